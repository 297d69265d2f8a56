"""What a running node has: its buckets, its users, its place in clusters, and the configs that it gives to clients.

`node.Node` opens, serves and closes all of it; the HTTP handlers, the dashboard and the simulation ask it here.
Everything is called in the node's event loop. Nothing here listens, and nothing here knows of HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Unpack

import numpy as np

from headwater import __version__
from headwater.client.connection_string import Address
from headwater.client.kv_connection import Login
from headwater.errors import LocalProtocolError, StoreError
from headwater.log_fields import Fields, fields
from headwater.node.auth.accounts import Accounts, Change
from headwater.node.auth.login_checks import LoginChecks
from headwater.node.auth.sharing import UserSharing
from headwater.node.auth.users import Users
from headwater.node.bucket_lifecycle import BucketLifecycle
from headwater.node.bucket_settings import BucketSettings, stored_settings
from headwater.node.consumer_views import STREAMS_VIEWED_MAX, ConsumerView
from headwater.node.failover_drill import RolledBack, roll_back_vbucket
from headwater.node.kv_listener import KvListener
from headwater.node.membership import ClusterMembership, MemberSettings, Memberships, peer_login
from headwater.node.node_folder import NodeEnvironment, NodeIdentity
from headwater.node.options import NodeOptions, check_bucket_name
from headwater.node.producer.connection import ProducerConnection
from headwater.node.service import BucketService, ConfigVersion, Traffic
from headwater.protocol.cluster_config import (
    NO_NODE,
    BucketMap,
    ClusterNodes,
    NodeAddress,
    PublishedConfig,
    bucket_config,
    node_config,
)
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.store.bucket import Bucket
from headwater.store.settling import flush

logger = logging.getLogger(__name__)

"""Clients decide by the first three numbers what they may use."""


class ChangeSignal:
    """A signal to any number of waiters that something has changed, of which none can miss a change.

    Note `count`, look at the thing, then wait for a change `after` that count. For one event loop: `notify` is called
    in the loop that waits.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, count: int) -> None:
        """Return once there have been more changes than `count`."""
        while self.count <= count:
            await self._next.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUsage:
    """What a bucket holds and takes."""

    items: int
    disk_bytes: int
    memory_bytes: int
    memory_quota_bytes: int


class Coordination(Protocol):
    """What the node asks of the coordinator (`headwater.cluster`), where its HTTP side is asked to change a cluster.

    A `HeadwaterError` says what was not done, and what to do.
    """

    async def form(self, seeds: Sequence[Address], login: Login, *, replicas: int, settings: Mapping[str, Any]) -> None:
        """Share a bucket that is empty on all these nodes out over them."""
        ...

    async def change(
        self, seeds: Sequence[Address], login: Login, change: Callable[[PublishedConfig], PublishedConfig]
    ) -> None:
        """Have all nodes go by what `change` makes of the config of a bucket."""
        ...


async def _nothing_to_end(bucket: str) -> None:
    pass


class NodeState:
    """The parts of a node, and what is asked of them."""

    def __init__(
        self, options: NodeOptions, environment: NodeEnvironment, coordination: Coordination | None = None
    ) -> None:
        self.options = options
        self.environment = environment
        self.folder = environment.open_folder(options.data)
        self.is_ready = False
        """Whether every bucket is open and served. Until then, and while the node stops, little is asked here."""
        self.why_not_ready = "it has not been started"
        """What the node does instead, such as `it opens bucket 'travel', 1 of 2`."""
        self.config_changes = ChangeSignal()
        """Notified when a cluster config has changed."""
        self.login_checks = LoginChecks(lambda: self._users, now_s=self.now_s)
        """One for the key-value side and for HTTP: guesses count wherever they are made."""
        self._started_s = self.now_s()
        self._accounts = Accounts(self.folder, random_bytes=environment.random_bytes, now_ns=environment.now_ns)
        self._users: Users
        self._durable = ChangeSignal()
        self._listener: KvListener
        self._address: NodeAddress
        # Clients take a config only if its revision is higher, and they may know one of before the last start. A start
        # can follow an end within the same second, so it is in milliseconds.
        self._revision = environment.now_ns() // 1_000_000
        self._known_states: object = None
        self._given_configs: dict[str | None, tuple[ConfigVersion, bytes]] = {}
        self._members = Memberships(
            MemberSettings(
                login=peer_login(options, environment.random_bytes),
                random_bytes=environment.random_bytes,
                now_s=self.now_s,
                on_config=self.config_changes.notify,
                on_login=self._accounts.let_nodes_in,
                users=UserSharing(self._accounts, random_bytes=environment.random_bytes),
            )
        )
        self._buckets = BucketLifecycle(
            options,
            environment,
            self.folder,
            self._members,
            on_durable=self._on_durable,
            on_void=self._on_void,
        )
        self._services, self._loops = self._buckets.services, self._buckets.loops
        self._coordination = coordination
        self.on_bucket_made: Callable[[str], None] = lambda name: None
        self.on_bucket_dropped: Callable[[str], Awaitable[None]] = _nothing_to_end
        """Called when a bucket comes and goes, for the dashboard, which reads it."""

    @property
    def server_version(self) -> str:
        return f"{self.options.dialect.server_version}-0000-headwater-{__version__}"

    @property
    def identity(self) -> NodeIdentity:
        return self._buckets.identity

    def now_s(self) -> float:
        """A clock that never goes back."""
        return self.environment.now_s()

    def uptime_s(self) -> float:
        return self.now_s() - self._started_s

    def log(self, message: str, **about: Unpack[Fields]) -> None:
        logger.warning("%s", message, extra=fields(**about))

    # --- users ----------------------------------------------------------------------------------------------------

    @property
    def users(self) -> Users:
        return self._users

    def is_node_user(self, name: str) -> bool:
        """Whether other nodes of a cluster log in as this user."""
        return self._accounts.is_node(name)

    async def change_users(self, change: Change) -> dict[str, str]:
        """Put what `change` makes of the users into force, on all nodes of its clusters. It is durable here then.

        Returns the nodes that do not have it yet, and why; they get it when they can be reached. `change` is called
        once, in a thread. What it raises is raised here; a `StoreError` says that the users are as they were, and so
        does a `LocalProtocolError` where there would be no admin left.
        """
        await self._accounts.change(change)
        return await self._members.share_users()

    def _put_in_force(self, users: Users) -> None:
        """Rights are looked up with every request, but a user who is gone must not come back with a namesake."""
        gone = self._users.by_name.keys() - users.by_name.keys()
        self._users = self._listener.service.users = users
        self._listener.log_out(gone)
        # Streams of configs look whether they may go on.
        self.config_changes.notify()

    # --- buckets --------------------------------------------------------------------------------------------------

    def bucket_names(self) -> Iterable[str]:
        return self._services

    def bucket(self, name: str) -> Bucket | None:
        service = self._services.get(name)
        return None if service is None else service.bucket

    def bucket_service(self, bucket: str) -> BucketService:
        return self._services[bucket]

    def membership(self, bucket: str) -> ClusterMembership:
        return self._members.of(bucket)

    def usage(self, bucket: str) -> BucketUsage:
        opened = self._services[bucket].bucket
        return BucketUsage(
            items=opened.index.live_documents(),
            disk_bytes=self.folder.disk_bytes(bucket),
            memory_bytes=opened.index.memory_bytes + opened.young.total_bytes + len(opened.pending.frames),
            memory_quota_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        )

    def producer_connections(self, bucket: str) -> list[ProducerConnection]:
        """The connections that get changes of a bucket."""
        return self._services[bucket].producer_connections()

    def consumer_views(
        self, bucket: str, name: str | None = None, *, streams_max: int = STREAMS_VIEWED_MAX
    ) -> list[ConsumerView]:
        """The connections by which this node receives its copies, or the one that is named."""
        return self._services[bucket].consumer_views(now_s=self.now_s(), name=name, streams_max=streams_max)

    def traffic(self, bucket: str) -> Traffic:
        """The totals of all connections since the node started, those that are gone included."""
        service, connections = self._services[bucket], self.producer_connections(bucket)
        sessions = (connection.session for connection in self._listener.connections)
        ended = service.ended
        return Traffic(
            requests=ended.requests + sum(session.requests for session in sessions if session.bucket is service),
            sent_messages=ended.sent_messages + sum(connection.sent_messages for connection in connections),
            sent_bytes=ended.sent_bytes + sum(connection.sent_bytes for connection in connections),
        )

    async def roll_back(self, bucket: str, vbucket: VBucketId, to_seqno: Seqno) -> RolledBack:
        """Do a failover drill. `InvalidInput` says that it can't be done so, a `StoreError` that it was not done."""
        service = self._services[bucket]
        return await self._loops[bucket].at_rest(lambda: roll_back_vbucket(service, vbucket, to_seqno))

    def hold_replicas(self, bucket: str) -> int:
        """Let the copies on this node fall behind until they are released. Returns how many there are."""
        return self._members.of(bucket).replication.hold()

    def release_replicas(self, bucket: str) -> int:
        return self._members.of(bucket).replication.release()

    # --- making, changing and dropping buckets --------------------------------------------------------------------

    @property
    def address(self) -> NodeAddress:
        """Where clients reach the node."""
        return self._address

    @property
    def coordination(self) -> Coordination:
        if self._coordination is None:
            raise LocalProtocolError(
                "this node was started without a coordinator", hint="Start the nodes with `headwater serve`"
            )
        return self._coordination

    def settings(self, bucket: str) -> BucketSettings:
        return self._services[bucket].settings

    async def create_bucket(self, name: str, settings: BucketSettings, *, vbuckets: int | None = None) -> None:
        """Make a bucket on this node, and return when it is served.

        A `LocalProtocolError` says what speaks against it, a `StoreError` that it could not be stored.
        """
        check_bucket_name(name)
        await self._buckets.create(name, settings, vbuckets=vbuckets or self.options.vbuckets, address=self._address)
        self.on_bucket_made(name)
        self.config_changes.notify()

    async def drop_bucket(self, name: str) -> None:
        """Drop a bucket of this node with all its data: its streams end, and its connections are closed."""
        options = self.options
        if options.upr_port is not None and name == (options.upr_bucket or options.buckets[0]):
            raise LocalProtocolError(f"the UPR port streams bucket {name!r}", hint="Start the node without --upr-port")
        self._remember_cluster(without=name)
        await self._buckets.drop(name, forget=self.on_bucket_dropped, close=self._listener.close_bucket)
        self.config_changes.notify()

    def _remember_cluster(self, *, without: str) -> None:
        """With its last bucket a cluster has no config, and would be forgotten."""
        configs = {name: service.config for name, service in self._services.items() if service.config is not None}
        config = configs.get(without)
        if config is not None and len(configs) == 1 and (this_node := self._services[without].this_node) is not None:
            others = tuple(node for at, node in enumerate(config.nodes) if at != this_node)
            self._buckets.change_identity(nodes=others, cluster_name=config.cluster_name or self.identity.cluster_name)

    async def flush_bucket(self, name: str) -> None:
        """Drop all documents of a bucket that are active here. Consumers roll back to 0, and so do the replicas."""
        service = self._services[name]

        def flush_at_rest() -> None:
            flush(service.bucket, active_only=True)
            active = np.flatnonzero(service.bucket.vbuckets.states == VBucketState.ACTIVE).tolist()
            service.history.flushed(active)
            service.forget_locks(active)
            service.sync_writes.evaluate_all()
            for vbucket in active:
                service.on_rolled_back(VBucketId(vbucket))

        await self._loops[name].at_rest(flush_at_rest)

    async def change_settings(self, bucket: str, settings: BucketSettings) -> None:
        """Go by other settings of a bucket that is in no cluster, and return when they are durable."""
        service = self._services[bucket]
        commit = service.set_settings(settings)
        while service.bucket.durable_commit < commit:
            await self._durable.after(self._durable.count)
        stored = stored_settings(service.bucket.engine)
        if stored != settings:
            service.settings, service.bucket.max_ttl_s = stored, stored.max_ttl_s
            raise StoreError("the settings could not be stored", hint="Free disk space and try again")
        self.config_changes.notify()

    def change_identity(self, **changes: Any) -> None:
        """Change what the node says of itself and of a cluster that it is alone in. It is durable then."""
        self._buckets.change_identity(**changes)
        self.config_changes.notify()

    def _on_durable(self) -> None:
        self._wake()
        self._members.on_durable()
        self._durable.notify()

    def _wake(self) -> None:
        """A commit is durable: answers and streams go on."""
        self._listener.send_durable()

    def _on_void(self, service: BucketService, commits: Collection[int]) -> None:
        self._listener.fail_waiting(service, commits)
        self._members.on_void(service)
        self._durable.notify()

    # --- collections ----------------------------------------------------------------------------------------------

    async def change_manifest(self, bucket: str, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Put what `change` makes of the manifest into force, and return it once it is durable.

        `change` is called once, and nothing else happens between that and the new manifest being in force. What it
        raises is raised here; a `StoreError` says that the manifest is as it was.
        """
        service, membership = self._services[bucket], self._members.of(bucket)
        manifest = await self._members.change_manifest(bucket, change)
        if manifest is None:
            manifest = change(service.bucket.manifest)
            service.set_manifest(manifest)
        while service.bucket.durable_commit < service.manifest_commit:
            await self._durable.after(self._durable.count)
        if service.bucket.manifest.uid < manifest.uid:
            raise StoreError("the manifest could not be stored", hint="Free disk space and try again")
        await membership.share_manifest()
        return manifest

    async def wait_for_manifest(self, bucket: str, uid: int) -> None:
        """Return once a manifest with this uid or a higher one is durable. The wait may be cancelled.

        A `StoreError` says that the node stops first.
        """
        service = self._services[bucket]
        while service.bucket.manifest.uid < uid or service.bucket.durable_commit < service.manifest_commit:
            await self._durable.after(self._durable.count)
            if not self.is_ready:
                raise StoreError("the node stops, and the manifest has not come", hint="Ask another node, or later")
            if self._services.get(bucket) is not service:
                raise StoreError("the bucket was dropped, and the manifest has not come")

    # --- cluster configs ------------------------------------------------------------------------------------------

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
        """The config for a bucket, or for the node, as the key-value side and HTTP give it."""
        published = self._members.shown_config(bucket)
        if published is not None:
            return published
        if bucket in self._given_configs:
            return self._given_configs[bucket][1]
        self._notice_state_changes()
        cluster = ClusterNodes(
            nodes=(self._address,),
            revision=self._revision,
            uuid=self.identity.cluster_uuid,
            name=self.identity.cluster_name,
        )
        service = self._services.get(bucket) if bucket else None
        if service is None:
            return node_config(cluster)
        if self.options.bare:
            return b""
        facts = service.bucket.facts
        # A vbucket that is damaged stays in the map: its clients learn from this node why they get nothing.
        states = [None if stored is None else stored.state for stored in service.bucket.vbuckets.facts]
        replicas = service.settings.replicas
        missing = [NO_NODE] * replicas
        owners = [[0 if state == VBucketState.ACTIVE else NO_NODE, *missing] for state in states]
        return bucket_config(
            cluster, BucketMap(name=facts.name, uuid=facts.uuid, replicas=replicas, vbucket_map=owners)
        )

    def _notice_state_changes(self) -> None:
        """A vbucket that has another state makes another config, and so do other settings, buckets and names."""
        states = (
            self.identity.cluster_name,
            {
                name: (service.bucket.facts.uuid, service.settings, service.bucket.vbuckets.states.tobytes())
                for name, service in self._services.items()
            },
        )
        if states != self._known_states:
            self._known_states = states
            self._revision += 1
            self.config_changes.notify()
