"""The catalog of a Spark session: its own one, a Hive metastore, Unity Catalog, or any other that Spark knows."""

from __future__ import annotations

from dataclasses import dataclass

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import Row, SparkSession

from headwater.errors import CatalogError, CatalogUnreachable
from headwater.lake.catalogs import TableEntry
from headwater.spark.query_errors import query_error

PROVIDER = "delta"
_NO_PROVIDER = "DATA_SOURCE_NOT_FOUND"
_LOCATION = "Location"


@dataclass(frozen=True, slots=True)
class SessionCatalog:
    """A catalog of a session that has Delta Lake. It needs no columns: Delta reads them from the log of the table, with
    all comments, each time that the table is used."""

    spark: SparkSession
    name: str | None = None
    """None for the current catalog of the session."""

    def register(self, schema: str, entry: TableEntry) -> None:
        parts = [schema, entry.name] if self.name is None else [self.name, schema, entry.name]
        full_name = ".".join(map(_quoted, parts))
        try:
            if self.spark.catalog.tableExists(full_name):
                entry.is_current(".".join(parts), uri=self._uri_of(full_name), properties={})
                return
            self.spark.sql(f"CREATE SCHEMA IF NOT EXISTS {'.'.join(map(_quoted, parts[:-1]))}")
            self.spark.sql(f"CREATE TABLE {full_name} USING {PROVIDER} LOCATION {_literal(entry.uri)}")
        except (PySparkException, Py4JJavaError) as error:
            if _NO_PROVIDER in str(error):
                raise CatalogUnreachable(
                    "the Spark session has no Delta Lake, which its catalog needs",
                    hint="Start it with Delta's package and extension, or give unity:// or glue:// in --catalog",
                ) from error
            raise CatalogError(
                f"Spark does not register the table: {query_error(error).reason}",
                hint="Check the catalog's name in --catalog, and that the session can write to it",
            ) from error
        except (Py4JError, ConnectionError) as error:
            raise CatalogUnreachable("the Spark session has ended", hint="Start the landing again") from error

    def _uri_of(self, full_name: str) -> str:
        rows: list[Row] = self.spark.sql(f"DESCRIBE TABLE EXTENDED {full_name}").collect()
        return next((str(row[1]) for row in reversed(rows) if row[0] == _LOCATION), "")


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
