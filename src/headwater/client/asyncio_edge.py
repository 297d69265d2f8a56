"""Connects a reader to the network under asyncio: sockets, TLS and the clock."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import cast

from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import open_transport
from headwater.client.kv_connection import Timeouts, broken, is_loopback
from headwater.client.links import CloseConnection, Command, OpenConnection
from headwater.client.pieces import Piece
from headwater.client.reader import Reader
from headwater.errors import ConnectionFailed, HeadwaterError
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset

TICK_S = 0.05
CLOSE_S_MAX = 1.0
"""How long to wait for sockets to close. Normally one iteration of the event loop is enough."""
CUT_OFF_S = 2.0
"""How long there may be no connection before the seeds are looked up again, and the interval of further lookups."""


class _LinkProtocol(asyncio.BufferedProtocol):
    """Passes what a socket receives to the reader, straight into the buffer of the link."""

    def __init__(self, edge: AsyncioEdge, link: int) -> None:
        self._edge = edge
        self._link = link
        self._scratch = memoryview(bytearray(4096))

    # These methods must not raise: the event loop would only log the exception.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        with self._edge.failing_the_read():
            # uvloop's transports are not instances of asyncio's classes.
            self._edge.on_connected(self._link, cast(asyncio.Transport, transport))

    def get_buffer(self, sizehint: int) -> memoryview:
        buffer = None
        with self._edge.failing_the_read():
            buffer = self._edge.reader.receive_buffer(self._link)
        return self._scratch if buffer is None else buffer

    def buffer_updated(self, nbytes: int) -> None:
        with self._edge.failing_the_read():
            self._edge.reader.received(self._link, nbytes, now_s=self._edge.now_s())
            self._edge.pump()

    def connection_lost(self, exc: Exception | None) -> None:
        with self._edge.failing_the_read():
            self._edge.on_lost(self._link, exc)


class AsyncioEdge:
    """Runs one reader in the running event loop."""

    def __init__(
        self,
        make_reader: Callable[[float], Reader],
        *,
        tls: ssl.SSLContext | None,
        timeouts: Timeouts,
        renew_seeds: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`renew_seeds` looks up the seeds again, if they can change while the read runs."""
        self.now_s = asyncio.get_running_loop().time
        self.reader = make_reader(self.now_s())
        self._tls = tls
        self._timeouts = timeouts
        self._renew_seeds = renew_seeds
        self._renewing: asyncio.Task[None] | None = None
        self._cut_off_s: float | None = None
        """Since when there may be no connection, or since the last renewal of the seeds. None while one exists."""
        self._transports: dict[int, asyncio.Transport] = {}
        self._connecting: dict[int, asyncio.Task[None]] = {}
        self._addresses: dict[int, Address] = {}
        """The addresses of links that the reader has requested and not closed."""
        self._sockets: set[int] = set()
        """Links with a connected socket, even if the reader has closed them."""
        self._fault: Exception | None = None
        self._is_closed = False
        self._news = asyncio.Event()
        self._ticker = asyncio.create_task(self._tick_for_ever())

    async def take(self) -> list[Piece] | None:
        """Return the next pieces; None at the end. Raises the error that failed the read, after everything before
        it."""
        while not (pieces := self.take_now()):
            if self.reader.is_finished or self._is_closed:
                return None
            await self.wait()
        return pieces

    def take_now(self) -> list[Piece]:
        """Return the available pieces, if any. Raises the error that failed the read, after everything before it."""
        if self._fault is not None:
            raise self._fault
        pieces: list[Piece] = []
        while self.reader.has_pieces and not pieces and not self._is_closed:
            pieces = self.reader.take()
            self.pump()
        if not pieces and self.reader.failure is not None:
            raise self.reader.failure
        return pieces

    async def wait(self) -> None:
        """Wait until there are pieces to take, or the read has ended or failed."""
        self._news.clear()
        if not self._has_news:
            await self._news.wait()

    @property
    def _has_news(self) -> bool:
        has_failed = self.reader.failure is not None or self._fault is not None
        return self.reader.has_pieces or self.reader.is_finished or has_failed or self._is_closed

    async def wait_for_offsets(self) -> None:
        """Wait until every vbucket has its offset (a start at "now" gets it from a server), or the read has failed."""
        while not (self.reader.has_offsets or self.reader.failure or self._fault or self._is_closed):
            await asyncio.sleep(TICK_S)

    def check_offsets(self) -> None:
        """Raise the error that kept a vbucket from getting its offset, if there is one."""
        if self._fault is not None:
            raise self._fault
        if not self.reader.has_offsets and self.reader.failure is not None:
            raise self.reader.failure

    def follow(self, offsets: Mapping[VBucketId, StreamOffset]) -> None:
        """Also read these vbuckets."""
        now_s = self.now_s()
        self.reader.follow(offsets, now_s=now_s)
        self.reader.tick(now_s)
        self.pump()

    async def close(self) -> None:
        """Close all connections. A caller that waits for pieces gets the end of the read."""
        self._is_closed = True
        self._news.set()
        tasks = [self._ticker, *self._connecting.values()]
        if self._renewing is not None:
            tasks.append(self._renewing)
        for task in tasks:
            task.cancel()
        self._addresses.clear()
        while self._transports:
            self._transports.popitem()[1].abort()
        self.reader.close()
        # Everything is closing by now, even if this coroutine is cancelled while it waits.
        await asyncio.wait(tasks)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S_MAX):
                while self._sockets:
                    await asyncio.sleep(0)

    @contextlib.contextmanager
    def failing_the_read(self) -> Iterator[None]:
        """Make an exception in the block fail the read. The event loop would only log it."""
        try:
            yield
        except Exception as error:
            self._fault = self._fault or error
            self._news.set()

    # --- between the reader and the sockets -----------------------------------------------------------------------

    def pump(self) -> None:
        """Run the reader's commands, send its data, and wake the callers that wait for it."""
        if self._is_closed:
            return
        for command in self.reader.commands():
            self._run_command(command)
        for link, data in self.reader.data_to_send():
            if link in self._transports:
                self._transports[link].write(data)
        if self._has_news:
            self._news.set()

    def _run_command(self, command: Command) -> None:
        match command:
            case OpenConnection(id=link, address=address):
                self._addresses[link] = address
                task = self._connecting[link] = asyncio.create_task(self._connect(link, address))
                task.add_done_callback(lambda _: self._connecting.pop(link))
            case CloseConnection(id=link):
                self._cut_off_s = self._cut_off_s or self.now_s()
                self._addresses.pop(link, None)
                transport = self._transports.pop(link, None)
                if transport is not None:
                    transport.abort()
                if link in self._connecting:
                    self._connecting[link].cancel()

    async def _connect(self, link: int, address: Address) -> None:
        try:
            await open_transport(lambda: _LinkProtocol(self, link), address, self._tls, self._timeouts)
        except ConnectionFailed as error:
            with self.failing_the_read():
                self._fail(link, error)

    def on_connected(self, link: int, transport: asyncio.Transport) -> None:
        self._sockets.add(link)
        if link not in self._addresses:
            transport.abort()  # the reader closed it in the meantime
            return
        self._transports[link] = transport
        is_local = is_loopback(transport.get_extra_info("socket"))
        self.reader.on_connected(link, is_loopback=is_local, now_s=self.now_s())
        self.pump()

    def on_lost(self, link: int, error: Exception | None) -> None:
        self._sockets.discard(link)
        if link not in self._transports:
            return
        if error is not None and not isinstance(error, OSError):
            raise error
        self._fail(link, None if error is None else broken(self._addresses[link], error))

    def _fail(self, link: int, error: HeadwaterError | None) -> None:
        now_s = self.now_s()
        self.reader.on_lost(link, error, now_s=now_s)
        self.reader.tick(now_s)
        self.pump()

    async def _tick_for_ever(self) -> None:
        while self._fault is None:
            with self.failing_the_read():
                self.reader.tick(self.now_s())
                self.pump()
                self._renew_if_cut_off()
            await asyncio.sleep(TICK_S)

    def _renew_if_cut_off(self) -> None:
        """Look up the seeds again if there has been no connection for a while: the hosts may have new names."""
        if self._transports:
            self._cut_off_s = None
        if self._renew_seeds is None or self._renewing is not None or self._cut_off_s is None:
            return
        if self.now_s() >= self._cut_off_s + CUT_OFF_S:
            self._renewing = asyncio.create_task(self._renew(self._renew_seeds))

    async def _renew(self, renew_seeds: Callable[[], Awaitable[None]]) -> None:
        with self.failing_the_read():
            await renew_seeds()
        self._cut_off_s = self.now_s()
        self._renewing = None
