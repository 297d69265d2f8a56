"""Spark: the `dcp` source compared with Parquet, landing a bucket in tables, small batches into large tables, the
age of documents under load, and memory.

All of it is measured in one session and its own process: that process is the driver whose memory is measured.
"""

from __future__ import annotations

import functools
import itertools
import json
import multiprocessing
import os
import queue
import random
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from bench.kv_driver import Updates, write_steadily
from bench.measure import SCALE, in_new_process, in_turns, load_now, scaled
from bench.processes import LOGIN, NodeProcess, data_folder, load, memory_bytes, node
from bench.report import Goal, Section
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.landing.loop import LandedBatch, LandingStatus
from headwater.landing.planning import Freshness
from headwater.landing.query import Landing
from headwater.spark.executors import SparkRunner
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
WRITES_PER_S = (1_000, 10_000)
AGE_S = max(3.0, 30.0 * SCALE)
SETTLE_S = max(3.0, 15.0 * SCALE)
"""How long the writer runs before ages are sampled: by then the first merges under load are complete."""
SAMPLE_EVERY_S = 0.1
FRESH_S = 5.0
EVERY = "1 second"
"""How often continuous landings look for changes."""
BATCH_S_MAX = 120.0
TRIES_MAX = 5
SMALL, LARGE = LOGIN.bucket, "large"


def run() -> Sequence[Section]:
    return in_new_process(_run)


def _run() -> list[Section]:
    try:
        return _measure()
    except PySparkException as error:
        # Spark's errors can't be pickled to pass them between processes.
        raise RuntimeError(str(error)) from None


def _measure() -> list[Section]:
    with (
        data_folder() as folder,
        node(folder / "node", "--bucket", SMALL, "--bucket", LARGE) as server,
        session(folder) as spark,
    ):
        bench = LandingBench(spark, server, folder.resolve())
        bench.load(SMALL, WARM_UP_DOCUMENTS)
        bench.land(SMALL, "warm-up")
        memory = measure_memory(bench)
        bench.load(SMALL, DOCUMENTS)
        bench.load(LARGE, LARGE_DOCUMENTS)
        return [
            measure_reading(bench),
            measure_landing(bench),
            measure_batches(bench),
            measure_ages(bench),
            memory,
        ]


@contextmanager
def session(folder: Path) -> Iterator[SparkSession]:
    spark = start_session(master=f"local[{CORES}]", log_folder=folder.resolve() / "spark")
    try:
        yield spark
    finally:
        spark.stop()


class LandingBench:
    """A node with documents, a session, and a folder for tables."""

    def __init__(self, spark: SparkSession, server: NodeProcess, folder: Path) -> None:
        self.spark = spark
        self.folder = folder
        self._server = server
        self._random = random.Random(6)

    # --- the bucket -----------------------------------------------------------------------------------------------

    def load(self, bucket: str, documents: int) -> None:
        """Write this many documents to the bucket. They replace those of earlier loads."""
        load(self._server.url, "--generate", str(documents), "--value-bytes", str(VALUE_BYTES), bucket=bucket)

    def update(self, bucket: str, count: int, *, of_documents: int) -> None:
        """Write new versions of random documents of the bucket."""
        lines = self.folder / "updates.jsonl"
        pad = "x" * (VALUE_BYTES - 40)
        with lines.open("w") as file:
            for number in self._random.sample(range(1, of_documents + 1), min(count, of_documents)):
                file.write(json.dumps({"n": number, "at": time.time(), "pad": pad}) + "\n")
        load(self._server.url, str(lines), "--key", "doc::{n}", bucket=bucket)

    def source(self, bucket: str) -> dict[str, str]:
        url = f"{self._server.url}/{bucket}"
        return {"url": url, "user": LOGIN.user, "password": LOGIN.password, "minPartitions": str(2 * CORES)}

    def read(self, bucket: str, schema: str | None = None, **options: str) -> DataFrame:
        reader = self.spark.read.format("dcp").options(**{**self.source(bucket), **options})
        return (reader if schema is None else reader.schema(schema)).load()

    # --- the tables -----------------------------------------------------------------------------------------------

    def landing(self, bucket: str, name: str) -> Landing:
        """Return a landing into a directory, or into an object store given by its URI."""
        return Landing(source=self.source(bucket), into=name if "://" in name else str(self.folder / name))

    def land(
        self,
        bucket: str,
        name: str,
        *,
        storage_options: Mapping[str, str] | None = None,
        lake: LakeSettings | None = None,
    ) -> Landed:
        """Land everything in the bucket, and merge the documents."""
        landing = self.landing(bucket, name)
        landing = replace(landing, storage_options=storage_options or {}, lake=lake or landing.lake)
        start_s = time.perf_counter()
        batches: list[LandedBatch] = []
        query = landing.start(SparkRunner(self.spark), on_batch=batches.append)
        query.awaitTermination()
        total_s = time.perf_counter() - start_s
        statuses = [*(batch.status for batch in batches), query.landing_status]
        return Landed(
            rows=sum(batch.rows for batch in batches),
            total_s=total_s,
            batches_s=sum(batch.took_s for batch in batches),
            merges_s=sum(_different(status.last_merge_s for status in statuses)),
        )

    # --- writes ---------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self, bucket: str, updates: Updates) -> Iterator[Future[float]]:
        """Run a process that writes to a bucket. Its future returns the rate that the node has accepted."""
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool.submit(write_steadily, self._server.port, replace(LOGIN, bucket=bucket), updates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """The result of a landing."""

    rows: int
    total_s: float
    """From the start of the query to its end."""
    batches_s: float
    """The part of it spent on batches, from the plan to the commit of `changes`."""
    merges_s: float


# --- reading ------------------------------------------------------------------------------------------------------


def measure_reading(bench: LandingBench) -> Section:
    changes = bench.read(SMALL)
    files = str(bench.folder / "rows.parquet")
    changes.write.parquet(files)
    parquet = bench.spark.read.parquet(files)
    keys = bench.read(SMALL, columns="key,op")
    all_fields = bench.read(SMALL, value="string").selectExpr("*", "get_json_object(value, '$.id') AS id")
    one_field = bench.read(SMALL, "key STRING, id BIGINT", mode="documents")
    variants = bench.read(SMALL, value="variant")
    parsed = bench.read(SMALL, value="string").selectExpr("* EXCEPT (value)", "parse_json(value) AS value")
    if parquet.count() != DOCUMENTS:
        raise RuntimeError(f"{parquet.count()} rows came, and there are {DOCUMENTS} documents")
    load_before = load_now()
    frames = (changes, parquet, keys, all_fields, one_field, parsed, variants)
    seconds = in_turns(*(functools.partial(to_nowhere, frame) for frame in frames), rounds=ROUNDS)
    dcp_s, parquet_s, keys_s, all_fields_s, one_field_s, parsed_s, variants_s = seconds
    return Section(
        title="Reading with Spark",
        text=(
            f'`format("dcp")` into a sink that drops everything, against Parquet files of the same '
            f"{millions(DOCUMENTS)} rows (goal ≥ 0.6), on {CORES} cores that the node shares with Spark. Medians of "
            f"{ROUNDS} turns; load of the machine before: {load_before}. Below them: two columns by the option "
            "`columns`, and the key with one field of the documents, by `mode=documents` and from all columns with "
            "`get_json_object` (goal: half of the seconds for all columns, or less); and the documents as variants, "
            "parsed by Spark from text and by the source (goal: no more seconds)."
        ),
        columns=["source", "seconds", "rows", "of Parquet", "seconds of all columns, or of text"],
        rows=[
            ["dcp", f"{dcp_s:.2f} s", rate(DOCUMENTS, dcp_s), f"{parquet_s / dcp_s:.2f}", "1"],
            ["Parquet", f"{parquet_s:.2f} s", rate(DOCUMENTS, parquet_s), "1", ""],
            ["dcp, `key` and `op`", f"{keys_s:.2f} s", rate(DOCUMENTS, keys_s), "", f"{keys_s / dcp_s:.2f}"],
            ["dcp, all columns and a field", f"{all_fields_s:.2f} s", rate(DOCUMENTS, all_fields_s), "", "1"],
            [
                *("dcp, `key` and a field", f"{one_field_s:.2f} s", rate(DOCUMENTS, one_field_s)),
                *("", f"{one_field_s / all_fields_s:.2f}"),
            ],
            ["dcp, `parse_json` of text", f"{parsed_s:.2f} s", rate(DOCUMENTS, parsed_s), "", "1"],
            [
                *("dcp, `value=variant`", f"{variants_s:.2f} s", rate(DOCUMENTS, variants_s)),
                *("", f"{variants_s / parsed_s:.2f}"),
            ],
        ],
        goals=[
            Goal("`dcp` into nothing, of Parquet", 0.6, parquet_s / dcp_s),
            Goal("`dcp`, `key` and `op`, of all columns", 0.5, keys_s / dcp_s, at_most=True),
            Goal("`dcp`, `key` and a field, of all columns and a field", 0.5, one_field_s / all_fields_s, at_most=True),
            Goal("`dcp`, variants, of `parse_json`", 1, variants_s / parsed_s, at_most=True),
        ],
    )


def to_nowhere(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


# --- landing ------------------------------------------------------------------------------------------------------


def measure_landing(bench: LandingBench) -> Section:
    load_before = load_now()
    small = [_checked_land(bench, SMALL, f"small-{turn}", DOCUMENTS) for turn in range(ROUNDS)]
    large = _checked_land(bench, LARGE, "large", LARGE_DOCUMENTS)
    for turn in range(1, ROUNDS):
        shutil.rmtree(bench.folder / f"small-{turn}")
    return Section(
        title="Landing a bucket",
        text=(
            f"Documents of {VALUE_BYTES} B into the tables `changes` and `documents`, as `headwater land --once` does "
            f"it, in a session that has landed something before (goals: 600 and 800 k/s on {CORES} idle cores, of "
            "which the node needs its share). The seconds are those from the start of the query to its end. "
            f"{millions(DOCUMENTS)} is the median of {ROUNDS} turns; load of the machine before: {load_before}."
        ),
        columns=["documents", "seconds", "rate", "of it batches", "of it merges"],
        rows=[_landed_row(DOCUMENTS, small), _landed_row(LARGE_DOCUMENTS, [large])],
        goals=[
            Goal(f"landing {millions(documents)}", wanted, documents / _total_s(landed) / 1e3, " k/s")
            for documents, wanted, landed in ((DOCUMENTS, 600, small), (LARGE_DOCUMENTS, 800, [large]))
        ],
    )


def _checked_land(bench: LandingBench, bucket: str, name: str, documents: int) -> Landed:
    landed = bench.land(bucket, name)
    if landed.rows < documents:
        raise RuntimeError(f"{landed.rows} changes were landed, and there are {documents} documents")
    return landed


def _total_s(landed: Sequence[Landed]) -> float:
    return statistics.median(one.total_s for one in landed)


def _landed_row(documents: int, landed: Sequence[Landed]) -> list[str]:
    total_s = _total_s(landed)
    batches_s = statistics.median(one.batches_s for one in landed)
    merges_s = statistics.median(one.merges_s for one in landed)
    seconds = [f"{count:.1f} s" for count in (batches_s, merges_s)]
    return [millions(documents), f"{total_s:.1f} s", rate(documents, total_s), *seconds]


# --- small batches ------------------------------------------------------------------------------------------------


class _Running:
    """A continuous query, to be fed with changes."""

    def __init__(
        self, bench: LandingBench, bucket: str, name: str, documents: int, *, on_read: bool | None = None
    ) -> None:
        self._bench = bench
        self._bucket = bucket
        self._documents = documents
        self._landed: queue.Queue[LandedBatch] = queue.Queue()
        lake = LakeSettings(merging=MergeRules(on_read=on_read))
        landing = replace(bench.landing(bucket, name), fresh=Freshness(wait_s_max=FRESH_S), lake=lake)
        self._query = landing.start(SparkRunner(bench.spark), every=EVERY, on_batch=self._landed.put)

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._query.stop()

    @property
    def status(self) -> LandingStatus:
        """The query's status. Raises if the query has ended."""
        if not self._query.isActive:
            raise RuntimeError(f"the query has ended: {self._query.exception()}")
        return self._query.landing_status

    def feed(self, changes: int) -> list[float]:
        """Write this many changes and wait until they have landed. Returns each batch's duration, without
        merges."""
        self._bench.update(self._bucket, changes, of_documents=self._documents)
        took: list[float] = []
        rows = 0
        while rows < min(changes, self._documents):
            batch = self._next_batch()
            rows += batch.rows
            took.append(batch.took_s)
        return took

    def feed_one_batch(self, changes: int) -> BatchTimes:
        """Like `feed`, but retry until the changes land as one batch, and include the merge that follows."""
        for _ in range(TRIES_MAX):
            took = self.feed(changes)
            merge_s = self.merge()
            if len(took) == 1:
                return BatchTimes(batch_s=took[0], merge_s=merge_s)
        raise RuntimeError(f"{TRIES_MAX} times {changes} changes were not taken as one batch")

    def merge(self) -> float:
        """Bring the documents up to date with the bucket. Returns the duration of the last merge."""
        self._query.processAllAvailable()
        merge_s = self.status.last_merge_s
        if merge_s is None:
            raise RuntimeError("nothing was merged")
        return merge_s

    def _next_batch(self) -> LandedBatch:
        deadline_s = time.monotonic() + BATCH_S_MAX
        while time.monotonic() < deadline_s:
            try:
                return self._landed.get(timeout=0.2)
            except queue.Empty:
                self.status  # noqa: B018  (raises if the query has ended)
        raise RuntimeError(f"no batch in {BATCH_S_MAX:.0f} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTimes:
    batch_s: float
    merge_s: float
    """The duration of the merge that brought the batch into the documents."""


def measure_batches(bench: LandingBench) -> Section:
    load_before = load_now()
    small: list[BatchTimes] = []
    large: list[BatchTimes] = []
    with ExitStack() as running:
        into_small = running.enter_context(_Running(bench, SMALL, "small-0", DOCUMENTS))
        into_large = running.enter_context(_Running(bench, LARGE, "large", LARGE_DOCUMENTS))
        for query in (into_small, into_large):
            # The first batch of a query connects, and its first merge reads the contents of the table.
            query.feed_one_batch(BATCH_CHANGES)
        for _ in range(BATCH_ROUNDS):
            small.append(into_small.feed_one_batch(BATCH_CHANGES))
            large.append(into_large.feed_one_batch(BATCH_CHANGES))
    small_batch_s, large_batch_s = (statistics.median(it.batch_s for it in times) for times in (small, large))
    small_merge_s, large_merge_s = (statistics.median(it.merge_s for it in times) for times in (small, large))
    return Section(
        title="Small batches into large tables",
        text=(
            f"{BATCH_CHANGES} updates of documents from anywhere in the table, as one batch of a landing that goes on "
            "(goal: within 1.5× of each other). A batch is reading, writing and committing `changes`. The merge of "
            "these changes into `documents` is counted apart: it writes every file again that holds one of the "
            "documents, and landings under load merge several batches at once. Medians of "
            f"{BATCH_ROUNDS} turns; load of the machine before: {load_before}."
        ),
        columns=["documents", "a batch", "of the smaller table's", "its merge", "of the smaller table's"],
        rows=[
            [millions(DOCUMENTS), f"{small_batch_s:.2f} s", "1", f"{small_merge_s:.2f} s", "1"],
            [
                millions(LARGE_DOCUMENTS),
                *(f"{large_batch_s:.2f} s", f"{large_batch_s / small_batch_s:.2f}"),
                *(f"{large_merge_s:.2f} s", f"{large_merge_s / small_merge_s:.2f}"),
            ],
        ],
        goals=[Goal("a batch into 4 M, of one into 1 M", 1.5, large_batch_s / small_batch_s, at_most=True)],
    )


# --- freshness ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ages:
    """Samples of how far tables were behind a bucket during writes."""

    written_per_s: float
    changes_s: Sequence[float]
    documents_s: Sequence[float]
    batches_s: Sequence[float]
    merges_s: Sequence[float]


def measure_ages(bench: LandingBench) -> Section:
    load_before = load_now()
    rows = []
    goals = []
    for mode, on_read in (("written again", False), ("deletion vectors", True)):
        with _Running(bench, LARGE, "large", LARGE_DOCUMENTS, on_read=on_read) as query:
            query.feed_one_batch(BATCH_CHANGES)
            for writes_per_s in WRITES_PER_S:
                ages = _ages_under_load(bench, query, writes_per_s)
                rows.append([mode, *_ages_row(writes_per_s, ages)])
                if on_read:
                    p99_s = float(np.percentile(ages.documents_s, 99))
                    work = f"age of `documents` with vectors at {writes_per_s:,} changes/s, p99"
                    goals.append(Goal(work, 5, p99_s, " s", at_most=True))
                query.merge()
    return Section(
        title="How old the documents are",
        text=(
            f"Random documents of {millions(LARGE_DOCUMENTS)} are written by a process of its own, at a steady rate, "
            f"as a landing with `--fresh {FRESH_S:.0f}s` looks for changes each second: by default the bytes merges "
            "write have a bound, and a change may wait a minute. All that was written to the bucket longer ago "
            "than the age of a table is in that table; the goal is a p99 of 5 s with vectors. Ages are looked at every "
            f"{SAMPLE_EVERY_S} s for {AGE_S:.0f} s, when the load has lasted for {SETTLE_S:.0f} s. Node, writer and "
            f"Spark share {CORES} cores. Batches and merges are medians; load of the machine before: {load_before}."
        ),
        columns=[
            *("superseded rows", "changes", "taken by the node"),
            *("`changes`, p50", "p99", "`documents`, p50", "p99"),
            *("a batch", "a merge"),
        ],
        rows=rows,
        goals=goals,
    )


def _ages_under_load(bench: LandingBench, query: _Running, writes_per_s: int) -> Ages:
    updates = Updates(
        sets_per_s=writes_per_s,
        seconds=SETTLE_S + AGE_S,
        of_documents=LARGE_DOCUMENTS,
        value_bytes=VALUE_BYTES,
        vbuckets=VBUCKETS,
    )
    samples: list[tuple[float, LandingStatus]] = []
    with bench.writing(LARGE, updates) as written:
        while not written.done():
            samples.append((time.monotonic(), query.status))
            time.sleep(SAMPLE_EVERY_S)
    from_s = time.monotonic() - AGE_S
    kept = [status for at_s, status in samples if at_s >= from_s]
    ages = [status.documents_age_s for status in kept if status.documents_age_s is not None]
    lags = [status.lag_s for status in kept if status.lag_s is not None]
    if len(ages) < len(kept) or len(lags) < len(kept):
        raise RuntimeError(f"of {len(kept)} ages {len(kept) - len(ages)} were not known")
    return Ages(
        written_per_s=written.result(),
        changes_s=lags,
        documents_s=ages,
        batches_s=_different(status.last_batch_s for status in kept),
        merges_s=_different(status.last_merge_s for status in kept),
    )


def _different(times_s: Iterable[float | None]) -> list[float]:
    """Return the duration of each batch or merge. The status keeps one until the next one is known."""
    return [time_s for time_s, _ in itertools.groupby(times_s) if time_s is not None]


def _ages_row(writes_per_s: int, ages: Ages) -> list[str]:
    percentiles = [
        float(np.percentile(seconds, share)) for seconds in (ages.changes_s, ages.documents_s) for share in (50, 99)
    ]
    return [
        f"{writes_per_s}/s",
        f"{ages.written_per_s:.0f}/s",
        *(f"{seconds:.1f} s" for seconds in percentiles),
        *(f"{statistics.median(took):.2f} s, {len(took)} times" for took in (ages.batches_s, ages.merges_s)),
    ]


# --- memory -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverMemory:
    """The memory of a driver, in bytes."""

    heap: int
    """Java's heap in use after a garbage collection."""
    java: int
    python: int


def measure_memory(bench: LandingBench) -> Section:
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
        columns=["", "Java's heap in use", "Java", "Python"],
        rows=[_memory_row("first batch", before), _memory_row(f"{MEMORY_BATCHES} batches later", after)],
    )


def _driver_memory(spark: SparkSession) -> DriverMemory:
    jvm: Any = spark._jvm
    jvm.System.gc()
    runtime = jvm.Runtime.getRuntime()
    java = [pid for pid in _below(os.getpid()) if _command(pid)[0].endswith("java")]
    return DriverMemory(
        heap=runtime.totalMemory() - runtime.freeMemory(),
        java=sum(map(memory_bytes, java)),
        python=memory_bytes(os.getpid()),
    )


def _below(pid: int) -> Iterator[int]:
    """Yield the descendants of a process."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield int(child)
            yield from _below(int(child))


def _command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def _memory_row(name: str, memory: DriverMemory) -> list[str]:
    return [name, *(f"{count / 1e6:.0f} MB" for count in (memory.heap, memory.java, memory.python))]


# --- figures ------------------------------------------------------------------------------------------------------


def millions(documents: int) -> str:
    return f"{documents / 1e6:g} M"


def rate(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e3:.0f} k/s"
