"""A network of hosts: links that are fast or slow, that split what is sent at any byte, and that can be cut.

A connection is two pipes. What is written waits at its sender until the window of the pipe has room, travels for as
long as the link says, and waits at its receiver until that reads: so there is back pressure, and slow readers slow
writers down. A link that is cut delivers nothing, in the direction that is cut; what was sent is delivered when it is
restored, as TCP would send it again. A connection whose other end has died is reset, as soon as word of it gets
through.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable
from contextvars import Context
from dataclasses import dataclass
from random import Random
from typing import Any

from headwater.sim.machines import CURRENT, Process, Trace

# --- one end of a connection, as an asyncio transport: buffers, back pressure, and all the ways to end ----------------


HIGH_WATER_BYTES = 64 * 1024
LOW_WATER_BYTES = 16 * 1024
RESET_CHANCE = 0.5
"""That an abort reaches the peer as a reset, and not as an end."""
_NO_PROCESS = Context()
"""What is on the way belongs to no process."""


class SimulatedSocket:
    """The few methods of a socket that are called on a transport's."""

    def __init__(self, here: tuple[str, int], there: tuple[str, int]) -> None:
        self._here, self._there = here, there

    def getsockname(self) -> tuple[str, int]:
        return self._here

    def getpeername(self) -> tuple[str, int]:
        return self._there

    def setsockopt(self, *_: Any) -> None:
        pass

    def fileno(self) -> int:
        return -1


class SimulatedTransport(asyncio.Transport):
    """The sending pipe of this end, and the received bytes that this end has not read."""

    def __init__(
        self,
        network: SimulatedNetwork,
        process: Process,
        connection: int,
        *,
        here: tuple[str, int],
        there: tuple[str, int],
        is_client: bool,
    ) -> None:
        super().__init__({"socket": SimulatedSocket(here, there), "peername": there, "sockname": here})
        self.process = process
        self.connection = connection
        self.is_client = is_client
        self.peer: SimulatedTransport
        self._network = network
        self._loop = network.loop
        self._link = network.link(here[0], there[0])
        self._back = network.link(there[0], here[0])
        self._protocol: asyncio.BaseProtocol | None = None
        self._context = process.context
        # Out.
        self._unsent: deque[bytes] = deque()
        self._unsent_bytes = 0
        self._in_flight_bytes = 0
        """Sent, and not read by the peer."""
        self._travelling: deque[bytes | Exception | None] = deque()
        """On the way; None is the end, and an error a reset."""
        self._arrives_s = 0.0
        self._is_waiting_for_link = False
        self._protocol_is_paused = False
        # In.
        self._unread: deque[bytes] = deque()
        self._is_reading = True
        self._peer_has_ended = False
        # Ending.
        self._is_closing = False
        self._is_lost = False

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """The connection is made, in the context of the process that it belongs to."""
        if self._is_lost:
            return
        self._protocol = protocol
        protocol.connection_made(self)
        self._read()

    # --- writing --------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not data or self._is_lost or self._is_closing or not self.process.is_alive:
            return
        copied = bytes(data)
        for tap in self._network.taps:
            tap.written(self.connection, copied, by_server=not self.is_client)
        self._unsent.append(copied)
        self._unsent_bytes += len(copied)
        self._send()
        if self._unsent_bytes > HIGH_WATER_BYTES and not self._protocol_is_paused:
            self._protocol_is_paused = True
            assert self._protocol is not None
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def can_write_eof(self) -> bool:
        return False

    def _send(self) -> None:
        """Let go what the window has room for."""
        link, random = self._link, self._network.random
        while self._unsent and self._in_flight_bytes < link.window_bytes and not self._is_lost:
            data = self._unsent.popleft()
            if len(data) > 1 and random.random() < link.split_chance:
                cut_at = random.randrange(1, len(data))
                self._unsent.appendleft(data[cut_at:])
                data = data[:cut_at]
            self._unsent_bytes -= len(data)
            self._in_flight_bytes += len(data)
            self._travel(data)
        if self._protocol_is_paused and self._unsent_bytes <= LOW_WATER_BYTES and not self._is_lost:
            self._protocol_is_paused = False
            assert self._protocol is not None
            self._loop.call_soon(self._protocol.resume_writing, context=self._context)
        if self._is_closing and not self._unsent and not self._is_lost:
            self._travel(None)
            self._lose(None)

    def _travel(self, what: bytes | Exception | None) -> None:
        link = self._link
        taken_s = self._network.latency_s(link) + (len(what) / link.bytes_per_s if isinstance(what, bytes) else 0.0)
        self._arrives_s = max(self._arrives_s, self._loop.time() + taken_s)
        self._travelling.append(what)
        # The network carries it on whatever becomes of the sender.
        self._loop.call_at(self._arrives_s, self._arrive, context=_NO_PROCESS)

    def _arrive(self) -> None:
        if self._link.is_cut:
            self._is_waiting_for_link = True
            return
        if self._travelling:
            self.peer._take(self._travelling.popleft())
            self._forget_if_done()

    def kick(self) -> None:
        """The link is whole again."""
        if self._is_waiting_for_link and not self._link.is_cut:
            self._is_waiting_for_link = False
            while self._travelling:
                self.peer._take(self._travelling.popleft())
            self._forget_if_done()
        if not self._is_lost and not self._back.is_cut:
            self._send()

    def _has_been_read(self, byte_count: int) -> None:
        self._in_flight_bytes -= byte_count
        if not self._back.is_cut and self.process.is_alive:
            self._send()

    # --- reading --------------------------------------------------------------------------------------------------

    def _take(self, what: bytes | Exception | None) -> None:
        """Something has arrived at this end."""
        if self._is_lost or not self.process.is_alive:
            if isinstance(what, bytes) and not self.peer._is_lost:
                self._travel(ConnectionResetError(104, "Connection reset by peer"))
            return
        if isinstance(what, Exception):
            self._unread.clear()
            self._unsent.clear()
            self._lose(what)
        elif what is None:
            self._peer_has_ended = True
            self._loop.call_soon(self._read, context=self._context)
        else:
            self._unread.append(what)
            self._loop.call_soon(self._read, context=self._context)

    def _read(self) -> None:
        protocol = self._protocol
        if protocol is None:
            return
        while self._unread and self._is_reading and not self._is_lost:
            data = self._unread.popleft()
            self._network.trace.delivered(data)
            if isinstance(protocol, asyncio.BufferedProtocol):
                self._fill_buffer(protocol, data)
            else:
                assert isinstance(protocol, asyncio.Protocol)
                protocol.data_received(data)
            self.peer._has_been_read(len(data))
        if self._peer_has_ended and not self._unread and not self._is_lost and self._is_reading:
            self._peer_has_ended = False
            assert isinstance(protocol, asyncio.Protocol | asyncio.BufferedProtocol)
            if not protocol.eof_received():
                self.close()

    def _fill_buffer(self, protocol: asyncio.BufferedProtocol, data: bytes) -> None:
        at = 0
        while at < len(data) and not self._is_lost:
            buffer = memoryview(protocol.get_buffer(-1))
            length = min(len(buffer), len(data) - at)
            buffer[:length] = data[at : at + length]
            protocol.buffer_updated(length)
            at += length

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self._loop.call_soon(self._read, context=self._context)

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    # --- ending ---------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing or self._is_lost

    def close(self) -> None:
        """After what was written has been sent."""
        if self._is_closing or self._is_lost:
            return
        self._is_closing = True
        self._is_reading = False
        self._send()

    def abort(self) -> None:
        if self._is_lost:
            return
        self._is_closing = True
        self._unsent.clear()
        is_reset = self._network.random.random() < RESET_CHANCE
        self._travel(ConnectionResetError(104, "Connection reset by peer") if is_reset else None)
        self._lose(None)

    def die(self, *, silently: bool) -> None:
        """The process was killed. The kernel of its host notifies the peer, unless that is gone as well."""
        self._unsent.clear()
        if not self._is_lost:
            if not silently:
                self._travel(ConnectionResetError(104, "Connection reset by peer"))
            self._is_lost = True
            self._end()

    def reset_by_network(self) -> None:
        """Both ends hear of it at once, and of nothing else."""
        for end in (self, self.peer):
            end._travelling.clear()
            if not end._is_lost and end.process.is_alive:
                end._unsent.clear()
                end._unread.clear()
                end._lose(ConnectionResetError(104, "Connection reset by peer"))

    def _lose(self, error: Exception | None) -> None:
        self._is_lost = True
        self._is_closing = True
        self._end()
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error, context=self._context)

    def _end(self) -> None:
        if self.is_client:
            for tap in self._network.taps:
                tap.closed(self.connection)
        self._forget_if_done()

    def _forget_if_done(self) -> None:
        """What is still on the way may have to wait for a link, and is delivered when that is whole."""
        if self._is_lost and not self._travelling:
            self._network.forget(self)


FIRST_FREE_PORT = 30_000


@dataclass(slots=True, kw_only=True)
class Link:
    """The way from one host to another, in one direction."""

    latency_s_min: float = 0.0001
    latency_s_max: float = 0.001
    bytes_per_s: float = 1e8
    split_chance: float = 0.0
    """How likely it is that what is sent at once comes in several pieces."""
    window_bytes: int = 256 * 1024
    is_cut: bool = False


class Tap:
    """Sees all that is written, where it is written."""

    def connected(self, connection: int, *, client: str, server: str) -> None: ...

    def written(self, connection: int, data: bytes, *, by_server: bool) -> None: ...

    def closed(self, connection: int) -> None: ...


class SimulatedServer:
    """What listens at a port, as `asyncio.Server` looks."""

    def __init__(
        self,
        network: SimulatedNetwork,
        factory: Callable[[], asyncio.BaseProtocol],
        process: Process,
        host: str,
        port: int,
    ) -> None:
        self.factory = factory
        self.process = process
        self.sockets = (SimulatedSocket((host, port), (host, port)),)
        self._network = network
        self._address = (host, port)

    def close(self) -> None:
        self._network.stop_listening(self._address, self)

    async def wait_closed(self) -> None:
        pass

    def is_serving(self) -> bool:
        return self._network.listeners.get(self._address) is self


class SimulatedNetwork:
    """All hosts and what is between them. `attach`ed to the loop that runs it."""

    def __init__(self, random: Random, trace: Trace) -> None:
        self.random = random
        self.trace = trace
        self.taps: list[Tap] = []
        self.listeners: dict[tuple[str, int], SimulatedServer] = {}
        self.new_link: Callable[[], Link] = Link
        self.loop: asyncio.AbstractEventLoop
        self._links: dict[tuple[str, str], Link] = {}
        self._open: dict[SimulatedTransport, None] = {}
        self._restored: list[asyncio.Future[None]] = []
        self._next_port = FIRST_FREE_PORT
        self._connections = 0

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop

    # --- links ----------------------------------------------------------------------------------------------------

    def link(self, source: str, target: str) -> Link:
        if (source, target) not in self._links:
            self._links[source, target] = Link(latency_s_max=0.0001) if source == target else self.new_link()
        return self._links[source, target]

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from source to target from now on."""
        self.link(source, target).is_cut = True

    def restore(self) -> None:
        """All that is cut is whole again."""
        for link in self._links.values():
            link.is_cut = False
        waiting, self._restored = self._restored, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
        for transport in list(self._open):
            transport.kick()

    def reset_some(self, chance: float) -> int:
        """Break connections, as a box on the way does that has lost its memory."""
        broken = [
            transport
            for transport in self._open
            if transport.is_client and not transport.is_closing() and self.random.random() < chance
        ]
        for transport in broken:
            transport.reset_by_network()
        return len(broken)

    def close_of(self, process: Process, *, silently: bool = False) -> None:
        """A process has died: its ports are free, and its peers get a reset, unless the host has died, too."""
        for address, server in list(self.listeners.items()):
            if server.process is process:
                del self.listeners[address]
        for transport in list(self._open):
            if transport.process is process:
                transport.die(silently=silently)

    def forget(self, transport: SimulatedTransport) -> None:
        self._open.pop(transport, None)

    # --- what a loop does -----------------------------------------------------------------------------------------

    def resolve(self, host: Any, port: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))]

    def listen(self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int) -> SimulatedServer:
        process = _current()
        if port == 0:
            self._next_port += 1
            port = self._next_port
        if (host, port) in self.listeners:
            raise OSError(98, "Address already in use")
        server = SimulatedServer(self, factory, process, host, port)
        self.listeners[host, port] = server
        return server

    def stop_listening(self, address: tuple[str, int], server: SimulatedServer) -> None:
        if self.listeners.get(address) is server:
            del self.listeners[address]

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        process = _current()
        there, back = self.link(process.host, host), self.link(host, process.host)
        await asyncio.sleep(self.latency_s(there))
        while there.is_cut or back.is_cut:
            waiter = self.loop.create_future()
            self._restored.append(waiter)
            await waiter
        server = self.listeners.get((host, port))
        if server is None or not server.process.is_alive:
            await asyncio.sleep(self.latency_s(back))
            raise ConnectionRefusedError(111, f"Connect call failed ('{host}', {port})")
        self._next_port += 1
        self._connections += 1
        near, far = (process.host, self._next_port), (host, port)
        client = SimulatedTransport(self, process, self._connections, here=near, there=far, is_client=True)
        peer = SimulatedTransport(self, server.process, self._connections, here=far, there=near, is_client=False)
        client.peer, peer.peer = peer, client
        self._open[client] = self._open[peer] = None
        for tap in self.taps:
            tap.connected(self._connections, client=process.name, server=server.process.name)
        self.loop.call_soon(lambda: peer.begin(server.factory()), context=server.process.context)
        try:
            await asyncio.sleep(self.latency_s(back))
        except asyncio.CancelledError:
            client.abort()
            raise
        if client.is_closing():
            raise ConnectionResetError(104, "Connection reset by peer")
        protocol = factory()
        client.begin(protocol)
        return client, protocol

    def latency_s(self, link: Link) -> float:
        return self.random.uniform(link.latency_s_min, link.latency_s_max)


def _current() -> Process:
    process = CURRENT.get()
    assert process is not None, "the network is for simulated processes"
    return process
