"""Serving an application: uvicorn inside an event loop that is there, on sockets that the caller has bound.

uvicorn would take over the signals and the logging of its process, and trust the addresses that clients claim for
themselves (`X-Forwarded-For`), which would let any client around a throttle. It does none of this here.

Connections are bounded, and idle ones can't keep others out: one too many takes the place of the one that has been idle
longest, of the address that has the most. Where all are busy there is a reserve, in which nothing is answered but
whether the server lives (`requests.Doorkeeper`): a supervisor must not take a busy server for a dead one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections import Counter
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwater.accepting import TlsDoor
from headwater.http.limits import (
    CONNECTIONS_MAX,
    CONNECTIONS_RESERVED,
    HEAD_BUFFER_BYTES_MAX,
    KEEP_ALIVE_S,
    REQUEST_S_MAX,
    STOP_S_MAX,
)
from headwater.http.requests import IN_RESERVE


class AppServer:
    """An application, on as many sockets as it listens on.

    server = AppServer(app)
    await server.listen(plain_socket)
    await server.listen(tls_socket, tls=context)
    …
    await server.stop()
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._running: list[tuple[_Server, asyncio.Task[None]]] = []
        self._connections: dict[_Connection, None] = {}
        """Of all sockets, the oldest first."""

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
        )
        server = _Server(config, self._connections, tls)
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
            server.close_door()
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self._running))
        self._running.clear()


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, connections: dict[_Connection, None], tls: ssl.SSLContext | None
    ) -> None:
        super().__init__(config)
        self.is_started = asyncio.Event()
        self._connections = connections
        self._door: TlsDoor | None = None
        if tls is not None:
            self._door = TlsDoor(
                tls,
                self._make_connection,
                handshake_s=REQUEST_S_MAX,
                has_room=lambda handshakes: handshakes < CONNECTIONS_MAX,
            )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the program's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        make_protocol = self._make_connection if self._door is None else self._door.open_protocol
        for bound in sockets or []:
            server = await asyncio.get_running_loop().create_server(
                make_protocol, sock=bound, backlog=self.config.backlog
            )
            self.servers.append(server)
        self.is_started.set()

    def _make_connection(self) -> asyncio.Protocol:
        return _Connection(
            self._connections, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    def close_door(self) -> None:
        if self._door is not None:
            self._door.close()


class _Connection(H11Protocol):
    """A connection that gives way to others while it is idle, and is closed if it sends no complete request.

    uvicorn's own timer watches over the rest between requests, and every byte stops it. This one runs from the first
    byte of a request, or from the start of the connection, until the head of the request is complete.
    """

    def __init__(self, connections: dict[_Connection, None], **parts: Any) -> None:
        super().__init__(**parts)
        self._all = connections
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()
        if len(self._all) >= CONNECTIONS_MAX:
            self._take_a_place()
        if not transport.is_closing():
            self._all[self] = None

    def _take_a_place(self) -> None:
        idle = [connection for connection in self._all if connection.is_idle]
        if idle:
            of_address = Counter(connection.address for connection in idle)
            longest = max(idle, key=lambda connection: of_address[connection.address])
            del self._all[longest]
            longest.transport.close()
        elif len(self._all) < CONNECTIONS_MAX + CONNECTIONS_RESERVED:
            self.app_state = {**self.app_state, IN_RESERVE: True}
        else:
            self.transport.abort()

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._deadline is None and (before is None or before.response_complete):
            self._expect_request()
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.pop(self, None)
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S_MAX, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
