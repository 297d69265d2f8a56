"""A batch into `changes`: what is checked before, what executors write, and the one commit that makes it visible.

    batch = begin_batch(lake, query_id=…, batch_id=…, end=offsets)     # None: the tables have it already
    reports = …                                                        # executors: batch.writer over the rows
    commit_batch(lake, batch, reports, run)                            # now `changes` has it

A crash before the commit leaves files that nobody names; after it, the transaction of query and batch is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from headwater.client.offsets import Offsets
from headwater.errors import LakeOutOfStep
from headwater.spark.lake.change_files import ChangeReport, ChangeWriter
from headwater.spark.lake.collection_tables import NOT_MERGED
from headwater.spark.lake.data_files import DataFile
from headwater.spark.lake.delta_log import Commit, TableState
from headwater.spark.lake.lake import BATCH_TRANSACTION, Lake
from headwater.spark.lake.layout import table_name
from headwater.spark.lake.new_tables import create_documents
from headwater.spark.lake.rollback import out_of_reach, void_tasks
from headwater.spark.lake.tasks import Runner, run_here
from headwater.spark.lake.void_rows import Voided
from headwater.spark.lake.wiped_vbuckets import write_rollbacks_to_zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch that is being landed."""

    query_id: str
    batch_id: int
    number: int
    """Of all batches that this lake has ever taken: what the rows have in `batch`."""
    end: Offsets
    writer: ChangeWriter
    """Picklable: executors write the rows with it."""


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


# --- before -------------------------------------------------------------------------------------------------------


def check_start(lake: Lake, start: Offsets) -> None:
    """Raises `LakeOutOfStep` unless changes that begin at these offsets go on where the tables end."""
    held = lake.state.offsets
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
    lake: Lake,
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
    lake.refresh()
    done = lake.changes.transaction(query_id)
    if done is not None and done >= batch_id:
        return None
    if lake.state.ended_query == query_id:
        raise LakeOutOfStep(
            "a rollback went further back than `changes` reaches, and this query can't go on",
            hint="Start with a new checkpoint: it goes on where the tables end, and reads what is missing again",
        )
    end.check_bucket(lake.facts.bucket_uuid)
    if start is not None:
        check_start(lake, start)
    number = lake.last_batch + 1
    writer = ChangeWriter(
        place=lake.changes.place,
        facts=lake.facts,
        batch=number,
        landed_at=landed_at or datetime.now(UTC),
        held_seqnos={vbucket: int(at.seqno) for vbucket, at in lake.state.offsets.offsets.items()},
    )
    return Batch(query_id=query_id, batch_id=batch_id, number=number, end=end, writer=writer)


# --- the commit ---------------------------------------------------------------------------------------------------


def commit_batch(lake: Lake, batch: Batch, reports: Sequence[ChangeReport], run: Runner = run_here) -> Committed:
    """Make a batch a part of `changes`, and mark what its rollbacks took back, all in one commit."""
    with lake.counting_pending() as pending:
        rollbacks = {
            vbucket: min(report.rollbacks[vbucket] for report in reports if vbucket in report.rollbacks)
            for report in reports
            for vbucket in report.rollbacks
        }
        added = [file for report in reports for file in report.files]
        wiped = _out_of_reach(lake, rollbacks).union(*(report.torn for report in reports))
        removed: list[DataFile] = []
        if rollbacks:
            added, removed = _void(lake, batch, rollbacks, wiped, added, run)
        known, state = lake.state.collections, _state_after(lake, batch, reports, wiped)
        lake.step("commit changes")
        lake.commit_changes(
            Commit(
                add=added,
                remove=removed,
                transactions={batch.query_id: batch.batch_id, BATCH_TRANSACTION: batch.number},
                state=state,
            )
        )
        for name in sorted({*state.collections.values()} - {*known.values()}):
            create_documents(lake, lake.tables[name], added, merged=batch.number - 1)
        for report in reports:
            pending.add(report, state.collections, lake.facts)
    return Committed(
        rows=sum(report.rows for report in reports),
        rows_by_table=_rows_by_table(reports, state),
        rollbacks=rollbacks,
        read_again=frozenset(wiped),
    )


def _out_of_reach(lake: Lake, rollbacks: Mapping[int, int]) -> set[int]:
    if lake.trimmed_batch == NOT_MERGED or not rollbacks:
        return set()
    files = lake.changes.files()
    return out_of_reach(lake.changes.place, files, dict(rollbacks), trimmed_batch=lake.trimmed_batch)


def _void(
    lake: Lake, batch: Batch, rollbacks: Mapping[int, int], wiped: set[int], added: list[DataFile], run: Runner
) -> tuple[list[DataFile], list[DataFile]]:
    """What to add and to remove, so that everything that the rollbacks took back is marked.

    `wiped` are the vbuckets that can't be rolled back. Those are added to it that are found out here.
    """
    place, facts = lake.changes.place, lake.facts
    limits = {vbucket: 0 if vbucket in wiped else kept for vbucket, kept in rollbacks.items()}
    tasks = void_tasks(place, facts, lake.changes.files(), limits)
    # What a vbucket that is wiped has in this very batch goes as well: all of it is read again.
    tasks += void_tasks(place, facts, added, dict.fromkeys(wiped, 0))
    results: list[Voided] = run(tasks)
    torn = {vbucket for voided in results for vbucket in voided.torn}
    if torn - wiped:
        wiped |= torn
        return _void(lake, batch, rollbacks, wiped, added, run)
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


def _state_after(lake: Lake, batch: Batch, reports: Sequence[ChangeReport], wiped: set[int]) -> TableState:
    collections = dict(lake.state.collections)
    names: dict[int, tuple[str | None, str | None]] = {}
    for report in reports:
        for id_, parts in report.names.items():
            if None in names.get(id_, (None,)):
                names[id_] = parts
    for id_, (scope, collection) in sorted(names.items()):
        collections.setdefault(id_, table_name(scope, collection, id_))
    reached = {**lake.state.offsets.offsets, **batch.end.offsets}
    offsets = {vbucket: at for vbucket, at in reached.items() if vbucket not in wiped}
    return TableState(
        offsets=Offsets(lake.facts.bucket_uuid, offsets),
        collections=collections,
        ended_query=batch.query_id if wiped else None,
    )


def _rows_by_table(reports: Sequence[ChangeReport], state: TableState) -> Counter[str]:
    by_table: Counter[str] = Counter()
    for report in reports:
        for (id_, _), count in report.document_rows.items():
            by_table[state.collections[id_]] += count
    return by_table
