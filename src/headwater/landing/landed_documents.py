"""Reads the documents of a landed collection as of a batch, including changes that are not merged yet.

`OpenCollection` is what a reader knows before it reads; `documents` reads in this process, `headwater.spark.documents`
on the executors of a session.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from headwater.errors import InvalidInput
from headwater.lake.documents_merge import MergeTask, merged_rows
from headwater.lake.lake import Lake
from headwater.lake.layout import documents_schema
from headwater.lake.location import Location
from headwater.landing.source_options import Conditions

KEYS_MAX = 100_000
"""The most keys of one lookup. For more, a join with all documents is better."""


@dataclass(frozen=True, slots=True)
class OpenCollection:
    """A collection of a lake, opened to be read."""

    lake: Lake
    name: str
    schema: pa.Schema
    """All columns of the table except the one by which it is partitioned."""

    @classmethod
    def open(
        cls, into: str, collection: str, *, batch: int | None, storage_options: Mapping[str, str] | None = None
    ) -> Self:
        lake = Lake.open(Location.of(into, storage_options), as_of_batch=batch)
        if lake is None:
            raise InvalidInput(
                f"{into} does not contain the tables of a landing", hint="Give the directory of a landing"
            )
        if collection not in lake.tables:
            known = ", ".join(sorted(lake.tables)) or "none"
            raise InvalidInput(f"there is no table of {collection!r} in {into}", hint=f"It has these tables: {known}")
        tables = lake.tables[collection]
        if batch is not None and (tables.documents is None or tables.documents.log.missing_files()):
            raise InvalidInput(
                f"the table of {collection!r} as of batch {batch} no longer exists",
                hint="Give a later batch; --keep-log and --keep-files determine how long one is readable",
            )
        typed = None if tables.columns is None else tables.columns.schema
        schema = documents_schema(xattrs=lake.facts.xattrs, form=lake.facts.document, typed=typed)
        return cls(lake, collection, schema)

    def check_columns(self, columns: Iterable[str]) -> None:
        for name in columns:
            if name not in self.schema.names:
                raise InvalidInput(
                    f"the table of {self.name!r} has no column {name!r}",
                    hint=f"Its columns are: {', '.join(self.schema.names)}",
                )

    def tasks(self, conditions: Conditions) -> list[MergeTask]:
        """Return the tasks that read it: one for each group of vbuckets that may contain matching documents."""
        chosen = conditions.vbuckets(self.lake.facts.vbuckets)
        return [
            task
            for task in self.lake.read_tasks(self.name)
            if chosen is None or not {*task.facts.vbuckets_of(task.group)}.isdisjoint(chosen)
        ]


def documents(
    into: str,
    collection: str,
    *,
    batch: int | None = None,
    columns: Sequence[str] = (),
    keys: Collection[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> pa.RecordBatchReader:
    """Read the documents of a collection as of a batch in this process, including changes that are not merged yet.

    Tables with deletion vectors work like others. A lookup by `keys` reads only the files' key indexes and the row
    groups that contain one of the keys, so it takes about as long in a large table as in a small one.

    Args:
        into: The directory that was landed into.
        collection: `scope.collection`.
        batch: The number of the batch, by default the last one. To combine several collections, use the same batch for
            all.
        columns: The columns to read; by default all except the one by which the table is partitioned.
        keys: Read only the documents with these keys.
        storage_options: Options of the object store that contains `into`.

    Returns:
        A stream of Arrow batches, read as it is consumed: `read_all()` returns a table, and Polars, DuckDB and pandas
        take it directly. It does not contain later batches of the landing.

    Raises:
        InvalidInput: The tables, a column or the batch does not exist, or there are more than 100,000 keys.
    """
    if isinstance(keys, str) or (keys is not None and len(keys) > KEYS_MAX):
        raise InvalidInput(
            f"keys takes a collection of at most {KEYS_MAX:,} keys",
            hint="Read all documents and join them with the keys",
        )
    opened = OpenCollection.open(into, collection, batch=batch, storage_options=storage_options)
    opened.check_columns(columns)
    shown = [*columns] or opened.schema.names
    read = shown if keys is None or "key" in shown else [*shown, "key"]
    wanted = None if keys is None else frozenset(keys)
    tasks = opened.tasks(Conditions() if wanted is None else Conditions({"key": wanted}))

    def batches() -> Iterator[pa.RecordBatch]:
        for task in tasks:
            for rows in merged_rows(task, read, wanted):
                yield from rows.select(shown).to_batches()

    return pa.RecordBatchReader.from_batches(pa.schema([opened.schema.field(name) for name in shown]), batches())
