"""The client: reading a bucket into Arrow batches and typed changes, compared with a client that only counts bytes."""

from __future__ import annotations

import asyncio
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import headwater
from bench.dcp_driver import connect_dcp, drain_acknowledging, stream_requests, survey_backfill
from bench.measure import in_new_process, load_now, scaled
from bench.processes import LOGIN, data_folder, load, node
from bench.report import Goal, Section
from headwater.client.changes import Mutation
from headwater.client.read_options import ReadOptions
from headwater.protocol.messages.dcp_streams import StreamFlags

DOCUMENTS = scaled(1_000_000)
VALUE_BYTES = 200
VBUCKETS = 1024
ROUNDS = 5
BUFFER_BYTES = ReadOptions().buffer_bytes
_CREDENTIALS: dict[str, Any] = {"user": LOGIN.user, "password": LOGIN.password}
_WARM_UP: dict[str, Any] = {"vbuckets": [0], "end": "now"}
"""A small read that comes first: a process loads kernels and imports modules once in its life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The duration, processor time and amount of a drain."""

    seconds: float
    cpu_s: float
    changes: int
    received_bytes: int


class _Stopwatch:
    def __init__(self) -> None:
        self._cpu_s, self._start_s = _cpu_s(), time.perf_counter()

    def stop(self, *, changes: int, received_bytes: int) -> Drain:
        seconds = time.perf_counter() - self._start_s
        return Drain(seconds=seconds, cpu_s=_cpu_s() - self._cpu_s, changes=changes, received_bytes=received_bytes)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- drains, each in its own process ------------------------------------------------------------------------------


def drain_bytes(port: int, total_bytes: int) -> Drain:
    """Open the streams, acknowledge, and count bytes without decoding them."""
    with connect_dcp(port, LOGIN, "count", buffer_bytes=BUFFER_BYTES) as connection:
        watch = _Stopwatch()
        drain_acknowledging(
            connection, stream_requests(VBUCKETS, StreamFlags.LATEST), total_bytes, ack_bytes=BUFFER_BYTES // 4
        )
        return watch.stop(changes=DOCUMENTS, received_bytes=total_bytes)


def _url(port: int) -> str:
    return f"couchbase://127.0.0.1:{port}/{LOGIN.bucket}"


def drain_batches(port: int, total_bytes: int) -> Drain:
    with headwater.blocking.connect(_url(port), **_CREDENTIALS) as client:
        for _ in client.batches(**_WARM_UP):
            pass
        watch = _Stopwatch()
        batches = client.batches(end="now")
        changes = sum(batch.num_rows for batch in batches)
        return watch.stop(changes=changes, received_bytes=batches.metrics.received_bytes)


def drain_async_batches(port: int, total_bytes: int) -> Drain:
    async def drain() -> Drain:
        async with headwater.connect(_url(port), **_CREDENTIALS) as client:
            async for _ in client.batches(**_WARM_UP):
                pass
            watch = _Stopwatch()
            batches = client.batches(end="now")
            changes = 0
            async for batch in batches:
                changes += batch.num_rows
            return watch.stop(changes=changes, received_bytes=batches.metrics.received_bytes)

    return asyncio.run(drain())


def drain_changes(port: int, total_bytes: int) -> Drain:
    with headwater.blocking.connect(_url(port), **_CREDENTIALS) as client:
        for _ in client.changes(**_WARM_UP):
            pass
        watch = _Stopwatch()
        changes = client.changes(end="now")
        count = sum(isinstance(change, Mutation) for change in changes)
        return watch.stop(changes=count, received_bytes=changes.metrics.received_bytes)


DRAINS: dict[str, Callable[[int, int], Drain]] = {
    "only counts bytes": drain_bytes,
    "Arrow batches, blocking": drain_batches,
    "Arrow batches, asyncio": drain_async_batches,
    "typed changes, blocking": drain_changes,
}


# --- the section --------------------------------------------------------------------------------------------------


def run_drain() -> Section:
    measured: dict[str, list[Drain]] = {name: [] for name in DRAINS}
    with data_folder() as folder:
        with node(folder) as server:
            load(server.url, "--generate", str(DOCUMENTS), "--value-bytes", str(VALUE_BYTES))
        with node(folder) as server:
            requests = stream_requests(VBUCKETS, StreamFlags.LATEST)
            backfill = survey_backfill(connect_dcp(server.port, LOGIN, "survey"), requests, VBUCKETS)
            load_before = load_now()
            for _ in range(ROUNDS):
                for name, drain in DRAINS.items():
                    one = in_new_process(drain, server.port, backfill.total_bytes)
                    if one.changes != DOCUMENTS:
                        raise RuntimeError(f"{name}: {one.changes} changes came, and {DOCUMENTS} were written")
                    measured[name].append(one)
    counting_rate = _bytes_per_s(measured["only counts bytes"])
    return Section(
        title="Draining a bucket with the client",
        text=(
            f"{DOCUMENTS / 1e6:g} M documents of {VALUE_BYTES} B over {VBUCKETS} streams of one connection, each time "
            "to a new process, from the first stream request to the last change, against a client that opens the same "
            "streams, acknowledges and only counts bytes (goals: ≥ 0.8 of its bytes/s for Arrow "
            "batches, 1 M typed changes/s). Processor "
            "time is that of the client's process. The node needs the other core. Medians of "
            f"{ROUNDS} turns; load of the machine before: {load_before}."
        ),
        columns=["", "seconds", "changes", "bytes", "of counting bytes", "CPU per million changes"],
        rows=[_row(name, drains, counting_rate) for name, drains in measured.items()],
        goals=[
            *(
                Goal(f"{name}, of counting bytes", 0.8, _bytes_per_s(drains) / counting_rate)
                for name, drains in measured.items()
                if name.startswith("Arrow")
            ),
            Goal("typed changes", 1, DOCUMENTS / _seconds(measured["typed changes, blocking"]) / 1e6, " M/s"),
        ],
    )


def _bytes_per_s(drains: list[Drain]) -> float:
    return statistics.median(one.received_bytes / one.seconds for one in drains)


def _seconds(drains: list[Drain]) -> float:
    return statistics.median(one.seconds for one in drains)


def _row(name: str, drains: list[Drain], counting_rate: float) -> list[str]:
    seconds = _seconds(drains)
    cpu_s = statistics.median(one.cpu_s / one.changes * 1e6 for one in drains)
    rate = _bytes_per_s(drains)
    return [
        name,
        f"{seconds:.2f} s",
        f"{DOCUMENTS / seconds / 1e6:.2f} M/s",
        f"{rate / 1e6:.0f} MB/s",
        f"{rate / counting_rate:.2f}",
        f"{cpu_s:.2f} s",
    ]
