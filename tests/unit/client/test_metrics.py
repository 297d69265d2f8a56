"""What a reader counts: totals, lag that is unknown until it is known, and the form for JSON."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from headwater.client.batches import OPS
from headwater.client.connection_string import Address
from headwater.client.metrics import LAST_ROLLBACKS_MAX, Lag, ReaderMetrics
from headwater.client.pieces import RollbackPiece
from headwater.errors import ConnectionClosed, HostUnreachable
from headwater.protocol.messages.dcp_streams import StreamEndReason
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid

VB, OTHER = VBucketId(3), VBucketId(4)


@pytest.fixture
def metrics() -> ReaderMetrics:
    return ReaderMetrics("nightly", "travel")


def rollback_to(seqno: int, *, vbucket: VBucketId = VB, from_seqno: int = 100) -> RollbackPiece:
    return RollbackPiece(
        vbucket=vbucket,
        seqno=Seqno(seqno),
        from_seqno=Seqno(from_seqno),
        old_vbuuid=Vbuuid(1),
        new_vbuuid=Vbuuid(2**64 - 1),
    )


def batch_of(*ops: str) -> pa.RecordBatch:
    indices = pa.array([OPS.index(op) for op in ops], pa.int8())
    return pa.record_batch({"op": pa.DictionaryArray.from_arrays(indices, pa.array(OPS))})


# --- counting -----------------------------------------------------------------------------------------------------


def test_what_was_received_is_counted(metrics: ReaderMetrics) -> None:
    metrics.on_received(1000)
    metrics.on_received(24)
    metrics.on_run(VB, 5, 700, 12)
    metrics.on_run(OTHER, 2, 100, 3)
    metrics.on_snapshot(VB, Seqno(12))
    metrics.on_ack(600)
    metrics.on_ack(24)
    metrics.on_noop()
    assert (metrics.received_bytes, metrics.received_changes, metrics.received_change_bytes) == (1024, 7, 800)
    assert (metrics.snapshots, metrics.acks, metrics.acked_bytes, metrics.noops) == (1, 2, 624, 1)


def test_batches_are_counted_by_op(metrics: ReaderMetrics) -> None:
    first = batch_of("mutation", "mutation", "deletion")
    second = batch_of("rollback", "mutation")
    given = (first, second, batch_of(), second.slice(1))
    for batch in given:
        metrics.on_batch(batch)
    assert metrics.changes == {"mutation": 4, "deletion": 1, "rollback": 1}
    assert metrics.batches == 4
    assert metrics.handed_out_bytes == sum(batch.nbytes for batch in given)


def test_streams_and_connections_are_counted_by_what_happened(metrics: ReaderMetrics) -> None:
    metrics.on_stream_request()
    metrics.on_stream_end(StreamEndReason.STATE_CHANGED)
    metrics.on_stream_end(StreamEndReason.OK)
    metrics.on_stream_end(StreamEndReason.OK)
    for number in range(100, 1100):
        metrics.on_stream_end(StreamEndReason(number))
    metrics.on_disconnect(ConnectionClosed("gone"))
    metrics.on_disconnect(HostUnreachable("gone"))
    metrics.on_disconnect(ConnectionClosed("gone again"))
    metrics.on_reconnect(Address("db", 11210))
    metrics.on_reconnect(Address("::1", 11210))
    metrics.on_config_update()
    assert (metrics.stream_requests, metrics.config_updates) == (1, 1)
    assert metrics.stream_ends == {"state_changed": 1, "ok": 2, "unknown": 1000}
    assert metrics.disconnects == {"ConnectionClosed": 2, "HostUnreachable": 1}
    assert metrics.reconnects == {"db:11210": 1, "[::1]:11210": 1}


def test_the_last_rollbacks_are_remembered(metrics: ReaderMetrics) -> None:
    for seqno in range(100):
        metrics.on_rollback(rollback_to(seqno))
    assert metrics.rollbacks == 100
    assert [rollback.seqno for rollback in metrics.last_rollbacks] == list(range(100 - LAST_ROLLBACKS_MAX, 100))


# --- lag ----------------------------------------------------------------------------------------------------------


def test_lag_is_unknown_until_the_high_seqno_is_heard(metrics: ReaderMetrics) -> None:
    assert metrics.lag() == Lag(total_seqnos=None, max_seqnos=None, vbuckets_unknown=0)
    metrics.on_followed(VB, Seqno(10))
    metrics.on_run(VB, 5, 100, 15)
    assert metrics.lags() == {VB: None}
    assert metrics.lag() == Lag(total_seqnos=None, max_seqnos=None, vbuckets_unknown=1)
    metrics.set_high_seqnos({VB: Seqno(30)})
    assert metrics.lags() == {VB: 20}
    metrics.on_handed_out(VB, Seqno(15))
    assert metrics.lag() == Lag(total_seqnos=15, max_seqnos=15, vbuckets_unknown=0)
    metrics.on_handed_out(VB, Seqno(39))
    assert metrics.lags() == {VB: 0}


def test_the_total_is_known_when_all_vbuckets_are(metrics: ReaderMetrics) -> None:
    metrics.on_followed(VB, Seqno(0))
    metrics.on_followed(OTHER, Seqno(5))
    # A node tells of vbuckets that are read by others, too.
    metrics.set_high_seqnos({VB: Seqno(7), VBucketId(9): Seqno(1000)})
    assert metrics.lag() == Lag(total_seqnos=None, max_seqnos=7, vbuckets_unknown=1)
    metrics.set_high_seqnos({OTHER: Seqno(5)})
    assert metrics.lag() == Lag(total_seqnos=7, max_seqnos=7, vbuckets_unknown=0)


def test_a_snapshot_tells_how_much_there_is_at_least(metrics: ReaderMetrics) -> None:
    metrics.on_followed(VB, Seqno(0))
    metrics.on_snapshot(VB, Seqno(8))
    assert metrics.lags() == {VB: 8}
    metrics.set_high_seqnos({VB: Seqno(20)})
    metrics.on_snapshot(VB, Seqno(12))
    assert metrics.lags() == {VB: 20}
    # The server itself may know less than before: after a failover.
    metrics.set_high_seqnos({VB: Seqno(9)})
    assert metrics.lags() == {VB: 9}


def test_after_a_rollback_the_lag_is_unknown_until_the_new_history_is_heard_of(metrics: ReaderMetrics) -> None:
    metrics.on_followed(VB, Seqno(100))
    metrics.set_high_seqnos({VB: Seqno(120)})
    metrics.on_rollback(rollback_to(60))
    assert metrics.lags() == {VB: None}
    metrics.on_snapshot(VB, Seqno(70))
    assert metrics.lags() == {VB: 10}


def test_a_rollback_above_the_caller_s_place_leaves_it_there(metrics: ReaderMetrics) -> None:
    metrics.on_followed(VB, Seqno(50))
    metrics.on_run(VB, 50, 1000, 100)
    metrics.on_rollback(rollback_to(60))
    metrics.set_high_seqnos({VB: Seqno(70)})
    assert metrics.lags() == {VB: 20}
    assert metrics.snapshot(vbuckets=True)["vbuckets"]["3"]["received_seqno"] == 60


def test_a_vbucket_that_was_left_has_no_lag_until_it_is_followed_again(metrics: ReaderMetrics) -> None:
    metrics.on_followed(VB, Seqno(0))
    metrics.on_followed(OTHER, Seqno(0))
    metrics.set_high_seqnos({VB: Seqno(10), OTHER: Seqno(10)})
    metrics.on_closed(VB)
    assert metrics.lags() == {OTHER: 10}
    # What had been received before is still handed out.
    metrics.on_handed_out(VB, Seqno(10))
    assert metrics.lags() == {OTHER: 10}
    metrics.on_closed(OTHER)
    assert metrics.lag() == Lag(total_seqnos=0, max_seqnos=None, vbuckets_unknown=0)
    metrics.on_followed(VB, Seqno(10))
    assert metrics.lags() == {VB: None}
    metrics.on_handed_out(VB, Seqno(11))
    metrics.set_high_seqnos({VB: Seqno(15)})
    assert metrics.lags() == {VB: 4}


# --- the snapshot -------------------------------------------------------------------------------------------------


def busy(metrics: ReaderMetrics) -> ReaderMetrics:
    metrics.on_batch(batch_of("mutation", "expiration"))
    metrics.on_followed(OTHER, Seqno(1))
    metrics.on_followed(VB, Seqno(10))
    metrics.on_run(VB, 5, 100, 15)
    metrics.set_high_seqnos({VB: Seqno(30)})
    metrics.on_rollback(rollback_to(0, vbucket=OTHER))
    metrics.on_stream_end(StreamEndReason.ROLLBACK)
    return metrics


def test_the_snapshot_is_ready_for_json(metrics: ReaderMetrics) -> None:
    taken = json.loads(json.dumps(busy(metrics).snapshot(vbuckets=True)))
    assert set(metrics.snapshot()) == {name for name in taken if name != "vbuckets" and not name.startswith("_")}
    assert (taken["reader"], taken["bucket"]) == ("nightly", "travel")
    assert taken["changes"] == {"mutation": 1, "expiration": 1}
    assert taken["received_changes"] == 5
    assert taken["stream_ends"] == {"rollback": 1}
    assert taken["lag"] == {"total_seqnos": None, "max_seqnos": 20, "vbuckets_unknown": 1}
    assert taken["last_rollbacks"] == [
        {"vbucket": 4, "seqno": 0, "from_seqno": 100, "old_vbuuid": 1, "new_vbuuid": 2**64 - 1}
    ]
    assert taken["vbuckets"] == {
        "3": {"handed_out_seqno": 10, "received_seqno": 15, "high_seqno": 30, "lag_seqnos": 20},
        "4": {"handed_out_seqno": 0, "received_seqno": 0, "high_seqno": None, "lag_seqnos": None},
    }


def test_a_snapshot_does_not_change_any_more(metrics: ReaderMetrics) -> None:
    taken = busy(metrics).snapshot(vbuckets=True)
    before = json.dumps(taken)
    busy(metrics)
    metrics.on_closed(VB)
    assert json.dumps(taken) == before
    assert json.dumps(metrics.snapshot(vbuckets=True)) != before


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before_s)


@pytest.mark.usefixtures("hasty_threads")
def test_the_numbers_may_be_read_while_they_change(metrics: ReaderMetrics) -> None:
    is_over = threading.Event()
    failures: list[BaseException] = []

    def look() -> None:
        try:
            while not is_over.is_set():
                taken: dict[str, Any] = metrics.snapshot(vbuckets=True)
                assert len(taken["last_rollbacks"]) <= LAST_ROLLBACKS_MAX
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for number in range(3000):
            vbucket = VBucketId(number % 1024)
            metrics.on_followed(vbucket, Seqno(number))
            metrics.set_high_seqnos({vbucket: Seqno(number + 1)})
            metrics.on_reconnect(Address("db", number))
            metrics.on_rollback(rollback_to(number, vbucket=vbucket))
            metrics.on_closed(VBucketId(number * 7 % 1024))
    finally:
        is_over.set()
        thread.join()
    assert failures == []
