"""`headwater decode`: print a capture as annotated frames."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import rich_click as click
from rich.console import Console
from rich.text import Text

from headwater.cli.frame_view import (
    ERROR_STYLE,
    FrameView,
    annotate,
    json_line,
    view_dcp_frame,
    view_upr_frame,
)
from headwater.cli.frame_view.printing import Line
from headwater.errors import BadMagic, CaptureError, LengthMismatch
from headwater.phrases import printable
from headwater.protocol.capture import (
    CapturedFrame,
    CaptureFault,
    CaptureFormat,
    read_capture,
    read_frames,
)

LIMIT_BYTES = 256 * 1024 * 1024
VALUE_BYTES_SHOWN = 256
PROBLEMS_SHOWN_MAX = 20
EXIT_UNDECODED = 1

_HINTS = {
    BadMagic: "Cut what stands before the next frame; on a TLS port there is nothing to see",
    LengthMismatch: "Check that the input begins at the first byte of a frame",
}


@click.command()
@click.argument("source", metavar="FILE", type=click.File("rb"))
@click.option("--json", "as_json", is_flag=True, help="One JSON object a frame, one frame a line.")
@click.option(
    "--input-format",
    type=click.Choice([member.value for member in CaptureFormat]),
    help="What the input is. By default, what its first bytes say.",
)
@click.option(
    "--collections/--no-collections",
    default=None,
    help="Keys start with a collection id, or do not. By default, what the HELLO responses say.",
)
@click.option("--upr", is_flag=True, help="The frames are of the UPR draft, DCP's forerunner.")
@click.option("--grid/--no-grid", default=True, show_default=True, help="Draw the bytes of every frame.")
@click.option(
    "--value-bytes",
    type=click.IntRange(min=0),
    default=VALUE_BYTES_SHOWN,
    show_default=True,
    help="How much of a value to show.",
)
@click.option(
    "--limit-bytes",
    type=click.IntRange(min=1),
    default=LIMIT_BYTES,
    show_default=True,
    help="The longest input that is read.",
)
def decode(
    source: BinaryIO,
    as_json: bool,
    input_format: str | None,
    collections: bool | None,
    upr: bool,
    grid: bool,
    value_bytes: int,
    limit_bytes: int,
) -> None:
    """Print the frames of a capture, field by field.

    FILE is hex text (a paste, a hex dump, an annotated session), raw bytes, or a pcap or pcapng file; - reads standard
    input, to its end. The offset of a frame counts the bytes of its direction of its connection.

    The exit code is 1 if some bytes could not be decoded: standard error says which, and what to do. Passwords of SASL
    PLAIN are not shown.

    \b
    Examples:
      echo 805c0000 00000000 00000000 00000007 0000000000000000 |
        headwater decode -
      tcpdump -i any -s 0 -w dcp.pcap port 11210
      headwater decode dcp.pcap
      headwater decode --json dcp.pcap |
        jq -c 'select(.opcode == "DCP_MUTATION") | [.extras.seqno, .key]'
    """
    report = _Report()
    capture_format = CaptureFormat(input_format) if input_format else None
    view_frame = view_upr_frame if upr else view_dcp_frame
    try:
        found = read_frames(read_capture(_read(source, limit_bytes), capture_format), collections=collections)
        views = _views(found, lambda captured: view_frame(captured, value_bytes_max=value_bytes), report)
        if as_json:
            _write_json(views, value_bytes)
        else:
            _write_annotated(views, grid=grid, value_bytes=value_bytes)
    except CaptureError as error:
        report.add(str(error))
    sys.stdout.flush()
    report.print()


def _read(source: BinaryIO, limit_bytes: int) -> bytes:
    data = source.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise CaptureError(
            f"the input is longer than {limit_bytes} bytes",
            hint="Raise --limit-bytes (it is held in memory), or cut the capture (`editcap -c`)",
        )
    return data


# --- what could not be decoded ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    """The sentences for standard error. A damaged capture may have a fault a packet, so not all are kept."""

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
        """Print the sentences and end with the exit code for them. Without a problem, nothing is printed."""
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
    """A view of every frame; what is wrong with it, or between frames, is noted in `report`."""
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


def _write_json(views: Iterable[FrameView | CaptureFault], value_bytes: int) -> None:
    for view in views:
        if isinstance(view, FrameView):
            sys.stdout.write(json_line(view, value_bytes_max=value_bytes) + "\n")


def _write_annotated(views: Iterable[FrameView | CaptureFault], *, grid: bool, value_bytes: int) -> None:
    write = _terminal_writer() if sys.stdout.isatty() else _plain_writer()
    for view in views:
        if isinstance(view, CaptureFault):
            flow = printable(f"[{view.flow}] ") if view.flow.connection else ""
            write((f"-- {flow}{view.error.reason}\n", ERROR_STYLE))
            continue
        for line in annotate(view, grid=grid, value_bytes_max=value_bytes):
            write(line)


def _plain_writer() -> Callable[[Line], None]:
    """Straight to the stream: rich would wrap, and takes a hundred times as long."""
    encoding = sys.stdout.encoding or "utf-8"

    def write(line: Line) -> None:
        text = line[0]
        if not text.isascii():
            text = text.encode(encoding, "backslashreplace").decode(encoding)
        sys.stdout.write(text + "\n")

    return write


def _terminal_writer() -> Callable[[Line], None]:
    console = Console(soft_wrap=True, highlight=False, markup=False, emoji=False)

    def write(line: Line) -> None:
        console.print(Text(line[0], style=line[1]))

    return write
