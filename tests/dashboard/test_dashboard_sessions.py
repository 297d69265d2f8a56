"""Logging in on the dashboard: cookies, where requests may come from, the throttle, and the end of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.http import requests
from headwater.node.auth.login_checks import FREE_FAILURES
from support.dashboard_world import ADMIN, OWN, READER, World, in_world


def test_the_right_password_begins_a_session(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        assert (await world.get("session")).json()["user"] is None
        answer = await world.log_in()
        assert answer.status_code == 204
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=/ui" in cookie
        told = (await world.get("session")).json()
        assert told["user"] == ADMIN[0]
        assert told["buckets"] == ["beer", "wine"]

    in_world(tmp_path, scenario)


def test_a_wrong_password_gets_no_session_and_no_window_of_the_browser(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        answer = await world.log_in((ADMIN[0], "wrong"))
        assert answer.status_code == 401
        assert "www-authenticate" not in answer.headers
        assert "set-cookie" not in answer.headers
        assert (await world.get("buckets/beer/changes")).status_code == 401

    in_world(tmp_path, scenario)


def test_guesses_count_in_the_one_throttle_of_the_node(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        for _ in range(FREE_FAILURES):
            assert (await world.log_in((ADMIN[0], "wrong"))).status_code == 401
        assert (await world.log_in()).status_code == 429
        assert (await world.client.get("/pools", auth=ADMIN)).status_code == 429

    in_world(tmp_path, scenario)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        OWN,
        {"Origin": "http://evil.example", **OWN},
        {"Origin": "http://127.0.0.1:1", **OWN},
        {"Origin": "null", **OWN},
    ],
)
def test_only_the_own_page_may_log_in_or_out(tmp_path: Path, headers: dict[str, str]) -> None:
    async def scenario(world: World) -> None:
        body = {"user": ADMIN[0], "password": ADMIN[1]}
        assert (await world.client.post("/ui/api/login", json=body, headers=headers)).status_code == 403
        without = {"Origin": world.url}
        assert (await world.client.post("/ui/api/login", json=body, headers=without)).status_code == 403
        await world.log_in()
        assert (await world.client.post("/ui/api/logout", headers=headers)).status_code == 403
        assert (await world.get("session")).json()["user"] == ADMIN[0]

    in_world(tmp_path, scenario)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b'{"user": "ann"}', 400),
        (b'{"user": "", "password": "x"}', 400),
        (b'{"user": 1, "password": "x"}', 400),
        (b'{"user": "ann", "password": "\\ud800"}', 400),
        (b'{"user": "%s", "password": "x"}' % (b"a" * 1000), 400),
        (b"[" * 5000, 400),
        (b" " * 9000, 413),
    ],
)
def test_a_log_in_that_makes_no_sense_is_refused(tmp_path: Path, body: bytes, status: int) -> None:
    async def scenario(world: World) -> None:
        answer = await world.client.post("/ui/api/login", content=body, headers={"Origin": world.url, **OWN})
        assert answer.status_code == status, answer.text

    in_world(tmp_path, scenario)


def test_logging_out_ends_the_session_itself_and_not_only_the_cookie(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.log_in()
        cookies = dict(world.client.cookies)
        assert (await world.client.post("/ui/api/logout", headers={"Origin": world.url, **OWN})).status_code == 204
        for name, value in cookies.items():
            world.client.cookies.set(name, value)
        assert (await world.get("session")).json()["user"] is None

    in_world(tmp_path, scenario)


def test_a_user_with_another_password_is_logged_out(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        await world.log_in(READER)
        users = world.node.users.remove(READER[0])
        assert (await world.get("session")).json()["user"] == READER[0]
        again = users.new_user(
            READER[0], "another", world.node.users.by_name[READER[0]].grants, salts=bytes(32 * 3)[:48]
        )
        world.node._users = users.add(again)
        assert (await world.get("session")).json()["user"] is None

    in_world(tmp_path, scenario)


def test_a_session_that_nobody_uses_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SESSION_S", -1.0)

    async def scenario(world: World) -> None:
        await world.log_in()
        assert (await world.get("session")).json()["user"] is None

    in_world(tmp_path, scenario)


def test_the_oldest_session_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SESSIONS_MAX", 2)

    async def scenario(world: World) -> None:
        await world.log_in()
        first = dict(world.client.cookies)
        for _ in range(2):
            world.client.cookies.clear()
            await world.log_in()
        assert (await world.get("session")).json()["user"] == ADMIN[0]
        world.client.cookies.clear()
        for name, value in first.items():
            world.client.cookies.set(name, value)
        assert (await world.get("session")).json()["user"] is None

    in_world(tmp_path, scenario)
