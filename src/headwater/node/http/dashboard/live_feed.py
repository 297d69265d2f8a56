"""The live feed: server-sent events, one message a tick with what has changed since the last.

The dashboard's page reads it. A viewer that reads slowly misses ticks, and nothing is kept for it: each message is made
when it can be sent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.responses import Response, StreamingResponse

from headwater.errors import MalformedJson
from headwater.node.commit_loop import ChangeSignal
from headwater.node.history import Event
from headwater.node.http.call import LongAnswers, Refusal
from headwater.node.http.dashboard.health import Examined, health_of
from headwater.node.http.dashboard.landing import Landings
from headwater.node.http.dashboard.samples import CONNECTIONS_SHOWN_MAX, BucketSampler, PeerNode, Point, Rows
from headwater.node.producer.statistics import ConnectionStatistics
from headwater.protocol.cluster_config import HOST_PLACEHOLDER, ClusterConfig, ConfigNode

if TYPE_CHECKING:
    from headwater.node.node_state import NodeState

VIEWERS_MAX = 32
"""Live feeds that are open at a time. Beyond that, one of the user that has the most ends."""
TICK_S = 1.0
"""How often numbers are taken, and sent to viewers."""


class LiveFeed:
    """All viewers of a node."""

    def __init__(self, node: NodeState, landings: Landings) -> None:
        self.ticks = ChangeSignal()
        """Notified when new numbers are there."""
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
        """By node; that of this one has no name."""
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
            # A node in no cluster gives clients a config all the same, but has no copies to miss.
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
        """Vbucket, state, documents, durable seqno and lag of those that are not as they were sent."""
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
    """An event with its sentence, and without what only the node needs."""
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
    """The nodes, and for each vbucket the node that has it active and those that have copies.

    There may be no config: a bare node has none until one is set. One that can't be read is shown as none.
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
