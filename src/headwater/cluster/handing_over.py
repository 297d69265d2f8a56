"""Takeovers: vbuckets become active on another node, one proxy a pair of nodes, and a new config after each of them.

A takeover that was cut short leaves its vbucket marked in the config. Which of the two nodes has it then is asked of
them: the one where it is active; where neither is, the old one, as it had everything until the very end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from headwater.cluster.config_changes import rows_of, with_building, with_handing_over, with_rows
from headwater.cluster.kv_port import NodePort
from headwater.cluster.planning import Move, Row
from headwater.cluster.publisher import Publisher
from headwater.cluster.survey import Survey, survey
from headwater.errors import HeadwaterError
from headwater.node.published_config import PublishedConfig
from headwater.node.replication.proxy import Proxy
from headwater.protocol.messages.dcp_stream import StreamEndReason, StreamFlags, VBucketState
from headwater.protocol.numbers import VBucketId

TAKEOVER_S_MAX = 60.0
"""One takeover has nothing but the last changes to send."""


class Takeovers:
    """The takeovers of one rebalance."""

    def __init__(self, publisher: Publisher, port_of: Callable[[str], NodePort]) -> None:
        self._publisher = publisher
        self._port_of = port_of
        self._proxies: dict[tuple[str, str], Proxy] = {}
        self._opening = asyncio.Lock()

    async def run(self, moves: Sequence[Move]) -> None:
        """Hand these vbuckets over, all at the same time."""
        targets = {move.vbucket: move.target for move in moves}
        await self._publisher.publish(lambda config: with_handing_over(config, targets))
        results = await asyncio.gather(*(self._hand_over(move) for move in moves), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if failures:
            raise failures[0]

    def close(self) -> None:
        for proxy in self._proxies.values():
            proxy.close()
        self._proxies.clear()

    async def _hand_over(self, move: Move) -> None:
        assert move.source is not None
        assert move.target is not None
        proxy = await self._proxy(move.source, move.target)
        try:
            async with asyncio.timeout(TAKEOVER_S_MAX):
                await proxy.add_stream(move.vbucket, StreamFlags.TAKEOVER)
                reason = await proxy.wait_for_end(move.vbucket)
        except TimeoutError as error:
            raise HeadwaterError(
                f"vbucket {move.vbucket} was not taken over in {TAKEOVER_S_MAX:.0f} s", hint="Run the command again"
            ) from error
        if reason != StreamEndReason.OK:
            raise HeadwaterError(
                f"the takeover of vbucket {move.vbucket} ended with {reason.name}", hint="Run the command again"
            )
        await self._publisher.publish(lambda config: arrived(config, move))

    async def _proxy(self, source: str, target: str) -> Proxy:
        async with self._opening:
            if (source, target) not in self._proxies:
                from_port, to_port = self._port_of(source), self._port_of(target)
                self._proxies[source, target] = await Proxy.open(
                    from_port.address,
                    to_port.address,
                    source_login=from_port.login,
                    target_login=to_port.login,
                    name=f"takeover:{source}->{target}",
                )
            return self._proxies[source, target]


def arrived(config: PublishedConfig, move: Move) -> PublishedConfig:
    """The config once a vbucket has its new row. Copies that go stay up to date until the new ones are known to be."""
    config = with_rows(with_handing_over(config, {move.vbucket: None}), {move.vbucket: move.after})
    return with_building(config, {move.vbucket: move.drops})


async def resolve(publisher: Publisher, ports: Mapping[str, NodePort]) -> None:
    """Bring takeovers that were cut short to an end."""
    config = publisher.config
    if not config.handing_over:
        return
    found = await survey(ports)
    names, rows = config.names(), rows_of(config)
    changed: dict[VBucketId, Row] = {}
    activated: dict[str, dict[VBucketId, Row]] = {}
    for number, node in config.handing_over.items():
        vbucket, target = VBucketId(number), names[node]
        row = rows[vbucket]
        source = row[0]
        active = _active_of(found, vbucket, source, target)
        if active == target:
            changed[vbucket] = row = _exchanged(row, target)
        if active is not None and found.state(active, vbucket) != VBucketState.ACTIVE:
            activated.setdefault(active, {})[vbucket] = row
    for name, by_vbucket in activated.items():
        await ports[name].activate({vbucket: (list(row),) for vbucket, row in by_vbucket.items()})

    def over(config: PublishedConfig) -> PublishedConfig:
        return with_rows(with_handing_over(config, dict.fromkeys(map(VBucketId, config.handing_over))), changed)

    await publisher.publish(over)


def _active_of(found: Survey, vbucket: VBucketId, source: str | None, target: str) -> str | None:
    for name in (target, source):
        if name is not None and found.state(name, vbucket) == VBucketState.ACTIVE:
            return name
    if source is not None and found.state(source, vbucket) is not None:
        return source
    return target if found.state(target, vbucket) is not None else None


def _exchanged(row: Row, target: str) -> Row:
    """The row with the target in front. The node that was active takes its place, or none if it had no place."""
    return (target, *(row[0] if node == target else node for node in row[1:]))
