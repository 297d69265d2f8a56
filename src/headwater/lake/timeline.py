"""What has happened to a lake: batches, merges, rollbacks and upkeep, according to the logs of its tables.

Nothing is stored beside the tables, so the timeline is the same after a restart, and for a landing that has stopped or
runs elsewhere. A batch is a commit of `changes` with a new number. Comparing its state with that of the commit before
shows what a rollback was: where the vbucket was, where it went back to, and on which branch it is now.

`Timeline` reads only entries of the logs that are new since its last look. `lake_look` combines it with the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from headwater.lake.collection_tables import MERGED_TRANSACTION
from headwater.lake.delta_log import DeltaLog, LogEntry
from headwater.lake.lake import BATCH_TRANSACTION, Lake
from headwater.lake.layout import TableKind
from headwater.lake.table_state import TableState
from headwater.phrases import counted
from headwater.protocol.numbers import VBucketId

CHANGES_ENTRIES_MAX = 300
"""How many commits of `changes` are read: reading one takes two milliseconds."""
TABLE_ENTRIES_MAX = 60
TABLES_MAX = 64
"""How many commits of each table of documents are read, and of how many tables."""
EVENTS_MAX = 400
ROLLBACKS_MAX = 100
"""Rollbacks are rare, and what people look for, so batches do not push them out."""
ROLLED_BACK_SHOWN_MAX = 64
"""How many vbuckets a rollback lists; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEvent:
    """A batch was committed to `changes`."""

    time_s: float
    batch: int
    rows: int | None
    """None if an earlier version created the table, and did not count."""
    took_s: float | None
    """From its start to its commit."""
    kind: str = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketRollback:
    """A rollback of one vbucket."""

    vbucket: int
    from_seqno: int
    """The seqno that the tables had reached."""
    kept_seqno: int
    """Everything above it was undone. It is the newest boundary of the tables, which may be further back than what the
    bucket has lost: the rest is read again in the same batch."""
    reached_seqno: int | None
    """The seqno of the tables after that batch; None if the vbucket is read again from 0."""
    is_new_branch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackEvent:
    """A batch contained rollbacks, and its commit marked as void what they took back."""

    time_s: float
    batch: int
    vbuckets: int
    undone: int | None
    """Rows of `changes` that became void; None if an earlier version did not count them."""
    why: str
    parts: tuple[VBucketRollback, ...]
    """The first rollbacks, one per vbucket."""
    kind: str = "rollback"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeEvent:
    """Pending changes were merged into `documents`."""

    time_s: float
    batch: int
    """The last batch that was merged."""
    tables: tuple[str, ...]
    files: int
    written_bytes: int
    kind: str = "merge"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepEvent:
    """The same rows were moved to other files."""

    time_s: float
    table: str
    added: int
    removed: int
    kind: str = "upkeep"


Event = BatchEvent | RollbackEvent | MergeEvent | UpkeepEvent


@dataclass(slots=True)
class Timeline:
    """The newest events of a lake."""

    events: list[Event] = field(default_factory=list)
    """Newest first."""
    _seen: dict[str, int] = field(default_factory=dict)
    """By table: the newest version that was read."""

    def look(self, lake: Lake) -> None:
        """Add events up to the versions at which the tables are open."""
        logs = {
            table.documents.log: name for name, table in sorted(lake.tables.items())[:TABLES_MAX] if table.documents
        }
        versions = {log.location.uri: log.version for log in (lake.changes, *logs)}
        if any(version < self._seen.get(uri, -1) for uri, version in versions.items()):
            # The tables were restored to an earlier time, or replaced by others.
            self.events, self._seen = [], {}
        found = [*self.events]
        for entry, state, before in self._new(lake.changes, CHANGES_ENTRIES_MAX):
            found += _changes_events(entry, state, before)
        for log, name in logs.items():
            for entry, _, _ in self._new(log, TABLE_ENTRIES_MAX):
                found += _documents_events(entry, name)
        in_order = sorted(_joined(found), key=lambda event: -event.time_s)
        rollbacks = [event for event in in_order if isinstance(event, RollbackEvent)][:ROLLBACKS_MAX]
        others = [event for event in in_order if not isinstance(event, RollbackEvent)][:EVENTS_MAX]
        self.events = sorted([*rollbacks, *others], key=lambda event: -event.time_s)
        # Last, so that a failed look is repeated.
        self._seen |= versions

    def _new(self, log: DeltaLog, entries_max: int) -> Iterator[tuple[LogEntry, TableState, TableState]]:
        """Yield the commits since the last look, each with what the table held after and before it. Commits of other
        tools record neither, and change neither."""
        seen, version = self._seen.get(log.location.uri, -1), log.version
        after: tuple[LogEntry, TableState] | None = None
        for entry in islice(log.entries(), entries_max) if version > seen else ():
            if after is not None and entry.state is not None:
                yield *after, entry.state
            if entry.version <= seen and entry.state is not None:
                return
            after = after if entry.state is None else (entry, entry.state)


def _changes_events(entry: LogEntry, state: TableState, before: TableState) -> Iterator[Event]:
    # Earlier versions recorded the number of the batch only in the transaction.
    batch = _transaction(entry, BATCH_TRANSACTION)
    if batch is None:
        yield from _upkeep(entry, TableKind.CHANGES)
        return
    rows = None
    if state.totals is not None and before.totals is not None:
        rows = state.totals.rows - before.totals.rows
    # A batch begins at the landing time of its rows.
    began_s = [at.timestamp() for at in entry.landed_at(batch)]
    took_s = max(0.0, entry.time_ms / 1000 - min(began_s)) if began_s else None
    yield BatchEvent(time_s=entry.time_ms / 1000, batch=batch, rows=rows, took_s=took_s)
    if state.rollbacks:
        yield _rollback(entry, state, before)


def _transaction(entry: LogEntry, prefix: str) -> int | None:
    """Return the highest number in a commit's transactions with this prefix; None if it has none."""
    found = [int(one["version"]) for one in entry.actions("txn") if one["appId"].startswith(prefix)]
    return max(found, default=None)


def _rollback(entry: LogEntry, state: TableState, before: TableState) -> RollbackEvent:
    parts = []
    for vbucket, kept in sorted((state.rollbacks or {}).items()):
        was, now = before.offsets.get(VBucketId(vbucket)), state.offsets.get(VBucketId(vbucket))
        parts.append(
            VBucketRollback(
                vbucket=vbucket,
                from_seqno=kept if was is None else int(was.seqno),
                kept_seqno=kept,
                reached_seqno=None if now is None else int(now.seqno),
                is_new_branch=was is not None and now is not None and was.vbuuid != now.vbuuid,
            )
        )
    return RollbackEvent(
        time_s=entry.time_ms / 1000,
        batch=state.batch,
        vbuckets=len(parts),
        undone=state.undone,
        why=" ".join(_reasons(parts)),
        parts=tuple(parts[:ROLLED_BACK_SHOWN_MAX]),
    )


def _reasons(parts: Sequence[VBucketRollback]) -> Iterator[str]:
    """Yield why the server took changes back, as far as offsets show it (kv_engine's docs, "Rollback": the branch of a
    failover log that the consumer is on ends before the seqno that it asks from)."""
    branches = sum(part.is_new_branch for part in parts)
    again = sum(part.reached_seqno is None for part in parts)
    if branches:
        went = "continued from an earlier seqno, on a new branch of history"
        yield f"A failover, a crash or a restore: {counted(branches, 'vbucket')} {went}."
    if again:
        yield f"{counted(again, 'vbucket')} went back further than the tables reach: read again from 0."
    if rest := len(parts) - branches - again:
        yield f"The server took back changes of {counted(rest, 'vbucket')} on the same branch."


def _documents_events(entry: LogEntry, name: str) -> Iterator[Event]:
    batch, added = _transaction(entry, MERGED_TRANSACTION), entry.actions("add")
    # Splitting groups rewrites the same rows, and records up to which batch each new group is merged.
    if batch is None or not any(add["dataChange"] for add in added):
        yield from _upkeep(entry, f"{TableKind.DOCUMENTS}/{name}")
    else:
        yield MergeEvent(
            time_s=entry.time_ms / 1000,
            batch=batch,
            tables=(name,),
            files=len(added),
            written_bytes=sum(add["size"] for add in added),
        )


def _upkeep(entry: LogEntry, table: str) -> Iterator[UpkeepEvent]:
    added, removed = len(entry.actions("add")), len(entry.actions("remove"))
    if added or removed:
        yield UpkeepEvent(time_s=entry.time_ms / 1000, table=table, added=added, removed=removed)


def _joined(events: Iterable[Event]) -> Iterator[Event]:
    """Join the commits of a merge into one event: it commits the tables one by one, and a look may come in between."""
    merges: dict[int, MergeEvent] = {}
    for event in events:
        if not isinstance(event, MergeEvent):
            yield event
        elif (known := merges.get(event.batch)) is None:
            merges[event.batch] = event
        else:
            merges[event.batch] = replace(
                known,
                time_s=max(known.time_s, event.time_s),
                tables=tuple(sorted({*known.tables, *event.tables})),
                files=known.files + event.files,
                written_bytes=known.written_bytes + event.written_bytes,
            )
    yield from merges.values()
