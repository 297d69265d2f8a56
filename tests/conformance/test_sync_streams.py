"""Durable writes on streams: prepares, commits and aborts for replicas, plain changes for everybody else."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.protocol.features import Opcode
from headwater.protocol.flow_control import PREPARE_SURCHARGE_BYTES
from headwater.protocol.frames import DurabilityLevel, Frame
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_changes import Abort, Commit, Mutation, Prepare, SnapshotMarker
from headwater.protocol.messages.dcp_streams import OpenFlags, VBucketState
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno
from headwater.protocol.values import Datatype, ValueParts, decompress, encode_xattrs
from headwater.store.prepares import PendingPrepare
from support.dcp_world import (
    COLLECTIONS,
    KEEP_NOTHING,
    OPAQUE,
    PLAIN,
    VBUCKET,
    Consumer,
    World,
    brief,
    changes,
    of_type,
    resume,
)
from support.replication_world import REPLICA_FLAGS, PlayedReplica


def prepare(world: World, key: str, value: bytes = b"1", *, is_removal: bool = False) -> PendingPrepare:
    return world.bucket.put_prepare(
        VBUCKET,
        collection_id=DEFAULT_COLLECTION,
        key=key.encode(),
        value=b"" if is_removal else value,
        datatype=Datatype.RAW if is_removal else Datatype.JSON,
        level=DurabilityLevel.MAJORITY,
        flags=7,
        is_removal=is_removal,
    )


def write_all_kinds(world: World) -> None:
    """1 prepare a, 2 set x, 3 commit a, 4 prepare b, 5 abort b, 6 prepare c."""
    first = prepare(world, "a")
    world.put("x")
    world.bucket.commit_prepare(first)
    world.bucket.abort_prepare(prepare(world, "b"))
    prepare(world, "c")
    world.commit()


ALL_KINDS = ["prepare a@1", "set x@2", "commit a@3 of 1", "prepare b@4", "marker 5..6", "abort b@5 of 4", "prepare c@6"]
FROM_DISK = ["set x@2", "set a@3", "abort b@5 of 4", "prepare c@6"]


# --- replicas -----------------------------------------------------------------------------------------------------


def test_from_memory_a_replica_gets_everything_as_it_happened(world: World) -> None:
    """A prepare and its abort are in two snapshots: a replica of a real server refuses one that holds both."""
    write_all_kinds(world)
    assert PlayedReplica(world).open() == ["marker 0..4", *ALL_KINDS]


@pytest.mark.parametrize(("version", "completed"), [("7.0", ["prepare a@1"]), ("8.0", [])])
def test_from_disk_a_replica_gets_what_was_committed_as_it_is(world: World, version: str, completed: list[str]) -> None:
    """As recorded: no commits, and of each key the newest prepare or abort; as 8.0, no prepare that is completed."""
    world.speak_as(version)
    write_all_kinds(world)
    world.settle()
    assert PlayedReplica(world).open() == ["marker 0..6", *completed, *FROM_DISK]
    world.bucket.commit_prepare(prepare(world, "a", b"2"))
    world.bucket.abort_prepare(prepare(world, "a", b"3"))
    world.commit()
    world.settle()
    assert PlayedReplica(world).open() == [
        "marker 0..10", "set x@2", "abort b@5 of 4", "prepare c@6", "set a@8", "abort a@10 of 9"
    ]  # fmt: skip


def test_a_prepare_that_is_completed_behind_a_disk_snapshot_is_in_it(world: World) -> None:
    prepared = prepare(world, "a")
    world.write("x")
    world.settle()
    replica = PlayedReplica(world)
    replica.consumer.open()
    assert brief(replica.consumer.step()) == ["marker 0..2"]
    world.bucket.commit_prepare(prepared)
    assert replica.brief() == ["prepare a@1", "set x@2", "marker 3..3", "commit a@3 of 1"]


def test_a_disk_snapshot_with_history_holds_every_prepare(world: World) -> None:
    """A replica may be rolled back to any seqno of it, where the prepare is undecided again."""
    write_all_kinds(world)
    world.settle()
    assert PlayedReplica(world, change_streams="true").open() == [
        "marker 0..6", "prepare a@1", "set x@2", "set a@3", "prepare b@4", "abort b@5 of 4", "prepare c@6"
    ]  # fmt: skip


def test_a_replica_that_resumes_inside_a_snapshot_needs_no_prepare_of_it(world: World) -> None:
    """It may have come from disk without the prepare, while the rest is still in memory."""
    write_all_kinds(world)
    inside = resume(world, 2, snapshot_start_seqno=Seqno(0), snapshot_end_seqno=Seqno(6))
    replica = PlayedReplica(world)
    assert replica.open(**inside) == ["marker 0..6", "set a@3", "abort b@5 of 4", "prepare c@6"]
    world.bucket.commit_prepare(world.bucket.prepares.of(VBUCKET)[0])
    assert replica.brief() == ["marker 7..7", "commit c@7 of 6"]


def test_the_bytes_of_prepare_commit_and_abort(world: World) -> None:
    committed = prepare(world, "ab", b"[1]")
    world.bucket.commit_prepare(committed)
    world.bucket.abort_prepare(prepare(world, "cd", is_removal=True))
    world.commit()
    replica = PlayedReplica(world)
    replica.consumer.open()
    frames = [frame for frame in replica.consumer.frames() if frame.opcode != Opcode.DCP_SNAPSHOT_MARKER]
    opaque = OPAQUE.to_bytes(4)
    now_s = world.node.clock.now_s()
    aborted_cas = int(world.bucket.vbuckets.max_cas[VBUCKET]) - 1
    assert [frame.encode() for frame in frames] == [
        # Prepare: seqno, revision, flags, expiry, lock time, nru, deleted, level; key with its collection, value.
        bytes.fromhex("80 60 0003 1f 01 0000 00000025")
        + opaque
        + committed.cas.to_bytes(8)
        + bytes.fromhex("0000000000000001 0000000000000001 00000007 00000000 00000000 00 00 01")
        + b"\x00ab[1]",
        # Commit: the prepare's seqno, then its own; no value and no CAS.
        bytes.fromhex("80 62 0003 10 00 0000 00000013")
        + opaque
        + bytes(8)
        + bytes.fromhex("0000000000000001 0000000000000002")
        + b"\x00ab",
        # A prepare of a removal has the time of the deletion where others have their expiry.
        bytes.fromhex("80 60 0003 1f 00 0000 00000022")
        + opaque
        + aborted_cas.to_bytes(8)
        + bytes.fromhex("0000000000000003 0000000000000001 00000007")
        + now_s.to_bytes(4)
        + bytes.fromhex("00000000 00 01 01")
        + b"\x00cd",
        bytes.fromhex("80 63 0003 10 00 0000 00000013")
        + opaque
        + bytes(8)
        + bytes.fromhex("0000000000000003 0000000000000004")
        + b"\x00cd",
    ]


def test_no_durable_write_is_left_out_of_memory_for_a_newer_one(world: World) -> None:
    """Else the replica would be left with a prepare that nothing ends. The newer one begins the next snapshot."""
    world.bucket.commit_prepare(prepare(world, "k"))
    world.bucket.commit_prepare(prepare(world, "k", b"2"))
    world.write("k", "k")
    assert PlayedReplica(world).open() == [
        *("marker 0..2", "prepare k@1", "commit k@2 of 1"),
        *("marker 3..4", "prepare k@3", "commit k@4 of 3"),
        *("marker 5..6", "set k@6"),
    ]


def test_where_compaction_has_dropped_the_prepare_the_change_itself_is_sent(world: World) -> None:
    write_all_kinds(world)
    world.compact(KEEP_NOTHING)
    assert PlayedReplica(world).open() == ["marker 0..6", "set x@2", "set a@3", "abort b@5 of 4", "prepare c@6"]


def test_a_replica_that_holds_the_prepare_is_told_of_the_commit_after_compaction(world: World) -> None:
    replica = PlayedReplica(world)
    prepared = prepare(world, "k")
    world.write("x")
    assert replica.open() == ["marker 0..2", "prepare k@1", "set x@2"]
    world.compact(KEEP_NOTHING)
    world.bucket.commit_prepare(prepared)
    assert replica.brief() == ["marker 3..3", "commit k@3 of 1"]


def test_no_stored_distance_is_ever_seen(world: World) -> None:
    """The opaque field of a stored commit is the store's own business."""
    write_all_kinds(world)
    world.compact(KEEP_NOTHING)
    for consumer in (PlayedReplica(world).consumer, world.consumer(features=COLLECTIONS), world.consumer()):
        consumer.open()
        assert {frame.opaque for frame in consumer.frames()} == {OPAQUE}


def test_a_prepare_takes_two_bytes_more_of_the_window_than_it_has(world: World) -> None:
    replica = PlayedReplica(world, connection_buffer_size="100000")
    prepare(world, "a")
    prepare(world, "b")
    world.write("x")
    replica.consumer.open()
    sent_bytes = sum(len(frame.encode()) for frame in replica.consumer.frames())
    connection = replica.consumer.session.dcp
    assert connection.window.unacked_bytes == sent_bytes + 2 * PREPARE_SURCHARGE_BYTES


def test_from_disk_a_replica_gets_prepares_and_what_removals_leave_compressed(world: World) -> None:
    """As recorded from a 7.0.5 server. From memory, and in plain changes, values come as they are stored."""
    left = encode_xattrs(ValueParts(xattrs={"_sync": b'"' + b"x" * 200 + b'"'}, body=b""))
    prepare(world, "p", b'{"a":"%s"}' % (b"y" * 200))
    world.put("plain", value=b'{"a":"%s"}' % (b"y" * 200))
    world.put("gone")
    world.remove("gone", value=left, datatype=Datatype.XATTR)
    world.commit()

    def sent() -> dict[bytes, tuple[int, bytes]]:
        flags = REPLICA_FLAGS | OpenFlags.INCLUDE_DELETED_USER_XATTRS
        names = {"enable_sync_writes": "true", "consumer_name": "b"}
        consumer = world.consumer(flags=flags, features=COLLECTIONS, **names)
        consumer.open()
        return {frame.key: (frame.datatype, decompressed(frame)) for frame in consumer.frames() if frame.key}

    from_memory = sent()
    assert {key: datatype for key, (datatype, _) in from_memory.items()} == {b"\0p": 1, b"\0plain": 1, b"\0gone": 4}
    world.settle()
    compressed = {b"\0p": Datatype.SNAPPY, b"\0plain": 0, b"\0gone": Datatype.SNAPPY}
    assert sent() == {key: (datatype | compressed[key], value) for key, (datatype, value) in from_memory.items()}


def decompressed(frame: Frame) -> bytes:
    return decompress(frame.value) if frame.datatype & Datatype.SNAPPY else frame.value


def test_values_can_be_left_out(world: World) -> None:
    prepare(world, "k", b'{"long":"value"}')
    world.commit()
    consumer = world.consumer(
        flags=REPLICA_FLAGS | OpenFlags.NO_VALUE, features=COLLECTIONS, enable_sync_writes="true", consumer_name="b"
    )
    consumer.open()
    (message,) = of_type(consumer.received(), Prepare)
    assert (message.value, message.flags) == (b"", 7)


# --- markers ------------------------------------------------------------------------------------------------------


def _marker(world: World, version: str, **fields: Any) -> SnapshotMarker:
    replica = PlayedReplica(world, max_marker_version=version)
    replica.consumer.open(**fields)
    marker: SnapshotMarker = of_type(replica.consumer.received(), SnapshotMarker)[0]
    return marker


def test_markers_of_disk_snapshots_name_what_is_visible_prepared_and_completed(world: World) -> None:
    write_all_kinds(world)
    world.settle()
    marker = _marker(world, "2.2")
    assert (marker.end_seqno, marker.max_visible_seqno, marker.high_completed_seqno) == (6, 3, 4)
    assert marker.high_prepared_seqno == 6
    world.speak_as("7.0")
    assert _marker(world, "2.0").max_visible_seqno == 3


def test_with_sync_writes_every_marker_has_version_2(world: World) -> None:
    """A replica of a real server closes the connection where a disk snapshot has no high completed seqno."""
    write_all_kinds(world)
    first, second = of_type(_received(world), SnapshotMarker)
    assert (first.version, first.max_visible_seqno, first.high_completed_seqno) == (0, 3, 0)
    assert (second.version, second.max_visible_seqno, second.high_completed_seqno) == (0, 3, 0)
    world.settle()
    (marker,) = of_type(_received(world), SnapshotMarker)
    assert (marker.version, marker.max_visible_seqno, marker.high_completed_seqno) == (0, 3, 4)


def test_the_high_completed_seqno_outlives_what_shows_it(world: World) -> None:
    """A replica of a real server ends its process where it falls."""
    world.bucket.commit_prepare(prepare(world, "a"))
    world.write("a", "b")
    world.compact(KEEP_NOTHING)
    world.node.reopen()
    (marker,) = of_type(_received(world), SnapshotMarker)
    assert (marker.flags, marker.max_visible_seqno, marker.high_completed_seqno) == (0x06, 4, 1)
    assert _marker(world, "2.2").high_prepared_seqno == 1


def _received(world: World) -> list[Message]:
    replica = PlayedReplica(world)
    replica.consumer.open()
    return replica.consumer.received()


def test_the_high_prepared_seqno_is_of_the_disk_snapshot_itself(world: World) -> None:
    """Not of what came before it, and not of one in memory: newer servers refuse both."""
    write_all_kinds(world)
    world.write("y")
    in_memory = _marker(world, "2.2")
    assert (in_memory.version, in_memory.max_visible_seqno, in_memory.high_completed_seqno) == (0, 3, 0)
    world.settle()
    marker = _marker(world, "2.2", **resume(world, 6))
    assert (marker.max_visible_seqno, marker.high_prepared_seqno, marker.high_completed_seqno) == (7, 0, 4)


def test_markers_without_durable_writes(world: World) -> None:
    world.store("x")
    marker = _marker(world, "2.2")
    assert (marker.version, marker.max_visible_seqno, marker.high_prepared_seqno) == (2, 1, 0)


def test_a_snapshot_that_may_repeat_a_key_begins_a_checkpoint(world: World) -> None:
    """A 7.0.5 replica closes the connection where a key with a durable write comes twice within one checkpoint."""
    replica = PlayedReplica(world)
    replica.open()

    def flags() -> list[int]:
        world.commit()
        return [int(marker.flags) for marker in of_type(replica.consumer.received(), SnapshotMarker)]

    world.put("a")
    assert flags() == [0x05]
    world.put("a")
    assert flags() == [0x01]
    for _ in range(3):
        pending = prepare(world, "a")
        assert flags() == [0x05]
        world.bucket.commit_prepare(pending)
        assert flags() == [0x05]
    world.put("a")
    assert flags() == [0x05]


# --- everybody else -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_others_see_commits_as_changes_and_nothing_else(world: World, on_disk: bool) -> None:
    write_all_kinds(world)
    if on_disk:
        world.settle()
    consumer = world.consumer(features=COLLECTIONS)
    assert consumer.stream() == ["marker 0..6", "set x@2", "set a@3", "advanced 6"]


def test_a_consumer_without_collections_has_a_snapshot_that_ends_at_what_it_gets(world: World) -> None:
    write_all_kinds(world)
    consumer = world.consumer(features=PLAIN)
    assert consumer.stream() == ["marker 0..3", "set x@2", "set a@3"]
    prepare(world, "d")
    world.commit()
    assert consumer.brief() == []
    world.write("y")
    assert consumer.brief() == ["marker 8..8", "set y@8"]


def test_a_live_stream_gets_nothing_for_a_prepare_or_an_abort(world: World) -> None:
    """As recorded from a 7.0.5 server. One that begins later gets a seqno-advanced."""
    consumer = world.consumer(features=COLLECTIONS)
    consumer.open()
    prepared = prepare(world, "k")
    world.commit()
    assert consumer.brief() == []
    world.bucket.abort_prepare(prepared)
    world.commit()
    assert consumer.brief() == []
    assert world.consumer(features=COLLECTIONS).stream() == ["marker 0..2", "advanced 2"]
    world.bucket.commit_prepare(prepare(world, "k"))
    world.commit()
    assert consumer.brief() == ["marker 0..4", "set k@4"]


@pytest.mark.parametrize("end_seqno", [1, 2])
def test_a_stream_to_now_goes_to_the_end_of_its_snapshot_and_ends(world: World, end_seqno: int) -> None:
    """Whether the end is what all-vb-seqnos gives, or the pending prepare behind it."""
    world.write("x")
    prepare(world, "k")
    world.commit()
    consumer = world.consumer(features=COLLECTIONS)
    assert consumer.stream(end_seqno=Seqno(end_seqno)) == ["marker 0..2", "set x@1", "advanced 2", "end OK"]


def test_all_vb_seqnos_gives_what_is_visible(world: World) -> None:
    world.write("x")
    world.bucket.abort_prepare(prepare(world, "k"))
    prepare(world, "l")
    world.commit()
    world.node.reopen()
    plain, replica = world.consumer(features=COLLECTIONS), PlayedReplica(world).consumer
    assert [_seqno(consumer) for consumer in (plain, replica, world.consumer(features=PLAIN))] == [1, 4, 4]
    assert _seqno(plain, collection=DEFAULT_COLLECTION) == 4


def _seqno(consumer: Consumer, **fields: Any) -> int:
    answer = consumer.call(GetAllVbSeqnos(state=VBucketState.ACTIVE, **fields))
    return {entry.vbucket: entry.seqno for entry in answer.seqnos}[VBUCKET]


def test_change_streams_hold_every_committed_version(world: World) -> None:
    world.bucket.commit_prepare(prepare(world, "k", b"1"))
    world.bucket.commit_prepare(prepare(world, "k", b"2"))
    world.commit()
    consumer = world.consumer(features=COLLECTIONS, change_streams="true")
    assert changes(consumer.stream()) == ["set k@2", "set k@4"]


def test_removals_are_committed_as_deletions(world: World) -> None:
    world.write("k")
    world.bucket.commit_prepare(prepare(world, "k", is_removal=True))
    world.commit()
    consumer = world.consumer(features=COLLECTIONS, flags=REPLICA_FLAGS)
    assert consumer.stream() == ["marker 0..3", "remove k@3"]


def test_committed_changes_are_whole(world: World) -> None:
    prepared = prepare(world, "k", b"[5]")
    world.bucket.commit_prepare(prepared)
    world.commit()
    consumer = world.consumer(features=COLLECTIONS)
    consumer.open()
    messages = consumer.received()
    (mutation,) = of_type(messages, Mutation)
    assert (mutation.value, mutation.flags, mutation.cas, mutation.rev_seqno) == (b"[5]", 7, prepared.cas, 1)
    assert of_type(messages, Prepare | Commit | Abort) == []
