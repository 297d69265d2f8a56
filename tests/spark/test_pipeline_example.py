"""The example of a declarative pipeline, as `spark-pipelines` runs it, before and after a failover."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from support.landings import LOGIN, SourceBucket
from support.node_process import PASSWORD

ROOT = Path(__file__).parents[2]
RUN_S_MAX = 300.0
ORDERS = "shop.orders"


def run(folder: Path) -> str:
    """Returns what it says."""
    command = shutil.which("spark-pipelines", path=str(Path(sys.executable).parent))
    assert command is not None, "it comes with PySpark"
    python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    done = subprocess.run(
        [command, "run", "--conf", "spark.sql.catalogImplementation=hive"],
        cwd=folder,
        env={**os.environ, **LOGIN, **python},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def rows(folder: Path, table: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in sorted((folder / "spark-warehouse" / table).glob("*.parquet")):
        found += pq.read_table(path).to_pylist()
    return found


def order(price: float) -> bytes:
    line = {"product": "p1", "quantity": 2, "price": price}
    return json.dumps({"customer": "c1", "ordered_at": "2026-11-01", "lines": [line]}).encode()


@pytest.mark.soak
@pytest.mark.spark_versions("pipelines", since="4.1")
def test_views_hold_what_the_bucket_has_and_changes_say_how_it_came(bucket: SourceBucket, tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="pipelines need pyspark[connect]")
    folder = tmp_path / "pipeline"
    shutil.copytree(ROOT / "examples" / "pipeline", folder)
    spec = folder / "spark-pipeline.yml"
    text = spec.read_text().replace("couchbase://127.0.0.1/default", bucket.url)
    spec.write_text(text.replace("/tmp/shop-pipeline", str(tmp_path / "storage")))
    bucket.create_scope("shop")
    bucket.create_collection(ORDERS)
    first, second = bucket.keys("o", 2, vbucket=1)
    bucket.put([first], order(3.5), into=ORDERS)
    kept = bucket.high_seqnos()[1]
    bucket.put([first, second], order(9.0), into=ORDERS)
    said = run(folder)
    assert [row["turnover"] for row in rows(folder, "turnover")] == [36.0]

    bucket.fail_over(1, kept)
    said += run(folder)
    assert [(row["key"], row["lines"][0]["price"]) for row in rows(folder, "orders")] == [(first.decode(), 3.5)]
    assert [row["turnover"] for row in rows(folder, "turnover")] == [7.0]
    changes = [(row["op"], row["key"]) for row in rows(folder, "order_changes") if row["vbucket"] == 1]
    assert changes.count(("rollback", None)) == 1
    assert changes.count(("mutation", second.decode())) == 1, "the log keeps what was taken back"
    assert PASSWORD not in said
