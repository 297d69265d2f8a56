"""The queue between the streams and the caller, the flow control that bounds it, and the gate that holds changes back
until no failover can take them away.

A server may send as much as fits its window, and gets room back when the caller takes pieces, so the caller's speed
bounds what waits here. Snapshots that are not complete can't be taken, and one larger than the window could never be
completed: so when nothing waits for the caller, what is held is acknowledged without being taken, and goes to a
temporary file where it is more than memory is meant for. At any time at most a window of every connection and
`held_bytes_max` are in memory.

The reader puts in what streams deliver, in order; `PersistenceHold` may stand between the two. Nothing
is reordered or left out here, but for vbuckets that are closed.
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
"""Lets the server of a link send as many bytes again: the link, and the bytes."""


class TakenPieces(NamedTuple):
    pieces: list[Piece]
    vbuckets: set[VBucketId]
    """Those whose offset has moved."""


class Delivery:
    """What waits for the caller, and the offsets that the caller has come to."""

    def __init__(self, *, release: Release, held_bytes_max: int, open_spool: OpenSpool) -> None:
        self.offsets: dict[VBucketId, StreamOffset] = {}
        """Behind the last piece that the caller has taken, by vbucket."""
        self.held_bytes = 0
        """In memory, of snapshots that are not complete."""
        self.waiting_bytes = 0
        self._release = release
        self._held_bytes_max = held_bytes_max
        self._open_spool = open_spool
        self._spool: Spool | None = None
        """One for all streams: a file each would be more than a process may have."""
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
        """A stream holds more or less than before. Where the memory for that is used up, it goes to disk."""
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
        """Acknowledge what streams hold, though no caller has taken it: without more there will be nothing to take."""
        for stream in streams:
            for item in stream.held:
                self._release_window(item)

    def drop(self, items: Iterable[StreamItem]) -> None:
        """These will be asked for again, or are not wanted any more."""
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
        """Leave no file open."""
        if self._spool is not None:
            self._spool.close()

    # --- to the caller --------------------------------------------------------------------------------------------

    def take(self, bytes_max: int) -> TakenPieces:
        """The next pieces, up to about that many bytes, and at least one if any waits.

        A snapshot is not cut in two for being a little too much; a large one is.
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
# A server streams a change as soon as it has it in memory, and its replicas get it no sooner than we do. If the active
# node is lost at that moment, a replica takes its place with what *it* has, a new branch of history begins there, and
# the consumer has to roll back. A consumer that can't undo what it has delivered can wait until every copy that could
# take over has the change on disk. That is what this gate is for. The reader asks what the gate wants asked and reports
# the answers; `PersistenceHold` keeps the changes meanwhile.
#
# **What it asks.** Observe-seqno asks a node how far it has persisted a vbucket, and names a branch by its vbuuid. The
# gate names the branch that the change was read on, never the one that a node happens to be on now. There are three
# answers:
#
# * The node is on that branch: it has persisted the branch up to `persisted_seqno`.
# * The node has moved to another branch (format 1), and holds the one asked for up to `last_received_seqno` only. What
#   it has persisted above that are other changes with the same numbers, so the lower of the two counts.
# * The node does not know the branch (KEY_ENOENT): it may share nothing with it, and nothing counts. That is common,
#   and passes: a replica learns of a new branch when it connects to the new active node.
#
# A seqno is released when the active node and every replica have persisted it.
#
# **When an answer no longer counts.** An answer is about the node that gave it, at the time it gave it. So a newer one
# takes the place of an older one even where it is lower, and all are void with a new cluster map (a copy may have been
# taken away and put back, empty, between two maps that we have seen), with a refusal, and with the loss of the
# connection. An answer that was under way when it became void is ignored. What has been released stays released: it may
# have been delivered in the same moment.
#
# **Copies that are not there.** A node out of reach holds its vbuckets back, until it answers or the cluster map is
# without it. A replica that the map lists as missing holds back, too, unless `missing_replicas_hold` is off: it can't
# take over now, but a node that was failed over may come back behind us, and take over later. A bucket on fewer nodes
# than it is to have copies never gets them, so there the option has to be off; on one node, which is how a bucket
# begins, no other could take over, and missing replicas never hold. `stalled` finds a vbucket that gets no further, and
# `why_held` says what it waits for.
#
# **What it can't know.** A replica that takes over inside a snapshot of its own begins its branch where that snapshot
# began, and the answer does not say where that is. So rollbacks become rare, not impossible, and a consumer must still
# know what to do with one. An ephemeral bucket persists nothing, and would be held for ever.
#
# Other clients ask each copy for its own newest branch and compare those. After a failover the copies soon agree again,
# on a branch that never had some of the changes that are still held, and such a client releases them.

INTERVAL_S = 0.5
"""How often a copy is asked about a vbucket while something of it waits."""

REQUESTS_AT_ONCE_MAX = 512
"""Requests of one call. What is due beyond that comes first in the next one."""

REFUSED_PAUSE_S_MAX = 5.0
"""A copy that refuses is asked less and less often, down to this."""

_DOUBLINGS_MAX = 16
_NEVER_S = float("-inf")


@dataclass(slots=True)
class _Copy:
    """What one node has said of a vbucket."""

    persisted: Seqno | None = None
    """On the branch that is waited for; None while nothing is known that counts."""
    refusals: int = 0
    """In a row."""
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
    """A vbucket of which something waits, or has waited."""

    vbuuid: Vbuuid = Vbuuid(0)
    wanted: Seqno = Seqno(0)
    """The highest seqno that waits, or has waited."""
    released: Seqno = Seqno(0)
    """Never more than was wanted: what is wanted later has to be backed by answers that count then."""
    copies: dict[Address, _Copy] = field(default_factory=dict)
    """The active node first, if there is one."""
    has_active: bool = False
    needed: int = 0
    """How many copies must have persisted a change, the active one among them."""
    asked_s: float = _NEVER_S
    due_s: float | None = None
    """When the copies are to be asked. It is set while something waits."""
    stuck_since_s: float | None = None
    """When the copies were first asked for what waits now, and since when nothing was released."""

    @property
    def is_waiting(self) -> bool:
        return self.released < self.wanted

    def release(self) -> bool:
        """Release what the answers allow. True if that is more than before."""
        before = self.released
        if self.has_active and len(self.copies) >= self.needed:
            persisted = min(copy.persisted or Seqno(0) for copy in self.copies.values())
            self.released = max(before, min(self.wanted, persisted))
        if self.released > before:
            self.stuck_since_s = None
        return self.released > before

    def behind(self) -> list[tuple[Address, _Copy]]:
        """The copies that have not yet said that they have persisted all that waits."""
        return [(address, copy) for address, copy in self.copies.items() if (copy.persisted or 0) < self.wanted]


class PersistenceGate:
    """Knows for every vbucket up to which seqno changes may be delivered, and which node to ask to find out.

    All requests to one node go over one connection: answers come in the order of their requests.
    """

    def __init__(self, cluster_map: ClusterMap, *, missing_replicas_hold: bool = True) -> None:
        self._map = cluster_map
        self._missing_replicas_hold = missing_replicas_hold
        self._now_s = _NEVER_S
        self._held: dict[VBucketId, _HeldVBucket] = {}
        self._asked: dict[VBucketId, dict[Address, _Ask]] = {}
        """At most one request for a vbucket is under way to a node, so its next answer is the answer to that."""
        self._queue: list[tuple[float, VBucketId]] = []
        """A heap. An entry whose time is not the vbucket's `due_s` is left over, and skipped."""

    # --- the changes ----------------------------------------------------------------------------------------------

    def wants(self, vbucket: VBucketId, vbuuid: Vbuuid, seqno: Seqno) -> None:
        """Something that was read on this branch waits, up to this seqno.

        With another branch than before, what is known of the old one is of no use. What waits from the old branch waits
        on with the new one: a server that went on from there without a rollback has it in the new branch's history.
        After a rollback, `on_rollback` has to come first.
        """
        held = self._held.get(vbucket)
        if held is None or held.vbuuid != vbuuid:
            held = self._with_new_copies(vbucket, vbuuid, held)
        held.wanted = max(held.wanted, seqno)
        held.release()
        if held.is_waiting and held.due_s is None:
            self._enqueue(vbucket, held, held.asked_s + INTERVAL_S)

    def released_seqno(self, vbucket: VBucketId) -> Seqno:
        """Up to here, all that was wanted may be delivered. 0 where nothing is known."""
        held = self._held.get(vbucket)
        return Seqno(0) if held is None else held.released

    def on_rollback(self, vbucket: VBucketId) -> None:
        """Nothing of this vbucket waits any more: it was rolled back, or is no longer read.

        What is still held of it after a rollback has to be wanted again.
        """
        self._make_void(vbucket)
        self._held.pop(vbucket, None)

    def stalled(self, now_s: float, *, after_s: float) -> VBucketId | None:
        """A vbucket of which something waits, and nothing has been released for longer than that."""
        for vbucket, held in self._held.items():
            if held.is_waiting and held.stuck_since_s is not None and now_s - held.stuck_since_s > after_s:
                return vbucket
        return None

    def why_held(self, vbucket: VBucketId) -> str | None:
        """What a vbucket waits for, in words for a log; None where it does not wait."""
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
        """The nodes that have to answer. Some may have replicas only of what is read, and so no stream."""
        waiting = (held for held in self._held.values() if held.is_waiting)
        return {address for held in waiting for address, _ in held.behind()}

    def requests_due(self, now_s: float, reachable: Container[Address]) -> list[tuple[Address, ObserveSeqno]]:
        """What to ask now, and of which node. It counts as asked: the caller has to report what becomes of it.

        At most about `REQUESTS_AT_ONCE_MAX`: all copies of the last vbucket are asked together.
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
        """A node has answered. True if more of the vbucket is released than before."""
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
        """A node has refused to answer: what it said before no longer counts, and it is asked again later.

        Raises the error where it will not pass by itself.
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
        """The connection to a node is gone: it will not answer, and may come back with less than it had."""
        for asked in self._asked.values():
            asked.pop(node, None)
        for held in self._held.values():
            if node in held.copies:
                held.copies[node] = _Copy()

    def on_cluster_map(self, cluster_map: ClusterMap) -> None:
        """The copies may be elsewhere now."""
        if cluster_map == self._map:
            return
        self._map = cluster_map
        for vbucket, held in self._held.items():
            self._with_new_copies(vbucket, held.vbuuid, held)

    def _take_ask(self, node: Address, request: ObserveSeqno) -> _HeldVBucket | None:
        """What the answer to a request is about; None if it no longer matters."""
        ask = self._asked.get(request.vbucket, {}).pop(node, None)
        return None if ask is None or ask.is_void else self._held[request.vbucket]

    def _make_void(self, vbucket: VBucketId) -> None:
        for ask in self._asked.get(vbucket, {}).values():
            ask.is_void = True

    # --- the copies -----------------------------------------------------------------------------------------------

    def _with_new_copies(self, vbucket: VBucketId, vbuuid: Vbuuid, before: _HeldVBucket | None) -> _HeldVBucket:
        """A vbucket with the copies that the cluster map has, of which nothing is known yet."""
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
    """How much of a branch a node has persisted, by its answer when it was asked for that branch."""
    if answer.vbuuid == vbuuid:
        return answer.persisted_seqno
    if answer.old_vbuuid == vbuuid and answer.last_received_seqno is not None:
        return min(answer.persisted_seqno, answer.last_received_seqno)
    # It is about branches that were not asked for.
    return Seqno(0)


# --- what waits for the gate --------------------------------------------------------------------------------------


class PersistenceHold:
    """What the gate has not released yet, vbucket by vbucket, between the streams and the queue for the caller.

    No caller has seen what waits, so a rollback drops it in silence. The caller gets a rollback piece only for what was
    released before.
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
        """The vbucket is not read any more."""
        self._delivery.drop(self._waiting.pop(vbucket, ()))
        self._released_seqnos.pop(vbucket, None)
        self.gate.on_rollback(vbucket)

    def _needed(self, item: StreamItem) -> Seqno:
        """What has to be persisted before the item is released. A snapshot that is to come whole is released whole."""
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
