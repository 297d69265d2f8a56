"""A client that only sends requests and counts answers, so that the server is measured."""

from __future__ import annotations

import random
import select
import socket
import struct
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headwater.protocol.features import Feature
from headwater.protocol.messages.session import Hello, SaslAuth, SelectBucket
from headwater.protocol.sasl import PlainLogin
from headwater.protocol.values import compress

_HEADER = struct.Struct(">BBHBBHIIQ")
HEADER_BYTES = 24
_SEND_BYTES = 256 * 1024
_TICK_S = 0.01
_TICK_SETS_MAX = 1_000
"""The limit of one step after a stall: the answers to more sets might not fit into the socket's buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    user: str
    password: str
    bucket: str
    takes_snappy: bool = False
    """Whether compression of values is negotiated first."""


def set_requests(count: int, *, first: int, value_bytes: int, vbuckets: int, compressed: bool = False) -> bytes:
    """Return plain sets of JSON documents, as an older client without collections sends them."""
    requests = bytearray()
    for number in range(first, first + count):
        key = b"user::%010d" % number
        requests += _set_request(key, number, value_bytes=value_bytes, vbuckets=vbuckets, compressed=compressed)
    return bytes(requests)


def _set_request(key: bytes, number: int, *, value_bytes: int, vbuckets: int, compressed: bool = False) -> bytes:
    value = (b'{"n":%d,"pad":"' % number).ljust(value_bytes - 2, b"x") + b'"}'
    if compressed:
        value = compress(value)
    return _request(0x01, key, number, vbuckets, extras=bytes(8), value=value, datatype=0x02 if compressed else 0)


def _request(
    opcode: int, key: bytes, number: int, vbuckets: int, *, extras: bytes = b"", value: bytes = b"", datatype: int = 0
) -> bytes:
    vbucket = (zlib.crc32(key) >> 16 & 0x7FFF) % vbuckets
    body = extras + key + value
    header = _HEADER.pack(0x80, opcode, len(key), len(extras), datatype, vbucket, len(body), number & 0xFFFFFFFF, 0)
    return header + body


def get_requests(numbers: Iterable[int], *, vbuckets: int) -> bytes:
    """Return gets of documents that `set_requests` has set."""
    return b"".join(_request(0x00, b"user::%010d" % number, number, vbuckets) for number in numbers)


def lookup_requests(numbers: Iterable[int], *, vbuckets: int) -> bytes:
    """Return sub-document gets of the field `n` of these documents."""
    extras = struct.pack(">HB", 1, 0)
    return b"".join(
        _request(0xC5, b"user::%010d" % number, number, vbuckets, extras=extras, value=b"n") for number in numbers
    )


def connect(port: int, login: Login | None) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    if login is not None:
        plain = PlainLogin(user=login.user, password=login.password).encode()
        if login.takes_snappy:
            connection.sendall(Hello(key=b"bench", features=(Feature.SNAPPY,)).encode())
            connection.recv(4096)
        connection.sendall(SaslAuth(key=b"PLAIN", value=plain).encode())
        connection.sendall(SelectBucket(key=login.bucket.encode()).encode())
        answers = b""
        while len(answers) < 2 * HEADER_BYTES:
            answers += connection.recv(4096)
        if answers[6:8] != bytes(2) or answers[30:32] != bytes(2):
            raise RuntimeError("the log-in was refused")
    connection.setblocking(False)
    return connection


def drive(
    port: int, requests: list[bytes], counts: list[int], login: Login | None = None, *, answer_bytes: int = HEADER_BYTES
) -> None:
    """Send each list of requests over its own connection and wait for all answers, which have equal lengths."""
    connections = {connect(port, login): at for at in range(len(requests))}
    views = [memoryview(data) for data in requests]
    sent = [0] * len(requests)
    missing = [count * answer_bytes for count in counts]
    received = bytearray(1024 * 1024)
    while connections:
        unsent = [connection for connection, at in connections.items() if sent[at] < len(views[at])]
        readable, writable, _ = select.select(list(connections), unsent, [])
        for connection in readable:
            at = connections[connection]
            missing[at] -= connection.recv_into(received)
            if missing[at] <= 0:
                del connections[connection]
                connection.close()
        for connection in writable:
            if connection in connections:
                at = connections[connection]
                sent[at] += connection.send(views[at][sent[at] : sent[at] + _SEND_BYTES])


def exchange_batches(port: int, batches: Iterable[tuple[bytes, int]], login: Login | None = None) -> None:
    """Send the batches of requests one after the other. Each waits for all answers to the one before."""
    received = bytearray(1024 * 1024)
    connection = connect(port, login)
    connection.setblocking(True)
    with connection:
        for requests, missing in batches:
            connection.sendall(requests)
            while missing > 0:
                count = connection.recv_into(received)
                if not count:
                    raise RuntimeError("the server has closed the connection")
                missing -= count


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Sets of random documents that `headwater load --generate` has written, at a steady rate."""

    sets_per_s: int
    seconds: float
    of_documents: int
    value_bytes: int
    vbuckets: int


def write_steadily(port: int, login: Login, updates: Updates) -> float:
    """Write these updates, and wait for each answer. Returns the sets per second that the server has accepted."""
    numbers = random.Random(8)
    written = 0
    connection = connect(port, login)
    connection.setblocking(True)
    with connection:
        start_s = time.perf_counter()
        while (passed_s := time.perf_counter() - start_s) < updates.seconds:
            count = min(round(passed_s * updates.sets_per_s) - written, _TICK_SETS_MAX)
            requests = bytearray()
            for _ in range(count):
                number = numbers.randint(1, updates.of_documents)
                requests += _set_request(
                    b"doc::%d" % number, number, value_bytes=updates.value_bytes, vbuckets=updates.vbuckets
                )
            connection.sendall(requests)
            _read_answers(connection, count)
            written += count
            time.sleep(max(0.0, _TICK_S - (time.perf_counter() - start_s - passed_s)))
    return written / passed_s


def small_set_waits_s(
    port: int, login: Login, *, vbuckets: int, goes_on: Callable[[float], bool], every_s: float = 0.01
) -> list[float]:
    """Send one small set after the other while `goes_on(seconds passed)` holds. Returns how long each took."""
    waits_s: list[float] = []
    connection = connect(port, login)
    connection.setblocking(True)
    with connection:
        start_s = time.perf_counter()
        while goes_on(time.perf_counter() - start_s):
            number = len(waits_s)
            request = _set_request(b"small::%d" % (number % 1000), number, value_bytes=100, vbuckets=vbuckets)
            sent_s = time.perf_counter()
            connection.sendall(request)
            _read_answers(connection, 1)
            waits_s.append(time.perf_counter() - sent_s)
            time.sleep(every_s)
    return waits_s


def _read_answers(connection: socket.socket, count: int) -> None:
    """Read the answers to sets. Raises if one of them was refused."""
    answers = bytearray()
    while len(answers) < count * HEADER_BYTES:
        received = connection.recv(count * HEADER_BYTES - len(answers))
        if not received:
            raise RuntimeError("the server has closed the connection")
        answers += received
    # A successful answer has no extras, key or value, so each is as long as a header.
    if any(answers[at + 6 : at + 8] != bytes(2) for at in range(0, len(answers), HEADER_BYTES)):
        raise RuntimeError("a set was refused")
