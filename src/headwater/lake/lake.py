"""The lake as its driver sees it: one object that knows all tables, and what they hold.

A batch goes this way:

    batch = begin_batch(lake)                                  # begins at `lake.held_offsets()`
    reports = …                                                # executors: batch.writer over the rows
    commit_batch(lake, batch, reports, run)                    # now `changes` has it
    merge(lake, run)                                           # now the documents have it

These functions are in `commits`. The tables are the only memory: after a crash anywhere the next batch begins where
they end, and what a commit has not named was never there. So a `Lake` must never know more than the logs say.
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
"""Tables may go on while they are opened, but hardly each time that they are."""
_BOUNDARY_COMMITS = 64
"""How many commits of `changes` are looked through for boundaries: a failover takes back seconds, not hours."""
BOUNDARIES_MAX = 16
"""Of each vbucket, how many of them are kept."""
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
    """By table, and for `*`: what is asked for of columns that are inferred. A table remembers it; where it changes,
    all documents of the table are parsed again."""
    cluster_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By table, or for `*`: the columns that documents are sorted by before their keys. Applies to files that are
    written from now on. A table that is not named keeps its order."""
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
        """What is asked for of the typed columns of a table; None where it may have any."""
        asked = self.columns.get(name, self.columns.get(EVERY_COLLECTION))
        return ColumnMode.NONE if asked is None and not self.infer else asked

    def cluster_by_of(self, name: str) -> tuple[str, ...] | None:
        """What a table is to be clustered by; None where it may stay as it is."""
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
        """Who commits here: another landing has another one."""
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
        """The lake in a directory, or None where there is none.

        `step` is called before each step that a crash could come between, with its name. With `as_of_batch`, all tables
        are shown as they were when that batch was the last one, for reading. A table that can't be opened is put on the
        list `aside`, where one is given; without it, its error is raised.
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
        """The lake in a directory; one is made where there is none, for a selection of the bucket or for all of it."""
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
        """Raise unless this is the transform that all changes went through; None for none."""
        if self.facts.transform != name:
            had = "no transform" if self.facts.transform is None else f"the transform {self.facts.transform}"
            raise errors.InvalidInput(
                f"the tables in {self.location.uri} were landed with {had}, not with {name or 'none'}",
                hint="Give the same, or land into another directory",
            )

    def _load(self) -> None:
        """Open all tables. A reader sees `changes` at least as new as what is made from it, so `changes` comes last."""
        opened: set[str] = set()
        stale: list[str] = []
        for _ in range(_OPENING_ATTEMPTS):
            # Earlier versions have the number of the batch in the transaction only.
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
        """Set a table aside where something fails inside that is its own fault. All others go on."""
        try:
            yield
        except BaseException as error:
            fault = own_fault(error)
            if fault is None:
                raise
            # In a lake that is gone anything may fail first.
            self.changes.check_there()
            self.set_aside(name, fault)

    def set_aside(self, name: str, fault: errors.HeadwaterError) -> None:
        """Do nothing with a table for a while. What it misses stays in `changes`."""
        self.aside.put(name, fault)
        if self._pending is not None:
            self._pending.forget(name)

    def try_set_aside(self) -> bool:
        """Let tables that were set aside take part again, once they have been left alone for long enough. Returns
        whether there were any."""
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
        """The last batch that was trimmed; -1 where none was."""
        trimmed = self.changes.transaction(TRIMMED_TRANSACTION)
        return NOT_MERGED if trimmed is None else trimmed

    def refresh(self) -> None:
        """Look again at everything if the log of `changes` has gone on without us.

        Another tool may have tidied the table up, or a commit of ours was done though it seemed to fail. Raises
        `LakeTaken` where another landing has landed a batch.
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
        """Whether some tables have been cut into more groups, and the lake has not been yet."""
        return any(table.groups > self.facts.groups for it in self.in_service for table in it.there)

    def set_groups(self, groups: int) -> None:
        """Say that all tables have so many groups."""
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
        """Whether the columns of a table that is there are to be inferred from now on, or by other rules."""
        if table.documents is None:
            return False
        asked = rules_of(table.name, self.settings.rules)
        if table.is_inferred:
            return table.rules.with_asked(asked).text != table.rules.text
        return self.settings.columns_of(table.name) == ColumnMode.INFER

    # --- what the tables hold -----------------------------------------------------------------------------------------

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
    def boundaries(self) -> Mapping[VBucketId, Sequence[Seqno]]:
        """By vbucket, seqnos at which the tables held all there was, rising: what a rollback can go back to.

        They are the offsets of earlier commits. What a rollback has given up is no boundary, so every commit names
        its rollbacks. Commits of versions that did not are where the search ends.
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
        """A commit has been made: its offsets are boundaries, and what its rollbacks gave up are none."""
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
        """What waits to be merged."""
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
        """Merges mark superseded documents in all tables."""
        documents = [table.documents for table in self.in_service]
        return all(table is not None and table.is_merged_on_read for table in documents)

    @property
    def merge_bytes(self) -> int:
        """What a merge of all that is pending is expected to write: as much as the last one of each table did."""
        return sum(self.tables[name].merge_bytes for name in self.pending.names)

    def documents_as_of_s(self, name: str) -> float | None:
        """Everything that was written to the bucket before this time is in the table of a collection; None where that
        is not known. For a table that has something pending."""
        documents = self.tables[name].documents
        of_table = None if documents is None else documents.state.as_of_s
        return self.pending.since_s.get(name, of_table)

    @contextmanager
    def counting_pending(self) -> Iterator[Pending]:
        """What waits to be merged, to be brought up to date. Should anything fail meanwhile, it is counted again."""
        pending, self._pending = self.pending, None
        yield pending
        for table in self.aside.tables:
            if table.name in self.aside:
                pending.forget(table.name)
        self._pending = pending

    def planner(self) -> Planner:
        """Plans merges of what the tables hold now."""
        return Planner(
            location=self.location,
            facts=self.facts,
            rules=self.settings.merging,
            change_files=self.changes.files(),
            upto_batch=self.last_batch,
        )

    def read_tasks(self, name: str) -> list[MergeTask]:
        """The work of reading a collection as it is now, one task a group, for `merged_rows` in any process."""
        planner, table = self.planner(), self.tables[name]
        return [
            planner.merge_task(
                group, of=table.groups, documents=(planner.documents_target(table, group),), with_whole=True
            )
            for group in range(table.groups)
        ]

    def documents_now(self, name: str) -> Iterator[pa.Table]:
        """The documents of a collection as they are now, whether merged or not, with the columns of their table."""
        for task in self.read_tasks(name):
            for rows in merged_rows(task):
                yield rows.append_column(GROUP, pa.repeat(pa.scalar(task.group, GROUP.type), rows.num_rows))

    def commit_changes(self, commit: TableCommit) -> None:
        """A commit to `changes`. What it says of the table holds from then on."""
        self.changes.commit(commit)
        self._note_boundaries(commit.state)
        self.state, self._seen_version = commit.state, self.changes.version
        self._know_collections()


def _changes_as_of(changes: DeltaLog, batch: int) -> DeltaLog:
    """`changes` as it was when this batch was the last one. What rollbacks have made void since then is not void."""
    found = None
    with contextlib.suppress(errors.LakeDamaged):  # The entry is there, and not all of those before it.
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
    """What of the bucket is landed in a lake; None where that is not known."""
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
# A task is pickled, carried to where it is run, and its result is carried back. It only writes files that no commit
# names yet, so it can be run twice, or be given up half-way, and nothing is harmed. `headwater.landing.tasks` has a
# runner with threads, and `headwater.spark.executors` one that runs a Spark job.


class Task(Protocol):
    """A piece of work."""

    def run(self) -> Any: ...


Runner = Callable[[Sequence[Any]], list[Any]]
"""Runs tasks, wherever that is, and gives their results in their order."""


def run_here(tasks: Sequence[Task]) -> list[Any]:
    """Run the tasks in this process, one after another."""
    return [task.run() for task in tasks]


# What came of a task is a value: an error goes the same way as a result, whatever carries them. An error that is raised
# in a worker of Spark reaches the driver as text in an error of Java, and Spark logs hundreds of lines of traceback. As
# a value it keeps its class and its sentence, through Py4J and through Spark Connect.
#
# A batch of which one task has failed is run again as a whole. So the files of all its tasks are removed: on a full
# disk they would take the room that was made for the next attempt.


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """A result, or what the task has failed with."""

    result: Any = None
    failure: errors.HeadwaterError | None = None
    outputs: tuple[str, ...] = ()
    """The files that it has written on a disk."""
    unrecorded: telemetry.Unrecorded | None = None
    """Its span, if the process that ran it records none."""


def run_task(task: Task, parent: str | None = None) -> TaskOutcome:
    """Run a task. Whatever it raises becomes an error of ours. `parent` is the `traceparent` of who wants it run."""
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
            # The sentence has the cause. Where it came from is for the log of the worker.
            traceback.print_exc()
            failure = lake_error(error, "the tables")
    remove_outputs(outputs)
    # Tracebacks keep what the task held, such as files that are open.
    failure.__cause__ = failure.__context__ = None
    return TaskOutcome(failure=failure.with_traceback(None))


def results(outcomes: Iterable[TaskOutcome]) -> list[Any]:
    """The results of all tasks. If one has failed, remove what the others have written, and raise its error."""
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
        # Vacuum removes later what can't be removed now. A file that is open takes its room until it is truncated.
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
            os.unlink(path)
