"""Reading `changes` for a merge, and folding the rows to the documents that they leave.

A merge looks at the key, the seqno and the like of every row, and needs the values of those rows alone that it keeps.
So a row group is read narrow, and wide only for what is kept of it. Where all of it is small, it is read wide at once.

Called by the tasks of merges, upkeep and reads, in any process. It writes nothing.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.client.batches import OPS
from headwater.lake.data_files import DataFile, FileReader, filtered, numbers
from headwater.lake.layout import NARROW, raw_keys
from headwater.lake.location import Location
from headwater.lake.rollbacks import Rollbacks, add_rollback
from headwater.protocol.kernels.memory import (
    Bools,
    Bytes,
    Column,
    Int64s,
    ReadOnlyBytes,
    ReadOnlyInt64s,
    UInt32s,
    UInt64,
    i64,
    kernel,
    kernel_part,
    read_only,
    u32,
    u64,
)
from headwater.protocol.kernels.siphash import sip_bytes, sip_end, sip_start, sip_word

MUTATION, DELETION, EXPIRATION, ROLLBACK, COLLECTION_CREATED, COLLECTION_DROPPED = range(6)
assert OPS[:6] == ("mutation", "deletion", "expiration", "rollback", "collection_created", "collection_dropped")

KEEP_BYTES = 256 * 1024 * 1024
"""How much of `changes` one merge holds with its values; of what is beyond that it reads the values again."""
_UNUSED = {"scope", "collection", "snapshot_start", "snapshot_end"}
Marks = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedChanges:
    """Which rows of `changes` a merge looks at."""

    vbuckets: tuple[int, ...]
    """In their order."""
    after_batch: int
    upto_batch: int
    ids: frozenset[int] | None
    """Of collections, or None for all. Rows that belong to none are looked at as well: a rollback concerns every
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
    """The wanted rows of one row group. `columns` says what to read of it for `wide`; None where `rows` has it."""

    def __init__(
        self,
        location: Location,
        path: str,
        row_group: int,
        rows: pa.Table,
        marks: Marks,
        columns: Sequence[str] | None,
    ) -> None:
        self._location, self._path, self._row_group = location, path, row_group
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

    @classmethod
    def in_memory(cls, rows: pa.Table) -> ChangeRows:
        """Rows that were not read from a file."""
        return cls(Location.of("."), "", 0, rows, np.ones(rows.num_rows, dtype=np.bool_), None)

    def keys(self, marks: Marks) -> pa.Array:
        """The bytes of the marked rows' keys, all of documents."""
        keys = filtered(self._keys, marks)
        return raw_keys(keys.column("key"), keys.column("key_bytes")).combine_chunks()

    def times_us(self) -> NDArray[np.int64]:
        """When the changes were made. Events have no such time: for them, when they were landed."""
        times = pc.coalesce(self._times.column("changed_at"), self._times.column("landed_at"))
        return np.asarray(times.cast(pa.int64()).to_numpy())

    def wide(self, marks: Marks) -> pa.Table:
        """The marked rows with all their columns."""
        if self._wide is not None:
            return filtered(self._wide, marks)
        with FileReader(self._location, self._path) as reader:
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
    """The wanted rows of some files. `columns` are those that `wide` has, by default what documents are made from."""
    if not wanted.vbuckets:
        return []
    found = []
    keep_bytes = KEEP_BYTES
    for path, reader, row_group in _row_groups(location, files, wanted):
        keep_bytes -= reader.uncompressed_bytes(row_group)
        is_wide = keep_bytes >= 0
        wide = columns or [name for name in reader.schema.names if name not in _UNUSED]
        rows = reader.read(row_group, wide if is_wide else NARROW)
        marks = wanted.marks(rows)
        if marks.any():
            found.append(ChangeRows(location, path, row_group, rows, marks, None if is_wide else wide))
    return found


def _row_groups(
    location: Location, files: Iterable[DataFile], wanted: WantedChanges
) -> Iterator[tuple[str, FileReader, int]]:
    for file in files:
        with FileReader(location, file.path) as reader:
            for row_group in reader.row_groups:
                if wanted.may_be_in(reader, row_group):
                    yield file.path, reader, row_group


# --- what the rows leave ----------------------------------------------------------------------------------------------
#
# *Pending* changes are those after the batch that the table was last merged at. Of each key the newest counts: a
# mutation is the document now, a removal says that there is none. An event that ends a collection takes all that is
# older.
#
# A vbucket with a rollback among its pending changes is *rolled back*: what the table holds of it is worth nothing any
# more, since versions that were overwritten, removed or dropped on the dead branch may be alive again. All of it is
# taken from `changes` again, as far as that is not void.


def rolled_back(pending: Sequence[ChangeRows], *, after_batch: int) -> Rollbacks:
    """The vbuckets with a rollback after a batch, and the least seqno that one of them kept.

    A rollback that another one made void counts as well: what it took back stays so.
    """
    found: Rollbacks = {}
    for rows in pending:
        marks = (rows.ops == ROLLBACK) & (rows.batches > after_batch)
        for vbucket, kept in zip(rows.vbuckets[marks].tolist(), rows.seqnos[marks].tolist(), strict=True):
            add_rollback(found, vbucket, kept)
    return found


class Barriers:
    """By vbucket and collection, the newest event that ended the collection: what is older is gone.

    The event is the end of the collection, or that it was created: one that is created again, at a higher seqno, has
    been flushed (kv_engine, docs/dcp/documentation/commands/system_event.md). It counts in its own vbucket only; each
    vbucket has its own, at a seqno of its own.
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
        self._index = KeyIndex(joined_keys, self._seqnos, key_spaces(self._vbuckets, self._joined("ids")))
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
        found = self._index.find(keys, key_spaces(vbuckets, ids))
        has_change = found >= 0
        changed_at = np.where(has_change, self._seqnos[found] if len(self._seqnos) else 0, -1)
        is_rolled = np.isin(vbuckets, self._rolled)
        is_newer = has_change & (seqnos > changed_at) & ~is_rolled
        self._live[found[is_newer]] = False
        stays: Marks = (~has_change | is_newer) & ~is_rolled
        return stays & ~self._barriers.before(vbuckets=vbuckets, ids=ids, seqnos=seqnos)

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


# --- rows by their key ------------------------------------------------------------------------------------------------
#
# A hash table over the rows, made for one merge and then dropped. Two rows are of one document where the bytes of their
# keys are equal and the numbers beside them, which say where the key is; so the hash only has to be good, not unique.


_SECRET: Any = (np.uint64(secrets.randbits(64)), np.uint64(secrets.randbits(64)))
_NO_BYTES = np.frombuffer(b"", dtype=np.uint8)
_NO_OFFSETS = np.frombuffer(bytes(8), dtype=np.int64)
"""Not to be written, as what is made of Arrow's buffers: a kernel is compiled once more for arrays that are."""


class KeyIndex:
    """The rows of a merge by their key."""

    def __init__(self, keys: pa.Array, seqnos: Column, beside: Column | None = None) -> None:
        self._offsets, self._data = _parts(keys)
        self._beside = _numbers_beside(beside, len(keys))
        capacity = 1 << max(4, (2 * len(keys)).bit_length())
        self._rows = np.full(capacity, -1, dtype=np.int64)
        self._tags = np.zeros(capacity, dtype=np.uint32)
        self.newest: Marks = np.zeros(len(keys), dtype=np.bool_)
        """By row: it has the highest seqno of its key. Of rows that have the same, the last."""
        self.documents: NDArray[np.int64] = np.zeros(len(keys), dtype=np.int64)
        """By row: the first row of its key."""
        _insert(
            self._data, self._offsets, self._beside, np.array(seqnos, dtype=np.int64), self._rows, self._tags,
            _SECRET[0], _SECRET[1], self.newest, self.documents,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.newest)

    def find(self, keys: pa.Array, beside: Column | None = None) -> NDArray[np.int64]:
        """By key: the newest row that has it, or -1."""
        found = np.full(len(keys), -1, dtype=np.int64)
        if len(self) and len(keys):
            offsets, data = _parts(keys)
            _find(
                self._data, self._offsets, self._beside, self._rows, self._tags, _SECRET[0], _SECRET[1],
                data, offsets, _numbers_beside(beside, len(keys)), found,
            )  # fmt: skip
        return found


def key_spaces(vbuckets: Column, ids: Column) -> NDArray[np.int64]:
    """One number for a collection in a vbucket: there a key is one document.

    A key has one vbucket by its hash, but no server holds a client to that.
    """
    spaces: NDArray[np.int64] = ids.astype(np.int64) << 16 | vbuckets
    return spaces


def _parts(keys: pa.Array) -> tuple[NDArray[np.int64], Bytes]:
    """The offsets and the bytes of an array of binaries without nulls."""
    assert keys.null_count == 0, "every document has a key"
    keys = keys.cast(pa.large_binary())
    _, offsets, data = keys.buffers()
    if len(keys) == 0:
        return _NO_OFFSETS, _NO_BYTES
    ends = read_only(np.frombuffer(offsets, np.int64))[keys.offset : keys.offset + len(keys) + 1]
    return ends, _NO_BYTES if data is None else read_only(np.frombuffer(data, np.uint8))


def _numbers_beside(beside: Column | None, rows: int) -> NDArray[np.int64]:
    return np.zeros(rows, dtype=np.int64) if beside is None else np.array(beside, dtype=np.int64)


# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel_part
def _hash(data: Bytes, start: int, end: int, beside: int, secret0: int, secret1: int) -> int:
    state = sip_word(sip_start(secret0, secret1), u64(beside))
    hashed: int = sip_end(sip_bytes(state, data, start, end - start))[0]
    return hashed


@kernel_part
def _are_equal(data: Bytes, start: int, end: int, other: Bytes, other_start: int, other_end: int) -> bool:
    if end - start != other_end - other_start:
        return False
    at = 0
    while at < end - start and data[start + at] == other[other_start + at]:
        at += 1
    return at == end - start


@kernel
def _insert(
    data: ReadOnlyBytes, offsets: ReadOnlyInt64s, beside: Int64s, seqnos: Int64s, rows: Int64s, tags: UInt32s,
    secret0: UInt64, secret1: UInt64, newest: Bools, documents: Int64s,
) -> None:  # fmt: skip
    mask = u64(len(rows) - 1)
    for row in range(len(newest)):
        start, end = offsets[row], offsets[row + 1]
        hashed = _hash(data, start, end, beside[row], secret0, secret1)
        tag = u32(hashed >> u64(32))
        slot = i64(hashed & mask)
        newest[row] = True
        documents[row] = row
        while rows[slot] >= 0:
            other = rows[slot]
            if (
                tags[slot] == tag
                and beside[other] == beside[row]
                and _are_equal(data, start, end, data, offsets[other], offsets[other + 1])
            ):
                documents[row] = documents[other]
                is_newer = seqnos[row] >= seqnos[other]
                newest[other if is_newer else row] = False
                if is_newer:
                    rows[slot] = row
                break
            slot = i64(u64(slot + 1) & mask)
        if rows[slot] < 0:
            rows[slot] = row
            tags[slot] = tag


@kernel
def _find(
    data: ReadOnlyBytes, offsets: ReadOnlyInt64s, beside: Int64s, rows: Int64s, tags: UInt32s, secret0: UInt64,
    secret1: UInt64, wanted: ReadOnlyBytes, wanted_offsets: ReadOnlyInt64s, wanted_beside: Int64s, found: Int64s,
) -> None:  # fmt: skip
    mask = u64(len(rows) - 1)
    for i in range(len(found)):
        start, end = wanted_offsets[i], wanted_offsets[i + 1]
        hashed = _hash(wanted, start, end, wanted_beside[i], secret0, secret1)
        tag = u32(hashed >> u64(32))
        slot = i64(hashed & mask)
        while rows[slot] >= 0:
            other = rows[slot]
            if (
                tags[slot] == tag
                and beside[other] == wanted_beside[i]
                and _are_equal(wanted, start, end, data, offsets[other], offsets[other + 1])
            ):
                found[i] = other
                break
            slot = i64(u64(slot + 1) & mask)
