"""Frame infos: the optional facts that flexible framing carries before the extras.

Each starts with a byte of two nibbles, id and length; a nibble of 15 is an escape, and the number goes on in a byte
of its own (id escapes first). Requests and responses number their infos apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct

from headwater.errors import LocalProtocolError, MalformedFrameInfo
from headwater.protocol.limits import STREAM_ID_MAX
from headwater.protocol.numbers import OpenIntEnum

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
    """One frame info: its id and its bytes. Ids nobody knows are kept as they came."""

    id: int
    data: bytes = b""


# --- the infos that have a meaning of their own -------------------------------------------------------------------


def stream_id(sid: int) -> FrameInfo:
    """The `sid` of a stream, on every message of it."""
    if not 0 <= sid <= STREAM_ID_MAX:
        raise LocalProtocolError(f"{sid} is not a 16-bit stream id")
    return FrameInfo(RequestInfo.STREAM_ID, _U16.pack(sid))


def durability(level: DurabilityLevel, *, timeout_ms: int | None = None) -> FrameInfo:
    """A durable write's level and, where given, how long the server may take."""
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
    """The `sid` a request carries, or None."""
    info = find(infos, RequestInfo.STREAM_ID)
    if info is None:
        return None
    if len(info.data) != _U16.size:
        raise MalformedFrameInfo(f"a stream id of {len(info.data)} bytes, not 2")
    return int(_U16.unpack(info.data)[0])


def decode_durability(infos: tuple[FrameInfo, ...]) -> tuple[DurabilityLevel, int | None] | None:
    """The durability level and time-out in milliseconds that a request asks for, or None."""
    info = find(infos, RequestInfo.DURABILITY)
    if info is None:
        return None
    if len(info.data) not in (1, 3):
        raise MalformedFrameInfo(f"a durability requirement of {len(info.data)} bytes, not 1 or 3")
    timeout_ms = int(_U16.unpack(info.data[1:])[0]) if len(info.data) == 3 else None
    return DurabilityLevel(info.data[0]), timeout_ms


def decode_server_duration(infos: tuple[FrameInfo, ...]) -> float | None:
    """The microseconds a server took, or None where the response does not say."""
    info = find(infos, ResponseInfo.SERVER_DURATION)
    if info is None:
        return None
    if len(info.data) != _U16.size:
        raise MalformedFrameInfo(f"a server duration of {len(info.data)} bytes, not 2")
    return float(_U16.unpack(info.data)[0] ** 1.74 / 2)


# --- the section --------------------------------------------------------------------------------------------------


def encode_frame_infos(infos: tuple[FrameInfo, ...]) -> bytes:
    encoded = bytearray()
    for info in infos:
        length = len(info.data)
        if not 0 <= info.id <= _ESCAPE + 0xFF or length > _ESCAPE + 0xFF:
            raise LocalProtocolError(f"frame info {info.id} of {length} bytes does not fit its header")
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
            raise MalformedFrameInfo(f"frame info {info_id} claims {length} bytes", offset=start)
        infos.append(FrameInfo(info_id, data[at : at + length]))
        at += length
    return tuple(infos)


def _escaped(data: bytes, at: int) -> tuple[int, int]:
    if at >= len(data):
        raise MalformedFrameInfo("a frame info ends in the middle of its header", offset=at)
    return data[at] + _ESCAPE, at + 1
