"""A cluster in memory for tests of the reader: nodes that speak the protocol, with failovers, moves, cuts and a clock.

The nodes are made of the protocol package alone and share no code with the client. They deduplicate, demand rollbacks,
obey flow control, send their streams in turns, and know vbuckets that are elsewhere. One random generator decides
everything, so that a seed replays a run.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from headwater.client.connection_string import Address
from headwater.protocol.failover_log import ConsumerPoint, FailoverLog, decide_rollback
from headwater.protocol.features import WITH_COLLECTIONS, Feature, Opcode
from headwater.protocol.flow_control import counted_bytes
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import ErrorResponse, PlainResponse, Request, Response, decode_message
from headwater.protocol.messages.dcp_changes import Deletion, Mutation, SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import (
    BufferAck,
    CloseStream,
    Control,
    DcpNoop,
    GetFailoverLog,
    GetFailoverLogResponse,
    StreamEnd,
    StreamEndReason,
    StreamRequest,
    StreamRequestResponse,
)
from headwater.protocol.messages.session import GetClusterConfig, Hello, HelloResponse
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse, VBucketSeqno
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.status import Status

KEYS = [f"key{number}".encode() for number in range(6)]


@dataclass
class VBucket:
    """`history[n]` is what seqno n+1 did: a key and its value, None for a deletion."""

    history: list[tuple[bytes, bytes | None]]
    log: FailoverLog
    node: int

    @property
    def high(self) -> Seqno:
        return Seqno(len(self.history))

    def contents(self) -> dict[bytes, bytes]:
        return {key: value for key, value in dict(self.history).items() if value is not None}


@dataclass
class Stream:
    """One stream of one connection. What it still has to send of its snapshot is made when the snapshot begins."""

    vbucket: VBucketId
    opaque: int
    position: Seqno
    end: int
    log: FailoverLog
    is_first: bool = True
    pending: list[bytes] = field(default_factory=list)


class Cluster:
    def __init__(self, rng: random.Random, *, nodes: int, vbuckets: int) -> None:
        self.rng = rng
        self.nodes = [Address("node", 1000 + number) for number in range(nodes)]
        self.is_up = [True] * nodes
        self.revision = 1
        self.versions = 0
        self.vbuuids = 100
        self.vbuckets = [
            VBucket([], FailoverLog.start(Vbuuid(vbucket + 1)), vbucket % nodes) for vbucket in range(vbuckets)
        ]
        self.connections: list[Connection] = []

    # --- what happens to it ---------------------------------------------------------------------------------------

    def write(self) -> None:
        self.versions += 1
        value = None if self.rng.random() < 0.2 else b"v%d" % self.versions
        self.rng.choice(self.vbuckets).history.append((self.rng.choice(KEYS), value))

    def fail_over(self) -> None:
        """A vbucket's copy that lacks the newest changes becomes active, on another node or on the same."""
        vbucket = self.rng.choice(self.vbuckets)
        del vbucket.history[max(0, len(vbucket.history) - self.rng.choice([0, 1, 2, 5, 20])) :]
        self._move(vbucket, StreamEndReason.STATE_CHANGED)

    def rebalance(self) -> None:
        self._move(self.rng.choice(self.vbuckets), StreamEndReason.STATE_CHANGED)

    def orphan(self) -> None:
        """A vbucket is with nobody, until it is moved or things are calm."""
        self._move(self.rng.choice(self.vbuckets), StreamEndReason.STATE_CHANGED, to=-1)

    def _move(self, vbucket: VBucket, reason: StreamEndReason, to: int | None = None) -> None:
        self.vbuuids += 1
        vbucket.log = vbucket.log.branch(Vbuuid(self.vbuuids), at_seqno=vbucket.high)
        number = VBucketId(self.vbuckets.index(vbucket))
        for connection in self.connections:
            connection.end_stream(number, reason)
        vbucket.node = self.rng.randrange(len(self.nodes)) if to is None else to
        self.revision += 1

    def cut(self) -> None:
        if self.connections:
            self.rng.choice(self.connections).is_cut = True

    def toggle_node(self) -> None:
        node = self.rng.randrange(len(self.nodes))
        self.is_up[node] = not self.is_up[node]
        for connection in self.connections:
            if connection.node == node:
                connection.is_cut = True

    def calm_down(self) -> None:
        self.is_up = [True] * len(self.nodes)
        for vbucket in self.vbuckets:
            if vbucket.node < 0:
                self._move(vbucket, StreamEndReason.STATE_CHANGED)

    # --- what it says ---------------------------------------------------------------------------------------------

    def config(self) -> bytes:
        servers = [f"{address.host}:{address.port}" for address in self.nodes]
        vbucket_map = [[vbucket.node] for vbucket in self.vbuckets]
        return json.dumps(
            {
                "rev": self.revision,
                "name": "travel",
                "uuid": "the bucket",
                "vBucketServerMap": {"serverList": servers, "vBucketMap": vbucket_map},
            }
        ).encode()


class Connection:
    """The node's end of one connection."""

    def __init__(self, cluster: Cluster, node: int) -> None:
        self.cluster = cluster
        self.node = node
        self.is_cut = False
        self.outbox = bytearray()
        self.asked: Counter[type[Request]] = Counter()
        self.streams: dict[int, Stream] = {}
        self._frames = FrameBuffer()
        self._window_bytes = 0
        self.unacked_bytes = 0

    def receive_data(self, data: bytes) -> None:
        self._frames.receive_data(data)
        for frame in self._frames.frames():
            message = decode_message(frame, WITH_COLLECTIONS)
            if isinstance(message, Request):
                self.asked[type(message)] += 1
                for answer in self._answers(message):
                    self.outbox += answer.encode()

    def _answers(self, request: Request) -> Iterator[Response]:
        match request:
            case Hello():
                yield HelloResponse(opaque=request.opaque, features=(Feature.COLLECTIONS,))
            case GetClusterConfig():
                yield self._ok(request, self.cluster.config())
            case BufferAck():
                self.unacked_bytes -= request.acked_bytes
            case Control():
                if request.key == b"connection_buffer_size":
                    self._window_bytes = int(request.value)
                yield self._ok(request)
            case DcpNoop():
                pass
            case _:
                yield self._vbucket_answer(request)

    def _vbucket_answer(self, request: Request) -> Response:
        match request:
            case GetAllVbSeqnos():
                seqnos = tuple(
                    VBucketSeqno(vbucket=VBucketId(number), seqno=vbucket.high)
                    for number, vbucket in enumerate(self.cluster.vbuckets)
                    if vbucket.node == self.node
                )
                return GetAllVbSeqnosResponse(opaque=request.opaque, seqnos=seqnos)
            case GetFailoverLog() | StreamRequest() if self._vbucket(request).node != self.node:
                return ErrorResponse(opcode=Opcode(request.opcode), opaque=request.opaque, status=Status.NOT_MY_VBUCKET)
            case GetFailoverLog():
                return GetFailoverLogResponse(opaque=request.opaque, failover_log=self._vbucket(request).log.entries)
            case StreamRequest():
                return self._open_stream(request)
            case CloseStream():
                self.streams = {
                    opaque: stream for opaque, stream in self.streams.items() if stream.vbucket != request.vbucket
                }
        return self._ok(request)

    def _vbucket(self, request: Request) -> VBucket:
        return self.cluster.vbuckets[request.vbucket]

    def _ok(self, request: Request, value: bytes = b"") -> Response:
        return PlainResponse(opcode=Opcode(request.opcode), opaque=request.opaque, value=value)

    def _open_stream(self, request: StreamRequest) -> Response:
        vbucket = self._vbucket(request)
        assert request.vbucket not in {stream.vbucket for stream in self.streams.values()}, "a stream twice"
        rollback = decide_rollback(
            ConsumerPoint(
                vbuuid=request.vbuuid,
                start_seqno=request.start_seqno,
                snapshot_start_seqno=request.snapshot_start_seqno,
                snapshot_end_seqno=request.snapshot_end_seqno,
            ),
            failover_log=vbucket.log,
            high_seqno=vbucket.high,
            purge_seqno=Seqno(0),
        )
        if rollback is not None:
            return StreamRequestResponse(
                opaque=request.opaque, status=Status.ROLLBACK, rollback_seqno=rollback.to_seqno
            )
        self.streams[request.opaque] = Stream(
            request.vbucket, request.opaque, request.start_seqno, request.end_seqno, vbucket.log
        )
        return StreamRequestResponse(opaque=request.opaque, failover_log=vbucket.log.entries)

    def end_stream(self, vbucket: VBucketId, reason: StreamEndReason) -> None:
        for opaque, stream in list(self.streams.items()):
            if stream.vbucket == vbucket:
                # What was promised of the snapshot is lost with the stream.
                self.outbox += StreamEnd(vbucket=vbucket, opaque=opaque, reason=reason).encode()
                del self.streams[opaque]

    def pump(self) -> None:
        """Send a little, of one stream after the other, while there is room."""
        streams = list(self.streams.values())
        self.cluster.rng.shuffle(streams)
        for stream in streams:
            if not stream.pending and stream.position >= stream.end:
                self.end_stream(stream.vbucket, StreamEndReason.OK)
                continue
            if not stream.pending:
                self._begin_snapshot(stream)
            for _ in range(self.cluster.rng.randint(1, 3)):
                if stream.pending and self.unacked_bytes < self._window_bytes:
                    frame = stream.pending.pop(0)
                    self.unacked_bytes += counted_bytes(frame[1], len(frame))
                    self.outbox += frame

    def _begin_snapshot(self, stream: Stream) -> None:
        vbucket = self.cluster.vbuckets[stream.vbucket]
        newest = {key: seqno for seqno, (key, _) in enumerate(vbucket.history, 1) if seqno > stream.position}
        if not newest:
            return
        start = stream.position if stream.is_first else stream.position + 1
        marker = SnapshotMarker(
            vbucket=stream.vbucket,
            opaque=stream.opaque,
            start_seqno=Seqno(start),
            end_seqno=vbucket.high,
            flags=SnapshotFlags.MEMORY,
        )
        stream.is_first = False
        stream.position = vbucket.high
        stream.pending = [marker.encode()]
        for seqno in sorted(newest.values()):
            key, value = vbucket.history[seqno - 1]
            parts = {"vbucket": stream.vbucket, "opaque": stream.opaque, "seqno": Seqno(seqno), "rev_seqno": 1}
            kind = Deletion if value is None else Mutation
            stream.pending.append(kind(**parts, key=key, value=value or b"", collection_id=CollectionId(0)).encode())
