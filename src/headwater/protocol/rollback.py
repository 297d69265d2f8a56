"""The rollback decision: can a consumer go on from where it says it is?

A consumer's point is the branch it knows (`vbuuid`), the last seqno it has (`start_seqno`) and the snapshot that seqno
came in. A consumer that stopped inside a snapshot holds a state that never was: some keys are newer than others. It
can only go on to the end of that same snapshot, so the whole snapshot must be part of our history, and not just the
seqno. That is why the snapshot's end, not the seqno, is held against the end of the shared branch.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.numbers import Seqno, Vbuuid


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerPoint:
    """Where a consumer says it is."""

    vbuuid: Vbuuid
    start_seqno: Seqno
    snapshot_start_seqno: Seqno
    snapshot_end_seqno: Seqno
    purge_seqno: Seqno | None = None
    """The purge seqno it has seen in a snapshot marker, if any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The consumer must go back to `to_seqno` and ask again."""

    to_seqno: Seqno
    reason: str


def decide_rollback(
    point: ConsumerPoint,
    *,
    failover_log: FailoverLog,
    high_seqno: Seqno,
    purge_seqno: Seqno,
    strict_vbuuid: bool = False,
    ignore_purged_tombstones: bool = False,
) -> Rollback | None:
    """The rollback the producer must demand, or None where the consumer can go on."""
    start = point.start_seqno
    if start == 0 and (point.vbuuid == 0 or not strict_vbuuid):
        # A consumer with nothing has nothing to roll back.
        return None
    # Deletions between its seqno and the purge seqno are gone: it would keep those documents for ever. One that has
    # seen this very purge seqno has read them before they went.
    may_miss_deletions = 0 < start < purge_seqno and point.purge_seqno != purge_seqno
    if may_miss_deletions and not ignore_purged_tombstones:
        return Rollback(to_seqno=Seqno(0), reason="deletions after the start seqno have been purged")
    shared_until = failover_log.branch_end(point.vbuuid, high_seqno=high_seqno)
    if shared_until is None:
        return Rollback(to_seqno=Seqno(0), reason="the vbuuid is not in the failover log")
    snapshot_start, snapshot_end = point.snapshot_start_seqno, point.snapshot_end_seqno
    if start == snapshot_start:
        # It holds nothing of that snapshot.
        snapshot_end = start
    if snapshot_end <= shared_until:
        return None
    if start == snapshot_end:
        # It holds the whole snapshot, so its state is consistent at its very seqno.
        snapshot_start = start
    if shared_until < snapshot_start:
        return Rollback(to_seqno=shared_until, reason="the histories part before the consumer's snapshot")
    return Rollback(to_seqno=snapshot_start, reason="the histories part inside the consumer's snapshot")
