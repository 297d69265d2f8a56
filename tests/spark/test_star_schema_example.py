"""The example with a star schema, on a real node and Spark."""

from __future__ import annotations

import json
from pathlib import Path

from examples.star_schema import build
from pyspark.sql import SparkSession
from spark_node import SourceBucket

from node_process import PASSWORD, USER


def test_the_report_adds_up(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    bucket.create_scope("shop")
    for collection in ("customers", "products", "orders"):
        bucket.create_collection(f"shop.{collection}")

    def write(collection: str, key: str, **document: object) -> None:
        bucket.put([key.encode()], json.dumps(document).encode(), into=f"shop.{collection}")

    write("customers", "c1", name="Ada", city="Graz")
    write("customers", "c2", name="Bo", city="Lyon")
    write("products", "p1", title="Tea", category="food", price=4.0)
    write("products", "p2", title="Cup", category="house", price=9.0)
    line = {"product": "p1", "quantity": 2, "price": 3.5}
    write("orders", "o1", customer="c1", ordered_at="2026-11-01", lines=[line])
    write(
        "orders", "o2", customer="c2", ordered_at="2026-11-02", lines=[line, {**line, "product": "p2", "quantity": 1}]
    )
    write("orders", "o2", customer="c2", ordered_at="2026-11-02", lines=[line])
    report = build(spark, bucket.url, str(tmp_path / "star"), user=USER, password=PASSWORD)
    assert {tuple(row) for row in report.collect()} == {("Graz", "food", 2, 7.0), ("Lyon", "food", 2, 7.0)}
    assert spark.read.parquet(str(tmp_path / "star" / "dim_product")).count() == 2
