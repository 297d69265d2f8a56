"""The state of a DCP consumer after applying its streams, and checks of every frame.

The documents have numbers: `key::00000042` is number 42, and a value begins with the version that its writer gave
it. So the state of a consumer is a few arrays, and a kernel can apply a thousand streams to them at little cost. It
judges the producer, and shares no code with it or with the codec.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import struct
import time
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numba import njit

from headwater.client.kv_connection import FEATURES, KvConnection, Login
from headwater.protocol.features import Feature
from headwater.protocol.messages.dcp_streams import (
    BufferAck,
    Control,
    Open,
    StreamEndReason,
    StreamFlags,
    StreamRequest,
)
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.sasl import Credentials
from support.node_process import PASSWORD, USER, NodeProcess

KEY_PREFIX = b"key::"
NUMBER_DIGITS = 8
VERSION_DIGITS = 12
VALUE_BYTES = 1000
PADDING = ord("x")


def key_of(number: int) -> bytes:
    return KEY_PREFIX + b"%0*d" % (NUMBER_DIGITS, number)


def value_of(version: int) -> bytes:
    return (b"%0*d" % (VERSION_DIGITS, version)).ljust(VALUE_BYTES, b"x")


def vbucket_of(key: bytes, vbuckets: int) -> int:
    return (zlib.crc32(key) >> 16 & 0x7FFF) % vbuckets


class Fault(IntEnum):
    """What is wrong with a frame."""

    NONE = 0
    STATUS = 1
    """A request was refused."""
    NOT_OPEN = 2
    """A message for a stream that is not open."""
    UNKNOWN = 3
    """A frame that is not allowed in these streams."""
    MARKER_TOO_EARLY = 4
    """A snapshot begins before the last one has ended."""
    MARKER_GOES_BACK = 5
    SEQNO_NOT_RISING = 6
    OUTSIDE_SNAPSHOT = 7
    KEY_TWICE = 8
    """Two versions of a document in one snapshot."""
    WRONG_VBUCKET = 9
    DAMAGED = 10
    """A key, value or length that the writer can't have written."""


@dataclass(slots=True)
class CheckedStreams:
    """The streams of one connection, one per vbucket, and the documents that result from them."""

    vbucket_of_document: np.ndarray
    vbuckets: int
    streams: np.ndarray = field(init=False)
    """One row per vbucket; see the columns below."""
    documents: np.ndarray = field(init=False)
    """One row per document; see the columns below."""
    changes: int = 0
    deletions: int = 0
    snapshots: int = 0

    def __post_init__(self) -> None:
        self.streams = np.zeros((self.vbuckets, STREAM_COLUMNS), dtype=np.uint64)
        self.documents = np.zeros((len(self.vbucket_of_document), DOCUMENT_COLUMNS), dtype=np.uint64)

    def receive(self, data: np.ndarray) -> Received:
        """Apply all complete frames, or raise if one is wrong."""
        counts = np.zeros(COUNTS, dtype=np.int64)
        consumed, fault, at = _apply(data, self.streams, self.documents, self.vbucket_of_document, counts)
        if fault:
            frame = data[at : at + 96].tobytes().hex(" ")
            vbucket = int.from_bytes(data[at + 6 : at + 8].tobytes())
            stream = self.streams[vbucket].tolist() if vbucket < self.vbuckets else None
            raise AssertionError(f"{Fault(fault).name}: {frame}; vbucket {vbucket}, its stream {stream}")
        self.changes += int(counts[CHANGES])
        self.deletions += int(counts[DELETIONS])
        self.snapshots += int(counts[SNAPSHOTS])
        return Received(
            consumed_bytes=int(consumed),
            flow_control_bytes=int(counts[FLOW_CONTROL_BYTES]),
            noops=int(counts[NOOPS]),
            noop_opaque=int(counts[NOOP_OPAQUE]),
            has_ends=bool(counts[ENDS]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a buffer contained besides changes."""

    consumed_bytes: int
    flow_control_bytes: int
    noops: int
    noop_opaque: int
    has_ends: bool


PHASE, PASSED, SNAPSHOT_START, SNAPSHOT_END, ORDINAL, VBUUID, END_REASON = range(7)
STREAM_COLUMNS = 7
REQUESTED, OPEN, IN_SNAPSHOT, ENDED = range(4)
"""The phases of a stream. `OPEN` has not received a marker since it was opened."""

SEQNO, CAS, VERSION, LAST_ORDINAL = range(4)
DOCUMENT_COLUMNS = 4
"""The version is 0 for a document that is deleted or never existed."""

CHANGES, DELETIONS, SNAPSHOTS, NOOPS, NOOP_OPAQUE, ENDS, FLOW_CONTROL_BYTES = range(7)
COUNTS = 7

_u64 = np.uint64


@njit(cache=True)
def _load(data: Any, at: int, size: int) -> Any:
    number = _u64(0)
    for byte in data[at : at + size]:
        number = _u64(number << _u64(8)) | _u64(byte)
    return number


@njit(cache=True)
def _digits(data: Any, at: int, count: int) -> int:
    """Return a decimal number, or -1 if there is none."""
    number = 0
    for byte in data[at : at + count]:
        if byte < 48 or byte > 57:
            return -1
        number = number * 10 + int(byte) - 48
    return number


@njit(cache=True)
def _apply(  # noqa: C901 - one flat loop: every rule stands where the frame it is about is met
    data: Any, streams: Any, documents: Any, vbucket_of_document: Any, counts: Any
) -> tuple[int, int, int]:
    at = 0
    while len(data) - at >= 24:
        body_bytes = int(_load(data, at + 8, 4))
        end = at + 24 + body_bytes
        if end > len(data):
            break
        magic, opcode = data[at], data[at + 1]
        vbucket = int(_load(data, at + 6, 2))
        body = at + 24
        if magic == 0x81:
            # An answer: to a stream request, whose opaque is its vbucket, or to a control.
            if vbucket != 0:
                return at, 1, at
            if opcode == 0x53:
                stream = streams[int(_load(data, at + 12, 4))]
                if stream[PHASE] != REQUESTED:
                    return at, 2, at
                stream[PHASE] = OPEN
                stream[VBUUID] = _load(data, body, 8)
            at = end
            continue
        if magic != 0x80:
            return at, 3, at
        if opcode == 0x5C:
            counts[NOOPS] += 1
            counts[NOOP_OPAQUE] = int(_load(data, at + 12, 4))
            at = end
            continue
        counts[FLOW_CONTROL_BYTES] += end - at
        if vbucket >= len(streams) or int(_load(data, at + 12, 4)) != vbucket:
            return at, 9, at
        stream = streams[vbucket]
        if stream[PHASE] != OPEN and stream[PHASE] != IN_SNAPSHOT:
            return at, 2, at
        if opcode == 0x55:
            stream[PHASE] = ENDED
            stream[END_REASON] = _load(data, body, 4)
            counts[ENDS] += 1
        elif opcode == 0x56:
            start_seqno, end_seqno = _load(data, body, 8), _load(data, body + 8, 8)
            if body_bytes != 20:
                return at, 10, at
            if stream[PHASE] == IN_SNAPSHOT:
                if stream[PASSED] != stream[SNAPSHOT_END]:
                    return at, 4, at
                if start_seqno <= stream[SNAPSHOT_END]:
                    return at, 5, at
            if start_seqno > end_seqno or end_seqno <= stream[PASSED]:
                return at, 5, at
            stream[PHASE] = IN_SNAPSHOT
            stream[SNAPSHOT_START], stream[SNAPSHOT_END] = start_seqno, end_seqno
            stream[ORDINAL] += _u64(1)
            counts[SNAPSHOTS] += 1
        elif opcode == 0x64:
            seqno = _load(data, body, 8)
            if seqno <= stream[PASSED]:
                return at, 6, at
            if stream[PHASE] != IN_SNAPSHOT or seqno > stream[SNAPSHOT_END]:
                return at, 7, at
            stream[PASSED] = seqno
        elif opcode == 0x57 or opcode == 0x58:
            seqno = _load(data, body, 8)
            if seqno <= stream[PASSED]:
                return at, 6, at
            if stream[PHASE] != IN_SNAPSHOT or seqno < stream[SNAPSHOT_START] or seqno > stream[SNAPSHOT_END]:
                return at, 7, at
            stream[PASSED] = seqno
            value_at = body + int(data[at + 4]) + int(_load(data, at + 2, 2))
            number = _digits(data, value_at - 8, 8)
            if number < 0 or number >= len(documents) or end < value_at:
                return at, 10, at
            if vbucket_of_document[number] != vbucket:
                return at, 9, at
            version = 0
            if opcode == 0x57:
                version = _digits(data, value_at, 12)
                if end - value_at != VALUE_BYTES or version <= 0:
                    return at, 10, at
                for byte in data[value_at + 12 : end]:
                    if byte != PADDING:
                        return at, 10, at
            else:
                counts[DELETIONS] += 1
                if end != value_at:
                    return at, 10, at
            document = documents[number]
            if document[LAST_ORDINAL] == stream[ORDINAL]:
                return at, 8, at
            document[SEQNO] = seqno
            document[CAS] = _load(data, at + 16, 8)
            document[VERSION] = _u64(version)
            document[LAST_ORDINAL] = stream[ORDINAL]
            counts[CHANGES] += 1
        else:
            return at, 3, at
        at = end
    return at, 0, at


# Many DCP consumers on one selector: fast and slow ones, with and without flow control and collections.


BUFFER_BYTES = 256 * 1024
FRAME_BYTES_MAX = 2048
NOOP_ANSWER = struct.Struct(">BBHBBHIIQ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a consumer behaves."""

    read_bytes: int = BUFFER_BYTES - FRAME_BYTES_MAX
    rest_s: float = 0.0
    """How long it sleeps after each read."""
    receive_buffer_bytes: int = 0
    """The receive buffer of its socket; 0 for the system's default. One smaller than loopback's segments of 64 KiB
    makes TCP itself crawl, at a few KiB per 0.2 s, for as long as the connection lives."""
    flow_control_bytes: int = 0
    """Its connection buffer, of which it acknowledges halves; 0 for no flow control."""
    knows_collections: bool = True

    @property
    def is_slow(self) -> bool:
        return self.rest_s > 0


class Consumer:
    """One connection with a stream of each vbucket, either endless or up to the current seqno."""

    def __init__(
        self, node: NodeProcess, name: str, manner: Manner, state: CheckedStreams, flags: StreamFlags | None = None
    ) -> None:
        self.name = name
        self.manner = manner
        self.state = state
        self.is_in_a_hurry = False
        """Whether a slow consumer should catch up without pauses."""
        self.received_bytes = 0
        self.reopened = 0
        self._flags = StreamFlags(0) if flags is None else flags
        self._unacked_bytes = 0
        self._buffer = np.empty(BUFFER_BYTES, dtype=np.uint8)
        self._filled = 0
        self.sock = self._open(node)

    def _open(self, node: NodeProcess) -> socket.socket:
        left_out = set() if self.manner.knows_collections else {Feature.COLLECTIONS}
        features = tuple(feature for feature in FEATURES if feature not in left_out)
        connection = KvConnection.open(
            node.address, Login(credentials=Credentials(USER, PASSWORD), bucket="default", features=features)
        )
        connection.request(Open(key=self.name.encode()))
        connection.request(Control(key=b"enable_noop", value=b"true"))
        if self.manner.flow_control_bytes:
            size = str(self.manner.flow_control_bytes).encode()
            connection.request(Control(key=b"connection_buffer_size", value=size))
        if self.manner.receive_buffer_bytes:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self.manner.receive_buffer_bytes)
        connection.sock.sendall(b"".join(self._request(vbucket) for vbucket in range(self.state.vbuckets)))
        connection.sock.setblocking(False)
        return connection.sock

    def _request(self, vbucket: int) -> bytes:
        """Request a stream from this consumer's position."""
        stream = self.state.streams[vbucket]
        stream[PHASE] = REQUESTED
        passed = Seqno(int(stream[PASSED]))
        return StreamRequest(
            vbucket=VBucketId(vbucket),
            opaque=vbucket,
            flags=self._flags,
            start_seqno=passed,
            vbuuid=Vbuuid(int(stream[VBUUID]) if passed else 0),
            snapshot_start_seqno=Seqno(min(passed, int(stream[SNAPSHOT_START]))),
            snapshot_end_seqno=Seqno(int(stream[SNAPSHOT_END])),
        ).encode()

    def read(self) -> None:
        """Read what has arrived, or a part of it, and send the necessary answers."""
        room = len(self._buffer) - self._filled
        size = room if self.is_in_a_hurry else min(self.manner.read_bytes, room)
        received = self.sock.recv_into(self._buffer[self._filled : self._filled + size])
        assert received, f"the node has closed the connection of {self.name}"
        self.received_bytes += received
        self._filled += received
        seen = self.state.receive(self._buffer[: self._filled])
        rest = self._buffer[seen.consumed_bytes : self._filled].copy()
        self._buffer[: len(rest)] = rest
        self._filled = len(rest)
        self._unacked_bytes += seen.flow_control_bytes
        answers = b"".join(NOOP_ANSWER.pack(0x81, 0x5C, 0, 0, 0, 0, 0, seen.noop_opaque, 0) for _ in range(seen.noops))
        if self.manner.flow_control_bytes and self._unacked_bytes >= self.manner.flow_control_bytes // 2:
            answers += BufferAck(acked_bytes=self._unacked_bytes).encode()
            self._unacked_bytes = 0
        if seen.has_ends and not self._flags & StreamFlags.LATEST:
            answers += self._reopen()
        if answers:
            assert self.sock.send(answers) == len(answers), "a few bytes always fit"

    def _reopen(self) -> bytes:
        """Reopen ended streams. The only valid reason is that a slow consumer's snapshot has been compacted away."""
        requests = []
        for vbucket in np.flatnonzero(self.state.streams[:, PHASE] == ENDED).tolist():
            reason = StreamEndReason(int(self.state.streams[vbucket, END_REASON]))
            assert reason is StreamEndReason.TOO_SLOW, f"the stream of vbucket {vbucket} ended with {reason.name}"
            requests.append(self._request(vbucket))
        self.reopened += len(requests)
        return b"".join(requests)

    @property
    def passed(self) -> np.ndarray:
        return self.state.streams[:, PASSED]

    @property
    def is_at_end(self) -> bool:
        """Whether all streams have ended; those without the flag `LATEST` never do."""
        return bool((self.state.streams[:, PHASE] == ENDED).all())

    def describe(self, stored: CheckedStreams) -> str:
        """Describe the state of a consumer that does not reach the end, for the error of a test."""
        behind = np.flatnonzero(self.passed != stored.streams[:, PASSED])
        return (
            f"{self.name}: {self.manner}, {self.received_bytes} bytes received, {self._filled} of them not applied, "
            f"{self._unacked_bytes} not acknowledged, {self.reopened} streams reopened, {len(behind)} streams behind: "
            f"{[(int(vbucket), self.state.streams[vbucket].tolist()) for vbucket in behind[:3]]}"
        )

    def close(self) -> None:
        self.sock.close()


class Selection:
    """Serves consumers: a fast one whenever it has something to read, a slow one after its pause."""

    def __init__(self, consumers: list[Consumer]) -> None:
        self._selector = selectors.DefaultSelector()
        self._resting: list[tuple[float, int, Consumer]] = []
        self._numbers = itertools.count()
        for consumer in consumers:
            self._selector.register(consumer.sock, selectors.EVENT_READ, consumer)

    def run(self, seconds: float) -> None:
        """Serve the consumers for a while."""
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            while self._resting and (self._resting[0][0] <= now_s or self._resting[0][2].is_in_a_hurry):
                consumer = heapq.heappop(self._resting)[2]
                self._selector.register(consumer.sock, selectors.EVENT_READ, consumer)
            next_s = min(end_s, self._resting[0][0]) if self._resting else end_s
            for key, _ in self._selector.select(max(0.0, next_s - now_s)):
                self._serve(key.data)

    def _serve(self, consumer: Consumer) -> None:
        consumer.read()
        if consumer.manner.is_slow and not consumer.is_in_a_hurry:
            self._selector.unregister(consumer.sock)
            wake_s = time.monotonic() + consumer.manner.rest_s
            heapq.heappush(self._resting, (wake_s, next(self._numbers), consumer))

    def close(self) -> None:
        self._selector.close()
