"""Sockets under asyncio: what goes wrong in them fails the read, and nothing is left open."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import Callable

import pytest

from headwater.client.asyncio_edge import AsyncioEdge
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.handshake import ClientHandshake
from headwater.client.kv_connection import Timeouts
from headwater.client.links import DcpLink
from headwater.client.read_options import ReadOptions
from headwater.client.reader import Reader, ReaderEnvironment
from headwater.errors import HostUnreachable
from headwater.protocol.messages.dcp_streams import StreamFlags
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset
from support.fake_servers import down, serving


def new_edge(address: Address, *, from_now: bool = False, **options: float) -> AsyncioEdge:
    cluster_map = ClusterMap(epoch=1, revision=1, bucket="b", uuid="u", nodes=(address,), vbucket_nodes=((0,),))

    def make_reader(now_s: float) -> Reader:
        return Reader(
            ReadOptions(**options),
            cluster_map=cluster_map,
            seeds=(address,),
            offsets={VBucketId(0): StreamOffset()},
            from_now=from_now,
            stream_flags=StreamFlags(0),
            stream_value=None,
            environment=ReaderEnvironment(
                new_link=lambda slot, is_loopback, now_s: DcpLink(
                    ClientHandshake(credentials=None, bucket="b", nonce=b""), None, now_s=now_s
                ),
                decode_map=lambda config, asked: cluster_map,
                open_spool=io.BytesIO,
                random=lambda: 0.5,
            ),
            now_s=now_s,
        )

    return AsyncioEdge(make_reader, tls=None, timeouts=Timeouts(connect_s=5))


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> Callable[[], asyncio.AbstractEventLoop]:
    module = pytest.importorskip(request.param)
    factory: Callable[[], asyncio.AbstractEventLoop] = module.new_event_loop
    return factory


def run(factory: Callable[[], asyncio.AbstractEventLoop], work: Callable[[], object]) -> None:
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(work())


@pytest.mark.parametrize("method", ["received", "receive_buffer", "on_connected", "tick"])
def test_a_fault_of_our_own_fails_the_read(
    method: str, loop_factory: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Event loops only log what their callbacks raise, and the caller would wait for ever."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    async def read() -> None:
        edge = new_edge(address)
        await asyncio.sleep(0)  # the first tick has asked for a connection
        monkeypatch.setattr(edge.reader, method, broken)
        try:
            with pytest.raises(RuntimeError, match="a fault of ours"):
                await asyncio.wait_for(edge.take(), 10)
        finally:
            await edge.close()

    def talk(sock: socket.socket) -> None:
        sock.sendall(b"hello")
        while sock.recv(1000):
            pass

    with serving(talk) as address:
        run(loop_factory, read)


async def test_a_host_name_that_is_none_is_a_host_that_is_not_there() -> None:
    edge = new_edge(Address("a" * 70, 1), give_up_after_s=0.5)
    try:
        with pytest.raises(HostUnreachable):
            await asyncio.wait_for(edge.take(), 10)
    finally:
        await edge.close()


async def test_what_has_kept_a_vbucket_from_its_place_is_raised() -> None:
    edge = new_edge(down(), from_now=True, give_up_after_s=0.5)
    try:
        await asyncio.wait_for(edge.wait_for_offsets(), 10)
        with pytest.raises(HostUnreachable):
            edge.check_offsets()
    finally:
        await edge.close()


async def test_whoever_waits_is_told_when_the_read_is_closed() -> None:
    edge = new_edge(down())
    waiting = asyncio.create_task(edge.take())
    await asyncio.sleep(0.01)
    await edge.close()
    assert await asyncio.wait_for(waiting, 10) is None


def test_closing_leaves_no_socket_and_no_task(loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    connected, ended = threading.Event(), threading.Event()

    def talk(sock: socket.socket) -> None:
        connected.set()
        while sock.recv(1000):
            pass
        ended.set()

    async def read() -> None:
        edge = new_edge(address)
        while not connected.is_set():
            await asyncio.sleep(0.01)
        await edge.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with serving(talk) as address:
        run(loop_factory, read)
        assert ended.wait(10)


async def test_a_close_that_is_cancelled_closes_all_the_same() -> None:
    edge = new_edge(down())
    await asyncio.sleep(0)
    closing = asyncio.create_task(edge.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.sleep(0.05)
    assert closing.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
