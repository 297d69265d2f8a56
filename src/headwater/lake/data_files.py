"""The Parquet files of the tables: writing them, and reading only the needed part of one.

Compression is zstd at its lowest level: on documents of 200 bytes it made files half the size of snappy's, and writing
was a sixth slower. The levels below it take as long and leave a third more. Columns whose values are mostly different
get no dictionary, and only columns that readers prune by get statistics. The log has the same statistics for each whole
file, as in Delta. Files that are looked up by key have a Bloom filter of keys in each row group: a key is in one group
of vbuckets, but its neighbours are in the files of all groups. Files of tables with deletion vectors also have an index
of all their keys, behind the last row group (`key_index`), with which a merge finds rows.

Files have checksums, so that damage on the way to the disk or later is not mistaken for another value. Parquet's own
checksums, which any reader can use, cover pages, but not page headers and the footer; and a damaged footer can end the
process, since Arrow aborts if a column does not have the type that the schema gives it. So the metadata of our files
has a checksum for each row group, and one for the footer itself, which is checked before Arrow reads the footer.
`headwater verify` checks all of them.

Other engines may rewrite the tables, for example by OPTIMIZE or UPDATE. Their files have the same columns, in types
that Arrow may read as views or as large ones; `FileReader` converts them to the types of our own files.

All modules of the lake read and write Parquet through this one. It never changes an existing file.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from functools import reduce
from inspect import signature
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater._version import __version__
from headwater.errors import LakeDamaged
from headwater.kernels.memory import Column
from headwater.lake.deletion_vectors import DeletionVector, Positions, VectorWriter
from headwater.lake.key_index import Hashes, KeyPlaces, key_hashes, key_spaces, new_secret, packed_places, raw_keys_of
from headwater.lake.layout import NAME_TYPE, name_columns
from headwater.lake.location import Location
from headwater.lake.variants import VARIANT, as_variants

ROW_GROUP_ROWS = 128 * 1024
KEYED_ROW_GROUP_ROWS = 16 * 1024
"""For files that are looked up by key: a lookup reads a row group, and a footer has about 3 KB for each."""
ROW_GROUP_BYTES = 64 * 1024 * 1024
"""In memory: a row group ends at this size or at its maximum of rows, since it is read and written as a whole."""
FILE_BYTES_DEFAULT = 128 * 1024 * 1024
_COMPRESSION = {"compression": "zstd", "compression_level": 1}
_MAGIC = b"PAR1"
_WRITTEN_BY = "headwater"
"""Metadata key: the version that wrote the file."""
_SEAL = "headwater.footer"
_NO_SEAL = b"00000000"
"""Placeholder for the footer's checksum while the checksum is computed."""
_ROW_GROUPS = "headwater.row_groups"
"""Metadata key: for each row group, where it ends and the checksum of its bytes."""
_FILTERS = "headwater.filters"
"""Metadata key: the checksum of the bytes between the last row group and the footer."""
_KEYS = "headwater.keys"
"""Metadata key: where the index of keys begins, and how many rows it has."""
_KEYS_AT = re.compile(rb"%s\x18[\x00-\x7f](\d+):(\d+)" % re.escape(_KEYS.encode()))
_SEALED, _FILTERS_SEALED = (
    re.compile(rb"%s\x18\x08([0-9a-f]{8})" % re.escape(name.encode())) for name in (_SEAL, _FILTERS)
)
"""As Thrift writes them: the key, a mark, the length, the checksum."""
_FALSE_POSITIVES = 0.01
"""For Bloom filters: about 10 bits a key."""
_WRITES_FILTERS = "bloom_filter_options" in signature(pq.write_table).parameters
"""Older versions of pyarrow can't. Files without Bloom filters are valid, but readers prune less with them."""
TEXT_CHARS = 32
"""How many characters of a text are in the statistics, as Spark writes them."""
_BOUND_BYTES_MAX = 4096
"""Arrow omits a column's bounds from a file if one of them is longer."""
_SAMPLE_ROWS, _SAMPLE_ROWS_MIN, _SAMPLE_BYTES = 2048, 32, 1024 * 1024
"""The sample of a file's first rows that shows whether a column repeats its values. Of long values it has fewer."""
_LAST_CHARACTER = "\U0010ffff"
_BUFFER_BYTES = 256 * 1024
"""How much is written to a file at once, unless Arrow writes more."""
_PAGE_ROWS, _PAGE_BYTES = 1024, 1024 * 1024
"""The maximum of a page of a column, whichever comes first: it is compressed, and read, as a whole."""
_LONG_VALUE_BYTES = 4 * 1024
"""Average value size from which slicing a column takes less time than copying its values."""
_CHECKED_BYTES = 4 * 1024 * 1024
"""How many bytes are read at once to compute a checksum, or to find the bounds of a column."""
_TAIL_BYTES = 64 * 1024
"""How many bytes are read from the end of a file first. Nearly all footers are smaller."""
_REPEATING = (
    *("op", "scope", "collection", "collection_id", "vbucket", "vbuuid", "rev", "datatype", "flags", "expiry"),
    *("snapshot_start", "snapshot_end", "batch", "landed_at", "_change_type"),
)

_NOTHING_DEAD: Positions = np.zeros(0, dtype=np.int64)

Range = tuple[Any, Any]
"""Of numbers, texts, dates or times."""
Bound = tuple[bool, Any]
"""A value to compare with others: whether it is null, which sorts last, and the value. Times are numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of a table, as the log describes it."""

    path: str
    """Relative to the table's directory."""
    size_bytes: int
    rows: int
    partition: tuple[tuple[str, str], ...] = ()
    """The values of the partition columns, as the log writes them."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """By column: the least and the highest value. A column that is missing here may hold anything."""
    nulls: Mapping[str, int] = field(default_factory=dict)
    """By column: the number of nulls."""
    modified_ms: int = 0
    vector: DeletionVector | None = None
    """Marks the dead rows of the file. All other fields describe the whole file."""

    @property
    def live_rows(self) -> int:
        return self.rows - (0 if self.vector is None else self.vector.cardinality)

    @property
    def vector_path(self) -> str | None:
        """The path of the file that contains its vector; None if there is none."""
        return None if self.vector is None else self.vector.file

    def may_hold(self, column: str, *, low: float = float("-inf"), high: float = float("inf")) -> bool:
        """Whether a column may hold a value between `low` and `high`."""
        least, highest = self.ranges.get(column, (float("-inf"), float("inf")))
        return bool(least <= high and low <= highest)

    def wrong_statistics(self, reader: FileReader) -> Iterator[tuple[str | None, str]]:
        """Yield contradictions between log and file: the column, if it concerns one, and the fault. Engines skip files
        by these statistics. Other engines cut texts and times off elsewhere, so their bounds only need to include all
        values."""
        if reader.size_bytes != self.size_bytes:
            yield None, f"has {reader.size_bytes:,} bytes, and the table's log says {self.size_bytes:,}"
        if reader.rows != self.rows and (self.rows or self.nulls or self.ranges):
            yield None, f"has {reader.rows:,} rows, and the table's log says {self.rows:,}"
        there = {*reader.schema.names}
        for column, nulls in self.nulls.items():
            if column in there and (found := reader.nulls_of(column)) != nulls:
                yield column, f"has {found:,} nulls in `{column}`, and the table's log says {nulls:,}"
        for column, (low, high) in self.ranges.items():
            if column not in there:
                continue
            bounds = reader.bounds_of(column)
            if bounds is None:
                is_right = not reader.is_sealed
            elif reader.is_sealed:
                is_right = (_least(low), _highest(high)) == (_least(bounds[0]), _highest(bounds[1]))
            else:
                least, highest = _least(bounds[0]), _least(bounds[1])
                is_right = None in (least, highest) or (_least(low) <= least and _highest(high) >= highest)
            if not is_right:
                yield column, f"has other least and highest values in `{column}` than the table's log says"

    def restated(self, reader: FileReader, columns: Iterable[str]) -> DataFile:
        """Return the same with the statistics of some columns taken from the file itself."""
        there = [name for name in columns if name in {*reader.schema.names}]
        found = {name: reader.bounds_of(name) for name in there}
        return replace(
            self,
            size_bytes=reader.size_bytes,
            rows=reader.rows,
            ranges={name: bounds for name, bounds in found.items() if bounds is not None},
            nulls={name: reader.nulls_of(name) for name in there},
        )

    def stats(self) -> str:
        """Return the statistics as the log writes them (Delta's protocol, "Per-file Statistics")."""
        found = {column: (_least(low), _highest(high)) for column, (low, high) in self.ranges.items()}
        known = {column: bounds for column, bounds in found.items() if None not in bounds}
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": {column: low for column, (low, _) in known.items()},
                "maxValues": {column: high for column, (_, high) in known.items()},
                "nullCount": dict(self.nulls),
                # The bounds include the dead rows.
                **({} if self.vector is None else {"tightBounds": False}),
            }
        )


# Delta readers take times in the statistics as milliseconds, so round bounds outwards. A text that is cut off becomes
# lower; the upper bound gets a last character that no other exceeds.


def _least(value: Any) -> Any:
    if isinstance(value, str):
        return value[:TEXT_CHARS]
    if isinstance(value, datetime):
        return _milliseconds(value)
    return _plain_bound(value)


def _highest(value: Any) -> Any:
    if isinstance(value, str):
        cut = len(value[:TEXT_CHARS]) + len(value[TEXT_CHARS:]) - len(value[TEXT_CHARS:].lstrip(_LAST_CHARACTER))
        return value if cut == len(value) else value[:cut] + _LAST_CHARACTER
    if isinstance(value, datetime):
        rest = timedelta(microseconds=-value.microsecond % 1000)
        return _milliseconds(value + rest) if value <= datetime.max.replace(tzinfo=UTC) - rest else None
    return _plain_bound(value)


def _milliseconds(time_: datetime) -> str:
    return time_.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain_bound(value: Any) -> Any:
    """Return a number or a date; None if JSON can't express the number: then the column may hold anything."""
    if isinstance(value, date):
        return value.isoformat()
    return value if isinstance(value, int) or math.isfinite(value) else None


# --- writing ----------------------------------------------------------------------------------------------------------


class FileWriter:
    """Writes one file. It becomes live when a commit names it; until then only vacuum looks at it."""

    def __init__(
        self,
        location: Location,
        schema: pa.Schema,
        *,
        ranges: Sequence[str],
        partition: Sequence[tuple[str, str]] = (),
        prefix: str = "part",
        filter_keys: int = 0,
        repeating: Collection[str] = _REPEATING,
        has_places: bool = False,
    ) -> None:
        """`ranges` are the columns with statistics; `filter_keys` is the maximum of keys in a row group, if it gets a
        Bloom filter; `repeating` are the columns that get a dictionary; with `has_places` the file has an index of its
        keys."""
        folder = "".join(f"{name}={value}/" for name, value in partition)
        # Each attempt gets a new name: two attempts at one task never write to the same file.
        self._path = f"{folder}{prefix}-{uuid.uuid4()}.parquet"
        self._partition = tuple(partition)
        self._ranges = ranges
        self._found: dict[str, Range] = {}
        self._unbounded: set[str] = set()
        """Columns with values that the log can't express."""
        self._nulls = dict.fromkeys(ranges, 0)
        self._rows = 0
        self._sink = _SealedFile(location, self._path)
        self._schema = _with_dictionaries(schema)
        # Arrow writes page headers, and short columns, in pieces of a few bytes.
        self._stream = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _BUFFER_BYTES)
        self._options: dict[str, Any] = {
            "use_dictionary": [name for name in schema.names if name in repeating],
            "write_statistics": [name for name in schema.names if name in ranges],
            **(_filter_options(filter_keys) if filter_keys else {}),
        }
        self._begun: pq.ParquetWriter | None = None
        self._row_groups: list[str] = []
        self._secret = new_secret() if has_places else None
        self._hashes: list[Hashes] = []

    def _writer(self, rows: pa.Table) -> pq.ParquetWriter:
        """Return Arrow's writer, created for the first rows: the size of their values decides how often it checks
        pages."""
        if self._begun is None:
            longest = max(_bytes_a_row(column) for column in rows.columns)
            self._begun = pq.ParquetWriter(
                self._stream,
                self._schema,
                store_schema=False,
                write_page_checksum=True,
                write_batch_size=max(1, min(_PAGE_ROWS, int(_PAGE_BYTES // max(1, longest)))),
                **self._options,
                **_COMPRESSION,
            )
            self._stream.flush()
            self._sink.take_checksum()
        return self._begun

    def write_row_group(self, rows: pa.Table) -> None:
        """Write rows as one row group. Their columns must be in the order of the schema."""
        rows = pa.Table.from_arrays(rows.columns, schema=self._schema)
        for name in self._ranges:
            column = rows.column(name)
            self._nulls[name] += column.null_count
            if pa.types.is_string(column.type) and (pc.max(pc.binary_length(column)).as_py() or 0) > _BOUND_BYTES_MAX:
                bounds = pc.min_max(column)
                self._widen(name, bounds["min"].as_py(), bounds["max"].as_py())
        if self._secret is not None:
            spaces = key_spaces(numbers(rows, "vbucket"), numbers(rows, "collection_id"))
            self._hashes.append(key_hashes(raw_keys_of(rows), spaces, self._secret))
        self._rows += rows.num_rows
        self._writer(rows).write_table(rows, row_group_size=max(1, rows.num_rows))
        self._stream.flush()
        self._row_groups.append(f"{self._sink.tell()}:{self._sink.take_checksum():08x}")

    def _widen(self, column: str, low: Any, high: Any) -> None:
        found = self._found.get(column, (low, high))
        self._found[column] = (min(low, found[0]), max(high, found[1]))

    @property
    def written_bytes(self) -> int:
        return self._sink.tell()

    def close(self) -> DataFile:
        writer = self._writer(self._schema.empty_table())
        writer.add_key_value_metadata(
            {
                _WRITTEN_BY: __version__,
                _ROW_GROUPS: ",".join(self._row_groups),
                _FILTERS: _NO_SEAL.decode(),
                _SEAL: _NO_SEAL.decode(),
            }
        )
        self._sink.hold_footer()
        if self._secret is not None and self._hashes:
            # Arrow asks the file for its position, and so skips what it did not write itself.
            writer.add_key_value_metadata({_KEYS: f"{self._sink.tell()}:{self._rows}"})
            self._stream.write(packed_places(np.concatenate(self._hashes), self._secret))
        writer.close()
        self._stream.flush()
        size_bytes = self._sink.tell()
        self._sink.close()
        # Not by `metadata_collector`: with it, Arrow fails when an abandoned writer is garbage-collected.
        self._take_bounds(writer.writer.metadata)
        return DataFile(
            path=self._path,
            size_bytes=size_bytes,
            rows=self._rows,
            partition=self._partition,
            ranges={name: bounds for name, bounds in self._found.items() if name not in self._unbounded},
            nulls=self._nulls,
            modified_ms=int(time.time() * 1000),
        )

    def _take_bounds(self, footer: pq.FileMetaData) -> None:
        """Take the bounds that Arrow found while it wrote: scanning every value again is not cheap."""
        leaves = _leaves(footer)
        for row_group in map(footer.row_group, range(footer.num_row_groups)):
            for name in self._ranges:
                statistics = row_group.column(leaves[name]).statistics
                if statistics is None or not statistics.has_min_max:
                    continue
                try:
                    self._widen(name, statistics.min, statistics.max)
                except (ValueError, OverflowError):
                    # A time before the year 1 or after 9999, which Python can't represent.
                    self._unbounded.add(name)


def _filter_options(keys: int) -> dict[str, Any]:
    if not _WRITES_FILTERS:
        return {}
    return {"bloom_filter_options": {"key": {"ndv": keys, "fpp": _FALSE_POSITIVES}}}


class _SealedFile:
    """The file that Arrow writes to. It computes checksums, and inserts them into the footer, which comes last."""

    def __init__(self, location: Location, path: str) -> None:
        self._location = location
        with location.answering():
            self._file = location.open_output(path)
        self._checksum = 0
        self._footer: bytearray | None = None
        self.closed = False

    def write(self, data: bytes) -> int:
        if self._footer is None:
            with self._location.answering():
                self._file.write(data)
            self._checksum = zlib.crc32(data, self._checksum)
        else:
            self._footer += data
        return len(data)

    def tell(self) -> int:
        return int(self._file.tell()) + len(self._footer or b"")

    def flush(self) -> None:
        """Do nothing: everything is flushed at the end."""

    def take_checksum(self) -> int:
        """Return the checksum of what was written since the last call."""
        checksum, self._checksum = self._checksum, 0
        return checksum

    def hold_footer(self) -> None:
        """Hold back what follows the pages: the index of keys and Bloom filters, if there are any, and the footer."""
        self._footer = bytearray()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with self._location.answering():
                if self._footer is not None:
                    self._file.write(_sealed(bytes(self._footer)))
                self._file.close()


def _sealed(end: bytes) -> bytes:
    """Insert the checksums into the end of a file."""
    length = int.from_bytes(end[-8:-4], "little") + 8
    filters, footer = end[:-length], end[-length:]
    for sealed, checked in ((_FILTERS_SEALED, filters), (_SEALED, None)):
        seal = sealed.search(footer)
        assert seal is not None, "the writer was given it"
        checksum = zlib.crc32(footer if checked is None else checked)
        footer = b"%s%08x%s" % (footer[: seal.start(1)], checksum, footer[seal.end(1) :])
    return filters + footer


def _with_dictionaries(schema: pa.Schema) -> pa.Schema:
    """Give columns of names the dictionary type that they have in memory. In the file they are strings."""
    for name in name_columns(schema.names):
        index = schema.get_field_index(name)
        schema = schema.set(index, schema.field(index).with_type(NAME_TYPE))
    return schema


def aligned(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Convert rows to what a writer for the schema takes. Their columns must be in its order."""
    schema = _with_dictionaries(schema)
    if rows.schema.types != schema.types:
        # Another engine wrote the file that they come from, and Arrow read it with other types.
        rows = rows.cast(schema)
    # Engines also differ in which columns are nullable, and tables are joined only if they agree.
    return pa.Table.from_arrays(rows.columns, schema=schema)


class RollingWriter:
    """Writes rows to files of about one size. Files of rows with keys get small row groups and Bloom filters.

    With `has_places` each file has an index of its keys."""

    def __init__(
        self,
        location: Location,
        schema: pa.Schema,
        *,
        ranges: Sequence[str],
        partition: Sequence[tuple[str, str]],
        file_bytes: int = FILE_BYTES_DEFAULT,
        is_keyed: bool = False,
        has_places: bool = False,
        prefix: str = "part",
    ) -> None:
        self._location, self._schema = location, _with_dictionaries(schema)
        self._ranges, self._partition = ranges, partition
        self._file_bytes = file_bytes
        self._is_keyed, self._has_places, self._prefix = is_keyed, has_places, prefix
        self._row_group_rows = KEYED_ROW_GROUP_ROWS if is_keyed else ROW_GROUP_ROWS
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._writer: FileWriter | None = None
        self._files: list[DataFile] = []

    def write(self, rows: pa.Table) -> None:
        rows = aligned(rows, self._schema)
        while rows.num_rows:
            taken = rows.slice(0, self._row_group_rows - self._waiting_rows)
            rows = rows.slice(taken.num_rows)
            self._waiting.append(taken)
            self._waiting_rows += taken.num_rows
            self._waiting_bytes += taken.nbytes
            if self._waiting_rows >= self._row_group_rows or self._waiting_bytes >= ROW_GROUP_BYTES:
                self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = pa.concat_tables(self._waiting).unify_dictionaries()
        if self._writer is None:
            repeating = [name for name in self._ranges if _is_repeating(rows.column(name))]
            self._writer = FileWriter(
                self._location,
                self._schema,
                ranges=self._ranges,
                partition=self._partition,
                prefix=self._prefix,
                filter_keys=self._waiting_rows if self._is_keyed else 0,
                has_places=self._has_places,
                repeating={*_REPEATING, *repeating},
            )
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        self._writer.write_row_group(rows)
        if self._writer.written_bytes >= self._file_bytes:
            self._files.append(self._writer.close())
            self._writer = None

    def close(self) -> list[DataFile]:
        self._flush()
        if self._writer is not None:
            self._files.append(self._writer.close())
            self._writer = None
        return self._files


# --- reading ----------------------------------------------------------------------------------------------------------


def _leaves(footer: pq.FileMetaData) -> dict[str, int]:
    """Return the column numbers in a file, by path. A nested column has several leaves, which shifts the numbers of
    columns behind it from those in the schema."""
    return {footer.schema.column(index).path: index for index in range(len(footer.schema))}


class FileReader:
    """Reads the live rows of the row groups of one file. Row counts are of live rows, statistics of all rows.

    With `checks`, reading a row group raises if it does not match the checksums that were written with it. Files of
    other engines may have none, and are not checked.
    """

    def __init__(self, location: Location, file: DataFile, *, checks: bool = False) -> None:
        path = file.path
        self._source = location.open_input(path)
        footer = _read_footer(self._source, path)
        self._footer_at = int(self._source.size()) - len(footer)
        self.is_sealed = _is_sealed(footer, path)
        """Whether the file has our checksums, with a correct one for the footer."""
        try:
            metadata = pq.read_metadata(pa.BufferReader(footer))
        except (pa.ArrowException, OSError) as error:
            raise _damaged(path, str(error)) from error
        self._leaves = _leaves(metadata)
        names = name_columns(self._leaves)
        self.file, self._path, self._checks = file, path, checks
        self._file = pq.ParquetFile(
            self._source, metadata=metadata, read_dictionary=names, page_checksum_verification=checks
        )
        types = self._file.schema_arrow.types
        if any(name == "document.typed_value" or name.startswith("document.typed_value.") for name in self._leaves):
            raise _damaged(path, "another engine has shredded its variants, and Headwater can't join the parts again")
        self._is_plain = [_plain_type(type_) for type_ in types] == types
        self.dead = _NOTHING_DEAD if file.vector is None else file.vector.read(location, path, rows=self.rows)
        """The positions in the file of dead rows."""
        sizes = [metadata.row_group(row_group).num_rows for row_group in self.row_groups]
        self._starts = np.cumsum([0, *sizes])
        """The position of each row group's first row, and at the end the number of all rows."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._source.close()

    @property
    def row_groups(self) -> range:
        return range(self._file.num_row_groups)

    @property
    def schema(self) -> pa.Schema:
        schema = self._file.schema_arrow
        return pa.schema([field.with_type(_plain_type(field.type)) for field in schema])

    @property
    def rows(self) -> int:
        """All rows of the file, dead ones included."""
        return int(self._file.metadata.num_rows)

    @property
    def live_rows(self) -> int:
        return self.rows - len(self.dead)

    def _live_of(self, row_group: int) -> Column | None:
        """Return a mark for each live row of a row group; None if all are live."""
        start, end = self._starts[row_group], self._starts[row_group + 1]
        first, last = np.searchsorted(self.dead, [start, end])
        if first == last:
            return None
        marks = np.ones(end - start, dtype=np.bool_)
        marks[self.dead[first:last] - start] = False
        return marks

    @property
    def size_bytes(self) -> int:
        return int(self._source.size())

    @property
    def created_by(self) -> str:
        """The library that wrote the file, such as `parquet-cpp-arrow version 26.0.1`."""
        return str(self._file.metadata.created_by or "")

    def read(self, row_group: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Return a row group with these columns in this order, or with all columns in the file's order."""
        rows, live = self._read_all(row_group, columns), self._live_of(row_group)
        return rows if live is None else filtered(rows, live)

    def _read_all(self, row_group: int, columns: Sequence[str] | None) -> pa.Table:
        """Return a row group with its dead rows."""
        # No threads: Spark gives a task one core.
        wanted = None if columns is None else list(columns)
        rows = self._file.read_row_group(row_group, columns=wanted, use_threads=False)
        rows = rows if wanted is None else rows.select(wanted)
        return rows if self._is_plain else _plain(rows)

    def batches(self, row_group: int, *, bytes_max: int = ROW_GROUP_BYTES) -> Iterator[pa.Table]:
        """Yield all columns of a row group in parts of about one size: other engines write row groups of any size."""
        if self._checks and self.is_sealed:
            self._check_row_group(row_group)
            if row_group == self.row_groups[-1]:
                self._check_filters()
        live, start = self._live_of(row_group), 0
        for part in self._parts(row_group, bytes_max):
            end = start + part.num_rows
            yield part if live is None else filtered(part, live[start:end])
            start = end

    def _parts(self, row_group: int, bytes_max: int, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield parts of a row group with its dead rows."""
        parts = max(1, -(-self.uncompressed_bytes(row_group) // bytes_max))
        batch_size = max(1, -(-self._rows_of(row_group) // parts))
        for batch in self._file.iter_batches(batch_size, [row_group], columns, use_threads=False):
            part = pa.Table.from_batches([batch])
            yield part if self._is_plain else _plain(part)

    def _check_row_group(self, row_group: int) -> None:
        """Check its bytes as they are: Parquet's checksums do not cover page headers."""
        ends = [entry.split(":") for entry in self._file.metadata.metadata[_ROW_GROUPS.encode()].decode().split(",")]
        at = int(ends[row_group - 1][0]) if row_group else len(_MAGIC)
        if self._checksum(at, int(ends[row_group][0])) != int(ends[row_group][1], 16):
            raise _damaged(self._path, f"row group {row_group} does not have the checksum that was written with it")

    def _check_filters(self) -> None:
        """Check what lies behind the last row group. Files of earlier versions have nothing there, and no checksum."""
        metadata = self._file.metadata.metadata
        if _FILTERS.encode() in metadata:
            at = int(metadata[_ROW_GROUPS.encode()].decode().split(",")[-1].split(":")[0])
            if self._checksum(at, self._footer_at) != int(metadata[_FILTERS.encode()], 16):
                raise _damaged(self._path, "its filters or keys do not have the checksum that was written with them")

    def _checksum(self, at: int, end: int) -> int:
        checksum = 0
        while at < end and (data := self._source.read_at(min(_CHECKED_BYTES, end - at), at)):
            checksum, at = zlib.crc32(data, checksum), at + len(data)
        return checksum

    def row_group_rows(self, row_group: int) -> int:
        live = self._live_of(row_group)
        return self._rows_of(row_group) if live is None else int(live.sum())

    def _rows_of(self, row_group: int) -> int:
        """Return the row count with dead rows."""
        return int(self._starts[row_group + 1] - self._starts[row_group])

    def uncompressed_bytes(self, row_group: int) -> int:
        return int(self._file.metadata.row_group(row_group).total_byte_size)

    def range_of(self, row_group: int, column: str) -> tuple[float, float, bool]:
        """Return bounds on the values of a row group, and whether it may hold nulls."""
        if self._checks and not self.is_sealed:
            # Reading statistics from a damaged footer could crash the whole process.
            bounds = pc.min_max(self._file.read_row_group(row_group, columns=[column], use_threads=False).column(0))
            low, high = bounds["min"].as_py(), bounds["max"].as_py()
            return (float("-inf"), float("inf"), True) if low is None else (low, high, True)
        statistics = self._statistics_of(row_group, column)
        if statistics is None or not statistics.has_min_max:
            return float("-inf"), float("inf"), True
        return statistics.min, statistics.max, not statistics.has_null_count or statistics.null_count > 0

    def _statistics_of(self, row_group: int, column: str) -> pq.Statistics | None:
        """Return the footer's statistics of a column; None if it has none."""
        # A dot makes the path ambiguous: a struct's member has one, and a column's name may have one as well.
        index = None if "." in column else self._leaves.get(column)
        return None if index is None else self._file.metadata.row_group(row_group).column(index).statistics

    def text_range(self, row_group: int, column: str) -> tuple[str, str] | None:
        """Return bounds on the texts of a row group; None if its statistics do not have them."""
        bounds: tuple[Any, ...] = self.range_of(row_group, column)
        low, high, _ = bounds
        return (low, high) if isinstance(low, str) and isinstance(high, str) else None

    def nulls_of(self, column: str) -> int:
        """Return the number of nulls in a column of the file."""
        return sum(self._nulls(row_group, column) for row_group in self.row_groups)

    def _nulls(self, row_group: int, column: str) -> int:
        if (statistics := self._sealed(row_group, column)) is not None:
            return int(statistics.null_count)
        return int(self._read_all(row_group, [column]).column(0).null_count)

    def bounds_of(self, column: str) -> Range | None:
        """Return the least and the highest value of a column in the whole file; None if it has none."""
        found = [self._bounds(row_group, column) for row_group in self.row_groups]
        known = [bounds for bounds in found if bounds[0] is not None]
        return (min(low for low, _ in known), max(high for _, high in known)) if known else None

    def _bounds(self, row_group: int, column: str) -> tuple[Any, Any]:
        """Return the least and the highest value of a row group. The footer does not have those of long texts."""
        if (statistics := self._sealed(row_group, column)) is not None:
            if statistics.null_count == self._rows_of(row_group):
                return None, None
            if statistics.has_min_max:
                return statistics.min, statistics.max
        found = [pc.min_max(part.column(column)) for part in self._parts(row_group, _CHECKED_BYTES, [column])]
        values = [part[name].as_py() for part in found for name in ("min", "max")]
        bounds = pc.min_max(pa.array(values, found[0]["min"].type if found else None))
        return bounds["min"].as_py(), bounds["max"].as_py()

    def _sealed(self, row_group: int, column: str) -> pq.Statistics | None:
        """Return statistics that count nulls, if our checksum protects the footer. Other footers may be wrong."""
        statistics = self._statistics_of(row_group, column) if self.is_sealed else None
        return statistics if statistics is not None and statistics.has_null_count else None

    def least(self, row_group: int, column: str) -> Bound | None:
        """Return a lower bound on the values of a row group in a column; None if its statistics do not have one."""
        statistics = self._statistics_of(row_group, column)
        if statistics is None:
            return None
        if not statistics.has_min_max:
            is_null = statistics.has_null_count and statistics.null_count == self._rows_of(row_group)
            return (True, None) if is_null else None
        raw = statistics.min_raw
        return (False, statistics.min if isinstance(raw, bytes) else raw) if raw == raw else None


def _read_footer(source: pa.NativeFile, path: str) -> bytes:
    """Return the footer of a file, with its length and the magic number that follow it."""
    size = source.size()
    tail = source.read_at(min(size, _TAIL_BYTES), max(0, size - _TAIL_BYTES))
    if len(tail) < 12 or tail[-4:] != _MAGIC or source.read_at(4, 0) != _MAGIC:
        raise _damaged(path, "it does not begin and end as a Parquet file does")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > size - 4:
        raise _damaged(path, "its footer is longer than the file")
    return bytes(tail[-length:] if length <= len(tail) else source.read_at(length, size - length))


def _is_sealed(footer: bytes, path: str) -> bool:
    """Whether the footer has a checksum. Raises if it is wrong. Files of other engines have none."""
    seal = _SEALED.search(footer)
    if seal is None:
        if b"%c%s\x18" % (len(_WRITTEN_BY), _WRITTEN_BY.encode()) in footer:
            raise _damaged(path, "its footer has lost its checksum")
        return False
    plain = footer[: seal.start(1)] + _NO_SEAL + footer[seal.end(1) :]
    if b"%08x" % zlib.crc32(plain) != seal[1]:
        raise _damaged(path, "its footer does not have the checksum that was written with it")
    return True


def _damaged(path: str, reason: str) -> LakeDamaged:
    return LakeDamaged(
        f"the file {path} can't be read: {' '.join(reason.split())}",
        hint="Restore it from a backup; `headwater verify` lists all damage",
    )


def _plain(rows: pa.Table) -> pa.Table:
    """Convert rows to types that all of Arrow's functions support. For delta-rs, Arrow reads texts and bytes as views,
    which most of its functions do not know."""
    columns = [
        as_variants(column) if _plain_type(column.type) == VARIANT else column.cast(_plain_type(column.type))
        for column in rows.columns
    ]
    return pa.table(columns, names=rows.schema.names)


def _plain_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(type_) or pa.types.is_large_string(type_):
        return pa.string()
    if pa.types.is_binary_view(type_) or pa.types.is_large_binary(type_):
        return pa.binary()
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return pa.list_(type_.value_field.with_type(_plain_type(type_.value_type)))
    if pa.types.is_map(type_):
        return pa.map_(_plain_type(type_.key_type), _plain_type(type_.item_type))
    if pa.types.is_struct(type_):
        if {field.name for field in type_} == {field.name for field in VARIANT} and {
            _plain_type(field.type) for field in type_
        } == {pa.binary()}:
            return VARIANT
        return pa.struct([field.with_type(_plain_type(field.type)) for field in type_])
    return type_


def filtered(rows: pa.Table, keep: Column) -> pa.Table:
    """Return the marked rows; the same table if all are marked."""
    return rows if keep.all() else rows.filter(pa.array(keep))


def reordered(rows: pa.Table, order: Column) -> pa.Table:
    """Return the rows in another order, given by their numbers.

    Columns of long values are not copied but sliced, and the slices are written as they are. A copy would need fresh
    memory each time, which takes the system longer to provide than the copy itself takes.
    """
    is_long = [_bytes_a_row(column) >= _LONG_VALUE_BYTES for column in rows.columns]
    long_names = [name for name, long in zip(rows.schema.names, is_long, strict=True) if long]
    short = rows.drop_columns(long_names).combine_chunks().take(pa.array(order))
    columns = {name: _in_slices(rows.column(name), order) for name in long_names}
    columns |= {name: short.column(name) for name in short.schema.names}
    return pa.table([columns[name] for name in rows.schema.names], schema=rows.schema)


def _bytes_a_row(column: pa.ChunkedArray) -> float:
    has_bytes = pa.types.is_string(column.type) or pa.types.is_binary(column.type)
    return column.nbytes / max(1, len(column)) if has_bytes else 0


def _is_repeating(column: pa.ChunkedArray) -> bool:
    """Whether a dictionary is worthwhile, judged by the first values."""
    rows = int(_SAMPLE_BYTES // max(1, _bytes_a_row(column)))
    sample = column.slice(0, max(_SAMPLE_ROWS_MIN, min(_SAMPLE_ROWS, rows)))
    return bool(2 * pc.count_distinct(sample).as_py() < len(sample))


def _in_slices(column: pa.ChunkedArray, order: Column) -> pa.ChunkedArray:
    """Return one slice for each stretch of rows that are neighbours before and after."""
    starts = np.cumsum([0, *(len(chunk) for chunk in column.chunks)])
    chunks = np.searchsorted(starts, order, side="right") - 1
    is_first = np.concatenate([[True], (np.diff(order) != 1) | (np.diff(chunks) != 0)])[: len(order)]
    firsts = np.flatnonzero(is_first)
    lengths = np.diff(np.append(firsts, len(order)))
    places = zip(chunks[firsts].tolist(), (order - starts[chunks])[firsts].tolist(), lengths.tolist(), strict=True)
    return pa.chunked_array([column.chunk(chunk).slice(at, length) for chunk, at, length in places], column.type)


def conformed(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns of a schema, in its order; null where the rows were written before a column was added."""
    if rows.schema.equals(schema):
        return rows
    there = {*rows.schema.names}
    columns = [
        rows.column(field.name) if field.name in there else pa.nulls(rows.num_rows, field.type) for field in schema
    ]
    return pa.table(columns, schema=schema)


def differing(one: pa.ChunkedArray, other: pa.ChunkedArray) -> Column:
    """Mark the rows in which two columns of one type differ."""
    if one.equals(other):
        return np.zeros(len(one), dtype=np.bool_)
    if pa.types.is_struct(one.type):
        members = zip(one.flatten(), other.flatten(), strict=True)
        found = np.asarray(pc.not_equal(one.is_null(), other.is_null()))
        return reduce(np.logical_or, (differing(*pair) for pair in members), found)
    if pa.types.is_nested(one.type):
        # By halves: for lists and structs, Arrow can only compare whole columns.
        half = len(one) // 2
        if half == 0:
            return np.ones(1, dtype=np.bool_)
        return np.concatenate([differing(one[:half], other[:half]), differing(one[half:], other[half:])])
    is_other = pc.fill_null(pc.not_equal(one, other), False)
    return np.asarray(pc.or_(is_other, pc.not_equal(one.is_null(), other.is_null())))


def read_files(
    location: Location, files: Iterable[DataFile], columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield the row groups of files, one after another."""
    for file in files:
        with FileReader(location, file) as reader:
            for row_group in reader.row_groups:
                yield reader.read(row_group, columns)


@dataclass(frozen=True, slots=True)
class Leaving:
    """Rows of a file that leave a table."""

    file: DataFile
    rows: int
    """Number of rows of the file, dead ones included."""
    dead: Positions
    """Rows that were dead before."""
    positions: Positions
    """Rows that leave now, in ascending order."""

    @classmethod
    def of(cls, reader: FileReader, kept: Column) -> Self:
        """Take the live rows that have no mark in `kept`, which is in the order of the reader."""
        is_live = np.ones(reader.rows, dtype=np.bool_)
        is_live[reader.dead] = False
        return cls(reader.file, reader.rows, reader.dead, np.flatnonzero(is_live)[~kept])

    @property
    def kept(self) -> Column:
        """A mark for each live row that stays, in the order of a reader."""
        is_live, stays = np.ones(self.rows, dtype=np.bool_), np.ones(self.rows, dtype=np.bool_)
        is_live[self.dead] = stays[self.positions] = False
        return stays[is_live]


def find_rows(location: Location, file: DataFile, find: Callable[[KeyPlaces], Positions]) -> Leaving | None:
    """Return the live rows that `find` finds in the file's index of keys; None if the file has no index."""
    with location.open_input(file.path) as source:
        footer = _read_footer(source, file.path)
    keys = _KEYS_AT.search(footer) if _is_sealed(footer, file.path) else None
    if keys is None:
        return None
    at, rows = int(keys[1]), int(keys[2])

    def read(ranges: Sequence[tuple[int, int]]) -> Sequence[bytes]:
        parts = location.read_ranges(file.path, [(at + start, at + end) for start, end in ranges])
        if any(len(part) != end - start for part, (start, end) in zip(parts, ranges, strict=True)):
            raise _damaged(file.path, "it ends before its index of keys does")
        return parts

    found, dead = find(KeyPlaces(rows, read)), _NOTHING_DEAD
    if len(found) and file.vector is not None:
        dead = file.vector.read(location, file.path, rows=rows)
        found = np.setdiff1d(found, dead, assume_unique=True)
    return Leaving(file, rows, dead, found)


def mark_rows(location: Location, files: Iterable[Leaving], vectors: VectorWriter | None = None) -> list[DataFile]:
    """Mark rows that leave as dead. A file without remaining rows is not returned: it must be removed."""
    vectors = vectors or VectorWriter(location)
    found = []
    for leaving in files:
        dead = np.union1d(leaving.dead, leaving.positions)
        if len(dead) < leaving.rows:
            found.append(replace(leaving.file, vector=vectors.write(dead)))
    vectors.close()
    return found


def numbers(rows: pa.Table, column: str, *, null: int = -1) -> Column:
    """Return a column of integers as a numpy array."""
    values = rows.column(column)
    if values.null_count:
        values = pc.fill_null(values, null)
    return np.asarray(values.to_numpy())
