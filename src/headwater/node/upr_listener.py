"""The UPR draft over asyncio: sockets to sessions and back, within the limits.

The draft has no log-in, so every client that reaches the port can read the bucket: it is for loopback, or a network of
one's own.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

from headwater.accepting import HeldMemory, close_servers
from headwater.errors import RemoteProtocolError
from headwater.log_fields import LogEvent, fields
from headwater.node.options import ServerLimits
from headwater.node.service import BucketService
from headwater.node.upr_session import UprSession

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_PRODUCE_BYTES = 256 * 1024
"""What a connection gets to send before others have their turn."""


class UprListener:
    """All UPR connections of a node. They stream one bucket: the draft has no way to name one."""

    def __init__(self, service: BucketService, limits: ServerLimits, memory: HeldMemory) -> None:
        """`memory` is the account of all connections of the node."""
        self.service = service
        self.memory = memory
        self.limits = limits
        self.connections: dict[UprConnection, None] = {}
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self.is_stopped = False

    async def listen(self, host: str, port: int) -> int:
        """Listen, and return the port: the one asked for, or a free one for 0."""
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
        """A commit is durable: streams go on."""
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
        # uvloop's transports are asyncio's in all but their ancestry.
        self._transport = cast(asyncio.Transport, transport)
        peer = transport.get_extra_info("peername") or ("", 0)
        name = f"upr:{peer[0]}:{peer[1]}"
        limits = self._listener.limits
        if self._listener.is_stopped:
            # It was accepted just before, and is none of those that were closed.
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
        # Bytes that trickle in do not count, only requests that have come to their end.
        if session.requests != requests:
            self._heard_s = self.moved_s = asyncio.get_running_loop().time()
        self.send_ready()

    def held_bytes(self) -> int:
        if self._session is None or self._transport is None:
            return 0
        return self._session.held_bytes + self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """No more requests of a peer that does not read: their answers would have to be kept."""
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
        """Send answers, and what the streams have, as long as the peer reads."""
        session, transport = self._session, self._transport
        if session is None or transport is None:
            return
        self._send_answers(session, transport)
        while self._peer_reads and not transport.is_closing() and (data := session.produce(_PRODUCE_BYTES)):
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
        """Drop a peer that wants nothing, or does not read."""
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
