"""Is a table the bucket, document by document? The comparison alone: hashes and numbers, and no files.

The bucket is what a stream from the beginning leaves: of each key its newest change. A table holds every vbucket up to
a place, and the bucket may have gone on since, so of each key one of these is true:

* The newest change in the bucket lies behind the place. The table can't know it: the key is *pending*, and whatever the
  table has of it is not judged. An end of the collection that lies behind the place makes all of its keys pending.
* Else the table knows all that the bucket knows. A live document must be there, with the same hash and once; one that
  was removed must not; nor must a key that the bucket has never had.

That holds in the middle of a snapshot as well. There the table may lack a version that the snapshot has superseded, but
then the bucket's own newest one lies behind the place.

A vbucket whose place is on a branch that a failover took back is not judged at all: the table holds what has not
happened, and the next landing takes it back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.lake.change_rows import COLLECTION_CREATED, COLLECTION_DROPPED, EXPIRATION, MUTATION, ROLLBACK, Barriers
from headwater.lake.digests import HashedRows, HashIndex, Marks, hash_changes
from headwater.lake.layout import TableKind
from headwater.protocol.kernels.memory import Column

_FOREVER = np.iinfo(np.int64).max
NOT_THERE = -1
SEQNO_BITS = 48
"""Seqnos have no more, so that a vbucket and a seqno are one number."""

Numbers = NDArray[np.int64]


class RolledBack(Exception):
    """The stream took changes back while it was read. It has to be read again: versions that the changes replaced here
    are alive again, and do not come a second time."""

    def __init__(self, vbuckets: frozenset[int]) -> None:
        super().__init__(f"vbuckets {sorted(vbuckets)}")
        self.vbuckets = vbuckets


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Standing:
    """How far a table is, in each vbucket of a group."""

    seqnos: Numbers
    """By vbucket, counted from the group's first: what the table holds. 0 stands for nothing."""
    is_rolled: Marks
    """By vbucket: its place is on a branch that a failover took back."""

    @classmethod
    def nowhere(cls, vbuckets: int) -> Standing:
        return cls(seqnos=np.zeros(vbuckets, dtype=np.int64), is_rolled=np.zeros(vbuckets, dtype=np.bool_))

    def also_rolled(self, vbuckets: Iterable[int]) -> Standing:
        """`vbuckets` are counted from the group's first."""
        is_rolled = self.is_rolled.copy()
        is_rolled[list(vbuckets)] = True
        return Standing(seqnos=self.seqnos, is_rolled=is_rolled)


# --- the bucket -----------------------------------------------------------------------------------------------------


class BucketReading:
    """Takes the batches of a stream from the beginning, of the vbuckets of one group."""

    def __init__(self, vbuckets: range, *, xattrs: bool) -> None:
        self.vbuckets = vbuckets
        self.names: dict[int, str] = {}
        """Of the collections in it, as far as the stream names them."""
        self._xattrs = xattrs
        self._parts: list[HashedRows] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Raises `RolledBack` for a batch with a rollback in it."""
        if batch.num_rows == 0:
            return
        rows = hash_changes(batch, xattrs=self._xattrs)
        is_rollback = rows.ops == ROLLBACK
        if is_rollback.any():
            raise RolledBack(frozenset(rows.vbuckets[is_rollback].tolist()))
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
        """All changes of documents, and the ends of collections. It holds nothing of them any more."""
        rows = HashedRows.joined(self._parts)
        self._parts = []
        return document_changes(rows), ends_of(rows, self.vbuckets)


def by_id(ids: Numbers) -> list[tuple[int, Any]]:
    """The rows of each collection; all of them as a slice, where there is one collection only."""
    if len(ids) == 0:
        return []
    if ids.min() == ids.max():
        return [(int(ids[0]), slice(None))]
    order = np.argsort(ids, kind="stable")
    edges = np.flatnonzero(np.diff(ids[order])) + 1
    return [(int(ids[chosen[0]]), chosen) for chosen in np.split(order, edges)]


def document_changes(rows: HashedRows) -> HashedRows:
    """Without events, and without what is unknown."""
    marks = (rows.ops >= MUTATION) & (rows.ops <= EXPIRATION)
    return rows if marks.all() else rows.of(marks)


def ends_of(rows: HashedRows, vbuckets: range) -> Barriers:
    """The ends of collections among changes."""
    events = rows.of((rows.ops == COLLECTION_DROPPED) | (rows.ops == COLLECTION_CREATED))
    ends = Barriers(np.unique(events.ids).tolist(), vbuckets)
    ends.add(vbuckets=events.vbuckets, ids=events.ids, seqnos=events.seqnos)
    return ends


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Bucket:
    """The newest change of every key of a collection, in the vbuckets of one group."""

    vbuckets: range
    rows: HashedRows
    index: HashIndex
    is_live: Marks
    changed_at: Numbers
    """By row: the seqno of what made it so, which is the end of its collection where that is newer."""
    ends: Barriers
    live_ids: frozenset[int] | None
    """The collections that the bucket has, where that is known."""

    @classmethod
    def of(cls, rows: HashedRows, ends: Barriers, vbuckets: range, *, live_ids: frozenset[int] | None = None) -> Bucket:
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

    def ended_at(self, rows: HashedRows, landed_ends: Barriers) -> Numbers:
        """By row that the bucket does not have: the seqno at which its collection has ended, or 0.

        A collection that the bucket no longer has may have ended unseen, because a server takes no filter on it. Then
        either that end has been landed, or the table can't know of it.
        """
        ended = self.ends.seqnos(vbuckets=rows.vbuckets, ids=rows.ids)
        if self.live_ids is None:
            return ended
        is_unseen = ~np.isin(rows.ids, list(self.live_ids)) & (ended < rows.seqnos)
        landed = landed_ends.seqnos(vbuckets=rows.vbuckets, ids=rows.ids)
        return np.where(is_unseen, np.where(landed > rows.seqnos, landed, _FOREVER), ended)

    def is_pending(self, standing: Standing) -> Marks:
        """By row: it is newer than what a table holds."""
        here = self.rows.vbuckets - self.vbuckets.start
        pending: Marks = (self.changed_at > standing.seqnos[here]) & ~standing.is_rolled[here]
        return pending

    def is_landed(self, standing: Standing) -> Marks:
        """By row: a table has to know it."""
        here = self.rows.vbuckets - self.vbuckets.start
        landed: Marks = (self.changed_at <= standing.seqnos[here]) & ~standing.is_rolled[here]
        return landed


# --- a table against it ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Judged:
    """The rows of a table, each with what is true of it. A row of which nothing is true is not judged."""

    is_equal: Marks
    differs: Marks
    is_extra: Marks
    is_twice: Marks
    is_ending: Marks
    """The bucket no longer has its key, because its collection has ended since."""
    missing: Numbers
    """Rows of the bucket that the table lacks."""

    @property
    def faults(self) -> tuple[Marks, ...]:
        return self.differs, self.is_extra, self.is_twice


def judge(
    bucket: Bucket, rows: HashedRows, standing: Standing, *, ids: frozenset[int], landed_ends: Barriers
) -> Judged:
    """Compare the documents that a table has with those of the bucket. `ids` are the collections that belong into the
    table; `landed_ends` are the ends of collections that have been landed."""
    found = bucket.index.find(rows.keys)
    place, is_rolled, is_ours = _places(bucket, rows, standing)
    is_ours &= is_one_of(rows.ids, ids)
    is_there = (found >= 0) & is_ours
    found = np.where(is_there, found, NOT_THERE)
    changed_at = _at(bucket.changed_at, found, 0)
    strange = ~is_there & is_ours
    if strange.any():
        changed_at[strange] = bucket.ended_at(rows.of(strange), landed_ends)
    # A place of 0 is that of a table that has not been begun.
    is_pending = is_ours & ~is_rolled & ((changed_at > place) | (place == 0))
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
    """By row: its vbucket is one of the group."""
    marks: Marks = (vbuckets >= group.start) & (vbuckets < group.stop)
    return marks


def is_one_of(ids: Numbers, wanted: frozenset[int]) -> Marks:
    # Nearly always it is one, and numpy does not see that.
    marks: Marks = ids == next(iter(wanted)) if len(wanted) == 1 else np.isin(ids, list(wanted))
    return marks


def _at(column: Column, places: Numbers, default: Any) -> Any:
    """What a column has at some places, and the default where a place is `NOT_THERE`."""
    if len(column) == 0:
        return np.full(len(places), default, dtype=column.dtype)
    return np.where(places >= 0, column[places], column.dtype.type(default))


def _places(bucket: Bucket, rows: HashedRows, standing: Standing) -> tuple[Numbers, Marks, Marks]:
    """By row: what the table holds of its vbucket, whether that is rolled back, and whether it is of the group at all.

    A row of another group's vbucket, or of one that the bucket does not have, was put there by another program.
    """
    is_ours = is_inside(rows.vbuckets, bucket.vbuckets)
    here = np.where(is_ours, rows.vbuckets - bucket.vbuckets.start, 0)
    return standing.seqnos[here], standing.is_rolled[here] & is_ours, is_ours


def _is_first(found: Numbers) -> Marks:
    """By row: no row before it has been found at the same place."""
    is_first = np.ones(len(found), dtype=np.bool_)
    there = found[found >= 0]
    if len(there) == 0 or np.bincount(there).max() == 1:
        return is_first
    order = np.argsort(found, kind="stable")
    again = (found[order[1:]] == found[order[:-1]]) & (found[order[1:]] >= 0)
    is_first[order[1:][again]] = False
    return is_first


def twice(numbers: Numbers) -> Numbers:
    """The places of numbers that have come before."""
    order = np.argsort(numbers, kind="stable")
    return np.sort(order[1:][numbers[order[1:]] == numbers[order[:-1]]])


# What `headwater verify` finds: what is wrong, in which table, and with what, each in one plain sentence.
#
# Of each kind and table the first few are kept, with the number of all of them. So a report is small, however much of a
# table is wrong, and can be carried from an executor to the driver.


FINDINGS_MAX = 20
"""Of one kind in one table that are kept."""
NOT_NAMED = "a document"
"""What a finding calls a document that only the bucket has, until its key has been looked up."""


class FindingKind(StrEnum):
    """What is wrong with it."""

    MISSING = "missing"
    """A document, a change or a version that the table has to hold."""
    EXTRA = "extra"
    """One that it must not hold."""
    DIFFERS = "differs"
    TWICE = "twice"
    TYPED_COLUMN = "typed column"
    """A typed column does not hold what the document says."""
    VALIDITY = "validity"
    """A version is current and has ended, or neither, or two of them hold at once."""
    MISSING_TABLE = "missing table"
    MISSING_FILE = "missing file"
    DAMAGED_FILE = "damaged file"
    DAMAGED_LOG = "damaged log"
    """The log of the table can't be read, so it is not known what belongs to the table."""
    ROLLBACK_PENDING = "rollback pending"
    """A failover took back changes that the table holds."""


_REPORTED_AGAIN = frozenset({FindingKind.MISSING_FILE, FindingKind.DAMAGED_FILE, FindingKind.MISSING_TABLE})
"""What is found by every task that meets it. There are few of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    table: str
    """Such as `changes` or `documents/shop.orders`."""
    what: str
    """A key, a file, or a vbucket."""
    says: str
    """The rest of the sentence."""
    vbucket: int | None = None
    seqno: int | None = None
    file: str | None = None
    """That holds it, from the table's directory on."""
    engine: str | None = None
    """What has written that file, where it was not Headwater."""

    @property
    def sentence(self) -> str:
        places = [
            f"{name} {value}"
            for name, value in (("vbucket", self.vbucket), ("seqno", self.seqno), ("file", self.file))
            if value is not None
        ]
        if self.engine is not None:
            places.append(f"rewritten by another engine, {self.engine}")
        where = f" ({', '.join(places)})" if places else ""
        return f"{self.table}: {self.what} {self.says}{where}"


def table_label(kind: TableKind, name: str | None = None) -> str:
    return str(kind) if name is None else f"{kind}/{name}"


@dataclass(slots=True)
class Findings:
    """Findings of any number, and the first of each kind and table."""

    kept: dict[tuple[FindingKind, str], list[Finding]] = field(default_factory=dict)
    counts: Counter[tuple[FindingKind, str]] = field(default_factory=Counter)

    def add(self, *found: Finding, count: int | None = None) -> None:
        """Take in some of one kind and table; `count` is how many there are, where these are the first only."""
        for one in found:
            self._keep(one)
        if found:
            self.counts[found[0].kind, found[0].table] += len(found) if count is None else count

    def merge(self, others: Findings) -> None:
        """Take in those of another report."""
        self.counts += others.counts
        for place, found in others.kept.items():
            for one in found:
                if one.kind in _REPORTED_AGAIN and any(one.what == known.what for known in self.kept.get(place, ())):
                    self.counts[place] -= 1
                else:
                    self._keep(one)

    def name(self, keys: Mapping[tuple[int, int], str]) -> None:
        """Put the keys of documents in, by vbucket and seqno, into those that have none yet."""

        def named(one: Finding) -> Finding:
            if one.what != NOT_NAMED or one.vbucket is None or one.seqno is None:
                return one
            return replace(one, what=keys.get((one.vbucket, one.seqno), NOT_NAMED))

        for place, found in self.kept.items():
            self.kept[place] = [named(one) for one in found]

    def _keep(self, finding: Finding) -> None:
        kept = self.kept.setdefault((finding.kind, finding.table), [])
        # What is reported again is kept until the last task has reported: else it would be counted twice.
        if len(kept) < FINDINGS_MAX or finding.kind in _REPORTED_AGAIN:
            kept.append(finding)

    def first(self) -> tuple[Finding, ...]:
        """In the order of the kinds, and no more than so many of each kind and table."""
        places = sorted(self.kept, key=lambda place: (_ORDER[place[0]], place[1]))
        return tuple(one for place in places for one in self.kept[place][:FINDINGS_MAX])


_ORDER = {kind: number for number, kind in enumerate(FindingKind)}
