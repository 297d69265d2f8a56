"""Spark: the `dcp` source against Parquet, landing a bucket in tables, small batches into large tables, and memory.

All of it is measured in one session, in a process of its own: that process is the driver whose memory is looked at.
"""

from __future__ import annotations

import json
import os
import queue
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from bench.measure import in_new_process, in_turns, load_now, scaled
from bench.processes import LOGIN, NodeProcess, data_folder, load, memory_bytes, node
from bench.report import Section
from headwater.spark.lake.merge_plan import MERGE_FRACTION
from headwater.spark.landing import LandedBatch, Landing
from headwater.spark.session import start_session

CORES = 2
DOCUMENTS = scaled(1_000_000)
LARGE_DOCUMENTS = 4 * DOCUMENTS
WARM_UP_DOCUMENTS = scaled(10_000)
VALUE_BYTES = 200
VBUCKETS = 1024
BATCH_CHANGES = scaled(10_000)
ROUNDS = 3
BATCH_ROUNDS = 7
MEMORY_BATCHES = 20
MEMORY_BATCH_CHANGES = 1_000
MERGED_PART = 1.25 * MERGE_FRACTION
"""Of a table: with so many changes a merge is due."""
EVERY = "1 second"
"""How often the queries of small batches look for changes."""
BATCH_S_MAX = 120.0
TRIES_MAX = 5
SMALL, LARGE = LOGIN.bucket, "large"


def run() -> Sequence[Section]:
    return in_new_process(_run)


def _run() -> list[Section]:
    try:
        return _measure()
    except PySparkException as error:
        # Spark's errors can't be carried from one process to another.
        raise RuntimeError(str(error)) from None


def _measure() -> list[Section]:
    with (
        data_folder() as folder,
        node(folder / "node", "--bucket", SMALL, "--bucket", LARGE) as server,
        _session(folder) as spark,
    ):
        bench = _Bench(spark, server, folder.resolve())
        bench.load(SMALL, WARM_UP_DOCUMENTS)
        bench.land(SMALL, "warm-up")
        memory = measure_memory(bench)
        bench.load(SMALL, DOCUMENTS)
        bench.load(LARGE, LARGE_DOCUMENTS)
        return [measure_reading(bench), measure_landing(bench), measure_batches(bench), memory]


@contextmanager
def _session(folder: Path) -> Iterator[SparkSession]:
    spark = start_session(master=f"local[{CORES}]", log_folder=folder.resolve() / "spark")
    try:
        yield spark
    finally:
        spark.stop()


class _Bench:
    """A node with documents, a session, and a folder for tables."""

    def __init__(self, spark: SparkSession, server: NodeProcess, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self._server = server
        self._random = random.Random(6)

    # --- the bucket -----------------------------------------------------------------------------------------------

    def load(self, bucket: str, documents: int) -> None:
        """Have these documents in the bucket, and no others."""
        load(self._server.url, "--generate", str(documents), "--value-bytes", str(VALUE_BYTES), bucket=bucket)

    def update(self, bucket: str, count: int, *, of_documents: int) -> None:
        """Write new versions of documents from anywhere in the bucket."""
        lines = self.folder / "updates.jsonl"
        pad = "x" * (VALUE_BYTES - 40)
        with lines.open("w") as file:
            for number in self._random.sample(range(1, of_documents + 1), min(count, of_documents)):
                file.write(json.dumps({"n": number, "at": time.time(), "pad": pad}) + "\n")
        load(self._server.url, str(lines), "--key", "doc::{n}", bucket=bucket)

    def source(self, bucket: str) -> dict[str, str]:
        url = f"{self._server.url}/{bucket}"
        return {"url": url, "user": LOGIN.user, "password": LOGIN.password, "minPartitions": str(2 * CORES)}

    # --- the tables -----------------------------------------------------------------------------------------------

    def landing(self, bucket: str, name: str) -> Landing:
        return Landing(source=self.source(bucket), into=str(self.folder / name))

    def land(self, bucket: str, name: str) -> Landed:
        """Land all there is, documents merged."""
        start_s = time.perf_counter()
        batches: list[LandedBatch] = []
        landing = self.landing(bucket, name)
        query = landing.start(self.spark, on_batch=batches.append)
        query.awaitTermination()
        merging_s = time.perf_counter()
        landing.merge_all(self.spark)
        end_s = time.perf_counter()
        triggers_s = sum(_trigger_s(progress) for progress in query.recentProgress)
        rows = sum(batch.rows for batch in batches)
        return Landed(rows=rows, batches_s=triggers_s + end_s - merging_s, total_s=end_s - start_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """What a landing came to."""

    rows: int
    batches_s: float
    """From the plan of a batch to the last commit."""
    total_s: float
    """With the start of the query: it has a Python process of its own that plans."""


def _trigger_s(progress: Any) -> float:
    return int(progress.durationMs["triggerExecution"]) / 1000


# --- reading ------------------------------------------------------------------------------------------------------


def measure_reading(bench: _Bench) -> Section:
    changes = bench.spark.read.format("dcp").options(**bench.source(SMALL)).load()
    files = str(bench.folder / "rows.parquet")
    changes.write.parquet(files)
    parquet = bench.spark.read.parquet(files)
    if parquet.count() != DOCUMENTS:
        raise RuntimeError(f"{parquet.count()} rows came, and there are {DOCUMENTS} documents")
    load_before = load_now()
    dcp_s, parquet_s = in_turns(lambda: _to_nowhere(changes), lambda: _to_nowhere(parquet), rounds=ROUNDS)
    return Section(
        title="Reading with Spark",
        text=(
            f'`format("dcp")` into a sink that drops everything, against Parquet files of the same '
            f"{_millions(DOCUMENTS)} rows (goal ≥ 0.5), on {CORES} cores that the node shares with Spark. Medians of "
            f"{ROUNDS} turns; load of the machine before: {load_before}."
        ),
        columns=["source", "seconds", "rows", "of Parquet"],
        rows=[
            ["dcp", f"{dcp_s:.2f} s", _rate(DOCUMENTS, dcp_s), f"{parquet_s / dcp_s:.2f}"],
            ["Parquet", f"{parquet_s:.2f} s", _rate(DOCUMENTS, parquet_s), "1"],
        ],
    )


def _to_nowhere(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


# --- landing ------------------------------------------------------------------------------------------------------


def measure_landing(bench: _Bench) -> Section:
    load_before = load_now()
    small = [_checked_land(bench, SMALL, f"small-{turn}", DOCUMENTS) for turn in range(ROUNDS)]
    large = _checked_land(bench, LARGE, "large", LARGE_DOCUMENTS)
    for turn in range(1, ROUNDS):
        shutil.rmtree(bench.folder / f"small-{turn}")
    return Section(
        title="Landing a bucket",
        text=(
            f"Documents of {VALUE_BYTES} B into the tables `changes` and `documents`, as `headwater land --once` does "
            f"it, in a session that has landed something before (goal ≥ 200 k/s on {CORES} idle cores, of which the "
            "node needs its share). A query also has to be started, which takes the same time for any bucket. "
            f"{_millions(DOCUMENTS)} is the median of {ROUNDS} turns; load of the machine before: {load_before}."
        ),
        columns=["documents", "seconds", "rate", "with the start of the query"],
        rows=[_landed_row(DOCUMENTS, small), _landed_row(LARGE_DOCUMENTS, [large])],
    )


def _checked_land(bench: _Bench, bucket: str, name: str, documents: int) -> Landed:
    landed = bench.land(bucket, name)
    if landed.rows < documents:
        raise RuntimeError(f"{landed.rows} changes were landed, and there are {documents} documents")
    return landed


def _landed_row(documents: int, landed: Sequence[Landed]) -> list[str]:
    batches_s = statistics.median(one.batches_s for one in landed)
    total_s = statistics.median(one.total_s for one in landed)
    return [_millions(documents), f"{batches_s:.1f} s", _rate(documents, batches_s), f"{total_s:.1f} s"]


# --- small batches ------------------------------------------------------------------------------------------------


class _Running:
    """A query that goes on, to be fed with changes."""

    def __init__(self, bench: _Bench, bucket: str, name: str, documents: int) -> None:
        self._bench = bench
        self._bucket = bucket
        self._documents = documents
        self._merges = 0
        self._landed: queue.Queue[LandedBatch] = queue.Queue()
        self._query = bench.landing(bucket, name).start(bench.spark, every=EVERY, on_batch=self._landed.put)

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._query.stop()

    def feed(self, changes: int) -> list[float]:
        """Write so many changes and wait until they are landed. Returns what each batch took, from plan to commit."""
        self._bench.update(self._bucket, changes, of_documents=self._documents)
        took: list[float] = []
        rows = 0
        while rows < min(changes, self._documents):
            batch = self._next_batch()
            rows += batch.rows
            self._merges += batch.merges
            took.append(self._seconds_of(batch.batch_id))
        return took

    def feed_one_batch(self, changes: int) -> float:
        """The same, again if Spark has happened to take them as two batches."""
        for _ in range(TRIES_MAX):
            if len(took := self.feed(changes)) == 1:
                return took[0]
        raise RuntimeError(f"{TRIES_MAX} times {changes} changes were not taken as one batch")

    def merging_share_s(self) -> float:
        """What a small batch costs more for being merged later: by so many changes that all of it is merged."""
        changes = round(MERGED_PART * self._documents)
        self._merges = 0
        seconds = sum(self.feed(changes))
        if not self._merges:
            raise RuntimeError(f"nothing was merged after {changes} changes")
        return seconds * BATCH_CHANGES / changes

    def _next_batch(self) -> LandedBatch:
        deadline_s = time.monotonic() + BATCH_S_MAX
        while time.monotonic() < deadline_s:
            try:
                return self._landed.get(timeout=0.2)
            except queue.Empty:
                if not self._query.isActive:
                    raise RuntimeError(f"the query has ended: {self._query.exception()}") from None
        raise RuntimeError(f"no batch in {BATCH_S_MAX:.0f} s")

    def _seconds_of(self, batch_id: int) -> float:
        """What Spark says that the whole trigger took. It is told a moment after the batch."""
        deadline_s = time.monotonic() + BATCH_S_MAX
        while time.monotonic() < deadline_s:
            for progress in self._query.recentProgress:
                if progress.batchId == batch_id and "addBatch" in progress.durationMs:
                    return _trigger_s(progress)
            time.sleep(0.02)
        raise RuntimeError(f"Spark does not tell of batch {batch_id}")


def measure_batches(bench: _Bench) -> Section:
    load_before = load_now()
    small_s: list[float] = []
    large_s: list[float] = []
    with ExitStack() as running:
        small = running.enter_context(_Running(bench, SMALL, "small-0", DOCUMENTS))
        small.feed(BATCH_CHANGES)  # the first batch of a query starts its planner
        large = running.enter_context(_Running(bench, LARGE, "large", LARGE_DOCUMENTS))
        large.feed(BATCH_CHANGES)
        for _ in range(BATCH_ROUNDS):
            small_s.append(small.feed_one_batch(BATCH_CHANGES))
            large_s.append(large.feed_one_batch(BATCH_CHANGES))
        small_share_s, large_share_s = small.merging_share_s(), large.merging_share_s()
    small_median_s, large_median_s = statistics.median(small_s), statistics.median(large_s)
    return Section(
        title="Small batches into large tables",
        text=(
            f"{BATCH_CHANGES} updates of documents from anywhere in the table, as one batch of a query that goes on "
            "(goal: within 1.5× of each other). The time is that of the whole trigger: planning, reading, writing, "
            "committing. Such a batch is merged into the documents later, together with others: its share of that is "
            f"what {MERGED_PART:.0%} of the table as one batch took, merges included, for as many changes. Medians of "
            f"{BATCH_ROUNDS} turns, and one turn of the merges; load of the machine before: {load_before}."
        ),
        columns=["documents", "a batch", "its share of merges", "sum, of the smaller table's"],
        rows=[
            [_millions(DOCUMENTS), f"{small_median_s:.2f} s", f"{small_share_s:.2f} s", "1"],
            [
                _millions(LARGE_DOCUMENTS),
                f"{large_median_s:.2f} s",
                f"{large_share_s:.2f} s",
                f"{(large_median_s + large_share_s) / (small_median_s + small_share_s):.2f}",
            ],
        ],
    )


# --- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverMemory:
    """What a driver has, in bytes."""

    heap: int
    """Of Java, in use after a collection."""
    java: int
    python: int
    planner: int
    """The process in which the source plans its batches."""


def measure_memory(bench: _Bench) -> Section:
    with _Running(bench, SMALL, "warm-up", WARM_UP_DOCUMENTS) as query:
        query.feed(MEMORY_BATCH_CHANGES)
        before = _driver_memory(bench.spark)
        for _ in range(MEMORY_BATCHES):
            query.feed(MEMORY_BATCH_CHANGES)
        after = _driver_memory(bench.spark)
    return Section(
        title="Memory of a driver",
        text=(
            f"The driver of a landing with {VBUCKETS} vbuckets, after its first batch of {MEMORY_BATCH_CHANGES} "
            f"changes and {MEMORY_BATCHES} batches later. Java takes more from the system than it has in use, up to "
            "what `--memory` allows."
        ),
        columns=["", "Java's heap in use", "Java", "Python", "planner"],
        rows=[_memory_row("first batch", before), _memory_row(f"{MEMORY_BATCHES} batches later", after)],
    )


def _driver_memory(spark: SparkSession) -> DriverMemory:
    jvm: Any = spark._jvm
    jvm.System.gc()
    runtime = jvm.Runtime.getRuntime()
    java = [pid for pid in _below(os.getpid()) if _command(pid)[0].endswith("java")]
    planners = [
        pid for pid in _below(os.getpid()) if "pyspark.sql.streaming.python_streaming_source_runner" in _command(pid)
    ]
    return DriverMemory(
        heap=runtime.totalMemory() - runtime.freeMemory(),
        java=sum(map(memory_bytes, java)),
        python=memory_bytes(os.getpid()),
        planner=sum(map(memory_bytes, planners)),
    )


def _below(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that they have."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from _below(int(child))


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _memory_row(name: str, memory: DriverMemory) -> list[str]:
    return [name, *(f"{count / 1e6:.0f} MB" for count in (memory.heap, memory.java, memory.python, memory.planner))]


# --- figures ------------------------------------------------------------------------------------------------------


def _millions(documents: int) -> str:
    return f"{documents / 1e6:g} M"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e3:.0f} k/s"
