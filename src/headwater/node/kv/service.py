"""What key-value sessions share: the buckets of the node, its users, and its limits.

Sans-IO: the time and random bytes come in as functions, and whoever runs the sessions commits the buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headwater.node.auth.accounts import LoginThrottle
from headwater.node.auth.users import Users
from headwater.node.durability import SyncWrites
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import Cas, CollectionId, VBucketId
from headwater.store.bucket import Bucket

if TYPE_CHECKING:
    from headwater.client.handshake import Credentials
    from headwater.node.consumer.connection import ConsumerConnection
    from headwater.node.kv.session import KvSession
    from headwater.node.producer.connection import ProducerConnection

# What the connections of a bucket have moved, also those that are gone.
#
# Every connection counts for itself. What it has counted is added here when it ends, so that sums over all connections
# never go back, and nothing is counted twice on the way.


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Totals since the node started."""

    requests: int = 0
    """Key-value requests, of all kinds."""
    sent_messages: int = 0
    """Messages of DCP streams."""
    sent_bytes: int = 0
    rollbacks: int = 0
    """Stream requests that were answered with a rollback."""

    def add_connection(self, connection: ProducerConnection) -> None:
        self.sent_messages += connection.sent_messages
        self.sent_bytes += connection.sent_bytes


ConfigVersion = tuple[int, int]
"""Epoch and revision of a cluster config."""
NO_CONFIG: ConfigVersion = (0, 0)
"""The version of a bucket that is in no cluster."""

LOCK_S_DEFAULT = 15
LOCK_S_MAX = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A document that is locked: the CAS that opens it, and when it opens by itself."""

    cas: Cas
    until_ns: int


@dataclass(slots=True, kw_only=True)
class BucketService:
    """A bucket as sessions see it."""

    bucket: Bucket
    ack_when_durable: bool = True
    """False answers a write at once; a crash may then lose what was answered."""
    locks: dict[tuple[int, CollectionId, bytes], Lock] = field(default_factory=dict)
    dcp_sessions: dict[str, KvSession] = field(default_factory=dict)
    """The DCP connections, by name."""
    upr_connections: dict[str, ProducerConnection] = field(default_factory=dict)
    """Those of the UPR draft, by a name that they were given."""
    replication: Callable[[], Iterable[tuple[str, object]]] = tuple
    """Statistics of the copies that this node keeps."""
    vbucket_numbers: Callable[[], Iterable[tuple[str, object]]] = tuple
    """Statistics of all vbuckets, each a list, for other nodes that show the cluster. Set where somebody counts."""
    config_version: Callable[[], ConfigVersion] = lambda: NO_CONFIG
    """Of the config that the cluster has given the bucket."""
    nodes_login: Callable[[], Credentials | None] = lambda: None
    """How the nodes of the bucket's cluster log in to each other: for whoever coordinates them to know."""
    may_take_over: Callable[[VBucketId], bool] = lambda vbucket: True
    """Whether a takeover may make a vbucket active here: in a cluster, where its config says so."""
    is_waiting: bool = False
    """Nothing is served yet: another node may have taken this one's place, and has not been heard."""
    manifest_commit: int = 0
    """The commit that makes the newest manifest durable."""
    on_change: Callable[[], None] = lambda: None
    """Called when there is something to commit."""
    receivers: dict[VBucketId, ConsumerConnection] = field(default_factory=dict)
    """The vbuckets that are received from other nodes, and by which connection: a copy has one source."""
    consumers: dict[ConsumerConnection, None] = field(default_factory=dict)
    """The connections that receive them, those with no stream included, oldest first."""
    when_at_rest: Callable[[Callable[[], None]], None] = lambda action: action()
    """Runs an action that must not meet a commit, such as a rollback, as soon as none is being written."""
    is_at_rest: Callable[[], bool] = lambda: True
    """Whether no commit is being written and no house-keeping done, so that vbuckets can be taken away at once."""
    ended: Traffic = field(default_factory=Traffic)
    """What was counted by connections that are gone."""
    sync_writes: SyncWrites = field(init=False)

    def __post_init__(self) -> None:
        self.sync_writes = SyncWrites(bucket=self.bucket, on_change=lambda: self.on_change())

    @property
    def name(self) -> str:
        return self.bucket.facts.name

    def producer_connections(self) -> list[ProducerConnection]:
        """All connections that get changes of this bucket."""
        dcp = (session.dcp for session in self.dcp_sessions.values())
        return [*(connection for connection in dcp if connection is not None), *self.upr_connections.values()]

    def consumer_connections(self) -> list[ConsumerConnection]:
        """All connections by which copies of this bucket are received."""
        return list(self.consumers)

    def set_manifest(self, manifest: Manifest) -> int:
        """Take a newer manifest. Returns the commit that makes it durable."""
        self.manifest_commit = self.bucket.set_manifest(manifest)
        self.on_change()
        return self.manifest_commit


@dataclass(slots=True, kw_only=True)
class Service:
    """The node as sessions see it."""

    buckets: dict[str, BucketService]
    users: Users
    throttle: LoginThrottle
    now_ns: Callable[[], int]
    now_s: Callable[[], float]
    """A clock that never goes back, for the throttle."""
    random_bytes: Callable[[int], bytes]
    cluster_config: Callable[[str | None], bytes]
    """The cluster config for a bucket, or for the node."""
    set_cluster_config: Callable[[str | None, ConfigVersion, bytes], bool] = lambda bucket, version, config: False
    """Give this config from now on; False where it is no newer than the one before."""
    server_version: str
    log: Callable[..., None] = lambda message, **about: None
    """A sentence, and what `log_fields` names for it."""
    started_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.started_ns = self.now_ns()
