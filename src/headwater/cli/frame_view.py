"""What `headwater decode` shows of a captured frame: its parts, with their offsets and meanings.

`view_dcp_frame` and `view_upr_frame` turn a frame into a `FrameView`, which `decode` prints. The frame belongs to
DCP, to the key-value protocol around it or to the UPR draft. A malformed frame never raises: it is shown as far as
its layout is known. A view never contains the password of SASL PLAIN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from enum import IntFlag
from typing import Any

from headwater.errors import MalformedFrameInfo, RemoteProtocolError, UnknownOpcode
from headwater.protocol import frames, upr
from headwater.protocol.capture import CapturedFrame
from headwater.protocol.features import Magic, Opcode, OpenIntEnum, ServerOpcode
from headwater.protocol.manifest import PACKED_VALUES, decode_event
from headwater.protocol.messages import REQUESTS, RESPONSES, SERVER_REQUESTS, Message, dcp_streams, decode_message
from headwater.protocol.messages.base import NO_FIELDS, Layout
from headwater.protocol.messages.dcp_changes import MARKER_V2_VALUES, SnapshotMarker, SystemEvent
from headwater.protocol.numbers import RELATIVE_EXPIRY_S_MAX, SEQNO_MAX
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype, decode_xattrs, decompress

# --- numbers ------------------------------------------------------------------------------------------------------


_TIMES = frozenset({"expiry", "delete_time", "item_exp"})
_END_SEQNOS = frozenset({"end_seqno", "end_by_seqno"})
_PLAIN = frozenset("\t\n\r")


def number_meaning(name: str, number: int) -> str:
    """Describe a field's number: flags and enumerations by name, times as dates, large numbers in decimal."""
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
    """Return the names of the set flags, and in hex the bits that have no name."""
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
    """Return bytes as text, or None if they are not UTF-8 or contain control characters."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text if all(char.isprintable() or char in _PLAIN for char in text) else None


def shorten(data: bytes, bytes_max: int) -> bytes:
    """Return the first bytes. In text, no character is cut in two."""
    if len(data) <= bytes_max:
        return data
    cut = bytes_max
    while cut > max(0, bytes_max - 3) and data[cut] & 0xC0 == 0x80:
        cut -= 1
    return data[:cut]


def show_bytes(data: bytes, bytes_max: int) -> str:
    """Format bytes for a reader: JSON as it is, other text in quotes, binary in hex. Long content is shortened.

    Control characters never get through: a captured key may contain escape sequences for the terminal.
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
    """Convert a message's attribute for JSON: enumerations to names, flags to numbers, bytes to text or hex."""
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
    """Format a message's attribute on one line."""
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
"""How many entries of a list in a value, such as a failover log, the annotated print shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One field: its name, its offset in the frame, its content and its meaning."""

    name: str
    offset: int | None = None
    """None for parts without bytes of their own, such as a field inside a compressed value."""
    width_bytes: int = 0
    number: int | None = None
    text: str = ""
    """The content of a field that is not a number."""
    meaning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueView:
    """A frame's value for display: the document, decompressed and without its attributes, or the value's fields."""

    document: bytes = b""
    inflated_bytes: int | None = None
    xattrs: dict[str, str] = field(default_factory=dict)
    fields: dict[str, Any] | None = None
    """The contents of a structured value, for JSON."""
    parts: tuple[Part, ...] = ()
    """The same for the annotated print."""
    is_secret: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameView:
    """A frame, decoded as far as possible. If its message is malformed, `error` says how."""

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
    """Yield the fields of a layout, repeated for as long as `data` holds it. `data` starts at `offset` in the frame."""
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


# --- the header, in the names that the specification's drawings use ----------------------------------------------


def header_parts(
    frame: frames.Frame, opcode: str, *, byte_5: tuple[str, str], bytes_6_7: tuple[str, str], opaque: tuple[str, str]
) -> tuple[Part, ...]:
    """Return the fields of the header. The names and meanings of some of them differ between protocols."""

    def part(offset: int, width_bytes: int, number: int, name: str, meaning: str | None = None) -> Part:
        shown = _decimal(number) if meaning is None else meaning
        return Part(name=name, offset=offset, width_bytes=width_bytes, number=number, meaning=shown)

    if frame.magic.is_flexible:
        lengths = [part(2, 1, len(frame.framing_extras), "Framing length"), part(3, 1, len(frame.key), "Key length")]
    else:
        lengths = [part(2, 2, len(frame.key), "Key length")]
    return (
        part(0, 1, frame.magic, "Magic", frame.magic.name),
        part(1, 1, frame.opcode, "Opcode", opcode),
        *lengths,
        part(4, 1, len(frame.extras), "Extra length", ""),
        part(5, 1, frame.datatype, *byte_5),
        part(6, 2, frame.specific, *bytes_6_7),
        part(8, 4, frame.body_bytes, "Total body"),
        part(12, 4, frame.opaque, *opaque),
        part(16, 8, frame.cas, "CAS"),
    )


def _decimal(number: int) -> str:
    return str(number) if number > 9 else ""


# --- frame infos --------------------------------------------------------------------------------------------------


def frame_info_parts(frame: frames.Frame) -> tuple[Part, ...]:
    """Return one part per info, or one for the whole section if it is malformed (the message's error says why)."""
    section = frame.framing_extras
    if not section:
        return ()
    try:
        infos = frames.decode_frame_infos(section)
    except MalformedFrameInfo:
        return (_hex_part("frame infos", frames.HEADER_BYTES, section),)
    parts = []
    at = frames.HEADER_BYTES
    for info in infos:
        encoded = frames.encode_frame_infos((info,))
        name = (frames.RequestInfo if frame.magic.is_request else frames.ResponseInfo)(info.id).name
        parts.append(_hex_part(name, at, encoded, _info_meaning(info, is_request=frame.magic.is_request)))
        at += len(encoded)
    return tuple(parts)


def _hex_part(name: str, offset: int, data: bytes, meaning: str = "") -> Part:
    return Part(name=name, offset=offset, width_bytes=len(data), text=f"0x{data.hex()}", meaning=meaning)


def _info_meaning(info: frames.FrameInfo, *, is_request: bool) -> str:
    try:
        if not is_request:
            is_duration = info.id == frames.ResponseInfo.SERVER_DURATION
            duration_us = frames.decode_server_duration((info,)) if is_duration else None
            return "" if duration_us is None else f"{duration_us:.0f} us"
        if info.id == frames.RequestInfo.STREAM_ID:
            return f"sid {frames.decode_stream_id((info,))}"
        if info.id == frames.RequestInfo.DURABILITY and (durability := frames.decode_durability((info,))) is not None:
            level, timeout_ms = durability
            return level.name if timeout_ms is None else f"{level.name} within {timeout_ms} ms"
    except MalformedFrameInfo as error:
        return error.reason
    return ""


# --- the value: a document with its attributes, a structure with fields, or bytes ---------------------------------


_SHARED_FIELDS = frozenset(
    {"opaque", "cas", "datatype", "frame_infos", "key", "value", "extras", "collection_id", "opcode", "status"}
)


def value_offset(frame: frames.Frame) -> int:
    return frames.HEADER_BYTES + frame.body_bytes - len(frame.value)


def read_value(frame: frames.Frame, message: Message | None, extras: Layout, *, bytes_max: int) -> ValueView:
    """Return the value for display. Raises if its compression, attributes or event are malformed."""
    if is_secret(frame):
        return ValueView(is_secret=True)
    if isinstance(message, SystemEvent):
        event = decode_event(message)
        members = {field.name: getattr(event, field.name) for field in fields(event) if field.name != "name"}
        layout = PACKED_VALUES.get((message.event, message.version), NO_FIELDS)
        return _structured(frame, layout, members, bytes_max)
    if message is None or "value" in {field.name for field in fields(message)}:
        return _document(frame)
    return _structured(frame, _value_layout(message), _value_fields(message, extras), bytes_max)


def is_secret(frame: frames.Frame) -> bool:
    """Return whether the value is the password that SASL PLAIN carries, which must not end up in a bug report."""
    return frame.magic.is_request and frame.opcode == Opcode.SASL_AUTH and frame.key == b"PLAIN"


# --- documents ----------------------------------------------------------------------------------------------------


def _document(frame: frames.Frame) -> ValueView:
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


# --- structures ---------------------------------------------------------------------------------------------------


def _structured(frame: frames.Frame, layout: Layout, members: dict[str, Any], bytes_max: int) -> ValueView:
    """Return the parts by the layout that decodes the message's value or, without a layout, by the fields."""
    if not frame.value:
        return ValueView()
    drawn = tuple(layout_parts(layout, frame.value, value_offset(frame)))
    return ValueView(
        fields={name: as_json(value, bytes_max) for name, value in members.items()},
        parts=drawn or tuple(_parts_in_words(members, bytes_max)),
    )


def _value_layout(message: Message) -> Layout:
    if isinstance(message, dcp_streams.StreamRequestResponse):
        return dcp_streams.FAILOVER_ENTRY if message.rollback_seqno is None else dcp_streams.ROLLBACK_VALUE
    if isinstance(message, dcp_streams.GetFailoverLogResponse):
        return dcp_streams.FAILOVER_ENTRY
    if isinstance(message, SnapshotMarker):
        return NO_FIELDS if message.version is None else MARKER_V2_VALUES[message.version]
    return NO_FIELDS


def _value_fields(message: Message, extras: Layout) -> dict[str, Any]:
    """Return the message's own fields, without those in its extras and those empty in this version or status."""
    elsewhere = _SHARED_FIELDS | {field.name for field in extras.fields}
    if not hasattr(message, "status"):
        elsewhere |= {"vbucket"}
    names = [field.name for field in fields(message) if field.name not in elsewhere]
    return {name: value for name in names if (value := getattr(message, name)) not in (None, ())}


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


# --- views of frames --------------------------------------------------------------------------------------------------


def view_dcp_frame(captured: CapturedFrame, *, value_bytes_max: int) -> FrameView:
    """Return the frame with all its fields named. A malformed message is shown as far as its layout is known."""
    frame = captured.frame
    message, error = _decode(captured)
    layout = _extras_layout(frame, message)
    try:
        value = read_value(frame, message, layout, bytes_max=value_bytes_max)
    except RemoteProtocolError as value_error:
        value = ValueView(document=frame.value)
        error = error or value_error.reason
    datatype, status, is_request = Datatype(frame.datatype), Status(frame.specific), frame.magic.is_request
    return FrameView(
        captured=captured,
        opcode=frame.opcode_name,
        title=f"{frame.opcode_name} {'command' if is_request else 'response'}",
        header=header_parts(
            frame,
            frame.opcode_name,
            byte_5=("Data type", flag_names(datatype)),
            bytes_6_7=("Vbucket", _decimal(frame.specific)) if is_request else ("Status", status.name),
            opaque=("Opaque", ""),
        ),
        datatype_names=tuple(flag_names(datatype).split(" | ")) if datatype else (),
        frame_infos=frame_info_parts(frame),
        extras=_extras_parts(frame, layout),
        key=getattr(message, "key", frame.key) or b"",
        collection_id=getattr(message, "collection_id", None),
        value=value,
        more={"vbucket": frame.specific} if is_request else {"status": status.name, "status_number": frame.specific},
        error=error,
    )


def _decode(captured: CapturedFrame) -> tuple[Message | None, str]:
    """Return the frame's message and its fault, if any. A known opcode without a message class here is no fault."""
    frame = captured.frame
    if frame.magic is Magic.SERVER_RESPONSE:
        return None, ""
    try:
        return decode_message(frame, captured.negotiated), ""
    except UnknownOpcode as error:
        names = ServerOpcode if frame.magic is Magic.SERVER_REQUEST else Opcode
        return None, "" if names(frame.opcode).is_known else error.reason
    except RemoteProtocolError as error:
        return None, error.reason


def _extras_layout(frame: frames.Frame, message: Message | None) -> Layout:
    """Return the layout that fits the extras' length, of the message's class or, if malformed, of the opcode's."""
    cls = type(message) if message is not None else _message_class(frame)
    layouts = () if cls is None else cls.layouts
    return next((layout for layout in layouts if layout.size_bytes == len(frame.extras)), NO_FIELDS)


def _message_class(frame: frames.Frame) -> type[Message] | None:
    if frame.magic is Magic.SERVER_REQUEST:
        return SERVER_REQUESTS.get(frame.opcode)
    if frame.magic is Magic.SERVER_RESPONSE:
        return None
    if frame.magic.is_request:
        return REQUESTS.get(frame.opcode)
    response = RESPONSES.get(frame.opcode)
    return response if response is not None and frame.specific in response.statuses else None


def _extras_parts(frame: frames.Frame, layout: Layout) -> tuple[Part, ...]:
    offset = frames.HEADER_BYTES + len(frame.framing_extras)
    if layout.size_bytes or not frame.extras:
        return tuple(layout_parts(layout, frame.extras, offset))
    return (_hex_part("extras", offset, frame.extras),)


# --- the UPR draft: the same frames, and other names for nearly everything ---------------------------------------


_OPCODE_NAMES = {int(opcode): opcode.name for opcode in upr.UprOpcode}


def view_upr_frame(captured: CapturedFrame, *, value_bytes_max: int) -> FrameView:
    frame = captured.frame
    packet: upr.UprPacket | None = None
    error = ""
    try:
        packet = upr.decode_packet(frame)
    except RemoteProtocolError as fault:
        error = fault.reason
    opcode = _OPCODE_NAMES.get(frame.opcode, f"UNKNOWN_0x{frame.opcode:02x}")
    name = packet.draft_name if packet is not None else ""
    return FrameView(
        captured=captured,
        opcode=opcode,
        title=f"UPR {name or opcode}",
        header=header_parts(
            frame,
            f"UPR {opcode}",
            byte_5=("Request type", packet.reason.name if isinstance(packet, upr.UprStreamEnd) else name),
            bytes_6_7=("Vbucket", _decimal(frame.specific)),
            opaque=("Request ID", str(frame.opaque)),
        ),
        extras=_extras_parts(frame, NO_FIELDS if packet is None else packet.layout()),
        key_name="Group ID" if packet is not None and packet.key_field == "group_id" else "Key",
        key=frame.key,
        value=_upr_value(frame, packet, value_bytes_max),
        more={"packet": name, "vbucket": frame.specific, "request_type": frame.datatype},
        error=error,
    )


def _upr_value(frame: frames.Frame, packet: upr.UprPacket | None, bytes_max: int) -> ValueView:
    members: dict[str, Any]
    if isinstance(packet, upr.UprFailoverLogResponse):
        members = {"failover_log": packet.failover_log}
    elif isinstance(packet, upr.UprRollback):
        members = {"rollback_seqno": packet.rollback_seqno}
    else:
        return ValueView(document=frame.value)
    return ValueView(
        fields={name: as_json(value, bytes_max) for name, value in members.items()},
        parts=tuple(layout_parts(packet.value_layout, frame.value, value_offset(frame))),
    )
