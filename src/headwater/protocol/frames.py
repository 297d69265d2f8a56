"""Frames: the 24-byte header, and the parts that its lengths cut the body into.

Every frame of the protocol has this header, big-endian:

    byte  0      magic
    byte  1      opcode
    bytes 2-3    key length; in flexible framing byte 2 is the framing-extras length and byte 3 the key length
    byte  4      extras length
    byte  5      datatype
    bytes 6-7    vbucket in a request, status in a response
    bytes 8-11   body length: framing extras + extras + key + value
    bytes 12-15  opaque: a request's own, echoed in its response
    bytes 16-23  CAS

A `Frame` is only the body cut into parts; the messages define what the parts mean (`messages/`). The frame infos of
flexible framing are here, too, since every message may have them. (kv_engine, docs/BinaryProtocol.md, "Packet
Structure".)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from struct import Struct

from headwater import errors
from headwater.protocol.features import Magic, Opcode, OpenIntEnum, ServerOpcode
from headwater.protocol.numbers import FRAME_BODY_BYTES_MAX, LEB128_BYTES_MAX, STREAM_ID_MAX, CollectionId

HEADER = struct.Struct(">BBHBBHIIQ")
HEADER_BYTES = HEADER.size
_KNOWN_MAGICS = frozenset(Magic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One frame, its body cut into parts."""

    magic: Magic
    opcode: int
    specific: int = 0
    """Bytes 6 and 7: the vbucket of a request, the status of a response."""
    opaque: int = 0
    cas: int = 0
    datatype: int = 0
    framing_extras: bytes = b""
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""

    @property
    def body_bytes(self) -> int:
        return len(self.framing_extras) + len(self.extras) + len(self.key) + len(self.value)

    @property
    def opcode_name(self) -> str:
        return opcode_name(self.magic, self.opcode)

    def encode(self) -> bytes:
        return encode_header(self) + self.framing_extras + self.extras + self.key + self.value


def opcode_name(magic: Magic, opcode: int) -> str:
    """Return the opcode's name; server-initiated frames have numbers of their own."""
    if magic in (Magic.SERVER_REQUEST, Magic.SERVER_RESPONSE):
        return ServerOpcode(opcode).name
    return Opcode(opcode).name


def encode_header(frame: Frame) -> bytes:
    """Return the frame's header. Raises `LocalProtocolError` if a part or a number is too large for its field."""
    key_bytes = len(frame.key)
    if frame.magic.is_flexible:
        if len(frame.framing_extras) > 0xFF or key_bytes > 0xFF:
            raise errors.LocalProtocolError(
                f"flexible framing holds 255 bytes of framing extras and 255 of key, not "
                f"{len(frame.framing_extras)} and {key_bytes}"
            )
        lengths = len(frame.framing_extras) << 8 | key_bytes
    elif frame.framing_extras:
        raise errors.LocalProtocolError(f"magic {frame.magic.name} has no room for framing extras")
    elif key_bytes > 0xFFFF:
        raise errors.LocalProtocolError(f"a key of {key_bytes} bytes does not fit its 16-bit length")
    else:
        lengths = key_bytes
    if len(frame.extras) > 0xFF:
        raise errors.LocalProtocolError(f"extras of {len(frame.extras)} bytes do not fit their 8-bit length")
    try:
        return HEADER.pack(
            frame.magic, frame.opcode, lengths, len(frame.extras), frame.datatype, frame.specific,
            frame.body_bytes, frame.opaque, frame.cas,
        )  # fmt: skip
    except struct.error as error:
        raise errors.LocalProtocolError(
            f"vbucket or status {frame.specific}, opaque {frame.opaque} or CAS {frame.cas} does not fit the header"
        ) from error


def decode_frame(
    data: bytes | bytearray | memoryview,
    offset: int = 0,
    *,
    body_bytes_max: int = FRAME_BODY_BYTES_MAX,
    position: int | None = None,
) -> tuple[Frame, int] | None:
    """Return the frame that starts at `offset` and the offset after it, or None while bytes are missing.

    Raises for faults in the header as soon as the header is there, without waiting for the body. `position` is the
    offset of the frame's first byte in errors; `offset` if it is None.
    """
    position = offset if position is None else position
    available = len(data) - offset
    if available < 1:
        return None
    if data[offset] not in _KNOWN_MAGICS:
        raise errors.BadMagic(f"0x{data[offset]:02x} is not a magic byte", offset=position)
    if available < HEADER_BYTES:
        return None
    magic, opcode, lengths, extras_bytes, datatype, specific, body_bytes, opaque, cas = HEADER.unpack_from(data, offset)
    magic = Magic(magic)
    framing_bytes, key_bytes = (lengths >> 8, lengths & 0xFF) if magic.is_flexible else (0, lengths)
    if body_bytes > body_bytes_max:
        raise errors.FrameTooLarge(
            f"a body of {body_bytes} bytes exceeds the limit of {body_bytes_max}", offset=position + 8
        )
    # BinaryProtocol.md, "Packet Structure": the body length counts framing extras, extras, key and value.
    if framing_bytes + extras_bytes + key_bytes > body_bytes:
        raise errors.LengthMismatch(
            f"framing extras, extras and key take {framing_bytes} + {extras_bytes} + {key_bytes} bytes "
            f"of a body of {body_bytes}",
            offset=position + 2,
        )
    end = offset + HEADER_BYTES + body_bytes
    if len(data) < end:
        return None
    extras_at = offset + HEADER_BYTES + framing_bytes
    key_at = extras_at + extras_bytes
    value_at = key_at + key_bytes
    frame = Frame(
        magic=magic,
        opcode=opcode,
        specific=specific,
        opaque=opaque,
        cas=cas,
        datatype=datatype,
        framing_extras=bytes(data[offset + HEADER_BYTES : extras_at]),
        extras=bytes(data[extras_at:key_at]),
        key=bytes(data[key_at:value_at]),
        value=bytes(data[value_at:end]),
    )
    return frame, end


def decode_frames(data: bytes, *, body_bytes_max: int = FRAME_BODY_BYTES_MAX) -> list[Frame]:
    """Return all frames of `data`. Raises `TruncatedFrame` if the data ends inside a frame."""
    buffer = FrameBuffer(body_bytes_max=body_bytes_max)
    buffer.receive_data(data)
    frames = list(buffer.frames())
    buffer.receive_end()
    return frames


class FrameBuffer:
    """Turns received bytes, split anywhere, into frames.

    It holds at most one incomplete frame plus what was received with it: a body above `body_bytes_max` is refused on
    its header. After an error the buffer stays broken and raises the same error again, since nothing after a bad
    header can be trusted.
    """

    def __init__(self, *, body_bytes_max: int = FRAME_BODY_BYTES_MAX) -> None:
        self._body_bytes_max = body_bytes_max
        self._data = bytearray()
        self._start = 0
        self._position = 0
        self._error: errors.BadMagic | errors.FrameTooLarge | errors.LengthMismatch | None = None

    @property
    def buffered_bytes(self) -> int:
        """Bytes received that no frame has taken yet."""
        return len(self._data) - self._start

    @property
    def held_bytes(self) -> int:
        """The memory that the buffer uses."""
        return self._data.__alloc__()

    def receive_data(self, data: bytes | bytearray | memoryview) -> None:
        if self._error is not None:
            return  # What follows a bad header is never read, so it must not pile up either.
        self.free_taken()
        self._data += data

    def free_taken(self) -> None:
        """Free the memory of taken frames: once per turn, because once per frame would be quadratic."""
        if self._start:
            del self._data[: self._start]
            self._start = 0

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that are complete by now."""
        while (frame := self.next_frame()) is not None:
            yield frame

    def next_frame(self) -> Frame | None:
        if self._error is not None:
            raise copy(self._error)
        try:
            decoded = decode_frame(
                self._data, self._start, body_bytes_max=self._body_bytes_max, position=self._position
            )
        except (errors.BadMagic, errors.FrameTooLarge, errors.LengthMismatch) as error:
            self._error = copy(error)  # The one that is raised refers to this buffer, by its traceback.
            self._data.clear()
            self._start = 0
            raise
        if decoded is None:
            return None
        frame, end = decoded
        self._position += end - self._start
        self._start = end
        return frame

    def peek(self) -> memoryview:
        """The bytes that no frame has taken yet. Release the view before anything else is received."""
        return memoryview(self._data)[self._start :]

    def skip(self, frame_bytes: int) -> None:
        """Skip whole frames at the front of `peek`, which were handled elsewhere."""
        self._start += frame_bytes
        self._position += frame_bytes

    def receive_end(self) -> None:
        """Note that the peer has closed. Raises `TruncatedFrame` if a frame is not complete by now."""
        if self.buffered_bytes:
            raise errors.TruncatedFrame(
                f"the bytes end {self.buffered_bytes} bytes into a frame", offset=self._position
            )


# --- frame infos: the optional facts that flexible framing carries before the extras ----------------------------------
#
# BinaryProtocol.md, the sections on headers with "flexible framing extras". Each starts with a byte of two nibbles, id
# and length; a nibble of 15 is an escape, and the number continues in a byte of its own (id escapes first). Requests
# and responses number their infos separately.


_ESCAPE = 15
_U16 = Struct(">H")


class RequestInfo(OpenIntEnum):
    BARRIER = 0
    DURABILITY = 1
    STREAM_ID = 2
    TRACING_CONTEXT = 3
    IMPERSONATE = 4
    PRESERVE_TTL = 5
    EXTRA_PRIVILEGE = 6


class ResponseInfo(OpenIntEnum):
    SERVER_DURATION = 0
    READ_UNITS = 1
    WRITE_UNITS = 2
    THROTTLE_DURATION = 3


class DurabilityLevel(OpenIntEnum):
    MAJORITY = 1
    MAJORITY_AND_PERSIST_ON_ACTIVE = 2
    PERSIST_TO_MAJORITY = 3


@dataclass(frozen=True, slots=True)
class FrameInfo:
    """One frame info: its id and its bytes. Unknown ids are kept as they came."""

    id: int
    data: bytes = b""


# --- the infos that have a meaning of their own -------------------------------------------------------------------


def stream_id(sid: int) -> FrameInfo:
    """The `sid` of a stream, which every message of it carries."""
    if not 0 <= sid <= STREAM_ID_MAX:
        raise errors.LocalProtocolError(f"{sid} is not a 16-bit stream id")
    return FrameInfo(RequestInfo.STREAM_ID, _U16.pack(sid))


def durability(level: DurabilityLevel, *, timeout_ms: int | None = None) -> FrameInfo:
    """A durable write's level and, if given, how long the server may take."""
    timeout = b"" if timeout_ms is None else _U16.pack(timeout_ms)
    return FrameInfo(RequestInfo.DURABILITY, bytes([level]) + timeout)


def impersonate(user: str) -> FrameInfo:
    return FrameInfo(RequestInfo.IMPERSONATE, user.encode())


def preserve_ttl() -> FrameInfo:
    return FrameInfo(RequestInfo.PRESERVE_TTL)


def server_duration(duration_us: float) -> FrameInfo:
    """How long the server took, on a curve that gives two bytes a range of two minutes."""
    return FrameInfo(ResponseInfo.SERVER_DURATION, _U16.pack(min(0xFFFF, round((duration_us * 2) ** (1 / 1.74)))))


def find(infos: tuple[FrameInfo, ...], wanted: int) -> FrameInfo | None:
    return next((info for info in infos if info.id == wanted), None)


def decode_stream_id(infos: tuple[FrameInfo, ...]) -> int | None:
    """Return the `sid` that a request carries, or None."""
    return _find_u16(infos, RequestInfo.STREAM_ID, "a stream id")


def decode_durability(infos: tuple[FrameInfo, ...]) -> tuple[DurabilityLevel, int | None] | None:
    """Return the durability level and time-out in milliseconds that a request asks for, or None."""
    info = find(infos, RequestInfo.DURABILITY)
    if info is None:
        return None
    if len(info.data) not in (1, 3):
        raise errors.MalformedFrameInfo(f"a durability requirement of {len(info.data)} bytes, not 1 or 3")
    timeout_ms = int(_U16.unpack(info.data[1:])[0]) if len(info.data) == 3 else None
    return DurabilityLevel(info.data[0]), timeout_ms


def decode_server_duration(infos: tuple[FrameInfo, ...]) -> float | None:
    """Return the microseconds that a server took, or None if the response does not say."""
    encoded = _find_u16(infos, ResponseInfo.SERVER_DURATION, "a server duration")
    return None if encoded is None else encoded**1.74 / 2


def _find_u16(infos: tuple[FrameInfo, ...], wanted: int, what: str) -> int | None:
    info = find(infos, wanted)
    if info is None:
        return None
    if len(info.data) != _U16.size:
        raise errors.MalformedFrameInfo(f"{what} of {len(info.data)} bytes, not 2")
    return int.from_bytes(info.data)


# --- the section --------------------------------------------------------------------------------------------------


def encode_frame_infos(infos: tuple[FrameInfo, ...]) -> bytes:
    encoded = bytearray()
    for info in infos:
        length = len(info.data)
        if not 0 <= info.id <= _ESCAPE + 0xFF or length > _ESCAPE + 0xFF:
            raise errors.LocalProtocolError(f"frame info {info.id} of {length} bytes does not fit its header")
        encoded.append(min(info.id, _ESCAPE) << 4 | min(length, _ESCAPE))
        if info.id >= _ESCAPE:
            encoded.append(info.id - _ESCAPE)
        if length >= _ESCAPE:
            encoded.append(length - _ESCAPE)
        encoded += info.data
    return bytes(encoded)


def decode_frame_infos(data: bytes) -> tuple[FrameInfo, ...]:
    infos = []
    at = 0
    while at < len(data):
        start = at
        info_id, length = data[at] >> 4, data[at] & 0x0F
        at += 1
        if info_id == _ESCAPE:
            info_id, at = _escaped(data, at)
        if length == _ESCAPE:
            length, at = _escaped(data, at)
        if at + length > len(data):
            raise errors.MalformedFrameInfo(f"frame info {info_id} claims {length} bytes", offset=start)
        infos.append(FrameInfo(info_id, data[at : at + length]))
        at += length
    return tuple(infos)


def _escaped(data: bytes, at: int) -> tuple[int, int]:
    if at >= len(data):
        raise errors.MalformedFrameInfo("a frame info ends in the middle of its header", offset=at)
    return data[at] + _ESCAPE, at + 1


# --- collection ids as unsigned LEB128, the prefix of every key on a collection-aware connection ----------------------
#
# kv_engine, docs/Collections.md. Seven bits to a byte, least significant first; the top bit says that another byte
# follows. Ids have 32 bits, so at most five bytes. Only the shortest form is accepted: two spellings of one id would
# make two keys of one document.


_U32_MAX = 2**32 - 1


def encode_collection_id(collection_id: int) -> bytes:
    if not 0 <= collection_id <= _U32_MAX:
        raise errors.LocalProtocolError(f"{collection_id} is not a 32-bit collection id")
    return encode_leb128(collection_id)


def decode_collection_id(data: bytes, offset: int = 0) -> tuple[CollectionId, int]:
    """Return the id that starts at `offset`, and the offset of what follows it."""
    value, end = decode_leb128(data, offset, "the collection id")
    return CollectionId(value), end


def encode_leb128(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def decode_leb128(data: bytes, offset: int, what: str) -> tuple[int, int]:
    """Return the 32-bit number that starts at `offset`, and the offset of what follows. `what` names it in errors."""
    value = 0
    for index in range(LEB128_BYTES_MAX):
        if offset + index >= len(data):
            raise errors.MalformedLeb128(f"{what} is cut off", offset=offset + index)
        byte = data[offset + index]
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            if byte == 0 and index > 0:
                raise errors.MalformedLeb128(f"{what} is not in its shortest form", offset=offset)
            if value > _U32_MAX:
                raise errors.MalformedLeb128(f"{what} exceeds 32 bits", offset=offset)
            return value, offset + index + 1
    raise errors.MalformedLeb128(f"{what} exceeds {LEB128_BYTES_MAX} bytes", offset=offset)
