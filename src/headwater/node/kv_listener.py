"""The key-value side over asyncio: sockets to sessions and back, within the limits.

The node makes one listener, which owns all connections and decides when what is sent: an answer when its commit is
durable, streams in turns. What a request does is for the session (`kv.session`).

No connection may keep the others waiting. A session handles a turn of its requests, and what is left waits for the next
turn of the event loop. Passwords are checked in a thread. A peer whose requests can't be handled yet is not read from.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Collection
from typing import Any, cast

from headwater.accepting import TlsDoor, close_servers
from headwater.errors import ConnectionFailed, RemoteProtocolError, UnexpectedMessage
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.login_checks import LoginChecks
from headwater.node.kv.context import CloseSession, PendingLogin
from headwater.node.kv.permissions import NEEDS_NO_LOGIN
from headwater.node.kv.session import DeferredAnswer, KvSession, Outgoing, Waits
from headwater.node.node_folder import give_back_freed_memory
from headwater.node.options import ServerLimits
from headwater.node.producer.connection import ProducerConnection
from headwater.node.producer.outbound import SpareOutput
from headwater.node.service import BucketService, Service
from headwater.protocol.features import Opcode
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages.base import ErrorResponse
from headwater.protocol.sasl import is_loopback_address
from headwater.protocol.status import Status

logger = logging.getLogger(__name__)

_SESSION_OPCODES = frozenset(request.opcode for request in NEEDS_NO_LOGIN)
STRANGER_BYTES_MAX = 16 * 1024
"""What a peer that has not logged in may have sent of one request. Real servers allow as much."""
_TICK_S = 0.5
_LONG_READ_BYTES = 64 * 1024
"""A read of so much is probably not the last."""
_PRODUCE_BYTES = 1024 * 1024
"""What a DCP connection gets to send before others have their turn."""
_COPIED_BYTES_MAX = 64 * 1024
"""What a transport may keep until the end of the loop's turn, to send it with what comes by then."""
_LARGE_BUFFER_BYTES = 1024 * 1024
_BUFFERS_LOOK_S = 0.05
"""Who has the node hold more than this is looked at, and how often."""
_GIVE_BACK_BYTES = 32 * 1024 * 1024
_GIVE_BACK_LOOKS = 30
"""After so much was written, the memory that it took goes back to the system: when it is quiet, and once more after so
many quiet looks."""
_FAREWELL_LOOKS_MAX, _FAREWELL_LOOK_S = 50, 0.01
"""How long a node that stops waits for peers that do not answer its farewell."""


class KvListener:
    """All key-value connections of a node."""

    def __init__(self, service: Service, limits: ServerLimits, login_checks: LoginChecks) -> None:
        self.service = service
        self.limits = limits
        self.login_checks = login_checks
        self.connections: dict[ServedConnection, None] = {}
        """In the order in which they came: whatever is done to all of them is done in that order."""
        self._servers: list[asyncio.Server] = []
        self._doors: list[TlsDoor] = []
        self._watch: asyncio.Task[None] | None = None
        self.is_stopped = False
        self._buffers_looked_at_s = 0.0
        self._written_bytes = self._written_bytes_before = self._quiet_looks = 0
        """Since memory was last given back: what was written, what was at the last look, and looks with no write."""
        self.spare_output = SpareOutput()
        self._seen_commits: dict[str, int] = {}
        """The newest durable commit of each bucket when streams were last woken."""

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen, and return the port: the one asked for, or a free one for 0."""

        def make_connection() -> ServedConnection:
            return ServedConnection(self, is_tls=tls is not None)

        make_protocol: Callable[[], asyncio.Protocol] = make_connection
        if tls is not None:
            door = TlsDoor(
                tls, make_connection, handshake_s=self.limits.auth_s, has_room=lambda handshakes: self.has_room()
            )
            self._doors.append(door)
            make_protocol = door.open_protocol
        server = await asyncio.get_running_loop().create_server(make_protocol, host, port)
        self._servers.append(server)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_connections())
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        self.is_stopped = True
        await close_servers(self._servers)
        for door in self._doors:
            door.close()
        if self._watch is not None:
            self._watch.cancel()
        for connection in list(self.connections):
            connection.close()
        # One turn of the loop lets the transports send what they hold and close. With TLS it takes an answer as well.
        await asyncio.sleep(0)
        for _ in range(_FAREWELL_LOOKS_MAX):
            if not any(connection.is_tls for connection in self.connections):
                break
            await asyncio.sleep(_FAREWELL_LOOK_S)
        for connection in list(self.connections):
            connection.abort()

    def has_room(self) -> bool:
        """Whether there may be one more connection. Handshakes that are not complete count as well."""
        return len(self.connections) + sum(len(door.handshakes) for door in self._doors) < self.limits.connections_max

    def send_durable(self) -> None:
        """A commit is durable: answers that waited for it go out, and streams go on."""
        for bucket in self.service.buckets.values():
            bucket.sync_writes.on_durable()
            newest = bucket.bucket.young.get(bucket.bucket.durable_commit)
            self._written_bytes += 0 if newest is None else len(newest.data)
        changed = {bucket.bucket: self._changed_vbuckets(bucket) for bucket in self.service.buckets.values()}
        for connection in list(self.connections):
            session = connection.session
            vbuckets = None if session.dcp is None else changed.get(session.dcp.bucket)
            if session.dcp is not None and vbuckets is not None:
                # Most commits change few vbuckets, and most connections have no stream that waits for them.
                if session.dcp.wake(vbuckets) or session.outgoing or session.unordered:
                    connection.send_ready(is_awake=True)
            elif session.outgoing or session.unordered or session.dcp is not None or session.consumer is not None:
                connection.send_ready()
        self.make_use_of_room()

    def _changed_vbuckets(self, bucket: BucketService) -> list[int] | None:
        """The vbuckets that have changes in the commit that is the newest since this was asked last; None where there
        may be more, or where it is more than changes that came."""
        newest = bucket.bucket.durable_commit
        seen, self._seen_commits[bucket.name] = self._seen_commits.get(bucket.name), newest
        commit = bucket.bucket.young.get(newest)
        if commit is None or seen != newest - 1 or commit.extra or commit.advanced_seqnos:
            return None
        return list(commit.vbuckets())

    def make_use_of_room(self) -> None:
        """A commit has been closed, or is durable: what waited for room may go on."""
        for connection in list(self.connections):
            if connection.session.waits_for is Waits.FOR_ROOM:
                connection.go_on()

    def keep_buffers_bounded(self, now_s: float) -> None:
        """Where all peers together have the node hold too much, drop the one that has moved nothing for longest.

        These are requests that have not come to their end, and answers that are not read.
        """
        if now_s < self._buffers_looked_at_s + _BUFFERS_LOOK_S:
            return
        self._buffers_looked_at_s = now_s
        held = {connection: connection.held_bytes() for connection in self.connections}
        if sum(held.values()) > self.limits.node_buffer_bytes_max:
            large = [connection for connection, held_bytes in held.items() if held_bytes > _LARGE_BUFFER_BYTES]
            if large:
                min(large, key=lambda connection: connection.moved_s).drop("the node holds too much for its clients")

    def fail_waiting(self, bucket: BucketService, commits: Collection[int]) -> None:
        """Commits of a bucket could not be written: what waited for them has not happened."""
        bucket.sync_writes.on_void()
        for connection in list(self.connections):
            session = connection.session
            if session.outgoing or session.unordered or session.consumer is not None:
                connection.fail_waiting(bucket, commits)

    def close_bucket(self, bucket: BucketService) -> None:
        """A bucket is dropped, and its vbuckets are gone: streams end, and its connections are closed (as kv_engine
        disconnects the clients of a bucket that it deletes)."""
        for connection in [one for one in self.connections if one.session.bucket is bucket]:
            connection.send_ready()
            connection.close()

    def log_out(self, names: Collection[str]) -> None:
        """These users are gone: what they have open has no rights any more, and streams end."""
        for connection in list(self.connections):
            if connection.session.user in names:
                connection.session.log_out()
                connection.send_ready()

    async def _watch_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            self.service.stay_awake()
            self._decide_sync_writes()
            for bucket in self.service.buckets.values():
                bucket.range_scans.tick(self.service.now_s())
            for connection in list(self.connections):
                connection.check_times(loop.time())
            # Also where nothing more comes: what came last may have been too much, and have come between two looks.
            self.keep_buffers_bounded(loop.time())
            await self._give_memory_back(loop)

    async def _give_memory_back(self, loop: asyncio.AbstractEventLoop) -> None:
        """Much was written, and nothing since the last look. What was settled and compacted meanwhile goes as well."""
        is_quiet, self._written_bytes_before = self._written_bytes == self._written_bytes_before, self._written_bytes
        if self._written_bytes < _GIVE_BACK_BYTES or not is_quiet:
            return
        self._quiet_looks += 1
        if self._quiet_looks % _GIVE_BACK_LOOKS == 1:
            # Not in the loop: it takes a while where much has been freed.
            await loop.run_in_executor(None, give_back_freed_memory)
        if self._quiet_looks > _GIVE_BACK_LOOKS:
            self._written_bytes = self._written_bytes_before = self._quiet_looks = 0

    def _decide_sync_writes(self) -> None:
        """Let durable writes run out of time. What is decided without a commit has nothing else to send its answer."""
        has_news = False
        for bucket in self.service.buckets.values():
            bucket.sync_writes.tick(self.service.now_s())
            has_news |= bucket.sync_writes.has_news
            bucket.sync_writes.has_news = False
        if has_news:
            self.send_durable()


class ServedConnection(asyncio.Protocol):
    """One connection: its socket, its session, and what it may still take."""

    def __init__(self, listener: KvListener, *, is_tls: bool) -> None:
        self._listener = listener
        self._limits = listener.limits
        self.is_tls = is_tls
        self._transport: asyncio.Transport | None = None
        self._peer_reads = True
        self._has_turn = False
        """Whether a turn of this connection is on its way."""
        self._login: asyncio.Task[None] | None = None
        self._started_s = self._heard_s = self._sent_s = self.moved_s = asyncio.get_running_loop().time()
        self.session: KvSession

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio's in all but their ancestry.
        self._transport = cast(asyncio.Transport, transport)
        peer = str((transport.get_extra_info("peername") or ("",))[0])
        allows_plain = self.is_tls or is_loopback_address(peer)
        self.session = KvSession(
            self._listener.service,
            peer=peer,
            allows_plain=allows_plain,
            limits=self._limits,
        )
        if self._listener.is_stopped:
            # It was accepted just before, and is none of those that were closed.
            self._transport.abort()
            return
        if not self._listener.has_room():
            logger.warning(
                "connection from %s refused: %d are open",
                *(peer, self._limits.connections_max),
                extra=fields(event=LogEvent.CONNECTION_REFUSED, peer=peer, limit=self._limits.connections_max),
            )
            self._transport.abort()
            return
        self.session.on_replaced = self.close
        self._listener.connections[self] = None

    def data_received(self, data: bytes) -> None:
        if not self._handle(data):
            return
        session = self.session
        if session.user is None and not session.is_held_back and session.unhandled_bytes > STRANGER_BYTES_MAX:
            self.drop("it sends much before it has logged in")
            return
        if len(data) >= _LONG_READ_BYTES and session.waits_for is Waits.FOR_NOTHING:
            # uvloop reads on and on while there is something to read. Others get their turn first.
            session.waits_for = Waits.FOR_TURN
        self.moved_s = asyncio.get_running_loop().time()
        self.send_ready()
        self._bound_buffers()

    def _bound_buffers(self) -> None:
        if self.held_bytes() > _LARGE_BUFFER_BYTES:
            self._listener.keep_buffers_bounded(asyncio.get_running_loop().time())

    def held_bytes(self) -> int:
        """What the node holds for the peer: half a request, answers. Streams have bounds of their own."""
        if self._transport is None or self.session.dcp is not None:
            return 0
        return self.session.unhandled_bytes + self._unsent_bytes() + self._transport.get_write_buffer_size()

    def _handle(self, data: bytes) -> bool:
        """Let the session handle what has come. False where that was the end of the connection."""
        session, requests = self.session, self.session.requests
        try:
            session.receive_data(data)
        except CloseSession:
            self.close()
            return False
        except RemoteProtocolError as error:
            logger.info("connection from %s closed: %s", session.peer, error, extra=self._dropped(error.reason, error))
            self.close()
            return False
        # Bytes that trickle in do not count, only requests that have come to their end.
        if session.requests != requests:
            self._heard_s = asyncio.get_running_loop().time()
            if session.dcp is not None:
                session.dcp.heard(self._heard_s)
        if session.login is not None and self._login is None:
            self._login = asyncio.get_running_loop().create_task(self._check_login(session.login))
        return True

    async def _check_login(self, login: PendingLogin) -> None:
        verdict = await self._listener.login_checks.check(login.attempt)
        self._login = None
        if self.session.login is login:
            try:
                self.session.finish_login(verdict)
            except CloseSession:
                self.close()
                return
        self.go_on()

    def pause_writing(self) -> None:
        self._peer_reads = False

    def resume_writing(self) -> None:
        self._peer_reads = True
        self._sent_s = self.moved_s = asyncio.get_running_loop().time()
        self.send_ready()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.connections.pop(self, None)
        if self._login is not None:
            self._login.cancel()
        self.session.disconnected()

    # --- sending --------------------------------------------------------------------------------------------------

    def send_ready(self, *, is_awake: bool = False) -> None:
        """Send the answers whose commits are durable, in order, as long as the peer reads; then what streams have.

        `is_awake` says that no stream has to be looked for that has something to send.
        """
        if self._transport is None:
            return
        self._send(self._transport)
        if not self.session.outgoing:
            self._send_streams(self._transport, is_awake=is_awake)
            self._send_as_consumer(self._transport)
        self._hold_or_take(self._transport)
        if self.session.is_quitting and not self.session.outgoing and not self.session.unordered:
            self._transport.close()

    def go_on(self) -> None:
        """Have requests that were left handled in the next turn of the loop: what they waited for may have come."""
        if not self._has_turn:
            self._has_turn = True
            asyncio.get_running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._has_turn = False
        if self._transport is None or self._transport.is_closing():
            return
        if self.session.is_held_back and not self._handle(b""):
            return
        self.send_ready()
        self._bound_buffers()

    @property
    def _may_go_on(self) -> bool:
        """Whether what the session's next request waits for has come, as far as this is to be seen here."""
        session = self.session
        match session.waits_for:
            case Waits.FOR_TURN:
                return True
            case Waits.FOR_READING:
                return self._unsent_bytes() <= self._limits.unsent_bytes_max
            case Waits.FOR_OUTCOME:
                return not session.waits_for_outcome
        return False

    def _send(self, transport: asyncio.Transport) -> None:
        outgoing, session = self.session.outgoing, self.session
        while outgoing and self._peer_reads and outgoing[0].may_be_sent:
            self._send_piece(transport, outgoing.popleft())
        if session.unordered and self._peer_reads:
            ready = [answer for answer in session.unordered if answer.may_be_sent]
            session.unordered = [answer for answer in session.unordered if not answer.may_be_sent]
            for answer in ready:
                self._send_piece(transport, answer)

    def _send_piece(self, transport: asyncio.Transport, piece: Outgoing | DeferredAnswer) -> None:
        if isinstance(piece, DeferredAnswer) and piece.ends_connection:
            transport.close()
            return
        transport.write(self.session.to_send(piece))
        self._sent_s = asyncio.get_running_loop().time()

    def _send_streams(self, transport: asyncio.Transport, *, is_awake: bool) -> None:
        """Let the streams of a DCP connection produce, if the peer reads. What is left waits for the next turn."""
        dcp = self.session.dcp
        if dcp is None or not self._peer_reads or transport.is_closing():
            return
        output = self._listener.spare_output.take()
        dcp.produce_into(output, _PRODUCE_BYTES, is_awake=is_awake)
        if not output.used:
            self._listener.spare_output.give_back(output)
            return
        is_small = output.used <= _COPIED_BYTES_MAX
        transport.write(bytes(output.data) if is_small else output.data)
        if is_small or not transport.get_write_buffer_size():
            self._listener.spare_output.give_back(output)
        self._sent_s = asyncio.get_running_loop().time()
        if dcp.has_more:
            # A backfill takes as long as it takes; other connections get a turn between two pieces of it.
            self.go_on()

    def _send_as_consumer(self, transport: asyncio.Transport) -> None:
        consumer = self.session.consumer
        if consumer is None or transport.is_closing():
            return
        consumer.on_durable()
        data = consumer.data_to_send()
        if data:
            transport.write(data)
            self._sent_s = asyncio.get_running_loop().time()

    def _unsent_bytes(self) -> int:
        return sum(len(piece.data) for piece in self.session.outgoing)

    def _hold_or_take(self, transport: asyncio.Transport) -> None:
        """No more requests while some are left, or too many answers wait."""
        if transport.is_closing():
            return
        if self._may_go_on:
            self.go_on()
        consumer = self.session.consumer
        is_full = consumer is not None and consumer.is_full
        if is_full or self.session.is_held_back or self._unsent_bytes() > self._limits.unsent_bytes_max:
            transport.pause_reading()
        elif not transport.is_reading():
            transport.resume_reading()

    def fail_waiting(self, bucket: BucketService, commits: Collection[int]) -> None:
        """Turn the answers that wait for these commits into temporary failures."""
        session = self.session
        if session.consumer is not None and session.bucket is bucket:
            # What the producer believes to be here is not: the streams have to be asked for again.
            session.consumer.on_void()
            self.close()
            return
        # Of a deferred answer it is known by now what has become of it, or it is still to be decided.
        void = {
            at: piece
            for at, piece in enumerate(session.outgoing)
            if isinstance(piece, Outgoing) and piece.bucket is bucket and piece.commit in commits
        }
        if not all(piece.data for piece in void.values()):
            # A quiet write is void, and it has no answer that could say so.
            self.close()
            return
        for at, piece in void.items():
            session.outgoing[at] = Outgoing(_failed(piece.data), 0, None, piece.received_s)
        self.send_ready()

    # --- ending ---------------------------------------------------------------------------------------------------

    def check_times(self, now_s: float) -> None:
        """Drop a peer that does not log in, says nothing, or does not read."""
        limits = self._limits
        if self.session.dcp is not None:
            self._keep_alive(self.session.dcp, now_s)
        if self.session.consumer is not None:
            try:
                self.session.consumer.tick(now_s)
            except ConnectionFailed as error:
                self.drop(error.reason)
        if self.session.user is None and now_s - self._started_s > limits.auth_s:
            self.drop("it did not log in")
        elif now_s - self._heard_s > limits.idle_s:
            self.drop("it was silent")
        elif not self._peer_reads and now_s - self._sent_s > limits.stalled_s:
            self.drop("it does not read its answers")

    def _keep_alive(self, dcp: ProducerConnection, now_s: float) -> None:
        try:
            noop = dcp.tick(now_s)
        except UnexpectedMessage as error:
            self.drop(error.reason)
            return
        if noop and self._transport is not None:
            self._transport.write(noop)
        self.send_ready()

    def drop(self, reason: str) -> None:
        logger.info("connection from %s dropped: %s", self.session.peer, reason, extra=self._dropped(reason))
        self.abort()

    def _dropped(self, reason: str, error: RemoteProtocolError | None = None) -> dict[str, Any]:
        about = {**self.session.log_fields(), **fields(event=LogEvent.CONNECTION_DROPPED, reason=reason)}
        return about if error is None else {**about, **fields(error=type(error).__name__)}

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close after what may be sent has been."""
        if self._transport is None:
            return
        self._send(self._transport)
        self._transport.close()


def _failed(data: bytes) -> bytes:
    """The same answers as temporary failures, but for those that are about the connection and not about data."""
    failed = bytearray()
    for frame in decode_frames(data):
        if frame.opcode in _SESSION_OPCODES:
            failed += frame.encode()
        else:
            failed += ErrorResponse(opcode=Opcode(frame.opcode), opaque=frame.opaque, status=Status.ETMPFAIL).encode()
    return bytes(failed)
