"""The users of a running node: how they begin, what a change does, and what one that fails does not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from headwater.errors import LocalProtocolError
from headwater.node.auth.accounts import (
    ADMIN,
    DELAYS_S,
    FREE_FAILURES,
    MEMORY_S,
    RECORDS_MAX,
    WINDOW_S,
    Accounts,
    LoginThrottle,
)
from headwater.node.auth.users import SALTS_BYTES, Grant, Role, Users
from headwater.node.node_folder import NodeFolder


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


def test_one_that_is_named_is_an_admin_and_keeps_nothing_but_its_name(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    assert accounts.load("ann", "pencil") is None
    assert accounts.in_force.by_name.keys() == {"ann"}
    accounts.store(None)
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "crayon")
    assert accounts.in_force.check_password("ann", "crayon")
    assert accounts.in_force.by_name["ann"].is_admin


def test_the_environment_names_the_first_user(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    assert accounts.load("ann", "pencil", first_only=True) is None
    assert accounts.in_force.by_name["ann"].is_admin
    assert accounts.in_force.check_password("ann", "pencil")


@pytest.mark.parametrize(
    ("name", "password", "told"),
    [
        ("rob", "violets", "rob, who has another password on this node: nothing is changed"),
        ("sid", "whatever", "sid, who is no user of this node: nothing is changed"),
        ("rob", "a password", None),
        ("ann", "pencil", None),
    ],
)
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


def test_what_the_options_change_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    asyncio.run(accounts.change(lambda users: with_user(users, "rob", Grant(Role.DATA_DCP_READER, "travel"))))
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


def test_a_change_is_on_disk_before_it_is_in_force(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    seen: list[tuple[set[str], set[str]]] = []

    def look(users: Users) -> None:
        stored = NodeFolder(tmp_path).load_users()
        assert stored is not None
        seen.append((set(users.by_name), set(stored.by_name)))

    accounts.on_change = look
    asyncio.run(accounts.change(lambda users: with_user(users, "bob")))
    assert seen == [({"ann", "bob"}, {"ann", "bob"})]


def test_changes_at_once_are_all_made(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")

    async def scenario() -> None:
        names = [f"u{number}" for number in range(8)]
        await asyncio.gather(*(accounts.change(lambda users, name=name: with_user(users, name)) for name in names))

    asyncio.run(scenario())
    assert len(accounts.in_force.by_name) == 9
    assert NodeFolder(tmp_path).load_users() == accounts.in_force


def test_a_change_that_fails_leaves_everything_as_it_was(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    accounts.store(None)
    before = accounts.in_force
    for change in (lambda users: users.remove("ann"), lambda users: users.remove("nobody")):
        with pytest.raises(LocalProtocolError):
            asyncio.run(accounts.change(change))
    assert accounts.in_force is before
    assert NodeFolder(tmp_path).load_users() == before


def test_the_password_that_was_made_is_forgotten_with_its_use(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.store(accounts.load(None, None))
    asyncio.run(accounts.change(lambda users: with_user(users, "ann", Grant(Role.ADMIN))))
    assert (tmp_path / "password").exists()
    asyncio.run(accounts.change(lambda users: users.remove(ADMIN)))
    assert not (tmp_path / "password").exists()


def test_other_nodes_are_let_in_and_never_stored(tmp_path: Path) -> None:
    accounts = accounts_in(tmp_path)
    accounts.load("ann", "pencil")
    accounts.let_in("@cluster-beer", "one secret", bucket="beer")
    accounts.let_in("@cluster-beer", "another secret", bucket="beer")
    asyncio.run(accounts.change(lambda users: with_user(users, "bob")))
    assert accounts.in_force.check_password("@cluster-beer", "another secret")
    assert accounts.is_node("@cluster-beer")
    assert not accounts.is_node("bob")
    stored = NodeFolder(tmp_path).load_users()
    assert stored is not None
    assert stored.by_name.keys() == {"ann", "bob"}


# The throttle: free failures, growing delays, forgetting, and bounded memory.


PEER, USER = "192.0.2.1", "ann"


def after(failures: int, *, now_s: float = 0.0) -> LoginThrottle:
    throttle = LoginThrottle()
    for _ in range(failures):
        throttle.failed(PEER, USER, now_s=now_s)
    return throttle


def test_a_peer_nobody_knows_need_not_wait() -> None:
    assert LoginThrottle().wait_s(PEER, USER, now_s=0.0) == 0.0


def test_a_few_failures_are_free() -> None:
    for failures in range(FREE_FAILURES):
        assert after(failures).wait_s(PEER, USER, now_s=0.0) == 0.0


def test_from_then_on_each_failure_costs_more_up_to_the_bound() -> None:
    throttle, now_s = after(FREE_FAILURES - 1), 0.0
    for delay_s in (*DELAYS_S, DELAYS_S[-1], DELAYS_S[-1]):
        throttle.failed(PEER, USER, now_s=now_s)
        assert throttle.wait_s(PEER, USER, now_s=now_s) == delay_s
        assert throttle.wait_s(PEER, USER, now_s=now_s + delay_s - 0.25) == 0.25
        now_s += delay_s
        assert throttle.wait_s(PEER, USER, now_s=now_s) == 0.0


def test_delays_grow() -> None:
    assert sorted(set(DELAYS_S)) == list(DELAYS_S)


def test_a_refused_try_costs_nothing() -> None:
    throttle = after(FREE_FAILURES)
    for _ in range(100):
        assert throttle.wait_s(PEER, USER, now_s=0.0) == DELAYS_S[0]


def test_a_success_wipes_the_slate() -> None:
    throttle = after(FREE_FAILURES + 3)
    throttle.succeeded(PEER, USER)
    assert throttle.wait_s(PEER, USER, now_s=0.0) == 0.0
    assert len(throttle) == 0
    throttle.succeeded(PEER, "nobody")


def test_other_peers_and_other_users_are_not_held_off() -> None:
    throttle = after(FREE_FAILURES + 3)
    assert throttle.wait_s("192.0.2.2", USER, now_s=0.0) == 0.0
    assert throttle.wait_s(PEER, "bob", now_s=0.0) == 0.0


def test_free_failures_are_forgotten_after_a_quiet_window() -> None:
    throttle = after(FREE_FAILURES - 1)
    throttle.failed(PEER, USER, now_s=WINDOW_S)
    assert throttle.wait_s(PEER, USER, now_s=WINDOW_S) == 0.0

    throttle = after(FREE_FAILURES - 1)
    throttle.failed(PEER, USER, now_s=WINDOW_S - 0.25)
    assert throttle.wait_s(PEER, USER, now_s=WINDOW_S - 0.25) == DELAYS_S[0]


def test_costly_failures_are_remembered_longer() -> None:
    throttle = after(FREE_FAILURES)
    throttle.failed(PEER, USER, now_s=MEMORY_S - 1)
    assert throttle.wait_s(PEER, USER, now_s=MEMORY_S - 1) == DELAYS_S[1]

    throttle = after(FREE_FAILURES + 3)
    throttle.failed(PEER, USER, now_s=MEMORY_S)
    assert throttle.wait_s(PEER, USER, now_s=MEMORY_S) == 0.0


def tries_within(hours: int, *, pause_s: float) -> int:
    """How many guesses a peer gets that pauses this long whenever it must wait, or just as long as it must."""
    throttle, now_s, tries = LoginThrottle(), 0.0, 0
    while now_s < hours * 3600:
        wait_s = throttle.wait_s(PEER, USER, now_s=now_s)
        if wait_s:
            now_s += max(wait_s, pause_s)
            continue
        throttle.failed(PEER, USER, now_s=now_s)
        tries += 1
    return tries


def test_no_way_of_pausing_pays() -> None:
    at_once = tries_within(24, pause_s=0.0)
    assert at_once < 1_500
    assert max(tries_within(24, pause_s=pause_s) for pause_s in (WINDOW_S, DELAYS_S[-1] + WINDOW_S, MEMORY_S)) < at_once


def test_memory_is_bounded_and_the_oldest_failure_is_forgotten() -> None:
    throttle = LoginThrottle(records_max=3)
    for user in ("ann", "bob", "cid"):
        for _ in range(FREE_FAILURES):
            throttle.failed(PEER, user, now_s=0.0)
    throttle.failed(PEER, "ann", now_s=1.0)
    throttle.failed(PEER, "dan", now_s=2.0)
    assert len(throttle) == 3
    assert [user for user in ("ann", "bob", "cid") if throttle.wait_s(PEER, user, now_s=0.5)] == ["ann", "cid"]


def test_a_flood_of_names_stays_within_the_bound() -> None:
    throttle = LoginThrottle()
    for number in range(RECORDS_MAX + 100):
        throttle.failed(PEER, str(number), now_s=0.0)
    assert len(throttle) == RECORDS_MAX
