"""The documents of a landed collection as of a batch, whether they are merged yet or not.

`OpenCollection` is what a reader knows before it reads; `documents` reads in this process, and
`headwater.spark.documents` on the executors of a session.
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
"""So many can be looked up at once. More are better joined with all documents."""


@dataclass(frozen=True, slots=True)
class OpenCollection:
    """A collection of a lake that is to be read."""

    lake: Lake
    name: str
    schema: pa.Schema
    """All columns of the table but the one that it is partitioned by."""

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
        """The work of reading it, one task for each group of vbuckets that may have such documents."""
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
    """The documents of a collection as of a batch, whether they are merged yet or not, read in this process.

    Tables with deletion vectors are read like others. A lookup by `keys` reads the indexes of keys that files have and
    the row groups that hold one of the keys, so it takes about as long in a large table as in a small one.

    Args:
        into: The directory that was landed into.
        collection: `scope.collection`.
        batch: The number of the batch, by default the last one. Results for several collections as of one batch belong
            together.
        columns: Columns of the table, by default all but the one that it is partitioned by. No others are read.
        keys: Read only the documents with these keys.
        storage_options: Options of the object store that `into` is in.

    Returns:
        A stream of Arrow batches, which is read as it is consumed: `read_all()` makes a table of it, and Polars, DuckDB
        and pandas take it as it is. It does not have what is landed later.

    Raises:
        InvalidInput: There are no such tables, columns or batch, or there are more than 100,000 keys.
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
