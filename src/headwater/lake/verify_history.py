"""Is a history what `changes` says? Its versions, from when to when they hold, and which of them are current.

A version holds from its seqno up to the seqno of what ended it: the next change of its document, or the end of its
collection. Of one document no two versions hold at once, and the one that is current has no end. Every mutation in
`changes` that is not void is a version, up to the batch that the history is merged at; and every version is one of
those. What was trimmed from `changes` can't be compared: a version may have been ended by a change that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headwater.lake.change_rows import COLLECTION_CREATED, COLLECTION_DROPPED, EXPIRATION, MUTATION
from headwater.lake.verify_changes import ScannedChanges
from headwater.lake.verify_hashes import NO_TIME, HashedRows, HashIndex, Marks
from headwater.lake.verify_judging import Numbers, is_inside, is_one_of
from headwater.lake.verify_scan import Locators
from headwater.protocol.kernels.memory import Column

NO_END = -1
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Versions:
    """The rows of a history."""

    rows: HashedRows
    locators: Locators
    begun_us: Numbers
    """`valid_from`, or `NO_TIME`."""
    ended_us: Numbers
    """`valid_to`, or `NO_TIME`."""
    ends: Numbers
    """By row: the seqno that ended it, or `NO_END`."""
    is_current: Marks
    """By row: as the table is partitioned."""

    @classmethod
    def joined(cls, parts: list[Versions]) -> Versions:
        def of(name: str, type_: type) -> Numbers:
            return np.concatenate([np.zeros(0, dtype=type_), *(getattr(part, name) for part in parts)])

        return cls(
            rows=HashedRows.joined([part.rows for part in parts]),
            **{name: of(name, np.int64) for name in ("locators", "begun_us", "ended_us", "ends")},
            is_current=of("is_current", np.bool_).astype(np.bool_),
        )


class LandedVersions:
    """What a history has to hold by `changes`."""

    def __init__(self, changes: ScannedChanges, *, ids: frozenset[int], merged: int, trimmed_batch: int) -> None:
        """`changes` are all that are not void. `merged` is the last batch that is in the history."""
        self._vbuckets = changes.vbuckets
        self._is_open = changes.rolled_back_at > merged
        """By vbucket of the group: a rollback that is not in the history yet has changed what `changes` says of it."""
        inside = changes.inside().upto(merged)
        ops = inside.rows.rows.ops
        self._events = inside.of((ops == COLLECTION_CREATED) | (ops == COLLECTION_DROPPED))
        self.changes = inside.of((ops >= MUTATION) & (ops <= EXPIRATION) & is_one_of(inside.rows.rows.ids, ids))
        self._trimmed_upto = np.zeros(len(changes.vbuckets), dtype=np.int64)
        """By vbucket: changes up to this seqno may be gone."""
        old = inside.upto(trimmed_batch)
        np.maximum.at(self._trimmed_upto, old.rows.rows.vbuckets - changes.vbuckets.start, old.rows.rows.seqnos)
        rows = self.changes.rows.rows
        self._by_hash = HashIndex(rows.hashes, rows.seqnos)

    def lost(self, versions: Versions) -> Marks:
        """A mark on the changes that are not among the versions."""
        rows = self.changes.rows.rows
        found = HashIndex(versions.rows.hashes, versions.rows.seqnos).find(rows.hashes)
        marks: Marks = (rows.ops == MUTATION) & ~self._is_open_at(rows) & (found < 0)
        return marks

    def unknown(self, versions: Versions) -> Marks:
        """A mark on the versions that are not among the changes."""
        rows = versions.rows
        found = self._by_hash.find(rows.hashes)
        return (found < 0) & ~self._is_open_at(rows) & ~self._is_trimmed(rows.vbuckets, rows.seqnos)

    def of_other_branches(self, versions: Versions) -> Marks:
        """A mark on the versions that have another vbuuid than the same change."""
        found = self._by_hash.find(versions.rows.hashes)
        marks, is_there = np.zeros(len(found), dtype=np.bool_), found >= 0
        marks[is_there] = self.changes.rows.rows.vbuuids[found[is_there]] != versions.rows.vbuuids[is_there]
        return marks & ~self._is_open_at(versions.rows)

    def _is_open_at(self, rows: HashedRows) -> Marks:
        inside = is_inside(rows.vbuckets, self._vbuckets)
        is_open: Marks = self._is_open[np.where(inside, rows.vbuckets - self._vbuckets.start, 0)] & inside
        return is_open

    def _is_trimmed(self, vbuckets: Column, seqnos: Numbers) -> Marks:
        inside = is_inside(vbuckets, self._vbuckets)
        upto = self._trimmed_upto[np.where(inside, vbuckets - self._vbuckets.start, 0)]
        marks: Marks = (seqnos <= upto) & inside
        return marks

    # --- from when to when they hold ----------------------------------------------------------------------------------

    def faults_of_validity(self, versions: Versions) -> Iterator[tuple[Marks, str | None, str]]:
        """Marks on versions that can't be as they are, the column where it is known, and what to say of them."""
        rows, ends = versions.rows, versions.ends
        has_end = ends != NO_END
        yield versions.is_current & has_end, "is_current", "is current, and has an end"
        yield ~versions.is_current & ~has_end, "is_current", "is not current, and has no end"
        yield has_end & (ends <= rows.seqnos), "valid_to_seqno", "ends before it begins"
        yield _overlapping(versions), None, "begins before the version before it ends"
        is_judged = is_inside(rows.vbuckets, self._vbuckets) & ~self._is_open_at(rows)
        ended_by, ended_us = self._ends_of(rows)
        # What ended it may have been trimmed; it is no later than what is there.
        is_gone = has_end & (ends < ended_by) & self._is_trimmed(rows.vbuckets, ends)
        is_other = is_judged & ~is_gone & (np.where(has_end, ends, _FOREVER) != ended_by)
        yield is_other, "valid_to_seqno", "ends with another change than in `changes`"
        is_later = is_judged & ~is_gone & ~is_other & (versions.ended_us != ended_us)
        yield is_later, "valid_to", "ends at another time than the change that ended it"
        yield has_end != (versions.ended_us != NO_TIME), "valid_to", "has one of `valid_to` and `valid_to_seqno` alone"
        begun_us, is_known = rows.times_us.copy(), rows.times_us != NO_TIME
        found = self._by_hash.find(rows.hashes)
        landed = ~is_known & (found >= 0)
        begun_us[landed] = self.changes.landed_us[found[landed]]
        is_other = (is_known | landed) & is_judged & (versions.begun_us != begun_us)
        yield is_other, "valid_from", "begins at another time than its change was made"

    def _ends_of(self, rows: HashedRows) -> tuple[Numbers, Numbers]:
        """By version: the seqno and the time of the first change of its document, or end of its collection, that comes
        after it; `_FOREVER` and `NO_TIME` where none does."""
        own, times = self.changes.rows.rows, self.changes.times_us
        seqnos, ended_us = _next_after(_document_codes(own, rows), own.seqnos, times, rows.seqnos)
        events = self._events.rows.rows
        if len(events):
            codes = _collection_codes(events), _collection_codes(rows)
            of_collections, at_us = _next_after(codes, events.seqnos, self._events.times_us, rows.seqnos)
            is_first = of_collections < seqnos
            seqnos, ended_us = np.where(is_first, of_collections, seqnos), np.where(is_first, at_us, ended_us)
        return seqnos, ended_us


def _document_codes(changes: HashedRows, versions: HashedRows) -> tuple[Numbers, Numbers]:
    """Numbers of documents: that of the row in `changes` by which the key is found, or -1."""
    index = HashIndex(changes.keys, changes.seqnos)
    return index.find(changes.keys), index.find(versions.keys)


def _collection_codes(rows: HashedRows) -> Numbers:
    return rows.ids << 16 | rows.vbuckets


def _next_after(
    codes: tuple[Numbers, Numbers], seqnos: Numbers, times_us: Numbers, after: Numbers
) -> tuple[Numbers, Numbers]:
    """By place that is asked for, given by its code and a seqno: the first of these with the same code after it."""
    own, asked = codes
    # In one order: what is asked for comes right behind its own change, and the next of these is the one.
    order = np.lexsort((np.concatenate([seqnos, after]), np.concatenate([own, asked])))
    last = len(order)
    following = np.minimum.accumulate(np.where(order < len(own), np.arange(last), last)[::-1])[::-1]
    found = np.empty(last, dtype=np.int64)
    found[order] = np.append(order, -1)[following]
    found = found[len(own) :]
    is_next = found >= 0
    is_next[is_next] = own[found[is_next]] == asked[is_next]
    next_seqnos, next_us = np.full(len(asked), _FOREVER), np.full(len(asked), NO_TIME)
    next_seqnos[is_next], next_us[is_next] = seqnos[found[is_next]], times_us[found[is_next]]
    return next_seqnos, next_us


def _overlapping(versions: Versions) -> Marks:
    rows = versions.rows
    marks = np.zeros(len(rows), dtype=np.bool_)
    order = np.lexsort((rows.seqnos, rows.keys[:, 1], rows.keys[:, 0]))
    before, after = order[:-1], order[1:]
    is_same = (rows.keys[before] == rows.keys[after]).all(axis=1)
    ends = np.where(versions.ends == NO_END, _FOREVER, versions.ends)
    marks[after[is_same & (ends[before] > rows.seqnos[after])]] = True
    return marks
