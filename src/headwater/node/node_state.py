"""The state of a running node: its buckets, its users, its cluster memberships, and the configs it gives to clients.

`node.Node` opens, serves and closes all of it; the HTTP handlers, the dashboard and the simulation use it from here.
Call everything in the node's event loop. This module opens no ports and does not depend on HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, Unpack

from headwater import __version__
from headwater.client.connection_string import Address
from headwater.client.kv_connection import Login
from headwater.errors import LocalProtocolError, MalformedJson, StoreError
from headwater.log_fields import Fields, fields
from headwater.node.auth.accounts import Accounts, Change, UserSharing
from headwater.node.auth.login_checks import LoginChecks
from headwater.node.auth.users import DECOY_SECRET_BYTES, Users
from headwater.node.bucket_lifecycle import BucketLifecycle
from headwater.node.commit_loop import ChangeSignal
from headwater.node.kv_listener import KvListener
from headwater.node.membership import (
    ClusterMembership,
    MemberSettings,
    RolledBack,
    peer_login,
    roll_back_vbucket,
    share_users,
)
from headwater.node.node_folder import NodeEnvironment, NodeIdentity
from headwater.node.options import BucketSettings, NodeOptions, check_bucket_name, stored_settings
from headwater.node.service import BucketService, ConfigVersion, Service, Traffic
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

logger = logging.getLogger(__name__)


class Coordinator(Protocol):
    """The methods of `headwater.cluster.coordinator` that the HTTP side calls. The node itself does not import it.

    They raise a `HeadwaterError` that says what was not done, and what to do next.
    """

    async def init(self, *, replicas: int, settings: Mapping[str, Any]) -> object: ...

    async def change(self, change: Callable[[PublishedConfig], PublishedConfig]) -> object: ...

    def close(self) -> None: ...


MakeCoordinator = Callable[[Sequence[Address], Login], Coordinator]


class NodeState:
    """The parts of a node, and the operations on them."""

    def __init__(
        self, options: NodeOptions, environment: NodeEnvironment, coordinator: MakeCoordinator | None = None
    ) -> None:
        self.options = options
        self.environment = environment
        self.folder = environment.open_folder(options.data)
        self.is_ready = False
        """Whether every bucket is open and served."""
        self.why_not_ready = "it has not been started"
        """What the node is doing instead, such as `it opens bucket 'travel', 1 of 2`."""
        self.config_changes = ChangeSignal()
        """Notified when a cluster config has changed."""
        self.login_checks = LoginChecks(lambda: self.users, now_s=self.now_s)
        """Shared by the key-value side and HTTP, so that failed attempts on either count together."""
        self._started_s = self.now_s()
        self._accounts = Accounts(self.folder, random_bytes=environment.random_bytes, now_ns=environment.now_ns)
        self._durable = ChangeSignal()
        self._address: NodeAddress | None = None
        self._wakes: list[Callable[[], None]] = []
        """Called when a commit is durable, to send answers and changes."""
        # Clients accept a config only with a higher revision, and may know one from before the last start. A node can
        # stop and start within the same second, so the first revision is the time in milliseconds.
        self._revision = environment.now_ns() // 1_000_000
        self._known_states: object = None
        self._given_configs: dict[str | None, tuple[ConfigVersion, bytes]] = {}
        member_settings = MemberSettings(
            login=peer_login(options, environment.random_bytes),
            random_bytes=environment.random_bytes,
            now_s=self.now_s,
            on_config=self.config_changes.notify,
            on_login=self._accounts.let_nodes_in,
            users=UserSharing(self._accounts, random_bytes=environment.random_bytes),
        )
        self._buckets = BucketLifecycle(
            options,
            environment,
            self.folder,
            member_settings,
            on_durable=self._on_durable,
            on_void=self._on_void,
        )
        self._services, self._loops = self._buckets.services, self._buckets.loops
        self._memberships = self._buckets.memberships
        service = Service(
            buckets=self._services,
            # No user can log in before the node has loaded its users.
            users=Users(decoy_secret=bytes(DECOY_SECRET_BYTES)),
            now_ns=environment.now_ns,
            now_s=self.now_s,
            random_bytes=environment.random_bytes,
            cluster_config=self.cluster_config,
            set_cluster_config=self.set_cluster_config,
            on_pause=self._ask_others_again,
            server_version=self.server_version,
            dialect=options.dialect,
            log=self.log,
        )
        self._listener = KvListener(service, options.limits, self.login_checks)
        self._wakes.append(self._listener.send_durable)
        self._make_coordinator = coordinator
        self.on_bucket_made: Callable[[str], None] | None = None
        self.on_bucket_dropped: Callable[[str], Awaitable[None]] | None = None
        """Called when a bucket was created, and when it is dropped, for the dashboard, which reads it."""

    @property
    def server_version(self) -> str:
        return f"{self.options.dialect.server_version}-0000-headwater-{__version__}"

    @property
    def identity(self) -> NodeIdentity:
        return self._buckets.identity

    def now_s(self) -> float:
        """A monotonic clock."""
        return self.environment.now_s()

    def uptime_s(self) -> float:
        return self.now_s() - self._started_s

    def log(self, message: str, **about: Unpack[Fields]) -> None:
        logger.warning("%s", message, extra=fields(**about))

    # --- users ----------------------------------------------------------------------------------------------------

    @property
    def users(self) -> Users:
        return self._listener.service.users

    def is_node_user(self, name: str) -> bool:
        """Whether other nodes of a cluster log in as this user."""
        return self._accounts.is_node(name)

    async def change_users(self, change: Change) -> dict[str, str]:
        """Change the users on this node, durably, and on all nodes of its clusters.

        Calls `change` once, in a thread, and raises what it raises. Raises `StoreError` if the users could not be
        stored, and `LocalProtocolError` if no admin would be left; the users are unchanged then. Returns the nodes that
        do not have the change yet, and why; they get it when they can be reached.
        """
        await self._accounts.change(change)
        return await share_users(self._memberships.values())

    def _put_in_force(self, users: Users) -> None:
        """Apply new users. Log out connections of removed users, or a later user of that name would inherit them."""
        gone = self.users.by_name.keys() - users.by_name.keys()
        self._listener.service.users = users
        self._listener.log_out(gone)
        # Wake config streams: they check whether their user still has access.
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
        return self._memberships[bucket]

    def traffic(self, bucket: str) -> Traffic:
        """The totals of all connections since the node started, including those that have ended."""
        service = self._services[bucket]
        connections = service.producer_connections()
        sessions = (connection.session for connection in self._listener.connections)
        ended = service.ended
        return Traffic(
            requests=ended.requests + sum(session.requests for session in sessions if session.bucket is service),
            sent_messages=ended.sent_messages + sum(connection.sent_messages for connection in connections),
            sent_bytes=ended.sent_bytes + sum(connection.sent_bytes for connection in connections),
        )

    async def roll_back(self, bucket: str, vbucket: VBucketId, to_seqno: Seqno) -> RolledBack:
        """Do a failover drill. Raises `InvalidInput` if it can't be done, `StoreError` if it was not done."""
        service = self._services[bucket]
        return await self._loops[bucket].at_rest(lambda: roll_back_vbucket(service, vbucket, to_seqno))

    def hold_replicas(self, bucket: str) -> int:
        """Hold the copies on this node, so that they fall behind until released. Returns how many there are."""
        return self._memberships[bucket].replication.hold()

    def release_replicas(self, bucket: str) -> int:
        return self._memberships[bucket].replication.release()

    def cut_connections(self, bucket: str, user: str) -> int:
        """Break all connections of a bucket, as a network failure does. Returns how many there were."""
        service = self._services[bucket]
        connections = [one for one in self._listener.connections if one.session.bucket is service]
        for connection in connections:
            connection.drop(f"a drill of {user!r} cuts all connections of the bucket")
        return len(connections)

    # --- making, changing and dropping buckets --------------------------------------------------------------------

    @property
    def address(self) -> NodeAddress:
        """The address at which clients reach the node."""
        assert self._address is not None, "nothing asks for the address before the node listens"
        return self._address

    @address.setter
    def address(self, address: NodeAddress) -> None:
        self._address = address

    def coordinator(self, seeds: Sequence[Address], login: Login) -> Coordinator:
        """Create a coordinator for the bucket of the log-in. The caller closes it."""
        if self._make_coordinator is None:
            raise LocalProtocolError(
                "this node was started without a coordinator", hint="Start the nodes with `headwater serve`"
            )
        return self._make_coordinator(seeds, login)

    async def create_bucket(self, name: str, settings: BucketSettings, *, vbuckets: int | None = None) -> None:
        """Create a bucket on this node, and return when it is served.

        Raises `LocalProtocolError` if it can't be created, `StoreError` if it could not be stored.
        """
        check_bucket_name(name)
        # Shielded here and in `drop_bucket`: if the caller is cancelled, the change still completes.
        creating = self._buckets.create(
            name, settings, vbuckets=vbuckets or self.options.vbuckets, address=self.address
        )
        await asyncio.shield(asyncio.create_task(creating))
        if self.on_bucket_made is not None:
            self.on_bucket_made(name)
        self.config_changes.notify()

    async def drop_bucket(self, name: str) -> None:
        """Drop a bucket of this node with all its data: its streams end, and its connections are closed."""
        options = self.options
        if options.upr_port is not None and name == (options.upr_bucket or options.buckets[0]):
            raise LocalProtocolError(f"the UPR port streams bucket {name!r}", hint="Start the node without --upr-port")
        self._remember_cluster(without=name)
        dropping = self._buckets.drop(name, forget=self.on_bucket_dropped, close=self._listener.close_bucket)
        await asyncio.shield(asyncio.create_task(dropping))
        self.config_changes.notify()

    def _remember_cluster(self, *, without: str) -> None:
        """If this is the last bucket of a cluster, store the cluster's nodes: no config will name them any more."""
        configs = {name: service.config for name, service in self._services.items() if service.config is not None}
        config = configs.get(without)
        if config is not None and len(configs) == 1 and (this_node := self._services[without].this_node) is not None:
            others = tuple(node for at, node in enumerate(config.nodes) if at != this_node)
            self._buckets.change_identity(nodes=others, cluster_name=config.cluster_name or self.identity.cluster_name)

    async def flush_bucket(self, name: str) -> None:
        """Drop all documents of the bucket's vbuckets that are active here (`BucketService.flush`)."""
        await self._loops[name].at_rest(self._services[name].flush)

    async def change_settings(self, bucket: str, settings: BucketSettings) -> None:
        """Change the settings of a bucket that is not in a cluster, and return when they are durable."""
        service = self._services[bucket]
        commit = service.set_settings(settings)
        while service.bucket.durable_commit < commit:
            await self._durable.after(self._durable.count)
        stored = stored_settings(service.bucket)
        if stored != settings:
            service.settings, service.bucket.max_ttl_s = stored, stored.max_ttl_s
            raise StoreError("the settings could not be stored", hint="Free disk space and try again")
        self.config_changes.notify()

    def change_identity(self, **changes: Any) -> None:
        """Change the identity of the node and of the cluster in which it is alone, durably."""
        self._buckets.change_identity(**changes)
        self.config_changes.notify()

    def _on_durable(self) -> None:
        for wake in self._wakes:
            wake()
        for membership in self._memberships.values():
            membership.on_durable()
        self._durable.notify()

    def _ask_others_again(self) -> None:
        for membership in self._memberships.values():
            membership.ask_again()

    def _on_void(self, service: BucketService, commits: Collection[int]) -> None:
        self._listener.fail_waiting(service, commits)
        self._memberships[service.name].on_void()
        self._durable.notify()

    # --- collections ----------------------------------------------------------------------------------------------

    async def change_manifest(self, bucket: str, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Change the manifest of a bucket, and return the new one once it is durable.

        Calls `change` once, and raises what it raises. The manifest does not change between that call and the use of
        its result. Raises `StoreError` if the manifest was not changed.
        """
        service, membership = self._services[bucket], self._memberships[bucket]
        if service.config is not None and service.this_node != 0:
            manifest = await membership.peers.change_manifest(change)
        else:
            manifest = change(service.bucket.manifest)
            service.set_manifest(manifest)
        while service.bucket.durable_commit < service.manifest_commit:
            await self._durable.after(self._durable.count)
        if service.bucket.manifest.uid < manifest.uid:
            raise StoreError("the manifest could not be stored", hint="Free disk space and try again")
        await membership.peers.share()
        return manifest

    async def wait_for_manifest(self, bucket: str, uid: int) -> None:
        """Return once a manifest with this uid or a higher one is durable. The wait may be cancelled.

        Raises `StoreError` if the node stops, or the bucket is dropped, first.
        """
        service = self._services[bucket]
        while service.bucket.manifest.uid < uid or service.bucket.durable_commit < service.manifest_commit:
            await self._durable.after(self._durable.count)
            if not self.is_ready:
                raise StoreError(
                    "the node is stopping, and the manifest has not arrived",
                    hint="Ask another node, or try again later",
                )
            if self._services.get(bucket) is not service:
                raise StoreError("the bucket was dropped, and the manifest has not come")

    # --- cluster configs ------------------------------------------------------------------------------------------

    def set_cluster_config(self, bucket: str | None, version: ConfigVersion, config: bytes) -> bool:
        """Give clients this config in place of the node's own. Returns False if it is no newer than the current one."""
        published = None if bucket is None else PublishedConfig.decode(config)
        if published is not None and bucket is not None:
            if published.bucket != bucket:
                raise MalformedJson(f"a config of bucket {published.bucket!r} was given to bucket {bucket!r}")
            return self._memberships[bucket].adopt(published)
        known = self._given_configs.get(bucket)
        if known is not None and version <= known[0]:
            return False
        self._given_configs[bucket] = (version, config)
        self.config_changes.notify()
        return True

    def cluster_config(self, bucket: str | None) -> bytes:
        """The config for a bucket, or for the node, as clients get it over the key-value protocol and HTTP."""
        published = self._published_config(bucket)
        if published is not None:
            return published
        if bucket in self._given_configs:
            return self._given_configs[bucket][1]
        self._notice_state_changes()
        cluster = ClusterNodes(
            nodes=(self.address,),
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
        # A damaged vbucket stays in the map: its clients have to ask this node to learn why they get nothing.
        states = [None if stored is None else stored.state for stored in service.bucket.vbuckets.facts]
        replicas = service.settings.replicas
        missing = [NO_NODE] * replicas
        owners = [[0 if state == VBucketState.ACTIVE else NO_NODE, *missing] for state in states]
        return bucket_config(
            cluster, BucketMap(name=facts.name, uuid=facts.uuid, replicas=replicas, vbucket_map=owners)
        )

    def _published_config(self, bucket: str | None) -> bytes | None:
        """The config of the cluster that a bucket, or with None the node, belongs to; None if it belongs to none."""
        if bucket is not None:
            membership = self._memberships.get(bucket)
            return None if membership is None or membership.config is None else membership.shown_config
        for membership in self._memberships.values():
            # A node that the config leaves out gives its own config instead: otherwise it could not be added again.
            if membership.config is not None and membership.this_node is not None:
                return membership.config.encode_for_node(this_node=membership.this_node)
        return None

    def _notice_state_changes(self) -> None:
        """Raise the config revision if vbucket states, settings, buckets or the cluster's name have changed."""
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
