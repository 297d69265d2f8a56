r"""Captures as hex text: bare hex, hex dumps, and annotated sessions.

Every line is one of these:

    8053 0000 ...                 hex, with or without spaces, commas, colons, `0x` or `\x`; `#` starts a remark
    00000010: 8053 0000  .S..     a dump line of xxd or tcpdump: an offset, bytes, and perhaps the bytes as text
    00000010  80 53 00 00 |.S..|  the same by hexdump -C, od -A x -t x1, tshark or Wireshark
    [dcp] C->S DCP_OPEN ...       from here on the bytes are the client's on connection `dcp`; a frame starts
    [dcp] anything else           an annotation
    ## [dcp] new TCP connection   the connection starts afresh
    # ...                         a remark
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import BytesIO

from headwater.errors import CaptureError
from headwater.protocol.capture.events import (
    UNKNOWN_FLOW,
    CaptureEvent,
    Chunk,
    Direction,
    Flow,
    Opened,
)

_HEADER = re.compile(r"\[(?P<connection>[^\]]+)\]\s+(?P<direction>C->S|S->C)(?:\s|$)")
_NEW_CONNECTION = re.compile(r"#+\s*\[(?P<connection>[^\]]+)\]\s+(?:new (?:TCP )?connection|reconnecting)")
_OFFSET_WITH_COLON = re.compile(r"\s*(?:0[xX])?[0-9a-fA-F]{4,16}:(?:\s+|$)")
_OFFSET = re.compile(r"\s*[0-9a-fA-F]{4,16}(?:\s+|$)")
_FIRST_OFFSET = re.compile(r"\s*0{4,16}(?:\s+|$)")
_SEPARATORS = re.compile(r"0[xX]|\\x|[,:;\-]")
_BYTE_PAIRS = re.compile(r"[0-9a-fA-F]{2}(?: [0-9a-fA-F]{2}){0,7}")
_EXCERPT_CHARS = 40


def read_hex_text(data: bytes) -> Iterator[CaptureEvent]:
    """The events of hex text, line by line; a `CaptureError` at the first line that is nothing of the above."""
    return _HexTextReader().read(data)


class _HexTextReader:
    def __init__(self) -> None:
        self._flow = UNKNOWN_FLOW
        self._starts_frame = False
        self._bare_offsets: bool | None = None

    def read(self, data: bytes) -> Iterator[CaptureEvent]:
        for number, raw_line in enumerate(BytesIO(data.removeprefix(b"\xef\xbb\xbf")), 1):
            line = raw_line.decode(errors="replace").rstrip()
            stripped = line.lstrip()
            if not stripped:
                continue
            if stripped.startswith("#"):
                if opened := _NEW_CONNECTION.match(stripped):
                    yield Opened(connection=opened["connection"])
            elif stripped.startswith("["):
                self._on_annotation(stripped)
            elif decoded := self._decode_line(line, number):
                yield Chunk(flow=self._flow, data=decoded, where=f"line {number}", starts_frame=self._starts_frame)
                self._starts_frame = False

    def _on_annotation(self, line: str) -> None:
        if header := _HEADER.match(line):
            self._flow = Flow(header["connection"], Direction(header["direction"]))
            self._starts_frame = True

    def _decode_line(self, line: str, number: int) -> bytes:
        if line == "*":
            raise CaptureError(
                f"line {number} stands for repeated lines that the dump left out",
                hint="Dump again with every line: `hexdump -v -C`, `od -v` or `xxd`",
            )
        if self._bare_offsets is None:
            # No frame begins with zeros, so zeros at the very start can only be the first offset of a dump.
            self._bare_offsets = _FIRST_OFFSET.match(line) is not None
        offset = _OFFSET_WITH_COLON.match(line) or (_OFFSET.match(line) if self._bare_offsets else None)
        hex_digits = _dump_columns(line[offset.end() :]) if offset else line.partition("#")[0]
        try:
            return bytes.fromhex(_SEPARATORS.sub(" ", hex_digits))
        except ValueError as error:
            excerpt = line.strip()[:_EXCERPT_CHARS]
            raise CaptureError(
                f"line {number} is neither whole bytes in hex nor an annotation: {excerpt!r}",
                hint="Start remarks with #, or give the format as raw or pcap if this is no text",
            ) from error


def _dump_columns(line: str) -> str:
    """The hex of a dump line behind its offset, without the column that shows the bytes as text.

    Text may look like hex, so a second column counts only where the dumps that have one put it: two spaces behind
    eight single bytes.
    """
    first, *others = line.partition("|")[0].rstrip().split("  ")
    if others and len(first) == 23 and _BYTE_PAIRS.fullmatch(first) and _BYTE_PAIRS.fullmatch(others[0]):
        return f"{first} {others[0]}"
    return first
