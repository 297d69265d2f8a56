"""Judge `changes` and the histories by themselves: each row, the rows of a vbucket together, and the rows by the log.

The bucket has only the newest version of a document, and no information about a landing. So the columns that a landing
adds, and all columns of superseded rows, are judged by rules that every sound record follows:

* `scope` and `collection` are those of the collection's id; if it was dropped, they may be unknown. `changed_at` is
  the time in the CAS.
* The rows of a vbucket that are not void, in the order of their seqnos, are the stream as it came. So batches and the
  bounds of snapshots never decrease, and a branch never returns once it was left.
* A row lies in its snapshot, and no row that is not void lies beyond the table's offset.
* A row is void exactly if a rollback took it back.
* All rows of a batch were landed at one time. The newest entries of the log record it, and where each batch ended.
* A branch is in the failover log, unless a rollback may have removed it there.

Only faults are reported that no sound lake can have: what the log and the failover log no longer contain is not judged.

The versions of a history are judged by the same rows. A version is valid from its seqno up to the seqno that ended it:
the next change of its document, or the end of its collection. No two versions of a document are valid at once, and the
current one has no end. Every mutation in `changes` that is not void is a version, up to the batch at which the history
is merged; and every version is one of those mutations. What was trimmed from `changes` can't be compared: a version may
have been ended by a change that is gone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.kernels.memory import Column
from headwater.lake.change_rows import (
    COLLECTION_CREATED,
    COLLECTION_DROPPED,
    MUTATION,
    ROLLBACK,
    Barriers,
    first_after,
)
from headwater.lake.data_files import FileReader, filtered
from headwater.lake.key_index import key_spaces
from headwater.lake.layout import LakeFacts, table_name
from headwater.lake.verify_hashes import (
    NO_TIME,
    UNKNOWN_OP,
    HashedRows,
    HashIndex,
    Marks,
    hash_changes,
    int64s,
    per_row,
)
from headwater.lake.verify_judging import SEQNO_BITS, Numbers, Standing, ends_of, is_inside, is_one_of
from headwater.lake.verify_scan import OF_FILES, FindingKind, TableRows, TableScan

_CAS_STEP_US = 66
"""The lowest 16 bits of a CAS, whose unit is nanoseconds, count changes at one moment."""
NO_END = -1
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoggedBatches:
    """What the newest log entries of `changes` record about its batches, for the vbuckets of a group."""

    numbers: Numbers
    """Of the batches, ascending without gaps; the first is where the entries begin."""
    seqnos: NDArray[np.int64]
    """By batch and vbucket: the offset after it."""
    is_steady: Marks
    """By vbucket: whether none of these batches contained a rollback."""
    landed_us: Mapping[int, tuple[int, int]]
    """By batch: its earliest and latest landing time."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChangesRecord:
    """What the rows of `changes` are judged by, for the vbuckets of a group."""

    names: Mapping[int, str]
    """By collection: the name of its tables."""
    live_ids: frozenset[int] | None = None
    """The collections that the bucket has, if known: every reader knows their names."""
    standing: Standing
    """The table's offsets. Vbuckets that were rolled back are not judged."""
    snapshot_ends: Numbers
    """By vbucket: the end of the snapshot that the table is in."""
    last_batch: int
    trimmed_batch: int
    """Rollbacks up to this batch are no longer in the table."""
    log: LoggedBatches
    branches: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By vbucket whose failover log has all of its branches: their vbuuids, as signed numbers."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScannedChanges(TableRows):
    """Rows of `changes`, of any kind, including those in vbuckets that the bucket does not have."""

    group: range
    """The vbuckets of the group."""
    rolled_back_at: Numbers
    """By vbucket of the group: the last batch with a rollback of it."""
    batches: Numbers = per_row(np.int64)
    landed_us: Numbers = per_row(np.int64)
    snapshot_starts: Numbers = per_row(np.int64)
    snapshot_ends: Numbers = per_row(np.int64)
    void: Marks = per_row(np.bool_)

    @classmethod
    def read(
        cls, scan: TableScan, record: ChangesRecord, group: range, edges: tuple[float, float], *, facts: LakeFacts
    ) -> ScannedChanges:
        """Read all rows between two vbuckets, and judge each part by itself. This takes long, but needs nothing from
        the bucket."""
        first, last = edges

        def may_hold_ours(reader: FileReader, row_group: int) -> bool:
            low, high, _ = reader.range_of(row_group, "vbucket")
            return low <= last and high >= first

        shared = {"scan": scan, "group": group, "rolled_back_at": np.full(len(group), -1, dtype=np.int64)}
        parts: list[ScannedChanges] = []
        for part in scan.read(may_hold_ours):
            homes = int64s(part.rows, "vbucket", null=-1)
            kept = (homes >= first) & (homes <= last)
            rows = filtered(part.rows, kept)
            columns = {name: int64s(rows, of).copy() for name, of in _COLUMNS.items()}
            columns["void"] = np.asarray(pc.fill_null(rows.column("void"), False)).astype(np.bool_)
            hashed = hash_changes(rows, xattrs=facts.xattrs, form=facts.document)
            parts.append(hashed.widened(cls, locators=part.locators[kept], **columns, **shared))
            for marks, name, says in _faults_of_rows(rows, parts[-1], record):
                parts[-1].of(marks).report(FindingKind.COLUMN, says, column=name)
        found = cls.joined(parts, **shared)
        # A rollback that a later one made void counts as well: the rows that it took back stay void.
        rollbacks = found.of((found.ops == ROLLBACK) & is_inside(found.vbuckets, group))
        np.maximum.at(found.rolled_back_at, rollbacks.vbuckets - group.start, rollbacks.batches)
        return found

    @property
    def ends(self) -> Barriers:
        """The ends of collections."""
        return ends_of(self.inside(), self.group)

    def documents(self) -> ScannedChanges:
        """Return the changes of documents."""
        return self.of((self.ops >= MUTATION) & (self.ops < ROLLBACK))

    def inside(self) -> ScannedChanges:
        """Return the rows in the vbuckets of the group."""
        return self.of(is_inside(self.vbuckets, self.group))

    def upto(self, batch: int) -> ScannedChanges:
        return self.of(self.batches <= batch)

    @property
    def made_us(self) -> Numbers:
        """When the changes were made. Events have no such time: for them, when they were landed."""
        return np.where(self.times_us == NO_TIME, self.landed_us, self.times_us)

    @property
    def is_readable(self) -> bool:
        """Whether no file was missing or damaged: then rows that were not read are not in the table."""
        return not any((kind, self.scan.label) in self.scan.findings.counts for kind in OF_FILES)


_COLUMNS = {
    "batches": "batch",
    "landed_us": "landed_at",
    "snapshot_starts": "snapshot_start",
    "snapshot_ends": "snapshot_end",
}


# --- each row by itself -----------------------------------------------------------------------------------------------


def _faults_of_rows(rows: pa.Table, hashed: ScannedChanges, record: ChangesRecord) -> Iterator[tuple[Marks, str, str]]:
    """Yield marks on impossible rows, the column, and the description."""
    yield hashed.ops == UNKNOWN_OP, "op", "has an operation that there is not"
    for column, marks in _other_names(rows, record):
        yield marks, column, f"has another `{column}` than its collection"
    cas, times_us = int64s(rows, "cas").view(np.uint64), hashed.times_us
    earlier_us = (cas // np.uint64(1000)).astype(np.int64) - np.where(times_us == NO_TIME, 0, times_us)
    is_other = (cas == 0) != (times_us == NO_TIME)
    is_other |= (cas != 0) & ((earlier_us < 0) | (earlier_us > _CAS_STEP_US))
    yield is_other, "changed_at", "has another `changed_at` than its CAS says"
    yield hashed.snapshot_starts > hashed.seqnos, "snapshot_start", "lies before its snapshot"
    yield hashed.snapshot_ends < hashed.seqnos, "snapshot_end", "lies behind its snapshot"
    is_other = (hashed.batches < 0) | (hashed.batches > record.last_batch)
    yield is_other, "batch", "is of a batch that was not landed"


def _other_names(rows: pa.Table, record: ChangesRecord) -> Iterator[tuple[str, Marks]]:
    """By column: mark rows with another name than their collection's. Events of scopes and rollbacks have none."""
    named = pa.table({name: rows.column(name) for name in ("collection_id", "scope", "collection")})
    codes = np.zeros(rows.num_rows, dtype=np.int64)
    for column in named.columns:
        encoded = column.combine_chunks().dictionary_encode()
        none = len(encoded.dictionary)
        codes = codes * (none + 1) + pc.fill_null(encoded.indices, none).to_numpy()
    found, first, at = np.unique(codes, return_index=True, return_inverse=True)
    wrong = {"scope": np.zeros(len(found), dtype=np.bool_), "collection": np.zeros(len(found), dtype=np.bool_)}
    # They are few: a row for each collection.
    for number, row in enumerate(named.take(pa.array(first)).to_pylist()):
        id_ = row["collection_id"]
        if id_ is None:
            wrong["collection"][number] = row["collection"] is not None
        elif id_ not in record.names or record.names[id_] == table_name(None, None, id_):
            continue
        else:
            # A reader may not know the name of a dropped collection, of its scope, or both.
            may_be_unknown = record.live_ids is not None and id_ not in record.live_ids
            for column, name in zip(wrong, record.names[id_].split(".", 1), strict=True):
                wrong[column][number] = row[column] != name and not (may_be_unknown and row[column] is None)
    for name, marks in wrong.items():
        if marks.any():
            yield name, marks[at.reshape(-1)]


# --- the rows of a vbucket together -----------------------------------------------------------------------------------


def judge_record(changes: ScannedChanges, record: ChangesRecord) -> ScannedChanges:
    """Report impossible rows in the group's vbuckets. Returns the rows that are not void."""
    start, standing = changes.group.start, record.standing
    is_judged = ~standing.is_rolled[changes.vbuckets - start]
    for marks, says in _faults_of_void(changes):
        changes.of(marks & is_judged).report(FindingKind.COLUMN, says, column="void")
    _judge_landing_times(changes, record.log)
    is_judged, changes = is_judged[~changes.void], changes.of(~changes.void)
    behind = (changes.seqnos > standing.seqnos[changes.vbuckets - start]) & is_judged
    says = "lies behind the offset that the table is at: nothing can be there yet"
    changes.of(behind).report(FindingKind.EXTRA, says)
    stream = changes.of((changes.ops != ROLLBACK) & is_judged & ~behind)
    order = np.argsort(stream.vbuckets.astype(np.int64) << SEQNO_BITS | stream.seqnos, kind="stable")
    for at, name, says in _faults_of_order(stream, order, record):
        stream.of(np.unique(at)).report(FindingKind.COLUMN, says, column=name)
    return changes


def _faults_of_void(changes: ScannedChanges) -> Iterator[tuple[Marks, str]]:
    """Check the marks. A rollback takes back rows of earlier batches above its seqno, and in its own batch those before
    it, an order that the rows no longer show."""
    is_rollback = changes.ops == ROLLBACK
    kept_later, kept_then = (np.full(len(changes), _FOREVER, dtype=np.int64) for _ in range(2))
    for vbucket in np.unique(changes.vbuckets[is_rollback]).tolist():
        here = np.flatnonzero(changes.vbuckets == vbucket)
        back = np.flatnonzero(is_rollback & (changes.vbuckets == vbucket))
        back = back[np.argsort(changes.batches[back], kind="stable")]
        # By rollback: the lowest seqno that it, or a later one, has kept.
        least = np.append(np.minimum.accumulate(changes.seqnos[back][::-1])[::-1], _FOREVER)
        batches = changes.batches[back]
        kept_later[here] = least[np.searchsorted(batches, changes.batches[here], side="right")]
        kept_then[here] = least[np.searchsorted(batches, changes.batches[here], side="left")]
    yield changes.void & (changes.seqnos <= kept_then), "is void, and no rollback took it back"
    yield ~changes.void & (changes.seqnos > kept_later), "is not void, and a rollback took it back"


def _judge_landing_times(changes: ScannedChanges, log: LoggedBatches) -> None:
    if len(changes) == 0:
        return
    batches, first, at = np.unique(changes.batches, return_index=True, return_inverse=True)
    bounds = np.array([log.landed_us.get(batch, (-_FOREVER, _FOREVER)) for batch in batches.tolist()], dtype=np.int64)
    is_other = (changes.landed_us < bounds[at, 0]) | (changes.landed_us > bounds[at, 1])
    expected = changes.landed_us[first]
    for number in np.unique(at[changes.landed_us != expected[at]]).tolist():
        # The time of most rows of the batch.
        times, counts = np.unique(changes.landed_us[at == number], return_counts=True)
        expected[number] = times[np.argmax(counts)]
    is_other |= changes.landed_us != expected[at]
    says = "was landed at another time than its batch"
    changes.of(is_other).report(FindingKind.COLUMN, says, column="landed_at")


def _faults_of_order(
    changes: ScannedChanges, order: Numbers, record: ChangesRecord
) -> Iterator[tuple[Numbers, str, str]]:
    """Yield rows that do not fit between their neighbours in the vbucket, in the order of their seqnos."""
    before, after = order[:-1], order[1:]
    is_same = changes.vbuckets[before] == changes.vbuckets[after]
    before, after = before[is_same], after[is_same]
    for name, values in (
        ("batch", changes.batches),
        ("snapshot_start", changes.snapshot_starts),
        ("snapshot_end", changes.snapshot_ends),
    ):
        falls = values[before] > values[after]
        yield before[falls], name, f"has a higher `{name}` than the change after it"
    beyond = np.flatnonzero(changes.snapshot_ends > record.snapshot_ends[changes.vbuckets - changes.group.start])
    yield beyond, "snapshot_end", "has a snapshot that ends behind the offset that the table is at"
    yield _of_other_batches(changes, record.log), "batch", "is not of the batch that the log says has brought it"
    yield _of_left_branches(changes, order), "vbuuid", "is of a branch between two rows of another"
    yield _of_unknown_branches(changes, record), "vbuuid", "is of a branch that the bucket does not know"


def _of_other_batches(changes: ScannedChanges, log: LoggedBatches) -> Numbers:
    """Return rows that are not of the first batch whose offset reaches them. If a batch before the logged ones reached
    them, or a rollback came, that is unknown."""
    found = [np.zeros(0, dtype=np.int64)]
    for here in np.flatnonzero(log.is_steady).tolist() if len(log.numbers) else ():
        at = np.flatnonzero(changes.vbuckets == here + changes.group.start)
        brought = np.searchsorted(log.seqnos[:, here], changes.seqnos[at])
        is_known = (brought > 0) & (brought < len(log.numbers))
        at, brought = at[is_known], brought[is_known]
        found.append(at[changes.batches[at] != log.numbers[brought]])
    return np.concatenate(found)


def _of_left_branches(changes: ScannedChanges, order: Numbers) -> Numbers:
    """Return the rows of another branch between two rows of one branch: a branch that was left never returns."""
    if len(order) == 0:
        return order
    homes, branches = changes.vbuckets[order], changes.vbuuids[order]
    is_start = np.append(True, (homes[1:] != homes[:-1]) | (branches[1:] != branches[:-1]))
    runs = np.flatnonzero(is_start)
    if len(runs) == len(np.unique(homes)):
        return order[:0]
    found = [order[:0]]
    edges = np.append(runs, len(order))
    for vbucket in np.unique(homes[runs][np.append(False, homes[runs][1:] == homes[runs][:-1])]).tolist():
        ours = np.flatnonzero(homes[runs] == vbucket)
        of_runs, sizes = branches[runs[ours]], edges[ours + 1] - edges[ours]
        # Of the branches that return, assume that the one with the most rows is right, and the rows within it wrong.
        for branch in np.unique(of_runs[[(of_runs == it).sum() > 1 for it in of_runs]]).tolist():
            spans = np.flatnonzero(of_runs == branch)
            inner = [it for it in range(spans[0] + 1, spans[-1]) if of_runs[it] != branch]
            if sizes[inner].sum() <= sizes[spans].sum():
                found += [order[edges[ours[it]] : edges[ours[it] + 1]] for it in inner]
    return np.unique(np.concatenate(found))


def _of_unknown_branches(changes: ScannedChanges, record: ChangesRecord) -> Numbers:
    """Return rows of branches that the bucket does not know. A branch leaves the failover log when the vbucket rolls
    back to before it, which brings a rollback here; trimmed ones are unknown."""
    found = [np.zeros(0, dtype=np.int64)]
    for vbucket, branches in record.branches.items():
        at = np.flatnonzero(changes.vbuckets == vbucket)
        since = max(changes.rolled_back_at[vbucket - changes.group.start], record.trimmed_batch)
        at = at[changes.batches[at] > since]
        found.append(at[~np.isin(changes.vbuuids[at], list(branches))])
    return np.concatenate(found)


# --- the versions of a history ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Versions(TableRows):
    """The rows of a history."""

    begun_us: Numbers = per_row(np.int64)
    """`valid_from`, or `NO_TIME`."""
    ended_us: Numbers = per_row(np.int64)
    """`valid_to`, or `NO_TIME`."""
    ends: Numbers = per_row(np.int64)
    """By row: the seqno that ended it, or `NO_END`."""
    is_current: Marks = per_row(np.bool_)
    """By row: according to the partition."""


class LandedVersions:
    """What a history must hold according to `changes`."""

    def __init__(self, changes: ScannedChanges, *, ids: frozenset[int], merged: int, trimmed_batch: int) -> None:
        """`changes` are all that are not void. `merged` is the last batch that is in the history."""
        self._group = changes.group
        self._is_open = changes.rolled_back_at > merged
        """By vbucket of the group: whether a rollback that the history lacks so far has changed its `changes`."""
        inside = changes.as_documents().inside().upto(merged)
        self._events = inside.of((inside.ops == COLLECTION_CREATED) | (inside.ops == COLLECTION_DROPPED))
        documents = inside.documents()
        self.changes = documents.of(is_one_of(documents.ids, ids))
        self._trimmed_upto = np.zeros(len(changes.group), dtype=np.int64)
        """By vbucket: changes up to this seqno may be gone."""
        old = inside.upto(trimmed_batch)
        np.maximum.at(self._trimmed_upto, old.vbuckets - changes.group.start, old.seqnos)
        self._by_hash = HashIndex(self.changes.hashes, self.changes.seqnos)

    def lost(self, versions: Versions) -> Marks:
        """Mark the changes that are not among the versions."""
        rows = self.changes
        found = HashIndex(versions.hashes, versions.seqnos).find(rows.hashes)
        marks: Marks = (rows.ops == MUTATION) & ~self._is_open_at(rows) & (found < 0)
        return marks

    def unknown(self, versions: Versions) -> Marks:
        """Mark the versions that are not among the changes."""
        found = self._by_hash.find(versions.hashes)
        return (found < 0) & ~self._is_open_at(versions) & ~self._is_trimmed(versions.vbuckets, versions.seqnos)

    def of_other_branches(self, versions: Versions) -> Marks:
        """Mark the versions that have another vbuuid than the same change."""
        found = self._by_hash.find(versions.hashes)
        marks, is_there = np.zeros(len(found), dtype=np.bool_), found >= 0
        marks[is_there] = self.changes.vbuuids[found[is_there]] != versions.vbuuids[is_there]
        return marks & ~self._is_open_at(versions)

    def _is_open_at(self, rows: HashedRows) -> Marks:
        inside = is_inside(rows.vbuckets, self._group)
        is_open: Marks = self._is_open[np.where(inside, rows.vbuckets - self._group.start, 0)] & inside
        return is_open

    def _is_trimmed(self, vbuckets: Column, seqnos: Numbers) -> Marks:
        inside = is_inside(vbuckets, self._group)
        upto = self._trimmed_upto[np.where(inside, vbuckets - self._group.start, 0)]
        marks: Marks = (seqnos <= upto) & inside
        return marks

    # --- when they are valid ------------------------------------------------------------------------------------------

    def faults_of_validity(self, versions: Versions) -> Iterator[tuple[Marks, str | None, str]]:
        """Yield marks on impossible versions, the column if known, and the description."""
        rows, ends = versions, versions.ends
        has_end = ends != NO_END
        yield versions.is_current & has_end, "is_current", "is current, and has an end"
        yield ~versions.is_current & ~has_end, "is_current", "is not current, and has no end"
        yield has_end & (ends <= rows.seqnos), "valid_to_seqno", "ends before it begins"
        yield _overlapping(versions), None, "begins before the version before it ends"
        is_judged = is_inside(rows.vbuckets, self._group) & ~self._is_open_at(rows)
        ended_by, ended_us = self._ends_of(rows)
        # The change that ended it may have been trimmed; it is no later than the changes that remain.
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
        """By version: return the seqno and the time of the first later change of its document, or end of its
        collection; `_FOREVER` and `NO_TIME` if there is none."""
        # A document's number is that of the row by which its key is found.
        index = HashIndex(self.changes.keys, self.changes.seqnos)
        codes = index.find(self.changes.keys), index.find(rows.keys)
        seqnos, ended_us = _next_after(self.changes, codes, rows.seqnos)
        if len(self._events):
            codes = key_spaces(self._events.vbuckets, self._events.ids), key_spaces(rows.vbuckets, rows.ids)
            of_collections, at_us = _next_after(self._events, codes, rows.seqnos)
            is_first = of_collections < seqnos
            seqnos, ended_us = np.where(is_first, of_collections, seqnos), np.where(is_first, at_us, ended_us)
        return seqnos, ended_us


def _next_after(rows: ScannedChanges, codes: tuple[Numbers, Numbers], after: Numbers) -> tuple[Numbers, Numbers]:
    """By position: return the seqno and the time of the first later row with the same code."""
    found = first_after(codes[0], rows.seqnos, codes[1], after)
    is_next = found >= 0
    seqnos, times_us = np.full(len(found), _FOREVER), np.full(len(found), NO_TIME)
    seqnos[is_next], times_us[is_next] = rows.seqnos[found[is_next]], rows.made_us[found[is_next]]
    return seqnos, times_us


def _overlapping(versions: Versions) -> Marks:
    rows = versions
    marks = np.zeros(len(rows), dtype=np.bool_)
    order = np.lexsort((rows.seqnos, rows.keys[:, 1], rows.keys[:, 0]))
    before, after = order[:-1], order[1:]
    is_same = (rows.keys[before] == rows.keys[after]).all(axis=1)
    ends = np.where(versions.ends == NO_END, _FOREVER, versions.ends)
    marks[after[is_same & (ends[before] > rows.seqnos[after])]] = True
    return marks
