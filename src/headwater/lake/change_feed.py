"""The change feed of `documents`: what each merge did, row by row, as Delta's change data feed has it.

A table with `delta.enableChangeDataFeed` shows its readers which rows a commit inserted, updated and deleted. A reader
takes them from the `cdc` files of the commit where it has any, and from these alone. Where it has none the reader
derives them: every row of a file that was added is an insert, every row of one that was removed a delete, unless the
commit says that no data has changed. So

* a merge that only adds files writes no `cdc` file: a first load costs nothing more;
* a merge that replaces or removes a row, or marks it in a deletion vector, writes `cdc` files with all rows that it
  changed, and no others: rows that were only written again are not among them, nor is a row that comes back equal in
  every column, as most rows of a vbucket do that was rolled back;
* a merge that changes no row at all says so, as joins and cuts into groups do.

`MergeTask` gives a `FeedWriter` the new rows, then those that leave. `commits` completes the feed of a commit: a group
that only adds files does not know whether another one replaces rows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.errors import InvalidInput
from headwater.kernels.memory import Column
from headwater.lake.data_files import (
    DataFile,
    FileReader,
    RollingWriter,
    aligned,
    conformed,
    differing,
    filtered,
    numbers,
    read_files,
)
from headwater.lake.key_index import KeyIndex, Marks, key_spaces, raw_keys_of
from headwater.lake.layout import FEED_COLUMNS, FEED_FOLDER, FEED_PROPERTY
from headwater.lake.location import Location

FEED_HELD_BYTES = 64 * 1024 * 1024
"""New rows that are held in memory to be compared; more of them lie in a temporary file."""
_CHANGE_TYPE = pa.field(FEED_COLUMNS[0], pa.string(), nullable=False)


def has_feed(properties: Mapping[str, str | None]) -> bool:
    """Whether a table with these properties has a change feed."""
    return properties.get(FEED_PROPERTY) == "true"


def check_feed_columns(name: str, columns: Iterable[str]) -> None:
    """Raise `InvalidInput` if a table has columns that are called as those of a change feed."""
    if taken := sorted({*FEED_COLUMNS} & {column.lower() for column in columns}):
        raise InvalidInput(
            f"{name} can't have a change feed: it has the column {', '.join(taken)}, which the feed has as well",
            hint="Land without --change-feed, or omit that column with --columns",
        )


class FeedWriter:
    """Writes the `cdc` files of one group of a table: give it all rows `after` the merge that are new, then all rows
    `before` it that leave."""

    def __init__(
        self, location: Location, schema: pa.Schema, *, partition: Sequence[tuple[str, str]], file_bytes: int
    ) -> None:
        self._schema = schema
        self._writer = _CdcWriter(location, schema, partition, file_bytes)
        self._after = _HeldRows()
        self._index: KeyIndex | None = None
        self._replaced: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """By new row: how many rows it replaces…"""
        self._equals: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        """…and how many of them are equal to it in every column."""

    def after(self, rows: pa.Table) -> pa.Table:
        """Take new rows. Returns them."""
        assert self._index is None, "new rows come before those that leave"
        self._after.add(rows)
        return rows

    def before(self, rows: pa.Table) -> None:
        """Take rows that leave, whether others take their places or not."""
        rows = aligned(conformed(rows, self._schema), self._schema).combine_chunks()
        found = self._indexed().find(raw_keys_of(rows), _spaces(rows))
        is_equal = np.zeros(rows.num_rows, dtype=np.bool_)
        for start, others in self._after.parts():
            here = np.flatnonzero((found >= start) & (found < start + others.num_rows))
            if len(here):
                is_equal[here] = _are_equal(rows, here, others, found[here] - start)
        paired = found[found >= 0]
        np.add.at(self._replaced, paired, 1)
        np.add.at(self._equals, paired, is_equal[found >= 0])
        self._writer.write(rows, ~is_equal, np.where(found >= 0, "update_preimage", "delete"))

    def _indexed(self) -> KeyIndex:
        if self._index is None:
            self._index = self._after.index()
            self._replaced, self._equals = (np.zeros(len(self._index), dtype=np.int64) for _ in range(2))
        return self._index

    def close(self, leaving: Iterable[pa.Table]) -> list[DataFile]:
        """Take the last rows that leave, and complete the files."""
        for rows in leaving:
            self.before(rows)
        self._indexed()
        # Of a damaged table two rows may have one key: then the new row is named, though it is equal to one of them.
        is_unchanged = (self._replaced == 1) & (self._equals == 1)
        for start, rows in self._after.parts():
            end = start + rows.num_rows
            kinds = np.where(self._replaced[start:end] > 0, "update_postimage", "insert")
            self._writer.write(rows, ~is_unchanged[start:end], kinds)
        self._after.close()
        return self._writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertsTask:
    """Write the `cdc` files of a group that a merge has only added files to."""

    location: Location
    files: tuple[DataFile, ...]
    file_bytes: int

    def run(self) -> list[DataFile]:
        with FileReader(self.location, self.files[0]) as reader:
            writer = _CdcWriter(self.location, reader.schema, self.files[0].partition, self.file_bytes)
        for rows in read_files(self.location, self.files):
            writer.write(rows, np.ones(rows.num_rows, dtype=np.bool_), np.full(rows.num_rows, "insert"))
        return writer.close()


class _CdcWriter:
    """Writes rows with what has happened to them."""

    def __init__(
        self, location: Location, schema: pa.Schema, partition: Sequence[tuple[str, str]], file_bytes: int
    ) -> None:
        self._writer = RollingWriter(
            location.join(FEED_FOLDER),
            schema.append(_CHANGE_TYPE),
            ranges=(),
            partition=partition,
            file_bytes=file_bytes,
            prefix="cdc",
        )

    def write(self, rows: pa.Table, marks: Marks, kinds: Column) -> None:
        """Write the marked rows."""
        if marks.any():
            self._writer.write(filtered(rows.append_column(_CHANGE_TYPE, pa.array(kinds, pa.string())), marks))

    def close(self) -> list[DataFile]:
        return [replace(file, path=f"{FEED_FOLDER}/{file.path}") for file in self._writer.close()]


class _HeldRows:
    """Rows that are numbered in the order in which they come: in memory, and beyond a bound in a temporary file."""

    def __init__(self) -> None:
        self._held: list[pa.Table] = []
        self._held_bytes = 0
        self._spilled: IO[bytes] | None = None
        self._keys: list[pa.Array] = []
        self._seqnos: list[Column] = []
        self._beside: list[Column] = []

    def add(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        rows = rows.combine_chunks()
        self._keys.append(raw_keys_of(rows))
        self._seqnos.append(numbers(rows, "seqno"))
        self._beside.append(_spaces(rows))
        self._held_bytes += rows.nbytes
        self._held.append(rows if self._held_bytes <= FEED_HELD_BYTES else self._spill(rows))

    def _spill(self, rows: pa.Table) -> pa.Table:
        """The same rows, mapped from a file."""
        if self._spilled is None:
            self._spilled = tempfile.NamedTemporaryFile(prefix="headwater-feed-")  # noqa: SIM115
        start = self._spilled.seek(0, 2)
        with pa.ipc.new_stream(pa.PythonFile(self._spilled, mode="w"), rows.schema) as stream:
            stream.write_table(rows)
        self._spilled.flush()
        mapped = pa.memory_map(self._spilled.name)
        mapped.seek(start)
        return pa.ipc.open_stream(mapped).read_all()

    def index(self) -> KeyIndex:
        """All rows by their keys."""
        if not self._held:
            return KeyIndex(pa.array([], pa.binary()), np.zeros(0, dtype=np.int64))
        keys, seqnos, beside = pa.concat_arrays(self._keys), np.concatenate(self._seqnos), np.concatenate(self._beside)
        self._keys, self._seqnos, self._beside = [], [], []
        return KeyIndex(keys, seqnos, beside)

    def parts(self) -> Iterable[tuple[int, pa.Table]]:
        """The rows, and the number of the first of each part."""
        start = 0
        for rows in self._held:
            yield start, rows
            start += rows.num_rows

    def close(self) -> None:
        self._held = []
        if self._spilled is not None:
            self._spilled.close()


def _spaces(rows: pa.Table) -> NDArray[np.int64]:
    return key_spaces(numbers(rows, "vbucket"), numbers(rows, "collection_id"))


def _are_equal(rows: pa.Table, here: Column, others: pa.Table, there: Column) -> Marks:
    """Which of some rows of one table are equal to those of another in every column."""
    # Two versions of a document have different seqnos or CAS values, so hardly any document is compared in vain.
    is_equal: Marks = np.ones(len(here), dtype=np.bool_)
    for name in ("seqno", "cas"):
        is_equal &= numbers(rows, name)[here] == numbers(others, name)[there]
    left, right = rows.take(here[is_equal]), others.take(there[is_equal])
    for name in rows.schema.names:
        if not left.num_rows:
            break
        same = ~differing(left.column(name), right.column(name))
        is_equal[np.flatnonzero(is_equal)[~same]] = False
        left, right = filtered(left, same), filtered(right, same)
    return is_equal
