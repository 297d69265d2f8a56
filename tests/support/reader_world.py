"""A cluster in memory for tests of the reader: nodes that speak the protocol, with failovers, moves, cuts and a clock.

The nodes are built only from the protocol package, and share no code with the client. They deduplicate, demand
rollbacks, obey flow control, send their streams in turns, and refuse vbuckets that are on other nodes. One random
generator decides everything, so that a seed replays a run.
"""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.handshake import ClientHandshake
from headwater.client.links import SCOUT, CloseConnection, DcpLink, DcpOpening, OpenConnection, PooledLink
from headwater.client.pieces import ChangeRun, Piece, RollbackPiece
from headwater.client.read_options import ReadOptions, Snapshots
from headwater.client.reader import Reader, ReaderEnvironment
from headwater.errors import ConnectionFailed
from headwater.protocol.consumer import DcpControl
from headwater.protocol.failover_log import ConsumerPoint, FailoverLog, decide_rollback
from headwater.protocol.features import WITH_COLLECTIONS, Feature, Opcode
from headwater.protocol.flow_control import counted_bytes
from headwater.protocol.frames import FrameBuffer, decode_frames
from headwater.protocol.messages import ErrorResponse, PlainResponse, Request, Response, dcp_streams, decode_message
from headwater.protocol.messages.dcp_changes import Deletion, Mutation, SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.session import GetClusterConfig, Hello, HelloResponse
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse, VBucketSeqno
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status

KEYS = [f"key{number}".encode() for number in range(6)]


@dataclass
class VBucket:
    """`history[n]` is the change with seqno n+1: a key and its value, None for a deletion."""

    history: list[tuple[bytes, bytes | None]]
    log: FailoverLog
    node: int
    cas: dict[int, int] = field(default_factory=dict)
    """By seqno, if the test needs it."""
    purge_seqno: Seqno = Seqno(0)

    @property
    def high(self) -> Seqno:
        return Seqno(len(self.history))

    def contents(self) -> dict[bytes, bytes]:
        return {key: value for key, value in dict(self.history).items() if value is not None}


@dataclass
class Stream:
    """One stream of one connection. Its pending frames are made when a snapshot begins."""

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
        """Make a copy active that lacks the newest changes of a vbucket, on another node or the same."""
        vbucket = self.rng.choice(self.vbuckets)
        del vbucket.history[max(0, len(vbucket.history) - self.rng.choice([0, 1, 2, 5, 20])) :]
        self._move(vbucket, dcp_streams.StreamEndReason.STATE_CHANGED)

    def rebalance(self) -> None:
        self._move(self.rng.choice(self.vbuckets), dcp_streams.StreamEndReason.STATE_CHANGED)

    def orphan(self) -> None:
        """Leave a vbucket without a node, until it is moved or `calm_down` is called."""
        self._move(self.rng.choice(self.vbuckets), dcp_streams.StreamEndReason.STATE_CHANGED, to=-1)

    def _move(self, vbucket: VBucket, reason: dcp_streams.StreamEndReason, to: int | None = None) -> None:
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
                self._move(vbucket, dcp_streams.StreamEndReason.STATE_CHANGED)

    # --- its config -----------------------------------------------------------------------------------------------

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
            case dcp_streams.BufferAck():
                self.unacked_bytes -= request.acked_bytes
            case dcp_streams.Control():
                if request.key == b"connection_buffer_size":
                    self._window_bytes = int(request.value)
                yield self._ok(request)
            case dcp_streams.DcpNoop():
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
            case dcp_streams.GetFailoverLog() | dcp_streams.StreamRequest() if self._vbucket(request).node != self.node:
                return ErrorResponse(opcode=Opcode(request.opcode), opaque=request.opaque, status=Status.NOT_MY_VBUCKET)
            case dcp_streams.GetFailoverLog():
                return dcp_streams.GetFailoverLogResponse(
                    opaque=request.opaque, failover_log=self._vbucket(request).log.entries
                )
            case dcp_streams.StreamRequest():
                return self._open_stream(request)
            case dcp_streams.CloseStream():
                self.streams = {
                    opaque: stream for opaque, stream in self.streams.items() if stream.vbucket != request.vbucket
                }
        return self._ok(request)

    def _vbucket(self, request: Request) -> VBucket:
        return self.cluster.vbuckets[request.vbucket]

    def _ok(self, request: Request, value: bytes = b"") -> Response:
        return PlainResponse(opcode=Opcode(request.opcode), opaque=request.opaque, value=value)

    def _open_stream(self, request: dcp_streams.StreamRequest) -> Response:
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
            purge_seqno=vbucket.purge_seqno,
        )
        if rollback is not None:
            return dcp_streams.StreamRequestResponse(
                opaque=request.opaque, status=Status.ROLLBACK, rollback_seqno=rollback.to_seqno
            )
        self.streams[request.opaque] = Stream(
            request.vbucket, request.opaque, request.start_seqno, request.end_seqno, vbucket.log
        )
        return dcp_streams.StreamRequestResponse(opaque=request.opaque, failover_log=vbucket.log.entries)

    def end_stream(self, vbucket: VBucketId, reason: dcp_streams.StreamEndReason) -> None:
        for opaque, stream in list(self.streams.items()):
            if stream.vbucket == vbucket:
                # The unsent rest of the snapshot is lost with the stream.
                self.outbox += dcp_streams.StreamEnd(vbucket=vbucket, opaque=opaque, reason=reason).encode()
                del self.streams[opaque]

    def pump(self) -> None:
        """Send a little from one stream after the other, while there is room."""
        streams = list(self.streams.values())
        self.cluster.rng.shuffle(streams)
        for stream in streams:
            if not stream.pending and stream.position >= stream.end:
                self.end_stream(stream.vbucket, dcp_streams.StreamEndReason.OK)
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
            parts["cas"] = Cas(vbucket.cas.get(seqno, 0))
            kind = Deletion if value is None else Mutation
            stream.pending.append(kind(**parts, key=key, value=value or b"", collection_id=CollectionId(0)).encode())


# A reader, a cluster in memory and a caller, with the wires between them and a clock that is moved by hand.


VBUCKETS = 6


class Consumer:
    """A caller's state after all pieces: the rows that no rollback took back."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[int, tuple[bytes, bytes | None]]] = {vbucket: {} for vbucket in range(VBUCKETS)}
        self.rollbacks = 0

    def take(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            rows = self.rows[piece.vbucket]
            if isinstance(piece, RollbackPiece):
                assert max(rows, default=0) > piece.seqno, "a rollback takes something back"
                self.rows[piece.vbucket] = {seqno: row for seqno, row in rows.items() if seqno <= piece.seqno}
                self.rollbacks += 1
            else:
                assert isinstance(piece, ChangeRun)
                self._take_run(piece, rows)

    def _take_run(self, run: ChangeRun, rows: dict[int, tuple[bytes, bytes | None]]) -> None:
        for frame in decode_frames(bytes(run.data)):
            message = decode_message(frame, WITH_COLLECTIONS)
            assert isinstance(message, Mutation | Deletion)
            assert message.vbucket == run.vbucket
            assert max(rows, default=0) < message.seqno <= run.snapshot_end, "seqnos rise, inside the snapshot"
            rows[message.seqno] = (message.key, None if isinstance(message, Deletion) else message.value)

    def contents(self, vbucket: int) -> dict[bytes, bytes]:
        newest = dict(row for _, row in sorted(self.rows[vbucket].items()))
        return {key: value for key, value in newest.items() if value is not None}


class Run:
    """A reader, its cluster, and the wires between them."""

    def __init__(self, seed: int, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.cluster = Cluster(self.rng, nodes=self.rng.randint(1, 4), vbuckets=VBUCKETS)
        self.now_s = 0.0
        self.may_fail = False
        self.wires: dict[int, Connection] = {}
        self.consumer = Consumer()
        self.files: list[BinaryIO] = []
        """All files that the reader has ever opened."""
        self.options = ReadOptions(
            snapshots=self.rng.choice(list(Snapshots)),
            buffer_bytes=self.rng.choice([1024, 4096, 1 << 20]),
            held_bytes_max=self.rng.choice([0, 1 << 20]),
            batch_bytes=self.rng.choice([1, 200, 1 << 20]),
            connections_per_node=self.rng.randint(1, 2),
            give_up_after_s=None,
        )
        self.options = replace(self.options, **options)
        self.reader = self.new_reader({VBucketId(vbucket): StreamOffset() for vbucket in range(VBUCKETS)})

    def new_reader(self, offsets: dict[VBucketId, StreamOffset], *, from_now: bool = False) -> Reader:
        return Reader(
            self.options,
            cluster_map=self.decode_map(self.cluster.config()),
            seeds=(self.cluster.nodes[0],),
            offsets=offsets,
            from_now=from_now,
            stream_flags=dcp_streams.StreamFlags(0),
            stream_value=None,
            environment=ReaderEnvironment(
                new_link=self.new_link,
                decode_map=lambda config, _: self.decode_map(config),
                open_spool=self.open_file,
                random=self.rng.random,
            ),
            now_s=self.now_s,
        )

    def open_file(self) -> BinaryIO:
        self.files.append(io.BytesIO())
        return self.files[-1]

    def decode_map(self, config: bytes) -> ClusterMap:
        return ClusterMap.decode(config, asked=self.cluster.nodes[0])

    def new_link(self, slot: PooledLink, is_loopback: bool, now_s: float) -> DcpLink:
        opening = DcpOpening(
            name=f"test:{slot.id}",
            flags=dcp_streams.OpenFlags.PRODUCER,
            controls=(
                DcpControl(key="enable_noop", value="true"),
                DcpControl(key="connection_buffer_size", value=str(self.options.buffer_bytes)),
            ),
            buffer_bytes=self.options.buffer_bytes,
            noop_interval_s=1000,
        )
        handshake = ClientHandshake(credentials=None, bucket="travel", nonce=b"")
        return DcpLink(handshake, None if slot.lane == SCOUT else opening, now_s=now_s)

    # --- time and wires -------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Let time pass: some bytes travel, and the caller may take something."""
        self.now_s += self.rng.choice([0.01, 0.1, 0.5])
        self.reader.tick(self.now_s)
        self.obey()
        for connection in self.wires.values():
            connection.pump()
        for link, connection in list(self.wires.items()):
            count = len(connection.outbox) if self.rng.random() < 0.5 else self.rng.randint(0, len(connection.outbox))
            self.deliver(link, connection, count)
        if self.rng.random() < 0.7:
            self.consumer.take(self.reader.take())
        assert self.may_fail or self.reader.failure is None

    def obey(self) -> None:
        for command in self.reader.commands():
            match command:
                case OpenConnection(id=link, address=address):
                    self._connect(link, self.cluster.nodes.index(address))
                case CloseConnection(id=link):
                    self._hang_up(link)
        for link, data in self.reader.data_to_send():
            if link in self.wires:
                self.wires[link].receive_data(data)

    def _connect(self, link: int, node: int) -> None:
        if not self.cluster.is_up[node]:
            self.reader.on_lost(link, ConnectionFailed("nobody is there"), now_s=self.now_s)
            return
        self.wires[link] = Connection(self.cluster, node)
        self.cluster.connections.append(self.wires[link])
        self.reader.on_connected(link, is_loopback=True, now_s=self.now_s)

    def _hang_up(self, link: int) -> None:
        connection = self.wires.pop(link, None)
        if connection is not None:
            self.cluster.connections.remove(connection)

    def deliver(self, link: int, connection: Connection, count: int) -> None:
        """Let this many bytes arrive at the reader. A cut connection ends after them."""
        data = bytes(connection.outbox[:count])
        del connection.outbox[:count]
        while data:
            buffer = self.reader.receive_buffer(link)
            if buffer is None:
                return
            part = data[: len(buffer)]
            buffer[: len(part)] = part
            self.reader.received(link, len(part), now_s=self.now_s)
            data = data[len(part) :]
        if connection.is_cut and link in self.wires:
            self._hang_up(link)
            self.reader.on_lost(link, None, now_s=self.now_s)

    # --- the whole run --------------------------------------------------------------------------------------------

    def disturb(self) -> None:
        events = [self.cluster.write] * 12 + [self.cluster.fail_over, self.cluster.rebalance, self.cluster.cut]
        events += [self.cluster.orphan, self._leave_and_follow]
        events += [self.cluster.toggle_node, self.restart] if self.rng.random() < 0.3 else []
        self.rng.choice(events)()

    def _leave_and_follow(self) -> None:
        """Drop and follow a vbucket again, as if a group's member lost and regained it."""
        vbucket = VBucketId(self.rng.randrange(VBUCKETS))
        place = self.reader.offsets[vbucket]
        self.reader.close_vbuckets([vbucket])
        self.reader.follow({vbucket: place}, now_s=self.now_s)

    def restart(self) -> None:
        """Restart the consumer from the offsets it has saved with its rows."""
        for link in list(self.wires):
            self._hang_up(link)
        self.reader.close()
        self.reader = self.new_reader(self.reader.offsets)

    def settle(self) -> None:
        self.cluster.calm_down()
        for _ in range(600):
            self.step()
            if self._is_settled():
                return
        raise AssertionError("the reader does not come to rest")

    def _is_settled(self) -> bool:
        offsets = self.reader.offsets
        return not self.reader.has_pieces and all(
            (offsets[VBucketId(number)].seqno, offsets[VBucketId(number)].vbuuid)
            == (vbucket.high, vbucket.log.newest.vbuuid)
            for number, vbucket in enumerate(self.cluster.vbuckets)
        )

    def check(self) -> None:
        for number, vbucket in enumerate(self.cluster.vbuckets):
            assert self.consumer.contents(number) == vbucket.contents(), f"vbucket {number}"
        for link, connection in list(self.wires.items()):
            self.deliver(link, connection, len(connection.outbox))
        self.obey()
        for connection in self.wires.values():
            assert connection.unacked_bytes * 5 <= self.options.buffer_bytes, "all that was taken is acknowledged"
        assert (self.reader.metrics.ready_bytes, self.reader.metrics.held_bytes) == (0, 0)
        self.reader.close()
        assert all(file.closed for file in self.files), "no file is left open"


# A run of a reader with one node, controlled by hand: what is sent, what arrives, and when.


_ONE_NODE = 2
"""A seed whose cluster has one node."""


def run_of_one_node(**options: Any) -> Run:
    """Return a run in which every change is a separate batch. The clock stands still, so nothing is polled."""
    run = Run(_ONE_NODE, **{"snapshots": Snapshots.COMPLETE, "connections_per_node": 1, "batch_bytes": 1, **options})
    assert len(run.cluster.nodes) == 1
    return run


def ask(run: Run) -> None:
    """Let the reader send its requests; the nodes' answers wait on the wire."""
    run.reader.tick(run.now_s)
    run.obey()


def arrive(run: Run) -> None:
    """Let everything on the wires arrive, and let the reader send the requests that follow."""
    for link, connection in list(run.wires.items()):
        run.deliver(link, connection, len(connection.outbox))
    run.obey()


def connect(run: Run) -> Connection:
    """Proceed to the first request about vbuckets or streams, whose answer is on the wire."""
    ask(run)
    arrive(run)  # HELLO
    arrive(run)  # the rest of the handshake
    arrive(run)  # open and controls
    return next(iter(run.wires.values()))
