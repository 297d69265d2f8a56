"""Pending changes into the tables of documents: which merges are due, and their commits, table by table.

Rejects come first, then history, then documents: once the documents say that a group is merged, nobody looks at what
lies before. A crash between two of them leaves a group that is merged again, with the same outcome.
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


def merge(lake: Lake, run: Runner = run_here, *, force: bool = False) -> int:
    """Merge what is due. Returns the number of merges."""
    tasks = plan_merges(lake, force=force)
    lake.step("run merges")
    commit_merges(lake, tasks, run(tasks))
    return len(tasks)


def plan_merges(lake: Lake, *, force: bool = False) -> list[MergeTask]:
    """The merges that are due, or with `force` all that have anything to merge."""
    lake.refresh()
    for name in {name for name, _ in [*lake.pending.rows, *lake.pending.urgent]}:
        lake.tables[name].refresh()
    for table in lake.tables.values():
        # Its collection is known, and it is not there: it was lost, or a crash came before it was made.
        if table.documents is None:
            create_documents(lake, table, lake.changes.files(), merged=NOT_MERGED)
        _check_history(lake, table)
    return lake.planner().plan(lake.tables.values(), lake.pending, force=force)


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
    upto = lake.last_batch
    assert all(task.upto_batch == upto for task in tasks), "a batch was landed since the merges were planned"
    merged: dict[str, dict[TableKind, list[Merged]]] = {}
    for part in (part for result in results for part in result):
        merged.setdefault(part.name, {}).setdefault(part.kind, []).append(part)
    for name, parts in merged.items():
        _commit_merged(lake, lake.tables[name], parts, upto)
    _note_idle_tables(lake, upto)


def _commit_merged(lake: Lake, table: CollectionTables, parts: Mapping[TableKind, Sequence[Merged]], upto: int) -> None:
    rejects = [part for part in parts.get(TableKind.REJECTS, ()) if part.add or part.remove]
    if rejects:
        lake.step(f"commit rejects {table.name}")
        _commit_parts(lake, table.rejects or table.create_rejects(), rejects, upto)
    if history := parts.get(TableKind.HISTORY, ()):
        lake.step(f"commit history {table.name}")
        _commit_parts(lake, table.history or table.create_history(), history, upto)
    documents = parts[TableKind.DOCUMENTS]
    lake.step(f"commit documents {table.name}")
    assert table.documents is not None, "it was made before the merge was planned"
    groups = {part.group for part in documents}
    # What nothing is pending for is as good as merged.
    groups |= {group for group in range(lake.facts.groups) if not lake.pending.has(table.name, group)}
    _commit_parts(lake, table.documents, documents, upto, groups)
    for part in documents:
        lake.pending.forget(table.name, part.group)


def _commit_parts(
    lake: Lake, table: MergedTable, parts: Sequence[Merged], upto: int, groups: set[int] | None = None
) -> None:
    table.commit(
        add=[file for part in parts for file in part.add],
        remove=[file for part in parts for file in part.remove],
        merged=dict.fromkeys(groups or {part.group for part in parts}, upto),
        held=lake.state.offsets,
    )


def _note_idle_tables(lake: Lake, upto: int) -> None:
    for table in lake.tables.values():
        if table.documents is None:
            continue
        idle = {
            group
            for group, at in table.documents.merged.items()
            if upto - at > _IDLE_BATCHES_MAX and not lake.pending.has(table.name, group)
        }
        if idle:
            lake.step(f"note idle {table.name}")
            table.documents.commit(merged=dict.fromkeys(idle, upto), held=lake.state.offsets)
