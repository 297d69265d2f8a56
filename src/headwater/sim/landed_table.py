"""The table that a simulated landing lands into: what `changes` of a lake is, and what its commits say, in memory.

It keeps the rules of the lake (`spark.lake`) without its files:

* A batch is one commit: its rows, the place that was reached in every vbucket, and which rollbacks it had. Nothing of
  it is there before, and nothing else is remembered.
* A rollback voids what lies above its seqno, in the batch itself as far as that came before, and in all earlier ones.
  The rows stay.
* The places of the last commits are *boundaries*, which a later rollback can go back to. What a rollback has given up
  is none any more.
* A rollback into the middle of a snapshot can't be undone, since versions up to its seqno may be missing for newer ones
  that are void now. Then all of the vbucket is void, and it is read again from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.sim.consumer_state import Row

BOUNDARIES_MAX = 16
"""Of each vbucket, as in the lake."""
ROLLBACK = "rollback"


@dataclass(slots=True, kw_only=True)
class ChangeRow:
    """A row of `changes`."""

    batch: int
    vbucket: int
    seqno: int
    snapshot_start: int
    op: str
    collection_id: int | None
    key: bytes | None
    cas: int
    value: bytes | None
    void: bool = False

    @classmethod
    def of(cls, row: Row, *, batch: int) -> ChangeRow:
        """From a row in the client's schema."""
        return cls(
            batch=batch,
            vbucket=row["vbucket"],
            seqno=row["seqno"],
            snapshot_start=row["snapshot_start"],
            op=row["op"],
            collection_id=row["collection_id"],
            key=row["key"],
            cas=row["cas"],
            value=row["value"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """What the tasks of a batch have read."""

    rows: list[Row]
    """Of a vbucket in the order of its stream."""
    reached: Mapping[VBucketId, StreamOffset]
    """The place that was reached in every vbucket that was read."""
    boundaries: Mapping[VBucketId, Seqno]
    """What a later rollback can go back to: the same as `reached`, but for a mutant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a batch came to."""

    batch: int
    added: Mapping[int, list[ChangeRow]]
    rollbacks: Mapping[int, int]
    """By vbucket: the last seqno that was kept."""


@dataclass(slots=True)
class LandedTable:
    """See the module. It outlives the processes that land into it."""

    batch: int = -1
    changes: dict[int, list[ChangeRow]] = field(default_factory=dict)
    """By vbucket, in the order in which they were landed."""
    places: dict[VBucketId, StreamOffset] = field(default_factory=dict)
    boundaries: dict[VBucketId, list[Seqno]] = field(default_factory=dict)
    rollbacks: int = 0

    def commit(self, read: ReadBatch, *, reads_torn_again: bool = True) -> Committed:
        """Make a batch a part of the table, in one step. Without `reads_torn_again` torn snapshots are left so."""
        number = self.batch + 1
        added: dict[int, list[ChangeRow]] = {}
        rollbacks: dict[int, int] = {}
        torn: set[int] = set()
        for row in read.rows:
            change = ChangeRow.of(row, batch=number)
            before = added.setdefault(change.vbucket, [])
            if change.op == ROLLBACK:
                rollbacks[change.vbucket] = min(change.seqno, rollbacks.get(change.vbucket, change.seqno))
                torn |= _void(before, change.seqno)
            before.append(change)
        for vbucket, kept in rollbacks.items():
            torn |= _void(self.changes.get(vbucket, ()), kept)
        places = {**self.places, **read.reached}
        if reads_torn_again:
            for vbucket in torn:
                _void(self.changes.get(vbucket, ()), 0)
                _void(added[vbucket], 0)
                rollbacks[vbucket] = 0
                places.pop(VBucketId(vbucket), None)
        self.batch = number
        self.rollbacks += len(rollbacks)
        self.places = places
        for vbucket, rows in added.items():
            self.changes.setdefault(vbucket, []).extend(rows)
        self._note_boundaries(rollbacks, {it: at for it, at in read.boundaries.items() if it in places})
        return Committed(batch=number, added=added, rollbacks=rollbacks)

    def _note_boundaries(self, rollbacks: Mapping[int, int], reached: Mapping[VBucketId, Seqno]) -> None:
        for rolled, kept in rollbacks.items():
            known = self.boundaries.get(VBucketId(rolled), [])
            self.boundaries[VBucketId(rolled)] = [seqno for seqno in known if seqno <= kept]
        for vbucket, seqno in reached.items():
            known = self.boundaries.setdefault(vbucket, [])
            if not known or seqno > known[-1]:
                self.boundaries[vbucket] = [*known, seqno][-BOUNDARIES_MAX:]


def _void(rows: Iterable[ChangeRow], kept: int) -> set[int]:
    """Mark what lies above a seqno of one vbucket. Returns it if one of the snapshots had begun before that seqno."""
    dead = [row for row in rows if row.seqno > kept and not row.void]
    for row in dead:
        row.void = True
    return {row.vbucket for row in dead if row.snapshot_start < kept}
