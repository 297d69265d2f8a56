"""`headwater collections` against a server: what it prints, what it says when it can't, and how it leaves."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headwater.cli import main, management
from headwater.cli.management import ManagementUrl
from headwater.client.connection_string import Address, ConnectionString
from headwater.errors import InvalidConnectionString
from headwater.node.auth.login_checks import LoginChecks
from headwater.node.auth.users import DECOY_SECRET_BYTES, SALTS_BYTES, Grant, Role, Users
from headwater.node.bucket_settings import BucketSettings
from headwater.node.http.server import HttpServer
from headwater.node.node_state import BucketUsage, ChangeSignal
from headwater.protocol.cluster_config import BucketMap, ClusterNodes, NodeAddress, bucket_config, node_config
from headwater.protocol.features import Opcode
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import ErrorResponse, PlainResponse, Response
from headwater.protocol.messages.session import (
    GetClusterConfig,
    Hello,
    HelloResponse,
    SaslAuth,
    SaslListMechanisms,
    SaslStep,
)
from headwater.protocol.sasl import Mechanism, ScramServer
from headwater.protocol.status import Status
from headwater.store.data_format import BucketFacts
from support.cases import each
from support.commands import printed, sentence

LOGIN = ("--user", "ann", "--password", "pencil")


def make_users() -> Users:
    users = Users(decoy_secret=bytes(DECOY_SECRET_BYTES), iterations=4_000)
    users = users.add(users.new_user("ann", "pencil", {Grant(Role.ADMIN)}, salts=bytes(SALTS_BYTES)))
    return users.add(users.new_user("rob", "quill", {Grant(Role.READER)}, salts=bytes(SALTS_BYTES)))


USERS = make_users()


@dataclass
class Node:
    """A node whose one bucket is no more than its manifest."""

    manifest: Manifest = field(default_factory=Manifest)
    users: Users = USERS
    server_version: str = "7.6.0-0-headwater"
    is_ready: bool = True
    why_not_ready: str = "it opens bucket 'beer', 1 of 1"
    config_changes: ChangeSignal = field(default_factory=ChangeSignal)
    waited_for: list[int] = field(default_factory=list)
    cluster: ClusterNodes = ClusterNodes(nodes=(NodeAddress(host="127.0.0.1", kv_port=11210),), revision=1, uuid="c")

    def __post_init__(self) -> None:
        self.login_checks = LoginChecks(lambda: self.users, now_s=self.now_s)

    def now_s(self) -> float:
        return 0.0

    def uptime_s(self) -> float:
        return 0.0

    def log(self, message: str, **about: object) -> None: ...

    def bucket_names(self) -> Iterable[str]:
        return ["beer"]

    def bucket(self, name: str) -> Any:
        facts = BucketFacts(name=name, uuid="ab", vbuckets=1)
        return SimpleNamespace(facts=facts, manifest=self.manifest) if name == "beer" else None

    def usage(self, bucket: str) -> BucketUsage:
        return BucketUsage(items=0, disk_bytes=0, memory_bytes=0, memory_quota_bytes=0)

    def settings(self, bucket: str) -> BucketSettings:
        return BucketSettings()

    def cluster_config(self, bucket: str | None) -> bytes:
        if bucket is None:
            return node_config(self.cluster)
        return bucket_config(self.cluster, BucketMap(name=bucket, uuid="ab", vbucket_map=[[0]]))

    async def change_manifest(self, bucket: str, change: Callable[[Manifest], Manifest]) -> Manifest:
        self.manifest = change(self.manifest)
        return self.manifest

    async def wait_for_manifest(self, bucket: str, uid: int) -> None:
        assert uid <= self.manifest.uid
        self.waited_for.append(uid)


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


class _Served:
    """A node and where it is. One server for all tests, whose node is a new one in each test."""

    def __init__(self, node: Node, port: int) -> None:
        self.node = node
        self.port = port
        self.url = f"http://127.0.0.1:{port}/beer"


@pytest.fixture(scope="module")
def server() -> Iterator[_Served]:
    node = Node()
    with in_a_thread(node) as port:
        yield _Served(node, port)


@pytest.fixture
def served(server: _Served) -> _Served:
    node = server.node
    node.manifest, node.waited_for = Manifest(), []
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
    assert served.node.waited_for == [1, 2, 3, 4, 5]
    assert [scope.name for scope in served.node.manifest.scopes] == ["_default"]


def test_what_a_collection_can_have(served: _Served) -> None:
    done("create", served.url, "_default.a", "--max-ttl", "60", "--history", *LOGIN)
    done("create", served.url, "_default.b", "--max-ttl", "-1", *LOGIN)
    collections = served.node.manifest.scopes[0].collections
    assert [(each.name, each.max_ttl_s, each.history) for each in collections[1:]] == [("a", 60, True), ("b", 0, False)]


def test_the_list(served: _Served) -> None:
    manifest = Manifest().with_scope("shop").with_scope("empty").with_collection("shop", "orders", history=True)
    served.node.manifest = manifest.with_collection("shop", "carts", max_ttl_s=60).with_collection(
        "shop", "logs", max_ttl_s=0
    )
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
    assert served.node.manifest.find("a%b", "c%2Fd") is not None
    done("drop", served.url, "a%b.c%2Fd", *LOGIN)


# --- who logs in --------------------------------------------------------------------------------------------------

BOTH = {"HEADWATER_USER": "ann", "HEADWATER_PASSWORD": "pencil"}


def test_the_environment_says_who(served: _Served) -> None:
    done("create", served.url, "shop", env=BOTH)


def test_the_url_may_name_the_user(served: _Served) -> None:
    url = served.url.replace("//", "//ann@")
    done("create", url, "shop", env={**BOTH, "HEADWATER_USER": "rob"})
    assert failed("create", url, "pub", "--user", "rob", "--password", "quill").startswith("Forbidden. User needs")


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


def test_a_wrong_password(served: _Served) -> None:
    sentence = failed("list", served.url, "--user", "ann", "--password", "crayon")
    assert sentence == "The user name or the password is wrong. Check --user and --password"


def test_a_missing_right(served: _Served) -> None:
    sentence = failed("create", served.url, "shop", "--user", "rob", "--password", "quill")
    assert sentence == ("Forbidden. User needs the following permissions. Give the user the role admin on the bucket")
    done("list", served.url, "--user", "rob", "--password", "quill")


# --- what can't be done -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("create", "shop"), 'Scope with name "shop" already exists'),
        (("create", "shop.orders"), 'Collection with name "orders" in scope "shop" already exists'),
        (
            ("create", "pub.beers"),
            'Scope with name "pub" is not found. Check the names: upper and lower case differ',
        ),
        (("drop", "_default"), "Deleting _default scope is not allowed"),
        (
            ("create", "shop._x"),
            "name: Use letters, digits, _ - and %, not beginning with _ or %, up to 251 characters",
        ),
    ],
)
def test_refusals_are_told_in_the_node_s_words(served: _Served, arguments: tuple[str, str], sentence: str) -> None:
    served.node.manifest = Manifest().with_scope("shop").with_collection("shop", "orders")
    command, name = arguments
    assert failed(command, served.url, name, *LOGIN) == sentence


def test_an_unknown_bucket(served: _Served) -> None:
    url = served.url.replace("beer", "wine")
    assert failed("list", url, *LOGIN).startswith('Bucket with name "wine" not found')


@each(
    "arguments",
    [
        ("create", "http://h/b", "shop", "--history"),
        ("create", "http://h/b", "shop", "--max-ttl", "1"),
        ("create", "http://h/b", "shop.c", "--max-ttl", "-2"),
        ("create", "http://h/b", "shop."),
        ("create", "http://h/b", ".c"),
        ("create", "http://h/b", "a.b.c"),
        ("create", "http://h/b", ""),
        ("drop", "http://h/b"),
        ("list", "http://h/b", "--http-port", "0"),
        ("list", "http://h/b", "--tls-ca", "/no/such/file"),
        (),
    ],
)
def test_a_command_line_that_is_wrong(arguments: tuple[str, ...]) -> None:
    assert run(*arguments, *(LOGIN if arguments else ())).exit_code == 2


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


@each(
    ("text", "addresses", "tls", "is_http", "bucket", "user"),
    [
        ("couchbase://h/b", [("h", 11210)], False, False, "b", None),
        ("couchbases://h/b", [("h", 11207)], True, False, "b", None),
        ("couchbase://ann@h:1,i:2/b", [("h", 1), ("i", 2)], False, False, "b", "ann"),
        ("http://h/b", [("h", 8091)], False, True, "b", None),
        ("HTTPS://ann@h/b%25/", [("h", 18091)], True, True, "b%", "ann"),
        ("http://[::1]:80/b", [("::1", 80)], False, True, "b", None),
        ("couchbase://h:8091,i/b", [("h", 8091)], False, True, "b", None),
        ("couchbases://h,i:18091/b", [("h", 11207)], True, False, "b", None),
    ],
)
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
        assert "password in it" in sentence
        assert "s3cret" not in sentence


# --- the management port ------------------------------------------------------------------------------------------


class KeyValueServer(threading.Thread):
    """As much of a key-value server as it takes to be asked for the cluster config."""

    def __init__(self, config: bytes) -> None:
        super().__init__()
        self._config = config
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self._scram: ScramServer | None = None

    def __enter__(self) -> KeyValueServer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.join(10)

    def run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                with connection:
                    self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        frames = FrameBuffer()
        while data := connection.recv(65536):
            frames.receive_data(data)
            for frame in frames.frames():
                connection.sendall(self._answer(decode_message(frame)).encode())

    def _answer(self, request: Any) -> Response:
        def plain(value: bytes = b"", status: Status = Status.SUCCESS) -> Response:
            return PlainResponse(opcode=Opcode(request.opcode), opaque=request.opaque, value=value, status=status)

        match request:
            case Hello():
                return HelloResponse(opaque=request.opaque)
            case SaslListMechanisms():
                return plain(b"SCRAM-SHA512 PLAIN")
            case SaslStep():
                assert self._scram is not None
                return plain(self._scram.finish(request.value))
            case SaslAuth():
                self._scram = ScramServer(Mechanism.decode(request.key), USERS.credentials, b"server")
                return plain(self._scram.start(request.value), Status.AUTH_CONTINUE)
            case GetClusterConfig():
                return plain(self._config)
        return ErrorResponse(opcode=Opcode(request.opcode), opaque=request.opaque, status=Status.UNKNOWN_COMMAND)


def config_with(port: int | None) -> bytes:
    node = NodeAddress(host="127.0.0.1", kv_port=11210, http_port=port)
    return node_config(ClusterNodes(nodes=(node,), revision=1, uuid="c"))


def test_the_key_value_port_is_asked_for_the_management_port(served: _Served) -> None:
    with KeyValueServer(config_with(served.port)) as kv:
        done("create", f"couchbase://127.0.0.1:{kv.port}/beer", "shop", *LOGIN)
        assert done("list", f"couchbase://127.0.0.1:{kv.port}/beer", *LOGIN).endswith("\nshop\n")


def test_the_next_host_is_asked_where_the_first_is_down(served: _Served) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        down = taken.getsockname()[1]
    with KeyValueServer(config_with(served.port)) as kv:
        done("list", f"couchbase://127.0.0.1:{down},127.0.0.1:{kv.port}/beer", *LOGIN)


def test_the_management_port_may_be_told(served: _Served) -> None:
    done("list", "couchbase://127.0.0.1:1/beer", "--http-port", str(served.port), *LOGIN)


@pytest.mark.parametrize(
    "config", [b"{}", b"[]", b"no json", b'{"nodesExt":[{"thisNode":true,"services":{"mgmt":99999}}]}']
)
def test_a_node_that_does_not_tell_its_management_port(config: bytes) -> None:
    with KeyValueServer(config) as kv:
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


@each(
    ("status", "body", "sentence"),
    [
        (404, b"Requested resource not found.\r\n", "there is no such bucket. Check the names"),
        (401, b"", "the user name or the password is wrong. Check"),
        (500, b"<html>", "the node answered with status 500"),
        (400, b'{"errors":["one","two"]}', "one; two"),
        (400, b'{"errors":{"name":"bad","_":"worse"}}', "name: bad; worse"),
        (400, b'{"message":"red \\u001b[31m and\\nnew line"}', "red ?[31m and new line"),
        (400, b'{"message":"' + b"x" * 5000 + b'"}', "x" * 300),
        (200, b"fine", "the answer is no list of collections"),
        (200, b'{"scopes":[{"name":"s"}]}', "the answer is no list of collections"),
    ],
)
def test_answers_of_other_servers(status: int, body: bytes, sentence: str) -> None:
    with answering({"GET": (status, body)}) as url:
        assert failed("list", url, *LOGIN).startswith(sentence)


def test_older_servers_have_no_maximal_times_to_live() -> None:
    manifest = {"uid": "0", "scopes": [{"name": "s\x1b", "uid": "8", "collections": [{"name": "c", "uid": "9"}]}]}
    with answering({"GET": (200, json.dumps(manifest).encode())}) as url:
        assert done("list", url, *LOGIN) == "COLLECTION  ID  MAX TTL  HISTORY\ns?.c        9\n"


def test_servers_that_can_t_wait_for_a_manifest() -> None:
    with answering({"DELETE": (200, b'{"uid":"7"}'), "POST": (404, b"")}) as url:
        assert done("drop", url, "shop", *LOGIN) == "dropped shop (manifest 7)\n"


def test_a_manifest_that_takes_long() -> None:
    with answering({"DELETE": (200, b'{"uid":"7"}'), "POST": (504, b"timeout")}) as url:
        assert failed("drop", url, "shop", *LOGIN).startswith("the nodes take long. Look again")


def test_a_change_without_a_uid() -> None:
    with answering({"POST": (200, b"[]")}) as url:
        assert failed("create", url, "shop", *LOGIN).startswith("the answer has no manifest uid")


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(management, "ANSWER_BYTES_MAX", 10)
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


# --- help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [[], ["list"], ["create"], ["drop"]])
def test_help_has_an_example(command: list[str]) -> None:
    assert f"headwater collections {(command or ['list'])[0]} couchbase://127.0.0.1/default" in done(*command, "--help")
