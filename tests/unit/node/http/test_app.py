"""Who may ask for what over HTTP."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from headwater.node.auth import login_checks
from headwater.node.auth.login_checks import DELAYS_S, FREE_FAILURES, PASSWORD_KNOWN_S
from headwater.node.auth.users import SALTS_BYTES, Grant, Role, Users
from headwater.node.http.app import ROUTES, http_app
from headwater.node.node_state import NodeState
from support.cases import case_apart
from support.http_node import ADMIN, READER, SCOPES, STRANGER, WRITER, Client, Node

PATHS = {
    path.replace(":path}", "}").format(
        bucket="beer", scope="shop", collection="c", uid="0", vbucket="0", domain="local", name="rob"
    ): methods
    for path, methods in ROUTES.items()
}


@pytest.mark.parametrize(("path", "method"), [(path, method) for path, methods in PATHS.items() for method in methods])
def test_everything_needs_a_log_in(ask: Client, path: str, method: str) -> None:
    answer = ask(method, path, auth=None)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert answer.json().keys() == {"message"}


@pytest.mark.parametrize(
    ("path", "method"), [(path, method) for path, methods in PATHS.items() for method in methods if "beer" in path]
)
def test_everything_about_a_bucket_needs_a_right_on_it(node: Node, ask: Client, path: str, method: str) -> None:
    answer = ask(method, path, auth=STRANGER)
    assert answer.status_code == 403
    assert answer.json().keys() == {"message", "permissions"}
    assert any("'sid' may not" in line for line in node.logged)


def test_a_bucket_that_one_may_not_use_might_as_well_not_exist(ask: Client) -> None:
    assert ask("GET", "/pools/default/b/nope", auth=READER).status_code == 403
    assert ask("GET", "/pools/default/b/nope", auth=ADMIN).status_code == 404
    assert ask("GET", "/pools/default/buckets", auth=STRANGER).json() == []
    assert ask("GET", "/pools/default", auth=STRANGER).json()["bucketNames"] == []


@case_apart("Bearer abc")
@case_apart("Basic")
@case_apart("Basic !!!")
@case_apart(b"Basic \xff")
@case_apart("Basic " + base64.b64encode(b"no colon").decode())
@case_apart("Basic " + base64.b64encode(b":no name").decode())
@case_apart("Basic " + base64.b64encode(b"\xff:x").decode())
@case_apart("Basic " + base64.b64encode(b"n" * 129 + b":x").decode())
def test_credentials_that_can_t_be_read(node: Node, ask: Client, header: str | bytes) -> None:
    answer = ask("GET", "/pools", auth=None, headers={"Authorization": header})
    assert answer.status_code == 401
    assert len(node.login_checks.throttle) == 0


def test_a_password_may_have_colons(node: Node, ask: Client) -> None:
    node.users = node.users.add(node.users.new_user("kim", "a:b:ü", {Grant(Role.READER)}, salts=bytes(SALTS_BYTES)))
    assert ask("GET", "/pools", auth=("kim", "a:b:ü".encode())).status_code == 200


def test_pages_of_other_sites_may_not_use_a_browser_s_log_in(ask: Client) -> None:
    def post(origin: str) -> int:
        return ask("POST", SCOPES, data={"name": "shop"}, headers={"Origin": origin}).status_code

    for other in ("http://evil.example", "null", "http://node:8092", "http://["):
        assert post(other) == 403
    assert post("http://node:8091") == 200
    assert ask("GET", SCOPES, headers={"Origin": "http://evil.example"}).status_code == 200


# --- hosts --------------------------------------------------------------------------------------------------------


async def ask_for(node: Node, url: str, *, host: str | None = None, is_tls_only: bool = False) -> httpx.Response:
    node.options = replace(node.options, tls_cert=Path("cert"), tls_key=Path("key"), tls_only=is_tls_only)
    app = http_app(cast(NodeState, node))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client:
        return await client.get(url, headers={} if host is None else {"Host": host})


@case_apart("lake.example.com:8091", 200)
@case_apart("LAKE.example.com", 200)
@case_apart("127.0.0.1:8091", 200)
@case_apart("[2001:db8::1]:8091", 200)
@case_apart("localhost:8091", 200)
@case_apart("evil.example.net", 421)
@case_apart("[1.2.3]", 421)
@case_apart("lake.example.com.evil.example.net:8091", 421)
async def test_requests_are_for_this_node(node: Node, host: str, status: int) -> None:
    """A page of another site can have its name lead here, and the browser believes it."""
    assert (await ask_for(node, "http://node/", host=host)).status_code == status
    assert (await ask_for(node, "http://node/health", host=host)).status_code == 200


async def test_browsers_that_came_by_tls_come_back_by_tls(node: Node) -> None:
    async def header(url: str, *, is_tls_only: bool = True) -> str | None:
        answer = await ask_for(node, url, is_tls_only=is_tls_only)
        return answer.headers.get("strict-transport-security")

    assert await header("https://lake.example.com/") == "max-age=31536000"
    # There is a port without TLS beside it, or other programs listen under the same name.
    assert await header("https://lake.example.com/", is_tls_only=False) is None
    assert await header("https://localhost/") is None


# --- log-ins over HTTP: those that fail, and those that are remembered ----------------------------------------------


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
    node.users = counting
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
