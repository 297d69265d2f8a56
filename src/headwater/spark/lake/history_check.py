"""Is a history sound in itself, and does it have the versions that `changes` has?

A version holds from its seqno up to the seqno that ended it. Of one document no two versions hold at once, and the one
that is current has no end. Every mutation in `changes` that is not void is a version, up to the batch that the history
is merged at; and every version is one of those, unless old changes have been folded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headwater.spark.lake.change_rows import MUTATION
from headwater.spark.lake.digests import HashedRows, HashIndex, Marks
from headwater.spark.lake.judging import Numbers, is_inside
from headwater.spark.lake.table_scan import Locators

NO_END = -1
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Versions:
    """The rows of a history."""

    rows: HashedRows
    locators: Locators
    ends: Numbers
    """By row: the seqno that ended it, or `NO_END`."""
    is_current: Marks
    """By row: as the table is partitioned."""

    @classmethod
    def joined(cls, parts: list[Versions]) -> Versions:
        return cls(
            rows=HashedRows.joined([part.rows for part in parts]),
            locators=np.concatenate([np.zeros(0, dtype=np.int64), *(part.locators for part in parts)]),
            ends=np.concatenate([np.zeros(0, dtype=np.int64), *(part.ends for part in parts)]),
            is_current=np.concatenate([np.zeros(0, dtype=np.bool_), *(part.is_current for part in parts)]),
        )


def faults_of_validity(versions: Versions) -> Iterator[tuple[Marks, str]]:
    """Marks on versions that can't be as they are, and what to say of them."""
    has_end = versions.ends != NO_END
    yield versions.is_current & has_end, "is current, and has an end"
    yield ~versions.is_current & ~has_end, "is not current, and has no end"
    yield has_end & (versions.ends <= versions.rows.seqnos), "ends before it begins"
    yield _overlapping(versions), "begins before the version before it ends"


def _overlapping(versions: Versions) -> Marks:
    rows = versions.rows
    marks = np.zeros(len(rows), dtype=np.bool_)
    order = np.lexsort((rows.seqnos, rows.keys[:, 1], rows.keys[:, 0]))
    before, after = order[:-1], order[1:]
    is_same = (rows.keys[before] == rows.keys[after]).all(axis=1)
    ends = np.where(versions.ends == NO_END, _FOREVER, versions.ends)
    marks[after[is_same & (ends[before] > rows.seqnos[after])]] = True
    return marks


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LandedVersions:
    """What a history has to hold by `changes`."""

    rows: HashedRows
    """Changes of the collection's documents that are not void."""
    batches: Numbers
    merged: int
    """The last batch that is in the history."""
    is_open: Marks
    """By vbucket of the group: a rollback that is not in the history yet has changed what `changes` says of it."""
    vbuckets: range

    def lost(self, versions: Versions) -> Marks:
        """A mark on the changes that are not among the versions."""
        marks: Marks = (self.rows.ops == MUTATION) & (self.batches <= self.merged) & ~self._is_open(self.rows)
        found = HashIndex(versions.rows.hashes, versions.rows.seqnos).find(self.rows.hashes)
        return marks & (found < 0)

    def unknown(self, versions: Versions) -> Marks:
        """A mark on the versions that are not among the changes."""
        found = HashIndex(self.rows.hashes, self.rows.seqnos).find(versions.rows.hashes)
        return (found < 0) & ~self._is_open(versions.rows)

    def _is_open(self, rows: HashedRows) -> Marks:
        inside = is_inside(rows.vbuckets, self.vbuckets)
        is_open: Marks = self.is_open[np.where(inside, rows.vbuckets - self.vbuckets.start, 0)] & inside
        return is_open
