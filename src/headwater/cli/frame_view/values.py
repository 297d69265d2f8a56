"""The value of a frame: a document with its attributes, a structure with fields, or bytes.

A structured value is drawn by the layout that its message decodes it with; one that has none is shown by its fields.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from headwater.cli.frame_view.meanings import as_json, as_text, in_words, shorten
from headwater.cli.frame_view.parts import ITEMS_SHOWN_MAX, Part, ValueView, layout_parts
from headwater.protocol.compression import decompress
from headwater.protocol.datatype import Datatype
from headwater.protocol.frames import HEADER_BYTES, Frame
from headwater.protocol.messages import Message
from headwater.protocol.messages.dcp_snapshot import MARKER_V2_VALUES, SnapshotMarker
from headwater.protocol.messages.dcp_stream import (
    FAILOVER_ENTRY,
    ROLLBACK_VALUE,
    GetFailoverLogResponse,
    StreamRequestResponse,
)
from headwater.protocol.messages.dcp_system_event import SystemEvent
from headwater.protocol.messages.layout import NO_FIELDS, Layout
from headwater.protocol.opcodes import Opcode
from headwater.protocol.system_events import PACKED_VALUES, decode_event
from headwater.protocol.xattrs import decode_xattrs

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
