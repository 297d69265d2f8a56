"""Plan where the copies of a bucket's vbuckets belong. Pure: maps in, maps out, and no node is asked.

The coordinator, a rebalance and a failover plan with it.

A map has a row for every vbucket: the active node, then the replicas; None is no node. Nodes are identified by their
names, because indices change whenever a node joins or leaves.

A plan keeps three promises. No node has two copies of a vbucket. Every node has as many active vbuckets as any other,
or one more, and the same holds for replicas. And copies stay where they may: a rebalance spends its time on building
copies, so an active vbucket preferably moves to a node that has a replica of it.

Active nodes are assigned by quotas. Replicas are a matching of vbuckets to nodes, in which every node has a quota and
none may have a vbucket twice. A vbucket that finds no node with room gets one by a chain of other vbuckets that give
way (an augmenting path), so that a plan within the quotas is found whenever there is one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headwater.errors import InvalidInput
from headwater.protocol.numbers import Seqno, VBucketId

REPLICAS_MAX = 3

Row = tuple[str | None, ...]
"""The copies of a vbucket: the active node, then the replicas."""
VBucketMap = tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """How far a copy of a vbucket has come."""

    seqno: Seqno
    branches: tuple[int, ...] = ()
    """The branches of history that it knows, newest first, as in its failover log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What has to happen to one vbucket."""

    vbucket: VBucketId
    source: str | None
    """The node that is active now."""
    before: Row
    after: Row

    @property
    def target(self) -> str | None:
        """The node that will be active."""
        return self.after[0]

    @property
    def builds(self) -> tuple[str, ...]:
        """The nodes that have no copy yet and will get one."""
        return tuple(node for node in self.after if node is not None and node not in self.before)

    @property
    def drops(self) -> tuple[str, ...]:
        return tuple(node for node in self.before if node is not None and node not in self.after)

    @property
    def is_takeover(self) -> bool:
        """Whether another node becomes active, and takes the vbucket over from the current one."""
        return self.source not in (None, self.target)


def empty_map(vbuckets: int, replicas: int) -> VBucketMap:
    return ((None,) * (replicas + 1),) * vbuckets


def plan(before: VBucketMap, nodes: Sequence[str], *, replicas: int) -> VBucketMap:
    """The map for these nodes that is closest to `before`."""
    if not nodes:
        raise InvalidInput("a cluster has at least one node", hint="Name a node that stays")
    if not 0 <= replicas <= REPLICAS_MAX:
        raise InvalidInput(f"{replicas} replicas", hint=f"Give a number from 0 to {REPLICAS_MAX}")
    actives = _plan_actives(before, nodes)
    copies = min(replicas, len(nodes) - 1)
    chosen = _Replicas(before, nodes, actives, copies).plan()

    def in_old_order(vbucket: int) -> list[str]:
        row = before[vbucket]
        return sorted(chosen[vbucket], key=lambda node: row.index(node) if node in row else len(row))

    return tuple(
        (active, *in_old_order(vbucket), *(None,) * (replicas - copies)) for vbucket, active in enumerate(actives)
    )


def moves(before: VBucketMap, after: VBucketMap) -> list[Move]:
    """The moves from one map to the other; none for vbuckets that stay as they are."""
    pairs = zip(before, after, strict=True)
    return [
        Move(vbucket=VBucketId(vbucket), source=old[0] if old else None, before=old, after=new)
        for vbucket, (old, new) in enumerate(pairs)
        if old != new
    ]


def fail_over(before: VBucketMap, lost: Sequence[str], copies: Mapping[VBucketId, Mapping[str, Copy]]) -> VBucketMap:
    """The map without these nodes: for each vbucket that was active there, promote the most advanced copy.

    `copies` are those that are left, including those that are still being built: if one of them is ahead, it has what
    was last acknowledged. A vbucket of which no copy is left has no active node.
    """
    rows: list[Row] = []
    for vbucket, row in enumerate(before):
        left = [node for node in row if node is not None and node not in lost]
        active = row[0] if row[0] in left else most_advanced(left, copies.get(VBucketId(vbucket), {}))
        others = [node for node in left if node != active]
        rows.append((active, *others, *(None,) * len(row))[: len(row)])
    return tuple(rows)


def most_advanced(first: Sequence[str], copies: Mapping[str, Copy]) -> str | None:
    """The copy to promote; among equals, one of the `first`.

    Seqnos compare only on the same branch of history: a copy that was away may have a higher one on a branch that the
    others have left since. A copy that knows the newest branch of another copy is not behind it.
    """
    candidates = [node for node in first if node in copies] + [node for node in copies if node not in first]

    def advance(node: str) -> tuple[int, int]:
        copy = copies[node]
        known = sum(not other.branches or other.branches[0] in copy.branches for other in copies.values())
        return known, copy.seqno

    return max(candidates, key=advance, default=None)


def _quotas(total: int, nodes: Sequence[str], order: Sequence[str]) -> dict[str, int]:
    """An equal share for every node, and one more for the first ones in `order` until the total is reached."""
    share, more = divmod(total, len(nodes))
    quotas = dict.fromkeys(nodes, share)
    for node in order[:more]:
        quotas[node] += 1
    return quotas


# --- active nodes -------------------------------------------------------------------------------------------------


def _plan_actives(before: VBucketMap, nodes: Sequence[str]) -> list[str]:
    had = Counter(row[0] for row in before)
    room = _quotas(len(before), nodes, sorted(nodes, key=lambda node: -had[node]))
    actives: list[str | None] = [None] * len(before)

    def could_be_promoted_elsewhere(vbucket: int) -> bool:
        return any(node is not None and had[node] < room.get(node, 0) for node in before[vbucket][1:])

    # If a node has too many, it keeps those that could only go to a node without a copy of them.
    for vbucket in sorted(range(len(before)), key=could_be_promoted_elsewhere):
        node = before[vbucket][0]
        if node is not None and room.get(node, 0) > 0:
            actives[vbucket] = node
            room[node] -= 1
    for use_replicas in (True, False):
        for vbucket, row in enumerate(before):
            if actives[vbucket] is not None:
                continue
            choices = [node for node in nodes if room[node] > 0 and (not use_replicas or node in row)]
            if choices:
                node = max(choices, key=lambda node: room[node])
                actives[vbucket] = node
                room[node] -= 1
    return [node for node in actives if node is not None]


# --- replicas -----------------------------------------------------------------------------------------------------


class _Replicas:
    """The matching of vbuckets to the nodes of their replicas."""

    def __init__(self, before: VBucketMap, nodes: Sequence[str], actives: list[str], copies: int) -> None:
        self._before = before
        self._nodes = nodes
        self._actives = actives
        self._copies = copies
        self._chosen: list[list[str]] = [[] for _ in before]
        counts = Counter(actives)
        # Nodes with fewer active vbuckets can have more replicas; if there are as many copies as nodes, they must.
        self._room = _quotas(len(before) * copies, nodes, sorted(nodes, key=lambda node: counts[node]))
        self._holders: dict[str, list[int]] = {node: [] for node in nodes}
        self._pairs: dict[tuple[str, str], int] = {(one, other): 0 for one in nodes for other in nodes}
        """How many vbuckets are active on the first node and have a replica on the second."""

    def plan(self) -> list[list[str]]:
        for vbucket, row in enumerate(self._before):
            # The old active node comes last: its copy can become a replica, but the old replicas need no new role.
            for node in (*row[1:], *row[:1]):
                if node is not None and self._may_take(vbucket, node) and self._room[node] > 0:
                    self._give(vbucket, node)
        for vbucket in range(len(self._before)):
            while len(self._chosen[vbucket]) < self._copies:
                self._add_copy(vbucket)
        return self._chosen

    def _may_take(self, vbucket: int, node: str) -> bool:
        return (
            node in self._room
            and node != self._actives[vbucket]
            and node not in self._chosen[vbucket]
            and len(self._chosen[vbucket]) < self._copies
        )

    def _give(self, vbucket: int, node: str) -> None:
        self._chosen[vbucket].append(node)
        self._holders[node].append(vbucket)
        self._room[node] -= 1
        self._pairs[self._actives[vbucket], node] += 1

    def _take_away(self, vbucket: int, node: str) -> None:
        self._chosen[vbucket].remove(node)
        self._holders[node].remove(vbucket)
        self._room[node] += 1
        self._pairs[self._actives[vbucket], node] -= 1

    def _add_copy(self, vbucket: int) -> None:
        """Give a vbucket one more node, by the shortest chain of vbuckets that give way."""
        allowed = [node for node in self._nodes if self._may_take(vbucket, node)]
        chain: dict[str, tuple[str, int] | None] = dict.fromkeys(allowed)
        # Try nodes with the fewest replicas of this active node first: after its failover, the others share its load.
        active = self._actives[vbucket]
        queue = deque(sorted(allowed, key=lambda node: (self._pairs[active, node], -self._room[node])))
        while queue:
            node = queue.popleft()
            if self._room[node] > 0:
                self._shift(vbucket, node, chain)
                return
            for other in self._nodes:
                if other in chain:
                    continue
                gives_way = next(
                    (
                        held
                        for held in self._holders[node]
                        if other != self._actives[held] and other not in self._chosen[held]
                    ),
                    None,
                )
                if gives_way is not None:
                    chain[other] = (node, gives_way)
                    queue.append(other)
        # The quotas can't be met, because no node may have a vbucket twice. This node goes one above its quota.
        self._give(vbucket, max(allowed, key=lambda node: self._room[node]))

    def _shift(self, vbucket: int, node: str, chain: dict[str, tuple[str, int] | None]) -> None:
        link = chain[node]
        while link is not None:
            before, gives_way = link
            self._take_away(gives_way, before)
            self._give(gives_way, node)
            node, link = before, chain[before]
        self._give(vbucket, node)
