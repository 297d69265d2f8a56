"""The queue between the streams and the caller, and the flow control that bounds it.

A server may send as much as fits its window, and gets room back when the caller takes pieces, so the caller's speed
bounds what waits here. Snapshots that are not complete can't be taken, and one larger than the window could never be
completed: so when nothing waits for the caller, what is held is acknowledged without being taken, and goes to a
temporary file where it is more than memory is meant for. At any time there is in memory at most a window of every
connection and `held_bytes_max`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from headwater.client.connection_string import Address
from headwater.client.persistence_gate import PersistenceGate
from headwater.client.pieces import ChangeRun, OpenSpool, Piece, RollbackPiece, Spool, SpooledRun
from headwater.client.vbucket_stream import Passed, VBucketStream
from headwater.errors import StatusError
from headwater.protocol.messages import Response
from headwater.protocol.messages.vbuckets import ObserveSeqno, ObserveSeqnoResponse
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset

Release = Callable[[int, int], None]
"""Gives a link room back: the link, and the bytes."""


class Taken(NamedTuple):
    pieces: list[Piece]
    vbuckets: set[VBucketId]
    """Where the caller's place has moved."""


class HandOut:
    """What waits for the caller, and where the caller is."""

    def __init__(self, *, release: Release, held_bytes_max: int, open_spool: OpenSpool) -> None:
        self.offsets: dict[VBucketId, StreamOffset] = {}
        """Where the caller is."""
        self.held_bytes = 0
        """In memory, of snapshots that are not complete."""
        self.waiting_bytes = 0
        self._release = release
        self._held_bytes_max = held_bytes_max
        self._open_spool = open_spool
        self._spool: Spool | None = None
        """One for all streams: a file each would be more than a process may have."""
        self._held_by: dict[VBucketId, int] = {}
        self._waiting: deque[Passed] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    # --- from the streams -----------------------------------------------------------------------------------------

    def put(self, passed: Iterable[Passed]) -> None:
        for item in passed:
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
        """Acknowledge what streams hold, though nobody has taken it: without more there will be nothing to take."""
        for stream in streams:
            for item in stream.held:
                self._release_window(item)

    def drop(self, dropped: Iterable[Passed]) -> None:
        """These will be asked for again."""
        for item in dropped:
            if isinstance(item.piece, SpooledRun):
                item.piece.drop()
            self._release_window(item)

    def leave(self, vbucket: VBucketId) -> None:
        """Nobody wants what waits of this vbucket."""
        left = [item for item in self._waiting if item.vbucket == vbucket]
        self.drop(left)
        self.waiting_bytes -= sum(item.data_bytes for item in left)
        self._waiting = deque(item for item in self._waiting if item.vbucket != vbucket)

    def close(self) -> None:
        """Leave no file open."""
        if self._spool is not None:
            self._spool.close()

    # --- to the caller --------------------------------------------------------------------------------------------

    def take(self, bytes_max: int) -> Taken:
        """What waits, up to about that many bytes, and at least one piece if there is any.

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
        return Taken(pieces, vbuckets)

    def _release_window(self, item: Passed) -> None:
        if item.link:
            self._release(item.link, item.data_bytes)
            item.link = 0


# Where changes wait until the persistence gate lets them go, between the streams and the queue for the caller.


class PersistenceHold:
    """What the gate has not let go yet, vbucket by vbucket.

    What waits has not been seen by anybody, so a rollback takes it back in silence. Only what went through before is
    told of.
    """

    def __init__(self, gate: PersistenceGate, hand_out: HandOut, *, whole_snapshots: bool) -> None:
        self.gate = gate
        self._hand_out = hand_out
        self._whole_snapshots = whole_snapshots
        self._waiting: dict[VBucketId, deque[Passed]] = {}
        self._passed_seqnos: dict[VBucketId, Seqno] = {}

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def put(self, passed: Iterable[Passed]) -> None:
        for item in passed:
            if isinstance(item.piece, RollbackPiece):
                self._roll_back(item)
            else:
                self._waiting.setdefault(item.vbucket, deque()).append(item)
                self.gate.wants(item.vbucket, item.offset.vbuuid, self._needed(item))
                self._let_go(item.vbucket)

    def on_answer(self, node: Address, request: ObserveSeqno, answer: Response, refusal: StatusError | None) -> None:
        if refusal is not None:
            self.gate.on_refused(node, request, refusal)
        else:
            assert isinstance(answer, ObserveSeqnoResponse)
            if self.gate.on_observed(node, request, answer):
                self._let_go(request.vbucket)

    def leave(self, vbucket: VBucketId) -> None:
        """The vbucket is no longer read: nobody wants what waits of it."""
        self._hand_out.drop(self._waiting.pop(vbucket, ()))
        self._passed_seqnos.pop(vbucket, None)
        self.gate.on_rollback(vbucket)

    def _needed(self, item: Passed) -> Seqno:
        """What has to be persisted before the item may go. A snapshot that is to come whole goes as a whole."""
        return item.offset.snapshot_end if self._whole_snapshots else item.offset.seqno

    def _let_go(self, vbucket: VBucketId) -> None:
        released = self.gate.released_seqno(vbucket)
        waiting = self._waiting[vbucket]
        while waiting and self._needed(waiting[0]) <= released:
            item = waiting.popleft()
            self._passed_seqnos[vbucket] = item.offset.seqno
            self._hand_out.put([item])
        if not waiting:
            del self._waiting[vbucket]

    def _roll_back(self, rollback: Passed) -> None:
        vbucket, kept = rollback.vbucket, rollback.offset.seqno
        waiting = self._waiting.pop(vbucket, deque())
        self._hand_out.drop(item for item in waiting if item.offset.seqno > kept)
        self.gate.on_rollback(vbucket)
        passed = self._passed_seqnos.get(vbucket, self._hand_out.offsets[vbucket].seqno)
        if passed > kept:
            assert isinstance(rollback.piece, RollbackPiece)
            self._passed_seqnos[vbucket] = kept
            self._hand_out.put([replace(rollback, piece=replace(rollback.piece, from_seqno=passed))])
        self.put(item for item in waiting if item.offset.seqno <= kept)
