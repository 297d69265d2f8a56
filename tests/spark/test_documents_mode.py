"""`mode=documents`: one row a live document, with its fields as columns."""

from __future__ import annotations

import random
from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

import headwater.spark
from headwater.client.batches import RAW_SCHEMA
from headwater.errors import HeadwaterError, InvalidInput
from headwater.spark import rows as spark_rows
from headwater.spark.rows import live_documents
from support.cases import each
from support.landings import SourceBucket
from support.node_process import PASSWORD, USER

LOGIN: Any = {"user": USER, "password": PASSWORD}


def read(bucket: SourceBucket, schema: pa.Schema | None = None, **options: str) -> list[dict[str, Any]]:
    from headwater.spark.source import DcpDataSource  # PySpark 3.5 has no sources

    source = DcpDataSource({**bucket.options, "mode": "documents", **options})
    reader: Any = source.reader(source.schema() if schema is None else from_arrow_schema(schema))
    with closing(reader._watch):
        return [row for one in reader.partitions() for batch in reader.read(one) for row in batch.to_pylist()]


def fill(bucket: SourceBucket) -> None:
    bucket.create_scope("shop")
    bucket.create_collection("shop.orders")
    for number in range(20):
        bucket.put([b"o-%d" % number], b'{"n":%d,"of":"me"}' % number, into="shop.orders")
    bucket.put([b"o-3"], b'{"n":33,"of":null}', into="shop.orders")
    bucket.delete([b"o-4"], of="shop.orders")
    bucket.put_each({b"plain": b"no json", b"wrong": b'{"n":"x"}'})


def test_rows_are_live_documents(bucket: SourceBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_rows, "HELD_CHANGES_MAX", 8)
    fill(bucket)
    orders = {f"o-{number}": 33 if number == 3 else number for number in range(20) if number != 4}
    rows = read(bucket, pa.schema([("key", pa.string()), ("n", pa.int32())]))
    assert {row["key"]: row["n"] for row in rows} == {**orders, "plain": None, "wrong": None}
    assert len(rows) == len(orders) + 2

    inferred = read(bucket, collections="shop.orders")
    assert sorted(map(tuple, (row.items() for row in inferred)))[0] == (
        ("scope", "shop"),
        ("collection", "orders"),
        ("key", "o-0"),
        ("document", '{"n":0,"of":"me"}'),
        ("n", 0),
        ("of", "me"),
    )
    assert {row["key"]: row["n"] for row in inferred} == orders
    assert read(bucket, columns="n", where="key = 'o-7' AND collection = 'orders'") == [{"n": 7}]
    assert {row["key"] for row in read(bucket, columns="key", scopes="shop")} == orders.keys()


@each(
    ("options", "schema", "sentence"),
    [
        ({"startingOffsets": "now"}, None, "startingOffsets is for changes"),
        ({"where": "op = 'mutation'"}, None, "a condition on op is for changes"),
        ({}, pa.schema([("key", pa.int32())]), "the column key is a string"),
        ({}, pa.schema([("seqno", pa.int64())]), "column 'seqno' of its own"),
        ({"columns": "nothing"}, None, "has a field 'nothing'"),
    ],
)
def test_what_can_not_be(
    bucket: SourceBucket, options: dict[str, str], schema: pa.Schema | None, sentence: str
) -> None:
    with pytest.raises(HeadwaterError) as caught:
        read(bucket, schema, **options)
    assert sentence in str(caught.value)


def test_a_stream_has_no_documents(bucket: SourceBucket) -> None:
    from headwater.spark.source import DcpDataSource

    with pytest.raises(InvalidInput, match="a stream has changes"):
        DcpDataSource({**bucket.options, "mode": "documents"}).streamReader(StructType())


def test_live_documents_are_those_of_a_model() -> None:
    chance = random.Random(7)
    for _ in range(30):
        model: dict[tuple[int, bytes], int] = {}
        rows = []
        for seqno in range(1, chance.randrange(2, 60)):
            id_, key = chance.randrange(8, 10), b"%d" % chance.randrange(6)
            op = chance.choice(["mutation"] * 4 + ["deletion", "expiration", "collection_dropped"])
            rows.append({"op": op, "seqno": seqno, "collection_id": id_, "key": None if "_" in op else key})
            if op == "mutation":
                model[id_, key] = seqno
            elif op == "collection_dropped":
                model = {place: at for place, at in model.items() if place[0] != id_}
            else:
                model.pop((id_, key), None)
        full = [{field.name: None if field.nullable else 0 for field in RAW_SCHEMA} | row for row in rows]
        cut = chance.randrange(len(full) + 1)
        batches = [pa.RecordBatch.from_pylist(part, RAW_SCHEMA) for part in (full[:cut], full[cut:]) if part]
        found = live_documents(pa.Table.from_batches(batches)).to_pylist()
        assert {(row["collection_id"], row["key"]): row["seqno"] for row in found} == model
        assert len(found) == len(model)


@pytest.mark.spark_versions("dcp, batch", since="4.0")
def test_in_spark(spark: SparkSession, bucket: SourceBucket) -> None:
    fill(bucket)
    frame = headwater.spark.read(spark, bucket.url, **LOGIN, mode="documents", schema="key STRING, n INT, of STRING")
    totals = frame.where("n >= 10 AND of = 'me'").agg({"n": "sum", "key": "count"}).collect()[0]
    assert (totals["sum(n)"], totals["count(key)"]) == (sum(range(10, 20)), 10)
    assert frame.where("key = 'o-3'").collect()[0].n == 33
    inferred = headwater.spark.read(spark, bucket.url, **LOGIN, mode="documents", scopes="shop")
    assert inferred.dtypes[4:] == [("n", "bigint"), ("of", "string")]
    assert inferred.count() == 19
    with pytest.raises(InvalidInput, match="is for changes"):
        headwater.spark.read(spark, bucket.url, **LOGIN, mode="documents", value="string").count()
