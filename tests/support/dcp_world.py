"""A bucket on a real engine, and DCP consumers of it, without sockets and with a stopped clock.

Changes go directly into the bucket, and nothing is durable, settled or compacted unless a test says so. A consumer
exchanges bytes: it encodes what it sends, and decodes what it receives with the negotiated features. `brief`
formats messages as short lines, so that a test can list what a consumer must see.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwater.node.kv.context import CloseSession
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.features import Feature, Negotiated, Opcode
from headwater.protocol.frames import Frame, decode_frames, stream_id
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import dcp_streams, decode_message
from headwater.protocol.messages.base import ErrorResponse, Message, Request, Response
from headwater.protocol.messages.dcp_changes import (
    Abort,
    Commit,
    Deletion,
    Expiration,
    Mutation,
    OsoSnapshot,
    Prepare,
    SeqnoAdvanced,
    SnapshotMarker,
    SystemEvent,
)
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import DIALECTS
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from headwater.store.compaction import compact_vbucket, finish_compaction
from headwater.store.settling import settle_now
from headwater.store.vbuckets import Retention
from support.kv_harness import FEATURES, WITH_COLLECTIONS, Client, Node, drive

VBUCKET = VBucketId(0)
OPAQUE = 0x1000
PUMPS_MAX = 10_000
"""Far more than any test needs: a stream that does not become idle fails instead of hanging."""

PLAIN = FEATURES
"""HELLO of a consumer without support for collections."""
COLLECTIONS = WITH_COLLECTIONS
NO_XERROR = tuple(feature for feature in FEATURES if feature is not Feature.XERROR)

KEEP_NOTHING = Retention(history_s=0, history_bytes=0, purge_age_s=3 * 24 * 3600)
"""Superseded versions are removed immediately; deletions stay."""
PURGE_ALL = Retention(history_s=0, history_bytes=0, purge_age_s=0)


class World:
    """One node, its bucket, and what happens to it."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder)
        self.consumers = 0

    def close(self) -> None:
        self.node.close()

    def speak_as(self, version: str) -> None:
        """From now on, answer like this version of Couchbase. The default is the newest."""
        self.node.service.dialect = DIALECTS[version]

    @property
    def bucket(self) -> Bucket:
        return self.node.bucket

    # --- changes --------------------------------------------------------------------------------------------------

    def put(
        self,
        *keys: str,
        value: bytes = b'{"a":1}',
        datatype: Datatype = Datatype.JSON,
        collection: int = DEFAULT_COLLECTION,
        vbucket: int = VBUCKET,
        expiry: int = 0,
    ) -> None:
        """Write documents, one after the other. They are not durable yet."""
        for key in keys:
            self.bucket.put_mutation(
                vbucket,
                collection_id=CollectionId(collection),
                key=key.encode(),
                value=value,
                datatype=datatype,
                expiry=expiry,
            )

    def remove(
        self,
        key: str,
        *,
        expired: bool = False,
        value: bytes = b"",
        datatype: Datatype = Datatype.RAW,
        collection: int = DEFAULT_COLLECTION,
    ) -> None:
        self.bucket.put_removal(
            VBUCKET,
            collection_id=CollectionId(collection),
            key=key.encode(),
            expired=expired,
            value=value,
            datatype=datatype,
        )

    def write(self, *keys: str, **how: Any) -> None:
        """Write documents and make them durable. They are still in memory."""
        self.put(*keys, **how)
        self.commit()

    def store(self, *keys: str, **how: Any) -> None:
        """Write documents, make them durable and settle them on disk."""
        self.write(*keys, **how)
        self.settle()

    def commit(self) -> None:
        self.bucket.commit_now()

    def settle(self) -> None:
        """Settle everything durable, so that it is only on disk."""
        self.commit()
        settle_now(self.bucket)

    def compact(self, retention: Retention = KEEP_NOTHING, vbucket: int = VBUCKET) -> None:
        """Compact a vbucket, as if everything in it were old."""
        self.settle()
        self.node.clock.advance(1)
        compacted = compact_vbucket(self.bucket, vbucket, retention)
        self.bucket.engine.write(compacted.changes)
        finish_compaction(self.bucket, vbucket, compacted)

    def set_state(self, state: dcp_streams.VBucketState, vbucket: int = VBUCKET) -> None:
        self.bucket.set_vbucket_state(vbucket, state)
        self.commit()

    def set_failover_log(self, log: FailoverLog, vbucket: int = VBUCKET) -> None:
        """Give a vbucket a failover log."""
        facts = self.bucket.vbuckets.facts[vbucket]
        assert facts is not None
        self.bucket.set_vbucket_facts(vbucket, replace(facts, failover_log=log))
        self.commit()

    def set_manifest(self, manifest: Manifest) -> Manifest:
        self.node.set_manifest(manifest)
        return manifest

    # --- its state ------------------------------------------------------------------------------------------------

    def vbuuid(self, vbucket: int = VBUCKET) -> Vbuuid:
        return Vbuuid(int(self.bucket.vbuckets.vbuuids[vbucket]))

    def high_seqno(self, vbucket: int = VBUCKET) -> int:
        return int(self.bucket.vbuckets.high_seqnos[vbucket])

    def purge_seqno(self, vbucket: int = VBUCKET) -> int:
        facts = self.bucket.vbuckets.facts[vbucket]
        return facts.purge_seqno

    # --- consumers ------------------------------------------------------------------------------------------------

    def connection(self, features: tuple[Feature, ...] = PLAIN) -> Consumer:
        """Return a connection that has logged in but is not a DCP connection yet."""
        client = self.node.client(features=features)
        return Consumer(self, client)

    def consumer(
        self,
        *,
        flags: dcp_streams.OpenFlags = dcp_streams.OpenFlags.PRODUCER,
        features: tuple[Feature, ...] = PLAIN,
        name: str | None = None,
        **controls: str,
    ) -> Consumer:
        """Return a consumer that has opened its connection and set its controls, with noops if streams need them."""
        consumer = self.connection(features)
        self.consumers += 1
        consumer.succeed(dcp_streams.Open(flags=flags, key=(name or f"consumer-{self.consumers}").encode()))
        if Feature.COLLECTIONS in features or dcp_streams.OpenFlags.INCLUDE_XATTRS in flags:
            controls = {"enable_noop": "true", **controls}
        for key, value in controls.items():
            consumer.control(key, value)
        return consumer


class Consumer:
    """The far end of a connection."""

    def __init__(self, world: World, client: Client) -> None:
        self.world = world
        self.session = client.session
        self.negotiated: Negotiated = client.negotiated
        self.is_closed = False
        """Whether the node has closed the connection."""
        client.on_replaced = self._on_replaced

    def _on_replaced(self) -> None:
        self.is_closed = True
        self.session.disconnected()

    # --- bytes ----------------------------------------------------------------------------------------------------

    def send(self, *requests: Request | Response | bytes) -> None:
        """Send messages in one write. Sets `is_closed` if the node closes the connection because of them."""
        data = b"".join(request if isinstance(request, bytes) else request.encode() for request in requests)
        try:
            drive(self.session, data)
        except CloseSession:
            self.is_closed = True

    def frames(self, bytes_max: int = 1 << 20) -> list[Frame]:
        """Return everything the node sends now: answers first, then the streams until they are idle."""
        data = bytearray()
        while piece := self.session.data_to_send():
            data += piece
        for _ in range(PUMPS_MAX):
            produced = self.session.dcp.produce(bytes_max) if self.session.dcp and not self.is_closed else b""
            data += produced
            if not produced:
                return list(decode_frames(bytes(data)))
        raise AssertionError("the streams do not come to rest")

    def step(self, bytes_max: int = 1) -> list[Message]:
        """Return one turn of the streams, which produces a frame or two for such a small limit."""
        return self.decode(list(decode_frames(self.session.dcp.produce(bytes_max))))

    def decode(self, frames: Iterable[Frame]) -> list[Message]:
        return [decode_message(frame, self.negotiated) for frame in frames]

    # --- messages -------------------------------------------------------------------------------------------------

    def received(self) -> list[Message]:
        return self.decode(self.frames())

    def call(self, request: Request | bytes) -> Response:
        """Send a request and return its answer, which arrives before anything else."""
        self.send(request)
        self.world.commit()
        answer = self.decode(decode_frames(self.session.data_to_send()))[0]
        assert isinstance(answer, Response)
        return answer

    def succeed(self, request: Request) -> Any:
        answer = self.call(request)
        assert not isinstance(answer, ErrorResponse), (answer.status.name, answer.context)
        return answer

    def refused(self, request: Request | bytes) -> Status:
        answer = self.call(request)
        assert answer.status != Status.SUCCESS, answer
        return answer.status

    def control(self, key: str, value: str) -> None:
        self.succeed(dcp_streams.Control(key=key.encode(), value=value.encode()))

    def request(self, **fields: Any) -> Response:
        """Send a stream request and return its answer. The default is everything of vbucket 0, without an end."""
        return self.call(stream_request(**fields))

    def open(self, **fields: Any) -> dcp_streams.StreamRequestResponse:
        """Open a stream."""
        answer = self.request(**fields)
        assert isinstance(answer, dcp_streams.StreamRequestResponse), answer
        assert answer.status == Status.SUCCESS, answer
        return answer

    def stream(self, **fields: Any) -> list[str]:
        """Open a stream, and return what it sends until it is idle, in brief."""
        self.open(**fields)
        return self.brief()

    def brief(self) -> list[str]:
        return brief(self.received())

    def close_stream(self, *, vbucket: int = VBUCKET, sid: int | None = None) -> Status:
        infos = () if sid is None else (stream_id(sid),)
        return self.call(dcp_streams.CloseStream(vbucket=VBucketId(vbucket), opaque=OPAQUE, frame_infos=infos)).status

    def ack(self, acked_bytes: int) -> None:
        self.send(dcp_streams.BufferAck(acked_bytes=acked_bytes))

    def answer(self, request: Message, opcode: Opcode) -> None:
        """Answer a request of the node with success."""
        self.send(b"\x81" + bytes([opcode]) + bytes(10) + request.opaque.to_bytes(4) + bytes(8))

    def tick(self) -> list[Message]:
        """Return what the node sends because of the time."""
        self.session.tick(self.world.node.service.now_s())
        return self.decode(decode_frames(self.session.data_to_send()))


def stream_request(**fields: Any) -> dcp_streams.StreamRequest:
    """Return a stream request. `start_seqno` implies a complete snapshot, unless the snapshot is given."""
    start = fields.get("start_seqno", 0)
    given = {"opaque": OPAQUE, "vbucket": VBUCKET, "snapshot_start_seqno": start, "snapshot_end_seqno": start}
    return dcp_streams.StreamRequest(**{**given, **fields})


def resume(world: World, seqno: int, **fields: Any) -> dict[str, Any]:
    """Return the stream request fields of a consumer that has everything up to a seqno."""
    return {"start_seqno": Seqno(seqno), "vbuuid": world.vbuuid(), **fields}


# --- formatting received messages ---------------------------------------------------------------------------------


def brief(messages: Iterable[Message]) -> list[str]:
    """Format messages as lines such as `marker 0..3`, `set a@1`, `remove a@2`, `end OK`."""
    return [_line(message) for message in messages]


def _line(message: Message) -> str:
    if isinstance(message, SnapshotMarker):
        return f"marker {message.start_seqno}..{message.end_seqno}"
    if isinstance(message, Mutation | Deletion | Expiration):
        return f"{_VERBS[type(message)]} {_key(message)}@{message.seqno}"
    if isinstance(message, SystemEvent):
        return f"event {message.event.name}@{message.seqno}"
    line = _LINES.get(type(message))
    return type(message).__name__ if line is None else line(message)


_VERBS: dict[type[Message], str] = {Mutation: "set", Deletion: "remove", Expiration: "expire"}
_LINES: dict[type[Message], Any] = {
    SeqnoAdvanced: lambda message: f"advanced {message.seqno}",
    dcp_streams.StreamEnd: lambda message: f"end {message.reason.name}",
    dcp_streams.SetVBucketState: lambda message: f"state {message.state.name}",
    OsoSnapshot: lambda message: f"oso {message.flags.name}",
    dcp_streams.DcpNoop: lambda message: "noop",
    Prepare: lambda message: f"prepare {_key(message)}@{message.seqno}",
    Commit: lambda message: f"commit {_key(message)}@{message.commit_seqno} of {message.prepared_seqno}",
    Abort: lambda message: f"abort {_key(message)}@{message.abort_seqno} of {message.prepared_seqno}",
}


def _key(change: Mutation | Deletion | Expiration | Prepare | Commit | Abort) -> str:
    prefix = f"{change.collection_id:x}:" if change.collection_id else ""
    return prefix + change.key.decode()


def of_type(messages: Iterable[Message], kind: type[Any]) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


def changes(lines: Iterable[str]) -> list[str]:
    """Return only the changes of documents."""
    return [line for line in lines if line.split()[0] in _VERBS.values()]
