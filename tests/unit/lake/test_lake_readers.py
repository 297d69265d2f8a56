"""The tables open in whatever reads Delta tables, and a lookup reads little of them."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.exceptions import DeltaProtocolError

from headwater.lake import data_files, upkeep
from headwater.lake.data_files import read_files
from headwater.lake.delta_log import DeltaLog
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from support.lake_model import HOTEL, SmallLake, guide_feed, mark_rows, use_vectors, with_columns

NAME = "_default._default"


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


def test_every_table_in_every_engine(lake: Path) -> None:
    """In DuckDB by the files that the log names; `delta_scan` would have to fetch an extension."""
    for table, count in ROWS.items():
        delta = DeltaTable(lake / table)
        frame = delta.to_pandas()
        assert len(frame) == pl.read_delta(str(lake / table)).height == count
        assert set(frame["vbucket"]) == {0} if table.startswith("rejects") else {0, 1, 2, 3}
        of_files = duckdb.sql(f"SELECT count(*) FROM read_parquet({delta.file_uris()!r}, hive_partitioning = true)")
        assert of_files.fetchall() == [(count,)]
        assert duckdb.from_arrow(delta.to_pyarrow_dataset()).aggregate("count(*)").fetchall() == [(count,)]
    documents = DeltaTable(lake / f"documents/{NAME}")
    of_sql = duckdb.from_arrow(documents.to_pyarrow_dataset()).filter("n > 38").order("key").project("key, n")
    assert of_sql.fetchall() == [("key-0", 1000), ("key-39", 39)]
    earlier = DeltaTable(lake / f"documents/{NAME}", version=documents.version() - 1)
    assert (earlier.count(), documents.count()) == (40, 35), "what was believed before the rollback"


# --- tables with deletion vectors: what docs/guides/engines.md says of each engine --------------------------------


def test_deletion_vectors_in_other_engines(tmp_path: Path) -> None:
    """After marks on top of each other, in the log and in files, a checkpoint that the log begins with, an append and a
    compaction by delta-rs."""
    small = SmallLake(tmp_path)
    small.write(0, *(keys := [f"key-{number:02}" for number in range(30)]))
    small.land()
    use_vectors(small.lake)
    table, path = small.lake.tables[NAME].documents, tmp_path / "documents" / NAME
    assert table is not None
    log = table.log
    left = {*keys}
    for dead, inline_bytes_max in ({"key-03", "key-29"}, 0), ({"key-04"}, 1024), ({"key-28"}, 0):
        log.commit(mark_rows(log, lambda row, dead=dead: row["key"] in dead, inline_bytes_max=inline_bytes_max))  # type: ignore[misc]
        left -= dead
        assert_all_read(log, path, sorted(left))
    assert {file.vector.storage for file in log.files() if file.vector} == {"i", "u"}
    delta = DeltaTable(path)
    for refused in (delta.to_pyarrow_table, delta.to_pyarrow_dataset, delta.to_pandas):
        with pytest.raises(DeltaProtocolError, match="deletionVectors"):
            refused()
    # Wrong without an error: dead rows are among these.
    files = f"read_parquet({delta.file_uris()!r})"
    assert delta.count() == duckdb.sql(f"SELECT * FROM {files}").count("*").fetchall()[0][0] > len(left)
    delta.create_checkpoint()
    for version in range(delta.version()):
        (path / "_delta_log" / f"{version:020}.json").unlink()
    assert_all_read(log, path, sorted(left))
    last = pl.read_delta(str(path)).filter(pl.col("key") == "key-10").with_columns(key=pl.lit("key-99"))
    write_deltalake(path, last.to_arrow(), mode="append")
    assert_all_read(log, path, [*sorted(left), "key-99"])
    DeltaTable(path).optimize.compact()
    assert_all_read(log, path, [*sorted(left), "key-99"])
    assert not any(file.vector for file in log.files())


def assert_all_read(log: DeltaLog, path: Path, keys: list[str]) -> None:
    log.refresh()
    again = DeltaLog.open(log.location)
    assert again is not None
    delta = DeltaTable(path)
    query = QueryBuilder().register("t", delta).execute("SELECT key FROM t").read_all()
    scanned = pa.RecordBatchReader.from_stream(delta.scan(columns=["key"]))
    found = {
        "Headwater": [key for rows in read_files(log.location, log.files()) for key in rows["key"].to_pylist()],
        "Headwater, opened": [k for rows in read_files(again.location, again.files()) for k in rows["key"].to_pylist()],
        "QueryBuilder": query["key"].to_pylist(),
        "Polars": pl.read_delta(str(path))["key"].to_list(),
        "Polars, with a filter": pl.scan_delta(str(path)).filter(pl.col("key") > "").collect()["key"].to_list(),
        "DuckDB over scan": [key for (key,) in duckdb.sql("SELECT key FROM scanned").fetchall()],
    }
    del scanned
    assert {name: sorted(read) for name, read in found.items()} == dict.fromkeys(found, keys)


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


def test_a_lookup_by_vbucket_and_key_skips_files_with_vectors(
    sorted_lake: SmallLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "DEAD_SHARE", 1.0)
    documents = sorted_lake.lake.tables[NAME].documents
    assert documents is not None
    documents.set_merged_on_read(True)
    for number in (18, 20):
        sorted_lake.write(number % 4, KEYS[number], value=b'{"n": 7}')
    sorted_lake.land()
    table = f"documents/{NAME}"
    assert DeltaTable(sorted_lake.directory / table).count() == len(KEYS) + 2, "two are marked"
    keep_only(sorted_lake, table, "vbucket = 0")
    condition, of_key = "vbucket = 0 AND key = 'key-020'", pl.col("key") == "key-020"
    delta = DeltaTable(sorted_lake.directory / table)
    queried = QueryBuilder().register("t", delta).execute(f"SELECT n FROM t WHERE {condition}").read_all()
    scanned = pa.RecordBatchReader.from_stream(delta.scan(columns=["n"], predicate=condition)).read_all()
    lazy = pl.scan_delta(str(sorted_lake.directory / table)).filter((pl.col("vbucket") == 0) & of_key)
    assert queried["n"].to_pylist() == scanned["n"].to_pylist() == lazy.collect()["n"].to_list() == [7]


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
