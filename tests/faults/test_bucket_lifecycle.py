"""Buckets that come and go while a node runs: what their consumers see, and what a crash on the way leaves."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import KvConnection, Login
from headwater.errors import HeadwaterError, StoreError
from headwater.node.commit_loop import CommitLoop
from headwater.node.kv.handlers.statistics import OFFERED_GROUPS
from headwater.node.node import Node
from headwater.node.node_folder import NodeEnvironment, NodeFolder
from headwater.node.options import BucketSettings, NodeOptions
from headwater.protocol.features import NOTHING_NEGOTIATED, Opcode
from headwater.protocol.frames import HEADER_BYTES, Frame, FrameBuffer, decode_frame
from headwater.protocol.messages import dcp_streams, decode_message
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, VBucketId, Vbuuid
from headwater.protocol.sasl import Credentials
from support.commands import printed
from support.node_process import PASSWORD, USER, NodeProcess, StartNode

LOGIN = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
PLACE: dict[str, Any] = {"vbucket": VBucketId(0), "collection_id": DEFAULT_COLLECTION, "key": b"k"}


def run(*arguments: str) -> str:
    return printed(CliRunner().invoke(main, ["buckets", *arguments], env=LOGIN))


def start_stream(connection: KvConnection) -> Vbuuid:
    """Stream vbucket 0 from its beginning. Returns its newest vbuuid."""
    connection.request(dcp_streams.Open(key=b"watcher", flags=dcp_streams.OpenFlags.PRODUCER))
    connection.request(dcp_streams.Control(key=b"enable_noop", value=b"true"))
    # The answer is read apart from what may come right behind it, which is for `read_to_the_end`.
    connection.sock.sendall(dcp_streams.StreamRequest(vbucket=VBucketId(0)).encode())
    header = connection.sock.recv(HEADER_BYTES, socket.MSG_WAITALL)
    answer = header + connection.sock.recv(int.from_bytes(header[8:12]), socket.MSG_WAITALL)
    decoded = decode_frame(answer)
    opened = decode_message(decoded[0], NOTHING_NEGOTIATED)
    return opened.failover_log[0].vbuuid


def read_to_the_end(connection: KvConnection) -> list[Frame]:
    """All that comes until the stream ends, or the node closes the connection."""
    buffer, frames = FrameBuffer(), list[Frame]()
    while not frames or frames[-1].opcode != Opcode.DCP_STREAM_END:
        received = connection.sock.recv(1 << 20)
        if not received:
            break
        buffer.receive_data(received)
        frames += buffer.frames()
    return frames


def test_commands_and_what_consumers_see_of_them(start_node: StartNode) -> None:
    node = start_node("--vbuckets", "4")
    assert run("create", node.url, "travel", "--flush-enabled", "--max-ttl", "60") == "created travel\n"
    assert "travel   0          4         1         60 s     yes" in run("list", node.url)
    with closing(node.connect("travel")) as writer, closing(node.connect("travel")) as reader:
        writer.request(Set(value=b"1", **PLACE))
        vbuuid = start_stream(reader)
        assert run("flush", node.url, "travel") == "flushed travel\n"
        end = read_to_the_end(reader)[-1]
        assert int.from_bytes(end.extras) == dcp_streams.StreamEndReason.ROLLBACK
        at = {"start_seqno": Seqno(1), "snapshot_start_seqno": Seqno(1), "snapshot_end_seqno": Seqno(1)}
        demanded = reader.request(dcp_streams.StreamRequest(vbucket=VBucketId(0), vbuuid=vbuuid, **at))
        assert getattr(demanded, "rollback_seqno", None) == 0
        writer.request(Set(value=b"2", **PLACE))
    with closing(node.connect("travel")) as reader:
        start_stream(reader)
        assert run("drop", node.url, "travel") == "dropped travel\n"
        end = read_to_the_end(reader)[-1]
        assert (end.opcode, int.from_bytes(end.extras)) == (
            Opcode.DCP_STREAM_END,
            dcp_streams.StreamEndReason.STATE_CHANGED,
        )
        assert reader.sock.recv(1) == b""
    assert not (node.data / "buckets" / "travel").exists()


def test_what_was_made_and_dropped_stays_so_over_kill_nine(start_node: StartNode) -> None:
    node = start_node("--bucket", "default", "--bucket", "other", "--vbuckets", "4")
    run("create", node.url, "travel", "--vbuckets", "8", "--flush-enabled")
    with closing(node.connect("travel")) as writer:
        writer.request(Set(value=b"1", **PLACE))
    run("drop", node.url, "other")
    run("update", node.url, "default", "--max-ttl", "60")
    node.kill()
    node.start()
    assert node.ready["buckets"] == ["default", "travel"]
    with closing(node.connect("travel")) as reader:
        assert bytes(reader.request(Get(**PLACE)).value) == b"1"
    listed = run("list", node.url).splitlines()
    assert [line.split()[2:] for line in listed[1:]] == [["4", "1", "60", "s"], ["8", "1", "yes"]]


# --- the moments at which a crash may come, as it leaves them -------------------------------------------------------


@pytest.fixture
def options(tmp_path: Path) -> NodeOptions:
    return NodeOptions(data=tmp_path, port=0, vbuckets=4, user=USER, password=PASSWORD)


async def buckets_after_start(options: NodeOptions) -> list[str]:
    node = Node(options, NodeEnvironment(serves_http=False))
    await node.start()
    try:
        return sorted(node.bucket_names())
    finally:
        await node.stop()


async def test_a_drop_that_was_cut_short_is_finished_by_the_next_start(options: NodeOptions) -> None:
    node = Node(options, NodeEnvironment(serves_http=False))
    await node.start()
    await node.create_bucket("travel", BucketSettings())
    await node.create_bucket("shop", BucketSettings())
    await node.stop()
    # It is named as dropped, and its files are where they were; those of the other one are under way.
    node.change_identity(dropped=frozenset({"travel", "shop"}))
    (options.data / "buckets" / "shop").rename(options.data / "buckets" / ".dropped-shop-1")
    assert await buckets_after_start(options) == ["default"]
    assert [entry.name for entry in (options.data / "buckets").iterdir()] == ["default"]
    identity = NodeFolder(options.data).load_identity()
    assert identity.dropped == frozenset()


async def test_a_bucket_that_was_half_made_is_nowhere(options: NodeOptions) -> None:
    node = Node(options, NodeEnvironment(serves_http=False))
    await node.start()
    await node.create_bucket("forming", BucketSettings(is_forming=True))
    await node.stop()
    # A folder whose facts were not stored any more.
    NodeFolder(options.data).open_engine("empty").close()
    assert await buckets_after_start(options) == ["default"]
    assert [entry.name for entry in (options.data / "buckets").iterdir()] == ["default"]


SLOW_SCRUBBER = """
import asyncio, sys, time
from pathlib import Path
from headwater.node import commit_loop
from headwater.node.options import BucketSettings
from headwater.node.commit_loop import CommitLoop
from headwater.node.kv.handlers.statistics import OFFERED_GROUPS
from headwater.node.node import Node
from headwater.node.node_folder import NodeEnvironment
from headwater.node.options import NodeOptions
from headwater.store import checked_engine as scrub

is_reading = asyncio.Event()

def read_slowly(table, key, row):
    loop.call_soon_threadsafe(is_reading.set)
    time.sleep(0.3)
    return len(bytes(row)) > 0

async def story(ending):
    global loop
    loop = asyncio.get_running_loop()
    node = Node(NodeOptions(data=Path(sys.argv[1]), port=0, vbuckets=4), NodeEnvironment(serves_http=False))
    await node.start()
    await is_reading.wait()
    is_reading.clear()
    await (node.drop_bucket("default") if ending == "drop" else node.stop())
    await asyncio.sleep(0.6)
    if ending == "drop":
        await node.create_bucket("default", BucketSettings())
        await is_reading.wait()
        await node.stop()

scrub._is_sound_row = read_slowly
commit_loop.SCRUB_STEP_S = commit_loop.SCRUB_REST_S = 0.01
asyncio.run(story(sys.argv[2]))
"""


@pytest.mark.parametrize("ending", ["drop", "stop"])
def test_a_bucket_is_closed_after_the_scrub_that_reads_it(tmp_path: Path, ending: str) -> None:
    """In a process of its own: rows that are read after their file was unmapped end the process."""
    ended = subprocess.run([sys.executable, "-c", SLOW_SCRUBBER, tmp_path, ending], capture_output=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, b"")


async def test_requests_that_come_while_a_bucket_is_dropped_are_answered(
    options: NodeOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Node(replace(options, http_port=0))
    await node.start()
    login = Login(credentials=Credentials(USER, PASSWORD), bucket="default")
    connection = await AsyncKvConnection.open(Address("127.0.0.1", node.address.kv_port or 0), login)
    await connection.request(Set(value=b"1", **PLACE))
    asked: list[object] = []
    stop = CommitLoop.stop

    async def ask_and_stop(loop: CommitLoop) -> None:
        asked.extend([await connection.statistics(group) for group in sorted(OFFERED_GROUPS | {"", "range-scans"})])
        asked.append(bytes((await connection.request(Get(**PLACE))).value))
        asked.append(await connection.request(GetClusterConfig()))
        await stop(loop)
        with pytest.raises(StoreError, match="is being closed"):
            await loop.at_rest(lambda: None)

    with monkeypatch.context() as patched:
        patched.setattr(CommitLoop, "stop", ask_and_stop)
        await node.drop_bucket("default")
    assert b"1" in asked
    with pytest.raises(HeadwaterError):
        await connection.request(Get(**PLACE))
    await node.stop()
    assert caplog.records == []


class Changer(threading.Thread):
    """Makes and drops buckets until the node is gone, and knows what it was answered."""

    def __init__(self, node: NodeProcess, chance: random.Random) -> None:
        super().__init__()
        self._url = node.http_url
        self._chance = chance
        self.there = set(node.ready["buckets"])
        self.under_way = ""
        self.refusals: list[str] = []

    def run(self) -> None:
        with httpx.Client(auth=(USER, PASSWORD), base_url=f"{self._url}/pools/default", timeout=10) as client:
            while not self.refusals:
                self.under_way = name = self._chance.choice("abcd")
                try:
                    if name in self.there:
                        done = client.delete(f"/buckets/{name}")
                    else:
                        done = client.post("/buckets", data={"name": name, "flushEnabled": "1"})
                except httpx.HTTPError:
                    return
                if not done.is_success:
                    self.refusals.append(done.text)
                self.there ^= {name}


@pytest.mark.soak
def test_kill_nine_while_buckets_are_made_and_dropped(tmp_path: Path) -> None:
    """Whenever it comes, each bucket is there as a whole or not at all, and what was answered holds."""
    chance = random.Random(7)
    with NodeProcess(tmp_path / "data", "--vbuckets", "4") as node:
        node.start()
        for _ in range(25):
            changer = Changer(node, chance)
            changer.start()
            time.sleep(chance.uniform(0.05, 0.5))
            node.kill()
            changer.join()
            assert changer.refusals == []
            node.start()
            assert set(node.ready["buckets"]) ^ changer.there <= {changer.under_way}
            made = httpx.get(f"{node.http_url}/pools/default/buckets", auth=(USER, PASSWORD)).json()
            assert all("flush" in one["controllers"] for one in made if one["name"] in "abcd")
