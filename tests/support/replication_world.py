"""Two nodes, and a proxy between them that forwards bytes from a producer connection to a consumer connection.

No sockets, stopped clocks, nothing durable unless a test says so or runs the link. The proxy keeps the answers to
its own requests, such as add-stream; everything else goes to the other side unchanged, if a real server there would
accept it (`support.strict_server`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from headwater.errors import RemoteProtocolError
from headwater.node.consumer.connection import ConsumerConnection
from headwater.node.kv.context import CloseSession
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.features import WITH_COLLECTIONS, Feature, Opcode
from headwater.protocol.frames import DurabilityLevel, Frame, decode_frames, durability
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import ErrorResponse, Message, PlainResponse, Request, Response
from headwater.protocol.messages.dcp_changes import SeqnoAcknowledged
from headwater.protocol.messages.dcp_streams import (
    AddStream,
    CloseStream,
    Control,
    Open,
    OpenFlags,
    StreamFlags,
    VBucketState,
)
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from support.dcp_world import COLLECTIONS, VBUCKET, Consumer, World
from support.kv_harness import Client, drive
from support.strict_server import V8_0_2, ServerVersion, StrictConnection

PRODUCER_FLAGS = (
    OpenFlags.PRODUCER
    | OpenFlags.INCLUDE_XATTRS
    | OpenFlags.INCLUDE_DELETE_TIMES
    | OpenFlags.INCLUDE_DELETED_USER_XATTRS
)
"""If one of these is missing, a copy does not hold everything that the source does."""
NO_STREAM_FLAGS = StreamFlags(0)
ROUNDS_MAX = 1000
WITH_EVERY_VERSION = pytest.mark.parametrize("replica", ["8.0.2"], indirect=True)
"""For tests of copies that hold every version of a document: 7.0.5 has no change streams."""
_PROXY_OPCODES = frozenset({Opcode.DCP_ADD_STREAM, Opcode.DCP_CLOSE_STREAM, Opcode.DCP_GET_FAILOVER_LOG})


class Receiver:
    """The proxy's end of a connection on which the node is the consumer. Exchanges bytes, and checks none of them."""

    def __init__(self, world: World, *, features: tuple[Feature, ...] = COLLECTIONS, name: str = "replication") -> None:
        self.world = world
        client: Client = world.node.client(features=features)
        self.session = client.session
        self.negotiated = client.negotiated
        self.is_closed = False
        self.controls: list[Control] = []
        self.name = name
        client.on_replaced = self.close

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.session.disconnected()

    def open(self, *, value: bytes = b"") -> None:
        datatype = Datatype.JSON if value else Datatype.RAW
        self.send(Open(key=self.name.encode(), flags=OpenFlags(0), value=value, datatype=datatype))
        (answer,) = self.received()
        assert answer.status == Status.SUCCESS, answer

    @property
    def connection(self) -> ConsumerConnection:
        assert self.session.consumer is not None
        return self.session.consumer

    def send(self, *messages: Request | Response | bytes) -> None:
        data = b"".join(message if isinstance(message, bytes) else message.encode() for message in messages)
        try:
            drive(self.session, data)
        except (CloseSession, RemoteProtocolError):
            self.close()

    def data(self) -> bytes:
        """Return what the node sends now."""
        data = b""
        while piece := self.session.data_to_send():
            data += piece
        return data

    def frames(self) -> list[Frame]:
        return decode_frames(self.data())

    def received(self) -> list[Message]:
        """Return what the node sends now, except its controls, which precede its first stream request."""
        messages = [decode_message(frame, self.negotiated) for frame in self.frames()]
        self.controls += [message for message in messages if isinstance(message, Control)]
        return [message for message in messages if not isinstance(message, Control)]

    def answer_controls(self, status: Status = Status.SUCCESS) -> None:
        for control in self.controls:
            self.send(PlainResponse(opcode=Opcode.DCP_CONTROL, opaque=control.opaque, status=status))


class Link:
    """A producer connection of one node joined to a consumer connection of another.

    Raises for anything that real servers of `version` refuse on either side.
    """

    version: ServerVersion = V8_0_2

    def __init__(self, source: World, target: World, *, name: str = "replication", value: bytes = b"") -> None:
        self.source = source
        self.target = target
        self.answers: list[Message] = []
        self.passed: list[Message] = []
        """What the producer has sent, for tests that inspect it."""
        self.receiver = Receiver(target, name=name)
        self.producer: Consumer = source.consumer(flags=PRODUCER_FLAGS, features=COLLECTIONS, name=name)
        self.receiver.open(value=value)
        features = frozenset(map(int, COLLECTIONS))
        self._strict_source = StrictConnection(self.version, features, is_open=True)
        self._strict_target = StrictConnection(self.version, features, is_open=True, is_consumer=True)

    def add_stream(self, vbucket: int = VBUCKET, flags: StreamFlags = NO_STREAM_FLAGS, opaque: int = 1) -> None:
        self.receiver.send(AddStream(vbucket=VBucketId(vbucket), flags=flags, opaque=opaque))

    def add(self, vbucket: int = VBUCKET, flags: StreamFlags = NO_STREAM_FLAGS) -> int:
        """Add a stream and run until nothing is sent any more. Returns the stream's opaque."""
        self.add_stream(vbucket, flags)
        self.run()
        answer = self.answers.pop()
        return answer.stream_opaque

    def refused(self, vbucket: int = VBUCKET, flags: StreamFlags = NO_STREAM_FLAGS) -> Status:
        self.add_stream(vbucket, flags)
        self.run()
        answer = self.answers.pop()
        assert answer.status != Status.SUCCESS
        return answer.status

    def close_stream(self, vbucket: int = VBUCKET) -> None:
        """Close a stream like the proxy does: first at the producer, then at the consumer."""
        close = CloseStream(vbucket=VBucketId(vbucket), opaque=7)
        self.producer.send(close)
        self.receiver.send(close)

    def cut(self) -> None:
        """Break both connections, and lose what is in transit."""
        self.receiver.close()
        self.producer.session.disconnected()
        self.producer.is_closed = True

    def step(self, bytes_max: int = 1 << 20) -> bool:
        """Forward what was sent. Returns whether there was anything."""
        to_target = self._from_producer(bytes_max)
        if to_target and not self.receiver.is_closed:
            self.receiver.send(to_target)
        to_source = self._from_receiver()
        if to_source and not self.producer.is_closed:
            self.producer.send(to_source)
        return bool(to_target or to_source)

    def run(self) -> None:
        """Run until neither side sends anything. Everything becomes durable."""
        for _ in range(ROUNDS_MAX):
            moved = self.step()
            self.source.commit()
            self.target.commit()
            if not moved and not self.step():
                return
        raise AssertionError("the link does not come to rest")

    def _from_producer(self, bytes_max: int) -> bytes:
        session = self.producer.session
        data = b""
        while piece := session.data_to_send():
            data += piece
        if session.dcp is not None and not self.producer.is_closed:
            data += session.dcp.produce(bytes_max)
        frames = decode_frames(data)
        self.passed += [decode_message(frame, self.producer.negotiated) for frame in frames]
        for frame in frames:
            self._strict_source.check_from_node(frame)
            self._strict_target.check_from_peer(frame)
        return b"".join(f.encode() for f in frames if f.magic.is_request or f.opcode not in _PROXY_OPCODES)

    def _from_receiver(self) -> bytes:
        data = b""
        for frame in self.receiver.frames():
            if not (self._strict_target.check_from_node(frame) and self._strict_source.check_from_peer(frame)):
                refusal = ErrorResponse(opcode=Opcode(frame.opcode), opaque=frame.opaque, status=Status.EINVAL)
                self.receiver.send(refusal)
            elif frame.magic.is_request or frame.opcode not in _PROXY_OPCODES:
                data += frame.encode()
            else:
                self.answers.append(decode_message(frame, self.receiver.negotiated))
        return data


def make_replica(world: World, number: int = 1) -> None:
    """Make all vbuckets of a node replicas, with branches that no other node has created."""
    world.node._vbuuids += 0x1_0000 * number
    for vbucket in range(len(world.bucket.vbuckets)):
        world.set_state(VBucketState.REPLICA, vbucket)
        world.set_failover_log(FailoverLog.start(world.node._new_vbuuid()), vbucket)


# --- comparing copies ---------------------------------------------------------------------------------------------


def change_log(bucket: Bucket, vbucket: int = VBUCKET, *, after_seqno: int = 0) -> bytes:
    """Return all durable changes of a vbucket as they are stored."""
    return b"".join(run.tobytes() for run in bucket.runs(vbucket, after_seqno=after_seqno))


def documents(bucket: Bucket, vbucket: int = VBUCKET) -> dict[tuple[int, bytes], Any]:
    """Return the newest version of every document, read through the index."""
    found: dict[tuple[int, bytes], Any] = {}
    for frame in decode_frames(change_log(bucket, vbucket)):
        if frame.opcode in (Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION):
            message: Any = decode_message(frame, WITH_COLLECTIONS)
            entry = bucket.find(vbucket, message.collection_id, message.key)
            assert entry is not None, message
            found[message.collection_id, message.key] = bucket.read(vbucket, entry)
    return found


# Durable writes in a world without sockets: a writer, the topology of its vbucket, and replicas that tests control.


ACTIVE, REPLICA, SECOND = "node-a", "node-b", "node-c"
MAJORITY = durability(DurabilityLevel.MAJORITY)
REPLICA_FLAGS = OpenFlags.PRODUCER | OpenFlags.INCLUDE_XATTRS | OpenFlags.INCLUDE_DELETE_TIMES


def set_topology(world: World, *chains: list[str | None], state: VBucketState = VBucketState.ACTIVE) -> None:
    """Set the nodes that have copies of the vbucket, as the cluster does."""
    value = json.dumps({"topology": chains or None}).encode()
    writer(world).succeed(SetVBucket(vbucket=VBUCKET, state=state, value=value))


def writer(world: World, *features: Feature) -> Client:
    return world.node.client(features=(*COLLECTIONS, *features))


def durable_set(key: str = "k", value: bytes = b"1", *, info: Any = MAJORITY, **fields: Any) -> Set:
    return Set(
        vbucket=VBUCKET, collection_id=DEFAULT_COLLECTION, key=key.encode(), value=value, frame_infos=(info,), **fields
    )


def plain(kind: type[Any], key: str = "k", **fields: Any) -> Any:
    return kind(vbucket=VBUCKET, collection_id=DEFAULT_COLLECTION, key=key.encode(), **fields)


def value_of(world: World, key: str = "k") -> bytes | None:
    """Return what a reader gets."""
    answer: Any = writer(world).call(plain(Get, key))
    return answer.value if answer.status == Status.SUCCESS else None


def answers(client: Client) -> list[Response]:
    """Return what a client has received so far. Decisions are made durable first."""
    client.node.commit()
    client.send(b"")
    return client.received()


def statuses(client: Client) -> list[str]:
    return [answer.status.name for answer in answers(client)]


class PlayedReplica:
    """A consumer that takes part in durable writes and acknowledges when a test says so."""

    def __init__(self, world: World, name: str = REPLICA, **controls: str) -> None:
        self.world = world
        given = {"enable_sync_writes": "true", "consumer_name": name, **controls}
        self.consumer: Consumer = world.consumer(flags=REPLICA_FLAGS, features=COLLECTIONS, name=f"to-{name}", **given)

    def open(self, **fields: Any) -> list[str]:
        return self.consumer.stream(**fields)

    def brief(self) -> list[str]:
        """Make everything durable, and return what the consumer then receives."""
        self.world.commit()
        return self.consumer.brief()

    def acknowledge(self, seqno: int, vbucket: int = VBUCKET) -> None:
        self.consumer.send(SeqnoAcknowledged(vbucket=VBucketId(vbucket), prepared_seqno=Seqno(seqno)))


def tick(world: World, seconds: float = 0) -> None:
    """Let time pass, and let the node react to it."""
    world.node.clock.advance(seconds)
    world.node.bucket_service.sync_writes.tick(world.node.service.now_s())
    world.commit()
