"""What a capture consists of, whatever file it came in: who sent which bytes, and where some are missing.

`reassemble` makes these events of captured TCP segments; the reader of hex text makes them line by line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from ipaddress import ip_address
from typing import NamedTuple

from headwater.errors import CaptureError


class Direction(Enum):
    """Who sent the bytes. A server is who was connected to; on DCP, requests go both ways."""

    CLIENT_TO_SERVER = "C->S"
    SERVER_TO_CLIENT = "S->C"


@dataclass(frozen=True, slots=True)
class Flow:
    """One direction of one connection. Input that does not say has one flow, with no name and no direction."""

    connection: str = ""
    direction: Direction | None = None

    def __str__(self) -> str:
        if self.direction is None:
            return self.connection
        return f"{self.connection} {self.direction.value}"


UNKNOWN_FLOW = Flow()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOpened:
    """A new connection begins under this name; what an older one of that name had negotiated is void."""

    connection: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes that follow the flow's last ones."""

    flow: Flow = UNKNOWN_FLOW
    data: bytes
    where: str = ""
    """The location in the input as its own tools count it: `line 7`, `packet 12`."""
    starts_frame: bool = False
    """The input says that a frame starts here, so an unfinished one before it stays unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The flow's next bytes are not in the capture."""

    flow: Flow
    missing_bytes: int | None
    """None where the capture began after the connection did."""


CaptureEvent = ConnectionOpened | Chunk | Gap


# --- TCP reassembly: segments as they were captured, each direction's bytes as they were sent -------------------------
#
# Sequence numbers put segments in order. What comes early waits for what is missing; what was sent before is dropped,
# and of overlapping segments each byte is taken once. If a missing segment does not turn up while as much waits as the
# limits allow, or by the end of the capture, there is a `Gap` instead.
#
# A capture may begin after a connection did. Its first segment need not be the first that was captured, so segments
# pass through a window, and the lowest sequence number in it is where a flow is taken to begin.


WAITING_BYTES_MAX = 4 * 1024 * 1024
"""What one direction may hold back for a missing segment; a common receive window is no larger."""

WAITING_SEGMENTS_MAX = 1024
LOOKAHEAD_SEGMENTS = 256

_SEQUENCE_NUMBERS = 2**32
_OLD_BYTES_MAX = 2**30
"""A segment this far behind is a retransmission; farther back than a window can reach, it lies ahead instead."""
_START_DISORDER_BYTES_MAX = 2**20
_SERVER_PORTS = (11210, 11207, 11209)
"""Couchbase's key-value ports: plain, TLS, and between nodes."""


class SocketAddress(NamedTuple):
    address: bytes
    port: int

    def __str__(self) -> str:
        address = ip_address(self.address)
        return f"{address}:{self.port}" if address.version == 4 else f"[{address}]:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One TCP segment. `number` is its packet's number in the capture."""

    number: int
    source: SocketAddress
    destination: SocketAddress
    sequence: int
    syn: bool = False
    ack: bool = True
    payload: bytes = b""

    @property
    def first_sequence(self) -> int:
        """The sequence number of the first byte; SYN has one of its own."""
        return (self.sequence + self.syn) % _SEQUENCE_NUMBERS

    @property
    def is_connect(self) -> bool:
        return self.syn and not self.ack

    @property
    def endpoints(self) -> frozenset[SocketAddress]:
        return frozenset((self.source, self.destination))


def reassemble(segments: Iterable[Segment]) -> Iterator[CaptureEvent]:
    """The bytes of every connection, roughly in the order in which they were captured.

    Where `segments` fails because the file is cut off, what came before is handed out first.
    """
    reassembler = _Reassembler()
    ahead: deque[Segment] = deque()
    failure: CaptureError | None = None
    try:
        for segment in segments:
            reassembler.announce(segment)
            ahead.append(segment)
            if len(ahead) > LOOKAHEAD_SEGMENTS:
                yield from reassembler.receive(ahead.popleft())
    except CaptureError as error:
        failure = error
    for segment in ahead:
        yield from reassembler.receive(segment)
    yield from reassembler.end()
    if failure is not None:
        raise failure


@dataclass(slots=True)
class _Start:
    """Where a flow begins, as far as is known. `is_certain` where its SYN was seen."""

    sequence: int
    is_certain: bool


class _Reassembler:
    def __init__(self) -> None:
        self._connections: dict[frozenset[SocketAddress], _CapturedConnection] = {}
        self._starts: dict[tuple[SocketAddress, SocketAddress], _Start] = {}
        self._clients: dict[frozenset[SocketAddress], SocketAddress] = {}

    def announce(self, segment: Segment) -> None:
        """Take note of a segment that will be received soon."""
        if segment.syn:
            client = segment.destination if segment.ack else segment.source
            self._clients.setdefault(segment.endpoints, client)
        connection = self._connections.get(segment.endpoints)
        if connection is not None and segment.source in connection.streams:
            return
        first = segment.first_sequence
        start = self._starts.setdefault((segment.source, segment.destination), _Start(first, segment.syn))
        if not start.is_certain and (start.sequence - first) % _SEQUENCE_NUMBERS <= _START_DISORDER_BYTES_MAX:
            start.sequence, start.is_certain = first, segment.syn

    def receive(self, segment: Segment) -> Iterator[CaptureEvent]:
        connection = self._connections.get(segment.endpoints)
        if connection is None or connection.is_replaced_by(segment):
            if connection is not None:
                yield from connection.end()
            connection = self._open(segment, connection)
            yield ConnectionOpened(connection=connection.name)
        if segment.source not in connection.streams:
            start = self._starts.pop((segment.source, segment.destination), None)
            yield from connection.begin(segment, start or _Start(segment.first_sequence, segment.syn))
        yield from connection.streams[segment.source].receive(segment)

    def _open(self, segment: Segment, previous: _CapturedConnection | None) -> _CapturedConnection:
        client = self._clients.get(segment.endpoints) or _likely_client(segment)
        server = segment.destination if client == segment.source else segment.source
        if segment.is_connect:
            client, server = segment.source, segment.destination
        connection = _CapturedConnection(client, server, 1 if previous is None else previous.incarnation + 1)
        self._connections[segment.endpoints] = connection
        return connection

    def end(self) -> Iterator[CaptureEvent]:
        for connection in self._connections.values():
            yield from connection.end()


def _likely_client(segment: Segment) -> SocketAddress:
    """Who is the client, by the ports alone: servers have well-known ones, or at least low ones."""
    for port in _SERVER_PORTS:
        if (segment.source.port == port) != (segment.destination.port == port):
            return segment.destination if segment.source.port == port else segment.source
    return segment.source if segment.source.port >= segment.destination.port else segment.destination


@dataclass(slots=True)
class _CapturedConnection:
    client: SocketAddress
    server: SocketAddress
    incarnation: int
    """Ports are used again: this one's number among the connections between these two."""
    streams: dict[SocketAddress, _Direction] = field(default_factory=dict)

    @property
    def name(self) -> str:
        again = f" #{self.incarnation}" if self.incarnation > 1 else ""
        return f"{self.client}-{self.server}{again}"

    def is_replaced_by(self, segment: Segment) -> bool:
        """A SYN that is no repetition of this connection's own."""
        stream = self.streams.get(segment.source)
        return segment.is_connect and stream is not None and stream.start_sequence != segment.first_sequence

    def begin(self, segment: Segment, start: _Start) -> Iterator[CaptureEvent]:
        is_client = segment.source == self.client
        flow = Flow(self.name, Direction.CLIENT_TO_SERVER if is_client else Direction.SERVER_TO_CLIENT)
        self.streams[segment.source] = _Direction(flow, start.sequence)
        if not start.is_certain:
            yield Gap(flow=flow, missing_bytes=None)

    def end(self) -> Iterator[CaptureEvent]:
        for stream in self.streams.values():
            yield from stream.end()


class _Direction:
    """One direction: the bytes in order, and the segments that came too early."""

    def __init__(self, flow: Flow, start_sequence: int) -> None:
        self._flow = flow
        self.start_sequence = start_sequence
        self._next = start_sequence  # counts on past 32 bits
        self._waiting: list[tuple[int, int, bytes]] = []
        self._waiting_bytes = 0

    def receive(self, segment: Segment) -> Iterator[CaptureEvent]:
        ahead = (segment.first_sequence - self._next) % _SEQUENCE_NUMBERS
        if ahead >= _SEQUENCE_NUMBERS - _OLD_BYTES_MAX:
            ahead -= _SEQUENCE_NUMBERS
        if not segment.payload or ahead + len(segment.payload) <= 0:
            return
        heappush(self._waiting, (self._next + ahead, segment.number, segment.payload))
        self._waiting_bytes += len(segment.payload)
        yield from self._take()
        while self._waiting_bytes > WAITING_BYTES_MAX or len(self._waiting) > WAITING_SEGMENTS_MAX:
            yield from self._pass_over_gap()

    def _take(self) -> Iterator[CaptureEvent]:
        while self._waiting and self._waiting[0][0] <= self._next:
            start, number, payload = heappop(self._waiting)
            self._waiting_bytes -= len(payload)
            fresh = payload[self._next - start :]
            if fresh:
                self._next += len(fresh)
                yield Chunk(flow=self._flow, data=fresh, where=f"packet {number}")

    def _pass_over_gap(self) -> Iterator[CaptureEvent]:
        start = self._waiting[0][0]
        yield Gap(flow=self._flow, missing_bytes=start - self._next)
        self._next = start
        yield from self._take()

    def end(self) -> Iterator[CaptureEvent]:
        while self._waiting:
            yield from self._pass_over_gap()
