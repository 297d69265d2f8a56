"""Pending changes into the tables of documents, and their commits, table by table.

Everything that is pending is merged, and every table is committed once: what a reader sees of a table is one cut of the
bucket, and the commit says of which batch, time and offsets. Rejects come first, then history, then documents: once the
documents say that they are merged, what lies before is not looked at again. A crash between two of them leaves tables
that are merged again, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headwater.errors import LakeOutOfStep
from headwater.spark.lake.collection_tables import NOT_MERGED, CollectionTables, MergedTable
from headwater.spark.lake.documents_merge import Merged, MergeTask
from headwater.spark.lake.lake import Lake
from headwater.spark.lake.layout import TableKind
from headwater.spark.lake.new_tables import create_documents
from headwater.spark.lake.tasks import Runner, run_here

_IDLE_BATCHES_MAX = 512
"""A table that nothing is pending for says so in its log after so many batches: they are not looked at again then."""


def merge(lake: Lake, run: Runner = run_here) -> int:
    """Merge what is pending. Returns the number of merges of groups."""
    tasks = plan_merges(lake)
    lake.step("run merges")
    commit_merges(lake, tasks, run(tasks))
    return len(tasks)


def plan_merges(lake: Lake) -> list[MergeTask]:
    lake.refresh()
    for name in lake.pending.names:
        lake.tables[name].refresh()
    for table in lake.tables.values():
        # Its collection is known, and it is not there: it was lost, or a crash came before it was made.
        if table.documents is None:
            create_documents(lake, table, lake.changes.files(), merged=NOT_MERGED)
        _check_history(lake, table)
    return lake.planner().plan(lake.tables.values(), lake.pending)


def _check_history(lake: Lake, table: CollectionTables) -> None:
    if not lake.settings.merging.history or table.history is None:
        return
    merged = [at for at in table.history.merged.values() if at != NOT_MERGED]
    if merged and min(merged) < lake.trimmed_batch:
        raise LakeOutOfStep(
            f"the history of {table.name} was not kept for a while, and what it misses has been trimmed",
            hint=f"Remove its directory under `{TableKind.HISTORY}`: it then begins with what there is now",
        )


def commit_merges(lake: Lake, tasks: Sequence[MergeTask], results: Sequence[Sequence[Merged]]) -> None:
    """Make merges a part of the tables, one table after another. Nothing may be landed since they were planned."""
    assert all(task.upto_batch == lake.last_batch for task in tasks), "a batch was landed since the merges were planned"
    merged: dict[str, dict[TableKind, list[Merged]]] = {}
    for part in (part for result in results for part in result):
        merged.setdefault(part.name, {}).setdefault(part.kind, []).append(part)
    for name, parts in merged.items():
        _commit_merged(lake, lake.tables[name], parts)
    _note_idle_tables(lake)


def _commit_merged(lake: Lake, table: CollectionTables, parts: Mapping[TableKind, Sequence[Merged]]) -> None:
    rejects = [part for part in parts.get(TableKind.REJECTS, ()) if part.add or part.remove]
    if rejects:
        lake.step(f"commit rejects {table.name}")
        _commit_parts(lake, table.rejects or table.create_rejects(), rejects)
    if history := parts.get(TableKind.HISTORY, ()):
        lake.step(f"commit history {table.name}")
        _commit_parts(lake, table.history or table.create_history(), history)
    lake.step(f"commit documents {table.name}")
    assert table.documents is not None, "it was made before the merge was planned"
    _commit_parts(lake, table.documents, parts[TableKind.DOCUMENTS])
    lake.pending.forget(table.name)


def _commit_parts(lake: Lake, table: MergedTable, parts: Sequence[Merged]) -> None:
    """Groups that are not among the parts had nothing pending: they are merged as well."""
    table.commit(
        add=[file for part in parts for file in part.add],
        remove=[file for part in parts for file in part.remove],
        held=lake.state,
    )


def _note_idle_tables(lake: Lake) -> None:
    for table in lake.tables.values():
        if table.documents is not None and lake.state.batch - min(table.documents.merged.values()) > _IDLE_BATCHES_MAX:
            lake.step(f"note idle {table.name}")
            table.documents.commit(held=lake.state)
