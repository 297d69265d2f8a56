"""The commits of a landing: a batch into `changes`, and pending changes into the tables of documents.

    batch = begin_batch(lake)                                  # begins where the tables end
    reports = …                                                # executors: batch.writer over the rows
    commit_batch(lake, batch, reports, run)                    # now `changes` has it
    merge(lake, run)                                           # now the documents have it

The commit of a batch holds the offset that it reached in every vbucket. A crash before it leaves files that no commit
names; after it, the next batch begins at these offsets. Two pipelines that land at the same time commit to the same
version of the log, and Delta lets one succeed. Only the driver of a landing calls this module, from one thread.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from headwater.client.offsets import Offsets
from headwater.errors import LakeError, LakeInUse, LakeOutOfStep
from headwater.lake import change_files
from headwater.lake.collection_tables import NOT_MERGED, CollectionTables, MergedTable
from headwater.lake.column_rules import rules_of
from headwater.lake.column_values import to_ddl
from headwater.lake.data_files import DataFile
from headwater.lake.delta_log import TableCommit
from headwater.lake.documents_merge import FirstDocuments, Merged, MergeTask
from headwater.lake.history import InsertsTask
from headwater.lake.lake import BATCH_TRANSACTION, Lake, Runner, run_here
from headwater.lake.layout import (
    CHANGE_RANGES,
    EVERY_COLLECTION,
    TableKind,
    table_name,
)
from headwater.lake.row_order import sort_columns
from headwater.lake.table_state import LandedTotals, TableState
from headwater.lake.typed_columns import INFERRED_MAX, ColumnMode, FieldTypes, TypedColumns, joined_fields
from headwater.lake.upkeep import JOIN_BYTES, grow_groups, grow_small_tables, join_documents, switch_modes
from headwater.log_fields import LogEvent, fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch that is being landed."""

    number: int
    """Its number among all batches of the lake: the rows' column `batch`."""
    writer: change_files.ChangeWriter
    """Writes the rows in the executors. It can be pickled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedBatch:
    """The result of a batch."""

    number: int
    rows: int
    rows_by_table: Mapping[str, int]
    """Changes of documents, by `scope.collection`."""
    system_events: int
    rollbacks: Mapping[int, int]
    """By vbucket: the last seqno that was kept."""
    read_again: frozenset[int]
    """Vbuckets that could not be rolled back: the tables hold nothing of them, and the next batch reads them from 0."""


def begin_batch(lake: Lake, *, landed_at: datetime | None = None) -> Batch:
    """Begin to land a batch where the tables end."""
    lake.refresh()
    lake.changes.keep_statistics(CHANGE_RANGES, lake.state)
    lake.changes.keep_description(TableKind.CHANGES, "", lake.state)
    number = lake.last_batch + 1
    writer = change_files.ChangeWriter(
        location=lake.changes.location,
        facts=lake.facts,
        batch=number,
        landed_at=landed_at or datetime.now(UTC),
        held_seqnos={vbucket: int(at.seqno) for vbucket, at in lake.state.offsets.offsets.items()},
    )
    return Batch(number=number, writer=writer)


def first_documents(lake: Lake) -> FirstDocuments | None:
    """Return a writer that makes the documents while the first batch of a lake lands; None for later batches."""
    settings = lake.settings
    if lake.last_batch >= 0 or settings.merging.history:
        return None
    default = ColumnMode.INFER if settings.infer else ColumnMode.NONE
    return FirstDocuments(
        location=lake.location,
        facts=lake.facts,
        batch=lake.last_batch + 1,
        columns={EVERY_COLLECTION: default, **settings.columns},
        rules=settings.rules,
        cluster_by={EVERY_COLLECTION: (), **settings.cluster_by},
        is_merged_on_read=bool(settings.merging.on_read),
        file_bytes=settings.merging.file_bytes,
    )


def commit_batch(
    lake: Lake,
    batch: Batch,
    reports: Sequence[change_files.ChangeReport],
    run: Runner = run_here,
    *,
    as_of_s: float | None = None,
    before_s: float | None = None,
) -> CommittedBatch:
    """Add a batch to `changes`, and mark what its rollbacks took back, in one commit.

    `as_of_s` is a time, if known: the tables now have everything that was written to the bucket before it;
    `before_s` is the same without this batch. By default `before_s` is the time in the last commit: later checks that
    found nothing new in the bucket have made no commit.
    """
    with lake.counting_pending() as pending:
        rollbacks: change_files.Rollbacks = {}
        for report in reports:
            for vbucket, kept in report.rollbacks.items():
                change_files.add_rollback(rollbacks, vbucket, kept)
        added, removed, wiped = [file for report in reports for file in report.files], [], frozenset[int]()
        undone = 0
        if rollbacks:
            location, live = lake.changes.location, lake.changes.files()
            torn = set[int]().union(*(report.torn for report in reports))
            if lake.trimmed_batch != NOT_MERGED:
                torn |= change_files.out_of_reach(location, live, rollbacks, trimmed_batch=lake.trimmed_batch)
            voided = change_files.void_rows(
                location, lake.facts, live=live, added=added, rollbacks=rollbacks, wiped=torn, run=run
            )
            added, removed, wiped, undone = voided.add, voided.remove, voided.wiped, voided.rows
        if wiped:
            added = [*added, batch.writer.write_rollbacks_to_zero(wiped)]
            rollbacks |= dict.fromkeys(wiped, 0)
        known = lake.state.collections
        before_s = lake.state.as_of_s if before_s is None else before_s
        state = replace(_state_after(lake, batch, reports, rollbacks, wiped, as_of_s), undone=undone)
        lake.step("commit changes")
        lake.commit_changes(
            TableCommit(add=added, remove=removed, transactions={BATCH_TRANSACTION: batch.number}, state=state)
        )
        rows_by_table: Counter[str] = Counter()
        for report in reports:
            for (id_, _), count in report.document_rows.items():
                rows_by_table[state.collections[id_]] += count
        for name in sorted({*state.collections.values()} - {*known.values()}):
            with lake.containing(name):
                _create_documents(lake, lake.tables[name], merged=batch.number - 1, expected=rows_by_table[name])
        for report in reports:
            pending.add(report, state.collections, lake.facts, since_s=before_s)
    return CommittedBatch(
        number=batch.number,
        rows=sum(report.rows for report in reports),
        rows_by_table=rows_by_table,
        system_events=sum(report.system_events for report in reports),
        rollbacks=rollbacks,
        read_again=wiped,
    )


def _state_after(
    lake: Lake,
    batch: Batch,
    reports: Sequence[change_files.ChangeReport],
    rollbacks: Mapping[int, int],
    wiped: frozenset[int],
    as_of_s: float | None,
) -> TableState:
    before = lake.state
    collections = dict(before.collections)
    names: dict[int, tuple[str | None, str | None]] = {}
    for report in reports:
        for id_, parts in report.names.items():
            if None in names.get(id_, (None,)):
                names[id_] = parts
    for id_, (scope, collection) in sorted(names.items()):
        collections.setdefault(id_, table_name(scope, collection, id_))
    offsets = dict(before.offsets.offsets)
    for report in reports:
        offsets |= report.reached
    totals = before.totals
    if totals is not None:
        rows = totals.rows + sum(report.rows for report in reports)
        totals = LandedTotals(rows=rows, rollbacks=totals.rollbacks + len(rollbacks))
    return replace(
        before,
        offsets=Offsets(
            lake.facts.bucket_uuid, {vbucket: at for vbucket, at in offsets.items() if vbucket not in wiped}
        ),
        batch=batch.number,
        as_of_s=None if wiped else as_of_s,
        collections=collections,
        rollbacks=rollbacks,
        totals=totals,
        writer=lake.writer,
    )


# --- pending changes into the tables of documents ---------------------------------------------------------------------
#
# A merge takes everything that is pending and commits every table once: a reader sees all vbuckets of a table at one
# batch, and the commit records this batch, its time and its offsets. Rejects are committed first, then history, then
# the documents of all collections in parallel: once the documents are marked as merged, earlier changes are not read
# again. After a crash between two of these commits the tables are merged again, with the same outcome.


_COMMITS_AT_ONCE = 8
"""How many tables of documents are committed in parallel: joins of them see two batches only for a short time."""
_COLUMN_ROUNDS_MAX = 8
"""How often a table's groups are merged again because others have found more columns. Two rounds are common."""
_JOIN_RATIO = 8
"""A merge joins files of up to `JOIN_BYTES`, or this many times the changed bytes if that is more."""
_IDLE_BATCHES_MAX = 512
"""After this many batches without pending changes, a table records that it is merged, so they are not read again."""


def merge(lake: Lake, run: Runner = run_here, written: Sequence[Merged] = ()) -> int:
    """Merge what is pending, and join some of the files that merges have left. Returns the number of merges of groups.
    `written` is the result of `first_documents`: these documents are not merged again. A table that fails is set aside.
    """
    lake.refresh()
    changed_bytes = lake.pending.size_bytes
    if lake.is_growing:
        grow_groups(lake, run)
    grow_small_tables(lake, run)
    switch_modes(lake, run)
    tasks = plan_merges(lake)
    found = {(part.name, part.group) for part in written if lake.tables[part.name].groups == lake.facts.groups}
    left = [task for task in tasks if not {(target.name, task.group) for target in task.documents} <= found]
    found -= {(target.name, task.group) for task in left for target in task.documents}
    lake.step("run merges")
    results = [[part for part in written if (part.name, part.group) in found], *(run(left) if left else [])]
    commit_merges(lake, tasks, results, run)
    _note_idle_tables(lake)
    bytes_max = max(JOIN_BYTES, _JOIN_RATIO * changed_bytes)
    join_documents(lake, run, file_bytes=lake.settings.merging.file_bytes, bytes_max=bytes_max)
    lake.aside.settle()
    return len(tasks)


def _create_documents(lake: Lake, table: CollectionTables, *, merged: int, expected: int) -> None:
    """Create an empty table that counts as merged up to a batch."""
    lake.step(f"create documents {table.name}")
    settings, name = lake.settings, table.name
    table.create_documents(
        settings.columns_of(name) or ColumnMode.INFER,
        rules_of(name, settings.rules),
        settings.cluster_by_of(name) or (),
        change_feed=bool(settings.merging.change_feed),
        merged=merged,
        expected=expected,
    )


def plan_merges(lake: Lake) -> list[MergeTask]:
    lake.refresh()
    pending = lake.pending.names
    for table in lake.in_service:
        with lake.containing(table.name):
            if table.name in pending:
                table.refresh()
                table.keep_metadata()
            # Its collection is known but the table is missing: it was lost, or a crash came before it was created.
            if table.documents is None:
                _create_documents(lake, table, merged=NOT_MERGED, expected=lake.pending.documents(table.name))
            elif lake.is_switched(table):
                lake.step(f"switch columns {table.name}")
                table.switch_to_inferred(rules_of(table.name, lake.settings.rules))
            _keep_clustered(lake, table)
            if lake.settings.merging.change_feed is not None:
                table.set_change_feed(lake.settings.merging.change_feed)
            _check_history(lake, table)
    if lake.is_growing:
        raise LakeInUse(
            f"another landing has divided the tables in {lake.location.uri} into more groups",
            hint="Let only one pipeline write to a directory, then start again: nothing is lost",
        )
    return lake.planner().plan(lake.in_service, lake.pending)


def _keep_clustered(lake: Lake, table: CollectionTables) -> None:
    """Sort newly written documents by the columns that the settings name."""
    asked = lake.settings.cluster_by_of(table.name)
    if asked is not None and asked != table.cluster_by:
        lake.step(f"cluster {table.name}")
        table.set_cluster_by(asked)
    assert table.documents is not None, "it was made before"
    there = sort_columns(table.documents.log.schema, table.cluster_by)
    missing = tuple(name for name in table.cluster_by if name not in there)
    # Inferred columns come with the first documents.
    if missing != table.unsorted_by and table.documents.log.files():
        table.unsorted_by = missing
        if missing:
            logger.warning(
                "%s: documents are not clustered by %s, since no field of that name has come, or one without an order",
                table.name,
                ", ".join(missing),
                extra=fields(event=LogEvent.COLUMNS_MISSING),
            )


def _check_history(lake: Lake, table: CollectionTables) -> None:
    if not lake.settings.merging.history or table.history is None:
        return
    merged = [at for at in table.history.merged.values() if at != NOT_MERGED]
    if merged and min(merged) < lake.trimmed_batch:
        raise LakeOutOfStep(
            f"the history of {table.name} was not kept for a while, and the missing changes have been trimmed",
            hint=f"Remove its directory under `{TableKind.HISTORY}`: it then starts with the current documents",
        )


def commit_merges(
    lake: Lake, tasks: Sequence[MergeTask], results: Sequence[Sequence[Merged]], run: Runner = run_here
) -> None:
    """Commit merges to the tables. No batch may land between their planning and this call.

    A table with new fields gets columns for them before any documents that have them. If a task has chosen other
    columns than all tasks together, such as a narrower type, its groups are merged again. If one group of a table has
    failed, the whole table is set aside.
    """
    assert all(task.upto_batch == lake.last_batch for task in tasks), "a batch was landed since the merges were planned"
    merged: dict[tuple[str, TableKind, int], Merged] = {}
    for _ in range(_COLUMN_ROUNDS_MAX):
        fresh = [part for result in results for part in result]
        merged |= {(part.name, part.kind, part.group): part for part in fresh}
        for part in fresh:
            if part.fault is not None and part.name not in lake.aside:
                with lake.containing(part.name):
                    raise part.fault
        wanted: dict[str, FieldTypes] = {}
        for part in fresh:
            wanted[part.name] = joined_fields(wanted.get(part.name, {}), part.wanted)
        for name in [name for name, found in wanted.items() if found and name not in lake.aside]:
            with lake.containing(name):
                _add_columns(lake, lake.tables[name], wanted[name])
        tasks = [again for task in tasks if (again := _unfinished(lake, task, merged)).targets]
        if not tasks:
            break
        lake.step("run merges again")
        results = run(tasks)
    for name in {target.name for task in tasks for target in task.targets}:
        fault = LakeError(
            f"the columns of {name} differ after each of {_COLUMN_ROUNDS_MAX} attempts to add them",
            hint=f"Give it fixed columns or none, such as --columns '{name}=…', and report this",
        )
        lake.set_aside(name, fault)
    by_table: dict[str, dict[TableKind, list[Merged]]] = {}
    for part in merged.values():
        if part.name not in lake.aside:
            by_table.setdefault(part.name, {kind: [] for kind in TableKind})[part.kind].append(part)
    feeds: dict[str, list[DataFile] | None] = {}
    for name, parts in by_table.items():
        with lake.containing(name):
            _commit_beside(lake, lake.tables[name], parts)
            feeds[name] = _feed(lake, lake.tables[name], parts[TableKind.DOCUMENTS], run)
    commits: dict[str, Future[None]] = {}
    try:
        with ThreadPoolExecutor(_COMMITS_AT_ONCE, thread_name_prefix="headwater-commit") as pool:
            for name, parts in by_table.items():
                if name not in lake.aside:
                    lake.step(f"commit documents {name}")
                    documents = lake.tables[name].documents
                    assert documents is not None, "it was made before the merge was planned"
                    commits[name] = pool.submit(_commit_parts, lake, documents, parts[TableKind.DOCUMENTS], feeds[name])
    finally:
        for name in [name for name, commit in commits.items() if commit.exception() is None]:
            lake.pending.forget(name)
            wrote = [part for of_kind in by_table[name].values() for part in of_kind]
            # A file that stays, with more of its rows marked, is not written.
            stayed = {file.path for part in wrote for file in part.remove}
            written = [file for part in wrote for file in part.add if file.path not in stayed]
            lake.tables[name].merge_bytes = sum(file.size_bytes for file in [*written, *(feeds[name] or ())])
    for name, commit in commits.items():
        with lake.containing(name):
            commit.result()


def _unfinished(lake: Lake, task: MergeTask, merged: Mapping[tuple[str, TableKind, int], Merged]) -> MergeTask:
    """Return the part of a task that must run again, now that the tables have their columns."""

    def is_finished(kind: TableKind, name: str, columns: TypedColumns | None) -> bool:
        part = merged[name, kind, task.group]
        chosen = set() if part.columns is None else {*part.columns.definitions}
        is_fit = columns is None or not columns.is_inferred or chosen <= {*columns.definitions}
        return name in lake.aside or (part.is_written and is_fit)

    documents = [(it, lake.tables[it.name].columns) for it in task.documents]
    versions = [(it, lake.tables[it.name].history_columns) for it in task.history]
    return replace(
        task,
        documents=tuple(
            replace(it, columns=columns)
            for it, columns in documents
            if not is_finished(TableKind.DOCUMENTS, it.name, columns)
        ),
        history=tuple(
            replace(it, columns=columns)
            for it, columns in versions
            if not is_finished(TableKind.HISTORY, it.name, columns)
        ),
    )


def _add_columns(lake: Lake, table: CollectionTables, wanted: FieldTypes) -> None:
    """Add the columns that merges want."""
    lake.step(f"add columns {table.name}")
    added = table.add_columns(wanted)
    if not added:
        return
    table.keep_metadata()
    logger.info("%s: columns added: %s", table.name, to_ddl(added), extra=fields(event=LogEvent.COLUMNS_ADDED))
    if table.columns is not None and len(table.columns.definitions) >= INFERRED_MAX:
        logger.warning(
            "%s has %d inferred columns, and gets no more: further fields are in `document` only",
            table.name,
            INFERRED_MAX,
            extra=fields(event=LogEvent.COLUMNS_ADDED),
        )


def _commit_beside(lake: Lake, table: CollectionTables, parts: Mapping[TableKind, Sequence[Merged]]) -> None:
    """Commit rejects and history, which come before the documents."""
    rejects = [part for part in parts[TableKind.REJECTS] if part.add or part.remove]
    if rejects:
        lake.step(f"commit rejects {table.name}")
        _commit_parts(lake, table.rejects or table.create_rejects(), rejects)
    if history := parts[TableKind.HISTORY]:
        lake.step(f"commit history {table.name}")
        _commit_parts(lake, table.history_with_columns(), history)


def _feed(lake: Lake, table: CollectionTables, parts: Sequence[Merged], run: Runner) -> list[DataFile] | None:
    """Return the change feed of a commit; None if it can be derived from the files. A commit with `cdc` files must have
    all its changes in them (Delta's protocol, "Add CDC File"), including those of groups that only add files."""
    if all(part.feed is None for part in parts):
        return None
    assert not any(part.remove for part in parts if part.feed is None), "rows leave without being in the feed"
    tasks = [
        InsertsTask(
            location=table.location_of(TableKind.DOCUMENTS),
            files=tuple(part.add),
            file_bytes=lake.settings.merging.file_bytes,
        )
        for part in parts
        if part.feed is None and part.add
    ]
    inserts: list[list[DataFile]] = run(tasks) if tasks else []
    return [file for files in (*(part.feed or [] for part in parts), *inserts) for file in files]


def _commit_parts(
    lake: Lake, table: MergedTable, parts: Sequence[Merged], feed: Sequence[DataFile] | None = None
) -> None:
    """Commit parts of a merge. Groups without parts had nothing pending, so they count as merged, too."""
    table.commit(
        add=[file for part in parts for file in part.add],
        remove=[file for part in parts for file in part.remove],
        feed=feed,
        held=lake.state,
    )


def _note_idle_tables(lake: Lake) -> None:
    """Record progress of idle tables. Tables that are set aside are not idle: what they miss is pending."""
    for table in lake.in_service:
        if table.documents is not None and lake.state.batch - min(table.documents.merged.values()) > _IDLE_BATCHES_MAX:
            with lake.containing(table.name):
                lake.step(f"note idle {table.name}")
                table.documents.commit(held=lake.state)
