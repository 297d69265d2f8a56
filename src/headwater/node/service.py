"""What the parts of a node share: its users, and its buckets as sessions, consumers and replicators use them.

The node creates one `Service`, and one `BucketService` per bucket. Sessions, consumers and replicators import this
module, and it imports none of them: connections register themselves here under small protocols. Sans-IO: the time and
random bytes come in as functions, and the commit loop makes the buckets durable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headwater.errors import LocalProtocolError
from headwater.node.auth.users import Users
from headwater.node.durability import SyncWrites
from headwater.node.history import BucketHistory
from headwater.node.options import BucketSettings
from headwater.node.producer.connection import ProducerConnection
from headwater.node.producer.statistics import STREAMS_VIEWED_MAX
from headwater.node.producer.stream import LiveFrames
from headwater.protocol.cluster_config import NO_NODE, NodeAddress, PublishedConfig
from headwater.protocol.manifest import CollectionCreated, Manifest
from headwater.protocol.numbers import Cas, CollectionId, VBucketId, Vbuuid
from headwater.protocol.sasl import Credentials
from headwater.protocol.stream_requests import NEWEST, Dialect
from headwater.store.bucket import Bucket
from headwater.store.checked_engine import Scrubbed
from headwater.store.range_scan import RangeScan
from headwater.store.read_run import DocumentReads
from headwater.store.settling import YOUNG_BYTES_MAX, flush

# --- views of the connections on which this node receives its copies ------------------------------------------------
# Plain data: `consumer.connection` makes a view of itself, `BucketService.consumer_views` collects those of a bucket.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedStreamView:
    """A stream on which this node receives a vbucket."""

    vbucket: int
    opaque: int
    flags: int
    """The flags of the stream request."""
    state: str
    received_seqno: int
    """All changes up to this one have been received; they may not be durable yet."""
    snapshot_start_seqno: int
    snapshot_end_seqno: int
    """The bounds of the current snapshot, or of the last one."""
    is_inside_snapshot: bool
    received_changes: int
    """Changes received by this stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerView:
    """A connection on which this node is the consumer."""

    name: str
    peer: str
    """The address of the producer, or of the proxy in between."""
    is_proxied: bool
    """Whether a proxy connects this node to the producer, as in a takeover."""
    open_s: float
    """How long it has been open."""
    received_bytes: int
    received_changes: int
    """Changes received by all its streams, including those that have ended."""
    acked_bytes: int
    unacked_bytes: int
    """Bytes that flow control counts as received and not acknowledged. Most belong to changes not durable yet."""
    held_bytes: int
    """Bytes received but not decoded yet: many while a drill holds the replicas, close to none otherwise."""
    buffer_bytes_max: int
    """How much the producer may send before it has to wait for acknowledgements."""
    is_held: bool
    """Whether a drill holds the connection, so that it processes nothing."""
    vbuckets: tuple[int, ...]
    """The vbuckets that it receives or has requested, in order."""
    streams: tuple[ReceivedStreamView, ...] | None
    """In the order of their vbuckets. None if there are too many, and the connection was not requested by name."""


# --- range scans ---------------------------------------------------------------------------------------------------
# A scan holds a view of the data, whose disk space can't be reused meanwhile: so scans are few, and none lives long.
# Handlers begin and continue them, a session that ends closes its own, and the listener's tick closes those that are
# too old. Sans-IO: the time comes in as a number.


SCANS_MAX = 32
"""Scans of a bucket at a time. Each takes up to 6 MB for its keys, plus the young changes of its vbucket."""
SCANS_OF_CONNECTION_MAX = 16
SCAN_S_MAX = 180.0
"""How long a scan may take in total; kv_engine's default."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningScan:
    """A scan, with the branch it began on: it can't continue on another branch, where the data differs."""

    scan: RangeScan
    vbucket: VBucketId
    vbuuid: Vbuuid
    owner: object
    """The session that began it. Others that know its id may continue it: clients have several connections."""
    until_s: float


@dataclass(slots=True)
class RangeScans:
    running: dict[bytes, RunningScan] = field(default_factory=dict)

    def is_full(self, owner: object) -> bool:
        own = sum(1 for running in self.running.values() if running.owner is owner)
        return len(self.running) >= SCANS_MAX or own >= SCANS_OF_CONNECTION_MAX

    def end(self, scan_id: bytes) -> None:
        self.running.pop(scan_id).scan.close()

    def end_of(self, owner: object) -> None:
        """End the scans of a session that has ended."""
        for scan_id in [scan_id for scan_id, running in self.running.items() if running.owner is owner]:
            self.end(scan_id)

    def end_all(self) -> None:
        """End all scans, because the bucket is closed."""
        for scan_id in list(self.running):
            self.end(scan_id)

    def tick(self, now_s: float) -> None:
        for scan_id in [scan_id for scan_id, running in self.running.items() if running.until_s <= now_s]:
            self.end(scan_id)


ConfigVersion = tuple[int, int]
"""Epoch and revision of a cluster config."""
NO_CONFIG: ConfigVersion = (0, 0)
"""The version of a bucket that is not in a cluster."""

COMMIT_BYTES_MAX = 4 * 1024 * 1024
"""How large commits get while clients write faster than the disk does."""

Statistics = Iterable[tuple[str, object]]

PAUSE_S_MAX = 2.0
"""How long a node may be suspended and still trust what it knows of its cluster. A failover takes longer."""


class ReceivingConnection(Protocol):
    """A connection on which copies are received from another node (`consumer.connection`)."""

    @property
    def name(self) -> str: ...

    @property
    def streams(self) -> Mapping[VBucketId, object]: ...

    def takeovers(self) -> Collection[VBucketId]:
        """The vbuckets that it receives for a takeover."""
        ...

    def view(self, *, now_s: float, with_streams: bool) -> ConsumerView: ...


class DcpSession(Protocol):
    """A session that has become a DCP connection, as producer or as consumer (`kv.session`)."""

    @property
    def user(self) -> str | None:
        """None if the user was removed."""
        ...

    @property
    def dcp(self) -> ProducerConnection | None: ...

    @property
    def consumer(self) -> ReceivingConnection | None: ...

    def end_dcp(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Traffic:
    """The traffic of a bucket's ended connections since the node started.

    Every connection has its own counters. They are added here when it ends, so that sums over all connections never
    decrease and nothing is counted twice.
    """

    requests: int = 0
    """Key-value requests, of all kinds."""
    sent_messages: int = 0
    """Messages of DCP streams."""
    sent_bytes: int = 0

    def add_connection(self, connection: ProducerConnection) -> None:
        self.sent_messages += connection.sent_messages
        self.sent_bytes += connection.sent_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """The lock of a document: the CAS that unlocks it, and when it expires."""

    cas: Cas
    until_ns: int


@dataclass(slots=True, kw_only=True)
class BucketService:
    """A bucket as sessions use it. The defaults are for a caller that commits by itself, as tests do."""

    bucket: Bucket
    ack_when_durable: bool = True
    """False acknowledges a write immediately; a crash may then lose acknowledged writes."""
    on_change: Callable[[], None] = lambda: None
    """Called when there is something to commit."""
    when_at_rest: Callable[[Callable[[], None]], None] = lambda action: action()
    """Runs an action that must not run during a commit, such as a rollback, as soon as none is being written."""
    is_at_rest: Callable[[], bool] = lambda: True
    """Whether neither a commit nor housekeeping is running, so that vbuckets can be removed immediately."""
    scrubbed: Callable[[], Scrubbed] = Scrubbed
    """The result of the last scrub of the stored data."""
    settings: BucketSettings = field(default_factory=BucketSettings)
    sync_writes: SyncWrites = field(init=False)
    reads: DocumentReads = field(init=False)
    live_frames: LiveFrames = field(init=False)
    history: BucketHistory = field(init=False)
    """What has happened to the vbuckets, and which changes were lost."""
    locks: dict[tuple[int, CollectionId, bytes], Lock] = field(default_factory=dict)
    range_scans: RangeScans = field(default_factory=RangeScans)
    manifest_commit: int = 0
    """The commit that makes the newest manifest durable."""
    ended: Traffic = field(default_factory=Traffic)
    """The counters of connections that have ended."""

    # What the cluster has decided; the bucket's membership sets these.
    config: PublishedConfig | None = None
    """None if the bucket is not in a cluster."""
    this_node: int | None = None
    """The index of this node in the config; None if the config does not have it."""
    is_waiting: bool = False
    """Whether the bucket serves nothing yet: another node may have replaced this one, and was not asked yet."""

    # The connections, which register themselves.
    dcp_sessions: dict[str, DcpSession] = field(default_factory=dict)
    """The DCP connections, by name."""
    upr_connections: dict[str, ProducerConnection] = field(default_factory=dict)
    """The connections of the UPR draft, by the name that the listener gave them."""
    receivers: dict[VBucketId, ReceivingConnection] = field(default_factory=dict)
    """The connection on which each vbucket is received from another node: a copy has one source."""
    consumers: dict[ReceivingConnection, None] = field(default_factory=dict)
    """The connections that receive copies, including those without streams, oldest first."""
    statistics: dict[str, Callable[[], Statistics]] = field(default_factory=dict)
    """`stat` groups that other parts of the node provide: its replicators and its dashboard."""
    node_statistics: dict[str, Callable[[str], Statistics]] = field(default_factory=dict)
    """`stat` groups for other nodes of the bucket's cluster only. Each gets the text after its name."""

    def __post_init__(self) -> None:
        self.sync_writes = SyncWrites(bucket=self.bucket, on_change=self.on_change)
        self.reads = DocumentReads(self.bucket)
        self.live_frames = LiveFrames(self.bucket)
        self.history = BucketHistory(self.bucket)
        self.bucket.max_ttl_s = self.settings.max_ttl_s

    @property
    def name(self) -> str:
        return self.bucket.facts.name

    @property
    def pending_bytes(self) -> int:
        """The bytes that are not durable yet."""
        return self.bucket.undurable_bytes

    @property
    def has_room(self) -> bool:
        """Whether clients that write much may continue. The larger a commit, the longer other writers wait for theirs.

        Young commits take memory until they are settled. The further settling is behind, the smaller the commits
        between two steps of it: clients that write much have to pause, and those that write little do not.
        """
        behind = max(1, self.bucket.young_bytes // YOUNG_BYTES_MAX)
        return self.bucket.pending_bytes < COMMIT_BYTES_MAX // behind

    def producer_connections(self) -> list[ProducerConnection]:
        """All connections that stream changes of this bucket."""
        dcp = (session.dcp for session in self.dcp_sessions.values())
        return [*(connection for connection in dcp if connection is not None), *self.upr_connections.values()]

    def consumer_views(
        self, *, now_s: float, name: str | None = None, streams_max: int = STREAMS_VIEWED_MAX
    ) -> list[ConsumerView]:
        """Views of the connections that receive copies, or of one by name; without streams if they are too many."""
        wanted = [connection for connection in self.consumers if name in (None, connection.name)]
        with_streams = name is not None or sum(len(connection.streams) for connection in wanted) <= streams_max
        return [connection.view(now_s=now_s, with_streams=with_streams) for connection in wanted]

    def set_manifest(self, manifest: Manifest) -> int:
        """Apply a newer manifest. Returns the commit that makes it durable."""
        events = self.bucket.manifest.events_to(manifest)
        flushed = {event.collection_id for event in events if isinstance(event, CollectionCreated)}
        self.locks = {key: lock for key, lock in self.locks.items() if key[1] not in flushed}
        self.manifest_commit = self.bucket.set_manifest(manifest)
        self.on_change()
        return self.manifest_commit

    @property
    def must_have_copies(self) -> bool:
        """Whether durable writes need nodes that the bucket does not have: it should have replicas, but is not in a
        cluster. The active copy alone is never a majority of two or more copies.
        """
        return self.config is None and self.settings.replicas > 0 and not self.settings.durable_alone

    def set_settings(self, settings: BucketSettings) -> int:
        """Apply other settings. Returns the commit that makes them durable."""
        self.settings = settings
        self.bucket.max_ttl_s = settings.max_ttl_s
        commit = self.bucket.put_rows(settings.rows())
        self.on_change()
        return commit

    def flush(self) -> None:
        """Drop all documents of the vbuckets that are active here. Consumers and replicas roll back to 0.

        Every flush calls this, whatever the protocol of its request. Call it at rest. Raises `LocalProtocolError` if
        the bucket's settings do not allow it.
        """
        if not self.settings.flush_enabled:
            # The SDKs match these words.
            raise LocalProtocolError("Flush is disabled for the bucket")
        flush(self.bucket, active_only=True)
        active = self.bucket.vbuckets.active()
        self.history.flushed(active)
        self.sync_writes.evaluate_all()
        for vbucket in active:
            self.on_rolled_back(VBucketId(vbucket))

    def forget_locks(self, vbuckets: Collection[int]) -> None:
        """Drop the locks on documents of these vbuckets, which are gone or empty."""
        self.locks = {key: lock for key, lock in self.locks.items() if key[0] not in vbuckets}

    def on_rolled_back(self, vbucket: VBucketId) -> None:
        """Drop the locks of a vbucket that was rolled back, and end streams that have sent more than it holds."""
        self.forget_locks({vbucket})
        for connection in self.producer_connections():
            connection.on_rolled_back(vbucket)

    # --- the cluster ----------------------------------------------------------------------------------------------

    @property
    def config_version(self) -> ConfigVersion:
        """The version of the bucket's cluster config."""
        return NO_CONFIG if self.config is None else self.config.version

    def other_nodes(self) -> list[NodeAddress]:
        """All nodes of the config except this one."""
        nodes = () if self.config is None else self.config.nodes
        return [node for at, node in enumerate(nodes) if at != self.this_node]

    @property
    def nodes_login(self) -> Credentials | None:
        """The credentials with which the cluster's nodes log in to each other. The coordinator asks for them."""
        return None if self.config is None else self.config.login

    def other_active_node(self, vbucket: VBucketId) -> str | None:
        """The node on which a vbucket is active according to the config; None if that is this node or none."""
        at = NO_NODE if self.config is None or vbucket >= len(self.config.rows) else self.config.rows[vbucket][0]
        return None if self.config is None or at in (NO_NODE, self.this_node) else self.config.names()[at]

    def may_take_over(self, vbucket: VBucketId) -> bool:
        """Whether a takeover may make a vbucket active here. In a cluster, the config has to hand it to this node."""
        return self.config is None or self.config.is_handed_over_to(vbucket, self.this_node)


@dataclass(slots=True, kw_only=True)
class Service:
    """The node as sessions use it."""

    buckets: dict[str, BucketService]
    users: Users
    now_ns: Callable[[], int]
    now_s: Callable[[], float]
    """A clock that never goes back."""
    random_bytes: Callable[[int], bytes]
    cluster_config: Callable[[str | None], bytes]
    """Returns the cluster config for a bucket, or for the node with None."""
    set_cluster_config: Callable[[str | None, ConfigVersion, bytes], bool] = lambda bucket, version, config: False
    """Sets the config for a bucket, or for the node with None. Returns False if it is no newer than the current one."""
    server_version: str
    dialect: Dialect = NEWEST
    """The Couchbase version that the node imitates."""
    log: Callable[..., None] = lambda message, **about: None
    """Logs a sentence with fields of `log_fields`."""
    on_pause: Callable[[], None] = lambda: None
    """Called after the process was suspended for more than `PAUSE_S_MAX`, before it handles waiting requests."""
    started_ns: int = field(init=False)
    awake_s: float = field(init=False)
    """When the process was last seen running."""

    def __post_init__(self) -> None:
        self.started_ns = self.now_ns()
        self.awake_s = self.now_s()

    def notice_pause(self) -> None:
        """Detect that the process was suspended: stopped by a signal, swapped out, or on a machine that was frozen.

        The cluster may have replaced this node meanwhile. Call this at least every second, and before handling
        received requests: when the process resumes, waiting requests are read before any timer runs.
        """
        now_s = self.now_s()
        has_stood_still, self.awake_s = now_s - self.awake_s > PAUSE_S_MAX, now_s
        if has_stood_still:
            self.on_pause()

    @property
    def pending_bytes(self) -> int:
        """The bytes of all buckets that are not durable yet."""
        return sum(bucket.pending_bytes for bucket in self.buckets.values())
