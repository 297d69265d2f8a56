"""Is `changes` a record that can be? What its rows say of themselves, of each other, and beside its log.

The bucket has the newest version of a document only, and nothing of a landing. So the columns that a landing adds, and
all columns of superseded rows, are judged by what must be true of any record:

* `scope` and `collection` are those of the collection's id; where it was dropped, they may be unknown. `changed_at` is
  the time in the CAS.
* The rows of a vbucket that are not void, in the order of their seqnos, are the stream as it came. So batches and the
  bounds of snapshots never fall, and a branch that was left does not come again.
* A row lies in its snapshot, and no row that is not void lies behind the offset that the table is at.
* A row is void exactly where a rollback took it back.
* All rows of a batch were landed at one time. The newest entries of the log say which, and where each batch has ended.
* A branch is one of the failover log, unless a rollback may have taken it out of that.

Only faults are reported that no sound lake can have: what the log and the failover log no longer say is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from headwater.lake.change_rows import MUTATION, ROLLBACK, Barriers
from headwater.lake.data_files import FileReader, filtered
from headwater.lake.layout import table_name
from headwater.lake.verify_hashes import NO_TIME, UNKNOWN_OP, Marks, hash_changes, int64s
from headwater.lake.verify_judging import SEQNO_BITS, Numbers, ends_of, is_inside
from headwater.lake.verify_scan import OF_FILES, FindingKind, TableRows, TableScan

_CAS_STEP_US = 66
"""The lowest 16 bits of a CAS, which has nanoseconds, count changes of one moment."""
_EVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoggedBatches:
    """What the newest entries of the log of `changes` say of its batches, for the vbuckets of a group."""

    numbers: Numbers
    """Of the batches, rising and with none left out; the first is where the entries begin."""
    seqnos: NDArray[np.int64]
    """By batch and vbucket: the offset after it."""
    is_steady: Marks
    """By vbucket: none of these batches has brought a rollback."""
    landed_us: Mapping[int, tuple[int, int]]
    """By batch: when it was landed, at the earliest and at the latest."""

    @classmethod
    def none(cls, vbuckets: int) -> LoggedBatches:
        nothing = np.zeros(0, dtype=np.int64)
        return cls(
            numbers=nothing,
            seqnos=np.zeros((0, vbuckets), dtype=np.int64),
            is_steady=np.zeros(vbuckets, dtype=np.bool_),
            landed_us={},
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChangesRecord:
    """What the rows of `changes` are judged by, for the vbuckets of a group."""

    names: Mapping[int, str]
    """By collection: the name of its tables."""
    live_ids: frozenset[int] | None = None
    """The collections that the bucket has, where that is known: their names are known to every reader."""
    offset_seqnos: Numbers
    """By vbucket: where the table is."""
    snapshot_ends: Numbers
    """By vbucket: where the snapshot ends that the table is in."""
    is_rolled: Marks
    """By vbucket: a failover took back a part of it, and nothing of it is judged."""
    last_batch: int
    trimmed_batch: int
    """Rollbacks up to this batch are no longer there."""
    log: LoggedBatches
    branches: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By vbucket whose failover log has all of its branches: their vbuuids, as signed numbers."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScannedChanges:
    """Rows of `changes`."""

    rows: TableRows
    """Of any kind, with vbuckets that the bucket does not have among them."""
    batches: Numbers
    landed_us: Numbers
    snapshot_starts: Numbers
    snapshot_ends: Numbers
    void: Marks
    rolled_back_at: Numbers
    """By vbucket of the group: the last batch that brought a rollback of it."""
    vbuckets: range

    @classmethod
    def read(
        cls, scan: TableScan, record: ChangesRecord, vbuckets: range, edges: tuple[float, float], *, xattrs: bool
    ) -> ScannedChanges:
        """All rows between two vbuckets. It takes long, and needs nothing of the bucket. Each part is judged by itself
        on the way."""
        first, last = edges

        def may_hold_ours(reader: FileReader, row_group: int) -> bool:
            low, high, _ = reader.range_of(row_group, "vbucket")
            return low <= last and high >= first

        parts: list[TableRows] = []
        columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for part in scan.read(may_hold_ours):
            homes = int64s(part.rows, "vbucket", null=-1)
            kept = (homes >= first) & (homes <= last)
            rows = filtered(part.rows, kept)
            hashed = TableRows(scan=scan, rows=hash_changes(rows, xattrs=xattrs), locators=part.locators[kept])
            parts.append(hashed)
            for name, column in _COLUMNS.items():
                columns[name].append(int64s(rows, column).copy())
            columns["void"][-1] = np.asarray(pc.fill_null(rows.column("void"), False)).astype(np.bool_)
            for marks, column, says in _faults_of_rows(rows, hashed, record):
                _report(hashed.of(marks), column, says)
        joined = {
            name: np.concatenate([np.zeros(0, dtype=np.bool_ if name == "void" else np.int64), *found])
            for name, found in columns.items()
        }
        rows_of_all = TableRows.joined(scan, parts)
        rolled_back_at = np.full(len(vbuckets), -1, dtype=np.int64)
        # A rollback that another one made void counts as well: what it took back stays so.
        rollbacks = (rows_of_all.rows.ops == ROLLBACK) & is_inside(rows_of_all.rows.vbuckets, vbuckets)
        at = rows_of_all.rows.vbuckets[rollbacks] - vbuckets.start
        np.maximum.at(rolled_back_at, at, joined["batches"][rollbacks])
        return cls(rows=rows_of_all, rolled_back_at=rolled_back_at, vbuckets=vbuckets, **joined)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def ends(self) -> Barriers:
        """Of collections."""
        rows = self.rows.rows
        return ends_of(rows.of(is_inside(rows.vbuckets, self.vbuckets)), self.vbuckets)

    def documents(self) -> ScannedChanges:
        """The changes of documents."""
        ops = self.rows.rows.ops
        return self.of((ops >= MUTATION) & (ops < ROLLBACK))

    def inside(self) -> ScannedChanges:
        """Those of the vbuckets of the group."""
        return self.of(is_inside(self.rows.rows.vbuckets, self.vbuckets))

    def upto(self, batch: int) -> ScannedChanges:
        return self.of(self.batches <= batch)

    @property
    def times_us(self) -> Numbers:
        """When the changes were made. Events have no such time: for them, when they were landed."""
        times = self.rows.rows.times_us
        return np.where(times == NO_TIME, self.landed_us, times)

    def of(self, chosen: Any) -> ScannedChanges:
        if isinstance(chosen, np.ndarray) and chosen.dtype == np.bool_ and chosen.all():
            return self
        columns = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        return replace(self, rows=self.rows.of(chosen), **columns)

    @property
    def is_readable(self) -> bool:
        """No file of it was missing or damaged: what is not among the rows is not in the table."""
        scan = self.rows.scan
        return not any((kind, scan.label) in scan.findings.counts for kind in OF_FILES)


_COLUMNS = {
    "batches": "batch",
    "landed_us": "landed_at",
    "snapshot_starts": "snapshot_start",
    "snapshot_ends": "snapshot_end",
    "void": "batch",
}


def _report(rows: TableRows, column: str, says: str) -> None:
    if len(rows.rows):
        rows.report(FindingKind.COLUMN, says, column=column)


# --- each row by itself -----------------------------------------------------------------------------------------------


def _faults_of_rows(rows: pa.Table, hashed: TableRows, record: ChangesRecord) -> Iterator[tuple[Marks, str, str]]:
    """Marks on rows that can't be as they are, the column, and what to say of them."""
    ops, seqnos = hashed.rows.ops, hashed.rows.seqnos
    yield ops == UNKNOWN_OP, "op", "has an operation that there is not"
    for column, marks in _other_names(rows, record):
        yield marks, column, f"has another `{column}` than its collection"
    cas, times_us = int64s(rows, "cas").view(np.uint64), hashed.rows.times_us
    earlier_us = (cas // np.uint64(1000)).astype(np.int64) - np.where(times_us == NO_TIME, 0, times_us)
    is_other = (cas == 0) != (times_us == NO_TIME)
    is_other |= (cas != 0) & ((earlier_us < 0) | (earlier_us > _CAS_STEP_US))
    yield is_other, "changed_at", "has another `changed_at` than its CAS says"
    starts, ends = int64s(rows, "snapshot_start"), int64s(rows, "snapshot_end")
    yield starts > seqnos, "snapshot_start", "lies before its snapshot"
    yield ends < seqnos, "snapshot_end", "lies behind its snapshot"
    batches = int64s(rows, "batch")
    yield (batches < 0) | (batches > record.last_batch), "batch", "is of a batch that was not landed"


def _other_names(rows: pa.Table, record: ChangesRecord) -> Iterator[tuple[str, Marks]]:
    """By column: a mark on rows that have another name in it than their collection. Events of scopes and rollbacks
    have none."""
    named = pa.table({name: rows.column(name) for name in ("collection_id", "scope", "collection")})
    codes = np.zeros(rows.num_rows, dtype=np.int64)
    for column in named.columns:
        encoded = column.combine_chunks().dictionary_encode()
        none = len(encoded.dictionary)
        codes = codes * (none + 1) + pc.fill_null(encoded.indices, none).to_numpy()
    found, first, at = np.unique(codes, return_index=True, return_inverse=True)
    wrong = {"scope": np.zeros(len(found), dtype=np.bool_), "collection": np.zeros(len(found), dtype=np.bool_)}
    # There are few of them: a row for each collection.
    for number, row in enumerate(named.take(pa.array(first)).to_pylist()):
        id_ = row["collection_id"]
        if id_ is None:
            wrong["collection"][number] = row["collection"] is not None
        elif id_ not in record.names or record.names[id_] == table_name(None, None, id_):
            continue
        else:
            # Of a collection that was dropped, a reader may not know its name, or that of its scope, or both.
            may_be_unknown = record.live_ids is not None and id_ not in record.live_ids
            for column, name in zip(wrong, record.names[id_].split(".", 1), strict=True):
                wrong[column][number] = row[column] != name and not (may_be_unknown and row[column] is None)
    for name, marks in wrong.items():
        if marks.any():
            yield name, marks[at.reshape(-1)]


# --- the rows of a vbucket beside each other --------------------------------------------------------------------------


def judge_record(changes: ScannedChanges, record: ChangesRecord) -> ScannedChanges:
    """Report what can't be in rows of the group's vbuckets. Returns those that are not void."""
    rows, start = changes.rows.rows, changes.vbuckets.start
    here = rows.vbuckets - start
    for marks, says in _faults_of_void(changes):
        _report(changes.rows.of(marks & ~record.is_rolled[here]), "void", says)
    _judge_landing_times(changes, record.log)
    changes = changes.of(~changes.void)
    rows = changes.rows.rows
    here = rows.vbuckets - start
    behind = (rows.seqnos > record.offset_seqnos[here]) & ~record.is_rolled[here]
    if behind.any():
        says = "lies behind the offset that the table is at: nothing can be there yet"
        changes.rows.of(behind).report(FindingKind.EXTRA, says)
    stream = changes.of((rows.ops != ROLLBACK) & ~record.is_rolled[here] & ~behind)
    rows = stream.rows.rows
    order = np.argsort(rows.vbuckets.astype(np.int64) << SEQNO_BITS | rows.seqnos, kind="stable")
    for at, column, says in _faults_of_order(stream, order, record):
        _report(stream.rows.of(np.unique(at)), column, says)
    return changes


def _faults_of_void(changes: ScannedChanges) -> Iterator[tuple[Marks, str]]:
    """A rollback takes back what came with earlier batches above its seqno, and in its own batch what came before it,
    which the rows no longer say."""
    rows = changes.rows.rows
    is_rollback = rows.ops == ROLLBACK
    kept_later, kept_then = (np.full(len(rows), _EVER, dtype=np.int64) for _ in range(2))
    for vbucket in np.unique(rows.vbuckets[is_rollback]).tolist():
        here = np.flatnonzero(rows.vbuckets == vbucket)
        back = np.flatnonzero(is_rollback & (rows.vbuckets == vbucket))
        back = back[np.argsort(changes.batches[back], kind="stable")]
        # By rollback: the least that it, or a later one, has kept.
        least = np.append(np.minimum.accumulate(rows.seqnos[back][::-1])[::-1], _EVER)
        batches = changes.batches[back]
        kept_later[here] = least[np.searchsorted(batches, changes.batches[here], side="right")]
        kept_then[here] = least[np.searchsorted(batches, changes.batches[here], side="left")]
    yield changes.void & (rows.seqnos <= kept_then), "is void, and no rollback took it back"
    yield ~changes.void & (rows.seqnos > kept_later), "is not void, and a rollback took it back"


def _judge_landing_times(changes: ScannedChanges, log: LoggedBatches) -> None:
    if len(changes) == 0:
        return
    batches, first, at = np.unique(changes.batches, return_index=True, return_inverse=True)
    bounds = np.array([log.landed_us.get(batch, (-_EVER, _EVER)) for batch in batches.tolist()], dtype=np.int64)
    is_other = (changes.landed_us < bounds[at, 0]) | (changes.landed_us > bounds[at, 1])
    expected = changes.landed_us[first]
    for number in np.unique(at[changes.landed_us != expected[at]]).tolist():
        # The time that most rows of the batch have.
        times, counts = np.unique(changes.landed_us[at == number], return_counts=True)
        expected[number] = times[np.argmax(counts)]
    is_other |= changes.landed_us != expected[at]
    _report(changes.rows.of(is_other), "landed_at", "was landed at another time than its batch")


def _faults_of_order(
    changes: ScannedChanges, order: Numbers, record: ChangesRecord
) -> Iterator[tuple[Numbers, str, str]]:
    """Rows that do not fit among those of their vbucket, in the order of their seqnos."""
    rows = changes.rows.rows
    before, after = order[:-1], order[1:]
    is_same = rows.vbuckets[before] == rows.vbuckets[after]
    before, after = before[is_same], after[is_same]
    for column, values in (
        ("batch", changes.batches),
        ("snapshot_start", changes.snapshot_starts),
        ("snapshot_end", changes.snapshot_ends),
    ):
        falls = values[before] > values[after]
        yield before[falls], column, f"has a higher `{column}` than the change after it"
    beyond = np.flatnonzero(changes.snapshot_ends > record.snapshot_ends[rows.vbuckets - changes.vbuckets.start])
    yield beyond, "snapshot_end", "has a snapshot that ends behind the offset that the table is at"
    yield _of_other_batches(changes, record.log), "batch", "is not of the batch that the log says has brought it"
    yield _of_left_branches(rows.vbuckets, rows.vbuuids, order), "vbuuid", "is of a branch between two rows of another"
    yield _of_unknown_branches(changes, record), "vbuuid", "is of a branch that the bucket does not know"


def _of_other_batches(changes: ScannedChanges, log: LoggedBatches) -> Numbers:
    """A row came with the first batch whose offset reaches it. Where batches of before the log have reached it, or a
    rollback came, that is not known."""
    rows = changes.rows.rows
    found = [np.zeros(0, dtype=np.int64)]
    for here in np.flatnonzero(log.is_steady).tolist() if len(log.numbers) else ():
        at = np.flatnonzero(rows.vbuckets == here + changes.vbuckets.start)
        brought = np.searchsorted(log.seqnos[:, here], rows.seqnos[at])
        is_known = (brought > 0) & (brought < len(log.numbers))
        at, brought = at[is_known], brought[is_known]
        found.append(at[changes.batches[at] != log.numbers[brought]])
    return np.concatenate(found)


def _of_left_branches(vbuckets: Any, vbuuids: Numbers, order: Numbers) -> Numbers:
    """The rows between two rows of one branch that are of another: a branch that was left does not come again."""
    if len(order) == 0:
        return order
    homes, branches = vbuckets[order], vbuuids[order]
    is_start = np.append(True, (homes[1:] != homes[:-1]) | (branches[1:] != branches[:-1]))
    runs = np.flatnonzero(is_start)
    if len(runs) == len(np.unique(homes)):
        return order[:0]
    found = [order[:0]]
    edges = np.append(runs, len(order))
    for vbucket in np.unique(homes[runs][np.append(False, homes[runs][1:] == homes[runs][:-1])]).tolist():
        ours = np.flatnonzero(homes[runs] == vbucket)
        of_runs, sizes = branches[runs[ours]], edges[ours + 1] - edges[ours]
        # The branch with the most rows of those that come again is what the others lie in between.
        for branch in np.unique(of_runs[[(of_runs == it).sum() > 1 for it in of_runs]]).tolist():
            spans = np.flatnonzero(of_runs == branch)
            inner = [it for it in range(spans[0] + 1, spans[-1]) if of_runs[it] != branch]
            if sizes[inner].sum() <= sizes[spans].sum():
                found += [order[edges[ours[it]] : edges[ours[it] + 1]] for it in inner]
    return np.unique(np.concatenate(found))


def _of_unknown_branches(changes: ScannedChanges, record: ChangesRecord) -> Numbers:
    """A branch leaves the failover log when the vbucket rolls back to before it, which brings a rollback here; those
    that were trimmed are not known any more."""
    rows = changes.rows.rows
    found = [np.zeros(0, dtype=np.int64)]
    for vbucket, branches in record.branches.items():
        at = np.flatnonzero(rows.vbuckets == vbucket)
        since = max(changes.rolled_back_at[vbucket - changes.vbuckets.start], record.trimmed_batch)
        at = at[changes.batches[at] > since]
        found.append(at[~np.isin(rows.vbuuids[at], list(branches))])
    return np.concatenate(found)
