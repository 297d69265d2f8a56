"""Log-ins over HTTP: those that fail, and those that are remembered."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from headwater.node.auth import login_checks
from headwater.node.auth.login_checks import DELAYS_S, FREE_FAILURES, PASSWORD_KNOWN_S
from headwater.node.auth.users import SALTS_BYTES, Grant, Role, Users
from support.http_node import ADMIN, READER, WRITER, Client, Node


def test_failed_log_ins_are_throttled_and_logged_without_the_password(node: Node, ask: Client) -> None:
    for _ in range(FREE_FAILURES):
        assert ask("GET", "/pools", auth=("ann", "secret-guess")).status_code == 401
    answer = ask("GET", "/pools")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json() == {"message": "Too many failed log-ins: try again in 1 s"}
    assert "log-in of 'ann' from 192.0.2.1 over HTTP failed" in node.logged
    assert not any("secret-guess" in line or "pencil" in line for line in node.logged)
    node.now += DELAYS_S[0]
    assert ask("GET", "/pools").status_code == 200
    assert len(node.login_checks.throttle) == 0


def test_a_remembered_password_does_not_get_around_the_throttle(ask: Client) -> None:
    assert ask("GET", "/pools").status_code == 200
    for _ in range(FREE_FAILURES):
        ask("GET", "/pools", auth=("ann", "guess"))
    assert ask("GET", "/pools").status_code == 429


def test_users_that_do_not_exist_fail_alike(ask: Client) -> None:
    wrong, unknown = ask("GET", "/pools", auth=("ann", "x")), ask("GET", "/pools", auth=("nobody", "x"))
    assert (wrong.status_code, wrong.json()) == (unknown.status_code, unknown.json())


@dataclass
class CountingUsers:
    """Users that count how often a password is checked."""

    users: Users
    checks: int = 0

    def check_password(self, name: str, password: str) -> bool:
        self.checks += 1
        return self.users.check_password(name, password)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.users, name)


@pytest.fixture
def counting(node: Node) -> CountingUsers:
    counting = CountingUsers(node.users)
    node.users = counting  # type: ignore[assignment]
    return counting


def test_polling_does_not_check_the_password_every_time(node: Node, counting: CountingUsers, ask: Client) -> None:
    for _ in range(5):
        assert ask("GET", "/pools").status_code == 200
    assert counting.checks == 1
    node.now += PASSWORD_KNOWN_S
    assert ask("GET", "/pools").status_code == 200
    assert counting.checks == 2
    assert ask("GET", "/pools", auth=("ann", "pencils")).status_code == 401
    assert counting.checks == 3


async def test_many_at_once_are_checked_once(counting: CountingUsers, ask: Client) -> None:
    answers = await asyncio.gather(*(ask.send("GET", "/pools") for _ in range(10)))
    assert [answer.status_code for answer in answers] == [200] * 10
    assert counting.checks == 1


def test_a_user_who_is_removed_or_changed_is_not_remembered(node: Node, ask: Client) -> None:
    assert ask("GET", "/pools").status_code == 200
    without = node.users.remove("ann")
    node.users = without
    assert ask("GET", "/pools").status_code == 401
    node.users = without.add(without.new_user("ann", "other", {Grant(Role.ADMIN)}, salts=bytes(SALTS_BYTES)))
    assert ask("GET", "/pools").status_code == 401
    assert ask("GET", "/pools", auth=("ann", "other")).status_code == 200


def test_only_so_many_are_remembered(counting: CountingUsers, ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_checks, "PASSWORDS_KNOWN_MAX", 2)
    for auth in (ADMIN, READER, WRITER, ADMIN):
        assert ask("GET", "/pools", auth=auth).status_code == 200
    assert counting.checks == 4


async def test_only_so_many_may_wait_for_a_check(ask: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_checks, "LINE_MAX", 2)
    answers = await asyncio.gather(*(ask.send("GET", "/pools") for _ in range(4)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 503, 503]
