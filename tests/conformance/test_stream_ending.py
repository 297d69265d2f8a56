"""How streams end: closed by the consumer, or by what happens to their vbucket."""

from __future__ import annotations

import pytest

from headwater.errors import StoreError
from headwater.protocol.features import Feature
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.session import Flush
from headwater.protocol.messages.vbuckets import DeleteVBucket, SetVBucket
from headwater.protocol.numbers import Seqno
from headwater.protocol.status import Status
from headwater.store.settling import roll_back
from support.dcp_world import COLLECTIONS, KEEP_NOTHING, PLAIN, VBUCKET, World, brief, changes, stream_request

# --- closed by the consumer ---------------------------------------------------------------------------------------


def test_close_without_a_stream_is_key_enoent(world: World) -> None:
    assert world.consumer().close_stream() == Status.KEY_ENOENT


def test_close_of_a_stream_sends_no_stream_end(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    assert consumer.close_stream() == Status.SUCCESS
    world.write("a")
    assert consumer.received() == []


def test_close_twice_is_key_enoent(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    assert consumer.close_stream() == Status.SUCCESS
    assert consumer.close_stream() == Status.KEY_ENOENT


def test_close_with_the_stream_end_control_answers_first(world: World) -> None:
    consumer = world.consumer(send_stream_end_on_client_close_stream="true")
    consumer.stream()
    consumer.send(b"\x80\x52" + bytes(22))
    assert consumer.brief() == ["PlainResponse", "end CLOSED"]


def test_a_stream_that_ended_by_itself_can_not_be_closed(world: World) -> None:
    world.write("a")
    consumer = world.consumer()
    assert consumer.stream(end_seqno=1)[-1] == "end OK"
    assert consumer.close_stream() == Status.KEY_ENOENT


def test_early_termination_inside_a_snapshot(world: World) -> None:
    world.store("a", "b", "c")
    consumer = world.consumer()
    consumer.open()
    assert brief(consumer.step(bytes_max=60)) == ["marker 0..3", "set a@1"]
    assert consumer.close_stream() == Status.SUCCESS
    assert consumer.received() == []


def test_a_closed_stream_can_be_opened_again(world: World) -> None:
    world.store("a")
    consumer = world.consumer()
    consumer.stream()
    consumer.close_stream()
    assert consumer.stream() == ["marker 0..1", "set a@1"]
    world.write("b")
    assert consumer.brief() == ["marker 2..2", "set b@2"]


def test_a_disconnect_ends_the_streams(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    dcp = consumer.session.dcp
    assert dcp is not None
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


def test_the_same_state_again_changes_nothing(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    world.set_state(VBucketState.ACTIVE)
    world.write("a")
    assert changes(consumer.brief()) == ["set a@1"]


def test_a_state_that_went_and_came_back_ends_the_stream_all_the_same(world: World) -> None:
    world.write("a")
    consumer = world.consumer()
    consumer.stream()
    world.set_state(VBucketState.REPLICA)
    world.set_state(VBucketState.ACTIVE)
    world.write("b")
    assert consumer.brief() == ["end STATE_CHANGED"]


def test_a_state_change_over_the_wire(world: World) -> None:
    consumer = world.consumer()
    consumer.open()
    front = world.node.client()
    front.succeed(SetVBucket(vbucket=VBUCKET, state=VBucketState.DEAD))
    assert consumer.brief() == ["end STATE_CHANGED"]


def test_a_vbucket_made_active_again_has_one_more_entry_in_its_failover_log(world: World) -> None:
    world.set_state(VBucketState.DEAD)
    world.set_state(VBucketState.ACTIVE)
    assert len(world.consumer().open().failover_log) == 2


def test_deletion_of_the_vbucket_ends_its_streams(world: World) -> None:
    world.write("a")
    consumer = world.consumer()
    consumer.stream()
    front = world.node.client()
    front.succeed(DeleteVBucket(vbucket=VBUCKET))
    assert consumer.brief() == ["end STATE_CHANGED"]
    assert consumer.refused(stream_request()) == Status.NOT_MY_VBUCKET


def test_deletion_of_an_empty_vbucket_ends_its_streams(world: World) -> None:
    consumer = world.consumer()
    consumer.stream()
    world.node.client().succeed(DeleteVBucket(vbucket=VBUCKET))
    assert consumer.brief() == ["end STATE_CHANGED"]


def test_rollback_of_the_vbucket_ends_the_stream(world: World) -> None:
    world.write("a", "b", "c")
    consumer = world.consumer()
    consumer.stream()
    roll_back(world.bucket, VBUCKET, Seqno(1), branch=True)
    assert consumer.brief() == ["end ROLLBACK"]


def test_a_rollback_is_noticed_when_writes_have_made_up_for_it(world: World) -> None:
    world.write("a", "b", "c")
    consumer = world.consumer()
    consumer.stream()
    roll_back(world.bucket, VBUCKET, Seqno(1), branch=True)
    world.write("d", "e")
    assert consumer.brief() == ["end ROLLBACK"]


def test_a_rollback_is_noticed_when_writes_have_gone_beyond_it(world: World) -> None:
    world.write("a", "b", "c")
    consumer = world.consumer()
    consumer.stream()
    roll_back(world.bucket, VBUCKET, Seqno(1), branch=True)
    world.write("d", "e", "f", "g")
    assert consumer.brief() == ["end ROLLBACK"]


def test_a_rollback_to_where_the_stream_is_ends_it_without_a_loss(world: World) -> None:
    world.write("a", "b")
    consumer = world.consumer()
    consumer.stream()
    roll_back(world.bucket, VBUCKET, Seqno(2), branch=True)
    world.write("c")
    assert consumer.brief() == ["end STATE_CHANGED"]


def test_a_flush_of_the_bucket_ends_its_streams(world: World) -> None:
    world.write("a", "b")
    consumer = world.consumer()
    consumer.stream()
    world.node.client().succeed(Flush())
    assert consumer.brief() == ["end ROLLBACK"]


# --- ended because it was too slow --------------------------------------------------------------------------------


def test_a_slow_consumer_whose_snapshot_was_compacted_away_is_too_slow(world: World) -> None:
    world.store("a", "b", "c", "d")
    consumer = world.consumer()
    consumer.open()
    assert brief(consumer.step(bytes_max=60)) == ["marker 0..4", "set a@1"]
    # The version of "c" that belongs to the snapshot is not stored any more.
    world.write("c")
    world.compact(KEEP_NOTHING)
    assert consumer.brief() == ["end TOO_SLOW"]


def test_a_slow_consumer_between_snapshots_goes_on_after_a_compaction(world: World) -> None:
    world.store("a", "b")
    consumer = world.consumer()
    consumer.stream()
    world.store("b", "b", "b")
    world.compact(KEEP_NOTHING)
    assert changes(consumer.brief()) == ["set b@5"]


def test_a_consumer_that_was_too_slow_can_go_on_from_where_it_was(world: World) -> None:
    world.store("a", "b", "c", "d")
    consumer = world.consumer(features=COLLECTIONS)
    consumer.open()
    consumer.step(bytes_max=60)
    world.write("c")
    world.compact(KEEP_NOTHING)
    assert consumer.brief() == ["end TOO_SLOW"]
    lines = consumer.stream(start_seqno=1, vbuuid=world.vbuuid(), snapshot_start_seqno=0, snapshot_end_seqno=4)
    assert lines == ["marker 0..5", "set b@2", "set d@4", "set c@5"]


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


def test_a_backfill_that_fails_inside_a_snapshot_ends_the_stream(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.store("a", "b", "c")
    consumer = world.consumer()
    consumer.open()
    consumer.step(bytes_max=60)
    _break(world, monkeypatch)
    assert consumer.brief() == ["end BACKFILL_FAILED"]


def test_a_live_stream_whose_disk_fails_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer = world.consumer()
    world.write("a")
    assert changes(consumer.stream()) == ["set a@1"]
    world.store("b", "c")
    _break(world, monkeypatch)
    assert consumer.brief() == ["end BACKFILL_FAILED"]


def test_a_user_who_loses_the_right_to_stream_is_told_so(world: World) -> None:
    consumer = world.consumer()
    consumer.stream()
    service = consumer.session.service
    user = consumer.session.user
    service.users = service.users.remove(user)
    assert consumer.brief() == ["end LOST_PRIVILEGES"]
    assert consumer.session.dcp.streams == {}
