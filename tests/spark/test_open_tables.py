"""The tables are plain Delta tables: any engine that reads those, reads all of these, and sees the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from pyspark.sql.types import StructType

from headwater.lake.documents_merge import MergeRules
from headwater.landing.query import Landing
from support.driven_source import RunHere, SimulatedLanding
from support.landings import SourceBucket
from support.object_store import S3Server

VBUCKET = 1
KEYS = 6
PEOPLE = "_default.people"
DEFAULT = "_default._default"
TABLES = (
    "changes",
    *(f"{kind}/{name}" for kind in ("documents", "history") for name in (PEOPLE, DEFAULT)),
    f"rejects/{PEOPLE}",
)

Rows = list[dict[str, Any]]


@dataclass
class OpenLake:
    """Everything is in it: updates, removals, a binary document, a rollback, typed columns, rejects, history."""

    bucket: SourceBucket
    landing: Landing

    def __post_init__(self) -> None:
        bucket, keys = self.bucket, self.bucket.keys("key", KEYS, vbucket=VBUCKET)
        bucket.create_collection(PEOPLE)
        for number, key in enumerate(keys):
            bucket.put([key], b'{"name":"%d","age":%d}' % (number, 20 + number), into=PEOPLE)
        bucket.put([b"odd"], b'{"name":"odd","age":"unknown"}', into=PEOPLE)
        bucket.put([b"binary"], b"\x00\xff")
        self._land()
        kept_seqno = bucket.high_seqnos()[VBUCKET]
        bucket.delete(keys[:2], of=PEOPLE)
        bucket.put(keys[2:3], b'{"name":"lost","age":99}', into=PEOPLE)
        self._land()
        bucket.fail_over(VBUCKET, kept_seqno)
        bucket.put(keys[3:4], b'{"name":"new","age":44}', into=PEOPLE)
        self._land()

    def _land(self) -> None:
        self.landing.start(RunHere()).awaitTermination()

    def table(self, name: str) -> Table:
        return Table(f"{self.landing.into}/{name}", self.landing.storage_options)


@dataclass(frozen=True)
class Table:
    uri: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def delta(self) -> DeltaTable:
        return DeltaTable(self.uri, storage_options=dict(self.options) or None)


# --- readers ------------------------------------------------------------------------------------------------------


def with_deltalake(table: Table) -> Rows:
    rows: Rows = table.delta.to_pyarrow_table().to_pylist()
    return rows


def with_pandas(table: Table) -> Rows:
    frame: pd.DataFrame = table.delta.to_pandas().astype(object)
    return [{name: None if _is_missing(value) else value for name, value in row.items()} for row in _records(frame)]


def _records(frame: pd.DataFrame) -> Rows:
    records: Rows = frame.to_dict("records")
    return records


def _is_missing(value: Any) -> bool:
    return not isinstance(value, list | bytes | str) and bool(pd.isna(value))


def with_polars(table: Table) -> Rows:
    return pl.scan_delta(table.uri, storage_options=dict(table.options) or None).collect().to_dicts()


def with_duckdb(table: Table) -> Rows:
    """Its own Delta extension has to be downloaded. Without it, Arrow carries the table over, file by file."""
    with duckdb.connect(config={"autoinstall_known_extensions": False}) as connection:
        connection.sql("SET TimeZone = 'UTC'")
        connection.register("delta", table.delta.to_pyarrow_dataset())
        found = connection.sql("SELECT * FROM delta")
        return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def with_spark(spark: SparkSession) -> Callable[[Table], Rows]:
    def read(table: Table) -> Rows:
        if table.options:
            # Stock PySpark has no file system for a store.
            frame = spark.createDataFrame(table.delta.to_pyarrow_table())
        else:
            # Delta's schemas are Spark's. Without one, Spark would take `is_current`, a partition, for a text.
            schema = StructType.fromJson(json.loads(table.delta.schema().to_json()))
            frame = spark.read.schema(schema).option("basePath", table.uri).parquet(*table.delta.file_uris())
        return [row.asDict(recursive=True) for row in frame.collect()]

    return read


def comparable(rows: Rows) -> list[Any]:
    """Rows in one order, and values in one form."""

    def plain(value: Any) -> Any:
        match value:
            case datetime():
                return (value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)).isoformat()
            case date():
                return value.isoformat()
            case bytearray():
                return bytes(value)
            case _:
                return value

    return sorted((sorted((name, plain(value)) for name, value in row.items()) for row in rows), key=repr)


# --- the tables ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["directory", "S3"])
def lake(bucket: SourceBucket, tmp_path: Path, request: pytest.FixtureRequest) -> OpenLake:
    landing = SimulatedLanding(
        bucket, tmp_path / "lake", rules=MergeRules(history=True), columns={PEOPLE: "name STRING, age INT"}
    ).landing
    if request.param == "S3":
        store: S3Server = request.getfixturevalue("store")
        landing = replace(landing, into=f"{store.make_bucket('open')}/lake", storage_options=store.options)
    return OpenLake(bucket, landing)


def test_every_engine_reads_every_table(lake: OpenLake, spark: SparkSession) -> None:
    readers = {
        "pandas": with_pandas,
        "Polars": with_polars,
        "DuckDB": with_duckdb,
        "Spark": with_spark(spark),
    }
    for name in TABLES:
        table = lake.table(name)
        expected = comparable(with_deltalake(table))
        assert expected, f"{name} is empty"
        protocol = table.delta.protocol()
        assert (protocol.min_reader_version, protocol.min_writer_version) == (1, 2), "what the oldest engines read"
        for engine, read in readers.items():
            assert comparable(read(table)) == expected, f"{engine} reads {name}"
    _check_content(lake)


def _check_content(lake: OpenLake) -> None:
    def read(name: str) -> Rows:
        return with_deltalake(lake.table(name))

    keys = [key.decode() for key in lake.bucket.keys("key", KEYS, vbucket=VBUCKET)]
    documents = {row["key"]: row for row in read(f"documents/{PEOPLE}")}
    assert {key: (row["name"], row["age"]) for key, row in documents.items()} == {
        **{key: (str(number), 20 + number) for number, key in enumerate(keys)},
        keys[3]: ("new", 44),
        "odd": ("odd", None),
    }
    assert documents[keys[0]]["document"] == '{"name":"0","age":20}'
    assert documents[keys[0]]["changed_at"] > datetime(2025, 1, 1, tzinfo=UTC)
    (binary,) = read(f"documents/{DEFAULT}")
    assert (binary["key"], binary["document"], bytes(binary["content"])) == ("binary", None, b"\x00\xff")
    (reject,) = read(f"rejects/{PEOPLE}")
    assert reject["key"] == "odd"
    assert "age" in reject["reason"]
    versions = [row for row in read(f"history/{PEOPLE}") if row["key"] == keys[3]]
    assert sorted((row["is_current"], row["document"]) for row in versions) == [
        (False, '{"name":"3","age":23}'),
        (True, '{"name":"new","age":44}'),
    ]
    changes = read("changes")
    assert len([row for row in changes if row["op"] == "rollback"]) == 1
    assert {row["key"] for row in changes if row["void"]} >= set(keys[:3])
