"""Starts and stops a node in order: opens its buckets, listens on its ports and runs its loops.

`headwater serve`, the tests and the simulation create a `Node`. `node_state` has what other parts ask of a running
node.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from headwater.errors import LocalProtocolError
from headwater.node.auth.accounts import ADMIN
from headwater.node.http.app import HttpServer
from headwater.node.kv_listener import UprListener
from headwater.node.node_folder import NodeEnvironment
from headwater.node.node_state import MakeCoordinator, NodeState
from headwater.node.options import NodeOptions, server_context
from headwater.protocol.cluster_config import NodeAddress, join_host_port


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The addresses of a started node, and its first user."""

    url: str
    """With TLS, if the node has it."""
    http_url: str
    plain_url: str | None = None
    """The address without TLS, if the node has both."""
    plain_http_url: str | None = None
    buckets: tuple[str, ...] = ()
    user: str
    generated_password: str | None
    """Shown once, by the start that generated it."""
    upr_address: str | None = None


class Node(NodeState):
    """A node that can be started and stopped."""

    def __init__(
        self,
        options: NodeOptions,
        environment: NodeEnvironment | None = None,
        coordinator: MakeCoordinator | None = None,
    ) -> None:
        super().__init__(options, environment or NodeEnvironment(), coordinator)
        self._upr: UprListener | None = None
        self._upr_address: str | None = None
        self._tls: ssl.SSLContext | None = None
        self._http_ports: dict[bool, int] = {}
        """Ports by whether they have TLS."""
        self._loading: asyncio.Future[None] | None = None
        """Done when the thread that opens the buckets has ended."""
        self._http: HttpServer | None = None
        if self.environment.serves_http:
            self._http = HttpServer(self)
            self.on_bucket_made = self._http.dashboard.watch
            self.on_bucket_dropped = self._http.dashboard.forget

    # --- starting and stopping ------------------------------------------------------------------------------------

    async def start(self) -> Started:
        options = self.options
        self.folder.make()
        try:
            self._buckets.hold()
            self._tls = server_context(options)
            await self._listen_http()
            await self._load()
            generated = self._accounts.load(options.user, options.password, first_only=options.first_user_only)
            service = self._listener.service
            service.users, service.awake_s = self._accounts.in_force, self.now_s()
            self._accounts.on_change = self._put_in_force
            self._buckets.serve_all()
            await self._listen()
            # Only now, when no step can prevent the start: the start that stores a password has to show it.
            self._accounts.store(generated)
            self.why_not_ready = "it asks the other nodes of its cluster"
            for membership in self._memberships.values():
                await membership.start(self.address)
        except BaseException:
            await self.stop()
            raise
        if self._http is not None:
            self._http.dashboard.start()
        self.is_ready = True
        urls = _urls(self.address)
        return Started(
            url=urls[0][0],
            http_url=urls[0][1],
            plain_url=urls[1][0] if len(urls) > 1 else None,
            plain_http_url=urls[1][1] if len(urls) > 1 else None,
            buckets=tuple(sorted(self._services)),
            user=options.user if options.user is not None and options.user in self.users.by_name else ADMIN,
            generated_password=generated,
            upr_address=self._upr_address,
        )

    async def stop(self) -> None:
        """Stop cleanly: all accepted writes are durable, and the next start adds no branch to any failover log."""
        self.is_ready = False
        self.why_not_ready = "it stops"
        self._buckets.is_stopping = True
        # Wake callers that wait for a manifest: it will not arrive any more.
        self._durable.notify()
        for membership in list(self._memberships.values()):
            await membership.stop()
        if self._http is not None:
            await self._http.stop()
        await self._listener.stop()
        if self._upr is not None:
            await self._upr.stop()
        self.login_checks.stop()
        await self._buckets.stop()
        if self._loading is not None:
            await asyncio.wait({self._loading})
            # Close the bucket that the thread was opening meanwhile.
            self._buckets.close_buckets()
        self._buckets.close_engines()

    async def _load(self) -> None:
        """Open the buckets. If the node serves HTTP, do so in a thread, so that it can answer meanwhile."""

        def report(why_not_ready: str) -> None:
            self.why_not_ready = why_not_ready

        if self._http is None:
            self._buckets.open_all(report)
            return
        self._loading = asyncio.get_running_loop().run_in_executor(None, self._buckets.open_all, report)
        # If the start is cancelled, the thread still finishes the bucket that it is opening, and `stop` waits for it.
        await asyncio.shield(self._loading)

    async def _listen(self) -> None:
        options, tls, listener = self.options, self._tls, self._listener
        kv_ports: dict[bool, int] = {}
        for has_tls, (asked, usual) in options.kv_ports().items():
            context = tls if has_tls else None
            listen = partial(listener.listen, options.host, tls=context)
            kv_ports[has_tls] = await listen_at(options.host, usual if asked is None else asked, listen)
        self.address = options.advertised(kv_ports, self._http_ports, uuid=self.identity.uuid)
        if options.upr_port is not None:
            await self._listen_upr(options.upr_port)

    async def _listen_upr(self, port: int) -> None:
        """Serve the UPR draft. It has no usual port: the option for its port turns it on."""
        options = self.options
        name = options.upr_bucket or options.buckets[0]
        if name not in self._services:
            raise LocalProtocolError(f"the bucket for UPR, {name!r}, does not exist", hint="Give --bucket for it, too")
        self._upr = upr = UprListener(self._services[name], options.limits, self._listener.memory)
        self._wakes.append(upr.send_durable)
        port = await listen_at(options.host, port, lambda port: upr.listen(options.host, port))
        self._upr_address = join_host_port(self.address.host, port)

    async def _listen_http(self) -> None:
        """Start to answer HTTP requests. The node is alive, but not ready."""
        http, options = self._http, self.options
        if http is None:
            return

        async def listen(port: int, *, tls: ssl.SSLContext | None) -> int:
            bound = await bound_socket(options.host, port)
            await http.listen(bound, tls=tls)
            chosen: int = bound.getsockname()[1]
            return chosen

        for has_tls, (asked, usual) in options.http_ports().items():
            port = usual if asked is None else asked
            listen_there = partial(listen, tls=self._tls if has_tls else None)
            self._http_ports[has_tls] = await listen_at(options.host, port, listen_there)


def _urls(address: NodeAddress) -> list[tuple[str, str]]:
    """The connection strings and HTTP addresses, those with TLS first."""
    host, urls = address.host, list[tuple[str, str]]()
    if address.kv_tls_port is not None:
        http = join_host_port(host, address.http_tls_port or address.kv_tls_port)
        urls.append((f"couchbases://{join_host_port(host, address.kv_tls_port)}", f"https://{http}"))
    if address.kv_port is not None:
        http = join_host_port(host, address.http_port or address.kv_port)
        urls.append((f"couchbase://{join_host_port(host, address.kv_port)}", f"http://{http}"))
    return urls


# --- ports --------------------------------------------------------------------------------------------------------


async def listen_at(host: str, port: int, listen: Callable[[int], Awaitable[int]]) -> int:
    """Listen on exactly this port, or on a free one for 0. Returns the port.

    Raises `LocalProtocolError` if it is taken, even if it is the usual port and was not chosen by an option: a client
    that names no port would write to the server that has it.
    """
    try:
        return await listen(port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise LocalProtocolError(
                f"another program listens on port {port} of {host}",
                hint="Stop it, or choose another port: --port and --http-port take 0 for a free one",
            ) from error
        raise LocalProtocolError(
            f"can't listen on port {port} of {host}: {error.strerror or error}",
            hint="Choose another port, or 0 for a free one, and an address of this machine",
        ) from error


async def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket. The system queues its connections until it is served."""
    loop = asyncio.get_running_loop()
    family, kind, _, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(128)
    except OSError:
        bound.close()
        raise
    return bound
