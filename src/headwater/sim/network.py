"""Simulated machines and the network between them: processes that can be killed, disks that outlive them, and links
that are fast or slow, split data at any byte, and can be cut.

A connection is two pipes. Written data waits at its sender until the window of the pipe has room, travels for as
long as the link takes, and waits at its receiver until that reads: so there is back pressure, and slow readers slow
writers down. A cut link delivers nothing in the direction that is cut; data sent is delivered when the link is
restored, as TCP would retransmit it. If the other end of a connection dies, the connection is reset as soon as the
reset gets through.

Everything that runs belongs to a process, and stops when the process is killed. A process is the value of a context
variable, which asyncio passes on to every task and callback created in it. Before the event loop runs anything, it
looks at this variable, and drops the callbacks of killed processes. This acts like kill -9: no `finally`, no
handler, no last word. A restarted process is a new one on the same host.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from headwater.client.kv_connection import Login
from headwater.client.settings import ClientSettings
from headwater.errors import StoreFull
from headwater.node.auth.users import Users
from headwater.node.node_folder import NodeIdentity
from headwater.store.engine import Change, MemoryEngine

PORT = 11210
BUCKET = "default"
"""The port of all nodes, and their only bucket."""

CURRENT: ContextVar[Process | None] = ContextVar("simulated process", default=None)


def login_of(settings: ClientSettings, random: Random) -> Login:
    """Return a client's login with simulated randomness, so that it does not differ from run to run."""
    return replace(settings.login(), random_bytes=random.randbytes)


class Process:
    """One incarnation of a program on a host."""

    def __init__(self, name: str, host: str, *, random: Random, disk: DiskDelay | None = None) -> None:
        self.name = name
        self.host = host
        self.random = random
        self.disk_delay: DiskDelay = disk or (lambda: 0.0)
        self.is_alive = True
        self.on_killed: list[Callable[[], None]] = []
        """What the network and the disk do when the process is killed."""
        self.context: Context = copy_context()
        self.context.run(CURRENT.set, self)

    def run(
        self, loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Any], *, name: str = "main"
    ) -> asyncio.Task[Any]:
        """Start a task of this process."""
        return loop.create_task(main, name=f"{self.name}/{name}", context=self.context)

    def kill(self) -> None:
        """Kill the process, as with kill -9."""
        if not self.is_alive:
            return
        self.is_alive = False
        for action in self.on_killed:
            action()

    def __repr__(self) -> str:
        return f"<{self.name}{'' if self.is_alive else ', dead'}>"


DiskDelay = Callable[[], float]
"""Returns how long the next operation on the process's disk takes, in seconds."""


# --- the disk: it outlives the processes on it, can be slow, and can be full ------------------------------------------
#
# A write is atomic and durable when it returns, as with LMDB. A crash during a write leaves all of it or nothing:
# the event loop lets a write take effect at one moment, shortly before its caller is notified.


class SimulatedDisk:
    """Everything that a host stores, except what only processes know."""

    def __init__(self, random: Random, users: Users) -> None:
        self.random = random
        self.users = users
        self.identity = NodeIdentity(uuid="", cluster_uuid="0" * 32)
        self.delay_s_max = 0.002
        self.is_full = False
        self.writes = 0
        self.engines: dict[str, SimulatedEngine] = {}

    def delay_s(self) -> float:
        return self.random.uniform(0.00005, self.delay_s_max)

    def before_write(self) -> None:
        if self.is_full:
            raise StoreFull("the simulated disk is full", hint="Wait for the fault to end")
        self.writes += 1


class SimulatedFolder:
    """A node's folder on a simulated disk."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def __call__(self, data: Path) -> SimulatedFolder:
        """Return this folder: a disk has one folder, whatever its name."""
        return self

    def make(self) -> None:
        pass

    def bucket_names(self) -> list[str]:
        return sorted(self._disk.engines)

    def open_engine(self, bucket: str) -> SimulatedEngine:
        if bucket not in self._disk.engines:
            self._disk.engines[bucket] = SimulatedEngine(self._disk)
        return self._disk.engines[bucket]

    def disk_bytes(self, bucket: str) -> int:
        return 0

    def remove_bucket(self, bucket: str) -> None:
        del self._disk.engines[bucket]

    def remove_dropped(self) -> None:
        pass

    def load_identity(self) -> NodeIdentity:
        return self._disk.identity

    def store_identity(self, identity: NodeIdentity) -> None:
        self._disk.identity = identity

    def load_users(self) -> Users:
        return self._disk.users

    def store_users(self, users: Users) -> None:
        self._disk.users = users

    def store_password(self, password: str) -> None:
        raise AssertionError("simulated nodes are given their users")

    def forget_password(self) -> None:
        raise AssertionError("no password was generated")


class SimulatedEngine(MemoryEngine):
    """The tables of a bucket. A write fails if the disk is full."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__()
        self._disk = disk

    def write(self, changes: Sequence[Change]) -> None:
        self._disk.before_write()
        super().write(changes)


# --- the trace: a digest of everything that happened, in order, and optionally lines to read --------------------------


LINES_MAX = 200_000
"""The number of lines kept for a reader. The digest covers all lines."""


class Trace:
    """The digest covers every line and every delivered byte: two runs with equal digests are the same run."""

    def __init__(self, *, keeps_lines: bool = False) -> None:
        self.lines: list[str] = []
        self.now_s: Callable[[], float] = lambda: 0.0
        self._keeps_lines = keeps_lines
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, who: str, what: str) -> None:
        line = f"{self.now_s():11.6f} {who:<14} {what}"
        self._digest.update(line.encode())
        if self._keeps_lines and len(self.lines) < LINES_MAX:
            self.lines.append(line)

    def delivered(self, data: bytes) -> None:
        self._digest.update(f"{self.now_s():.9f}".encode())
        self._digest.update(data)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


# --- the network ------------------------------------------------------------------------------------------------------

# --- one end of a connection, as an asyncio transport: buffers, back pressure, and all the ways to end ----------------


HIGH_WATER_BYTES = 64 * 1024
LOW_WATER_BYTES = 16 * 1024
RESET_CHANCE = 0.5
"""The chance that an abort reaches the peer as a reset, and not as an end of the stream."""
_NO_PROCESS = Context()
"""Data in transit belongs to no process."""


class SimulatedSocket:
    """The few methods of a transport's socket that are called."""

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
    """One end of a connection: its sending pipe, and received bytes that it has not read yet."""

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
        """Bytes sent but not yet read by the peer."""
        self._travelling: deque[bytes | Exception | None] = deque()
        """Items in transit; None is the end of the stream, and an error is a reset."""
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
        """Complete the connection, in the context of its process."""
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
        """Send as much as the window has room for."""
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
        # The data arrives even if the sender dies.
        self._loop.call_at(self._arrives_s, self._arrive, context=_NO_PROCESS)

    def _arrive(self) -> None:
        if self._link.is_cut:
            self._is_waiting_for_link = True
            return
        if self._travelling:
            self.peer._take(self._travelling.popleft())
            self._forget_if_done()

    def kick(self) -> None:
        """Deliver what waited for the link, which is restored."""
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
        """Process an item that has arrived at this end."""
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
        """Close the connection after all written data was sent."""
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
        """End the connection of a killed process. Its host's kernel resets it, unless the host is dead, too."""
        self._unsent.clear()
        if not self._is_lost:
            if not silently:
                self._travel(ConnectionResetError(104, "Connection reset by peer"))
            self._is_lost = True
            self._end()

    def reset_by_network(self) -> None:
        """Reset both ends at once; data in transit is lost."""
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
        """Forget a lost transport once nothing is in transit. Items may have to wait until a link is restored."""
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
    """The chance that data sent at once arrives in several pieces."""
    window_bytes: int = 256 * 1024
    is_cut: bool = False


class Tap:
    """Sees all data at the moment it is written."""

    def connected(self, connection: int, *, client: str, server: str) -> None: ...

    def written(self, connection: int, data: bytes, *, by_server: bool) -> None: ...

    def closed(self, connection: int) -> None: ...


class SimulatedServer:
    """A listening server, with the interface of `asyncio.Server`."""

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
    """All hosts and the links between them. The loop that runs it sets `loop`."""

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

    # --- links ----------------------------------------------------------------------------------------------------

    def link(self, source: str, target: str) -> Link:
        if (source, target) not in self._links:
            self._links[source, target] = Link(latency_s_max=0.0001) if source == target else self.new_link()
        return self._links[source, target]

    def cut(self, source: str, target: str) -> None:
        """From now on, deliver nothing from source to target."""
        self.link(source, target).is_cut = True

    def restore(self) -> None:
        """Restore all links that are cut."""
        for link in self._links.values():
            link.is_cut = False
        waiting, self._restored = self._restored, []
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
        for transport in list(self._open):
            transport.kick()

    def reset_some(self, chance: float) -> int:
        """Break connections, like a middlebox that has lost its state."""
        broken = [
            transport
            for transport in self._open
            if transport.is_client and not transport.is_closing() and self.random.random() < chance
        ]
        for transport in broken:
            transport.reset_by_network()
        return len(broken)

    def close_of(self, process: Process, *, silently: bool = False) -> None:
        """Clean up after a dead process: free its ports, and reset its peers unless the host is dead, too."""
        for address, server in list(self.listeners.items()):
            if server.process is process:
                del self.listeners[address]
        for transport in list(self._open):
            if transport.process is process:
                transport.die(silently=silently)

    def forget(self, transport: SimulatedTransport) -> None:
        self._open.pop(transport, None)

    # --- what a loop does -----------------------------------------------------------------------------------------

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
