"""Accept connections, and limit the places and the memory that they take.

asyncio's servers create the protocol only once the TLS handshake is complete. A handshake that never finishes would
count against no limit, and could not be closed when the node stops. This module accepts and counts each connection
first, and then upgrades it to TLS.

`Places` records who holds a place, so that no address and no user keeps all of them while others want one. `HeldMemory`
counts the bytes that peers make the process hold. The key-value listener and the HTTP server use both.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar, cast

H = TypeVar("H", bound=Hashable)


async def close_servers(servers: Iterable[asyncio.Server]) -> None:
    """Stop accepting. Connections that were already accepted still get their protocol, which has to reject them.

    asyncio creates the protocol one loop iteration after it accepts a connection. If the server is closed by then,
    that fails and leaves the socket open (CPython's issue 109564). uvloop does both at once and has no readers here.
    """
    servers = list(servers)
    loop = asyncio.get_running_loop()
    for server in servers:
        for listening in server.sockets:
            loop.remove_reader(listening.fileno())
    await asyncio.sleep(0)
    for server in servers:
        server.close()


def peer_address(transport: asyncio.BaseTransport) -> str:
    """The address of the other end, without its port."""
    return str((transport.get_extra_info("peername") or ("",))[0])


# --- places -------------------------------------------------------------------------------------------------------


class Places(Generic[H]):
    """Who holds a place, by owner: connections by their address, sessions and streams by their user.

    An owner may hold any number of places while there is room for all. Once there is none, the caller uses `owners`
    or `first_to_go`: the owner that has the most gives way.
    """

    def __init__(self) -> None:
        self._of: dict[str, dict[H, None]] = {}
        """The holders of each owner, the oldest first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def count_of(self, owner: str) -> int:
        return len(self._of.get(owner, ()))

    def add(self, holder: H, *, owner: str) -> None:
        """Give a place to a holder. If it already has one, it becomes the newest of its owner."""
        self.discard(holder, owner=owner)
        self._of.setdefault(owner, {})[holder] = None
        self._count += 1

    def discard(self, holder: H, *, owner: str) -> None:
        holders = self._of.get(owner, {})
        if holder in holders:
            del holders[holder]
            self._count -= 1
            if not holders:
                del self._of[owner]

    def owners(self) -> Iterator[Collection[H]]:
        """The holders of each owner, oldest first. The owner that has the most comes first."""
        yield from sorted(self._of.values(), key=len, reverse=True)

    def first_to_go(self, owner: str) -> H | None:
        """The oldest holder of the owner that has the most; None if `owner` would have as many with one more place."""
        holders = max(self._of.values(), key=len, default={})
        return next(iter(holders)) if len(holders) > self.count_of(owner) + 1 else None


# --- memory -------------------------------------------------------------------------------------------------------

_SETTLED_SHARE = 7 / 8
"""Once the limit is exceeded, connections are closed until usage is down to this share of it: comparing all of them
takes a while, and must not happen for every byte."""
_LARGE_BYTES = 64 * 1024
"""For smaller amounts, the allocator uses memory that it already has."""


class MemoryHolder(Protocol):
    """A connection whose held bytes are counted."""

    moved_s: float
    """When it last made progress: a request arrived, or the peer read an answer."""

    def held_bytes(self) -> int: ...

    def drop(self, reason: str) -> None:
        """Close it and free what it holds, now."""
        ...


class HeldMemory:
    """Counts the bytes that peers make the process hold: unfinished requests, waiting requests, and unread answers.

    Every connection that holds such bytes calls `enter` whenever their number may have changed.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.total_bytes = 0
        self.taken_bytes = 0
        """All that was ever held in large pieces. The allocator may still keep it (`give_back_freed_memory`)."""
        self._held: dict[MemoryHolder, int] = {}

    def enter(self, holder: MemoryHolder) -> None:
        """Count what a connection holds now. If the total is too high, close the largest holders, maybe this one."""
        held_bytes, before_bytes = holder.held_bytes(), self._held.get(holder, 0)
        self._held[holder] = held_bytes
        self.total_bytes += held_bytes - before_bytes
        if held_bytes - before_bytes > _LARGE_BYTES:
            self.taken_bytes += held_bytes - before_bytes
        if self.total_bytes > self.bytes_max:
            self._close_largest()

    def forget(self, holder: MemoryHolder) -> None:
        self.total_bytes -= self._held.pop(holder, 0)

    def _close_largest(self) -> None:
        # Count again: peers may have read meanwhile, which is not reported.
        self._held = {holder: holder.held_bytes() for holder in self._held}
        self.total_bytes = sum(self._held.values())
        is_over = self.total_bytes > self.bytes_max
        while is_over and self.total_bytes > self.bytes_max * _SETTLED_SHARE:
            half = max(self._held.values()) / 2
            # Close the large holder whose last progress is oldest: one that still makes progress may finish by itself.
            large = [holder for holder, held_bytes in self._held.items() if held_bytes >= half]
            stuck = min(large, key=lambda holder: holder.moved_s)
            self.forget(stuck)
            stuck.drop("the node holds too much for its clients")


# --- TLS ----------------------------------------------------------------------------------------------------------


class TlsAcceptor:
    """Accepts TLS connections. Use `open_protocol` as the protocol factory of a server that listens without TLS."""

    def __init__(
        self,
        context: ssl.SSLContext,
        make_protocol: Callable[[asyncio.Transport], asyncio.Protocol],
        *,
        handshake_s: float,
        admit: Callable[[Handshake], bool],
        leave: Callable[[Handshake], None],
    ) -> None:
        """`make_protocol` gets the transport below TLS, which may hold bytes as well. `admit` returns whether a
        handshake gets a place; `leave` takes the place back."""
        self.context = context
        self.make_protocol = make_protocol
        self.handshake_s = handshake_s
        self.admit = admit
        self.leave = leave
        self.handshakes: dict[Handshake, None] = {}
        self.is_closed = False

    def open_protocol(self) -> asyncio.Protocol:
        return Handshake(self)

    def close(self) -> None:
        """Abort the handshakes in progress, and reject new connections."""
        self.is_closed = True
        for handshake in list(self.handshakes):
            handshake.abort()


class Handshake(asyncio.Protocol):
    """A connection whose TLS handshake is not complete yet. Then the real protocol replaces it."""

    def __init__(self, acceptor: TlsAcceptor) -> None:
        self._acceptor = acceptor
        self.address = ""
        self._transport: asyncio.Transport
        self._task: asyncio.Task[None] | None = None
        self._received = bytearray()
        """Bytes that came before the handshake began; later, those that came together with its last bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the interface of asyncio's, but another base class.
        self._transport = cast(asyncio.Transport, transport)
        self.address = peer_address(transport)
        if self._acceptor.is_closed or not self._acceptor.admit(self):
            self._transport.abort()
            return
        self._acceptor.handshakes[self] = None
        self._task = asyncio.get_running_loop().create_task(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._received += data

    async def _shake_hands(self) -> None:
        acceptor, loop = self._acceptor, asyncio.get_running_loop()
        # uvloop starts to read when `connection_made` returns, even if paused in there, so a fast client's hello may
        # have arrived already. Pass it on once TLS has replaced this protocol.
        starting = loop.create_task(
            loop.start_tls(
                self._transport, self, acceptor.context, server_side=True, ssl_handshake_timeout=acceptor.handshake_s
            )
        )
        try:
            while self._transport.get_protocol() is self and not starting.done():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            hello, self._received = self._received, bytearray()
            # If the connection broke meanwhile, it has no protocol.
            if hello and not starting.done() and (protocol := self._transport.get_protocol()) is not None:
                _hand_on(protocol, hello)
            encrypted = await starting
        except (OSError, TimeoutError):
            # The peer speaks no TLS, or no version that we support, or is too slow. No protocol can report that yet.
            self._transport.abort()
            return
        finally:
            starting.cancel()
            acceptor.handshakes.pop(self, None)
            acceptor.leave(self)
        if encrypted is None or encrypted.is_closing():
            return
        served = acceptor.make_protocol(self._transport)
        encrypted.set_protocol(served)
        served.connection_made(encrypted)
        if self._received and not encrypted.is_closing():
            served.data_received(bytes(self._received))

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._transport.abort()


def _hand_on(protocol: asyncio.BaseProtocol, data: bytearray) -> None:
    """Pass bytes to the TLS protocol that it did not read itself."""
    buffered = cast(asyncio.BufferedProtocol, protocol)
    while data:
        room = memoryview(buffered.get_buffer(len(data)))
        taken = min(len(room), len(data))
        room[:taken] = data[:taken]
        del data[:taken]
        buffered.buffer_updated(taken)
