"""A batch into `changes`: what executors write, and the one commit that makes it visible.

    batch = begin_batch(lake)                                  # begins where the tables end
    reports = …                                                # executors: batch.writer over the rows
    commit_batch(lake, batch, reports, run)                    # now `changes` has it

The commit holds the place that was reached in every vbucket. A crash before it leaves files that no commit names; after
it, the next batch begins behind it. Two pipelines that land at the same time commit to the same version of the log, and
Delta lets one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from headwater.client.offsets import Offsets
from headwater.spark.lake.change_files import ChangeReport, ChangeWriter
from headwater.spark.lake.collection_tables import NOT_MERGED
from headwater.spark.lake.data_files import DataFile
from headwater.spark.lake.delta_log import Commit, TableState, Totals
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

    number: int
    """Of all batches that this lake has ever taken: what the rows have in `batch`."""
    writer: ChangeWriter
    """Picklable: executors write the rows with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a batch came to."""

    number: int
    rows: int
    rows_by_table: Mapping[str, int]
    """Changes of documents, by `scope.collection`."""
    rollbacks: Mapping[int, int]
    """By vbucket: the last seqno that was kept."""
    read_again: frozenset[int]
    """Vbuckets that could not be rolled back: the tables hold nothing of them, and the next batch reads them from 0."""


def begin_batch(lake: Lake, *, landed_at: datetime | None = None) -> Batch:
    """Begin to land a batch, where the tables end."""
    lake.refresh()
    number = lake.last_batch + 1
    writer = ChangeWriter(
        place=lake.changes.place,
        facts=lake.facts,
        batch=number,
        landed_at=landed_at or datetime.now(UTC),
        held_seqnos={vbucket: int(at.seqno) for vbucket, at in lake.state.offsets.offsets.items()},
    )
    return Batch(number=number, writer=writer)


def commit_batch(
    lake: Lake, batch: Batch, reports: Sequence[ChangeReport], run: Runner = run_here, *, as_of_s: float | None = None
) -> Committed:
    """Make a batch a part of `changes`, and mark what its rollbacks took back, all in one commit.

    `as_of_s` is a time such that all that was written to the bucket before it is in the tables now, if that is known.
    """
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
        rollbacks |= dict.fromkeys(wiped, 0)
        known, before_s = lake.state.collections, lake.state.as_of_s
        state = _state_after(lake, batch, reports, rollbacks, wiped, as_of_s)
        lake.step("commit changes")
        lake.commit_changes(
            Commit(add=added, remove=removed, transactions={BATCH_TRANSACTION: batch.number}, state=state)
        )
        for name in sorted({*state.collections.values()} - {*known.values()}):
            create_documents(lake, lake.tables[name], added, merged=batch.number - 1)
        for report in reports:
            pending.add(report, state.collections, lake.facts, since_s=before_s)
    return Committed(
        number=batch.number,
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


def _state_after(
    lake: Lake,
    batch: Batch,
    reports: Sequence[ChangeReport],
    rollbacks: Mapping[int, int],
    wiped: set[int],
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
    places = dict(before.offsets.offsets)
    for report in reports:
        places |= report.reached
    totals = before.totals
    if totals is not None:
        rows = totals.rows + sum(report.rows for report in reports)
        totals = Totals(rows=rows, rollbacks=totals.rollbacks + len(rollbacks))
    return replace(
        before,
        offsets=Offsets(
            lake.facts.bucket_uuid, {vbucket: at for vbucket, at in places.items() if vbucket not in wiped}
        ),
        batch=batch.number,
        as_of_s=None if wiped else as_of_s,
        collections=collections,
        rollbacks=rollbacks,
        totals=totals,
    )


def _rows_by_table(reports: Sequence[ChangeReport], state: TableState) -> Counter[str]:
    by_table: Counter[str] = Counter()
    for report in reports:
        for (id_, _), count in report.document_rows.items():
            by_table[state.collections[id_]] += count
    return by_table
