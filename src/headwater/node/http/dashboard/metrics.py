"""The node's numbers for Prometheus.

The dashboard answers `/metrics` with them. A scrape reads what the last tick has taken; nothing is counted for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from headwater.metric_kinds import MetricFamily, MetricKind, MetricSamples, collect_metrics, one_number
from headwater.node.http.dashboard.samples import BucketSampler
from headwater.node.http.limits import CONNECTIONS_SHOWN_MAX
from headwater.node.node_state import NodeState
from headwater.node.producer.statistics import ConnectionStatistics
from headwater.protocol.messages.dcp_streams import VBucketState

PREFIX = "headwater_node_"
REPLICATION_NAME = "replication:"
"""How the names of connections begin by which other nodes of the cluster keep their copies up to date. It goes on with
`FROM->TO:BUCKET`."""


def _by_state(read: Callable[[BucketSampler, VBucketState], float]) -> Callable[[BucketSampler], MetricSamples]:
    return lambda sampler: [((state.name.lower(),), float(read(sampler, state))) for state in VBucketState]


def _by_connection(read: Callable[[ConnectionStatistics], float]) -> Callable[[BucketSampler], MetricSamples]:
    """Of the connections furthest behind, so that a crowd of them makes no crowd of time series."""
    return lambda sampler: [((one.name,), read(one)) for one in sampler.furthest_behind()]


def _replication(sampler: BucketSampler) -> MetricSamples:
    return [
        ((connection.name.removesuffix(f":{sampler.name}").rpartition("->")[2],), connection.backlog_items)
        for connection in sampler.connections
        if connection.name.startswith(REPLICATION_NAME)
    ]


KINDS: tuple[MetricKind[BucketSampler], ...] = (
    MetricKind(
        "documents",
        "Documents, without the deleted, by the state of their vbuckets; with millions of them some seconds old.",
        _by_state(lambda s, state: s.live.counts[s.bucket.vbuckets.states == state].sum()),
        "state",
    ),
    MetricKind(
        "vbuckets",
        "Vbuckets that are here, by state.",
        _by_state(lambda s, state: (s.bucket.vbuckets.states == state).sum()),
        "state",
    ),
    MetricKind(
        "changes_total",
        "Changes of documents in vbuckets that are active here.",
        one_number(lambda s: s.totals.changes),
    ),
    MetricKind(
        "system_events_total",
        "Collections and scopes that came or went, once for each vbucket that is active here.",
        one_number(lambda s: s.totals.system_events),
    ),
    MetricKind(
        "received_changes_total",
        "Seqnos that copies here have got from the nodes that have them active.",
        one_number(lambda s: s.totals.received),
    ),
    MetricKind("requests_total", "Key-value requests of all kinds.", one_number(lambda s: s.totals.requests)),
    MetricKind("commits_total", "Commits made durable.", one_number(lambda s: s.totals.commits)),
    MetricKind("pending_changes", "Changes that no commit has yet.", one_number(lambda s: s.bucket.pending.count)),
    MetricKind(
        "unsettled_bytes",
        "Durable changes that are still held in memory.",
        one_number(lambda s: s.bucket.young.total_bytes),
    ),
    MetricKind("disk_bytes", "What the bucket takes on disk.", one_number(lambda s: s.disk_bytes)),
    MetricKind(
        "damaged_vbuckets",
        "Vbuckets that are stopped because what is stored of them is not what was written.",
        one_number(lambda s: len(s.bucket.vbuckets.damage)),
    ),
    MetricKind(
        "scrub_completed_timestamp_seconds",
        "When the last pass over all stored data ended; 0 for never.",
        one_number(lambda s: s.scrubbed().completed_ns / 1e9),
    ),
    MetricKind(
        "scrub_findings",
        "Rows that the last pass found damaged.",
        one_number(lambda s: s.scrubbed().findings),
    ),
    MetricKind("dcp_connections", "Connections that get changes.", one_number(lambda s: len(s.connections))),
    MetricKind(
        "dcp_streams", "Streams that are open.", one_number(lambda s: sum(one.num_streams for one in s.connections))
    ),
    MetricKind("dcp_messages_total", "Messages sent by streams.", one_number(lambda s: s.totals.messages)),
    MetricKind(
        "dcp_sent_bytes_total", "Bytes sent to connections that get changes.", one_number(lambda s: s.totals.sent_bytes)
    ),
    MetricKind(
        "dcp_backlog_seqnos", "Seqnos that all streams together have still to get.", one_number(lambda s: s.backlog)
    ),
    MetricKind(
        "dcp_connection_backlog_seqnos",
        f"Seqnos that a connection's streams have still to get; of the {CONNECTIONS_SHOWN_MAX} furthest behind.",
        _by_connection(lambda one: one.backlog_items),
        "connection",
    ),
    MetricKind(
        "dcp_connection_unacked_bytes",
        "Bytes sent that the consumer has not acknowledged.",
        _by_connection(lambda one: one.unacked_bytes),
        "connection",
    ),
    MetricKind(
        "dcp_connection_window_bytes",
        "The consumer's flow-control buffer; 0 for none.",
        _by_connection(lambda one: one.max_buffer_bytes),
        "connection",
    ),
    MetricKind("replication_lag_seqnos", "Seqnos that another node's copies are behind.", _replication, "replica"),
    MetricKind(
        "rollbacks_total",
        "Vbuckets that have lost changes by a failover or a drill, or given them up as copies; kept over restarts.",
        one_number(lambda s: s.events.totals.rolled_back),
    ),
    MetricKind(
        "lost_changes_total",
        "Changes known to be lost by failovers, crashes and drills: at least so many; kept over restarts.",
        one_number(lambda s: s.events.totals.lost_changes),
    ),
    MetricKind(
        "unknown_loss_vbuckets",
        "Vbuckets that were promoted without it being known what they lost.",
        one_number(lambda s: s.events.unknown_vbuckets),
    ),
    MetricKind(
        "rollback_answers_total",
        "Stream requests of consumers answered with a rollback; kept over restarts.",
        one_number(lambda s: s.events.totals.answers),
    ),
)


class NodeCollector:
    """What a registry collects: the node, and the buckets that the user may see."""

    def __init__(self, node: NodeState, samplers: Sequence[BucketSampler]) -> None:
        self._node = node
        self._samplers = samplers

    def collect(self) -> Iterator[MetricFamily]:
        info = GaugeMetricFamily(f"{PREFIX}info", "Always 1; the label says what runs.", labels=("version",))
        info.add_metric((self._node.server_version,), 1)
        yield info
        yield GaugeMetricFamily(f"{PREFIX}ready", "1 once every bucket is open.", value=int(self._node.is_ready))
        yield GaugeMetricFamily(f"{PREFIX}uptime_seconds", "Time since the node started.", value=self._node.uptime_s())
        sources = [((sampler.name,), sampler) for sampler in self._samplers]
        yield from collect_metrics(KINDS, sources, prefix=PREFIX, labels=("bucket",))


def metrics_text(node: NodeState, samplers: Sequence[BucketSampler], *, accept: str) -> tuple[bytes, str]:
    """All metrics, in the form that the client prefers, and the name of that form."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(node, samplers))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type
