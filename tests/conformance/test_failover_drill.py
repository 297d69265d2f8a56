"""The failover drill on a real node: what a consumer sees of it, and what the command says."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.client.kv_connection import KvConnection, Login
from headwater.errors import KeyNotFound
from headwater.protocol.features import NOTHING_NEGOTIATED
from headwater.protocol.frames import FrameBuffer
from headwater.protocol.messages import dcp_streams, decode_message
from headwater.protocol.messages.base import Request, Response
from headwater.protocol.messages.dcp_changes import Mutation, SnapshotMarker
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.sasl import Credentials
from headwater.protocol.status import Status
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

VBUCKET = VBucketId(1)
DEFAULT = CollectionId(0)
NO_FLAGS = dcp_streams.StreamFlags(0)


@pytest.fixture
def node(start_node: StartNode) -> NodeProcess:
    return start_node("--vbuckets", "4")


@pytest.fixture
def kv(node: NodeProcess) -> Iterator[KvConnection]:
    with closing(node.connect()) as connection:
        yield connection


class Consumer:
    """A raw DCP consumer without collections, on one vbucket."""

    def __init__(self, connection: KvConnection) -> None:
        self._sock = connection.sock
        self._sock.settimeout(10)
        self._frames = FrameBuffer()

    def send(self, message: Request) -> None:
        self._sock.sendall(message.encode())

    def receive(self) -> Request | Response:
        while (frame := self._frames.next_frame()) is None:
            data = self._sock.recv(65536)
            assert data, "the node closed the connection"
            self._frames.receive_data(data)
        message = decode_message(frame, NOTHING_NEGOTIATED)
        assert isinstance(message, Request | Response)
        return message

    def open(self) -> None:
        self.send(dcp_streams.Open(key=b"drilled"))
        self.receive()

    def ask(
        self, start: int, vbuuid: int, flags: dcp_streams.StreamFlags = NO_FLAGS
    ) -> dcp_streams.StreamRequestResponse:
        seqno = Seqno(start)
        self.send(
            dcp_streams.StreamRequest(
                vbucket=VBUCKET,
                opaque=5,
                flags=flags,
                start_seqno=seqno,
                vbuuid=Vbuuid(vbuuid),
                snapshot_start_seqno=seqno,
                snapshot_end_seqno=seqno,
            )
        )
        answer = self.receive()
        assert isinstance(answer, dcp_streams.StreamRequestResponse)
        return answer

    def keys(self, count: int) -> list[bytes]:
        """The keys of the next mutations."""
        keys: list[bytes] = []
        while len(keys) < count:
            message = self.receive()
            assert isinstance(message, SnapshotMarker | Mutation), message
            if isinstance(message, Mutation):
                keys.append(message.key)
        return keys


class Follower:
    """Follows the vbucket through ends and rollbacks."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._changes: dict[int, tuple[bytes, int]] = {}
        self._vbuuid = 0
        self._is_open = False
        self.rollbacks = 0

    @property
    def seqno(self) -> int:
        return max(self._changes, default=0)

    def documents(self) -> dict[bytes, int]:
        return {key: cas for _, (key, cas) in sorted(self._changes.items())}

    def read(self, count: int) -> None:
        """Take so many changes."""
        while count > 0:
            if not self._is_open:
                self._ask()
            count -= self._take()

    def read_to_the_end(self) -> None:
        """Take all there is. A stream that is still open after the last drill ends by it, so this waits for that."""
        while self._is_open:
            self._take()
        self._ask(dcp_streams.StreamFlags.LATEST)
        while self._is_open:
            self._take()

    def _take(self) -> int:
        message = self._consumer.receive()
        if isinstance(message, dcp_streams.StreamEnd):
            self._is_open = False
        if not isinstance(message, Mutation):
            return 0
        assert message.seqno > self.seqno
        self._changes[message.seqno] = (message.key, message.cas)
        return 1

    def _ask(self, flags: dcp_streams.StreamFlags = NO_FLAGS) -> None:
        while (answer := self._consumer.ask(self.seqno, self._vbuuid, flags)).status == Status.ROLLBACK:
            assert answer.rollback_seqno is not None
            self.rollbacks += 1
            kept = {seqno: change for seqno, change in self._changes.items() if seqno <= answer.rollback_seqno}
            self._changes = kept
        self._vbuuid = answer.failover_log[0].vbuuid
        self._is_open = True


@pytest.fixture
def consumer(node: NodeProcess) -> Iterator[Consumer]:
    login = Login(credentials=Credentials(USER, PASSWORD), bucket="default", features=())
    with closing(KvConnection.open(node.address, login)) as connection:
        consumer = Consumer(connection)
        consumer.open()
        yield consumer


def put(kv: KvConnection, *keys: bytes) -> None:
    for key in keys:
        kv.request(Set(vbucket=VBUCKET, collection_id=DEFAULT, key=key, value=b"1"))


def drill(node: NodeProcess, to: int, *options: str, vbucket: int = VBUCKET, user: str = USER) -> Result:
    login = ("--user", user, "--password", PASSWORD)
    where = ("--vbucket", str(vbucket), "--to", str(to))
    return CliRunner().invoke(main, ["drill", "rollback", f"{node.url}/default", *where, *login, *options])


# --- what a consumer sees ------------------------------------------------------------------------------------------


def test_a_consumer_is_rolled_back_to_the_new_branch(node: NodeProcess, kv: KvConnection, consumer: Consumer) -> None:
    put(kv, b"a", b"b", b"c", b"d")
    old = consumer.ask(0, 0).failover_log[0]
    assert consumer.keys(4) == [b"a", b"b", b"c", b"d"]

    done = json.loads(drill(node, 2, "--json").stdout)
    assert done == {"vbucket": VBUCKET, "rolled_back_to": 2, "vbuuid": done["vbuuid"], "high_seqno_before": 4}
    ended = consumer.receive()
    assert isinstance(ended, dcp_streams.StreamEnd)
    assert ended.reason == dcp_streams.StreamEndReason.ROLLBACK

    refused = consumer.ask(4, old.vbuuid)
    assert (refused.status, refused.rollback_seqno) == (Status.ROLLBACK, 2)
    with pytest.raises(KeyNotFound):
        kv.request(Get(vbucket=VBUCKET, collection_id=DEFAULT, key=b"c"))

    put(kv, b"e")
    accepted = consumer.ask(2, old.vbuuid)
    log = [(entry.vbuuid, entry.seqno) for entry in accepted.failover_log]
    assert log == [(done["vbuuid"], 2), (old.vbuuid, old.seqno)]
    assert consumer.keys(1) == [b"e"]


def test_a_stream_with_nothing_to_undo_ends_too(node: NodeProcess, kv: KvConnection, consumer: Consumer) -> None:
    put(kv, b"a")
    vbuuid = consumer.ask(0, 0).failover_log[0].vbuuid
    consumer.keys(1)
    assert drill(node, 0, vbucket=2).exit_code == 0
    put(kv, b"b")
    assert consumer.keys(1) == [b"b"]
    assert drill(node, 2).exit_code == 0
    ended = consumer.receive()
    assert isinstance(ended, dcp_streams.StreamEnd)
    assert ended.reason == dcp_streams.StreamEndReason.ROLLBACK
    assert consumer.ask(2, vbuuid).status == Status.SUCCESS


def test_a_drill_outlives_a_restart(node: NodeProcess, kv: KvConnection) -> None:
    put(kv, b"a", b"b", b"c")
    vbuuid = json.loads(drill(node, 1, "--json").stdout)["vbuuid"]
    node.stop()
    node.start()
    with closing(node.connect()) as connection:
        connection.request(Get(vbucket=VBUCKET, collection_id=DEFAULT, key=b"a"))
        with pytest.raises(KeyNotFound):
            connection.request(Get(vbucket=VBUCKET, collection_id=DEFAULT, key=b"b"))
    again = json.loads(drill(node, 1, "--json").stdout)
    assert again["high_seqno_before"] == 1
    assert again["vbuuid"] != vbuuid


def test_drills_while_writes_go_on(node: NodeProcess, consumer: Consumer) -> None:
    """A consumer that does as it is told ends with what the node has."""
    stop = threading.Event()

    def write() -> None:
        with closing(node.connect()) as connection:
            for number in itertools.count():
                put(connection, b"key-%d" % (number % 50))
                if stop.is_set():
                    return

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        follower = Follower(consumer)
        try:
            for _ in range(5):
                follower.read(200)
                assert drill(node, max(0, follower.seqno - 30)).exit_code == 0
        finally:
            stop.set()
        writing.result()
    follower.read_to_the_end()
    again = Follower(consumer)
    again.read_to_the_end()
    assert follower.rollbacks >= 5
    assert follower.documents() == again.documents()


# --- what the command says -----------------------------------------------------------------------------------------


def test_what_the_command_says(node: NodeProcess, kv: KvConnection) -> None:
    put(kv, b"a", b"b")
    for to, vbucket, words in (
        (0, 4, "Error: there is no vbucket 4. The bucket has 4, counted from 0\n"),
        (9, 1, "Error: seqno 9 is beyond the high seqno 2 of vbucket 1. Use one from 0 to 2\n"),
        (2**64, 1, "Error: to: A number from 0 to 18446744073709551615\n"),
    ):
        refused = drill(node, to, vbucket=vbucket)
        assert (refused.exit_code, refused.stderr) == (1, words)
    stranger = drill(node, 0, user="nobody")
    assert (stranger.exit_code, len(stranger.stderr.splitlines())) == (1, 1)
    result = drill(node, 1)
    assert result.exit_code == 0
    assert result.stdout.startswith("vbucket 1 rolled back from 2 to 1: 1 change lost (new vbuuid ")
    assert "rolled vbucket 1 of bucket 'default' back from 2 to 1" in node.log()


def test_help_has_an_example() -> None:
    for command in (["drill"], ["drill", "rollback"]):
        result = CliRunner().invoke(main, [*command, "--help"])
        assert "headwater drill rollback couchbase://127.0.0.1/default --vbucket 12 --to 100" in result.stdout
