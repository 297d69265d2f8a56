"""Attacks on a real node, by strangers and by users: others are served meanwhile, and memory stays bounded.

Nothing here looks at a clock. That others are not kept waiting shows in the order of answers: theirs come while most of
what the attacker asked for is still to be done.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from urllib.parse import urlsplit

import httpx
import pytest

from headwater.client.kv_connection import KvConnection
from headwater.protocol.features import Feature
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.documents import Get, GetResponse, Set
from headwater.protocol.messages.session import Hello, Noop, SaslAuth, SelectBucket
from headwater.protocol.messages.subdocument import SubdocCounter
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.sasl import PlainLogin
from headwater.protocol.status import Status
from support.node_process import PASSWORD, USER, NodeProcess, StartNode, memory_bytes

MIB = 1024 * 1024
FEW_VBUCKETS = ("--vbuckets", "16")
HEADER_BYTES = 24


def guess(number: int, user: str = "user {}") -> SaslAuth:
    login = PlainLogin(user.format(number), f"guess {number}")
    return SaslAuth(opaque=number, key=b"PLAIN", value=login.encode())


def statuses_of(answers: bytes | bytearray) -> list[int]:
    """Of the answers that are complete."""
    buffer = FrameBuffer()
    buffer.receive_data(bytes(answers))
    return [frame.specific for frame in buffer.frames()]


class Flood:
    """A connection that sends many requests at once, and counts the bytes of the answers as they come."""

    def __init__(self, sock: socket.socket, requests: list[Request]) -> None:
        self._sock = sock
        self.answers = bytearray()
        self._requests = b"".join(request.encode() for request in requests)
        self._sender = threading.Thread(target=sock.sendall, args=(self._requests,), daemon=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._sender.start()
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):
            while data := self._sock.recv(65536):
                self.answers += data

    def statuses(self) -> list[int]:
        return statuses_of(self.answers)

    def end(self) -> None:
        self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join()


@contextmanager
def bare(node: NodeProcess) -> Iterator[socket.socket]:
    with socket.create_connection((node.address.host, node.address.port), timeout=60) as sock:
        yield sock


def counters(connection: KvConnection, *, document_bytes: int, count: int) -> list[Request]:
    """Counters in a large document: each makes a whole new version of it."""
    place = {"key": b"large", "collection_id": DEFAULT_COLLECTION}
    connection.request(Set(value=b'{"n":0,"pad":"%s"}' % (b"x" * document_bytes), **place))
    return [SubdocCounter(opaque=number, path=b"n", new_value=b"1", **place) for number in range(count)]


# --- freezing -----------------------------------------------------------------------------------------------------


def test_pipelined_log_ins_keep_no_other_client_waiting(start_node: StartNode) -> None:
    """A stranger sends 3.5 KB. Each of the 100 passwords takes the node ten milliseconds to hash."""
    node = start_node(*FEW_VBUCKETS)
    with node.connect() as other, bare(node) as stranger:
        flood = Flood(stranger, [guess(number) for number in range(100)])
        for _ in range(20):
            other.request(Noop())
        answered = len(flood.answers) // HEADER_BYTES
        assert answered < 50, "the log-ins came first"
        flood.end()
    assert set(flood.statuses()) <= {Status.AUTH_ERROR}


def test_requests_behind_a_log_in_wait_for_it(start_node: StartNode) -> None:
    """Real clients send the end of their log-in, the bucket and more in one write."""
    node = start_node(*FEW_VBUCKETS)
    right = SaslAuth(key=b"PLAIN", value=PlainLogin(USER, PASSWORD).encode())
    with bare(node) as sock:
        sock.sendall(b"".join(request.encode() for request in (guess(1), right, SelectBucket(key=b"default"), Noop())))
        answers = b""
        while len(statuses_of(answers)) < 4:
            answers += sock.recv(4096)
    assert statuses_of(answers) == [Status.AUTH_ERROR, Status.SUCCESS, Status.SUCCESS, Status.SUCCESS]


def test_guesses_lock_no_admin_out(start_node: StartNode) -> None:
    """90 connections guess names, on both ports and from the admin's own address."""
    node = start_node(*FEW_VBUCKETS)
    web = urlsplit(node.http_url)
    with ExitStack() as stack:
        for number in range(45):
            sock = stack.enter_context(bare(node))
            sock.sendall(b"".join(guess(number * 1000 + at).encode() for at in range(50)))
            guesser = stack.enter_context(socket.create_connection((web.hostname, web.port), timeout=60))
            wrong = f"GET /pools HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic {number:04d}Ong==\r\n\r\n"
            guesser.sendall(wrong.encode() * 20)
        assert httpx.get(f"{node.http_url}/pools", auth=(USER, PASSWORD), timeout=60).status_code == 200
        # From now on the admin is known at this address, and goes first.
        for _ in range(5):
            with node.connect() as connection:
                connection.request(Noop())


def test_idle_connections_do_not_hide_the_health(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS)
    web = urlsplit(node.http_url)
    with ExitStack() as stack:
        for _ in range(520):
            stack.enter_context(socket.create_connection((web.hostname, web.port), timeout=60))
        assert httpx.get(f"{node.http_url}/health", timeout=60).status_code == 200
        assert httpx.get(f"{node.http_url}/pools", auth=(USER, PASSWORD), timeout=60).status_code == 200


# --- filling ------------------------------------------------------------------------------------------------------


def test_counters_on_a_large_document_fill_no_memory_and_keep_no_client_waiting(start_node: StartNode) -> None:
    """40 requests of 33 bytes, each of which makes a new version of 4 MB."""
    node = start_node(*FEW_VBUCKETS)
    with node.connect() as attacker, node.connect() as other:
        requests = counters(attacker, document_bytes=4_000_000, count=40)
        before = peak = memory_bytes(node)
        flood = Flood(attacker.sock, requests)
        answered_before_all = 0
        while len(flood.answers) < len(requests) * HEADER_BYTES:
            other.request(Noop())
            answered_before_all += 1
            peak = max(peak, memory_bytes(node))
        flood.end()
    assert answered_before_all > 5, "the counters came first"
    # What the node takes to settle commits, and a few of the versions: not all of them, several times.
    print(f"grew by {(peak - before) / MIB:.0f} MiB")
    assert peak - before < 300 * MIB


def test_a_node_that_is_full_still_reads(start_node: StartNode) -> None:
    """The bound of all connections together is met by one write: other writes wait, and none is lost."""
    node = start_node(*FEW_VBUCKETS, "--node-pending-bytes-max", "100000")
    place = {"collection_id": DEFAULT_COLLECTION}
    with node.connect() as first, node.connect() as second:
        writes = [Set(opaque=n, key=b"k%d" % n, value=bytes(150_000), **place) for n in range(40)]
        flood = Flood(first.sock, list(writes))
        for number in range(20):
            second.request(Set(key=b"s%d" % number, value=b"1", **place))
            answer = second.request(Get(key=b"s%d" % number, **place))
            assert isinstance(answer, GetResponse)
        while len(flood.answers) < len(writes) * HEADER_BYTES:
            second.request(Noop())
        flood.end()
    assert set(flood.statuses()) == {Status.SUCCESS}


def test_who_leaves_requests_unfinished_is_dropped_when_the_node_holds_too_much(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS, "--node-buffer-bytes-max", str(12 * MIB))
    unfinished = Set(key=b"k", collection_id=DEFAULT_COLLECTION, value=bytes(8 * MIB)).encode()[:-1]
    with ExitStack() as stack:
        slow = [stack.enter_context(node.connect()) for _ in range(3)]
        for connection in slow:
            connection.sock.sendall(unfinished)
            with node.connect() as other:
                other.request(Set(key=b"other", collection_id=DEFAULT_COLLECTION, value=bytes(2 * MIB)))
        assert slow[0].sock.recv(1) == b""
        slow[2].sock.sendall(b"\0")
        assert slow[2].sock.recv(HEADER_BYTES)
    assert "holds too much for its clients" in node.log()


# --- the log ------------------------------------------------------------------------------------------------------


def test_a_stranger_can_not_fill_the_log(start_node: StartNode) -> None:
    node = start_node(*FEW_VBUCKETS)
    hello = Hello(key=b"a stranger", features=(Feature.XERROR,))
    requests = [hello, *(SelectBucket(opaque=number, key=b"\0" * 12_000) for number in range(500))]
    with bare(node) as sock, node.connect() as other:
        flood = Flood(sock, requests)
        while len(flood.statuses()) < len(requests):
            other.request(Noop())
        flood.end()
    assert len(node.log()) < 100_000
    assert "\0" not in node.log()


# --- by the minute ------------------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.parametrize(("document_bytes", "count"), [(5_000_000, 60), (19_000_000, 200)])
def test_the_largest_counters(start_node: StartNode, document_bytes: int, count: int) -> None:
    """With the usual limits: 1.1 GB and 10.5 GB before there were any."""
    node = start_node(*FEW_VBUCKETS)
    with node.connect() as attacker, node.connect() as other:
        requests = counters(attacker, document_bytes=document_bytes, count=count)
        before = peak = memory_bytes(node)
        flood = Flood(attacker.sock, requests)
        progress = [0]
        while len(flood.answers) < len(requests) * HEADER_BYTES:
            other.request(Noop())
            progress.append(len(flood.answers) // HEADER_BYTES)
            peak = max(peak, memory_bytes(node))
        flood.end()
    print(f"grew by {(peak - before) / MIB:.0f} MiB")
    assert peak - before < 1024 * MIB
    # Between two noops of another client, no more is answered than one commit holds.
    assert max(later - earlier for earlier, later in pairwise(progress)) <= 64 * MIB // document_bytes + 1
