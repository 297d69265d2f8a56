"""The dashboard of a node: the ticks that feed it, and the handlers of its page, its live feed and its metrics.

`app` has the routes and checks the user; `HttpServer` starts and closes the dashboard with the node. Once a second a
`BucketSampler` samples the numbers of each bucket, and viewers and scrapes get the last sample. The dashboard only
reads the node: no handler here changes anything.

The page reads a live feed of server-sent events: one message a tick, with what has changed since the last one. A viewer
that reads slowly misses ticks, and nothing is buffered for it: each message is made when it can be sent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import count, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from headwater.errors import MalformedJson
from headwater.findings import Verdict
from headwater.http.serving import Json, PageFiles
from headwater.log_fields import LogEvent, fields
from headwater.metric_kinds import MetricFamily, MetricKind, MetricSamples, collect_metrics, one_number
from headwater.node.auth.users import Action
from headwater.node.commit_loop import ChangeSignal
from headwater.node.history import Event
from headwater.node.http.call import Call, Logins, LongAnswers, Refusal, Sessions, may_see
from headwater.node.http.dashboard.browser import BucketBrowser
from headwater.node.http.dashboard.health import BucketVerdict, Examined, health_of
from headwater.node.http.dashboard.samples import CONNECTIONS_SHOWN_MAX, BucketSampler, Landings, PeerNode, Point, Rows
from headwater.node.producer.statistics import ConnectionStatistics
from headwater.protocol.cluster_config import HOST_PLACEHOLDER, ClusterConfig, ConfigNode
from headwater.protocol.messages.dcp_streams import VBucketState

if TYPE_CHECKING:
    from headwater.node.node_state import NodeState

VIEWERS_MAX = 32
"""The most live feeds at a time. Beyond that, one feed of the user that has the most ends."""
TICK_S = 1.0
"""How often numbers are sampled, and sent to viewers."""


class LiveFeed:
    """The live feeds of all viewers of a node."""

    def __init__(self, node: NodeState, landings: Landings) -> None:
        self.ticks = ChangeSignal()
        """Notified when there are new numbers."""
        self.viewers = LongAnswers()
        self._is_closed = False
        self._node = node
        self._landings = landings

    def close(self) -> None:
        """End all feeds, and refuse new ones."""
        self._is_closed = True
        self.ticks.notify()

    def stream(self, user: str, sampler: BucketSampler, still_allowed: Callable[[], bool]) -> Response:
        if self._is_closed or not self.viewers.has_room(user, most=VIEWERS_MAX):
            raise Refusal.message(503, f"There are {VIEWERS_MAX} viewers already, or the node stops: try again later")
        return StreamingResponse(self._messages(user, sampler, still_allowed), media_type="text/event-stream")

    async def _messages(
        self, user: str, sampler: BucketSampler, still_allowed: Callable[[], bool]
    ) -> AsyncIterator[bytes]:
        with self.viewers.place(user, most=VIEWERS_MAX) as place:
            if place.is_over:
                return
            view = _Viewer(self._node, self._landings, sampler)
            yield b"retry: %d\n\n" % int(2000 * TICK_S) + _message("hello", view.all())
            while not self._is_closed and not place.is_over:
                await self.ticks.after(self.ticks.count)
                if not still_allowed():
                    yield _message("bye", {})
                    return
                yield _message("tick", view.news())


def _message(event: str, content: dict[str, Any]) -> bytes:
    return f"event: {event}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


class _Viewer:
    """What one viewer has been sent."""

    def __init__(self, node: NodeState, landings: Landings, sampler: BucketSampler) -> None:
        self._node = node
        self._landings = landings
        self._sampler = sampler
        self._rows: dict[str, Rows] = {}
        """By node; the key of this node is empty."""
        self._revision = 0
        self._config = b""
        self._manifest_uid = -1

    def all(self) -> dict[str, Any]:
        sampler = self._sampler
        return {
            **self.news(),
            "bucket": sampler.name,
            "version": self._node.server_version,
            "vbucket_count": len(sampler.bucket.vbuckets),
            "history": _points(sampler.history),
        }

    def news(self) -> dict[str, Any]:
        sampler = self._sampler
        unreachable = {peer.name for peer in sampler.cluster.unreachable()}
        # A node that comes back is sent in full again.
        self._rows = {node: rows for node, rows in self._rows.items() if not node or node in sampler.cluster.peers}
        news: dict[str, Any] = {
            "point": _points([sampler.history[-1]] if sampler.history else []),
            "uptime_s": round(self._node.uptime_s(), 1),
            "totals": asdict(sampler.totals),
            "rates": asdict(sampler.rates),
            "documents": int(sampler.live.counts[sampler.bucket.vbuckets.states == 1].sum()),
            "disk_bytes": sampler.disk_bytes,
            "pending": sampler.bucket.pending_changes,
            "vbuckets": self._changed("", self._own_rows()),
            "is_held": sampler.holds_replicas,
            "peers": [
                {**self._peer(peer), "is_reachable": peer.name not in unreachable}
                for peer in sampler.cluster.peers.values()
            ],
            "connection_count": len(sampler.connections),
            "connections": [_connection(sampler, one) for one in sampler.furthest_behind()],
            "consumers": self._consumers(),
            "backlog": sampler.backlog,
            "losses": {**asdict(sampler.events.totals), "unknown": sampler.events.unknown_vbuckets},
            "events": [show_event(event) for event in sampler.events.after(self._revision)],
            "landings": self._landings.of(sampler.name),
            "landings_watched": len(self._landings.numbers),
            "health": health_of(Examined.of(self._node, sampler, self._landings)).show(),
        }
        self._revision = sampler.events.revision
        config = self._node.cluster_config(sampler.name)
        if config != self._config:
            self._config = config
            is_alone = self._node.bucket_service(sampler.name).config is None
            # A node outside a cluster also gives clients a config, but has no copies that could be missing.
            news["cluster"] = show_cluster(config) | ({"replicas": 0} if is_alone else {})
        manifest = sampler.bucket.manifest
        if manifest.uid != self._manifest_uid:
            self._manifest_uid = manifest.uid
            news["collections"] = [
                {"scope": scope.name, "name": one.name, "id": f"{one.id:x}", "max_ttl_s": one.max_ttl_s}
                for scope, one in manifest.collections()
            ]
        return news

    # --- vbuckets -------------------------------------------------------------------------------------------------

    def _own_rows(self) -> Rows:
        sampler = self._sampler
        numbers = sampler.numbers()
        return np.column_stack((numbers.states, numbers.documents, numbers.seqnos, sampler.lags()))

    def _peer(self, peer: PeerNode) -> dict[str, Any]:
        rows = self._sampler.cluster.rows_of(peer)
        return {
            "name": peer.name,
            "heard_ms": peer.heard_ms,
            "error": peer.error,
            "is_known": rows is not None,
            "is_held": peer.numbers is not None and peer.numbers.is_held,
            "connections": [] if peer.numbers is None else [asdict(one) for one in peer.numbers.connections],
            "vbuckets": [] if rows is None else self._changed(peer.name, rows),
        }

    def _changed(self, node: str, rows: Rows) -> list[list[int]]:
        """Vbucket, state, documents, durable seqno and lag of those that have changed since they were sent."""
        known = self._rows.get(node)
        changed = np.arange(len(rows)) if known is None else np.flatnonzero((rows != known).any(axis=1))
        self._rows[node] = rows
        sent: list[list[int]] = np.column_stack((changed, rows[changed])).tolist()
        return sent

    # --- copies ---------------------------------------------------------------------------------------------------

    def _consumers(self) -> list[dict[str, Any]]:
        sampler, lags = self._sampler, np.maximum(self._sampler.lags(), 0)
        return [
            {
                "name": one.name,
                "peer": one.peer,
                "is_proxied": one.is_proxied,
                "open_s": round(one.open_s),
                "vbuckets": len(one.vbuckets),
                "behind": int(lags[list(one.vbuckets)].sum()),
                "messages": round(sampler.rates_received(one).messages, 1),
                "bytes": round(sampler.rates_received(one).moved_bytes),
                "unacked": one.unacked_bytes,
                "window": one.buffer_bytes_max,
                "is_held": one.is_held,
                "held_bytes": one.held_bytes,
            }
            for one in sampler.consumers[:CONNECTIONS_SHOWN_MAX]
        ]


def show_event(event: Event) -> dict[str, Any]:
    """An event with its sentence, and without the members that only the node needs."""
    shown = asdict(event)
    for name in ("last_ms", "revision", "states"):
        del shown[name]
    return {**shown, "text": event.sentence()}


def _points(points: Iterable[Point]) -> dict[str, list[float]]:
    taken = list(points)
    return {
        "time_ms": [point.time_ms for point in taken],
        "changes": [round(point.rates.changes, 1) for point in taken],
        "requests": [round(point.rates.requests, 1) for point in taken],
        "messages": [round(point.rates.messages, 1) for point in taken],
        "sent_bytes": [round(point.rates.sent_bytes) for point in taken],
        "backlog": [point.backlog for point in taken],
    }


def _connection(sampler: BucketSampler, connection: ConnectionStatistics) -> dict[str, Any]:
    rates = sampler.rates_of(connection)
    return {
        "name": connection.name,
        "type": connection.type,
        "open_s": round(connection.open_s),
        "streams": connection.num_streams,
        "backlog": connection.backlog_items,
        "messages": round(rates.messages, 1),
        "bytes": round(rates.moved_bytes),
        "sent_bytes": connection.total_bytes_sent,
        "unacked": connection.unacked_bytes,
        "window": connection.max_buffer_bytes,
        "noop_wait": connection.noop_wait,
    }


def show_cluster(config: bytes) -> dict[str, Any]:
    """The nodes, and for each vbucket the node with the active copy and those with replicas.

    A bare node has no config until one is set. A config that can't be read is shown as if there were none.
    """
    try:
        read = ClusterConfig.decode(config)
        nodes = [_node(node, kv) for node, kv in zip_longest(read.nodes[: len(read.servers)], read.servers)]
        return {"revision": read.revision, "nodes": nodes, "map": read.rows, "replicas": read.replicas}
    except MalformedJson:
        return {"revision": 0, "nodes": [], "map": [], "replicas": 0}


def _node(member: ConfigNode | None, kv_address: str) -> dict[str, Any]:
    host = (member and member.host) or kv_address.rpartition(":")[0].replace(HOST_PLACEHOLDER, "")
    port = None if member is None else member.http_port(tls=False)
    scheme = "http" if port is not None else "https"
    if port is None and member is not None:
        port = member.http_port(tls=True)
    return {
        "name": kv_address,
        "this": member is not None and member.is_this_node,
        "url": f"{scheme}://{host}:{port}/ui/" if host and port else None,
    }


# --- metrics -------------------------------------------------------------------------------------------------------
# The dashboard answers `/metrics` with them. A scrape reads the last sample, and counts nothing.


PREFIX = "headwater_node_"
REPLICATION_NAME = "replication:"
"""The prefix of the names of replication connections. `FROM->TO:BUCKET` follows."""


def _by_state(read: Callable[[BucketSampler, VBucketState], float]) -> Callable[[BucketSampler], MetricSamples]:
    return lambda sampler: [((state.name.lower(),), float(read(sampler, state))) for state in VBucketState]


def _by_connection(read: Callable[[ConnectionStatistics], float]) -> Callable[[BucketSampler], MetricSamples]:
    """Only the connections furthest behind, so that many connections do not make as many time series."""
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
    """Collects the metrics of the node, and of the buckets that the user may see."""

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
    """All metrics in the format that the client prefers, and the content type of that format."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(node, samplers))
    ProcessCollector(registry=registry)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


# --- the dashboard --------------------------------------------------------------------------------------------------

logger = logging.getLogger(__name__)

TICK_SHARE_MAX = 0.05
TICK_S_MAX = 5.0
"""The share of its time that the node may spend on ticks before it slows them down, and the longest interval then."""
PEERS_IDLE_TICKS = 3
"""While there are viewers, the other nodes of the cluster are asked at every tick, otherwise once in this many ticks.
Their last answer shows how much is lost if they are."""
PEERS_S_MAX = 0.2
"""How long a tick waits for their answers, so that the numbers of all nodes are of about the same moment."""


class Dashboard:
    """Everything that the page shows. Call `start` and `close` in the node's event loop."""

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
        """Begin to sample: the node serves from now on."""
        for name in self._node.bucket_names():
            self.watch(name)
        self._tasks = [asyncio.create_task(self._tick_forever()), asyncio.create_task(self._landings.watch())]

    def watch(self, bucket: str) -> None:
        self._samplers[bucket] = BucketSampler(self._node, bucket)

    async def forget(self, bucket: str) -> None:
        """A bucket is dropped. Once this returns, nothing here reads the bucket any more."""
        sampler = self._samplers.pop(bucket, None)
        if sampler is not None:
            sampler.cluster.close()
        self._feed.ticks.notify()
        await self.browser.finish_searches()

    def close(self) -> None:
        """The node stops: end what would never end by itself."""
        self._feed.close()
        for task in self._tasks:
            task.cancel()
        for sampler in self._samplers.values():
            sampler.cluster.close()
            sampler.keep_events()

    async def _tick_forever(self) -> None:
        took_s = 0.0
        for tick in count():
            # If there are so many streams that sampling takes long, sample less often. Only processor time counts: on a
            # machine that is busy with other things, everything takes long.
            await asyncio.sleep(min(TICK_S_MAX, max(TICK_S, took_s / TICK_SHARE_MAX)))
            began_s = time.thread_time()
            try:
                for sampler in list(self._samplers.values()):
                    sampler.sample()
                    if self._feed.viewers or tick % PEERS_IDLE_TICKS == 0:
                        sampler.cluster.ask()
            except Exception:
                # The node continues without its dashboard; the next tick may succeed.
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
            # The bucket may have been dropped, and another one created with its name.
            return self._samplers.get(name) is sampler and self._sessions.may_see(call.request, name)

        return self._feed.stream(call.user, sampler, still_allowed)

    async def show_health(self, call: Call) -> Response:
        """The verdict at the top of every page."""
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
