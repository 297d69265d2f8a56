"""Documents from tables: a CSV or a Parquet file, with a JSON object for every row.

Rows are counted from 1, without the header. An unusable row ends the reading, after the documents before it were
returned.

`inputs.open_source` chooses between the formats.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from headwater.errors import InvalidDocument, InvalidInput
from headwater.protocol.numbers import VALUE_BYTES_MAX
from headwater.transfer.json_lines import KEY_MEMBER, ByteReader, text_bytes
from headwater.transfer.key_template import KeyTemplate
from headwater.transfer.set_frames import Documents

BATCH_ROWS_MAX = 4096
BATCH_BYTES = 4 * 1024 * 1024
"""The approximate size of a batch, estimated from the mean size of a row."""

COLUMNS_MAX = 10_000
_LINE = re.compile(r"^line (?=\d)")


class Rows(Protocol):
    """The rows of a file as JSON objects, some at a time."""

    @property
    def bytes_read(self) -> int:
        """The number of bytes read from the file, to show progress."""

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
        """Yield documents. Raises `InvalidDocument` at the first unusable row, after all documents before it."""
        for texts in self._rows.objects():
            documents, problem = self._documents(texts)
            if len(documents):
                yield documents
            if problem is not None:
                raise problem

    def _documents(self, texts: pa.Array) -> tuple[Documents, InvalidDocument | None]:
        content, edges = text_bytes(texts)
        starts, ends = edges[:-1], edges[1:]
        large = np.flatnonzero(ends - starts > VALUE_BYTES_MAX)
        fit = int(large[0]) if len(large) else len(ends)
        numbers = np.arange(self._given + 1, self._given + 1 + fit, dtype=np.int64)
        self._given += len(texts)
        keys, key_ends, problem = self._template.build(content, starts[:fit], ends[:fit], numbers)
        if problem is not None:
            problem = problem.reworded(_LINE.sub("row ", problem.reason))
        elif fit < len(texts):
            problem = InvalidDocument(
                f"row {self._given - len(texts) + fit + 1}: the document would be longer than {VALUE_BYTES_MAX} bytes",
                hint="Split it, or omit columns",
            )
        good = len(key_ends)
        documents = Documents(
            keys=keys, key_ends=key_ends, values=content, value_starts=starts[:good], value_ends=ends[:good]
        )
        return documents, problem


def check_columns(names: list[str]) -> None:
    """Raise for too many columns or equal names: a document can't have two members of one name."""
    if len(names) > COLUMNS_MAX:
        raise InvalidInput(f"the file has more than {COLUMNS_MAX} columns", hint="Check that it is the right file")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidInput(f"the file has two columns {twice!r}", hint="Give each column its own name")


class ParquetRows:
    """The rows of a Parquet file. It is read page by page, so its row groups may be of any size."""

    def __init__(self, file: Any, *, maybe_exported: bool = False) -> None:
        """With `maybe_exported`, the file is an export if its first column has the keys."""
        self._file = file
        try:
            self._parquet = pq.ParquetFile(file, buffer_size=1024 * 1024, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            raise InvalidInput(
                f"the file is not a readable Parquet file: {_first_line(error)}",
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
                f"after row {given} the file can't be read: {_first_line(error)}", hint="Create the file again"
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
# It has a header, and the first rows determine the types of the columns.
#
# A column has numbers if all its cells in the first block look like JSON numbers, booleans if all are `true` or
# `false`, and otherwise texts. So `007`, `+1` and `1,5` stay texts, and a number is written as it is in the file. A
# later cell of another kind is an error that names its row: it is not for us to decide that half of a column is text.
# An empty cell is null; one with nothing between quotes is an empty text.


BLOCK_BYTES = 4 * 1024 * 1024
"""The block size, which also limits the length of a row."""

HEADER_BYTES_MAX = 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_NOT_UTF8 = "\N{REPLACEMENT CHARACTER}"
_NUMBER = r"^-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?$"
_BOOLEAN = r"^(?:true|false)$"
_ROW = re.compile(r"Row #(?P<row>[0-9]+): (?P<what>.*)", re.DOTALL)


class CellKind(Enum):
    """What the cells of a column contain."""

    TEXT = "a text"
    NUMBER = "a number"
    BOOLEAN = "true or false"


class CsvRows:
    """Rows as JSON objects. Columns in `texts` are read as texts, whatever they look like.

    With `maybe_exported`, the file is an export if its first column has the keys.
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
            # Numbers and booleans are valid JSON as they are in the file.
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
            f"row {row}: {cell[:40]!r} in column {name!r} is not {kind.value}, unlike the first cells of the column",
            hint=f"Fix the cell, or read the whole column as text with --text {name}",
        )

    def _unreadable(self, error: pa.ArrowInvalid) -> InvalidDocument | InvalidInput:
        text = str(error).partition("\n")[0]
        if "straddl" in text:
            return InvalidDocument(
                f"after row {self._given} there is a row of more than {BLOCK_BYTES} bytes",
                hint="Check that all quotes are closed",
            )
        found = _ROW.search(text)
        # The parser counts the header as a row.
        where = f"row {int(found['row']) - 1}" if found else f"after row {self._given}"
        if "UTF8" in text:
            return InvalidDocument(f"{where}: a cell is not UTF-8", hint="Convert the file with iconv")
        if found is not None:
            return InvalidDocument(
                f"{where}: {found['what'][:200].rstrip('. ').replace('Expected', 'expected')}",
                hint="Fix the row; --delimiter sets the delimiter",
            )
        return InvalidDocument(f"after row {self._given} the file can't be read: {text}", hint="Fix the file")


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
    """A file whose beginning is read before Arrow reads it; a pipe can't be read twice."""

    def __init__(self, file: ByteReader) -> None:
        self.bytes_read = 0
        self._file = file
        self._ahead = b""

    def peek(self, size: int) -> bytes:
        """Return the first bytes, up to the first line end outside quotes, or `size` of them."""
        while len(self._ahead) < size and (self._ahead.count(b'"') % 2 or b"\n" not in self._ahead):
            more = self._file.read1(size - len(self._ahead))
            if not more:
                # Arrow treats a header without a line end as an empty file.
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


# --- rows as JSON objects ---------------------------------------------------------------------------------------------
#
# The texts are assembled column by column, without a Python object per row. The exporter uses them, too.
#
# | Arrow | JSON |
# |---|---|
# | null | `null` |
# | booleans, whole numbers, decimals | as they are |
# | floating point | as it is; `null` if it is infinite or not a number, which JSON can't express |
# | text | a string |
# | dates, times | a string in ISO 8601; a time stamp with a zone is in UTC, and ends with Z |
# | bytes | a string in base64 |
# | lists, structs, maps | arrays and objects; the keys of a map must be text |

_NULL = "null"
_TEXT = pa.large_string()
JSON_TEXT = {b"headwater": b"json"}
"""The metadata of a column in an exported file whose texts are JSON."""

_HINT = "Leave the column out, or change its type where the file is made"
_ESCAPES = (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"))
"""The order matters: the first replacement would double the backslashes of the others."""


def objects_of(batch: pa.RecordBatch, *, keyed: bool = False) -> pa.Array:
    """Return a JSON object for every row, as text, with the columns as its members. `keyed` is as in `objects`."""
    texts = [
        column.cast(_TEXT) if keyed and JSON_TEXT.items() <= (field.metadata or {}).items() else json_of(column, name)
        for name, field, column in zip(batch.schema.names, batch.schema, batch.columns, strict=True)
    ]
    return objects(batch.schema.names, texts, batch.num_rows, keyed=keyed)


def objects(names: Sequence[str], texts: Sequence[pa.Array], rows: int, *, keyed: bool = False) -> pa.Array:
    """Return objects from columns whose values are already JSON texts; a null becomes `null`.

    With `keyed`, the first column must have no nulls, and nulls of the other columns are left out.
    """
    parts: list[Any] = ["{"]
    for number, (name, column) in enumerate(zip(names, texts, strict=True)):
        start = f"{',' if number else ''}{json.dumps(name, ensure_ascii=False)}:"
        text = column.cast(_TEXT)
        if keyed and number:
            parts.append(pc.coalesce(joined([start, text], rows), pa.scalar("", _TEXT)))
        else:
            parts += [start, _nulls_written(text)]
    return joined([*parts, "}"], rows)


def json_of(column: pa.Array, name: str) -> pa.Array:
    """Return the JSON text of every value, or null for a null. Raises an error with `name` for an unsupported type."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    for is_one, texts in _FORMS:
        if is_one(column.type):
            return texts(column, name)
    raise InvalidInput(f"column {name!r} is of type {column.type}, which JSON has no form for", hint=_HINT)


# --- single values ----------------------------------------------------------------------------------------------------


def _nulls(column: pa.Array, name: str) -> pa.Array:
    return pa.nulls(len(column), _TEXT)


def _as_written(column: pa.Array, name: str) -> pa.Array:
    return column.cast(_TEXT)


def _real(column: pa.Array, name: str) -> pa.Array:
    if column.type == pa.float16():
        column = column.cast(pa.float32())
    nothing = pa.scalar(None, column.type)
    return pc.if_else(pc.is_finite(column), column, nothing).cast(_TEXT)


def quoted(column: pa.Array, name: str = "") -> pa.Array:
    """Encode texts as JSON strings."""
    text = column.cast(_TEXT)
    if pc.any(pc.match_substring_regex(text, r'["\\\x00-\x1f]')).as_py():
        for sign, escape in _ESCAPES:
            text = pc.replace_substring(text, sign, escape)
        text = _without_controls(text)
    return joined(['"', text, '"'], len(text))


def _without_controls(text: pa.Array) -> pa.Array:
    """Escape the remaining control characters, which are rare."""
    marks = pc.fill_null(pc.match_substring_regex(text, r"[\x00-\x1f]"), False)
    if not pc.any(marks).as_py():
        return text
    controls = {number: f"\\u{number:04x}" for number in range(0x20)}
    plain = [value.translate(controls) for value in text.filter(marks).to_pylist()]
    return pc.replace_with_mask(text, marks, pa.array(plain, _TEXT))


def _base64(column: pa.Array, name: str) -> pa.Array:
    texts = [None if value is None else base64.b64encode(value).decode() for value in column.to_pylist()]
    return quoted(pa.array(texts, _TEXT))


def _time(column: pa.Array, name: str) -> pa.Array:
    return quoted(column.cast(_TEXT))


def _timestamp(column: pa.Array, name: str) -> pa.Array:
    if column.type.tz is not None:
        column = column.cast(pa.timestamp(column.type.unit, "UTC"))
    return quoted(pc.replace_substring(column.cast(_TEXT), " ", "T"))


# --- composite values -------------------------------------------------------------------------------------------------


def _dictionary(column: pa.Array, name: str) -> pa.Array:
    return json_of(column.dictionary_decode(), name)


def _list(column: pa.Array, name: str) -> pa.Array:
    if not isinstance(column, pa.ListArray | pa.LargeListArray):
        column = column.cast(pa.large_list(column.type.value_field))
    return _bracketed(
        "[", _nulls_written(json_of(column.flatten(), name)), "]", lengths=_lengths(column), valid=column.is_valid()
    )


def _map(column: pa.Array, name: str) -> pa.Array:
    if not _is_text(column.type.key_type):
        raise InvalidInput(f"column {name!r} is a map whose keys are no texts", hint=_HINT)
    lists = column.cast(
        pa.list_(pa.struct([pa.field("k", column.type.key_type), pa.field("v", column.type.item_type)]))
    )
    entries = lists.flatten()
    members = joined([quoted(entries.field(0)), ":", _nulls_written(json_of(entries.field(1), name))], len(entries))
    return _bracketed("{", members, "}", lengths=_lengths(lists), valid=column.is_valid())


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    lengths: NDArray[np.int64] = pc.fill_null(pc.list_value_length(lists), 0).cast(pa.int64()).to_numpy()
    return lengths


def _bracketed(before: str, items: pa.Array, behind: str, *, lengths: NDArray[np.int64], valid: pa.Array) -> pa.Array:
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    members = pc.binary_join(pa.ListArray.from_arrays(offsets, items.cast(pa.string())), ",")
    texts = joined([before, members.cast(_TEXT), behind], len(lengths))
    return pc.if_else(valid, texts, pa.scalar(None, _TEXT))


def _struct(column: pa.Array, name: str) -> pa.Array:
    # `flatten` makes the members of a null struct null.
    members = pa.RecordBatch.from_arrays(column.flatten(), names=[field.name for field in column.type])
    return pc.if_else(column.is_valid(), objects_of(members), pa.scalar(None, _TEXT))


def _nulls_written(texts: pa.Array) -> pa.Array:
    return pc.coalesce(texts, pa.scalar(_NULL, _TEXT))


def joined(parts: Sequence[Any], rows: int) -> pa.Array:
    """Join texts by row. A part is a column of texts, or one text for all rows."""
    if all(isinstance(part, str) for part in parts):
        return pa.repeat(pa.scalar("".join(parts), _TEXT), rows)
    scalars = [pa.scalar(part, _TEXT) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*scalars, pa.scalar("", _TEXT))


def _is_text(type_: pa.DataType) -> bool:
    return any(is_one(type_) for is_one in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


def _is_bytes(type_: pa.DataType) -> bool:
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(is_one(type_) for is_one in kinds)


def _is_list(type_: pa.DataType) -> bool:
    return any(is_one(type_) for is_one in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))


_FORMS: tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array, str], pa.Array]], ...] = (
    (pa.types.is_null, _nulls),
    (pa.types.is_boolean, _as_written),
    (pa.types.is_integer, _as_written),
    (pa.types.is_decimal, _as_written),
    (pa.types.is_floating, _real),
    (_is_text, quoted),
    (_is_bytes, _base64),
    (pa.types.is_date, _time),
    (pa.types.is_time, _time),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_dictionary, _dictionary),
    (pa.types.is_map, _map),
    (_is_list, _list),
    (pa.types.is_struct, _struct),
)
"""The conversion of each type: the first match applies."""
