"""The node as a DCP producer: backfill compared with raw loopback, live latency, idle streams, and filters."""

from __future__ import annotations

import socket
import statistics
import time
from functools import partial

import numpy as np

from bench.dcp_driver import (
    Backfill,
    Drained,
    connect_dcp,
    drain,
    draining,
    raw_sender,
    stream_requests,
    survey_backfill,
)
from bench.kv_driver import connect, drive, set_requests
from bench.processes import LOGIN, NodeProcess, collections, data_folder, load, node
from bench.report import Goal, Section
from headwater.protocol.messages.dcp_streams import StreamFlags
from headwater.protocol.numbers import CollectionId
from headwater.protocol.stream_requests import StreamRequestValue

DOCUMENTS = 1_000_000
KEPT_DOCUMENTS = DOCUMENTS // 100
VALUE_BYTES = 200
VBUCKETS = 1024
ROUNDS = 5
SETS = 2000
IDLE_CONNECTIONS = (0, 1, 32)
IDLE_S = 5.0
WRITE_EVERY_S = 0.01
SETTLE_S = 1.0
FAN_OUT_CONSUMERS = (0, 8, 32, 64)
FAN_OUT_S = 5.0


# --- backfill -----------------------------------------------------------------------------------------------------


def run_backfill() -> Section:
    requests = stream_requests(VBUCKETS, StreamFlags.LATEST)
    with data_folder() as folder:
        with node(folder) as server:
            load(server.url, "--generate", str(DOCUMENTS), "--value-bytes", str(VALUE_BYTES))
        streamed, raw, updated = [], [], []
        with node(folder) as server:
            backfill = _survey(server, requests, changes=DOCUMENTS)
            with raw_sender(backfill.total_bytes) as raw_port:
                connect_raw = partial(socket.create_connection, ("127.0.0.1", raw_port))
                for _ in range(ROUNDS):
                    streamed.append(drain(partial(_connect, server), requests, backfill.total_bytes))
                    raw.append(drain(connect_raw, b"", backfill.total_bytes))
            load(server.url, "--generate", str(DOCUMENTS), "--value-bytes", str(VALUE_BYTES))
        with node(folder) as server:
            _survey(server, requests, changes=DOCUMENTS)
            for _ in range(ROUNDS):
                updated.append(drain(partial(_connect, server), requests, backfill.total_bytes))
    raw_s = statistics.median(one.data_s for one in raw)
    with_opening_s = statistics.median(one.opening_s + one.data_s for one in streamed)
    data_s = statistics.median(one.data_s for one in streamed)
    updated_s = statistics.median(one.data_s for one in updated)
    return Section(
        title="Streaming from disk",
        text=(
            f"{DOCUMENTS / 1e6:.0f} M documents of {VALUE_BYTES} B from the data files, which the system holds in its "
            f"cache, over {VBUCKETS} streams of one connection to a consumer that only counts bytes, against a process "
            f"that sends as many bytes from memory to the same consumer (goal ≥ 0.6, with opening ≥ 0.5). Then every "
            f"document is written again, and the same takes {updated_s / data_s:.2f} of the time before (goal ≤ 1.3). "
            f"Medians of {ROUNDS} turns."
        ),
        columns=["", "seconds", "documents", "bytes", "of raw loopback"],
        rows=[
            _backfill_row("first byte to last", data_s, backfill, raw_s),
            _backfill_row("with connecting and opening the streams", with_opening_s, backfill, raw_s),
            _backfill_row("after every document was updated", updated_s, backfill, raw_s),
            ["raw loopback", f"{raw_s:.2f} s", "", f"{backfill.total_bytes / raw_s / 1e6:.0f} MB/s", "1"],
        ],
        goals=[
            Goal("streaming from disk, of raw loopback", 0.6, raw_s / data_s),
            Goal("the same with opening 1,024 streams", 0.5, raw_s / with_opening_s),
            Goal("after every document was updated, of the time before", 1.3, updated_s / data_s, at_most=True),
        ],
    )


def _backfill_row(name: str, seconds: float, backfill: Backfill, raw_s: float) -> list[str]:
    return [
        name,
        f"{seconds:.2f} s",
        f"{backfill.changes / seconds / 1e6:.2f} M/s",
        f"{backfill.total_bytes / seconds / 1e6:.0f} MB/s",
        f"{raw_s / seconds:.2f}",
    ]


def _connect(server: NodeProcess, name: str = "drain") -> socket.socket:
    return connect_dcp(server.port, LOGIN, name)


def _survey(server: NodeProcess, requests: bytes, *, changes: int) -> Backfill:
    """Check a backfill before timing it: all changes must arrive, and from disk."""
    backfill = survey_backfill(_connect(server, "survey"), requests, VBUCKETS)
    if backfill.changes != changes or backfill.snapshots_from_disk != VBUCKETS:
        raise RuntimeError(f"not the backfill that was to be measured: {backfill}")
    return backfill


# --- filters ------------------------------------------------------------------------------------------------------


def run_filtered() -> Section:
    with data_folder() as folder:
        with node(folder) as server:
            collections(server.url, "create", "bench")
            for name, documents in (("dropped", DOCUMENTS - KEPT_DOCUMENTS), ("kept", KEPT_DOCUMENTS)):
                collections(server.url, "create", f"bench.{name}")
                load(
                    server.url, "--generate", str(documents), "--value-bytes", str(VALUE_BYTES),
                    "--collection", f"bench.{name}",
                )  # fmt: skip
            kept = _collection_id(server, "kept")
        value = StreamRequestValue(collections=(kept,)).encode()
        all_requests = stream_requests(VBUCKETS, StreamFlags.LATEST)
        kept_requests = stream_requests(VBUCKETS, StreamFlags.LATEST, value)
        with node(folder) as server:
            everything = _survey(server, all_requests, changes=DOCUMENTS)
            filtered = _survey(server, kept_requests, changes=KEPT_DOCUMENTS)
            full: list[Drained] = []
            part: list[Drained] = []
            for _ in range(ROUNDS):
                full.append(drain(partial(_connect, server), all_requests, everything.total_bytes))
                part.append(drain(partial(_connect, server), kept_requests, filtered.total_bytes))
    full_s = statistics.median(one.opening_s + one.data_s for one in full)
    part_s = statistics.median(one.opening_s + one.data_s for one in part)
    return Section(
        title="Streaming one collection",
        text=(
            f"The same with the documents in two collections, {KEPT_DOCUMENTS} of them in the one that the streams "
            "ask for. Connecting and opening the streams are part of the time."
        ),
        columns=["streams", "documents", "seconds", "of the time for all"],
        rows=[
            ["of everything", f"{everything.changes}", f"{full_s:.2f} s", "1"],
            ["of one collection", f"{filtered.changes}", f"{part_s:.2f} s", f"{part_s / full_s:.2f}"],
        ],
        goals=[Goal("one collection of 1 %, of the time for all", 0.15, part_s / full_s, at_most=True)],
    )


def _collection_id(server: NodeProcess, name: str) -> CollectionId:
    for scope in collections(server.url, "list")["scopes"]:
        for collection in scope["collections"]:
            if collection["name"] == name:
                return CollectionId(int(collection["uid"], 16))
    raise RuntimeError(f"there is no collection {name}")


# --- live ---------------------------------------------------------------------------------------------------------


def run_live() -> Section:
    written, received = [], []
    with data_folder() as folder, node(folder) as server, _connect(server) as streams:
        _open_idle(streams)
        writer = connect(server.port, LOGIN)
        writer.setblocking(True)
        with writer:
            for number in range(SETS):
                request = set_requests(1, first=number, value_bytes=VALUE_BYTES, vbuckets=VBUCKETS)
                start_s = time.perf_counter()
                writer.sendall(request)
                writer.recv(4096)
                written_s = time.perf_counter()
                missing = _LIVE_BYTES
                while missing > 0:
                    missing -= len(streams.recv(missing))
                written.append(written_s - start_s)
                received.append(time.perf_counter() - written_s)
    return Section(
        title="Live changes",
        text=(
            f"{SETS} single sets of {VALUE_BYTES} B, one after the other, while {VBUCKETS} streams are open on another "
            "connection: how long after the answer, which tells that the change is durable, its frame is received."
        ),
        columns=["", "p50", "p99"],
        rows=[_latency_row("set to answer", written), _latency_row("answer to frame", received)],
    )


_LIVE_BYTES = (24 + 20) + (24 + 31 + 1 + len("user::") + 10 + VALUE_BYTES)
"""A snapshot marker, and a mutation whose key has the prefix of the default collection."""


def _latency_row(name: str, seconds: list[float]) -> list[str]:
    return [name, *(f"{float(np.percentile(seconds, share)) * 1e6:.0f} µs" for share in (50, 99))]


_OPENED_BYTES = 24 + 16
"""The answer to a stream request: a failover log with one entry. An empty vbucket sends nothing else."""


def _open_idle(connection: socket.socket) -> None:
    """Open streams of empty vbuckets, and wait until they are idle."""
    connection.sendall(stream_requests(VBUCKETS))
    missing = VBUCKETS * _OPENED_BYTES
    while missing > 0:
        missing -= len(connection.recv(missing))


# --- idle streams -------------------------------------------------------------------------------------------------


def run_idle() -> Section:
    rows = []
    with data_folder() as folder, node(folder) as server:
        streams: list[socket.socket] = []
        writer = connect(server.port, LOGIN)
        writer.setblocking(True)
        _cpu_share(server, writer)
        empty_bytes = server.memory_bytes()
        for connections in IDLE_CONNECTIONS:
            while len(streams) < connections:
                streams.append(_connect(server, f"idle-{len(streams)}"))
                streams[-1].sendall(stream_requests(VBUCKETS))
            time.sleep(SETTLE_S)
            grown = server.memory_bytes() - empty_bytes
            count = connections * VBUCKETS
            cpu_share, writes_per_s = _cpu_share(server, writer)
            rows.append(
                [
                    str(connections),
                    str(count),
                    f"{writes_per_s:.0f}/s",
                    f"{cpu_share * 100:.1f} %",
                    f"{grown / 1e6:.1f} MB",
                    f"{grown / count / 1e3:.2f} kB" if count else "",
                ]
            )
        for connection in (*streams, writer):
            connection.close()
    return Section(
        title="Idle streams",
        text=(
            f"What the node uses of one core while a set every {WRITE_EVERY_S * 1e3:.0f} ms, if the disk allows, wakes "
            f"one of the {VBUCKETS} streams of each connection, and the memory that the connections have added."
        ),
        columns=["connections", "streams", "sets", "CPU", "memory", "memory per stream"],
        rows=rows,
    )


def _cpu_share(server: NodeProcess, writer: socket.socket) -> tuple[float, float]:
    """Return the node's CPU seconds per second during writes to one vbucket, and the number of writes per second."""
    request = set_requests(1, first=0, value_bytes=VALUE_BYTES, vbuckets=VBUCKETS)
    start_s, used_s = time.perf_counter(), server.cpu_s()
    writes = 0
    while (seconds := time.perf_counter() - start_s) < IDLE_S:
        writer.sendall(request)
        writer.recv(4096)
        writes += 1
        time.sleep(max(0.0, start_s + writes * WRITE_EVERY_S - time.perf_counter()))
    return (server.cpu_s() - used_s) / seconds, writes / seconds


# --- fan-out ------------------------------------------------------------------------------------------------------


def run_fan_out() -> Section:
    rows = []
    alone = 0.0
    shares = {}
    for consumers in FAN_OUT_CONSUMERS:
        with data_folder() as folder, node(folder) as server, draining(server.port, LOGIN, consumers, VBUCKETS):
            # The first change of a stream comes with its own snapshot marker.
            first = set_requests(8 * VBUCKETS, first=0, value_bytes=VALUE_BYTES, vbuckets=VBUCKETS)
            drive(server.port, [first], [8 * VBUCKETS], LOGIN)
            time.sleep(SETTLE_S)
            writer = connect(server.port, LOGIN)
            writer.setblocking(True)
            with writer:
                sets = 0
                start_s, used_s = time.perf_counter(), server.cpu_s()
                while (seconds := time.perf_counter() - start_s) < FAN_OUT_S:
                    writer.sendall(set_requests(1, first=sets, value_bytes=VALUE_BYTES, vbuckets=VBUCKETS))
                    writer.recv(4096)
                    sets += 1
                cpu_us = (server.cpu_s() - used_s) / sets * 1e6
        alone = alone or sets / seconds
        share = shares[consumers] = sets / seconds / alone
        rows.append([str(consumers), f"{sets / seconds:.0f}/s", f"{share:.2f}", f"{cpu_us:.0f} µs"])
    return Section(
        title="Fan-out",
        text=(
            f"One writer that sets documents of {VALUE_BYTES} B one by one, while consumers have {VBUCKETS} live "
            "streams each, in a process that takes all they get (goal: 32 consumers cost at most half the rate)."
        ),
        columns=["consumers", "sets", "of the rate without", "CPU of the node a set"],
        rows=rows,
        goals=[Goal("a writer beside 32 consumers, of alone", 0.5, shares[32])],
    )
