"""The tables of one collection's name: its documents, and beside them its history and its rejects.

How far a table has been merged is an application transaction, one for each group of vbuckets, whose number is the
batch. A merge commits all groups at once, so the numbers of a table are the same; earlier versions merged groups one by
one. The rejects are committed first, then the history, then the documents: what says that the documents are merged says
so of the rejects, too. The history has numbers of its own, since it may be asked for later than the documents.

`Lake` holds one `CollectionTables` for each name; `commits` and `upkeep` commit through them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from headwater.client.offsets import Offsets
from headwater.errors import ColumnsChanged
from headwater.lake.data_files import DataFile
from headwater.lake.delta_log import DeltaLog, TableCommit
from headwater.lake.layout import (
    DOCUMENT_RANGES,
    GROUP,
    HISTORY_RANGES,
    IS_CURRENT,
    REJECTS_SCHEMA,
    LakeFacts,
    TableKind,
    document_ranges,
    documents_schema,
    history_schema,
)
from headwater.lake.location import Location
from headwater.lake.table_state import TableState
from headwater.lake.typed_columns import TypedColumns

_COLUMNS_PROPERTY = "headwater.columns"
NOT_MERGED = -1
"""The batch before the first."""


def _merged_transaction(group: int) -> str:
    return f"headwater.merged.{group}"


class MergedTable:
    """A table that changes are merged into."""

    def __init__(self, log: DeltaLog, facts: LakeFacts) -> None:
        self.log = log
        self._facts = facts
        self.reload()

    def reload(self) -> None:
        """Look again at what the log says."""
        self.log.refresh()
        found = {group: self.log.transaction(_merged_transaction(group)) for group in range(self._facts.groups)}
        self.merged: dict[int, int] = {group: NOT_MERGED if at is None else at for group, at in found.items()}
        """By group: the last batch that is merged."""
        self.state = self.log.state()
        self._seen_version = self.log.version

    def refresh(self) -> None:
        """Look again if the log has gone on without us: another tool has tidied the table up, or a commit of ours was
        done though it seemed to fail."""
        self.log.refresh()
        if self.log.version != self._seen_version:
            self.reload()

    def files_of(self, group: int) -> tuple[DataFile, ...]:
        return tuple(file for file in self.log.files() if dict(file.partition)[GROUP.name] == str(group))

    def rows_by_group(self) -> dict[int, int]:
        rows = dict.fromkeys(range(self._facts.groups), 0)
        for file in self.log.files():
            rows[int(dict(file.partition)[GROUP.name])] += file.rows
        return rows

    def commit(
        self,
        *,
        add: Sequence[DataFile] = (),
        remove: Sequence[DataFile] = (),
        held: TableState | None = None,
    ) -> None:
        """Commit what a merge came to. `held` is what `changes` holds: all groups of the table hold that now, too, so
        that it is one cut of the bucket. Without it the same rows only lie in other files."""
        merged = {} if held is None else dict.fromkeys(range(self._facts.groups), held.batch)
        state = self.state if held is None else TableState(offsets=held.offsets, batch=held.batch, as_of_s=held.as_of_s)
        self.log.commit(
            TableCommit(
                add=add,
                remove=remove,
                transactions={_merged_transaction(group): batch for group, batch in merged.items()},
                state=state,
                is_rearrangement=held is None,
            )
        )
        self.merged.update(merged)
        self.state = state
        self._seen_version = self.log.version

    @property
    def offsets(self) -> Offsets:
        """How far the table is, in every vbucket."""
        return self.state.offsets


@dataclass(slots=True)
class CollectionTables:
    """The tables of one name, as far as they are there."""

    name: str
    location: Location
    facts: LakeFacts
    documents: MergedTable | None = None
    history: MergedTable | None = None
    rejects: MergedTable | None = None
    columns: TypedColumns | None = None
    ids: set[int] = field(default_factory=set)
    """Every collection that has or had this name."""

    def open(self, asked: TypedColumns | None) -> None:
        """Open what is there. `asked` are the typed columns that are wanted, if any."""
        self.documents = self._opened(TableKind.DOCUMENTS)
        self.history = self._opened(TableKind.HISTORY)
        self.rejects = self._opened(TableKind.REJECTS)
        if self.documents is None:
            return
        ddl = self.documents.log.properties.get(_COLUMNS_PROPERTY)
        self.columns = TypedColumns(ddl) if ddl else None
        if asked is not None and asked != self.columns:
            raise ColumnsChanged(
                f"the table of {self.name} has the typed columns {ddl or 'none'}, not {asked.ddl}",
                hint="Ask for the same columns, or have the table built again: while nothing runs, remove its "
                f"directories under `{TableKind.DOCUMENTS}` and `{TableKind.REJECTS}`",
            )

    def refresh(self) -> None:
        for table in (self.documents, self.history, self.rejects):
            if table is not None:
                table.refresh()

    def keep_statistics(self) -> None:
        """Have readers look at the statistics that files get now, also where the tables were made with fewer."""
        for table, ranges in self.with_ranges():
            table.log.keep_statistics(ranges, table.state)

    def with_ranges(self) -> Iterator[tuple[MergedTable, tuple[str, ...]]]:
        """The tables that are there, each with the columns whose least and highest values its log has."""
        typed = pa.schema([] if self.columns is None else self.columns.schema)
        for table, ranges in (
            (self.documents, document_ranges(typed)),
            (self.history, HISTORY_RANGES),
            (self.rejects, DOCUMENT_RANGES),
        ):
            if table is not None:
                yield table, ranges

    def _opened(self, kind: TableKind) -> MergedTable | None:
        log = DeltaLog.open(self.location.join(kind, self.name))
        return None if log is None else MergedTable(log, self.facts)

    def merged_at(self, group: int) -> int:
        return NOT_MERGED if self.documents is None else self.documents.merged[group]

    # --- making them --------------------------------------------------------------------------------------------------

    def create_documents(self, columns: TypedColumns | None, *, merged: int) -> MergedTable:
        """Make the table of documents, which holds all there was up to a batch: nothing."""
        schema = documents_schema(xattrs=self.facts.xattrs, typed=None if columns is None else columns.schema)
        properties = {} if columns is None else {_COLUMNS_PROPERTY: columns.ddl}
        self.columns = columns
        self.documents = self._create(TableKind.DOCUMENTS, schema, document_ranges(schema), properties, merged)
        return self.documents

    def create_history(self) -> MergedTable:
        schema = history_schema(xattrs=self.facts.xattrs)
        self.history = self._create(TableKind.HISTORY, schema, HISTORY_RANGES, {}, NOT_MERGED)
        return self.history

    def create_rejects(self) -> MergedTable:
        self.rejects = self._create(TableKind.REJECTS, REJECTS_SCHEMA, DOCUMENT_RANGES, {}, NOT_MERGED)
        return self.rejects

    def _create(
        self, kind: TableKind, schema: pa.Schema, ranges: Sequence[str], properties: Mapping[str, str], merged: int
    ) -> MergedTable:
        partition = [GROUP, IS_CURRENT] if kind == TableKind.HISTORY else [GROUP]
        for field_ in partition:
            schema = schema.append(field_)
        groups = range(self.facts.groups) if merged != NOT_MERGED else ()
        log = DeltaLog.create(
            self.location.join(kind, self.name),
            schema,
            partition_by=[field_.name for field_ in partition],
            ranges=ranges,
            properties={**self.facts.to_properties(), **properties},
            transactions={_merged_transaction(group): merged for group in groups},
            state=TableState(offsets=Offsets(self.facts.bucket_uuid)),
        )
        return MergedTable(log, self.facts)
