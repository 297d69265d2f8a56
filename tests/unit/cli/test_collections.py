"""`headwater collections` against a server: what it prints, what it says when it can't, and how it leaves."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headwater import http as http_client
from headwater.cli import main
from headwater.cli.management import ManagementUrl
from headwater.client.connection_string import Address, ConnectionString
from headwater.errors import InvalidConnectionString
from headwater.node.auth.login_checks import LoginChecks
from headwater.node.http.app import HttpServer
from headwater.protocol.cluster_config import ClusterNodes, NodeAddress, node_config
from headwater.protocol.manifest import Manifest
from headwater.store.data_format import BucketFacts
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import create_bucket
from support import fake_servers
from support.cases import case, case_apart, each
from support.commands import printed, sentence
from support.fake_servers import Peer, down, serving
from support.http_node import ENVIRONMENT, Node

LOGIN = ("--user", "ann", "--password", "pencil")


@contextmanager
def in_a_thread(node: Node) -> Iterator[int]:
    """The HTTP side of a node on a free port of the loopback."""
    bound = socket.create_server(("127.0.0.1", 0))
    port: int = bound.getsockname()[1]
    loop = asyncio.new_event_loop()
    ready, stopping = threading.Event(), asyncio.Event()

    async def serve() -> None:
        server = HttpServer(node)
        await server.listen(bound)
        ready.set()
        await stopping.wait()
        await server.stop()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(10)
        yield port
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join(10)
        loop.close()
    assert not thread.is_alive()


@dataclass
class _Served:
    """A node and where it is. One server for all tests, whose bucket has a new manifest in each test."""

    node: Node
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/beer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Served]:
    folder = tmp_path_factory.mktemp("node")
    with closing(LmdbEngine(folder / "beer")) as engine:
        facts = BucketFacts(name="beer", uuid="ab" * 16, vbuckets=1)
        node = Node(create_bucket(engine, facts, environment=ENVIRONMENT, secret=(1, 2)), folder)
        with in_a_thread(node) as port:
            yield _Served(node, port)


@pytest.fixture
def served(server: _Served) -> _Served:
    node = server.node
    node.durable_uid = 0
    node.stored.set_manifest(Manifest())
    node.login_checks = LoginChecks(lambda: node.users, now_s=node.now_s)
    return server


def run(*arguments: str, env: dict[str, str] | None = None, stdin: str | None = None) -> Result:
    clean = {"HEADWATER_USER": None, "HEADWATER_PASSWORD": None}
    return CliRunner().invoke(main, ["collections", *arguments], env={**clean, **(env or {})}, input=stdin)


def done(*arguments: str, **parts: Any) -> str:
    return printed(run(*arguments, **parts))


def failed(*arguments: str, **parts: Any) -> str:
    return sentence(run(*arguments, **parts))


# --- what it does -------------------------------------------------------------------------------------------------


def test_scopes_and_collections_come_and_go(served: _Served) -> None:
    assert done("create", served.url, "shop", *LOGIN) == "created shop (manifest 1)\n"
    assert done("create", served.url, "shop.orders", *LOGIN) == "created shop.orders (manifest 2)\n"
    assert done("create", served.url, "_default.log", *LOGIN) == "created _default.log (manifest 3)\n"
    assert done("drop", served.url, "shop.orders", *LOGIN) == "dropped shop.orders (manifest 4)\n"
    assert done("drop", served.url, "shop", *LOGIN) == "dropped shop (manifest 5)\n"
    assert served.node.durable_uid == 5
    assert [scope.name for scope in served.node.stored.manifest.scopes] == ["_default"]


def test_what_a_collection_can_have(served: _Served) -> None:
    done("create", served.url, "_default.a", "--max-ttl", "60", "--history", *LOGIN)
    done("create", served.url, "_default.b", "--max-ttl", "-1", *LOGIN)
    collections = served.node.stored.manifest.scopes[0].collections
    assert [(each.name, each.max_ttl_s, each.history) for each in collections[1:]] == [("a", 60, True), ("b", 0, False)]


def test_the_list(served: _Served) -> None:
    manifest = Manifest().with_scope("shop").with_scope("empty").with_collection("shop", "orders", history=True)
    manifest = manifest.with_collection("shop", "carts", max_ttl_s=60)
    served.node.stored.set_manifest(manifest.with_collection("shop", "logs", max_ttl_s=0))
    assert done("list", served.url, *LOGIN) == (
        "COLLECTION         ID  MAX TTL  HISTORY\n"
        "_default._default  0\n"
        "shop.orders        a            yes\n"
        "shop.carts         b   60 s\n"
        "shop.logs          c   none\n"
        "empty\n"
    )


def test_json(served: _Served) -> None:
    assert json.loads(done("create", served.url, "shop", "--json", *LOGIN)) == {"uid": "1"}
    listed = done("list", served.url, "--json", *LOGIN)
    assert listed.count("\n") == 1
    assert [scope["name"] for scope in json.loads(listed)["scopes"]] == ["_default", "shop"]
    assert json.loads(done("drop", served.url, "shop", "--json", *LOGIN)) == {"uid": "2"}


def test_names_are_escaped(served: _Served) -> None:
    done("create", served.url, "a%b", *LOGIN)
    done("create", served.url, "a%b.c%2Fd", *LOGIN)
    assert served.node.stored.manifest.find("a%b", "c%2Fd") is not None
    done("drop", served.url, "a%b.c%2Fd", *LOGIN)


# --- who logs in --------------------------------------------------------------------------------------------------

BOTH = {"HEADWATER_USER": "ann", "HEADWATER_PASSWORD": "pencil"}


def test_who_logs_in(served: _Served) -> None:
    done("create", served.url, "shop", env=BOTH)
    url = served.url.replace("//", "//ann@")
    done("create", url, "bar", env={**BOTH, "HEADWATER_USER": "rob"})
    assert failed("create", url, "pub", "--user", "rob", "--password", "quill") == (
        "Forbidden. User needs the following permissions. Give the user the role admin on the bucket"
    )
    done("list", served.url, "--user", "rob", "--password", "quill")
    sentence = failed("list", served.url, "--user", "ann", "--password", "crayon")
    assert sentence == "The user name or the password is wrong. Check --user and --password"


@pytest.mark.parametrize("login", [(), ("--user", "ann"), ("--password", "pencil")])
def test_without_a_user_and_a_password(served: _Served, login: tuple[str, ...]) -> None:
    assert "Give --user and --password, or set HEADWATER_USER and HEADWATER_PASSWORD" in failed(
        "list", served.url, *login
    )


def test_on_a_terminal_the_password_is_asked_for(served: _Served, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def prompt(text: str, **options: Any) -> str:
        assert options["hide_input"]
        asked.append(text)
        return "pencil"

    monkeypatch.setattr("headwater.cli.options.is_terminal", lambda: True)
    monkeypatch.setattr("headwater.cli.options.click.prompt", prompt)
    done("list", served.url, "--user", "ann")
    assert asked == ["Password of ann"]


# --- what can't be done -------------------------------------------------------------------------------------------


@case_apart(("create", "shop"), 'Scope with name "shop" already exists')
@case_apart(("create", "shop.orders"), 'Collection with name "orders" in scope "shop" already exists')
@case_apart(("create", "pub.beers"), 'Scope with name "pub" is not found. Check the names: upper and lower case differ')
@case_apart(("drop", "_default"), "Deleting _default scope is not allowed")
@case_apart(
    ("create", "shop._x"), "name: Use letters, digits, _ - and %, not beginning with _ or %, up to 251 characters"
)
def test_refusals_are_told_in_the_node_s_words(served: _Served, arguments: tuple[str, str], sentence: str) -> None:
    served.node.stored.set_manifest(Manifest().with_scope("shop").with_collection("shop", "orders"))
    command, name = arguments
    assert failed(command, served.url, name, *LOGIN) == sentence


def test_an_unknown_bucket(served: _Served) -> None:
    url = served.url.replace("beer", "wine")
    assert failed("list", url, *LOGIN).startswith('Bucket with name "wine" not found')


@each(
    "arguments",
    [("create", "shop", "--history"), ("create", "shop", "--max-ttl", "1"), ("create", "shop.c", "--max-ttl", "-2"),
     ("create", "shop."), ("create", ".c"), ("create", ""), ("drop",), ("list", "--http-port", "0"),
     ("list", "--tls-ca", "/no/such/file")],
)  # fmt: skip
def test_a_command_line_that_is_wrong(arguments: tuple[str, ...]) -> None:
    assert run(arguments[0], "http://h/b", *arguments[1:], *LOGIN).exit_code == 2


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}/beer", f"couchbase://127.0.0.1:{port}/beer"):
        assert failed("list", url, *LOGIN).startswith(f"127.0.0.1:{port} can't be reached: ")


def test_a_ca_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    assert "can't be used" in failed("list", "https://127.0.0.1:1/b", "--tls-ca", str(tmp_path / "ca.pem"), *LOGIN)


def test_tls_with_a_server_that_has_none(served: _Served) -> None:
    url = served.url.replace("http:", "https:")
    for more in ((), ("--tls-skip-verify",)):
        assert failed("list", url, *more, *LOGIN).startswith(f"no TLS with 127.0.0.1:{served.port}: ")


# --- URLs ---------------------------------------------------------------------------------------------------------


@case("couchbase://h/b", [("h", 11210)], False, False, "b", None)
@case("couchbases://h/b", [("h", 11207)], True, False, "b", None)
@case("couchbase://ann@h:1,i:2/b", [("h", 1), ("i", 2)], False, False, "b", "ann")
@case("http://h/b", [("h", 8091)], False, True, "b", None)
@case("HTTPS://ann@h/b%25/", [("h", 18091)], True, True, "b%", "ann")
@case("http://[::1]:80/b", [("::1", 80)], False, True, "b", None)
@case("couchbase://h:8091,i/b", [("h", 8091)], False, True, "b", None)
@case("couchbases://h,i:18091/b", [("h", 11207)], True, False, "b", None)
def test_urls(
    text: str, addresses: list[tuple[str, int]], tls: bool, is_http: bool, bucket: str, user: str | None
) -> None:
    string = ConnectionString.parse(text) if text.startswith("couchbase") else None
    assert ManagementUrl.parse(text) == ManagementUrl(
        addresses=tuple(Address(*address) for address in addresses),
        tls=tls,
        is_http=is_http,
        bucket=bucket,
        user=user,
        listed=string if string is not None and string.srv_name is not None else None,
    )


@each(
    "text",
    ["", "h/b", "ftp://h/b", "couchbase://h", "http://h", "http://h/", "http://h/a/b", "http:///b", "http://h:x/b",
     "http://[::1/b", "http://h:0/b", "couchbases://h:8091/b"],
)  # fmt: skip
def test_urls_that_are_none(text: str) -> None:
    with pytest.raises(InvalidConnectionString):
        ManagementUrl.parse(text)
    assert run("list", text, *LOGIN).exit_code == 1


def test_a_password_in_a_url_is_not_repeated() -> None:
    for scheme in ("http", "couchbase"):
        sentence = failed("list", f"{scheme}://ann:s3cret@h/b")
        assert "contains a password" in sentence
        assert "s3cret" not in sentence


# --- the management port ------------------------------------------------------------------------------------------


def key_value_server(config: bytes) -> AbstractContextManager[Address]:
    """As much of a key-value server as it takes to be asked for the cluster config."""
    return serving(fake_servers.answering(lambda: Peer(bucket="beer", config=config, password="pencil")))


def config_with(port: int | None) -> bytes:
    node = NodeAddress(host="127.0.0.1", kv_port=11210, http_port=port)
    return node_config(ClusterNodes(nodes=(node,), revision=1, uuid="c"))


def test_the_key_value_port_is_asked_for_the_management_port(served: _Served) -> None:
    with key_value_server(config_with(served.port)) as kv:
        done("create", f"couchbase://127.0.0.1:{kv.port}/beer", "shop", *LOGIN)
        assert done("list", f"couchbase://127.0.0.1:{kv.port}/beer", *LOGIN).endswith("\nshop\n")


def test_the_next_host_is_asked_where_the_first_is_down(served: _Served) -> None:
    with key_value_server(config_with(served.port)) as kv:
        done("list", f"couchbase://{down()},{kv}/beer", *LOGIN)


def test_the_management_port_may_be_told(served: _Served) -> None:
    done("list", "couchbase://127.0.0.1:1/beer", "--http-port", str(served.port), *LOGIN)


@pytest.mark.parametrize(
    "config", [b"{}", b"[]", b"no json", b'{"nodesExt":[{"thisNode":true,"services":{"mgmt":99999}}]}']
)
def test_a_node_that_does_not_tell_its_management_port(config: bytes) -> None:
    with key_value_server(config) as kv:
        sentence = failed("list", f"couchbase://127.0.0.1:{kv.port}/beer", *LOGIN)
    assert sentence == "the config of the node has no management port. Give it with --http-port"


# --- other servers ------------------------------------------------------------------------------------------------


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]]) -> Iterator[str]:
    """A server that answers every request of a method in one way."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, body = answers[self.command]
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{http_server.server_port}/beer"
        finally:
            http_server.shutdown()
            thread.join(10)


@case(404, b"Requested resource not found.\r\n", "there is no such bucket. Check the names")
@case(401, b"", "the user name or the password is wrong. Check")
@case(500, b"<html>", "the node answered with status 500")
@case(400, b'{"errors":["one","two"]}', "one; two")
@case(400, b'{"errors":{"name":"bad","_":"worse"}}', "name: bad; worse")
@case(400, b'{"message":"red \\u001b[31m and\\nnew line"}', "red ?[31m and new line")
@case(400, b'{"message":"' + b"x" * 5000 + b'"}', "x" * 300)
@case(200, b"fine", "the answer is not a list of collections")
@case(200, b'{"scopes":[{"name":"s"}]}', "the answer is not a list of collections")
def test_answers_of_other_servers(status: int, body: bytes, sentence: str) -> None:
    with answering({"GET": (status, body)}) as url:
        assert failed("list", url, *LOGIN).startswith(sentence)


def test_older_servers_have_no_maximal_times_to_live() -> None:
    manifest = {"uid": "0", "scopes": [{"name": "s\x1b", "uid": "8", "collections": [{"name": "c", "uid": "9"}]}]}
    with answering({"GET": (200, json.dumps(manifest).encode())}) as url:
        assert done("list", url, *LOGIN) == "COLLECTION  ID  MAX TTL  HISTORY\ns?.c        9\n"


# Servers that can't wait for a manifest.
@case(("drop", "shop"), {"DELETE": (200, b'{"uid":"7"}'), "POST": (404, b"")}, "dropped shop (manifest 7)\n")
@case(("drop", "shop"), {"DELETE": (200, b'{"uid":"7"}'), "POST": (504, b"timeout")}, "Error: the nodes take long. ")
@case(("create", "shop"), {"POST": (200, b"[]")}, "Error: the answer has no manifest uid")
def test_other_servers_answers(arguments: tuple[str, str], answers: dict[str, tuple[int, bytes]], said: str) -> None:
    command, name = arguments
    with answering(answers) as url:
        assert run(command, url, name, *LOGIN).output.startswith(said)


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "ANSWER_BYTES_MAX", 10)
    with answering({"GET": (200, b"x" * 11)}) as url:
        assert "has more than 10 bytes" in failed("list", url, *LOGIN)


def test_a_port_that_does_not_speak_http() -> None:
    def hang_up(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"\x81\x00\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=hang_up, args=(listening,))
        thread.start()
        sentence = failed("list", f"http://127.0.0.1:{port}/beer", *LOGIN)
        thread.join(10)
    assert sentence == f"127.0.0.1:{port} does not speak HTTP. Give the management port with --http-port"
