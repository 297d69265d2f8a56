"""Opening: what was durable is there and nothing else, and the failover log shows whether the stop was clean."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from headwater.errors import DataDamaged, DataTooNew, StoreFull
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import FAILOVER_LOG_ENTRIES_MAX
from headwater.protocol.values import Datatype
from headwater.store import data_format
from headwater.store.bucket import Bucket
from headwater.store.engine import DeleteRow, Engine, MemoryEngine, PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket, create_bucket, open_bucket, stored_facts
from headwater.store.settling import flush, remove_vbucket, roll_back, settle_now
from support.cases import case_apart
from support.store_harness import (
    NOTHING_KEPT,
    SECRET,
    Clock,
    FailingEngine,
    changes_of,
    check_counts,
    compact,
    facts_of,
    new_bucket,
    put,
    remove,
    reopened,
    seqnos_of,
    state_of,
    stopped_everywhere,
    value_of,
)


def opened(engine: Engine) -> Bucket:
    return open_bucket(engine, environment=Clock().environment(), secret=SECRET)


def filled(engine: Engine, *, commits: int = 6) -> Bucket:
    """Some versions of some documents in all vbuckets but the last, over some commits."""
    bucket = new_bucket(engine)
    for number in range(commits):
        for vbucket in range(3):
            put(bucket, vbucket, b"k%d" % (number % 3), b"value %d" % number, flags=number, expiry=2**31 + number)
            put(bucket, vbucket, b"only %d" % number)
            if number % 2:
                remove(bucket, vbucket, b"only %d" % (number - 1))
        bucket.commit_now()
    return bucket


def logs(bucket: Bucket) -> list[list[int]]:
    return [
        [] if facts is None else [entry.seqno for entry in facts.failover_log.entries]
        for facts in bucket.vbuckets.facts
    ]


def everything(bucket: Bucket) -> dict[str, object]:
    """All that a restart must not change."""
    numbers = bucket.vbuckets
    return {
        "documents": [state_of(bucket, vbucket) for vbucket in range(len(numbers))],
        "changes": [changes_of(bucket, vbucket) for vbucket in range(len(numbers))],
        "numbers": [
            array.tolist()
            for array in (numbers.durable_seqnos, numbers.max_cas, numbers.deleted_revs, numbers.superseded)
        ],
        "states": numbers.states.tolist(),
        "manifest": bucket.manifest,
        "live": bucket.index.live_documents(),
    }


# --- what comes back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settled_after", [None, 2, 6], ids=["journal", "both", "blocks"])
@pytest.mark.parametrize("is_clean", [True, False], ids=["clean", "unclean"])
def test_everything_durable_comes_back(tmp_path: Path, settled_after: int | None, is_clean: bool) -> None:
    engine = LmdbEngine(tmp_path)
    bucket = new_bucket(engine)
    bucket.set_manifest(Manifest().with_collection("_default", "fruit", max_ttl_s=5))
    for number in range(6):
        put(bucket, 1, b"k", b"%d" % number, collection_id=8 * (number % 2))
        put(bucket, 2, b"k%d" % number, datatype=Datatype.RAW)
        bucket.commit_now()
        if number + 1 == settled_after:
            settle_now(bucket)
    remove(bucket, 2, b"k0")
    bucket.commit_now()
    before = everything(bucket)
    if is_clean:
        close_bucket(bucket)
    engine.close()
    engine = LmdbEngine(tmp_path)
    again = opened(engine)
    assert everything(again) == before
    assert again.vbuckets.high_seqnos.tolist() == again.vbuckets.durable_seqnos.tolist()
    check_counts(again)
    engine.close()


def test_purged_deletions_leave_their_numbers_behind(bucket: Bucket, clock: Clock) -> None:
    """Seqno, CAS and revision of the last change must not be given out a second time."""
    for _ in range(3):
        put(bucket, 0, b"k")
    removed = remove(bucket, 0, b"k")
    bucket.commit_now()
    settle_now(bucket)
    clock.advance(10)
    compact(bucket, 0, NOTHING_KEPT)
    assert changes_of(bucket, 0) == []
    for again in (bucket, reopened(bucket), reopened(reopened(bucket))):
        written = put(again, 0, b"k")
        assert written.seqno == removed.seqno + 1
        assert written.cas > removed.cas
        entry = again.find(0, 0, b"k")
        assert entry.rev_seqno == 5


def test_vbuckets_that_do_not_exist_stay_so() -> None:
    bucket = new_bucket(state=None)
    bucket.set_vbucket_state(2, VBucketState.REPLICA)
    bucket.commit_now()
    again = reopened(bucket)
    assert [again.vbuckets.state(vbucket) for vbucket in range(4)] == [None, None, VBucketState.REPLICA, None]


# --- clean and unclean stops --------------------------------------------------------------------------------------


def test_an_unclean_stop_adds_one_branch_to_each_active_vbucket_and_none_to_others() -> None:
    bucket = filled(MemoryEngine())
    bucket.set_vbucket_state(1, VBucketState.REPLICA)
    bucket.set_vbucket_state(2, VBucketState.PENDING)
    bucket.commit_now()
    before = logs(bucket)
    high = int(bucket.vbuckets.durable_seqnos[0])
    again = reopened(bucket)
    assert logs(again) == [[high, *before[0]], before[1], before[2], [0, *before[3]]]
    newest = [facts_of(again, vbucket).failover_log.newest.vbuuid for vbucket in (0, 3)]
    assert len({*newest, *(facts_of(bucket, vbucket).failover_log.newest.vbuuid for vbucket in (0, 3))}) == 4
    assert again.vbuckets.vbuuids[0] == newest[0]
    # The branch is durable before any client can have seen it.
    assert logs(reopened(again, again.engine))[0] == [high, high, *before[0]]
    dead = new_bucket(state=VBucketState.DEAD)
    assert logs(reopened(dead)) == logs(dead)


def test_a_stop_that_could_not_be_marked_is_unclean() -> None:
    engine = FailingEngine(MemoryEngine())
    bucket = filled(engine)
    put(bucket, 0, b"last", b"moment")
    engine.writes_left = 1
    with pytest.raises(StoreFull):
        close_bucket(bucket)
    engine.writes_left = None
    again = reopened(bucket)
    assert value_of(again, 0, b"last") == b"moment"
    assert [len(log) for log in logs(again)] == [2, 2, 2, 2]


def test_what_was_closed_in_order_can_be_opened_on_a_full_disk() -> None:
    engine = FailingEngine(MemoryEngine())
    bucket = filled(engine)
    close_bucket(bucket)
    engine.writes_left = 0
    for _ in range(2):
        bucket = reopened(bucket)
        assert [len(log) for log in logs(bucket)] == [1, 1, 1, 1]
        close_bucket(bucket)
    bucket = reopened(bucket)
    engine.writes_left = None
    put(bucket, 0, b"first", b"change")
    bucket.commit_now()
    # It has changed, and is not closed: from now on that is an unclean stop.
    assert [len(log) for log in logs(reopened(bucket))] == [2, 2, 2, 2]


def test_a_copy_of_what_was_closed_in_order_begins_a_branch(tmp_path: Path) -> None:
    engine = LmdbEngine(tmp_path / "data")
    bucket = filled(engine)
    close_bucket(bucket)
    engine.close()
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    for folder, branches in (("data", 1), ("copy", 2)):
        engine = LmdbEngine(tmp_path / folder)
        assert [len(log) for log in logs(reopened(bucket, engine))] == [branches] * 4
        engine.close()


def test_the_failover_log_is_bounded() -> None:
    bucket = new_bucket(vbuckets=1)
    for _ in range(FAILOVER_LOG_ENTRIES_MAX + 5):
        bucket = reopened(bucket)
    assert len(logs(bucket)[0]) == FAILOVER_LOG_ENTRIES_MAX


def test_a_commit_in_flight_is_no_clean_stop() -> None:
    bucket = filled(MemoryEngine())
    put(bucket, 0, b"k0", b"in flight")
    bucket.seal()
    with pytest.raises(AssertionError):
        close_bucket(bucket)


# --- crashes in the middle ----------------------------------------------------------------------------------------


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwater.store.commits.BLOCK_BYTES_TARGET", 200)
    monkeypatch.setattr("headwater.store.settling.STEP_BYTES", 1)
    monkeypatch.setattr("headwater.store.compaction.STEP_BYTES", 300)


def check_nothing_is_lost_or_doubled(bucket: Bucket, before: dict[str, object]) -> None:
    again = reopened(bucket)
    assert everything(again) == before
    for vbucket in range(4):
        seqnos = seqnos_of(again, vbucket)
        assert seqnos == sorted(set(seqnos))
    check_counts(again)
    # It can be settled from there, as often as it takes.
    settle_now(again)
    assert everything(again) == before
    settle_now(again)
    assert everything(reopened(again)) == before


@pytest.mark.parametrize("settled_before", [False, True])
def test_a_crash_between_the_steps_of_settling(monkeypatch: pytest.MonkeyPatch, settled_before: bool) -> None:
    small_blocks(monkeypatch)
    before: dict[str, object] = {}

    def prepare(engine: FailingEngine) -> Bucket:
        bucket = filled(engine)
        if settled_before:
            settle_now(bucket)
            for vbucket in (0, 1, 2):
                put(bucket, vbucket, b"k1", b"newer")
                put(bucket, vbucket, b"fresh")
            bucket.commit_now()
        before.update(everything(bucket))
        return bucket

    stops = 0
    for bucket, has_ended in stopped_everywhere(prepare, settle_now):
        # The process may go on after a write that failed, too.
        assert everything(bucket) == before
        if not has_ended:
            assert bucket.young
        check_nothing_is_lost_or_doubled(bucket, before)
        stops += 1
    assert stops > 3


def test_writing_on_between_the_steps_of_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash, a start, more commits, and another round: seqnos distinguish blocks from journal."""
    small_blocks(monkeypatch)
    for bucket, _ in stopped_everywhere(filled, settle_now):
        again = reopened(bucket)
        for vbucket in range(3):
            put(again, vbucket, b"k1", b"after the crash")
        again.commit_now()
        expected = everything(again)
        check_nothing_is_lost_or_doubled(again, expected)


def test_a_crash_between_the_steps_of_compaction(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    clock = Clock()

    def prepare(engine: FailingEngine) -> Bucket:
        bucket = filled(engine)
        settle_now(bucket)
        bucket.environment = clock.environment()
        return bucket

    clock.advance(100)
    documents = [state_of(prepare(FailingEngine(MemoryEngine())), vbucket) for vbucket in range(4)]
    stops = 0
    for bucket, _ in stopped_everywhere(prepare, lambda bucket: compact(bucket, 1)):
        high = bucket.vbuckets.high_seqnos.tolist()
        for seen in (bucket, reopened(bucket)):
            for vbucket in range(4):
                now = state_of(seen, vbucket)
                assert all(documents[vbucket][place] == document for place, document in now.items())
                # What is gone is deleted, and long enough.
                assert all(document.is_deleted for place, document in documents[vbucket].items() if place not in now)
            assert seen.vbuckets.high_seqnos.tolist() == high
            check_counts(seen)
        stops += 1
    assert stops > 3


@case_apart(lambda bucket: roll_back(bucket, 1, 4), id="rollback")
@case_apart(lambda bucket: roll_back(bucket, 1, 0, branch=True), id="rollback to 0")
@case_apart(lambda bucket: remove_vbucket(bucket, 1), id="removal")
@case_apart(flush, id="flush")
@case_apart(close_bucket, id="close")
def test_a_crash_leaves_no_half_action(monkeypatch: pytest.MonkeyPatch, action: Callable[[Bucket], object]) -> None:
    """With a change still pending: that may be durable when the action is not done, as if it had come before."""
    small_blocks(monkeypatch)

    def prepare(engine: FailingEngine) -> Bucket:
        bucket = filled(engine)
        bucket.set_manifest(Manifest().with_collection("_default", "fruit"))
        bucket.commit_now()
        put(bucket, 1, b"pending", b"v")
        return bucket

    untouched = everything(reopened(prepare(FailingEngine(MemoryEngine()))))
    committed = prepare(FailingEngine(MemoryEngine()))
    committed.commit_now()
    with_pending = everything(committed)
    done = prepare(FailingEngine(MemoryEngine()))
    action(done)
    finished = everything(done)

    for bucket, has_ended in stopped_everywhere(prepare, action):
        again = everything(reopened(bucket))
        if has_ended:
            assert again == finished
        else:
            assert again in (untouched, with_pending)
            # The process that saw the failure may try again.
            bucket.commit_now()
            assert everything(bucket) == with_pending
            action(bucket)
            assert everything(bucket) == finished
        check_counts(bucket)


# --- data that is not sound ---------------------------------------------------------------------------------------


def damaged(engine: Engine, change: PutRow | DeleteRow) -> str:
    engine.write([change])
    with pytest.raises(DataDamaged) as raised:
        opened(engine)
    assert raised.value.hint
    assert "\n" not in str(raised.value)
    return raised.value.reason


def stopped(engine: Engine, change: PutRow, vbucket: int) -> str:
    """Why a vbucket is stopped after a change of a row; all others must go on."""
    before = [state_of(opened(engine), other) for other in range(3)]
    engine.write([change])
    bucket = opened(engine)
    assert list(bucket.vbuckets.damage) == [vbucket]
    assert bucket.vbuckets.state(vbucket) is VBucketState.DEAD
    for other in {0, 1, 2} - {vbucket}:
        assert state_of(bucket, other) == before[other]
    error = bucket.vbuckets.damage[vbucket]
    assert error.hint
    assert "\n" not in str(error)
    return error.reason


def test_no_bucket_is_no_bucket() -> None:
    assert stored_facts(MemoryEngine()) is None
    with pytest.raises(DataDamaged, match="holds no bucket"):
        opened(MemoryEngine())


def test_facts_are_stored_with_the_bucket() -> None:
    engine = MemoryEngine()
    facts = data_format.BucketFacts(name="beer", uuid="5" * 32, vbuckets=2)
    create_bucket(engine, facts, environment=Clock().environment(), secret=SECRET)
    assert stored_facts(engine) == facts
    assert opened(engine).facts == facts


def test_newer_data_is_refused_before_anything_is_touched() -> None:
    engine = MemoryEngine()
    close_bucket(filled(engine))
    with engine.view() as view:
        facts = json.loads(bytes(view.get(Table.BUCKET, data_format.BUCKET_FACTS) or b""))
    facts["version"] = data_format.FORMAT_VERSION + 1
    del facts["crc32c"]
    engine.write([PutRow(Table.BUCKET, data_format.BUCKET_FACTS, json.dumps(facts).encode())])
    with pytest.raises(DataTooNew):
        opened(engine)
    with engine.view() as view:
        assert view.get(Table.BUCKET, data_format.CLEAN_STOP) is not None


def test_a_manifest_that_is_not_one() -> None:
    assert "manifest is damaged" in damaged(
        filled(MemoryEngine()).engine, PutRow(Table.BUCKET, data_format.MANIFEST, b"{}")
    )
    assert "manifest is gone" in damaged(filled(MemoryEngine()).engine, DeleteRow(Table.BUCKET, data_format.MANIFEST))


def test_vbuckets_that_are_not() -> None:
    good = facts_of(new_bucket(), 0).encode()
    assert "facts" in stopped(
        filled(MemoryEngine()).engine, PutRow(Table.VBUCKETS, data_format.vbucket_key(1), b"{}"), 1
    )
    assert "beyond" in damaged(filled(MemoryEngine()).engine, PutRow(Table.VBUCKETS, data_format.vbucket_key(4), good))
    assert damaged(filled(MemoryEngine()).engine, PutRow(Table.VBUCKETS, b"\0\0\1", good))


@pytest.mark.parametrize("data", [b"x", bytes(100), b"\x80\x57" + bytes(22), b"\x80\x57" + b"\xff" * 60])
def test_changes_that_are_not(data: bytes) -> None:
    settled = filled(MemoryEngine())
    settle_now(settled)
    high = int(settled.vbuckets.durable_seqnos[1])
    reason = stopped(settled.engine, PutRow(Table.BLOCKS, data_format.block_key(1, high), data), 1)
    assert reason == f"bucket default: vbucket 1, its changes from 1 to {high} are damaged"
    bucket = filled(MemoryEngine())
    bucket.engine.write([PutRow(Table.JOURNAL, data_format.commit_key(99), data)])
    # Which vbuckets it was about is not to be seen.
    found = opened(bucket.engine).vbuckets.damage
    assert list(found) == [0, 1, 2, 3]
    assert "commit 99" in found[1].reason


def test_rows_that_are_in_the_wrong_place() -> None:
    settled = filled(MemoryEngine())
    settle_now(settled)
    high = int(settled.vbuckets.durable_seqnos[1])
    with settled.engine.view() as view:
        block = bytes(view.get(Table.BLOCKS, data_format.block_key(1, high)) or b"")
    assert stopped(settled.engine, PutRow(Table.BLOCKS, data_format.block_key(2, high + 1), block), 2)
    settled.engine.write([DeleteRow(Table.BLOCKS, data_format.block_key(2, high + 1))])
    assert stopped(settled.engine, PutRow(Table.BLOCKS, data_format.block_key(1, high + 1), block), 1)
    settled.engine.write([DeleteRow(Table.BLOCKS, data_format.block_key(1, high + 1))])
    assert stopped(settled.engine, PutRow(Table.BLOCKS, data_format.block_key(1, 2**64 - 2), block), 1)
    assert damaged(filled(MemoryEngine()).engine, PutRow(Table.JOURNAL, b"\0", block))
