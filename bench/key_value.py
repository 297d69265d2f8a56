"""The node as a key-value server: durable sets and gets compared with memcached, bulk loads, memory, and restarts."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from bench.kv_driver import (
    HEADER_BYTES,
    Login,
    drive,
    exchange_batches,
    get_requests,
    lookup_requests,
    set_requests,
    small_set_waits_s,
)
from bench.measure import in_turns
from bench.processes import LOGIN, data_folder, load, memcached, node
from bench.report import Goal, Section

SETS = 400_000
ROUNDS = 3
VALUE_BYTES = 200
VBUCKETS = 1024
DOCUMENTS = 200_000
READS = 200_000
MIXED_OPERATIONS = 100_000
MIXED_BATCH = 1_000
FIRST = 1_000_000
"""Numbers of equal length result in answers of equal length."""


def sets_per_s(port: int, connections: int, first: int, login: Login | None) -> float:
    count = SETS // connections
    requests = [
        set_requests(count, first=first + at * count, value_bytes=VALUE_BYTES, vbuckets=VBUCKETS)
        for at in range(connections)
    ]
    start = time.perf_counter()
    drive(port, requests, [count] * connections, login)
    return SETS / (time.perf_counter() - start)


def run_sets() -> Section:
    rows = []
    goals = []
    with data_folder() as folder, node(folder) as server, memcached() as memcached_port:
        for connections in (1, 16):
            ours, theirs = [], []
            for turn in range(ROUNDS):
                first = (connections * ROUNDS + turn) * SETS
                ours.append(sets_per_s(server.port, connections, first, LOGIN))
                if memcached_port is not None:
                    theirs.append(sets_per_s(memcached_port, connections, first, None))
            headwater = statistics.median(ours)
            other = statistics.median(theirs) if theirs else None
            ratio = None if other is None else headwater / other
            goals.append(Goal(f"durable sets on {connections} connections, of memcached's", 0.2, ratio))
            rows.append(
                [
                    str(connections),
                    f"{headwater / 1e3:.0f} k/s",
                    "not installed" if other is None else f"{other / 1e3:.0f} k/s",
                    "" if ratio is None else f"{ratio:.2f}",
                ]
            )
    return Section(
        title="Durable sets",
        text=(
            f"Pipelined sets of {VALUE_BYTES} B JSON documents to new keys over {VBUCKETS} vbuckets, answered once "
            "they are on disk, against Debian's memcached, which keeps nothing (goal ≥ 0.2). The client is the same "
            "and only counts answers."
        ),
        columns=["connections", "headwater, durable", "memcached", "ratio"],
        rows=rows,
        goals=goals,
    )


def run_reads() -> Section:
    """Gets, compressed sets and sub-document reads, each compared with memcached's gets in the same turns."""
    numbers = [random.Random(16).randrange(FIRST, FIRST + DOCUMENTS) for _ in range(READS)]
    takes_snappy = replace(LOGIN, takes_snappy=True)
    rows = []
    goals = []
    with data_folder() as folder, memcached() as memcached_port:
        documents = set_requests(DOCUMENTS, first=FIRST, value_bytes=VALUE_BYTES, vbuckets=VBUCKETS)
        with node(folder) as server:
            drive(server.port, [documents], [DOCUMENTS], LOGIN)
        if memcached_port is not None:
            drive(memcached_port, [documents], [DOCUMENTS])
        with node(folder) as server:  # Recent data is on disk now.
            for connections in (1, 16):
                parts = [numbers[at::connections] for at in range(connections)]
                counts = [len(part) for part in parts]
                gets = [get_requests(part, vbuckets=VBUCKETS) for part in parts]
                lookups = [lookup_requests(part, vbuckets=VBUCKETS) for part in parts]
                sets = [
                    set_requests(count, first=2 * FIRST, value_bytes=VALUE_BYTES, vbuckets=VBUCKETS, compressed=True)
                    for count in counts
                ]
                hit_bytes = HEADER_BYTES + 4 + VALUE_BYTES
                tasks: dict[str, Callable[[], None]] = {
                    "gets": partial(drive, server.port, gets, counts, LOGIN, answer_bytes=hit_bytes),
                    "sub-document gets": partial(
                        drive, server.port, lookups, counts, LOGIN, answer_bytes=HEADER_BYTES + len(str(FIRST))
                    ),
                    "durable sets of compressed values": partial(drive, server.port, sets, counts, takes_snappy),
                }
                if memcached_port is not None:
                    tasks["memcached's gets"] = partial(drive, memcached_port, gets, counts, answer_bytes=hit_bytes)
                seconds = dict(zip(tasks, in_turns(*tasks.values(), rounds=ROUNDS), strict=True))
                theirs_s = seconds.get("memcached's gets")
                ratio = None if theirs_s is None else theirs_s / seconds["gets"]
                goals.append(Goal(f"gets on {connections} connections, of memcached's", 0.5, ratio))
                for name, taken_s in seconds.items():
                    share = "not installed" if theirs_s is None else f"{theirs_s / taken_s:.2f}"
                    rows.append([str(connections), name, f"{READS / taken_s / 1e3:.0f} k/s", share])
    return Section(
        title="Reads",
        text=(
            f"Pipelined gets of random documents of {VALUE_BYTES} B out of {DOCUMENTS}, sub-document gets of a path in "
            "them, and durable sets of compressed values, against the gets of Debian's memcached in the same turns "
            "(goal of gets ≥ 0.5). The client is the same and only counts the bytes of answers."
        ),
        columns=["connections", "", "rate", "of memcached's gets"],
        rows=rows,
        goals=goals,
    )


def run_mixed() -> Section:
    """The workload of `cbc-pillowfight`: one thread sends a batch and waits for its answers."""
    numbers = random.Random(8)
    batches = []
    for _ in range(MIXED_OPERATIONS // MIXED_BATCH):
        sets = [numbers.randrange(MIXED_BATCH) < MIXED_BATCH // 3 for _ in range(MIXED_BATCH)]
        chosen = [numbers.randrange(FIRST, FIRST + DOCUMENTS) for _ in range(MIXED_BATCH)]
        requests = b"".join(
            set_requests(1, first=number, value_bytes=VALUE_BYTES, vbuckets=VBUCKETS)
            if is_set
            else get_requests([number], vbuckets=VBUCKETS)
            for is_set, number in zip(sets, chosen, strict=True)
        )
        answer_bytes = sum(HEADER_BYTES if is_set else HEADER_BYTES + 4 + VALUE_BYTES for is_set in sets)
        batches.append((requests, answer_bytes))
    documents = set_requests(DOCUMENTS, first=FIRST, value_bytes=VALUE_BYTES, vbuckets=VBUCKETS)
    with data_folder() as folder, node(folder) as server, memcached() as memcached_port:
        ports: dict[str, tuple[int, Login | None]] = {"headwater, durable": (server.port, LOGIN)}
        if memcached_port is not None:
            ports["memcached"] = (memcached_port, None)
        for port, login in ports.values():
            drive(port, [documents], [DOCUMENTS], login)
        tasks = [partial(exchange_batches, port, batches, login) for port, login in ports.values()]
        seconds = dict(zip(ports, in_turns(*tasks, rounds=ROUNDS), strict=True))
    theirs_s = seconds.get("memcached")
    return Section(
        title="Mixed work",
        text=(
            f"One connection sends batches of {MIXED_BATCH:,} operations on random documents of {VALUE_BYTES} B, a "
            "third of them sets and the rest gets, and waits for the answers to each batch, as `cbc-pillowfight` does. "
            "The answers of Headwater to sets come when they are on disk."
        ),
        columns=["server", "operations", "of memcached's"],
        rows=[
            [
                name,
                f"{MIXED_OPERATIONS / taken_s / 1e3:.0f} k/s",
                "not installed" if theirs_s is None else f"{theirs_s / taken_s:.2f}",
            ]
            for name, taken_s in seconds.items()
        ],
    )


def run_load() -> Section:
    rows = []
    goals = []
    with data_folder() as folder:
        with node(folder) as server:
            empty = server.memory_bytes()
            total = 0
            for millions in (1, 3):
                report = load(
                    server.url, "--generate", str(millions * 1_000_000), "--value-bytes", str(VALUE_BYTES),
                    "--key", f"load{millions}::{{#}}",
                )  # fmt: skip
                total += millions
                goals.append(Goal(f"bulk load, {total} M", 400, report["documents_per_s"] / 1e3, " k/s"))
                time.sleep(2)  # Recent data is settled, and its memory released
                grown = server.memory_bytes() - empty
                rows.append(
                    [
                        f"{total} M",
                        f"{report['documents_per_s'] / 1e3:.0f} k/s",
                        f"{grown / 1e6:.0f} MB",
                        f"{grown / total / 1e6:.0f} MB",
                    ]
                )
            server.process.kill()
            server.process.wait()
        start = time.perf_counter()
        with node(folder) as server:
            seconds = time.perf_counter() - start
            grown = server.memory_bytes() - empty
            rows.append(
                [
                    f"{total} M, after kill -9",
                    f"ready in {seconds:.1f} s",
                    f"{grown / 1e6:.0f} MB",
                    f"{grown / total / 1e6:.0f} MB",
                ]
            )
    return Section(
        title="Bulk load and memory",
        text=(
            f"`headwater load --generate` of documents of about {VALUE_BYTES} B into an empty node, then three times "
            "as many, every write durable (goal ≥ 400 k/s on two cores, and flat per document). Memory is what the "
            "process has beyond an empty one, without mapped pages of the data files. Part of it is buffers that do "
            "not grow with the documents; a restart shows the index alone."
        ),
        columns=["documents", "rate", "memory", "memory per million"],
        rows=rows,
        goals=goals,
    )


def run_small_sets() -> Section:
    """Measure how a bulk load affects other writers."""
    documents = 3_000_000
    with data_folder() as folder, node(folder) as server, ThreadPoolExecutor(1) as thread:
        alone = small_set_waits_s(server.port, LOGIN, vbuckets=VBUCKETS, goes_on=lambda passed_s: passed_s < 5)

        def load_more(prefix: str) -> float:
            options = ("--generate", str(documents), "--value-bytes", str(VALUE_BYTES), "--key", f"{prefix}::{{#}}")
            rate: float = load(server.url, *options)["documents_per_s"]
            return rate

        rate_alone = load_more("alone")
        loading = thread.submit(load_more, "beside")
        beside = small_set_waits_s(server.port, LOGIN, vbuckets=VBUCKETS, goes_on=lambda passed_s: not loading.done())
        rate_beside = loading.result()

    def row(name: str, waits_s: list[float], rate: str) -> list[str]:
        centiles = statistics.quantiles(waits_s, n=100)
        return [name, *(f"{centiles[at] * 1e3:.1f} ms" for at in (49, 98)), f"{max(waits_s) * 1e3:.0f} ms", rate]

    return Section(
        title="Small sets beside a bulk load",
        text=(
            "One connection sets a small document every 10 ms and waits for the answer, which comes when it is on "
            f"disk; meanwhile `headwater load` writes {documents // 1_000_000} M documents (goal: 99 of 100 within "
            "50 ms, and at most a tenth of the rate lost). Node, loader and client share the cores."
        ),
        columns=["", "median", "p99", "longest", "rate of the load"],
        rows=[
            row("alone", alone, ""),
            ["a load alone", "", "", "", f"{rate_alone / 1e3:.0f} k/s"],
            row("beside a load", beside, f"{rate_beside / 1e3:.0f} k/s"),
        ],
        goals=[
            Goal(
                "small sets beside a load, p99", 50, statistics.quantiles(beside, n=100)[98] * 1e3, " ms", at_most=True
            ),
            Goal("a load beside small sets, of alone", 0.9, rate_beside / rate_alone),
        ],
    )
