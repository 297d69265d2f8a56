"""Real nodes in the test's process, with real sockets and disks: any number, and ready immediately."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from headwater.client.cluster_map import vbucket_of
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.errors import HeadwaterError, KeyNotFound
from headwater.node.membership import PEER_FEATURES
from headwater.node.node import Node
from headwater.node.node_folder import NodeEnvironment
from headwater.node.options import NodeOptions
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.sasl import Credentials
from headwater.store.bucket import Bucket
from support.fault_proxy import free_port
from support.node_process import PASSWORD, USER, NodeProcess

VBUCKETS = 8
LOGIN = Login(credentials=Credentials(USER, PASSWORD), bucket="default", features=PEER_FEATURES)


class InProcessNodes:
    """Nodes that are stopped and started by number."""

    def __init__(self, folder: Path, *, login: Login = LOGIN) -> None:
        self._folder = folder
        self.login = login
        self._options: list[NodeOptions] = []
        self.running: dict[int, Node] = {}

    async def start_new(
        self, *, vbuckets: int = VBUCKETS, bare: bool = False, certificate: tuple[Path, Path] | None = None
    ) -> int:
        number = len(self._options)
        self._options.append(
            NodeOptions(
                data=self._folder / f"node-{number}",
                port=free_port(),
                vbuckets=vbuckets,
                bare=bare,
                user=USER,
                password=PASSWORD,
                tls_cert=None if certificate is None else certificate[0],
                tls_key=None if certificate is None else certificate[1],
                tls_only=certificate is not None,
            )
        )
        await self.start(number)
        return number

    async def start(self, number: int) -> Node:
        node = Node(self._options[number], NodeEnvironment(serves_http=False))
        await node.start()
        self.running[number] = node
        return node

    async def stop(self, number: int) -> None:
        await self.running.pop(number).stop()

    async def stop_all(self) -> None:
        for number in list(self.running):
            await self.stop(number)

    def address(self, number: int) -> Address:
        port = self._options[number].port
        assert port is not None
        return Address("127.0.0.1", port)

    def name(self, number: int) -> str:
        return str(self.address(number))

    @asynccontextmanager
    async def coordinator(self, *seeds: int) -> AsyncIterator[Coordinator]:
        coordinator = Coordinator([self.address(seed) for seed in seeds or (0,)], self.login)
        try:
            yield coordinator
        finally:
            coordinator.close()

    # --- documents ------------------------------------------------------------------------------------------------

    async def store(self, documents: Iterable[bytes]) -> None:
        """Write documents, each to the node that accepts it."""
        wanted = list(documents)
        assert await self.try_to_store(wanted) == wanted

    async def try_to_store(self, documents: Iterable[bytes]) -> list[bytes]:
        """Write documents. Returns those that were accepted."""
        taken = []
        connections = [await AsyncKvConnection.open(self.address(number), self.login) for number in self.running]
        for key in documents:
            for connection in connections:
                try:
                    await connection.request(Set(value=b'{"a": 1}', **_place(key)))
                    taken.append(key)
                    break
                except HeadwaterError:
                    continue
        for connection in connections:
            connection.close()
        return taken

    async def found(self, documents: Iterable[bytes]) -> list[bytes]:
        """Return those of the documents that a node returns from an active vbucket."""
        connections = [await AsyncKvConnection.open(self.address(number), self.login) for number in self.running]
        found = []
        for key in documents:
            for connection in connections:
                try:
                    await connection.request(Get(**_place(key)))
                    found.append(key)
                    break
                except KeyNotFound:
                    break
                except HeadwaterError:
                    continue
        for connection in connections:
            connection.close()
        return found

    def bucket(self, number: int) -> Bucket:
        return self.running[number].bucket_service("default").bucket

    def durable_seqnos(self, number: int) -> list[int]:
        return list(map(int, self.bucket(number).vbuckets.durable_seqnos))

    def is_even(self) -> bool:
        """Return whether all copies of each vbucket are at the same seqno."""
        buckets = [self.bucket(number) for number in self.running]
        return all(
            len({int(one.vbuckets.durable_seqnos[vb]) for one in buckets if one.vbuckets.exists(vb)}) == 1
            for vb in range(VBUCKETS)
        )

    def copies(self, vbucket: int) -> dict[int, str]:
        """Return the state of a vbucket on each of the nodes."""
        states = {
            number: node.bucket_service("default").bucket.vbuckets.state(vbucket)
            for number, node in self.running.items()
        }
        return {number: state.name.lower() for number, state in states.items() if state is not None}


async def soon(is_so: Callable[[], bool], *, within_s: float = 30.0) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(within_s):
        while not is_so():
            await asyncio.sleep(0.02)


def _place(key: bytes) -> dict[str, object]:
    return {"vbucket": vbucket_of(key, VBUCKETS), "collection_id": DEFAULT_COLLECTION, "key": key}


@asynccontextmanager
async def in_process(folder: Path, count: int) -> AsyncIterator[InProcessNodes]:
    nodes = InProcessNodes(folder)
    try:
        for _ in range(count):
            await nodes.start_new()
        yield nodes
    finally:
        await nodes.stop_all()


# Real nodes in separate processes, on fixed ports, so that a restarted one is the same node.


PROCESS_VBUCKETS = 32
"""Few, as every vbucket takes time to move."""


class ClusterProcesses:
    """Nodes that are in no cluster yet."""

    def __init__(self, folder: Path, count: int, *options: str, vbuckets: int = PROCESS_VBUCKETS) -> None:
        self.nodes = [
            NodeProcess(
                folder / f"node-{number}",
                *("--port", str(free_port()), "--http-port", str(free_port()), "--vbuckets", str(vbuckets)),
                *("--compact-interval", "1", *options),
            )
            for number in range(count)
        ]
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for node in self.nodes:
            self._stack.enter_context(node)
            node.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        if kind is None:
            for node in self.nodes:
                assert "Traceback" not in node.log(), node.log()

    def form(self, *, replicas: int = 1) -> None:
        """Form a cluster of all nodes."""

        async def init() -> None:
            async with self.coordinator(*range(len(self.nodes))) as coordinator:
                await coordinator.init(replicas=replicas)

        asyncio.run(init())

    @property
    def login(self) -> Login:
        return Login(credentials=Credentials(USER, PASSWORD), bucket="default", features=PEER_FEATURES)

    def url(self, *seeds: int) -> str:
        """Return a connection string of these nodes."""
        return f"couchbase://{','.join(self.names[seed] for seed in seeds)}"

    @property
    def names(self) -> list[str]:
        return [str(node.address) for node in self.nodes]

    @asynccontextmanager
    async def coordinator(self, *seeds: int) -> AsyncIterator[Coordinator]:
        """Yield a new coordinator, which knows only these nodes."""
        coordinator = Coordinator([self.nodes[seed].address for seed in seeds or (0,)], self.login)
        try:
            yield coordinator
        finally:
            coordinator.close()
