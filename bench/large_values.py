"""Bytes per second with values of 1, 16 and 256 KiB: loading, streaming, landing and verifying, each compared with
what the same machine does with as many bytes and no other work."""

from __future__ import annotations

import os
import socket
import statistics
import time
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bench.dcp_driver import connect_dcp, drain, raw_sender, stream_requests, survey_backfill
from bench.measure import in_new_process, load_now, scaled
from bench.processes import LOGIN, NodeProcess, data_folder, load, node
from bench.report import Goal, Section
from headwater.lake.verify import compare
from headwater.landing.query import Landing
from headwater.landing.source_options import SourceOptions
from headwater.landing.tasks import LocalRunner
from headwater.protocol.messages.dcp_streams import StreamFlags

KIB = 1024
VALUE_BYTES = (1 * KIB, 16 * KIB, 256 * KIB)
GOAL_VALUE_BYTES = 16 * KIB
LOAD_BYTES = scaled(96 * KIB * KIB)
"""Bytes of values in one load. Streaming, landing and verifying process those of all loads together."""
ROUNDS = 3
VBUCKETS = 1024
PIECE_BYTES = KIB * KIB
WARM_UP, MEASURED = "warm-up", LOGIN.bucket


def run() -> Section:
    load_before = load_now()
    rows, goals = [], []
    for value_bytes in VALUE_BYTES:
        for work, rate, reference in _measure(value_bytes):
            ratio = None if reference is None else rate / reference[1]
            rows.append(
                [
                    f"{value_bytes // KIB} KiB",
                    work,
                    f"{rate / 1e6:.0f} MB/s",
                    "" if reference is None else f"{reference[0]}, {reference[1] / 1e6:,.0f} MB/s",
                    "" if ratio is None else f"{ratio:.2f}",
                ]
            )
            if value_bytes == GOAL_VALUE_BYTES and reference is not None:
                goals.append(Goal(f"{work} of values of {value_bytes // KIB} KiB, of {reference[0]}", 0.6, ratio))
    return Section(
        title="Large values",
        text=(
            f"Bytes of values a second. `headwater load` of {LOAD_BYTES >> 20} MiB, durable, {ROUNDS} times, each "
            "beside a new file of as many bytes, written and synced at the end; then all of it over "
            f"{VBUCKETS} streams from disk, against a process that sends as many bytes from memory; landed in an "
            "empty lake without Spark, against Arrow, which writes the rows of `changes` and of `documents` as Parquet "
            "with the same compression, from memory; and verified. The values repeat themselves, so Parquet compresses "
            "them to a hundredth. Landing and verifying are in a process that has done both before. Medians of "
            f"{ROUNDS} turns (goals ≥ 0.6 for {GOAL_VALUE_BYTES // KIB} KiB); load of the machine: {load_before}."
        ),
        columns=["values", "", "rate", "against", "ratio"],
        rows=rows,
        goals=goals,
    )


Measured = tuple[str, float, tuple[str, float] | None]
"""A kind of work, its rate in bytes of values per second, and the reference for it with its rate."""


def _measure(value_bytes: int) -> list[Measured]:
    documents = max(1, LOAD_BYTES // value_bytes)
    with data_folder() as folder:
        with node(folder / "node", "--bucket", WARM_UP, "--bucket", MEASURED) as server:
            _load(server, "warm", 1000, 200, bucket=WARM_UP)
            loaded, written = [], []
            for turn in range(ROUNDS):
                loaded.append(_load(server, f"turn{turn}", documents, value_bytes))
                written.append(_write_file(folder / "file", documents * value_bytes))
        with node(folder / "node", "--bucket", WARM_UP, "--bucket", MEASURED) as server:
            streamed, raw = _stream(server, documents * ROUNDS)
            landed, by_arrow, verified = in_new_process(_land_and_verify, server.url, folder.resolve())
    total_bytes = ROUNDS * documents * value_bytes
    return [
        ("load", statistics.median(loaded), ("writing and syncing a file", statistics.median(written))),
        ("streaming from disk", total_bytes / streamed, ("raw loopback", total_bytes / raw)),
        ("landing", total_bytes / landed, ("Arrow alone", total_bytes / by_arrow)),
        ("verifying", total_bytes / verified, None),
    ]


def _load(server: NodeProcess, name: str, documents: int, value_bytes: int, *, bucket: str = MEASURED) -> float:
    options = ("--generate", str(documents), "--value-bytes", str(value_bytes), "--key", f"{name}::{{#}}")
    rate: float = load(server.url, *options, bucket=bucket)["documents_per_s"]
    return rate * value_bytes


def _write_file(path: Path, size_bytes: int) -> float:
    piece = os.urandom(PIECE_BYTES)
    start_s = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for at in range(0, size_bytes, PIECE_BYTES):
            file.write(piece[: size_bytes - at])
        os.fsync(file.fileno())
    rate = size_bytes / (time.perf_counter() - start_s)
    path.unlink()
    return rate


def _stream(server: NodeProcess, documents: int) -> tuple[float, float]:
    """Return the seconds to drain the node, and to receive as many bytes from memory."""
    requests = stream_requests(VBUCKETS, StreamFlags.LATEST)
    connect = partial(connect_dcp, server.port, LOGIN, "drain")
    backfill = survey_backfill(connect(), requests, VBUCKETS)
    if backfill.changes != documents:
        raise RuntimeError(f"not the backfill that was to be measured: {backfill}")
    streamed, raw = [], []
    with raw_sender(backfill.total_bytes) as raw_port:
        connect_raw = partial(socket.create_connection, ("127.0.0.1", raw_port))
        for _ in range(ROUNDS):
            streamed.append(drain(connect, requests, backfill.total_bytes).data_s)
            raw.append(drain(connect_raw, b"", backfill.total_bytes).data_s)
    return statistics.median(streamed), statistics.median(raw)


# --- a lake, in its own process -----------------------------------------------------------------------------------


def _land_and_verify(url: str, folder: Path) -> tuple[float, float, float]:
    """Return the seconds of a landing, of writing the same rows with Arrow alone, and of a verification."""
    _land(url, WARM_UP, folder / WARM_UP)
    _verify(url, WARM_UP, folder / WARM_UP)
    landed, by_arrow, verified = [], [], []
    for turn in range(ROUNDS):
        lake = folder / f"lake{turn}"
        landed.append(_land(url, MEASURED, lake))
        by_arrow.append(_write_by_arrow(lake, folder / "rows.parquet"))
        verified.append(_verify(url, MEASURED, lake))
    return statistics.median(landed), statistics.median(by_arrow), statistics.median(verified)


def _source(url: str, bucket: str) -> dict[str, str]:
    return {"url": f"{url}/{bucket}", "user": LOGIN.user, "password": LOGIN.password}


def _land(url: str, bucket: str, lake: Path) -> float:
    start_s = time.perf_counter()
    Landing(source=_source(url, bucket), into=str(lake)).start(LocalRunner()).awaitTermination()
    return time.perf_counter() - start_s


def _verify(url: str, bucket: str, lake: Path) -> float:
    start_s = time.perf_counter()
    found = compare(SourceOptions.make(_source(url, bucket)).settings, str(lake), run=LocalRunner())
    if not found.is_equal:
        raise RuntimeError(found.sentence)
    return time.perf_counter() - start_s


def _write_by_arrow(lake: Path, target: Path) -> float:
    """Write the rows of a lake's files as one file per table. Only the writing is timed."""
    seconds = 0.0
    for table in ("changes", "documents"):
        files = sorted((lake / table).rglob("*.parquet"))
        rows = pa.concat_tables([pq.ParquetFile(file).read() for file in files])
        start_s = time.perf_counter()
        pq.write_table(rows, target, compression="zstd", compression_level=1)
        seconds += time.perf_counter() - start_s
        target.unlink()
    return seconds
