"""The HTTP side of a node: its application, served from before the node is ready until it has stopped.

`node.Node` starts and stops it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from headwater.http.serving import AppServer
from headwater.node.http.app import http_app
from headwater.node.node_state import NodeState


class HttpServer(AppServer):
    """The HTTP side of a node, on as many sockets as it listens on.

    server = HttpServer(node)
    await server.listen(plain_socket)
    await server.listen(tls_socket, tls=context)
    …  # the node gets ready; requests are answered with 503 until it is
    server.open()
    …
    await server.stop()
    """

    def __init__(
        self,
        node: NodeState,
        *,
        open_metrics: bool = False,
        landing_urls: Sequence[str] = (),
        hosts: Collection[str] | None = None,
        is_tls_only: bool = False,
    ) -> None:
        """`hosts` are the names that requests may be for, beside addresses; None for all."""
        app = http_app(node, open_metrics=open_metrics, landing_urls=landing_urls, hosts=hosts, is_tls_only=is_tls_only)
        super().__init__(app)
        self._state = app.state

    def open(self) -> None:
        """The node is ready: the dashboard begins to take numbers."""
        self._state.dashboard.start()

    def watch_bucket(self, name: str) -> None:
        """A bucket was made while the node runs."""
        self._state.dashboard.watch(name)

    async def forget_bucket(self, name: str) -> None:
        """A bucket is dropped. When this returns, nothing here reads it any more."""
        await self._state.dashboard.forget(name)

    async def stop(self) -> None:
        """End the streams, let requests under way end, and close the sockets."""
        self._state.streams.close()
        self._state.dashboard.close()
        await super().stop()
