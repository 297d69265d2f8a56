"""The tasks of a merge: one for each group of vbuckets that has something pending, for all tables together.

When to merge is decided by the pipeline (`headwater.spark.freshness`). A merge takes everything that is pending, so a
table is one cut of the bucket after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headwater.spark.lake.change_rows import pending_files
from headwater.spark.lake.collection_tables import NOT_MERGED, CollectionTables
from headwater.spark.lake.data_files import FILE_BYTES_DEFAULT, DataFile
from headwater.spark.lake.documents_merge import DocumentsTarget, MergeTask
from headwater.spark.lake.history import HistoryTarget
from headwater.spark.lake.layout import LakeFacts, LakePlace, TableKind
from headwater.spark.lake.pending import Pending


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRules:
    """What is merged into."""

    history: bool = False
    file_bytes: int = FILE_BYTES_DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """What plans are made from."""

    place: LakePlace
    facts: LakeFacts
    rules: MergeRules
    change_files: Sequence[DataFile]
    upto_batch: int

    def plan(self, tables: Iterable[CollectionTables], pending: Pending) -> list[MergeTask]:
        due: dict[int, list[CollectionTables]] = {}
        for table in tables:
            for group in range(self.facts.groups):
                if pending.has(table.name, group) or self.history_lags(table, group):
                    due.setdefault(group, []).append(table)
        return [self._task(group, due[group], pending) for group in sorted(due)]

    def history_lags(self, table: CollectionTables, group: int) -> bool:
        if not self.rules.history or table.documents is None:
            return False
        at = NOT_MERGED if table.history is None else table.history.merged[group]
        return at < table.documents.merged[group]

    # --- tasks ----------------------------------------------------------------------------------------------------

    def _task(self, group: int, tables: Sequence[CollectionTables], pending: Pending) -> MergeTask:
        documents = tuple(self.documents_target(table, group) for table in tables)
        history = tuple(self._history_target(table, group) for table in tables) if self.rules.history else ()
        is_rolled = any((table.name, group) in pending.urgent for table in tables)
        return self.merge_task(group, documents, history, with_whole=is_rolled)

    def merge_task(
        self,
        group: int,
        documents: tuple[DocumentsTarget, ...],
        history: tuple[HistoryTarget, ...] = (),
        *,
        with_whole: bool,
    ) -> MergeTask:
        vbuckets = self.facts.vbuckets_of(group)
        targets: list[DocumentsTarget | HistoryTarget] = [*documents, *history]
        after = min(target.after_batch for target in targets)
        whole = tuple(pending_files(self.change_files, after_batch=NOT_MERGED, vbuckets=vbuckets))
        return MergeTask(
            facts=self.facts,
            group=group,
            changes=self.place.table(TableKind.CHANGES),
            pending=tuple(pending_files(self.change_files, after_batch=after, vbuckets=vbuckets)),
            whole=whole if with_whole else None,
            upto_batch=self.upto_batch,
            documents=documents,
            history=history,
            file_bytes=self.rules.file_bytes,
        )

    def documents_target(self, table: CollectionTables, group: int) -> DocumentsTarget:
        return DocumentsTarget(
            name=table.name,
            ids=frozenset(table.ids),
            place=self.place.table(TableKind.DOCUMENTS, table.name),
            files=() if table.documents is None else table.documents.files_of(group),
            after_batch=table.merged_at(group),
            columns=table.columns,
            rejects_place=self.place.table(TableKind.REJECTS, table.name),
            rejects_files=() if table.rejects is None else table.rejects.files_of(group),
        )

    def _history_target(self, table: CollectionTables, group: int) -> HistoryTarget:
        return HistoryTarget(
            name=table.name,
            ids=frozenset(table.ids),
            place=self.place.table(TableKind.HISTORY, table.name),
            files=() if table.history is None else table.history.files_of(group),
            after_batch=NOT_MERGED if table.history is None else table.history.merged[group],
        )
