"""The live feed: server-sent events, one message a tick with what has changed since the last.

A viewer that reads slowly misses ticks, and nothing is kept for it: each message is made when it can be sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
from starlette.responses import Response, StreamingResponse

from headwater.dashboard.answers import NOT_KEPT, Refused
from headwater.dashboard.cluster_view import show_cluster
from headwater.dashboard.guard import Asked
from headwater.dashboard.landing import Landings
from headwater.dashboard.limits import TICK_S, VIEWERS_MAX
from headwater.dashboard.metrics import furthest_behind
from headwater.dashboard.samples import BucketSampler, Point
from headwater.dashboard.source import NodeSource


class Ticks:
    """A signal to any number of viewers that new numbers are there."""

    def __init__(self) -> None:
        self._next = asyncio.Event()
        self.is_closed = False

    def notify(self) -> None:
        self._next.set()
        self._next = asyncio.Event()

    def close(self) -> None:
        self.is_closed = True
        self.notify()

    async def wait(self) -> None:
        await self._next.wait()


class LiveFeed:
    """All viewers of a node."""

    def __init__(self, source: NodeSource, landings: Landings) -> None:
        self.ticks = Ticks()
        self.viewers = 0
        self._source = source
        self._landings = landings

    def stream(self, asked: Asked, still_allowed: Callable[[], bool]) -> Response:
        if self.viewers >= VIEWERS_MAX or self.ticks.is_closed:
            raise Refused(503, f"There are {VIEWERS_MAX} viewers already, or the node stops: try again later")
        return StreamingResponse(
            self._messages(asked.sampler, still_allowed), media_type="text/event-stream", headers=NOT_KEPT
        )

    async def _messages(self, sampler: BucketSampler, still_allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        if self.viewers >= VIEWERS_MAX:
            return
        self.viewers += 1
        view = _View(self._source, self._landings, sampler)
        try:
            yield b"retry: %d\n\n" % int(2000 * TICK_S) + _message("hello", view.all())
            while not self.ticks.is_closed:
                await self.ticks.wait()
                if not still_allowed():
                    yield _message("bye", {})
                    return
                yield _message("tick", view.news())
        finally:
            self.viewers -= 1


class _View:
    """What one viewer has been told."""

    def __init__(self, source: NodeSource, landings: Landings, sampler: BucketSampler) -> None:
        self._source = source
        self._landings = landings
        self._sampler = sampler
        self._rows = np.zeros((0, 0), dtype=np.int64)
        self._event = 0
        self._config = b""
        self._manifest_uid = -1

    def all(self) -> dict[str, Any]:
        sampler = self._sampler
        return {
            **self.news(),
            "bucket": sampler.name,
            "version": self._source.version,
            "vbucket_count": len(sampler.bucket.vbuckets),
            "history": _points(sampler.history),
        }

    def news(self) -> dict[str, Any]:
        sampler = self._sampler
        news: dict[str, Any] = {
            "point": _points([sampler.history[-1]] if sampler.history else []),
            "uptime_s": round(self._source.uptime_s(), 1),
            "totals": asdict(sampler.totals),
            "rates": asdict(sampler.rates),
            "documents": int(sampler.live.counts[sampler.bucket.vbuckets.states == 1].sum()),
            "disk_bytes": sampler.disk_bytes,
            "pending": sampler.bucket.pending.count,
            "vbuckets": self._changed_rows(),
            "connection_count": len(sampler.connections),
            "connections": [_connection(sampler, one) for one in furthest_behind(sampler.connections)],
            "backlog": sampler.backlog,
            "rolled_back": sampler.watch.rolled_back_total,
            "events": [asdict(event) for event in sampler.watch.after(self._event)],
            "landings": self._landings.of(sampler.name),
        }
        if sampler.watch.events:
            self._event = sampler.watch.events[-1].number
        config = self._source.cluster_config(sampler.name)
        if config != self._config:
            self._config = config
            news["cluster"] = show_cluster(config)
        manifest = sampler.bucket.manifest
        if manifest.uid != self._manifest_uid:
            self._manifest_uid = manifest.uid
            news["collections"] = [
                {"scope": scope.name, "name": one.name, "id": f"{one.id:x}", "max_ttl_s": one.max_ttl_s}
                for scope, one in manifest.collections()
            ]
        return news

    def _changed_rows(self) -> list[list[int]]:
        """Vbucket, state, documents, durable seqno and lag of those that are not as they were told."""
        sampler = self._sampler
        numbers = sampler.bucket.vbuckets
        rows = np.column_stack(
            (numbers.states, sampler.live.counts, numbers.durable_seqnos.astype(np.int64), sampler.lags)
        ).astype(np.int64)
        changed = np.arange(len(rows))
        if rows.shape == self._rows.shape:
            changed = np.flatnonzero((rows != self._rows).any(axis=1))
        self._rows = rows
        told: list[list[int]] = np.column_stack((changed, rows[changed])).tolist()
        return told


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


def _connection(sampler: BucketSampler, connection: Any) -> dict[str, Any]:
    rates = sampler.rates_of(connection)
    return {
        "name": connection.name,
        "type": connection.type,
        "open_s": round(connection.open_s),
        "streams": connection.num_streams,
        "backlog": connection.backlog_items,
        "messages": round(rates.messages, 1),
        "bytes": round(rates.sent_bytes),
        "sent_bytes": connection.total_bytes_sent,
        "unacked": connection.unacked_bytes,
        "window": connection.max_buffer_bytes,
        "noop_wait": connection.noop_wait,
    }


def _message(event: str, content: dict[str, Any]) -> bytes:
    return f"event: {event}\ndata: {json.dumps(content, separators=(',', ':'))}\n\n".encode()
