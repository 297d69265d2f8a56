"""The node's numbers for Prometheus. A scrape reads what the last tick has taken; nothing is counted for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from headwater.node.dashboard.samples import BucketSampler
from headwater.node.dashboard.source import CONNECTIONS_SHOWN_MAX, ConnectionNumbers, NodeSource
from headwater.protocol.messages.dcp_streams import VBucketState

PREFIX = "headwater_node_"
REPLICATION_NAME = "replication:"
"""How the names of connections begin by which other nodes of the cluster keep their copies up to date. It goes on with
`FROM->TO:BUCKET`."""

Family = CounterMetricFamily | GaugeMetricFamily
Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values of the family's own label, if it has one, and the number."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A family of metrics of a bucket, and where its numbers come from."""

    name: str
    documentation: str
    read: Callable[[BucketSampler], Samples]
    label: str | None = None

    def make(self) -> Family:
        make = CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily
        return make(PREFIX + self.name, self.documentation, labels=("bucket", *((self.label,) if self.label else ())))


def _one(read: Callable[[BucketSampler], float]) -> Callable[[BucketSampler], Samples]:
    return lambda sampler: [((), read(sampler))]


def _by_state(read: Callable[[BucketSampler, VBucketState], float]) -> Callable[[BucketSampler], Samples]:
    return lambda sampler: [((state.name.lower(),), read(sampler, state)) for state in VBucketState]


def _documents(sampler: BucketSampler, state: VBucketState) -> float:
    return float(sampler.live.counts[sampler.bucket.vbuckets.states == state].sum())


def _vbuckets(sampler: BucketSampler, state: VBucketState) -> float:
    return float((sampler.bucket.vbuckets.states == state).sum())


def _by_connection(read: Callable[[ConnectionNumbers], float]) -> Callable[[BucketSampler], Samples]:
    """Of the connections furthest behind, so that a crowd of them makes no crowd of time series."""
    return lambda sampler: [((one.name,), read(one)) for one in furthest_behind(sampler.connections)]


def _replication(sampler: BucketSampler) -> Samples:
    return [
        ((connection.name.removesuffix(f":{sampler.name}").rpartition("->")[2],), connection.backlog_items)
        for connection in sampler.connections
        if connection.name.startswith(REPLICATION_NAME)
    ]


def _unsettled_bytes(sampler: BucketSampler) -> float:
    return sampler.bucket.young.total_bytes


def furthest_behind(connections: Sequence[ConnectionNumbers]) -> list[ConnectionNumbers]:
    """As many connections as are shown, those with the most to get first."""
    return sorted(connections, key=lambda one: (-one.backlog_items, one.name))[:CONNECTIONS_SHOWN_MAX]


KINDS = (
    Kind(
        "documents",
        "Documents, without the deleted, by the state of their vbuckets; with millions of them some seconds old.",
        _by_state(_documents),
        "state",
    ),
    Kind("vbuckets", "Vbuckets that are here, by state.", _by_state(_vbuckets), "state"),
    Kind("changes_total", "Seqnos given out, or received from another node.", _one(lambda s: s.totals.changes)),
    Kind("requests_total", "Key-value requests of all kinds.", _one(lambda s: s.totals.requests)),
    Kind("commits_total", "Commits made durable.", _one(lambda s: s.totals.commits)),
    Kind("pending_changes", "Changes that no commit has yet.", _one(lambda s: s.bucket.pending.count)),
    Kind("unsettled_bytes", "Durable changes that are still held in memory.", _one(_unsettled_bytes)),
    Kind("disk_bytes", "What the bucket takes on disk.", _one(lambda s: s.disk_bytes)),
    Kind("dcp_connections", "Connections that get changes.", _one(lambda s: len(s.connections))),
    Kind("dcp_streams", "Streams that are open.", _one(lambda s: sum(one.num_streams for one in s.connections))),
    Kind("dcp_messages_total", "Messages sent by streams.", _one(lambda s: s.totals.messages)),
    Kind("dcp_sent_bytes_total", "Bytes sent to connections that get changes.", _one(lambda s: s.totals.sent_bytes)),
    Kind("dcp_backlog_seqnos", "Seqnos that all streams together have still to get.", _one(lambda s: s.backlog)),
    Kind(
        "dcp_connection_backlog_seqnos",
        f"Seqnos that a connection's streams have still to get; of the {CONNECTIONS_SHOWN_MAX} furthest behind.",
        _by_connection(lambda one: one.backlog_items),
        "connection",
    ),
    Kind(
        "dcp_connection_unacked_bytes",
        "Bytes sent that the consumer has not acknowledged.",
        _by_connection(lambda one: one.unacked_bytes),
        "connection",
    ),
    Kind(
        "dcp_connection_window_bytes",
        "The consumer's flow-control buffer; 0 for none.",
        _by_connection(lambda one: one.max_buffer_bytes),
        "connection",
    ),
    Kind("replication_lag_seqnos", "Seqnos that another node's copies are behind.", _replication, "replica"),
    Kind("rollbacks_total", "Vbuckets that were taken back.", _one(lambda s: s.watch.rolled_back_total)),
    Kind(
        "rollback_answers_total",
        "Stream requests answered with a rollback.",
        _one(lambda s: s.totals.rollback_answers),
    ),
)


class NodeCollector:
    """What a registry collects: the node, and the buckets that the one who asks may see."""

    def __init__(self, source: NodeSource, samplers: Sequence[BucketSampler]) -> None:
        self._source = source
        self._samplers = samplers

    def collect(self) -> Iterator[Family]:
        info = GaugeMetricFamily(f"{PREFIX}info", "Always 1; the label says what runs.", labels=("version",))
        info.add_metric((self._source.version,), 1)
        yield info
        yield GaugeMetricFamily(f"{PREFIX}ready", "1 once every bucket is open.", value=int(self._source.is_ready))
        yield GaugeMetricFamily(
            f"{PREFIX}uptime_seconds", "Time since the node started.", value=self._source.uptime_s()
        )
        for kind in KINDS:
            family = kind.make()
            for sampler in self._samplers:
                for own, number in kind.read(sampler):
                    family.add_metric((sampler.name, *own), number)
            yield family


def metrics_text(source: NodeSource, samplers: Sequence[BucketSampler], *, accept: str) -> tuple[bytes, str]:
    """All metrics, in the form that the one who asks prefers, and the name of that form."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(source, samplers))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
