"""A TCP proxy in front of a real server that does to a connection what networks do.

It cuts, truncates, delays and splits. It never changes bytes or their order: what comes out on one side is always a
prefix of what went in on the other. Only the number of a connection determines what happens to it, counted from 0
in the order of arrival.

A node that is to be reached only by the proxy must have the proxy's port as `--advertise-port`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from headwater.client.cluster_map import vbucket_of
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.client.settings import TlsSettings
from headwater.node.auth.accounts import store_users
from headwater.node.auth.users import DECOY_SECRET_BYTES, Users
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos
from headwater.protocol.numbers import VBucketId
from headwater.protocol.sasl import SCRAM_ITERATIONS_MIN, Credentials
from support.node_process import PASSWORD, USER, NodeProcess

HOST = "127.0.0.1"
RECEIVE_BYTES = 64 * 1024
CALL_S_MAX = 30.0
"""Far longer than anything here takes."""
LAST_WORDS_S_MAX = 1.0
"""How long a side may take to close after it was notified of the end."""
PORTS_TO_CHOOSE = range(20_000, 32_000)
"""Below the ports that systems use for outgoing connections, so that a port stays free while its server is down."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Way(Enum):
    TO_CLIENT = "to client"
    TO_SERVER = "to server"


class Ending(Enum):
    """How both sides are notified of the end."""

    FIN = "FIN"
    """They read everything that was passed, and then the end."""
    RESET = "RST"
    """Data that was passed but not read yet may be lost, too."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Pass this many bytes, perhaps ending inside a message, then end the connection in both directions."""

    way: Way
    after_bytes: int
    ending: Ending


@dataclass(frozen=True, slots=True)
class Truncate:
    """Pass this many bytes, then end only this direction. The other stays open until its own end."""

    way: Way
    after_bytes: int


@dataclass(frozen=True, slots=True)
class Stall:
    """Pass this many bytes and then nothing, but keep the connection open, like a dead machine."""

    way: Way
    after_bytes: int


@dataclass(frozen=True, slots=True)
class Delay:
    """Hold back the data after this many bytes, once."""

    way: Way
    after_bytes: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class Split:
    """Pass the first bytes in many small pieces, each in its own write."""

    way: Way
    until_bytes: int
    piece_bytes_max: int
    seed: int = 0


Action = Cut | Truncate | Stall | Delay | Split
Plan = Callable[[int], Sequence[Action]]
"""Returns what happens to a connection, by its number."""


def no_faults(connection: int) -> Sequence[Action]:
    """Pass everything as it arrives."""
    return ()


# --- schedules ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FaultSchedule:
    """Faults that only the seed determines: the repr is enough to reproduce them."""

    seed: int
    faulty_connections: int = 6
    """Later connections have no faults, so that clients that retry succeed in the end."""
    to_client_bytes_max: int = 1 << 15
    to_server_bytes_max: int = 1 << 11
    delay_s_max: float = 0.02

    def __call__(self, connection: int) -> tuple[Action, ...]:
        if connection >= self.faulty_connections:
            return ()
        dice = random.Random(f"{self.seed}/{connection}")
        actions: list[Action] = []
        for way in Way:
            if dice.random() < 0.5:
                actions.append(self._split(dice, way))
            if dice.random() < 0.3:
                actions.append(Delay(way, self._position(dice, way), dice.uniform(0, self.delay_s_max)))
        if dice.random() < 0.9:
            actions.append(self._end(dice))
        return tuple(actions)

    def _split(self, dice: random.Random, way: Way) -> Split:
        """Return single bytes for a while, or small pieces for longer: each piece is a system call."""
        piece_bytes_max = dice.choice([1, 3, 20, 300])
        return Split(way, piece_bytes_max * 400, piece_bytes_max, seed=dice.randrange(1 << 32))

    def _end(self, dice: random.Random) -> Action:
        # Most of the bytes go to the client, and so do most of the faults.
        way = dice.choices(list(Way), weights=[3, 1])[0]
        position = self._position(dice, way)
        if dice.random() < 0.2:
            return Truncate(way, position)
        return Cut(way, position, dice.choice(list(Ending)))

    def _position(self, dice: random.Random, way: Way) -> int:
        """Return an early, later or any position, to hit logins, the opening of streams, and long streams."""
        limit = self.to_client_bytes_max if way is Way.TO_CLIENT else self.to_server_bytes_max
        return dice.randrange(limit >> dice.choice([6, 3, 0]))

    def describe(self) -> str:
        """Return what the schedule does, one line per connection."""
        lines = [f"  {number}: {'; '.join(map(str, self(number)))}" for number in range(self.faulty_connections)]
        return "\n".join([repr(self), *lines])


# --- the proxy ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """What the proxy has done since it got its plan."""

    connections: int = 0
    ended: int = 0
    """Connections that a plan has cut or truncated."""
    passed_bytes: dict[Way, int] = field(default_factory=lambda: dict.fromkeys(Way, 0))


class FaultProxy:
    """Listens until the `with` block ends, in its own thread, so that any kind of client can be tested."""

    def __init__(self, server_port: int, plan: Plan = no_faults, *, port: int = 0) -> None:
        self.server_port = server_port
        self.counts = Counts()
        self._plan = plan
        self._listening = socket.create_server((HOST, port))
        self._listening.setblocking(False)
        self.port: int = self._listening.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self._accepting: asyncio.Task[None]
        self._connections: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._listening.close()
        assert not self._errors, self._errors

    def use(self, plan: Plan) -> None:
        """End all connections and start another plan, with connection 0."""
        self._call(self._use(plan))

    def cut_all(self) -> None:
        """Reset every connection. The plan continues."""
        self._call(self._cut_all())

    def _call(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_S_MAX)

    # --- on the thread of the proxy -------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._accepting = asyncio.create_task(self._accept())

    async def _stop(self) -> None:
        self._accepting.cancel()
        await asyncio.gather(self._accepting, return_exceptions=True)
        await self._cut_all()

    async def _use(self, plan: Plan) -> None:
        await self._cut_all()
        self._plan, self.counts = plan, Counts()

    async def _cut_all(self) -> None:
        connections = list(self._connections)
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            client, _ = await self._loop.sock_accept(self._listening)
            number = self.counts.connections
            self.counts.connections += 1
            task = asyncio.create_task(self._serve(client, self._plan(number)))
            self._connections.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._connections.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.append(error)

    async def _serve(self, client: socket.socket, actions: Sequence[Action]) -> None:
        server = socket.socket()
        ending = Ending.RESET
        try:
            for sock in (client, server):
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.sock_connect(server, (HOST, self.server_port))
            ending = await self._pass_both_ways(client, server, actions)
        except OSError:
            pass  # One side is gone, or was never reachable, so the other is closed, too.
        finally:
            for sock in (client, server):
                if ending is Ending.RESET:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                sock.close()

    async def _pass_both_ways(self, client: socket.socket, server: socket.socket, actions: Sequence[Action]) -> Ending:
        """Pass data in both directions. Returns how the connection has ended."""
        ways = {
            asyncio.create_task(self._pass(server, client, Way.TO_CLIENT, actions)),
            asyncio.create_task(self._pass(client, server, Way.TO_SERVER, actions)),
        }
        try:
            while ways:
                done, ways = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                # If one side has reset the connection, both directions may fail; one error is enough.
                for error in [way.exception() for way in done]:
                    if error is not None:
                        raise error
                endings = [way.result() for way in done]
                if Ending.RESET in endings:
                    return Ending.RESET
                if Ending.FIN in endings:
                    await self._say_the_end(client, server)
                    return Ending.FIN
            return Ending.FIN
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _say_the_end(self, *sockets: socket.socket) -> None:
        """End both directions, and discard data that still arrives, or else the system would reset the connection."""
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S_MAX):
                for sock in sockets:
                    sock.shutdown(socket.SHUT_WR)
                for sock in sockets:
                    while await self._loop.sock_recv(sock, RECEIVE_BYTES):
                        pass

    async def _pass(
        self, source: socket.socket, sink: socket.socket, way: Way, actions: Sequence[Action]
    ) -> Ending | None:
        """Pass one direction until its end, or until the plan ends both: then returns how."""
        script = _Script(way, actions)
        while data := await self._loop.sock_recv(source, RECEIVE_BYTES):
            for piece in script.pieces(data):
                if piece.delay_s:
                    await asyncio.sleep(piece.delay_s)
                await self._loop.sock_sendall(sink, piece.data)
                self.counts.passed_bytes[way] += len(piece.data)
                # Let the other direction, and the other side, run between two pieces.
                await asyncio.sleep(0)
            if isinstance(script.ended_by, Stall):
                await self._loop.create_future()
            if script.ended_by is not None:
                self.counts.ended += 1
            if isinstance(script.ended_by, Cut):
                return script.ended_by.ending
            if isinstance(script.ended_by, Truncate):
                break
        sink.shutdown(socket.SHUT_WR)
        return None


@dataclass(frozen=True, slots=True)
class _Piece:
    data: bytes
    delay_s: float = 0.0


class _Script:
    """The plan of one connection in one direction: how data is split into pieces, and what ends it."""

    def __init__(self, way: Way, actions: Sequence[Action]) -> None:
        mine = [action for action in actions if action.way is way]
        self.ended_by: Cut | Truncate | Stall | None = None
        self._ends = sorted(
            (action for action in mine if isinstance(action, Cut | Truncate | Stall)), key=lambda end: end.after_bytes
        )
        self._delays = sorted(
            (action for action in mine if isinstance(action, Delay)), key=lambda delay: delay.after_bytes
        )
        self._splits = [(action, random.Random(action.seed)) for action in mine if isinstance(action, Split)]
        self._passed = 0

    def pieces(self, data: bytes) -> Iterator[_Piece]:
        """Yield the pieces to pass of the received bytes. Sets `ended_by` if that is not everything."""
        if self._ends and self._passed + len(data) > self._ends[0].after_bytes:
            self.ended_by = self._ends[0]
            data = data[: self.ended_by.after_bytes - self._passed]
        at = 0
        while at < len(data):
            delay_s = 0.0
            while self._delays and self._delays[0].after_bytes <= self._passed:
                delay_s += self._delays.pop(0).delay_s
            piece = data[at : at + self._piece_bytes(len(data) - at)]
            yield _Piece(piece, delay_s)
            at += len(piece)
            self._passed += len(piece)

    def _piece_bytes(self, left: int) -> int:
        """Return how many bytes may be passed before the next delay, within the limits of the splits."""
        size = left
        if self._delays:
            size = min(size, self._delays[0].after_bytes - self._passed)
        for split, dice in self._splits:
            if self._passed < split.until_bytes:
                size = min(size, dice.randint(1, split.piece_bytes_max))
        return size


# --- ports --------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """Return a port for a server that is started later, and restarted after it was killed."""
    dice = random.SystemRandom()
    while True:
        port = dice.choice(PORTS_TO_CHOOSE)
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((HOST, port))
            return port


# A real node behind a proxy: it advertises the proxy's address to clients, and tests can bypass the proxy.


MANAGEMENT_S_MAX = 30.0


def _log_in_quickly(data: Path) -> None:
    """Use the cheapest allowed password hashing: tests log in a thousand times."""
    data.mkdir(parents=True, exist_ok=True)
    users = data / "users.json"
    if not users.exists():
        store_users(users, Users(decoy_secret=bytes(DECOY_SECRET_BYTES), iterations=SCRAM_ITERATIONS_MIN))


class ProxiedNode:
    """Runs until the `with` block ends. The node may be killed and restarted in the meantime, on the same ports."""

    def __init__(
        self,
        data: Path,
        *options: str,
        vbuckets: int = 8,
        buckets: Sequence[str] = ("default",),
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """With a certificate and its key, all connections use TLS."""
        self.vbuckets = vbuckets
        self.tls: TlsSettings | None = None
        if certificate is not None:
            self.tls = TlsSettings(ca_file=certificate[0])
            options = (*options, "--tls-only", "--tls-cert", str(certificate[0]), "--tls-key", str(certificate[1]))
        self._port = free_port()
        self._http_port = free_port()
        self.proxy = FaultProxy(self._port)
        named = [part for name in buckets for part in ("--bucket", name)]
        self.node = NodeProcess(
            data, "--port", str(self._port), "--http-port", str(self._http_port),
            "--advertise-port", str(self.proxy.port), "--vbuckets", str(vbuckets), *named, *options,
        )  # fmt: skip
        self._tls_context = None if self.tls is None else self.tls.context()
        self.http = httpx.Client(
            base_url=f"http{'s' if self.tls else ''}://{HOST}:{self._http_port}",
            auth=(USER, PASSWORD),
            timeout=MANAGEMENT_S_MAX,
            verify=self._tls_context or False,
        )

    def __enter__(self) -> Self:
        _log_in_quickly(self.node.data)
        self.proxy.__enter__()
        try:
            self.node.start()
        except BaseException:
            self.proxy.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.http.close()
        self.node.__exit__(kind, error, traceback)
        self.proxy.__exit__(kind, error, traceback)
        assert "Traceback" not in self.node.log(), self.node.log()

    def connect_directly(self, bucket: str) -> KvConnection:
        """Return a connection that bypasses the proxy."""
        login = Login(credentials=Credentials(USER, PASSWORD), bucket=bucket, tls=self._tls_context)
        return KvConnection.open(Address(HOST, self._port), login)


class ProxiedBucket:
    """A bucket of such a node, and operations on it that bypass the proxy."""

    def __init__(self, node: ProxiedNode, name: str = "default") -> None:
        self.node = node
        self.name = name
        self.collections: dict[str, int] = {}
        """Ids by name of the existing collections of the default scope that were created here."""

    @property
    def proxy(self) -> FaultProxy:
        return self.node.proxy

    @property
    def vbuckets(self) -> int:
        return self.node.vbuckets

    @property
    def url(self) -> str:
        """The connection string of a client that is to meet the faults."""
        return f"couchbase{'s' if self.node.tls else ''}://{HOST}:{self.proxy.port}/{self.name}"

    def connect_directly(self) -> KvConnection:
        return self.node.connect_directly(self.name)

    def vbucket_of(self, key: bytes) -> VBucketId:
        return vbucket_of(key, self.vbuckets)

    def high_seqnos(self, connection: KvConnection) -> dict[int, int]:
        answer = connection.request(GetAllVbSeqnos())
        return {entry.vbucket: entry.seqno for entry in answer.seqnos}

    # --- management -----------------------------------------------------------------------------------------------

    def create_collection(self, name: str) -> int:
        """Create a collection. Returns its id."""
        scopes = f"/pools/default/buckets/{self.name}/scopes"
        self._ask("POST", f"{scopes}/_default/collections", data={"name": name})
        manifest = self._ask("GET", scopes).json()
        made = [
            collection for scope in manifest["scopes"] for collection in scope["collections"]
            if (scope["name"], collection["name"]) == ("_default", name)
        ]  # fmt: skip
        self.collections[name] = int(made[0]["uid"], 16)
        return self.collections[name]

    def drop_collection(self, name: str) -> None:
        del self.collections[name]
        self._ask("DELETE", f"/pools/default/buckets/{self.name}/scopes/_default/collections/{name}")

    def roll_back(self, vbucket: int, to_seqno: int) -> dict[str, int]:
        """Run a failover drill. Returns the node's report."""
        path = f"/headwater/buckets/{self.name}/vbuckets/{vbucket}/rollback"
        told: dict[str, int] = self._ask("POST", path, data={"to": str(to_seqno)}).json()
        return told

    def _ask(self, method: str, path: str, **request: Any) -> httpx.Response:
        return self.node.http.request(method, path, **request).raise_for_status()
