"""A network of hosts: links that are fast or slow, that split what is sent at any place, and that can be cut.

A connection is two pipes. What is written waits at its sender until the window of the pipe has room, travels for as
long as the link says, and waits at its receiver until that reads: so there is back pressure, and slow readers slow
writers down. A link that is cut delivers nothing, in the direction that is cut; what was sent is delivered when it is
mended, as TCP would send it again. A connection whose other end has died is reset, as soon as word of it gets through.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from headwater.sim.processes import CURRENT, Process
from headwater.sim.trace import Trace
from headwater.sim.transport import SimulatedSocket, SimulatedTransport

if TYPE_CHECKING:
    from headwater.sim.event_loop import SimulatedLoop

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
        self, network: Network, factory: Callable[[], asyncio.BaseProtocol], process: Process, host: str, port: int
    ) -> None:
        self.factory = factory
        self.process = process
        self.sockets = (SimulatedSocket((host, port), (host, port)),)
        self._network = network
        self._place = (host, port)

    def close(self) -> None:
        self._network.stop_listening(self._place, self)

    async def wait_closed(self) -> None:
        pass

    def is_serving(self) -> bool:
        return self._network.listeners.get(self._place) is self


class Network:
    """All hosts and what is between them. `attach`ed to the loop that runs it."""

    def __init__(self, random: Random, trace: Trace) -> None:
        self.random = random
        self.trace = trace
        self.taps: list[Tap] = []
        self.listeners: dict[tuple[str, int], SimulatedServer] = {}
        self.new_link: Callable[[], Link] = Link
        self.loop: SimulatedLoop
        self._links: dict[tuple[str, str], Link] = {}
        self._open: dict[SimulatedTransport, None] = {}
        self._mended: list[asyncio.Future[None]] = []
        self._next_port = FIRST_FREE_PORT
        self._connections = 0

    def attach(self, loop: SimulatedLoop) -> None:
        self.loop = loop

    # --- links ----------------------------------------------------------------------------------------------------

    def link(self, source: str, target: str) -> Link:
        if (source, target) not in self._links:
            self._links[source, target] = Link(latency_s_max=0.0001) if source == target else self.new_link()
        return self._links[source, target]

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from source to target from now on."""
        self.link(source, target).is_cut = True

    def mend(self) -> None:
        """All that is cut is whole again."""
        for link in self._links.values():
            link.is_cut = False
        waiting, self._mended = self._mended, []
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
        """A process has died: nobody listens any more, and its peers will be told, unless the host has died, too."""
        for place, server in list(self.listeners.items()):
            if server.process is process:
                del self.listeners[place]
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

    def stop_listening(self, place: tuple[str, int], server: SimulatedServer) -> None:
        if self.listeners.get(place) is server:
            del self.listeners[place]

    async def connect(
        self, factory: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        process = _current()
        there, back = self.link(process.host, host), self.link(host, process.host)
        await asyncio.sleep(self.latency_s(there))
        while there.is_cut or back.is_cut:
            waiter = self.loop.create_future()
            self._mended.append(waiter)
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
