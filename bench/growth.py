"""How cost grows: the same work with more documents, fewer vbuckets, larger values, and a second node."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.client import drain_batches
from bench.dcp_driver import connect_dcp, drain, stream_requests, survey_backfill
from bench.landing import CORES, LandingBench, millions, session, to_nowhere
from bench.measure import in_new_process, load_now, scaled
from bench.plot import Panel, draw_panels
from bench.processes import HEADWATER, LOGIN, NodeProcess, data_folder, load, node
from bench.replication import address, login
from bench.report import PAGE, Goal, Section
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.cluster.coordinator import Coordinator
from headwater.protocol.messages.dcp_streams import StreamFlags, VBucketState
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse

PLOT = PAGE.parent.parent / "images" / "growth.svg"
VBUCKETS = 1024
ROUNDS = 3
_LOGIN = {"HEADWATER_USER": LOGIN.user, "HEADWATER_PASSWORD": LOGIN.password}


# --- one node, buckets of many shapes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a bucket."""

    documents: int = scaled(1_000_000)
    vbuckets: int = VBUCKETS
    value_bytes: int = 100

    @property
    def name(self) -> str:
        value = f"{self.value_bytes} B" if self.value_bytes < 1000 else f"{self.value_bytes // 1024} KiB"
        return f"{millions(self.documents)}, {self.vbuckets} vbuckets, {value}"


BASE = Shape()
BY_DOCUMENTS = (BASE, Shape(documents=scaled(4_000_000)), Shape(documents=scaled(16_000_000)))
BY_VBUCKETS = (Shape(vbuckets=128), BASE)
BY_VALUE = (BASE, Shape(value_bytes=1024), Shape(documents=scaled(100_000), value_bytes=16 * 1024))
"""The last shape has about as many bytes as the others, but fewer documents."""
SHAPES = tuple(dict.fromkeys((*BY_DOCUMENTS, *BY_VBUCKETS, *BY_VALUE)))

WORKS = ("load", "start", "stream", "Arrow batches", "dcp to nowhere", "land", "verify")


def run() -> Sequence[Section]:
    return [_run_growth(), _run_nodes()]


def _run_growth() -> Section:
    load_before = load_now()
    costs = {shape: in_new_process(_measure_shape, shape) for shape in SHAPES}
    draw_panels(
        PLOT,
        "microseconds per document",
        [
            Panel("documents", [(millions(it.documents), costs[it].us_per_document) for it in BY_DOCUMENTS]),
            Panel("vbuckets", [(str(it.vbuckets), costs[it].us_per_document) for it in BY_VBUCKETS]),
            Panel("bytes of a value", [(str(it.value_bytes), costs[it].us_per_document) for it in BY_VALUE]),
        ],
    )
    return Section(
        title="How cost grows",
        text=(
            "Microseconds per document of each work, for buckets of several shapes: `headwater load`; the start of a "
            "node that holds them; streaming them to a consumer that only counts bytes, with opening the streams; the "
            'client\'s Arrow batches; `format("dcp")` into a sink that drops everything, as the first read of a '
            "session; a landing into new tables, "
            f"in a session that has landed before; `headwater verify` of these tables. One turn, streaming the median "
            f"of {ROUNDS}; node and the work share {CORES} cores. Memory is that of the node after the load, and the "
            f"most that `verify` had. Load of the machine before: {load_before}.\n\n"
            "![Microseconds per document, by documents, vbuckets and size of a value](../images/growth.svg)"
        ),
        columns=["bucket", *WORKS, "memory of the node", "memory of `verify`"],
        rows=[
            [
                shape.name,
                *(f"{costs[shape].us_per_document[work]:.2f}" for work in WORKS),
                f"{costs[shape].node_bytes / shape.documents:.0f} B each",
                f"{costs[shape].verify_bytes / 1e6:.0f} MB",
            ]
            for shape in SHAPES
        ],
        goals=[
            Goal(
                "`verify` of 1 M", 2, costs[BASE].us_per_document["verify"] * BASE.documents / 1e6, " s", at_most=True
            ),
            Goal("memory of `verify` of 1 M", 300, costs[BASE].verify_bytes / 1e6, " MB", at_most=True),
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    us_per_document: dict[str, float]
    node_bytes: int
    verify_bytes: int


def _measure_shape(shape: Shape) -> Costs:
    seconds: dict[str, float] = {}
    with data_folder() as folder:
        data = folder / "node"
        with node(data, "--vbuckets", str(shape.vbuckets)) as server:
            generate = ("--generate", str(shape.documents), "--value-bytes", str(shape.value_bytes))
            seconds["load"] = _seconds(lambda: load(server.url, *generate))
            node_bytes = server.memory_bytes()
        start_s = time.perf_counter()
        with node(data) as server:
            seconds["start"] = time.perf_counter() - start_s
            seconds["stream"] = _stream_s(server, range(shape.vbuckets), shape.documents)
            seconds["Arrow batches"] = in_new_process(drain_batches, server.port, 0).seconds
            with session(folder) as spark:
                bench = LandingBench(spark, server, folder.resolve())
                everything = bench.read(LOGIN.bucket)
                # The first job of a session starts Spark's workers.
                to_nowhere(everything.limit(1000).repartition(CORES))
                seconds["dcp to nowhere"] = _seconds(lambda: to_nowhere(everything))
                bench.land(LOGIN.bucket, "warm-up")
                seconds["land"] = bench.land(LOGIN.bucket, "lake").total_s
            seconds["verify"], verify_bytes = _verify(server, folder / "lake")
    us_per_document = {work: took_s / shape.documents * 1e6 for work, took_s in seconds.items()}
    return Costs(us_per_document=us_per_document, node_bytes=node_bytes, verify_bytes=verify_bytes)


def _seconds(work: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    work()
    return time.perf_counter() - start_s


def _stream_s(server: NodeProcess, vbuckets: Sequence[int], documents: int) -> float:
    requests = stream_requests(vbuckets, StreamFlags.LATEST)
    connect = partial(connect_dcp, server.port, LOGIN, "drain")
    backfill = survey_backfill(connect(), requests, len(vbuckets))
    if backfill.changes != documents:
        raise RuntimeError(f"{backfill.changes} changes came, and there are {documents} documents")
    turns = [drain(connect, requests, backfill.total_bytes) for _ in range(ROUNDS)]
    return statistics.median(one.opening_s + one.data_s for one in turns)


def _verify(server: NodeProcess, lake: Path) -> tuple[float, int]:
    """Return the seconds it took, and its peak memory."""
    start_s = time.perf_counter()
    command = [*HEADWATER, "verify", f"{server.url}/{LOGIN.bucket}", str(lake)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | _LOGIN)
    _, status, used = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError("the tables are not equal to the bucket")
    return time.perf_counter() - start_s, used.ru_maxrss * 1024


# --- two nodes ----------------------------------------------------------------------------------------------------


NODES_DOCUMENTS = scaled(2_000_000)
NODE_COUNTS = (1, 2)


def _run_nodes() -> Section:
    load_before = load_now()
    rates = {count: in_new_process(_measure_nodes, count) for count in NODE_COUNTS}
    return Section(
        title="A second node",
        text=(
            f"{millions(NODES_DOCUMENTS)} documents of {BASE.value_bytes} B in {VBUCKETS} vbuckets, of one node and of "
            "two node processes with half of the vbuckets each, no replicas, on the same machine of "
            f"{os.cpu_count()} cores, which the loader, a consumer for each node that only counts bytes, and Spark "
            "share with them. Processor time is that of the nodes. Where cores are free a second node doubles the "
            "rate; here it does as far as the others leave it the second core. Load of the machine before: "
            f"{load_before}."
        ),
        columns=["nodes", "load", "stream", "land", *(f"nodes' CPU, {work}" for work in ("load", "stream", "land"))],
        rows=[
            [
                str(count),
                *(f"{NODES_DOCUMENTS / taken.seconds / 1e3:.0f} k/s" for taken in measured),
                *(f"{taken.cpu_s / NODES_DOCUMENTS * 1e6:.2f} s/M" for taken in measured),
            ]
            for count, measured in rates.items()
        ],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    seconds: float
    cpu_s: float


def _measure_nodes(count: int) -> list[Taken]:
    with data_folder() as folder, _cluster(folder / "nodes", count) as nodes:
        url = f"couchbase://{','.join(f'127.0.0.1:{it.port}' for it in nodes)}"
        generate = ("--generate", str(NODES_DOCUMENTS), "--value-bytes", str(BASE.value_bytes))
        taken = [_taken(nodes, lambda: load(url, *generate))]
        drains = []
        for server in nodes:
            active = asyncio.run(_active_vbuckets(server))
            requests = stream_requests(active, StreamFlags.LATEST)
            connect = partial(connect_dcp, server.port, LOGIN, "drain")
            drains.append((connect, requests, survey_backfill(connect(), requests, len(active)).total_bytes))
        with ThreadPoolExecutor(count) as pool:
            taken.append(_taken(nodes, lambda: list(pool.map(lambda args: drain(*args), drains))))
        with session(folder) as spark:
            bench = LandingBench(spark, NodeProcess(nodes[0].process, url), folder.resolve())
            bench.land(LOGIN.bucket, "warm-up")
            taken.append(_taken(nodes, lambda: bench.land(LOGIN.bucket, "lake")))
    return taken


def _taken(nodes: Sequence[NodeProcess], work: Callable[[], object]) -> Taken:
    cpu_s = sum(it.cpu_s() for it in nodes)
    seconds = _seconds(work)
    return Taken(seconds=seconds, cpu_s=sum(it.cpu_s() for it in nodes) - cpu_s)


@contextmanager
def _cluster(folder: Path, count: int) -> Iterator[list[NodeProcess]]:
    """Run nodes, each in its own process, that share the vbuckets of the bucket."""
    with ExitStack() as stack:
        nodes = [stack.enter_context(node(folder / str(number))) for number in range(count)]
        if count > 1:
            asyncio.run(_share_vbuckets(nodes))
        yield nodes


async def _share_vbuckets(nodes: Sequence[NodeProcess]) -> None:
    coordinator = Coordinator([address(it.port) for it in nodes], login())
    await coordinator.init(replicas=0)
    await coordinator.rebalance()
    coordinator.close()


async def _active_vbuckets(server: NodeProcess) -> list[int]:
    connection = await AsyncKvConnection.open(address(server.port), login())
    answer = await connection.request(GetAllVbSeqnos(state=VBucketState.ACTIVE))
    connection.close()
    assert isinstance(answer, GetAllVbSeqnosResponse)
    return [entry.vbucket for entry in answer.seqnos]
