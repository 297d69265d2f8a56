"""Compare the rows of a table with the documents of the bucket: only hashes and numbers, no files.

The bucket's documents are the outcome of a stream from the beginning: the newest change of each key. A table holds
every vbucket up to an offset, and the bucket may have advanced since, so one of these is true of each key:

* The newest change in the bucket lies beyond the offset. The table can't know it: the key is *pending*, and the table's
  row for it is not judged. If a collection ended beyond the offset, all of its keys are pending.
* Otherwise the table knows all that the bucket knows. A live document must be there exactly once, with the same hash;
  a removed one must not; nor must a key that the bucket has never had.

A row whose seqno lies beyond the offset is always wrong, whatever the bucket has.

All this is true in the middle of a snapshot as well. There the table may lack a version that the snapshot has
superseded, but then the bucket's own newest version lies beyond the offset.

A vbucket whose offset is on a branch that a failover took back is not judged at all: the table holds changes that no
longer exist, and the next landing takes them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.kernels.memory import Column
from headwater.lake.change_rows import COLLECTION_CREATED, COLLECTION_DROPPED, MUTATION, ROLLBACK, UNMATCHED, Barriers
from headwater.lake.data_files import differing
from headwater.lake.layout import DocumentForm
from headwater.lake.typed_columns import Parsed, TypedColumns
from headwater.lake.variants import document_texts
from headwater.lake.verify_hashes import (
    HashedRows,
    Hashes,
    HashIndex,
    Marks,
    hash_changes,
    hash_documents,
    hash_texts,
    per_row,
)
from headwater.lake.verify_scan import Locators, TableRows, TableScan

_FOREVER = np.iinfo(np.int64).max
NOT_THERE = -1
SEQNO_BITS = 48
"""Seqnos have no more bits, so a vbucket and a seqno fit one number."""
Numbers = NDArray[np.int64]
_Texts: TypeAlias = pa.Array | pa.ChunkedArray


class StreamRolledBack(Exception):
    """The stream took changes back while it was read. It has to be read again: versions that these changes had replaced
    are alive again, but do not come a second time."""

    def __init__(self, vbuckets: frozenset[int]) -> None:
        super().__init__(f"vbuckets {sorted(vbuckets)}")
        self.vbuckets = vbuckets


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Standing:
    """The offsets of a table, for each vbucket of a group."""

    seqnos: Numbers
    """By vbucket, counted from the group's first: the last seqno that the table holds. 0 stands for nothing."""
    is_rolled: Marks
    """By vbucket: whether its offset is on a branch that a failover took back."""

    def also_rolled(self, vbuckets: Iterable[int]) -> Standing:
        """Return the same, with more vbuckets rolled back. They are counted from the group's first."""
        is_rolled = self.is_rolled.copy()
        is_rolled[list(vbuckets)] = True
        return Standing(seqnos=self.seqnos, is_rolled=is_rolled)


# --- the bucket -------------------------------------------------------------------------------------------------------


class BucketReading:
    """Takes the batches of a stream from the beginning, of the vbuckets of one group."""

    def __init__(self, vbuckets: range, *, xattrs: bool, form: DocumentForm = DocumentForm.STRING) -> None:
        self.vbuckets = vbuckets
        self.names: dict[int, str] = {}
        """By collection id: its name, as far as the stream contains it."""
        self._xattrs, self._form = xattrs, form
        self._parts: list[HashedRows] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Add a batch. Raises `StreamRolledBack` if it contains a rollback."""
        if batch.num_rows == 0:
            return
        rows = hash_changes(batch, xattrs=self._xattrs, form=self._form)
        is_rollback = rows.ops == ROLLBACK
        if is_rollback.any():
            raise StreamRolledBack(frozenset(rows.vbuckets[is_rollback].tolist()))
        self._name(batch, rows)
        self._parts.append(rows)

    def _name(self, batch: pa.RecordBatch, rows: HashedRows) -> None:
        for id_, chosen in by_id(rows.ids):
            if id_ in self.names:
                continue
            row = 0 if isinstance(chosen, slice) else int(chosen[0])
            scope, collection = (batch.column(name)[row].as_py() for name in ("scope", "collection"))
            if scope is not None and collection is not None:
                self.names[id_] = f"{scope}.{collection}"

    def finish(self) -> tuple[HashedRows, Barriers]:
        """Return all changes of documents, and the ends of collections. Releases what was read."""
        rows, self._parts = HashedRows.joined(self._parts), []
        return rows.of((rows.ops >= MUTATION) & (rows.ops <= UNMATCHED)), ends_of(rows, self.vbuckets)


def by_id(ids: Numbers) -> list[tuple[int, Any]]:
    """Return the rows of each collection; all of them as a slice, if there is only one collection."""
    if len(ids) == 0:
        return []
    if ids.min() == ids.max():
        return [(int(ids[0]), slice(None))]
    order = np.argsort(ids, kind="stable")
    edges = np.flatnonzero(np.diff(ids[order])) + 1
    return [(int(ids[chosen[0]]), chosen) for chosen in np.split(order, edges)]


def ends_of(rows: HashedRows, vbuckets: range) -> Barriers:
    """Return the ends of collections among changes."""
    events = rows.of((rows.ops == COLLECTION_DROPPED) | (rows.ops == COLLECTION_CREATED))
    ends = Barriers(np.unique(events.ids).tolist(), vbuckets)
    ends.add(vbuckets=events.vbuckets, ids=events.ids, seqnos=events.seqnos)
    return ends


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BucketDocuments:
    """The newest change of every key of a collection, in the vbuckets of one group."""

    vbuckets: range
    rows: HashedRows
    index: HashIndex
    is_live: Marks
    changed_at: Numbers
    """By row: the seqno of its change, or of the end of its collection if that is newer."""
    ends: Barriers
    live_ids: frozenset[int] | None
    """The collections that the bucket has, if known."""

    @classmethod
    def of(
        cls, rows: HashedRows, ends: Barriers, vbuckets: range, *, live_ids: frozenset[int] | None = None
    ) -> BucketDocuments:
        """Fold changes of documents to the newest of each key."""
        index = HashIndex(rows.keys, rows.seqnos)
        if not index.newest.all():
            rows = rows.of(index.newest)
            index = HashIndex(rows.keys, rows.seqnos)
        ended = ends.seqnos(vbuckets=rows.vbuckets, ids=rows.ids)
        return cls(
            vbuckets=vbuckets,
            rows=rows,
            index=index,
            is_live=(rows.ops == MUTATION) & (rows.seqnos > ended),
            changed_at=np.maximum(rows.seqnos, ended),
            ends=ends,
            live_ids=live_ids,
        )

    def as_documents(self) -> BucketDocuments:
        """Return the same for comparison with tables of documents."""
        return replace(self, rows=self.rows.as_documents())

    def ended_at(self, rows: HashedRows, landed_ends: Barriers) -> Numbers:
        """By row that the bucket does not have: return the seqno at which its collection ended, or 0.

        A collection that the bucket no longer has may have ended unseen, because a server accepts no filter on it. Then
        either that end has been landed, or the table can't know of it.
        """
        ended = self.ends.seqnos(vbuckets=rows.vbuckets, ids=rows.ids)
        if self.live_ids is None:
            return ended
        is_unseen = ~np.isin(rows.ids, list(self.live_ids)) & (ended < rows.seqnos)
        landed = landed_ends.seqnos(vbuckets=rows.vbuckets, ids=rows.ids)
        return np.where(is_unseen, np.where(landed > rows.seqnos, landed, _FOREVER), ended)

    def is_pending(self, standing: Standing) -> Marks:
        """By row: whether it is newer than what a table holds."""
        here = self.rows.vbuckets - self.vbuckets.start
        pending: Marks = (self.changed_at > standing.seqnos[here]) & ~standing.is_rolled[here]
        return pending

    def is_landed(self, standing: Standing) -> Marks:
        """By row: whether a table has to know it."""
        here = self.rows.vbuckets - self.vbuckets.start
        landed: Marks = (self.changed_at <= standing.seqnos[here]) & ~standing.is_rolled[here]
        return landed


# --- a table compared with the bucket ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Judged:
    """The rows of a table with the verdict on each. A row without any verdict is not judged."""

    is_equal: Marks
    differs: Marks
    is_extra: Marks
    is_twice: Marks
    is_ending: Marks
    """The bucket no longer has its key, because its collection has ended since."""
    missing: Numbers
    """Rows of the bucket that the table lacks."""


def judge(
    bucket: BucketDocuments, rows: HashedRows, standing: Standing, *, ids: frozenset[int], landed_ends: Barriers
) -> Judged:
    """Compare the documents of a table with those of the bucket. `ids` are the collections that belong in the table;
    `landed_ends` are the ends of collections that have been landed."""
    found = bucket.index.find(rows.keys)
    held, is_rolled, is_ours = _held(bucket, rows, standing)
    is_ours &= is_one_of(rows.ids, ids)
    is_beyond = is_ours & ~is_rolled & (rows.seqnos > held)
    is_there = (found >= 0) & is_ours & ~is_beyond
    found = np.where(is_there, found, NOT_THERE)
    changed_at = _at(bucket.changed_at, found, 0)
    strange = ~is_there & is_ours & ~is_beyond
    if strange.any():
        changed_at[strange] = bucket.ended_at(rows.of(strange), landed_ends)
    is_pending = is_ours & ~is_rolled & (changed_at > held) & ~is_beyond
    is_judged = ~is_pending & ~is_rolled
    is_live = _at(bucket.is_live, found, False)
    is_first = _is_first(found)
    is_same = is_there.copy()
    for word in range(2):
        is_same &= _at(bucket.rows.hashes[:, word], found, 0) == rows.hashes[:, word]
    is_seen = np.zeros(len(bucket.rows), dtype=np.bool_)
    is_seen[found[is_there]] = True
    wanted = bucket.is_live & bucket.is_landed(standing) & ~is_seen
    return Judged(
        is_equal=is_judged & is_live & is_same & is_first,
        differs=is_judged & is_live & ~is_same & is_first,
        is_extra=is_judged & ~is_live,
        is_twice=is_judged & is_live & ~is_first,
        is_ending=is_pending & ~is_there,
        missing=np.flatnonzero(wanted),
    )


def is_inside(vbuckets: Column, group: range) -> Marks:
    """By row: whether its vbucket is one of the group."""
    marks: Marks = (vbuckets >= group.start) & (vbuckets < group.stop)
    return marks


def is_one_of(ids: Numbers, wanted: frozenset[int]) -> Marks:
    # Nearly always there is only one, which numpy does not make use of.
    marks: Marks = ids == next(iter(wanted)) if len(wanted) == 1 else np.isin(ids, list(wanted))
    return marks


def _at(column: Column, rows: Numbers, default: Any) -> Any:
    """Return a column's values in some rows, and the default where a row is `NOT_THERE`."""
    if len(column) == 0:
        return np.full(len(rows), default, dtype=column.dtype)
    return np.where(rows >= 0, column[rows], column.dtype.type(default))


def _held(bucket: BucketDocuments, rows: HashedRows, standing: Standing) -> tuple[Numbers, Marks, Marks]:
    """By row: the table's seqno in its vbucket, whether that is rolled back, and whether the vbucket is of the group.

    A row in another group's vbucket, or in one that the bucket does not have, was put there by another program.
    """
    is_ours = is_inside(rows.vbuckets, bucket.vbuckets)
    here = np.where(is_ours, rows.vbuckets - bucket.vbuckets.start, 0)
    return standing.seqnos[here], standing.is_rolled[here] & is_ours, is_ours


def _is_first(found: Numbers) -> Marks:
    """By row: whether it is the first that was found in its row of the bucket."""
    is_first = np.ones(len(found), dtype=np.bool_)
    there = found[found >= 0]
    if len(there) == 0 or np.bincount(there).max() == 1:
        return is_first
    order = np.argsort(found, kind="stable")
    again = (found[order[1:]] == found[order[:-1]]) & (found[order[1:]] >= 0)
    is_first[order[1:][again]] = False
    return is_first


def twice(numbers: Numbers) -> Numbers:
    """Return the positions of numbers that have occurred before."""
    order = np.argsort(numbers, kind="stable")
    return np.sort(order[1:][numbers[order[1:]] == numbers[order[:-1]]])


# --- typed columns and rejects ----------------------------------------------------------------------------------------
#
# Documents are parsed again, as by the merge that wrote them. The results must equal the columns, and the values that
# do not fit must be the rows of `rejects`, each with the same reason.


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rejected(TableRows):
    """Documents with a value that does not fit, from `documents` or from `rejects`: a row for each value. The hashes do
    not cover extended attributes, since `rejects` does not have them."""

    places: Hashes = per_row(np.uint64, 2)
    """Hashes of the key and, if recorded, the field."""
    reasons: Hashes = per_row(np.uint64, 2)

    @classmethod
    def read(cls, scan: TableScan, rows: pa.Table, fields: _Texts | None, reasons: _Texts, at: Locators) -> Rejected:
        hashed = hash_documents(rows, xattrs=False)
        places = hashed.keys if fields is None else hashed.keys ^ hash_texts(fields)
        return hashed.widened(cls, scan=scan, places=places, reasons=hash_texts(reasons), locators=at)


def are_typed_otherwise(rows: pa.Table, parsed: Parsed, *, may_be_null: bool = False) -> Marks:
    """Mark rows with a typed column that differs from their document, or is null unless `may_be_null`."""
    wrong = np.zeros(rows.num_rows, dtype=np.bool_)
    for name, expected in parsed.columns.items():
        is_other = differing(rows.column(name), expected)
        wrong |= is_other & rows.column(name).is_valid().to_numpy() if may_be_null else is_other
    return wrong


class TypedCheck:
    """Checks the rows of a table of documents."""

    def __init__(self, scan: TableScan, columns: TypedColumns | None) -> None:
        self._scan, self._columns = scan, columns
        self._rejected: list[Rejected] = []

    def take(self, rows: pa.Table, locators: Locators) -> Marks:
        """Check rows. Returns a mark on those whose typed columns differ from their document."""
        if self._columns is None or rows.num_rows == 0:
            return np.zeros(rows.num_rows, dtype=np.bool_)
        parsed = self._columns.parse(document_texts(rows.column("document")))
        if len(misfits := parsed.misfits):
            fields = None if self._columns.is_whole_row else misfits.fields
            found = rows.take(pa.array(misfits.rows))
            self._rejected.append(Rejected.read(self._scan, found, fields, misfits.reasons, locators[misfits.rows]))
        return are_typed_otherwise(rows, parsed)

    @property
    def rejected(self) -> Rejected:
        """The misfits of all rows that were taken."""
        return Rejected.joined(self._rejected, scan=self._scan)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JudgedRejects:
    missing: Numbers
    """Rows that must be there."""
    extra: Numbers
    differing: Numbers
    twice: Numbers
    other_branches: Numbers
    """This and the three before it are positions of stored rows."""


def judge_rejects(expected: Rejected, stored: Rejected) -> JudgedRejects:
    """Compare the rejects of a table with the expected ones."""
    index = HashIndex(expected.places, expected.seqnos)
    found = index.find(stored.places)
    is_there = found >= 0
    is_first = np.zeros(len(found), dtype=np.bool_)
    is_first[np.unique(found, return_index=True)[1]] = True
    at = found[is_there]
    is_same = np.zeros(len(found), dtype=np.bool_)
    is_same[is_there] = (stored.hashes[is_there] == expected.hashes[at]).all(axis=1)
    is_same[is_there] &= (stored.reasons[is_there] == expected.reasons[at]).all(axis=1)
    is_branch = np.zeros(len(found), dtype=np.bool_)
    is_branch[is_there] = stored.vbuuids[is_there] == expected.vbuuids[at]
    is_seen = np.zeros(len(expected), dtype=np.bool_)
    is_seen[at] = True
    # Duplicates in `documents` itself are reported there.
    return JudgedRejects(
        missing=np.flatnonzero(~is_seen & index.newest),
        extra=np.flatnonzero(~is_there),
        differing=np.flatnonzero(is_there & is_first & ~is_same),
        twice=np.flatnonzero(is_there & ~is_first),
        other_branches=np.flatnonzero(is_there & is_first & is_same & ~is_branch),
    )
