"""A rebalance: from the map there is to the one that is planned, some vbuckets at a time.

For each of these batches: the copies that are missing are built; once they have caught up, active vbuckets are handed
over; then the new rows are in force, and the old copies are kept up to date until the new ones have what the active one
had at that moment. Until then a failover may choose an old copy, so that a write which only the old copies have
acknowledged is not lost. In the end the config is settled, and nodes drop what is no longer theirs.

All that is known is in the published config, so whoever runs a rebalance again goes on where the last one ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from headwater.cluster.config_changes import rows_of, with_building, with_nodes
from headwater.cluster.handing_over import Takeovers, arrived
from headwater.cluster.kv_port import NodePort
from headwater.cluster.planning import Move, moves, plan
from headwater.cluster.publisher import Publisher
from headwater.cluster.survey import Survey, survey
from headwater.errors import HeadwaterError
from headwater.node.published_config import PublishedConfig
from headwater.protocol.numbers import VBucketId

BATCH = 64
"""Vbuckets that are built at a time."""
TAKEOVERS_MAX = 8
"""Vbuckets that are handed over at a time. Their copies stand still meanwhile, so it must not take long."""
_POLL_FIRST_S = 0.02
_POLL_MAX_S = 0.5
STALLED_S_MAX = 120.0
"""A copy that makes no progress for so long will not make any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far an operation has come."""

    phase: str
    done: int
    total: int


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalanced:
    """What a rebalance has done."""

    handed_over: int
    built: int


class Rebalance:
    """One rebalance of one bucket."""

    def __init__(self, publisher: Publisher, port_of: Callable[[str], NodePort], report: Report) -> None:
        self._publisher = publisher
        self._port_of = port_of
        self._report = report
        self._done = 0

    async def run(self, nodes: Sequence[str]) -> Rebalanced:
        """Bring the vbuckets to these nodes, and leave the others out of the cluster."""
        config = self._publisher.config
        before = rows_of(config)
        after = plan(before, nodes, replicas=config.replicas)
        todo = moves(before, after)
        self._report(Progress(phase="moving vbuckets", done=0, total=len(todo)))
        takeovers = Takeovers(self._publisher, self._port_of)
        try:
            for batch in _batches(todo, BATCH):
                await self._build(batch)
                await self._activate_orphans(batch)
                for handed_over in _batches([move for move in batch if _is_handed_over(move)], TAKEOVERS_MAX):
                    await takeovers.run(handed_over)
                await self._put_in_force(batch)
                self._done += len(batch)
                self._report(Progress(phase="moving vbuckets", done=self._done, total=len(todo)))
        finally:
            takeovers.close()
        await self._settle(nodes)
        return Rebalanced(
            handed_over=sum(_is_handed_over(move) for move in todo), built=sum(len(move.builds) for move in todo)
        )

    async def _build(self, batch: Sequence[Move]) -> None:
        building = {move.vbucket: move.builds for move in batch if move.source is not None}
        if any(building.values()) or self._publisher.config.settled:
            await self._publisher.publish(lambda config: replace(with_building(config, building), settled=False))
        await self._wait_for(
            [(move.vbucket, move.source, node) for move in batch for node in move.builds if move.source is not None]
        )

    async def _activate_orphans(self, batch: Sequence[Move]) -> None:
        """Vbuckets that nobody has begin empty."""
        for move in batch:
            if move.source is None and move.target is not None:
                await self._port_of(move.target).activate(
                    {move.vbucket: (list(move.after),)}, version=self._publisher.config.version
                )

    async def _put_in_force(self, batch: Sequence[Move]) -> None:
        others = [move for move in batch if not _is_handed_over(move)]

        def all_arrived(config: PublishedConfig) -> PublishedConfig:
            for move in others:
                config = arrived(config, move)
            return config

        if others:
            await self._publisher.publish(all_arrived)
        copies = [
            (move.vbucket, move.target, node)
            for move in batch
            for node in move.after[1:]
            if node is not None and move.target is not None
        ]
        await self._wait_for(copies)
        dropped: dict[VBucketId, Iterable[str]] = {move.vbucket: () for move in batch if move.drops}
        if dropped:
            await self._publisher.publish(lambda config: with_building(config, dropped))

    async def _settle(self, nodes: Sequence[str]) -> None:
        def settled(config: PublishedConfig) -> PublishedConfig:
            kept = [node for node in config.nodes if node.kv_address in nodes]
            return replace(with_nodes(config, kept), building={}, handing_over={}, settled=True)

        config = self._publisher.config
        if settled(config) != config:
            await self._publisher.publish(settled)

    async def _wait_for(self, copies: Sequence[tuple[VBucketId, str, str]]) -> None:
        """Until each of these copies has what its active one had when it was first looked at."""
        left = dict.fromkeys(copies)
        if not left:
            return
        names = list(dict.fromkeys(name for _, active, node in copies for name in (active, node)))
        ports = {name: self._port_of(name) for name in names}
        goals: Survey | None = None
        poll_s, stalled_s, seen = _POLL_FIRST_S, 0.0, ""
        while True:
            found = await survey(ports)
            for name, error in found.unreachable.items():
                raise error.retold(f"{name} can't be asked how far it is: {error.reason}")
            goals = goals or found
            left = {one: None for one in left if not _has_reached(goals, found, *one)}
            if not left:
                return
            now_seen = repr([found.copy(node, vbucket) for vbucket, _, node in left])
            stalled_s = 0.0 if now_seen != seen else stalled_s + poll_s
            seen = now_seen
            if stalled_s > STALLED_S_MAX:
                vbucket, active, node = next(iter(left))
                raise HeadwaterError(
                    f"{node} does not get vbucket {vbucket} from {active}", hint="Look at the node's log"
                )
            # Copies that another command has put an end to would be waited for until they count as stalled.
            await self._publisher.check_not_overtaken()
            await asyncio.sleep(poll_s)
            poll_s = min(_POLL_MAX_S, 1.5 * poll_s)


def _has_reached(goals: Survey, found: Survey, vbucket: VBucketId, active: str, node: str) -> bool:
    goal, copy, newest = goals.copy(active, vbucket), found.copy(node, vbucket), found.copy(active, vbucket)
    if goal is None or copy is None or newest is None:
        return False
    return copy.branches[:1] == newest.branches[:1] and copy.seqno >= goal.seqno


def _is_handed_over(move: Move) -> bool:
    return move.hands_over and move.source is not None


def _batches(moves: Sequence[Move], size: int) -> Iterator[Sequence[Move]]:
    for at in range(0, len(moves), size):
        yield moves[at : at + size]
