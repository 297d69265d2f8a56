"""The key-value listener on real sockets: what it holds for peers, which of them give way, and what is left of them."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headwater.node import kv_listener
from headwater.node.auth.login_checks import LoginChecks
from headwater.node.kv_listener import KvListener, ServedConnection
from headwater.node.options import ServerLimits
from headwater.protocol.features import Magic, Opcode
from headwater.protocol.frames import HEADER, DurabilityLevel, FrameBuffer, durability
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import Control, Open, OpenFlags, StreamRequest
from headwater.protocol.messages.documents import Get, Set
from headwater.protocol.messages.session import Hello, Noop, SaslAuth, SelectBucket
from headwater.protocol.numbers import VBucketId
from headwater.protocol.sasl import PlainLogin
from support.kv_harness import FEATURES, PASSWORD, Node
from support.machine import self_signed

LARGE_BYTES = 6_000_000
SOON_S = 10.0


def encoded(*requests: Request) -> bytes:
    return b"".join(request.encode() for request in requests)


LOGIN = encoded(
    Hello(key=b"test", features=FEATURES),
    SaslAuth(key=b"PLAIN", value=PlainLogin(user="admin", password=PASSWORD).encode()),
    SelectBucket(key=b"default"),
)
UNFINISHED = encoded(Set(key=b"k", value=bytes(LARGE_BYTES)))[:-1]
OPEN_PRODUCER = encoded(Open(key=b"a producer", flags=OpenFlags.PRODUCER))
OPEN_CONSUMER = encoded(Open(key=b"a consumer"))


class World:
    """A listener of the harness's node, and peers of it."""

    def __init__(self, node: Node, **limits: Any) -> None:
        self.node = node
        self.checks = LoginChecks(lambda: node.service.users, now_s=asyncio.get_running_loop().time)
        self.listener = KvListener(node.service, ServerLimits(**limits), self.checks)
        self.port = 0
        self._tls: ssl.SSLContext | None = None
        self._peers: list[Peer] = []

    async def __aenter__(self) -> World:
        self.port = await self.listener.listen("127.0.0.1", 0)
        return self

    async def listen_with_tls(self, folder: Path) -> None:
        certificate, key = self_signed(folder)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate, key)
        self._tls = ssl.create_default_context(cafile=str(certificate))
        self.port = await self.listener.listen("127.0.0.1", 0, server)

    async def __aexit__(self, *error: object) -> None:
        for peer in self._peers:
            peer.writer.transport.abort()
        await self.listener.stop()
        self.checks.stop()

    @property
    def connections(self) -> list[ServedConnection]:
        return list(self.listener.connections)

    async def peer(self, *, logs_in: bool = True, address: str = "127.0.0.1") -> Peer:
        # A small window: the system would else take megabytes of what a test leaves unread.
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        end.setblocking(False)
        end.bind((address, 0))
        await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(
            sock=end, ssl=self._tls, server_hostname="127.0.0.1" if self._tls else None
        )
        peer = Peer(reader, writer)
        self._peers.append(peer)
        if logs_in:
            assert await peer.call(LOGIN, answers=3)
        return peer

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not is_so():
                await asyncio.sleep(0.005)

    async def finish(self, peer: Peer, rest: bytes) -> None:
        """Send the rest of an unfinished request, and take the answer."""
        answered = asyncio.create_task(peer.call(rest + b"\0"))
        pending = self.node.bucket.pending_bytes
        await self.until(lambda: self.node.bucket.pending_bytes > pending)
        self.commit()
        assert await answered

    def commit(self) -> None:
        self.node.commit()
        self.listener.send_durable()


class Peer:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def call(self, requests: bytes, *, answers: int = 1) -> bool:
        """Send, and wait for so many answers. False where the connection ends before."""
        self.writer.write(requests)
        buffer, seen = FrameBuffer(), 0
        while seen < answers:
            try:
                data = await asyncio.wait_for(self.reader.read(1 << 16), SOON_S)
            except ConnectionError:
                return False
            if not data:
                return False
            buffer.receive_data(data)
            seen += len(list(buffer.frames()))
        return True

    async def is_served(self) -> bool:
        return await self.call(encoded(Noop()))


BEHIND_A_DURABLE_WRITE = encoded(
    Set(key=b"d", value=b"1", frame_infos=(durability(DurabilityLevel.MAJORITY),)),
    Set(key=b"d", value=bytes(LARGE_BYTES)),
)
STATES = {
    "idle": b"",
    "no frame": b"\xff" * 100,
    "lengths": HEADER.pack(Magic.REQUEST, Opcode.GET, 100, 0, 0, 0, 10, 0, 0),
    "unread": encoded(*(Get(key=b"large") for _ in range(5))),
    "not durable": encoded(Set(key=b"k", value=b"1"), Get(key=b"k")),
    "undecided": BEHIND_A_DURABLE_WRITE,
    "log-in": encoded(SaslAuth(key=b"PLAIN", value=PlainLogin(user="x", password="y").encode())) * 3,
    "producer": OPEN_PRODUCER + encoded(StreamRequest(vbucket=0)) + UNFINISHED,
    "consumer": OPEN_CONSUMER + UNFINISHED,
}


@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_a_closed_connection_is_freed_by_counting_references(
    node: Node,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    has_tls: bool,
) -> None:
    """The collector of cycles may come minutes later."""
    # The listener's clock looks at the connection while it is open.
    monkeypatch.setattr(kv_listener, "_TICK_S", 0.02)
    caplog.set_level(
        logging.CRITICAL, "headwater"
    )  # What is captured of the log would keep the error, and all with it.

    async def story() -> None:
        async with World(node) as world:
            if has_tls:
                await world.listen_with_tls(tmp_path)
            node.client().succeed(Set(key=b"large", value=bytes(LARGE_BYTES)))
            peer = await world.peer()
            gc.collect()
            gc.disable()
            try:
                (served,) = world.connections
                known = [weakref.ref(served), weakref.ref(served.session)]
                del served
                peer.writer.write(STATES[state])
                await asyncio.sleep(0.1)
                peer.writer.transport.abort()
                await world.until(lambda: not world.connections and all(ref() is None for ref in known))
                assert world.listener.memory.total_bytes == 0
            finally:
                gc.enable()

    uvloop.run(story())


# --- the account of memory ----------------------------------------------------------------------------------------

HOLDS = {
    "unfinished": UNFINISHED,
    "unfinished on DCP": OPEN_PRODUCER + UNFINISHED,
    "unfinished changes": OPEN_CONSUMER + UNFINISHED,
    "unread": encoded(Get(key=b"large")),
    "unread on DCP": OPEN_PRODUCER + encoded(Get(key=b"large")),
    "behind a durable write": BEHIND_A_DURABLE_WRITE,
}


@pytest.mark.parametrize("holds", HOLDS)
async def test_whatever_kind_a_connection_is_what_it_holds_counts_until_it_is_closed(node: Node, holds: str) -> None:
    node.client().succeed(Set(key=b"large", value=bytes(LARGE_BYTES)))
    facts = node.bucket.vbuckets.facts[0]
    assert facts is not None
    node.bucket.set_vbucket_facts(VBucketId(0), replace(facts, topology=(["here", "there"],)))
    node.commit()
    node.bucket_service.sync_writes.evaluate_all()
    async with World(node) as world:
        peer = await world.peer()
        peer.writer.write(HOLDS[holds])
        await world.until(lambda: world.listener.memory.total_bytes > LARGE_BYTES * 0.9)
        await asyncio.sleep(0.05)
        assert world.listener.memory.total_bytes > LARGE_BYTES * 0.9
        assert world.listener.memory.total_bytes < 2 * LARGE_BYTES
        (served,) = world.connections
        served.drop("the test")
        assert world.listener.memory.total_bytes == served.session.held_bytes == 0
        await world.until(lambda: not world.connections)


async def test_the_largest_holders_are_closed_and_free_what_they_hold_at_once(node: Node) -> None:
    memory_max = 5 * LARGE_BYTES // 2
    async with World(node, node_buffer_bytes_max=memory_max) as world:
        small, *large = [await world.peer() for _ in range(4)]
        small.writer.write(encoded(Set(key=b"small", value=bytes(200_000)))[:-1])
        served = world.connections[1:]
        for peer, of_node in zip(large, served, strict=True):
            peer.writer.write(UNFINISHED)
            await world.until(lambda of_node=of_node: of_node.held_bytes() > LARGE_BYTES)
            assert world.listener.memory.total_bytes <= memory_max
        # The third was one too many, and the first had moved nothing for longest.
        assert served[0].held_bytes() == 0
        assert await large[0].reader.read() == b""
        for peer in (small, large[1], large[2]):
            await world.finish(peer, b"")


async def test_a_request_that_was_handled_is_not_held(node: Node) -> None:
    async with World(node) as world:
        peer = await world.peer()
        await world.finish(peer, UNFINISHED)
        assert world.listener.memory.total_bytes < 100_000


async def test_a_peer_that_does_not_read_is_not_read_from(node: Node) -> None:
    """Each answer is larger than its share: one is in the transport, and none is made beside it."""
    node.client().succeed(Set(key=b"large", value=bytes(LARGE_BYTES)))
    async with World(node, unsent_bytes_max=LARGE_BYTES // 2) as world:
        peer = await world.peer()
        (served,) = world.connections
        requests = served.session.requests
        for _ in range(4):
            peer.writer.write(encoded(Get(key=b"large")))
            await asyncio.sleep(0.05)
        assert served.session.requests == requests + 1
        assert await peer.call(b"", answers=4)


# --- turns --------------------------------------------------------------------------------------------------------


def recorded_writes(monkeypatch: pytest.MonkeyPatch) -> list[ServedConnection]:
    """The connections that are written to from now on, in order."""
    written: list[ServedConnection] = []
    write = ServedConnection._write
    monkeypatch.setattr(
        ServedConnection, "_write", lambda served, *output: written.append(served) or write(served, *output)
    )
    return written


async def test_a_commit_is_answered_before_streams_get_it_and_these_get_it_in_turns(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer's next set does not wait until all consumers are served."""
    async with World(node) as world:
        consumers = [await world.peer() for _ in range(2 * kv_listener._TURNS_AT_ONCE + 1)]
        for number, consumer in enumerate(consumers):
            name = Open(key=b"consumer %d" % number, flags=OpenFlags.PRODUCER)
            assert await consumer.call(encoded(name, StreamRequest(vbucket=0)), answers=2)
        writer = await world.peer()
        writer.writer.write(encoded(Set(key=b"k", value=b"1")))
        await world.until(lambda: node.bucket.pending_bytes > 0)
        written = recorded_writes(monkeypatch)
        world.commit()
        *streaming, answered = world.connections
        assert written == [answered]
        await asyncio.sleep(0)
        assert written == [answered, *streaming[: kv_listener._TURNS_AT_ONCE]]
        assert all([await consumer.call(b"", answers=2) for consumer in consumers]), "a marker, and the change"
        assert written == [answered, *streaming]


async def test_a_replica_gets_a_commit_at_once_and_a_stop_sends_it_to_all(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durable writes wait for replicas, and what was answered should be on its way."""
    async with World(node) as world:
        replica, consumer, writer = [await world.peer() for _ in range(3)]
        for peer, name in ((replica, b"replica"), (consumer, b"consumer")):
            assert await peer.call(encoded(Open(key=name, flags=OpenFlags.PRODUCER)))
        controls = (Control(key=b"enable_sync_writes", value=b"true"), Control(key=b"consumer_name", value=b"x"))
        assert await replica.call(encoded(*controls), answers=2)
        for peer in (replica, consumer):
            assert await peer.call(encoded(StreamRequest(vbucket=0)))
        writer.writer.write(encoded(Set(key=b"k", value=b"1")))
        await world.until(lambda: node.bucket.pending_bytes > 0)
        to_replica, to_consumer, to_writer = world.connections
        written = recorded_writes(monkeypatch)
        world.commit()
        assert written == [to_replica, to_writer]
        await world.listener.stop()
        assert written == [to_replica, to_writer, to_consumer]
        assert await consumer.call(b"", answers=2), "a marker, and the change"


# --- places -------------------------------------------------------------------------------------------------------


async def test_connections_that_have_not_logged_in_give_way_to_others(node: Node) -> None:
    async with World(node, connections_max=3) as world:
        user = await world.peer()
        strangers = [await world.peer(logs_in=False) for _ in range(5)]
        await world.until(lambda: len(world.connections) == 3)
        assert [await one.is_served() for one in strangers] == [False, False, False, True, True]
        assert await (await world.peer()).is_served()
        assert await user.is_served()


async def test_the_address_with_the_most_strangers_gives_way(node: Node) -> None:
    async with World(node, connections_max=3) as world:
        few = await world.peer(logs_in=False)
        many = [await world.peer(logs_in=False, address="127.0.0.2") for _ in range(4)]
        await world.until(lambda: len(world.connections) == 3)
        assert await few.is_served()
        assert [await one.is_served() for one in many] == [False, False, True, True]


async def test_users_of_one_address_do_not_take_all_places(node: Node) -> None:
    """Of 32 places, two are for connections that have not logged in."""
    async with World(node, connections_max=32) as world:
        many = [await world.peer() for _ in range(30)]
        assert await many[0].is_served()
        late = await world.peer(logs_in=False)
        assert not await late.call(LOGIN + encoded(Noop()), answers=4), "one address has all places of users"
        elsewhere = await world.peer(address="127.0.0.2")
        assert await elsewhere.is_served()
        # It has the place of the one that was silent for longest.
        assert not await many[1].is_served()
        assert await many[0].is_served()


async def test_memory_goes_back_to_the_system_after_every_crowd(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(kv_listener, "give_back_freed_memory", lambda: given_back.append(1))
    for name, value in {"_TICK_S": 0.02, "_GIVE_BACK_BYTES": LARGE_BYTES // 2, "_GIVE_BACK_LOOKS": 10**6}.items():
        monkeypatch.setattr(kv_listener, name, value)
    async with World(node) as world:
        for crowds in (1, 2):
            peer = await world.peer()
            peer.writer.write(UNFINISHED)
            await world.until(lambda: world.listener.memory.total_bytes > LARGE_BYTES)
            peer.writer.transport.abort()
            await world.until(lambda crowds=crowds: len(given_back) == crowds)
