"""The queue between the streams and the caller, its flow control, and the gate that holds changes back until no
failover can take them away.

A server may send as much as fits its window, and gets room back when the caller takes pieces, so the caller's speed
bounds what waits here. An incomplete snapshot can't be taken, and one larger than the window could never be completed.
So when nothing waits for the caller, held data is acknowledged without being taken, and whatever exceeds the memory
limit goes to a temporary file. At any time, memory contains at most a window per connection plus `held_bytes_max`.

The reader adds what the streams deliver, in order; `PersistenceHold` may stand in between. Nothing is reordered or
dropped here, except for vbuckets that are closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.pieces import ChangeRun, OpenSpool, Piece, RollbackPiece, Spool, SpooledRun
from headwater.client.vbucket_stream import StreamItem, VBucketStream
from headwater.errors import KeyNotFound, StatusError, UnexpectedMessage
from headwater.protocol.messages import Response
from headwater.protocol.messages.vbuckets import ObserveSeqno, ObserveSeqnoResponse
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

Release = Callable[[int, int], None]
"""Called with a link and a number of bytes: lets the link's server send that many bytes more."""


class TakenPieces(NamedTuple):
    pieces: list[Piece]
    vbuckets: set[VBucketId]
    """The vbuckets whose offset has moved."""


class Delivery:
    """The pieces that wait for the caller, and the offsets that the caller has reached."""

    def __init__(self, *, release: Release, held_bytes_max: int, open_spool: OpenSpool) -> None:
        self.offsets: dict[VBucketId, StreamOffset] = {}
        """By vbucket, the offset after the last piece that the caller has taken."""
        self.held_bytes = 0
        """Bytes in memory of incomplete snapshots."""
        self.waiting_bytes = 0
        self._release = release
        self._held_bytes_max = held_bytes_max
        self._open_spool = open_spool
        self._spool: Spool | None = None
        """Shared by all streams: one file for each could exceed the limit of open files."""
        self._held_by: dict[VBucketId, int] = {}
        self._waiting: deque[StreamItem] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    # --- from the streams -----------------------------------------------------------------------------------------

    def put(self, items: Iterable[StreamItem]) -> None:
        for item in items:
            self.waiting_bytes += item.data_bytes
            self._waiting.append(item)

    def note_held(self, stream: VBucketStream) -> None:
        """A stream holds more or less than before. If the memory limit is exceeded, its data goes to disk."""
        self._count_held(stream)
        if self.held_bytes > self._held_bytes_max and stream.held_bytes:
            self._put_on_disk(stream)
            self._count_held(stream)

    def _count_held(self, stream: VBucketStream) -> None:
        self.held_bytes += stream.held_bytes - self._held_by.get(stream.vbucket, 0)
        self._held_by[stream.vbucket] = stream.held_bytes

    def _put_on_disk(self, stream: VBucketStream) -> None:
        if self._spool is None or self._spool.is_closed:
            self._spool = Spool(self._open_spool)
        for item in stream.held:
            if isinstance(item.piece, ChangeRun):
                item.piece = self._spool.put(item.piece)
        stream.held_bytes = 0

    def release_held(self, streams: Iterable[VBucketStream]) -> None:
        """Acknowledge held data before the caller takes it: without more data, its snapshots would never be
        complete."""
        for stream in streams:
            for item in stream.held:
                self._release_window(item)

    def drop(self, items: Iterable[StreamItem]) -> None:
        """Drop items that will be requested again, or are no longer wanted."""
        for item in items:
            if isinstance(item.piece, SpooledRun):
                item.piece.drop()
            self._release_window(item)

    def close_vbucket(self, vbucket: VBucketId) -> None:
        """Deliver nothing more of this vbucket."""
        closed = [item for item in self._waiting if item.vbucket == vbucket]
        self.drop(closed)
        self.waiting_bytes -= sum(item.data_bytes for item in closed)
        self._waiting = deque(item for item in self._waiting if item.vbucket != vbucket)

    def close(self) -> None:
        """Close the temporary file."""
        if self._spool is not None:
            self._spool.close()

    # --- to the caller --------------------------------------------------------------------------------------------

    def take(self, bytes_max: int) -> TakenPieces:
        """Take the next pieces, up to about `bytes_max`, and at least one if any waits.

        The limit doubles in the middle of a snapshot, so that only large snapshots are split.
        """
        pieces: list[Piece] = []
        vbuckets: set[VBucketId] = set()
        taken_bytes = 0
        at_end_of_snapshot = True
        while self._waiting and taken_bytes < (bytes_max if at_end_of_snapshot else 2 * bytes_max):
            item = self._waiting.popleft()
            at_end_of_snapshot = item.offset.is_complete
            taken_bytes += item.data_bytes
            self.waiting_bytes -= item.data_bytes
            self.offsets[item.vbucket] = item.offset
            vbuckets.add(item.vbucket)
            self._release_window(item)
            if item.piece is not None:
                pieces.append(item.piece.load() if isinstance(item.piece, SpooledRun) else item.piece)
        return TakenPieces(pieces, vbuckets)

    def _release_window(self, item: StreamItem) -> None:
        if item.link:
            self._release(item.link, item.data_bytes)
            item.link = 0


# --- the persistence gate ---------------------------------------------------------------------------------------------
#
# A server streams a change as soon as it is in memory, and its replicas get it no sooner than the client. If the
# active node is lost at that moment, a replica takes over with what *it* has, a new branch of history begins there,
# and the consumer has to roll back. A consumer that can't undo what it has delivered can wait until every copy that
# could take over has the change on disk. This gate implements that wait. The reader sends the requests that the gate
# returns and reports the answers; `PersistenceHold` keeps the changes meanwhile.
#
# **What it asks.** Observe-seqno asks a node how far it has persisted a vbucket, on a branch given by its vbuuid. The
# gate names the branch on which the change was read, never the one on which the node is now. There are three possible
# answers:
#
# * The node is on that branch: it has persisted the branch up to `persisted_seqno`.
# * The node has moved to another branch (format 1), and has the requested one only up to `last_received_seqno`. Above
#   that, it has persisted other changes with the same numbers, so the lower of the two counts.
# * The node does not know the branch (KEY_ENOENT): it may share nothing with it, so nothing counts. That is common and
#   temporary: a replica learns of a new branch when it connects to the new active node.
#
# The gate releases a seqno when the active node and every replica have persisted it.
#
# **When an answer no longer counts.** An answer describes one node at one time. So a newer one replaces an older one
# even if it is lower, and all become void with a new cluster map (a copy may have been removed and added again, empty,
# between two maps that we saw), with a refusal, and when the connection is lost. An answer that was under way when it
# became void is ignored. Released seqnos stay released: the changes may already have been delivered.
#
# **Missing copies.** An unreachable node holds its vbuckets back until it answers or leaves the cluster map. A replica
# that the map lists as missing holds back, too, unless `missing_replicas_hold` is off: it can't take over now, but a
# failed-over node may return with less than we have, and take over later. If a bucket has fewer nodes than copies, the
# copies never appear, so the option must be off; with a single node, which is how a bucket starts, no other could take
# over, so missing replicas never hold. `stalled` finds a vbucket without progress, and `why_held` says what it waits
# for.
#
# **What it can't know.** A replica that takes over inside one of its snapshots starts its branch where that snapshot
# began, and the answer does not say where that is. So rollbacks become rare, not impossible, and a consumer must still
# handle them. An ephemeral bucket persists nothing, so its changes would be held forever.
#
# Other clients ask each copy for its own newest branch and compare those. After a failover the copies soon agree on a
# new branch that may lack some of the changes that are still held, and such a client then releases them.

INTERVAL_S = 0.5
"""How often a copy is asked about a vbucket while changes of it wait."""

REQUESTS_AT_ONCE_MAX = 512
"""Requests per call. Further due requests come first in the next call."""

REFUSED_PAUSE_S_MAX = 5.0
"""The longest pause before a copy that refuses is asked again. The pause doubles with each refusal."""

_DOUBLINGS_MAX = 16
_NEVER_S = float("-inf")


@dataclass(slots=True)
class _Copy:
    """What one node has answered about a vbucket."""

    persisted: Seqno | None = None
    """The persisted seqno on the branch in question; None if no valid answer is known."""
    refusals: int = 0
    """The number of refusals in a row."""
    ask_again_s: float = _NEVER_S

    def describe(self) -> str:
        if self.persisted is not None:
            return f"has persisted {self.persisted}"
        return "refuses to answer" if self.refusals else "has not answered yet"


@dataclass(slots=True)
class _Ask:
    """A request under way."""

    is_void: bool = False


@dataclass(slots=True)
class _HeldVBucket:
    """A vbucket whose changes wait, or have waited."""

    vbuuid: Vbuuid = Vbuuid(0)
    wanted: Seqno = Seqno(0)
    """The highest seqno that waits or has waited."""
    released: Seqno = Seqno(0)
    """Never above `wanted`: later changes need answers that are valid then."""
    copies: dict[Address, _Copy] = field(default_factory=dict)
    """The active node comes first, if there is one."""
    has_active: bool = False
    needed: int = 0
    """How many copies must have persisted a change, including the active one."""
    asked_s: float = _NEVER_S
    due_s: float | None = None
    """When to ask the copies next. It is set while something waits."""
    stuck_since_s: float | None = None
    """When the copies were first asked about what waits now. Reset by each release."""

    @property
    def is_waiting(self) -> bool:
        return self.released < self.wanted

    def release(self) -> bool:
        """Release what the answers allow. Returns whether that is more than before."""
        before = self.released
        if self.has_active and len(self.copies) >= self.needed:
            persisted = min(copy.persisted or Seqno(0) for copy in self.copies.values())
            self.released = max(before, min(self.wanted, persisted))
        if self.released > before:
            self.stuck_since_s = None
        return self.released > before

    def behind(self) -> list[tuple[Address, _Copy]]:
        """Return the copies that have not yet confirmed everything that waits."""
        return [(address, copy) for address, copy in self.copies.items() if (copy.persisted or 0) < self.wanted]


class PersistenceGate:
    """Knows up to which seqno the changes of each vbucket may be delivered, and which nodes to ask.

    All requests to a node must use one connection, so that answers come in the order of the requests.
    """

    def __init__(self, cluster_map: ClusterMap, *, missing_replicas_hold: bool = True) -> None:
        self._map = cluster_map
        self._missing_replicas_hold = missing_replicas_hold
        self._now_s = _NEVER_S
        self._held: dict[VBucketId, _HeldVBucket] = {}
        self._asked: dict[VBucketId, dict[Address, _Ask]] = {}
        """At most one request per vbucket and node is under way, so the next answer belongs to it."""
        self._queue: list[tuple[float, VBucketId]] = []
        """A heap. Entries whose time is not the vbucket's `due_s` are stale, and skipped."""

    # --- the changes ----------------------------------------------------------------------------------------------

    def wants(self, vbucket: VBucketId, vbuuid: Vbuuid, seqno: Seqno) -> None:
        """Changes that were read on this branch wait, up to this seqno.

        When the branch changes, answers about the old one no longer count. Changes that wait from the old branch wait
        on with the new one: a server that continued without a rollback has them in the new branch's history. After a
        rollback, call `on_rollback` first.
        """
        held = self._held.get(vbucket)
        if held is None or held.vbuuid != vbuuid:
            held = self._with_new_copies(vbucket, vbuuid, held)
        held.wanted = max(held.wanted, seqno)
        held.release()
        if held.is_waiting and held.due_s is None:
            self._enqueue(vbucket, held, held.asked_s + INTERVAL_S)

    def released_seqno(self, vbucket: VBucketId) -> Seqno:
        """Return the seqno up to which changes may be delivered; 0 if nothing is known."""
        held = self._held.get(vbucket)
        return Seqno(0) if held is None else held.released

    def on_rollback(self, vbucket: VBucketId) -> None:
        """Forget the vbucket: it was rolled back, or is no longer read.

        Changes that are still held after a rollback have to be passed to `wants` again.
        """
        self._make_void(vbucket)
        self._held.pop(vbucket, None)

    def stalled(self, now_s: float, *, after_s: float) -> VBucketId | None:
        """Return a vbucket that has waited for longer than `after_s` without a release, if there is one."""
        for vbucket, held in self._held.items():
            if held.is_waiting and held.stuck_since_s is not None and now_s - held.stuck_since_s > after_s:
                return vbucket
        return None

    def why_held(self, vbucket: VBucketId) -> str | None:
        """Describe what a vbucket waits for, for a log; None if it does not wait."""
        held = self._held.get(vbucket)
        if held is None or not held.is_waiting:
            return None
        reasons = [f"{address} {copy.describe()}" for address, copy in held.behind()]
        if not held.has_active:
            reasons.append("no node has it active")
        if len(held.copies) < held.needed:
            reasons.append(f"there are {len(held.copies)} of the {held.needed} copies that must have it")
        return f"vbucket {vbucket} waits for seqno {held.wanted} to be persisted: {', '.join(reasons)}"

    # --- the questions --------------------------------------------------------------------------------------------

    @property
    def nodes_waited_for(self) -> set[Address]:
        """The nodes that have to answer. Some may have only replicas of these vbuckets, and thus no stream."""
        waiting = (held for held in self._held.values() if held.is_waiting)
        return {address for held in waiting for address, _ in held.behind()}

    def requests_due(self, now_s: float, reachable: Container[Address]) -> list[tuple[Address, ObserveSeqno]]:
        """Return the requests that are due, with their nodes. They count as sent: the caller must report what becomes
        of them.

        The limit `REQUESTS_AT_ONCE_MAX` is approximate: all copies of the last vbucket are asked together.
        """
        self._now_s = now_s
        due: list[tuple[Address, ObserveSeqno]] = []
        while self._queue and self._queue[0][0] <= now_s and len(due) < REQUESTS_AT_ONCE_MAX:
            due_s, vbucket = heappop(self._queue)
            held = self._held.get(vbucket)
            if held is None or held.due_s != due_s:
                continue
            held.due_s = None
            if held.is_waiting:
                due += self._ask_copies(vbucket, held, reachable)
                held.asked_s = now_s
                held.stuck_since_s = now_s if held.stuck_since_s is None else held.stuck_since_s
                self._enqueue(vbucket, held, now_s + INTERVAL_S)
        return due

    def _ask_copies(
        self, vbucket: VBucketId, held: _HeldVBucket, reachable: Container[Address]
    ) -> list[tuple[Address, ObserveSeqno]]:
        requests = []
        asked = self._asked.setdefault(vbucket, {})
        for address, copy in held.behind():
            if address in reachable and address not in asked and copy.ask_again_s <= self._now_s:
                asked[address] = _Ask()
                requests.append((address, ObserveSeqno(vbucket=vbucket, vbuuid=held.vbuuid)))
        return requests

    # --- the answers ----------------------------------------------------------------------------------------------

    def on_observed(self, node: Address, request: ObserveSeqno, answer: ObserveSeqnoResponse) -> bool:
        """A node has answered. Returns whether more of the vbucket is released than before."""
        if answer.vbucket != request.vbucket:
            raise UnexpectedMessage(f"the seqnos of vbucket {answer.vbucket}, when {request.vbucket} was asked for")
        held = self._take_ask(node, request)
        if held is None:
            return False
        copy = held.copies[node]
        copy.persisted = persisted_on_branch(request.vbuuid, answer)
        copy.refusals = 0
        return held.release()

    def on_refused(self, node: Address, request: ObserveSeqno, error: StatusError) -> None:
        """A node has refused to answer: its earlier answer no longer counts, and it is asked again later.

        Raises the error if it is not temporary.
        """
        if not (error.retriable or isinstance(error, KeyNotFound)):
            raise error
        held = self._take_ask(node, request)
        if held is None:
            return
        copy = held.copies[node]
        copy.persisted = None
        copy.refusals = min(copy.refusals + 1, _DOUBLINGS_MAX)
        copy.ask_again_s = self._now_s + min(INTERVAL_S * 2**copy.refusals, REFUSED_PAUSE_S_MAX)

    def on_disconnected(self, node: Address) -> None:
        """The connection to a node is lost: it will not answer, and may return with less data than before."""
        for asked in self._asked.values():
            asked.pop(node, None)
        for held in self._held.values():
            if node in held.copies:
                held.copies[node] = _Copy()

    def on_cluster_map(self, cluster_map: ClusterMap) -> None:
        """The copies may have moved."""
        if cluster_map == self._map:
            return
        self._map = cluster_map
        for vbucket, held in self._held.items():
            self._with_new_copies(vbucket, held.vbuuid, held)

    def _take_ask(self, node: Address, request: ObserveSeqno) -> _HeldVBucket | None:
        """Return the vbucket of an answered request; None if the answer no longer counts."""
        ask = self._asked.get(request.vbucket, {}).pop(node, None)
        return None if ask is None or ask.is_void else self._held[request.vbucket]

    def _make_void(self, vbucket: VBucketId) -> None:
        for ask in self._asked.get(vbucket, {}).values():
            ask.is_void = True

    # --- the copies -----------------------------------------------------------------------------------------------

    def _with_new_copies(self, vbucket: VBucketId, vbuuid: Vbuuid, before: _HeldVBucket | None) -> _HeldVBucket:
        """Set a vbucket's copies from the cluster map. Nothing is known about them yet."""
        self._make_void(vbucket)
        row = self._map.vbucket_nodes[vbucket] if vbucket < self._map.vbuckets else (-1,)
        present = [self._map.nodes[node] for node in row if node >= 0]
        missing_hold = self._missing_replicas_hold and len(self._map.nodes) > 1
        held = before or _HeldVBucket()
        held.vbuuid = vbuuid
        held.copies = {address: _Copy() for address in present}
        held.has_active = row[0] >= 0
        held.needed = len(row) if missing_hold else len(present)
        self._held[vbucket] = held
        return held

    def _enqueue(self, vbucket: VBucketId, held: _HeldVBucket, due_s: float) -> None:
        held.due_s = due_s
        heappush(self._queue, (due_s, vbucket))


def persisted_on_branch(vbuuid: Vbuuid, answer: ObserveSeqnoResponse) -> Seqno:
    """Return how much of a branch a node has persisted, from its answer about that branch."""
    if answer.vbuuid == vbuuid:
        return answer.persisted_seqno
    if answer.old_vbuuid == vbuuid and answer.last_received_seqno is not None:
        return min(answer.persisted_seqno, answer.last_received_seqno)
    # The answer is about other branches.
    return Seqno(0)


# --- what waits for the gate --------------------------------------------------------------------------------------


class PersistenceHold:
    """The changes that the gate has not released yet, by vbucket. They wait here before the caller's queue.

    The caller has not seen what waits, so a rollback drops it silently. The caller gets a rollback piece only for
    changes that were released before.
    """

    def __init__(self, gate: PersistenceGate, delivery: Delivery, *, whole_snapshots: bool) -> None:
        self.gate = gate
        self._delivery = delivery
        self._whole_snapshots = whole_snapshots
        self._waiting: dict[VBucketId, deque[StreamItem]] = {}
        self._released_seqnos: dict[VBucketId, Seqno] = {}

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def put(self, items: Iterable[StreamItem]) -> None:
        for item in items:
            if isinstance(item.piece, RollbackPiece):
                self._roll_back(item)
            else:
                self._waiting.setdefault(item.vbucket, deque()).append(item)
                self.gate.wants(item.vbucket, item.offset.vbuuid, self._needed(item))
                self._release(item.vbucket)

    def on_answer(self, node: Address, request: ObserveSeqno, answer: Response, refusal: StatusError | None) -> None:
        if refusal is not None:
            self.gate.on_refused(node, request, refusal)
        else:
            assert isinstance(answer, ObserveSeqnoResponse)
            if self.gate.on_observed(node, request, answer):
                self._release(request.vbucket)

    def close_vbucket(self, vbucket: VBucketId) -> None:
        """Drop a vbucket that is no longer read."""
        self._delivery.drop(self._waiting.pop(vbucket, ()))
        self._released_seqnos.pop(vbucket, None)
        self.gate.on_rollback(vbucket)

    def _needed(self, item: StreamItem) -> Seqno:
        """Return the seqno that must be persisted before the item is released: with whole snapshots, the snapshot's
        end."""
        return item.offset.snapshot_end if self._whole_snapshots else item.offset.seqno

    def _release(self, vbucket: VBucketId) -> None:
        released = self.gate.released_seqno(vbucket)
        waiting = self._waiting[vbucket]
        while waiting and self._needed(waiting[0]) <= released:
            item = waiting.popleft()
            self._released_seqnos[vbucket] = item.offset.seqno
            self._delivery.put([item])
        if not waiting:
            del self._waiting[vbucket]

    def _roll_back(self, rollback: StreamItem) -> None:
        vbucket, kept = rollback.vbucket, rollback.offset.seqno
        waiting = self._waiting.pop(vbucket, deque())
        self._delivery.drop(item for item in waiting if item.offset.seqno > kept)
        self.gate.on_rollback(vbucket)
        released = self._released_seqnos.get(vbucket, self._delivery.offsets[vbucket].seqno)
        if released > kept:
            assert isinstance(rollback.piece, RollbackPiece)
            self._released_seqnos[vbucket] = kept
            self._delivery.put([replace(rollback, piece=replace(rollback.piece, from_seqno=released))])
        self.put(item for item in waiting if item.offset.seqno <= kept)
