"""Serving the application: uvicorn inside the node's event loop, on sockets that the node has bound.

`node.Node` starts and stops it. uvicorn would take over the signals and the logging of its process, and trust the
addresses that clients claim for themselves (`X-Forwarded-For`), which would let any client around the throttle. It does
none of this here.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator, Sequence

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwater.node.http.app import http_app
from headwater.node.http.limits import (
    CONNECTIONS_MAX,
    HEAD_BUFFER_BYTES_MAX,
    KEEP_ALIVE_S,
    REQUEST_S_MAX,
    STOP_S_MAX,
)
from headwater.node.node_state import NodeState


class HttpServer:
    """The HTTP side of a node, on as many sockets as it listens on.

    server = HttpServer(node)
    await server.listen(plain_socket)
    await server.listen(tls_socket, tls=context)
    …  # the node gets ready; requests are answered with 503 until it is
    server.open()
    …
    await server.stop()
    """

    def __init__(self, node: NodeState, *, open_metrics: bool = False, landing_urls: Sequence[str] = ()) -> None:
        self._app = http_app(node, open_metrics=open_metrics, landing_urls=landing_urls)
        self._running: list[tuple[_Server, asyncio.Task[None]]] = []

    async def listen(self, bound: socket.socket, *, tls: ssl.SSLContext | None = None) -> None:
        """Serve on a bound socket, from now on. The socket is the server's to close."""
        config = uvicorn.Config(
            self._app,
            http=_TimedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            limit_concurrency=CONNECTIONS_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_S_MAX,
            h11_max_incomplete_event_size=HEAD_BUFFER_BYTES_MAX,
            ssl_context_factory=None if tls is None else lambda config, default: tls,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[bound]), name="headwater http")
        started = asyncio.create_task(server.is_started.wait())
        await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            started.cancel()
            bound.close()
            await task
        self._running.append((server, task))

    def open(self) -> None:
        """The node is ready: the dashboard begins to take numbers."""
        self._app.state.dashboard.start()

    def watch_bucket(self, name: str) -> None:
        """A bucket was made while the node runs."""
        self._app.state.dashboard.watch(name)

    async def forget_bucket(self, name: str) -> None:
        """A bucket is dropped. When this returns, nothing here reads it any more."""
        await self._app.state.dashboard.forget(name)

    async def stop(self) -> None:
        """End the streams, let requests under way end, and close the sockets."""
        self._app.state.streams.close()
        self._app.state.dashboard.close()
        for server, _ in self._running:
            server.should_exit = True
        await asyncio.gather(*(task for _, task in self._running))
        self._running.clear()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_started = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the node's."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_started.set()


class _TimedProtocol(H11Protocol):
    """A connection that is closed if it sends no complete request.

    uvicorn's own timer watches over the rest between requests, and every byte stops it. This one runs from the first
    byte of a request, or from the start of the connection, until the head of the request is complete.
    """

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        if self._deadline is None and (before is None or before.response_complete):
            self._expect_request()
        super().data_received(data)
        if self.cycle is not before:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _expect_request(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_S_MAX, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
