"""The forms in which changes are printed."""

from __future__ import annotations

import shutil
import sys
from enum import StrEnum
from typing import Protocol

import pyarrow as pa
from rich.console import Console

from headwater.cli.tailing.arrow_stream import ArrowStream
from headwater.cli.tailing.json_lines import JsonLines
from headwater.cli.tailing.pretty_lines import PrettyLines
from headwater.client.batches import change_schema


class Format(StrEnum):
    PRETTY = "pretty"
    JSONL = "jsonl"
    ARROW = "arrow"


class Encoder(Protocol):
    """Batches to bytes."""

    def encode(self, batch: pa.RecordBatch) -> bytes | memoryview:
        """Good until the next call."""

    def end(self) -> bytes:
        """What comes behind the last batch."""


def encoder(format_: Format, *, no_value: bool, xattrs: bool) -> Encoder:
    match format_:
        case Format.PRETTY:
            return PrettyLines(coloured=_is_coloured(), width=_width)
        case Format.JSONL:
            return JsonLines(no_value=no_value)
        case Format.ARROW:
            return ArrowStream(change_schema(xattrs=xattrs))


def _is_coloured() -> bool:
    """As rich has it: by the terminal and the variables NO_COLOR, FORCE_COLOR and TERM."""
    console = Console(file=sys.stdout)
    return console.color_system is not None and not console.no_color


def _width() -> int | None:
    """How wide a line may be; it may change while the command runs. None where there is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
