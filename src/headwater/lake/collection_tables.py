"""The tables of one collection name: its documents, and beside them its history and its rejects.

A table records how far it has been merged in application transactions, one for each group of vbuckets, whose number is
the batch. A merge commits all groups at once, so the numbers of a table are equal; earlier versions merged groups one
by one. A merge commits the rejects first, then the history, then the documents: once the documents are marked as
merged, the rejects are, too. The history has its own numbers, since it may be turned on later than the documents.

`Lake` holds one `CollectionTables` for each name; `commits` and `upkeep` commit through them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from headwater.client.offsets import Offsets
from headwater.errors import ColumnsChanged, InvalidColumns, LakeDamaged
from headwater.lake.column_rules import ColumnRules
from headwater.lake.column_values import ColumnDef, parse_columns, plain_type
from headwater.lake.data_files import DataFile
from headwater.lake.delta_log import DeltaLog, TableCommit
from headwater.lake.history import check_feed_columns, has_feed
from headwater.lake.layout import (
    BESIDE_METADATA,
    DOCUMENT_RANGES,
    FEED_PROPERTY,
    FIELD,
    FIELD_METADATA,
    GROUP,
    GROUPS_TRANSACTION,
    IS_CURRENT,
    TABLE_PROPERTY,
    XATTRS,
    LakeFacts,
    TableKind,
    commented,
    document_ranges,
    documents_schema,
    folder_name,
    groups_within,
    history_ranges,
    history_schema,
    rejects_schema,
    table_description,
)
from headwater.lake.location import Location
from headwater.lake.table_state import TableState
from headwater.lake.typed_columns import ColumnChoice, ColumnMode, FieldTypes, TypedColumns

_COLUMNS_PROPERTY = "headwater.columns"
"""Fixed columns as SQL writes them, or `infer`: then the columns are those of the schema. A table without typed columns
lacks this property. (Versions that do not know `infer` treat it as unreadable columns, and stop with an error.)"""
_CLUSTER_PROPERTY = "headwater.cluster_by"
"""The columns, separated by commas, that files are sorted by before the key. The property applies to files written
while it is set; older files keep their order."""
_MISFITS_PROPERTY = "headwater.misfits"
_ONE_COLUMN = "column"
"""A value that does not fit nulls its own column. Tables without the property come from an earlier version: there it
nulls all typed columns of the row."""
_TYPED_PROPERTY, _ALL_VERSIONS, _LATER_VERSIONS = "headwater.typed", "all", "later"
"""Of a history: which versions have values in the typed columns. A table without the property was made by an earlier
release: there only later versions have values."""
_RULES_PROPERTY = "headwater.column_rules"
"""The rules for inferred columns (`ColumnRules.text`)."""
_REBUILD_PROPERTY = "headwater.rebuild"
_REBUILT_TRANSACTION = "headwater.rebuilt"
"""All documents of a table must be parsed again while the property's number is higher than the transaction's. The
transaction is committed together with the parsed documents, so this happens once, even after crashes."""
MERGED_TRANSACTION = "headwater.merged."
"""Followed by the group: the batch up to which it is merged."""
NOT_MERGED = -1
"""The number before the first batch."""


def _merged_transaction(group: int) -> str:
    return f"{MERGED_TRANSACTION}{group}"


class MergedTable:
    """A table that changes are merged into."""

    def __init__(self, log: DeltaLog, facts: LakeFacts, kind: TableKind) -> None:
        self.log = log
        self.kind = kind
        self._facts = facts
        self.reload()

    def reload(self) -> None:
        """Refresh the log, and read from it what the table holds."""
        self.log.refresh()
        made_with = LakeFacts.from_properties(self.log.properties, where=self.log.location.uri).groups
        self.groups = self.log.transaction(GROUPS_TRANSACTION) or made_with
        """Of the table: fewer than the lake's while it is small, and more while the lake's groups are being doubled."""
        if max(self.groups, self._facts.groups) % min(self.groups, self._facts.groups):
            raise LakeDamaged(
                f"the table at {self.log.location.uri} has {self.groups} groups, and the lake {self._facts.groups}",
                hint="Remove its directory: the next run rebuilds it",
            )
        found = [self.log.transaction(_merged_transaction(group)) for group in range(self.groups)]
        merged = [NOT_MERGED if at is None else at for at in found]
        lake_groups = self._facts.groups
        self.merged = {
            group: min(merged[part] for part in groups_within(group, of=lake_groups, groups=self.groups))
            for group in range(lake_groups)
        }
        """By group of the lake: the last batch that is merged."""
        self.state = self.log.state()
        self._seen_version = self.log.version

    @property
    def has_to_be_rebuilt(self) -> bool:
        """Whether its columns have changed and its documents have not been parsed again since."""
        asked = int(self.log.properties.get(_REBUILD_PROPERTY) or 0)
        return asked > 0 and asked > (self.log.transaction(_REBUILT_TRANSACTION) or 0)

    @property
    def is_merged_on_read(self) -> bool:
        """Whether merges mark superseded rows in deletion vectors."""
        return self.log.may_have_vectors

    def set_merged_on_read(self, on_read: bool) -> None:
        self.log.set_vectors(on_read, self.state)
        self._seen_version = self.log.version

    def refresh(self) -> None:
        """Reload if the log has advanced without us: another tool has maintained the table, or a commit of ours
        succeeded although it seemed to fail."""
        self.log.refresh()
        if self.log.version != self._seen_version:
            self.reload()

    def files_of(self, group: int, *, of: int) -> tuple[DataFile, ...]:
        """Return the files that may hold rows of `group`, out of `of` groups. A table with fewer groups has rows of
        other groups in these files, too."""
        parts = {*map(str, groups_within(group, of=of, groups=self.groups))}
        return tuple(file for file in self.log.files() if dict(file.partition)[GROUP.name] in parts)

    def merged_at(self, group: int, *, of: int) -> int:
        """Return the last batch that is merged in `group`, out of `of` groups."""
        return min(self.merged[part] for part in groups_within(group, of=of, groups=self._facts.groups))

    @property
    def rows(self) -> int:
        return sum(file.live_rows for file in self.log.files())

    def commit(
        self,
        *,
        add: Sequence[DataFile] = (),
        remove: Sequence[DataFile] = (),
        feed: Sequence[DataFile] | None = None,
        held: TableState | None = None,
    ) -> None:
        """Commit the result of a merge. `held` is the state of `changes`, which all groups of the table then reflect.
        If None, the same rows only lie in other files. `feed`, if given, has all rows that have changed."""
        merged = {} if held is None else dict.fromkeys(range(self.groups), held.batch)
        state = self.state if held is None else TableState(offsets=held.offsets, batch=held.batch, as_of_s=held.as_of_s)
        transactions = {_merged_transaction(group): batch for group, batch in merged.items()}
        if held is not None and self.has_to_be_rebuilt:
            # Every merge has then parsed all documents of its group again, and all groups were merged.
            transactions[_REBUILT_TRANSACTION] = int(self.log.properties[_REBUILD_PROPERTY] or 0)
        self.log.commit(
            TableCommit(
                add=add,
                remove=remove,
                cdc=feed or (),
                transactions=transactions,
                state=state,
                is_rearrangement=held is None or (feed is not None and not feed),
            )
        )
        if held is not None:
            self.merged = dict.fromkeys(self.merged, held.batch)
        self.state = state
        self._seen_version = self.log.version

    def regroup(self, groups: int, *, add: Sequence[DataFile], remove: Sequence[DataFile]) -> None:
        """Commit the same rows in more groups. Each new group is merged as far as the group that it was part of."""
        merged = {group: self.merged_at(group, of=groups) for group in range(groups)}
        transactions = {_merged_transaction(group): at for group, at in merged.items() if at != NOT_MERGED}
        self.log.commit(
            TableCommit(
                add=add,
                remove=remove,
                transactions={**transactions, GROUPS_TRANSACTION: groups},
                state=self.state,
                is_rearrangement=True,
            )
        )
        self.reload()

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        self.log.add_columns([*commented(pa.schema(fields), self.kind)], self.state)
        self._seen_version = self.log.version

    def set_properties(self, properties: Mapping[str, str]) -> None:
        self.log.set_properties(properties, self.state)
        self._seen_version = self.log.version

    @property
    def offsets(self) -> Offsets:
        """The offset of every vbucket that the table has reached."""
        return self.state.offsets


@dataclass(slots=True)
class CollectionTables:
    """The tables of one name, if they exist."""

    name: str
    location: Location
    facts: LakeFacts
    as_of_batch: int | None = None
    """The batch as of which the tables are opened; None for the present."""
    documents: MergedTable | None = None
    history: MergedTable | None = None
    rejects: MergedTable | None = None
    _columns_at: tuple[int, TypedColumns | None] = (-1, None)
    """The columns as of a version of the log."""
    _history_columns_at: tuple[tuple[int, int], tuple[TypedColumns | None, pa.Schema]] | None = None
    unsorted_by: tuple[str, ...] = ()
    """Columns to cluster by that the table lacks so far, as last logged."""
    ids: set[int] = field(default_factory=set)
    """Every collection that has or had this name."""
    merge_bytes: int = 0
    """Bytes that the last merge of this process wrote: the next one is expected to write as much."""

    def open(self, asked: ColumnChoice | None) -> None:
        """Open the existing tables. Raises `ColumnsChanged` if `asked` names other typed columns than they have."""
        # If opening fails, treat all of them as missing.
        self.documents = self.history = self.rejects = None
        documents, history, rejects = (
            self._opened(kind) for kind in (TableKind.DOCUMENTS, TableKind.HISTORY, TableKind.REJECTS)
        )
        columns = None if documents is None else self._read_columns(documents.log)
        self.documents, self.history, self.rejects = documents, history, rejects
        self._columns_at = (-1 if documents is None else documents.log.version, columns)
        if documents is None or asked is None or asked == ColumnMode.INFER:
            return
        wanted = asked.ddl if isinstance(asked, TypedColumns) else ""
        if wanted != ("" if columns is None else columns.ddl) or (columns is not None and columns.is_inferred):
            inferred = "inferred " if columns is not None and columns.is_inferred else ""
            raise ColumnsChanged(
                f"the table of {self.name} has the typed columns {inferred}{(columns and columns.ddl) or 'none'}, not "
                f"{wanted or 'none'}",
                hint="Omit the columns to keep these, or rebuild the table: stop the landing, and remove its "
                f"directories under `{TableKind.DOCUMENTS}` and `{TableKind.REJECTS}`",
            )

    @property
    def columns(self) -> TypedColumns | None:
        """The typed columns of the table of documents."""
        if self.documents is None:
            return None
        log = self.documents.log
        if self._columns_at[0] != log.version:
            self._columns_at = log.version, self._read_columns(log)
        return self._columns_at[1]

    @property
    def history_columns(self) -> TypedColumns | None:
        """The typed columns of the history: those of the documents. A column that the history has already stays as it
        is, even if the documents were rebuilt with another column of that name."""
        return self._history_columns[0]

    @property
    def history_unused(self) -> pa.Schema:
        """Other typed columns of the history, which keep the values of earlier versions."""
        return self._history_columns[1]

    @property
    def _history_columns(self) -> tuple[TypedColumns | None, pa.Schema]:
        columns = self.columns
        if self.history is None or self.documents is None:
            return columns, pa.schema([])
        versions = self.documents.log.version, self.history.log.version
        if self._history_columns_at is None or self._history_columns_at[0] != versions:
            own = {*history_schema(xattrs=self.facts.xattrs).names, XATTRS.name, GROUP.name, IS_CURRENT.name}
            there = {it.name.lower(): _to_column(it) for it in self.history.log.schema if it.name not in own}
            if columns is not None:
                kept = [(it, there.pop(it.name.lower(), it)) for it in columns.definitions]
                definitions = tuple(replace(it, name=held.name, type=held.type) for it, held in kept)
                columns = replace(columns, definitions=definitions)
            unused = pa.schema([(it.name, it.type) for it in there.values()])
            self._history_columns_at = versions, (columns, unused)
        return self._history_columns_at[1]

    @property
    def has_all_typed(self) -> bool:
        """Whether every version in the history has its values in the typed columns."""
        return self.history is not None and self.history.log.properties.get(_TYPED_PROPERTY) == _ALL_VERSIONS

    def _read_columns(self, log: DeltaLog) -> TypedColumns | None:
        ddl = log.properties.get(_COLUMNS_PROPERTY)
        if not ddl:
            return None
        own = {*documents_schema(xattrs=self.facts.xattrs).names, GROUP.name}
        try:
            if ddl != ColumnMode.INFER:
                is_whole_row = log.properties.get(_MISFITS_PROPERTY) != _ONE_COLUMN
                return TypedColumns(tuple(parse_columns(ddl)), is_whole_row=is_whole_row)
            definitions = tuple(_to_column(it) for it in log.schema if it.name not in own)
            rules = ColumnRules.from_text(log.properties.get(_RULES_PROPERTY))
            used = tuple(it for it in definitions if _is_used(it, rules))
            unused = tuple(it for it in definitions if it not in used)
            return TypedColumns(used, is_inferred=True, rules=rules, unused=unused)
        except (InvalidColumns, KeyError, ValueError) as error:
            raise LakeDamaged(
                f"the typed columns of the table at {log.location.uri} were not created by Headwater: {error}",
                hint=f"Remove its directories under `{TableKind.DOCUMENTS}` and `{TableKind.REJECTS}`: the next run "
                "rebuilds it",
            ) from None

    @property
    def cluster_by(self) -> tuple[str, ...]:
        """The columns by which newly written documents are sorted before their keys."""
        names = "" if self.documents is None else self.documents.log.properties.get(_CLUSTER_PROPERTY)
        return tuple(names.split(",")) if names else ()

    def set_cluster_by(self, names: Sequence[str]) -> None:
        assert self.documents is not None, "a new table is made with them"
        self.documents.set_properties({_CLUSTER_PROPERTY: ",".join(names)})

    def set_change_feed(self, is_on: bool) -> None:
        """Turn the change feed on or off from now on."""
        assert self.documents is not None, "a new table is made with it"
        if is_on != has_feed(self.documents.log.properties):
            self.documents.set_properties({FEED_PROPERTY: str(is_on).lower()})

    def refresh(self) -> None:
        for table in self.there:
            table.refresh()

    def keep_metadata(self) -> None:
        """Update the log's metadata so that readers use all statistics that files get now, and find descriptions, even
        if an earlier version made the tables."""
        for table in self.there:
            table.log.keep_statistics(self.ranges_of(table), table.state)
            table.log.keep_description(table.kind, self.name, table.state)

    @property
    def there(self) -> list[MergedTable]:
        """The tables that exist."""
        return [table for table in (self.documents, self.history, self.rejects) if table is not None]

    def table_of(self, kind: TableKind) -> MergedTable | None:
        """Return the table of a kind, or None if it does not exist."""
        return next((table for table in self.there if table.kind is kind), None)

    def ranges_of(self, table: MergedTable) -> tuple[str, ...]:
        """Return the columns for which the log of the table has minimum and maximum values."""
        if table.kind is TableKind.DOCUMENTS:
            return document_ranges(pa.schema([] if self.columns is None else self.columns.schema))
        return history_ranges(table.log.schema) if table.kind is TableKind.HISTORY else DOCUMENT_RANGES

    def _opened(self, kind: TableKind) -> MergedTable | None:
        log = DeltaLog.open(self.location_of(kind))
        if log is not None and self.as_of_batch is not None:
            log = log.as_of(self.as_of_batch)
        return None if log is None else MergedTable(log, self.facts, kind)

    def location_of(self, kind: TableKind) -> Location:
        """Return where a table lies, or will lie."""
        return self.location.join(kind, folder_name(self.name))

    def merged_at(self, group: int) -> int:
        """Return the last batch that is merged into the documents of a group of the lake."""
        return NOT_MERGED if self.documents is None else self.documents.merged[group]

    @property
    def groups(self) -> int:
        """The number of tasks that read or merge the tables. While groups are being split, some tables have more."""
        return min([self.facts.groups, *(table.groups for table in self.there)])

    def groups_for(self, documents: int) -> int:
        """Return how many groups the tables should have for this many documents. The number never goes down."""
        least = max((table.groups for table in self.there), default=1)
        return self.facts.groups_of_table(documents, least=least)

    # --- creating the tables ------------------------------------------------------------------------------------------

    def create_documents(
        self,
        columns: ColumnChoice,
        rules: ColumnRules,
        cluster_by: Sequence[str],
        *,
        change_feed: bool,
        merged: int,
        expected: int,
    ) -> MergedTable:
        """Create an empty table of documents that counts as merged up to batch `merged`. `expected` is how many
        documents will come next. Merges that find new fields add inferred columns for them."""
        fixed = columns if isinstance(columns, TypedColumns) else None
        typed = None if fixed is None else fixed.schema
        schema = documents_schema(xattrs=self.facts.xattrs, form=self.facts.document, typed=typed)
        properties = {_COLUMNS_PROPERTY: str(columns) if fixed is None else fixed.ddl, _MISFITS_PROPERTY: _ONE_COLUMN}
        if columns == ColumnMode.NONE:
            properties = {}
        elif fixed is None and rules.text:
            properties[_RULES_PROPERTY] = rules.text
        if cluster_by:
            properties[_CLUSTER_PROPERTY] = ",".join(cluster_by)
        if change_feed:
            check_feed_columns(self.name, schema.names)
            properties[FEED_PROPERTY] = "true"
        self._columns_are_others()
        ranges, groups = document_ranges(schema), self.groups_for(expected)
        self.documents = self._create(TableKind.DOCUMENTS, schema, ranges, properties, groups=groups, merged=merged)
        return self.documents

    def history_with_columns(self) -> MergedTable:
        """Return the history, with all typed columns of the documents. Creates it if it is missing."""
        columns = self.history_columns
        typed = pa.schema([] if columns is None else [_to_field(column) for column in columns.definitions])
        schema = history_schema(xattrs=self.facts.xattrs, form=self.facts.document, typed=typed)
        if self.history is None:
            properties = {_TYPED_PROPERTY: _ALL_VERSIONS}
            ranges = history_ranges(schema)
            self.history = self._create(TableKind.HISTORY, schema, ranges, properties, groups=self.groups)
        elif missing := [field_ for field_ in schema if field_.name not in self.history.log.schema.names]:
            self.history.add_columns(missing)
            self.keep_metadata()
        return self.history

    def create_rejects(self) -> MergedTable:
        columns = self.columns
        assert columns is not None, "without typed columns everything fits"
        schema = rejects_schema(with_field=not columns.is_whole_row, form=self.facts.document)
        self.rejects = self._create(TableKind.REJECTS, schema, DOCUMENT_RANGES, {}, groups=self.groups)
        return self.rejects

    # --- columns that are added later ---------------------------------------------------------------------------------

    def add_columns(self, wanted: FieldTypes) -> tuple[ColumnDef, ...]:
        """Add columns for new fields, before any document that has them is merged. Returns the added columns."""
        columns = self.columns
        assert self.documents is not None, "it was merged into"
        assert columns is not None, "only merges into inferred columns want more"
        added = columns.extended(wanted).definitions[len(columns.definitions) :]
        if added:
            self.documents.add_columns([_to_field(column) for column in added])
        return added

    @property
    def is_inferred(self) -> bool:
        columns = self.columns
        return columns is not None and columns.is_inferred

    @property
    def rules(self) -> ColumnRules:
        """The rules for the inferred columns."""
        return ColumnRules() if self.columns is None else self.columns.rules

    def check_names(self, rules: ColumnRules) -> None:
        """Raise `InvalidColumns` if a rename gives a field the name that another field's column has already."""
        there = {} if self.documents is None else {it.name.lower(): _source(it) for it in self.documents.log.schema}
        for old, new in rules.rename or ():
            if there.get(new.lower(), old) != old:
                raise InvalidColumns(
                    f"{old!r} can't be renamed to {new!r}: the table of {self.name} has a column of that name, for the "
                    f"field {there[new.lower()]!r}",
                    hint="Choose another name, or rebuild the table: stop the landing, and remove its directories "
                    f"under `{TableKind.DOCUMENTS}` and `{TableKind.REJECTS}`",
                )

    def switch_to_inferred(self, asked: ColumnRules) -> None:
        """Infer the columns from now on, by the given rules. The next merge parses all documents again."""
        assert self.documents is not None, "a new table is made with its columns"
        rules = self.rules.with_asked(asked)
        self.check_names(rules)
        if self.rejects is not None and FIELD.name not in self.rejects.log.schema.names:
            self.rejects.add_columns([FIELD])
        self._columns_are_others()
        self.documents.set_properties(
            {
                _COLUMNS_PROPERTY: ColumnMode.INFER.value,
                _MISFITS_PROPERTY: _ONE_COLUMN,
                _RULES_PROPERTY: rules.text,
                _REBUILD_PROPERTY: str(int(self.documents.log.properties.get(_REBUILD_PROPERTY) or 0) + 1),
            }
        )

    def _columns_are_others(self) -> None:
        """Record that existing versions in the history are not parsed again for the new columns."""
        if self.has_all_typed and self.history is not None:
            self.history.set_properties({_TYPED_PROPERTY: _LATER_VERSIONS})

    def _create(
        self,
        kind: TableKind,
        schema: pa.Schema,
        ranges: Sequence[str],
        properties: Mapping[str, str],
        *,
        groups: int,
        merged: int = NOT_MERGED,
    ) -> MergedTable:
        partition = [GROUP, IS_CURRENT] if kind == TableKind.HISTORY else [GROUP]
        for field_ in partition:
            schema = schema.append(field_)
        # delta-rs would create all missing folders, so check that the lake is still there.
        self.location.identity()
        location = self.location_of(kind)
        named = {} if folder_name(self.name) == self.name else {TABLE_PROPERTY: self.name}
        log = DeltaLog.create(
            location,
            commented(schema, kind),
            description=table_description(kind, self.name),
            partition_by=[field_.name for field_ in partition],
            ranges=ranges,
            properties={**replace(self.facts, groups=groups).to_properties(), **named, **properties},
            transactions={_merged_transaction(group): merged for group in range(groups) if merged != NOT_MERGED},
            state=TableState(offsets=Offsets(self.facts.bucket_uuid)),
        )
        return MergedTable(log, self.facts, kind)


def _is_used(column: ColumnDef, rules: ColumnRules) -> bool:
    """Whether a column's name is the one that the current rules give it: earlier rules may have differed."""
    name = rules.column_of(column.field)
    return name is not None and (column.name == name or column.name.startswith(f"{name}_"))


def _to_field(column: ColumnDef) -> pa.Field:
    """Return a column as a field of its table's schema."""
    metadata = {} if column.field == column.name else {FIELD_METADATA: column.field.encode()}
    metadata |= {BESIDE_METADATA: b"true"} if column.is_beside else {}
    return pa.field(column.name, column.type, metadata=metadata or None)


def _to_column(field_: pa.Field) -> ColumnDef:
    is_beside = BESIDE_METADATA in (field_.metadata or {})
    return ColumnDef(field_.name, plain_type(field_.type), field=_source(field_), is_beside=is_beside)


def _source(field_: pa.Field) -> str:
    """Return the field of the documents that a column holds, or held."""
    return str((field_.metadata or {}).get(FIELD_METADATA, field_.name.encode()).decode())
