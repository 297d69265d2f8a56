"""The tables open in whatever reads Delta tables, and a lookup reads little of them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import duckdb
import polars as pl
import pyarrow.dataset as ds
import pytest
from deltalake import DeltaTable, QueryBuilder

from headwater.lake import data_files
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from support.lake_model import HOTEL, SmallLake, guide_feed, with_columns

NAME = "_default._default"
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
    assert found == [("key-0", 1000, 0), ("key-39", 39, 0)]
    del documents


def test_time_travel_shows_what_was_believed(lake: Path) -> None:
    delta = DeltaTable(lake / "documents/_default._default")
    versions = range(delta.version() + 1)
    assert [DeltaTable(lake / "documents/_default._default", version=v).count() for v in versions][-2:] == [40, 35]


# --- how much is read: files that a query must not need are taken away before it ----------------------------------


KEYS = [f"key-{number:03}" for number in range(48)]
SINCE = datetime(2023, 11, 14, 23, tzinfo=UTC)


@pytest.fixture
def sorted_lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large_tables: None) -> SmallLake:
    """Documents in many small files, merged twice, and changes of two hours."""
    monkeypatch.setattr(data_files, "KEYED_ROW_GROUP_ROWS", 4)
    settings = with_columns(LakeSettings(merging=MergeRules(file_bytes=1)), {"*": "n INT, `a-b` STRING"})
    small = SmallLake(tmp_path, settings=settings)
    for turn in (1, 3):
        for number, key in [*enumerate(KEYS)][::turn]:
            small.write(number % 4, key, value=b'{"n": %d, "a-b": "%d"}' % (number, turn))
        small.land()
        small.bucket.advance_time(hours=1)
    return small


def keep_only(small: SmallLake, table: str, condition: str) -> int:
    """Delete the files of a table that a condition rules out. Returns how many are left."""
    delta = DeltaTable(small.directory / table)
    needed = {*delta.file_uris(file_pruning_predicate=condition)}
    for path in {*delta.file_uris()} - needed:
        Path(path).unlink()
    return len(needed)


def keys_where(table: Path, condition: str, expression: pl.Expr) -> list[list[str]]:
    """What each reader finds."""
    delta = DeltaTable(table)
    queried = QueryBuilder().register("t", delta).execute(f"SELECT key FROM t WHERE {condition}").read_all()
    relation = duckdb.from_arrow(delta.to_pyarrow_dataset()).filter(condition)
    lazy = pl.scan_delta(str(table)).filter(expression)
    return [
        sorted(queried["key"].to_pylist()),
        sorted(key for (key,) in relation.project("key").fetchall()),
        sorted(lazy.select("key").collect()["key"].to_list()),
    ]


def test_a_lookup_by_key_reads_one_file_of_each_group(sorted_lake: SmallLake) -> None:
    table = f"documents/{NAME}"
    assert len(DeltaTable(sorted_lake.directory / table).file_uris()) == 12
    condition = "key = 'key-020'"
    assert keep_only(sorted_lake, table, condition) == 2
    found = keys_where(sorted_lake.directory / table, condition, pl.col("key") == "key-020")
    assert found == [["key-020"]] * 3


def test_changes_since_a_time_are_read_from_the_files_that_have_them(sorted_lake: SmallLake) -> None:
    condition = f"changed_at >= '{SINCE:%Y-%m-%dT%H:%M:%SZ}'"
    assert keep_only(sorted_lake, "changes", condition) == 1
    found = keys_where(sorted_lake.directory / "changes", condition, pl.col("changed_at") >= SINCE)
    assert found == [KEYS[::3]] * 3


def test_typed_columns_have_statistics_and_a_table_of_an_earlier_version_gets_them(sorted_lake: SmallLake) -> None:
    def files(condition: str) -> int:
        documents = DeltaTable(sorted_lake.directory / f"documents/{NAME}")
        return len(documents.file_uris(file_pruning_predicate=condition))

    assert (files("n = 20"), files("`a-b` > '3'"), files("n >= 0")) == (2, 0, 12)
    for table in ("changes", f"documents/{NAME}"):
        delta = DeltaTable(sorted_lake.directory / table)
        delta.alter.set_table_properties({"delta.dataSkippingStatsColumns": "vbucket,seqno"})
    assert files("n = 20") == 12
    lake = sorted_lake.reopen()
    sorted_lake.write(0, "new")
    sorted_lake.land()
    assert (files("n = 20"), lake.held_offsets()) == (2, sorted_lake.bucket.offsets())


def test_the_feed_of_the_guide_has_what_each_document_came_to(sorted_lake: SmallLake) -> None:
    sorted_lake.write(1, "key-001", "key-001", "new")
    sorted_lake.bucket.change(2, "deletion", 0, b"key-002")
    sorted_lake.land()
    feed = guide_feed(sorted_lake.directory, NAME, after_batch=0)
    assert feed == {**dict.fromkeys([*KEYS[::3], "key-001", "new"], "upsert"), "key-002": "delete"}


def test_the_feed_has_what_a_collection_takes_with_it(small: SmallLake) -> None:
    """Its events may come without its name, and another collection may get that."""
    small.write(0, "stays")
    small.write(0, "a", "b", "gone before", collection=HOTEL)
    small.write(1, "c", collection=HOTEL)
    small.land()
    small.bucket.change(0, "deletion", HOTEL, b"gone before")
    small.land()
    small.write(0, "b", "late", collection=HOTEL)
    names = small.bucket.names[HOTEL]
    small.bucket.names[HOTEL] = (None, None)  # type: ignore[assignment]
    small.bucket.event("collection_dropped", HOTEL)
    small.bucket.names[HOTEL + 1] = names
    small.write(1, "c", collection=HOTEL + 1)
    small.land()
    feed = guide_feed(small.directory, ".".join(names), after_batch=1)
    assert feed == {"a": "delete", "b": "delete", "late": "delete", "c": "upsert"}
    assert guide_feed(small.directory, ".".join(names), after_batch=2) == {}
