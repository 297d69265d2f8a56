"""The numbers of a bucket, taken once a second from what the node has anyway.

Totals never go back: a sum that is lower than before (a connection is just being replaced by another one of its name,
a vbucket was rolled back) stays where it was. Rates are differences of totals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headwater.dashboard.cluster_numbers import ClusterNumbers
from headwater.dashboard.events import VBucketWatch
from headwater.dashboard.limits import HISTORY_POINTS
from headwater.dashboard.live_counts import LiveCounts
from headwater.dashboard.source import ConnectionNumbers, ConsumerNumbers, Counts, NodeSource
from headwater.dashboard.vbucket_numbers import VBucketNumbers
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
    """What went through a connection in the last tick, a second, in its one direction."""

    messages: float = 0.0
    moved_bytes: float = 0.0


@dataclass(slots=True)
class _Moved:
    """What went through a connection since it was opened."""

    messages: int
    moved_bytes: int
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
        self.consumers: Sequence[ConsumerNumbers] = ()
        self.disk_bytes = 0
        self.live = LiveCounts(len(bucket.vbuckets))
        self.stream_lags: Counts = np.zeros(len(bucket.vbuckets), dtype=np.int64)
        self.watch = VBucketWatch(bucket, now_ms=self.now_ms)
        self.cluster = ClusterNumbers(source, name, now_ms=self.now_ms, on_event=self.watch.note_node)
        source.offer_numbers(name, lambda: self.numbers().encode())
        self._sent: dict[str, _Moved] = {}
        self._received: dict[str, _Moved] = {}
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
        return self._sent[connection.name].rates

    def rates_received(self, consumer: ConsumerNumbers) -> ConnectionRates:
        return self._received[consumer.name].rates

    def lags(self) -> Counts:
        """How far the vbuckets here are behind: copies behind their active ones, streams behind the others."""
        return self.cluster.lags(self.stream_lags)

    def numbers(self) -> VBucketNumbers:
        """For the other nodes of the cluster: what is cheap as of now, the rest as of the last tick."""
        numbers = self.bucket.vbuckets
        return VBucketNumbers(
            states=numbers.states.astype(np.int64),
            documents=self.live.counts,
            seqnos=numbers.durable_seqnos.astype(np.int64),
            stream_lags=self.stream_lags,
            is_held=self._source.holds_replicas(self.name),
        )

    def sample(self) -> None:
        """Take the numbers of now."""
        bucket, now_s = self.bucket, self._source.now_s()
        passed_s = max(1e-3, now_s - self._taken_s)
        before, self.totals, self._taken_s = self.totals, self._totals(bucket), now_s
        self.rates = _rates(before, self.totals, passed_s)
        self.connections = self._source.connections(self.name)
        self.consumers = self._source.consumers(self.name)
        self.stream_lags = self._source.lags(self.name)
        sent = {one.name: _Moved(one.total_messages_sent, one.total_bytes_sent) for one in self.connections}
        received = {one.name: _Moved(one.received_changes, one.received_bytes) for one in self.consumers}
        self._sent = _with_rates(self._sent, sent, passed_s)
        self._received = _with_rates(self._received, received, passed_s)
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


def _with_rates(before: dict[str, _Moved], now: dict[str, _Moved], passed_s: float) -> dict[str, _Moved]:
    for name, moved in now.items():
        known = before.get(name)
        if known is not None:
            # Another connection of the same name begins at zero.
            moved.rates = ConnectionRates(
                messages=max(0, moved.messages - known.messages) / passed_s,
                moved_bytes=max(0, moved.moved_bytes - known.moved_bytes) / passed_s,
            )
    return now


def _rates(before: Totals, now: Totals, passed_s: float) -> Rates:
    return Rates(
        changes=(now.changes - before.changes) / passed_s,
        requests=(now.requests - before.requests) / passed_s,
        messages=(now.messages - before.messages) / passed_s,
        sent_bytes=(now.sent_bytes - before.sent_bytes) / passed_s,
    )
