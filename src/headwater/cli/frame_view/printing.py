"""How a view of a frame is printed: annotated, or as a line of JSON.

The annotated print has a title, the bytes as the specification draws them, and a table of fields with offsets, values
and meanings. Nothing that a terminal would obey gets into it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from headwater.cli.frame_view.parts import (
    FrameView,
    Part,
    document_json,
    is_secret,
    numbers_of,
    show_bytes,
    value_offset,
)
from headwater.phrases import printable
from headwater.protocol.capture import CapturedFrame
from headwater.protocol.frames import HEADER_BYTES, Frame
from headwater.protocol.numbers import encode_collection_id

# --- the drawing: four bytes to a row, with the offset of the row --------------------------------------------------


VALUE_BYTES_DRAWN_MAX = 64
"""Of the value; header, extras and key are drawn whole."""

_ROW_BYTES = 4
_GRID_MARGIN = " " * 8
_CELL_CHARS = 15
_HEAD = (
    "      Byte/     0       |       1       |       2       |       3       |",
    "         /              |               |               |               |",
    f"{_GRID_MARGIN}|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|",
)


def draw(frame: Frame) -> Iterator[str]:
    value_at = value_offset(frame)
    drawn_bytes = 0 if is_secret(frame) else min(len(frame.value), VALUE_BYTES_DRAWN_MAX)
    data = frame.encode()[: value_at + drawn_bytes]
    text_at = HEADER_BYTES + len(frame.framing_extras) + len(frame.extras)
    yield from _HEAD
    yield _rule(_ROW_BYTES)
    for at in range(0, len(data), _ROW_BYTES):
        row = data[at : at + _ROW_BYTES]
        cells = "|".join((_TEXT_CELLS if at + i >= text_at else _CELLS)[byte] for i, byte in enumerate(row))
        yield f"{at:>8}|{cells}|"
        yield _rule(len(row))
    if drawn_bytes < len(frame.value):
        yield f"{_GRID_MARGIN}| ... {len(frame.value) - drawn_bytes} more bytes of value"


def _rule(cells: int) -> str:
    return _GRID_MARGIN + "+" + ("-" * _CELL_CHARS + "+") * cells


def _text_cell(byte: int) -> str:
    char = f" ('{chr(byte)}')" if 0x20 <= byte < 0x7F else ""
    return f" 0x{byte:02x}{char}".ljust(_CELL_CHARS)


_CELLS = tuple(f" 0x{byte:02x}".ljust(_CELL_CHARS) for byte in range(256))
_TEXT_CELLS = tuple(_text_cell(byte) for byte in range(256))
"""In key and value, where bytes are often characters."""


# --- the annotated print ----------------------------------------------------------------------------------------------

Line = tuple[str, str]
"""A line of text and the style it has on a terminal."""

TITLE_STYLE = "bold cyan"
GRID_STYLE = "dim"
FIELD_STYLE = ""
ERROR_STYLE = "bold red"

_MARGIN = " " * 4
_OFFSET_CHARS_MIN = 7


def annotate(view: FrameView, *, grid: bool, value_bytes_max: int) -> Iterator[Line]:
    """The lines of one frame."""
    yield _title(view), TITLE_STYLE
    if grid:
        yield from ((line, GRID_STYLE) for line in draw(view.captured.frame))
    yield f"{_MARGIN}{view.title}", FIELD_STYLE
    yield from ((line, FIELD_STYLE) for line in _table(view, value_bytes_max))
    if view.error:
        yield f"{_MARGIN}Error: {view.error}", ERROR_STYLE
    yield "", FIELD_STYLE


def _title(view: FrameView) -> str:
    captured = view.captured
    magic = captured.frame.magic
    words = [f"#{captured.number}", f"byte {captured.offset}"]
    if captured.flow.connection:
        words.append(printable(f"[{captured.flow.connection}]"))
    if captured.flow.direction is not None:
        words.append(captured.flow.direction.value)
    words += [view.title, f"magic 0x{magic:02x} {magic.name}"]
    if captured.where:
        words.append(f"({captured.where})")
    return "  ".join(words)


def _table(view: FrameView, value_bytes_max: int) -> Iterator[str]:
    body = [*view.frame_infos, *view.extras]
    rows = [(part.name, part) for part in view.header]
    rows += [(f"  {part.name.replace('_', ' ')}", part) for part in body]
    rows += _key_rows(view)
    rows += _value_rows(view, value_bytes_max)
    name_chars = max(len(name) for name, _ in rows)
    offset_chars = max(_OFFSET_CHARS_MIN, *(len(_offset(part)) for _, part in rows))
    yield f"{_MARGIN}{'Field':<{name_chars}} (offset) (value)"
    for name, part in rows:
        meaning = f" ({part.meaning})" if part.meaning else ""
        yield f"{_MARGIN}{name:<{name_chars}} {_offset(part):<{offset_chars}}: {_content(part)}{meaning}".rstrip()


def _offset(part: Part) -> str:
    """The offset as the specification writes it: (4), (2,3), (8-11)."""
    if part.offset is None or not part.width_bytes:
        return ""
    last = part.offset + part.width_bytes - 1
    if part.width_bytes == 1:
        return f"({part.offset})"
    return f"({part.offset}{',' if part.width_bytes == 2 else '-'}{last})"


def _content(part: Part) -> str:
    return part.text if part.number is None else f"0x{part.number:0{2 * part.width_bytes}x}"


def _key_rows(view: FrameView) -> list[tuple[str, Part]]:
    frame = view.captured.frame
    if not frame.key:
        return []
    at = value_offset(frame) - len(frame.key)
    rows = []
    if view.collection_id is not None:
        prefix = encode_collection_id(view.collection_id)
        text, meaning = f"0x{prefix.hex()}", f"collection 0x{view.collection_id:x}"
        part = Part(name="collection", offset=at, width_bytes=len(prefix), text=text, meaning=meaning)
        rows.append(("  collection id", part))
        at += len(prefix)
    text = show_bytes(view.key, len(view.key))
    rows.append((view.key_name, Part(name=view.key_name, offset=at, width_bytes=len(view.key), text=text)))
    return rows


def _value_rows(view: FrameView, bytes_max: int) -> list[tuple[str, Part]]:
    frame, value = view.captured.frame, view.value
    if not frame.value:
        return []
    if value.fields is not None:
        return [(f"  {part.name.replace('_', ' ')}", part) for part in value.parts]
    meaning = "" if value.inflated_bytes is None else f"snappy, {value.inflated_bytes} bytes inflated"
    text = f"hidden, {len(frame.value)} bytes" if value.is_secret else show_bytes(value.document, bytes_max)
    whole = Part(name="Value", offset=value_offset(frame), width_bytes=len(frame.value), text=text, meaning=meaning)
    xattrs = [
        (f"  xattr {printable(name)}", Part(name=name, text=show_bytes(json_text.encode(), bytes_max)))
        for name, json_text in value.xattrs.items()
    ]
    return [*xattrs, ("Value", whole)]


# --- JSON ---------------------------------------------------------------------------------------------------------


def json_line(view: FrameView, *, value_bytes_max: int) -> str:
    frame = view.captured.frame
    members: dict[str, Any] = {
        **_json_location(view.captured),
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


def _json_location(captured: CapturedFrame) -> dict[str, Any]:
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
