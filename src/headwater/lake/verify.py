"""Compare a lake with its bucket: every document that the tables have reached must be equal. Newer ones are pending.

The tables are opened once, each at its newest version. Then the bucket is read. Changes written in the meantime lie
beyond the offsets of the tables, so they are counted and not judged. There is one task for each group of vbuckets
(`verify_group`), which can run in any process: this one, or the executors of Spark. `headwater verify` and
`headwater.spark.verify` call `compare`. It writes nothing.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.client.blocking_bucket import Surveyor, look_at_bucket
from headwater.client.blocking_client import Client
from headwater.client.changes import split_keys
from headwater.client.collection_names import CollectionNames
from headwater.client.offsets import Offsets
from headwater.client.read_options import End, ReadOptions, Snapshots
from headwater.client.settings import ClientSettings
from headwater.client.survey import VBucketStatus
from headwater.errors import InvalidInput, UnknownCollection, UnknownScope
from headwater.lake.chosen_rows import ChosenRows, Transform
from headwater.lake.collection_tables import CollectionTables, MergedTable
from headwater.lake.data_files import DataFile
from headwater.lake.lake import Lake, Runner, landed_selection, run_here
from headwater.lake.layout import GROUP, LakeFacts, TableKind, changes_schema
from headwater.lake.location import Location
from headwater.lake.table_state import Selection, TableState
from headwater.lake.verify_changes import ChangesRecord, LoggedBatches
from headwater.lake.verify_group import (
    CollectionCheck,
    Counts,
    GroupCheck,
    GroupReport,
    TableCheck,
    judge_group,
    scan_changes,
)
from headwater.lake.verify_hashes import int64s
from headwater.lake.verify_judging import SEQNO_BITS, BucketReading, Standing, StreamRolledBack
from headwater.lake.verify_scan import (
    NOT_NAMED,
    OF_FILES,
    UNREADABLE_LOG,
    Finding,
    FindingKind,
    Findings,
    TableScan,
    damaged_logs,
    table_label,
)
from headwater.options import MIB
from headwater.phrases import counted
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset

ATTEMPTS_MAX = 5
"""Judge a group at most this often, if the bucket loses a part of its history or a collection in the meantime."""
AGENT = "headwater-verify"
"""Name of the connection, as nodes and Spark show it."""
_BUFFER_BYTES = 4 * MIB
"""How much the server may send ahead. Hashing keeps up with it."""
_JUDGED_CHANGES = 128 * 1024
"""How many changes of the bucket a task judges, unless a table has smaller parts: their hashes take 8 MB."""
MAKING_S_MAX = 60.0
"""How long a table may be missing after its first changes. Creating tables takes far less."""
LOG_ENTRIES_MAX = 64
"""Read at most this many commits of `changes`: one takes two milliseconds, and more in an object store."""
NOWHERE = StreamOffset()
_EPOCH = datetime.fromtimestamp(0, UTC)

Statuses = Mapping[VBucketId, VBucketStatus]
IsRolledBack = Callable[[VBucketId, StreamOffset], bool]
"""Whether a failover took back what a table at this offset holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How far tables may be behind the bucket."""

    pending_max: int | None = None
    age_s_max: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionVerdict:
    name: str
    landed: int
    """Documents that are equal in the bucket and in the table of documents."""
    pending: int
    """Changes in the bucket that are newer than the table of documents."""
    differing: int
    """Documents that are wrong in some table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result of comparing a bucket with its tables."""

    collections: tuple[CollectionVerdict, ...]
    findings: tuple[Finding, ...] = ()
    """The first findings of each kind and table."""
    counts: Mapping[tuple[FindingKind, str], int] = field(default_factory=dict)
    """The number of findings of each kind and table."""
    rolled_back: tuple[int, ...] = ()
    """Vbuckets in which a table holds changes that a failover took back."""
    places: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """By table: the vbuckets with wrong or missing rows."""
    waiting_s: float | None = None
    """How long the oldest pending change has waited, by the clock of its server; None if none has a time."""
    limits: Limits = field(default_factory=lambda: Limits())

    @property
    def is_equal(self) -> bool:
        """Whether everything that the tables have reached is equal to the bucket."""
        return not self.counts

    @property
    def is_behind(self) -> bool:
        """Whether more changes are pending than the limits permit, or for longer."""
        return bool(self._behind)

    @property
    def _behind(self) -> list[str]:
        found = []
        if self.limits.pending_max is not None and self.pending > self.limits.pending_max:
            found.append(_are(self.pending, "newer change", f"pending, and at most {self.limits.pending_max:,} may be"))
        if self.limits.age_s_max is not None and self.pending and (self.waiting_s or 0.0) > self.limits.age_s_max:
            found.append(f"the oldest has waited for {self.waiting_s:,.0f} s, and may for {self.limits.age_s_max:g} s")
        return found

    @property
    def landed(self) -> int:
        return sum(one.landed for one in self.collections)

    @property
    def pending(self) -> int:
        return sum(one.pending for one in self.collections)

    @property
    def differing(self) -> int:
        return sum(one.differing for one in self.collections)

    def count(self, *kinds: FindingKind) -> int:
        return sum(count for (kind, _), count in self.counts.items() if kind in kinds)

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        pending = f"; {_are(self.pending, 'newer change', 'pending')}" if self.pending else ""
        if self.is_behind:
            pending = f"; behind: {', '.join(self._behind)}"
        if self.is_equal:
            where = counted(len(self.collections), "collection")
            if self.is_behind:
                landed = counted(self.landed, "document")
                return f"Behind: {', '.join(self._behind)}; {landed} in {where} are equal."
            return f"Equal: {counted(self.landed, 'document')} in {where}{pending}."
        faults = []
        if self.differing:
            faults.append(f"{counted(self.differing, 'document')} {'differs' if self.differing == 1 else 'differ'}")
        for kind in _OF_FILES:
            if count := self.count(kind):
                state, _, noun = kind.partition(" ")
                faults.append(_are(count, noun, state))
        if count := self.count(FindingKind.STATISTICS):
            faults.append(f"the statistics in the logs are wrong in {counted(count, 'place')}")
        if self.count(FindingKind.NEVER_LANDED):
            faults.append("no landing has succeeded yet: see why it fails, and land again")
        if self.rolled_back:
            where = counted(len(self.rolled_back), "vbucket")
            faults.append(f"a failover took back changes of {where} that the tables hold: land again")
        return f"Not equal: {', '.join(faults) or counted(sum(self.counts.values()), 'fault')}{pending}."


_OF_FILES = (
    FindingKind.DAMAGED_FILE,
    FindingKind.MISSING_FILE,
    FindingKind.MISSING_TABLE,
    FindingKind.DAMAGED_LOG,
)


def _are(count: int, noun: str, state: str) -> str:
    return f"{counted(count, noun)} {'is' if count == 1 else 'are'} {state}"


# --- on the driver ----------------------------------------------------------------------------------------------------


def compare(
    settings: ClientSettings,
    into: str | Location,
    *,
    scopes: Iterable[str] = (),
    collections: Iterable[str] = (),
    transform: Transform | None = None,
    limits: Limits | None = None,
    run: Runner = run_here,
    by_group: bool = False,
) -> Verification:
    """Compare a bucket with the tables in a directory.

    Args:
        settings: How to reach the bucket.
        into: The directory or the prefix in an object store that was landed into.
        scopes: Compare only these scopes. With neither scopes nor collections, compare everything that was landed.
        collections: Compare only these collections.
        transform: The transform of the landing: the tables must hold what it makes of the bucket.
        limits: How far the tables may be behind.
        run: Runs the tasks.
        by_group: Judge each group of the lake apart, also for small tables. That takes longer, and locates faults
            more exactly.

    Returns:
        What is equal, pending and wrong.

    Raises:
        InvalidInput: There are no tables, or they were landed with another transform.
        LakeOfOtherBucket: The tables hold another bucket.
    """
    location = Location.of(into)
    with Surveyor(settings) as surveyor:
        try:
            lake = Lake.open(location, bucket_uuid=surveyor.cluster_map.uuid, bucket_name=settings.bucket_label)
        except UNREADABLE_LOG:
            findings = damaged_logs(location)
            if not findings.counts:
                raise
            return Verification(collections=(), findings=findings.first(), counts=dict(findings.counts))
        if lake is None:
            raise InvalidInput(
                f"{location.uri} does not contain the tables of a landing", hint="Give the directory of a landing"
            )
        lake.check_transform(None if transform is None else transform.name)
        selection = Selection(scopes=tuple(scopes), collections=tuple(collections))
        statuses = surveyor.survey()
        changes = sum(status.last_seqno for status in statuses.values())
        facts = lake.facts if by_group else judged_facts(lake, changes=changes)
        driver = _Driver(settings, lake, facts, selection, landed_selection(lake) or Selection(), transform)
        reports: dict[int, GroupReport] = {}
        for attempt in range(ATTEMPTS_MAX):
            groups = [group for group in range(facts.groups) if group not in reports]
            plan = driver.plan(groups, statuses, is_last=attempt == ATTEMPTS_MAX - 1)
            found = zip(groups, run(plan), strict=True)
            reports |= {group: report for group, report in found if report is not None}
            before, statuses = statuses, surveyor.survey()
            for group in driver.groups_rolled_back(before, statuses) if attempt < ATTEMPTS_MAX - 1 else ():
                reports.pop(group, None)
            if len(reports) == facts.groups:
                break
        return replace(driver.verdict(reports, statuses), limits=limits or Limits())


def judged_facts(lake: Lake, *, changes: int) -> LakeFacts:
    """Return the facts of a lake with the number of groups to judge by, given the number of changes in the bucket.

    A file of a table with fewer groups than the lake has rows of several groups, and each task reads the whole file. So
    the lake is judged by as few groups as its tables have, as long as a task does not hold too many rows.
    """
    facts, tables = lake.facts, [table for tables in lake.tables.values() for table in tables.there]
    if any(len({*table.merged.values()}) > 1 for table in tables):
        return facts
    least = math.lcm(*(min(table.groups, facts.groups) for table in tables))
    rows = max(changes, sum(file.rows for file in lake.changes.files()))
    return replace(facts, groups=facts.groups_of_table(rows, least=least, each=_JUDGED_CHANGES))


class _Driver:
    """Makes the tasks, from one version of every table."""

    def __init__(
        self,
        settings: ClientSettings,
        lake: Lake,
        facts: LakeFacts,
        asked: Selection,
        landed: Selection,
        transform: Transform | None,
    ) -> None:
        self._settings, self._lake, self._facts = settings, lake, facts
        self._chosen = ChosenRows.of(landed, transform)
        self._selection = landed if asked.is_of_all else asked
        # A collection with a table existed, and may have been dropped since.
        self._known = Selection(
            scopes=(*landed.scopes, *(name.partition(".")[0] for name in lake.tables)),
            collections=(*landed.collections, *lake.tables),
        )
        self._checks = LakeChecks(lake, facts=facts)

    def plan(self, groups: Iterable[int], statuses: Statuses, *, is_last: bool) -> list[VerifyTask]:
        """Return one task for each group, for the current collections of the bucket."""
        manifest = look_at_bucket(self._settings).manifest
        left = what_is_left(manifest, self._selection, self._known)
        self._checks = LakeChecks(self._lake, self._chosen_tables(manifest, left), facts=self._facts)
        live_ids = frozenset(int(collection.id) for _, collection in manifest.collections())
        return [
            VerifyTask(
                check=self._checks.of_group(
                    group,
                    lambda vbucket, offset: _is_rolled_back(offset, statuses[vbucket]),
                    live_ids=live_ids,
                    failover_logs={vbucket: status.failover_log for vbucket, status in statuses.items()},
                    is_selection=not self._selection.is_of_all,
                ),
                settings=self._settings,
                left=left,
                chosen=self._chosen,
                is_last=is_last,
            )
            for group in groups
        ]

    def _chosen_tables(self, manifest: Manifest, left: Selection | None) -> list[CollectionTables]:
        tables = [table for _, table in sorted(self._lake.tables.items())]
        if self._selection.is_of_all:
            return tables
        names = CollectionNames(manifest)
        chosen = left or Selection()
        # The user may give a collection by its id, but a dropped one only by the name that it had.
        ids = {int(id_) for id_ in names.ids_in(names.select(scopes=chosen.scopes, collections=chosen.collections))}
        return [
            table
            for table in tables
            if table.name in self._selection.collections
            or table.name.partition(".")[0] in self._selection.scopes
            or not ids.isdisjoint(table.ids)
        ]

    def _rolled_back(self, statuses: Statuses) -> Iterator[tuple[str, VBucketId, StreamOffset]]:
        """Yield the offsets of tables that a failover took back, by table and vbucket."""
        for label, offsets in self._checks.held().items():
            for vbucket, offset in sorted(offsets.offsets.items()):
                if _is_rolled_back(offset, statuses[vbucket]):
                    yield label, vbucket, offset

    def groups_rolled_back(self, before: Statuses, now: Statuses) -> set[int]:
        """Return the groups in which a failover has taken back changes that a table holds."""
        changed = {vbucket for vbucket, status in now.items() if status.failover_log != before[vbucket].failover_log}
        if not changed:
            return set()
        return {int(self._facts.group_of(vbucket)) for _, vbucket, _ in self._rolled_back(now) if vbucket in changed}

    def verdict(self, reports: Mapping[int, GroupReport], statuses: Statuses) -> Verification:
        found = verdict(self._checks, reports, [_rollback_pending(*it, statuses) for it in self._rolled_back(statuses)])
        rolled_back = {*found.rolled_back, *(int(vbucket) for _, vbucket, _ in self._rolled_back(statuses))}
        return replace(found, rolled_back=tuple(sorted(rolled_back)))


def verdict(checks: LakeChecks, reports: Mapping[int, GroupReport], rollbacks: Iterable[Finding] = ()) -> Verification:
    """Combine the reports of all groups with the rollbacks that wait to be landed."""
    counts: dict[str, Counts] = {}
    findings = checks.faults_of_logs()
    for group, report in sorted(reports.items()):
        findings.merge(report.findings)
        for label in {label for kind, label in report.findings.counts if kind in OF_FILES}:
            findings.locate(label, checks.vbuckets_of(group))
        for name, part in report.counts.items():
            counts.setdefault(name, Counts()).add(part)
    if all(kind not in OF_FILES for kind, label in findings.counts if label == TableKind.CHANGES):
        checks.count_changes(sum(report.change_rows for report in reports.values()), findings)
    checks.find_never_landed(counts, findings)
    for finding in rollbacks:
        findings.add(finding)
    since_us = min((it.pending_since_us for it in counts.values() if it.pending_since_us is not None), default=None)
    return Verification(
        collections=tuple(
            CollectionVerdict(name=name, landed=it.landed, pending=it.pending, differing=it.differing)
            for name, it in sorted(counts.items())
        ),
        findings=findings.first(),
        counts={kind: count for kind, count in findings.counts.items() if count},
        rolled_back=tuple(sorted(set[int]().union(*(report.rolled_back for report in reports.values())))),
        places={label: frozenset(vbuckets) for label, vbuckets in findings.vbuckets.items()},
        waiting_s=None if since_us is None else max(0.0, time.time() - since_us / 1_000_000),
    )


def _shared_seqno(offset: StreamOffset, status: VBucketStatus) -> Seqno | None:
    """Return the last seqno of a table's history that the bucket still has; None if it no longer knows that branch."""
    return status.failover_log.branch_end(offset.vbuuid, high_seqno=status.last_seqno)


def _is_rolled_back(offset: StreamOffset, status: VBucketStatus) -> bool:
    shared = _shared_seqno(offset, status)
    return offset.seqno > 0 and (shared is None or shared < offset.seqno)


def _rollback_pending(label: str, vbucket: VBucketId, offset: StreamOffset, statuses: Statuses) -> Finding:
    shared = _shared_seqno(offset, statuses[vbucket])
    lost = "a history that the bucket no longer knows" if shared is None else f"changes above seqno {shared}"
    return Finding(
        kind=FindingKind.ROLLBACK_PENDING,
        table=label,
        what=f"vbucket {vbucket}",
        says=f"was taken back by a failover: the table is at seqno {offset.seqno}, with {lost}; land again",
    )


def what_is_left(manifest: Manifest, selection: Selection, known: Selection) -> Selection | None:
    """Return what of a selection the bucket still has; None for nothing. Raises for names that never existed."""
    if selection.is_of_all:
        return selection
    now = CollectionNames(manifest)

    def is_there(look: Callable[[str], object], name: str, names: tuple[str, ...]) -> bool:
        try:
            look(name)
        except (UnknownScope, UnknownCollection):
            if name not in names:
                raise
            return False
        return True

    left = Selection(
        scopes=tuple(name for name in selection.scopes if is_there(now.find_scope, name, known.scopes)),
        collections=tuple(
            name for name in selection.collections if is_there(now.find_collection, name, known.collections)
        ),
    )
    return None if left.is_of_all else left


class LakeChecks:
    """Makes the checks of a lake, or of some of its tables: one for each group, and those that need only the logs."""

    def __init__(
        self, lake: Lake, tables: Sequence[CollectionTables] | None = None, *, facts: LakeFacts | None = None
    ) -> None:
        """`facts` are those of the lake, perhaps with fewer groups."""
        self._lake, self.facts = lake, facts or lake.facts
        self._tables = [table for _, table in sorted(lake.tables.items())] if tables is None else tables
        self._change_files = lake.changes.files()
        self._states: dict[int, TableState] = {}
        """By batch, as far as the log is read back: what `changes` held after it."""
        self._landed_us: dict[int, tuple[int, int]] = {}
        for entry in islice(lake.changes.entries(), LOG_ENTRIES_MAX):
            if entry.state is not None:
                if entry.state.rollbacks is None:
                    # An earlier version has written it, and recorded less.
                    break
                self._states.setdefault(entry.state.batch, entry.state)
                if landed := entry.landed_at(entry.state.batch):
                    low, high = (int((it - _EPOCH) / timedelta(microseconds=1)) for it in (min(landed), max(landed)))
                    self._landed_us[entry.state.batch] = low, high
        self._owners: dict[int, set[str]] = {}
        """By group: the files of `changes` whose statistics are judged with it."""
        edges = [GroupCheck.edges_of(self.facts, group) for group in range(self.facts.groups)]
        for file in self._change_files:
            readers = (group for group, (low, high) in enumerate(edges) if file.may_hold("vbucket", low=low, high=high))
            self._owners.setdefault(next(readers, 0), set()).add(file.path)

    def vbuckets_of(self, group: int) -> range:
        return self.facts.vbuckets_of(group)

    def held(self) -> dict[str, Offsets]:
        """Return the offsets of each table that is compared with the bucket."""
        held = {table_label(TableKind.CHANGES): self._lake.held_offsets()}
        return {**held, **{label: merged.offsets for label, merged in self._merged_tables()}}

    def _merged_tables(self) -> Iterator[tuple[str, MergedTable]]:
        for table in self._tables:
            for kind, merged in ((TableKind.DOCUMENTS, table.documents), (TableKind.HISTORY, table.history)):
                if merged is not None:
                    yield table_label(kind, table.name), merged

    # --- the logs compared with each other ----------------------------------------------------------------------------

    def faults_of_logs(self) -> Findings:
        """Find tables that are ahead of `changes`, which they are made from, or whose offsets differ from it."""
        findings, last = Findings(), self._lake.last_batch
        kind, what = FindingKind.DAMAGED_LOG, "_delta_log"
        further = [label for label, merged in self._merged_tables() if max(merged.merged.values()) > last]
        if further:
            says = f"ends with batch {last}, and {further[0]} is made of later ones"
            findings.add(Finding(kind=kind, table=table_label(TableKind.CHANGES), what=what, says=says))
        for label, merged in self._merged_tables():
            state = self._states.get(merged.state.batch)
            if state is not None and state.offsets != merged.offsets:
                says = f"says other offsets than `{TableKind.CHANGES}` had after batch {state.batch}"
                findings.add(Finding(kind=kind, table=label, what=what, says=says))
                findings.locate(label, range(self.facts.vbuckets))
        return findings

    def count_changes(self, rows: int, findings: Findings) -> None:
        """Check that `changes` has as many rows as were landed, unless some were trimmed."""
        totals = self._lake.state.totals
        if totals is None or self._lake.trimmed_batch >= 0 or totals.rows == rows:
            return
        findings.add(
            Finding(
                kind=FindingKind.MISSING if rows < totals.rows else FindingKind.EXTRA,
                table=table_label(TableKind.CHANGES),
                what=counted(abs(totals.rows - rows), "row"),
                says=f"too {'few' if rows < totals.rows else 'many'}: {totals.rows:,} were landed",
            )
        )

    def find_never_landed(self, counts: Mapping[str, Counts], findings: Findings) -> None:
        """Find tables into which nothing was ever landed although the bucket has changes for them."""
        waiting = {name for name, it in counts.items() if it.pending}
        labels = [table_label(TableKind.CHANGES)] if self._lake.last_batch < 0 and waiting else []
        for table in self._tables:
            documents = table.documents
            if documents is None or documents.state.batch >= 0 or table.name not in waiting:
                continue
            if min(documents.merged.values()) < self._made_upto():
                labels.append(table_label(TableKind.DOCUMENTS, table.name))
        for label in labels:
            says = "has never been landed into, though the bucket has changes for it: see why the landing fails"
            findings.add(Finding(kind=FindingKind.NEVER_LANDED, table=label, what="the table", says=says))

    def of_group(
        self,
        group: int,
        is_rolled_back: IsRolledBack,
        *,
        live_ids: frozenset[int] | None = None,
        failover_logs: Mapping[VBucketId, FailoverLog] | None = None,
        is_selection: bool = False,
    ) -> GroupCheck:
        lake = self._lake
        low, high = GroupCheck.edges_of(self.facts, group)
        owned = self._owners.get(group, set())
        return GroupCheck(
            facts=self.facts,
            group=group,
            changes=TableScan(
                lake.changes.location,
                table_label(TableKind.CHANGES),
                changes_schema(xattrs=self.facts.xattrs),
                [it for it in self._change_files if it.path in owned or it.may_hold("vbucket", low=low, high=high)],
                owned=frozenset(owned),
            ),
            collections=tuple(self._collection(table, group, is_rolled_back) for table in self._tables),
            made_upto=self._made_upto(),
            record=self._record(group, is_rolled_back, live_ids, failover_logs or {}),
            is_selection=is_selection,
        )

    def _record(
        self,
        group: int,
        is_rolled_back: IsRolledBack,
        live_ids: frozenset[int] | None,
        failover_logs: Mapping[VBucketId, FailoverLog],
    ) -> ChangesRecord:
        lake = self._lake
        vbuckets = [VBucketId(vbucket) for vbucket in self.facts.vbuckets_of(group)]
        ends = [(lake.held_offsets().get(vbucket) or NOWHERE).snapshot_end for vbucket in vbuckets]
        return ChangesRecord(
            names=lake.state.collections,
            live_ids=live_ids,
            standing=self._standing(lake.held_offsets(), group, is_rolled_back),
            snapshot_ends=_signed(ends),
            last_batch=lake.last_batch,
            trimmed_batch=lake.trimmed_batch,
            log=self._logged_batches(vbuckets),
            branches={
                int(vbucket): frozenset(_signed([entry.vbuuid for entry in log.entries]).tolist())
                for vbucket in vbuckets
                if (log := failover_logs.get(vbucket)) is not None and log.entries[-1].seqno == 0
            },
        )

    def _logged_batches(self, vbuckets: Sequence[VBucketId]) -> LoggedBatches:
        batches = sorted(self._states)
        states = [self._states[batch] for batch in batches]
        rolled = {vbucket for state in states[1:] for vbucket in state.rollbacks or ()}
        seqnos = [[(state.offsets.get(vbucket) or NOWHERE).seqno for vbucket in vbuckets] for state in states]
        return LoggedBatches(
            numbers=np.array(batches, dtype=np.int64),
            seqnos=_signed(seqnos).reshape(len(batches), len(vbuckets)),
            is_steady=np.array([vbucket not in rolled for vbucket in vbuckets], dtype=np.bool_),
            landed_us=self._landed_us,
        )

    def _made_upto(self) -> int:
        """Return the last batch whose tables must exist. A table is created right after the batch with its first
        change; while that may still be going on, its absence is no fault."""
        newest_s = max((file.modified_ms for file in self._change_files), default=0) / 1000
        return self._lake.last_batch - (1 if time.time() - newest_s < MAKING_S_MAX else 0)

    def _collection(self, table: CollectionTables, group: int, is_rolled_back: IsRolledBack) -> CollectionCheck:
        def check(merged: MergedTable | None) -> TableCheck | None:
            if merged is None:
                return None
            files, odd = self._files_of(merged, group)
            around = self._around(merged, group)
            is_first = around.start == self.facts.vbuckets_of(group).start
            return TableCheck(
                location=merged.log.location,
                files=(*files, *odd),
                around=around,
                owned=None if is_first else frozenset(),
                odd=frozenset(file.path for file in odd),
                standing=self._standing(merged.offsets, group, is_rolled_back),
                merged=merged.merged_at(group, of=self.facts.groups),
                groups=merged.groups,
            )

        is_unparsed = table.documents is not None and table.documents.has_to_be_rebuilt
        return CollectionCheck(
            name=table.name,
            ids=frozenset(table.ids),
            columns=None if is_unparsed else table.columns,
            history_columns=None if is_unparsed else table.history_columns,
            has_all_typed=table.has_all_typed,
            is_unparsed=is_unparsed,
            documents=check(table.documents),
            history=check(table.history),
            rejects=check(table.rejects),
        )

    def _files_of(self, table: MergedTable, group: int) -> tuple[tuple[DataFile, ...], tuple[DataFile, ...]]:
        """Return the files of a group; for the first group also those that another program has put into groups that the
        table does not have."""
        found = table.files_of(group, of=self.facts.groups)
        groups = {*map(str, range(table.groups))} if group == 0 else None
        odd = (file for file in table.log.files() if groups and dict(file.partition)[GROUP.name] not in groups)
        return found, tuple(odd)

    def _around(self, table: MergedTable, group: int) -> range:
        """Return the vbuckets whose rows the files of a group have: those of several groups, if the table has fewer."""
        facts, groups = self.facts, min(table.groups, self.facts.groups)
        return replace(facts, groups=groups).vbuckets_of(group * groups // facts.groups)

    def _standing(self, held: Offsets, group: int, is_rolled_back: IsRolledBack) -> Standing:
        vbuckets = [VBucketId(vbucket) for vbucket in self.facts.vbuckets_of(group)]
        offsets = [held.get(vbucket) or NOWHERE for vbucket in vbuckets]
        rolled = [is_rolled_back(vbucket, offset) for vbucket, offset in zip(vbuckets, offsets, strict=True)]
        seqnos = _signed([offset.seqno for offset in offsets])
        return Standing(seqnos=seqnos, is_rolled=np.array(rolled, dtype=np.bool_))


def _signed(numbers: Any) -> NDArray[np.int64]:
    """Convert to signed numbers, as tables have them."""
    return np.array(numbers, dtype=np.uint64).view(np.int64)


# --- in a task --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyTask:
    """Read a group of vbuckets from the bucket, and judge the tables by it."""

    check: GroupCheck
    settings: ClientSettings
    left: Selection | None
    """What of the bucket is read; None for nothing, if all that was landed has been dropped."""
    chosen: ChosenRows
    is_last: bool = False
    """Whether the task will not be retried."""

    def run(self) -> GroupReport | None:
        """Returns None if a collection was dropped since the task was created: then it must be created again."""
        try:
            check, reading = self._read()
            report = judge_group(check, reading, scan_changes(check))
            self._name_missing(report.findings)
            return report
        except (UnknownCollection, UnknownScope):
            # The server no longer accepts a filter with the collection.
            if self.is_last:
                raise
            return None

    def _read(self) -> tuple[GroupCheck, BucketReading]:
        """Read the bucket until no failover interrupts. Leaves out vbuckets that do not settle."""
        unsettled: frozenset[int] = frozenset()
        for attempt in itertools.count(1):
            reading = self.check.reading()
            try:
                self._read_into(reading, frozenset(map(VBucketId, self.check.vbuckets)) - unsettled)
                break
            except StreamRolledBack as error:
                if attempt >= ATTEMPTS_MAX:
                    unsettled |= error.vbuckets
        return self.check.leaving_out(unsettled), reading

    def _read_into(self, reading: BucketReading, vbuckets: frozenset[VBucketId]) -> None:
        if self.left is None or not vbuckets:
            return
        options = self._options(vbuckets=vbuckets, end=End.NOW, xattrs=self.check.facts.xattrs)
        with Client(self.settings) as client:
            for batch in map(self.chosen.function(), client.read(options)):
                reading.add(batch)

    def _options(self, **options: Any) -> ReadOptions:
        assert self.left is not None, "there is nothing to read"
        return ReadOptions.make(
            name=AGENT,
            # Everything is read to its end, so nothing has to be held back until a snapshot is complete.
            snapshots=Snapshots.AS_THEY_COME,
            buffer_bytes=_BUFFER_BYTES,
            batch_bytes=_BUFFER_BYTES // 2,
            scopes=self.left.scopes,
            collections=self.left.collections,
            **options,
        )

    def _name_missing(self, findings: Findings) -> None:
        """Look up the keys of documents that a table lacks. A change that has been superseded gets no name."""
        kept = [one for found in findings.kept.values() for one in found if one.what == NOT_NAMED]
        changes = {(VBucketId(one.vbucket), Seqno(one.seqno)) for one in kept if one.vbucket is not None and one.seqno}
        if not changes or self.left is None:
            return
        ends = {vbucket: max(seqno for at, seqno in changes if at == vbucket) for vbucket, _ in changes}
        wanted = np.array([vbucket << SEQNO_BITS | seqno for vbucket, seqno in changes], dtype=np.int64)
        keys: dict[tuple[int, int], str] = {}
        with Client(self.settings) as client:
            for batch in client.read(self._options(vbuckets=frozenset(ends), end=ends, no_value=True)):
                vbuckets, seqnos = int64s(batch, "vbucket"), int64s(batch, "seqno")
                chosen = np.flatnonzero(np.isin(vbuckets << SEQNO_BITS | seqnos, wanted))
                shown, _ = split_keys(batch.column("key").take(pa.array(chosen)))
                found = zip(vbuckets[chosen].tolist(), seqnos[chosen].tolist(), strict=True)
                keys |= {at: key for at, key in zip(found, shown.to_pylist(), strict=True) if key is not None}
        findings.name(keys)
