"""Clients that ask for too much, say too little, or do not read: a real node drops them and serves the others."""

from __future__ import annotations

import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from headwater.client.kv_connection import KvConnection
from headwater.errors import HeadwaterError
from headwater.protocol.features import Magic, Opcode
from headwater.protocol.frames import HEADER
from headwater.protocol.messages.documents import Get, GetResponse, Set
from headwater.protocol.messages.session import Hello, Noop, SaslAuth, SaslListMechanisms
from headwater.protocol.numbers import DEFAULT_COLLECTION, FRAME_BODY_BYTES_MAX
from headwater.protocol.sasl import PlainLogin
from support.acknowledged_writes import exchange, statistics
from support.cases import case_apart
from support.machine import self_signed
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

FEW_VBUCKETS = ("--vbuckets", "16")
SOON_S = 1.0
"""The time limits of the nodes here. They look at the clock once a second."""
SLACK_S = 8.0
"""What a loaded machine may take beyond that."""
BEAT_S = 0.2

MIB = 1024 * 1024
GROWTH_BYTES_MAX = 96 * MIB


def test_the_limit_of_open_files_is_raised(start_node: StartNode) -> None:
    _, most = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        node = start_node(*FEW_VBUCKETS, fresh=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert resource.prlimit(node.pid, resource.RLIMIT_NOFILE) == (most, most)


@contextmanager
def connected(node: NodeProcess) -> Iterator[socket.socket]:
    """A bare connection."""
    with socket.create_connection((node.address.host, node.address.port), timeout=30) as sock:
        yield sock


def wait_until_closed(sock: socket.socket, *, within_s: float) -> float:
    """Read and forget until the other end closes. Returns how long that took."""
    began_s = time.monotonic()
    try:
        while True:
            sock.settimeout(max(0.001, began_s + within_s - time.monotonic()))
            if not sock.recv(65536):
                break
    except ConnectionError:
        pass
    except TimeoutError:
        pytest.fail(f"the connection is still open after {within_s} s")
    return time.monotonic() - began_s


def beat_until_closed(sock: socket.socket, beats: Iterator[bytes], *, within_s: float) -> float:
    """Send something every now and then until the other end closes. Returns how long that took."""
    began_s = time.monotonic()
    sock.settimeout(BEAT_S)
    while time.monotonic() < began_s + within_s:
        try:
            sock.sendall(next(beats))
            if not sock.recv(65536):
                break
        except TimeoutError:
            continue
        except ConnectionError:
            break
        time.sleep(BEAT_S)
    else:
        pytest.fail(f"the connection is still open after {within_s} s")
    return time.monotonic() - began_s


def assert_serves(node: NodeProcess) -> None:
    with node.connect() as connection:
        connection.request(Noop())


def one_by_one(data: bytes) -> Iterator[bytes]:
    for byte in data:
        yield bytes([byte])


# --- connections and time -----------------------------------------------------------------------------------------


def test_too_many_connections(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS, "--connections-max", "3")
    first, *others = [node.connect() for _ in range(3)]
    with connected(node) as refused:
        wait_until_closed(refused, within_s=SLACK_S)
    for connection in others:
        connection.request(Noop())
    first.close()
    deadline_s = time.monotonic() + SLACK_S
    while True:
        try:
            others.append(node.connect())
            break
        except HeadwaterError:
            assert time.monotonic() < deadline_s, "the place of a connection that has gone is not free"
    for connection in others:
        connection.request(Noop())
        connection.close()


def test_no_login_in_time(start_node: StartNode) -> None:
    """Neither talking nor a log-in that trickles in puts the end off."""
    node = start_node(*FEW_VBUCKETS, "--auth-seconds", str(SOON_S))
    with node.connect() as patient, connected(node) as silent, connected(node) as chatty:
        chatty.sendall(Hello(key=b"chatty").encode() + SaslListMechanisms().encode())
        assert wait_until_closed(silent, within_s=SOON_S + SLACK_S) > SOON_S / 2
        wait_until_closed(chatty, within_s=SLACK_S)
        patient.request(Noop())
    hellos = iter(lambda: Hello(key=b"chatty").encode(), b"")
    login = SaslAuth(key=b"PLAIN", value=PlainLogin(USER, PASSWORD).encode()).encode()
    for beats in (hellos, one_by_one(login)):
        with connected(node) as slow:
            assert beat_until_closed(slow, beats, within_s=SOON_S + SLACK_S) > SOON_S / 2
    assert_serves(node)


def test_idle(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS, "--idle-seconds", str(SOON_S))
    with node.connect() as silent:
        assert wait_until_closed(silent.sock, within_s=SOON_S + SLACK_S) > SOON_S / 2
    with node.connect() as busy:
        until_s = time.monotonic() + 3 * SOON_S
        while time.monotonic() < until_s:
            busy.request(Noop())
            time.sleep(BEAT_S)
    with node.connect() as slow:
        never_ending = one_by_one(Set(key=b"k", collection_id=DEFAULT_COLLECTION, value=bytes(1000)).encode())
        beat_until_closed(slow.sock, never_ending, within_s=SOON_S + SLACK_S)
    assert_serves(node)


# --- bytes that come too slowly -----------------------------------------------------------------------------------


def test_slow_loris_in_the_tls_handshake(start_node: StartNode, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    tls = ("--tls-only", "--tls-cert", str(certificate), "--tls-key", str(key))
    node = start_node(*FEW_VBUCKETS, "--auth-seconds", str(SOON_S), *tls)
    with connected(node) as silent:
        wait_until_closed(silent, within_s=SOON_S + SLACK_S)
    with connected(node) as plain:
        plain.sendall(Hello(key=b"no TLS").encode())
        wait_until_closed(plain, within_s=SLACK_S)
    speaks_tls(node, certificate)


def speaks_tls(node: NodeProcess, certificate: Path) -> None:
    """Wait until a noop is answered: there may be no room for a connection yet, or the machine may be slow."""
    context = ssl.create_default_context(cafile=str(certificate))
    deadline_s = time.monotonic() + SLACK_S
    while time.monotonic() < deadline_s:
        with (
            suppress(OSError),
            connected(node) as sock,
            context.wrap_socket(sock, server_hostname="127.0.0.1") as encrypted,
        ):
            encrypted.sendall(Noop().encode())
            if encrypted.recv(24):
                return
    pytest.fail("no noop is answered")


def test_unfinished_handshakes_count_as_connections(start_node: StartNode, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    node = start_node(
        *FEW_VBUCKETS, "--tls-only", "--connections-max", "2", "--tls-cert", str(certificate), "--tls-key", str(key)
    )
    with connected(node) as first, connected(node) as second:
        with connected(node):
            wait_until_closed(first, within_s=SLACK_S)
        second.sendall(b"no TLS at all" * 10)
        wait_until_closed(second, within_s=SLACK_S)
        # The places of handshakes that have failed are free.
        speaks_tls(node, certificate)
    with connected(node):
        # It is still in its handshake when the node stops.
        assert node.stop() == 0
    assert "Traceback" not in node.log()


# --- bytes that are no requests -----------------------------------------------------------------------------------


@case_apart(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="http")
@case_apart(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), id="tls")
@case_apart(b"\x00", id="zero")
@case_apart(b"\xff" * 100_000, id="ones")
# Lengths that contradict each other.
@case_apart(HEADER.pack(Magic.REQUEST, Opcode.GET, 100, 0, 0, 0, 10, 0, 0), id="lengths")
# A good request, and then nonsense.
@case_apart(Hello(key=b"me").encode() + b"nonsense", id="after a request")
def test_garbage(limits_node: NodeProcess, garbage: bytes) -> None:
    with connected(limits_node) as sock:
        sock.sendall(garbage)
        wait_until_closed(sock, within_s=SLACK_S)
    assert_serves(limits_node)


@pytest.mark.parametrize("body_bytes", [FRAME_BODY_BYTES_MAX + 1, 1024 * MIB, 2**32 - 1])
@pytest.mark.parametrize("is_logged_in", [False, True])
def test_a_body_that_is_too_long(limits_node: NodeProcess, body_bytes: int, is_logged_in: bool) -> None:
    """Closed on the header, while not one byte of the body has come."""
    header = HEADER.pack(Magic.REQUEST, Opcode.SET, 10, 8, 0, 0, body_bytes, 0, 0)
    with connected(limits_node) as bare, limits_node.connect() as logged_in:
        sock = logged_in.sock if is_logged_in else bare
        sock.sendall(header)
        assert wait_until_closed(sock, within_s=SLACK_S) < SLACK_S / 2


def test_a_stranger_is_not_allowed_a_large_body(limits_node: NodeProcess) -> None:
    """Who has not logged in has nothing long to say."""
    header = HEADER.pack(Magic.REQUEST, Opcode.SASL_AUTH, 5, 0, 0, 0, 15 * MIB, 0, 0)
    before = limits_node.resident_bytes()
    with ExitStack() as stack:
        sockets = [stack.enter_context(connected(limits_node)) for _ in range(20)]
        for sock in sockets:
            with suppress(ConnectionError):
                sock.sendall(header + bytes(14 * MIB))
        assert limits_node.resident_bytes() - before < GROWTH_BYTES_MAX
        for sock in sockets:
            wait_until_closed(sock, within_s=SLACK_S)


# --- answers that nobody reads ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def limits_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node with small limits that tests may share, since none of them may harm it."""
    options = ("--unsent-bytes-max", str(MIB), "--stalled-seconds", str(SOON_S))
    with NodeProcess(tmp_path_factory.mktemp("limits") / "data", *FEW_VBUCKETS, *options) as node:
        yield node.start()
        assert node.stop() == 0
        assert "Traceback" not in node.log(), node.log()


def large_document(connection: KvConnection) -> Get:
    """Store a document of a mebibyte. Returns the request for it."""
    place = {"key": b"large", "collection_id": DEFAULT_COLLECTION}
    connection.request(Set(value=bytes(MIB), **place))
    return Get(**place)


def watch_growth(node: NodeProcess, sock: socket.socket, before: int) -> int:
    """The most memory that a node takes until it drops a peer. The peer's socket is not read."""
    most = 0
    deadline_s = time.monotonic() + SOON_S + SLACK_S
    with node.connect() as watcher:
        own_port = sock.getsockname()[1]
        while _is_open(node, own_port):
            assert time.monotonic() < deadline_s, "the peer is not dropped"
            watcher.request(Noop())
            most = max(most, node.resident_bytes() - before)
            time.sleep(0.05)
    return most


def _is_open(node: NodeProcess, peer_port: int) -> bool:
    """Whether the node still has its end of a connection: it is asked of the kernel, so that the peer need not read."""
    established = "01"
    ends = (f":{node.address.port:04X}", f":{peer_port:04X}")
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if local.endswith(ends[0]) and remote.endswith(ends[1]) and state == established:
            return True
    return False


def test_a_peer_that_does_not_read_large_answers(limits_node: NodeProcess) -> None:
    """Two gibibytes of answers are asked for in 70 kilobytes, and nobody reads them."""
    with limits_node.connect() as connection:
        request = large_document(connection).encode()
        before = limits_node.resident_bytes()
        connection.sock.sendall(request * 2000)
        growth = watch_growth(limits_node, connection.sock, before)
    print(f"grew by {growth / MIB:.0f} MiB")
    assert growth < GROWTH_BYTES_MAX
    assert "does not read its answers" in limits_node.log()
    assert_serves(limits_node)


def test_a_peer_that_does_not_read_small_answers(limits_node: NodeProcess) -> None:
    sets = b"".join(Set(key=b"k%d" % number, collection_id=DEFAULT_COLLECTION).encode() for number in range(1000))
    with limits_node.connect() as connection:
        before = limits_node.resident_bytes()
        connection.sock.settimeout(1)
        with pytest.raises((TimeoutError, ConnectionError)):  # noqa: PT012
            for _ in range(10_000):
                connection.sock.sendall(sets)
        growth = limits_node.resident_bytes() - before
        growth = max(growth, watch_growth(limits_node, connection.sock, before))
    print(f"grew by {growth / MIB:.0f} MiB")
    assert growth < 2 * GROWTH_BYTES_MAX
    assert_serves(limits_node)


def test_a_peer_that_reads_late_gets_everything(limits_node: NodeProcess) -> None:
    """Far more than the node holds back for a peer, in one write, read as it comes."""
    with limits_node.connect() as connection:
        request = large_document(connection)
        requests = [Get(opaque=number, key=request.key, collection_id=DEFAULT_COLLECTION) for number in range(100)]
        answers = exchange(connection, requests, batch=len(requests))
    assert {len(answer.value) for answer in answers} == {MIB}


def test_a_peer_that_reads_slowly_is_served(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS, "--unsent-bytes-max", "1000", "--stalled-seconds", "5")
    with node.connect() as connection:
        stored = [
            Set(opaque=number, key=b"k%d" % number, collection_id=DEFAULT_COLLECTION, value=bytes(10_000))
            for number in range(500)
        ]
        assert len(exchange(connection, list(stored), batch=len(stored))) == len(stored)
        reads = [Get(opaque=number, key=b"k%d" % number, collection_id=DEFAULT_COLLECTION) for number in range(500)]
        connection.sock.sendall(b"".join(read.encode() for read in reads))
        time.sleep(SOON_S)
        answers = exchange(connection, list(reads), batch=len(reads), is_sent=True)
        assert all(len(answer.value) == 10_000 for answer in answers)
        assert int(statistics(connection)["curr_items"]) == 500
        assert isinstance(connection.request(reads[0]), GetResponse)
