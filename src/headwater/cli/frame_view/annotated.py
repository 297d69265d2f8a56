"""The annotated print: a title, the drawing, and the table of fields with offsets, values and meanings."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.cli.escaping import printable
from headwater.cli.frame_view.grid import draw
from headwater.cli.frame_view.meanings import show_bytes
from headwater.cli.frame_view.parts import FrameView, Part
from headwater.cli.frame_view.values import value_offset
from headwater.protocol.leb128 import encode_collection_id

Line = tuple[str, str]
"""A line of text and the style it has on a terminal."""

TITLE_STYLE = "bold cyan"
GRID_STYLE = "dim"
FIELD_STYLE = ""
ERROR_STYLE = "bold red"

_MARGIN = " " * 4
_PLACE_CHARS_MIN = 7


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
    place_chars = max(_PLACE_CHARS_MIN, *(len(_place(part)) for _, part in rows))
    yield f"{_MARGIN}{'Field':<{name_chars}} (offset) (value)"
    for name, part in rows:
        meaning = f" ({part.meaning})" if part.meaning else ""
        yield f"{_MARGIN}{name:<{name_chars}} {_place(part):<{place_chars}}: {_content(part)}{meaning}".rstrip()


def _place(part: Part) -> str:
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
    place = Part(name="Value", offset=value_offset(frame), width_bytes=len(frame.value), text=text, meaning=meaning)
    xattrs = [
        (f"  xattr {printable(name)}", Part(name=name, text=show_bytes(json_text.encode(), bytes_max)))
        for name, json_text in value.xattrs.items()
    ]
    return [*xattrs, ("Value", place)]
