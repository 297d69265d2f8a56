"""Three real nodes with a replica of everything, and their bucket. They are held back, killed and failed over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx

from headwater.client.blocking_bucket import KvCluster
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.client.settings import ClientSettings
from headwater.cluster.coordinator import Coordinator
from headwater.errors import ConnectionFailed, NotMyVBucket, TemporaryFailure
from headwater.node.membership import PEER_FEATURES
from headwater.protocol.messages.base import Request, Response
from headwater.protocol.sasl import Credentials
from support.fault_proxy import HOST, free_port
from support.landings import MANAGEMENT_S_MAX, SourceBucket, log_in_quickly
from support.node_process import PASSWORD, USER, NodeProcess

NODES = 3
VBUCKETS = 16
SETTLED_S_MAX = 30.0
POLL_S = 0.05
LOGIN = Login(credentials=Credentials(USER, PASSWORD), bucket="default", features=PEER_FEATURES)

T = TypeVar("T")


class SparkCluster:
    """Lives while the `with` block lasts. A node that has met an error of its own fails the test."""

    def __init__(self, folder: Path) -> None:
        self.vbuckets = VBUCKETS
        ports = [(free_port(), free_port()) for _ in range(NODES)]
        self.addresses = [Address(HOST, port) for port, _ in ports]
        self.nodes = [
            NodeProcess(
                folder / f"node-{number}",
                *("--port", str(port), "--http-port", str(http_port), "--vbuckets", str(VBUCKETS), "--bare"),
            )
            for number, (port, http_port) in enumerate(ports)
        ]
        self._https = [
            httpx.Client(base_url=f"http://{HOST}:{port}", auth=(USER, PASSWORD), timeout=MANAGEMENT_S_MAX)
            for _, port in ports
        ]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for node, http in zip(self.nodes, self._https, strict=True):
            self._stack.enter_context(http)
            self._stack.enter_context(node)
            log_in_quickly(node.data)
            node.start()
        self.coordinate(lambda coordinator: coordinator.init(replicas=1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        for node in self.nodes:
            assert "Traceback" not in node.log(), node.log()

    @property
    def http(self) -> httpx.Client:
        """Of a node that runs."""
        return next(http for node, http in zip(self.nodes, self._https, strict=True) if node.is_running)

    @property
    def url(self) -> str:
        return f"couchbase://{','.join(map(str, self.addresses))}/default"

    def coordinate(self, work: Callable[[Coordinator], Awaitable[T]]) -> T:
        async def run() -> T:
            running = [address for node, address in zip(self.nodes, self.addresses, strict=True) if node.is_running]
            coordinator = Coordinator(running, LOGIN)
            try:
                return await work(coordinator)
            finally:
                coordinator.close()

        return asyncio.run(run())

    def wait_until_replicated(self) -> None:
        give_up_s = time.monotonic() + SETTLED_S_MAX
        while any(node.behind for node in self.coordinate(lambda coordinator: coordinator.status()).nodes):
            assert time.monotonic() < give_up_s, "replicas do not catch up"
            time.sleep(POLL_S)

    # --- what goes wrong ------------------------------------------------------------------------------------------

    def hold_replicas(self, *nodes: int) -> None:
        for node in nodes:
            told = self._https[node].post("/headwater/buckets/default/replicas/hold").raise_for_status().json()
            assert told["replicas"] > 0

    def release_replicas(self, *nodes: int) -> None:
        for node in nodes:
            self._https[node].post("/headwater/buckets/default/replicas/release").raise_for_status()

    def lose(self, node: int) -> None:
        """kill -9, and the replicas take over."""
        self.nodes[node].kill()
        done = self.coordinate(lambda coordinator: coordinator.failover([str(self.addresses[node])]))
        assert (done.promoted > 0, done.lost) == (True, ())

    def bring_back(self, node: int) -> None:
        """Start a node that was failed over, and give it its share of the vbuckets."""
        self.nodes[node].start()

        async def rebalance(coordinator: Coordinator) -> None:
            await coordinator.add(self.addresses[node])
            await coordinator.rebalance()

        self.coordinate(rebalance)


class ClusterBucket(SourceBucket):
    """The bucket of such a cluster. Writes go to the node of their vbucket, and follow it."""

    def __init__(self, cluster: SparkCluster) -> None:
        super().__init__(cluster)  # type: ignore[arg-type]
        self.cluster = cluster
        self._connections: dict[Address, KvConnection] = {}
        self._map: ClusterMap | None = None

    @property
    def url(self) -> str:
        return self.cluster.url

    @property
    def map(self) -> ClusterMap:
        if self._map is None:
            self._map = KvCluster(ClientSettings.make(self.url, user=USER, password=PASSWORD)).read_map()
        return self._map

    def vbuckets_on(self, node: int) -> list[int]:
        """Those that are active there."""
        self._forget()
        address = self.cluster.addresses[node]
        return [v for v in range(VBUCKETS) if self.map.nodes[self.map.active_node(v)] == address]

    def request(self, message: Request) -> Response:
        give_up_s = time.monotonic() + SETTLED_S_MAX
        while True:
            try:
                return self._connection_to(message).request(message)
            except (ConnectionFailed, NotMyVBucket, TemporaryFailure):
                if time.monotonic() > give_up_s:
                    raise
            self._forget()
            time.sleep(POLL_S)

    def _connection_to(self, message: Request) -> KvConnection:
        address = self.map.nodes[self.map.active_node(message.vbucket)]
        if address not in self._connections:
            self._connections[address] = KvConnection.open(address, LOGIN)
        return self._connections[address]

    def _forget(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()
        self._map = None

    def close(self) -> None:
        self._forget()
