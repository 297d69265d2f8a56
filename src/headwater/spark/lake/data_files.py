"""The Parquet files of the tables: how they are written, and how only the needed part of one is read.

Compression is zstd at its lowest level: on documents of 200 bytes it made files half the size of snappy's, and writing
was a sixth slower. Columns with values that are all different get no dictionary, and only those columns get statistics
that somebody prunes by.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headwater.protocol.kernels.memory import Column
from headwater.spark.lake.layout import TablePlace, open_filesystem
from headwater.spark.lake.schemas import NAME_COLUMNS, NAME_TYPE

ROW_GROUP_ROWS = 128 * 1024
ROW_GROUP_BYTES = 64 * 1024 * 1024
"""In memory, whichever of the two bounds is reached first: a row group is read and written as a whole."""
FILE_BYTES_DEFAULT = 128 * 1024 * 1024
_COMPRESSION = {"compression": "zstd", "compression_level": 1}
_REPEATING = (
    *("op", "scope", "collection", "collection_id", "vbucket", "vbuuid", "rev", "datatype", "flags", "expiry"),
    *("snapshot_start", "snapshot_end", "batch", "landed_at"),
)

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of a table, as the log knows it."""

    path: str
    """From the table's directory on."""
    size_bytes: int
    rows: int
    partition: tuple[tuple[str, str], ...] = ()
    """The values of the partition columns, as the log writes them."""
    ranges: Mapping[str, Range] = field(default_factory=dict)
    """By column: the least and the highest value. A column that is missing here may hold anything."""
    modified_ms: int = 0

    def may_hold(self, column: str, *, low: float = float("-inf"), high: float = float("inf")) -> bool:
        """Whether a value of a column may lie between two."""
        least, highest = self.ranges.get(column, (float("-inf"), float("inf")))
        return least <= high and low <= highest

    def stats(self) -> str:
        """The statistics as the log writes them."""
        return json.dumps(
            {
                "numRecords": self.rows,
                "minValues": {column: least for column, (least, _) in self.ranges.items()},
                "maxValues": {column: highest for column, (_, highest) in self.ranges.items()},
            }
        )


# --- writing ------------------------------------------------------------------------------------------------------


class FileWriter:
    """Writes one file. It is live only once a commit names it; until then nobody but vacuum ever looks at it."""

    def __init__(
        self,
        place: TablePlace,
        schema: pa.Schema,
        *,
        ranges: Sequence[str],
        partition: Sequence[tuple[str, str]] = (),
        prefix: str = "part",
    ) -> None:
        folder = "".join(f"{name}={value}/" for name, value in partition)
        # The name is new in every attempt: two attempts at one task never write to one file.
        self._path = f"{folder}{prefix}-{uuid.uuid4()}.parquet"
        self._partition = tuple(partition)
        self._ranges = ranges
        self._found: dict[str, Range] = {}
        self._rows = 0
        filesystem, root = open_filesystem(place.uri)
        if folder:
            filesystem.create_dir(f"{root}/{folder}")
        self._sink = filesystem.open_output_stream(f"{root}/{self._path}")
        self._schema = _with_dictionaries(schema)
        self._writer = pq.ParquetWriter(
            self._sink,
            self._schema,
            use_dictionary=[name for name in schema.names if name in _REPEATING],
            write_statistics=[name for name in schema.names if name in ranges],
            store_schema=False,
            **_COMPRESSION,
        )

    def write_row_group(self, rows: pa.Table) -> None:
        """Write rows as a row group of their own. Their columns are in the order of the schema."""
        rows = pa.Table.from_arrays(rows.columns, schema=self._schema)
        for name in self._ranges:
            bounds = pc.min_max(rows.column(name))
            if bounds["min"].is_valid:
                low, high = bounds["min"].as_py(), bounds["max"].as_py()
                found = self._found.get(name, (low, high))
                self._found[name] = (min(low, found[0]), max(high, found[1]))
        self._rows += rows.num_rows
        self._writer.write_table(rows, row_group_size=max(1, rows.num_rows))

    @property
    def written_bytes(self) -> int:
        return int(self._sink.tell())

    def close(self) -> DataFile:
        self._writer.close()
        size_bytes = int(self._sink.tell())
        self._sink.close()
        return DataFile(
            path=self._path,
            size_bytes=size_bytes,
            rows=self._rows,
            partition=self._partition,
            ranges=self._found,
            modified_ms=int(time.time() * 1000),
        )


def _with_dictionaries(schema: pa.Schema) -> pa.Schema:
    """The types that columns of names have in memory. In the file they are strings."""
    for index, name in enumerate(schema.names):
        if name in NAME_COLUMNS:
            schema = schema.set(index, schema.field(index).with_type(NAME_TYPE))
    return schema


class RollingWriter:
    """Writes rows to as many files of about one size as it takes."""

    def __init__(
        self,
        place: TablePlace,
        schema: pa.Schema,
        *,
        ranges: Sequence[str],
        partition: Sequence[tuple[str, str]],
        file_bytes: int = FILE_BYTES_DEFAULT,
    ) -> None:
        self._place, self._schema = place, _with_dictionaries(schema)
        self._ranges, self._partition = ranges, partition
        self._file_bytes = file_bytes
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._writer: FileWriter | None = None
        self._files: list[DataFile] = []

    def write(self, rows: pa.Table) -> None:
        if rows.num_rows == 0:
            return
        if rows.schema.types != self._schema.types:
            # Another engine has written the file that they come from, and Arrow has its own idea of the types.
            rows = rows.cast(self._schema)
        self._waiting += rows.to_batches()
        self._waiting_rows += rows.num_rows
        self._waiting_bytes += rows.nbytes
        if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        if self._writer is None:
            self._writer = FileWriter(self._place, self._schema, ranges=self._ranges, partition=self._partition)
        rows = pa.Table.from_batches(self._waiting).unify_dictionaries()
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


# --- reading ------------------------------------------------------------------------------------------------------


class FileReader:
    """Reads the row groups of one file."""

    def __init__(self, place: TablePlace, path: str) -> None:
        filesystem, root = open_filesystem(place.uri)
        self._source = filesystem.open_input_file(f"{root}/{path}")
        metadata = pq.read_metadata(self._source)
        # A nested column has several leaves, so those behind it have other numbers here than in the schema.
        paths = [metadata.schema.column(index).path for index in range(len(metadata.schema))]
        self._leaves = {path: index for index, path in enumerate(paths)}
        names = [name for name in NAME_COLUMNS if name in self._leaves]
        self._file = pq.ParquetFile(self._source, metadata=metadata, read_dictionary=names)

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
        return self._file.schema_arrow

    def read(self, row_group: int, columns: Sequence[str] | None = None) -> pa.Table:
        # Spark gives a task one core, so no threads.
        return self._file.read_row_group(
            row_group, columns=None if columns is None else list(columns), use_threads=False
        )

    def uncompressed_bytes(self, row_group: int) -> int:
        return int(self._file.metadata.row_group(row_group).total_byte_size)

    def range_of(self, row_group: int, column: str) -> tuple[float, float, bool]:
        """The least and the highest value that a row group may hold, and whether it may hold nulls."""
        statistics = self._file.metadata.row_group(row_group).column(self._leaves[column]).statistics
        if statistics is None or not statistics.has_min_max:
            return float("-inf"), float("inf"), True
        return statistics.min, statistics.max, not statistics.has_null_count or statistics.null_count > 0


def filtered(rows: pa.Table, keep: Column) -> pa.Table:
    """The rows that are marked; the same table where all are."""
    return rows if keep.all() else rows.filter(pa.array(keep))


def read_files(
    place: TablePlace, files: Iterable[DataFile], columns: Sequence[str] | None = None
) -> Iterator[tuple[DataFile, pa.Table]]:
    """The row groups of files, one after another."""
    for file in files:
        with FileReader(place, file.path) as reader:
            for row_group in reader.row_groups:
                yield file, reader.read(row_group, columns)


def numbers(rows: pa.Table, column: str, *, null: int = -1) -> Column:
    """A column of integers as numpy's."""
    values = rows.column(column)
    if values.null_count:
        values = pc.fill_null(values, null)
    return np.asarray(values.to_numpy())
