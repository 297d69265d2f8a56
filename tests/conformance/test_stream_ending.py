"""How streams end: closed by the consumer, or by what happens to their vbucket."""

from __future__ import annotations

import pytest

from headwater.errors import StoreError
from headwater.protocol.features import Feature
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.session import Flush
from headwater.protocol.messages.vbuckets import DeleteVBucket
from headwater.protocol.numbers import Seqno
from headwater.protocol.status import Status
from headwater.store.settling import roll_back
from support.cases import case_apart
from support.dcp_world import COLLECTIONS, KEEP_NOTHING, PLAIN, VBUCKET, World, brief, changes, stream_request

# --- closed by the consumer ---------------------------------------------------------------------------------------


def test_a_stream_is_closed_once_and_without_a_stream_end(world: World) -> None:
    consumer = world.consumer()
    assert consumer.close_stream() == Status.KEY_ENOENT
    consumer.open()
    assert consumer.close_stream() == Status.SUCCESS
    assert consumer.close_stream() == Status.KEY_ENOENT
    world.write("a")
    assert consumer.received() == []


def test_close_with_the_stream_end_control_answers_first(world: World) -> None:
    consumer = world.consumer(send_stream_end_on_client_close_stream="true")
    consumer.stream()
    consumer.send(b"\x80\x52" + bytes(22))
    assert consumer.brief() == ["PlainResponse", "end CLOSED"]


def test_a_stream_that_was_closed_or_has_ended_can_be_opened_again(world: World) -> None:
    world.store("a")
    consumer = world.consumer()
    assert consumer.stream(end_seqno=1)[-1] == "end OK"
    assert consumer.close_stream() == Status.KEY_ENOENT
    assert consumer.stream() == ["marker 0..1", "set a@1"]
    assert consumer.close_stream() == Status.SUCCESS
    assert consumer.stream() == ["marker 0..1", "set a@1"]
    world.write("b")
    assert consumer.brief() == ["marker 2..2", "set b@2"]


def test_early_termination_inside_a_snapshot(world: World) -> None:
    world.store("a", "b", "c")
    consumer = world.consumer()
    consumer.open()
    assert brief(consumer.step(bytes_max=60)) == ["marker 0..3", "set a@1"]
    assert consumer.close_stream() == Status.SUCCESS
    assert consumer.received() == []


def test_a_disconnect_ends_the_streams(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    dcp = consumer.session.dcp
    (stream,) = dcp.streams.values()
    consumer.session.disconnected()
    assert stream.is_ended


# --- ended by the vbucket -----------------------------------------------------------------------------------------


def test_state_change_ends_the_streams_of_the_vbucket(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    consumer.open(vbucket=1)
    assert consumer.brief() == []
    world.set_state(VBucketState.REPLICA)
    assert consumer.brief() == ["end STATE_CHANGED"]
    world.write("a", vbucket=1)
    assert changes(consumer.brief()) == ["set a@1"]


def test_a_state_change_inside_a_snapshot_ends_the_stream(world: World) -> None:
    world.store("a", "b", "c")
    consumer = world.consumer()
    consumer.open()
    consumer.step(bytes_max=60)
    world.set_state(VBucketState.DEAD)
    assert consumer.brief() == ["end STATE_CHANGED"]


def test_the_same_state_again_changes_nothing_and_one_that_came_back_ends_the_stream(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    world.set_state(VBucketState.ACTIVE)
    world.write("a")
    assert changes(consumer.brief()) == ["set a@1"]
    world.set_state(VBucketState.REPLICA)
    world.set_state(VBucketState.ACTIVE)
    world.write("b")
    assert consumer.brief() == ["end STATE_CHANGED"]


@pytest.mark.parametrize("keys", [(), ("a",)])
def test_deletion_of_the_vbucket_ends_its_streams(world: World, keys: tuple[str, ...]) -> None:
    world.write(*keys)
    consumer = world.consumer()
    consumer.stream()
    world.node.client().succeed(DeleteVBucket(vbucket=VBUCKET))
    assert consumer.brief() == ["end STATE_CHANGED"]
    assert consumer.refused(stream_request()) == Status.NOT_MY_VBUCKET


@case_apart(1, "", "ROLLBACK", id="nothing written since")
@case_apart(1, "de", "ROLLBACK", id="writes have made up for it")
@case_apart(1, "defg", "ROLLBACK", id="writes have gone beyond it")
@case_apart(3, "d", "STATE_CHANGED", id="nothing was lost")
def test_rollback_of_the_vbucket_ends_the_stream(world: World, to_seqno: int, later: str, end: str) -> None:
    world.write("a", "b", "c")
    consumer = world.consumer()
    consumer.stream()
    roll_back(world.bucket, VBUCKET, Seqno(to_seqno), branch=True)
    world.write(*later)
    assert consumer.brief() == [f"end {end}"]


def test_a_flush_of_the_bucket_ends_its_streams(world: World) -> None:
    world.write("a", "b")
    consumer = world.consumer()
    consumer.stream()
    world.node.client().succeed(Flush())
    assert consumer.brief() == ["end ROLLBACK"]


# --- ended because it was too slow --------------------------------------------------------------------------------


def test_a_consumer_whose_snapshot_was_compacted_away_is_too_slow_and_can_resume(world: World) -> None:
    world.store("a", "b", "c", "d")
    consumer = world.consumer(features=COLLECTIONS)
    consumer.open()
    assert brief(consumer.step(bytes_max=60)) == ["marker 0..4", "set a@1"]
    # The version of "c" that belongs to the snapshot is not stored any more.
    world.write("c")
    world.compact(KEEP_NOTHING)
    assert consumer.brief() == ["end TOO_SLOW"]
    lines = consumer.stream(start_seqno=1, vbuuid=world.vbuuid(), snapshot_start_seqno=0, snapshot_end_seqno=4)
    assert lines == ["marker 0..5", "set b@2", "set d@4", "set c@5"]


def test_a_slow_consumer_between_snapshots_goes_on_after_a_compaction(world: World) -> None:
    world.store("a", "b")
    consumer = world.consumer()
    consumer.stream()
    world.store("b", "b", "b")
    world.compact(KEEP_NOTHING)
    assert changes(consumer.brief()) == ["set b@5"]


def test_a_compaction_before_the_stream_does_not_make_it_slow(world: World) -> None:
    world.store("a", "b", "c", "d", "a")
    world.compact(KEEP_NOTHING)
    consumer = world.consumer()
    consumer.open()
    assert brief(consumer.step(bytes_max=60)) == ["marker 0..5", "set b@2"]
    assert consumer.brief() == ["set c@3", "set d@4", "set a@5"]


def test_a_compaction_that_takes_nothing_of_the_snapshot_does_not_make_a_stream_slow(world: World) -> None:
    world.store("a", "b", "c", "a")
    world.compact(KEEP_NOTHING)
    consumer = world.consumer()
    consumer.open()
    consumer.step(bytes_max=60)
    world.compact(KEEP_NOTHING)
    assert consumer.brief() == ["set c@3", "set a@4"]


def test_a_compaction_inside_the_snapshot_takes_only_what_the_snapshot_leaves_out(world: World) -> None:
    world.store("a", "b", "c", "b", "d")
    consumer = world.consumer()
    consumer.open()
    assert brief(consumer.step(bytes_max=60)) == ["marker 0..5", "set a@1"]
    world.compact(KEEP_NOTHING)
    assert consumer.brief() == ["set c@3", "set b@4", "set d@5"]


# --- ended because the disk can't be read -------------------------------------------------------------------------


def _break(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise StoreError("the disk can't be read")

    monkeypatch.setattr(world.bucket.engine, "view", fail)


@pytest.mark.parametrize(
    ("features", "marker"), [(PLAIN, []), (COLLECTIONS, ["marker 0..2"])], ids=["plain", "collections"]
)
def test_a_backfill_that_fails_ends_the_stream(
    world: World, monkeypatch: pytest.MonkeyPatch, features: tuple[Feature, ...], marker: list[str]
) -> None:
    world.store("a", "a")
    consumer = world.consumer(features=features)
    consumer.open()
    _break(world, monkeypatch)
    assert consumer.brief() == [*marker, "end BACKFILL_FAILED"]


def test_a_stream_whose_disk_fails_later_ends_as_well(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One inside its snapshot, and one that was live."""
    live = world.consumer()
    world.write("a")
    assert changes(live.stream()) == ["set a@1"]
    world.store("b", "c")
    inside = world.consumer()
    inside.open()
    inside.step(bytes_max=60)
    _break(world, monkeypatch)
    assert inside.brief() == live.brief() == ["end BACKFILL_FAILED"]


def test_a_user_who_loses_the_right_to_stream_is_told_so(world: World) -> None:
    consumer = world.consumer()
    consumer.stream()
    service = consumer.session.service
    user = consumer.session.user
    service.users = service.users.remove(user)
    assert consumer.brief() == ["end LOST_PRIVILEGES"]
    assert consumer.session.dcp.streams == {}
