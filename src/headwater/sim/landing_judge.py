"""The judge of a simulated landing. It knows the rows of the table, what the nodes have stored and the writers'
log, but not the code that plans, reads and commits.

At every commit:

* No (vbucket, seqno) is live twice: over all batches, the live seqnos of a vbucket rise from row to row. The rows
  marked as void are exactly those that rollbacks took back.
* The table has what the bucket held when the survey of the batch began: every document in that version or a newer
  one, and no document that had been removed by then. The table is on the branch that the vbucket was on. If a
  failover or a drill has taken something back since, the branch differs, and the next commits are judged by it.
* The table has everything that was acknowledged to its writer before the survey of the previous batch: no document is
  older than two batches. A landing with a row limit reads the vbuckets in turn, and may take a batch more for each.
* A rollback goes to the end of a snapshot, and leaves exactly what the server held at that seqno.

At the end, the table must equal the bucket: that is judged by `documents`, as for every other consumer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING

from headwater.client.cluster_map import vbucket_of
from headwater.client.offsets import Offsets
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.sim.checkers import (
    Document,
    Kept,
    Key,
    KnownOutcome,
    Row,
    Write,
    apply_changes,
    documents_of,
    history_differences,
    stored_changes,
)

if TYPE_CHECKING:
    from headwater.sim.world import World

# --- the table that a simulated landing lands into: `changes` of a lake, and the contents of its commits, in memory ---
#
# It keeps the rules of the lake (`headwater.lake`) without its files:
#
# * A batch is one commit: its rows, the offset reached in every vbucket, and its rollbacks. None of it is visible
#   earlier, and nothing else is remembered.
# * A rollback voids the rows above its seqno, in earlier batches and earlier in its own batch. The rows stay.
# * The offsets of the last commits are *boundaries*, to which a later rollback can go back. Boundaries that a rollback
#   has taken back no longer count.
# * A rollback into the middle of a snapshot can't be undone: versions up to its seqno may be missing, replaced by newer
#   ones that are now void. Then the whole vbucket is void, and is read again from 0.


BOUNDARIES_MAX = 16
"""Boundaries kept for each vbucket, as in the lake."""
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
        """Make a row from one in the client's schema."""
        return cls(batch=batch, **{one.name: row[one.name] for one in fields(cls) if one.name in row})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBatch:
    """What the tasks of a batch have read."""

    rows: list[Row]
    """The rows. Those of a vbucket are in the order of its stream."""
    reached: Mapping[VBucketId, StreamOffset]
    """The offset reached in every vbucket that was read."""
    boundaries: Mapping[VBucketId, Seqno]
    """The seqnos to which a later rollback can go back: the same as `reached`, except for a mutant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """The result of committing a batch."""

    batch: int
    added: Mapping[int, list[ChangeRow]]
    rollbacks: Mapping[int, int]
    """By vbucket: the last seqno that was kept."""


@dataclass(slots=True)
class LandedTable:
    """The table described above. It outlives the processes that land into it."""

    batch: int = -1
    changes: dict[int, list[ChangeRow]] = field(default_factory=dict)
    """By vbucket, in the order of landing."""
    offsets: dict[VBucketId, StreamOffset] = field(default_factory=dict)
    boundaries: dict[VBucketId, list[Seqno]] = field(default_factory=dict)
    rollbacks: int = 0

    def commit(self, read: ReadBatch, *, reads_torn_again: bool = True) -> Committed:
        """Add a batch to the table in one step. Without `reads_torn_again`, torn snapshots are not read again."""
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
        offsets = {**self.offsets, **read.reached}
        if reads_torn_again:
            for vbucket in torn:
                _void(self.changes.get(vbucket, ()), 0)
                _void(added[vbucket], 0)
                rollbacks[vbucket] = 0
                offsets.pop(VBucketId(vbucket), None)
        self.batch = number
        self.rollbacks += len(rollbacks)
        self.offsets = offsets
        for vbucket, rows in added.items():
            self.changes.setdefault(vbucket, []).extend(rows)
        self._note_boundaries(rollbacks, {it: at for it, at in read.boundaries.items() if it in offsets})
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
    """Void the rows of one vbucket above a seqno. Returns the vbucket if that lies inside one of their snapshots."""
    dead = [row for row in rows if row.seqno > kept and not row.void]
    for row in dead:
        row.void = True
    return {row.vbucket for row in dead if row.snapshot_start < kept}


# --- the judge --------------------------------------------------------------------------------------------------------

CHECKED_COMMITS = 5
"""Compare the first commits with the server's history, which is slow, and after that every `CHECK_EVERY`th."""
CHECK_EVERY = 20
_REMOVALS = frozenset({"deletion", "expiration"})
_NO_CHANGES = frozenset({ROLLBACK, "collection_created", "collection_modified", "scope_created", "scope_dropped"})
"""Operations that change no document themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVBucket:
    """What the active node of a vbucket has stored at one moment."""

    branch: int
    seqno: int
    """Everything up to this seqno is durable."""
    purge_seqno: int
    """Removals up to this seqno may be purged: a consumer that reads from 0 then gets no row for them."""
    documents: Mapping[Key, Document]
    collections: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The bucket at one moment, without vbuckets that have no active node at that moment, or two."""

    at_s: float
    vbuckets: Mapping[int, StoredVBucket]


@dataclass(slots=True)
class _Followed:
    """The documents of a vbucket on one node and branch, updated with what was stored since."""

    node: str
    branch: int
    seqno: int = 0
    documents: dict[Key, Document] = field(default_factory=dict)


class BucketTruth:
    """What the nodes have stored, followed over time. All landings of a run share one instance."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._followed: dict[int, _Followed] = {}
        self._first_seen_s: dict[tuple[int, int], float] = {}

    def look(self) -> Look:
        """Return the current state of the bucket."""
        found = {vbucket: self._look_at(vbucket) for vbucket in range(self._world.plan.vbuckets)}
        return Look(
            at_s=self._world.loop.time(),
            vbuckets={vbucket: stored for vbucket, stored in found.items() if stored is not None},
        )

    def first_seen_s(self, vbucket: int, branch: int) -> float:
        """Return a time when the vbucket was already on this branch: its start has not lost any later write."""
        return self._first_seen_s[vbucket, branch]

    def _look_at(self, vbucket: int) -> StoredVBucket | None:
        host = self._world.active_host(vbucket)
        facts = None if host is None else host.bucket.vbuckets.facts[vbucket]
        if host is None or facts is None:
            return None
        branch, seqno = int(facts.failover_log.newest.vbuuid), host.bucket.vbuckets.durable_seqno(vbucket)
        self._first_seen_s.setdefault((vbucket, branch), self._world.loop.time())
        known = self._followed.get(vbucket)
        # A removal that was stored and purged between two looks is never seen (seed 50): then everything is read again.
        if (
            known is None
            or (known.node, known.branch) != (host.name, branch)
            or not facts.purge_seqno <= known.seqno <= seqno
        ):
            known = self._followed[vbucket] = _Followed(host.name, branch)
        apply_changes(known.documents, stored_changes(host.bucket, vbucket, after_seqno=known.seqno))
        known.seqno = seqno
        return StoredVBucket(
            branch=branch,
            seqno=seqno,
            purge_seqno=int(facts.purge_seqno),
            documents=dict(known.documents),
            collections=frozenset(int(collection.id) for _, collection in host.bucket.manifest.collections()),
        )


class LandingJudge:
    """Judges one table, over all lives of the landing."""

    def __init__(self, world: World, name: str, table: LandedTable, truth: BucketTruth, *, is_limited: bool) -> None:
        self._world = world
        self._name = name
        self._table = table
        self._truth = truth
        self._is_limited = is_limited
        batches_late = world.plan.vbuckets if is_limited else 1
        self._looks: deque[Look] = deque(maxlen=batches_late + 1)
        """The looks before the surveys of the last committed batches."""
        self._alive: dict[int, list[ChangeRow]] = {}
        """By vbucket, rising: the rows that must be live according to rows and rollbacks, not to the table's marks."""
        self._newest: dict[int, dict[Key, ChangeRow]] = {}
        """By vbucket: the last of these rows for every key, including removals."""

    def on_start(self) -> None:
        """Note the start of a life. It forgets which vbuckets were read last, so they may wait the full time again."""
        if self._is_limited:
            self._looks.clear()

    def documents(self, vbucket: int) -> dict[Key, Document]:
        """Return the documents of all live rows in the table."""
        rows = self._table.changes.get(vbucket, ())
        return documents_of(_kept(row) for row in rows if not row.void and row.op not in _NO_CHANGES)

    # --- checks at a commit ---------------------------------------------------------------------------------------

    def on_commit(self, committed: Committed, look: Look, *, postponed: Collection[int]) -> None:
        """Check a committed batch. `look` was taken before its survey; `postponed` vbuckets wait for a later one."""
        for vbucket, rows in committed.added.items():
            for row in rows:
                self._take(row)
            if vbucket in committed.rollbacks:
                self._check_marks(vbucket)
        self._looks.append(look)
        now = self._truth.look()
        self._check_held(look, now, postponed)
        if len(self._looks) == self._looks.maxlen:
            self._check_age(self._looks[0], now)
        if committed.rollbacks or committed.batch < CHECKED_COMMITS or committed.batch % CHECK_EVERY == 0:
            offsets = Offsets("", self._table.offsets)
            for wrong in history_differences(self._name, self.documents, offsets, self._world.active_bucket):
                self._world.complain(wrong)

    def on_nothing_new(self, look: Look) -> None:
        """Check the table after a survey that found nothing to read."""
        self._check_held(look, self._truth.look(), ())

    def _take(self, row: ChangeRow) -> None:
        alive, newest = self._alive.setdefault(row.vbucket, []), self._newest.setdefault(row.vbucket, {})
        where = f"vbucket {row.vbucket}, in batch {row.batch}"
        if row.op == ROLLBACK:
            dead = [alive.pop() for _ in range(len(alive) - bisect_right(alive, row.seqno, key=attrgetter("seqno")))]
            if any(gone.snapshot_start < row.seqno for gone in dead):
                self._complain(f"the rollback to seqno {row.seqno} of {where}, goes into the middle of a snapshot")
            newest.clear()
            newest.update((_key(left), left) for left in alive if left.key is not None)
            return
        if alive and row.seqno <= alive[-1].seqno:
            self._complain(f"seqno {row.seqno} is alive after {alive[-1].seqno} in {where}")
            return
        alive.append(row)
        if row.key is not None:
            newest[_key(row)] = row

    def _check_marks(self, vbucket: int) -> None:
        """Check that the rows not marked as void are those that the rollbacks have left."""
        marked = [row.seqno for row in self._table.changes[vbucket] if not row.void and row.op != ROLLBACK]
        if marked != [row.seqno for row in self._alive[vbucket]]:
            self._complain(f"the marks of vbucket {vbucket} are wrong in batch {self._table.batch}")

    # --- against the nodes ----------------------------------------------------------------------------------------

    def _check_held(self, then: Look, now: Look, postponed: Collection[int]) -> None:
        for vbucket, stored in then.vbuckets.items():
            after = now.vbuckets.get(vbucket)
            if vbucket in postponed or after is None or after.branch != stored.branch:
                continue
            if not self._is_on(stored.branch, vbucket):
                self._complain(f"vbucket {vbucket} is at {self._offset(vbucket)}, and its branch is {stored.branch}")
                continue
            live = stored.collections & after.collections
            newest = self._newest.get(vbucket, {})
            for key in sorted(stored.documents.keys() | newest.keys()):
                row = newest.get(key)
                # It may have been removed since, and the removal purged: a read from 0 then has no row for either.
                newer = after.purge_seqno if row is None else row.seqno
                if key[0] not in live or newer > stored.seqno or _document(row) == stored.documents.get(key):
                    continue
                self._complain(
                    f"vbucket {vbucket} at seqno {self._offset_seqno(vbucket)} has {_document(row)} for {key}, and "
                    f"stored was {stored.documents.get(key)} before the survey, at seqno {stored.seqno}"
                )

    def _is_on(self, branch: int, vbucket: int) -> bool:
        """Return whether the table's rows of a vbucket are on this branch. An empty vbucket is on any branch."""
        offset = self._offset(vbucket)
        return offset is None or not offset.seqno or int(offset.vbuuid) == branch

    def _offset(self, vbucket: int) -> StreamOffset | None:
        return self._table.offsets.get(VBucketId(vbucket))

    def _offset_seqno(self, vbucket: int) -> int:
        offset = self._offset(vbucket)
        return 0 if offset is None else int(offset.seqno)

    # --- against the writers --------------------------------------------------------------------------------------

    def _check_age(self, then: Look, now: Look) -> None:
        """Check that the table has what was acknowledged before the oldest look, if the branch is the same."""
        for key, writes in self._world.writes.by_key.items():
            vbucket = vbucket_of(key[1], self._world.plan.vbuckets)
            stored, after = then.vbuckets.get(vbucket), now.vbuckets.get(vbucket)
            if stored is None or after is None or after.branch != stored.branch:
                continue
            if not self._is_on(stored.branch, vbucket):
                continue
            since_s = self._truth.first_seen_s(vbucket, stored.branch)
            due = _last_acknowledged(writes, since_s=since_s, before_s=then.at_s)
            held = _document(self._newest.get(vbucket, {}).get(key))
            if due is not None and not _may_be_held(writes, due, None if held is None else held[2]):
                self._complain(
                    f"{key} is too old: it has {held} in batch {self._table.batch}, and {writes[due].value!r} was "
                    f"acknowledged before the survey of batch {self._table.batch - len(self._looks) + 1}"
                )

    def _complain(self, what: str) -> None:
        self._world.complain(f"{self._name}: {what}")


def _key(row: ChangeRow) -> Key:
    assert row.key is not None, f"{row} is of no document"
    return row.collection_id or 0, row.key


def _kept(row: ChangeRow) -> Kept:
    if row.op == "collection_dropped":
        return row.seqno, None, row.collection_id
    return row.seqno, _key(row), _document(row)


def _document(row: ChangeRow | None) -> Document | None:
    if row is None or row.op in _REMOVALS:
        return None
    assert row.op == "mutation", f"{row} is no document"
    return row.seqno, row.cas, row.value or b""


def _last_acknowledged(writes: list[Write], *, since_s: float, before_s: float) -> int | None:
    """Return the index of the last write acknowledged before a time, or None if it began too early."""
    for number in reversed(range(len(writes))):
        write = writes[number]
        if write.outcome is KnownOutcome.ACKNOWLEDGED and write.ended_s is not None and write.ended_s < before_s:
            return number if write.began_s > since_s else None
    return None


def _may_be_held(writes: list[Write], due: int, held: bytes | None) -> bool:
    """Return whether a value, or None, can result from the write that is due or from another possible one."""
    for number in reversed(range(len(writes))):
        write = writes[number]
        # A write of unknown outcome may take effect late, after writes that began later.
        counts = write.outcome is not KnownOutcome.REFUSED if number >= due else write.outcome is KnownOutcome.UNKNOWN
        if counts and (write.value == held or (held is None and write.may_expire)):
            return True
    return False
