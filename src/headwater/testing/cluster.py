"""A cluster for one test: nodes with replicas of each other, and the faults they can suffer.

The plug-in's fixture makes it. Its methods block; a test with its own event loop may call them, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar, Unpack

from headwater.client import blocking_client
from headwater.client.kv_connection import Login
from headwater.client.settings import ConnectKeywords
from headwater.cluster.coordinator import Coordinator
from headwater.cluster.nodes import ClusterStatus
from headwater.errors import InvalidInput
from headwater.node.membership import PEER_FEATURES
from headwater.phrases import counted
from headwater.protocol.sasl import Credentials
from headwater.testing.node import DEFAULT_COLLECTION, PASSWORD, USER, VBUCKETS, HeadwaterNode, check_sequences
from headwater.testing.nursery import NodeFailed, Nursery

REPLICATED_S_MAX = 30.0
_LOOK_EVERY_S = 0.02

T = TypeVar("T")


class HeadwaterCluster:
    """Nodes that share the vbuckets of one bucket, `default`, with replicas."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        *,
        nodes: int = 2,
        replicas: int = 1,
        vbuckets: int = VBUCKETS,
        options: Sequence[str] = (),
    ) -> None:
        check_sequences(options=options)
        if replicas >= nodes:
            raise InvalidInput(
                f"{counted(nodes, 'node')} can't hold {counted(replicas, 'replica')} beside the active copies",
                hint=f"Give replicas={max(0, nodes - 1)}, or more nodes",
            )
        self.user = USER
        self.password = PASSWORD
        self.replicas = replicas
        self._stack = ExitStack()
        self.nodes: list[HeadwaterNode] = []
        for number in range(nodes):
            own = folder / f"node-{number}"
            own.mkdir()
            self.nodes.append(HeadwaterNode(nursery, own, vbuckets=vbuckets, options=("--bare", *options)))

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                self._stack.enter_context(node)
            self._coordinate(lambda coordinator: coordinator.init(replicas=self.replicas))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The connection string: all running nodes, and the bucket."""
        return f"couchbase://{','.join(str(node.address) for node in self._running())}/default"

    def connect(self, **settings: Unpack[ConnectKeywords]) -> blocking_client.Client:
        """Make a client of the bucket, for `with`. It logs in as the nodes' user by default."""
        settings.setdefault("user", self.user)
        settings.setdefault("password", self.password)
        return blocking_client.connect(self.url, **settings)

    def status(self) -> ClusterStatus:
        return self._coordinate(lambda coordinator: coordinator.status())

    # --- documents ------------------------------------------------------------------------------------------------

    def active_node(self, vbucket: int) -> HeadwaterNode:
        """Return the node where a vbucket is active."""
        with self.connect() as client:
            address = client.cluster_map.address_of(vbucket)  # type: ignore[arg-type]
        return next(node for node in self.nodes if node.address == address)

    def write(self, documents: Mapping[Any, Any], *, collection: str = DEFAULT_COLLECTION) -> None:
        """Write documents by key, each to the node of its vbucket."""
        by_node: dict[int, dict[Any, Any]] = {}
        with self.connect() as client:
            for key, value in documents.items():
                address = client.cluster_map.address_of(self.nodes[0].vbucket_of(key))  # type: ignore[arg-type]
                number = next(number for number, node in enumerate(self.nodes) if node.address == address)
                by_node.setdefault(number, {})[key] = value
        for number, part in by_node.items():
            self.nodes[number].write(part, collection=collection)

    def wait_until_replicated(self) -> None:
        """Wait until every replica has all changes of its active copy; raises `NodeFailed` after 30 seconds."""
        deadline_s = time.monotonic() + REPLICATED_S_MAX
        while any(node.behind for node in self.status().nodes):
            if time.monotonic() > deadline_s:
                raise NodeFailed(f"replicas were behind for {REPLICATED_S_MAX:.0f} s")
            time.sleep(_LOOK_EVERY_S)

    # --- faults ---------------------------------------------------------------------------------------------------

    def failover(self, node: HeadwaterNode | None = None) -> None:
        """Kill a node, by default the first, and let its replicas take over. Changes that they lack are lost."""
        lost = node or self._running()[0]
        self._check_survivors(lost)
        lost.kill()
        self._coordinate(lambda coordinator: coordinator.failover([str(lost.address)]))

    def _check_survivors(self, lost: HeadwaterNode) -> None:
        """Raise `NodeFailed` if the remaining nodes would not have a copy of everything."""
        survivors = [node.address for node in self._running() if node is not lost]
        if not survivors:
            raise NodeFailed("no node would be left after this failover: bring_back one first, or take more nodes")
        url = f"couchbase://{','.join(str(address) for address in survivors)}/default"
        with blocking_client.connect(url, user=self.user, password=self.password) as client:
            known = client.cluster_map
        left = {number for number, address in enumerate(known.nodes) if address in survivors}
        gone = [copies for copies in known.vbucket_nodes if not left & set(copies)]
        if gone:
            raise NodeFailed(
                f"{counted(len(gone), 'vbucket')} would be lost by this failover, as no other node that runs has a "
                "copy: bring_back a node first, or take more replicas"
            )

    def bring_back(self, node: HeadwaterNode) -> None:
        """Start a node that was failed over, add it to the cluster again, and give it its share of the vbuckets."""
        if not node.process.is_running:
            node.kill()
            node.start()

        async def take_in(coordinator: Coordinator) -> None:
            await coordinator.add(node.address)
            await coordinator.rebalance()

        self._coordinate(take_in)

    def take_out(self, node: HeadwaterNode) -> None:
        """Move all vbuckets of a node to the others, and remove it from the cluster. It keeps running."""
        self._coordinate(lambda coordinator: coordinator.remove(str(node.address)))

    def lose(self, documents: Mapping[Any, Any], *, collection: str = DEFAULT_COLLECTION) -> None:
        """Write documents and lose them by a failover: their node dies before any replica has received them.

        They must all be on one node; otherwise raises `NodeFailed`.
        """
        owners = {self.nodes.index(self.active_node(self.nodes[0].vbucket_of(key))) for key in documents}
        if len(owners) != 1:
            raise NodeFailed(f"the documents are on {len(owners)} nodes: choose keys of one")
        lost = self.nodes[owners.pop()]
        others = [node for node in self._running() if node is not lost]
        for node in others:
            node.hold_replicas()
        lost.write(documents, collection=collection)
        self.failover(lost)
        for node in others:
            node.release_replicas()

    def rollback(self, vbucket: int, seqno: int) -> int:
        """Undo all changes of a vbucket above a seqno. See `HeadwaterNode.rollback`."""
        return self.active_node(vbucket).rollback(vbucket, seqno)

    def pause(self, node: HeadwaterNode | None = None) -> HeadwaterNode:
        """Pause a node, by default the first, until `resume`."""
        paused = node or self._running()[0]
        paused.pause()
        return paused

    def resume(self, node: HeadwaterNode) -> None:
        node.resume()

    # --- the coordinator ------------------------------------------------------------------------------------------

    def _running(self) -> list[HeadwaterNode]:
        return [node for node in self.nodes if node.process.is_running]

    def _coordinate(self, work: Callable[[Coordinator], Awaitable[T]]) -> T:
        async def run() -> T:
            login = Login(
                credentials=Credentials(self.user, self.password),
                bucket="default",
                features=PEER_FEATURES,
                agent="headwater testing",
            )
            coordinator = Coordinator([node.address for node in self._running()], login)
            try:
                return await work(coordinator)
            finally:
                coordinator.close()

        # The test's thread may have an event loop, and a thread can run only one.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: asyncio.run(run())).result()
