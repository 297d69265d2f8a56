"""The numbers of a bucket, taken once a second from what the node has anyway.

The dashboard calls `BucketSampler.sample` at every tick; the live feed and the metrics read what it has taken. Totals
never go back: a sum that is lower than before (a connection is just being replaced by another one of its name, a
vbucket was rolled back) stays where it was. Rates are differences of totals.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headwater.node.consumer_views import ConsumerView
from headwater.node.http.dashboard.cluster_numbers import STATISTICS, ClusterNumbers, Counts, VBucketNumbers
from headwater.node.http.limits import (
    CONNECTIONS_SHOWN_MAX,
    COUNTED_SLOTS_MAX,
    EVENT_VBUCKETS_MAX,
    EVENTS_MAX,
    HISTORY_POINTS,
)
from headwater.node.node_state import NodeState
from headwater.node.producer.statistics import ConnectionStatistics, connection_statistics, stream_backlogs
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store.bucket import Bucket
from headwater.store.vbuckets import ABSENT

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
    """Takes the numbers of one bucket."""

    def __init__(self, node: NodeState, name: str) -> None:
        self.name = name
        self.bucket = bucket = node.bucket_service(name).bucket
        self.scrubbed = node.bucket_service(name).scrubbed
        self._node = node
        self.totals = Totals()
        self.rates = Rates()
        self.history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self.connections: Sequence[ConnectionStatistics] = ()
        self.consumers: Sequence[ConsumerView] = ()
        self.disk_bytes = 0
        self.live = LiveCounts(len(bucket.vbuckets))
        self.stream_lags: Counts = np.zeros(len(bucket.vbuckets), dtype=np.int64)
        """Of each vbucket: how many seqnos the stream of it that is furthest behind has still to get."""
        self.watch = VBucketWatch(bucket, now_ms=self.now_ms)
        peers = node.membership(name).peer_statistics
        self.cluster = ClusterNumbers(bucket, peers, now_ms=self.now_ms, on_event=self.watch.note_node)
        # The other nodes of the cluster ask for these.
        node.bucket_service(name).statistics[STATISTICS] = lambda: self.numbers().encode()
        self._sent: dict[str, _Moved] = {}
        self._received: dict[str, _Moved] = {}
        self._high_seqnos = bucket.vbuckets.high_seqnos.copy()
        self._first_commit = bucket.durable_commit
        self._taken_s = node.now_s()
        self.sample()
        self.rates = Rates()
        self.history.clear()

    def now_ms(self) -> int:
        return self.bucket.environment.now_ns() // _NANOSECONDS_PER_MS

    @property
    def backlog(self) -> int:
        return sum(connection.backlog_items for connection in self.connections)

    @property
    def holds_replicas(self) -> bool:
        """Whether copies here are let fall behind, for a drill."""
        return self._node.membership(self.name).replication.is_held

    def furthest_behind(self) -> list[ConnectionStatistics]:
        """As many connections as are shown, those with the most to get first."""
        return sorted(self.connections, key=lambda one: (-one.backlog_items, one.name))[:CONNECTIONS_SHOWN_MAX]

    def rates_of(self, connection: ConnectionStatistics) -> ConnectionRates:
        return self._sent[connection.name].rates

    def rates_received(self, consumer: ConsumerView) -> ConnectionRates:
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
            is_held=self.holds_replicas,
        )

    def sample(self) -> None:
        """Take the numbers of now."""
        bucket, now_s = self.bucket, self._node.now_s()
        passed_s = max(1e-3, now_s - self._taken_s)
        before, self.totals, self._taken_s = self.totals, self._totals(bucket), now_s
        self.rates = Rates(
            changes=(self.totals.changes - before.changes) / passed_s,
            requests=(self.totals.requests - before.requests) / passed_s,
            messages=(self.totals.messages - before.messages) / passed_s,
            sent_bytes=(self.totals.sent_bytes - before.sent_bytes) / passed_s,
        )
        producers = self._node.producer_connections(self.name)
        self.connections = connection_statistics(producers, now_s=now_s, streams_max=0)
        self.consumers = self._node.consumer_views(self.name, streams_max=0)
        self.stream_lags = np.zeros(len(bucket.vbuckets), dtype=np.int64)
        for producer in producers:
            np.maximum.at(self.stream_lags, *stream_backlogs(producer))
        sent = {one.name: _Moved(one.total_messages_sent, one.total_bytes_sent) for one in self.connections}
        received = {one.name: _Moved(one.received_changes, one.received_bytes) for one in self.consumers}
        self._sent = _with_rates(self._sent, sent, passed_s)
        self._received = _with_rates(self._received, received, passed_s)
        self.live.refresh(bucket)
        self.watch.look(bucket, answered_rollbacks=self.totals.rollback_answers)
        self.disk_bytes = self._node.folder.disk_bytes(self.name)
        self.history.append(Point(time_ms=self.now_ms(), rates=self.rates, backlog=self.backlog))

    def _totals(self, bucket: Bucket) -> Totals:
        traffic, last = self._node.traffic(self.name), self.totals
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


# --- documents ----------------------------------------------------------------------------------------------------


class LiveCounts:
    """How many documents each vbucket has, without the deleted.

    The index has deleted documents, too, so they have to be counted. A vbucket is counted again when it has changed,
    and a tick looks at a bounded number of slots; with many documents a count is some seconds old.
    """

    def __init__(self, vbuckets: int) -> None:
        self.counts: Counts = np.zeros(vbuckets, dtype=np.int64)
        self._stamps = np.zeros(vbuckets, dtype=np.uint64)
        self._next = 0

    def refresh(self, bucket: Bucket, *, slots_max: int = COUNTED_SLOTS_MAX) -> None:
        """Count what has changed, in turns."""
        numbers, index = bucket.vbuckets, bucket.index
        stamps = numbers.high_seqnos ^ numbers.vbuuids
        changed = np.flatnonzero((stamps != self._stamps) & (index.entries > 0))
        empty = index.entries == 0
        self.counts[empty] = 0
        self._stamps[empty] = stamps[empty]
        in_turn = np.concatenate((changed[changed >= self._next], changed[changed < self._next]))
        # As many as the bound allows, and one where even that has more slots.
        fitting = max(1, int(np.searchsorted(np.cumsum(index.capacities[in_turn]), slots_max, side="right")))
        counted = in_turn[:fitting]
        index.count_live(counted, self.counts)
        self._stamps[counted] = stamps[counted]
        self._next = int(in_turn[fitting]) if fitting < len(in_turn) else 0


# --- events -------------------------------------------------------------------------------------------------------


_STATE_NAMES = {ABSENT: "absent", **{int(state): state.name.lower() for state in VBucketState}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to some vbuckets at the same time."""

    number: int
    time_ms: int
    kind: str
    """`state`, `branch`, `rollback`, `answered-rollback` or `node`."""
    text: str
    vbuckets: tuple[int, ...]
    """The first few of them."""
    count: int


class VBucketWatch:
    """Compares the vbuckets of a bucket with what they were at the last look, and remembers the events.

    A new branch in the failover log is a failover, or a start after a crash; where it begins below what the vbucket
    had, changes were rolled back. Events live in memory: the failover logs themselves are what is durable.
    """

    def __init__(self, bucket: Bucket, *, now_ms: Callable[[], int]) -> None:
        self.events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.rolled_back_total = 0
        """Vbuckets that were taken back."""
        self._now_ms = now_ms
        self._number = 0
        self._states = bucket.vbuckets.states.copy()
        self._vbuuids = bucket.vbuckets.vbuuids.copy()
        self._durable = bucket.vbuckets.durable_seqnos.copy()
        self._answered = 0

    def look(self, bucket: Bucket, *, answered_rollbacks: int) -> None:
        numbers = bucket.vbuckets
        self._look_at_states(numbers.states)
        self._look_at_branches(bucket)
        if answered_rollbacks > self._answered:
            answered = answered_rollbacks - self._answered
            words = "1 stream request was" if answered == 1 else f"{answered} stream requests were"
            self._add("answered-rollback", f"{words} answered with a rollback", [], count=answered)
        self._states, self._vbuuids = numbers.states.copy(), numbers.vbuuids.copy()
        self._durable, self._answered = numbers.durable_seqnos.copy(), answered_rollbacks

    def note_node(self, text: str) -> None:
        """Another node of the cluster has gone, or is back."""
        self._add("node", text, [])

    def after(self, number: int) -> list[Event]:
        """The events behind this one, oldest first."""
        return [event for event in self.events if event.number > number]

    def _look_at_states(self, states: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        changed = np.flatnonzero(states != self._states)
        for before, after in sorted({(int(self._states[vbucket]), int(states[vbucket])) for vbucket in changed}):
            vbuckets = changed[(self._states[changed] == before) & (states[changed] == after)].tolist()
            self._add("state", f"{_STATE_NAMES.get(before, '?')} → {_STATE_NAMES.get(after, '?')}", vbuckets)

    def _look_at_branches(self, bucket: Bucket) -> None:
        numbers = bucket.vbuckets
        # A vbucket that has come or gone has no branch that others could have followed.
        changed = np.flatnonzero((numbers.vbuuids != self._vbuuids) & (numbers.vbuuids != 0) & (self._vbuuids != 0))
        rolled_back, branched, lost = [], [], 0
        for vbucket in changed.tolist():
            facts = numbers.facts[vbucket]
            if facts is None:
                continue
            kept, had = facts.failover_log.newest.seqno, int(self._durable[vbucket])
            if facts.state == VBucketState.ACTIVE != self._states[vbucket]:
                # A copy in the middle of a snapshot begins its branch where that began, and keeps what it has.
                kept = Seqno(int(numbers.durable_seqnos[vbucket]))
            if kept < had:
                rolled_back.append(vbucket)
                lost += had - kept
            else:
                branched.append(vbucket)
        if branched:
            self._add("branch", "a new branch of history began, and nothing was lost", branched)
        if rolled_back:
            self.rolled_back_total += len(rolled_back)
            words = "1 seqno is" if lost == 1 else f"{lost} seqnos are"
            self._add("rollback", f"rolled back, {words} of a history that did not happen", rolled_back)

    def _add(self, kind: str, text: str, vbuckets: list[int], *, count: int | None = None) -> None:
        self._number += 1
        self.events.append(
            Event(
                number=self._number,
                time_ms=self._now_ms(),
                kind=kind,
                text=text,
                vbuckets=tuple(vbuckets[:EVENT_VBUCKETS_MAX]),
                count=len(vbuckets) if count is None else count,
            )
        )
