"""Do the typed columns say what the documents beside them say, and are the rejects those that do not fit?

Documents are parsed once more, as the merge did that wrote them. What comes out must be what the columns hold, and the
documents that do not fit must be the rows of `rejects`, each with the same reason.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.spark.lake.digests import HashedRows, Hashes, HashIndex, Marks, hash_documents, hash_texts
from headwater.spark.lake.judging import Numbers
from headwater.spark.lake.table_scan import Locators
from headwater.spark.lake.typed_columns import TypedColumns


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rejected:
    """Documents that do not fit, as `documents` has them or as `rejects` does."""

    rows: HashedRows
    """Without extended attributes, which `rejects` does not have."""
    reasons: Hashes
    locators: Locators

    @classmethod
    def of(cls, rows: pa.Table, reasons: pa.Array | pa.ChunkedArray, locators: Locators) -> Rejected:
        return cls(rows=hash_documents(rows, xattrs=False), reasons=hash_texts(reasons), locators=locators)

    @classmethod
    def joined(cls, parts: list[Rejected]) -> Rejected:
        return cls(
            rows=HashedRows.joined([part.rows for part in parts]),
            reasons=np.concatenate([np.zeros((0, 2), dtype=np.uint64), *(part.reasons for part in parts)]),
            locators=np.concatenate([np.zeros(0, dtype=np.int64), *(part.locators for part in parts)]),
        )


class TypedCheck:
    """Goes over the rows of a table of documents."""

    def __init__(self, columns: TypedColumns | None) -> None:
        self._columns = columns
        self._rejected: list[Rejected] = []

    def take(self, rows: pa.Table, locators: Locators) -> Marks:
        """Returns a mark on rows whose typed columns do not hold what their document says."""
        if self._columns is None or rows.num_rows == 0:
            return np.zeros(rows.num_rows, dtype=np.bool_)
        parsed = self._columns.parse(rows.column("document"))
        wrong = np.zeros(rows.num_rows, dtype=np.bool_)
        for name, expected in parsed.columns.items():
            wrong |= _differing(rows.column(name), expected)
        unfit = np.asarray(parsed.reasons.is_valid())
        if unfit.any():
            marks = pa.array(unfit)
            self._rejected.append(Rejected.of(rows.filter(marks), parsed.reasons.filter(marks), locators[unfit]))
        return wrong

    @property
    def rejected(self) -> Rejected:
        """Those that do not fit, of all that were taken."""
        return Rejected.joined(self._rejected)


def _differing(stored: pa.ChunkedArray, expected: pa.ChunkedArray) -> Marks:
    """A mark on rows in which two columns of one type are not the same."""
    if stored.equals(expected):
        return np.zeros(len(stored), dtype=np.bool_)
    if pa.types.is_nested(stored.type):
        return _differing_nested(stored.combine_chunks(), expected.combine_chunks())
    is_other = pc.fill_null(pc.not_equal(stored, expected), False)
    return np.asarray(pc.or_(is_other, pc.not_equal(stored.is_null(), expected.is_null())))


def _differing_nested(stored: pa.Array, expected: pa.Array) -> Marks:
    """By halves: Arrow can say of arrays of lists and structs only whether they are the same as a whole."""
    if stored.equals(expected):
        return np.zeros(len(stored), dtype=np.bool_)
    if len(stored) == 1:
        return np.ones(1, dtype=np.bool_)
    half = len(stored) // 2
    return np.concatenate(
        [_differing_nested(stored[:half], expected[:half]), _differing_nested(stored[half:], expected[half:])]
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JudgedRejects:
    missing: Numbers
    """Places of those that have to be there."""
    extra: Numbers
    differing: Numbers
    twice: Numbers
    """Places of those that are there."""


def judge_rejects(expected: Rejected, stored: Rejected) -> JudgedRejects:
    """Compare the rejects of a table with what they have to be."""
    index = HashIndex(expected.rows.keys, expected.rows.seqnos)
    found = index.find(stored.rows.keys)
    is_there = found >= 0
    is_first = np.zeros(len(found), dtype=np.bool_)
    is_first[np.unique(found, return_index=True)[1]] = True
    at = found[is_there]
    is_same = np.zeros(len(found), dtype=np.bool_)
    is_same[is_there] = (stored.rows.hashes[is_there] == expected.rows.hashes[at]).all(axis=1)
    is_same[is_there] &= (stored.reasons[is_there] == expected.reasons[at]).all(axis=1)
    is_seen = np.zeros(len(expected.rows), dtype=np.bool_)
    is_seen[at] = True
    # A document that is twice in `documents` is said so there.
    return JudgedRejects(
        missing=np.flatnonzero(~is_seen & index.newest),
        extra=np.flatnonzero(~is_there),
        differing=np.flatnonzero(is_there & is_first & ~is_same),
        twice=np.flatnonzero(is_there & ~is_first),
    )
