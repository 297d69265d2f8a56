"""The numbers of a bucket, taken once a second from what the node has anyway.

Totals never go back: a sum that is lower than before (a connection is just being replaced by another one of its name,
a vbucket was rolled back) stays where it was. Rates are differences of totals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headwater.dashboard.events import VBucketWatch
from headwater.dashboard.limits import HISTORY_POINTS
from headwater.dashboard.live_counts import LiveCounts
from headwater.dashboard.source import ConnectionNumbers, Counts, NodeSource
from headwater.store.bucket import Bucket

_NANOSECONDS_PER_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What has happened since the node started."""

    changes: int = 0
    """Seqnos given out, or received from another node."""
    requests: int = 0
    messages: int = 0
    sent_bytes: int = 0
    commits: int = 0
    rollback_answers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of the last tick, a second."""

    changes: float = 0.0
    requests: float = 0.0
    messages: float = 0.0
    sent_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What the charts have of one tick."""

    time_ms: int
    rates: Rates
    backlog: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRates:
    messages: float = 0.0
    sent_bytes: float = 0.0


@dataclass(slots=True)
class _SeenConnection:
    messages: int
    sent_bytes: int
    rates: ConnectionRates = field(default_factory=ConnectionRates)


class BucketSampler:
    """Takes the numbers of one bucket; see the module."""

    def __init__(self, source: NodeSource, name: str) -> None:
        self._source = source
        self.name = name
        bucket = source.bucket(name)
        self.totals = Totals()
        self.rates = Rates()
        self.history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self.connections: Sequence[ConnectionNumbers] = ()
        self.disk_bytes = 0
        self.live = LiveCounts(len(bucket.vbuckets))
        self.lags: Counts = np.zeros(len(bucket.vbuckets), dtype=np.int64)
        self.watch = VBucketWatch(bucket, now_ms=self.now_ms)
        self._seen: dict[str, _SeenConnection] = {}
        self._high_seqnos = bucket.vbuckets.high_seqnos.copy()
        self._first_commit = bucket.durable_commit
        self._taken_s = source.now_s()
        self.sample()
        self.rates = Rates()
        self.history.clear()

    @property
    def bucket(self) -> Bucket:
        return self._source.bucket(self.name)

    def now_ms(self) -> int:
        return self.bucket.outside.now_ns() // _NANOSECONDS_PER_MS

    @property
    def backlog(self) -> int:
        return sum(connection.backlog_items for connection in self.connections)

    def rates_of(self, connection: ConnectionNumbers) -> ConnectionRates:
        seen = self._seen.get(connection.name)
        return ConnectionRates() if seen is None else seen.rates

    def sample(self) -> None:
        """Take the numbers of now."""
        bucket, now_s = self.bucket, self._source.now_s()
        passed_s = max(1e-3, now_s - self._taken_s)
        before, self.totals, self._taken_s = self.totals, self._totals(bucket), now_s
        self.rates = _rates(before, self.totals, passed_s)
        self.connections = self._source.connections(self.name)
        self.lags = self._source.lags(self.name)
        self._look_at_connections(passed_s)
        self.live.refresh(bucket)
        self.watch.look(bucket, answered_rollbacks=self.totals.rollback_answers)
        self.disk_bytes = self._source.disk_bytes(self.name)
        self.history.append(Point(time_ms=self.now_ms(), rates=self.rates, backlog=self.backlog))

    def _totals(self, bucket: Bucket) -> Totals:
        traffic, last = self._source.traffic(self.name), self.totals
        high_seqnos = bucket.vbuckets.high_seqnos
        # Of a vbucket that was rolled back the difference is negative; these numbers are signed by now.
        grown = np.maximum((high_seqnos - self._high_seqnos).view(np.int64), 0)
        self._high_seqnos = high_seqnos.copy()
        return Totals(
            changes=last.changes + int(grown.sum()),
            requests=max(last.requests, traffic.requests),
            messages=max(last.messages, traffic.sent_messages),
            sent_bytes=max(last.sent_bytes, traffic.sent_bytes),
            commits=max(last.commits, bucket.durable_commit - self._first_commit),
            rollback_answers=max(last.rollback_answers, traffic.rollbacks),
        )

    def _look_at_connections(self, passed_s: float) -> None:
        seen: dict[str, _SeenConnection] = {}
        for connection in self.connections:
            now = _SeenConnection(connection.total_messages_sent, connection.total_bytes_sent)
            before = self._seen.get(connection.name)
            if before is not None:
                now.rates = ConnectionRates(
                    messages=max(0, now.messages - before.messages) / passed_s,
                    sent_bytes=max(0, now.sent_bytes - before.sent_bytes) / passed_s,
                )
            seen[connection.name] = now
        self._seen = seen


def _rates(before: Totals, now: Totals, passed_s: float) -> Rates:
    return Rates(
        changes=(now.changes - before.changes) / passed_s,
        requests=(now.requests - before.requests) / passed_s,
        messages=(now.messages - before.messages) / passed_s,
        sent_bytes=(now.sent_bytes - before.sent_bytes) / passed_s,
    )
