"""The catalog of a Spark session. There is no jar of Delta here: what Spark says then, and all else by Parquet."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

import headwater.spark
from headwater.errors import CatalogError
from headwater.lake.catalogs import TableEntry
from headwater.spark import session as module
from headwater.spark.session import SessionCatalog
from support.landings import SourceBucket, check_tables
from support.node_process import PASSWORD, USER


def entry(folder: Path) -> TableEntry:
    return TableEntry(table="documents/a.b", uri=f"file://{folder}", columns=(), comment="It has rows")


def test_a_table_is_registered_once_and_never_moved(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    pq.write_table(pa.table({"n": [1, 2]}), folder / "one.parquet")
    monkeypatch.setattr(module, "PROVIDER", "parquet")
    catalog = SessionCatalog(spark, "spark_catalog")
    try:
        for _ in range(2):
            catalog.register("lake", entry(folder))
        assert spark.table("lake.documents_a_b").count() == 2
        with pytest.raises(CatalogError, match=r"has spark_catalog\.lake\.documents_a_b already, and it is at"):
            catalog.register("lake", entry(tmp_path / "other"))
    finally:
        spark.sql("DROP SCHEMA IF EXISTS lake CASCADE")
    with pytest.raises(CatalogError, match="Spark does not register the table"):
        SessionCatalog(spark, "missing").register("lake", entry(folder))


def test_a_landing_goes_on_where_the_session_has_no_delta(
    spark: SparkSession, bucket: SourceBucket, tmp_path: Path
) -> None:
    statement = "CREATE TABLE `main`.`lake`.`documents_a_b` USING delta LOCATION 'it\\'s here'"
    plan = spark._jsparkSession.sessionState().sqlParser().parsePlan(statement)  # type: ignore[attr-defined]
    assert "CreateTable" in plan.toString()
    bucket.put([b"a"], b'{"n":1}')
    login = {"user": USER, "password": PASSWORD}
    query = headwater.spark.land(
        spark, bucket.url, str(tmp_path / "lake"), catalog="spark", schema="none", min_partitions=2, **login
    )
    query.awaitTermination()
    assert query.landing_status.tables_unregistered == 2
    assert query.landing_status.catalog_failure == (
        "changes is not up to date in the catalog: the Spark session has no Delta Lake, which its catalog needs. Start "
        "it with Delta's package and extension, or give unity:// or glue:// in --catalog"
    )
    check_tables(bucket, tmp_path / "lake")
    spark.sql("DROP SCHEMA none CASCADE")
