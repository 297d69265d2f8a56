"""The example with a star schema, on a real node and Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples.star_schema import FIELDS, build
from pyspark.sql import SparkSession

from support.landings import SourceBucket
from support.node_process import PASSWORD, USER

ROOT = Path(__file__).parents[2]
PROGRAM_S_MAX = 300.0
TABLES = ["dim_customer", "dim_product", "fact_order_line"]


def test_the_report_adds_up(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    """An order that was written again counts as it is now."""
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
    assert sorted(path.name for path in (tmp_path / "star").iterdir()) == TABLES


def test_the_shop_that_lies_beside_it_has_what_the_program_reads() -> None:
    assert {path.stem for path in (ROOT / "examples" / "shop").iterdir()} == {f"shop.{name}" for name in FIELDS}


@pytest.mark.soak
def test_the_program_on_the_shop_that_lies_beside_it(bucket: SourceBucket, tmp_path: Path) -> None:
    def run(*command: str) -> str:
        login = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
        return subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env={**os.environ, **login},
            capture_output=True,
            text=True,
            check=True,
            timeout=PROGRAM_S_MAX,
        ).stdout

    run("-m", "headwater", "load", bucket.url, "examples/shop", "--create-collections")
    report = run("examples/star_schema.py", bucket.url, str(tmp_path / "star"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in report.splitlines() if "|" in line]
    assert rows == [
        ["city", "category", "pieces", "turnover"],
        ["Lyon", "house", "3", "27.0"],
        ["Graz", "food", "2", "7.0"],
        ["Lyon", "food", "1", "4.0"],
    ]
    assert sorted(path.name for path in (tmp_path / "star").iterdir()) == TABLES
