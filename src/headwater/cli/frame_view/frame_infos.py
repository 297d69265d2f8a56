"""Frame infos as parts: each with its place, and its own meaning where it has one."""

from __future__ import annotations

from headwater.cli.frame_view.parts import Part
from headwater.errors import MalformedFrameInfo
from headwater.protocol.frame_info import (
    FrameInfo,
    RequestInfo,
    ResponseInfo,
    decode_durability,
    decode_frame_infos,
    decode_server_duration,
    decode_stream_id,
    encode_frame_infos,
)
from headwater.protocol.frames import HEADER_BYTES, Frame


def frame_info_parts(frame: Frame) -> tuple[Part, ...]:
    """One part an info, or one for the whole section where it does not parse (the message's error says why)."""
    section = frame.framing_extras
    if not section:
        return ()
    try:
        infos = decode_frame_infos(section)
    except MalformedFrameInfo:
        return (_part("frame infos", HEADER_BYTES, section, ""),)
    parts = []
    at = HEADER_BYTES
    for info in infos:
        encoded = encode_frame_infos((info,))
        name = (RequestInfo if frame.magic.is_request else ResponseInfo)(info.id).name
        parts.append(_part(name, at, encoded, _meaning(info, is_request=frame.magic.is_request)))
        at += len(encoded)
    return tuple(parts)


def _part(name: str, offset: int, data: bytes, meaning: str) -> Part:
    return Part(name=name, offset=offset, width_bytes=len(data), text=f"0x{data.hex()}", meaning=meaning)


def _meaning(info: FrameInfo, *, is_request: bool) -> str:
    try:
        return _request_meaning(info) if is_request else _response_meaning(info)
    except MalformedFrameInfo as error:
        return error.reason


def _request_meaning(info: FrameInfo) -> str:
    if info.id == RequestInfo.STREAM_ID:
        return f"sid {decode_stream_id((info,))}"
    if info.id == RequestInfo.DURABILITY and (durability := decode_durability((info,))) is not None:
        level, timeout_ms = durability
        return level.name if timeout_ms is None else f"{level.name} within {timeout_ms} ms"
    return ""


def _response_meaning(info: FrameInfo) -> str:
    if info.id == ResponseInfo.SERVER_DURATION and (duration_us := decode_server_duration((info,))) is not None:
        return f"{duration_us:.0f} us"
    return ""
