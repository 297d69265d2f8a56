"""Fuzzed frames on many connections, with many roles: the node serves on, keeps what others wrote, and leaks nothing.

Most frames must get as far as a handler, or the test would say little: the node counts them (`support.counting_node`),
and every opcode of its table must be among them.
"""

from __future__ import annotations

import json
import random
import re
import selectors
import struct
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from headwater.client.kv_connection import KvConnection, Login
from headwater.node.kv.handlers import DCP_MESSAGES, HANDLERS
from headwater.protocol.failover_log import FailoverEntry
from headwater.protocol.features import Magic
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import dcp_streams
from headwater.protocol.messages.dcp_changes import Deletion, Mutation, SnapshotMarker
from headwater.protocol.messages.documents import Get, GetResponse, Set
from headwater.protocol.messages.session import Noop
from headwater.protocol.messages.vbuckets import SetCollectionsManifest, SetVBucket
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.sasl import Credentials
from headwater.protocol.states import TO_A_CONSUMER
from support.counting_node import HandlerCounts
from support.forked_program import HEADWATER, run_program
from support.fuzzed_frames import FEATURES, MANIFEST, VBUCKETS, FrameCorpus
from support.node_process import PASSWORD, USER, NodeProcess, memory_bytes

SEED = 29
BLOCK_FRAMES = 1000
BLOCKS_OF_CONNECTION = 6
CHANGES_SHARE, WRONG_CHANGES_SHARE = 0.1, 0.01
FLUSH_EVERY_FRAMES = 200_000
LOGIN_REQUESTS = 6
ANSWERED_S_MAX = 60.0
GROWTH_BYTES_MAX = 64 * 1024 * 1024
REST_S = 5.0
FUZZED, COPIES, GOOD = "fuzzed", "copies", "good"
ROLES = {
    "everything": "admin",
    "writer": f"bucket_full_access[{FUZZED}]",
    "reader": f"data_reader[{FUZZED}],data_dcp_reader[{FUZZED}]",
    "data": f"data_reader[{FUZZED}],data_writer[{FUZZED}]",
    "streams": f"data_dcp_reader[{FUZZED}]",
    "manager": f"bucket_admin[{FUZZED}]",
    "watcher": "ro_admin",
}
ACTIVE_AGAIN = b"".join(
    SetVBucket(vbucket=vb, state=dcp_streams.VBucketState.ACTIVE).encode() for vb in range(VBUCKETS)
)


class Fuzzing(threading.Thread):
    """One connection after the other, each of which sends some blocks of frames and then something that ends it."""

    _numbers = count(1)

    def __init__(self, node: NodeProcess, stop: threading.Event, seed: int) -> None:
        super().__init__(daemon=True)
        self._node = node
        self._stop_event = stop
        self.rng = random.Random(seed)
        self.connections = self.sent = 0
        self.frames = 0
        """Those of blocks that the node has read to their end."""
        self.has_sent_each = False
        """Whether everything that it is to send was sent once."""
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stop_event.is_set():
                self.connections += 1
                self.talk()
        except BaseException as error:
            self.failure = error
            self._stop_event.set()

    def talk(self) -> None:
        raise NotImplementedError

    def open(self, user: str, bucket: str) -> KvConnection:
        self.sent += LOGIN_REQUESTS
        login = Login(credentials=Credentials(user, PASSWORD), bucket=bucket, features=FEATURES)
        return KvConnection.open(self._node.address, login)

    def passes(self, connection: KvConnection, block: bytes, frames: int) -> bool:
        """Send a block, and read and forget until the noop behind it is answered. False where the node has closed."""
        self.sent += frames + 1
        number = 0xF0000000 + next(self._numbers)
        end = re.compile(rb"[\x81\x18]\x0a.{10}" + re.escape(number.to_bytes(4)), re.DOTALL)
        unsent, tail = memoryview(block + Noop(opaque=number).encode()), b""
        sock, until_s = connection.sock, time.monotonic() + ANSWERED_S_MAX
        sock.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
            while time.monotonic() < until_s:
                for _, ready in selector.select(1.0):
                    try:
                        if ready & selectors.EVENT_READ:
                            data = sock.recv(1 << 20)
                            if not data:
                                return False
                            if end.search(tail + data):
                                self.frames += frames
                                return True
                            tail = data[-32:] if len(data) >= 32 else (tail + data)[-32:]
                        if ready & selectors.EVENT_WRITE:
                            unsent = unsent[sock.send(unsent) :]
                            if not unsent:
                                selector.modify(sock, selectors.EVENT_READ)
                    except (ConnectionError, BrokenPipeError):
                        return False
        raise AssertionError(f"the node has not answered in {ANSWERED_S_MAX:.0f} s")


class RequestFuzzing(Fuzzing):
    """Requests of clients, and of DCP consumers where `is_dcp`."""

    def __init__(
        self, node: NodeProcess, stop: threading.Event, seed: int, users: list[str], *, is_dcp: bool = False
    ) -> None:
        super().__init__(node, stop, seed)
        self._users = users
        self._is_dcp = is_dcp
        served = [*DCP_MESSAGES, *HANDLERS] if is_dcp else list(HANDLERS)
        self._corpus = FrameCorpus(served, seed)

    def talk(self) -> None:
        user = self._users[self.connections % len(self._users)]
        corpus = self._corpus
        with self.open(user, FUZZED) as connection:
            beginning = ACTIVE_AGAIN
            if self._is_dcp:
                name = f"fuzz {self.rng.random()}".encode()
                beginning += dcp_streams.Open(
                    key=name, flags=dcp_streams.OpenFlags.PRODUCER | dcp_streams.OpenFlags.INCLUDE_XATTRS
                ).encode()
            if not self.passes(connection, beginning, VBUCKETS):
                return
            if not self.has_sent_each:
                self.passes(connection, corpus.some_of_each, 3 * len(HANDLERS))
                for ending in corpus.endings:
                    with self.open(user, FUZZED) as other:
                        self.passes(other, ending, 1)
                self.has_sent_each = True
            for _ in range(BLOCKS_OF_CONNECTION):
                if self._stop_event.is_set():
                    return
                if not self.passes(connection, ACTIVE_AGAIN + corpus.block(BLOCK_FRAMES), BLOCK_FRAMES + VBUCKETS):
                    return
            self.passes(connection, self.rng.choice(corpus.endings), 1)


class ProducerFuzzing(Fuzzing):
    """Joins streams to a node that is the consumer, and sends changes in right order of which some are wrong."""

    def __init__(self, node: NodeProcess, stop: threading.Event, seed: int, others: list[Fuzzing]) -> None:
        super().__init__(node, stop, seed)
        self._others = others
        self._corpus = FrameCorpus(TO_A_CONSUMER, seed)

    def talk(self) -> None:
        while self.frames > CHANGES_SHARE * sum(fuzzer.frames for fuzzer in self._others):
            # The node takes whole runs of changes at once, and what is wrong with one of them ends its stream.
            if self._stop_event.wait(0.05):
                return
        with self.open("everything", COPIES) as connection:
            streams = self._opened_streams(connection)
            for opaque, (vbucket, seqno) in streams.items():
                if self._stop_event.is_set():
                    return
                changes = self._changes(opaque, vbucket, seqno)
                if not self.passes(connection, changes, 10 * 51):
                    return
                self.has_sent_each = True
            self.passes(connection, self._corpus.block(BLOCK_FRAMES), BLOCK_FRAMES)

    def _opened_streams(self, connection: KvConnection) -> dict[int, tuple[int, int]]:
        """The vbucket and the last seqno of each stream that the node has asked for, by its opaque."""
        sock, buffer, streams = connection.sock, FrameBuffer(), {}
        for vbucket in range(VBUCKETS):
            sock.sendall(SetVBucket(vbucket=vbucket, state=dcp_streams.VBucketState.REPLICA).encode())
        sock.sendall(dcp_streams.Open(key=b"copies", flags=dcp_streams.OpenFlags(0)).encode())
        sock.sendall(b"".join(dcp_streams.AddStream(opaque=vb, vbucket=vb).encode() for vb in range(VBUCKETS)))
        while len(streams) < VBUCKETS:
            data = sock.recv(1 << 16)
            assert data, "the node has closed a connection on which all was right"
            buffer.receive_data(data)
            for frame in buffer.frames():
                if frame.opcode == dcp_streams.StreamRequest.opcode and frame.magic is Magic.REQUEST:
                    start, vbuuid = struct.unpack_from(">8xQ8xQ", frame.extras)
                    log = (FailoverEntry(vbuuid=vbuuid or 1, seqno=0),)
                    sock.sendall(dcp_streams.StreamRequestResponse(opaque=frame.opaque, failover_log=log).encode())
                    streams[frame.opaque] = frame.specific, start
                elif frame.magic is Magic.REQUEST:
                    sock.sendall(
                        struct.pack(">BBHBBHIIQ", Magic.RESPONSE, frame.opcode, 0, 0, 0, 0, 0, frame.opaque, 0)
                    )
        return streams

    def _changes(self, opaque: int, vbucket: int, seqno: int) -> bytes:
        parts = []
        for _ in range(10):
            marker = SnapshotMarker(
                opaque=opaque, vbucket=vbucket, start_seqno=seqno + 1, end_seqno=seqno + 50, flags=1
            )
            parts.append(marker.encode())
            for _ in range(50):
                seqno += 1
                place = {"opaque": opaque, "vbucket": vbucket, "key": b"k%d" % (seqno % 97), "collection_id": 0}
                kind = Mutation if self.rng.random() < 0.8 else Deletion
                frame = bytearray(kind(**place, cas=seqno, seqno=seqno, rev_seqno=seqno, value=b"").encode())
                if self.rng.random() < WRONG_CHANGES_SHARE:
                    frame[self.rng.randrange(12, len(frame))] = self.rng.randrange(256)
                parts.append(bytes(frame))
        return b"".join(parts)


class GoodClient:
    """Writes and reads documents of a bucket that no fuzzer uses, and knows what must be there."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self._connection = node.connect(GOOD)
        self._written: dict[bytes, bytes] = {}
        self._numbers = count()

    def work(self) -> None:
        number = next(self._numbers)
        key, value = b"good-%d" % (number % 5000), b'{"number":%d}' % number
        self._connection.request(Set(value=value, **_place(key)))
        self._written[key] = value
        some = random.choice(list(self._written)) if number % 50 == 0 else key
        self._check(self._connection, some)

    def check_all(self) -> int:
        """By a new connection, so that log-ins are seen to work."""
        with self._node.connect(GOOD) as connection:
            for key in self._written:
                self._check(connection, key)
        return len(self._written)

    def _check(self, connection: KvConnection, key: bytes) -> None:
        answer = connection.request(Get(**_place(key)))
        assert isinstance(answer, GetResponse)
        assert answer.value == self._written[key]

    def close(self) -> None:
        self._connection.close()


def _place(key: bytes) -> dict[str, object]:
    return {"key": key, "collection_id": DEFAULT_COLLECTION, "vbucket": key[-1] % VBUCKETS}


@pytest.fixture
def counts(tmp_path: Path) -> HandlerCounts:
    return HandlerCounts(tmp_path / "counts")


@pytest.fixture
def node(tmp_path: Path, counts: HandlerCounts) -> Iterator[NodeProcess]:
    """With a bucket to fuzz, one of copies, one that nobody fuzzes, and a user for each role."""
    buckets = [word for name in (FUZZED, COPIES, GOOD) for word in ("--bucket", name)]
    program = ("-m", "support.counting_node", str(tmp_path / "counts"))
    with NodeProcess(tmp_path / "data", *buckets, "--vbuckets", str(VBUCKETS), program=program) as node:
        node.start()
        with admin(node) as client:
            for name, roles in ROLES.items():
                form = {"password": PASSWORD, "roles": roles}
                client.put(f"/settings/rbac/users/local/{name}", data=form).raise_for_status()
            for bucket in (FUZZED, COPIES):
                client.post(f"/pools/default/buckets/{bucket}", data={"flushEnabled": "1"}).raise_for_status()
        with node.connect(FUZZED) as connection:
            connection.request(SetCollectionsManifest(value=json.dumps(MANIFEST).encode()))
        yield node
        assert "Traceback" not in node.log(), node.log()[-20_000:]


def admin(node: NodeProcess) -> httpx.Client:
    return httpx.Client(base_url=node.http_url, auth=(USER, PASSWORD), timeout=60)


def flush(node: NodeProcess) -> None:
    """So that what is in the buckets does not grow with the frames."""
    with admin(node) as client:
        for bucket in (FUZZED, COPIES):
            answer = client.post(f"/pools/default/buckets/{bucket}/controller/doFlush")
            assert answer.status_code in (200, 503), answer.text


@pytest.mark.parametrize("frames", [6_000, pytest.param(10_000_000, marks=pytest.mark.soak)])
def test_fuzzed_frames(node: NodeProcess, counts: HandlerCounts, frames: int) -> None:
    stop = threading.Event()
    fuzzers: list[Fuzzing] = [
        RequestFuzzing(node, stop, SEED, ["everything"]),
        RequestFuzzing(node, stop, SEED + 1, ["everything", "writer"]),
        RequestFuzzing(node, stop, SEED + 2, list(ROLES)),
        RequestFuzzing(node, stop, SEED + 3, ["everything", "streams"], is_dcp=True),
    ]
    fuzzers.append(ProducerFuzzing(node, stop, SEED + 4, list(fuzzers)))
    good = GoodClient(node)
    for fuzzer in fuzzers:
        fuzzer.start()
    began_s, flushed, memory = time.monotonic(), 0, []
    while not stop.is_set():
        done = sum(fuzzer.frames for fuzzer in fuzzers)
        if done >= frames and all(fuzzer.has_sent_each for fuzzer in fuzzers):
            break
        good.work()
        if done - flushed > FLUSH_EVERY_FRAMES:
            flushed = done
            flush(node)
            memory.append(memory_bytes(node))
            print(
                f"{done} frames, {done / (time.monotonic() - began_s):.0f} a second, {memory[-1] >> 20} MiB", flush=True
            )
        time.sleep(0.01)
    stop.set()
    for fuzzer in fuzzers:
        fuzzer.join(ANSWERED_S_MAX)
        assert not fuzzer.is_alive()
        if fuzzer.failure is not None:
            raise fuzzer.failure
    took_s = time.monotonic() - began_s
    checked = good.check_all()
    good.close()
    done = sum(fuzzer.frames for fuzzer in fuzzers)
    connections = sum(fuzzer.connections for fuzzer in fuzzers)
    sent = sum(fuzzer.sent for fuzzer in fuzzers)
    print(f"{done} frames in {took_s:.0f} s, {counts.total / sent:.0%} in handlers, {connections} connections")
    print(f"good documents {checked}; memory in MiB {[size >> 20 for size in memory]}")
    assert httpx.get(f"{node.http_url}/health", timeout=60).status_code == 200
    never = [cls.__name__ for cls in HANDLERS if not counts.entered[cls.opcode]]
    assert never == [], "no frame of these has reached its handler"
    assert counts.consumed[Mutation.opcode] > 0
    assert counts.total > 0.5 * sent
    if memory:
        flush(node)
        time.sleep(REST_S)
        assert memory_bytes(node) - memory[len(memory) // 5] < GROWTH_BYTES_MAX
    # Nothing that was stored keeps the node from opening it again, or is damaged.
    node.kill()
    node.start()
    good.check_all()
    assert node.stop() == 0
    checked_files = run_program(*HEADWATER, "check", str(node.data))
    assert checked_files.returncode == 0, checked_files.stdout + checked_files.stderr
