"""The users of a running node: how they begin, what a change does, and what one that fails does not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from headwater.errors import LocalProtocolError
from headwater.node.auth.accounts import ADMIN, Accounts, UserSharing, merged
from headwater.node.auth.users import SALTS_BYTES, Grant, Group, Role, User, Users
from headwater.node.node_folder import NodeFolder
from headwater.protocol.sasl import Credentials
from headwater.sim.network import SimulatedDisk, SimulatedFolder
from support.cases import case_apart


def accounts_in(folder: Path) -> Accounts:
    return Accounts(NodeFolder(folder), random_bytes=os.urandom)


def with_user(users: Users, name: str, *grants: Grant) -> Users:
    return users.add(users.new_user(name, "a password", grants, salts=bytes(SALTS_BYTES)))


def test_the_first_user_has_a_password_that_was_made(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    generated = accounts.load(None, None)
    assert generated is not None
    assert not list(tmp_path.iterdir())
    accounts.store(generated)
    assert (tmp_path / "password").read_text() == generated + "\n"
    again = accounts_in(tmp_path)
    assert again.load(None, None) is None
    assert again.in_force.check_password(ADMIN, generated)
    assert again.in_force.has_admin


@pytest.mark.parametrize("first_only", [False, True])
def test_one_that_is_named_is_an_admin_and_keeps_nothing_but_its_name(tmp_path: Path, first_only: bool) -> None:
    accounts = accounts_in(tmp_path)
    assert accounts.load("ann", "pencil", first_only=first_only) is None
    assert accounts.in_force.by_name.keys() == {"ann"}
    assert accounts.in_force.is_admin("ann")
    assert accounts.in_force.check_password("ann", "pencil")
    accounts.store(None)
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "crayon")
    assert accounts.in_force.check_password("ann", "crayon")
    assert accounts.in_force.is_admin("ann")


@case_apart("rob", "violets", "rob, who has another password on this node: nothing is changed")
@case_apart("sid", "whatever", "sid, who is no user of this node: nothing is changed")
@case_apart("rob", "a password", None)
@case_apart("ann", "pencil", None)
def test_the_environment_changes_no_user(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, password: str, told: str | None
) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    asyncio.run(accounts.change(lambda users: with_user(users, "rob", Grant(Role.DATA_DCP_READER, "travel"))))
    before = accounts.in_force
    again = accounts_in(tmp_path)
    again.load(name, password, first_only=True)
    assert again.in_force == before
    assert password not in caplog.text
    assert [told in message for message in caplog.messages] == ([True] if told else [])


def test_a_start_that_changes_nothing_writes_nothing(tmp_path: Path) -> None:
    """So a node starts on a full disk as well."""
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    accounts.store(None)
    written = (tmp_path / "users.json").stat().st_ino
    again = accounts_in(tmp_path)
    again.load("ann", "pencil")
    again.store(None)
    assert (tmp_path / "users.json").stat().st_ino == written


async def test_what_the_options_change_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    await accounts.change(lambda users: with_user(users, "rob", Grant(Role.DATA_DCP_READER, "travel")))
    again = accounts_in(tmp_path)
    again.load("ann", "pencil")
    assert not caplog.messages
    again.load("ann", "crayon")
    again.load("rob", "a password")
    accounts_in(tmp_path).load("rob", "another")
    assert [message.partition(", ")[2] for message in caplog.messages] == [
        "user ann has a new password",
        "user rob is an admin now",
        "user rob is an admin now and has a new password",
    ]


async def test_a_change_is_on_disk_before_it_is_in_force(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    seen: list[tuple[set[str], set[str]]] = []

    def look(users: Users) -> None:
        stored = NodeFolder(tmp_path).load_users()
        seen.append((set(users.by_name), set(stored.by_name)))

    accounts.on_change = look
    await accounts.change(lambda users: with_user(users, "bob"))
    assert seen == [({"ann", "bob"}, {"ann", "bob"})]


async def test_changes_at_once_are_all_made(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    names = [f"u{number}" for number in range(8)]
    await asyncio.gather(*(accounts.change(lambda users, name=name: with_user(users, name)) for name in names))
    assert len(accounts.in_force.by_name) == 9
    assert NodeFolder(tmp_path).load_users() == accounts.in_force


async def test_a_change_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    accounts.store(None)
    before = accounts.in_force
    for change in (lambda users: users.remove("ann"), lambda users: users.remove("nobody")):
        with pytest.raises(LocalProtocolError):
            await accounts.change(change)
    assert accounts.in_force is before
    assert NodeFolder(tmp_path).load_users() == before


async def test_the_password_that_was_made_is_forgotten_with_its_use(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.store(accounts.load(None, None))
    await accounts.change(lambda users: with_user(users, "ann", Grant(Role.ADMIN)))
    assert (tmp_path / "password").exists()
    await accounts.change(lambda users: users.remove(ADMIN))
    assert not (tmp_path / "password").exists()


async def test_other_nodes_are_let_in_and_never_stored(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    for secret in ("one secret", "another secret"):
        accounts.let_nodes_in("beer", Credentials("@cluster-beer", secret))
    await accounts.change(lambda users: with_user(users, "bob"))
    assert accounts.in_force.check_password("@cluster-beer", "another secret")
    assert accounts.is_node("@cluster-beer")
    assert not accounts.is_node("bob")
    stored = NodeFolder(tmp_path).load_users()
    assert stored.by_name.keys() == {"ann", "bob"}
    accounts.let_nodes_in("beer", None)
    assert "@cluster-beer" not in accounts.in_force.by_name


# --- what nodes make of each other's users: all end with the same, and one that joins takes those of the cluster ----


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
    return replace(ANN, name=name, **changes)


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
