"""A rebalance: from the current map to the planned one, some vbuckets at a time.

For each of these batches: missing copies are built; once they have caught up, active vbuckets are handed over; then the
new rows are in force, and the old copies are kept up to date until the new ones have what the active copy had at that
moment. Until then a failover may choose an old copy, so that a write which only the old copies have acknowledged is not
lost. At the end the config is settled, and nodes drop what is no longer theirs.

All state is in the published config, so a rebalance that is run again resumes where the last one ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headwater.cluster.nodes import (
    LOOK_S_MAX,
    Inventory,
    NodePort,
    Publisher,
    Topology,
    answered,
    rows_of,
    take_inventory,
    with_building,
    with_frozen,
    with_handing_over,
    with_nodes,
    with_rows,
)
from headwater.cluster.planning import Move, Row, fail_over, most_advanced, moves, plan
from headwater.errors import HeadwaterError, InvalidInput, Overtaken
from headwater.node.history import loss_sentence
from headwater.node.replication.proxy import Proxy
from headwater.node.service import ConfigVersion
from headwater.phrases import counted
from headwater.protocol.cluster_config import NO_NODE, PublishedConfig
from headwater.protocol.messages.dcp_streams import StreamEndReason, StreamFlags, VBucketState
from headwater.protocol.numbers import VBucketId

BATCH = 64
"""How many vbuckets are built at a time."""
TAKEOVERS_MAX = 8
"""How many vbuckets are handed over at a time. Their copies are not updated meanwhile, so it must not take long."""
_POLL_FIRST_S = 0.02
_POLL_MAX_S = 0.5
STALLED_S_MAX = 120.0
"""A copy that makes no progress for this long counts as stalled."""
TAKEOVER_S_MAX = 60.0
"""A takeover only has to send the last changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceProgress:
    """How far an operation has come."""

    phase: str
    done: int
    total: int


OnProgress = Callable[[RebalanceProgress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalanced:
    """What a rebalance has done."""

    handed_over: int
    built: int


class Rebalance:
    """One rebalance of one bucket."""

    def __init__(self, publisher: Publisher, port_of: Callable[[str], NodePort], report: OnProgress) -> None:
        self._publisher = publisher
        self._port_of = port_of
        self._report = report
        self._done = 0

    async def run(self, nodes: Sequence[str]) -> Rebalanced:
        """Move the vbuckets to these nodes, and remove the others from the cluster."""
        config = self._publisher.config
        before = rows_of(config)
        after = plan(before, nodes, replicas=config.replicas)
        todo = moves(before, after)
        self._report(RebalanceProgress(phase="moving vbuckets", done=0, total=len(todo)))
        takeovers = Takeovers(self._publisher, self._port_of)
        try:
            for batch in _batches(todo, BATCH):
                await self._build(batch)
                await self._activate_orphans(batch)
                for handed_over in _batches([move for move in batch if move.is_takeover], TAKEOVERS_MAX):
                    await takeovers.run(handed_over)
                await self._put_in_force(batch)
                self._done += len(batch)
                self._report(RebalanceProgress(phase="moving vbuckets", done=self._done, total=len(todo)))
        finally:
            takeovers.close()
        await self._settle(nodes)
        return Rebalanced(
            handed_over=sum(move.is_takeover for move in todo), built=sum(len(move.builds) for move in todo)
        )

    async def _build(self, batch: Sequence[Move]) -> None:
        building = {move.vbucket: move.builds for move in batch if move.source is not None}
        if any(building.values()) or self._publisher.config.settled:
            await self._publisher.publish(lambda config: replace(with_building(config, building), settled=False))
        await self._wait_for(
            [(move.vbucket, move.source, node) for move in batch for node in move.builds if move.source is not None]
        )

    async def _activate_orphans(self, batch: Sequence[Move]) -> None:
        """Begin vbuckets that no node has, empty."""
        for move in batch:
            if move.source is None and move.target is not None:
                await self._port_of(move.target).activate(
                    {move.vbucket: (list(move.after),)}, version=self._publisher.config.version
                )

    async def _put_in_force(self, batch: Sequence[Move]) -> None:
        others = [move for move in batch if not move.is_takeover]

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
        """Wait until each of these copies has what its active copy had at the first look."""
        left = dict.fromkeys(copies)
        if not left:
            return
        names = list(dict.fromkeys(name for _, active, node in copies for name in (active, node)))
        ports = {name: self._port_of(name) for name in names}
        goals: Inventory | None = None
        poll_s, stalled_s, seen = _POLL_FIRST_S, 0.0, ""
        while True:
            found = await take_inventory(ports)
            for name, error in found.unreachable.items():
                raise error.reworded(f"{name} can't be asked how far it is: {error.reason}")
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
                    f"{node} does not get vbucket {vbucket} from {active}", hint="Check the node's log"
                )
            # Otherwise copies that another command has ended would be waited for until they count as stalled.
            await self._publisher.check_not_overtaken()
            await asyncio.sleep(poll_s)
            poll_s = min(_POLL_MAX_S, 1.5 * poll_s)


def _has_reached(goals: Inventory, found: Inventory, vbucket: VBucketId, active: str, node: str) -> bool:
    goal, copy, newest = goals.copy(active, vbucket), found.copy(node, vbucket), found.copy(active, vbucket)
    if goal is None or copy is None or newest is None:
        return False
    return copy.branches[:1] == newest.branches[:1] and copy.seqno >= goal.seqno


def _batches(moves: Sequence[Move], size: int) -> list[Sequence[Move]]:
    return [moves[at : at + size] for at in range(0, len(moves), size)]


# --- takeovers ----------------------------------------------------------------------------------------------------


class Takeovers:
    """The takeovers of one rebalance: vbuckets become active on another node, with a new config after each of them.

    There is one proxy for each pair of nodes. An interrupted takeover leaves its vbucket marked in the config; then
    `resolve` asks all nodes which one has it.
    """

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
            raise joined_failures(failures, of=len(moves))

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


def joined_failures(failures: Mapping[VBucketId, BaseException], *, of: int) -> BaseException:
    """One error for failed takeovers, out of `of`: it names their vbuckets and everything that went wrong."""
    for failure in failures.values():
        if isinstance(failure, Overtaken) or not isinstance(failure, HeadwaterError):
            return failure  # an interrupt, a bug of our own, or the cause of all the others
    reasons = dict.fromkeys(failure.reason for failure in failures.values() if isinstance(failure, HeadwaterError))
    vbuckets = ", ".join(map(str, sorted(failures)))
    first = next(iter(failures.values()))
    assert isinstance(first, HeadwaterError)
    return first.reworded(f"{len(failures)} of {of} vbuckets were not handed over ({vbuckets}): {'; '.join(reasons)}")


def arrived(config: PublishedConfig, move: Move) -> PublishedConfig:
    """The config once a vbucket has its new row. Copies to drop stay up to date until the new ones are complete."""
    config = with_rows(with_handing_over(config, {move.vbucket: None}), {move.vbucket: move.after})
    return with_building(config, {move.vbucket: move.drops})


# --- what another command has left undone -------------------------------------------------------------------------


async def resolve(publisher: Publisher, ports: Mapping[str, NodePort]) -> None:
    """Finish what another command has left undone: takeovers, and vbuckets that are active nowhere.

    First freeze them. The other command may still be running, and could complete a takeover behind our back; once it is
    frozen, it can't. Only then does it make sense to check which node has the vbucket.
    """
    config = publisher.config
    found = await _inventory_of_all(ports)
    inactive = [
        number for number, row in enumerate(rows_of(config)) if row[0] and not _is_active(found, number, row[0])
    ]
    if not inactive and not config.handing_over:
        return
    await publisher.publish(lambda config: with_frozen(config, inactive))
    config, found = publisher.config, await _inventory_of_all(ports)
    rows = rows_of(config)
    changed: dict[VBucketId, Row] = {}
    activated: dict[str, dict[VBucketId, Row]] = {}
    for number in config.handing_over:
        vbucket = VBucketId(number)
        row, active = rows[vbucket], _node_of(found, vbucket, rows[vbucket], list(ports))
        if active is None:
            continue
        if active != row[0]:
            # The node that was active takes the new one's place in the row, if that had one.
            changed[vbucket] = row = (active, *(row[0] if node == active else node for node in row[1:]))
        if not _is_active(found, vbucket, active):
            activated.setdefault(active, {})[vbucket] = row
    for name, by_vbucket in activated.items():
        topologies: dict[VBucketId, Topology] = {vbucket: (list(row),) for vbucket, row in by_vbucket.items()}
        await ports[name].activate(topologies, version=config.version)
    await publisher.publish(lambda config: with_rows(replace(config, handing_over={}), changed))


async def _inventory_of_all(ports: Mapping[str, NodePort]) -> Inventory:
    found = await take_inventory(ports)
    for name, error in found.unreachable.items():
        raise error.reworded(f"{name} can't be asked what it has: {error.reason}")
    return found


def _node_of(found: Inventory, vbucket: VBucketId, row: Row, nodes: Sequence[str]) -> str | None:
    """The node where a vbucket is active, or should become active.

    Clients go to the node that the map names. If that one has it active, any other node with an active copy was
    promoted by an interrupted failover, and no client has written to it.
    """
    named = row[0]
    for name in (named, *nodes):
        if name is not None and _is_active(found, vbucket, name):
            return name
    if named is not None and found.copy(named, vbucket) is not None:
        # It had everything until the very end of a takeover.
        return named
    return most_advanced([node for node in row if node is not None], found.copies_of(vbucket, nodes))


def _is_active(found: Inventory, vbucket: int, name: str) -> bool:
    return found.state(name, VBucketId(vbucket)) == VBucketState.ACTIVE


# --- failover ------------------------------------------------------------------------------------------------------
# First the lost nodes are cut off: vbuckets that are active there are frozen, so that the others take nothing more from
# them. Otherwise a node that is not really lost could continue, and get its majority from a copy that is not the chosen
# one. Hand-overs of another command are frozen, too. Then the copies are compared and promoted, and the config without
# the lost nodes is published. Until then, clients still go to a node that does not answer. If the coordinator dies in
# between, run it again: it finds what it had promoted active.


_SHOWN = 10
_FIRST_LOOK_S_MAX = 2 * LOOK_S_MAX
"""For the copies of the nodes that stay, before anything is changed, because another one may hang as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedOver:
    """What a failover has done."""

    nodes: tuple[str, ...]
    promoted: int
    lost: tuple[VBucketId, ...]
    """Vbuckets of which no copy was left. They are empty now."""
    lost_changes: int
    """The number that is known from what the lost nodes last reported: a lower bound."""
    lost_vbuckets: int
    """How many vbuckets these changes were in."""
    unknown_vbuckets: int
    """Vbuckets for which it is unknown what the lost nodes had."""

    def losses(self) -> str:
        return loss_sentence(changes=self.lost_changes, vbuckets=self.lost_vbuckets, unknown=self.unknown_vbuckets)


async def fail_nodes_over(
    publisher: Publisher, port_of: Callable[[str], NodePort], lost: Sequence[str], *, force: bool
) -> FailedOver:
    """Continue without the lost nodes. With `force`, even if vbuckets are lost with them."""
    config = publisher.config
    left = [name for name in config.names() if name not in lost]
    if not left:
        raise InvalidInput("no node would be left", hint="Start one of the nodes again")
    ports = {name: port_of(name) for name in left}
    found = await take_inventory(ports, within_s=_FIRST_LOOK_S_MAX)
    for name, error in found.unreachable.items():
        raise HeadwaterError(
            f"{name} can't be reached either: {error.reason}", hint="Start it again, or fail it over as well"
        )
    orphans = _orphans(_rows_without(config, lost, found))
    if orphans and not force:
        raise InvalidInput(
            f"{counted(len(orphans), 'vbucket')} would be lost, because no other node has them ({_some(orphans)})",
            hint="Start the node again, or give --force to continue without them",
        )
    publisher.may_miss(frozenset(lost))
    await _cut_off(publisher, lost)
    found = await take_inventory(ports)
    rows = _rows_without(publisher.config, lost, found)
    orphans = _orphans(rows)
    for at, vbucket in enumerate(orphans):
        rows[vbucket] = (left[at % len(left)], *(None,) * config.replicas)
    for name in left:
        # A damaged copy does not count, and would stay stopped if it became active.
        await port_of(name).remove_damaged(vbucket for vbucket in orphans if rows[vbucket][0] == name)
    promoted = await _promote(port_of, rows, found, publisher.config.version)
    kept = [node for node in config.nodes if node.kv_address in left]

    def without(config: PublishedConfig) -> PublishedConfig:
        return with_rows(replace(with_nodes(config, kept), handing_over={}, settled=False), rows)

    await publisher.publish(without)
    losses = await _losses(ports, promoted)
    return FailedOver(
        nodes=tuple(lost),
        promoted=sum(map(len, promoted.values())) - len(orphans),
        lost=orphans,
        lost_changes=sum(loss or 0 for loss in losses),
        lost_vbuckets=sum(bool(loss) for loss in losses),
        unknown_vbuckets=losses.count(None),
    )


async def _losses(ports: Mapping[str, NodePort], promoted: Mapping[str, Collection[VBucketId]]) -> list[int | None]:
    """How many changes each promoted vbucket has lost, as far as its node knows.

    The failover is done. If a node can't report this any more, only the loss is unknown.
    """
    losses: list[int | None] = []
    for name, vbuckets in promoted.items():
        try:
            known = await answered(ports[name].losses, LOOK_S_MAX)
        except HeadwaterError:
            known = {}
        losses += [known.get(vbucket) for vbucket in vbuckets]
    return losses


async def _cut_off(publisher: Publisher, lost: Sequence[str]) -> None:
    """Freeze what is active on the lost nodes, and all takeovers, until it is decided which nodes have the vbuckets."""
    config = publisher.config
    names = config.names()
    frozen = [
        number
        for number, row in enumerate(config.rows)
        if row[0] != NO_NODE
        and names[row[0]] in lost
        and any(names[node] not in lost for node in config.holders(number))
    ]
    if frozen or config.handing_over:
        await publisher.publish(lambda config: with_frozen(config, frozen))


def _rows_without(config: PublishedConfig, lost: Sequence[str], found: Inventory) -> dict[VBucketId, Row]:
    names = config.names()
    rows: list[Row] = []
    copies = {}
    for number, row in enumerate(rows_of(config)):
        vbucket = VBucketId(number)
        holders = [names[node] for node in config.holders(number) if names[node] not in lost]
        copies[vbucket] = found.copies_of(vbucket, holders)
        if number in config.handing_over:
            # If it was being handed over or promoted, it belongs where it is active, else to its newest copy.
            nodes = [name for name in (row[0], *holders) if name is not None]
            active = next((name for name in nodes if found.state(name, vbucket) == VBucketState.ACTIVE), None)
            row = (active, *row[1:])
        rows.append(row)
    return {VBucketId(vbucket): row for vbucket, row in enumerate(fail_over(tuple(rows), lost, copies))}


async def _promote(
    port_of: Callable[[str], NodePort], rows: Mapping[VBucketId, Row], found: Inventory, version: ConfigVersion
) -> dict[str, dict[VBucketId, Row]]:
    """Make the first node of every row active. Returns the vbuckets that were not active before, by node."""
    by_node: dict[str, dict[VBucketId, Row]] = {}
    for vbucket, row in rows.items():
        if row[0] is not None and found.state(row[0], vbucket) != VBucketState.ACTIVE:
            by_node.setdefault(row[0], {})[vbucket] = row
    for name, promoted in by_node.items():
        await port_of(name).activate({vbucket: (list(row),) for vbucket, row in promoted.items()}, version=version)
    return by_node


def _orphans(rows: Mapping[VBucketId, Row]) -> tuple[VBucketId, ...]:
    return tuple(vbucket for vbucket, row in rows.items() if row[0] is None)


def _some(vbuckets: Sequence[VBucketId]) -> str:
    shown = ", ".join(str(vbucket) for vbucket in vbuckets[:_SHOWN])
    return shown if len(vbuckets) <= _SHOWN else f"{shown}, …"
