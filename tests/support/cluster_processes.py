"""Real nodes in processes of their own, on fixed ports, so that one that is started again is the same node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from headwater.client.handshake import Credentials
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.node.membership import PEER_FEATURES
from support.fault_proxy import free_port
from support.node_process import PASSWORD, USER, NodeProcess

VBUCKETS = 32
"""Few, as every one that moves takes its time."""


class ClusterProcesses:
    """Nodes that are in no cluster yet."""

    def __init__(self, folder: Path, count: int, *options: str, vbuckets: int = VBUCKETS) -> None:
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

    @property
    def login(self) -> Login:
        return Login(credentials=Credentials(USER, PASSWORD), bucket="default", features=PEER_FEATURES)

    def url(self, *seeds: int) -> str:
        """A connection string of these nodes."""
        return f"couchbase://{','.join(self.names[seed] for seed in seeds)}"

    @property
    def names(self) -> list[str]:
        return [str(node.address) for node in self.nodes]

    @asynccontextmanager
    async def coordinator(self, *seeds: int) -> AsyncIterator[Coordinator]:
        """A new one, which knows these nodes and nothing else."""
        coordinator = Coordinator([self.nodes[seed].address for seed in seeds or (0,)], self.login)
        try:
            yield coordinator
        finally:
            coordinator.close()
