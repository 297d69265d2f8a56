"""What the reader hands out: pieces of the changes, in order.

Within a vbucket the order of the pieces is the stream's. A run holds frames as they were received, so that nothing is
done per change before the bulk kernels see them.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.system_events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRun:
    """Mutations, deletions and expirations of one vbucket and snapshot, one frame behind the other."""

    vbucket: VBucketId
    vbuuid: Vbuuid
    """The branch of history that they were read on."""
    snapshot_start: Seqno
    snapshot_end: Seqno
    rows: int
    data: bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPiece:
    """A collection or a scope has come, gone or changed."""

    vbucket: VBucketId
    vbuuid: Vbuuid
    snapshot_start: Seqno
    snapshot_end: Seqno
    seqno: Seqno
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPiece:
    """What was handed out of this vbucket above `seqno` never happened, as far as the bucket is concerned."""

    vbucket: VBucketId
    seqno: Seqno
    """The last seqno that stays."""
    from_seqno: Seqno
    """The last seqno that had been handed out."""
    old_vbuuid: Vbuuid
    new_vbuuid: Vbuuid


Piece = ChangeRun | EventPiece | RollbackPiece
