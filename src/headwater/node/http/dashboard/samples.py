"""Sample the numbers of a bucket once a second, from what the node counts anyway, and fetch those of landings.

The dashboard calls `BucketSampler.sample` at every tick; the live feed and the metrics read the last sample. Totals
never decrease: a sum that is lower than before (another connection of the same name is just replacing one, a vbucket
was rolled back) stays where it was. Rates are differences of totals.

The numbers of landings come from their metrics for Prometheus (`land --ui` or `land --metrics-port`). The dashboard
keeps one `Landings`, and the live feed shows it. Their addresses are an option of the node, never a user's choice: a
page must not make the node send requests to any address.
"""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from http import HTTPStatus
from http.client import HTTPException
from shutil import disk_usage
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from headwater.errors import HeadwaterError, InvalidInput, MalformedMessage
from headwater.http import TOKEN_VARIABLE, ask
from headwater.node.history import BucketHistory
from headwater.node.producer.statistics import ConnectionStatistics, connection_statistics, stream_backlogs
from headwater.node.replication.peers import PeerStatistics
from headwater.node.service import ConsumerView
from headwater.protocol.cluster_config import CopyCounts
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.store.bucket import Bucket
from headwater.store.vbuckets import ABSENT

if TYPE_CHECKING:
    from headwater.node.node_state import NodeState

HISTORY_POINTS = 600
"""Ticks that the charts go back."""
COUNTED_SLOTS_MAX = 500_000
"""How many slots of the index a tick examines to count documents; the rest has its turn in the next one."""
EVENTS_ROOM_BYTES = 64 * 1024 * 1024
"""With less free space on the disk, the history is kept in memory only."""
CONNECTIONS_SHOWN_MAX = 64

# --- the numbers of the cluster ------------------------------------------------------------------------------------
# A `BucketSampler` has one `ClusterNumbers`, and the live feed shows it. Every node is asked separately, so that one
# that does not answer delays no other. The last answer of such a node stays, with the time when it came.
#
# A copy is behind by the seqnos that the active copy has more. The two are never read at the same moment, and a
# difference in time must not look like a lag. So the active copy's seqno is always the older of the two: for copies of
# another node, this node's when it asked; for copies here, the other node's when it answered.


Counts = np.ndarray[tuple[int], np.dtype[np.int64]]
"""One number for each vbucket."""
Rows = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""For each vbucket: state, documents, durable seqno, lag."""
UNKNOWN = -1
"""The lag of a replica if its node or its active node does not answer."""
UNREACHED_MS = 3_000
"""A node that has missed only one answer is not down yet."""
STATISTICS = "headwater-vbuckets"
"""The group of statistics in which nodes exchange these numbers."""
_LISTS = ("states", "documents", "seqnos", "stream_lags")
_HELD = "replicas_held"
_CONNECTIONS = "connections"
CONNECTION_NAME_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class SentTo:
    """What one connection of a node is sent, as that node reports it to the others."""

    name: str
    streams: int
    backlog: int
    messages: float
    """Per second."""

    @classmethod
    def decode(cls, members: object) -> Self:
        match members:
            case [str(name), int(streams), int(backlog), int() | float() as messages]:
                return cls(name[:CONNECTION_NAME_CHARS_MAX], streams, backlog, messages)
        raise ValueError(f"{members!r:.100} is no connection")


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketNumbers:
    """The numbers of one node: each array has one number for each vbucket.

    The nodes of a cluster exchange them as statistics, each array as one list: a few long answers instead of thousands
    of short ones.
    """

    states: Counts
    documents: Counts
    seqnos: Counts
    """The durable ones."""
    stream_lags: Counts
    """The lag of the stream that is furthest behind."""
    is_held: bool
    """Whether the node lets its copies fall behind, for a drill."""
    connections: tuple[SentTo, ...] = ()
    """Those furthest behind. A node of an earlier version reports none."""

    def encode(self) -> Iterator[tuple[str, str]]:
        for name in _LISTS:
            yield name, ",".join(map(str, getattr(self, name).tolist()))
        yield _HELD, "true" if self.is_held else "false"
        yield _CONNECTIONS, json.dumps([astuple(one) for one in self.connections])

    @classmethod
    def decode(cls, statistics: Mapping[str, str], *, vbuckets: int) -> Self:
        try:
            lists = {name: np.array(statistics[name].split(","), dtype=np.int64) for name in _LISTS}
            sent = json.loads(statistics.get(_CONNECTIONS, "[]"))[:CONNECTIONS_SHOWN_MAX]
            connections = tuple(SentTo.decode(one) for one in sent)
        except (KeyError, ValueError, TypeError, OverflowError, RecursionError) as error:
            raise MalformedMessage(f"the numbers of its vbuckets can't be read: {error!r}") from error
        if any(len(one) != vbuckets for one in lists.values()):
            raise MalformedMessage(f"it does not have {vbuckets} vbuckets")
        return cls(**lists, is_held=statistics.get(_HELD) == "true", connections=connections)


@dataclass(slots=True, kw_only=True)
class PeerNode:
    """Another node of the cluster, and what is known about it."""

    name: str
    heard_ms: int
    """When its last answer came; if it never answered, when it was first asked."""
    numbers: VBucketNumbers | None = None
    own_seqnos: Counts | None = None
    """This node's seqnos when it asked the question."""
    error: str | None = None
    """Why the last question got no answer."""

    @property
    def is_heard(self) -> bool:
        return self.numbers is not None and self.error is None


class ClusterNumbers:
    """The other nodes of one bucket's cluster."""

    def __init__(
        self,
        bucket: Bucket,
        statistics: PeerStatistics,
        *,
        now_ms: Callable[[], int],
        history: BucketHistory,
    ) -> None:
        self.peers: dict[str, PeerNode] = {}
        """By their names, in the order of the cluster config."""
        self._bucket = bucket
        self._statistics = statistics
        self._now_ms = now_ms
        self._history = history
        self._asking: dict[str, asyncio.Task[None]] = {}

    # --- asking ---------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask every node that does not have a pending question."""
        names, known, now_ms = self._statistics.names(), self.peers, self._now_ms()
        self.peers = {name: known.get(name) or PeerNode(name=name, heard_ms=now_ms) for name in names}
        for peer in self.peers.values():
            if peer.name not in self._asking:
                task = self._asking[peer.name] = asyncio.create_task(self._ask(peer))
                task.add_done_callback(lambda _, name=peer.name: self._asking.pop(name, None))  # type: ignore[misc]

    def unreachable(self) -> list[PeerNode]:
        """The nodes that have not answered for longer than `UNREACHED_MS`."""
        # A node that was failed over since the last question is not missed any more.
        names, now_ms = set(self._statistics.names()), self._now_ms()
        return [
            peer
            for peer in self.peers.values()
            if peer.error is not None and now_ms - peer.heard_ms > UNREACHED_MS and peer.name in names
        ]

    async def wait_for_answers(self, *, within_s: float) -> None:
        """Wait briefly for the nodes that answered last time."""
        due = [task for name, task in self._asking.items() if name in self.peers and self.peers[name].is_heard]
        if due:
            await asyncio.wait(due, timeout=within_s)

    def close(self) -> None:
        for task in list(self._asking.values()):
            task.cancel()

    async def _ask(self, peer: PeerNode) -> None:
        own_seqnos = _durable_seqnos(self._bucket)
        try:
            answer = await self._statistics.ask(peer.name, STATISTICS)
            numbers = VBucketNumbers.decode(answer, vbuckets=len(own_seqnos))
        except HeadwaterError as error:
            if peer.error is None:
                self._history.noted_node(f"node {peer.name} does not answer", node=peer.name)
            peer.error = error.reason
            return
        if peer.error is not None:
            self._history.noted_node(f"node {peer.name} answers again", node=peer.name)
        self._history.heard(states=numbers.states, seqnos=numbers.seqnos)
        peer.numbers, peer.own_seqnos, peer.heard_ms, peer.error = numbers, own_seqnos, self._now_ms(), None

    # --- lags -----------------------------------------------------------------------------------------------------

    def lags(self, stream_lags: Counts) -> Counts:
        """How far each vbucket here is behind: a copy behind its active copy, otherwise its slowest stream."""
        states, seqnos = _states(self._bucket), _durable_seqnos(self._bucket)
        return _lags(states, seqnos, stream_lags, active_seqnos=self._active_seqnos(states, seqnos))

    def rows_of(self, peer: PeerNode) -> Rows | None:
        """The rows of a node as of its last answer; None if it never answered."""
        numbers = peer.numbers
        if numbers is None or peer.own_seqnos is None:
            return None
        active_seqnos = self._active_seqnos(_states(self._bucket), peer.own_seqnos)
        if not peer.is_heard:
            # Its copies may have been up to date when it last answered. Only the node knows whether they still are, or
            # still exist.
            active_seqnos = np.full_like(active_seqnos, UNKNOWN)
        lags = _lags(numbers.states, numbers.seqnos, numbers.stream_lags, active_seqnos=active_seqnos)
        return np.column_stack((numbers.states, numbers.documents, numbers.seqnos, lags))

    def _active_seqnos(self, own_states: Counts, own_seqnos: Counts) -> Counts:
        """The seqnos of the active vbuckets of this node and of all nodes that answer."""
        known = np.where(own_states == VBucketState.ACTIVE, own_seqnos, UNKNOWN)
        for peer in self.peers.values():
            if peer.is_heard and peer.numbers is not None:
                theirs = np.where(peer.numbers.states == VBucketState.ACTIVE, peer.numbers.seqnos, UNKNOWN)
                known = np.maximum(known, theirs)
        return known


def _states(bucket: Bucket) -> Counts:
    return bucket.vbuckets.states.astype(np.int64)


def _durable_seqnos(bucket: Bucket) -> Counts:
    return bucket.vbuckets.durable_seqnos.astype(np.int64)


def _lags(states: Counts, seqnos: Counts, stream_lags: Counts, *, active_seqnos: Counts) -> Counts:
    is_copy = (states == VBucketState.REPLICA) | (states == VBucketState.PENDING)
    behind = np.where(active_seqnos == UNKNOWN, UNKNOWN, np.maximum(active_seqnos - seqnos, 0))
    return np.where(is_copy, behind, stream_lags)


_NANOSECONDS_PER_MS = 1_000_000
_STATE_NAMES = {ABSENT: "absent", **{int(state): state.name.lower() for state in VBucketState}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counters since the node started."""

    changes: int = 0
    """Changes of documents in vbuckets that are active here."""
    system_events: int = 0
    """Entries of collections and scopes, one for each vbucket that is active here."""
    received: int = 0
    """Seqnos that copies here have received from their active copies."""
    requests: int = 0
    messages: int = 0
    sent_bytes: int = 0
    commits: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of the last tick, per second."""

    changes: float = 0.0
    requests: float = 0.0
    messages: float = 0.0
    sent_bytes: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What the charts show of one tick."""

    time_ms: int
    rates: Rates
    backlog: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionRates:
    """The traffic of a connection in the last tick, per second, in its one direction."""

    messages: float = 0.0
    moved_bytes: float = 0.0


@dataclass(slots=True)
class _Moved:
    """The traffic of a connection since it was opened."""

    messages: int
    moved_bytes: int
    rates: ConnectionRates = field(default_factory=ConnectionRates)
    still_s: float = 0.0
    """How long no message has gone through it."""


class BucketSampler:
    """Samples the numbers of one bucket."""

    def __init__(self, node: NodeState, name: str) -> None:
        self.name = name
        self._node = node
        self._service = service = node.bucket_service(name)
        self.bucket = bucket = service.bucket
        self.scrubbed = service.scrubbed
        self.totals = Totals()
        self.rates = Rates()
        self.history: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self.connections: Sequence[ConnectionStatistics] = ()
        self.consumers: Sequence[ConsumerView] = ()
        self.disk_bytes = 0
        self.live = LiveCounts(len(bucket.vbuckets))
        self.stream_lags: Counts = np.zeros(len(bucket.vbuckets), dtype=np.int64)
        """By vbucket: how many seqnos its slowest stream still has to send."""
        self.events = service.history
        self._states = bucket.vbuckets.states.copy()
        peers = node.membership(name).peer_statistics
        self.cluster = ClusterNumbers(bucket, peers, now_ms=self.now_ms, history=self.events)
        # The other nodes of the cluster read these statistics.
        service.statistics[STATISTICS] = lambda: self.numbers().encode()
        self._sent: dict[str, _Moved] = {}
        self._received: dict[str, _Moved] = {}
        self._high_seqnos = bucket.vbuckets.high_seqnos.copy()
        self._first_events = bucket.entered_events
        self._prepares = bucket.entered_prepares
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

    def copies(self) -> CopyCounts | None:
        """Where the copies of the cluster are, given which nodes can be reached; None outside a cluster."""
        config = self._service.config
        return None if config is None else config.copies([peer.name for peer in self.cluster.unreachable()])

    @property
    def holds_replicas(self) -> bool:
        """Whether a drill holds back the copies here."""
        return self._node.membership(self.name).replication.is_held

    def furthest_behind(self) -> list[ConnectionStatistics]:
        """The connections that are shown, those with the largest backlog first."""
        return sorted(self.connections, key=lambda one: (-one.backlog_items, one.name))[:CONNECTIONS_SHOWN_MAX]

    def stuck_connections(self, still_s: float) -> list[ConnectionStatistics]:
        """Connections that have changes to send and have sent nothing for this long, the largest backlog first."""
        return [one for one in self.furthest_behind() if one.backlog_items and self._sent[one.name].still_s >= still_s]

    def rates_of(self, connection: ConnectionStatistics) -> ConnectionRates:
        return self._sent[connection.name].rates

    def rates_received(self, consumer: ConsumerView) -> ConnectionRates:
        return self._received[consumer.name].rates

    def lags(self) -> Counts:
        """How far each vbucket here is behind: a copy behind its active copy, otherwise its slowest stream."""
        return self.cluster.lags(self.stream_lags)

    def numbers(self) -> VBucketNumbers:
        """The numbers for the other nodes of the cluster: cheap ones as of now, the rest as of the last tick."""
        numbers = self.bucket.vbuckets
        return VBucketNumbers(
            states=numbers.states.astype(np.int64),
            documents=self.live.counts,
            seqnos=numbers.durable_seqnos.astype(np.int64),
            stream_lags=self.stream_lags,
            is_held=self.holds_replicas,
            connections=tuple(
                SentTo(one.name, one.num_streams, one.backlog_items, round(self.rates_of(one).messages, 1))
                for one in self.furthest_behind()
            ),
        )

    def sample(self) -> None:
        """Take a sample now."""
        bucket, now_s = self.bucket, self._node.now_s()
        passed_s = max(1e-3, now_s - self._taken_s)
        before, self.totals, self._taken_s = self.totals, self._totals(bucket), now_s
        names = [one.name for one in fields(Rates)]
        self.rates = Rates(**{one: (getattr(self.totals, one) - getattr(before, one)) / passed_s for one in names})
        producers = self._service.producer_connections()
        self.connections = connection_statistics(producers, now_s=now_s, streams_max=0)
        self.consumers = self._service.consumer_views(now_s=now_s, streams_max=0)
        self.stream_lags = np.zeros(len(bucket.vbuckets), dtype=np.int64)
        for producer in producers:
            np.maximum.at(self.stream_lags, *stream_backlogs(producer))
        sent = {one.name: _Moved(one.total_messages_sent, one.total_bytes_sent) for one in self.connections}
        received = {one.name: _Moved(one.received_changes, one.received_bytes) for one in self.consumers}
        self._sent = _with_rates(self._sent, sent, passed_s)
        self._received = _with_rates(self._received, received, passed_s)
        self.live.refresh(bucket)
        self._note_states(bucket.vbuckets.states)
        self.keep_events()
        self.disk_bytes = self._node.folder.disk_bytes(self.name)
        self.history.append(Point(time_ms=self.now_ms(), rates=self.rates, backlog=self.backlog))

    def keep_events(self) -> None:
        """Store the new events of the history with the next commit.

        On a full disk, wait: a commit that fails voids what clients have written, and an event is no reason for that.
        """
        if not self.events.is_unsaved or disk_usage(self._node.options.data).free < EVENTS_ROOM_BYTES:
            return
        if rows := self.events.take_rows():
            self.bucket.put_rows(rows)
            self._service.on_change()

    def _totals(self, bucket: Bucket) -> Totals:
        traffic, last = self._node.traffic(self.name), self.totals
        high_seqnos, is_active = bucket.vbuckets.high_seqnos, bucket.vbuckets.states == VBucketState.ACTIVE
        # For a vbucket that was rolled back the difference is negative, so the numbers are viewed as signed.
        grown = np.maximum((high_seqnos - self._high_seqnos).view(np.int64), 0)
        events = bucket.entered_events - self._first_events
        others = events - last.system_events + bucket.entered_prepares - self._prepares
        self._high_seqnos, self._prepares = high_seqnos.copy(), bucket.entered_prepares
        return Totals(
            changes=last.changes + max(0, int(grown[is_active].sum()) - others),
            system_events=events,
            received=last.received + int(grown[~is_active].sum()),
            requests=max(last.requests, traffic.requests),
            messages=max(last.messages, traffic.sent_messages),
            sent_bytes=max(last.sent_bytes, traffic.sent_bytes),
            commits=max(last.commits, bucket.durable_commit - self._first_commit),
        )

    def _note_states(self, states: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> None:
        """Record vbuckets whose state has changed since the last tick. Becoming active has an event with its reason."""
        before, self._states = self._states, states.copy()
        changed = np.flatnonzero((states != before) & (states != VBucketState.ACTIVE))
        for was, now in sorted({(int(before[vbucket]), int(states[vbucket])) for vbucket in changed}):
            vbuckets = changed[(before[changed] == was) & (states[changed] == now)].tolist()
            self.events.changed_states(_STATE_NAMES.get(was, "?"), _STATE_NAMES.get(now, "?"), vbuckets)


def _with_rates(before: dict[str, _Moved], now: dict[str, _Moved], passed_s: float) -> dict[str, _Moved]:
    for name, moved in now.items():
        known = before.get(name)
        if known is not None:
            # Another connection of the same name begins at zero.
            moved.still_s = known.still_s + passed_s if moved.messages == known.messages else 0.0
            moved.rates = ConnectionRates(
                messages=max(0, moved.messages - known.messages) / passed_s,
                moved_bytes=max(0, moved.moved_bytes - known.moved_bytes) / passed_s,
            )
    return now


# --- documents ----------------------------------------------------------------------------------------------------


class LiveCounts:
    """How many documents each vbucket has, without deleted ones.

    The index has deleted documents, too, so the others have to be counted. A vbucket is counted again after it has
    changed, and a tick examines a limited number of slots; with many documents a count is some seconds old.
    """

    def __init__(self, vbuckets: int) -> None:
        self.counts: Counts = np.zeros(vbuckets, dtype=np.int64)
        self._stamps = np.zeros(vbuckets, dtype=np.uint64)
        self._next = 0

    def refresh(self, bucket: Bucket, *, slots_max: int = COUNTED_SLOTS_MAX) -> None:
        """Count the vbuckets that have changed, in turns."""
        numbers, index = bucket.vbuckets, bucket.index
        stamps = numbers.high_seqnos ^ numbers.vbuuids
        changed = np.flatnonzero((stamps != self._stamps) & (index.entries > 0))
        empty = index.entries == 0
        self.counts[empty] = 0
        self._stamps[empty] = stamps[empty]
        in_turn = np.concatenate((changed[changed >= self._next], changed[changed < self._next]))
        # As many as the limit allows, but at least one.
        fitting = max(1, int(np.searchsorted(np.cumsum(index.capacities[in_turn]), slots_max, side="right")))
        counted = in_turn[:fitting]
        index.count_live(counted, self.counts)
        self._stamps[counted] = stamps[counted]
        self._next = int(in_turn[fitting]) if fitting < len(in_turn) else 0


# --- landings ---------------------------------------------------------------------------------------------------------


LANDING_EVERY_S = 2.0
LANDING_S_MAX = 2.0
LANDING_BYTES_MAX = 1024 * 1024
LANDINGS_MAX = 8
"""How often the metrics of a landing are fetched, how long that may take, how long they may be, and how many."""
_PREFIX = "headwater_land_"
_PAGE = f"{_PREFIX}page_info"


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingNumbers:
    """What one endpoint has answered last, by bucket and pipeline, whose name may be empty. `error` says why it could
    not be asked since."""

    url: str
    landings: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    pages: dict[tuple[str, str], str] = field(default_factory=dict)
    """The URL of the landing's own page."""
    heard_ms: int | None = None
    """When it last answered."""
    error: str | None = None
    is_ended: bool = False
    """Nothing listens there any more: the process has ended, while the network works."""


class Landings:
    """Asks the endpoints repeatedly."""

    def __init__(self, urls: Sequence[str]) -> None:
        if len(urls) > LANDINGS_MAX:
            raise InvalidInput(f"{len(urls)} landings to watch", hint=f"Watch at most {LANDINGS_MAX}")
        for url in urls:
            if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
                raise InvalidInput(
                    f"{url!r} is not an address of metrics", hint="Give one like http://127.0.0.1:9100/metrics"
                )
        self.numbers = [LandingNumbers(url=url, error="not asked yet") for url in urls]

    async def watch(self) -> None:
        while self.numbers:
            self.numbers = [await asyncio.to_thread(fetch_landing, known.url, known) for known in self.numbers]
            await asyncio.sleep(LANDING_EVERY_S)

    def of(self, bucket: str) -> list[dict[str, object]]:
        """What is known about the landings of a bucket, and about endpoints that have never answered. A landing that
        has stopped is shown with its last answer."""
        shown: list[dict[str, object]] = []
        for known in self.numbers:
            failed = {} if known.error is None else {"error": known.error, "is_ended": known.is_ended}
            about = {"heard_ms": known.heard_ms, **failed}
            if known.error is not None and not known.landings:
                shown.append({"url": known.url, **about})
            for (of, pipeline), numbers in known.landings.items():
                if of == bucket:
                    page = {"page": known.pages[of, pipeline]} if (of, pipeline) in known.pages else {}
                    # The page identifies the landing by this.
                    url = f"{known.url}#{pipeline}" if pipeline else known.url
                    shown.append({"url": url, **about, "numbers": numbers, **page})
        return shown


def fetch_landing(url: str, before: LandingNumbers | None = None) -> LandingNumbers:
    """Ask one endpoint. A fault there is not raised, but part of the result, together with what it answered `before`.
    Redirects are not followed: the operator has named the endpoint, and it must not name another one."""
    where = urlsplit(url)
    tls = ssl.create_default_context() if where.scheme == "https" else None
    # A landing that is served beyond this machine requires the token of its page.
    token = os.environ.get(TOKEN_VARIABLE)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits: Any = {"answer_s": LANDING_S_MAX, "bytes_max": LANDING_BYTES_MAX}
    target = f"{where.path or '/'}{where.query and '?'}{where.query}"
    is_ended = False
    try:
        port = where.port or (80 if tls is None else 443)
        status, text = ask(where.hostname or "", port, "GET", target, headers=headers, tls=tls, **limits)
        if status == HTTPStatus.OK:
            return _parse(url, str(text))
        hint = f": start the node with its token in {TOKEN_VARIABLE}" if status == HTTPStatus.UNAUTHORIZED else ""
        problem = f"it answers with {status}{hint}"
    except (OSError, ValueError, HTTPException, HeadwaterError) as error:
        is_ended = isinstance(error, ConnectionRefusedError)
        said = (error.strerror if isinstance(error, OSError) else None) or str(error) or "no answer"
        problem = f"{said[0].lower()}{said[1:]}"
    return replace(before or LandingNumbers(url=url), error=problem, is_ended=is_ended)


def _parse(url: str, text: str) -> LandingNumbers:
    landings: dict[tuple[str, str], dict[str, float]] = {}
    pages: dict[tuple[str, str], str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            which = sample.labels.get("bucket", ""), sample.labels.get("pipeline", "")
            if sample.name == _PAGE and (page := sample.labels.get("url", "")).startswith(("http://", "https://")):
                pages[which] = page
            elif sample.name.startswith(_PREFIX) and "bucket" in sample.labels:
                name = sample.name.removeprefix(_PREFIX).removesuffix("_total")
                landings.setdefault(which, {})[name] = sample.value
    return LandingNumbers(url=url, landings=landings, pages=pages, heard_ms=int(time.time() * 1000))
