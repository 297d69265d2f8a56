"""What a consumer does with what comes: its copy of a vbucket becomes the producer's, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from headwater.errors import ConnectionFailed
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Feature, Opcode
from headwater.protocol.frames import stream_id
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import dcp_streams
from headwater.protocol.messages.base import ErrorResponse, Message, Request
from headwater.protocol.messages.dcp_changes import (
    CacheTransferEnd,
    DcpFlush,
    Deletion,
    Expiration,
    Mutation,
    OsoFlags,
    OsoSnapshot,
    SeqnoAdvanced,
    SnapshotFlags,
    SnapshotMarker,
)
from headwater.protocol.numbers import DEFAULT_COLLECTION, Cas, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, ValueParts, compress, encode_xattrs
from support.cases import case_apart
from support.dcp_world import COLLECTIONS, PLAIN, PURGE_ALL, VBUCKET, World, of_type
from support.replication_world import WITH_EVERY_VERSION, Link, Receiver, change_log, documents

LOG = (FailoverEntry(vbuuid=Vbuuid(0xFEED), seqno=Seqno(0)),)
HISTORY = SnapshotFlags.MEMORY | SnapshotFlags.HISTORY | SnapshotFlags.MAY_CONTAIN_DUPLICATES


class Scripted:
    """A stream whose producer is the test."""

    def __init__(self, world: World, features: tuple[Feature, ...] = COLLECTIONS) -> None:
        self.world = world
        self.receiver = Receiver(world, features=features)
        self.receiver.open()
        self.opaque = self.add()
        self.receiver.answer_controls()

    def add(self) -> int:
        self.receiver.send(dcp_streams.AddStream(vbucket=VBUCKET))
        (request,) = self.receiver.received()
        assert isinstance(request, dcp_streams.StreamRequest)
        self.receiver.send(dcp_streams.StreamRequestResponse(opaque=request.opaque, failover_log=LOG))
        self.receiver.data()
        return request.opaque

    def send(self, *messages: Request) -> list[Message]:
        """Send messages of the stream, and what is answered once they are durable."""
        self.receiver.send(*(replace(message, opaque=self.opaque) for message in messages))
        self.world.commit()
        return self.receiver.received()

    def status(self, *messages: Request) -> Status:
        (answer,) = self.send(*messages)
        assert isinstance(answer, ErrorResponse)
        assert answer.opcode == messages[-1].opcode
        assert answer.opaque == self.opaque
        return answer.status

    def high_seqno(self) -> int:
        return self.world.high_seqno()


@pytest.fixture
def stream(replica: World) -> Scripted:
    return Scripted(replica)


def _marker(start: int, end: int, flags: SnapshotFlags = HISTORY, **fields: Any) -> SnapshotMarker:
    return SnapshotMarker(start_seqno=Seqno(start), end_seqno=Seqno(end), flags=flags, **fields)


def _set(seqno: int, key: str = "k", **fields: Any) -> Mutation:
    given = {"collection_id": DEFAULT_COLLECTION, "value": b"{}", "datatype": Datatype.JSON, "cas": Cas(seqno << 16)}
    return Mutation(**{**given, "seqno": Seqno(seqno), "rev_seqno": 1, "key": key.encode(), **fields})


# --- copies -------------------------------------------------------------------------------------------------------


@WITH_EVERY_VERSION
def test_a_copy_gets_everything_that_is_there_and_everything_that_comes(world: World, replica: World) -> None:
    world.store("a", "b", "a")
    link = Link(world, replica)
    link.add()
    assert change_log(replica.bucket) == change_log(world.bucket)
    world.write("c", "a")
    world.remove("b")
    link.run()
    assert change_log(replica.bucket) == change_log(world.bucket)
    assert documents(replica.bucket) == documents(world.bucket)


@WITH_EVERY_VERSION
def test_a_copy_has_all_kinds_of_changes_byte_by_byte(world: World, replica: World) -> None:
    manifest = world.set_manifest(Manifest().with_scope("s").with_collection("s", "c", max_ttl_s=50, history=True))
    collection = manifest.find("s", "c")
    xattrs = encode_xattrs(ValueParts(xattrs={"_sync": b"1", "mine": b"{}"}, body=b"\x00\xff"))
    world.put("a", value=b"\x00\x01", datatype=Datatype.RAW, expiry=2_000_000_000)
    world.put("a", value=xattrs, datatype=Datatype.XATTR)
    world.put("in c", collection=collection.id)
    left = encode_xattrs(ValueParts(xattrs={"_sync": b"1", "mine": b"{}"}, body=b""))
    world.remove("a", value=left, datatype=Datatype.XATTR)
    world.put("e", "empty", value=b"")
    world.remove("e", expired=True)
    link = Link(world, replica)
    link.add()
    assert change_log(replica.bucket) == change_log(world.bucket)
    assert documents(replica.bucket) == documents(world.bucket)
    assert replica.bucket.manifest == manifest, "the bucket hears of the collections, too"
    assert replica.bucket.vbuckets.max_cas[0] == world.bucket.vbuckets.max_cas[0]
    assert replica.bucket.vbuckets.deleted_revs[0] == world.bucket.vbuckets.deleted_revs[0]
    assert replica.bucket.vbuckets.superseded[0] == world.bucket.vbuckets.superseded[0]


@WITH_EVERY_VERSION
def test_a_copy_is_the_same_after_a_restart(world: World, replica: World) -> None:
    world.put("a", "b", "a")
    world.remove("b")
    link = Link(world, replica)
    link.add()
    before = change_log(replica.bucket)
    facts = replica.bucket.vbuckets.facts[0]
    replica.node.reopen(in_order=False)
    assert change_log(replica.bucket) == before
    assert replica.bucket.vbuckets.facts[0] == facts
    assert documents(replica.bucket) == documents(world.bucket)
    again = Link(world, replica)
    world.write("c")
    again.add()
    assert change_log(replica.bucket) == change_log(world.bucket)


@WITH_EVERY_VERSION
def test_what_was_compacted_at_the_source_does_not_come(world: World, replica: World) -> None:
    world.put("a", "b", "a")
    world.remove("b")
    world.put("c")
    world.compact(PURGE_ALL)
    link = Link(world, replica)
    link.add()
    assert change_log(replica.bucket) == change_log(world.bucket)
    facts = replica.bucket.vbuckets.facts[0]
    assert facts.purge_seqno == world.purge_seqno() == 4
    world.write("d")
    link.run()
    link.cut()
    Link(world, replica).add()
    assert change_log(replica.bucket) == change_log(world.bucket)


def test_the_failover_log_is_the_producers(world: World, replica: World) -> None:
    world.store("a")
    world.set_state(dcp_streams.VBucketState.DEAD)
    world.set_state(dcp_streams.VBucketState.ACTIVE)
    Link(world, replica).add()
    mine, theirs = replica.bucket.vbuckets.facts[0], world.bucket.vbuckets.facts[0]
    assert mine.failover_log == theirs.failover_log
    assert len(mine.failover_log.entries) == 2


def test_a_client_streams_from_a_copy_what_is_durable_there(world: World, replica: World) -> None:
    world.store("a", "b")
    link = Link(world, replica)
    link.add()
    client = replica.consumer()
    assert client.stream() == ["marker 0..2", "set a@1", "set b@2"]
    world.write("c")
    link.step()
    assert client.brief() == []
    link.run()
    assert client.brief() == ["marker 3..3", "set c@3"]


def test_changes_of_a_dropped_collection_leave_only_their_seqno(world: World, replica: World) -> None:
    manifest = world.set_manifest(Manifest().with_collection("_default", "c"))
    collection = manifest.find("_default", "c")
    world.write("a")
    link = Link(world, replica)
    link.add()
    world.set_manifest(manifest.without_collection("_default", "c"))
    world.write("late", collection=collection.id)
    link.run()
    assert replica.high_seqno() == world.high_seqno()
    assert replica.bucket.vbuckets.durable_seqno(0) == world.high_seqno()
    replica.node.reopen(in_order=False)
    assert replica.high_seqno() == world.high_seqno()


# --- forms that are not stored ------------------------------------------------------------------------------------

OLD_FORMS: dict[str, tuple[Request, Callable[[Any], bool]]] = {
    "compressed": (
        _set(1, value=compress(b'{"a":1}' * 50), datatype=Datatype.JSON | Datatype.SNAPPY),
        lambda document: document.value == b'{"a":1}' * 50 and document.datatype == Datatype.JSON,
    ),
    "with a stream id": (_set(1, frame_infos=(stream_id(3),)), lambda document: document.value == b"{}"),
    "with metadata behind the value": (_set(1, value=b"{}mm", nmeta=2), lambda document: document.value == b"{}"),
    "locked": (_set(1, lock_time=77, nru=2), lambda document: document.value == b"{}"),
    "an expiration without its time": (
        Expiration(seqno=Seqno(1), rev_seqno=3, key=b"k", collection_id=DEFAULT_COLLECTION, cas=Cas(9)),
        lambda document: document.is_deleted and document.delete_time == 1_800_000_000,
    ),
}


@pytest.mark.parametrize("form", OLD_FORMS)
def test_other_forms_are_brought_into_the_stored_one(stream: Scripted, form: str) -> None:
    change, is_right = OLD_FORMS[form]
    assert stream.send(_marker(0, 3), change, _set(2, "x"), _set(3, "y")) == []
    bucket = stream.world.bucket
    found = documents(bucket)
    assert is_right(found[0, b"k"])
    assert sorted(key for _, key in found) == [b"k", b"x", b"y"]
    stream.world.node.reopen(in_order=False)
    assert documents(stream.world.bucket) == found


# --- out of order -------------------------------------------------------------------------------------------------


@case_apart([_set(1)], Status.ERANGE, id="no snapshot")
@case_apart([_marker(0, 1), _set(1), _set(2)], Status.ERANGE, id="after a complete one")
@case_apart([_marker(0, 2), _set(1), _marker(3, 4)], Status.EINVAL, id="inside of one")
@case_apart([_marker(0, 2), _set(1), _set(2), _marker(5, 4)], Status.EINVAL, id="end before start")
@case_apart([_marker(0, 2), _set(1), _set(2), _marker(1, 2)], Status.ERANGE, id="the same")
@case_apart([_marker(0, 2), _set(1), _set(2), _marker(0, 1)], Status.ERANGE, id="an older one")
def test_a_change_or_a_marker_that_does_not_fit(stream: Scripted, messages: list[Request], status: Status) -> None:
    assert stream.status(*messages) == status
    assert stream.high_seqno() == len(of_type(messages[:-1], Mutation))


@pytest.mark.parametrize(
    "late",
    [_set(4), _set(2), _set(1), SeqnoAdvanced(seqno=Seqno(4)), SeqnoAdvanced(seqno=Seqno(2))],
    ids=lambda message: f"{type(message).__name__} {message.seqno}",
)
def test_a_seqno_that_does_not_rise_inside_its_snapshot(stream: Scripted, late: Request) -> None:
    assert stream.status(_marker(1, 3), _set(1), _set(2, "b"), late) == Status.ERANGE
    assert stream.high_seqno() == 2, "what came before it is taken"


def test_a_refused_change_ends_the_stream_so_that_there_is_no_gap(stream: Scripted) -> None:
    assert stream.status(_marker(0, 1), _set(1), _set(3)) == Status.ERANGE
    assert stream.status(_marker(2, 4)) == Status.STREAM_NOT_FOUND
    assert stream.high_seqno() == 1
    assert stream.add() != stream.opaque


def test_messages_of_a_stream_that_is_not_open(stream: Scripted) -> None:
    """As recorded from a 7.0.5 server, which has two statuses where the control asks for them."""
    stream.opaque += 1
    messages = (_marker(0, 1), _set(1), dcp_streams.SetVBucketState(state=dcp_streams.VBucketState.ACTIVE))
    for message in messages:
        assert stream.status(message) == Status.OPAQUE_NO_MATCH
        assert stream.status(replace(message, vbucket=VBucketId(1))) == Status.STREAM_NOT_FOUND
    assert stream.send(dcp_streams.StreamEnd()) == [], "of a stream that was closed here"
    assert stream.world.bucket.vbuckets.state(0) == dcp_streams.VBucketState.REPLICA


def test_messages_of_a_stream_that_is_not_open_for_an_older_producer(replica: World) -> None:
    receiver = Receiver(replica)
    receiver.open()
    receiver.send(
        dcp_streams.AddStream(vbucket=VBUCKET), replace(_marker(0, 1), opaque=9), replace(_set(1), vbucket=VBucketId(1))
    )
    refusals = [answer for answer in receiver.received() if isinstance(answer, ErrorResponse)]
    assert [answer.status for answer in refusals] == [Status.KEY_EEXISTS, Status.KEY_ENOENT]


@pytest.mark.parametrize("collections", [True, False])
def test_a_deletion_has_the_form_that_fits_what_hello_agreed_on(replica: World, collections: bool) -> None:
    stream = Scripted(replica, features=COLLECTIONS if collections else PLAIN)
    collection = DEFAULT_COLLECTION if collections else None
    timed = Deletion(seqno=Seqno(1), rev_seqno=1, delete_time=5, collection_id=collection, key=b"k")
    fitting, other = (timed, replace(timed, delete_time=None))[:: 1 if collections else -1]
    assert stream.send(_marker(0, 1), fitting) == []
    (answer,) = stream.send(_marker(2, 2), replace(other, seqno=Seqno(2)))
    assert (answer.status, answer.datatype) == (Status.EINVAL, Datatype.JSON)
    assert "delete times" in answer.context


@case_apart(replace(_set(1), vbucket=VBucketId(1)))
@case_apart(_set(1, datatype=Datatype.XATTR, value=b"\x00\x00\x00\x09abc"))
@case_apart(_set(1, datatype=Datatype.SNAPPY, value=b"\xff\xff\xff\xff\xff"))
@case_apart(_set(1, datatype=Datatype(0x40)))
@case_apart(_set(1, collection_id=None, key="\x80"))
def test_changes_that_are_not_sound(stream: Scripted, change: Request) -> None:
    assert stream.status(_marker(0, 1), change) == Status.EINVAL
    assert stream.high_seqno() == 0
    assert change_log(stream.world.bucket) == b""


@pytest.mark.parametrize("message", [OsoSnapshot(flags=OsoFlags.START), CacheTransferEnd()])
def test_what_was_not_asked_for(stream: Scripted, message: Request) -> None:
    """As recorded from an 8.0.2 server."""
    assert stream.status(message) == Status.UNKNOWN_COMMAND
    assert stream.send(_marker(0, 1), _set(1)) == []
    assert stream.high_seqno() == 1


def test_a_vbucket_that_has_become_active_takes_nothing(stream: Scripted) -> None:
    assert stream.send(_marker(0, 5), _set(1)) == []
    stream.world.set_state(dcp_streams.VBucketState.ACTIVE)
    assert stream.status(_set(2)) == Status.NOT_MY_VBUCKET
    assert stream.high_seqno() == 1


def test_a_vbucket_that_was_changed_under_the_stream(stream: Scripted) -> None:
    assert stream.send(_marker(0, 5), _set(1)) == []
    stream.world.set_state(dcp_streams.VBucketState.ACTIVE)
    stream.world.write("own")
    stream.world.set_state(dcp_streams.VBucketState.REPLICA)
    assert stream.status(_set(3)) == Status.KEY_ENOENT


# --- what is answered ---------------------------------------------------------------------------------------------


def test_a_marker_with_the_ack_flag_is_answered_when_its_snapshot_is_durable(stream: Scripted) -> None:
    asked = _marker(0, 2, HISTORY | SnapshotFlags.ACK)
    assert stream.send(asked, _set(1)) == []
    stream.receiver.send(replace(_set(2), opaque=stream.opaque))
    assert stream.receiver.received() == []
    stream.world.commit()
    (answer,) = stream.receiver.received()
    assert (answer.opcode, answer.opaque, answer.status) == (Opcode.DCP_SNAPSHOT_MARKER, stream.opaque, Status.SUCCESS)


def test_a_state_is_answered_when_it_is_durable(stream: Scripted) -> None:
    stream.receiver.send(dcp_streams.SetVBucketState(opaque=stream.opaque, state=dcp_streams.VBucketState.PENDING))
    assert stream.receiver.received() == []
    stream.world.commit()
    (answer,) = stream.receiver.received()
    assert (answer.opcode, answer.opaque) == (Opcode.DCP_SET_VBUCKET_STATE, stream.opaque)
    assert stream.world.bucket.vbuckets.state(0) == dcp_streams.VBucketState.PENDING


def test_noops_are_answered_with_their_opaque(stream: Scripted) -> None:
    stream.receiver.send(dcp_streams.DcpNoop(opaque=0x10000000))
    (answer,) = stream.receiver.received()
    assert (answer.opcode, answer.opaque) == (Opcode.DCP_NOOP, 0x10000000)


def test_a_silent_producer_is_dead_after_two_intervals(stream: Scripted) -> None:
    connection = stream.receiver.connection
    now_s = stream.world.node.service.now_s()
    for second in range(31):
        connection.tick(now_s + second)
    stream.receiver.send(dcp_streams.DcpNoop(opaque=1))
    for second in range(31, 70):
        connection.tick(now_s + second)
    with pytest.raises(ConnectionFailed, match="silent"):
        connection.tick(now_s + 71)


def test_a_flush_drops_what_is_there(stream: Scripted) -> None:
    assert stream.send(_marker(0, 2), _set(1), _set(2, "b")) == []
    (answer,) = stream.send(DcpFlush(), _marker(3, 3), _set(3, "c"))
    assert answer.opcode == Opcode.DCP_FLUSH
    assert [key for _, key in documents(stream.world.bucket)] == [b"c"]


# --- flow control -------------------------------------------------------------------------------------------------


def test_bytes_are_acknowledged_when_they_are_durable(stream: Scripted) -> None:
    frames = [replace(_set(seqno, value=bytes(200_000)), opaque=stream.opaque) for seqno in range(1, 21)]
    stream.receiver.send(replace(_marker(0, 20), opaque=stream.opaque), *frames)
    assert stream.receiver.received() == []
    stream.world.commit()
    (ack,) = stream.receiver.received()
    assert ack.acked_bytes == 44 + sum(len(frame.encode()) for frame in frames)


def test_less_than_a_fifth_of_the_buffer_is_not_acknowledged_yet(stream: Scripted) -> None:
    assert stream.send(_marker(0, 5), _set(1, value=bytes(1_000_000))) == []
    assert stream.send(_set(2, value=bytes(1_000_000))) == []
    assert [type(message) for message in stream.send(_set(3, value=bytes(200_000)))] == [dcp_streams.BufferAck]


def test_a_producer_waits_for_a_consumer_whose_disk_does(world: World, replica: World) -> None:
    world.store(*(f"k{number}" for number in range(200)), value=bytes(100_000))
    link = Link(world, replica)
    link.add_stream()
    for _ in range(100):
        link.step()
    pending = replica.bucket.pending.used_bytes
    assert 10_000_000 < pending < 11_500_000, "one buffer, and what it may be overdrawn by"
    link.run()
    assert replica.high_seqno() == 200


def test_a_consumer_that_gets_too_much_stops_reading(stream: Scripted) -> None:
    connection = stream.receiver.connection
    stream.receiver.send(replace(_marker(0, 50), opaque=stream.opaque))
    for seqno in range(1, 30):
        stream.receiver.send(replace(_set(seqno, value=bytes(1_000_000)), opaque=stream.opaque))
    assert connection.is_full
    stream.world.commit()
    stream.receiver.received()
    assert not connection.is_full


def test_what_could_not_be_stored_is_not_acknowledged(stream: Scripted) -> None:
    stream.receiver.send(dcp_streams.SetVBucketState(opaque=stream.opaque, state=dcp_streams.VBucketState.PENDING))
    stream.receiver.connection.on_void()
    stream.world.commit()
    assert stream.receiver.received() == []
    assert stream.world.node.bucket_service.receivers == {}
    stream.receiver.send(dcp_streams.DcpNoop(opaque=1))
    assert stream.receiver.is_closed


# --- bytes --------------------------------------------------------------------------------------------------------


@WITH_EVERY_VERSION
def test_any_split_of_the_bytes_gives_the_same_copy(world: World, replica: World) -> None:
    world.put("a", "b", "a")
    world.remove("b")
    link = Link(world, replica)
    link.add_stream()
    link.step(), link.step()
    send = link.receiver.send

    def send_bytes(*messages: bytes) -> None:
        for message in messages:
            for at in range(len(message)):
                send(message[at : at + 1])

    link.receiver.send = send_bytes
    link.run()
    assert change_log(replica.bucket) == change_log(world.bucket)


def test_bytes_that_are_no_frames_end_the_connection(stream: Scripted) -> None:
    stream.receiver.send(b"\x42" * 24)
    assert stream.receiver.is_closed
    assert stream.world.node.bucket_service.receivers == {}


def test_the_producers_end_of_the_link_sees_the_refusal(world: World, replica: World) -> None:
    world.store("a")
    link = Link(world, replica)
    link.add()
    replica.set_state(dcp_streams.VBucketState.ACTIVE)
    world.write("b")
    link.run()
    assert link.producer.is_closed


@pytest.mark.parametrize(("flags", "history_start"), [(HISTORY, 0), (SnapshotFlags.DISK, 5)])
def test_rollback_into_a_snapshot_needs_history(stream: Scripted, flags: SnapshotFlags, history_start: int) -> None:
    assert stream.send(_marker(0, 5, flags), _set(1), _set(5)) == []
    facts = stream.world.bucket.vbuckets.facts[0]
    assert facts.history_start_seqno == history_start
    assert (facts.snapshot_start_seqno, facts.snapshot_end_seqno) == (0, 5)


def test_a_collection_id_of_several_bytes(stream: Scripted) -> None:
    assert stream.send(_marker(0, 1), _set(1, collection_id=CollectionId(0x12345))) == []
    assert (0x12345, b"k") in documents(stream.world.bucket)
