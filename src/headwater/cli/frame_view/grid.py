"""The bytes of a frame as the specification draws them: four to a row, with the offset of the row."""

from __future__ import annotations

from collections.abc import Iterator

from headwater.cli.frame_view.values import is_secret, value_offset
from headwater.protocol.frames import HEADER_BYTES, Frame

VALUE_BYTES_DRAWN_MAX = 64
"""Of the value; header, extras and key are drawn whole."""

_ROW_BYTES = 4
_MARGIN = " " * 8
_CELL_CHARS = 15
_HEAD = (
    "      Byte/     0       |       1       |       2       |       3       |",
    "         /              |               |               |               |",
    f"{_MARGIN}|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|0 1 2 3 4 5 6 7|",
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
        yield f"{_MARGIN}| ... {len(frame.value) - drawn_bytes} more bytes of value"


def _rule(cells: int) -> str:
    return _MARGIN + "+" + ("-" * _CELL_CHARS + "+") * cells


def _text_cell(byte: int) -> str:
    char = f" ('{chr(byte)}')" if 0x20 <= byte < 0x7F else ""
    return f" 0x{byte:02x}{char}".ljust(_CELL_CHARS)


_CELLS = tuple(f" 0x{byte:02x}".ljust(_CELL_CHARS) for byte in range(256))
_TEXT_CELLS = tuple(_text_cell(byte) for byte in range(256))
"""In key and value, where bytes are often characters."""
