"""Takeovers: vbuckets become active on another node, one proxy a pair of nodes, and a new config after each of them.

A takeover that was cut short leaves its vbucket marked in the config. Which node has it then is asked of them all: the
one where it is active; where it is active nowhere, the old one, as it had everything until the very end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from headwater.cluster.config_changes import rows_of, with_building, with_frozen, with_handing_over, with_rows
from headwater.cluster.kv_port import NodePort, Topology
from headwater.cluster.planning import Move, Row, most_advanced
from headwater.cluster.publisher import Publisher
from headwater.cluster.survey import Survey, survey
from headwater.errors import HeadwaterError, Overtaken
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
        failures = {
            move.vbucket: result
            for move, result in zip(moves, results, strict=True)
            if isinstance(result, BaseException)
        }
        if failures:
            raise told_together(failures, of=len(moves))

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


def told_together(failures: Mapping[VBucketId, BaseException], *, of: int) -> BaseException:
    """One error for takeovers that have failed, out of so many: which vbuckets they are of, and all that went wrong."""
    for failure in failures.values():
        if isinstance(failure, Overtaken) or not isinstance(failure, HeadwaterError):
            return failure  # an interrupt, a fault of our own, or what all of the others come from
    reasons = dict.fromkeys(failure.reason for failure in failures.values() if isinstance(failure, HeadwaterError))
    vbuckets = ", ".join(map(str, sorted(failures)))
    first = next(iter(failures.values()))
    assert isinstance(first, HeadwaterError)
    return first.retold(f"{len(failures)} of {of} vbuckets were not handed over ({vbuckets}): {'; '.join(reasons)}")


def arrived(config: PublishedConfig, move: Move) -> PublishedConfig:
    """The config once a vbucket has its new row. Copies that go stay up to date until the new ones are known to be."""
    config = with_rows(with_handing_over(config, {move.vbucket: None}), {move.vbucket: move.after})
    return with_building(config, {move.vbucket: move.drops})


async def resolve(publisher: Publisher, ports: Mapping[str, NodePort]) -> None:
    """Bring to an end what another command has left undone: takeovers, and vbuckets that are active nowhere.

    First they are frozen. That other command may not be dead, and a takeover of it could come to its end behind our
    back; frozen, it can't. Only then is it worth looking which node has the vbucket.
    """
    config = publisher.config
    found = await _survey_all(ports)
    inactive = [
        number for number, row in enumerate(rows_of(config)) if row[0] and not _is_active(found, number, row[0])
    ]
    if not inactive and not config.handing_over:
        return
    await publisher.publish(lambda config: with_frozen(config, inactive))
    config, found = publisher.config, await _survey_all(ports)
    rows = rows_of(config)
    changed: dict[VBucketId, Row] = {}
    activated: dict[str, dict[VBucketId, Row]] = {}
    for number in config.handing_over:
        vbucket = VBucketId(number)
        row, active = rows[vbucket], _node_of(found, vbucket, rows[vbucket], list(ports))
        if active is None:
            continue
        if active != row[0]:
            changed[vbucket] = row = _exchanged(row, active)
        if not _is_active(found, vbucket, active):
            activated.setdefault(active, {})[vbucket] = row
    for name, by_vbucket in activated.items():
        topologies: dict[VBucketId, Topology] = {vbucket: (list(row),) for vbucket, row in by_vbucket.items()}
        await ports[name].activate(topologies, version=config.version)
    await publisher.publish(lambda config: with_rows(replace(config, handing_over={}), changed))


async def _survey_all(ports: Mapping[str, NodePort]) -> Survey:
    found = await survey(ports)
    for name, error in found.unreachable.items():
        raise error.retold(f"{name} can't be asked what it has: {error.reason}")
    return found


def _node_of(found: Survey, vbucket: VBucketId, row: Row, nodes: Sequence[str]) -> str | None:
    """Where a vbucket is active, or shall be.

    Clients go to the node that the map names. Where that one has it, any other that has it, too, was promoted by a
    failover which was cut short, and nobody has written to it.
    """
    named = row[0]
    for name in (named, *nodes):
        if name is not None and _is_active(found, vbucket, name):
            return name
    if named is not None and found.copy(named, vbucket) is not None:
        # It had everything until the very end of a takeover.
        return named
    return most_advanced([node for node in row if node is not None], found.copies_of(vbucket, nodes))


def _is_active(found: Survey, vbucket: int, name: str) -> bool:
    return found.state(name, VBucketId(vbucket)) == VBucketState.ACTIVE


def _exchanged(row: Row, target: str) -> Row:
    """The row with the target in front. The node that was active takes its place, or none if it had no place."""
    return (target, *(row[0] if node == target else node for node in row[1:]))
