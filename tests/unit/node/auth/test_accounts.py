"""The users of a running node: how they begin, what a change does, and what one that fails does not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from headwater.errors import LocalProtocolError
from headwater.node.auth.accounts import ADMIN, Accounts
from headwater.node.auth.users import SALTS_BYTES, Grant, Role, Users
from headwater.node.node_folder import NodeFolder
from headwater.protocol.sasl import Credentials
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
