"""Reading `changes` for a merge, and folding the rows into the documents that result.

A merge needs the key, the seqno and a few other columns of every row, but the values only of rows that it keeps. So it
reads a row group's narrow columns first, and the others only for kept rows. Small data is read with all columns.

The tasks of merges, upkeep and reads use this module, in any process. It writes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.kernels.memory import Column
from headwater.lake.change_files import Rollbacks, add_rollback
from headwater.lake.data_files import DataFile, FileReader, filtered, numbers
from headwater.lake.key_index import KeyIndex, KeyPlaces, Marks, key_spaces, raw_keys_of
from headwater.lake.layout import LANDED_OPS, NARROW
from headwater.lake.location import Location

MUTATION, DELETION, EXPIRATION, UNMATCHED, ROLLBACK, COLLECTION_CREATED, COLLECTION_DROPPED = range(7)
assert LANDED_OPS[:4] == ("mutation", "deletion", "expiration", "unmatched")
assert LANDED_OPS[4:7] == ("rollback", "collection_created", "collection_dropped")

_SORTED_KEYS_MAX = 100_000
"""With more changed keys than this, assume that every part of the table contains one."""
KEEP_BYTES = 256 * 1024 * 1024
"""How many bytes of `changes` a merge holds with values. Beyond this, it reads the values whenever it needs them."""
_UNUSED = {"scope", "collection", "snapshot_start", "snapshot_end"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedChanges:
    """Which rows of `changes` a merge reads."""

    vbuckets: tuple[int, ...]
    """In ascending order."""
    after_batch: int
    upto_batch: int
    ids: frozenset[int] | None
    """Of collections, or None for all. Rows without a collection are included as well: a rollback concerns every
    collection."""

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
    """The wanted rows of one row group. `columns` are those that `wide` reads; None if `rows` has all of them."""

    def __init__(
        self,
        location: Location,
        file: DataFile,
        row_group: int,
        rows: pa.Table,
        marks: Marks,
        columns: Sequence[str] | None,
    ) -> None:
        self._location, self._file, self._row_group = location, file, row_group
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
        codes = np.array([LANDED_OPS.index(name) for name in ops.dictionary.to_pylist()], dtype=np.int8)
        self.ops: NDArray[np.int8] = codes[ops.indices.to_numpy()]

    @classmethod
    def in_memory(cls, rows: pa.Table) -> ChangeRows:
        """Wrap rows that were not read from a file."""
        none = DataFile(path="", size_bytes=0, rows=0)
        return cls(Location.of("."), none, 0, rows, np.ones(rows.num_rows, dtype=np.bool_), None)

    def keys(self, marks: Marks) -> pa.Array:
        """Return the marked rows' keys as bytes. All marked rows must be of documents."""
        return raw_keys_of(filtered(self._keys, marks))

    def shown_keys(self, marks: Marks) -> pa.ChunkedArray:
        """Return the marked rows' keys as texts, as the tables show them."""
        return filtered(self._keys, marks).column("key")

    def times_us(self) -> NDArray[np.int64]:
        """Return when each change was made. Events have no such time: for them, when they were landed."""
        times = pc.coalesce(self._times.column("changed_at"), self._times.column("landed_at"))
        return np.asarray(times.cast(pa.int64()).to_numpy())

    def wide(self, marks: Marks) -> pa.Table:
        """Return the marked rows with all their columns."""
        if self._wide is not None:
            return filtered(self._wide, marks)
        with FileReader(self._location, self._file) as reader:
            rows = reader.read(self._row_group, self._columns)
        both = self._marks.copy()
        both[self._marks] = marks
        return filtered(rows, both)


def read_changes(
    location: Location,
    files: Iterable[DataFile],
    wanted: WantedChanges,
    *,
    columns: Sequence[str] | None = None,
) -> list[ChangeRows]:
    """Return the wanted rows of some files. `columns` are those that `wide` returns, by default those for documents."""
    if not wanted.vbuckets:
        return []
    found = []
    keep_bytes = KEEP_BYTES
    for file in files:
        with FileReader(location, file) as reader:
            for row_group in (it for it in reader.row_groups if wanted.may_be_in(reader, it)):
                keep_bytes -= reader.uncompressed_bytes(row_group)
                is_wide = keep_bytes >= 0
                wide = columns or [name for name in reader.schema.names if name not in _UNUSED]
                rows = reader.read(row_group, wide if is_wide else NARROW)
                marks = wanted.marks(rows)
                if marks.any():
                    found.append(ChangeRows(location, file, row_group, rows, marks, None if is_wide else wide))
    return found


# --- the outcome of the rows ------------------------------------------------------------------------------------------
#
# *Pending* changes are those after the batch that the table was last merged at. The newest change of each key counts: a
# mutation is the current document, a removal means there is none. An event that ends a collection removes all that is
# older.
#
# A vbucket with a rollback among its pending changes is *rolled back*: what the table holds of it is worthless, since
# versions that were overwritten, removed or dropped on the dead branch may be alive again. So the vbucket is rebuilt
# from all of its rows in `changes` that are not void.


def rolled_back(pending: Sequence[ChangeRows], *, after_batch: int) -> Rollbacks:
    """Return the vbuckets with a rollback after a batch, each with the lowest seqno that was kept.

    A rollback that a later one made void counts as well: the rows that it took back stay void.
    """
    found: Rollbacks = {}
    for rows in pending:
        marks = (rows.ops == ROLLBACK) & (rows.batches > after_batch)
        for vbucket, kept in zip(rows.vbuckets[marks].tolist(), rows.seqnos[marks].tolist(), strict=True):
            add_rollback(found, vbucket, kept)
    return found


class Barriers:
    """By vbucket and collection: the newest event that ended the collection. Older rows are gone.

    The event drops or creates the collection: one that is created again, at a higher seqno, has been flushed
    (kv_engine, docs/dcp/documentation/commands/system_event.md). It counts in its own vbucket only: each vbucket has
    its own event, at its own seqno.
    """

    def __init__(self, ids: Iterable[int], vbuckets: range) -> None:
        self._ids = np.array(sorted(ids), dtype=np.int64)
        self._first = vbuckets.start
        self._seqnos = np.zeros((len(self._ids), len(vbuckets)), dtype=np.int64)

    def add(self, *, vbuckets: Column, ids: Column, seqnos: Column) -> None:
        is_ours = np.isin(ids, self._ids)
        rows = np.searchsorted(self._ids, ids[is_ours])
        np.maximum.at(self._seqnos, (rows, vbuckets[is_ours] - self._first), seqnos[is_ours])

    def before(self, *, vbuckets: Column, ids: Column, seqnos: Column) -> NDArray[np.bool_]:
        """By row: whether it is older than the newest event of its collection."""
        return seqnos < self.seqnos(vbuckets=vbuckets, ids=ids)

    def seqnos(self, *, vbuckets: Column, ids: Column) -> NDArray[np.int64]:
        """By row: the seqno of the newest event of its collection, or 0."""
        if not self._seqnos.any():
            return np.zeros(len(vbuckets), dtype=np.int64)
        rows = np.minimum(np.searchsorted(self._ids, ids), len(self._ids) - 1)
        found: NDArray[np.int64] = self._seqnos[rows, vbuckets - self._first]
        return np.where(self._ids[rows] == ids, found, 0)

    def __bool__(self) -> bool:
        return bool(self._seqnos.any())


class Fold:
    """The outcome of changes. `whole` has all changes of the vbuckets in `rolled`, `pending` those of the others."""

    def __init__(
        self,
        *,
        ids: frozenset[int],
        vbuckets: range,
        after_batch: int,
        rolled: Column,
        pending: Sequence[ChangeRows],
        whole: Sequence[ChangeRows],
    ) -> None:
        self._rolled = rolled
        self._barriers = Barriers(ids, vbuckets)
        self._wanted_ids = np.array(sorted(ids), dtype=np.int64)
        self._parts: list[tuple[ChangeRows, Marks]] = []
        for rows in pending:
            self._take(rows, (rows.batches > after_batch) & ~np.isin(rows.vbuckets, rolled))
        for rows in whole:
            self._take(rows, np.isin(rows.vbuckets, rolled))
        self._seqnos = self._joined("seqnos")
        self._vbuckets = self._joined("vbuckets")
        keys = [rows.keys(marks) for rows, marks in self._parts]
        joined_keys = pa.concat_arrays(keys) if keys else pa.array([], pa.binary())
        self._index = KeyIndex(joined_keys, self._seqnos, key_spaces(self._vbuckets, self._joined("ids")))
        self._shown: list[str] | None = None
        """The keys as texts, sorted; None until they are first needed."""
        self._live: Marks = self._index.newest & (self._joined("ops") == MUTATION)
        if self._barriers:
            ids_joined = self._joined("ids")
            self._live &= ~self._barriers.before(vbuckets=self._vbuckets, ids=ids_joined, seqnos=self._seqnos)

    def _take(self, rows: ChangeRows, marks: Marks) -> None:
        marks = marks & ~rows.void
        events = marks & ((rows.ops == COLLECTION_CREATED) | (rows.ops == COLLECTION_DROPPED))
        self._barriers.add(vbuckets=rows.vbuckets[events], ids=rows.ids[events], seqnos=rows.seqnos[events])
        documents = marks & (rows.ops <= UNMATCHED) & np.isin(rows.ids, self._wanted_ids)
        if documents.any():
            self._parts.append((rows, documents))

    def _joined(self, name: str) -> NDArray[np.int64]:
        columns = [getattr(rows, name)[marks] for rows, marks in self._parts]
        return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, dtype=np.int64)

    def can_touch(self, vbuckets: tuple[float, float]) -> bool:
        """Whether rows of a table's file with vbuckets in this range may have to be replaced or removed."""
        if self._barriers:
            return True
        low, high = vbuckets
        return any(bool(np.any((touched >= low) & (touched <= high))) for touched in (self._vbuckets, self._rolled))

    def may_change(self, keys: tuple[Any, Any] | None) -> bool:
        """Whether rows of a table with shown keys in this range may have to be replaced or removed."""
        if keys is None or self.looks_at_rows or len(self._index) > _SORTED_KEYS_MAX:
            return True
        if self._shown is None:
            shown = [rows.shown_keys(marks) for rows, marks in self._parts]
            self._shown = sorted(key for part in shown for key in part.to_pylist())
        low, high = keys
        at = bisect_left(self._shown, low)
        return at < len(self._shown) and self._shown[at] <= high

    @property
    def looks_at_rows(self) -> bool:
        """Whether rows may go whose own keys have not changed: with their collection, or by a rollback."""
        return bool(self._barriers) or len(self._rolled) > 0

    def superseded(self, places: KeyPlaces) -> NDArray[np.int64]:
        """Return the rows of a table's file that are replaced or removed, dead ones too. Only for use without
        `looks_at_rows`.

        None of them is newer than its change: in a vbucket that was not rolled back a later batch has higher seqnos,
        and the table holds every merged batch as a whole.
        """
        return places.find(self._index)

    def match_rows(self, rows: int, read: Callable[[Sequence[str]], pa.Table]) -> Marks:
        """Return which of the table's `rows` rows stay. `read` returns columns of them; those beside the key are read
        only if one of the keys may have changed."""
        keys = raw_keys_of(read(("key", "key_bytes")))
        if self.looks_at_rows:
            chosen = np.arange(rows)
        elif not len(chosen := self._index.maybe(keys)):
            return np.ones(rows, dtype=np.bool_)
        beside = read(("vbucket", "seqno", "collection_id"))
        vbuckets, seqnos, ids = (numbers(beside, name)[chosen] for name in beside.column_names)
        marks: Marks = np.ones(rows, dtype=np.bool_)
        marks[chosen] = self._survivors(keys=keys.take(pa.array(chosen)), vbuckets=vbuckets, seqnos=seqnos, ids=ids)
        return marks

    def _survivors(self, *, keys: pa.Array, vbuckets: Column, seqnos: Column, ids: Column) -> Marks:
        """Return which of these rows of the table stay. A row that is newer than its change hides the change."""
        found = self._index.find(keys, key_spaces(vbuckets, ids))
        has_change = found >= 0
        changed_at = np.where(has_change, self._seqnos[found] if len(self._seqnos) else 0, -1)
        is_rolled = np.isin(vbuckets, self._rolled)
        is_newer = has_change & (seqnos > changed_at) & ~is_rolled
        self._live[found[is_newer]] = False
        stays: Marks = (~has_change | is_newer) & ~is_rolled
        return stays & ~self._barriers.before(vbuckets=vbuckets, ids=ids, seqnos=seqnos)

    def live(self) -> Iterator[pa.Table]:
        """Yield the changes that are documents now, with all their columns. Call it after `match_rows`."""
        start = 0
        for rows, marks in self._parts:
            end = start + int(marks.sum())
            kept = marks.copy()
            kept[marks] = self._live[start:end]
            start = end
            if kept.any():
                yield rows.wide(kept)


def first_after(codes: Column, seqnos: Column, asked: Column, after: Column) -> NDArray[np.int64]:
    """For each position (`asked` is its code, `after` its seqno): the first row after it with the same code, or -1."""
    if not len(codes):
        return np.full(len(asked), -1, dtype=np.int64)
    # In this order a position comes directly after its own change, so the next row is the wanted one.
    order = np.lexsort((np.concatenate([seqnos, after]), np.concatenate([codes, asked])))
    last = len(order)
    following = np.minimum.accumulate(np.where(order < len(codes), np.arange(last), last)[::-1])[::-1]
    found = np.empty(last, dtype=np.int64)
    found[order] = np.append(order, -1)[following]
    found = found[len(codes) :]
    is_other = found >= 0
    is_other[is_other] = codes[found[is_other]] != asked[is_other]
    found[is_other] = -1
    return found
