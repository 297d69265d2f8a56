"""`headwater decode`: print a capture as JSON, or as annotated frames drawn like the packets in the specification."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from rich.console import Console
from rich.text import Text

from headwater.cli.frame_view import (
    FrameView,
    Part,
    as_text,
    is_secret,
    shorten,
    show_bytes,
    value_offset,
    view_dcp_frame,
    view_upr_frame,
)
from headwater.cli.options import GivenOptions, options_from
from headwater.cli.output import click
from headwater.errors import BadMagic, CaptureError, LengthMismatch
from headwater.options import option
from headwater.phrases import printable
from headwater.protocol.capture import CapturedFrame, CaptureFault, CaptureFormat, read_capture, read_frames
from headwater.protocol.frames import HEADER_BYTES, Frame, encode_collection_id

LIMIT_BYTES = 256 * 1024 * 1024
VALUE_BYTES_SHOWN = 256
PROBLEMS_SHOWN_MAX = 20
EXIT_UNDECODED = 1

_HINTS = {
    BadMagic: "Cut what stands before the next frame; on a TLS port there is nothing to see",
    LengthMismatch: "Check that the input begins at the first byte of a frame",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """The options of the command."""

    as_json: bool = option("Print one JSON object per frame, one per line.", False, cli_name="--json")
    input_format: str | None = option(
        "The format of the input. By default, it is detected from the first bytes.",
        cli_type=click.Choice([member.value for member in CaptureFormat]),
    )
    collections: bool | None = option(
        "Whether keys start with a collection id. By default, the HELLO responses decide.",
        cli_name="--collections/--no-collections",
    )
    upr: bool = option("Decode the UPR draft, the predecessor of DCP.", False)
    grid: bool = option("Draw the bytes of every frame.", True, cli_name="--grid/--no-grid")
    value_bytes: int = option("How many bytes of a value to show.", VALUE_BYTES_SHOWN, cli_type=click.IntRange(min=0))
    limit_bytes: int = option("Maximum size of the input.", LIMIT_BYTES, cli_type=click.IntRange(min=1))


@click.command()
@click.argument("source", metavar="FILE", type=click.File("rb"))
@options_from(DecodeOptions)
def decode(source: BinaryIO, given: GivenOptions) -> None:
    """Print the frames of a capture, field by field.

    FILE is hex text (a paste, a hex dump, an annotated session), raw bytes, or a pcap or pcapng file; - reads standard
    input, to its end. The offset of a frame counts the bytes in its direction of its connection.

    The exit code is 1 if some bytes could not be decoded; standard error says which, and what to do. Passwords of SASL
    PLAIN are never shown.

    \b
    Examples:
      echo 805c0000 00000000 00000000 00000007 0000000000000000 |
        headwater decode -
      tcpdump -i any -s 0 -w dcp.pcap port 11210
      headwater decode dcp.pcap
      headwater decode --json dcp.pcap |
        jq -c 'select(.opcode == "DCP_MUTATION") | [.extras.seqno, .key]'
    """
    asked, report = given.make(DecodeOptions), _Report()
    capture_format = CaptureFormat(asked.input_format) if asked.input_format else None
    view_frame = view_upr_frame if asked.upr else view_dcp_frame
    value_bytes = asked.value_bytes
    try:
        data = _read(source, asked.limit_bytes)
        found = read_frames(read_capture(data, capture_format), collections=asked.collections)
        views = _views(found, lambda captured: view_frame(captured, value_bytes_max=value_bytes), report)
        if asked.as_json:
            for view in views:
                if isinstance(view, FrameView):
                    sys.stdout.write(json_line(view, value_bytes_max=value_bytes) + "\n")
        else:
            _write_annotated(views, grid=asked.grid, value_bytes=value_bytes)
    except CaptureError as error:
        report.add(str(error))
    sys.stdout.flush()
    report.print()


def _read(source: BinaryIO, limit_bytes: int) -> bytes:
    data = source.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise CaptureError(
            f"the input is longer than {limit_bytes} bytes",
            hint="Raise --limit-bytes (the input is held in memory), or split the capture (`editcap -c`)",
        )
    return data


# --- what could not be decoded ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    """The messages for standard error: only the first are kept, as a capture may have a fault in every packet."""

    frames: int = 0
    problems: int = 0
    sentences: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        self.problems += 1
        if len(self.sentences) < PROBLEMS_SHOWN_MAX:
            self.sentences.append(printable(sentence))

    def add_fault(self, fault: CaptureFault) -> None:
        place = ", ".join(part for part in (str(fault.flow), fault.where) if part)
        hint = _HINTS.get(type(fault.error), fault.error.hint)
        self.add(f"{place}{': ' if place else ''}{fault.error.reason}. {hint}")

    def print(self) -> None:
        """Print the messages and exit with the code for them. Without any problem, print nothing and return."""
        if not self.problems:
            if not self.frames:
                click.echo("There are no frames in the input", err=True)
            return
        for sentence in self.sentences:
            click.echo(f"Error: {sentence}", err=True)
        if self.problems > len(self.sentences):
            click.echo(f"Error: and {self.problems - len(self.sentences)} more of that kind", err=True)
        sys.exit(EXIT_UNDECODED)


def _views(
    found: Iterable[CapturedFrame | CaptureFault], view: Callable[[CapturedFrame], FrameView], report: _Report
) -> Iterator[FrameView | CaptureFault]:
    """Yield a view of every frame. Faults in a frame, or between frames, are added to `report`."""
    for item in found:
        if isinstance(item, CaptureFault):
            report.add_fault(item)
            yield item
            continue
        report.frames += 1
        seen = view(item)
        if seen.error:
            hint = "Its fields are shown as they came: its sender is wrong, or --collections or --upr is"
            report.add(f"frame #{item.number}, byte {item.offset}: {seen.error}. {hint}")
        yield seen


# --- output -------------------------------------------------------------------------------------------------------


def _write_annotated(views: Iterable[FrameView | CaptureFault], *, grid: bool, value_bytes: int) -> None:
    write = _plain_writer()
    if sys.stdout.isatty():
        console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
        write = lambda line: console.print(Text(line[0], style=line[1]))  # noqa: E731
    for view in views:
        if isinstance(view, CaptureFault):
            flow = printable(f"[{view.flow}] ") if view.flow.connection else ""
            write((f"-- {flow}{view.error.reason}\n", ERROR_STYLE))
            continue
        for line in annotate(view, grid=grid, value_bytes_max=value_bytes):
            write(line)


def _plain_writer() -> Callable[[Line], None]:
    """Write directly to standard output: rich would wrap the lines, and takes a hundred times as long."""
    encoding = sys.stdout.encoding or "utf-8"

    def write(line: Line) -> None:
        text = line[0]
        if not text.isascii():
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        sys.stdout.write(text + "\n")

    return write


# --- the drawing: four bytes to a row, with the offset of the row --------------------------------------------------


VALUE_BYTES_DRAWN_MAX = 64
"""How much of a value is drawn. Header, extras and key are drawn in full."""

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
"""Used in the key and the value, whose bytes are often characters."""


# --- the annotated print ----------------------------------------------------------------------------------------------

Line = tuple[str, str]
"""A line of text and its style on a terminal."""

TITLE_STYLE = "bold cyan"
GRID_STYLE = "dim"
FIELD_STYLE = ""
ERROR_STYLE = "bold red"

_MARGIN = " " * 4
_OFFSET_CHARS_MIN = 7


def annotate(view: FrameView, *, grid: bool, value_bytes_max: int) -> Iterator[Line]:
    """Yield the lines of one frame."""
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
        content = part.text if part.number is None else f"0x{part.number:0{2 * part.width_bytes}x}"
        yield f"{_MARGIN}{name:<{name_chars}} {_offset(part):<{offset_chars}}: {content}{meaning}".rstrip()


def _offset(part: Part) -> str:
    """Return the offset in the specification's notation: (4), (2,3), (8-11)."""
    if part.offset is None or not part.width_bytes:
        return ""
    last = part.offset + part.width_bytes - 1
    if part.width_bytes == 1:
        return f"({part.offset})"
    return f"({part.offset}{',' if part.width_bytes == 2 else '-'}{last})"


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
        "extras": {part.name: part.text if part.number is None else int(part.number) for part in view.extras},
        # Only names and dates: a plain decimal would repeat the number in `extras`.
        "meanings": {one.name: one.meaning for one in view.extras if one.meaning and not one.meaning.isdigit()},
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
    if value.document:
        shown = shorten(value.document, bytes_max)
        text = as_text(shown)
        members |= {"value_hex": shown.hex()} if text is None else {"value": text}
        if len(shown) < len(value.document):
            members["value_truncated"] = True
    return members
