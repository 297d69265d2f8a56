"""The failover log: the branches of a vbucket's history.

An entry `(vbuuid, seqno)` says that from `seqno` on the history goes by the name `vbuuid`. A new entry is added
whenever two copies could have gone different ways: when a vbucket becomes active, and after an unclean stop. The
newest entry comes first, as on the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headwater.errors import LocalProtocolError, MalformedMessage
from headwater.protocol.limits import FAILOVER_LOG_ENTRIES_MAX
from headwater.protocol.numbers import Seqno, Vbuuid


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverEntry:
    """From `seqno` on, the history is called `vbuuid`."""

    vbuuid: Vbuuid
    seqno: Seqno


@dataclass(frozen=True, slots=True)
class FailoverLog:
    """All branches that are remembered, newest first. A change makes a new log."""

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
        """A new branch begins at `at_seqno`. The oldest entries fall out beyond the limit.

        Entries that began later than this one are of a history that did not happen, and go.
        """
        older = [entry for entry in self.entries if entry.seqno <= at_seqno and entry.vbuuid != vbuuid]
        newest = FailoverEntry(vbuuid=vbuuid, seqno=at_seqno)
        return FailoverLog((newest, *older)[:FAILOVER_LOG_ENTRIES_MAX])

    def truncate(self, to_seqno: Seqno) -> FailoverLog:
        """The log after a rollback to `to_seqno`: without the branches that began after it.

        A vbucket that rolls back to before its first entry keeps its oldest branch, now from `to_seqno` on.
        """
        kept = [entry for entry in self.entries if entry.seqno <= to_seqno]
        return FailoverLog(tuple(kept) or (FailoverEntry(vbuuid=self.entries[-1].vbuuid, seqno=to_seqno),))

    def branch_end(self, vbuuid: Vbuuid, *, high_seqno: Seqno) -> Seqno | None:
        """The last seqno that a holder of `vbuuid` shares with this history, or None for an unknown branch.

        That is where the next newer branch began, or the high seqno for the newest one.
        """
        end = high_seqno
        for entry in self.entries:
            if entry.vbuuid == vbuuid:
                return end
            end = entry.seqno
        return None

    def vbuuid_at(self, seqno: Seqno) -> Vbuuid:
        """The branch that the change `seqno` belongs to."""
        for entry in self.entries:
            # A branch that begins at a seqno names what comes after it.
            if entry.seqno < seqno:
                return entry.vbuuid
        return self.entries[-1].vbuuid

    @classmethod
    def of(cls, entries: Iterable[FailoverEntry]) -> FailoverLog:
        """A log received from a peer, cut to the limit."""
        received = tuple(entries)
        if not received:
            raise MalformedMessage("a failover log has at least one entry")
        return cls(received[:FAILOVER_LOG_ENTRIES_MAX])
