"""Starting and stopping a real node: what it says, what it refuses in one sentence, and what it leaves behind."""

from __future__ import annotations

import base64
import json
import re
import signal
import socket
import stat
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.session import Noop
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.sasl import Credentials
from support.acknowledged_writes import PipelinedWriter, WriteHistory, check_history, statistics
from support.cases import case_apart
from support.fault_proxy import free_port
from support.node_process import PASSWORD, USER, NodeProcess, StartNode, run_serve

VBUCKETS = 16
FEW_VBUCKETS = ("--vbuckets", str(VBUCKETS))
FREE_PORTS = ("--port", "0", "--http-port", "0")
LOGIN = ("--user", USER, "--password", PASSWORD)

_FRAME = re.compile(r"[╭╮╰╯─│]|\bError\b")


def sentence(ended: subprocess.CompletedProcess[str]) -> str:
    """What a start that failed has said: without the frame that is drawn around it, and without a traceback."""
    assert ended.returncode == 1, ended.stderr
    assert not ended.stdout
    assert "Traceback" not in ended.stderr
    said = " ".join(_FRAME.sub(" ", ended.stderr).split())
    assert said.count(". ") <= 1, "a reason and what to do next"
    return said


def branches(node: NodeProcess) -> dict[str, str]:
    """The newest vbuuid of every vbucket."""
    with node.connect() as connection:
        details = statistics(connection, "vbucket-details")
    return {name: value for name, value in details.items() if name.endswith(":uuid")}


# --- stopping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_clean_stop(start_node: StartNode, number: signal.Signals) -> None:
    node = start_node(*FEW_VBUCKETS)
    document = {"key": b"lasting", "collection_id": DEFAULT_COLLECTION}
    with node.connect() as connection:
        connection.request(Set(value=b"1", **document))
        before = branches(node)
        # With a client that is still there.
        assert node.stop(number) == 0
    node.start()
    assert branches(node) == before
    with node.connect() as connection:
        assert connection.request(Get(**document)).value == b"1"
    node.kill()
    node.start()
    after = branches(node)
    assert all(after[name] != before[name] for name in before)


def test_a_clean_stop_under_load(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS)
    before = branches(node)
    history = WriteHistory()
    writer = PipelinedWriter(node, history, name="busy", key_prefix="busy", keys=300, vbuckets=VBUCKETS)
    writer.start()
    assert writer.has_answers.wait(30)
    assert node.stop() == 0
    writer.join(30)
    assert not writer.faults
    node.start()
    assert branches(node) == before
    with node.connect() as connection:
        check_history(connection, history, vbuckets=VBUCKETS)


def test_a_stop_waits_for_nobody(start_node: StartNode) -> None:
    """Neither for a peer that does not read its answers, nor for one that streams configs, nor for half a request."""
    node = start_node(*FEW_VBUCKETS)
    place = {"key": b"large", "collection_id": DEFAULT_COLLECTION}
    with node.connect() as deaf, node.connect() as slow, httpx.Client(auth=(USER, PASSWORD)) as client:
        deaf.request(Set(value=bytes(1024 * 1024), **place))
        deaf.sock.sendall(Get(**place).encode() * 100)
        slow.sock.sendall(Set(value=bytes(100), **place).encode()[:50])
        with client.stream("GET", f"{node.http_url}/pools/default/bs/default") as stream:
            next(stream.iter_bytes())
            assert node.stop() == 0
    assert node.stopped_s < 10


def test_a_stop_answers_who_waits_for_a_manifest(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS)
    address = urlsplit(node.http_url)
    login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    path = "/pools/default/buckets/default/scopes/@ensureManifest/ff"
    with socket.create_connection((address.hostname, address.port), timeout=30) as waiting:
        waiting.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic {login}\r\n\r\n".encode())
        # What has come first is read first.
        httpx.get(f"{node.http_url}/pools", auth=(USER, PASSWORD)).raise_for_status()
        assert node.stop() == 0
        assert waiting.recv(1000).startswith(b"HTTP/1.1 503")
    assert "Traceback" not in node.log()


# --- what a start refuses -----------------------------------------------------------------------------------------


def test_a_second_process_on_the_same_data(start_node: StartNode) -> None:
    """It is refused, and has changed nothing: not even the password it was given is taken."""
    node = start_node(*FEW_VBUCKETS)
    before = branches(node)
    files = {path: path.stat().st_mtime_ns for path in node.data.iterdir()}
    other = ("--bucket", "another", "--user", USER, "--password", "another password")
    second = run_serve("--data", str(node.data), *FREE_PORTS, *other)
    assert "another process uses the data" in sentence(second)
    assert {path: path.stat().st_mtime_ns for path in node.data.iterdir()} == files
    assert [path.name for path in (node.data / "buckets").iterdir()] == ["default"]
    node.kill()
    node.user = None
    node.start()
    node.user = USER
    assert branches(node).keys() == before.keys()


@pytest.mark.parametrize("option", ["--port", "--http-port"])
def test_a_port_that_is_taken(tmp_path: Path, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run_serve("--data", str(tmp_path / "data"), *FEW_VBUCKETS, *FREE_PORTS, *LOGIN, option, port)
    assert f"another program listens on port {port} of 127.0.0.1. Stop it" in sentence(ended)


@pytest.mark.parametrize(("usual", "others"), [(11210, ("--http-port", "0")), (8091, ("--port", "0"))])
def test_a_usual_port_that_is_taken_is_not_replaced(tmp_path: Path, usual: int, others: tuple[str, ...]) -> None:
    """Else the next command, which names no port, would write to the server that has it."""
    with socket.socket() as taken:
        with suppress(OSError):  # another program of this machine may have it
            taken.bind(("127.0.0.1", usual))
            taken.listen()
        ended = run_serve("--data", str(tmp_path / "data"), *FEW_VBUCKETS, *LOGIN, *others)
    assert f"another program listens on port {usual} of 127.0.0.1" in sentence(ended)


def test_a_start_that_fails_is_a_clean_stop(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS)
    before = branches(node)
    assert node.stop() == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        sentence(run_serve("--data", str(node.data), "--port", str(taken.getsockname()[1]), "--http-port", "0", *LOGIN))
    node.start()
    assert branches(node) == before


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_beyond_loopback_without_tls(tmp_path: Path, host: str) -> None:
    ended = run_serve("--data", str(tmp_path / "data"), *FREE_PORTS, *LOGIN, "--host", host)
    assert f"listening on {host} without TLS" in sentence(ended)
    assert not (tmp_path / "data").exists()


def test_beyond_loopback_where_that_is_wanted(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS, "--host", "0.0.0.0", "--insecure", "--advertise-host", "localhost")
    assert node.address.host == "localhost"
    with node.connect() as connection:
        connection.request(Noop())


@case_apart(("--host", "0.0.0.0", "--insecure"), "--advertise-host")
@case_apart(("--vbuckets", "1000"), "1000 vbuckets")
@case_apart(("--user", "me"), "a user comes with a password")
@case_apart(("--tls-cert", __file__), "TLS needs both")
@case_apart(("--tls-cert", __file__, "--tls-key", __file__), "certificate or key can't be used")
@case_apart(("--data", "/proc/no/such/folder"), "/proc/no/such/folder")
@case_apart(("--host", "no.such.host.invalid", "--insecure"), "no.such.host.invalid")
@case_apart(("--bucket", "../elsewhere"), "'../elsewhere' is not the name of a bucket")
def test_options_that_can_not_be_used(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    usual = ("--data", str(tmp_path / "data"), *FREE_PORTS, *FEW_VBUCKETS)
    assert said in sentence(run_serve(*usual, *options))


# --- what a start says --------------------------------------------------------------------------------------------


def test_the_generated_password(tmp_path: Path) -> None:
    """Shown once, kept where only its owner reads it."""
    data = tmp_path / "data"
    with NodeProcess(data, *FEW_VBUCKETS, user=None) as node:
        node.start()
        node.user, node.password = node.ready["user"], node.ready["password"]
        with node.connect() as connection:
            connection.request(Noop())
        assert node.password not in node.log()
        assert node.stop() == 0
        kept = data / "password"
        assert kept.read_text().strip() == node.password
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert stat.S_IMODE((data / "users.json").stat().st_mode) == 0o600
        assert node.password not in (data / "users.json").read_text()
        password, node.user = node.password, None
        node.start()
        assert "password" not in node.ready
        node.user = node.ready["user"]
        assert kept.read_text().strip() == password
        with node.connect() as connection:
            connection.request(Noop())
        assert password not in node.log()


def test_a_password_is_not_made_by_a_start_that_fails(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        sentence(run_serve("--data", str(data), *FEW_VBUCKETS, "--port", port, "--http-port", "0"))
    with NodeProcess(data, *FEW_VBUCKETS, user=None) as node:
        assert node.start().ready["password"] == (data / "password").read_text().strip()


def test_the_ready_line(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "data", *FEW_VBUCKETS, user=None, as_json=False) as node:
        node.start()
        assert re.fullmatch(r"ready couchbase://127\.0\.0\.1:\d+\n", node.ready_line)
        assert f"(kept in {tmp_path / 'data' / 'password'})" in node.log()
        assert f"data {tmp_path / 'data'}\n" in node.log()
        assert node.stop() == 0
        shown = node.log()
        node.start()
        assert re.fullmatch(r"ready couchbase://127\.0\.0\.1:\d+\n", node.ready_line)
        assert "kept in" not in node.log().removeprefix(shown)


def test_the_ready_line_as_json(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS)
    ready = json.loads(node.ready_line)
    assert ready.keys() == {"ready", "http", "user", "data", "buckets"}
    assert ready["user"] == USER
    assert ready["data"] == str(node.data)
    with httpx.Client(auth=(USER, PASSWORD)) as client:
        assert client.get(f"{ready['http']}/pools").raise_for_status().json()["pools"][0]["name"] == "default"


# --- A node behind address translation tells clients the address that they see, and not the one it listens on -------


HOST = "127.0.0.1"
SEEN_PORT = 31210
SEEN_HTTP_PORT = 38091


def test_the_ports_that_clients_see(start_node: StartNode) -> None:
    port, http_port = free_port(), free_port()
    node = start_node(
        "--vbuckets", "4", "--port", str(port), "--http-port", str(http_port),
        "--advertise-host", "localhost",
        "--advertise-port", str(SEEN_PORT), "--advertise-http-port", str(SEEN_HTTP_PORT),
    )  # fmt: skip
    assert node.ready["ready"] == f"couchbase://localhost:{SEEN_PORT}"
    assert node.ready["http"] == f"http://localhost:{SEEN_HTTP_PORT}"
    login = Login(credentials=Credentials(USER, PASSWORD), bucket="default")
    address = Address(HOST, port)
    with KvConnection.open(address, login) as connection:
        config = connection.outcome.cluster_config
        assert config is not None
    assert ClusterMap.decode(config, asked=address).nodes == (Address("localhost", SEEN_PORT),)
    assert services(json.loads(config)) == {"kv": SEEN_PORT, "mgmt": SEEN_HTTP_PORT}
    with httpx.Client(auth=(USER, PASSWORD)) as client:
        url = f"http://{HOST}:{http_port}/pools/default/b/default"
        assert client.get(url).raise_for_status().content == config


def test_one_port_alone(start_node: StartNode) -> None:
    node = start_node("--vbuckets", "4", "--advertise-http-port", str(SEEN_HTTP_PORT))
    with node.connect() as connection:
        config = connection.outcome.cluster_config
        assert config is not None
    assert services(json.loads(config)) == {"kv": node.address.port, "mgmt": SEEN_HTTP_PORT}


def services(config: dict[str, Any]) -> dict[str, int]:
    """The ports of the only node."""
    assert len(config["nodesExt"]) == 1
    ports: dict[str, int] = config["nodesExt"][0]["services"]
    return ports
