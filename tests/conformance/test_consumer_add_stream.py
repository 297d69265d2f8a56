"""Add-stream in all its forms (seed 002), byte-checked, at a node that is the consumer."""

from __future__ import annotations

import struct

import pytest

from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.messages.base import ErrorResponse, Message
from headwater.protocol.messages.dcp_streams import (
    AddStream,
    AddStreamResponse,
    BufferAck,
    CloseStream,
    Control,
    GetFailoverLog,
    Open,
    OpenFlags,
    StreamFlags,
    StreamRequest,
    StreamRequestResponse,
    VBucketState,
)
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from support.cases import case_apart
from support.dcp_world import OPAQUE, VBUCKET, World
from support.replication_world import Link, Receiver, change_log, documents

SEED_REQUEST = bytes.fromhex("80510000 04000005 00000004 00000001 00000000 00000000 00000001".replace(" ", ""))
SEED_RESPONSE = bytes.fromhex("81510000 04000000 00000004 00000001 00000000 00000000 00001000".replace(" ", ""))
LOG = (FailoverEntry(vbuuid=Vbuuid(0xFEED), seqno=Seqno(0)),)


def _opened(world: World, name: str = "replication") -> Receiver:
    receiver = Receiver(world, name=name)
    receiver.open()
    return receiver


def _request(receiver: Receiver, **fields: object) -> StreamRequest:
    """What the node asks its producer for when it is told to add a stream."""
    receiver.send(AddStream(**{"vbucket": VBUCKET, "opaque": 1, **fields}))
    (request,) = receiver.received()
    assert isinstance(request, StreamRequest), request
    return request


def _refused(receiver: Receiver, message: Message | bytes) -> Status:
    receiver.send(message)
    (answer,) = receiver.received()
    return answer.status


def _accept(receiver: Receiver, request: StreamRequest) -> bytes:
    receiver.send(StreamRequestResponse(opaque=request.opaque, failover_log=LOG))
    return receiver.data()


# --- the seed's example -------------------------------------------------------------------------------------------


def test_the_seeds_example_byte_by_byte(replica: World) -> None:
    receiver = _opened(replica)
    receiver.send(SEED_REQUEST)
    data = receiver.data()
    header = struct.pack(">BBHBBHIIQ", 0x80, 0x53, 0, 48, 0, 5, 48, 0x1000, 0)
    assert data.endswith(header + struct.pack(">IIQQQQQ", 1, 0, 0, 2**64 - 1, 0, 0, 0))
    replica.commit()
    assert receiver.data() == b"", "the producer has not accepted yet"
    assert _accept(receiver, StreamRequest(opaque=0x1000)) == SEED_RESPONSE


@case_apart(StreamFlags(0))
@case_apart(StreamFlags.TAKEOVER)
@case_apart(StreamFlags.DISK_ONLY)
@case_apart(StreamFlags.LATEST)
@case_apart(StreamFlags.ACTIVE_ONLY)
@case_apart(StreamFlags.STRICT_VBUUID)
@case_apart(StreamFlags.TAKEOVER | StreamFlags.ACTIVE_ONLY | StreamFlags.STRICT_VBUUID)
def test_flags_are_passed_on(replica: World, flags: StreamFlags) -> None:
    request = _request(_opened(replica), flags=flags)
    assert request.flags == flags
    assert request.end_seqno == SEQNO_MAX


@pytest.mark.parametrize(
    "flags", [StreamFlags.NO_VALUE, StreamFlags.FROM_LATEST, StreamFlags(0x100), StreamFlags(2**31)]
)
def test_flags_that_make_no_copy_are_invalid(replica: World, flags: StreamFlags) -> None:
    assert _refused(_opened(replica), AddStream(vbucket=VBUCKET, flags=flags)) == Status.EINVAL


# --- what is refused ----------------------------------------------------------------------------------------------

MALFORMED = {
    "no extras": "80510000 00000000 00000000 00000001 00000000 00000000",
    "short extras": "80510000 03000000 00000003 00000001 00000000 00000000 000000",
    "long extras": "80510000 08000000 00000008 00000001 00000000 00000000 0000000000000000",
    "a key": "80510001 04000000 00000005 00000001 00000000 00000000 00000000 61",
    "a value": "80510000 04000000 00000005 00000001 00000000 00000000 00000000 61",
}


@pytest.mark.parametrize("text", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_add_stream_is_invalid_and_the_connection_lives_on(replica: World, text: str) -> None:
    receiver = _opened(replica)
    assert _refused(receiver, bytes.fromhex(text.replace(" ", ""))) == Status.EINVAL
    assert _request(receiver).vbucket == VBUCKET


def test_only_copies_that_are_here_receive(replica: World) -> None:
    receiver = _opened(replica)
    assert _refused(receiver, AddStream(vbucket=VBucketId(1000))) == Status.NOT_MY_VBUCKET
    for state in (VBucketState.ACTIVE, VBucketState.DEAD):
        replica.set_state(state)
        assert _refused(receiver, AddStream(vbucket=VBUCKET)) == Status.NOT_MY_VBUCKET
    replica.set_state(VBucketState.PENDING)
    assert _request(receiver).vbucket == VBUCKET


def test_a_vbucket_is_received_by_one_stream(replica: World) -> None:
    first, second = _opened(replica, "one"), _opened(replica, "two")
    request = _request(first)
    for receiver in (first, second):
        assert _refused(receiver, AddStream(vbucket=VBUCKET)) == Status.KEY_EEXISTS
    _accept(first, request)
    for receiver in (first, second):
        assert _refused(receiver, AddStream(vbucket=VBUCKET)) == Status.KEY_EEXISTS
    first.close()
    assert _request(second).vbucket == VBUCKET


@pytest.mark.parametrize("status", [Status.NOT_MY_VBUCKET, Status.ERANGE, Status.KEY_EEXISTS, Status(0x1234)])
def test_what_the_producer_refuses_is_refused_with_its_status(replica: World, status: Status) -> None:
    receiver = _opened(replica)
    request = _request(receiver)
    answer = ErrorResponse(opcode=StreamRequest.opcode, opaque=request.opaque, status=status)
    assert _refused(receiver, answer) == status
    assert _request(receiver).vbucket == VBUCKET


def test_what_is_out_of_turn_is_refused(replica: World) -> None:
    receiver = Receiver(replica)
    assert _refused(receiver, AddStream(vbucket=VBUCKET)) == Status.EINVAL
    receiver.open()
    assert _refused(receiver, Open(key=b"again", flags=OpenFlags(0))) == Status.EINVAL
    assert _refused(receiver, CloseStream(vbucket=VBUCKET)) == Status.KEY_ENOENT
    assert not receiver.is_closed


@case_apart(StreamRequest(opaque=OPAQUE))
@case_apart(Control(key=b"enable_noop", value=b"true"))
@case_apart(BufferAck(acked_bytes=1))
def test_what_is_for_a_producer_closes_a_consumers_connection(replica: World, message: Message) -> None:
    receiver = _opened(replica)
    receiver.send(message)
    assert receiver.is_closed
    assert receiver.data() == b""


def test_a_consumer_that_may_not_administer_is_refused(replica: World) -> None:
    receiver = Receiver(replica)
    receiver.session.user = "writer"
    assert _refused(receiver, Open(key=b"r", flags=OpenFlags(0))) == Status.EACCESS


# --- opening ------------------------------------------------------------------------------------------------------


def test_the_controls_that_a_consumer_sends(replica: World) -> None:
    """Only with the first stream; those that a 7.0.5 server knows are in its recorded session."""
    receiver = _opened(replica)
    assert receiver.controls == []
    _request(receiver)
    controls = {control.key.decode(): control.value.decode() for control in receiver.controls}
    assert "enable_sync_writes" not in controls
    assert "consumer_name" not in controls
    newer = {"flatbuffers_system_events": "true", "change_streams": "true", "max_marker_version": "2.2"}
    assert list(controls.items())[-3:] == list(newer.items())


def test_add_stream_in_the_same_bytes_as_the_open(replica: World) -> None:
    receiver = Receiver(replica)
    receiver.send(Open(key=b"r", flags=OpenFlags(0)).encode() + SEED_REQUEST)
    assert isinstance(receiver.received()[-1], StreamRequest)


def test_a_node_answers_other_requests_on_a_consumers_connection(replica: World) -> None:
    receiver = _opened(replica)
    receiver.send(GetFailoverLog(vbucket=VBUCKET, opaque=9))
    (log,) = receiver.received()
    assert log.failover_log[0].vbuuid == replica.vbuuid()
    receiver.send(bytes.fromhex("800a00000000000000000000000000070000000000000000"))
    (noop,) = receiver.received()
    assert (noop.opcode, noop.opaque, noop.status) == (0x0A, 7, Status.SUCCESS)


# --- many ---------------------------------------------------------------------------------------------------------


def test_several_connections_times_several_vbuckets(world: World, replica: World) -> None:
    for vbucket in range(8):
        world.store(*(f"{vbucket}-{number}" for number in range(20)), vbucket=vbucket)
    links = [Link(world, replica, name=f"link-{number}") for number in range(4)]
    opaques = [[link.add(vbucket) for vbucket in (number, number + 4)] for number, link in enumerate(links)]
    assert opaques == [[0x1000, 0x1001]] * 4
    for number, link in enumerate(links):
        assert link.refused((number + 1) % 8) == Status.KEY_EEXISTS
    for vbucket in range(8):
        world.write("late", vbucket=vbucket)
    for link in links:
        link.run()
    for vbucket in range(8):
        assert change_log(replica.bucket, vbucket) == change_log(world.bucket, vbucket)
        assert len(documents(replica.bucket, vbucket)) == 21


def test_all_streams_are_added_before_the_first_is_answered(world: World, replica: World) -> None:
    for vbucket in range(8):
        world.store("a", "b", vbucket=vbucket)
    link = Link(world, replica)
    for vbucket in range(8):
        link.add_stream(vbucket, opaque=100 - vbucket)
    link.run()
    assert [(type(answer), answer.opaque) for answer in link.answers] == [
        (AddStreamResponse, 100 - vbucket) for vbucket in range(8)
    ]
    assert all(change_log(replica.bucket, v) == change_log(world.bucket, v) for v in range(8))


def test_reopen_after_close(world: World, replica: World) -> None:
    world.store("a", "b")
    link = Link(world, replica)
    assert link.add() == 0x1000
    link.close_stream()
    link.run()
    world.write("c")
    link.run()
    assert change_log(replica.bucket) != change_log(world.bucket)
    assert link.add() == 0x1001
    assert change_log(replica.bucket) == change_log(world.bucket)


def test_closing_before_the_producer_has_answered(replica: World) -> None:
    receiver = _opened(replica)
    request = _request(receiver)
    receiver.send(CloseStream(vbucket=VBUCKET, opaque=5))
    add_stream, close = receiver.received()
    assert (add_stream.opaque, add_stream.status) == (1, Status.KEY_ENOENT)
    assert (close.opaque, close.status) == (5, Status.SUCCESS)
    assert _accept(receiver, request) == b"", "an answer to what nobody wants any more"
    assert _request(receiver).opaque != request.opaque


def test_a_connection_of_the_same_name_takes_over(world: World, replica: World) -> None:
    world.store("a")
    first = Link(world, replica)
    first.add()
    second = Link(world, replica)
    assert first.receiver.is_closed
    second.add()
    world.write("b")
    second.run()
    assert change_log(replica.bucket) == change_log(world.bucket)


def test_disk_only_and_latest_end_by_themselves(world: World, replica: World) -> None:
    world.store("a", "b")
    link = Link(world, replica)
    for flags in (StreamFlags.DISK_ONLY, StreamFlags.LATEST):
        link.add(flags=flags)
        assert link.receiver.connection.streams == {}
        assert change_log(replica.bucket) == change_log(world.bucket)
        world.write("c")


def test_active_only_is_refused_by_a_producer_that_is_not(world: World, replica: World) -> None:
    world.set_state(VBucketState.REPLICA)
    assert Link(world, replica).refused(flags=StreamFlags.ACTIVE_ONLY) == Status.NOT_MY_VBUCKET


def test_strict_vbuuid_starts_from_nothing_all_the_same(world: World, replica: World) -> None:
    world.store("a")
    link = Link(world, replica)
    link.add(flags=StreamFlags.STRICT_VBUUID)
    assert change_log(replica.bucket) == change_log(world.bucket)
    rollbacks = [m for m in link.passed if isinstance(m, StreamRequestResponse) and m.rollback_seqno is not None]
    assert rollbacks == [], "a copy that holds nothing names no branch"
