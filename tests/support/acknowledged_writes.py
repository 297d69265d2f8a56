"""Writers that record which writes were acknowledged, and the check that no acknowledged write is lost.

A writer pipelines sets and deletes on a connection until that breaks. For every key it keeps the versions it has
sent, in order, and which of them were answered. After a crash, a document must have the last answered version or a
later one: a write that was sent but not answered may or may not have happened. The version found then counts as
answered, so a write that was lost once and reappears after the next crash is a fault, too.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from headwater.client.cluster_map import vbucket_of
from headwater.client.kv_connection import KvConnection
from headwater.errors import ConnectionFailed
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.documents import Delete, Get, Set
from headwater.protocol.messages.session import Stat
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.status import Status
from support.node_process import NodeProcess

RECEIVE_BYTES = 256 * 1024
BATCH = 50
UNANSWERED_MAX = 200
DELETES_SHARE = 0.1
LARGE_SHARE = 0.2
LARGE_BYTES_MAX = 40_000
SMALL_BYTES_MAX = 400


@dataclass(slots=True)
class Version:
    """One state of a document: a value, or None if it does not exist."""

    value: bytes | None
    is_answered: bool = False
    cas: int = 0
    """The CAS in the answer."""


class WriteHistory:
    """What was sent for each key since its state was last known."""

    def __init__(self) -> None:
        self._versions: dict[bytes, list[Version]] = {}

    @property
    def keys(self) -> list[bytes]:
        return list(self._versions)

    def sent(self, key: bytes, value: bytes | None) -> Version:
        versions = self._versions.setdefault(key, [Version(None, is_answered=True)])
        versions.append(Version(value))
        return versions[-1]

    def found(self, key: bytes, value: bytes | None, cas: int) -> None:
        """Check what a crash has left of a document, and treat it as the known state from now on."""
        versions = self._versions[key]
        promised = max(number for number, version in enumerate(versions) if version.is_answered)
        matches = [version for version in versions[promised:] if version.value == value]
        if not matches:
            assert any(version.value == value for version in versions), f"{key!r} has a value that was never sent"
            raise AssertionError(f"{key!r} has lost a write that was answered")
        if value is not None and matches[-1].is_answered:
            assert matches[-1].cas == cas, f"{key!r} has another CAS than was answered"
        self._versions[key] = [Version(value, is_answered=True, cas=cas)]


class PipelinedWriter(threading.Thread):
    """Writes to its own keys until the connection breaks."""

    def __init__(
        self, node: NodeProcess, history: WriteHistory, *, name: str, key_prefix: str, keys: int, vbuckets: int
    ) -> None:
        """`name` is part of every value, so no other writer may ever have the same name."""
        super().__init__(name=name)
        self.answered = 0
        self.has_answers = threading.Event()
        self.faults: list[str] = []
        """Invalid answers."""
        self._connection = node.connect()
        self._history = history
        self._keys = [f"{key_prefix}-{number}".encode() for number in range(keys)]
        self._vbuckets = vbuckets
        self._random = random.Random(name)
        self._frames = FrameBuffer()
        self._sent = 0
        self._unanswered: deque[Version] = deque()

    def run(self) -> None:
        with self._connection as connection:
            try:
                while True:
                    connection.sock.sendall(b"".join(self._requests()))
                    while len(self._unanswered) > UNANSWERED_MAX:
                        self._receive()
            except (OSError, ConnectionFailed):
                try:
                    while True:
                        self._receive()
                except (OSError, ConnectionFailed):
                    pass

    def _requests(self) -> Iterator[bytes]:
        for _ in range(BATCH):
            key = self._random.choice(self._keys)
            place = {"key": key, "collection_id": DEFAULT_COLLECTION, "vbucket": vbucket_of(key, self._vbuckets)}
            value = None if self._random.random() < DELETES_SHARE else self._value()
            self._unanswered.append(self._history.sent(key, value))
            request = Delete if value is None else Set
            members = {} if value is None else {"value": value}
            yield request(opaque=self._sent, **place, **members).encode()
            self._sent += 1

    def _value(self) -> bytes:
        size_max = LARGE_BYTES_MAX if self._random.random() < LARGE_SHARE else SMALL_BYTES_MAX
        padding = b"x" * self._random.randrange(size_max)
        return b'{"writer":"%s","number":%d,"padding":"%s"}' % (self.name.encode(), self._sent, padding)

    def _receive(self) -> None:
        data = self._connection.sock.recv(RECEIVE_BYTES)
        if not data:
            raise ConnectionFailed("the node has closed the connection")
        self._frames.receive_data(data)
        for frame in self._frames.frames():
            self._take(frame)

    def _take(self, frame: Frame) -> None:
        version = self._unanswered.popleft()
        expected = {Status.SUCCESS} if version.value is not None else {Status.SUCCESS, Status.KEY_ENOENT}
        if frame.opaque != self.answered or frame.specific not in expected:
            self.faults.append(f"answer {self.answered}: opaque {frame.opaque}, {Status(frame.specific).name}")
        version.is_answered = True
        version.cas = frame.cas
        self.answered += 1
        self.has_answers.set()


# --- reading the documents back -----------------------------------------------------------------------------------


def check_history(connection: KvConnection, history: WriteHistory, *, vbuckets: int) -> int:
    """Check every document that was ever written. Returns how many exist."""
    keys = history.keys
    requests: list[Request] = [
        Get(opaque=number, key=key, collection_id=DEFAULT_COLLECTION, vbucket=vbucket_of(key, vbuckets))
        for number, key in enumerate(keys)
    ]
    documents = 0
    for key, frame in zip(keys, exchange(connection, requests), strict=True):
        assert frame.specific in (Status.SUCCESS, Status.KEY_ENOENT), Status(frame.specific).name
        is_there = frame.specific == Status.SUCCESS
        history.found(key, frame.value if is_there else None, frame.cas)
        documents += is_there
    return documents


def exchange(
    connection: KvConnection, requests: list[Request], *, batch: int = BATCH, is_sent: bool = False
) -> list[Frame]:
    """Send requests, a batch at a time, and receive as many answers, which arrive in the same order."""
    answers: list[Frame] = []
    frames = FrameBuffer()
    for start in range(0, len(requests), batch):
        part = requests[start : start + batch]
        if not is_sent:
            connection.sock.sendall(b"".join(request.encode() for request in part))
        while len(answers) < start + len(part):
            answers += _received(connection, frames)
    assert [answer.opaque for answer in answers] == [request.opaque for request in requests]
    return answers


def statistics(connection: KvConnection, group: str = "") -> dict[str, str]:
    """Return a group of statistics: one answer each, and an empty one at the end."""
    connection.sock.sendall(Stat(key=group.encode()).encode())
    frames = FrameBuffer()
    answers: list[Frame] = []
    while not answers or answers[-1].key:
        answers += _received(connection, frames)
    assert answers[-1].specific == Status.SUCCESS
    return {answer.key.decode(): answer.value.decode() for answer in answers[:-1]}


def _received(connection: KvConnection, frames: FrameBuffer) -> list[Frame]:
    data = connection.sock.recv(RECEIVE_BYTES)
    assert data, "the node has closed the connection"
    frames.receive_data(data)
    return list(frames.frames())
