"""`changes` and the tables of documents as Iceberg tables, too, for engines that read Iceberg.

The Delta tables are the source of truth. The driver keeps the Iceberg tables with pyiceberg, without any jar.

`changes` is copied, batch by batch (`IcebergChanges`). One commit of the catalog appends the rows of a batch, marks
what its rollbacks took back as void, and records the batch's number (in the table property `headwater.batch`). After a
crash before that commit the next run copies the batch; after it, the next run finds the batch there. So each table is
exact by itself, and Iceberg is a batch behind at worst. Files are not shared with the Delta table, whose upkeep deletes
its own. Upkeep of the Iceberg table is left to its owner.

The tables of documents share the files of the Delta tables (`IcebergDocuments`). A table of documents is a list of
Parquet files; a merge removes some and adds others. The Iceberg table of a collection is that list in Iceberg's
metadata: after each merge, one commit of the catalog removes the files that left the Delta table, and adds the new
ones. No row is copied, so the cost is that of reading the new files' footers. Comparing the two lists shows what is
missing, so the next run completes what a crash between the two commits has left out.

Files do not carry Iceberg's field ids, so the table has a name mapping for its readers (the property
`schema.name-mapping.default`). The partition column of the Delta table is not in its files, and so not in the Iceberg
table. Files belong to the Delta table: its upkeep deletes them some time after a merge has replaced them
(`--keep-files`), and no engine may delete them through Iceberg.

`landing.loop` calls this module before and after each batch, and after merges.
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
"""A property: the collection whose documents the table has."""
_DESCRIPTION = "comment"
"""A property that catalogs and engines show as the description of the table."""
SNAPSHOTS_KEPT = 32
"""Older snapshots are expired: the metadata lists all of them, and every commit rewrites it."""
_PROPERTIES = {
    # This makes engines refuse to delete files of the table, which belong to the Delta table.
    "gc.enabled": "false",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.metrics.default": "none",
}
_RETRIES = {"commit.retry.num-retries": "0"}
"""pyiceberg would reapply a failed commit on top of another one: a batch copied by two processes would appear twice."""


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
"""The options of a lake's store, with their names in pyiceberg. Anything else comes from pyiceberg's configuration."""


def load_catalog_of(settings: IcebergSettings, lake: Location) -> Catalog:
    """Return the catalog; a new one keeps its tables in the directory of the lake, beside the others."""
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
            # The service decides where tables lie; to it, a warehouse is a name.
            return load_catalog("headwater", uri=settings.catalog, **store)
        return load_catalog("headwater", uri=settings.catalog, warehouse=f"{lake.full_uri}/iceberg", **store)
    except Exception as error:
        # The URI may contain a password, and the message of the error may repeat the URI.
        raise InvalidInput(
            f"the Iceberg catalog can't be used ({type(error).__name__})",
            hint="Give a name from .pyiceberg.yaml, or a URI such as sqlite:////data/catalog.db",
        ) from error


def _open_table(catalog: Catalog, name: str, schema: pa.Schema, properties: Mapping[str, str]) -> Table:
    """Return a table of the catalog, created if it is missing."""
    catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
    table = catalog.create_table_if_not_exists(name, schema, properties={**properties, **_RETRIES})
    if not _RETRIES.items() <= table.properties.items():
        with table.transaction() as transaction:
            transaction.set_properties(_RETRIES)
    return table


def _failed(table: str, what: str, error: Exception) -> LakeError:
    """Convert an error. Its class depends on the kind of catalog and file system."""
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
    """Return the columns with their comments, which pyiceberg calls docs. Iceberg has no 16-bit integers."""
    return pa.schema(
        field.with_type(pa.int32() if pa.types.is_int16(field.type) else field.type).with_metadata(
            {"doc": field.metadata[COMMENT]}
        )
        for field in commented(schema, kind)
    )


# --- `changes`, by copies ---------------------------------------------------------------------------------------------


class IcebergChanges:
    """The Iceberg table of `changes`, open for the one pipeline that writes to it."""

    def __init__(self, table: Table, name: str) -> None:
        self._table = table
        self._name = name

    @classmethod
    def open(cls, settings: IcebergSettings, lake: Lake) -> Self:
        """Return the table of a lake, created if it is missing."""
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
        """The number of the last batch in it; -1 if there is none."""
        return int(self._table.properties.get(_BATCH, -1))

    def catch_up(self, lake: Lake) -> int:
        """Copy the missing batches. Returns their number."""
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
    """Yield the rows of a batch from the Delta table."""
    files = [file for file in lake.changes.files() if file.may_hold("batch", low=number, high=number)]
    for rows in read_files(lake.changes.location, files, schema.names):
        yield from rows.filter(pc.equal(rows.column("batch"), number)).cast(schema).to_batches()


def _rollbacks(lake: Lake, number: int) -> Rollbacks:
    """Return the last seqno that the batch's rollbacks kept, by vbucket."""
    kept: Rollbacks = {}
    schema = _schema(changes_schema(xattrs=lake.facts.xattrs), TableKind.CHANGES)
    for batch in _rows(lake, number, pa.schema([schema.field(name) for name in ("vbucket", "seqno", "op", "batch")])):
        for row in batch.filter(pc.equal(batch.column("op"), "rollback")).to_pylist():
            add_rollback(kept, row["vbucket"], row["seqno"])
    return kept


# --- the documents, by their files ------------------------------------------------------------------------------------


@dataclass(slots=True)
class IcebergDocuments:
    """The Iceberg tables of documents, for the one pipeline that writes to them."""

    catalog: Catalog
    namespace: str
    tables: dict[str, Table] = field(default_factory=dict)
    """By collection: the tables opened so far."""
    seen: dict[str, int] = field(default_factory=dict)
    """By collection: the version of the Delta table that the Iceberg table has."""

    @classmethod
    def open(cls, settings: IcebergSettings, lake: Lake) -> Self:
        namespace = settings.table.rpartition(".")[0]
        return cls(load_catalog_of(settings, lake.location), namespace)

    def name_of(self, collection: str) -> str:
        """Return the table's name for a collection. Other characters would need quotes in most engines."""
        return f"{self.namespace}.documents_{plain_name(collection)}"

    def catch_up(self, lake: Lake) -> int:
        """Bring the tables up to date with the Delta tables. Returns how many have changed."""
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
    """Exchange files. New columns are added in the same commit."""
    from pyiceberg.io.pyarrow import parquet_files_to_data_files
    from pyiceberg.table import TableProperties

    with table.transaction() as transaction:
        with transaction.update_schema() as columns:
            columns.union_by_name(schema)
        # Readers find columns by this mapping, and so does pyiceberg when it reads the footers below.
        mapping = transaction.table_metadata.schema().name_mapping.model_dump_json()
        # Our files have statistics of these columns: pyiceberg logs a warning for each other one that it inspects.
        metrics = {f"write.metadata.metrics.column.{name}": "full" for name in document_ranges(schema)}
        transaction.set_properties({**metrics, TableProperties.DEFAULT_NAME_MAPPING: mapping, _BATCH: str(batch)})
        with transaction.update_snapshot(snapshot_properties={_BATCH: str(batch)}).overwrite() as files:
            for file in parquet_files_to_data_files(table.io, transaction.table_metadata, iter(add)):
                files.append_data_file(file)
            for file in remove:
                files.delete_data_file(file)


def _forget_snapshots(table: Table) -> None:
    """Expire the oldest snapshots, and delete manifests that no other snapshot uses. A crash in between leaves some."""
    held = {ref.snapshot_id for ref in table.metadata.refs.values()}
    snapshots = sorted(table.metadata.snapshots, key=lambda snapshot: snapshot.sequence_number or 0)
    old = [snapshot for snapshot in snapshots[:-SNAPSHOTS_KEPT] if snapshot.snapshot_id not in held]
    kept = [snapshot for snapshot in snapshots if snapshot not in old]
    needed = {manifest.manifest_path for snapshot in kept for manifest in snapshot.manifests(table.io)}
    lists = {manifest.manifest_path for snapshot in old for manifest in snapshot.manifests(table.io)} - needed
    table.maintenance.expire_snapshots().by_ids([snapshot.snapshot_id for snapshot in old]).commit()
    for path in lists | {snapshot.manifest_list for snapshot in old}:
        with contextlib.suppress(OSError):
            # Files that can't be deleted do no harm.
            table.io.delete(path)
