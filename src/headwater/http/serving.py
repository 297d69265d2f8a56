"""Serving an application: uvicorn inside an event loop that is there, on sockets that the caller has bound.

uvicorn would take over the signals and the logging of its process, and trust the addresses that clients claim for
themselves (`X-Forwarded-For`), which would let any client around a throttle. It does none of this here.

Connections are bounded, unfinished TLS handshakes included, and slow ones can't keep others out. One too many takes the
place of another, of the address that has the most: of one that waits for its client (for a request, the rest of one, or
an answer to be read), the longest first; or else of a request that has not been answered for long. Where none gives way
there is a reserve, in which nothing is answered but whether the server lives, and its metrics (`requests.HostCheck`): a
supervisor must not take a busy server for a dead one. A connection of the reserve always gives way to the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwater.accepting import Handshake, Places, TlsAcceptor
from headwater.http.requests import (
    CONNECTIONS_MAX,
    GONE,
    HEAD_BUFFER_BYTES_MAX,
    IN_RESERVE,
    KEEP_ALIVE_S,
    REQUEST_S_MAX,
    RESERVED_SHARE,
    SLOW_S,
    STOP_S_MAX,
)

_BACKLOG = 128
"""Connections that the system accepts before the server does. All of them are accepted in one turn of the event loop,
which other connections wait for."""


class AppServer:
    """An application, on as many sockets as it listens on."""

    def __init__(self, app: ASGIApp, *, connections_max: int = CONNECTIONS_MAX) -> None:
        self._app = app
        self._running: list[tuple[_Server, asyncio.Task[None]]] = []
        self._visitors = _Visitors(connections_max)

    async def listen(self, bound: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        """Serve on a bound socket, from now on. The socket is the server's to close."""
        config = uvicorn.Config(
            self._app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S_MAX,
            h11_max_incomplete_event_size=HEAD_BUFFER_BYTES_MAX,
            backlog=_BACKLOG,
        )
        server = _Server(config, self._visitors, tls)
        task = asyncio.create_task(server.serve(sockets=[bound]), name="headwater http")
        started = asyncio.create_task(server.is_started.wait())
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            started.cancel()
            bound.close()
            await task
        self._running.append((server, task))

    async def stop(self) -> None:
        """Let requests under way end, and close the sockets. What never ends by itself is the application's to end."""
        for server, _ in self._running:
            server.close_acceptor()
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self._running))
        self._running.clear()


class _Visitors:
    """The connections of all sockets of a server, and which one gives way."""

    def __init__(self, connections_max: int) -> None:
        self._places: Places[_Connection | Handshake] = Places()
        self._reserve: dict[_Connection, None] = {}
        """Connections beyond the places, the oldest first."""
        self._reserved = max(1, connections_max // RESERVED_SHARE)
        self._most = connections_max - self._reserved

    def admit(self, visitor: _Connection | Handshake) -> bool:
        """Give a place to a connection, if need be that of another. False where none gives way."""
        if len(self._places) >= self._most:
            slow = self._first_to_go(asyncio.get_running_loop().time())
            if slow is None:
                return False
            self.leave(slow)
            slow.abort()
        self._places.add(visitor, owner=visitor.address)
        return True

    def admit_to_reserve(self, connection: _Connection) -> None:
        while len(self._reserve) >= self._reserved:
            oldest = next(iter(self._reserve))
            self.leave(oldest)
            oldest.abort()
        self._reserve[connection] = None

    def leave(self, visitor: _Connection | Handshake) -> None:
        self._places.discard(visitor, owner=visitor.address)
        if isinstance(visitor, _Connection):
            self._reserve.pop(visitor, None)

    def renew(self, connection: _Connection) -> None:
        """It begins to wait for something else: it is the newest of its address again."""
        if connection not in self._reserve:
            self._places.add(connection, owner=connection.address)

    def _first_to_go(self, now_s: float) -> _Connection | Handshake | None:
        for visitors in self._places.owners():
            for visitor in visitors:
                if isinstance(visitor, Handshake) or visitor.waits_for_client:
                    return visitor
            for visitor in visitors:
                if isinstance(visitor, _Connection) and visitor.is_slow(now_s):
                    return visitor
        return None


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, visitors: _Visitors, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.is_started = asyncio.Event()
        self._visitors = visitors
        self._acceptor: TlsAcceptor | None = None
        if tls is not None:
            self._acceptor = TlsAcceptor(
                tls,
                lambda below: self._make_connection(),
                handshake_s=REQUEST_S_MAX,
                admit=visitors.admit,
                leave=visitors.leave,
            )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the program's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        make_protocol = self._make_connection if self._acceptor is None else self._acceptor.open_protocol
        for bound in sockets or []:
            server = await asyncio.get_running_loop().create_server(
                make_protocol, sock=bound, backlog=self.config.backlog
            )
            self.servers.append(server)
        self.is_started.set()

    def _make_connection(self) -> asyncio.Protocol:
        return _Connection(
            self._visitors, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def close_acceptor(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()


class _Connection(H11Protocol):
    """A connection that gives way to others while it is slow, and is closed if it sends no complete request.

    uvicorn's own timer watches over the rest between requests, and every byte stops it. This one runs from the first
    byte of a request, or from the start of the connection, until the head of the request is complete.
    """

    def __init__(self, visitors: _Visitors, **parts: Any) -> None:
        super().__init__(**parts)
        self._visitors = visitors
        self._deadline: asyncio.TimerHandle | None = None
        self._waits_since_s = self.loop.time()
        self._gone: asyncio.Future[None] = self.loop.create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        self.app_state = {**self.app_state, GONE: self._gone}
        if not self._visitors.admit(self):
            self.app_state[IN_RESERVE] = True
            self._visitors.admit_to_reserve(self)

    @property
    def waits_for_client(self) -> bool:
        """For a request, the rest of one, or for an answer to be read."""
        return self._is_idle or self.flow.write_paused or self.cycle.more_body

    def is_slow(self, now_s: float) -> bool:
        """Whether a request is not answered for long. Streams are: what bounds them counts them by user."""
        return not self._is_idle and not self.cycle.response_started and now_s - self._waits_since_s > SLOW_S

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def abort(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._deadline is None and (before is None or before.response_complete):
            self._expect_request()
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()
            self._renew()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._renew()

    def _renew(self) -> None:
        """A request is complete, or its answer is."""
        self._waits_since_s = self.loop.time()
        if not self.transport.is_closing():
            self._visitors.renew(self)

    def send_400_response(self, msg: str) -> None:
        # uvicorn answers malformed bytes also where their request has an answer, or a handler that will answer, and h11
        # refuses a second one.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._visitors.leave(self)
        self._unset_keepalive_if_required()  # uvicorn leaves it where the connection broke, and itself with it
        self._stop_waiting()
        if not self._gone.done():
            self._gone.set_result(None)
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S_MAX, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
