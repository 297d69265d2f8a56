"""Reading `changes` for a merge: the rows of some vbuckets and batches, and of each first only what decides.

A merge looks at the key, the seqno and the like of every row, and needs the values of those rows alone that it keeps.
So a row group is read narrow, and wide only for what is kept of it. Where all of it is small, it is read wide at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.client.batches import OPS
from headwater.lake.data_files import DataFile, FileReader, FileWriter, filtered, numbers
from headwater.lake.key_index import KeyIndex, document_places
from headwater.lake.layout import CHANGE_RANGES, NARROW, LakeFacts, TablePlace, changes_schema, raw_keys
from headwater.protocol.kernels.memory import Column
from headwater.protocol.values import Datatype

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


# Collections that are gone: of a vbucket and a collection, what is older than an event is no more.
#
# The event is the end of the collection, or that it was created: one that is created again, at a higher seqno, has been
# flushed. It counts in its own vbucket only; each vbucket has its own, at a seqno of its own.


class Barriers:
    """The newest such event by vbucket and collection."""

    def __init__(self, ids: Iterable[int], vbuckets: range) -> None:
        self._ids = np.array(sorted(ids), dtype=np.int64)
        self._first = vbuckets.start
        self._seqnos = np.zeros((len(self._ids), len(vbuckets)), dtype=np.int64)

    def add(self, *, vbuckets: Column, ids: Column, seqnos: Column) -> None:
        is_ours = np.isin(ids, self._ids)
        rows = np.searchsorted(self._ids, ids[is_ours])
        np.maximum.at(self._seqnos, (rows, vbuckets[is_ours] - self._first), seqnos[is_ours])

    def before(self, *, vbuckets: Column, ids: Column, seqnos: Column) -> NDArray[np.bool_]:
        """By row: it is older than the newest event of its collection."""
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


# Changes of one collection's table and one group of vbuckets, folded to what they leave.
#
# *Pending* changes are those after the batch that the table was last merged at. Of each key the newest counts: a
# mutation is the document now, a removal says that there is none. An event that ends a collection takes all that is
# older.
#
# A vbucket with a rollback among its pending changes is *rolled back*: what the table holds of it is worth nothing any
# more, since versions that were overwritten, removed or dropped on the dead branch may be alive again. All of it is
# taken from `changes` again, as far as that is not void.


def rolled_back(pending: Sequence[ChangeRows], *, after_batch: int) -> dict[int, int]:
    """The vbuckets with a rollback after a batch, and the least seqno that one of them kept.

    A rollback that another one made void counts as well: what it took back stays so.
    """
    found: dict[int, int] = {}
    for rows in pending:
        marks = (rows.ops == ROLLBACK) & (rows.batches > after_batch)
        for vbucket, kept in zip(rows.vbuckets[marks].tolist(), rows.seqnos[marks].tolist(), strict=True):
            found[vbucket] = min(kept, found.get(vbucket, kept))
    return found


class Fold:
    """What the changes leave. `whole` has all changes of the vbuckets in `rolled`, `pending` those of the others."""

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
        self._index = KeyIndex(joined_keys, self._seqnos, document_places(self._vbuckets, self._joined("ids")))
        self._live: Marks = self._index.newest & (self._joined("ops") == MUTATION)
        if self._barriers:
            ids_joined = self._joined("ids")
            self._live &= ~self._barriers.before(vbuckets=self._vbuckets, ids=ids_joined, seqnos=self._seqnos)

    def _take(self, rows: ChangeRows, marks: Marks) -> None:
        marks = marks & ~rows.void
        events = marks & ((rows.ops == COLLECTION_CREATED) | (rows.ops == COLLECTION_DROPPED))
        self._barriers.add(vbuckets=rows.vbuckets[events], ids=rows.ids[events], seqnos=rows.seqnos[events])
        documents = marks & (rows.ops <= EXPIRATION) & np.isin(rows.ids, self._wanted_ids)
        if documents.any():
            self._parts.append((rows, documents))

    def _joined(self, name: str) -> NDArray[np.int64]:
        columns = [getattr(rows, name)[marks] for rows, marks in self._parts]
        return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, dtype=np.int64)

    def can_touch(self, vbuckets: tuple[float, float]) -> bool:
        """Whether rows of a table's file, whose vbuckets lie between two, can be replaced or gone."""
        if self._barriers:
            return True
        low, high = vbuckets
        return any(bool(np.any((touched >= low) & (touched <= high))) for touched in (self._vbuckets, self._rolled))

    def survivors(self, *, keys: pa.Array, vbuckets: Column, seqnos: Column, ids: Column) -> Marks:
        """Of rows that the table has: which of them stay. A row that is newer than its change hides the change."""
        found = self._index.find(keys, document_places(vbuckets, ids))
        has_change = found >= 0
        changed_at = np.where(has_change, self._seqnos[found] if len(self._seqnos) else 0, -1)
        is_rolled = np.isin(vbuckets, self._rolled)
        is_newer = has_change & (seqnos > changed_at) & ~is_rolled
        self._live[found[is_newer]] = False
        stays: Marks = (~has_change | is_newer) & ~is_rolled
        return stays & ~self._barriers.before(vbuckets=vbuckets, ids=ids, seqnos=seqnos)

    @property
    def live_rows(self) -> int:
        return int(self._live.sum())

    def live(self) -> Iterator[pa.Table]:
        """The changes that are documents now, with all their columns. To be asked after `survivors`."""
        start = 0
        for rows, marks in self._parts:
            end = start + int(marks.sum())
            kept = marks.copy()
            kept[marks] = self._live[start:end]
            start = end
            if kept.any():
                yield rows.wide(kept)


# Rows of `changes` to rows of the tables of documents.


_Array = Any
"""One of Arrow's, chunked or not."""


def document_columns(changes: pa.Table, schema: pa.Schema) -> dict[str, _Array]:
    """The columns of a table of documents that mutations give, by name; `schema` may have more."""
    documents, contents = split_values(changes.column("value"), numbers(changes, "datatype"))
    columns = {"document": documents, "content": contents}
    for name in schema.names:
        if name in changes.schema.names and name not in columns:
            columns[name] = changes.column(name)
    return columns


def split_values(values: pa.ChunkedArray, datatypes: NDArray[np.int16]) -> tuple[_Array, _Array]:
    """The texts of those values that are JSON, and the bytes of all others.

    A value that is called JSON and is no UTF-8 is none: it goes with the others.
    """
    is_json = (datatypes & Datatype.JSON) != 0
    try:
        return _split(values, is_json)
    except pa.ArrowInvalid:
        is_text = np.array([_is_text(value) for value in values.to_pylist()], dtype=np.bool_)
        return _split(values, is_json & is_text)


_NOTHING = pa.scalar(None, pa.binary())


def _split(values: pa.ChunkedArray, is_json: NDArray[np.bool_]) -> tuple[_Array, _Array]:
    if is_json.all():
        return values.cast(pa.string()), pa.nulls(len(values), pa.binary())
    marks = pa.array(is_json)
    return pc.if_else(marks, values, _NOTHING).cast(pa.string()), pc.if_else(marks, _NOTHING, values)


def _is_text(value: bytes | None) -> bool:
    try:
        return value is not None and value.decode() is not None
    except UnicodeDecodeError:
        return False


# Marking what a rollback took back: of some vbuckets, everything above a seqno that came before the rollback.
#
# A file that holds such rows is written again with the mark set. The rows stay: `changes` tells what was once believed.


Rollbacks = dict[int, int]
"""By vbucket: the last seqno that is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Voided:
    """A file with dead rows in it, and the one to put in its place; none where it had no dead rows after all."""

    file: DataFile
    replacement: DataFile | None
    torn: frozenset[int] = frozenset()
    """Vbuckets with a rollback into the middle of a snapshot that the file has rows of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VoidTask:
    """Mark the dead rows of one file."""

    place: TablePlace
    facts: LakeFacts
    file: DataFile
    rollbacks: Rollbacks

    def run(self) -> Voided:
        limits = np.full(self.facts.vbuckets, np.iinfo(np.int64).max)
        for vbucket, kept in self.rollbacks.items():
            limits[vbucket] = kept
        torn: set[int] = set()
        with FileReader(self.place, self.file.path) as reader:
            deaths = [_newly_dead(reader, row_group, limits, torn) for row_group in reader.row_groups]
            if not any(dead.any() for dead in deaths):
                return Voided(file=self.file, replacement=None)
            schema = changes_schema(xattrs=self.facts.xattrs)
            writer = FileWriter(self.place, schema, ranges=CHANGE_RANGES, prefix="changes")
            index = schema.get_field_index("void")
            for row_group, dead in zip(reader.row_groups, deaths, strict=True):
                rows = reader.read(row_group, schema.names)
                void = np.asarray(rows.column("void").to_numpy()) | dead
                writer.write_row_group(rows.set_column(index, schema.field(index), pa.array(void)))
        return Voided(file=self.file, replacement=writer.close(), torn=frozenset(torn))


def _newly_dead(reader: FileReader, row_group: int, limits: NDArray[np.int64], torn: set[int]) -> NDArray[np.bool_]:
    rows = reader.read(row_group, ["vbucket", "seqno", "snapshot_start", "void"])
    vbuckets = numbers(rows, "vbucket")
    dead: NDArray[np.bool_] = numbers(rows, "seqno") > limits[vbuckets]
    dead &= ~np.asarray(rows.column("void").to_numpy())
    torn |= torn_vbuckets(vbuckets[dead], numbers(rows, "snapshot_start")[dead], limits)
    return dead


def torn_vbuckets(vbuckets: Column, snapshot_starts: Column, kept: Column) -> set[int]:
    """The vbuckets of dead rows whose snapshot began before the seqno that is kept, given by vbucket.

    In a snapshot each key is there once, in its newest version. Of one that goes on beyond the seqno, versions up to it
    may be missing for newer ones that are dead now: nobody can tell what the vbucket was at that seqno.
    """
    return {int(vbucket) for vbucket in np.unique(vbuckets[snapshot_starts < kept[vbuckets]])}


def may_hold_dead_rows(file: DataFile, rollbacks: Rollbacks) -> bool:
    """Whether a file can hold what the rollbacks took back, by what the log tells of it."""
    return any(
        file.may_hold("vbucket", low=vbucket, high=vbucket) and file.may_hold("seqno", low=kept + 1)
        for vbucket, kept in rollbacks.items()
    )
