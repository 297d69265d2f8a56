"""Logging in on the dashboard: cookies, where requests may come from, the throttle, and the end of a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.http import requests
from headwater.node.auth.login_checks import FREE_FAILURES
from support.dashboard_world import ADMIN, OWN, READER, serving


async def test_the_right_password_begins_a_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
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


async def test_a_wrong_password_gets_no_session_and_counts_in_the_throttle_of_the_node(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        for _ in range(FREE_FAILURES):
            answer = await world.log_in((ADMIN[0], "wrong"))
            assert answer.status_code == 401
            assert not {"www-authenticate", "set-cookie"} & answer.headers.keys(), "a browser would open a window"
        assert (await world.get("buckets/beer/changes")).status_code == 401
        assert (await world.log_in()).status_code == 429
        assert (await world.client.get("/pools", auth=ADMIN)).status_code == 429


async def test_only_the_own_page_may_log_in_or_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        foreign = ("http://evil.example", "http://127.0.0.1:1", "null")
        refused = [{}, OWN, {"Origin": world.url}, *({"Origin": origin, **OWN} for origin in foreign)]
        body = {"user": ADMIN[0], "password": ADMIN[1]}
        for headers in refused:
            assert (await world.client.post("/ui/api/login", json=body, headers=headers)).status_code == 403
        await world.log_in()
        for headers in refused:
            assert (await world.client.post("/ui/api/logout", headers=headers)).status_code == 403
        assert (await world.get("session")).json()["user"] == ADMIN[0]


NO_LOG_INS = (
    b"{", b"[]", b'{"user": "ann"}', b'{"user": "", "password": "x"}', b'{"user": 1, "password": "x"}',
    b'{"user": "ann", "password": "\\ud800"}', b'{"user": "%s", "password": "x"}' % (b"a" * 1000), b"[" * 5000,
)  # fmt: skip


async def test_a_log_in_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        for body, status in (*((body, 400) for body in NO_LOG_INS), (b" " * 9000, 413)):
            answer = await world.client.post("/ui/api/login", content=body, headers={"Origin": world.url, **OWN})
            assert answer.status_code == status, body[:40]


async def test_logging_out_ends_the_session_itself_and_not_only_the_cookie(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in()
        cookies = dict(world.client.cookies)
        assert (await world.client.post("/ui/api/logout", headers={"Origin": world.url, **OWN})).status_code == 204
        for name, value in cookies.items():
            world.client.cookies.set(name, value)
        assert (await world.get("session")).json()["user"] is None


async def test_a_user_with_another_password_is_logged_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as world:
        await world.log_in(READER)
        users = world.node.users.remove(READER[0])
        assert (await world.get("session")).json()["user"] == READER[0]
        again = users.new_user(
            READER[0], "another", world.node.users.by_name[READER[0]].grants, salts=bytes(32 * 3)[:48]
        )
        world.node._listener.service.users = users.add(again)
        assert (await world.get("session")).json()["user"] is None


async def test_a_session_that_nobody_uses_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SESSION_S", -1.0)
    async with serving(tmp_path) as world:
        await world.log_in()
        assert (await world.get("session")).json()["user"] is None


async def test_sessions_of_one_user_end_none_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SESSIONS_MAX", 2)
    async with serving(tmp_path) as world:
        await world.log_in()
        cookies = dict(world.client.cookies)
        for _ in range(3):
            world.client.cookies.clear()
            assert (await world.log_in(READER)).status_code == 204
        assert (await world.get("session")).json()["user"] == READER[0]
        world.client.cookies.clear()
        world.client.cookies.update(cookies)
        assert (await world.get("session")).json()["user"] == ADMIN[0]


async def test_the_oldest_session_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "SESSIONS_MAX", 2)
    async with serving(tmp_path) as world:
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
