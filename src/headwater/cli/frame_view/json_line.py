"""The JSON print: one object a frame, on one line."""

from __future__ import annotations

import json
from typing import Any

from headwater.cli.frame_view.parts import FrameView, numbers_of
from headwater.cli.frame_view.values import document_json
from headwater.protocol.capture import CapturedFrame


def json_line(view: FrameView, *, value_bytes_max: int) -> str:
    frame = view.captured.frame
    members: dict[str, Any] = {
        **_place(view.captured),
        "magic": frame.magic.name,
        "magic_number": int(frame.magic),
        "opcode": view.opcode,
        "opcode_number": frame.opcode,
        **view.more,
        "opaque": frame.opaque,
        "cas": frame.cas,
        "datatype": list(view.datatype_names),
        "frame_infos": [
            {"name": part.name, "hex": part.text.removeprefix("0x"), "meaning": part.meaning}
            for part in view.frame_infos
        ],
        "extras": numbers_of(view.extras),
        "meanings": {part.name: part.meaning for part in view.extras if _is_named(part.meaning)},
        **_key(view),
        "value_length": len(frame.value),
        **_value(view, value_bytes_max),
    }
    if view.error:
        members["error"] = view.error
    return json.dumps(members)


def _place(captured: CapturedFrame) -> dict[str, Any]:
    members: dict[str, Any] = {"frame": captured.number, "offset": captured.offset}
    if captured.where:
        members["where"] = captured.where
    if captured.flow.connection:
        members["connection"] = captured.flow.connection
    if captured.flow.direction is not None:
        members["direction"] = captured.flow.direction.value
    return members


def _is_named(meaning: str) -> bool:
    """A name or a date, not the number once more in decimal."""
    return bool(meaning) and not meaning.isdigit()


def _key(view: FrameView) -> dict[str, Any]:
    members: dict[str, Any] = {} if view.collection_id is None else {"collection_id": view.collection_id}
    text = view.key.decode(errors="replace")
    members["key"] = text
    if text.encode() != view.key:
        members["key_hex"] = view.key.hex()
    return members


def _value(view: FrameView, bytes_max: int) -> dict[str, Any]:
    value = view.value
    if value.is_secret:
        return {"value_hidden": True}
    if value.fields is not None:
        return {"value_fields": value.fields}
    members: dict[str, Any] = {}
    if value.inflated_bytes is not None:
        members["value_inflated_length"] = value.inflated_bytes
    if value.xattrs:
        members["xattrs"] = value.xattrs
    return {**members, **document_json(value.document, bytes_max=bytes_max)} if value.document else members
