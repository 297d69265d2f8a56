"""Who may ask for what over HTTP."""

from __future__ import annotations

import asyncio
import base64
from typing import cast

import httpx
import pytest

from headwater.node.auth.users import SALTS_BYTES, Grant, Role
from headwater.node.http.app import ROUTES, http_app
from headwater.node.node_state import NodeState
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


@pytest.mark.parametrize(
    ("path", "method"),
    [(path, method) for path, methods in PATHS.items() for method in methods if path.startswith("/settings/")],
)
def test_only_admins_may_look_at_users_and_change_them(node: Node, ask: Client, path: str, method: str) -> None:
    before = node.users
    answer = ask(method, path, auth=WRITER)
    assert (answer.status_code, answer.json()["permissions"]) == (403, ["cluster.admin.security.admin!write"])
    assert node.users is before


def test_readers_and_writers_may_not_drill(ask: Client) -> None:
    for auth in (READER, WRITER):
        assert (
            ask("POST", "/headwater/buckets/beer/vbuckets/0/rollback", auth=auth, data={"to": "0"}).status_code == 403
        )
        for path in ("hold", "release"):
            assert ask("POST", f"/headwater/buckets/beer/replicas/{path}", auth=auth).status_code == 403


def test_readers_and_writers_may_not_change_collections(ask: Client) -> None:
    for auth in (READER, WRITER):
        answer = ask("POST", SCOPES, auth=auth, data={"name": "shop"})
        assert answer.status_code == 403
        assert answer.json()["permissions"] == ["cluster.collection[beer:.:.].collections!write"]


def test_a_bucket_that_one_may_not_use_might_as_well_not_exist(ask: Client) -> None:
    assert ask("GET", "/pools/default/b/nope", auth=READER).status_code == 403
    assert ask("GET", "/pools/default/b/nope", auth=ADMIN).status_code == 404


def test_others_buckets_are_not_listed(ask: Client) -> None:
    assert ask("GET", "/pools/default/buckets", auth=STRANGER).json() == []
    assert ask("GET", "/pools/default", auth=STRANGER).json()["bucketNames"] == []


@pytest.mark.parametrize(
    "header",
    [
        "Bearer abc",
        "Basic",
        "Basic !!!",
        "Basic " + base64.b64encode(b"no colon").decode(),
        "Basic " + base64.b64encode(b":no name").decode(),
        "Basic " + base64.b64encode(b"\xff:x").decode(),
        "Basic " + base64.b64encode(b"n" * 129 + b":x").decode(),
    ],
)
def test_credentials_that_can_t_be_read(node: Node, ask: Client, header: str) -> None:
    answer = ask("GET", "/pools", auth=None, headers={"Authorization": header})
    assert answer.status_code == 401
    assert len(node.login_checks.throttle) == 0


def test_a_password_may_have_colons(node: Node, ask: Client) -> None:
    node.users = node.users.add(node.users.new_user("kim", "a:b:ü", {Grant(Role.READER)}, salts=bytes(SALTS_BYTES)))
    assert ask("GET", "/pools", auth=("kim", "a:b:ü".encode())).status_code == 200


def test_pages_of_other_sites_may_not_use_a_browser_s_log_in(ask: Client) -> None:
    def post(origin: str) -> int:
        return ask("POST", SCOPES, data={"name": "shop"}, headers={"Origin": origin}).status_code

    assert (post("http://evil.example"), post("null"), post("http://node:8092")) == (403, 403, 403)
    assert post("http://node:8091") == 200
    assert ask("GET", SCOPES, headers={"Origin": "http://evil.example"}).status_code == 200


# --- hosts --------------------------------------------------------------------------------------------------------


def ask_for(node: Node, url: str, *, is_tls_only: bool = False) -> httpx.Response:
    app = http_app(cast(NodeState, node), hosts=["lake.example.com"], is_tls_only=is_tls_only)

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app)) as client:
            return await client.get(url)

    return asyncio.run(send())


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("lake.example.com:8091", 200),
        ("LAKE.example.com", 200),
        ("127.0.0.1:8091", 200),
        ("[2001:db8::1]:8091", 200),
        ("localhost:8091", 200),
        ("evil.example.net", 421),
        ("lake.example.com.evil.example.net:8091", 421),
    ],
)
def test_requests_are_for_this_node(node: Node, host: str, status: int) -> None:
    """A page of another site can have its name lead here, and the browser believes it."""
    assert ask_for(node, f"http://{host}/").status_code == status
    assert ask_for(node, f"http://{host}/health").status_code == 200


def test_browsers_that_came_by_tls_come_back_by_tls(node: Node) -> None:
    def header(url: str, *, is_tls_only: bool = True) -> str | None:
        answer = ask_for(node, url, is_tls_only=is_tls_only)
        return answer.headers.get("strict-transport-security")

    assert header("https://lake.example.com/") == "max-age=31536000"
    # There is a port without TLS beside it, or other programs listen under the same name.
    assert header("https://lake.example.com/", is_tls_only=False) is None
    assert header("https://localhost/") is None
