"""Replication: copying a bucket, writes during the handover of vbuckets, and the recovery after the loss of a node."""

from __future__ import annotations

import asyncio
import random
import socket
import statistics
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.kv_driver import connect
from bench.measure import in_new_process, load_now, scaled
from bench.processes import LOGIN, NodeProcess, data_folder, load, node
from bench.report import Goal, Section
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.node.membership import PEER_FEATURES
from headwater.node.replication.proxy import Proxy
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import StreamFlags, VBucketState
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse, SetVBucket
from headwater.protocol.numbers import VBucketId
from headwater.protocol.sasl import Credentials
from headwater.protocol.status import Status

DOCUMENTS = scaled(1_000_000)
CLUSTER_DOCUMENTS = scaled(100_000)
VALUE_BYTES = 200
VBUCKETS = 1024
ROUNDS = 3
RETRY_S = 0.0005
_HEADER = struct.Struct(">BBHBBHIIQ")
_VALUE = b"x" * VALUE_BYTES


def run() -> list[Section]:
    return [run_copy(), in_new_process(run_cluster)]


# --- a copy -------------------------------------------------------------------------------------------------------


def run_copy() -> Section:
    load_before = load_now()
    with data_folder() as folder, node(folder / "source") as source:
        load(source.url, "--generate", str(DOCUMENTS), "--value-bytes", str(VALUE_BYTES))
        taken = [in_new_process(_copy_once, source.port, str(folder / f"copy-{turn}")) for turn in range(ROUNDS)]
    seconds = statistics.median(took for took, _ in taken)
    cpu_s = statistics.median(used for _, used in taken)
    return Section(
        title="Replication",
        text=(
            f"{DOCUMENTS / 1e6:.0f} M documents of {VALUE_BYTES} B in {VBUCKETS} vbuckets, from a node to an empty one "
            "through the proxy, three processes in all: until every stream has ended and all of it is durable in the "
            f"copy. Medians of {ROUNDS} turns; load of the machine before: {load_before}."
        ),
        columns=["seconds", "changes", "processor time of the consumer"],
        rows=[[f"{seconds:.2f} s", f"{DOCUMENTS / seconds / 1e3:.0f} k/s", f"{cpu_s * 1e6 / DOCUMENTS:.2f} s/M"]],
        goals=[Goal("replication", 1, DOCUMENTS / seconds / 1e6, " M/s")],
    )


def _copy_once(source_port: int, folder: str) -> tuple[float, float]:
    """Return the seconds that a copy takes, and the consumer's processor time."""
    with node(Path(folder), "--bare") as target:
        return asyncio.run(_copy(source_port, target))


async def _copy(source_port: int, target: NodeProcess) -> tuple[float, float]:
    vbuckets = [VBucketId(number) for number in range(VBUCKETS)]
    replicas: list[Request] = [SetVBucket(vbucket=vbucket, state=VBucketState.REPLICA) for vbucket in vbuckets]
    connection = await AsyncKvConnection.open(address(target.port), login())
    await connection.request_all(replicas)
    connection.close()
    start_s, cpu_s = time.perf_counter(), target.cpu_s()
    proxy = await Proxy.open(
        address(source_port), address(target.port), source_login=login(), target_login=login(), name="bench"
    )
    await asyncio.gather(*(proxy.add_stream(vbucket, StreamFlags.LATEST) for vbucket in vbuckets))
    await asyncio.gather(*(proxy.wait_for_end(vbucket) for vbucket in vbuckets))
    copied = sum(stream.changes for stream in proxy.streams.values())
    proxy.close()
    if copied != DOCUMENTS:
        raise RuntimeError(f"{copied} changes were copied, and there are {DOCUMENTS} documents")
    connection = await AsyncKvConnection.open(address(target.port), login())
    while await _durable_changes(connection) < DOCUMENTS:
        await asyncio.sleep(0.01)
    connection.close()
    return time.perf_counter() - start_s, target.cpu_s() - cpu_s


async def _durable_changes(connection: AsyncKvConnection) -> int:
    answer = await connection.request(GetAllVbSeqnos(state=VBucketState.REPLICA))
    assert isinstance(answer, GetAllVbSeqnosResponse)
    return sum(entry.seqno for entry in answer.seqnos)


# --- a cluster ----------------------------------------------------------------------------------------------------


def run_cluster() -> Section:
    """Measure two nodes: the first hands over half of its vbuckets to the second, which is then lost."""
    load_before = load_now()
    with data_folder() as folder, node(folder / "first") as first, node(folder / "second") as second:
        load(first.url, "--generate", str(CLUSTER_DOCUMENTS), "--value-bytes", str(VALUE_BYTES))
        asyncio.run(_init(first, second))
        with _writing(first, second) as writer:
            quiet = writer.measure_for(2.0)
            start_s = time.perf_counter()
            handed_over = asyncio.run(_rebalance(first, second))
            rebalance_s = time.perf_counter() - start_s
            moving = writer.taken()
        failover_s, accepted_s = _fail_over(first, second)
    return Section(
        title="Handing over, and failing over",
        text=(
            f"A node with {CLUSTER_DOCUMENTS // 1000} k documents in {VBUCKETS} vbuckets, and an empty one that joins "
            f"with one replica: {handed_over} vbuckets are handed over in {rebalance_s:.1f} s, while one writer sets "
            "documents of any vbucket, one after the other, and asks the other node where it is refused. Then the "
            "second node is killed with kill -9 and failed over: the time from the command to the first write that is "
            "accepted in a vbucket that the lost node had, and until every such vbucket accepts one. Load of the "
            f"machine before: {load_before}."
        ),
        columns=["", "p50", "p99", "longest"],
        rows=[
            ["a write, before", *_latencies(quiet)],
            ["a write, while vbuckets are handed over", *_latencies(moving)],
            ["failover to the first accepted write", "", "", f"{accepted_s * 1e3:.0f} ms"],
            ["failover to a write in every vbucket", "", "", f"{failover_s * 1e3:.0f} ms"],
        ],
    )


def _latencies(seconds: list[float]) -> list[str]:
    p50, p99 = np.percentile(seconds, [50, 99])
    return [f"{p50 * 1e3:.2f} ms", f"{p99 * 1e3:.2f} ms", f"{max(seconds) * 1e3:.0f} ms"]


async def _init(first: NodeProcess, second: NodeProcess) -> None:
    coordinator = Coordinator([address(first.port), address(second.port)], login())
    await coordinator.init(replicas=1)
    coordinator.close()


async def _rebalance(first: NodeProcess, second: NodeProcess) -> int:
    coordinator = Coordinator([address(first.port), address(second.port)], login())
    done = await coordinator.rebalance()
    coordinator.close()
    return done.handed_over


def _fail_over(first: NodeProcess, second: NodeProcess) -> tuple[float, float]:
    writer = _Writer(first.port, None)
    lost = [vbucket for vbucket in range(VBUCKETS) if writer.write_once(vbucket) == Status.NOT_MY_VBUCKET]
    if not lost:
        raise RuntimeError("the second node has no vbuckets")
    second.process.kill()
    second.process.wait()
    start_s = time.perf_counter()
    failing_over = threading.Thread(target=lambda: asyncio.run(_failover_of(first, second)))
    failing_over.start()
    accepted: list[float] = []
    for vbucket in lost:
        while writer.write_once(vbucket) != Status.SUCCESS:
            time.sleep(RETRY_S)
        accepted.append(time.perf_counter() - start_s)
    failing_over.join()
    return accepted[-1], accepted[0]


async def _failover_of(first: NodeProcess, second: NodeProcess) -> None:
    coordinator = Coordinator([address(first.port)], login())
    await coordinator.failover([str(address(second.port))])
    coordinator.close()


# --- a writer -----------------------------------------------------------------------------------------------------


class _Writer:
    """Sets one document after the other. If a node refuses a set, it asks the other node."""

    def __init__(self, *ports: int | None) -> None:
        self._sockets: list[socket.socket] = []
        for port in ports:
            if port is not None:
                connection = connect(port, LOGIN)
                connection.setblocking(True)
                self._sockets.append(connection)
        self._owners = [0] * VBUCKETS
        self._keys = _key_of_each_vbucket()
        self._times: list[float] = []
        self._is_stopped = False

    def write_once(self, vbucket: int) -> Status:
        key = self._keys[vbucket]
        sock = self._sockets[self._owners[vbucket]]
        header = _HEADER.pack(0x80, 0x01, len(key), 8, 0, vbucket, 8 + len(key) + len(_VALUE), 0, 0)
        sock.sendall(header + bytes(8) + key + _VALUE)
        answer = _receive(sock, 24)
        _receive(sock, int.from_bytes(answer[8:12]))
        return Status(int.from_bytes(answer[6:8]))

    def run(self) -> None:
        chosen = random.Random(7)
        while not self._is_stopped:
            vbucket = chosen.randrange(VBUCKETS)
            start_s = time.perf_counter()
            while (status := self.write_once(vbucket)) != Status.SUCCESS:
                if status == Status.NOT_MY_VBUCKET:
                    self._owners[vbucket] = 1 - self._owners[vbucket]
                time.sleep(RETRY_S)
            self._times.append(time.perf_counter() - start_s)

    def measure_for(self, seconds: float) -> list[float]:
        self.taken()
        time.sleep(seconds)
        return self.taken()

    def taken(self) -> list[float]:
        """Return the durations of the writes since the last call."""
        taken, self._times = self._times, []
        return taken

    def stop(self) -> None:
        self._is_stopped = True


@contextmanager
def _writing(first: NodeProcess, second: NodeProcess) -> Iterator[_Writer]:
    writer = _Writer(first.port, second.port)
    thread = threading.Thread(target=writer.run)
    thread.start()
    try:
        yield writer
    finally:
        writer.stop()
        thread.join()


def _key_of_each_vbucket() -> list[bytes]:
    keys: dict[int, bytes] = {}
    number = 0
    while len(keys) < VBUCKETS:
        key = b"write-%d" % number
        keys.setdefault((zlib.crc32(key) >> 16 & 0x7FFF) % VBUCKETS, key)
        number += 1
    return [keys[vbucket] for vbucket in range(VBUCKETS)]


def _receive(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise RuntimeError("the node has closed the connection")
        data += more
    return data


def address(port: int) -> Address:
    return Address("127.0.0.1", port)


def login() -> Login:
    return Login(credentials=Credentials(LOGIN.user, LOGIN.password), bucket=LOGIN.bucket, features=PEER_FEATURES)
