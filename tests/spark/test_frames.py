"""Data frames for programs: the documents of a lake as they are now, and changes for sinks of one's own."""

from __future__ import annotations

import itertools
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import headwater.spark
from headwater.client.cluster_map import vbucket_of
from headwater.errors import InvalidInput
from headwater.lake import layout
from headwater.lake.lake import LakeSettings
from headwater.spark.executors import SparkRunner
from headwater.spark.frames import ChangeBatch
from support.lake_model import SmallLake, use_vectors, with_columns
from support.landings import DEFAULT, NEVER_FRESH, LandedBucket, SourceBucket
from support.live_bucket import Working

VBUCKET = 1


@pytest.mark.spark_versions("documents")
def test_documents_are_those_of_the_last_batch(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    landed = LandedBucket(bucket, spark, tmp_path / "lake", fresh=NEVER_FRESH)
    query = landed.landing.start(SparkRunner(spark), every="100 milliseconds", on_batch=landed.batches.append)
    try:
        bucket.put([b"kept", b"changed", b"removed"], b'{"n":1}')
        query.processAllAvailable()
        first = landed.batches[-1].batch_id
        bucket.put([b"changed", b"new"], b'{"n":2}')
        bucket.delete([b"removed"])
        seqnos = bucket.high_seqnos()
        while {int(v): int(at.seqno) for v, at in landed.batches[-1].offsets.offsets.items() if at.seqno} != {
            vbucket: seqno for vbucket, seqno in seqnos.items() if seqno
        }:
            assert not query.awaitTermination(0.05)
        merged = {row["key"]: row["document"] for row in landed.rows("documents", DEFAULT)}
        assert merged == dict.fromkeys(["kept", "changed", "removed"], '{"n":1}'), "the table waits for its merge"
        frame = headwater.spark.documents(spark, str(landed.folder), DEFAULT)
        found = {row.key: row.document for row in frame.collect()}
        assert found == {"kept": '{"n":1}', "changed": '{"n":2}', "new": '{"n":2}'}
        assert frame.select("seqno", "changed_at").where("key = 'new'").count() == 1
        before = headwater.spark.documents(spark, str(landed.folder), DEFAULT, batch=first)
        assert {row.key: row.document for row in before.collect()} == merged
    finally:
        query.stop()


@pytest.mark.spark_versions("documents")
def test_columns_that_were_added_later(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    """By Headwater's frame, and as the guide reads a table without the jar of Delta."""
    landed = LandedBucket(bucket, spark, tmp_path / "lake")
    bucket.put([b"a", b"b"], b'{"n":1,"home":{"zip":3000}}')
    landed.land()
    bucket.put([b"c"], b'{"n":2.5,"tags":["x"],"by":{"a":1,"A":2}}')
    landed.land()
    path = str(landed.folder / "documents" / DEFAULT)
    files = spark.read.option("basePath", path).option("mergeSchema", "true").parquet(*DeltaTable(path).file_uris())
    for frame in (headwater.spark.documents(spark, str(landed.folder), DEFAULT), files):
        frame.createOrReplaceTempView("documents")
        (row,) = spark.sql(
            "SELECT sum(coalesce(n, n_double)) AS n, sum(home.zip) AS zip, max(tags) AS tags, sum(by.A) AS by "
            "FROM documents"
        ).collect()
        assert (row["n"], row["zip"], row["tags"], row["by"]) == (4.5, 6000, ["x"], 2)


@pytest.mark.spark_versions("documents")
def test_columns_and_conditions_of_a_table_with_dead_rows(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletion vectors mark them. A condition on the key reads one group of vbuckets."""
    monkeypatch.setattr(layout, "SMALL_GROUP_DOCUMENTS", -1)
    small = SmallLake(tmp_path, vbuckets=8, groups=4, settings=with_columns(LakeSettings(), {"*": "n INT, `a-b` INT"}))
    keys = [f"key-{number}" for number in range(20)]
    for number, key in enumerate(keys):
        small.write(int(vbucket_of(key.encode(), 8)), key, value=b'{"n": %d, "a-b": 1}' % number)
    small.land()
    use_vectors(small.lake)

    def read(**chosen: Any) -> list[tuple[Any, ...]]:
        frame = headwater.spark.documents(spark, str(tmp_path), DEFAULT, **chosen)
        return sorted(tuple(row) for row in frame.collect())

    small.write(int(vbucket_of(b"key-7", 8)), "key-7", value=b'{"n": 77}')
    small.land(merges=False)
    expected = [(key, 77 if number == 7 else number) for number, key in enumerate(keys)]
    assert read(columns=["key", "n"]) == sorted(expected)
    assert read(columns=["key"], where="`a-b` = 1 AND n >= 15") == [(f"key-{number}",) for number in range(15, 20)]
    assert read(columns=["n"], where="key IN ('key-7', 'none')") == [(77,)]
    home = int(small.lake.facts.group_of(int(vbucket_of(b"key-3", 8))))
    for path in (tmp_path / "documents" / DEFAULT).glob("vbucket_group=*"):
        if path.name != f"vbucket_group={home}":
            shutil.rmtree(path)
    assert read(columns=["n"], where="key = 'key-3'") == [(3,)]
    with pytest.raises(InvalidInput, match="has no column 'm'"):
        read(columns=["m"])


@pytest.mark.parametrize(("folder", "table"), [("lake", "a.b"), ("none", DEFAULT)])
def test_documents_that_are_not_there(
    spark: SparkSession, bucket: SourceBucket, tmp_path: Path, folder: str, table: str
) -> None:
    bucket.put([b"a"], b"{}")
    LandedBucket(bucket, spark, tmp_path / "lake").land()
    with pytest.raises(InvalidInput, match=r"no table|does not contain the tables"):
        headwater.spark.documents(spark, str(tmp_path / folder), table)


# --- a sink of one's own ------------------------------------------------------------------------------------------


class Crash(Exception):
    """The end of a query."""


class SqliteSink:
    """Keeps every change that holds, and the places, in one transaction. It may fail before or after its commit."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path, check_same_thread=False)
        self._database.execute("CREATE TABLE changes (vbucket, seqno, key, op, value, UNIQUE (vbucket, seqno))")
        self._database.execute("CREATE TABLE places (text)")
        self.rollbacks = 0
        self.fails: list[str] = []

    def places(self) -> str | None:
        found = self._database.execute("SELECT text FROM places").fetchone()
        return None if found is None else str(found[0])

    def apply(self, changes: DataFrame, batch: ChangeBatch) -> None:
        rows = changes.select("vbucket", "seqno", "key", "op", "value").collect()
        fails = self.fails.pop() if self.fails else ""
        if fails == "before":
            raise Crash
        with self._database:
            for rollback in batch.rollbacks:
                self.rollbacks += 1
                place = (rollback.vbucket, rollback.seqno)
                self._database.execute("DELETE FROM changes WHERE vbucket = ? AND seqno > ?", place)
            self._database.executemany("INSERT INTO changes VALUES (?, ?, ?, ?, ?)", [tuple(row) for row in rows])
            self._database.execute("DELETE FROM places")
            self._database.execute("INSERT INTO places VALUES (?)", (batch.places,))
        if fails == "after":
            raise Crash

    def documents(self) -> dict[str, bytes]:
        rows = self._database.execute("SELECT key, op, value FROM changes WHERE key IS NOT NULL ORDER BY seqno")
        newest = {key: (op, value) for key, op, value in rows}
        return {key: bytes(value) for key, (op, value) in newest.items() if op == "mutation"}


def apply_all(spark: SparkSession, bucket: SourceBucket, checkpoint: Path, apply: Any, *, places: Any) -> None:
    """Apply what the bucket has now and the query does not."""
    frame = spark.readStream.format("dcp").options(**bucket.options).load()
    writer = frame.writeStream.foreachBatch(headwater.spark.apply_changes(apply, places=places))
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


HOT_PAUSE_S = 0.002


class HotWriter(Working):
    """Rewrites a few documents many times while a batch is read. Its pauses leave the machine to Spark."""

    keys: list[bytes]

    def _work(self) -> None:
        for number in itertools.count():
            if self._is_over.wait(HOT_PAUSE_S):
                return
            self._bucket.put([self.keys[number % len(self.keys)]], b'{"n":%d}' % number)


@pytest.mark.soak
def test_a_sink_is_exact_through_crashes_rollbacks_and_hot_writes(
    spark: SparkSession, bucket: SourceBucket, tmp_path: Path
) -> None:
    """A change that came twice would break the UNIQUE; one that did not come would be missing at the end."""
    sink = SqliteSink(tmp_path / "sink.db")
    keys = [key for vbucket in range(4) for key in bucket.keys("hot", 5, vbucket=vbucket)]
    bucket.put(keys, b'{"n":0}')

    def run() -> None:
        apply_all(spark, bucket, tmp_path / "checkpoint", sink.apply, places=sink.places)

    writer = HotWriter("hot writer", bucket)
    writer.keys = keys
    with writer:
        for fails in ("before", "after"):
            sink.fails = [fails]
            with pytest.raises(PySparkException, match="Crash"):
                run()
            run()
    bucket.fail_over(VBUCKET, bucket.high_seqnos()[VBUCKET] - 7)
    bucket.put(bucket.keys("late", 3, vbucket=VBUCKET), b'{"late":1}')
    bucket.delete(bucket.keys("hot", 2, vbucket=VBUCKET))
    run()
    assert sink.rollbacks
    every = [*keys, *bucket.keys("late", 3, vbucket=VBUCKET)]
    found = {key.decode(): value for key in every if (value := bucket.get(key)) is not None}
    assert sink.documents() == found
    assert len(found) == len(keys) + 3 - 2


@pytest.mark.spark_versions("dcp, stream", since="4.0")
def test_a_query_that_begins_again_brings_what_the_sink_does_not_have(
    spark: SparkSession, bucket: SourceBucket, tmp_path: Path
) -> None:
    """On a branch that the sink does not have all is new, and the sink has to undo its own. That is no rollback among
    the rows: the query has nothing to roll back. Of other vbuckets nothing comes again."""
    seen: list[tuple[list[str], list[tuple[int, int]]]] = []
    places = tmp_path / "places.json"

    def apply(changes: DataFrame, batch: ChangeBatch) -> None:
        undone = [(rollback.vbucket, rollback.seqno) for rollback in batch.rollbacks]
        seen.append((sorted(row.key for row in changes.collect()), undone))
        places.write_text(batch.places)

    first, later, other = (bucket.keys(*of, vbucket=at) for *of, at in (("a", 5, 1), ("b", 2, 1), ("x", 2, 2)))
    bucket.put([*first, *other], b"{}")
    apply_all(spark, bucket, tmp_path / "first", apply, places=lambda: None)
    bucket.fail_over(VBUCKET, 3)
    bucket.put(later, b"{}")
    apply_all(spark, bucket, tmp_path / "second", apply, places=str(tmp_path))
    names = [[key.decode() for key in keys] for keys in ([*first, *other], [*first[:3], *later])]
    assert seen == [(sorted(names[0]), []), (sorted(names[1]), [(VBUCKET, 0)])]
