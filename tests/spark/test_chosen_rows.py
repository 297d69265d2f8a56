"""Reads of some columns and some rows: what comes is what Spark would have left, and nothing else is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import headwater.spark
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.spark.versions import ReadMaxRows
from support.cases import each
from support.driven_source import DrivenStream, batch_reader, read_batch
from support.landings import SourceBucket
from support.node_process import PASSWORD, USER

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


@pytest.fixture
def shop(bucket: SourceBucket) -> SourceBucket:
    """Two collections beside the default one, with documents in all vbuckets and some that were removed."""
    bucket.create_scope("shop")
    for name in ("orders", "users"):
        bucket.create_collection(f"shop.{name}")
        keys = [b"%s-%d" % (name.encode(), number) for number in range(12)]
        bucket.put(keys, b'{"n":1}', into=f"shop.{name}")
        bucket.delete(keys[:3], of=f"shop.{name}")
    bucket.put([b"a", b"b", b"\xffa", b"it's"], b'{"n":2}')
    return bucket


def as_set(rows: list[dict[str, Any]]) -> set[Any]:
    return {(row["vbucket"], row["seqno"], row["op"], row["scope"], row["collection"], row["key"]) for row in rows}


Judge = Callable[[dict[str, Any]], bool]


@each(
    ("where", "meets", "vbuckets", "collections"),
    [
        ("op IN ('deletion')", lambda row: row["op"] == "deletion", 4, ()),
        ("vbucket BETWEEN 1 AND 2", lambda row: row["vbucket"] in (1, 2), 2, ()),
        ("key = 'a'", lambda row: row["key"] == "a", 1, ()),
        ("collection = 'orders'", lambda row: row["collection"] == "orders", 4, ("shop.orders",)),
        ("scope = 'shop' AND op = 'mutation'", lambda row: (row["scope"], row["op"]) == ("shop", "mutation"), 4, ()),
        ("scope = 'shop'", lambda row: row["scope"] == "shop", 4, ()),
        ("collection = 'nothing'", lambda row: False, 0, ()),
        ("vbucket = 9", lambda row: False, 0, ()),
    ],
)
def test_rows_that_meet_a_condition(
    shop: SourceBucket, where: str, meets: Judge, vbuckets: int, collections: tuple[str, ...]
) -> None:
    assert as_set(read_batch(shop, where=where)) == as_set([row for row in read_batch(shop) if meets(row)])
    with closing(batch_reader(shop, where=where)) as reader:
        partitions: Any = reader.partitions()
    assert len([it for partition in partitions for it in partition.ranges]) == vbuckets
    assert {partition.bucket.collections for partition in partitions} == {collections}


def test_chosen_columns_and_a_key_that_is_no_text(shop: SourceBucket) -> None:
    rows = read_batch(shop, columns="key,value", where="key IN ('a', 'b')", value="string")
    assert sorted(map(tuple, (row.items() for row in rows))) == [
        (("key", "a"), ("value", '{"n":2}')),
        (("key", "b"), ("value", '{"n":2}')),
    ]
    (row,) = (row for row in read_batch(shop, columns="key_bytes,op") if row["key_bytes"] is not None)
    assert row == {"key_bytes": b"\xffa", "op": "mutation"}


def test_a_stream_of_some_vbuckets_keeps_its_rollbacks(shop: SourceBucket) -> None:
    inside, outside = (shop.keys("s", 3, vbucket=vbucket) for vbucket in (1, 2))
    with DrivenStream(shop, where="vbucket = 1 AND op = 'mutation'", columns="vbucket,op,key") as stream:
        start = stream.initial()
        first = stream.latest(start)
        assert {row["vbucket"] for row in stream.read(start, first)} == {1}
        kept = shop.high_seqnos()[1]
        shop.put([*inside, *outside], b"{}")
        second = stream.latest(first)
        assert [row["key"] for row in stream.read(first, second)] == [key.decode() for key in inside]
        shop.fail_over(1, kept)
        third = stream.latest(second)
        first_op, *others = (row["op"] for row in stream.read(second, third))
        assert (first_op, set(others) - {"mutation"}) == ("rollback", set())


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_limit_of_a_stream_counts_rows(shop: SourceBucket, monkeypatch: pytest.MonkeyPatch, is_counted: bool) -> None:
    """An eighth of the changes are of the collection. Without counts of the server the first batch shows it."""
    for vbucket in range(4):
        for name, count in (("users", 70), ("orders", 10)):
            shop.put(shop.keys(name, count, vbucket=vbucket), b"{}", into=f"shop.{name}")

    async def statistics(self: object, group: str = "") -> dict[str, str]:
        ids = {name: shop.ids[f"shop.{name}"] for name in ("users", "orders")}
        return {f"0x8:0x{ids['users']:x}:items": "280", f"0x8:0x{ids['orders']:x}:items": "40", "0x8:name": "shop"}

    if is_counted:
        monkeypatch.setattr(AsyncKvConnection, "statistics", statistics)
    counts, limit = [], ReadMaxRows(90)
    with DrivenStream(shop, collections="shop.orders") as stream:
        start = stream.initial()
        while (end := stream.latest(start, limit)) != start:
            counts.append(len({it.vbucket for one in stream.partitions(start, end) for it in one.ranges}))
            stream.read(start, end)
            start = end
    assert counts == ([4] if is_counted else [1, 3])


@pytest.mark.spark_versions("pushed filters", since="4.1")
def test_spark_hands_its_filters_over_where_it_may(spark: SparkSession, shop: SourceBucket) -> None:
    """With the setting and without it, a query has the same rows."""
    where = "collection = 'orders' AND op = 'mutation' AND vbucket < 3 AND key <> 'orders-5' AND rev > 0"

    def planned(frame: DataFrame) -> tuple[set[Any], str]:
        found = {(row.vbucket, row.key) for row in frame.collect()}
        return found, frame._jdf.queryExecution().executedPlan().toString()

    session = spark.newSession()
    headwater.spark.register(session)
    session.conf.set(PUSHDOWN, "false")
    frame = session.read.format("dcp").options(**shop.options).load()
    whole, plan = planned(frame.where(where))
    assert whole
    assert "= mutation" in plan
    session.conf.set(PUSHDOWN, "true")
    handed, plan = planned(session.read.format("dcp").options(**shop.options).load().where(where))
    assert handed == whole
    assert "= mutation" not in plan.replace("PushedFilters", ""), plan
    assert "orders-5" in plan, "what the source can't apply is left to Spark"


@pytest.mark.spark_versions("dcp, batch", since="4.0")
def test_variants_are_those_of_spark(spark: SparkSession, bucket: SourceBucket) -> None:
    """What `parse_json` makes of the same text, byte for byte; what is no JSON is left as bytes."""
    texts = {
        "object": '{"b": {"c": "x\\u00e9\\n", "a": [1, -129, 40000, 5000000000, 2.50]}, "a": "%s", "é": null}'
        % ("x" * 70),
        "numbers": "[0, -0.0, 9223372036854775808, 0.00000000000000000001, 1e3, -1.7976931348623157e308, 5e-324, 1e23]",
        "wide": json.dumps([*range(300), {f"name {number}": number for number in range(300)}]),
        "null": "null",
    }
    others = {"text": b"plain", "raw": b"\xff", "half a character": b'"\\ud800"'}
    bucket.put_each({key.encode(): text.encode() for key, text in texts.items()})
    bucket.put_each({key.encode(): value for key, value in others.items()})
    parsed = spark.createDataFrame([*texts.items()], "key STRING, text STRING").selectExpr("key", "parse_json(text) v")
    login: Any = {"user": USER, "password": PASSWORD, "value": "variant"}
    frame = headwater.spark.read(spark, bucket.url, **login)
    rows = frame.collect()
    variants = {row.key: row.value for row in rows if row.value is not None}
    assert {key: (it.value, it.metadata) for key, it in variants.items()} == {
        key: (it.value, it.metadata) for key, it in parsed.collect()
    }
    assert {row.key: row.value_bytes for row in rows if row.value_bytes is not None} == others
    (found,) = frame.where("key = 'object'").selectExpr("variant_get(value, '$.b.a[4]', 'double') AS found").collect()
    assert found.found == 2.5
    narrow = headwater.spark.read(spark, bucket.url, **login, columns="value,key")
    assert narrow.dtypes == [("value", "variant"), ("key", "string")]


@pytest.mark.spark_versions("dcp, batch", since="4.0")
def test_read_sets_all_of_it(spark: SparkSession, shop: SourceBucket) -> None:
    login: Any = {"user": USER, "password": PASSWORD}
    frame = headwater.spark.read(
        spark, shop.url, **login, collections=["shop.orders"], columns=["key", "op"], where="op = 'deletion'"
    )
    assert frame.columns == ["key", "op"]
    assert sorted(map(tuple, frame.collect())) == [(f"orders-{number}", "deletion") for number in range(3)]
    # Any other condition is Spark's, on columns that the frame need not have.
    others = headwater.spark.read(spark, shop.url, **login, columns="key", where="op = 'deletion' OR key = 'it\\'s'")
    wanted = ["it's", *(f"{name}-{number}" for name in ("orders", "users") for number in range(3))]
    assert (others.columns, sorted(row.key for row in others.collect())) == (["key"], sorted(wanted))
    with pytest.raises(TypeError, match=r"^read\(\) got .* 'colums'\. Did you mean columns\?$"):
        headwater.spark.read(spark, shop.url, colums="key")
    by_schema = spark.read.format("dcp").options(**shop.options).schema("op STRING, key STRING").load()
    assert by_schema.columns == ["op", "key"]
    assert by_schema.where("op = 'deletion'").count() == 6
    with pytest.raises(PySparkException, match="the column key is a string, and the schema has it as bigint"):
        spark.read.format("dcp").options(**shop.options).schema("key LONG").load().collect()
