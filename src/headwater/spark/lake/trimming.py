"""Trimming `changes`: what is older than its retention is folded to what it left.

Of every document the version stays that it had at that point, so the tables of documents can still be built from
`changes`, and a rollback to any later point can be undone. Removals, superseded versions, void rows and events go. One
row more stays of each vbucket, the one with the highest seqno: it tells how far back a rollback may go.

It is done where most of the old rows would go, so that a row is not written again too often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.spark.lake.barriers import Barriers
from headwater.spark.lake.change_rows import (
    COLLECTION_CREATED,
    COLLECTION_DROPPED,
    EXPIRATION,
    MUTATION,
    ChangeRows,
    Marks,
    Wanted,
    read_changes,
)
from headwater.spark.lake.collection_tables import NOT_MERGED
from headwater.spark.lake.data_files import DataFile, RollingWriter, read_files
from headwater.spark.lake.delta_log import Commit
from headwater.spark.lake.key_index import KeyIndex, document_places
from headwater.spark.lake.lake import TRIMMED_TRANSACTION, Lake
from headwater.spark.lake.layout import LakeFacts, TablePlace
from headwater.spark.lake.schemas import CHANGE_RANGES, changes_schema
from headwater.spark.lake.tasks import Runner, run_here

TRIM_ROWS_PER_DOCUMENT = 2
"""Changes are trimmed when there are more old ones than this for each document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimTask:
    """Write the changes of one group again, with the old ones folded."""

    place: TablePlace
    facts: LakeFacts
    group: int
    files: tuple[DataFile, ...]
    upto_batch: int
    """What came with a later batch stays as it is."""
    last_batch: int

    def run(self) -> list[DataFile]:
        schema = changes_schema(xattrs=self.facts.xattrs)
        vbuckets = self.facts.vbuckets_of(self.group)
        wanted = Wanted(vbuckets=tuple(vbuckets), after_batch=NOT_MERGED, upto_batch=self.last_batch, ids=None)
        parts = read_changes(self.place, self.files, wanted, columns=schema.names)
        if not parts:
            return []
        writer = RollingWriter(self.place, schema, ranges=CHANGE_RANGES, partition=())
        for rows, kept in zip(parts, self._kept(parts, vbuckets), strict=True):
            if kept.any():
                writer.write(rows.wide(kept).select(schema.names))
        return writer.close()

    def _kept(self, parts: Sequence[ChangeRows], vbuckets: range) -> Iterator[Marks]:
        old = [(rows.batches <= self.upto_batch) & ~rows.void for rows in parts]
        places, ids, seqnos, ops = (_joined(parts, old, name) for name in ("vbuckets", "ids", "seqnos", "ops"))
        barriers = Barriers(np.unique(ids).tolist(), vbuckets)
        is_end = (ops == COLLECTION_CREATED) | (ops == COLLECTION_DROPPED)
        barriers.add(vbuckets=places[is_end], ids=ids[is_end], seqnos=seqnos[is_end])
        is_change = ops <= EXPIRATION
        keys = [rows.keys(marks & (rows.ops <= EXPIRATION)) for rows, marks in zip(parts, old, strict=True)]
        index = KeyIndex(pa.concat_arrays(keys), seqnos[is_change], document_places(places, ids)[is_change])
        kept = _highest(places, seqnos)
        is_document = index.newest & (ops[is_change] == MUTATION)
        kept[is_change] |= is_document & ~barriers.before(vbuckets=places, ids=ids, seqnos=seqnos)[is_change]
        start = 0
        for rows, marks in zip(parts, old, strict=True):
            chosen = rows.batches > self.upto_batch
            chosen[marks] |= kept[start : (start := start + int(marks.sum()))]
            yield chosen


def _joined(parts: Sequence[ChangeRows], marks: Sequence[Marks], name: str) -> NDArray[np.int64]:
    columns = [getattr(rows, name)[chosen] for rows, chosen in zip(parts, marks, strict=True)]
    return np.concatenate(columns).astype(np.int64) if columns else np.zeros(0, dtype=np.int64)


def _highest(vbuckets: NDArray[np.int64], seqnos: NDArray[np.int64]) -> Marks:
    """The row with the highest seqno of each vbucket."""
    order = np.lexsort((seqnos, vbuckets))
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = vbuckets[order[1:]] != vbuckets[order[:-1]]
    found = np.zeros(len(order), dtype=np.bool_)
    found[order[is_last]] = True
    return found


def trim_changes(lake: Lake, before: datetime, run: Runner = run_here) -> int:
    """Fold changes that were landed before a time, where enough of them would go. Returns how many rows are gone.

    A rollback to before that time can't be undone afterwards: such a vbucket is read again from 0.
    """
    upto = min([_last_batch_before(lake, before), *_merged_batches(lake)])
    old = [file for file in lake.changes.files() if file.may_hold("batch", high=upto)]
    rows = sum(file.rows for file in old)
    if upto < 0 or rows <= TRIM_ROWS_PER_DOCUMENT * _document_rows(lake):
        return 0
    tasks = [
        TrimTask(
            place=lake.changes.place,
            facts=lake.facts,
            group=group,
            files=tuple(old),
            upto_batch=upto,
            last_batch=lake.last_batch,
        )
        for group in range(lake.facts.groups)
    ]
    kept: list[DataFile] = [file for files in run(tasks) for file in files]
    lake.step("commit trimmed changes")
    lake.commit_changes(Commit(add=kept, remove=old, transactions={TRIMMED_TRANSACTION: upto}, state=lake.state))
    kept_rows = sum(int(file.rows) for file in kept)
    return rows - kept_rows


def _last_batch_before(lake: Lake, before: datetime) -> int:
    """The last batch such that it, and every one before it, was landed before a time."""
    landed: dict[int, datetime] = {}

    for _, rows in read_files(lake.changes.place, lake.changes.files(), ["batch", "landed_at"]):
        for row in rows.group_by("batch", use_threads=False).aggregate([("landed_at", "max")]).to_pylist():
            batch, at = row["batch"], row["landed_at_max"]
            landed[batch] = max(at, landed.get(batch, at))
    young = [batch for batch, at in landed.items() if at >= before]
    return min(young) - 1 if young else max(landed, default=NOT_MERGED)


def _merged_batches(lake: Lake) -> Iterator[int]:
    """The batches that the tables are merged at: what they still need must stay as it is."""
    for table in lake.tables.values():
        yield min(table.merged_at(group) for group in range(lake.facts.groups))
        if lake.settings.merging.history:
            yield NOT_MERGED if table.history is None else min(table.history.merged.values())


def _document_rows(lake: Lake) -> int:
    tables = [table.documents for table in lake.tables.values() if table.documents is not None]
    return sum(sum(table.rows_by_group().values()) for table in tables)
