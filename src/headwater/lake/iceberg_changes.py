"""`changes` as an Iceberg table as well, for engines that read Iceberg: it follows the Delta table, batch by batch.

The Delta table is the truth. After each batch, what the Iceberg table lacks is copied from there: the rows of the batch
are appended, and what its rollbacks took back is marked void, all in one commit of the catalog that also says which
batch it was (the table property `headwater.batch`). A crash before that commit has the batch copied by the next run;
a batch that is replayed is found to be there. So each table is exact by itself, and Iceberg is a batch behind at worst.

The driver does the copying, with pyiceberg: there is no jar in it. Files are not shared with the Delta table, whose
upkeep deletes its own. Upkeep of the Iceberg table is the owner's affair.

`landing_loop` calls it before and after each batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pyarrow as pa
import pyarrow.compute as pc

from headwater.client.options import names_keywords
from headwater.errors import InvalidInput, LakeError, LakeInUse, LakeOfOtherBucket
from headwater.lake.data_files import read_files
from headwater.lake.lake import Lake
from headwater.lake.layout import changes_schema
from headwater.lake.location import Location
from headwater.lake.rollbacks import Rollbacks, add_rollback
from headwater.phrases import install_command

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

TABLE_DEFAULT = "headwater.changes"
BATCH = "headwater.batch"
BUCKET = "headwater.bucket_uuid"


@names_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class IcebergSettings:
    """Where the table is. It is pickled with the pipeline."""

    catalog: str
    """A name from pyiceberg's own configuration, or the URI of a catalog, such as `sqlite:////data/catalog.db`."""
    table: str = TABLE_DEFAULT
    """Namespace and name of `changes`. The tables of documents are in the same namespace."""


class IcebergChanges:
    """The table, open for the one pipeline that writes to it."""

    def __init__(self, table: Table, name: str) -> None:
        self._table = table
        self._name = name

    @classmethod
    def open(cls, settings: IcebergSettings, lake: Lake) -> Self:
        """The table of a lake; it is made where there is none."""
        catalog = load_catalog_of(settings, lake.location)
        facts = {BUCKET: lake.facts.bucket_uuid}
        try:
            schema = iceberg_schema(changes_schema(xattrs=lake.facts.xattrs))
            table = open_table(catalog, settings.table, schema, facts)
        except Exception as error:
            # What a catalog raises depends on its kind.
            raise failed(settings.table, "can't be opened", error) from error
        if table.properties.get(BUCKET) != lake.facts.bucket_uuid:
            raise LakeOfOtherBucket(
                f"the Iceberg table {settings.table} does not hold the changes of this bucket",
                hint="Give the table another name, with --iceberg-table",
            )
        return cls(table, settings.table)

    @property
    def last_batch(self) -> int:
        """The number of the last batch that it has; -1 for none."""
        return int(self._table.properties.get(BATCH, -1))

    def catch_up(self, lake: Lake) -> int:
        """Copy the batches that are missing. Returns how many those were."""
        missing = range(self.last_batch + 1, lake.last_batch + 1)
        for number in missing:
            self._copy(lake, number)
        return len(missing)

    def _copy(self, lake: Lake, number: int) -> None:
        from pyiceberg.exceptions import CommitFailedException

        properties = {BATCH: str(number)}
        schema = iceberg_schema(changes_schema(xattrs=lake.facts.xattrs))
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
        except CommitFailedException as error:
            raise LakeInUse(
                f"another process has written to the Iceberg table {self._name} meanwhile ({error})",
                hint="Let only one pipeline write to it, then start again: nothing is lost",
            ) from error
        except Exception as error:
            raise failed(self._name, "can't be written", error) from error


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
        raise InvalidInput(f"{settings.table!r} is no name of an Iceberg table", hint="Write namespace.table")
    store = {_FILE_IO[name]: value for name, value in lake.options.items() if name in _FILE_IO}
    try:
        if "://" not in settings.catalog:
            return load_catalog(settings.catalog, **store)
        warehouse = f"file://{Path(lake.uri).absolute()}" if lake.is_local else lake.uri
        return load_catalog("headwater", uri=settings.catalog, warehouse=f"{warehouse}/iceberg", **store)
    except Exception as error:
        # The URI may hold a password, and what is raised may repeat the URI.
        raise InvalidInput(
            f"the Iceberg catalog can't be used ({type(error).__name__})",
            hint="Give a name from .pyiceberg.yaml, or a URI such as sqlite:////data/catalog.db",
        ) from error


_RETRIES = {"commit.retry.num-retries": "0"}
"""pyiceberg would apply a commit again on top of another one: a batch that two processes copy would be there twice."""


def open_table(catalog: Catalog, name: str, schema: pa.Schema, properties: Mapping[str, str]) -> Table:
    """A table of the catalog; it is made where there is none."""
    catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
    table = catalog.create_table_if_not_exists(name, schema, properties={**properties, **_RETRIES})
    if not _RETRIES.items() <= table.properties.items():
        with table.transaction() as transaction:
            transaction.set_properties(_RETRIES)
    return table


def failed(table: str, what: str, error: Exception) -> LakeError:
    reason = " ".join(str(error).split())[:300]
    return LakeError(
        f"the Iceberg table {table} {what}: {type(error).__name__}: {reason}",
        hint="See that the catalog and the warehouse can be written, then start again: nothing is lost",
    )


def iceberg_schema(schema: pa.Schema) -> pa.Schema:
    """Iceberg has no integers of 16 bits."""
    return pa.schema([field.with_type(pa.int32()) if pa.types.is_int16(field.type) else field for field in schema])


def _rows(lake: Lake, number: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a batch, as the Delta table has them."""
    files = [file for file in lake.changes.files() if file.may_hold("batch", low=number, high=number)]
    for rows in read_files(lake.changes.location, files, schema.names):
        yield from rows.filter(pc.equal(rows.column("batch"), number)).cast(schema).to_batches()


def _rollbacks(lake: Lake, number: int) -> Rollbacks:
    """By vbucket, the last seqno that the batch has kept."""
    kept: Rollbacks = {}
    schema = iceberg_schema(changes_schema(xattrs=lake.facts.xattrs))
    for batch in _rows(lake, number, pa.schema([schema.field(name) for name in ("vbucket", "seqno", "op", "batch")])):
        for row in batch.filter(pc.equal(batch.column("op"), "rollback")).to_pylist():
            add_rollback(kept, row["vbucket"], row["seqno"])
    return kept
