"""The simulated network: order, splits, back pressure, cuts, resets and deaths."""

from __future__ import annotations

import asyncio

import pytest

from headwater.sim.network import Link

PLACE = ("server", 1)


class Recorder(asyncio.Protocol):
    def __init__(self):
        self.pieces = []
        self.lost = None
        self.is_paused = False

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.pieces.append(data)

    def pause_writing(self):
        self.is_paused = True

    def resume_writing(self):
        self.is_paused = False

    def connection_lost(self, error):
        self.lost = error or "closed"

    @property
    def data(self):
        return b"".join(self.pieces)


class BufferedRecorder(asyncio.BufferedProtocol):
    def __init__(self):
        self.received = b""
        self._buffer = bytearray(3)

    def connection_made(self, transport):
        self.transport = transport

    def get_buffer(self, sizehint):
        return self._buffer

    def buffer_updated(self, nbytes):
        self.received += bytes(self._buffer[:nbytes])


async def connected(world, client_factory=Recorder):
    """A client and a server protocol, and the server's process."""
    server_process = world.process("server")
    accepted = []

    def accept():
        accepted.append(Recorder())
        return accepted[-1]

    async def listen():
        await asyncio.get_running_loop().create_server(accept, *PLACE)

    await server_process.run(world.loop, listen())
    _, client = await asyncio.get_running_loop().create_connection(client_factory, *PLACE)
    await asyncio.sleep(0.1)
    return client, accepted[0], server_process


def test_bytes_come_in_order_whatever_the_splits(small_world):
    small_world.network.new_link = lambda: Link(split_chance=0.8, latency_s_max=0.05)
    sent = [bytes([number]) * 50 for number in range(100)]

    async def main():
        client, server, _ = await connected(small_world)
        for piece in sent:
            client.transport.write(piece)
        await asyncio.sleep(60)
        assert server.data == b"".join(sent)
        assert len(server.pieces) > len(sent)

    small_world.run(main())


def test_a_buffered_protocol_gets_what_fits_its_buffer(small_world):
    async def main():
        client, server, _ = await connected(small_world, BufferedRecorder)
        server.transport.write(b"more than three bytes")
        await asyncio.sleep(1)
        assert client.received == b"more than three bytes"

    small_world.run(main())


def test_one_who_does_not_read_holds_up_the_writer(small_world):
    small_world.network.new_link = lambda: Link(window_bytes=1000)

    async def main():
        client, server, _ = await connected(small_world)
        server.transport.pause_reading()
        for _ in range(300):
            client.transport.write(bytes(1000))
        await asyncio.sleep(1)
        assert client.is_paused
        assert server.data == b""
        server.transport.resume_reading()
        await asyncio.sleep(10)
        assert not client.is_paused
        assert len(server.data) == 300_000

    small_world.run(main())


def test_a_slow_link_takes_its_time(small_world):
    small_world.network.new_link = lambda: Link(bytes_per_s=1000)

    async def main():
        client, server, _ = await connected(small_world)
        client.transport.write(bytes(5000))
        await asyncio.sleep(4.5)
        assert server.data == b""
        await asyncio.sleep(1)
        assert len(server.data) == 5000

    small_world.run(main())


def test_a_cut_link_holds_back_one_direction_until_it_is_restored(small_world):
    async def main():
        client, server, _ = await connected(small_world)
        small_world.network.cut("main", "server")
        client.transport.write(b"there")
        server.transport.write(b"back")
        await asyncio.sleep(5)
        assert (server.data, client.data) == (b"", b"back")
        small_world.network.restore()
        await asyncio.sleep(1)
        assert server.data == b"there"

    small_world.run(main())


def test_a_cut_link_accepts_no_connection(small_world):
    async def main():
        await connected(small_world)
        small_world.network.cut("server", "main")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.get_running_loop().create_connection(Recorder, *PLACE)
        small_world.network.restore()
        await asyncio.get_running_loop().create_connection(Recorder, *PLACE)

    small_world.run(main())


def test_a_close_comes_after_what_was_written(small_world):
    async def main():
        client, server, _ = await connected(small_world)
        client.transport.write(b"last words")
        client.transport.close()
        await asyncio.sleep(1)
        assert (server.data, server.lost, client.lost) == (b"last words", "closed", "closed")

    small_world.run(main())


def test_a_reset_reaches_both_ends(small_world):
    async def main():
        client, server, _ = await connected(small_world)
        assert small_world.network.reset_some(1.0) == 1
        await asyncio.sleep(1)
        assert isinstance(client.lost, ConnectionResetError)
        assert isinstance(server.lost, ConnectionResetError)

    small_world.run(main())


def test_the_peers_of_a_dead_process_are_reset_and_its_port_is_closed(small_world):
    async def main():
        client, _, server_process = await connected(small_world)
        server_process.kill()
        await asyncio.sleep(1)
        assert isinstance(client.lost, ConnectionResetError)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.get_running_loop().create_connection(Recorder, *PLACE)

    small_world.run(main())


def test_the_reset_of_a_dead_process_waits_for_a_cut_link(small_world):
    async def main():
        client, _, server_process = await connected(small_world)
        small_world.network.cut("server", "main")
        server_process.kill()
        await asyncio.sleep(5)
        assert client.lost is None
        small_world.network.restore()
        await asyncio.sleep(1)
        assert isinstance(client.lost, ConnectionResetError)

    small_world.run(main())
