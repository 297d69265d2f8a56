"""Data frames for programs: the documents of a lake as they are now, and changes for sinks of one's own."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest
from deltalake import DeltaTable
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

import headwater.spark
from headwater.errors import InvalidInput
from headwater.spark.frames import ChangeBatch
from support.landings import DEFAULT, NEVER_FRESH, LandedBucket, SourceBucket

VBUCKET = 1


def test_documents_are_those_of_the_last_batch(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    landed = LandedBucket(bucket, spark, tmp_path / "lake", fresh=NEVER_FRESH)
    query = landed.landing.start(spark, every="100 milliseconds", on_batch=landed.batches.append)
    try:
        bucket.put([b"kept", b"changed", b"removed"], b'{"n":1}')
        query.processAllAvailable()
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
        before = headwater.spark.documents(spark, str(landed.folder), DEFAULT, batch=landed.batches[0].batch_id)
        assert {row.key: row.document for row in before.collect()} == merged
    finally:
        query.stop()


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


@pytest.mark.parametrize(("folder", "table"), [("lake", "a.b"), ("none", DEFAULT)])
def test_documents_that_are_not_there(
    spark: SparkSession, bucket: SourceBucket, tmp_path: Path, folder: str, table: str
) -> None:
    bucket.put([b"a"], b"{}")
    LandedBucket(bucket, spark, tmp_path / "lake").land()
    with pytest.raises(InvalidInput, match="no table"):
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


HOT_PAUSE_S = 0.002


class HotWriter(threading.Thread):
    """Rewrites a few documents many times while a batch is read. Its pauses leave the machine to Spark."""

    def __init__(self, bucket: SourceBucket, keys: list[bytes]) -> None:
        super().__init__()
        self._bucket = SourceBucket(bucket.node, bucket.name)
        self._keys = keys
        self._is_over = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._is_over.wait(HOT_PAUSE_S):
            number += 1
            self._bucket.put([self._keys[number % len(self._keys)]], b'{"n":%d}' % number)

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()
        self._bucket.close()


@pytest.mark.soak
def test_a_sink_is_exact_through_crashes_rollbacks_and_hot_writes(
    spark: SparkSession, bucket: SourceBucket, tmp_path: Path
) -> None:
    """A change that came twice would break the UNIQUE; one that did not come would be missing at the end."""
    sink = SqliteSink(tmp_path / "sink.db")
    keys = [key for vbucket in range(4) for key in bucket.keys("hot", 5, vbucket=vbucket)]
    bucket.put(keys, b'{"n":0}')

    def run() -> None:
        frame = spark.readStream.format("dcp").options(**bucket.options).load()
        writer = frame.writeStream.foreachBatch(headwater.spark.apply_changes(sink.apply, places=sink.places))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    with HotWriter(bucket, keys):
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


def test_places_in_a_folder(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    """A new query, which begins at the beginning, brings nothing again."""
    seen: list[list[str]] = []

    def run(checkpoint: str) -> None:
        frame = spark.readStream.format("dcp").options(**bucket.options).load()
        applied = headwater.spark.apply_changes(
            lambda changes, batch: seen.append(sorted(row.key for row in changes.collect())),
            places=str(tmp_path / "places"),
        )
        writer = frame.writeStream.foreachBatch(applied).option("checkpointLocation", str(tmp_path / checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    bucket.put([b"a", b"b"], b"{}")
    run("first")
    bucket.put([b"c"], b"{}")
    run("second")
    assert seen == [["a", "b"], ["c"]]


def test_a_query_that_begins_again_on_another_branch(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    """It has no rollback among its rows, since it has nothing to roll back. The sink has."""
    sink = SqliteSink(tmp_path / "sink.db")

    def run(checkpoint: str) -> None:
        frame = spark.readStream.format("dcp").options(**bucket.options).load()
        writer = frame.writeStream.foreachBatch(headwater.spark.apply_changes(sink.apply, places=sink.places))
        writer = writer.option("checkpointLocation", str(tmp_path / checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    bucket.put(bucket.keys("a", 5, vbucket=VBUCKET), b'{"n":1}')
    run("first")
    bucket.fail_over(VBUCKET, 3)
    bucket.put(bucket.keys("b", 2, vbucket=VBUCKET), b'{"n":2}')
    run("second")
    kept = [*bucket.keys("a", 3, vbucket=VBUCKET), *bucket.keys("b", 2, vbucket=VBUCKET)]
    assert set(sink.documents()) == {key.decode() for key in kept}
