"""Documents from tables: a CSV or a Parquet file, a JSON object for every row.

Rows are counted from 1, a header not counted. A row that can't be used ends the reading, after the documents before it
have been given.

`inputs.open_source` chooses between the formats.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from headwater.errors import InvalidDocument, InvalidInput
from headwater.protocol.numbers import VALUE_BYTES_MAX
from headwater.transfer.json_lines import KEY_MEMBER, ByteReader
from headwater.transfer.key_template import KeyTemplate
from headwater.transfer.set_frames import Documents
from headwater.transfer.table_json import objects, objects_of, quoted, text_bytes

BATCH_ROWS_MAX = 4096
BATCH_BYTES = 4 * 1024 * 1024
"""About: by the mean size of a row."""

COLUMNS_MAX = 10_000
_LINE = re.compile(r"^line (?=\d)")


class Rows(Protocol):
    """The rows of a file as JSON objects, some at a time."""

    @property
    def bytes_read(self) -> int:
        """Of the file, for a line with the progress."""

    def objects(self) -> Iterator[pa.Array]: ...


class TableDocuments:
    """The documents of a table, batch by batch."""

    def __init__(self, rows: Rows, template: KeyTemplate) -> None:
        self._rows = rows
        self._template = template
        self._given = 0

    @property
    def bytes_read(self) -> int:
        return self._rows.bytes_read

    def batches(self) -> Iterator[Documents]:
        """Raises `InvalidDocument` at the first row that can't be used; those before it have been given by then."""
        for texts in self._rows.objects():
            documents, problem = self._documents(texts)
            if len(documents):
                yield documents
            if problem is not None:
                raise problem

    def _documents(self, texts: pa.Array) -> tuple[Documents, InvalidDocument | None]:
        content, edges = text_bytes(texts)
        starts, ends = edges[:-1], edges[1:]
        fit = _fitting(starts, ends)
        numbers = np.arange(self._given + 1, self._given + 1 + fit, dtype=np.int64)
        self._given += len(texts)
        keys, key_ends, problem = self._template.build(content, starts[:fit], ends[:fit], numbers)
        if problem is not None:
            problem = problem.reworded(_LINE.sub("row ", problem.reason))
        elif fit < len(texts):
            problem = InvalidDocument(
                f"row {self._given - len(texts) + fit + 1}: the document would be longer than {VALUE_BYTES_MAX} bytes",
                hint="Split it, or leave columns out",
            )
        good = len(key_ends)
        documents = Documents(
            keys=keys, key_ends=key_ends, values=content, value_starts=starts[:good], value_ends=ends[:good]
        )
        return documents, problem


def _fitting(starts: Any, ends: Any) -> int:
    """How many rows there are before the first that is too large for a document."""
    large = np.flatnonzero(ends - starts > VALUE_BYTES_MAX)
    return int(large[0]) if len(large) else len(ends)


def check_columns(names: list[str]) -> None:
    """A document can't have two members of one name."""
    if len(names) > COLUMNS_MAX:
        raise InvalidInput(f"the file has more than {COLUMNS_MAX} columns", hint="Check that it is what you mean")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"the file has two columns {twice!r}", hint="Give each column a name of its own")


class ParquetRows:
    """The rows of a Parquet file. It is read page by page, so that its row groups may be of any size."""

    def __init__(self, file: Any, *, maybe_exported: bool = False) -> None:
        """A file that may be an exported one is, if its first column has the keys."""
        self._file = file
        try:
            self._parquet = pq.ParquetFile(file, buffer_size=1024 * 1024, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(
                f"the file is no Parquet file that can be read: {_first_line(error)}",
                hint="Check the file, or give --format",
            ) from error
        names = self._parquet.schema_arrow.names
        check_columns(names)
        self.is_exported = maybe_exported and names[:1] == [KEY_MEMBER]

    @property
    def bytes_read(self) -> int:
        return int(self._file.tell())

    def objects(self) -> Iterator[pa.Array]:
        given = 0
        try:
            for batch in self._parquet.iter_batches(batch_size=self._batch_rows()):
                yield objects_of(batch, keyed=self.is_exported)
                given += batch.num_rows
        except (pa.ArrowException, OSError) as error:
            raise InvalidDocument(
                f"behind row {given} the file can't be read: {_first_line(error)}", hint="Make the file again"
            ) from error

    def _batch_rows(self) -> int:
        metadata = self._parquet.metadata
        data_bytes = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
        mean = max(1, int(data_bytes) // max(1, int(metadata.num_rows)))
        return max(1, min(BATCH_ROWS_MAX, BATCH_BYTES // mean))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(". ")


# --- a CSV file -------------------------------------------------------------------------------------------------------
#
# It has a header, and the first rows decide the types of the columns.
#
# A column is of numbers if all cells of it in the first block look like numbers of JSON, and of booleans if all are
# `true` or `false`; else it is of texts. So `007`, `+1` and `1,5` stay texts, and a number is written as it stands in
# the file. A later cell that is of another kind is an error, which names its row: it is not for us to decide that half
# of a column is text. An empty cell is null; one with nothing between quotes is an empty text.


BLOCK_BYTES = 4 * 1024 * 1024
"""The longest row, too."""

HEADER_BYTES_MAX = 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_UTF8 = "\N{REPLACEMENT CHARACTER}"
_NUMBER = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$"
_BOOLEAN = r"^(?:true|false)$"
_ROW = re.compile(r"Row #(?P<row>[0-9]+): (?P<what>.*)", re.DOTALL)


class CellKind(Enum):
    """What the cells of a column are."""

    TEXT = "a text"
    NUMBER = "a number"
    BOOLEAN = "true or false"


class CsvRows:
    """Rows as JSON objects. `texts` are columns that are taken as texts, whatever they look like.

    A file that may be an exported one is, if its first column has the keys.
    """

    def __init__(
        self, file: ByteReader, *, delimiter: str = ",", texts: Sequence[str] = (), maybe_exported: bool = False
    ) -> None:
        self._source = _CsvFile(file)
        self._delimiter = delimiter
        self.names = self._read_header()
        check_columns(self.names)
        unknown = next((name for name in texts if name not in self.names), None)
        if unknown is not None:
            raise InvalidInput(f"the file has no column {unknown!r}", hint=f"It has {', '.join(self.names[:20])}")
        self.is_exported = maybe_exported and self.names[0] == KEY_MEMBER
        self._texts = frozenset({*texts, KEY_MEMBER} if self.is_exported else texts)
        self._kinds: list[CellKind] | None = None
        self._given = 0

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read

    def _read_header(self) -> list[str]:
        text = self._source.peek(HEADER_BYTES_MAX).decode(errors="replace")
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=self._delimiter)
        names = next(rows, [])
        if not names:
            raise InvalidInput("the file has no header", hint="Name the columns in its first row")
        if any(_NOT_UTF8 in name for name in names):
            raise InvalidInput("the header is not UTF-8", hint="Convert the file with iconv")
        if any(not name for name in names):
            raise InvalidInput("a column has no name in the header", hint="Name all columns in the first row")
        return names

    def objects(self) -> Iterator[pa.Array]:
        try:
            reader = pa_csv.open_csv(
                self._source,
                read_options=pa_csv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES),
                parse_options=pa_csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
                convert_options=pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(self.names, pa.string()),
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )
            for block in reader:
                yield from self._objects_of(block)
        except pa.ArrowInvalid as error:
            raise self._unreadable(error) from error

    def _objects_of(self, block: pa.RecordBatch) -> Iterator[pa.Array]:
        if self._kinds is None:
            self._kinds = [
                CellKind.TEXT if name in self._texts else _kind_of(column)
                for name, column in zip(self.names, block.columns, strict=True)
            ]
        good = block.num_rows
        problem: InvalidDocument | None = None
        for name, kind, column in zip(self.names, self._kinds, block.columns, strict=True):
            row = _first_misfit(column.slice(0, good), kind)
            if row is not None:
                good, problem = row, self._misfit(self._given + row + 1, name, kind, column[row].as_py())
        for start in range(0, good, BATCH_ROWS_MAX):
            part = block.slice(start, min(BATCH_ROWS_MAX, good - start))
            # Numbers and booleans are JSON as they stand in the file.
            texts = [
                quoted(column) if kind is CellKind.TEXT else column
                for kind, column in zip(self._kinds, part.columns, strict=True)
            ]
            yield objects(self.names, texts, part.num_rows, keyed=self.is_exported)
        self._given += good
        if problem is not None:
            raise problem

    @staticmethod
    def _misfit(row: int, name: str, kind: CellKind, cell: str) -> InvalidDocument:
        return InvalidDocument(
            f"row {row}: {cell[:40]!r} in column {name!r} is not {kind.value}, as the first cells of it are",
            hint=f"Fix the cell, or take the whole column as text with --text {name}",
        )

    def _unreadable(self, error: pa.ArrowInvalid) -> InvalidDocument | InvalidInput:
        text = str(error).partition("\n")[0]
        if "straddl" in text:
            return InvalidDocument(
                f"behind row {self._given} there is a row of more than {BLOCK_BYTES} bytes",
                hint="Check that all quotes are closed",
            )
        found = _ROW.search(text)
        # The parser counts the header.
        where = f"row {int(found['row']) - 1}" if found else f"behind row {self._given}"
        if "UTF8" in text:
            return InvalidDocument(f"{where}: a cell is not UTF-8", hint="Convert the file with iconv")
        if found is not None:
            return InvalidDocument(
                f"{where}: {found['what'][:200].rstrip('. ').replace('Expected', 'expected')}",
                hint="Fix the row; --delimiter names what stands between cells",
            )
        return InvalidDocument(f"behind row {self._given} the file can't be read: {text}", hint="Fix the file")


# --- kinds of cells ---------------------------------------------------------------------------------------------------


def _kind_of(column: pa.Array) -> CellKind:
    if column.null_count == len(column):
        return CellKind.TEXT
    for kind in (CellKind.NUMBER, CellKind.BOOLEAN):
        if _first_misfit(column, kind) is None:
            return kind
    return CellKind.TEXT


def _first_misfit(column: pa.Array, kind: CellKind) -> int | None:
    if kind is CellKind.TEXT:
        return None
    fits = pc.match_substring_regex(column, _NUMBER if kind is CellKind.NUMBER else _BOOLEAN)
    misfits = np.flatnonzero(~np.asarray(pc.fill_null(fits, True)))
    return int(misfits[0]) if len(misfits) else None


# --- the file ---------------------------------------------------------------------------------------------------------


class _CsvFile(io.RawIOBase):
    """A file whose beginning is looked at before Arrow reads it; a pipe can't be read twice."""

    def __init__(self, file: ByteReader) -> None:
        self.bytes_read = 0
        self._file = file
        self._ahead = b""

    def peek(self, size: int) -> bytes:
        """The first bytes, up to the first that ends a line outside of quotes, or `size` of them."""
        while len(self._ahead) < size and (self._ahead.count(b'"') % 2 or b"\n" not in self._ahead):
            more = self._file.read1(size - len(self._ahead))
            if not more:
                # Arrow takes a header that no line end closes for no file at all.
                self._ahead += b"\n" if self._ahead else b""
                break
            self._ahead += more
        self._ahead = self._ahead.removeprefix(_BYTE_ORDER_MARK)
        return self._ahead

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._ahead[: len(buffer)] or self._file.read1(len(buffer))
        self._ahead = self._ahead[len(data) :] if self._ahead else b""
        buffer[: len(data)] = data
        self.bytes_read += len(data)
        return len(data)
