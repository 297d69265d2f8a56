"""A node: buckets, users, the key-value side and the HTTP side, started and stopped together."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Unpack

from headwater import __version__
from headwater.errors import LocalProtocolError, StoreError
from headwater.log_fields import Fields, LogEvent, fields
from headwater.node.auth.accounts import ADMIN, Accounts, Change, LoginThrottle
from headwater.node.auth.users import Users
from headwater.node.commit_loop import CommitLoop
from headwater.node.consumer.views import ConsumerView, consumer_views
from headwater.node.failover_drill import RolledBack, roll_back_vbucket
from headwater.node.http.call import BucketUsage, BucketView, Changes
from headwater.node.http.logins import Extension, Logins
from headwater.node.http.server import HttpServer
from headwater.node.service import BucketService, ConfigVersion, Service
from headwater.node.kv_listener import KvListener
from headwater.node.membership import MemberSettings, Membership, Memberships, is_member, peer_login
from headwater.node.node_folder import Surroundings
from headwater.node.options import (
    HTTP_PORT,
    HTTP_TLS_PORT,
    KV_PORT,
    KV_TLS_PORT,
    LOOPBACK_HOSTS,
    NodeOptions,
    server_context,
)
from headwater.node.producer.connection import ProducerConnection
from headwater.node.upr_listener import UprListener
from headwater.protocol.cluster_config import (
    BucketMap,
    Cluster,
    NodeAddress,
    bucket_config,
    join_host_port,
    node_config,
)
from headwater.protocol.kernels.machine_code import compile_kernels
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.store.bucket import Bucket, Outside
from headwater.store.data_format import BucketFacts
from headwater.store.engine import Engine
from headwater.store.opening import close_bucket, create_bucket, open_bucket, stored_facts

# Finding the port to listen on: the one that was asked for, the usual one, or a free one.


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
    """A socket that connections wait at, before anybody serves it."""
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


logger = logging.getLogger(__name__)

SERVER_VERSION = f"7.6.0-0000-headwater-{__version__}"
"""Clients decide by the first three numbers what they may use."""
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


Extend = Callable[["Node", Logins], Extension]
"""Makes what else is served on the HTTP port of a node."""


class Node:
    """See the module. `start`, then `stop`."""

    def __init__(
        self, options: NodeOptions, surroundings: Surroundings | None = None, *, extend: Extend | None = None
    ) -> None:
        self.options = options
        self.surroundings = surroundings or Surroundings()
        self.folder = self.surroundings.open_folder(options.data)
        self.config_changes = Changes()
        self.throttle = LoginThrottle()
        self.is_ready = False
        self.why_not_ready = "it has not been started"
        self._is_stopping = False
        self._started_s = self.now_s()
        self._accounts = Accounts(self.folder, random_bytes=self.surroundings.random_bytes)
        self._users: Users
        self._outside = Outside(now_ns=self.surroundings.now_ns, new_vbuuid=self.surroundings.new_vbuuid)
        self._engines: dict[str, Engine] = {}
        self._services: dict[str, BucketService] = {}
        self._closed: set[str] = set()
        self._loops: dict[str, CommitLoop] = {}
        self._durable = Changes()
        # Clients take a config only if its revision is higher, and they may know one of before the last start.
        self._revision = self._outside.now_s()
        self._known_states: dict[str, bytes] = {}
        self._given_configs: dict[str | None, tuple[ConfigVersion, bytes]] = {}
        self._address: NodeAddress
        self._listener: KvListener
        self._upr: UprListener | None = None
        self._upr_address: str | None = None
        self._tls: ssl.SSLContext | None = None
        self._http_port: int | None = None
        self._loading: asyncio.Future[None] | None = None
        """The thread that opens the buckets."""
        make_extension = None if extend is None else partial(extend, self)
        self._http = HttpServer(self, make_extension) if self.surroundings.serves_http else None
        self._members = Memberships(
            MemberSettings(
                login=peer_login(options, self.surroundings.random_bytes),
                random_bytes=self.surroundings.random_bytes,
                now_s=self.now_s,
                on_config=self.config_changes.notify,
                on_login=lambda bucket, login: self._accounts.let_in(login.user, login.password, bucket=bucket),
            )
        )

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
        if self._http is not None:
            self._http.prepare()
        for number, name in enumerate(self._engines, start=1):
            if self._is_stopping:
                return
            self.why_not_ready = f"it opens bucket {name!r}, {number} of {len(self._engines)}"
            self._open_bucket(name)

    def _close_buckets(self) -> None:
        """Those that are open by now."""
        for name in [name for name in list(self._services) if name not in self._closed]:
            self._closed.add(name)
            try:
                close_bucket(self._services[name].bucket)
            except StoreError as error:
                about = fields(
                    event=LogEvent.STORE_FAILED, bucket=name, error=type(error).__name__, reason=error.reason
                )
                logger.error("bucket %s was not closed in order: %s", name, error, extra=about)

    def _open_bucket(self, name: str) -> None:
        options = self.options
        engine = self._engines[name]
        secret = (self.surroundings.random_number(bits=64), self.surroundings.random_number(bits=64))
        facts = stored_facts(engine)
        if facts is None:
            uuid = self.surroundings.random_bytes(_UUID_BYTES).hex()
            facts = BucketFacts(name=name, uuid=uuid, vbuckets=options.vbuckets)
            bucket = create_bucket(engine, facts, outside=self._outside, secret=secret)
        else:
            bucket = open_bucket(engine, outside=self._outside, secret=secret)
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
        self._services[name] = BucketService(bucket=bucket, ack_when_durable=options.ack_when_durable)

    def _start_loops(self) -> None:
        service = Service(
            buckets=self._services,
            users=self._users,
            throttle=self.throttle,
            now_ns=self.surroundings.now_ns,
            now_s=self.now_s,
            random_bytes=self.surroundings.random_bytes,
            cluster_config=self.cluster_config,
            set_cluster_config=self.set_cluster_config,
            server_version=SERVER_VERSION,
            log=self.log,
        )
        self._listener = KvListener(service, self.options.limits)
        self._accounts.on_change = self._put_in_force
        for name, bucket_service in self._services.items():
            loop = CommitLoop(
                bucket_service,
                retention=self.options.retention,
                expiry_every_s=self.options.expiry_every_s,
                compact_every_s=self.options.compact_every_s,
                on_durable=self._on_durable,
                on_void=partial(self._on_void, bucket_service),
                on_failed=self.surroundings.end_process,
            )
            loop.start()
            self._loops[name] = loop
            self._members.open(bucket_service, loop)

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
        """From now on whoever asks is told that the node lives, and that it is not ready."""
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

    def _on_void(self, bucket: BucketService, commits: Collection[int]) -> None:
        self._listener.fail_waiting(bucket, commits)
        self._members.on_void(bucket)
        self._durable.notify()

    # --- what the HTTP side sees ----------------------------------------------------------------------------------

    @property
    def users(self) -> Users:
        return self._users

    def is_node_user(self, name: str) -> bool:
        return self._accounts.is_node(name)

    async def change_users(self, change: Change) -> None:
        await self._accounts.change(change)

    def _put_in_force(self, users: Users) -> None:
        """Everybody asks for rights with every request, but one who is gone must not come back with a namesake."""
        gone = self._users.by_name.keys() - users.by_name.keys()
        self._users = self._listener.service.users = users
        self._listener.log_out(gone)
        # Streams of configs look whether they may go on.
        self.config_changes.notify()

    @property
    def server_version(self) -> str:
        return SERVER_VERSION

    def now_s(self) -> float:
        return self.surroundings.now_s()

    def uptime_s(self) -> float:
        return self.now_s() - self._started_s

    def log(self, message: str, **about: Unpack[Fields]) -> None:
        logger.warning("%s", message, extra=fields(**about))

    def bucket_names(self) -> Iterable[str]:
        return self._services

    def bucket(self, name: str) -> BucketView | None:
        service = self._services.get(name)
        if service is None:
            return None
        facts = service.bucket.facts
        return BucketView(name=name, uuid=facts.uuid, manifest=service.bucket.manifest)

    def usage(self, bucket: str) -> BucketUsage:
        opened = self._services[bucket].bucket
        return BucketUsage(
            items=opened.index.live_documents(),
            disk_bytes=self.folder.disk_bytes(bucket),
            memory_bytes=_memory_bytes(opened),
            memory_quota_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )

    def set_cluster_config(self, bucket: str | None, version: ConfigVersion, config: bytes) -> bool:
        """Give this config in place of the node's own; False where it is no newer than the one before."""
        is_taken = self._members.adopt(bucket, config)
        if is_taken is not None:
            return is_taken
        known = self._given_configs.get(bucket)
        if known is not None and version <= known[0]:
            return False
        self._given_configs[bucket] = (version, config)
        self.config_changes.notify()
        return True

    def cluster_config(self, bucket: str | None) -> bytes:
        published = self._members.shown_config(bucket)
        if published is not None:
            return published
        if bucket in self._given_configs:
            return self._given_configs[bucket][1]
        self._notice_state_changes()
        cluster = Cluster(nodes=(self._address,), revision=self._revision, uuid=self._cluster_uuid())
        service = self._services.get(bucket) if bucket else None
        if service is None:
            return node_config(cluster)
        if self.options.bare:
            return b""
        facts = service.bucket.facts
        states = service.bucket.vbuckets.states.tolist()
        owners = [[0 if state == VBucketState.ACTIVE else -1] for state in states]
        return bucket_config(cluster, BucketMap(name=facts.name, uuid=facts.uuid, vbucket_map=owners))

    def _notice_state_changes(self) -> None:
        """A vbucket that has another state makes another config."""
        states = {name: service.bucket.vbuckets.states.tobytes() for name, service in self._services.items()}
        if states != self._known_states:
            self._known_states = states
            self._revision += 1
            self.config_changes.notify()

    def _cluster_uuid(self) -> str:
        return next(iter(self._services.values())).bucket.facts.uuid if self._services else "0" * 32

    async def change_manifest(self, bucket: str, change: Callable[[Manifest], Manifest]) -> Manifest:
        service = self._services[bucket]
        manifest = await self._members.change_manifest(bucket, change)
        if manifest is None:
            manifest = change(service.bucket.manifest)
            service.set_manifest(manifest)
        while service.bucket.durable_commit < service.manifest_commit:
            await self._durable.after(self._durable.count)
        if service.bucket.manifest.uid < manifest.uid:
            raise StoreError("the manifest could not be stored", hint="Free disk space and try again")
        await self._members.of(bucket).share_manifest()
        return manifest

    async def wait_for_manifest(self, bucket: str, uid: int) -> None:
        service = self._services[bucket]
        while service.bucket.manifest.uid < uid or service.bucket.durable_commit < service.manifest_commit:
            await self._durable.after(self._durable.count)

    def bucket_service(self, bucket: str) -> BucketService:
        return self._services[bucket]

    def membership(self, bucket: str) -> Membership:
        return self._members.of(bucket)

    def kv_requests(self, bucket: str) -> int:
        """How many key-value requests the bucket has got, of all kinds, since the node started."""
        service = self._services[bucket]
        sessions = (connection.session for connection in self._listener.connections)
        return service.ended.requests + sum(session.requests for session in sessions if session.bucket is service)

    def consumer_views(
        self, bucket: str, name: str | None = None, *, streams_max: int | None = None
    ) -> list[ConsumerView]:
        """The connections by which this node receives its copies, or the one that is named."""
        connections = self._services[bucket].consumer_connections()
        return consumer_views(connections, now_s=self.now_s(), name=name, streams_max=streams_max)

    def producer_connections(self, bucket: str) -> list[ProducerConnection]:
        return self._services[bucket].producer_connections()

    async def roll_back(self, bucket: str, vbucket: VBucketId, to_seqno: Seqno) -> RolledBack:
        service = self._services[bucket]
        return await self._loops[bucket].at_rest(lambda: roll_back_vbucket(service, vbucket, to_seqno))

    def hold_replicas(self, bucket: str) -> int:
        return self._members.of(bucket).replication.hold()

    def release_replicas(self, bucket: str) -> int:
        return self._members.of(bucket).replication.release()


def _memory_bytes(bucket: Bucket) -> int:
    return bucket.index.memory_bytes + bucket.young.total_bytes + len(bucket.pending.frames)
