"""What nodes make of each other's users: all end with the same, and one that joins takes those of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from headwater.node.auth.accounts import Accounts, UserSharing, merged
from headwater.node.auth.users import SALTS_BYTES, Grant, Group, Role, User, Users
from headwater.sim.network import SimulatedDisk, SimulatedFolder

CLUSTER, OTHER = "a" * 32, "b" * 32
EMPTY = Users(decoy_secret=bytes(32), iterations=4096)
ANN = EMPTY.new_user("ann", "pencil", [Grant(Role.ADMIN)], salts=bytes(SALTS_BYTES))
BASE = EMPTY.put(ANN)


class SharingNode:
    """A node with users and a clock of its own."""

    def __init__(self, users: Users = BASE, *, ms: int = 1_000) -> None:
        self.ms = ms
        folder = SimulatedFolder(SimulatedDisk(Random(0), users))
        self.accounts = Accounts(folder, random_bytes=Random(1).randbytes, now_ns=lambda: self.ms * 1_000_000)
        self.accounts.load(None, None)
        self.sharing = UserSharing(self.accounts, random_bytes=Random(ms).randbytes)

    @property
    def users(self) -> Users:
        return self.accounts.stored

    async def change(self, change: Callable[[Users], Users]) -> None:
        await self.accounts.change(change)

    async def ask(self, other: SharingNode, cluster: str = CLUSTER) -> None:
        await self.sharing.take(cluster, dict(other.sharing.pieces(cluster)))


def named(name: str, **changes: object) -> User:
    return replace(ANN, name=name, **changes)  # type: ignore[arg-type]


async def cluster_of(*nodes: SharingNode) -> None:
    await nodes[0].sharing.begin(CLUSTER)
    for node in nodes[1:]:
        await node.ask(nodes[0])


async def test_one_that_joins_gives_up_its_users_for_those_of_the_cluster() -> None:
    first, joining = SharingNode(), SharingNode(BASE.put(named("own", changed_ms=10**9)))
    await joining.ask(first)
    assert "own" in joining.users.by_name, "no node shares users yet"
    await cluster_of(first, joining)
    assert joining.users == first.users
    assert joining.sharing.digest(CLUSTER) == first.sharing.digest(CLUSTER) != ""
    # A second bucket of the same nodes is a cluster of its own, and changes no user.
    await joining.change(lambda users: users.put(named("kim")))
    await first.sharing.begin(OTHER)
    await joining.ask(first, OTHER)
    assert joining.users.by_name.keys() == {"ann", "kim"}
    # One that was left out and is added again gives up what it has changed on its own.
    await joining.sharing.leave(CLUSTER)
    assert joining.sharing.digest(CLUSTER) == ""


async def test_a_node_in_two_clusters_stays_with_the_users_that_it_has() -> None:
    first, node, other = SharingNode(ms=1), SharingNode(), SharingNode(ms=2)
    await cluster_of(first, node)
    await other.sharing.begin(OTHER)
    await other.change(lambda users: users.put(named("kim")))
    await node.ask(other, OTHER)
    taken = node.users
    assert "kim" in taken.by_name
    await node.ask(first)
    assert node.users == taken


async def test_the_later_change_counts_whatever_the_clocks_say() -> None:
    ahead, behind = SharingNode(ms=9_000), SharingNode(ms=1_000)
    await cluster_of(ahead, behind)
    await ahead.change(lambda users: users.put(named("kim", display_name="first")).put_group(Group(name="lake")))
    await behind.ask(ahead)
    await behind.change(lambda users: users.put(named("kim", display_name="second")).remove_group("lake"))
    await ahead.ask(behind)
    assert ahead.users == behind.users
    assert ahead.users.by_name["kim"].display_name == "second"
    assert ahead.users.groups == {}
    await behind.change(lambda users: users.remove("kim"))
    await behind.ask(ahead)
    assert "kim" not in behind.users.by_name, "one that was away must not bring a removed user back"


@pytest.mark.parametrize("seed", range(20))
async def test_all_end_with_the_same_in_whatever_order_they_hear(seed: int) -> None:
    random = Random(seed)
    nodes = [SharingNode(ms=random.randrange(5)) for _ in range(3)]
    await cluster_of(*nodes)
    for _ in range(12):
        node, name = random.choice(nodes), random.choice("klm")
        if random.random() < 0.3 and name in node.users.by_name:
            await node.change(lambda users, name=name: users.remove(name))
        else:
            await node.change(lambda users, name=name: users.put(named(name, display_name=str(random.random()))))
        if random.random() < 0.5:
            await random.choice(nodes).ask(random.choice(nodes))
    for _ in range(2):
        for node in nodes:
            for other in nodes:
                await node.ask(other)
    assert nodes[0].users == nodes[1].users == nodes[2].users


def test_two_admins_that_remove_each_other_leave_the_users_as_they_are() -> None:
    ours = BASE.remove("ann").put(named("bob")).stamped(BASE.put(named("bob")), now_ms=5)
    theirs = BASE.stamped(BASE.put(named("bob")), now_ms=5)
    assert merged(ours, theirs) == ours
