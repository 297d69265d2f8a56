"""The lake as its driver sees it: one object that plans, hands work out and commits.

A batch goes this way:

    batch = lake.begin_batch(query_id=…, batch_id=…, end=offsets)      # None: the tables have it already
    reports = …                                                         # executors: batch.writer over the rows
    lake.commit_batch(batch, reports, run)                              # now `changes` has it
    lake.merge(run)                                                     # now the documents have it, where it is due

After a crash anywhere the same calls complete it: what a commit has not named was never there, and what it has named is
found by its transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa

from headwater.client.offsets import Offsets
from headwater.errors import ColumnsChanged, LakeDamaged, LakeOfOtherBucket, LakeOutOfStep
from headwater.spark.lake.change_files import ChangeReport, ChangeWriter
from headwater.spark.lake.change_rows import MUTATION, Wanted, read_changes
from headwater.spark.lake.collection_tables import NOT_MERGED, CollectionTables, MergedTable
from headwater.spark.lake.data_files import DataFile
from headwater.spark.lake.delta_log import Commit, DeltaLog, TableState
from headwater.spark.lake.documents_merge import Merged, MergeTask, merged_rows
from headwater.spark.lake.layout import GROUPS_DEFAULT, LakeFacts, LakePlace, TableKind, table_name
from headwater.spark.lake.merge_plan import MergeRules, Planner
from headwater.spark.lake.pending import Pending, count_pending
from headwater.spark.lake.rollback import out_of_reach, void_tasks
from headwater.spark.lake.schemas import CHANGE_RANGES, GROUP, changes_schema
from headwater.spark.lake.tasks import Runner, run_here
from headwater.spark.lake.typed_columns import TypedColumns, infer_columns
from headwater.spark.lake.void_rows import Voided
from headwater.spark.lake.wiped_vbuckets import write_rollbacks_to_zero

BATCH_TRANSACTION = "headwater.batch"
TRIMMED_TRANSACTION = "headwater.trimmed"
INFER_ROWS = 1000
EVERY_COLLECTION = "*"
_OPENING_ATTEMPTS = 10
"""Tables may go on while they are opened, but hardly each time that they are."""
_IDLE_BATCHES_MAX = 512
"""A table that nothing is pending for says so in its log after so many batches: they are not looked at again then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeSettings:
    """What may be different every time that a lake is opened."""

    merging: MergeRules = field(default_factory=MergeRules)
    columns: Mapping[str, TypedColumns] = field(default_factory=dict)
    """By table (`scope.collection`), or for `*`: typed columns."""
    infer: bool = False
    """Tables that are made get typed columns for the fields that their first documents have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch that is being landed."""

    query_id: str
    batch_id: int
    number: int
    """Of all batches that this lake has ever taken: what the rows have in `batch`."""
    end: Offsets
    writer: ChangeWriter
    """Picklable. `df.mapInArrow(batch.writer, RESULT_DDL)` writes the rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a batch came to."""

    rows: int
    rows_by_table: Mapping[str, int]
    """Changes of documents, by `scope.collection`."""
    rollbacks: Mapping[int, int]
    """By vbucket: the last seqno that was kept."""
    read_again: frozenset[int]
    """Vbuckets that could not be rolled back. The query must end, and another begin at `Lake.held_offsets`."""


class Lake:
    """The tables of one bucket, open for one writer or any number of readers."""

    def __init__(
        self,
        place: LakePlace,
        facts: LakeFacts,
        changes: DeltaLog,
        settings: LakeSettings,
        step: Callable[[str], None],
    ) -> None:
        self.place = place
        self.facts = facts
        self.settings = settings
        self.changes = changes
        self.tables: dict[str, CollectionTables] = {}
        self.step = step
        self._pending: Pending | None = None
        self._load()

    @classmethod
    def open(
        cls,
        place: LakePlace | str,
        *,
        bucket_uuid: str | None = None,
        settings: LakeSettings | None = None,
        step: Callable[[str], None] = lambda name: None,
    ) -> Lake | None:
        """The lake in a directory, or None where there is none.

        `step` is called before each step that a crash could come between, with its name.
        """
        place = LakePlace(place) if isinstance(place, str) else place
        changes = DeltaLog.open(place.table(TableKind.CHANGES))
        if changes is None:
            return None
        facts = LakeFacts.from_properties(changes.properties, where=changes.place.uri)
        if bucket_uuid is not None and facts.bucket_uuid != bucket_uuid:
            raise LakeOfOtherBucket(
                f"the tables in {place.root} hold the bucket with uuid {facts.bucket_uuid!r}, and this one has "
                f"{bucket_uuid!r}",
                hint="Give another directory, or name the bucket that was landed here; if that was deleted and made "
                "anew, it is another one",
            )
        return cls(place, facts, changes, settings or LakeSettings(), step)

    @classmethod
    def create(
        cls,
        place: LakePlace | str,
        *,
        bucket_uuid: str,
        vbuckets: int,
        groups: int = GROUPS_DEFAULT,
        xattrs: bool = False,
        settings: LakeSettings | None = None,
        step: Callable[[str], None] = lambda name: None,
    ) -> Lake:
        """The lake in a directory; one is made where there is none."""
        place = LakePlace(place) if isinstance(place, str) else place
        facts = LakeFacts(bucket_uuid=bucket_uuid, vbuckets=vbuckets, groups=min(groups, vbuckets), xattrs=xattrs)
        DeltaLog.create(
            place.table(TableKind.CHANGES),
            changes_schema(xattrs=xattrs),
            ranges=CHANGE_RANGES,
            properties=facts.to_properties(),
            transactions={},
            state=TableState(offsets=Offsets(bucket_uuid)),
        )
        lake = cls.open(place, bucket_uuid=bucket_uuid, settings=settings, step=step)
        assert lake is not None, "it has just been made"
        if lake.facts.vbuckets != vbuckets:
            raise LakeDamaged(
                f"the tables in {place.root} were made for {lake.facts.vbuckets} vbuckets, not for {vbuckets}",
                hint="Give another directory: a bucket never changes its number of vbuckets",
            )
        if lake.facts.xattrs != xattrs:
            raise ColumnsChanged(
                f"the tables in {place.root} were made {'with' if lake.facts.xattrs else 'without'} xattrs",
                hint="Ask for the same, or land into another directory",
            )
        return lake

    def _load(self) -> None:
        """Open all tables. A reader sees `changes` at least as new as what is made from it, so `changes` comes last."""
        opened: set[str] = set()
        stale: list[str] = []
        for _ in range(_OPENING_ATTEMPTS):
            self.state = self.changes.state()
            for id_, name in self.state.collections.items():
                self._table(name).ids.add(id_)
            stale = [table.name for table in self.tables.values() if self._is_stale(table)]
            if self.tables.keys() <= opened and not stale:
                break
            for table in self.tables.values():
                table.open(self._asked_columns(table.name))
            opened = set(self.tables)
            self.changes.refresh()
        if stale:
            raise LakeDamaged(
                f"the table of {stale[0]} misses changes that have been trimmed from `{TableKind.CHANGES}` since",
                hint=f"Remove its directories under `{TableKind.DOCUMENTS}` and `{TableKind.REJECTS}`: the next run "
                "builds it again",
            )
        self._seen_version = self.changes.version
        self._pending = None

    def _is_stale(self, table: CollectionTables) -> bool:
        """Whether changes that a table still needs have been trimmed: it was merged after it was opened here."""
        merged = [] if table.documents is None else [at for at in table.documents.merged.values() if at != NOT_MERGED]
        return bool(merged) and min(merged) < self.trimmed_batch

    @property
    def trimmed_batch(self) -> int:
        """The last batch that was trimmed; -1 where none was."""
        trimmed = self.changes.transaction(TRIMMED_TRANSACTION)
        return NOT_MERGED if trimmed is None else trimmed

    def refresh(self) -> None:
        """Look again at everything if the log of `changes` has gone on without us.

        Somebody may have tidied the table up, or a commit of ours was done though it seemed to fail. If another
        pipeline has landed here, what comes next does not begin where the tables end, and is refused.
        """
        self.changes.refresh()
        if self.changes.version != self._seen_version:
            self._load()

    def _table(self, name: str) -> CollectionTables:
        return self.tables.setdefault(name, CollectionTables(name, self.place, self.facts))

    def _asked_columns(self, name: str) -> TypedColumns | None:
        return self.settings.columns.get(name, self.settings.columns.get(EVERY_COLLECTION))

    # --- what the tables hold -------------------------------------------------------------------------------------

    @property
    def last_batch(self) -> int:
        """The number of the last batch in `changes`, counted from 0; -1 where there is none."""
        number = self.changes.transaction(BATCH_TRANSACTION)
        return NOT_MERGED if number is None else number

    def held_offsets(self, name: str | None = None) -> Offsets:
        """The offsets that `changes` holds, or the table of a collection: of every vbucket, where its rows end."""
        if name is None:
            return self.state.offsets
        documents = self.tables[name].documents
        return Offsets(self.facts.bucket_uuid) if documents is None else documents.offsets

    @property
    def pending(self) -> Pending:
        """What waits to be merged."""
        if self._pending is None:
            names = self.state.collections
            self._pending = count_pending(
                self.changes.place, self.changes.files(), self.facts, names, lambda n, g: self.tables[n].merged_at(g)
            )
            missing = [table.name for table in self.tables.values() if table.documents is None]
            self._pending.urgent |= {(name, group) for name in missing for group in range(self.facts.groups)}
        return self._pending

    def read_tasks(self, name: str) -> list[MergeTask]:
        """The work of reading a collection as it is now, one task a group, for `merged_rows` in any process."""
        planner, table = self._planner(), self.tables[name]
        return [
            planner.merge_task(group, (planner.documents_target(table, group),), with_whole=True)
            for group in range(self.facts.groups)
        ]

    def documents_now(self, name: str) -> Iterator[pa.Table]:
        """The documents of a collection as they are now, whether merged or not, with the columns of their table."""
        for task in self.read_tasks(name):
            for rows in merged_rows(task):
                yield rows.append_column(GROUP, pa.repeat(pa.scalar(task.group, GROUP.type), rows.num_rows))

    # --- a batch --------------------------------------------------------------------------------------------------

    def check_start(self, start: Offsets) -> None:
        """Raises `LakeOutOfStep` unless changes that begin at these offsets go on where the tables end."""
        held = self.state.offsets
        for vbucket in sorted({*held.offsets, *start.offsets}):
            ours, theirs = (offsets.get(vbucket) for offsets in (held, start))
            at = [(0, 0) if it is None or it.seqno == 0 else (it.vbuuid, it.seqno) for it in (ours, theirs)]
            if at[0] != at[1]:
                raise LakeOutOfStep(
                    f"in vbucket {vbucket} the changes begin after seqno {at[1][1]} of branch {at[1][0]}, and the "
                    f"tables end at seqno {at[0][1]} of branch {at[0][0]}",
                    hint="Start with a new checkpoint: it goes on where the tables end",
                )

    def begin_batch(
        self,
        *,
        query_id: str,
        batch_id: int,
        end: Offsets,
        start: Offsets | None = None,
        landed_at: datetime | None = None,
    ) -> Batch | None:
        """Begin to land a batch. None says that `changes` has it already.

        `end` are the offsets behind the batch, and `start`, if known, those before it.
        """
        self.refresh()
        done = self.changes.transaction(query_id)
        if done is not None and done >= batch_id:
            return None
        if self.state.ended_query == query_id:
            raise LakeOutOfStep(
                "a rollback went further back than `changes` reaches, and this query can't go on",
                hint="Start with a new checkpoint: it goes on where the tables end, and reads what is missing again",
            )
        end.check_bucket(self.facts.bucket_uuid)
        if start is not None:
            self.check_start(start)
        number = self.last_batch + 1
        writer = ChangeWriter(
            place=self.changes.place,
            facts=self.facts,
            batch=number,
            landed_at=landed_at or datetime.now(UTC),
            held_seqnos={vbucket: int(at.seqno) for vbucket, at in self.state.offsets.offsets.items()},
        )
        return Batch(query_id=query_id, batch_id=batch_id, number=number, end=end, writer=writer)

    def commit_batch(self, batch: Batch, reports: Sequence[ChangeReport], run: Runner = run_here) -> Committed:
        """Make a batch a part of `changes`, and mark what its rollbacks took back, all in one commit."""
        pending = self.pending
        # Should anything fail from here on, what is pending is counted anew.
        self._pending = None
        rollbacks = {
            vbucket: min(report.rollbacks[vbucket] for report in reports if vbucket in report.rollbacks)
            for report in reports
            for vbucket in report.rollbacks
        }
        added = [file for report in reports for file in report.files]
        wiped = self._out_of_reach(rollbacks).union(*(report.torn for report in reports))
        removed: list[DataFile] = []
        if rollbacks:
            added, removed = self._void(batch, rollbacks, wiped, added, run)
        state = self._state_after(batch, reports, wiped)
        self.step("commit changes")
        self.changes.commit(
            Commit(
                add=added,
                remove=removed,
                transactions={batch.query_id: batch.batch_id, BATCH_TRANSACTION: batch.number},
                state=state,
            )
        )
        known, self.state, self._seen_version = self.state.collections, state, self.changes.version
        for id_, name in state.collections.items():
            self._table(name).ids.add(id_)
        for name in sorted({*state.collections.values()} - {*known.values()}):
            self._create_documents(self.tables[name], added, merged=batch.number - 1)
        for report in reports:
            pending.add(report, state.collections, self.facts)
        self._pending = pending
        by_table: Counter[str] = Counter()
        for report in reports:
            for (id_, _), count in report.document_rows.items():
                by_table[state.collections[id_]] += count
        return Committed(
            rows=sum(report.rows for report in reports),
            rows_by_table=by_table,
            rollbacks=rollbacks,
            read_again=frozenset(wiped),
        )

    def commit_changes(self, commit: Commit) -> None:
        """A commit to `changes` that brings no batch."""
        self.changes.commit(commit)
        self._seen_version = self.changes.version

    def _out_of_reach(self, rollbacks: Mapping[int, int]) -> set[int]:
        if self.trimmed_batch == NOT_MERGED or not rollbacks:
            return set()
        files = self.changes.files()
        return out_of_reach(self.changes.place, files, dict(rollbacks), trimmed_batch=self.trimmed_batch)

    def _void(
        self, batch: Batch, rollbacks: Mapping[int, int], wiped: set[int], added: list[DataFile], run: Runner
    ) -> tuple[list[DataFile], list[DataFile]]:
        """What to add and to remove, so that everything that the rollbacks took back is marked.

        `wiped` are the vbuckets that can't be rolled back. Those are added to it that are found out here.
        """
        place, facts = self.changes.place, self.facts
        limits = {vbucket: 0 if vbucket in wiped else kept for vbucket, kept in rollbacks.items()}
        tasks = void_tasks(place, facts, self.changes.files(), limits)
        # What a vbucket that is wiped has in this very batch goes as well: all of it is read again.
        tasks += void_tasks(place, facts, added, dict.fromkeys(wiped, 0))
        results: list[Voided] = run(tasks)
        torn = {vbucket for voided in results for vbucket in voided.torn}
        if torn - wiped:
            wiped |= torn
            return self._void(batch, rollbacks, wiped, added, run)
        removed: list[DataFile] = []
        for voided in results:
            if voided.replacement is None:
                continue
            if voided.file in added:
                added = [voided.replacement if file == voided.file else file for file in added]
            else:
                added, removed = [*added, voided.replacement], [*removed, voided.file]
        if wiped:
            added = [*added, write_rollbacks_to_zero(batch.writer, wiped)]
        return added, removed

    def _state_after(self, batch: Batch, reports: Sequence[ChangeReport], wiped: set[int]) -> TableState:
        collections = dict(self.state.collections)
        names: dict[int, tuple[str | None, str | None]] = {}
        for report in reports:
            for id_, parts in report.names.items():
                if None in names.get(id_, (None,)):
                    names[id_] = parts
        for id_, (scope, collection) in sorted(names.items()):
            collections.setdefault(id_, table_name(scope, collection, id_))
        reached = {**self.state.offsets.offsets, **batch.end.offsets}
        offsets = {vbucket: at for vbucket, at in reached.items() if vbucket not in wiped}
        return TableState(
            offsets=Offsets(self.facts.bucket_uuid, offsets),
            collections=collections,
            ended_query=batch.query_id if wiped else None,
        )

    def _create_documents(self, table: CollectionTables, files: Sequence[DataFile], *, merged: int) -> None:
        """Make a table that holds all there was up to a batch. Columns are inferred from these files of `changes`."""
        columns = self._asked_columns(table.name)
        if columns is None and self.settings.infer:
            columns = self._inferred_columns(table, files)
        self.step(f"create documents {table.name}")
        table.create_documents(columns, merged=merged)

    def _inferred_columns(self, table: CollectionTables, files: Sequence[DataFile]) -> TypedColumns | None:
        wanted = Wanted(
            vbuckets=tuple(range(self.facts.vbuckets)),
            after_batch=NOT_MERGED,
            upto_batch=self.last_batch,
            ids=frozenset(table.ids),
        )
        documents: list[str | None] = []
        for file in files:
            for rows in read_changes(self.changes.place, [file], wanted):
                marks = (rows.ops == MUTATION) & ~rows.void & np.isin(rows.ids, [*table.ids])
                values = rows.wide(marks).column("value").slice(0, INFER_ROWS - len(documents))
                documents += [None if value is None else value.decode(errors="replace") for value in values.to_pylist()]
            if len(documents) >= INFER_ROWS:
                break
        return infer_columns(documents)

    # --- merging --------------------------------------------------------------------------------------------------

    def _planner(self) -> Planner:
        return Planner(
            place=self.place,
            facts=self.facts,
            rules=self.settings.merging,
            change_files=self.changes.files(),
            upto_batch=self.last_batch,
        )

    def plan_merges(self, *, force: bool = False) -> list[MergeTask]:
        """The merges that are due, or with `force` all that have anything to merge."""
        self.refresh()
        for name in {name for name, _ in [*self.pending.rows, *self.pending.urgent]}:
            self.tables[name].refresh()
        for table in self.tables.values():
            # Its collection is known, and it is not there: it was lost, or a crash came before it was made.
            if table.documents is None:
                self._create_documents(table, self.changes.files(), merged=NOT_MERGED)
            self._check_history(table)
        return self._planner().plan(self.tables.values(), self.pending, force=force)

    def _check_history(self, table: CollectionTables) -> None:
        if not self.settings.merging.history or table.history is None:
            return
        merged = [at for at in table.history.merged.values() if at != NOT_MERGED]
        if merged and min(merged) < self.trimmed_batch:
            raise LakeOutOfStep(
                f"the history of {table.name} was not kept for a while, and what it misses has been trimmed",
                hint=f"Remove its directory under `{TableKind.HISTORY}`: it then begins with what there is now",
            )

    def commit_merges(self, tasks: Sequence[MergeTask], results: Sequence[Sequence[Merged]]) -> None:
        """Make merges a part of the tables, one table after another. Nothing may be landed since they were planned."""
        upto = self.last_batch
        assert all(task.upto_batch == upto for task in tasks), "a batch was landed since the merges were planned"
        merged: dict[str, dict[TableKind, list[Merged]]] = {}
        for part in (part for result in results for part in result):
            merged.setdefault(part.name, {}).setdefault(part.kind, []).append(part)
        for name, parts in merged.items():
            self._commit_merged(self.tables[name], parts, upto)
        self._note_idle_tables(upto)

    def _commit_merged(self, table: CollectionTables, parts: Mapping[TableKind, Sequence[Merged]], upto: int) -> None:
        rejects = [part for part in parts.get(TableKind.REJECTS, ()) if part.add or part.remove]
        if rejects:
            self.step(f"commit rejects {table.name}")
            self._commit_parts(table.rejects or table.create_rejects(), rejects, upto)
        if history := parts.get(TableKind.HISTORY, ()):
            self.step(f"commit history {table.name}")
            self._commit_parts(table.history or table.create_history(), history, upto)
        documents = parts[TableKind.DOCUMENTS]
        self.step(f"commit documents {table.name}")
        assert table.documents is not None, "it was made before the merge was planned"
        groups = {part.group for part in documents}
        # What nothing is pending for is as good as merged.
        groups |= {group for group in range(self.facts.groups) if not self.pending.has(table.name, group)}
        self._commit_parts(table.documents, documents, upto, groups)
        for part in documents:
            self.pending.forget(table.name, part.group)

    def _commit_parts(
        self, table: MergedTable, parts: Sequence[Merged], upto: int, groups: set[int] | None = None
    ) -> None:
        table.commit(
            add=[file for part in parts for file in part.add],
            remove=[file for part in parts for file in part.remove],
            merged=dict.fromkeys(groups or {part.group for part in parts}, upto),
            held=self.state.offsets,
        )

    def _note_idle_tables(self, upto: int) -> None:
        for table in self.tables.values():
            if table.documents is None:
                continue
            idle = {
                group
                for group, at in table.documents.merged.items()
                if upto - at > _IDLE_BATCHES_MAX and not self.pending.has(table.name, group)
            }
            if idle:
                self.step(f"note idle {table.name}")
                table.documents.commit(merged=dict.fromkeys(idle, upto), held=self.state.offsets)

    def merge(self, run: Runner = run_here, *, force: bool = False) -> int:
        """Merge what is due. Returns the number of merges."""
        tasks = self.plan_merges(force=force)
        self.step("run merges")
        self.commit_merges(tasks, run(tasks))
        return len(tasks)


def with_columns(settings: LakeSettings, columns: Mapping[str, str]) -> LakeSettings:
    """The same with typed columns, by table or for `*`, as SQL writes them."""
    return replace(settings, columns={name: TypedColumns.from_ddl(ddl) for name, ddl in columns.items()})
