"""Rows that say: of this vbucket, everything is void, and it is read again from 0."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from headwater.spark.lake.change_files import ROLLBACK, ChangeWriter, write_sorted
from headwater.spark.lake.data_files import DataFile
from headwater.spark.lake.schemas import NAME_COLUMNS, NAME_TYPE, changes_schema


def write_rollbacks_to_zero(writer: ChangeWriter, vbuckets: Iterable[int]) -> DataFile:
    """Write a rollback to seqno 0 for each of some vbuckets, as a part of the writer's batch."""
    rows = [
        {"op": ROLLBACK, "vbucket": vbucket, "batch": writer.batch, "landed_at": writer.landed_at, "void": False}
        for vbucket in sorted(vbuckets)
    ]
    schema = changes_schema(xattrs=writer.facts.xattrs)
    columns = {}
    for field in schema:
        column = pa.array([row.get(field.name, None if field.nullable else 0) for row in rows], field.type)
        columns[field.name] = column.cast(NAME_TYPE) if field.name in NAME_COLUMNS else column
    return write_sorted(writer.place, writer.facts, pa.table(columns))
