"""The failover log, the branches of a vbucket's history, and the rollback decision, which rests on it.

An entry `(vbuuid, seqno)` says that from `seqno` on the history is named `vbuuid`. A new entry is added whenever two
copies could have diverged: when a vbucket becomes active, and after an unclean stop (Failure Scenarios; Stream
Request, "VBucket UUID"). The newest entry comes first, as on the wire.

The producer decides with `decide_rollback`; the client checks what it receives against a `FailoverLog`. Nothing here
handles bytes, streams or stored changes.

Sources are cited by title: the seeds "Stream Request", "Add Stream" and "Protocol Flow", and "Rollback" and "Failure
Scenarios" of kv_engine's docs/dcp/documentation. "Recorded of 7.0.5" cites a recorded session of such a server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headwater.errors import LocalProtocolError, MalformedMessage
from headwater.protocol.numbers import FAILOVER_LOG_ENTRIES_MAX, Seqno, Vbuuid


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverEntry:
    """From `seqno` on, the history is called `vbuuid`."""

    vbuuid: Vbuuid
    seqno: Seqno


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """All branches that are remembered, newest first. A change returns a new log."""

    entries: tuple[FailoverEntry, ...]

    def __post_init__(self) -> None:
        if not self.entries:
            raise LocalProtocolError("a failover log has at least one entry")

    @classmethod
    def start(cls, vbuuid: Vbuuid) -> FailoverLog:
        """The log of a new vbucket."""
        return cls((FailoverEntry(vbuuid=vbuuid, seqno=Seqno(0)),))

    @property
    def newest(self) -> FailoverEntry:
        return self.entries[0]

    def knows(self, vbuuid: Vbuuid) -> bool:
        return any(entry.vbuuid == vbuuid for entry in self.entries)

    def branch(self, vbuuid: Vbuuid, *, at_seqno: Seqno) -> FailoverLog:
        """Return the log with a new branch that begins at `at_seqno`. Beyond the limit the oldest entries are dropped.

        Entries that began later than this one belong to a history that did not happen, and are dropped.
        """
        older = [entry for entry in self.entries if entry.seqno <= at_seqno and entry.vbuuid != vbuuid]
        newest = FailoverEntry(vbuuid=vbuuid, seqno=at_seqno)
        return FailoverLog((newest, *older)[:FAILOVER_LOG_ENTRIES_MAX])

    def truncate(self, to_seqno: Seqno) -> FailoverLog:
        """Return the log after a rollback to `to_seqno`: without the branches that began after it.

        A vbucket that rolls back to before its first entry keeps its oldest branch, now from `to_seqno` on.
        """
        kept = [entry for entry in self.entries if entry.seqno <= to_seqno]
        return FailoverLog(tuple(kept) or (FailoverEntry(vbuuid=self.entries[-1].vbuuid, seqno=to_seqno),))

    def branch_end(self, vbuuid: Vbuuid, *, high_seqno: Seqno) -> Seqno | None:
        """Return the last seqno that a holder of `vbuuid` shares with this history, or None for an unknown branch.

        That is where the next newer branch began, or the high seqno for the newest one (Rollback, case 4, "upper").
        """
        end = high_seqno
        for entry in self.entries:
            if entry.vbuuid == vbuuid:
                return end
            end = entry.seqno
        return None

    def vbuuid_at(self, seqno: Seqno) -> Vbuuid:
        """Return the branch that the change with this seqno belongs to."""
        for entry in self.entries:
            # A branch that begins at a seqno names what comes after it.
            if entry.seqno < seqno:
                return entry.vbuuid
        return self.entries[-1].vbuuid

    @classmethod
    def of(cls, entries: Iterable[FailoverEntry]) -> FailoverLog:
        """Return a log received from a peer, cut to the limit. Raises `MalformedMessage` if it is empty."""
        received = tuple(entries)
        if not received:
            raise MalformedMessage("a failover log has at least one entry")
        return cls(received[:FAILOVER_LOG_ENTRIES_MAX])


# --- the rollback decision --------------------------------------------------------------------------------------------
#
# Can a consumer continue from where it says it is? Its point is the branch it knows (`vbuuid`), the last seqno it has
# (`start_seqno`) and the snapshot that seqno came in. A consumer that stopped inside a snapshot holds a state that
# never existed: some keys are newer than others. It can only continue to the end of that same snapshot, so the whole
# snapshot must be part of our history, and not just the seqno. That is why the snapshot's end, not the seqno, is
# compared with the end of the shared branch (Rollback, "Snapshot").


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
class RollbackDemand:
    """The consumer must roll back to `to_seqno` and ask again (Protocol Flow, "Starting the Stream", 2 to 4)."""

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
) -> RollbackDemand | None:
    """Return the rollback that the producer must demand, or None if the consumer can continue.

    The log and the seqnos are the producer's; `strict_vbuuid` and `ignore_purged_tombstones` are the request's flags
    0x20 and 0x80. The cases are those of "Rollback logic on DCP Producer" in Rollback, in its order.
    """
    start = point.start_seqno
    # Rollback, case 1a: a consumer with nothing has nothing to roll back. Case 1b asks for a known vbuuid at seqno 0,
    # too; servers do that only under the flag 0x20 (Add Stream, "Strict VBUUID match"; recorded of 7.0.5).
    if start == 0 and (point.vbuuid == 0 or not strict_vbuuid):
        return None
    # Rollback, case 2, "Purge": deletions between its seqno and the purge seqno are gone, and it would keep those
    # documents for ever. The flag 0x80 opts out. A consumer that has seen this very purge seqno has read the deletions
    # before they were purged (Stream Request Value, `purge_seqno`).
    may_miss_deletions = 0 < start < purge_seqno and point.purge_seqno != purge_seqno
    if may_miss_deletions and not ignore_purged_tombstones:
        return RollbackDemand(to_seqno=Seqno(0), reason="deletions after the start seqno have been purged")
    # Rollback, case 3, "Diverging History".
    shared_until = failover_log.branch_end(point.vbuuid, high_seqno=high_seqno)
    if shared_until is None:
        return RollbackDemand(to_seqno=Seqno(0), reason="the vbuuid is not in the failover log")
    # Before case 4 the producer adjusts the snapshot: a consumer at its start holds nothing of it.
    snapshot_start, snapshot_end = point.snapshot_start_seqno, point.snapshot_end_seqno
    if start == snapshot_start:
        snapshot_end = start
    # Case 4a, "Full history match". A start beyond the high seqno of the right branch continues with case 4b: recorded
    # of 7.0.5, which asks for a rollback to its high seqno. The seed Stream Request has ERANGE for it.
    if snapshot_end <= shared_until:
        return None
    # The other adjustment: a consumer at the end of the snapshot holds all of it, so its state is consistent there.
    if start == snapshot_end:
        snapshot_start = start
    # Cases 4b and 4c, "Partial history match".
    if shared_until < snapshot_start:
        return RollbackDemand(to_seqno=shared_until, reason="the histories part before the consumer's snapshot")
    return RollbackDemand(to_seqno=snapshot_start, reason="the histories part inside the consumer's snapshot")
