"""Where a reader meets the network, under asyncio: sockets, TLS and the clock."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast

from headwater.client.connection_string import Address
from headwater.client.kv_connection import Timeouts, broken, is_loopback, tls_failed, unreachable
from headwater.client.link_pool import CloseConnection, Command, OpenConnection
from headwater.client.pieces import Piece
from headwater.client.reader import Reader
from headwater.errors import ConnectionFailed, HeadwaterError
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset

TICK_S = 0.05


class _LinkProtocol(asyncio.BufferedProtocol):
    """Passes what a socket receives to the reader, straight into the buffer of the link."""

    def __init__(self, edge: AsyncioEdge, link: int) -> None:
        self._edge = edge
        self._link = link
        self._scratch = memoryview(bytearray(4096))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes.
        self._edge.on_connected(self._link, cast(asyncio.Transport, transport))

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = self._edge.reader.receive_buffer(self._link)
        return self._scratch if buffer is None else buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._edge.reader.received(self._link, nbytes, now_s=time.monotonic())
        self._edge.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._edge.on_lost(self._link, exc)


class AsyncioEdge:
    """Runs one reader in the running event loop."""

    def __init__(
        self, make_reader: Callable[[float], Reader], *, tls: ssl.SSLContext | None, timeouts: Timeouts
    ) -> None:
        self.reader = make_reader(time.monotonic())
        self._tls = tls
        self._timeouts = timeouts
        self._transports: dict[int, asyncio.Transport] = {}
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._addresses: dict[int, Address] = {}
        self._news = asyncio.Event()
        self._ticker = asyncio.create_task(self._tick_for_ever())

    async def take(self) -> list[Piece] | None:
        """The next pieces; None at the end of the read. Raises what has failed it, after what came before."""
        while not (pieces := self.take_now()):
            if self.reader.is_finished:
                return None
            await self.wait()
        return pieces

    def take_now(self) -> list[Piece]:
        """What is there, which may be nothing. Raises what has failed the read, after what came before."""
        pieces: list[Piece] = []
        while self.reader.has_pieces and not pieces:
            pieces = self.reader.take()
            self.pump()
        if not pieces and self.reader.failure is not None:
            raise self.reader.failure
        return pieces

    async def wait(self) -> None:
        """Until there is something to take, or the read has come to its end."""
        self._news.clear()
        if not (self.reader.has_pieces or self.reader.is_finished or self.reader.failure is not None):
            await self._news.wait()

    async def wait_for_places(self) -> None:
        """Until it is known where every vbucket starts: one that starts at what is there now has no place before."""
        while not self.reader.is_placed and self.reader.failure is None:
            await asyncio.sleep(TICK_S)

    def follow(self, offsets: Mapping[VBucketId, StreamOffset]) -> None:
        """Read these vbuckets, too."""
        now_s = time.monotonic()
        self.reader.follow(offsets, now_s=now_s)
        self.reader.tick(now_s)
        self.pump()

    async def close(self) -> None:
        """Leave nothing open."""
        tasks = [self._ticker, *self._connecting.values()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        for transport in self._transports.values():
            transport.abort()
        self._transports.clear()
        self.reader.close()

    # --- between the reader and the sockets -----------------------------------------------------------------------

    def pump(self) -> None:
        """Do what the reader wants done, and wake whoever waits for it."""
        for command in self.reader.commands():
            self._obey(command)
        for link, data in self.reader.data_to_send():
            if link in self._transports:
                self._transports[link].write(data)
        if self.reader.has_pieces or self.reader.is_finished or self.reader.failure is not None:
            self._news.set()

    def _obey(self, command: Command) -> None:
        match command:
            case OpenConnection(id=link, address=address):
                self._addresses[link] = address
                self._connecting[link] = asyncio.create_task(self._connect(link, address))
            case CloseConnection(id=link):
                self._addresses.pop(link, None)
                transport = self._transports.pop(link, None)
                if transport is not None:
                    transport.abort()
                if link in self._connecting:
                    self._connecting[link].cancel()

    async def _connect(self, link: int, address: Address) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                await loop.create_connection(
                    lambda: _LinkProtocol(self, link),
                    address.host,
                    address.port,
                    ssl=self._tls,
                    server_hostname=address.host if self._tls else None,
                )
        except (OSError, TimeoutError) as error:
            self._fail(link, _connect_error(address, error))
        finally:
            del self._connecting[link]

    def on_connected(self, link: int, transport: asyncio.Transport) -> None:
        if link not in self._addresses:
            transport.abort()  # it was given up meanwhile
            return
        self._transports[link] = transport
        is_local = is_loopback(transport.get_extra_info("socket"))
        self.reader.on_connected(link, is_loopback=is_local, now_s=time.monotonic())
        self.pump()

    def on_lost(self, link: int, error: Exception | None) -> None:
        if link not in self._transports:
            return
        assert error is None or isinstance(error, OSError)
        self._fail(link, None if error is None else broken(self._addresses[link], error))

    def _fail(self, link: int, error: HeadwaterError | None) -> None:
        now_s = time.monotonic()
        self.reader.on_lost(link, error, now_s=now_s)
        self.reader.tick(now_s)
        self.pump()

    async def _tick_for_ever(self) -> None:
        while True:
            self.reader.tick(time.monotonic())
            self.pump()
            await asyncio.sleep(TICK_S)


def _connect_error(address: Address, error: OSError) -> ConnectionFailed:
    return tls_failed(address, error) if isinstance(error, ssl.SSLError) else unreachable(address, error)
