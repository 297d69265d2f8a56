"""Crowds of connections that make the node hold bytes, or take its places: what it holds is bounded and freed, and
others get in.

Tests that count run always. Those that measure memory and waiting times are for `make soak`; their figures are in
`docs/guides/security.md`.
"""

from __future__ import annotations

import multiprocessing
import resource
import selectors
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx
import pytest

from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.node.options import ServerLimits
from headwater.protocol.messages.dcp_streams import Open, OpenFlags
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.session import Noop
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.sasl import Credentials
from support.machine import self_signed
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

MIB = 1024 * 1024
FEW_VBUCKETS = ("--vbuckets", "16")
LARGE = {"key": b"large", "collection_id": DEFAULT_COLLECTION}
LARGE_BYTES = 20_000_000
UNFINISHED = Set(value=bytes(LARGE_BYTES), **LARGE).encode()[:-1]


def open_dcp(connection: KvConnection, name: str) -> None:
    connection.request(Open(key=name.encode(), flags=OpenFlags.PRODUCER))


def own_bytes(node: NodeProcess) -> int:
    """The memory that is the node's own. Mapped pages of data files are the system's to take back."""
    status = Path(f"/proc/{node.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


@contextmanager
def peak_of(node: NodeProcess) -> Iterator[list[int]]:
    """The most memory that the node takes meanwhile, in a list of one."""
    peak, is_over = [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.005):
            peak[0] = max(peak[0], own_bytes(node))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        is_over.set()
        watcher.join()


def send_or_be_dropped(connection: KvConnection, data: bytes) -> None:
    with suppress(OSError):
        connection.sock.sendall(data)


# --- places -------------------------------------------------------------------------------------------------------


def test_idle_connections_do_not_keep_others_out(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS, "--connections-max", "100")
    with node.connect() as before, ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection((node.address.host, node.address.port), timeout=30))
        with node.connect() as connection:
            connection.request(Noop())
        before.request(Noop())


def test_more_connections_than_open_files(start_node: StartNode) -> None:
    """The bounds are those that a node takes where the system allows it 400 files. They leave enough for the rest."""
    limits = ServerLimits().within_open_files(400)
    bounds = ("--connections-max", str(limits.connections_max), "--http-connections-max", "26")
    node = start_node(*FEW_VBUCKETS, *bounds)
    assert limits.http_connections_max == 26
    resource.prlimit(node.pid, resource.RLIMIT_NOFILE, (400, 400))
    web = urlsplit(node.http_url)
    with node.connect() as before, ExitStack() as stack:
        for address in [(node.address.host, node.address.port), (web.hostname, web.port)] * 300:
            stack.enter_context(socket.create_connection(address, timeout=30))
        assert httpx.get(f"{node.http_url}/health", timeout=30).status_code == 200
        with node.connect() as connection:
            connection.request(Noop())
        before.request(Noop())
    assert "Traceback" not in node.log()


# --- memory, by the minute ----------------------------------------------------------------------------------------


def leave_gets_unread(node: NodeProcess, stack: ExitStack, count: int = 36) -> None:
    for number in range(count):
        connection = stack.enter_context(node.connect())
        open_dcp(connection, f"unread {number}")
        send_or_be_dropped(connection, b"".join(Get(opaque=n, **LARGE).encode() for n in range(3)))


def leave_requests_unfinished(node: NodeProcess, stack: ExitStack, count: int = 200) -> None:
    for number in range(count):
        connection = stack.enter_context(node.connect())
        open_dcp(connection, f"unfinished {number}")
        send_or_be_dropped(connection, UNFINISHED)


def come_in_rounds(node: NodeProcess, stack: ExitStack) -> None:
    for _ in range(11):
        with ExitStack() as round_:
            for _ in range(40):
                connection = round_.enter_context(node.connect())
                send_or_be_dropped(connection, UNFINISHED)


@pytest.mark.soak
@pytest.mark.parametrize("attack", [leave_gets_unread, leave_requests_unfinished, come_in_rounds])
def test_what_peers_make_the_node_hold(start_node: StartNode, attack: Callable[[NodeProcess, ExitStack], None]) -> None:
    """With the usual bound of 512 MiB: 6 GB, 4.3 GB and 5.8 GB before DCP counted and closing freed."""
    node = start_node(*FEW_VBUCKETS)
    with node.connect() as connection:
        connection.request(Set(value=bytes(LARGE_BYTES), **LARGE))
    time.sleep(2)
    before = own_bytes(node)
    with ExitStack() as stack, peak_of(node) as peak:
        attack(node, stack)
        time.sleep(2)
    began_s = time.monotonic()
    while (after := own_bytes(node)) > before + 50 * MIB and time.monotonic() < began_s + 20:
        time.sleep(0.1)
    rest_s = time.monotonic() - began_s
    print(f"{before / 1e6:.0f} MB, at most {peak[0] / 1e6:.0f} MB, {after / 1e6:.0f} MB after {rest_s:.1f} s")
    assert peak[0] < 512 * MIB + 300_000_000
    assert rest_s < 10


# --- waiting, by the minute -----------------------------------------------------------------------------------------


def crowd(address: tuple[str, int], request: Callable[[int], bytes], count: int, for_s: float) -> None:
    """Keep so many connections open that have sent a request, and open another for each that is closed."""
    until_s = time.monotonic() + for_s
    selector = selectors.DefaultSelector()
    opened = 0
    while time.monotonic() < until_s:
        while len(selector.get_map()) < count:
            sock = socket.socket()
            sock.setblocking(False)
            sock.connect_ex(address)
            selector.register(sock, selectors.EVENT_WRITE)
            opened += 1
        for key, events in selector.select(timeout=0.1):
            sock = cast(socket.socket, key.fileobj)
            try:
                if events & selectors.EVENT_WRITE:
                    sock.send(request(opened))
                    selector.modify(sock, selectors.EVENT_READ)
                elif not sock.recv(65536):
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                selector.unregister(sock)
                sock.close()
    print(f"{opened} connections")


def basic(name: str, password: str) -> str:
    return f"Authorization: Basic {b64encode(f'{name}:{password}'.encode()).decode()}"


def head(first: str, *headers: str) -> bytes:
    return "\r\n".join([f"{first} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


OWN_PAGE = ("Origin: http://localhost", "X-Headwater-Dashboard: 1")
MANIFEST = "/pools/default/buckets/default/scopes/@ensureManifest/ffff"
CROWDS: dict[str, Callable[[int], bytes]] = {
    "log-ins without a body": lambda number: head("POST /ui/api/login", *OWN_PAGE, "Content-Length: 100"),
    "made-up names": lambda number: head("GET /pools", basic(f"user {number}", "a guess")),
    "waits for a manifest": lambda number: (
        head(f"POST {MANIFEST}", basic(USER, PASSWORD), "Content-Length: 14") + b"timeout=300000"
    ),
    "handshakes": lambda number: b"",
}


@pytest.mark.soak
@pytest.mark.parametrize("kind", CROWDS)
def test_a_crowd_at_the_http_port(start_node: StartNode, tmp_path: Path, kind: str) -> None:
    """From the very address of the supervisor: every question for the health was refused before."""
    tls: tuple[str, ...] = ()
    if kind == "handshakes":
        certificate, key = self_signed(tmp_path)
        tls = ("--tls-cert", str(certificate), "--tls-key", str(key))
    node = start_node(*FEW_VBUCKETS, *tls)
    url, plain_http = node.ready.get("plain", node.url), node.ready.get("plain_http", node.http_url)
    host, port = url.rpartition("/")[2].split(":")
    attacked = urlsplit(node.http_url)
    attacker = multiprocessing.get_context("fork").Process(
        target=crowd, args=((attacked.hostname, attacked.port), CROWDS[kind], 620, 12.0)
    )
    waits_s, health_s = [], []
    login = Login(credentials=Credentials(USER, PASSWORD), bucket="default")
    with KvConnection.open(Address(host, int(port)), login) as good:
        attacker.start()
        time.sleep(1)
        until_s = time.monotonic() + 10
        while time.monotonic() < until_s:
            began_s = time.monotonic()
            good.request(Noop())
            waits_s.append(time.monotonic() - began_s)
            if len(waits_s) % 20 == 0:
                began_s = time.monotonic()
                assert httpx.get(f"{plain_http}/health", timeout=5).status_code == 200
                assert httpx.get(f"{plain_http}/metrics", timeout=5, auth=(USER, PASSWORD)).status_code == 200
                if kind == "handshakes":
                    assert httpx.get(f"{node.http_url}/health", timeout=5, verify=False).status_code == 200
                health_s.append(time.monotonic() - began_s)
            time.sleep(0.005)
        attacker.join()
    waits_s.sort()
    p99_s = waits_s[len(waits_s) * 99 // 100]
    print(
        f"{kind}: noop {waits_s[len(waits_s) // 2] * 1e3:.1f} ms (median), {p99_s * 1e3:.0f} ms (p99), "
        f"{waits_s[-1] * 1e3:.0f} ms at most; health {max(health_s) * 1e3:.0f} ms at most of {len(health_s)}"
    )
    assert p99_s < 0.1
    assert waits_s[-1] < 0.25
    assert "Traceback" not in node.log()
