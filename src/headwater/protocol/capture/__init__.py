"""Captures: hex text, raw bytes, pcap and pcapng files, all read as the same events, and the frames in them, with what
their connection had negotiated by then.

`read_capture` turns the bytes of a file into who sent what; `read_frames` cuts that into frames. Neither opens a file.

A flow is in step while its frames follow each other. Bytes that are no frame stop it, because nothing after them can
be trusted. After a gap, the reader searches for the next bytes that look like a frame. Every such point is reported as
a `CaptureFault`; frames of other flows continue.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from headwater.errors import RemoteProtocolError, TruncatedFrame
from headwater.protocol.capture.files import (
    UNKNOWN_FLOW,
    CaptureEvent,
    Chunk,
    ConnectionOpened,
    Direction,
    Flow,
    Gap,
    is_packet_capture,
    read_hex_text,
    read_segments,
    reassemble,
)
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS, Magic, Negotiated, Opcode, ServerOpcode
from headwater.protocol.frames import HEADER, HEADER_BYTES, Frame, decode_frame
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.session import HelloResponse
from headwater.protocol.numbers import FRAME_BODY_BYTES_MAX

# Where a frame may begin in bytes whose beginning is lost.
#
# A header is recognised by a known magic and opcode, a datatype of three bits, a vbucket or status below 1024, and
# lengths that fit each other and the limit. Random bytes look like one about once in fifty megabytes. If the frame's
# end is in the data, another such header must follow.


_MAGICS = re.compile(b"[" + b"".join(re.escape(bytes([magic])) for magic in Magic) + b"]")
_SERVER_MAGICS = frozenset({Magic.SERVER_REQUEST, Magic.SERVER_RESPONSE})
_DATATYPE_MAX = 0x07
_SPECIFIC_MAX = 1023


def find_frame(data: bytes | bytearray) -> int | None:
    """Return the offset of the first bytes that look like a frame, or None if there are none."""
    for candidate in _MAGICS.finditer(data):
        at = candidate.start()
        if at + HEADER_BYTES > len(data):
            return None
        if _looks_like_frame(data, at):
            return at
    return None


def _looks_like_frame(data: bytes | bytearray, at: int) -> bool:
    if not _looks_like_header(data, at):
        return False
    end: int = at + HEADER_BYTES + HEADER.unpack_from(data, at)[6]
    return end + HEADER_BYTES > len(data) or _looks_like_header(data, end)


def _looks_like_header(data: bytes | bytearray, at: int) -> bool:
    magic, opcode, _, _, datatype, specific, *_ = HEADER.unpack_from(data, at)
    try:
        # Faults that the header alone shows are enough to reject it.
        decode_frame(data[at : at + HEADER_BYTES])
    except RemoteProtocolError:
        return False
    names = ServerOpcode if magic in _SERVER_MAGICS else Opcode
    return names(opcode).is_known and datatype <= _DATATYPE_MAX and specific <= _SPECIFIC_MAX


SEARCH_BYTES_MAX = HEADER_BYTES + FRAME_BODY_BYTES_MAX
"""No frame is longer, so the next frame begins within this many bytes."""

_RESPONSES = frozenset({Magic.RESPONSE, Magic.FLEXIBLE_RESPONSE})


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedFrame:
    """A frame, and its place in the capture."""

    number: int
    """Counts all frames of the capture from 1."""
    flow: Flow
    offset: int
    """Offset of the first byte in the flow."""
    where: str
    frame: Frame
    negotiated: Negotiated


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureFault:
    """Bytes of a flow that no frame could be made of."""

    flow: Flow
    where: str
    error: RemoteProtocolError


def read_frames(
    events: Iterable[CaptureEvent], *, collections: bool | None = None
) -> Iterator[CapturedFrame | CaptureFault]:
    """Yield all frames, in the order in which they were completed, and the faults.

    `collections` says whether keys have collection ids; by default HELLO responses show it.
    """
    reader = _FrameReader(collections)
    for event in events:
        yield from reader.receive(event)
    yield from reader.end()


class _FrameReader:
    def __init__(self, collections: bool | None) -> None:
        self._forced = {None: None, True: WITH_COLLECTIONS, False: NOTHING_NEGOTIATED}[collections]
        self._connections: dict[str, _ConnectionState] = {}
        self._frames = 0

    def receive(self, event: CaptureEvent) -> Iterator[CapturedFrame | CaptureFault]:
        if isinstance(event, ConnectionOpened):
            previous = self._connections.pop(event.connection, None)
            if previous is not None:
                yield from previous.end()
            return
        connection = self._connections.setdefault(event.flow.connection, _ConnectionState())
        reader = connection.flows.setdefault(event.flow, _FlowReader(event.flow))
        if isinstance(event, Gap):
            yield from reader.skip(event.missing_bytes)
            return
        for found in reader.receive(event):
            if isinstance(found, CaptureFault):
                yield found
                continue
            offset, where, frame = found
            connection.learn(frame)
            self._frames += 1
            yield CapturedFrame(
                number=self._frames,
                flow=event.flow,
                offset=offset,
                where=where,
                frame=frame,
                negotiated=self._forced or connection.negotiated,
            )

    def end(self) -> Iterator[CaptureFault]:
        for connection in self._connections.values():
            yield from connection.end()


@dataclass(slots=True)
class _ConnectionState:
    negotiated: Negotiated = NOTHING_NEGOTIATED
    flows: dict[Flow, _FlowReader] = field(default_factory=dict)

    def learn(self, frame: Frame) -> None:
        if frame.opcode != Opcode.HELLO or frame.magic not in _RESPONSES:
            return
        try:
            message = decode_message(frame)
        except RemoteProtocolError:
            return  # what shows the frame decodes it again, and reports the error
        if isinstance(message, HelloResponse):
            self.negotiated = Negotiated(frozenset(message.features))

    def end(self) -> Iterator[CaptureFault]:
        for reader in self.flows.values():
            yield from reader.end()


class _FlowState(Enum):
    IN_STEP = auto()
    SEARCHING = auto()
    STOPPED = auto()


class _FlowReader:
    """The bytes of one flow, and how far they were cut into frames."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._state = _FlowState.IN_STEP
        self._data = bytearray()
        self._position = 0
        """The offset in the flow of the first byte of `_data`."""
        self._chunks: deque[tuple[int, str]] = deque()
        """The offsets at which chunks began, and where in the input that was."""
        self._gap_at = 0
        self._missing_bytes: int | None = 0
        self._skipped_bytes = 0

    def receive(self, chunk: Chunk) -> Iterator[tuple[int, str, Frame] | CaptureFault]:
        if chunk.starts_frame:
            yield from self.end()
            self._forget_data()
            self._state = _FlowState.IN_STEP
        self._chunks.append((self._position + len(self._data), chunk.where))
        if self._state is _FlowState.STOPPED:
            self._position += len(chunk.data)
            self._chunks.clear()
            return
        self._data += chunk.data
        if self._state is _FlowState.SEARCHING:
            yield from self._search()
        if self._state is _FlowState.IN_STEP:
            yield from self._cut()

    def skip(self, missing_bytes: int | None) -> Iterator[CaptureFault]:
        """Note that bytes are missing here; None if their number is not known."""
        if self._state is _FlowState.SEARCHING:
            yield from self.end()
        self._gap_at = self._position
        self._missing_bytes = missing_bytes
        self._skipped_bytes = len(self._data)
        self._forget_data()
        self._position += missing_bytes or 0
        self._state = _FlowState.SEARCHING

    def end(self) -> Iterator[CaptureFault]:
        """Report the bytes that are left over at the end."""
        if self._state is _FlowState.SEARCHING:
            self._skipped_bytes += len(self._data)
            yield from self._report_gap("no frame was found after that")
        elif self._state is _FlowState.IN_STEP and self._data:
            error = TruncatedFrame(f"the bytes end {len(self._data)} bytes into a frame", offset=self._position)
            yield self._fault(error)

    def _cut(self) -> Iterator[tuple[int, str, Frame] | CaptureFault]:
        """Yield the frames that are complete by now."""
        start = 0
        try:
            while (decoded := decode_frame(self._data, start, position=self._position + start)) is not None:
                frame, end = decoded
                offset = self._position + start
                yield offset, self._where_of(offset), frame
                start = end
        except RemoteProtocolError as error:
            # Frames may have been cut before this one: the position is that of the frame that fails.
            self._drop(start)
            yield self._fault(error)
            self._forget_data()
            self._state = _FlowState.STOPPED
            return
        self._drop(start)

    def _search(self) -> Iterator[CaptureFault]:
        found = find_frame(self._data)
        # A header may begin in the last bytes and continue in the next chunk.
        passed = max(0, len(self._data) - HEADER_BYTES + 1) if found is None else found
        self._skipped_bytes += passed
        self._drop(passed)
        if found is not None:
            self._state = _FlowState.IN_STEP
            yield from self._report_gap("decoding goes on at the next frame")
        elif self._skipped_bytes > SEARCH_BYTES_MAX:
            self._state = _FlowState.STOPPED
            yield from self._report_gap("no frame was found in as many bytes as a frame can have")
            self._forget_data()

    def _report_gap(self, outcome: str) -> Iterator[CaptureFault]:
        if self._missing_bytes is None:
            if not self._skipped_bytes:
                return
            reason = f"the capture does not begin at a frame: {self._skipped_bytes} bytes were skipped; {outcome}"
            hint = "Capture from the connection's start, and check that the port speaks the protocol without TLS"
        else:
            reason = (
                f"{self._missing_bytes} bytes are missing from the capture and {self._skipped_bytes} around them "
                f"were skipped; {outcome}"
            )
            hint = "Capture again with whole packets and a larger buffer (`tcpdump -s 0 -B 65536`)"
        yield self._fault(TruncatedFrame(reason, offset=self._gap_at, hint=hint))

    def _fault(self, error: RemoteProtocolError) -> CaptureFault:
        return CaptureFault(flow=self._flow, where=self._where_of(self._position), error=error)

    def _where_of(self, offset: int) -> str:
        """Return where in the input the flow's byte `offset` was. Call it with rising offsets only."""
        while len(self._chunks) > 1 and self._chunks[1][0] <= offset:
            self._chunks.popleft()
        return self._chunks[0][1] if self._chunks else ""

    def _drop(self, length: int) -> None:
        del self._data[:length]
        self._position += length

    def _forget_data(self) -> None:
        self._drop(len(self._data))
        self._chunks.clear()


# --- captures of any format -------------------------------------------------------------------------------------------

__all__ = [
    "UNKNOWN_FLOW", "CaptureEvent", "CaptureFault", "CaptureFormat", "CapturedFrame", "Chunk", "ConnectionOpened",
    "Direction", "Flow", "Gap", "find_format", "read_capture", "read_frames",
]  # fmt: skip

_RAW_CHUNK_BYTES = 64 * 1024
_FIRST_BYTES = frozenset(Magic)


class CaptureFormat(Enum):
    HEX = "hex"
    RAW = "raw"
    PCAP = "pcap"
    """pcap or pcapng."""


def find_format(data: bytes) -> CaptureFormat:
    """Return the format that the first bytes show. No magic of the protocol is a character that text begins with."""
    if is_packet_capture(data):
        return CaptureFormat.PCAP
    if data and data[0] in _FIRST_BYTES:
        return CaptureFormat.RAW
    return CaptureFormat.HEX


def read_capture(data: bytes, capture_format: CaptureFormat | None = None) -> Iterator[CaptureEvent]:
    """Return the events of a capture. Without a format, the first bytes decide.

    Raises `CaptureError`, from the iterator, at the point where the input is not of that format.
    """
    capture_format = capture_format or find_format(data)
    if capture_format is CaptureFormat.PCAP:
        return reassemble(read_segments(data))
    if capture_format is CaptureFormat.HEX:
        return read_hex_text(data)
    return _read_raw(data)


def _read_raw(data: bytes) -> Iterator[CaptureEvent]:
    for at in range(0, len(data), _RAW_CHUNK_BYTES):
        yield Chunk(data=data[at : at + _RAW_CHUNK_BYTES])
