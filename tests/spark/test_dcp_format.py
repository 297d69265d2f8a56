"""`format("dcp")` in Spark itself: that it is found, what it shows, and what it hides."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from headwater import spark as headwater_spark
from headwater.errors import InvalidInput
from headwater.spark import executors
from headwater.spark.executors import SparkRunner, keep_loaded, ship_kernels
from support.landings import SourceBucket, wait_until
from support.machine import DnsServer
from support.node_process import PASSWORD, USER

COLUMNS = {
    "vbucket": "int",
    "vbuuid": "bigint",
    "seqno": "bigint",
    "rev": "bigint",
    "op": "string",
    "scope": "string",
    "collection": "string",
    "collection_id": "bigint",
    "key": "string",
    "key_bytes": "binary",
    "value": "binary",
    "datatype": "smallint",
    "flags": "bigint",
    "expiry": "bigint",
    "cas": "bigint",
    "changed_at": "timestamp",
    "snapshot_start": "bigint",
    "snapshot_end": "bigint",
}
DOCUMENTS = {
    b"json": b'{"a":{"b":[1,2.5,"x"]}}',
    b"number": b"17",
    b"text": b"plain",
    b"binary": b"\x00\xff",
    b"\xffkey": b"[]",
    b"empty": b"",
}


def load(spark: SparkSession, bucket: SourceBucket, **options: str) -> DataFrame:
    return spark.read.format("dcp").options(**{**bucket.options, **options}).load()


def by_key(frame: DataFrame) -> dict[bytes, Any]:
    rows = [row for row in frame.collect() if row.op == "mutation"]
    return {row.key.encode() if row.key_bytes is None else bytes(row.key_bytes): row for row in rows}


@pytest.mark.spark_versions("dcp, batch", since="4.0")
def test_it_is_found_by_itself_and_keeps_its_secrets(
    spark: SparkSession, bucket: SourceBucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket.put_each(DOCUMENTS)
    bucket.delete([b"text"])
    session = spark.newSession()
    frame = load(session, bucket)
    assert dict(frame.dtypes) == COLUMNS
    rows = by_key(frame)
    assert {key: bytes(row.value) for key, row in rows.items()} == {
        key: value for key, value in DOCUMENTS.items() if key != b"text"
    }
    assert rows[b"json"].changed_at.year >= 2025
    assert [(row.key, row.value) for row in frame.where("op = 'deletion'").collect()] == [("text", None)]

    # Whatever Spark tells of a plan, it does not tell this.
    for mode in ("simple", "extended", "codegen", "cost", "formatted"):
        frame.explain(mode=mode)
    execution = frame._jdf.queryExecution()
    told = [capsys.readouterr().out, repr(frame), execution.toString(), execution.optimizedPlan().prettyJson()]
    assert "dcp" in told[0]
    assert not [text for text in told if PASSWORD in text]

    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    view = f"url '{bucket.url}', user '{bucket.options['user']}', passwordFile '{file}'"
    session.sql(f"CREATE TEMPORARY VIEW changes USING dcp OPTIONS ({view})")
    assert session.sql("SELECT count(*) FROM changes").collect()[0][0] == len(DOCUMENTS)


@pytest.mark.spark_versions("dcp, batch", since="4.0")
def test_values_as_text_and_extended_attributes(spark: SparkSession, bucket: SourceBucket) -> None:
    bucket.put_each(DOCUMENTS)
    bucket.set_xattr(b"json", b"meta", b'{"by":"me"}')
    headwater_spark.register(spark)
    frame = load(spark, bucket, value="string", xattrs="true")
    assert dict(frame.dtypes) == COLUMNS | {
        "value": "string",
        "value_bytes": "binary",
        "xattrs": "map<string,binary>",
    }
    rows = by_key(frame)
    assert {key: (row.value, row.value_bytes) for key, row in rows.items()} == {
        b"json": ('{"a":{"b":[1,2.5,"x"]}}', None),
        b"number": ("17", None),
        b"text": ("plain", None),
        b"binary": (None, bytearray(b"\x00\xff")),
        b"\xffkey": ("[]", None),
        b"empty": ("", None),
    }
    assert {key: row.xattrs for key, row in rows.items() if row.xattrs} == {
        b"json": {"meta": bytearray(b'{"by":"me"}')}
    }


class Crash(Exception):
    """In the middle of a batch."""


@pytest.mark.spark_versions("dcp, stream", since="4.0")
def test_a_stream_that_fails_and_is_started_again(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    from headwater.spark.source import progress_lag  # PySpark 3.5 has no sources
    from headwater.spark.versions import HAS_LIMITS

    for vbucket in range(4):
        bucket.put(bucket.keys("a", 4, vbucket=vbucket), b'{"a":1}')
    landed: dict[int, list[tuple[int, int]]] = {}
    seen: list[tuple[int, list[tuple[int, int]]]] = []
    lags: list[int] = []
    # With an older Spark the first batch after a start takes all that there is.
    fails_in = {1 if HAS_LIMITS else 0}

    def sink(frame: DataFrame, batch_id: int) -> None:
        rows = sorted((row.vbucket, row.seqno) for row in frame.collect())
        seen.append((batch_id, rows))
        if batch_id in fails_in:
            fails_in.remove(batch_id)
            raise Crash
        landed[batch_id] = rows

    def run() -> Any:
        frame = spark.readStream.format("dcp").options(**bucket.options, maxRowsPerTrigger="8").load()
        writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    listener = headwater_spark.LagListener(lambda name, lag: lags.append(lag))
    spark.streams.addListener(listener)
    try:
        with pytest.raises(PySparkException, match="Crash"):
            run()
        bucket.put(bucket.keys("b", 1, vbucket=0), b'{"b":1}')
        query = run()
        # Spark tells its listeners of a batch some time after it.
        wait_until(lambda: lags[-1:] == [0] or not HAS_LIMITS)
    finally:
        spark.streams.removeListener(listener)
    if HAS_LIMITS:
        assert seen[1] == seen[2], "the batch was repeated as it was"
        assert {batch_id: len(rows) for batch_id, rows in landed.items()} == {0: 8, 1: 8, 2: 1}
        assert lags[0] == 8
    rows = {row for batch in landed.values() for row in batch}
    assert sorted(rows) == [(vbucket, seqno) for vbucket in range(4) for seqno in range(1, 6 if vbucket == 0 else 5)]
    assert progress_lag(query.lastProgress) == (0 if HAS_LIMITS else None), "an older Spark does not ask for the end"
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()]


def test_an_error_is_a_sentence_and_no_traceback(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    """Where the source is made, where it is planned, and in a stream."""

    def stream() -> None:
        changes = spark.readStream.format("dcp").options(**{**bucket.options, "password": "not this one"}).load()
        changes.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).start().processAllAvailable()

    for fail, sentence in (
        (lambda: load(spark, bucket, colections="a.b"), "no option 'colections'. Did you mean collections?"),
        (lambda: load(spark, bucket, password="not this one").count(), "Check the user name and the password"),
        (stream, "Check the user name and the password"),
    ):
        with pytest.raises(PySparkException) as raised:
            fail()
        assert "headwater.errors." in str(raised.value)
        assert sentence in str(raised.value)
        assert not [word for word in ("Traceback", PASSWORD, "not this one") if word in str(raised.value)]
    with pytest.raises(InvalidInput, match=r"^the dcp source has no column 'kye'.*Did you mean key\?$"):
        headwater_spark.read(spark, bucket.url, columns="kye", user=USER, password=PASSWORD)


def test_workers_with_another_python(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has none of our libraries, and that the user has chosen."""
    other = tmp_path / "python"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", str(other))
    with pytest.raises(InvalidInput, match=r"has no Headwater: No module named .*Set PYSPARK_PYTHON"):
        headwater_spark.register(spark)


# --- the Python processes of Spark that plan and run our tasks: what they load, and how they find the hosts -----------

TASKS = 8
NAME = "cb.example.com"
HEAVY = {"headwater.client.asyncio_client", "headwater.client.batches", "llvmlite", "pandas", "deltalake"}


def loaded_after(program: str) -> set[str]:
    command = [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_a_planner_loads_nothing_that_only_reading_needs() -> None:
    """Its process is new for every query."""
    assert not HEAVY & loaded_after("import headwater.spark.source")
    assert loaded_after("import headwater.landing.tasks") >= HEAVY - {"deltalake", "llvmlite", "pandas"}


def test_planner_and_tasks_find_the_hosts_that_dns_lists(spark: SparkSession, bucket: SourceBucket) -> None:
    keys = [f"key-{number}".encode() for number in range(20)]
    bucket.put_each(dict.fromkeys(keys, b"{}"))
    with DnsServer({f"_couchbase._tcp.{NAME}": [(0, 0, bucket.node.port, "localhost.")]}) as server:
        url = f"couchbase://{NAME}/{bucket.name}?{server.options}"
        rows = spark.read.format("dcp").options(**{**bucket.options, "url": url}).load().collect()
    assert sorted(row.key.encode() for row in rows if row.op == "mutation") == sorted(keys)
    assert set(server.questions) == {f"_couchbase._tcp.{NAME}"}


def test_what_a_worker_has_loaded_is_no_garbage_to_look_for(spark: SparkSession) -> None:
    run = SparkRunner(spark)
    pids = set(run([SimpleNamespace(run=os.getpid)] * TASKS))
    assert os.getpid() not in pids
    frozen = run([SimpleNamespace(run=gc.get_freeze_count)] * TASKS)
    assert max(frozen) > 10_000, "Arrow alone has more"


def test_a_process_that_is_no_worker_is_left_alone() -> None:
    frozen = gc.get_freeze_count()
    keep_loaded("test")
    assert gc.get_freeze_count() == frozen


def test_another_session_of_the_context_can_be_used_after_more_was_compiled(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship_kernels(spark)
    (tmp_path / "another.o").write_bytes(b"compiled")
    monkeypatch.setattr(executors, "code_folder", lambda: tmp_path)
    ship_kernels(spark.newSession())


def test_a_batch_and_a_stream_start_at_a_time(spark: SparkSession, bucket: SourceBucket, tmp_path: Path) -> None:
    """The time is for the first start alone: a query that goes on has its offsets."""
    bucket.put_each(DOCUMENTS)
    time.sleep(0.01)
    at = datetime.now(UTC).isoformat()
    bucket.put([b"since"], b"1")
    bucket.delete([b"number"])
    since = [("number", "deletion"), ("since", "mutation")]
    assert sorted((row.key, row.op) for row in load(spark, bucket, startAt=at).collect()) == since

    def stream(start: str) -> list[tuple[str, str]]:
        frame = spark.readStream.format("dcp").options(**bucket.options, startAt=start).load()
        kept = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        kept.trigger(availableNow=True).start(str(tmp_path / "rows")).awaitTermination()
        return sorted((row.key, row.op) for row in spark.read.parquet(str(tmp_path / "rows")).collect())

    assert stream(at) == since
    bucket.put([b"later"], b"2")
    time.sleep(0.01)
    assert stream("-1ms") == [("later", "mutation"), *since]
