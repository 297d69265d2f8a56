"""What the other nodes of a bucket's cluster have, asked of them again and again, and how far each copy is behind.

A `BucketSampler` has one, and the live feed shows it. Every node is asked by itself, so that one that does not answer
delays no other. Its last answer stays, with the time since which it has not been heard.

A copy is behind by the seqnos that the active one has more. The two are never of one moment, and a difference that is
only one in time must not look like a lag. So the active one's seqno is always the older of the two: that of this node
when it asked, for the copies of another; that of another when it answered, for copies here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from headwater.errors import HeadwaterError, MalformedMessage
from headwater.node.history import BucketHistory
from headwater.node.replication.peers import PeerStatistics
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.store.bucket import Bucket

Counts = np.ndarray[tuple[int], np.dtype[np.int64]]
"""A number of each vbucket."""
Rows = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""For each vbucket: state, documents, durable seqno, lag."""
UNKNOWN = -1
"""The lag of a copy whose active one is not heard of."""
STATISTICS = "headwater-vbuckets"
"""The group of statistics that the numbers travel as."""
_LISTS = ("states", "documents", "seqnos", "stream_lags")
_HELD = "replicas_held"


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketNumbers:
    """What a node has, one number a vbucket in each array.

    The nodes of a cluster give them to each other as statistics, each array as one list: a few long answers instead of
    thousands of short ones.
    """

    states: Counts
    documents: Counts
    seqnos: Counts
    """Durable ones."""
    stream_lags: Counts
    """Of the stream that is furthest behind."""
    is_held: bool
    """Whether the node lets its copies fall behind, for a drill."""

    def encode(self) -> Iterator[tuple[str, str]]:
        for name in _LISTS:
            yield name, ",".join(map(str, getattr(self, name).tolist()))
        yield _HELD, "true" if self.is_held else "false"

    @classmethod
    def decode(cls, statistics: Mapping[str, str], *, vbuckets: int) -> Self:
        try:
            lists = {name: np.array(statistics[name].split(","), dtype=np.int64) for name in _LISTS}
        except (KeyError, ValueError, OverflowError) as error:
            raise MalformedMessage(f"the numbers of its vbuckets can't be read: {error!r}") from error
        if any(len(one) != vbuckets for one in lists.values()):
            raise MalformedMessage(f"it does not have {vbuckets} vbuckets")
        return cls(**lists, is_held=statistics.get(_HELD) == "true")


@dataclass(slots=True, kw_only=True)
class PeerNode:
    """Another node of the cluster, as far as it is known."""

    name: str
    heard_ms: int
    """When it gave what is known of it; of one that never did, when it was first asked."""
    numbers: VBucketNumbers | None = None
    own_seqnos: Counts | None = None
    """Those of this node when it asked for them."""
    error: str | None = None
    """Why the last question has no answer."""

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
        """Ask every node whose answer is not waited for already."""
        names, known, now_ms = self._statistics.names(), self.peers, self._now_ms()
        self.peers = {name: known.get(name) or PeerNode(name=name, heard_ms=now_ms) for name in names}
        for peer in self.peers.values():
            if peer.name not in self._asking:
                task = self._asking[peer.name] = asyncio.create_task(self._ask(peer))
                task.add_done_callback(lambda _, name=peer.name: self._asking.pop(name, None))  # type: ignore[misc]

    async def wait_for_answers(self, *, within_s: float) -> None:
        """Wait a moment for the nodes that answered last time."""
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
        """How far the vbuckets here are behind: copies behind their active ones, streams behind the others."""
        states, seqnos = _states(self._bucket), _durable_seqnos(self._bucket)
        return _lags(states, seqnos, stream_lags, active_seqnos=self._active_seqnos(states, seqnos))

    def rows_of(self, peer: PeerNode) -> Rows | None:
        """What a node has by its last answer; None where it never answered."""
        numbers = peer.numbers
        if numbers is None or peer.own_seqnos is None:
            return None
        active_seqnos = self._active_seqnos(_states(self._bucket), peer.own_seqnos)
        lags = _lags(numbers.states, numbers.seqnos, numbers.stream_lags, active_seqnos=active_seqnos)
        return np.column_stack((numbers.states, numbers.documents, numbers.seqnos, lags))

    def _active_seqnos(self, own_states: Counts, own_seqnos: Counts) -> Counts:
        """The seqnos of the active vbuckets of all nodes that are heard."""
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
