"""The dashboard of a node: the ticks that feed it, and the handlers of its page, its live feed and its metrics.

`app` has the routes and checks who asks; `HttpServer` starts and closes it with the node. Once a second a
`BucketSampler` takes the numbers of each bucket, and viewers and scrapes are given what the last tick has taken. The
dashboard only reads the node: no handler here changes anything.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from headwater.findings import Verdict
from headwater.http.requests import Json, PageFiles
from headwater.log_fields import LogEvent, fields
from headwater.metric_kinds import MetricFamily, MetricKind, MetricSamples, collect_metrics, one_number
from headwater.node.auth.users import Action
from headwater.node.http.call import Call, Logins, Sessions, may_see
from headwater.node.http.dashboard.browser import BucketBrowser
from headwater.node.http.dashboard.health import BucketVerdict, Examined, health_of
from headwater.node.http.dashboard.landing import Landings
from headwater.node.http.dashboard.live_feed import TICK_S, LiveFeed
from headwater.node.http.dashboard.samples import CONNECTIONS_SHOWN_MAX, BucketSampler
from headwater.node.producer.statistics import ConnectionStatistics
from headwater.protocol.messages.dcp_streams import VBucketState

if TYPE_CHECKING:
    from headwater.node.node_state import NodeState

# --- metrics -------------------------------------------------------------------------------------------------------
# The dashboard answers `/metrics` with them. A scrape reads what the last tick has taken; nothing is counted for it.


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


def _number(name: str, text: str, read: Callable[[BucketSampler], float]) -> MetricKind[BucketSampler]:
    """A metric that is one number of a bucket."""
    return MetricKind(name, text, one_number(read))


KINDS: tuple[MetricKind[BucketSampler], ...] = (
    MetricKind(
        "documents",
        "Documents that are not deleted, by the state of their vbuckets; with millions of documents, some seconds old.",
        _by_state(lambda s, state: s.live.counts[s.bucket.vbuckets.states == state].sum()),
        "state",
    ),
    MetricKind(
        "vbuckets",
        "Vbuckets on this node, by state.",
        _by_state(lambda s, state: (s.bucket.vbuckets.states == state).sum()),
        "state",
    ),
    _number("changes_total", "Changes of documents in vbuckets that are active here.", lambda s: s.totals.changes),
    _number(
        "system_events_total",
        "Collections and scopes that were created or dropped, once for each vbucket that is active here.",
        lambda s: s.totals.system_events,
    ),
    _number(
        "received_changes_total",
        "Seqnos that the copies on this node have received from the active copies.",
        lambda s: s.totals.received,
    ),
    _number(
        "unreachable_nodes",
        "Other nodes of the cluster that this node can't reach.",
        lambda s: len(s.cluster.unreachable()),
    ),
    _number(
        "unserved_vbuckets",
        "Vbuckets of the cluster with no active copy on a node that this node can reach.",
        lambda s: 0 if (copies := s.copies()) is None else copies.unserved,
    ),
    _number(
        "missing_replicas",
        "Replicas of the cluster that no node keeps.",
        lambda s: 0 if (copies := s.copies()) is None else copies.replicas_missing,
    ),
    _number("requests_total", "Key-value requests of all kinds.", lambda s: s.totals.requests),
    _number("commits_total", "Commits made durable.", lambda s: s.totals.commits),
    _number("pending_changes", "Changes that are not committed yet.", lambda s: s.bucket.pending_changes),
    _number("unsettled_bytes", "Durable changes that are still held in memory.", lambda s: s.bucket.young_bytes),
    _number("disk_bytes", "Size of the bucket on disk.", lambda s: s.disk_bytes),
    _number(
        "damaged_vbuckets",
        "Vbuckets that are stopped because their stored data is damaged.",
        lambda s: len(s.bucket.vbuckets.damage),
    ),
    _number(
        "scrub_completed_timestamp_seconds",
        "When the last pass over all stored data ended; 0 for never.",
        lambda s: s.scrubbed().completed_ns / 1e9,
    ),
    _number("scrub_findings", "Rows that the last pass found damaged.", lambda s: s.scrubbed().findings),
    _number("dcp_connections", "Connections that receive changes.", lambda s: len(s.connections)),
    _number("dcp_streams", "Open streams.", lambda s: sum(one.num_streams for one in s.connections)),
    _number("dcp_messages_total", "Messages sent by streams.", lambda s: s.totals.messages),
    _number("dcp_sent_bytes_total", "Bytes sent to connections that receive changes.", lambda s: s.totals.sent_bytes),
    _number("dcp_backlog_seqnos", "Seqnos that all streams together have not sent yet.", lambda s: s.backlog),
    MetricKind(
        "dcp_connection_backlog_seqnos",
        f"Seqnos that a connection's streams have not sent yet; for the {CONNECTIONS_SHOWN_MAX} furthest behind.",
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
    MetricKind("replication_lag_seqnos", "Seqnos by which another node's copies are behind.", _replication, "replica"),
    _number(
        "rollbacks_total",
        "Vbuckets that lost changes in a failover or a drill, or discarded them as copies; kept across restarts.",
        lambda s: s.events.totals.rolled_back,
    ),
    _number(
        "lost_changes_total",
        "Changes known to be lost in failovers, crashes and drills (a lower bound); kept across restarts.",
        lambda s: s.events.totals.lost_changes,
    ),
    _number(
        "unknown_loss_vbuckets",
        "Vbuckets that were promoted with an unknown loss.",
        lambda s: s.events.unknown_vbuckets,
    ),
    _number(
        "rollback_answers_total",
        "Stream requests of consumers that were answered with a rollback; kept across restarts.",
        lambda s: s.events.totals.answers,
    ),
)


class NodeCollector:
    """What a registry collects: the node, and the buckets that the user may see."""

    def __init__(self, node: NodeState, samplers: Sequence[BucketSampler]) -> None:
        self._node = node
        self._samplers = samplers

    def collect(self) -> Iterator[MetricFamily]:
        info = GaugeMetricFamily(f"{PREFIX}info", "Always 1; the label has the version.", labels=("version",))
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


# --- the dashboard --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

TICK_SHARE_MAX = 0.05
TICK_S_MAX = 5.0
"""Which part of its time the node may spend on ticks before they become fewer, and how far apart they get."""
PEERS_IDLE_TICKS = 3
"""The other nodes of the cluster are asked at every tick while there are viewers, and else once in so many. What they
last had is the measure of what their loss loses."""
PEERS_S_MAX = 0.2
"""How long a tick waits for their answers, so that what is shown of all nodes is of about the same moment."""


class Dashboard:
    """All that the page shows. `start` and `close` are called in the node's event loop."""

    def __init__(self, node: NodeState, logins: Logins, sessions: Sessions) -> None:
        self._node = node
        self._logins = logins
        self._sessions = sessions
        self._samplers: dict[str, BucketSampler] = {}
        self._landings = Landings(node.options.landing_urls)
        self._feed = LiveFeed(node, self._landings)
        self.browser = BucketBrowser(self._samplers)
        self.files = PageFiles(__package__)
        self._tasks: list[asyncio.Task[None]] = []

    # --- ticks ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to take numbers: the node serves from now on."""
        for name in self._node.bucket_names():
            self.watch(name)
        self._tasks = [asyncio.create_task(self._tick_forever()), asyncio.create_task(self._landings.watch())]

    def watch(self, bucket: str) -> None:
        self._samplers[bucket] = BucketSampler(self._node, bucket)

    async def forget(self, bucket: str) -> None:
        """A bucket is dropped. When this returns, nothing here reads it any more."""
        sampler = self._samplers.pop(bucket, None)
        if sampler is not None:
            sampler.cluster.close()
        self._feed.ticks.notify()
        await self.browser.finish_searches()

    def close(self) -> None:
        """End what would never end by itself: the node stops."""
        self._feed.close()
        for task in self._tasks:
            task.cancel()
        for sampler in self._samplers.values():
            sampler.cluster.close()
            sampler.keep_events()

    async def _tick_forever(self) -> None:
        took_s = 0.0
        for tick in count():
            # With so many streams that a look at them takes long, it is taken less often. What counts is the work: on a
            # machine that is busy with other things everything takes long.
            await asyncio.sleep(min(TICK_S_MAX, max(TICK_S, took_s / TICK_SHARE_MAX)))
            began_s = time.thread_time()
            try:
                for sampler in list(self._samplers.values()):
                    sampler.sample()
                    if self._feed.viewers or tick % PEERS_IDLE_TICKS == 0:
                        sampler.cluster.ask()
            except Exception:
                # The node goes on without its dashboard, and the next tick may be better.
                about = fields(event=LogEvent.DASHBOARD_FAILED)
                logger.exception("the dashboard could not take the numbers of the node", extra=about)
            took_s = time.thread_time() - began_s
            clusters = [sampler.cluster for sampler in self._samplers.values()]
            await asyncio.gather(*(cluster.wait_for_answers(within_s=PEERS_S_MAX) for cluster in clusters))
            self._feed.ticks.notify()

    # --- handlers -------------------------------------------------------------------------------------------------

    async def stream_live(self, call: Call) -> Response:
        name = call.path("bucket")
        sampler = self._samplers[name]

        def still_allowed() -> bool:
            # The bucket may have been dropped, and another one made with its name.
            return self._samplers.get(name) is sampler and self._sessions.may_see(call.request, name)

        return self._feed.stream(call.user, sampler, still_allowed)

    async def show_health(self, call: Call) -> Response:
        """The verdict that is on top of every page."""
        return Json(self._verdict(self._samplers[call.path("bucket")]).show())

    async def show_node_health(self, call: Call) -> Response:
        """The verdicts on all buckets that the user may use, and the worst of them."""
        users = self._node.users
        samplers = [one for name, one in self._samplers.items() if users.may(call.user, Action.USE, name)]
        verdicts = {sampler.name: self._verdict(sampler) for sampler in samplers}
        worst = Verdict.of(
            (finding for verdict in verdicts.values() for finding in verdict.findings),
            well=" ".join(dict.fromkeys(verdict.text for verdict in verdicts.values())) or "The user has no bucket",
        )
        buckets = {name: verdict.show() for name, verdict in verdicts.items()}
        whole = {"level": worst.level, "text": worst.text, "do": worst.do}
        return Json({"node": self._node.address.kv_address, **whole, "buckets": buckets})

    def _verdict(self, sampler: BucketSampler) -> BucketVerdict:
        return health_of(Examined.of(self._node, sampler, self._landings))

    async def show_metrics(self, request: Request) -> Response:
        samplers = list(self._samplers.values())
        if not self._node.options.open_metrics:
            user = await self._logins.user_of(request)
            samplers = [sampler for sampler in samplers if may_see(self._node, user, sampler.name)]
        text, content_type = metrics_text(self._node, samplers, accept=request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})
