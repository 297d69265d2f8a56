"""A client that does nothing but send sets and count answers, so that the server is what is measured."""

from __future__ import annotations

import select
import socket
import struct
import zlib
from dataclasses import dataclass

from headwater.protocol.messages.session import SaslAuth, SelectBucket
from headwater.protocol.sasl import PlainLogin

_HEADER = struct.Struct(">BBHBBHIIQ")
_ANSWER_BYTES = 24
_SEND_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    user: str
    password: str
    bucket: str


def set_requests(count: int, *, first: int, value_bytes: int, vbuckets: int) -> bytes:
    """Plain sets of JSON documents, as an older client without collections sends them."""
    requests = bytearray()
    for number in range(first, first + count):
        key = b"user::%010d" % number
        value = (b'{"n":%d,"pad":"' % number).ljust(value_bytes - 2, b"x") + b'"}'
        vbucket = (zlib.crc32(key) >> 16 & 0x7FFF) % vbuckets
        body_bytes = 8 + len(key) + len(value)
        requests += _HEADER.pack(0x80, 0x01, len(key), 8, 0, vbucket, body_bytes, number & 0xFFFFFFFF, 0)
        requests += bytes(8) + key + value
    return bytes(requests)


def connect(port: int, login: Login | None) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port))
    if login is not None:
        plain = PlainLogin(user=login.user, password=login.password).encode()
        connection.sendall(SaslAuth(key=b"PLAIN", value=plain).encode())
        connection.sendall(SelectBucket(key=login.bucket.encode()).encode())
        answers = b""
        while len(answers) < 2 * _ANSWER_BYTES:
            answers += connection.recv(4096)
        if answers[6:8] != bytes(2) or answers[30:32] != bytes(2):
            raise RuntimeError("the log-in was refused")
    connection.setblocking(False)
    return connection


def drive(port: int, requests: list[bytes], counts: list[int], login: Login | None = None) -> None:
    """Send each list of requests over a connection of its own and wait for every answer."""
    connections = {connect(port, login): at for at in range(len(requests))}
    views = [memoryview(data) for data in requests]
    sent = [0] * len(requests)
    missing = [count * _ANSWER_BYTES for count in counts]
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
