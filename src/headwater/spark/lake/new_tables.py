"""Making the table of a collection that has none: when it is seen first, or when it was lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headwater.spark.lake.change_rows import MUTATION, Wanted, read_changes
from headwater.spark.lake.collection_tables import NOT_MERGED, CollectionTables
from headwater.spark.lake.data_files import DataFile
from headwater.spark.lake.lake import Lake
from headwater.spark.lake.typed_columns import TypedColumns, infer_columns

INFER_ROWS = 1000


def create_documents(lake: Lake, table: CollectionTables, files: Sequence[DataFile], *, merged: int) -> None:
    """Make a table that holds all there was up to a batch. Columns are inferred from these files of `changes`."""
    columns = lake.asked_columns(table.name)
    if columns is None and lake.settings.infer:
        columns = _inferred_columns(lake, table, files)
    lake.step(f"create documents {table.name}")
    table.create_documents(columns, merged=merged)


def _inferred_columns(lake: Lake, table: CollectionTables, files: Sequence[DataFile]) -> TypedColumns | None:
    wanted = Wanted(
        vbuckets=tuple(range(lake.facts.vbuckets)),
        after_batch=NOT_MERGED,
        upto_batch=lake.last_batch,
        ids=frozenset(table.ids),
    )
    documents: list[str | None] = []
    for file in files:
        for rows in read_changes(lake.changes.place, [file], wanted):
            marks = (rows.ops == MUTATION) & ~rows.void & np.isin(rows.ids, [*table.ids])
            values = rows.wide(marks).column("value").slice(0, INFER_ROWS - len(documents))
            documents += [None if value is None else value.decode(errors="replace") for value in values.to_pylist()]
        if len(documents) >= INFER_ROWS:
            break
    return infer_columns(documents)
