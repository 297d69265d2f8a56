"""The lake as its driver sees it: one object that knows all tables, and what they hold.

A batch is landed in these steps:

    batch = begin_batch(lake)                                  # begins at `lake.held_offsets()`
    reports = …                                                # executors: batch.writer over the rows
    commit_batch(lake, batch, reports, run)                    # now `changes` has it
    merge(lake, run)                                           # now the documents have it

These functions are in `commits`. The tables are the only state: after any crash the next batch begins where they end,
and files that no commit names do not count. So a `Lake` must never know more than the logs say.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa

from headwater import errors, telemetry
from headwater.client.offsets import Offsets
from headwater.lake.change_files import Rollbacks, add_rollback
from headwater.lake.collection_tables import NOT_MERGED, CollectionTables
from headwater.lake.column_rules import ColumnRules, rules_of
from headwater.lake.delta_log import DeltaLog, TableCommit
from headwater.lake.documents_merge import MergeRules, MergeTask, Pending, Planner, count_pending, merged_rows
from headwater.lake.history import check_feed_columns
from headwater.lake.layout import (
    CHANGE_RANGES,
    EVERY_COLLECTION,
    GROUP,
    GROUPS_MIN,
    GROUPS_TRANSACTION,
    DocumentForm,
    LakeFacts,
    TableKind,
    changes_schema,
    commented,
    table_description,
)
from headwater.lake.location import OWN_FOLDER, Location, lake_error, noting_outputs
from headwater.lake.set_aside import AsideTables, own_fault
from headwater.lake.table_state import LandedTotals, Selection, TableState
from headwater.lake.typed_columns import ColumnChoice, ColumnMode, check_cluster_columns
from headwater.options import suggest_keywords
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId

BATCH_TRANSACTION = "headwater.batch"
TRIMMED_TRANSACTION = "headwater.trimmed"
_OPENING_ATTEMPTS = 10
"""Tables may advance while they are being opened, but hardly during every attempt."""
_BOUNDARY_COMMITS = 64
"""How many commits of `changes` are searched for boundaries: a failover takes back seconds, not hours."""
BOUNDARIES_MAX = 16
"""How many boundaries are kept for each vbucket."""
_SELECTION = "selection.json"


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class LakeSettings:
    """Settings that may change each time a lake is opened."""

    merging: MergeRules = field(default_factory=MergeRules)
    columns: Mapping[str, ColumnChoice] = field(default_factory=dict)
    """By table (`scope.collection`), or for `*`: the typed columns, or `ColumnMode.INFER`. An existing table can be
    switched to `INFER`; any other columns it must have already."""
    infer: bool = True
    """Infer columns for new tables that `columns` does not name. Otherwise these tables must have none."""
    rules: Mapping[str, ColumnRules] = field(default_factory=dict)
    """By table, and for `*`: rules for inferred columns. A table remembers its rules; if they change, all its documents
    are parsed again."""
    cluster_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By table, or for `*`: the columns by which documents are sorted before their keys. Applies to files written from
    now on. A table that is not named keeps its order."""
    document: DocumentForm | str | None = None
    """What the column `document` is: "string" or "variant". `None` leaves an existing lake as it is, and is "string"
    for a new one; an existing lake can't be switched."""

    def __post_init__(self) -> None:
        if self.document is not None and self.document not in {*DocumentForm}:
            raise errors.InvalidInput(
                f"{self.document!r} is not a form of documents", hint=f"Use one of: {', '.join(DocumentForm)}"
            )
        for table in {*self.columns, *self.cluster_by}:
            check_cluster_columns(table, self.cluster_by_of(table) or (), self.columns_of(table) or ColumnMode.INFER)
        for table in self.rules:
            rules_of(table, self.rules)
            if self.columns_of(table) not in (None, ColumnMode.INFER):
                raise errors.InvalidInput(
                    f"{'all tables have' if table == EVERY_COLLECTION else f'{table} has'} fixed columns or none, and "
                    "rules of columns are for those that are inferred",
                    hint="Leave out the columns, or --on-mismatch, --include-columns, --exclude-columns and "
                    "--rename-columns",
                )

    def columns_of(self, name: str) -> ColumnChoice | None:
        """Return the typed columns that are required of a table; None if it may have any."""
        asked = self.columns.get(name, self.columns.get(EVERY_COLLECTION))
        return ColumnMode.NONE if asked is None and not self.infer else asked

    def cluster_by_of(self, name: str) -> tuple[str, ...] | None:
        """Return the columns to cluster a table by; None if it keeps its order."""
        return self.cluster_by.get(name, self.cluster_by.get(EVERY_COLLECTION))


def _named(name: str | None, uuid: str) -> str:
    return f"with the uuid {uuid!r}" if name is None else f"{name} (uuid {uuid!r})"


class Lake:
    """The tables of one bucket, open for one writer or any number of readers."""

    def __init__(
        self,
        location: Location,
        facts: LakeFacts,
        changes: DeltaLog,
        settings: LakeSettings,
        step: Callable[[str], None],
        writer: str | None,
        as_of_batch: int | None = None,
        aside: AsideTables | None = None,
    ) -> None:
        self.location = location
        self._as_of_batch = as_of_batch
        self.facts = facts
        self.settings = settings
        self.changes = changes
        self.tables: dict[str, CollectionTables] = {}
        self.step = step
        self.writer = writer or uuid.uuid4().hex
        """Identifies this landing in commits: another landing has another value."""
        self.aside = AsideTables() if aside is None else aside
        self._is_landed_into = aside is not None
        self._pending: Pending | None = None
        self._boundaries: dict[VBucketId, list[Seqno]] | None = None
        self._load()

    @classmethod
    def open(
        cls,
        location: Location | str,
        *,
        bucket_uuid: str | None = None,
        bucket_name: str | None = None,
        settings: LakeSettings | None = None,
        step: Callable[[str], None] = lambda name: None,
        writer: str | None = None,
        as_of_batch: int | None = None,
        aside: AsideTables | None = None,
    ) -> Lake | None:
        """Open the lake in a directory. Returns None if there is none.

        Calls `step` with a name before each step that a crash could interrupt. With `as_of_batch`, all tables are shown
        as of that batch, for reading. A table that can't be opened is put on the list `aside`, if one is given;
        otherwise its error is raised.
        """
        location = Location.of(location)
        changes = DeltaLog.open(location.join(TableKind.CHANGES))
        if changes is None:
            return None
        if as_of_batch is not None:
            changes = _changes_as_of(changes, as_of_batch)
        facts = LakeFacts.from_properties(changes.properties, where=changes.location.uri)
        facts = replace(facts, groups=changes.transaction(GROUPS_TRANSACTION) or facts.groups)
        if bucket_uuid is not None and facts.bucket_uuid != bucket_uuid:
            raise errors.LakeOfOtherBucket(
                f"the tables in {location.uri} hold the bucket {_named(facts.bucket_name, facts.bucket_uuid)}, and not "
                f"{_named(bucket_name, bucket_uuid)}",
                hint="Give another directory, or the bucket that was landed here; a bucket that was deleted and "
                "created again is a different one",
            )
        settings = settings or LakeSettings()
        if settings.document not in (None, facts.document):
            raise errors.ColumnsChanged(
                f"the tables in {location.uri} have documents as {facts.document}, not as {settings.document}",
                hint="Omit the form of documents, or land into another directory",
            )
        return cls(location, facts, changes, settings, step, writer, as_of_batch, aside)

    @classmethod
    def create(
        cls,
        location: Location | str,
        *,
        bucket_uuid: str,
        bucket_name: str | None = None,
        vbuckets: int,
        groups: int = GROUPS_MIN,
        xattrs: bool = False,
        transform: str | None = None,
        selection: Selection | None = None,
        settings: LakeSettings | None = None,
        step: Callable[[str], None] = lambda name: None,
    ) -> Lake:
        """Open the lake in a directory, or create one for a selection of the bucket, by default all of it."""
        location = Location.of(location)
        form = DocumentForm((settings and settings.document) or DocumentForm.STRING)
        facts = LakeFacts(
            bucket_uuid=bucket_uuid,
            bucket_name=bucket_name,
            vbuckets=vbuckets,
            groups=min(groups, vbuckets),
            xattrs=xattrs,
            document=form,
            transform=transform,
        )
        DeltaLog.create(
            location.join(TableKind.CHANGES),
            commented(changes_schema(xattrs=xattrs), TableKind.CHANGES),
            description=table_description(TableKind.CHANGES, ""),
            ranges=CHANGE_RANGES,
            properties=facts.to_properties(),
            transactions={},
            state=TableState(
                offsets=Offsets(bucket_uuid),
                rollbacks={},
                totals=LandedTotals(),
                selection=selection or Selection(),
                tidied_s=time.time(),
            ),
        )
        lake = cls.open(
            location,
            bucket_uuid=bucket_uuid,
            bucket_name=bucket_name,
            settings=settings,
            step=step,
            aside=AsideTables(),
        )
        assert lake is not None, "it has just been made"
        if lake.facts.vbuckets != vbuckets:
            raise errors.LakeDamaged(
                f"the tables in {location.uri} were created for {lake.facts.vbuckets} vbuckets, not for {vbuckets}",
                hint="Give another directory: a bucket never changes its number of vbuckets",
            )
        if lake.facts.xattrs != xattrs:
            raise errors.ColumnsChanged(
                f"the tables in {location.uri} were made {'with' if lake.facts.xattrs else 'without'} xattrs",
                hint="Use the same setting, or land into another directory",
            )
        lake.check_transform(transform)
        return lake

    def check_transform(self, name: str | None) -> None:
        """Raise `InvalidInput` unless this is the transform that all changes went through; None for none."""
        if self.facts.transform != name:
            had = "no transform" if self.facts.transform is None else f"the transform {self.facts.transform}"
            raise errors.InvalidInput(
                f"the tables in {self.location.uri} were landed with {had}, not with {name or 'none'}",
                hint="Give the same, or land into another directory",
            )

    def _load(self) -> None:
        """Open all tables. `changes` comes last, so a reader sees it at least as new as the tables made from it."""
        opened: set[str] = set()
        stale: list[str] = []
        for _ in range(_OPENING_ATTEMPTS):
            # Earlier versions recorded the number of the batch only in the transaction.
            self.state = replace(self.changes.state(), batch=self.last_batch)
            self._know_collections()
            stale = [table.name for table in self.in_service if self._is_stale(table)]
            if self.tables.keys() <= opened and not stale:
                break
            for table in self.in_service:
                with self.containing(table.name) if self._is_landed_into else contextlib.nullcontext():
                    table.open(self.settings.columns_of(table.name))
                    self._check_asked(table)
            opened = set(self.tables)
            self.changes.refresh()
        for name in stale:
            with self.containing(name) if self._is_landed_into else contextlib.nullcontext():
                self._check_stale(self.tables[name])
        self._seen_version = self.changes.version
        self._pending = self._boundaries = None

    @property
    def in_service(self) -> list[CollectionTables]:
        """The tables that are not set aside."""
        return [table for table in self.tables.values() if table.name not in self.aside]

    @contextmanager
    def containing(self, name: str) -> Iterator[None]:
        """Set a table aside if the code inside fails through the table's own fault. All others continue."""
        try:
            yield
        except BaseException as error:
            fault = own_fault(error)
            if fault is None:
                raise
            # If the lake is gone, any operation may be the first to fail.
            self.changes.check_there()
            self.set_aside(name, fault)

    def set_aside(self, name: str, fault: errors.HeadwaterError) -> None:
        """Do nothing with a table for a while. The changes that it misses stay in `changes`."""
        self.aside.put(name, fault)
        if self._pending is not None:
            self._pending.forget(name)

    def try_set_aside(self) -> bool:
        """Let tables that were set aside take part again after their pause. Returns whether there were any."""
        due = self.aside.try_due()
        for name in due:
            with self.containing(name):
                table = self.tables[name]
                table.open(self.settings.columns_of(name))
                self._check_asked(table)
                self._check_stale(table)
        if due:
            self._pending = None
            if not self.has_pending:
                self.aside.settle()
        return bool(due)

    def _is_stale(self, table: CollectionTables) -> bool:
        """Whether changes that a table still needs have been trimmed: it was merged after it was opened here."""
        merged = [] if table.documents is None else [at for at in table.documents.merged.values() if at != NOT_MERGED]
        return bool(merged) and min(merged) < self.trimmed_batch

    def _check_stale(self, table: CollectionTables) -> None:
        if self._is_stale(table):
            raise errors.LakeDamaged(
                f"the table of {table.name} lacks changes that have been trimmed from `{TableKind.CHANGES}` since",
                hint=f"Remove its directories under `{TableKind.DOCUMENTS}` and `{TableKind.REJECTS}`: the next run "
                "rebuilds it",
            )

    @property
    def trimmed_batch(self) -> int:
        """The last batch that was trimmed; -1 if none was."""
        trimmed = self.changes.transaction(TRIMMED_TRANSACTION)
        return NOT_MERGED if trimmed is None else trimmed

    def refresh(self) -> None:
        """Reload everything if the log of `changes` has advanced without us.

        Another tool may have maintained the table, or a commit of ours succeeded although it seemed to fail. Raises
        `LakeTaken` if another landing has landed a batch.
        """
        batch = self.last_batch
        self.changes.refresh()
        if self.changes.version != self._seen_version:
            self._load()
            self.check_writer(batch)

    def check_writer(self, batch: int) -> None:
        """Raise `LakeTaken` if there are batches after this one and another landing has committed the last of them."""
        if self.last_batch != batch and self.state.writer != self.writer:
            raise errors.LakeTaken(
                f"another landing writes to the tables in {self.location.uri}",
                hint="Let only one pipeline write to a directory: the other one continues, and nothing is lost",
            )

    @property
    def documents(self) -> int:
        """The rows of all tables of documents."""
        return sum(table.documents.rows for table in self.tables.values() if table.documents is not None)

    @property
    def is_growing(self) -> bool:
        """Whether some tables have been split into more groups, but the lake has not been yet."""
        return any(table.groups > self.facts.groups for it in self.in_service for table in it.there)

    def set_groups(self, groups: int) -> None:
        """Record that all tables have this many groups."""
        self.commit_changes(TableCommit(transactions={GROUPS_TRANSACTION: groups}, state=self.state))
        self.facts = replace(self.facts, groups=groups)
        self.tables = {}
        self._load()

    def _know_collections(self) -> None:
        for id_, name in self.state.collections.items():
            table = CollectionTables(name, self.location, self.facts, self._as_of_batch)
            self.tables.setdefault(name, table).ids.add(id_)

    def _check_asked(self, table: CollectionTables) -> None:
        asked = self.settings.cluster_by_of(table.name)
        is_fixed = table.documents is not None and not table.is_inferred and not self.is_switched(table)
        if is_fixed and table.name in self.settings.rules:
            raise errors.ColumnsChanged(
                f"the table of {table.name} has fixed columns or none, and rules of columns are for those that are "
                "inferred",
                hint=f"Leave the rules out, or give --columns {table.name}=infer as well",
            )
        if self.is_switched(table):
            table.check_names(table.rules.with_asked(rules_of(table.name, self.settings.rules)))
        if asked and table.documents is not None and not self.is_switched(table):
            check_cluster_columns(table.name, asked, table.columns or ColumnMode.NONE)
        if self.settings.merging.change_feed and table.documents is not None:
            check_feed_columns(table.name, table.documents.log.schema.names)

    def is_switched(self, table: CollectionTables) -> bool:
        """Whether an existing table's columns are to be inferred from now on, or by other rules."""
        if table.documents is None:
            return False
        asked = rules_of(table.name, self.settings.rules)
        if table.is_inferred:
            return table.rules.with_asked(asked).text != table.rules.text
        return self.settings.columns_of(table.name) == ColumnMode.INFER

    # --- what the tables hold -----------------------------------------------------------------------------------------

    @property
    def last_batch(self) -> int:
        """The number of the last batch in `changes`, counted from 0; -1 if there is none."""
        number = self.changes.transaction(BATCH_TRANSACTION)
        return NOT_MERGED if number is None else number

    def held_offsets(self, name: str | None = None) -> Offsets:
        """Return the offset of every vbucket up to which `changes`, or the table of a collection, holds rows."""
        if name is None:
            return self.state.offsets
        documents = self.tables[name].documents
        return Offsets(self.facts.bucket_uuid) if documents is None else documents.offsets

    @property
    def boundaries(self) -> Mapping[VBucketId, Sequence[Seqno]]:
        """By vbucket, in ascending order: seqnos at which the tables held a whole snapshot. A rollback can go back
        there.

        They are the offsets of earlier commits. A seqno that a rollback gave up is no boundary, so every commit records
        its rollbacks. The search ends at commits of versions that did not record them.
        """
        if self._boundaries is None:
            found: dict[VBucketId, list[Seqno]] = {}
            ceilings: Rollbacks = {}
            for state in islice(self.changes.states(), _BOUNDARY_COMMITS):
                if state.rollbacks is None:
                    break
                for vbucket, at in state.offsets.offsets.items():
                    seqnos = found.setdefault(vbucket, [])
                    is_lower = at.is_whole and at.seqno < (seqnos[0] if seqnos else SEQNO_MAX)
                    if is_lower and at.seqno <= ceilings.get(vbucket, SEQNO_MAX) and len(seqnos) < BOUNDARIES_MAX:
                        seqnos.insert(0, at.seqno)
                for rolled, kept in state.rollbacks.items():
                    add_rollback(ceilings, rolled, kept)
            self._boundaries = found
        return self._boundaries

    def _note_boundaries(self, state: TableState) -> None:
        """After a commit: add its offsets as boundaries, and drop those that its rollbacks gave up."""
        if self._boundaries is None or state.rollbacks is None:
            self._boundaries = None
            return
        for rolled, kept in state.rollbacks.items():
            known = self._boundaries.get(VBucketId(rolled), [])
            self._boundaries[VBucketId(rolled)] = [seqno for seqno in known if seqno <= kept]
        for vbucket, at in state.offsets.offsets.items():
            known = self._boundaries.setdefault(vbucket, [])
            if at.is_whole and (not known or at.seqno > known[-1]):
                self._boundaries[vbucket] = [*known, at.seqno][-BOUNDARIES_MAX:]

    @property
    def pending(self) -> Pending:
        """The changes that wait to be merged."""
        if self._pending is None:
            names = {id_: name for id_, name in self.state.collections.items() if name not in self.aside}
            self._pending = count_pending(
                self.changes.location, self.changes.files(), self.facts, names, lambda n, g: self.tables[n].merged_at(g)
            )
            built = [
                table.name
                for table in self.in_service
                if table.documents is None or table.documents.has_to_be_rebuilt or self.is_switched(table)
            ]
            self._pending.urgent |= {(name, group) for name in built for group in range(self.facts.groups)}
        return self._pending

    @property
    def has_pending(self) -> bool:
        """Whether there is anything to merge."""
        if self.pending.names or not self.settings.merging.history:
            return bool(self.pending.names)
        planner, groups = self.planner(), range(self.facts.groups)
        return any(planner.history_lags(table, group) for table in self.in_service for group in groups)

    @property
    def is_merged_on_read(self) -> bool:
        """Whether merges mark superseded documents in all tables."""
        documents = [table.documents for table in self.in_service]
        return all(table is not None and table.is_merged_on_read for table in documents)

    @property
    def merge_bytes(self) -> int:
        """How many bytes a merge of all pending changes should write: as many as the last merge of each table."""
        return sum(self.tables[name].merge_bytes for name in self.pending.names)

    def documents_as_of_s(self, name: str) -> float | None:
        """Return the time before which everything written to the bucket is in the table of a collection; None if
        unknown. For a table with pending changes."""
        documents = self.tables[name].documents
        of_table = None if documents is None else documents.state.as_of_s
        return self.pending.since_s.get(name, of_table)

    @contextmanager
    def counting_pending(self) -> Iterator[Pending]:
        """Yield the pending counts for an update. If the code inside fails, they are counted again."""
        pending, self._pending = self.pending, None
        yield pending
        for table in self.aside.tables:
            if table.name in self.aside:
                pending.forget(table.name)
        self._pending = pending

    def planner(self) -> Planner:
        """Return a planner for merges of what the tables hold now."""
        return Planner(
            location=self.location,
            facts=self.facts,
            rules=self.settings.merging,
            change_files=self.changes.files(),
            upto_batch=self.last_batch,
        )

    def read_tasks(self, name: str) -> list[MergeTask]:
        """Return the tasks that read a collection as it is now, one per group, for `merged_rows` in any process."""
        planner, table = self.planner(), self.tables[name]
        return [
            planner.merge_task(
                group, of=table.groups, documents=(planner.documents_target(table, group),), with_whole=True
            )
            for group in range(table.groups)
        ]

    def documents_now(self, name: str) -> Iterator[pa.Table]:
        """Yield the current documents of a collection, merged or not, with the columns of their table."""
        for task in self.read_tasks(name):
            for rows in merged_rows(task):
                yield rows.append_column(GROUP, pa.repeat(pa.scalar(task.group, GROUP.type), rows.num_rows))

    def commit_changes(self, commit: TableCommit) -> None:
        """Commit to `changes`, and take over the committed state."""
        self.changes.commit(commit)
        self._note_boundaries(commit.state)
        self.state, self._seen_version = commit.state, self.changes.version
        self._know_collections()


def _changes_as_of(changes: DeltaLog, batch: int) -> DeltaLog:
    """Open `changes` as of the commit of this batch. Rows that rollbacks have voided since then are not void in it."""
    found = None
    with contextlib.suppress(errors.LakeDamaged):  # The entry exists, but some before it are missing.
        found = changes.as_of(batch)
    if found is None or found.transaction(BATCH_TRANSACTION) != batch or found.missing_files():
        known = [state.batch for state in changes.states() if state.batch != NOT_MERGED]
        logged = f"The log has batches {known[-1]} to {known[0]}" if known else "The log has no batch"
        raise errors.InvalidInput(
            f"the tables can't be read as of batch {batch}",
            hint=f"{logged}; --keep-log and --keep-files determine how long one is readable",
        )
    return found


def landed_selection(lake: Lake) -> Selection | None:
    """Return which part of the bucket is landed in a lake; None if unknown."""
    if lake.state.selection is not None:
        return lake.state.selection
    path = f"{OWN_FOLDER}/{_SELECTION}"
    try:
        held = json.loads(lake.location.read(path))
        return Selection.of_note(held)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise errors.InvalidInput(
            f"{path} in {lake.location.uri} can't be read: {error!r}", hint="Remove it if the options have not changed"
        ) from error


# --- work that any process can do -------------------------------------------------------------------------------------
#
# A task is pickled and sent to where it runs; its result is sent back. It only writes files that no commit names, so
# running it twice, or abandoning it half-way, does no harm. `headwater.landing.tasks` has a runner with threads, and
# `headwater.spark.executors` one that runs a Spark job.


class Task(Protocol):
    """A piece of work."""

    def run(self) -> Any: ...


Runner = Callable[[Sequence[Any]], list[Any]]
"""Runs tasks, locally or elsewhere, and returns their results in order."""


def run_here(tasks: Sequence[Task]) -> list[Any]:
    """Run the tasks in this process, one after another."""
    return [task.run() for task in tasks]


# A task's outcome is a value: errors travel the same way as results, whatever transports them. An error raised in a
# Spark worker would reach the driver as text in a Java error, and Spark would log hundreds of lines of traceback. As a
# value it keeps its class and its sentence, through Py4J and through Spark Connect.
#
# If one task of a batch fails, the whole batch is run again. So the files of all its tasks are removed: on a full disk
# they would take the room that was made for the next attempt.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """The result of a task, or the error with which it failed."""

    result: Any = None
    failure: errors.HeadwaterError | None = None
    outputs: tuple[str, ...] = ()
    """The files that it has written on a local disk."""
    unrecorded: telemetry.Unrecorded | None = None
    """Its span, if the process that ran it does not record spans."""


def run_task(task: Task, parent: str | None = None) -> TaskOutcome:
    """Run a task. Converts any error to one of ours. `parent` is the caller's `traceparent`."""
    if parent is None:
        return _run(task)
    name, about = "headwater.task", {"headwater.task": type(task).__name__, "headwater.host": socket.gethostname()}
    with telemetry.span(name, about, parent=parent) as span:
        began_ns = time.time_ns()
        outcome = _run(task)
        if outcome.failure is not None:
            span.fail(outcome.failure)
        if span.is_recording:
            return outcome
    return replace(outcome, unrecorded=telemetry.Unrecorded(name=name, attributes=about, began_ns=began_ns))


def _run(task: Task) -> TaskOutcome:
    with noting_outputs() as outputs:
        try:
            return TaskOutcome(result=task.run(), outputs=tuple(outputs))
        except errors.HeadwaterError as error:
            failure = error
        except Exception as error:
            # The error's sentence has the cause; the traceback is for the worker's log.
            traceback.print_exc()
            failure = lake_error(error, "the tables")
    remove_outputs(outputs)
    # Tracebacks would keep alive what the task held, such as open files.
    failure.__cause__ = failure.__context__ = None
    return TaskOutcome(failure=failure.with_traceback(None))


def results(outcomes: Iterable[TaskOutcome]) -> list[Any]:
    """Return the results of all tasks. If one has failed, remove what the others have written, and raise its error."""
    outcomes = list(outcomes)
    for outcome in outcomes:
        if outcome.unrecorded is not None:
            outcome.unrecorded.record(outcome.failure)
    for failed in outcomes:
        if failed.failure is not None:
            for outcome in outcomes:
                remove_outputs(outcome.outputs)
            raise failed.failure
    return [outcome.result for outcome in outcomes]


def remove_outputs(paths: Iterable[str]) -> None:
    """Remove the files of a task whose result is not used."""
    for path in paths:
        # Vacuum later removes what can't be removed now. An open file takes up its space until it is truncated.
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
            os.unlink(path)
