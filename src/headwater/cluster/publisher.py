"""Publishing: every change of the config goes to all nodes at once, with a higher revision, one after the other.

A rebalance, a failover and the coordinator give changes to a `Publisher`, made with `with_rows` and its siblings.
Changes that come while one is on its way are published together with the next: a rebalance hands over many vbuckets at
a time, and each of them waits for its own change only.

Another coordinator may be at work. So nothing is sent before every node has been asked whether it still has the config
that this one goes by, and nothing is done by a config before every node has taken it. A node takes one config of a
revision and no other. So of two coordinators one at most gets its config to all nodes; the other one is refused
somewhere, which is the end of its work (`Overtaken`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from headwater.cluster.nodes import LOST_S_MAX, NodePort, answered
from headwater.cluster.planning import Row, VBucketMap
from headwater.errors import HeadwaterError, Overtaken
from headwater.log_fields import LogEvent, fields
from headwater.protocol.cluster_config import NO_NODE, NodeAddress, PublishedConfig, nodes_user
from headwater.protocol.numbers import VBucketId
from headwater.protocol.sasl import Credentials

logger = logging.getLogger(__name__)

Change = Callable[[PublishedConfig], PublishedConfig]

TRIES_MAX = 5
"""How often a node that leaves, and has a config that another coordinator gave to it alone, is sent a yet higher
revision."""


class Publisher:
    """Holds the newest config. `seen` are those that nodes had when it was looked for: it replaces them."""

    def __init__(
        self,
        config: PublishedConfig,
        port_of: Callable[[str], NodePort],
        *,
        seen: Iterable[PublishedConfig] = (),
        is_first: bool = False,
    ) -> None:
        self.config = config
        self._is_first = is_first
        """The cluster is being made, so its nodes may be in none."""
        self._port_of = port_of
        self._seen = [replace(one, login=None) for one in seen]
        self._waiting: list[tuple[Change, asyncio.Future[None]]] = []
        self._publishing = asyncio.Lock()
        self._may_miss: frozenset[str] = frozenset()
        self._overtaken: Overtaken | None = None

    def may_miss(self, names: frozenset[str]) -> None:
        """The config is sent to these nodes as well, and it does not matter whether they get it."""
        self._may_miss = names

    def replaces(self, config: PublishedConfig) -> None:
        """A node that joins has this one of old."""
        self._seen.append(replace(config, login=None))

    async def publish(self, change: Change) -> None:
        """Apply a change, and return once every node has the config with it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        async with self._publishing:
            if not done.done():
                await self._publish_waiting()
        await done

    async def check_not_overtaken(self) -> None:
        """Raise `Overtaken` if another coordinator has published since, as far as the nodes can be asked."""
        try:
            await self._compare(self.config)
        except Overtaken:
            raise
        except HeadwaterError as error:
            about = fields(event=LogEvent.CLUSTER_CONFIG, reason=error.reason)
            logger.debug("could not check whether another command has been faster: %s", error.reason, extra=about)

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
        if self._overtaken is not None:
            raise self._overtaken
        before = config = self.config
        for change in changes:
            config = change(config)
        # Nodes that leave get the config that leaves them out, if they listen.
        names = list(dict.fromkeys([*config.names(), *before.names()]))
        try:
            await self._compare(before)
            await self._send_until_all_have_it(names, config)
        except Overtaken as overtaken:
            # A higher revision would be taken again, and undo what the other one has done.
            self._overtaken = overtaken
            raise

    # --- comparing ------------------------------------------------------------------------------------------------

    async def _compare(self, before: PublishedConfig) -> None:
        """Raise unless the nodes have the config that they were last seen with, or were sent.

        Those that may miss it are not asked: no command is to wait for them twice, and their refusals count anyway.
        """
        names = [name for name in before.names() if name not in self._may_miss]
        results = await self._of_each(names, lambda name: self._port_of(name).config())
        for name, known in zip(names, results, strict=True):
            if isinstance(known, HeadwaterError):
                raise known.reworded(f"config {before.revision + 1} could not be given to {name}: {known.reason}")
            if known is None and not self._is_first:
                # It would take its empty vbuckets for what the cluster has, and the copies would follow it.
                raise HeadwaterError(
                    f"{name} does not know that it is in the cluster: it was started on another data folder",
                    hint="Start it on its own, or go on without it by `headwater cluster failover` and add it again",
                )
            if isinstance(known, PublishedConfig):
                is_older = known.version < before.version
                if not (is_older or known == replace(before, login=None) or known in self._seen):
                    raise Overtaken(name, revision=known.revision)

    # --- sending --------------------------------------------------------------------------------------------------

    async def _send_until_all_have_it(self, names: Sequence[str], config: PublishedConfig) -> None:
        for tries_left in reversed(range(TRIES_MAX)):
            self.config = config = replace(config, revision=config.revision + 1)
            refused = await self._send(names, config)
            if refused is None:
                return
            if not tries_left:
                raise refused
            # All that stay have taken it, so the one that leaves has a config which no node can act by. It must not
            # keep it, or it would go on as if it belonged here.
            config = replace(config, revision=max(config.revision, refused.revision))

    async def _send(self, names: Sequence[str], config: PublishedConfig) -> Overtaken | None:
        """Send to all nodes. Returns the refusal of one that leaves; those of the others are raised."""
        results = await self._of_each(names, lambda name: self._port_of(name).publish(config))
        refused: Overtaken | None = None
        for name, result in zip(names, results, strict=True):
            if not isinstance(result, HeadwaterError):
                continue
            if name in config.names() and name not in self._may_miss:
                if isinstance(result, Overtaken):
                    raise result
                raise result.reworded(f"config {config.revision} could not be given to {name}: {result.reason}")
            if isinstance(result, Overtaken):
                refused = result
            else:
                about = fields(
                    event=LogEvent.CLUSTER_CONFIG, config=config.revision, address=name, reason=result.reason
                )
                logger.warning("config %d has not reached %s: %s", config.revision, name, result.reason, extra=about)
        return refused

    async def _of_each(self, names: Sequence[str], ask: Callable[[str], Awaitable[object]]) -> list[object]:
        """What comes of asking each of these nodes, its error if it is one of ours."""

        async def ask_within(name: str) -> object:
            try:
                return await answered(partial(ask, name), LOST_S_MAX if name in self._may_miss else None)
            except HeadwaterError as error:
                return error

        return list(await asyncio.gather(*(ask_within(name) for name in names)))


# --- changes of a config: the coordinator plans with names, and a config has indices ------------------------------


SECRET_BYTES = 32
"""Of the log-in of the nodes among themselves."""


def rows_of(config: PublishedConfig) -> VBucketMap:
    names = config.names()
    return tuple(tuple(None if node == NO_NODE else names[node] for node in row) for row in config.rows)


def with_rows(config: PublishedConfig, changed: Mapping[VBucketId, Row]) -> PublishedConfig:
    """The same config with other rows of some vbuckets. The revision stays for the publisher to raise."""
    index = {name: at for at, name in enumerate(config.names())}
    rows = list(config.rows)
    for vbucket, row in changed.items():
        rows[vbucket] = tuple(NO_NODE if name is None else index[name] for name in row)
    return replace(config, rows=tuple(rows))


def with_building(config: PublishedConfig, changed: Mapping[VBucketId, Iterable[str]]) -> PublishedConfig:
    """The same config with other nodes that build some vbuckets; with none of them, no node does."""
    index = {name: at for at, name in enumerate(config.names())}
    building = dict(config.building)
    for vbucket, names in changed.items():
        nodes = tuple(index[name] for name in names if index[name] not in config.rows[vbucket])
        if nodes:
            building[vbucket] = nodes
        else:
            building.pop(vbucket, None)
    return replace(config, building=building)


def with_handing_over(config: PublishedConfig, changed: Mapping[VBucketId, str | None]) -> PublishedConfig:
    """The same config with vbuckets on their way to these nodes; None where one has arrived, or will not."""
    index = {name: at for at, name in enumerate(config.names())}
    handing_over = dict(config.handing_over)
    for vbucket, name in changed.items():
        if name is None:
            handing_over.pop(vbucket, None)
        else:
            handing_over[vbucket] = index[name]
    return replace(config, handing_over=handing_over)


def with_frozen(config: PublishedConfig, vbuckets: Iterable[int]) -> PublishedConfig:
    """The same config with vbuckets, and all that are on their way, kept as they are on every node."""
    frozen = {vbucket: config.rows[vbucket][0] for vbucket in (*vbuckets, *config.handing_over)}
    return replace(config, handing_over={vbucket: node for vbucket, node in sorted(frozen.items()) if node != NO_NODE})


def with_nodes(config: PublishedConfig, nodes: Iterable[NodeAddress]) -> PublishedConfig:
    """The same config with other nodes. What the ones that go had is on no node."""
    kept = tuple(nodes)
    new_index = {node.kv_address: at for at, node in enumerate(kept)}
    moved = [new_index.get(name, NO_NODE) for name in config.names()]

    def move(node: int) -> int:
        return NO_NODE if node == NO_NODE else moved[node]

    building = {
        vbucket: tuple(move(node) for node in builders if move(node) != NO_NODE)
        for vbucket, builders in config.building.items()
    }
    return replace(
        config,
        nodes=kept,
        rows=tuple(tuple(move(node) for node in row) for row in config.rows),
        building={vbucket: builders for vbucket, builders in building.items() if builders},
        handing_over={vbucket: move(node) for vbucket, node in config.handing_over.items() if move(node) != NO_NODE},
    )


def new_nodes_login(bucket: str, random_bytes: Callable[[int], bytes]) -> Credentials:
    """A log-in of the nodes among themselves, made once for a cluster. It follows from nothing that may change."""
    return Credentials(nodes_user(bucket), random_bytes(SECRET_BYTES).hex())
