"""The listeners of a node over asyncio. They move bytes between sockets and sessions, within the limits.

The node creates one `KvListener`, which owns all connections. The session (`kv.session`) decides what a request does
and when something may be sent.

No connection may keep the others waiting. A session handles requests for one turn of bounded work, then its connection
queues for the next turn. Each iteration of the event loop takes one turn's work from the queue: however many
connections request much, a connection that requests little waits for only one of them at a time. Worker threads do what
takes longer than a turn; another thread checks passwords. The listener stops reading from a peer whose requests must
wait.

The UPR draft has no log-in, so every client that reaches the port can read the bucket: use it on loopback or a private
network only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from headwater.accepting import Handshake, HeldMemory, Places, TlsAcceptor, close_servers, peer_address
from headwater.errors import ConnectionFailed, RemoteProtocolError, UnexpectedMessage
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.login_checks import LoginChecks
from headwater.node.kv.context import TURN_WORK, CloseSession, PendingLogin
from headwater.node.kv.session import KvSession
from headwater.node.node_folder import give_back_freed_memory
from headwater.node.options import ServerLimits
from headwater.node.producer.outbound import SpareOutput
from headwater.node.service import BucketService, Service
from headwater.node.upr_session import UprSession
from headwater.protocol.sasl import is_loopback_address

logger = logging.getLogger(__name__)

_WORKERS = max(1, min(4, (os.cpu_count() or 1) - 1))
"""One core is left for the event loop."""
_TICK_S = 0.5
_PRODUCE_BYTES = 1024 * 1024
"""How much a DCP connection may send in a turn."""
_COPIED_BYTES_MAX = 64 * 1024
"""Output up to this size is copied, so that the transport may send it together with what follows in this turn."""
_TURNS_AT_ONCE, _LINE_SHARE = 8, 8
"""How many connections get a turn before the sockets are polled again, however little work their turns take: this
many, or one in so many of those in line if that is more."""
_WRITE_BYTES = 1024 * 1024
"""Longer output is given to the transport in pieces of this size. The connection keeps and counts the rest."""
_STRANGERS_SHARE = 16
"""One in this many places is reserved for connections that have not logged in: the others can't keep a user out."""
_GIVE_BACK_BYTES = 32 * 1024 * 1024
_QUIET_BYTES = 1024 * 1024
_GIVE_BACK_LOOKS = 30
"""Return freed memory to the system after `_GIVE_BACK_BYTES` were written or held for peers: once a check finds fewer
than `_QUIET_BYTES` since the last check, and again after `_GIVE_BACK_LOOKS` such checks in a row."""
_FAREWELL_LOOKS_MAX, _FAREWELL_LOOK_S = 50, 0.01
"""How many times, and how long each time, a stopping node waits for TLS peers to answer its close."""


class KvListener:
    """All key-value connections of a node."""

    def __init__(self, service: Service, limits: ServerLimits, login_checks: LoginChecks) -> None:
        self.service = service
        self.limits = limits
        self.login_checks = login_checks
        self.connections: dict[ServedConnection, None] = {}
        """A dict as an ordered set: in order of arrival, in which loops over all connections handle them."""
        self._servers: list[asyncio.Server] = []
        self._acceptors: list[TlsAcceptor] = []
        self._watch: asyncio.Task[None] | None = None
        self.is_stopped = False
        self.workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="worker")
        self._line: deque[ServedConnection] = deque()
        """The connections that wait for a turn."""
        self._is_line_moving = False
        self.memory = HeldMemory(limits.node_buffer_bytes_max)
        self._strangers: Places[ServedConnection | Handshake] = Places()
        """Connections and handshakes without a user, by address. Connections with a user are in `_users`."""
        self._users: Places[ServedConnection] = Places()
        self._written_bytes = self._used_bytes_before = self._given_back_bytes = self._quiet_looks = 0
        """Bytes written so far; bytes written or held, at the last check and when memory was last given back; and
        quiet checks in a row."""
        self._gives_back_again = False
        self.spare_output = SpareOutput()
        self._seen_commits: dict[str, int] = {}
        """The newest durable commit of each bucket when streams were last woken."""

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen on a port, or on a free one for 0. Returns the port."""
        make_protocol: Callable[[], asyncio.Protocol] = partial(ServedConnection, self)
        if tls is not None:
            acceptor = TlsAcceptor(
                tls,
                lambda below: ServedConnection(self, below_tls=below),
                handshake_s=self.limits.auth_s,
                admit=self.admit,
                leave=self.leave,
            )
            self._acceptors.append(acceptor)
            make_protocol = acceptor.open_protocol
        server = await asyncio.get_running_loop().create_server(make_protocol, host, port)
        self._servers.append(server)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_connections())
        bound: int = server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        self.is_stopped = True
        await close_servers(self._servers)
        for acceptor in self._acceptors:
            acceptor.close()
        if self._watch is not None:
            self._watch.cancel()
        for connection in list(self.connections):
            # Streams that stand in line have not sent the last commits yet.
            connection.send_ready()
            connection.close()
        # One turn of the loop lets the transports send what they hold and close. With TLS the peer has to answer, too.
        await asyncio.sleep(0)
        for _ in range(_FAREWELL_LOOKS_MAX):
            if not any(connection.is_tls for connection in self.connections):
                break
            await asyncio.sleep(_FAREWELL_LOOK_S)
        for connection in list(self.connections):
            connection.abort()
        self.workers.shutdown(wait=False, cancel_futures=True)

    def stand_in_line(self, connection: ServedConnection) -> None:
        """Queue a connection for a turn."""
        self._line.append(connection)
        self._move_line()

    def _move_line(self) -> None:
        if self._line and not self._is_line_moving:
            self._is_line_moving = True
            asyncio.get_running_loop().call_soon(self._take_turns)

    def _take_turns(self) -> None:
        """Give connections their turns, until these together have taken the work of one full turn. Most take less."""
        work = 0
        try:
            for _ in range(min(len(self._line), max(_TURNS_AT_ONCE, len(self._line) // _LINE_SHARE))):
                work += self._line.popleft().take_turn()
                if work >= TURN_WORK:
                    break
        finally:
            self._is_line_moving = False
            self._move_line()

    # --- places ---------------------------------------------------------------------------------------------------

    def admit(self, visitor: ServedConnection | Handshake) -> bool:
        """Give a place to a connection that has not logged in, or to a TLS handshake in progress.

        If all places are taken, it replaces another such visitor. Returns False if there is none.
        """
        if len(self._strangers) + len(self._users) >= self.limits.connections_max:
            oldest = next((next(iter(of_address)) for of_address in self._strangers.owners()), None)
            if oldest is None:
                return False
            self.leave(oldest)
            if isinstance(oldest, Handshake):
                oldest.abort()
            else:
                oldest.drop("it has not logged in, and others want its place")
        self._strangers.add(visitor, owner=visitor.address)
        return True

    def leave(self, visitor: ServedConnection | Handshake) -> None:
        self._strangers.discard(visitor, owner=visitor.address)
        if isinstance(visitor, ServedConnection):
            self._users.discard(visitor, owner=visitor.address)

    def on_user(self, connection: ServedConnection) -> None:
        """A connection has logged in, or lost its user. If too many have users, drop one of the largest address."""
        self.leave(connection)
        if connection.session.user is None:
            self._strangers.add(connection, owner=connection.address)
            return
        self._users.add(connection, owner=connection.address)
        users_max = self.limits.connections_max - self.limits.connections_max // _STRANGERS_SHARE
        if len(self._users) > users_max:
            of_address = next(self._users.owners())
            has_more = len(of_address) > self._users.count_of(connection.address)
            silent = min(of_address, key=lambda one: (one.session.dcp is not None, one.heard_s))
            (silent if has_more else connection).drop(f"{users_max} are logged in, most of them from its address")

    def send_durable(self) -> None:
        """A commit is durable: send the answers that waited for it, and queue DCP connections for a turn.

        So writers do not wait until all consumers are served, and their next commit can be written meanwhile. Replicas
        do not queue: durable writes wait for them.
        """
        for bucket in self.service.buckets.values():
            bucket.sync_writes.on_durable()
        changed = {bucket.bucket: self._changed_vbuckets(bucket) for bucket in self.service.buckets.values()}
        self._written_bytes = sum(bucket.bucket.written_bytes for bucket in self.service.buckets.values())
        for connection in list(self.connections):
            if connection.session.on_durable(changed):
                dcp = connection.session.dcp
                if dcp is None or dcp.controls.sync_writes:
                    connection.send_ready()
                else:
                    connection.resume()
        self.resume_writers()

    def _changed_vbuckets(self, bucket: BucketService) -> list[int] | None:
        """The vbuckets that have changed since the last call; None if any may have changed."""
        newest = bucket.bucket.durable_commit
        seen, self._seen_commits[bucket.name] = self._seen_commits.get(bucket.name), newest
        return None if seen is None else bucket.bucket.changed_after(seen)

    def resume_writers(self) -> None:
        """A commit was sealed or became durable: connections that waited for room in it resume."""
        for connection in list(self.connections):
            if connection.session.is_held_back and connection.session.may_resume:
                connection.resume()

    def fail_waiting(self, bucket: BucketService, commits: Collection[int]) -> None:
        """Fail the requests that waited for commits of a bucket, because these could not be written."""
        bucket.sync_writes.on_void()
        for connection in list(self.connections):
            try:
                if connection.session.on_void(bucket, commits):
                    connection.send_ready()
            except CloseSession:
                connection.close()

    def close_bucket(self, bucket: BucketService) -> None:
        """End the streams and close the connections of a bucket that is dropped and has no vbuckets any more (as
        kv_engine disconnects the clients of a bucket that it deletes)."""
        for connection in [one for one in self.connections if one.session.bucket is bucket]:
            connection.session.on_bucket_dropped()
            connection.send_ready()
            connection.close()

    def log_out(self, names: Collection[str]) -> None:
        """Log out the connections of users that were removed, and end their streams."""
        for connection in list(self.connections):
            if connection.session.user in names:
                connection.session.log_out()
                self.on_user(connection)
                connection.send_ready()

    async def _watch_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            self._tick(loop.time())
            await self._give_memory_back(loop)

    def _tick(self, now_s: float) -> None:
        """Do what is due by the clock. Not in the coroutine: its loop variable would keep a closed connection alive."""
        self.service.notice_pause()
        self._decide_sync_writes()
        for bucket in self.service.buckets.values():
            bucket.range_scans.tick(self.service.now_s())
        for connection in list(self.connections):
            connection.check_times(now_s)

    async def _give_memory_back(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return freed memory to the system when the node is quiet after much was written or held for peers. Do so once
        more later, for what settling and compaction have freed in between."""
        used_bytes = self._written_bytes + self.memory.taken_bytes
        is_quiet, self._used_bytes_before = used_bytes - self._used_bytes_before < _QUIET_BYTES, used_bytes
        self._quiet_looks = self._quiet_looks + 1 if is_quiet else 0
        has_much = used_bytes - self._given_back_bytes >= _GIVE_BACK_BYTES
        if is_quiet and (has_much or (self._gives_back_again and self._quiet_looks >= _GIVE_BACK_LOOKS)):
            self._given_back_bytes, self._gives_back_again = used_bytes, has_much
            # Not in the event loop: it takes a while if much has been freed.
            await loop.run_in_executor(None, give_back_freed_memory)

    def _decide_sync_writes(self) -> None:
        """Time out durable writes. Send the answers of those decided without a commit: no commit would do so."""
        has_news = False
        for bucket in self.service.buckets.values():
            bucket.sync_writes.tick(self.service.now_s())
            has_news |= bucket.sync_writes.has_news
            bucket.sync_writes.has_news = False
        if has_news:
            self.send_durable()


class ServedConnection(asyncio.Protocol):
    """One connection: its socket, its session, and output that the transport has not taken yet."""

    def __init__(self, listener: KvListener, *, below_tls: asyncio.Transport | None = None) -> None:
        """`below_tls` is the transport below TLS, which buffers bytes, too."""
        self._listener = listener
        self._limits = listener.limits
        self.is_tls = below_tls is not None
        self._below_tls = below_tls
        self._transport: asyncio.Transport | None = None
        self.address = ""
        self._peer_reads = True
        self._has_turn = False
        """Whether this connection is queued for a turn."""
        self._login: asyncio.Task[None] | None = None
        self._work: asyncio.Task[None] | None = None
        """Tasks of threads that requests wait for: the password check, and work that takes longer than a turn."""
        self._rest: bytes | memoryview = b""
        """Output that the transport has not taken yet."""
        self._longest_write = 0
        """The longest output that the transport may still hold. It keeps all of it until the last byte is sent."""
        self._started_s = self.heard_s = self._sent_s = self.moved_s = asyncio.get_running_loop().time()
        self.session: KvSession

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports behave like asyncio's, but do not inherit from them.
        self._transport = cast(asyncio.Transport, transport)
        self.address = peer_address(transport)
        self.session = KvSession(
            self._listener.service,
            peer=self.address,
            allows_plain=self.is_tls or is_loopback_address(self.address),
            limits=self._limits,
            on_replaced=self.close,
        )
        if self._listener.is_stopped:
            # It was accepted just before the stop, which did not close it.
            self._transport.abort()
            return
        if not self._listener.admit(self):
            about = fields(event=LogEvent.CONNECTION_REFUSED, peer=self.address, limit=self._limits.connections_max)
            logger.warning(
                "connection from %s refused: %d are open", self.address, self._limits.connections_max, extra=about
            )
            self._transport.abort()
            return
        self._listener.connections[self] = None

    def data_received(self, data: bytes) -> None:
        if not self._handle(data):
            return
        if self.session.is_flooded:
            self.drop("it sends much before it has logged in")
            return
        self.moved_s = asyncio.get_running_loop().time()
        self.send_ready()

    def held_bytes(self) -> int:
        """The memory that the node holds for the peer."""
        return self.session.held_bytes + self._sending_bytes()

    def _sending_bytes(self) -> int:
        """The memory that output takes which is not sent yet."""
        if self._transport is None:
            return 0
        buffered = self._transport.get_write_buffer_size()
        if self._below_tls is not None:
            buffered += self._below_tls.get_write_buffer_size()
        if not buffered:
            self._longest_write = 0
        # A view of a part keeps the whole buffer in memory.
        rest_bytes = memoryview(self._rest.obj).nbytes if isinstance(self._rest, memoryview) else 0
        return rest_bytes + buffered + self._longest_write

    def _handle(self, data: bytes) -> bool:
        """Let the session handle received bytes. Returns False if that closed the connection."""
        session, requests = self.session, self.session.requests
        # Only a transport that has paused us reports when it has sent enough, so bytes in any other do not count.
        session.in_transport_bytes = 0 if self._peer_reads else self._sending_bytes()
        try:
            session.receive_data(data)
        except CloseSession:
            self.close()
            return False
        except RemoteProtocolError as error:
            logger.info("connection from %s closed: %s", session.peer, error, extra=self._dropped(error.reason, error))
            self.close()
            return False
        # Only whole requests count, not bytes that trickle in.
        if session.requests != requests:
            self.heard_s = asyncio.get_running_loop().time()
            session.heard(self.heard_s)
        if session.login is not None and self._login is None:
            self._login = asyncio.get_running_loop().create_task(self._check_login(session.login))
        if session.postponed is not None and self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._do_work())
        return True

    async def _do_work(self) -> None:
        loop, session = asyncio.get_running_loop(), self.session
        try:
            while session.postponed is not None:
                await loop.run_in_executor(self._listener.workers, session.postponed.task.run)
                session.finish_work()
        except CloseSession:
            self.close()
            return
        except Exception:
            # As with any fault in handling a request, the connection ends and the log has the reason.
            self.abort()
            raise
        finally:
            self._work = None
        self.send_ready()

    async def _check_login(self, login: PendingLogin) -> None:
        verdict = await self._listener.login_checks.check(login.attempt)
        self._login = None
        if self.session.login is login:
            try:
                self.session.finish_login(verdict)
            except CloseSession:
                self.close()
                return
            self._listener.on_user(self)
        self.resume()

    def pause_writing(self) -> None:
        self._peer_reads = False

    def resume_writing(self) -> None:
        self._peer_reads = True
        self._sent_s = self.moved_s = asyncio.get_running_loop().time()
        self.send_ready()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.connections.pop(self, None)
        self._free()
        self.session.disconnected()
        # Break the reference cycles: transports, and TLS above them, refer to each other and to this connection.
        self._transport = self._below_tls = None

    def _free(self) -> None:
        """Free the connection's place, and what is held for the peer."""
        self._listener.leave(self)
        self._listener.memory.forget(self)
        for task in (self._login, self._work):
            if task is not None:
                task.cancel()
        self._login = self._work = None
        self._rest = b""
        self.session.free()

    # --- sending --------------------------------------------------------------------------------------------------

    def send_ready(self) -> None:
        """While the peer reads, send the answers that are ready, then what streams have."""
        transport, session = self._transport, self.session
        if transport is None or transport.is_closing():
            return
        self._send_answers(transport)
        if session.dcp is not None and self._peer_reads:
            self._send_streams(transport)
        if session.is_finished and not self._rest:
            transport.close()
        self._listener.memory.enter(self)
        if transport.is_closing():
            return
        session.in_transport_bytes = 0 if self._peer_reads else self._sending_bytes()
        if session.is_held_back and session.may_resume:
            self.resume()
        if not session.wants_data:
            transport.pause_reading()
        elif not transport.is_reading():
            transport.resume_reading()

    def resume(self) -> None:
        """Queue for a turn, in which the session handles the requests that it left."""
        if not self._has_turn:
            self._has_turn = True
            self._listener.stand_in_line(self)

    def take_turn(self) -> int:
        """Handle waiting requests and send what streams have. Returns the work that this took."""
        self._has_turn = False
        if self._transport is None or self._transport.is_closing():
            return 0
        before = self.session.work_done
        try:
            if not self.session.is_held_back or self._handle(b""):
                self.send_ready()
        except Exception:
            # A stream that has failed would never send again, and noops would keep the connection open.
            self.abort()
            raise
        return self.session.work_done - before

    def _send_answers(self, transport: asyncio.Transport) -> None:
        while self._peer_reads and (data := self._rest or self.session.data_to_send()):
            self._write(transport, data)

    def _write(self, transport: asyncio.Transport, data: bytes | memoryview) -> None:
        """Write at most `_WRITE_BYTES` to the transport, and keep the rest."""
        if len(data) > _WRITE_BYTES:
            view = memoryview(data)
            data, self._rest = view[:_WRITE_BYTES], view[_WRITE_BYTES:]
        else:
            self._rest = b""
        self._longest_write = max(self._longest_write, len(data))
        transport.write(data)
        self._sent_s = asyncio.get_running_loop().time()

    def _send_streams(self, transport: asyncio.Transport) -> None:
        """Send what the streams of a DCP connection produce. If they have more, queue for another turn."""
        output = self._listener.spare_output.take()
        has_more = self.session.produce_into(output, _PRODUCE_BYTES)
        if not output.used:
            self._listener.spare_output.give_back(output)
            return
        is_small = output.used <= _COPIED_BYTES_MAX
        self._write(transport, bytes(output.data) if is_small else output.data)
        if self._rest:
            self._send_answers(transport)
        if is_small or not self._sending_bytes():
            self._listener.spare_output.give_back(output)
        if has_more:
            # A backfill may take long: other connections get turns between two pieces of it.
            self.resume()

    # --- ending ---------------------------------------------------------------------------------------------------

    def check_times(self, now_s: float) -> None:
        """Drop a peer that does not log in, says nothing, or does not read."""
        limits = self._limits
        try:
            self.session.tick(now_s)
        except (ConnectionFailed, UnexpectedMessage) as error:
            self.drop(error.reason)
            return
        if self.session.dcp is not None:
            self.send_ready()
        if self.session.user is None and now_s - self._started_s > limits.auth_s:
            self.drop("it did not log in")
        elif now_s - self.heard_s > limits.idle_s:
            self.drop("it was silent")
        elif not self._peer_reads and now_s - self._sent_s > limits.stalled_s:
            self.drop("it does not read its answers")

    def drop(self, reason: str) -> None:
        logger.info("connection from %s dropped: %s", self.session.peer, reason, extra=self._dropped(reason))
        self.abort()

    def _dropped(self, reason: str, error: RemoteProtocolError | None = None) -> dict[str, Any]:
        about = {**self.session.log_fields(), **fields(event=LogEvent.CONNECTION_DROPPED, reason=reason)}
        return about if error is None else {**about, **fields(error=type(error).__name__)}

    def abort(self) -> None:
        """Close immediately, and free what is held for the peer."""
        if self._transport is not None:
            self._transport.abort()
            self._free()

    def close(self) -> None:
        """Close after the answers that are ready have been sent."""
        if self._transport is None:
            return
        self._send_answers(self._transport)
        if self._rest:
            self._transport.write(self._rest)
            self._rest = b""
        self._transport.close()


# --- the UPR draft ----------------------------------------------------------------------------------------------------


_UPR_PRODUCE_BYTES = 256 * 1024
"""How much the streams of a UPR connection produce at once."""


class UprListener:
    """All UPR connections of a node. They stream one bucket: the draft has no way to name one."""

    def __init__(self, service: BucketService, limits: ServerLimits, memory: HeldMemory) -> None:
        """`memory` counts what the node holds for all connections."""
        self.service = service
        self.memory = memory
        self.limits = limits
        self.connections: dict[UprConnection, None] = {}
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self.is_stopped = False

    async def listen(self, host: str, port: int) -> int:
        """Listen on a port, or on a free one for 0. Returns the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: UprConnection(self), host, port)
        self._watch = asyncio.create_task(self._watch_connections())
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self) -> None:
        self.is_stopped = True
        if self._server is not None:
            await close_servers([self._server])
        if self._watch is not None:
            self._watch.cancel()
        for connection in list(self.connections):
            connection.close()
        # One turn of the loop lets the transports send what they hold and close.
        await asyncio.sleep(0)

    def send_durable(self) -> None:
        """A commit is durable: send its changes to the streams."""
        for connection in list(self.connections):
            connection.send_ready()

    async def _watch_connections(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            for connection in list(self.connections):
                connection.check_times(loop.time())


class UprConnection(asyncio.Protocol):
    """One connection: its socket and its session."""

    def __init__(self, listener: UprListener) -> None:
        self._listener = listener
        self._transport: asyncio.Transport | None = None
        self._peer_reads = True
        self._heard_s = self._sent_s = self.moved_s = asyncio.get_running_loop().time()
        self._session: UprSession | None = None

    # --- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports behave like asyncio's, but do not inherit from them.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername") or ("", 0)
        name = f"upr:{peer[0]}:{peer[1]}"
        limits = self._listener.limits
        if self._listener.is_stopped:
            # It was accepted just before the stop, which did not close it.
            self._transport.abort()
            return
        if len(self._listener.connections) >= limits.connections_max:
            logger.warning(
                "UPR connection from %s refused: %d are open",
                *(peer[0], limits.connections_max),
                extra=fields(event=LogEvent.CONNECTION_REFUSED, peer=str(peer[0]), limit=limits.connections_max),
            )
            self._transport.abort()
            return
        self._session = UprSession(self._listener.service, name=name, now_s=self._heard_s)
        self._listener.connections[self] = None

    def data_received(self, data: bytes) -> None:
        session = self._session
        if session is None:
            return
        requests = session.requests
        try:
            session.receive_data(data)
        except RemoteProtocolError as error:
            about = fields(
                event=LogEvent.CONNECTION_DROPPED,
                connection=session.name,
                error=type(error).__name__,
                reason=error.reason,
            )
            logger.info("connection %s closed: %s", session.name, error, extra=about)
            self.close()
            return
        # Only whole requests count, not bytes that trickle in.
        if session.requests != requests:
            self._heard_s = self.moved_s = asyncio.get_running_loop().time()
        self.send_ready()

    def held_bytes(self) -> int:
        if self._session is None or self._transport is None:
            return 0
        return self._session.held_bytes + self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """Stop reading requests from a peer that does not read answers, which would have to be kept."""
        self._peer_reads = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._peer_reads = True
        self._sent_s = self.moved_s = asyncio.get_running_loop().time()
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        self.send_ready()

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.connections.pop(self, None)
        self._listener.memory.forget(self)
        if self._session is not None:
            self._session.disconnected()
        self._session = self._transport = None

    # --- sending --------------------------------------------------------------------------------------------------

    def send_ready(self) -> None:
        """Send the answers, then what the streams have while the peer reads."""
        session, transport = self._session, self._transport
        if session is None or transport is None:
            return
        self._send_answers(session, transport)
        while self._peer_reads and not transport.is_closing() and (data := session.produce(_UPR_PRODUCE_BYTES)):
            transport.write(data)
            self._sent_s = asyncio.get_running_loop().time()
        self._listener.memory.enter(self)

    def _send_answers(self, session: UprSession, transport: asyncio.Transport) -> None:
        answers = session.data_to_send()
        if answers:
            transport.write(answers)
            self._sent_s = asyncio.get_running_loop().time()

    # --- ending ---------------------------------------------------------------------------------------------------

    def check_times(self, now_s: float) -> None:
        """Drop a peer that has no streams and is silent, or that does not read."""
        session, limits = self._session, self._listener.limits
        if session is None or self._transport is None:
            return
        if not session.has_streams and now_s - max(self._heard_s, self._sent_s) > limits.idle_s:
            self.drop("it was silent")
        elif not self._peer_reads and now_s - self._sent_s > limits.stalled_s:
            self.drop("it does not read")
        else:
            # A vbucket may have changed its state without a commit.
            self.send_ready()

    def drop(self, reason: str) -> None:
        if self._session is None or self._transport is None:
            return
        name = self._session.name
        about = fields(event=LogEvent.CONNECTION_DROPPED, connection=name, reason=reason)
        logger.info("connection %s dropped: %s", name, reason, extra=about)
        self._transport.abort()

    def close(self) -> None:
        """Close after the answers so far have been sent."""
        if self._transport is None:
            return
        if self._session is not None:
            self._send_answers(self._session, self._transport)
        self._transport.close()
