"""What the parts of a node share: its buckets as sessions, consumers and replicators see them, its users, its limits.

The node builds these once from their collaborators. Everything above imports this module, and it imports none of that:
connections register themselves here under small protocols. Sans-IO: the time and random bytes come in as functions, and
the commit loop makes the buckets durable.
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

# --- what can be seen of the connections by which this node receives its copies ------------------------------------
# Plain data: `consumer.connection` makes a view of itself, `BucketService.consumer_views` gathers those of a bucket.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedStreamView:
    """A vbucket that is received."""

    vbucket: int
    opaque: int
    flags: int
    """Those it was asked for with."""
    state: str
    received_seqno: int
    """Everything up to here has come; it may not be durable yet."""
    snapshot_start_seqno: int
    snapshot_end_seqno: int
    """Of the snapshot that is being received, or was last."""
    is_inside_snapshot: bool
    received_changes: int
    """By this stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerView:
    """A connection on which this node is the consumer."""

    name: str
    peer: str
    """The producer's address, or that of the proxy in between."""
    is_proxied: bool
    """Whether a proxy joins this node to the producer, as in a takeover."""
    open_s: float
    """How long it has been open."""
    received_bytes: int
    received_changes: int
    """By its streams, also by those that have ended."""
    acked_bytes: int
    unacked_bytes: int
    """What flow control counts of the changes that were taken and not acknowledged: mostly they are not durable yet."""
    held_bytes: int
    """What has come and was not looked into. It is much while replicas are held back, and next to nothing else."""
    buffer_bytes_max: int
    """What the producer may send before it has to wait."""
    is_held: bool
    """For a drill: nothing is taken in."""
    vbuckets: tuple[int, ...]
    """Those it receives, or has asked for, in order."""
    streams: tuple[ReceivedStreamView, ...] | None
    """In the order of their vbuckets. None where there are too many to give them unasked."""


# --- range scans ---------------------------------------------------------------------------------------------------
# A scan holds a view of the data, and what it needs is not given back to the disk meanwhile: so scans are few, and none
# lives long. Handlers begin and continue them, a session that ends takes its own along, and the listener's tick ends
# those that are too old. Sans-IO: the time comes in as a number.


SCANS_MAX = 32
"""Of a bucket, at a time. Each takes up to 6 MB for its keys, and what was young of its vbucket."""
SCANS_OF_CONNECTION_MAX = 16
SCAN_S_MAX = 180.0
"""How long a scan may take in all; kv_engine's default."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunningScan:
    """A scan, and what it began with: on another branch of history it would be of something else."""

    scan: RangeScan
    vbucket: VBucketId
    vbuuid: Vbuuid
    owner: object
    """The session that has begun it. Others that know its id may continue it: clients have several connections."""
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
        """The session is gone."""
        for scan_id in [scan_id for scan_id, running in self.running.items() if running.owner is owner]:
            self.end(scan_id)

    def end_all(self) -> None:
        """The bucket is closed."""
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
"""How large commits get while clients write more than the disk takes."""

Statistics = Iterable[tuple[str, object]]

PAUSE_S_MAX = 2.0
"""How long a node may stand still and take for granted what it knows of its cluster. A failover takes longer."""


class ReceivingConnection(Protocol):
    """A connection by which copies are received from another node (`consumer.connection`)."""

    @property
    def name(self) -> str: ...

    @property
    def streams(self) -> Mapping[VBucketId, object]: ...

    def takeovers(self) -> Collection[VBucketId]:
        """The vbuckets that it receives in order to take them over."""
        ...

    def view(self, *, now_s: float, with_streams: bool) -> ConsumerView: ...


class DcpSession(Protocol):
    """A session that has become a DCP connection, in one of the two directions (`kv.session`)."""

    @property
    def user(self) -> str | None:
        """None where the user is gone."""
        ...

    @property
    def dcp(self) -> ProducerConnection | None: ...

    @property
    def consumer(self) -> ReceivingConnection | None: ...

    def end_dcp(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Traffic:
    """What the connections of a bucket that have ended have moved since the node started.

    Every connection counts for itself. What it has counted is added here when it ends, so that sums over all
    connections never go back, and nothing is counted twice on the way.
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
    """A document that is locked: the CAS that opens it, and when it opens by itself."""

    cas: Cas
    until_ns: int


@dataclass(slots=True, kw_only=True)
class BucketService:
    """A bucket as sessions see it. The defaults are for a caller that commits by itself, as tests do."""

    bucket: Bucket
    ack_when_durable: bool = True
    """False answers a write at once; a crash may then lose what was answered."""
    on_change: Callable[[], None] = lambda: None
    """Called when there is something to commit."""
    when_at_rest: Callable[[Callable[[], None]], None] = lambda action: action()
    """Runs an action that must not meet a commit, such as a rollback, as soon as none is being written."""
    is_at_rest: Callable[[], bool] = lambda: True
    """Whether neither a commit nor housekeeping is under way, so that vbuckets can be removed at once."""
    scrubbed: Callable[[], Scrubbed] = Scrubbed
    """The last pass over what is stored, in search of damage."""
    settings: BucketSettings = field(default_factory=BucketSettings)
    sync_writes: SyncWrites = field(init=False)
    reads: DocumentReads = field(init=False)
    live_frames: LiveFrames = field(init=False)
    history: BucketHistory = field(init=False)
    """What has happened to the vbuckets, and what was lost by it."""
    locks: dict[tuple[int, CollectionId, bytes], Lock] = field(default_factory=dict)
    range_scans: RangeScans = field(default_factory=RangeScans)
    manifest_commit: int = 0
    """The commit that makes the newest manifest durable."""
    ended: Traffic = field(default_factory=Traffic)
    """What was counted by connections that are gone."""

    # What the cluster has decided; the bucket's membership sets these.
    config: PublishedConfig | None = None
    """None where the bucket is not in a cluster."""
    this_node: int | None = None
    """Which of the config's nodes this is; None where it was left out."""
    is_waiting: bool = False
    """Nothing is served yet: another node may have taken this one's place, and has not been asked."""

    # The connections, which register themselves.
    dcp_sessions: dict[str, DcpSession] = field(default_factory=dict)
    """The DCP connections, by name."""
    upr_connections: dict[str, ProducerConnection] = field(default_factory=dict)
    """Those of the UPR draft, by a name that they were given."""
    receivers: dict[VBucketId, ReceivingConnection] = field(default_factory=dict)
    """The vbuckets that are received from other nodes, and by which connection: a copy has one source."""
    consumers: dict[ReceivingConnection, None] = field(default_factory=dict)
    """The connections that receive them, those with no stream included, oldest first."""
    statistics: dict[str, Callable[[], Statistics]] = field(default_factory=dict)
    """Groups of `stat` that other parts of the node offer: of its replicators, and of its dashboard."""
    node_statistics: dict[str, Callable[[str], Statistics]] = field(default_factory=dict)
    """Groups that are for other nodes of the bucket's cluster only, each with what stands behind its name."""

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
        """What is not durable yet."""
        return self.bucket.undurable_bytes

    @property
    def has_room(self) -> bool:
        """Whether those who write much may go on. The larger a commit, the longer all others wait for theirs.

        Commits are young until they are settled, and take memory. The further settling is behind, the less comes in
        with each commit between two steps of it: a rest for those who write much, and none for those who write little.
        """
        behind = max(1, self.bucket.young_bytes // YOUNG_BYTES_MAX)
        return self.bucket.pending_bytes < COMMIT_BYTES_MAX // behind

    def producer_connections(self) -> list[ProducerConnection]:
        """All connections that get changes of this bucket."""
        dcp = (session.dcp for session in self.dcp_sessions.values())
        return [*(connection for connection in dcp if connection is not None), *self.upr_connections.values()]

    def consumer_views(
        self, *, now_s: float, name: str | None = None, streams_max: int = STREAMS_VIEWED_MAX
    ) -> list[ConsumerView]:
        """The connections that receive copies, or the one named; with their streams unless they are too many."""
        wanted = [connection for connection in self.consumers if name in (None, connection.name)]
        with_streams = name is not None or sum(len(connection.streams) for connection in wanted) <= streams_max
        return [connection.view(now_s=now_s, with_streams=with_streams) for connection in wanted]

    def set_manifest(self, manifest: Manifest) -> int:
        """Use a newer manifest from now on. Returns the commit that makes it durable."""
        events = self.bucket.manifest.events_to(manifest)
        flushed = {event.collection_id for event in events if isinstance(event, CollectionCreated)}
        self.locks = {key: lock for key, lock in self.locks.items() if key[1] not in flushed}
        self.manifest_commit = self.bucket.set_manifest(manifest)
        self.on_change()
        return self.manifest_commit

    @property
    def must_have_copies(self) -> bool:
        """Whether a durable write needs nodes that the bucket does not have: it is not in a cluster, and is to have
        replicas. A majority of two copies or more is never the active one alone.
        """
        return self.config is None and self.settings.replicas > 0 and not self.settings.durable_alone

    def set_settings(self, settings: BucketSettings) -> int:
        """Use other settings from now on. Returns the commit that makes them durable."""
        self.settings = settings
        self.bucket.max_ttl_s = settings.max_ttl_s
        commit = self.bucket.put_rows(settings.rows())
        self.on_change()
        return commit

    def flush(self) -> None:
        """Drop all documents that are active here. Consumers roll back to 0, and so do the replicas.

        Every flush comes here, over whichever protocol it was asked for. Call it at rest. Raises `LocalProtocolError`
        unless the bucket's settings allow it.
        """
        if not self.settings.flush_enabled:
            # The SDKs look for these words.
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
        """Of the config that the cluster has given the bucket."""
        return NO_CONFIG if self.config is None else self.config.version

    def other_nodes(self) -> list[NodeAddress]:
        """All nodes of the config but this one."""
        nodes = () if self.config is None else self.config.nodes
        return [node for at, node in enumerate(nodes) if at != self.this_node]

    @property
    def nodes_login(self) -> Credentials | None:
        """How the nodes of the bucket's cluster log in to each other: for the coordinator to know."""
        return None if self.config is None else self.config.login

    def other_active_node(self, vbucket: VBucketId) -> str | None:
        """The node that has a vbucket active by the config, where that is not this one."""
        at = NO_NODE if self.config is None or vbucket >= len(self.config.rows) else self.config.rows[vbucket][0]
        return None if self.config is None or at in (NO_NODE, self.this_node) else self.config.names()[at]

    def may_take_over(self, vbucket: VBucketId) -> bool:
        """Whether a takeover may make a vbucket active here: in a cluster, where its config says so."""
        return self.config is None or self.config.is_handed_over_to(vbucket, self.this_node)


@dataclass(slots=True, kw_only=True)
class Service:
    """The node as sessions see it."""

    buckets: dict[str, BucketService]
    users: Users
    now_ns: Callable[[], int]
    now_s: Callable[[], float]
    """A clock that never goes back."""
    random_bytes: Callable[[int], bytes]
    cluster_config: Callable[[str | None], bytes]
    """The cluster config for a bucket, or for the node."""
    set_cluster_config: Callable[[str | None, ConfigVersion, bytes], bool] = lambda bucket, version, config: False
    """Give this config from now on; False where it is no newer than the one before."""
    server_version: str
    dialect: Dialect = NEWEST
    """The version that the node speaks as."""
    log: Callable[..., None] = lambda message, **about: None
    """A sentence, and what `log_fields` names for it."""
    on_pause: Callable[[], None] = lambda: None
    """Called when the process has stood still for `PAUSE_S_MAX`, before it handles what has come meanwhile."""
    started_ns: int = field(init=False)
    awake_s: float = field(init=False)
    """When the process was last seen running."""

    def __post_init__(self) -> None:
        self.started_ns = self.now_ns()
        self.awake_s = self.now_s()

    def stay_awake(self) -> None:
        """Detect that the process stood still: stopped by a signal, swapped out, or on a machine that was frozen.

        Its cluster may have gone on without it meanwhile. Call it every second or more often, and before what has come
        is handled: when the process wakes up, requests that have waited come before any timer.
        """
        now_s = self.now_s()
        has_stood_still, self.awake_s = now_s - self.awake_s > PAUSE_S_MAX, now_s
        if has_stood_still:
            self.on_pause()

    @property
    def pending_bytes(self) -> int:
        """What is not durable yet, of all buckets."""
        return sum(bucket.pending_bytes for bucket in self.buckets.values())
