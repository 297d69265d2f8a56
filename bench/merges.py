"""Merges of random updates into tables of many sizes, which rewrite files or use deletion vectors.

The lake's own functions are called in a separate process, without a node or Spark, to measure the merge alone.
`bench.landing` measures the age of documents under load with a node and a landing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder
from numpy.typing import NDArray

from bench.measure import in_new_process, in_turns, load_now, scaled
from bench.processes import data_folder
from bench.report import Goal, Section
from headwater.client.batches import RAW_SCHEMA
from headwater.lake.commits import begin_batch, commit_batch, merge
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import Lake, LakeSettings
from headwater.lake.layout import groups_for
from headwater.landing import documents
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

SIZES = tuple(scaled(count) for count in (1_000_000, 4_000_000, 16_000_000))
UPDATES = scaled(10_000)
ROUNDS = 3
MERGES = {False: max(5, scaled(25)), True: max(5, scaled(100))}
"""Merges in a row into the table of the second size, without and with vectors: a rewriting merge takes seconds."""
QUERY_ROUNDS = 5
AGAIN, VECTORS = "written again", "deletion vectors"
MODES = {AGAIN: False, VECTORS: True}
VBUCKETS = 1024
VALUE_BYTES = 200
ROWS_A_BATCH = 250_000
NAME = "_default._default"
_VBUUID = 7
_TEXT = b"abcdefghijklmnopqrstuvwxyz0123456789"


class MergeBench:
    """A lake of numbered documents, and updates of some of them."""

    def __init__(self, folder: Path, documents: int, *, on_read: bool) -> None:
        self._documents = documents
        self._random = np.random.default_rng(documents)
        self._seqnos = np.zeros(VBUCKETS, dtype=np.int64)
        self._turn = 0
        self.table = folder / "documents" / NAME
        self.lake = Lake.create(
            str(folder),
            bucket_uuid="bench",
            vbuckets=VBUCKETS,
            groups=groups_for(documents),
            settings=LakeSettings(merging=MergeRules(on_read=on_read)),
        )
        self.land(np.arange(documents))
        merge(self.lake)

    def update(self, count: int) -> None:
        """Land updates of random documents, which are then pending for a merge."""
        self.land(self._random.choice(self._documents, min(count, self._documents), replace=False))

    def land(self, documents: NDArray[np.int64]) -> None:
        batch = begin_batch(self.lake)
        report = batch.writer.write(self._batches(documents))
        for vbucket in range(VBUCKETS):
            seqno = Seqno(int(self._seqnos[vbucket]))
            report.reached[VBucketId(vbucket)] = StreamOffset.whole(Vbuuid(_VBUUID), seqno)
        commit_batch(self.lake, batch, [report])
        self._turn += 1

    def _batches(self, documents: NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
        for first in range(0, len(documents), ROWS_A_BATCH):
            numbers = documents[first : first + ROWS_A_BATCH]
            vbuckets = _vbuckets_of(numbers)
            order = np.argsort(vbuckets, kind="stable")
            numbers, vbuckets = numbers[order], vbuckets[order]
            counts = np.bincount(vbuckets, minlength=VBUCKETS)
            starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
            seqnos = self._seqnos[vbuckets] + np.arange(len(numbers)) - starts[vbuckets] + 1
            self._seqnos += counts
            rows = len(numbers)
            texts = pa.array(numbers).cast(pa.string())
            filling = np.frombuffer(_TEXT, np.uint8)[self._random.integers(0, len(_TEXT), (rows, VALUE_BYTES - 60))]
            filled = pa.array(filling.view(f"S{VALUE_BYTES - 60}").ravel()).cast(pa.string())
            values = pc.binary_join_element_wise(
                '{"city": "', pc.if_else(pa.array(numbers % 100 == 1), "Oslo", "Bern"), '", "n": ', texts,
                f', "turn": {self._turn}, "text": "', filled, '"}', "",
            )  # fmt: skip
            given = {
                "vbucket": vbuckets,
                "vbuuid": np.full(rows, _VBUUID),
                "seqno": seqnos,
                "rev": np.full(rows, self._turn + 1),
                "op": pa.array(["mutation"] * rows).dictionary_encode(),
                "scope": pa.array(["_default"] * rows).dictionary_encode(),
                "collection": pa.array(["_default"] * rows).dictionary_encode(),
                "collection_id": np.zeros(rows, dtype=np.int64),
                "key": pc.binary_join_element_wise("doc::", texts, ""),
                "value": values,
                "datatype": np.ones(rows, dtype=np.int64),
                "cas": np.full(rows, time.time_ns()),
                "changed_at": np.full(rows, time.time_ns() // 1000),
                "snapshot_start": np.zeros(rows, dtype=np.int64),
                "snapshot_end": seqnos,
            }
            columns = []
            for field in RAW_SCHEMA:
                column = given.get(field.name, np.zeros(rows, dtype=np.int64))
                array = column if isinstance(column, pa.Array) else pa.array(column)
                columns.append(array.cast(field.type))
            yield pa.RecordBatch.from_arrays(columns, schema=RAW_SCHEMA)

    def merge(self) -> Cost:
        """Merge the pending changes in this thread."""
        files = {*self.table.rglob("*.*")}
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        merge(self.lake)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        new = {*self.table.rglob("*.*")} - files
        return Cost(seconds=took_s, cpu_s=cpu_s, written_bytes=sum(path.stat().st_size for path in new))

    @property
    def row_bytes(self) -> float:
        """The mean size of a document in the files of the table."""
        documents = self.lake.tables[NAME].documents
        assert documents is not None, "it was merged into"
        files = documents.log.files()
        return sum(file.size_bytes for file in files) / max(1, sum(file.rows for file in files))


def _vbuckets_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return pseudo-random vbuckets for neighbouring keys, like a hash."""
    return numbers * 2_654_435_761 % 2**32 % VBUCKETS


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a merge."""

    seconds: float
    cpu_s: float
    written_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The costs of many merges in a row, and of queries after them."""

    merges: Sequence[Cost]
    changed_bytes: float
    files: int
    queries_s: Mapping[str, float]

    @property
    def written_for_each_byte(self) -> float:
        return sum(cost.written_bytes for cost in self.merges) / self.changed_bytes


def run() -> Sequence[Section]:
    return [_run_sizes(), _run_many()]


def _run_sizes() -> Section:
    load_before = load_now()
    costs = {
        (size, mode): in_new_process(_measure_size, size, on_read) for size in SIZES for mode, on_read in MODES.items()
    }
    least = {mode: costs[SIZES[0], mode] for mode in MODES}
    return Section(
        title="Merges into tables of many sizes",
        text=(
            f"{UPDATES:,} random updates of documents of {VALUE_BYTES} B, merged in one thread; medians of {ROUNDS}, "
            "after one that is not counted. Goals with vectors: 4 M at most 1.5 times and 16 M at most 3 times the "
            "processor time of 1 M, and at 4 M a tenth of what writing again takes. Load of the machine before: "
            f"{load_before}."
        ),
        columns=["documents", "superseded rows", "seconds", "processor time", "of the smallest", "written"],
        rows=[
            [
                f"{size:,}",
                mode,
                f"{cost.seconds:.2f} s",
                f"{cost.cpu_s:.2f} s",
                f"{cost.cpu_s / least[mode].cpu_s:.2f}",
                f"{cost.written_bytes / 1e6:.1f} MB",
            ]
            for (size, mode), cost in costs.items()
        ],
        goals=[
            *(
                Goal(
                    f"merge with vectors into {times} times as many, of the time",
                    most,
                    _times(costs, VECTORS, size),
                    at_most=True,
                )
                for times, most, size in ((4, 1.5, SIZES[1]), (16, 3, SIZES[2]))
            ),
            Goal(
                "merge with vectors into 4 M, of writing again",
                0.1,
                costs[SIZES[1], VECTORS].cpu_s / costs[SIZES[1], AGAIN].cpu_s,
                at_most=True,
            ),
        ],
    )


def _times(costs: Mapping[tuple[int, str], Cost], mode: str, size: int) -> float:
    """Return the processor time relative to that of the smallest table."""
    return costs[size, mode].cpu_s / costs[SIZES[0], mode].cpu_s


def _measure_size(documents: int, on_read: bool) -> Cost:
    with data_folder() as folder:
        bench = MergeBench(folder, documents, on_read=on_read)
        costs = [cost for _ in range(ROUNDS + 1) for cost in [_updated(bench)]][1:]
    return Cost(
        seconds=statistics.median(cost.seconds for cost in costs),
        cpu_s=statistics.median(cost.cpu_s for cost in costs),
        written_bytes=int(statistics.median(cost.written_bytes for cost in costs)),
    )


def _updated(bench: MergeBench) -> Cost:
    bench.update(UPDATES)
    return bench.merge()


def _run_many() -> Section:
    load_before = load_now()
    rows = {mode: in_new_process(_measure_many, SIZES[1], on_read) for mode, on_read in MODES.items()}
    plain, vectors = rows[AGAIN], rows[VECTORS]
    return Section(
        title="Many merges in a row",
        text=(
            f"{MERGES[True]} merges ({MERGES[False]} without vectors) of {UPDATES:,} random updates into "
            f"{SIZES[1]:,} documents, then full scans and lookups "
            f"of one key, medians of {QUERY_ROUNDS}, with their ratio to the table without vectors (goal ≤ 1.3). What "
            "is written has the joins of files in it, against what the updates take up (goal ≤ 8). Headwater is "
            "`headwater.landing.documents`, in one thread. deltalake reads files that have vectors in one thread, and "
            "neither it nor Polars uses a condition to skip parts of them; with the vbucket of the key in the "
            "condition, both skip the files of other groups. "
            f"Load of the machine before: {load_before}."
        ),
        columns=["superseded rows", "processor time", "slowest", "written for each byte", "files", *plain.queries_s],
        rows=[
            [
                mode,
                f"{sum(cost.cpu_s for cost in row.merges) / len(row.merges):.2f} s a merge",
                f"{max(cost.seconds for cost in row.merges):.2f} s",
                f"{row.written_for_each_byte:.1f}",
                str(row.files),
                *(f"{took:.2f} s ({took / plain.queries_s[query]:.2f})" for query, took in row.queries_s.items()),
            ]
            for mode, row in rows.items()
        ],
        goals=[
            Goal(
                "merges with vectors, bytes written for each that changed",
                8,
                vectors.written_for_each_byte,
                at_most=True,
            ),
            *(
                Goal(f"{query} after merges with vectors, of without", 1.3, took / plain.queries_s[query], at_most=True)
                for query, took in vectors.queries_s.items()
            ),
        ],
    )


def _measure_many(documents: int, on_read: bool) -> Row:
    with data_folder() as folder:
        bench = MergeBench(folder, documents, on_read=on_read)
        changed_bytes = MERGES[on_read] * UPDATES * bench.row_bytes
        merges = [_updated(bench) for _ in range(MERGES[on_read])]
        queries = _queries(folder, bench.table, documents // 3)
        queries_s = dict(zip(queries, in_turns(*queries.values(), rounds=QUERY_ROUNDS), strict=True))
        files = len(DeltaTable(bench.table).file_uris())
    return Row(merges=merges, changed_bytes=changed_bytes, files=files, queries_s=queries_s)


def _queries(lake: Path, table: Path, number: int) -> Mapping[str, Callable[[], object]]:
    key, vbucket = f"doc::{number}", int(_vbuckets_of(np.array([number]))[0])

    def headwater(keys: Sequence[str] | None) -> object:
        read, rows, total = documents(str(lake), NAME, columns=("n", "document"), keys=keys), 0, 0
        for batch in read:
            rows, total = rows + batch.num_rows, total + (pc.sum(batch.column("n")).as_py() or 0)
        return rows, total

    def deltalake(condition: str) -> object:
        query = f"SELECT count(*), sum(n), max(length(document)) FROM t WHERE {condition}"
        return QueryBuilder().register("t", DeltaTable(table)).execute(query).read_all()

    def polars(condition: pl.Expr) -> object:
        rows = pl.scan_delta(str(table)).filter(condition)
        return rows.select(pl.len(), pl.col("n").sum(), pl.col("document").str.len_bytes().max()).collect()

    return {
        "scan, Headwater": lambda: headwater(None),
        "lookup, Headwater": lambda: headwater([key]),
        "scan, deltalake": lambda: deltalake("document IS NOT NULL"),
        "scan, Polars": lambda: polars(pl.col("document").is_not_null()),
        "lookup, deltalake": lambda: deltalake(f"key = '{key}'"),
        "lookup, Polars": lambda: polars(pl.col("key") == key),
        "lookup with vbucket, deltalake": lambda: deltalake(f"vbucket = {vbucket} AND key = '{key}'"),
        "lookup with vbucket, Polars": lambda: polars((pl.col("vbucket") == vbucket) & (pl.col("key") == key)),
    }
