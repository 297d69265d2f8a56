"""The tables open in whatever reads Delta tables."""

from __future__ import annotations

from pathlib import Path

import duckdb
import polars as pl
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable

from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from support.lake_model import SmallLake, with_columns

TABLES = ("changes", "documents/_default._default", "history/_default._default", "rejects/_default._default")


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    settings = with_columns(LakeSettings(merging=MergeRules(history=True)), {"*": "n INT, at TIMESTAMP"})
    small = SmallLake(tmp_path, settings=settings)
    for number in range(40):
        small.write(number % 4, f"key-{number}", value=b'{"n": %d, "at": "2026-01-01T00:00:00Z"}' % number)
        if number == 19:
            small.land()
    small.write(0, "odd", value=b"\xff")
    small.land()
    small.write(0, "key-0", value=b'{"n": 1000}')
    small.bucket.change(1, "deletion", 0, b"key-1")
    small.land()
    small.bucket.fail_over(2, 5)
    small.land()
    return tmp_path


ROWS = {
    "changes": 44,
    "documents/_default._default": 35,
    "history/_default._default": 37,
    "rejects/_default._default": 1,
}


@pytest.mark.parametrize("table", TABLES)
def test_deltalake_and_pandas(lake: Path, table: str) -> None:
    frame = DeltaTable(lake / table).to_pandas()
    assert len(frame) == ROWS[table]
    assert set(frame["vbucket"]) == {0} if table.startswith("rejects") else {0, 1, 2, 3}


@pytest.mark.parametrize("table", TABLES)
def test_polars(lake: Path, table: str) -> None:
    frame = pl.read_delta(str(lake / table))
    assert frame.height == ROWS[table]
    if table.startswith("documents"):
        assert frame.filter(pl.col("key") == "key-0")["n"].to_list() == [1000]


@pytest.mark.parametrize("table", TABLES)
def test_duckdb(lake: Path, table: str) -> None:
    """By the files that the log names; `delta_scan` would have to fetch an extension."""
    delta = DeltaTable(lake / table)
    files = delta.file_uris()
    counted = duckdb.sql(f"SELECT count(*) FROM read_parquet({files!r}, hive_partitioning = true)").fetchall()
    assert counted == [(ROWS[table],)]
    dataset = delta.to_pyarrow_dataset()
    assert isinstance(dataset, ds.Dataset)
    assert duckdb.from_arrow(dataset).aggregate("count(*)").fetchall() == [(ROWS[table],)]


def test_the_present_can_be_asked_for_in_sql(lake: Path) -> None:
    documents = DeltaTable(lake / "documents/_default._default").to_pyarrow_dataset()
    found = duckdb.sql("SELECT key, n, vbucket_group FROM documents WHERE n > 38 ORDER BY key").fetchall()
    assert found == [("key-0", 1000, 0), ("key-39", 39, 1)]
    del documents


def test_time_travel_shows_what_was_believed(lake: Path) -> None:
    delta = DeltaTable(lake / "documents/_default._default")
    versions = range(delta.version() + 1)
    assert [DeltaTable(lake / "documents/_default._default", version=v).count() for v in versions][-2:] == [40, 35]
