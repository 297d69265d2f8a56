"""The tables of documents as Iceberg tables as well: the same files, in the lists of both.

A table of documents is a list of Parquet files, and a merge takes some out and puts others in. The Iceberg table of a
collection is that list in the metadata of Iceberg: after each merge, one commit of the catalog takes out what the Delta
table has no more, and puts in what is new. No row is copied, so it costs what the footers of the new files cost. What
the table holds says itself what is missing: there is nothing to remember, and a crash between the two commits has the
next look complete it. A rollback has no part here: what it takes back, the merge has taken back.

Files do not carry Iceberg's field ids: the table has a mapping by names for its readers (the property
`schema.name-mapping.default`). The column that the Delta table is partitioned by is not in its files, and so not in the
Iceberg table. Files belong to the Delta table: its upkeep deletes them some time after a merge has replaced them
(`--keep-files`), and no engine may delete them by way of Iceberg.

`landing_loop` calls it after merges, and when it begins.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from headwater.errors import LakeInUse, LakeOfOtherBucket
from headwater.lake.collection_tables import CollectionTables
from headwater.lake.iceberg_changes import (
    BATCH,
    BUCKET,
    IcebergSettings,
    failed,
    iceberg_schema,
    load_catalog_of,
    open_table,
)
from headwater.lake.lake import Lake
from headwater.lake.layout import document_ranges, documents_schema
from headwater.lake.location import Location

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

_TABLE = "headwater.table"
"""A property: the collection that the table is of."""
SNAPSHOTS_KEPT = 32
"""Older ones are forgotten: all of them are in the metadata, which every commit writes again."""
_PROPERTIES = {
    # Engines then refuse to delete files of the table, which are the Delta table's.
    "gc.enabled": "false",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.metrics.default": "none",
}


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
        return f"{self.namespace}.documents_{re.sub('[^A-Za-z0-9_]', '_', collection)}"

    def catch_up(self, lake: Lake) -> int:
        """Bring the tables up to the Delta tables. Returns how many were changed."""
        behind = [
            (name, tables)
            for name, tables in lake.tables.items()
            if tables.documents is not None and tables.documents.log.version != self.seen.get(name)
        ]
        return sum(self._catch_up(lake, name, tables) for name, tables in behind)

    def _catch_up(self, lake: Lake, name: str, tables: CollectionTables) -> bool:
        from pyiceberg.exceptions import CommitFailedException

        assert tables.documents is not None, "it was looked for"
        log, called = tables.documents.log, self.name_of(name)
        typed = None if tables.columns is None else tables.columns.schema
        schema = iceberg_schema(documents_schema(xattrs=lake.facts.xattrs, typed=typed))
        try:
            table = self.tables.get(name) or self._open(lake, name, schema)
            live = {f"{_uri(log.location)}/{file.path}" for file in log.files()}
            held = {task.file.file_path: task.file for task in table.scan().plan_files()}
            if live != held.keys():
                gone = [held[path] for path in held.keys() - live]
                batch = tables.documents.state.batch
                _commit(table, schema, add=sorted(live - held.keys()), remove=gone, batch=batch)
            if len(table.metadata.snapshots) >= 2 * SNAPSHOTS_KEPT:
                _forget_snapshots(table)
        except CommitFailedException as error:
            self.tables.pop(name, None)
            raise LakeInUse(
                f"another process has written to the Iceberg table {called} meanwhile ({error})",
                hint="Let only one pipeline write to it, then start again: nothing is lost",
            ) from error
        except LakeOfOtherBucket:
            raise
        except Exception as error:
            # What a catalog and its file system raise depends on their kind.
            self.tables.pop(name, None)
            raise failed(called, "can't be written", error) from error
        self.tables[name], self.seen[name] = table, log.version
        return live != held.keys()

    def _open(self, lake: Lake, name: str, schema: pa.Schema) -> Table:
        called, facts = self.name_of(name), {BUCKET: lake.facts.bucket_uuid, _TABLE: name}
        table = open_table(self.catalog, called, schema, {**facts, **_PROPERTIES})
        if any(table.properties.get(key) != value for key, value in facts.items()):
            raise LakeOfOtherBucket(
                f"the Iceberg table {called} is not of {name} of this bucket, but of {table.properties.get(_TABLE)}",
                hint="Give another namespace, with --iceberg-table. Of collections with like names, a-b and a_b, each "
                "needs a landing of its own",
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
        transaction.set_properties({**metrics, TableProperties.DEFAULT_NAME_MAPPING: mapping, BATCH: str(batch)})
        with transaction.update_snapshot(snapshot_properties={BATCH: str(batch)}).overwrite() as files:
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


def _uri(location: Location) -> str:
    """With a scheme, as engines of other languages want it."""
    return f"file://{Path(location.uri).absolute()}" if location.is_local else location.uri
