"""The parts of a frame: what the annotated print and the JSON print are both made of.

`frames` makes views of frames from these, `printing` prints them. The password of SASL PLAIN never gets into a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import IntFlag
from typing import Any

from headwater.errors import MalformedFrameInfo
from headwater.protocol.capture import CapturedFrame
from headwater.protocol.features import Opcode
from headwater.protocol.frames import (
    HEADER_BYTES,
    Frame,
    FrameInfo,
    RequestInfo,
    ResponseInfo,
    decode_durability,
    decode_frame_infos,
    decode_server_duration,
    decode_stream_id,
    encode_frame_infos,
)
from headwater.protocol.messages import Message
from headwater.protocol.messages.base import NO_FIELDS, Layout
from headwater.protocol.messages.dcp_changes import MARKER_V2_VALUES, SnapshotMarker, SystemEvent
from headwater.protocol.messages.dcp_streams import (
    FAILOVER_ENTRY,
    ROLLBACK_VALUE,
    GetFailoverLogResponse,
    StreamRequestResponse,
)
from headwater.protocol.numbers import RELATIVE_EXPIRY_S_MAX, SEQNO_MAX, OpenIntEnum
from headwater.protocol.status import Status
from headwater.protocol.system_events import PACKED_VALUES, decode_event
from headwater.protocol.values import Datatype, decode_xattrs, decompress

# --- numbers ------------------------------------------------------------------------------------------------------


_TIMES = frozenset({"expiry", "delete_time", "item_exp"})
_END_SEQNOS = frozenset({"end_seqno", "end_by_seqno"})
_PLAIN = frozenset("\t\n\r")


def number_meaning(name: str, number: int) -> str:
    """What a field's number means: flags and enumerations by name, times as dates, large numbers in decimal."""
    if isinstance(number, IntFlag):
        return flag_names(number)
    if isinstance(number, OpenIntEnum):
        return number.name
    if name in _END_SEQNOS and number == SEQNO_MAX:
        return "no end"
    if name in _TIMES and number:
        return time_meaning(number)
    return str(number) if number > 9 and not name.endswith("flags") else ""


def flag_names(flags: IntFlag) -> str:
    """The flags that are set, and in hex the bits that have no name."""
    names = [member.name or "" for member in type(flags) if member in flags]
    known = sum(member for member in type(flags))
    unknown = int(flags) & ~known
    return " | ".join([*names, f"0x{unknown:x}"] if unknown else names)


def time_meaning(time_s: int) -> str:
    if time_s <= RELATIVE_EXPIRY_S_MAX:
        return f"in {time_s} s"
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- bytes --------------------------------------------------------------------------------------------------------


def as_text(data: bytes) -> str | None:
    """The text that bytes are, or None where they are none: not UTF-8, or with control characters."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in _PLAIN for char in text) else None


def shorten(data: bytes, bytes_max: int) -> bytes:
    """The first bytes, not cut within a character where they are text."""
    if len(data) <= bytes_max:
        return data
    cut = bytes_max
    while cut > max(0, bytes_max - 3) and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return data[:cut]


def show_bytes(data: bytes, bytes_max: int) -> str:
    """Bytes for a reader: JSON as it is, other text in quotes, binary in hex; long ones shortened.

    Nothing that a terminal would obey gets through: a captured key may hold escape sequences.
    """
    shown = shorten(data, bytes_max)
    left_out = f" ... {len(data) - len(shown)} more bytes" if len(shown) < len(data) else ""
    text = as_text(shown)
    if text is None:
        return (f"0x{shown.hex()}" if shown else "") + left_out
    line = text.translate({ord("\t"): r"\t", ord("\n"): r"\n", ord("\r"): r"\r"})
    return (line if line.startswith(("{", "[")) else f'"{line}"') + left_out


# --- attributes of messages ---------------------------------------------------------------------------------------


def as_json(value: Any, bytes_max: int) -> Any:
    """A message's attribute as JSON can hold it: enumerations by name, flags as numbers, bytes as text or hex."""
    if isinstance(value, OpenIntEnum):
        return value.name
    if isinstance(value, bytes):
        shown = shorten(value, bytes_max)
        text = as_text(shown)
        return f"0x{shown.hex()}" if text is None else text
    if isinstance(value, tuple):
        return [as_json(item, bytes_max) for item in value]
    if is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name), bytes_max) for field in fields(value)}
    return int(value) if isinstance(value, IntFlag) else value


def in_words(value: Any, bytes_max: int) -> str:
    """A message's attribute on one line."""
    if isinstance(value, OpenIntEnum):
        return value.name
    if isinstance(value, IntFlag):
        return flag_names(value) or "0"
    if isinstance(value, bytes):
        return show_bytes(value, bytes_max)
    if isinstance(value, tuple):
        return ", ".join(in_words(item, bytes_max) for item in value)
    if is_dataclass(value):
        return " ".join(f"{field.name}={in_words(getattr(value, field.name), bytes_max)}" for field in fields(value))
    return str(value)


# --- parts and views --------------------------------------------------------------------------------------------------

ITEMS_SHOWN_MAX = 32
"""Entries of a list in a value, such as a failover log, that the annotated print shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One field: its name, its offset in the frame, its content and what that means."""

    name: str
    offset: int | None = None
    """None for what has no bytes of its own, such as a field inside a compressed value."""
    width_bytes: int = 0
    number: int | None = None
    text: str = ""
    """What is shown where the field is no number."""
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueView:
    """A frame's value as it can be shown: the document without its compression and attributes, or the fields."""

    document: bytes = b""
    inflated_bytes: int | None = None
    xattrs: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] | None = None
    """What a structured value holds, for JSON."""
    parts: tuple[Part, ...] = ()
    """The same for the annotated print."""
    is_secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameView:
    """A frame understood as far as it can be. Where its message is malformed, `error` says how."""

    captured: CapturedFrame
    opcode: str
    title: str
    header: tuple[Part, ...]
    datatype_names: tuple[str, ...] = ()
    frame_infos: tuple[Part, ...] = ()
    extras: tuple[Part, ...] = ()
    key_name: str = "Key"
    key: bytes
    collection_id: int | None = None
    value: ValueView
    more: dict[str, Any] = field(default_factory=dict)
    """Further members for JSON, such as vbucket or status."""
    error: str = ""


def layout_parts(layout: Layout, data: bytes, offset: int) -> Iterator[Part]:
    """The fields of a layout, over and over as long as `data` holds it. `offset` is that of `data` in the frame."""
    if not layout.size_bytes:
        return
    repeats = len(data) // layout.size_bytes
    for index in range(min(repeats, ITEMS_SHOWN_MAX)):
        numbers = layout.unpack(data, index * layout.size_bytes)
        at = offset + index * layout.size_bytes
        for layout_field in layout.fields:
            place: dict[str, Any] = {"name": layout_field.name, "offset": at, "width_bytes": layout_field.width_bytes}
            number: int | bytes = numbers[layout_field.name]
            if isinstance(number, bytes):
                yield Part(**place, text=f"0x{number.hex()}")
            else:
                yield Part(**place, number=number, meaning=number_meaning(layout_field.name, number))
            at += layout_field.width_bytes
    if repeats > ITEMS_SHOWN_MAX:
        yield Part(name="...", text=f"{repeats - ITEMS_SHOWN_MAX} more of these")


def numbers_of(parts: Iterable[Part]) -> dict[str, int | str]:
    return {part.name: part.text if part.number is None else int(part.number) for part in parts}


# --- the header, in the names that the specification's drawings use ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderWords:
    """What the header's fields are called where protocols differ, and what their numbers mean."""

    opcode_meaning: str
    byte_5: str
    byte_5_meaning: str
    bytes_6_7: str
    bytes_6_7_meaning: str
    opaque: str
    opaque_meaning: str = ""


def dcp_words(frame: Frame) -> HeaderWords:
    return HeaderWords(
        opcode_meaning=frame.opcode_name,
        byte_5="Data type",
        byte_5_meaning=flag_names(Datatype(frame.datatype)),
        bytes_6_7="Vbucket" if frame.magic.is_request else "Status",
        bytes_6_7_meaning=_decimal(frame.specific) if frame.magic.is_request else Status(frame.specific).name,
        opaque="Opaque",
    )


def header_parts(frame: Frame, words: HeaderWords) -> tuple[Part, ...]:
    return (
        _part("Magic", 0, 1, frame.magic, frame.magic.name),
        _part("Opcode", 1, 1, frame.opcode, words.opcode_meaning),
        *_length_parts(frame),
        _part("Extra length", 4, 1, len(frame.extras)),
        _part(words.byte_5, 5, 1, frame.datatype, words.byte_5_meaning),
        _part(words.bytes_6_7, 6, 2, frame.specific, words.bytes_6_7_meaning),
        _part("Total body", 8, 4, frame.body_bytes, _decimal(frame.body_bytes)),
        _part(words.opaque, 12, 4, frame.opaque, words.opaque_meaning),
        _part("CAS", 16, 8, frame.cas, _decimal(frame.cas)),
    )


def _length_parts(frame: Frame) -> tuple[Part, ...]:
    key_bytes = len(frame.key)
    if frame.magic.is_flexible:
        framing_bytes = len(frame.framing_extras)
        return (
            _part("Framing length", 2, 1, framing_bytes, _decimal(framing_bytes)),
            _part("Key length", 3, 1, key_bytes, _decimal(key_bytes)),
        )
    return (_part("Key length", 2, 2, key_bytes, _decimal(key_bytes)),)


def _part(name: str, offset: int, width_bytes: int, number: int, meaning: str = "") -> Part:
    return Part(name=name, offset=offset, width_bytes=width_bytes, number=number, meaning=meaning)


def _decimal(number: int) -> str:
    return str(number) if number > 9 else ""


# --- frame infos --------------------------------------------------------------------------------------------------


def frame_info_parts(frame: Frame) -> tuple[Part, ...]:
    """One part an info, or one for the whole section where it does not parse (the message's error says why)."""
    section = frame.framing_extras
    if not section:
        return ()
    try:
        infos = decode_frame_infos(section)
    except MalformedFrameInfo:
        return (_info_part("frame infos", HEADER_BYTES, section, ""),)
    parts = []
    at = HEADER_BYTES
    for info in infos:
        encoded = encode_frame_infos((info,))
        name = (RequestInfo if frame.magic.is_request else ResponseInfo)(info.id).name
        parts.append(_info_part(name, at, encoded, _meaning(info, is_request=frame.magic.is_request)))
        at += len(encoded)
    return tuple(parts)


def _info_part(name: str, offset: int, data: bytes, meaning: str) -> Part:
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


# --- the value: a document with its attributes, a structure with fields, or bytes ---------------------------------


_SHARED_FIELDS = frozenset(
    {"opaque", "cas", "datatype", "frame_infos", "key", "value", "extras", "collection_id", "opcode", "status"}
)


def value_offset(frame: Frame) -> int:
    return HEADER_BYTES + frame.body_bytes - len(frame.value)


def read_value(frame: Frame, message: Message | None, extras: Layout, *, bytes_max: int) -> ValueView:
    """The value as it can be shown. Raises where its compression, attributes or event are malformed."""
    if is_secret(frame):
        return ValueView(is_secret=True)
    if isinstance(message, SystemEvent):
        return _structured(frame, _event_layout(message), _event_fields(message), bytes_max)
    if message is None or "value" in {field.name for field in fields(message)}:
        return _document(frame)
    return _structured(frame, _value_layout(frame, message), _value_fields(message, extras), bytes_max)


def is_secret(frame: Frame) -> bool:
    """SASL PLAIN carries the password itself, which has no business in a bug report."""
    return frame.magic.is_request and frame.opcode == Opcode.SASL_AUTH and frame.key == b"PLAIN"


# --- documents ----------------------------------------------------------------------------------------------------


def _document(frame: Frame) -> ValueView:
    document = frame.value
    inflated_bytes = None
    if document and frame.datatype & Datatype.SNAPPY:
        document = decompress(document)
        inflated_bytes = len(document)
    xattrs = {}
    if document and frame.datatype & Datatype.XATTR:
        split = decode_xattrs(document)
        document = split.body
        xattrs = {name: json_text.decode(errors="replace") for name, json_text in split.xattrs.items()}
    return ValueView(document=document, inflated_bytes=inflated_bytes, xattrs=xattrs)


def document_json(document: bytes, *, bytes_max: int) -> dict[str, Any]:
    """The document as JSON members: text where it is text, hex where not, and whether that is all of it."""
    shown = shorten(document, bytes_max)
    text = as_text(shown)
    members: dict[str, Any] = {"value_hex": shown.hex()} if text is None else {"value": text}
    return members if len(shown) == len(document) else {**members, "value_truncated": True}


# --- structures ---------------------------------------------------------------------------------------------------


def _structured(frame: Frame, layout: Layout, members: dict[str, Any], bytes_max: int) -> ValueView:
    """Drawn by the layout that its message decodes it with; where there is none, by the fields."""
    if not frame.value:
        return ValueView()
    drawn = tuple(layout_parts(layout, frame.value, value_offset(frame)))
    return ValueView(
        fields={name: as_json(value, bytes_max) for name, value in members.items()},
        parts=drawn or tuple(_parts_in_words(members, bytes_max)),
    )


def _value_layout(frame: Frame, message: Message) -> Layout:
    if isinstance(message, StreamRequestResponse):
        return FAILOVER_ENTRY if message.rollback_seqno is None else ROLLBACK_VALUE
    if isinstance(message, GetFailoverLogResponse):
        return FAILOVER_ENTRY
    if isinstance(message, SnapshotMarker):
        return NO_FIELDS if message.version is None else MARKER_V2_VALUES[message.version]
    return NO_FIELDS


def _value_fields(message: Message, extras: Layout) -> dict[str, Any]:
    """The message's own fields that its extras do not hold, without those that this version or status leaves empty."""
    elsewhere = _SHARED_FIELDS | {field.name for field in extras.fields}
    if not hasattr(message, "status"):
        elsewhere |= {"vbucket"}
    names = [field.name for field in fields(message) if field.name not in elsewhere]
    return {name: value for name in names if (value := getattr(message, name)) not in (None, ())}


def _event_layout(message: SystemEvent) -> Layout:
    return PACKED_VALUES.get((message.event, message.version), NO_FIELDS)


def _event_fields(message: SystemEvent) -> dict[str, Any]:
    event = decode_event(message)
    return {field.name: getattr(event, field.name) for field in fields(event) if field.name != "name"}


def _parts_in_words(members: dict[str, Any], bytes_max: int) -> list[Part]:
    parts: list[Part] = []
    for name, value in members.items():
        if isinstance(value, tuple) and value and hasattr(value[0], "__dataclass_fields__"):
            shown = value[:ITEMS_SHOWN_MAX]
            parts += [Part(name=f"{name}[{i}]", text=in_words(item, bytes_max)) for i, item in enumerate(shown)]
            if len(shown) < len(value):
                parts.append(Part(name="...", text=f"{len(value) - len(shown)} more of these"))
        else:
            parts.append(Part(name=name, text=in_words(value, bytes_max)))
    return parts
