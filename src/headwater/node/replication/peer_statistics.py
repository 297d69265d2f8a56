"""Statistics of the other nodes of a bucket's cluster, for those who show the cluster to people.

They are asked over the key-value protocol, as the nodes log in to each other anyway. A connection to each is kept from
one question to the next, is made when it is first needed, and again when it broke.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headwater.client.kv_connection import Login
from headwater.errors import ConnectionFailed, NoAnswer
from headwater.node.published_config import PublishedConfig, kv_address
from headwater.node.replication.peer_connection import PeerConnection

ANSWER_S_MAX = 3.0
"""How long a node may take to answer, its log-in included, before it counts as one that does not."""


class PeerStatistics:
    """See the module. Ask a node one thing at a time."""

    def __init__(
        self,
        *,
        login: Callable[[PublishedConfig], Login],
        config: Callable[[], PublishedConfig | None],
        this_node: Callable[[], int | None],
    ) -> None:
        self._login = login
        self._config = config
        self._this_node = this_node
        self._connections: dict[str, PeerConnection] = {}
        self._is_stopped = False

    def names(self) -> list[str]:
        """The other nodes, as the config names them."""
        config = self._config()
        if config is None:
            return []
        this_node = self._this_node()
        return [name for at, name in enumerate(config.names()) if at != this_node]

    async def ask(self, name: str, group: str) -> dict[str, str]:
        """A group of statistics of a node. Raises a `HeadwaterError` where there is no answer."""
        self._forget_all_but(self.names())
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                return await (await self._connection(name)).statistics(group)
        except BaseException as error:
            # An answer that nobody waits for any more would be taken for that to the next question.
            left = self._connections.pop(name, None)
            if left is not None:
                left.abort()
            if isinstance(error, TimeoutError):
                raise NoAnswer(
                    f"{name} has not answered for {ANSWER_S_MAX:g} seconds", hint="Look at that node's load and log"
                ) from error
            raise

    async def _connection(self, name: str) -> PeerConnection:
        known = self._connections.get(name)
        if known is not None and not known.is_closed:
            return known
        config = self._config()
        if self._is_stopped or config is None or name not in config.names():
            raise ConnectionFailed(f"{name} is not a node of this cluster", hint="Look at the cluster's config")
        login = self._login(config)
        address = kv_address(config.nodes[config.names().index(name)], tls=login.tls is not None)
        opened = self._connections[name] = await PeerConnection.open(address, login)
        return opened

    def _forget_all_but(self, names: list[str]) -> None:
        for name in [name for name in self._connections if name not in names]:
            self._connections.pop(name).close()

    def stop(self) -> None:
        self._is_stopped = True
        self._forget_all_but([])
