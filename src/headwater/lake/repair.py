"""`headwater repair`: rebuild what `verify` finds wrong, as far as the data still exists.

What is rebuilt from what:

* The statistics in a log, from the files.
* `documents`, `rejects` and `history`, from `changes`: the table is built as if it was new, and one commit replaces all
  its old files with the new ones.
* `changes`, from the bucket: all rows of each faulty vbucket are removed, and the vbucket is read again from 0. The
  batch that contains the new rows records a rollback to 0, so the other tables follow as after any rollback.

Each is an ordinary commit, so readers continue, and after a crash the next repair or landing continues.
What the bucket no longer has, the superseded versions of such a vbucket, is lost; so are the versions that were trimmed
from `changes`, and `history` is not rebuilt without them. After each step the lake is verified again, and only the
result decides what to do next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headwater.client.blocking_bucket import look_at_bucket
from headwater.client.blocking_client import Client
from headwater.client.offsets import Offsets
from headwater.client.read_options import End, ReadOptions
from headwater.client.settings import ClientSettings
from headwater.errors import LakeOutOfStep, LakeTaken
from headwater.lake.change_files import ChangeReport, ChangeWriter
from headwater.lake.chosen_rows import ChosenRows, Transform
from headwater.lake.collection_tables import CollectionTables
from headwater.lake.commits import begin_batch, commit_merges, merge
from headwater.lake.data_files import DataFile, FileReader, FileWriter, filtered, numbers
from headwater.lake.delta_log import DeltaLog, TableCommit
from headwater.lake.documents_merge import Merged, MergeRules, MergeTask
from headwater.lake.lake import BATCH_TRANSACTION, Lake, LakeSettings, Runner, landed_selection, run_here
from headwater.lake.lake_look import LANDING_SILENT_S, read_landing
from headwater.lake.layout import CHANGE_RANGES, GROUP, TableKind, changes_schema, table_name
from headwater.lake.location import Location
from headwater.lake.table_state import LandedTotals, Selection
from headwater.lake.verify import Verification, what_is_left
from headwater.lake.verify_scan import UNREADABLE_FILE, UNREADABLE_LOG, FindingKind, table_label
from headwater.phrases import counted
from headwater.protocol.numbers import VBucketId

AGENT = "headwater-repair"
_CHANGES = table_label(TableKind.CHANGES)
_NOT_OF_ROWS = frozenset(
    {FindingKind.STATISTICS, FindingKind.ROLLBACK_PENDING, FindingKind.NEVER_LANDED, FindingKind.MISSING_TABLE}
)

Verify = Callable[[], Verification]
ReadVBuckets = Callable[[Lake, ChangeWriter, Collection[int]], ChangeReport]
"""Reads vbuckets from 0, writes their rows, and reports the offsets that it reached."""


@dataclass(slots=True)
class Repair:
    """The result of a repair."""

    found: Verification
    """The verification before the repair."""
    left: Verification
    """The verification after it."""
    done: list[str] = field(default_factory=list)
    """A sentence for each step."""
    lost: list[str] = field(default_factory=list)
    """What could not be rebuilt."""


def repair(location: Location, verify: Verify, read: ReadVBuckets, *, run: Runner = run_here) -> Repair:
    """Repair the tables of a lake. `verify` judges them; `read` reads the bucket if `changes` is wrong.

    Raises `LakeTaken` or `LakeInUse` while a landing writes to the tables.
    """
    check_no_landing(location)
    found = verify()
    report = Repair(found=found, left=found)
    for step in (_restate, _read_again, _build_again):
        if report.left.is_equal:
            break
        try:
            lake = _open(location)
        except UNREADABLE_LOG:
            # `verify` reports the unreadable logs.
            break
        if step(lake, report, read, run):
            report.left = verify()
    return report


def check_no_landing(location: Location) -> None:
    """Raise `LakeTaken` if a landing has recently reported that it writes to the tables."""
    note = read_landing(location)
    if note is not None and note.is_running and time.time() - note.time_s < LANDING_SILENT_S:
        raise LakeTaken(
            f"a landing on {note.host} writes to the tables in {location.uri}", hint="Stop it, then repair again"
        )


def _open(location: Location) -> Lake:
    lake = Lake.open(location)
    assert lake is not None, "it was verified"
    if any(table.history is not None for table in lake.tables.values()):
        lake.settings = LakeSettings(merging=MergeRules(history=True))
    return lake


# --- statistics, from the files ---------------------------------------------------------------------------------------


def _restate(lake: Lake, report: Repair, read: ReadVBuckets, run: Runner) -> bool:
    wrong = {label for kind, label in report.left.counts if kind is FindingKind.STATISTICS}
    if _CHANGES in wrong:
        restated = _restated(lake.changes, CHANGE_RANGES)
        lake.commit_changes(TableCommit(add=restated, state=lake.state, is_rearrangement=True))
        report.done.append(f"{_CHANGES}: the statistics of {counted(len(restated), 'file')} are those of the files")
    for name, tables in sorted(lake.tables.items()):
        for table in tables.there:
            if (label := table_label(table.kind, name)) in wrong:
                restated = _restated(table.log, tables.ranges_of(table))
                table.commit(add=restated)
                files = counted(len(restated), "file")
                report.done.append(f"{label}: the statistics of {files} are those of the files")
    return bool(wrong)


def _restated(log: DeltaLog, ranges: Sequence[str]) -> list[DataFile]:
    """Return the files whose statistics in the log are wrong, with correct ones. Damaged files are repaired later."""
    found = []
    for file in log.files():
        try:
            with FileReader(log.location, file) as reader:
                if any(file.wrong_statistics(reader)):
                    found.append(file.restated(reader, ranges))
        except UNREADABLE_FILE:
            continue
    return found


# --- `changes`, from the bucket ---------------------------------------------------------------------------------------


def _read_again(lake: Lake, report: Repair, read: ReadVBuckets, run: Runner) -> bool:
    kinds = {kind for kind, label in report.left.counts if label == _CHANGES} - _NOT_OF_ROWS
    if not kinds or FindingKind.DAMAGED_LOG in kinds:
        return False
    vbuckets = sorted(report.left.places.get(_CHANGES, frozenset()) & {*range(lake.facts.vbuckets)})
    batch = begin_batch(lake)
    held = {vbucket: seqno for vbucket, seqno in batch.writer.held_seqnos.items() if vbucket not in vbuckets}
    writer = replace(batch.writer, held_seqnos=held)
    landed = read(lake, writer, vbuckets) if vbuckets else ChangeReport()
    live = lake.changes.files()
    tasks = [
        KeepTask(
            location=lake.changes.location,
            xattrs=lake.facts.xattrs,
            file=file,
            vbuckets=tuple(vbuckets),
            last=lake.facts.vbuckets,
        )
        for file in live
    ]
    kept: list[KeptRows | None] = run(tasks)
    changed = [file for file, rows in zip(live, kept, strict=True) if rows is None or rows.file != file]
    state = lake.state
    names = {id_: table_name(*parts, id_) for id_, parts in landed.names.items()}
    rows_left = sum(rows.rows for rows in kept if rows is not None)
    offsets = {vbucket: at for vbucket, at in state.offsets.offsets.items() if vbucket not in vbuckets}
    rollbacks = [writer.write_rollbacks_to_zero(vbuckets)] if vbuckets else []
    new = [rows.file for rows in kept if rows is not None and rows.file is not None]
    lake.step("commit repaired changes")
    lake.commit_changes(
        TableCommit(
            add=[*(file for file in new if file not in live), *landed.files, *rollbacks],
            remove=changed,
            transactions={BATCH_TRANSACTION: batch.number},
            state=replace(
                state,
                offsets=Offsets(lake.facts.bucket_uuid, {**offsets, **landed.reached}),
                batch=batch.number,
                collections={**names, **state.collections},
                rollbacks=dict.fromkeys(vbuckets, 0),
                undone=0,
                totals=None
                if state.totals is None
                else LandedTotals(rows=rows_left + landed.rows, rollbacks=state.totals.rollbacks + len(vbuckets)),
                writer=lake.writer,
            ),
        )
    )
    if vbuckets:
        where = counted(len(vbuckets), "vbucket")
        report.done.append(f"{_CHANGES}: {where} were read again from the bucket, {landed.rows:,} changes")
        report.lost.append(f"{_CHANGES}: the superseded versions of {where}, which the bucket no longer has")
    else:
        report.done.append(f"{_CHANGES}: the number of rows is counted again")
        report.lost.append(f"{_CHANGES}: superseded versions, which the bucket no longer has")
    return True


@dataclass(frozen=True, slots=True)
class KeptRows:
    """What is kept of a file of `changes`."""

    file: DataFile | None
    rows: int
    """Without the rollbacks that a landing has written itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepTask:
    """Rewrite a file of `changes` without the rows of some vbuckets, and of vbuckets that the bucket does not have."""

    location: Location
    xattrs: bool
    file: DataFile
    vbuckets: tuple[int, ...]
    last: int
    """The number of vbuckets of the bucket."""

    def run(self) -> KeptRows | None:
        """Returns None if the file can't be read."""
        try:
            with FileReader(self.location, self.file, checks=True) as reader:
                return self._kept(reader)
        except UNREADABLE_FILE:
            return None

    def _kept(self, reader: FileReader) -> KeptRows:
        schema = changes_schema(xattrs=self.xattrs)
        marks, rows = [], 0
        for row_group in reader.row_groups:
            for part in reader.batches(row_group):
                homes = numbers(part, "vbucket")
                keep = ~np.isin(homes, self.vbuckets) & (homes >= 0) & (homes < self.last)
                own = (numbers(part, "vbuuid") == 0) & (numbers(part, "seqno") == 0)
                rows += int((keep & ~own).sum())
                marks.append(keep)
        kept = np.concatenate(marks) if marks else np.zeros(0, dtype=np.bool_)
        if kept.all():
            return KeptRows(self.file, rows)
        if not kept.any():
            return KeptRows(None, 0)
        writer = FileWriter(self.location, schema, ranges=CHANGE_RANGES, prefix="changes")
        start = 0
        for row_group in reader.row_groups:
            whole = reader.read(row_group, schema.names)
            part = filtered(whole, kept[start : start + whole.num_rows])
            start += whole.num_rows
            if part.num_rows:
                writer.write_row_group(part)
        return KeptRows(writer.close(), rows)


def read_from_bucket(settings: ClientSettings, transform: Transform | None = None) -> ReadVBuckets:
    """Return a function that reads vbuckets as a landing does, in this process."""

    def read(lake: Lake, writer: ChangeWriter, vbuckets: Collection[int]) -> ChangeReport:
        selection = landed_selection(lake) or Selection()
        known = Selection(scopes=tuple(name.partition(".")[0] for name in lake.tables), collections=tuple(lake.tables))
        left = what_is_left(look_at_bucket(settings).manifest, selection, known)
        if left is None:
            # Everything that was landed has been dropped. The next landing skips what is left.
            return ChangeReport()
        options = ReadOptions.make(
            name=AGENT,
            end=End.NOW,
            vbuckets=frozenset(map(VBucketId, vbuckets)),
            xattrs=lake.facts.xattrs,
            scopes=left.scopes,
            collections=left.collections,
        )
        with Client(settings) as client:
            batches = client.read(options)
            report = writer.write(map(ChosenRows.of(selection, transform).function(), batches))
            for vbucket, at in batches.offsets.offsets.items():
                if not at.is_complete:
                    raise LakeOutOfStep(
                        f"the read of vbucket {vbucket} has ended inside a snapshot", hint="Repair again"
                    )
                report.reached[vbucket] = at.as_whole()
        return report

    return read


# --- the other tables, from `changes` ---------------------------------------------------------------------------------


def _build_again(lake: Lake, report: Repair, read: ReadVBuckets, run: Runner) -> bool:
    """Rebuild what is wrong, and merge pending changes into all other tables."""
    wrong = {label for kind, label in report.left.counts if kind not in _NOT_OF_ROWS}
    if _CHANGES in wrong:
        # `changes` itself is wrong, so nothing correct can be made from it.
        return False
    for name, tables in sorted(lake.tables.items()):
        label = table_label(TableKind.HISTORY, name)
        with_history = label in wrong
        if with_history and lake.trimmed_batch >= 0:
            report.lost.append(
                f"{label}: `{TableKind.CHANGES}` no longer has all of its versions: bring it back from "
                "a backup, or remove its directory, and it begins with the documents of now"
            )
            with_history = False
        kinds = (TableKind.DOCUMENTS, TableKind.REJECTS)
        with_documents = any(table_label(kind, name) in wrong for kind in kinds)
        if tables.documents is not None and (with_documents or with_history):
            # Readers derive the feed from files that can't be read: they stop, and start again with the current table.
            with_feed = (FindingKind.DAMAGED_FILE, table_label(TableKind.DOCUMENTS, name)) not in report.left.counts
            _build_tables(lake, tables, run, with_history=with_history, with_feed=with_feed)
            built = [TableKind.DOCUMENTS, *([TableKind.HISTORY] if with_history else [])]
            report.done += [f"{table_label(kind, name)}: built again from `{TableKind.CHANGES}`" for kind in built]
    merge(lake, run)
    return True


def _build_tables(lake: Lake, tables: CollectionTables, run: Runner, *, with_history: bool, with_feed: bool) -> None:
    """Rebuild the documents, the rejects and, if wanted, the history of a collection, with all pending changes."""
    planner = lake.planner()
    tasks = [
        planner.new_table_task(tables, group, with_history=with_history, with_feed=with_feed)
        for group in range(tables.groups)
    ]

    def run_and_replace(tasks: Sequence[MergeTask]) -> list[list[Merged]]:
        """Remove all old files, including those in groups that the table does not have."""
        return [[replace(part, remove=_replaced(tables, part)) for part in parts] for parts in run(tasks)]

    commit_merges(lake, tasks, run_and_replace(tasks), run_and_replace)


def _replaced(tables: CollectionTables, part: Merged) -> list[DataFile]:
    table = tables.table_of(part.kind)
    if table is None:
        return []
    known = {*map(str, range(table.groups))}
    strays = [file for file in table.log.files() if dict(file.partition)[GROUP.name] not in known]
    return [*table.files_of(part.group, of=tables.groups), *(strays if part.group == 0 else [])]
