"""Accepting connections: what asyncio's servers leave open.

They make a protocol when a TLS handshake is complete. Until then no one knows of the connection: handshakes that are
never finished would count against no limit, and could not be closed when the node stops. Here the connection is
accepted first, counted, and upgraded then. The key-value listener and the HTTP server use it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from typing import cast


async def close_servers(servers: Iterable[asyncio.Server]) -> None:
    """Accept no more. What has been accepted meanwhile gets its protocol, which is to turn it away.

    asyncio's own loop hands a connection on one turn after it has accepted it. If its server is closed by then, it
    fails and leaves the socket open (CPython's issue 109564). uvloop does both in one turn and has no readers here.
    """
    servers = list(servers)
    loop = asyncio.get_running_loop()
    for server in servers:
        for listening in server.sockets:
            loop.remove_reader(listening.fileno())
    await asyncio.sleep(0)
    for server in servers:
        server.close()


class TlsDoor:
    """Where connections come in. `open_protocol` is the protocol factory of a server that listens without TLS."""

    def __init__(
        self,
        context: ssl.SSLContext,
        make_protocol: Callable[[], asyncio.Protocol],
        *,
        handshake_s: float,
        has_room: Callable[[int], bool],
    ) -> None:
        """`has_room` gets the number of handshakes under way, and says whether there may be one more."""
        self.context = context
        self.make_protocol = make_protocol
        self.handshake_s = handshake_s
        self.has_room = has_room
        self.handshakes: dict[_Handshake, None] = {}
        self.is_closed = False

    def open_protocol(self) -> asyncio.Protocol:
        return _Handshake(self)

    def close(self) -> None:
        """End the handshakes under way, and let no one in any more."""
        self.is_closed = True
        for handshake in list(self.handshakes):
            handshake.abort()


class _Handshake(asyncio.Protocol):
    """One connection until its handshake is complete. Then the real protocol takes its place."""

    def __init__(self, door: TlsDoor) -> None:
        self._door = door
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None] | None = None
        self._received = bytearray()
        """At first what came before the handshake began, then what came with the last bytes of it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's in all but their ancestry.
        self._transport = cast(asyncio.Transport, transport)
        if self._door.is_closed or not self._door.has_room(len(self._door.handshakes)):
            self._transport.abort()
            return
        self._door.handshakes[self] = None
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._received += data

    async def _shake_hands(self) -> None:
        door, loop = self._door, asyncio.get_running_loop()
        # uvloop begins to read when `connection_made` returns, whatever was asked there, so a fast client's hello is
        # here already. It is handed on once TLS has taken our place.
        starting = loop.create_task(
            loop.start_tls(
                self._transport, self, door.context, server_side=True, ssl_handshake_timeout=door.handshake_s
            )
        )
        try:
            while self._transport.get_protocol() is self and not starting.done():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            hello, self._received = self._received, bytearray()
            # A connection that broke meanwhile has no protocol any more.
            if hello and not starting.done() and (protocol := self._transport.get_protocol()) is not None:
                _hand_on(protocol, hello)
            encrypted = await starting
        except (OSError, TimeoutError):
            # It speaks no TLS, or none that we speak, or takes too long. There is no protocol to report that to.
            self._transport.abort()
            return
        finally:
            starting.cancel()
            door.handshakes.pop(self, None)
        if encrypted is None or encrypted.is_closing():
            return
        served = door.make_protocol()
        encrypted.set_protocol(served)
        served.connection_made(encrypted)
        if self._received and not encrypted.is_closing():
            served.data_received(bytes(self._received))

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()


def _hand_on(protocol: asyncio.BaseProtocol, data: bytearray) -> None:
    """Have the protocol of TLS take bytes that it did not read itself."""
    buffered = cast(asyncio.BufferedProtocol, protocol)
    while data:
        room = memoryview(buffered.get_buffer(len(data)))
        taken = min(len(room), len(data))
        room[:taken] = data[:taken]
        del data[:taken]
        buffered.buffer_updated(taken)
