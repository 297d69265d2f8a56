"""`changes` and the tables of documents as Iceberg tables as well, for engines that read Iceberg.

The Delta tables are the truth. The driver does the rest with pyiceberg: there is no jar in it.

`changes` is copied, batch by batch (`IcebergChanges`). The rows of a batch are appended, and what its rollbacks took
back is marked void, all in one commit of the catalog that also says which batch it was (the table property
`headwater.batch`). A crash before that commit has the batch copied by the next run; a batch that is replayed is found
to be there. So each table is exact by itself, and Iceberg is a batch behind at worst. Files are not shared with the
Delta table, whose upkeep deletes its own. Upkeep of the Iceberg table is the owner's affair.

The tables of documents share the files of the Delta tables (`IcebergDocuments`). A table of documents is a list of
Parquet files, and a merge takes some out and puts others in. The Iceberg table of a collection is that list in the
metadata of Iceberg: after each merge, one commit of the catalog removes the files that left the Delta table, and adds
those that are new. No row is copied, so it costs what the footers of the new files cost. What the table holds says
itself what is missing, so the next run completes what a crash between the two commits has left out.

Files do not carry Iceberg's field ids: the table has a mapping by names for its readers (the property
`schema.name-mapping.default`). The column that the Delta table is partitioned by is not in its files, and so not in the
Iceberg table. Files belong to the Delta table: its upkeep deletes them some time after a merge has replaced them
(`--keep-files`), and no engine may delete them by way of Iceberg.

`landing.loop` calls it before and after each batch, and after merges.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pyarrow.compute as pc

from headwater.errors import InvalidInput, LakeError, LakeInUse, LakeOfOtherBucket
from headwater.lake.catalogs import plain_name
from headwater.lake.change_files import Rollbacks, add_rollback
from headwater.lake.collection_tables import CollectionTables
from headwater.lake.data_files import read_files
from headwater.lake.lake import Lake
from headwater.lake.layout import (
    COMMENT,
    TableKind,
    changes_schema,
    commented,
    document_ranges,
    documents_schema,
    table_description,
)
from headwater.lake.location import Location
from headwater.options import suggest_keywords
from headwater.phrases import install_command

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

TABLE_DEFAULT = "headwater.changes"
_BATCH = "headwater.batch"
_BUCKET = "headwater.bucket_uuid"
_TABLE = "headwater.table"
"""A property: the collection that the table is of."""
_DESCRIPTION = "comment"
"""A property that catalogs and engines show as the description of the table."""
SNAPSHOTS_KEPT = 32
"""Older ones are forgotten: all of them are in the metadata, which every commit writes again."""
_PROPERTIES = {
    # Engines then refuse to delete files of the table, which are the Delta table's.
    "gc.enabled": "false",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.metrics.default": "none",
}
_RETRIES = {"commit.retry.num-retries": "0"}
"""pyiceberg would apply a commit again on top of another one: a batch that two processes copy would be there twice."""


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergSettings:
    """Where the Iceberg tables are."""

    catalog: str
    """A name from pyiceberg's own configuration, or the URI of a catalog, such as `sqlite:////data/catalog.db`."""
    table: str = TABLE_DEFAULT
    """Namespace and name of `changes`. The tables of documents are in the same namespace."""


# --- the catalog ------------------------------------------------------------------------------------------------------

_FILE_IO = {
    "aws_access_key_id": "s3.access-key-id",
    "aws_secret_access_key": "s3.secret-access-key",
    "aws_session_token": "s3.session-token",
    "aws_region": "s3.region",
    "aws_endpoint_url": "s3.endpoint",
    "aws_endpoint": "s3.endpoint",
    "azure_storage_account_name": "adls.account-name",
    "azure_storage_account_key": "adls.account-key",
    "azure_storage_sas_token": "adls.sas-token",
}
"""The options of a lake's store, as pyiceberg calls them. What else it needs is in its own configuration."""


def load_catalog_of(settings: IcebergSettings, lake: Location) -> Catalog:
    """The catalog; a new one keeps its tables in the directory of the lake, beside the others."""
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError as error:
        raise InvalidInput("Iceberg tables need pyiceberg", hint=f"Run {install_command('iceberg')}") from error
    if settings.table.count(".") < 1:
        raise InvalidInput(f"{settings.table!r} is not a name of an Iceberg table", hint="Write namespace.table")
    store = {_FILE_IO[name]: value for name, value in lake.options.items() if name in _FILE_IO}
    try:
        if "://" not in settings.catalog:
            return load_catalog(settings.catalog, **store)
        if settings.catalog.startswith(("http://", "https://")):
            # The service decides where tables are; to it, a warehouse is a name.
            return load_catalog("headwater", uri=settings.catalog, **store)
        return load_catalog("headwater", uri=settings.catalog, warehouse=f"{lake.full_uri}/iceberg", **store)
    except Exception as error:
        # The URI may hold a password, and what is raised may repeat the URI.
        raise InvalidInput(
            f"the Iceberg catalog can't be used ({type(error).__name__})",
            hint="Give a name from .pyiceberg.yaml, or a URI such as sqlite:////data/catalog.db",
        ) from error


def _open_table(catalog: Catalog, name: str, schema: pa.Schema, properties: Mapping[str, str]) -> Table:
    """A table of the catalog; it is made where there is none."""
    catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
    table = catalog.create_table_if_not_exists(name, schema, properties={**properties, **_RETRIES})
    if not _RETRIES.items() <= table.properties.items():
        with table.transaction() as transaction:
            transaction.set_properties(_RETRIES)
    return table


def _failed(table: str, what: str, error: Exception) -> LakeError:
    """What a catalog and its file system raise depends on their kind."""
    from pyiceberg.exceptions import CommitFailedException

    if isinstance(error, CommitFailedException):
        return LakeInUse(
            f"another process has written to the Iceberg table {table} meanwhile ({error})",
            hint="Let only one pipeline write to it, then start again: nothing is lost",
        )
    reason = " ".join(str(error).split())[:300]
    return LakeError(
        f"the Iceberg table {table} {what}: {type(error).__name__}: {reason}",
        hint="Check that the catalog and the warehouse are writable, then start again: nothing is lost",
    )


def _schema(schema: pa.Schema, kind: TableKind) -> pa.Schema:
    """The columns with their comments, which pyiceberg calls docs. Iceberg has no integers of 16 bits."""
    return pa.schema(
        field.with_type(pa.int32() if pa.types.is_int16(field.type) else field.type).with_metadata(
            {"doc": field.metadata[COMMENT]}
        )
        for field in commented(schema, kind)
    )


# --- `changes`, by copies ---------------------------------------------------------------------------------------------


class IcebergChanges:
    """The table, open for the one pipeline that writes to it."""

    def __init__(self, table: Table, name: str) -> None:
        self._table = table
        self._name = name

    @classmethod
    def open(cls, settings: IcebergSettings, lake: Lake) -> Self:
        """The table of a lake; it is made where there is none."""
        catalog = load_catalog_of(settings, lake.location)
        facts = {_BUCKET: lake.facts.bucket_uuid}
        described = {**facts, _DESCRIPTION: table_description(TableKind.CHANGES, "")}
        try:
            schema = _schema(changes_schema(xattrs=lake.facts.xattrs), TableKind.CHANGES)
            table = _open_table(catalog, settings.table, schema, described)
        except Exception as error:
            raise _failed(settings.table, "can't be opened", error) from error
        if table.properties.get(_BUCKET) != lake.facts.bucket_uuid:
            raise LakeOfOtherBucket(
                f"the Iceberg table {settings.table} does not hold the changes of this bucket",
                hint="Give the table another name, with --iceberg-table",
            )
        return cls(table, settings.table)

    @property
    def last_batch(self) -> int:
        """The number of the last batch that it has; -1 for none."""
        return int(self._table.properties.get(_BATCH, -1))

    def catch_up(self, lake: Lake) -> int:
        """Copy the batches that are missing. Returns how many those were."""
        missing = range(self.last_batch + 1, lake.last_batch + 1)
        for number in missing:
            self._copy(lake, number)
        return len(missing)

    def _copy(self, lake: Lake, number: int) -> None:
        properties = {_BATCH: str(number)}
        schema = _schema(changes_schema(xattrs=lake.facts.xattrs), TableKind.CHANGES)
        try:
            with self._table.transaction() as transaction:
                for vbucket, kept in _rollbacks(lake, number).items():
                    of_dead_branch = f"vbucket = {vbucket} and seqno > {kept} and void = false"
                    dead = self._table.scan(row_filter=of_dead_branch).to_arrow()
                    if dead.num_rows:
                        index = dead.schema.get_field_index("void")
                        void = dead.set_column(index, dead.schema.field(index), pa.repeat(True, dead.num_rows))
                        transaction.overwrite(void.cast(schema), of_dead_branch, snapshot_properties=properties)
                rows = pa.Table.from_batches(_rows(lake, number, schema), schema)
                transaction.append(rows, snapshot_properties=properties)
                transaction.set_properties(properties)
        except Exception as error:
            raise _failed(self._name, "can't be written", error) from error


def _rows(lake: Lake, number: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a batch, as the Delta table has them."""
    files = [file for file in lake.changes.files() if file.may_hold("batch", low=number, high=number)]
    for rows in read_files(lake.changes.location, files, schema.names):
        yield from rows.filter(pc.equal(rows.column("batch"), number)).cast(schema).to_batches()


def _rollbacks(lake: Lake, number: int) -> Rollbacks:
    """By vbucket, the last seqno that the batch has kept."""
    kept: Rollbacks = {}
    schema = _schema(changes_schema(xattrs=lake.facts.xattrs), TableKind.CHANGES)
    for batch in _rows(lake, number, pa.schema([schema.field(name) for name in ("vbucket", "seqno", "op", "batch")])):
        for row in batch.filter(pc.equal(batch.column("op"), "rollback")).to_pylist():
            add_rollback(kept, row["vbucket"], row["seqno"])
    return kept


# --- the documents, by their files ------------------------------------------------------------------------------------


@dataclass(slots=True)
class IcebergDocuments:
    """The tables of a lake, for the one pipeline that writes to them."""

    catalog: Catalog
    namespace: str
    tables: dict[str, Table] = field(default_factory=dict)
    """By collection, those that were opened."""
    seen: dict[str, int] = field(default_factory=dict)
    """By collection, the version of the Delta table that is there."""

    @classmethod
    def open(cls, settings: IcebergSettings, lake: Lake) -> Self:
        namespace = settings.table.rpartition(".")[0]
        return cls(load_catalog_of(settings, lake.location), namespace)

    def name_of(self, collection: str) -> str:
        """What the table of a collection is called. Other characters than these need quotes in most engines."""
        return f"{self.namespace}.documents_{plain_name(collection)}"

    def catch_up(self, lake: Lake) -> int:
        """Bring the tables up to the Delta tables. Returns how many were changed."""
        behind = [
            (name, tables)
            for name, tables in lake.tables.items()
            if tables.documents is not None and tables.documents.log.version != self.seen.get(name)
        ]
        return sum(self._catch_up(lake, name, tables) for name, tables in behind)

    def _catch_up(self, lake: Lake, name: str, tables: CollectionTables) -> bool:
        assert tables.documents is not None, "it was looked for"
        log, called = tables.documents.log, self.name_of(name)
        if log.may_have_vectors:
            raise LakeError(
                f"the Iceberg table {called} can't be kept: the table of {name} has deletion vectors, and an Iceberg "
                "table of its files would contain dead rows",
                hint="Land without --iceberg-catalog, or without deletion vectors",
            )
        typed = None if tables.columns is None else tables.columns.schema
        schema = _schema(documents_schema(xattrs=lake.facts.xattrs, typed=typed), TableKind.DOCUMENTS)
        try:
            table = self.tables.get(name) or self._open(lake, name, schema)
            live = {f"{log.location.full_uri}/{file.path}" for file in log.files()}
            held = {task.file.file_path: task.file for task in table.scan().plan_files()}
            if live != held.keys():
                gone = [held[path] for path in held.keys() - live]
                batch = tables.documents.state.batch
                _commit(table, schema, add=sorted(live - held.keys()), remove=gone, batch=batch)
            if len(table.metadata.snapshots) >= 2 * SNAPSHOTS_KEPT:
                _forget_snapshots(table)
        except LakeOfOtherBucket:
            raise
        except Exception as error:
            self.tables.pop(name, None)
            raise _failed(called, "can't be written", error) from error
        self.tables[name], self.seen[name] = table, log.version
        return live != held.keys()

    def _open(self, lake: Lake, name: str, schema: pa.Schema) -> Table:
        called, facts = self.name_of(name), {_BUCKET: lake.facts.bucket_uuid, _TABLE: name}
        described = {**facts, **_PROPERTIES, _DESCRIPTION: table_description(TableKind.DOCUMENTS, name)}
        table = _open_table(self.catalog, called, schema, described)
        if any(table.properties.get(key) != value for key, value in facts.items()):
            raise LakeOfOtherBucket(
                f"the Iceberg table {called} is not of {name} of this bucket, but of {table.properties.get(_TABLE)}",
                hint="Give another namespace, with --iceberg-table. Collections with similar names, such as a-b and "
                "a_b, need separate landings",
            )
        return table


def _commit(table: Table, schema: pa.Schema, *, add: list[str], remove: list[DataFile], batch: int) -> None:
    """Exchange files. Columns that are new to the table are added first, in the same commit."""
    from pyiceberg.io.pyarrow import parquet_files_to_data_files
    from pyiceberg.table import TableProperties

    with table.transaction() as transaction:
        with transaction.update_schema() as columns:
            columns.union_by_name(schema)
        # Readers find columns by it, and so does what reads the footers here.
        mapping = transaction.table_metadata.schema().name_mapping.model_dump_json()
        # Columns that our files have statistics of: pyiceberg logs a warning for each other one that it looks at.
        metrics = {f"write.metadata.metrics.column.{name}": "full" for name in document_ranges(schema)}
        transaction.set_properties({**metrics, TableProperties.DEFAULT_NAME_MAPPING: mapping, _BATCH: str(batch)})
        with transaction.update_snapshot(snapshot_properties={_BATCH: str(batch)}).overwrite() as files:
            for file in parquet_files_to_data_files(table.io, transaction.table_metadata, iter(add)):
                files.append_data_file(file)
            for file in remove:
                files.delete_data_file(file)


def _forget_snapshots(table: Table) -> None:
    """Forget the oldest snapshots, and delete the lists that no other one has. A crash in between leaves some."""
    held = {ref.snapshot_id for ref in table.metadata.refs.values()}
    snapshots = sorted(table.metadata.snapshots, key=lambda snapshot: snapshot.sequence_number or 0)
    old = [snapshot for snapshot in snapshots[:-SNAPSHOTS_KEPT] if snapshot.snapshot_id not in held]
    kept = [snapshot for snapshot in snapshots if snapshot not in old]
    needed = {manifest.manifest_path for snapshot in kept for manifest in snapshot.manifests(table.io)}
    lists = {manifest.manifest_path for snapshot in old for manifest in snapshot.manifests(table.io)} - needed
    table.maintenance.expire_snapshots().by_ids([snapshot.snapshot_id for snapshot in old]).commit()
    for path in lists | {snapshot.manifest_list for snapshot in old}:
        with contextlib.suppress(OSError):
            # What can't be deleted is in no one's way.
            table.io.delete(path)
