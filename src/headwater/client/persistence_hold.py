"""Where changes wait until the persistence gate lets them go, between the streams and the queue for the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from headwater.client.connection_string import Address
from headwater.client.hand_out import HandOut
from headwater.client.persistence_gate import PersistenceGate
from headwater.client.pieces import RollbackPiece
from headwater.client.vbucket_stream import Passed
from headwater.errors import StatusError
from headwater.protocol.messages import Response
from headwater.protocol.messages.vbuckets import ObserveSeqno, ObserveSeqnoResponse
from headwater.protocol.numbers import Seqno, VBucketId


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
