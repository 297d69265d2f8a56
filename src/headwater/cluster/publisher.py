"""Publishing: every change of the config goes to all nodes at once, with a higher revision, one after the other.

Changes that come while one is on its way are published together with the next: a rebalance hands over many vbuckets at
a time, and each of them waits for its own change only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from headwater.cluster.kv_port import NodePort
from headwater.errors import HeadwaterError
from headwater.node.published_config import PublishedConfig

logger = logging.getLogger(__name__)

Change = Callable[[PublishedConfig], PublishedConfig]

LOST_S_MAX = 1.0
"""How long a node that may miss a config is waited for: the others are without it meanwhile."""


class Publisher:
    """Holds the newest config there is."""

    def __init__(self, config: PublishedConfig, port_of: Callable[[str], NodePort]) -> None:
        self.config = config
        self._port_of = port_of
        self._waiting: list[tuple[Change, asyncio.Future[None]]] = []
        self._publishing = asyncio.Lock()
        self._may_miss: frozenset[str] = frozenset()

    def may_miss(self, names: frozenset[str]) -> None:
        """These nodes are told as well, and it does not matter whether they hear it."""
        self._may_miss = names

    async def publish(self, change: Change) -> None:
        """Apply a change, and return once every node has the config with it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        async with self._publishing:
            if not done.done():
                await self._publish_waiting()
        await done

    async def _publish_waiting(self) -> None:
        together, self._waiting = [one for one in self._waiting if not one[1].done()], []
        waiters = [done for _, done in together]
        try:
            await self._publish_together([change for change, _ in together])
        except asyncio.CancelledError:
            for done in waiters:
                done.cancel()
            raise
        except Exception as error:
            for done in waiters:
                done.set_exception(error)
            return
        for done in waiters:
            done.set_result(None)

    async def _publish_together(self, changes: Sequence[Change]) -> None:
        before = config = self.config
        for change in changes:
            config = change(config)
        self.config = config = replace(config, revision=config.revision + 1)
        await self._send(config, before)

    async def _send(self, config: PublishedConfig, before: PublishedConfig) -> None:
        # Nodes that leave are told that they have left, if they listen.
        names = list(dict.fromkeys([*config.names(), *before.names()]))
        results = await asyncio.gather(*(self._tell(name, config) for name in names), return_exceptions=True)
        for name, result in zip(names, results, strict=True):
            if not isinstance(result, BaseException):
                continue
            if not isinstance(result, HeadwaterError):
                raise result
            if name in self._may_miss or name not in config.names():
                logger.warning("config %d has not reached %s: %s", config.revision, name, result.reason)
            else:
                raise result.retold(f"config {config.revision} could not be given to {name}: {result.reason}")

    async def _tell(self, name: str, config: PublishedConfig) -> None:
        try:
            async with asyncio.timeout(LOST_S_MAX if name in self._may_miss else None):
                await self._port_of(name).publish(config)
        except TimeoutError as error:
            raise HeadwaterError(f"it has not answered in {LOST_S_MAX:.0f} s") from error
