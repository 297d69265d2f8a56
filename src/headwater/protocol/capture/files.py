r"""Read capture files: hex text into events, pcap and pcapng files into TCP segments, and these into events.

Events are what a capture consists of, whatever its file: who sent which bytes, and where bytes are missing.

No file is opened here: callers pass in its bytes. Bytes that are not of the format raise a `CaptureError` with the
line or packet. Every line of hex text is one of these:

    8053 0000 ...                 hex, with or without spaces, commas, colons, `0x` or `\x`; `#` starts a comment
    00000010: 8053 0000  .S..     a dump line of xxd or tcpdump: an offset, bytes, and perhaps the bytes as text
    00000010  80 53 00 00 |.S..|  the same by hexdump -C, od -A x -t x1, tshark or Wireshark
    [dcp] C->S DCP_OPEN ...       from here on the bytes are the client's on connection `dcp`; a frame starts
    [dcp] anything else           an annotation
    ## [dcp] new TCP connection   the connection starts again
    # ...                         a comment
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from io import BytesIO
from ipaddress import ip_address
from struct import unpack_from
from typing import Any, NamedTuple

import dpkt

from headwater.errors import CaptureError


class Direction(Enum):
    """Who sent the bytes. The server is the side that was connected to; on DCP, requests go both ways."""

    CLIENT_TO_SERVER = "C->S"
    SERVER_TO_CLIENT = "S->C"


@dataclass(frozen=True, slots=True)
class Flow:
    """One direction of one connection. Input without directions has one flow, with no name and no direction."""

    connection: str = ""
    direction: Direction | None = None

    def __str__(self) -> str:
        if self.direction is None:
            return self.connection
        return f"{self.connection} {self.direction.value}"


UNKNOWN_FLOW = Flow()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionOpened:
    """A new connection begins under this name; what an older one with that name had negotiated is void."""

    connection: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes that follow the previous ones of the flow."""

    flow: Flow = UNKNOWN_FLOW
    data: bytes
    where: str = ""
    """The location in the input as its own tools count it: `line 7`, `packet 12`."""
    starts_frame: bool = False
    """Whether the input says that a frame starts here, so that an unfinished one before it stays unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The flow's next bytes are not in the capture."""

    flow: Flow
    missing_bytes: int | None
    """None if the capture began after the connection did."""


CaptureEvent = ConnectionOpened | Chunk | Gap


# --- TCP reassembly: segments as they were captured, each direction's bytes as they were sent -------------------------
#
# Sequence numbers put segments in order. A segment that comes early waits for what is missing; bytes that were sent
# before are dropped, so of overlapping segments each byte is taken once. If a missing segment does not turn up while
# as much waits as the limits allow, or by the end of the capture, a `Gap` is reported instead.
#
# A capture may begin after a connection did. The first segment captured need not be the first in order, so segments
# pass through a window, and a flow is assumed to begin at the lowest sequence number in it.


WAITING_BYTES_MAX = 4 * 1024 * 1024
"""How many bytes one direction may hold back for a missing segment; a common receive window is no larger."""

WAITING_SEGMENTS_MAX = 1024
LOOKAHEAD_SEGMENTS = 256

_SEQUENCE_NUMBERS = 2**32
_OLD_BYTES_MAX = 2**30
"""A segment this far behind is a retransmission; one farther back than a window can reach is ahead instead."""
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
        """The sequence number of the first byte; a SYN takes one itself."""
        return (self.sequence + self.syn) % _SEQUENCE_NUMBERS

    @property
    def is_connect(self) -> bool:
        return self.syn and not self.ack

    @property
    def endpoints(self) -> frozenset[SocketAddress]:
        return frozenset((self.source, self.destination))


def reassemble(segments: Iterable[Segment]) -> Iterator[CaptureEvent]:
    """Yield the bytes of every connection, roughly in the order in which they were captured.

    If `segments` fails because the file is cut off, what precedes that is yielded first.
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
    """Where a flow begins, as far as is known; `is_certain` if its SYN was seen."""

    sequence: int
    is_certain: bool


class _Reassembler:
    def __init__(self) -> None:
        self._connections: dict[frozenset[SocketAddress], _CapturedConnection] = {}
        self._starts: dict[tuple[SocketAddress, SocketAddress], _Start] = {}
        self._clients: dict[frozenset[SocketAddress], SocketAddress] = {}

    def announce(self, segment: Segment) -> None:
        """Note a segment that will be received soon."""
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
    """Return the likely client, by the ports alone: servers have well-known ports, or at least low ones."""
    for port in _SERVER_PORTS:
        if (segment.source.port == port) != (segment.destination.port == port):
            return segment.destination if segment.source.port == port else segment.source
    return segment.source if segment.source.port >= segment.destination.port else segment.destination


@dataclass(slots=True)
class _CapturedConnection:
    client: SocketAddress
    server: SocketAddress
    incarnation: int
    """The number of this connection among those between these two: ports are reused."""
    streams: dict[SocketAddress, _Direction] = field(default_factory=dict)

    @property
    def name(self) -> str:
        again = f" #{self.incarnation}" if self.incarnation > 1 else ""
        return f"{self.client}-{self.server}{again}"

    def is_replaced_by(self, segment: Segment) -> bool:
        """Whether a segment is a SYN that does not repeat this connection's own."""
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
    """One direction: its bytes in order, and the segments that came too early."""

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


# --- the files --------------------------------------------------------------------------------------------------------

_HEADER = re.compile(r"\[(?P<connection>[^\]]+)\]\s+(?P<direction>C->S|S->C)(?:\s|$)")
_NEW_CONNECTION = re.compile(r"#+\s*\[(?P<connection>[^\]]+)\]\s+(?:new (?:TCP )?connection|reconnecting)")
_OFFSET_WITH_COLON = re.compile(r"\s*(?:0[xX])?[0-9a-fA-F]{4,16}:(?:\s+|$)")
_OFFSET = re.compile(r"\s*[0-9a-fA-F]{4,16}(?:\s+|$)")
_FIRST_OFFSET = re.compile(r"\s*0{4,16}(?:\s+|$)")
_SEPARATORS = re.compile(r"0[xX]|\\x|[,:;\-]")
_BYTE_PAIRS = re.compile(r"[0-9a-fA-F]{2}(?: [0-9a-fA-F]{2}){0,7}")
_EXCERPT_CHARS = 40


def read_hex_text(data: bytes) -> Iterator[CaptureEvent]:
    """Yield the events of hex text, line by line. Raises `CaptureError` at the first line of no known form."""
    return _HexTextReader().read(data)


class _HexTextReader:
    def __init__(self) -> None:
        self._flow = UNKNOWN_FLOW
        self._starts_frame = False
        self._bare_offsets: bool | None = None

    def read(self, data: bytes) -> Iterator[CaptureEvent]:
        for number, raw_line in enumerate(BytesIO(data.removeprefix(b"\xef\xbb\xbf")), 1):
            line = raw_line.decode(errors="replace").rstrip()
            stripped = line.lstrip()
            if not stripped:
                continue
            if stripped.startswith("#"):
                if opened := _NEW_CONNECTION.match(stripped):
                    yield ConnectionOpened(connection=opened["connection"])
            elif stripped.startswith("["):
                if header := _HEADER.match(stripped):
                    self._flow = Flow(header["connection"], Direction(header["direction"]))
                    self._starts_frame = True
            elif decoded := self._decode_line(line, number):
                yield Chunk(flow=self._flow, data=decoded, where=f"line {number}", starts_frame=self._starts_frame)
                self._starts_frame = False

    def _decode_line(self, line: str, number: int) -> bytes:
        if line == "*":
            raise CaptureError(
                f"line {number} stands for repeated lines that the dump left out",
                hint="Dump again with every line: `hexdump -v -C`, `od -v` or `xxd`",
            )
        if self._bare_offsets is None:
            # No frame begins with zeros, so zeros at the very start can only be the first offset of a dump.
            self._bare_offsets = _FIRST_OFFSET.match(line) is not None
        offset = _OFFSET_WITH_COLON.match(line) or (_OFFSET.match(line) if self._bare_offsets else None)
        hex_digits = _dump_columns(line[offset.end() :]) if offset else line.partition("#")[0]
        try:
            return bytes.fromhex(_SEPARATORS.sub(" ", hex_digits))
        except ValueError as error:
            excerpt = line.strip()[:_EXCERPT_CHARS]
            raise CaptureError(
                f"line {number} is neither whole bytes in hex nor an annotation: {excerpt!r}",
                hint="Start remarks with #, or give the format as raw or pcap if this is no text",
            ) from error


def _dump_columns(line: str) -> str:
    """Return the hex of a dump line after its offset, without the column that shows the bytes as text.

    Text may look like hex, so a second column counts only where dumps with two columns have it: two spaces after eight
    single bytes.
    """
    first, *others = line.partition("|")[0].rstrip().split("  ")
    if others and len(first) == 23 and _BYTE_PAIRS.fullmatch(first) and _BYTE_PAIRS.fullmatch(others[0]):
        return f"{first} {others[0]}"
    return first


# --- pcapng files: blocks, of which those with packets matter ---------------------------------------------------------
#
# dpkt's own reader takes every packet to be of the first interface, whose link type may not be that of another
# (Wireshark on loopback and Ethernet at once), skips simple packet blocks, and parses needless options.


SECTION_HEADER = 0x0A0D0D0A
_INTERFACE_DESCRIPTION = 1
_PACKET = 2
_SIMPLE_PACKET = 3
_ENHANCED_PACKET = 6

_BYTE_ORDERS = {b"\x1a\x2b\x3c\x4d": ">", b"\x4d\x3c\x2b\x1a": "<"}
_BLOCK_BYTES_MIN = 12
_SECTION_HEADER_BYTES_MIN = 28
_PACKET_DATA_AT = 28


def is_pcapng(data: bytes) -> bool:
    return data.startswith(SECTION_HEADER.to_bytes(4, "big")) and data[8:12] in _BYTE_ORDERS


def read_pcapng_packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the link type and the bytes of every packet."""
    order = ">"
    link_types: list[int] = []
    at = 0
    while at < len(data):
        if data[at : at + 4] == SECTION_HEADER.to_bytes(4, "big"):
            if data[at + 8 : at + 12] not in _BYTE_ORDERS:
                raise _damaged(at)
            order, link_types = _BYTE_ORDERS[data[at + 8 : at + 12]], []
        kind, block_bytes = _block(data, at, order)
        if kind == _INTERFACE_DESCRIPTION and block_bytes >= 20:
            link_types.append(unpack_from(order + "H", data, at + 8)[0])
        elif kind in (_ENHANCED_PACKET, _PACKET, _SIMPLE_PACKET):
            interface, packet = _captured(kind, data[at : at + block_bytes], order, at)
            if interface >= len(link_types):
                raise CaptureError(
                    f"the packet at byte {at} of the file names interface {interface}, which was not described",
                    hint="The file is damaged: capture again, or cut it before that byte",
                )
            yield link_types[interface], packet
        at += block_bytes


def _block(data: bytes, at: int, order: str) -> tuple[int, int]:
    """Return the type and the length of the block at `at`, which is checked against the file's end."""
    if at + _BLOCK_BYTES_MIN > len(data):
        raise _damaged(at)
    kind, block_bytes = unpack_from(order + "II", data, at)
    least = _SECTION_HEADER_BYTES_MIN if kind == SECTION_HEADER else _BLOCK_BYTES_MIN
    if block_bytes < least or block_bytes % 4 or at + block_bytes > len(data):
        raise _damaged(at)
    return kind, block_bytes


def _damaged(at: int) -> CaptureError:
    return CaptureError(
        f"the pcapng file is cut off or damaged at byte {at}",
        hint="Let the capture finish before you copy it, or repair it with `editcap`",
    )


def _captured(kind: int, block: bytes, order: str, at: int) -> tuple[int, bytes]:
    """Return the number of the interface and the bytes of the packet in a block."""
    if len(block) < (16 if kind == _SIMPLE_PACKET else _PACKET_DATA_AT + 4):
        raise _damaged(at)
    if kind == _SIMPLE_PACKET:
        original_bytes = unpack_from(order + "I", block, 8)[0]
        return 0, block[12 : min(12 + original_bytes, len(block) - 4)]
    interface = unpack_from(order + ("H" if kind == _PACKET else "I"), block, 8)[0]
    captured_bytes = unpack_from(order + "I", block, 20)[0]
    if _PACKET_DATA_AT + captured_bytes + 4 > len(block):
        raise _damaged(at)
    return interface, block[_PACKET_DATA_AT : _PACKET_DATA_AT + captured_bytes]


# --- pcap and pcapng files, and the TCP segments in their packets -----------------------------------------------------


_PCAP_MAGICS = frozenset(
    number.to_bytes(4, order)
    for number in (dpkt.pcap.TCPDUMP_MAGIC, dpkt.pcap.TCPDUMP_MAGIC_NANO, dpkt.pcap.MODPCAP_MAGIC)
    for order in ("big", "little")
)
_LINK_TYPE_BITS = 0xFFFF
"""The upper half of a pcap file's link type has the length of the frame check sequence."""


def is_packet_capture(data: bytes) -> bool:
    return data[:4] in _PCAP_MAGICS or is_pcapng(data)


# --- the file -----------------------------------------------------------------------------------------------------


def read_segments(data: bytes) -> Iterator[Segment]:
    """Yield the TCP segments that carry something, in the file's order. Packets are numbered as in Wireshark."""
    packets = read_pcapng_packets(data) if is_pcapng(data) else _read_pcap_packets(data)
    for number, (link_type, packet) in enumerate(packets, 1):
        strip = _LINK_TYPES.get(link_type)
        if strip is None:
            raise CaptureError(
                f"packet {number} has link type {link_type}, which is not supported",
                hint="Capture on Ethernet, loopback, Linux `any` or raw IP",
            )
        segment = _segment(number, strip, packet)
        if segment is not None and (segment.payload or segment.syn):
            yield segment


def _read_pcap_packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    try:
        reader = dpkt.pcap.Reader(BytesIO(data))
    except (ValueError, dpkt.Error) as error:
        raise CaptureError(
            "the input is not a pcap or pcapng file",
            hint="Give the format as hex or raw, or let it be found",
        ) from error
    link_type = reader.datalink() & _LINK_TYPE_BITS
    packets = iter(reader)
    number = 0
    while True:
        number += 1
        try:
            _, packet = next(packets)
        except StopIteration:
            return
        except dpkt.Error as error:
            raise CaptureError(
                f"the pcap file is cut off in packet {number}",
                hint="Let the capture finish before you copy it (`tcpdump -U` writes packet by packet)",
            ) from error
        yield link_type, packet


# --- the layers ---------------------------------------------------------------------------------------------------
# dpkt decodes every protocol it knows inside a packet. Only TCP is wanted here, and other decoders can't be trusted
# with damaged bytes, so its tables of inner protocols are cut down.


class _Ip(dpkt.ip.IP):  # type: ignore[misc]  # dpkt has no types
    _protosw = {dpkt.ip.IP_PROTO_TCP: dpkt.tcp.TCP}  # noqa: RUF012  (dpkt's own name and form)


class _Ip6(dpkt.ip6.IP6):  # type: ignore[misc]
    _protosw = {dpkt.ip.IP_PROTO_TCP: dpkt.tcp.TCP}  # noqa: RUF012


_IP_BY_ETHERTYPE = {dpkt.ethernet.ETH_TYPE_IP: _Ip, dpkt.ethernet.ETH_TYPE_IP6: _Ip6}
_VLAN_TYPES = frozenset({dpkt.ethernet.ETH_TYPE_8021Q, dpkt.ethernet.ETH_TYPE_8021AD, dpkt.ethernet.ETH_TYPE_QINQ1})
_IP_BY_VERSION = {4: _Ip, 6: _Ip6}
_VLAN_TAGS_MAX = 2


def _of_ethertype(ethertype: int, packet: bytes) -> Any:
    ip = _IP_BY_ETHERTYPE.get(ethertype)
    return None if ip is None else ip(packet)


def _ethernet(packet: bytes) -> Any:
    at = 12
    for _ in range(_VLAN_TAGS_MAX):
        if int.from_bytes(packet[at : at + 2], "big") in _VLAN_TYPES:
            at += 4
    return _of_ethertype(int.from_bytes(packet[at : at + 2], "big"), packet[at + 2 :])


def _linux_cooked(packet: bytes) -> Any:
    return _of_ethertype(int.from_bytes(packet[14:16], "big"), packet[16:])


def _linux_cooked_v2(packet: bytes) -> Any:
    return _of_ethertype(int.from_bytes(packet[:2], "big"), packet[20:])


def _raw_ip(packet: bytes) -> Any:
    ip = _IP_BY_VERSION.get(packet[0] >> 4) if packet else None
    return None if ip is None else ip(packet)


def _loopback(packet: bytes) -> Any:
    # Four bytes name the address family, each system with its own numbers; the packet itself is plainer.
    return _raw_ip(packet[4:])


_RAW_IP_ON_OPENBSD = 14
_LINK_TYPES: dict[int, Callable[[bytes], Any]] = {
    dpkt.pcap.DLT_NULL: _loopback,
    108: _loopback,  # OpenBSD's
    dpkt.pcap.DLT_EN10MB: _ethernet,
    dpkt.pcap.DLT_LINUX_SLL: _linux_cooked,
    dpkt.pcap.DLT_LINUX_SLL2: _linux_cooked_v2,
    12: _raw_ip,
    _RAW_IP_ON_OPENBSD: _raw_ip,
    101: _raw_ip,
    dpkt.pcap.DLT_IPV4: _raw_ip,
    dpkt.pcap.DLT_IPV6: _raw_ip,
}


def _segment(number: int, strip: Callable[[bytes], Any], packet: bytes) -> Segment | None:
    """Return the TCP segment in a packet, or None: other protocols, later fragments and cut headers have none.

    Bytes of a connection that are lost this way show as a gap in its sequence numbers.
    """
    try:
        ip = strip(packet)
    except dpkt.Error:
        return None
    tcp = None if ip is None else ip.data
    if not isinstance(tcp, dpkt.tcp.TCP):
        return None
    return Segment(
        number=number,
        source=SocketAddress(bytes(ip.src), tcp.sport),
        destination=SocketAddress(bytes(ip.dst), tcp.dport),
        sequence=tcp.seq,
        syn=bool(tcp.flags & dpkt.tcp.TH_SYN),
        ack=bool(tcp.flags & dpkt.tcp.TH_ACK),
        payload=bytes(tcp.data),
    )
