"""Reading `changes` for a merge: the rows of some vbuckets and batches, and of each first only what decides.

A merge looks at the key, the seqno and the like of every row, and needs the values of those rows alone that it keeps.
So a row group is read narrow, and wide only for what is kept of it. Where all of it is small, it is read wide at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.client.batches import OPS
from headwater.spark.lake.data_files import DataFile, FileReader, filtered, numbers
from headwater.spark.lake.layout import TablePlace
from headwater.spark.lake.schemas import NARROW, raw_keys

MUTATION, DELETION, EXPIRATION, ROLLBACK, COLLECTION_CREATED, COLLECTION_DROPPED = range(6)
assert OPS[:6] == ("mutation", "deletion", "expiration", "rollback", "collection_created", "collection_dropped")

KEEP_BYTES = 256 * 1024 * 1024
"""How much of `changes` one merge holds with its values; of what is beyond that it reads the values again."""
_UNUSED = {"scope", "collection", "snapshot_start", "snapshot_end"}
Marks = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which rows of `changes` a merge looks at."""

    vbuckets: tuple[int, ...]
    """In their order."""
    after_batch: int
    upto_batch: int
    ids: frozenset[int] | None
    """Of collections, or None for all. Rows that belong to none are looked at as well: a rollback is everybody's."""

    def may_be_in(self, reader: FileReader, row_group: int) -> bool:
        low, high, _ = reader.range_of(row_group, "vbucket")
        if not (low <= self.vbuckets[-1] and self.vbuckets[0] <= high):
            return False
        low, high, _ = reader.range_of(row_group, "batch")
        if not (low <= self.upto_batch and self.after_batch < high):
            return False
        low, high, has_nulls = reader.range_of(row_group, "collection_id")
        return has_nulls or self.ids is None or any(low <= id_ <= high for id_ in self.ids)

    def marks(self, rows: pa.Table) -> Marks:
        vbuckets, batches = numbers(rows, "vbucket"), numbers(rows, "batch")
        marks: Marks = (batches > self.after_batch) & (batches <= self.upto_batch)
        if self.ids is not None:
            marks &= np.isin(numbers(rows, "collection_id"), [-1, *self.ids])
        first, last = self.vbuckets[0], self.vbuckets[-1]
        if last - first + 1 == len(self.vbuckets):
            return marks & (vbuckets >= first) & (vbuckets <= last)
        return marks & np.isin(vbuckets, self.vbuckets)


class ChangeRows:
    """The wanted rows of one row group. `columns` tells what to read of it for `wide`; None where `rows` has it."""

    def __init__(
        self, place: TablePlace, path: str, row_group: int, rows: pa.Table, marks: Marks, columns: Sequence[str] | None
    ) -> None:
        self._place, self._path, self._row_group = place, path, row_group
        self._marks = marks
        self._columns = columns
        narrow = filtered(rows, marks)
        self._wide = narrow if columns is None else None
        self._keys = narrow.select(["key", "key_bytes"])
        self._times = narrow.select(["changed_at", "landed_at"])
        self.vbuckets = numbers(narrow, "vbucket")
        self.seqnos = numbers(narrow, "seqno")
        self.ids = numbers(narrow, "collection_id")
        self.batches = numbers(narrow, "batch")
        self.void: Marks = np.asarray(narrow.column("void").to_numpy())
        ops = narrow.column("op").combine_chunks()
        codes = np.array([OPS.index(name) for name in ops.dictionary.to_pylist()], dtype=np.int8)
        self.ops: NDArray[np.int8] = codes[ops.indices.to_numpy()]

    def keys(self, marks: Marks) -> pa.Array:
        """The bytes of the marked rows' keys, all of documents."""
        keys = filtered(self._keys, marks)
        return raw_keys(keys.column("key"), keys.column("key_bytes")).combine_chunks()

    def times_us(self) -> NDArray[np.int64]:
        """When the changes were made. Events do not tell: for them, when they were landed."""
        times = pc.coalesce(self._times.column("changed_at"), self._times.column("landed_at"))
        return np.asarray(times.cast(pa.int64()).to_numpy())

    def wide(self, marks: Marks) -> pa.Table:
        """The marked rows with all their columns."""
        if self._wide is not None:
            return filtered(self._wide, marks)
        with FileReader(self._place, self._path) as reader:
            rows = reader.read(self._row_group, self._columns)
        both = self._marks.copy()
        both[self._marks] = marks
        return filtered(rows, both)


def read_changes(
    place: TablePlace,
    files: Iterable[DataFile],
    wanted: Wanted,
    *,
    columns: Sequence[str] | None = None,
) -> list[ChangeRows]:
    """The wanted rows of some files. `columns` are those that `wide` has, by default what documents are made from."""
    if not wanted.vbuckets:
        return []
    found = []
    keep_bytes = KEEP_BYTES
    for path, reader, row_group in _row_groups(place, files, wanted):
        keep_bytes -= reader.uncompressed_bytes(row_group)
        is_wide = keep_bytes >= 0
        wide = columns or [name for name in reader.schema.names if name not in _UNUSED]
        rows = reader.read(row_group, wide if is_wide else NARROW)
        marks = wanted.marks(rows)
        if marks.any():
            found.append(ChangeRows(place, path, row_group, rows, marks, None if is_wide else wide))
    return found


def _row_groups(place: TablePlace, files: Iterable[DataFile], wanted: Wanted) -> Iterator[tuple[str, FileReader, int]]:
    for file in files:
        with FileReader(place, file.path) as reader:
            for row_group in reader.row_groups:
                if wanted.may_be_in(reader, row_group):
                    yield file.path, reader, row_group


def pending_files(files: Iterable[DataFile], *, after_batch: int, vbuckets: Sequence[int]) -> list[DataFile]:
    """Those that may hold changes of some vbuckets after a batch."""
    return [
        file
        for file in files
        if file.may_hold("batch", low=after_batch + 1) and file.may_hold("vbucket", low=vbuckets[0], high=vbuckets[-1])
    ]
