"""Starting and stopping a node: its buckets are opened, its ports listen, its loops run, and all of it ends in order.

`headwater serve`, the tests and the simulation make a `Node`. What a running node is asked is in `node_state`; here is
nothing but the order of things.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial

from headwater.errors import LocalProtocolError, StoreError
from headwater.log_fields import LogEvent, fields
from headwater.node.auth.accounts import ADMIN
from headwater.node.commit_loop import CommitLoop
from headwater.node.http.server import HttpServer
from headwater.node.kv_listener import KvListener
from headwater.node.membership import is_member
from headwater.node.node_folder import NodeEnvironment
from headwater.node.node_state import SERVER_VERSION, NodeState
from headwater.node.options import (
    HTTP_PORT,
    HTTP_TLS_PORT,
    KV_PORT,
    KV_TLS_PORT,
    LOOPBACK_HOSTS,
    NodeOptions,
    server_context,
)
from headwater.node.service import BucketService, Service
from headwater.node.upr_listener import UprListener
from headwater.protocol.cluster_config import (
    NodeAddress,
    join_host_port,
)
from headwater.protocol.kernels.machine_code import compile_kernels
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.store.bucket import Bucket
from headwater.store.data_format import BucketFacts
from headwater.store.engine import Engine
from headwater.store.opening import close_bucket, create_bucket, open_bucket, stored_facts

logger = logging.getLogger(__name__)

KERNEL_PACKAGES = (
    "headwater.protocol.kernels.frame_runs",
    "headwater.protocol.kernels.siphash",
    "headwater.store",
    "headwater.node",
)
"""Where the kernels are that a node calls. It compiles them before it is ready: that takes a minute on a new machine,
during which it could answer no client. Later starts load what was kept."""
_UUID_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Where a started node is to be found."""

    url: str
    http_url: str
    user: str
    generated_password: str | None
    """Shown once, when it was made."""
    upr_address: str | None = None


class Node(NodeState):
    """A node that can be started and stopped."""

    def __init__(self, options: NodeOptions, environment: NodeEnvironment | None = None) -> None:
        super().__init__(options, environment or NodeEnvironment())
        self._is_stopping = False
        self._engines: dict[str, Engine] = {}
        self._buckets: dict[str, Bucket] = {}
        """Those that are opened; a service is built for each once all are."""
        self._closed: set[str] = set()
        self._upr: UprListener | None = None
        self._upr_address: str | None = None
        self._tls: ssl.SSLContext | None = None
        self._http_port: int | None = None
        self._loading: asyncio.Future[None] | None = None
        """The thread that opens the buckets."""
        self._http: HttpServer | None = None
        if self.environment.serves_http:
            self._http = HttpServer(self, open_metrics=options.open_metrics, landing_urls=options.landing_urls)

    # --- starting and stopping ------------------------------------------------------------------------------------

    async def start(self) -> Started:
        options = self.options
        self.folder.make()
        try:
            # What is there comes first: where another process has it, nothing has been changed yet.
            for name in dict.fromkeys((*self.folder.bucket_names(), *options.buckets)):
                self._engines[name] = self.folder.open_engine(name)
            self._tls = server_context(options)
            await self._listen_http()
            await self._load()
            generated = self._accounts.load(options.user, options.password, first_only=options.first_user_only)
            self._users = self._accounts.in_force
            self._start_loops()
            await self._listen()
            # When nothing can fail any more: a password is shown by the start that stores it.
            self._accounts.store(generated)
            self.why_not_ready = "it asks the other nodes of its cluster"
            await self._members.start(self._address)
        except BaseException:
            await self.stop()
            raise
        if self._http is not None:
            self._http.open()
        self.is_ready = True
        return Started(
            url=f"couchbase{'s' if options.tls_cert else ''}://{self._address.kv_address}",
            http_url=f"http{'s' if options.tls_cert else ''}://{self._address.http_address}",
            user=options.user if options.user is not None and options.user in self._users.by_name else ADMIN,
            generated_password=generated,
            upr_address=self._upr_address,
        )

    async def stop(self) -> None:
        """A clean stop: everything taken is durable, and the next start adds no branch to any failover log."""
        self.is_ready = False
        self.why_not_ready = "it stops"
        self._is_stopping = True
        await self._members.stop()
        if self._http is not None:
            await self._http.stop()
        if hasattr(self, "_listener"):
            await self._listener.stop()
        if self._upr is not None:
            await self._upr.stop()
        for loop in self._loops.values():
            await loop.stop()
        self._close_buckets()
        if self._loading is not None:
            await asyncio.wait({self._loading})
            # The one that was being opened.
            self._close_buckets()
        for engine in self._engines.values():
            engine.close()

    async def _load(self) -> None:
        """Open the buckets, in a thread where the HTTP side is to answer meanwhile."""
        if self._http is None:
            self._open_buckets()
            return
        self._loading = asyncio.get_running_loop().run_in_executor(None, self._open_buckets)
        # Where the start is cancelled, the thread goes on to the end of the bucket, and `stop` waits for it.
        await asyncio.shield(self._loading)

    def _open_buckets(self) -> None:
        self.why_not_ready = "it loads or compiles its kernels"
        compile_kernels(*KERNEL_PACKAGES)
        for number, name in enumerate(self._engines, start=1):
            if self._is_stopping:
                return
            self.why_not_ready = f"it opens bucket {name!r}, {number} of {len(self._engines)}"
            self._open_bucket(name)

    def _close_buckets(self) -> None:
        """Those that are open by now."""
        for name in [name for name in list(self._buckets) if name not in self._closed]:
            self._closed.add(name)
            try:
                close_bucket(self._buckets[name])
            except StoreError as error:
                about = fields(
                    event=LogEvent.STORE_FAILED, bucket=name, error=type(error).__name__, reason=error.reason
                )
                logger.error("bucket %s was not closed in order: %s", name, error, extra=about)

    def _open_bucket(self, name: str) -> None:
        options = self.options
        engine = self._engines[name]
        secret = (self.environment.random_number(bits=64), self.environment.random_number(bits=64))
        facts = stored_facts(engine)
        if facts is None:
            uuid = self.environment.random_bytes(_UUID_BYTES).hex()
            facts = BucketFacts(name=name, uuid=uuid, vbuckets=options.vbuckets)
            bucket = create_bucket(engine, facts, environment=self._store_environment, secret=secret)
        else:
            bucket = open_bucket(engine, environment=self._store_environment, secret=secret)
            if not engine.was_left_alone:
                logger.warning(
                    "bucket %s was not stopped in order, or is a copy: its history begins a new branch",
                    name,
                    extra=fields(event=LogEvent.NEW_BRANCH, bucket=name),
                )
        if not options.bare and not any(bucket.vbuckets.facts) and not is_member(engine):
            # A new bucket, or one whose making was cut short.
            for vbucket in range(facts.vbuckets):
                bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
            bucket.commit_now()
        self._buckets[name] = bucket

    def _start_loops(self) -> None:
        service = Service(
            buckets=self._services,
            users=self._users,
            throttle=self.throttle,
            now_ns=self.environment.now_ns,
            now_s=self.now_s,
            random_bytes=self.environment.random_bytes,
            cluster_config=self.cluster_config,
            set_cluster_config=self.set_cluster_config,
            server_version=SERVER_VERSION,
            log=self.log,
        )
        self._listener = KvListener(service, self.options.limits)
        self._accounts.on_change = self._put_in_force
        for name, bucket in self._buckets.items():
            loop = CommitLoop(
                bucket,
                retention=self.options.retention,
                expiry_every_s=self.options.expiry_every_s,
                compact_every_s=self.options.compact_every_s,
                on_durable=self._on_durable,
                on_void=partial(self._on_void, name),
                on_failed=self.environment.end_process,
            )
            self._loops[name] = loop
            self._services[name] = BucketService(
                bucket=bucket,
                ack_when_durable=self.options.ack_when_durable,
                on_change=loop.on_change,
                when_at_rest=loop.run_at_rest,
                is_at_rest=loop.is_at_rest,
            )
            loop.start()
            self._members.open(self._services[name], loop)

    async def _listen(self) -> None:
        options = self.options
        tls, http_port = self._tls, self._http_port
        kv_port = await usual_or_free(
            options.host,
            options.port,
            KV_PORT if tls is None else KV_TLS_PORT,
            lambda port: self._listener.listen(options.host, port, tls),
        )
        kv_port, http_port = options.advertise_port or kv_port, options.advertise_http_port or http_port
        host = options.advertise_host or ("127.0.0.1" if options.host in LOOPBACK_HOSTS else options.host)
        self._address = NodeAddress(
            host=host,
            kv_port=None if tls else kv_port,
            kv_tls_port=kv_port if tls else None,
            http_port=None if tls else http_port,
            http_tls_port=http_port if tls else None,
        )
        if options.upr_port is not None:
            await self._listen_upr(options.upr_port)

    async def _listen_upr(self, port: int) -> None:
        """Serve the UPR draft, which is asked for by its port and has no usual one."""
        options = self.options
        name = options.upr_bucket or options.buckets[0]
        if name not in self._services:
            raise LocalProtocolError(
                f"UPR is to stream the bucket {name!r}, which is not here", hint="Give --bucket for it, too"
            )
        self._upr = upr = UprListener(self._services[name], options.limits)
        port = await usual_or_free(options.host, port, port, lambda port: upr.listen(options.host, port))
        self._upr_address = join_host_port(self._address.host, port)

    async def _listen_http(self) -> None:
        """From now on requests are answered: the node lives, and is not ready."""
        http, options, tls = self._http, self.options, self._tls
        if http is None:
            return

        async def listen(port: int) -> int:
            bound = await bound_socket(options.host, port)
            await http.listen(bound, tls=tls)
            chosen: int = bound.getsockname()[1]
            return chosen

        usual = HTTP_PORT if tls is None else HTTP_TLS_PORT
        self._http_port = await usual_or_free(options.host, options.http_port, usual, listen)

    def _on_durable(self) -> None:
        self._listener.send_durable()
        if self._upr is not None:
            self._upr.send_durable()
        self._members.on_durable()
        self._durable.notify()

    def _on_void(self, bucket: str, commits: Collection[int]) -> None:
        self._listener.fail_waiting(self._services[bucket], commits)
        self._members.on_void(self._services[bucket])
        self._durable.notify()


# --- ports --------------------------------------------------------------------------------------------------------


async def usual_or_free(host: str, asked: int | None, usual: int, listen: Callable[[int], Awaitable[int]]) -> int:
    """Listen on the port asked for; where none was, on the usual one, or on a free one if that is taken."""
    try:
        return await listen(usual if asked is None else asked)
    except OSError as error:
        if asked is not None or error.errno != errno.EADDRINUSE:
            raise LocalProtocolError(
                f"can't listen on port {usual if asked is None else asked} of {host}: {error.strerror or error}",
                hint="Choose another port, or 0 for a free one, and an address of this machine",
            ) from error
        return await listen(0)


async def bound_socket(host: str, port: int) -> socket.socket:
    """A socket that connections wait at, before it is served."""
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
