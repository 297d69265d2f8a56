"""Documents from JSON lines: one document a line, checked, and given as columns with no object per line.

Blank lines are passed over but counted, so that a number is always that of the line in the file. A line that can't be
used ends the reading, after the documents before it have been given.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from headwater.client.key_template import KeyTemplate
from headwater.client.set_frames import Documents
from headwater.errors import InvalidDocument
from headwater.protocol.kernels.json_check import is_json
from headwater.protocol.kernels.memory import Bytes, Column, i64, kernel
from headwater.protocol.limits import VALUE_BYTES_MAX

CHUNK_BYTES = 512 * 1024
BATCH_DOCUMENTS_MAX = 4096

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class ByteReader(Protocol):
    """A binary file, standard input among them."""

    def read1(self, size: int, /) -> bytes: ...


class JsonLines:
    """The documents of a file, batch by batch."""

    def __init__(self, file: ByteReader, template: KeyTemplate) -> None:
        self.bytes_read = 0
        self._file = file
        self._template = template
        self._lines = 0
        """The lines that have been split off."""

    def batches(self) -> Iterator[Documents]:
        """Raises `InvalidDocument` at the first line that can't be used; those before it have been given by then."""
        rest = b""
        at_end = False
        while not at_end:
            chunk = self._file.read1(CHUNK_BYTES)
            at_end = not chunk
            if not self.bytes_read:
                chunk = chunk.removeprefix(_BYTE_ORDER_MARK)
            self.bytes_read += len(chunk)
            text = np.frombuffer(rest + chunk, dtype=np.uint8)
            at = 0
            while at < len(text):
                documents, consumed, problem = self._split(text[at:], at_end=at_end)
                if len(documents):
                    yield documents
                if problem is not None:
                    raise problem
                if not consumed:
                    break
                at += consumed
            rest = text[at:].tobytes()
            if len(rest) > VALUE_BYTES_MAX:
                raise self._too_long(self._lines + 1)

    def _split(self, text: Bytes, *, at_end: bool) -> tuple[Documents, int, InvalidDocument | None]:
        starts, ends, numbers = (np.empty(BATCH_DOCUMENTS_MAX, dtype=np.int64) for _ in range(3))
        count, consumed, lines, is_sound = _split_lines(
            text, at_end, self._lines, VALUE_BYTES_MAX, starts, ends, numbers
        )
        self._lines += lines
        starts, ends, numbers = starts[:count], ends[:count], numbers[:count]
        keys, key_ends, problem = self._template.build(text, starts, ends, numbers)
        if problem is None and not is_sound:
            problem = self._unusable(text[consumed:])
        good = len(key_ends)
        documents = Documents(
            keys=keys, key_ends=key_ends, values=text, value_starts=starts[:good], value_ends=ends[:good]
        )
        return documents, consumed, problem

    def _unusable(self, text: Bytes) -> InvalidDocument:
        newlines = np.flatnonzero(text == ord("\n"))
        if len(newlines) and newlines[0] > VALUE_BYTES_MAX:
            return self._too_long(self._lines + 1)
        return InvalidDocument(
            f"line {self._lines + 1} is not JSON", hint="Write one document a line, in UTF-8, and nothing else on it"
        )

    @staticmethod
    def _too_long(line: int) -> InvalidDocument:
        return InvalidDocument(
            f"line {line} is longer than {VALUE_BYTES_MAX} bytes",
            hint="Split the document; if the file is one large array, write its elements one a line (`jq -c '.[]'`)",
        )


@kernel
def _split_lines(
    text: Bytes, at_end: bool, lines_before: int, line_bytes_max: int, starts: Column, ends: Column, numbers: Column
) -> tuple[int, int, int, bool]:
    """Cut off whole lines: how many documents, bytes and lines, and whether the line that follows is not at fault."""
    at = i64(0)
    count = 0
    lines = 0
    while at < len(text) and count < len(starts):
        newline = at
        while newline < len(text) and text[newline] != 0x0A:
            newline += 1
        if newline == len(text) and not at_end:
            break
        start, end = _trim(text, at, newline)
        if start < end:
            if end - start > line_bytes_max or not is_json(text, start, end):
                return count, at, lines, False
            starts[count] = start
            ends[count] = end
            numbers[count] = lines_before + lines + 1
            count += 1
        lines += 1
        at = min(newline + 1, len(text))
    return count, at, lines, True


@kernel
def _trim(text: Bytes, start: int, end: int) -> tuple[int, int]:
    while start < end and (text[start] == 0x20 or text[start] == 0x09 or text[start] == 0x0D):
        start += 1
    while end > start and (text[end - 1] == 0x20 or text[end - 1] == 0x09 or text[end - 1] == 0x0D):
        end -= 1
    return start, end
