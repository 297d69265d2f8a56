"""Tables of a landing: how much queries read, and landing into an object store compared with the local disk."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from deltalake import DeltaTable, QueryBuilder
from pyspark.errors import PySparkException

from bench.landing import CORES, DOCUMENTS, SMALL, VALUE_BYTES, WARM_UP_DOCUMENTS, LandingBench, millions, rate, session
from bench.measure import in_new_process, load_now
from bench.processes import data_folder, node, s3_server
from bench.report import Section
from headwater.lake.lake import LakeSettings

QUERIED_DOCUMENTS = 4 * DOCUMENTS
UPDATES = max(1, DOCUMENTS // 100)
ROUNDS = 3
TABLES = ("queried/documents/_default._default", "queried/changes", "clustered/documents/_default._default")
_OF_CITY = "city = 'Oslo'"


def run() -> Sequence[Section]:
    return in_new_process(_run)


def _run() -> list[Section]:
    try:
        with data_folder() as folder, node(folder / "node") as server, session(folder) as spark:
            bench = LandingBench(spark, server, folder.resolve())
            bench.load(SMALL, WARM_UP_DOCUMENTS)
            bench.land(SMALL, "warm-up")
            bench.load(SMALL, DOCUMENTS)
            return [measure_store(bench), measure_queries(bench)]
    except PySparkException as error:
        # Spark's errors can't be pickled to pass them between processes.
        raise RuntimeError(str(error)) from None


# --- queries ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a query has read."""

    rows: int
    bytes: int
    seconds: float


Query = Callable[[Path, str], int]
"""Runs a condition against a table, with all columns, and returns the number of rows found."""


def with_deltalake(table: Path, condition: str) -> int:
    found = QueryBuilder().register("t", DeltaTable(table)).execute(f"SELECT * FROM t WHERE {condition}").read_all()
    return int(pa.table(found).num_rows)


def with_duckdb(table: Path, condition: str) -> int:
    files = DeltaTable(table).file_uris(file_pruning_predicate=condition)
    with duckdb.connect() as connection:
        connection.execute("SET enable_progress_bar = false")
        return len(connection.execute(f"SELECT * FROM read_parquet({files!r}) WHERE {condition}").fetchall())


def with_arrow(table: Path, condition: str) -> int:
    column, _, text = condition.partition(" ")
    sign, value = text.split(" ")[0], text.split("'")[1]
    field = ds.field(column)
    wanted = pa.scalar(datetime.fromisoformat(value)) if column == "changed_at" else pa.scalar(value)
    found = field == wanted if sign == "=" else field >= wanted
    return int(DeltaTable(table).to_pyarrow_dataset().to_table(filter=found).num_rows)


def measure_queries(bench: LandingBench) -> Section:
    load_before = load_now()
    bench.load(SMALL, QUERIED_DOCUMENTS)
    plain = bench.land(SMALL, "queried")
    clustered = bench.land(SMALL, "clustered", lake=LakeSettings(cluster_by={"*": ("city",)}))
    since = datetime.now(UTC)
    bench.update(SMALL, UPDATES, of_documents=QUERIED_DOCUMENTS)
    for name in ("queried", "clustered"):
        bench.land(SMALL, name)
    by_key, changes, by_city = TABLES
    sizes = {
        table: sum(Path(file).stat().st_size for file in DeltaTable(bench.folder / table).file_uris())
        for table in TABLES
    }
    of_city = _rows_of_city(bench.folder / by_city)
    rows = []
    for title, table, condition, expected in (
        ("a document by its key", by_key, f"key = 'doc::{QUERIED_DOCUMENTS // 3}'", 1),
        ("a document by its key, clustered by city", by_city, f"key = 'doc::{QUERIED_DOCUMENTS // 3}'", 1),
        (f"the documents of a city ({of_city / QUERIED_DOCUMENTS:.3f} of all)", by_key, _OF_CITY, of_city),
        ("the same, clustered by city", by_city, _OF_CITY, of_city),
        ("the changes since a time", changes, f"changed_at >= '{since:%Y-%m-%dT%H:%M:%S.%fZ}'", UPDATES),
    ):
        for name, query in (("deltalake", with_deltalake), ("DuckDB", with_duckdb), ("Arrow", with_arrow)):
            reading = in_new_process(_reading, query, bench.folder / table, condition)
            if reading.rows != expected:
                raise RuntimeError(f"{name} has found {reading.rows} rows where {condition}, not {expected}")
            share = reading.bytes / sizes[table]
            rows.append([title, name, f"{reading.bytes / 1e6:.2f} MB", f"{share:.3f}", f"{reading.seconds:.2f} s"])
    return Section(
        title="Queries of a landed table",
        text=(
            f"A table of {millions(QUERIED_DOCUMENTS)} documents of {VALUE_BYTES} B, after {UPDATES} updates, with all "
            "columns, in a new process: the bytes that it has read from files, and their share of what the table has, "
            f"which is what a full scan reads (goal ≤ 0.1): {sizes[by_key] / 1e6:.0f} MB in `documents`, "
            f"{sizes[by_city] / 1e6:.0f} MB where it is clustered, {sizes[changes] / 1e6:.0f} MB in `changes`. Landing "
            f"took {plain.total_s:.1f} s, and {clustered.total_s:.1f} s where `documents` is clustered. Load of the "
            f"machine before: {load_before}."
        ),
        columns=["query", "engine", "read", "of a full scan", "seconds"],
        rows=rows,
    )


def _rows_of_city(table: Path) -> int:
    return int(DeltaTable(table).to_pyarrow_dataset().count_rows(filter=ds.field("city") == "Oslo"))


def _reading(query: Query, table: Path, condition: str) -> Reading:
    before, start_s = _bytes_read(), time.perf_counter()
    rows = query(table, condition)
    return Reading(rows=rows, bytes=_bytes_read() - before, seconds=time.perf_counter() - start_s)


def _bytes_read() -> int:
    """Return how many bytes this process has read from any source, cached or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


# --- an object store --------------------------------------------------------------------------------------------------


def measure_store(bench: LandingBench) -> Section:
    load_before = load_now()
    local_s: list[float] = []
    store_s: list[float] = []
    with s3_server() as store:
        for turn in range(ROUNDS):
            local_s.append(bench.land(SMALL, f"local-{turn}").total_s)
            uri = store.make_bucket(f"lake-{turn}")
            store_s.append(bench.land(SMALL, uri, storage_options=store.options).total_s)
    local, stored = statistics.median(local_s), statistics.median(store_s)
    return Section(
        title="Landing into an object store",
        text=(
            f"{millions(DOCUMENTS)} documents of {VALUE_BYTES} B into tables on the local disk and on moto's S3 "
            f"server, a Python program that shares the {CORES} cores with node and Spark. Medians of {ROUNDS} turns; "
            f"load of the machine before: {load_before}."
        ),
        columns=["tables in", "seconds", "rate", "of the local disk"],
        rows=[
            ["a directory", f"{local:.1f} s", rate(DOCUMENTS, local), "1"],
            ["S3", f"{stored:.1f} s", rate(DOCUMENTS, stored), f"{stored / local:.2f}"],
        ],
    )
