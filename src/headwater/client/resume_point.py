"""After a rollback: from which point can a consumer go on, so that nothing of the new branch is missed?

The server names the last seqno that both histories share, but a consumer can't go back to just any seqno. A snapshot
holds the newest version of each key only: if it was read from 0 to 100 in one snapshot, and the histories part at 55,
then a key whose version 40 was overshadowed by version 60 has never been seen in version 40, and taking back 60 does
not bring 40 back. The server, asked for what comes after 55, would not send it either. So a consumer goes back to a
*boundary*: a seqno at which it held a complete snapshot, and hence everything up to there. Without one it starts anew.

The server judges the branch it is asked with. Where it does not know that branch at all it says 0, but the two may
still share an older one: each failover log names the ancestors of its branch, so the best point is where the newest
branch that both know has parted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.numbers import SEQNO_MAX, Seqno, Vbuuid
from headwater.protocol.snapshots import StreamOffset

BOUNDARIES_MAX = 64
"""How many complete snapshots of a vbucket are remembered; of those long ago only some."""


def resume_point(
    asked: StreamOffset,
    *,
    demanded: Seqno,
    server_log: FailoverLog,
    own_log: FailoverLog | None,
    boundaries: Sequence[Seqno],
) -> StreamOffset:
    """The point to ask from next, always below `asked`, so that asking again and again comes to an end at 0."""
    vbuuid, shared_until = asked.vbuuid, demanded
    if not server_log.knows(asked.vbuuid):
        vbuuid, shared_until = _common_branch(own_log, server_log)
    below = min(shared_until, max(asked.seqno - 1, 0))
    seqno = max((boundary for boundary in boundaries if boundary <= below), default=Seqno(0))
    if not seqno:
        return StreamOffset()
    return StreamOffset(vbuuid=vbuuid, seqno=seqno, snapshot_start=seqno, snapshot_end=seqno)


def _common_branch(own_log: FailoverLog | None, server_log: FailoverLog) -> tuple[Vbuuid, Seqno]:
    if own_log is not None:
        for entry in own_log.entries:
            if server_log.knows(entry.vbuuid):
                ours = own_log.branch_end(entry.vbuuid, high_seqno=SEQNO_MAX)
                theirs = server_log.branch_end(entry.vbuuid, high_seqno=SEQNO_MAX)
                assert ours is not None
                assert theirs is not None
                return entry.vbuuid, min(ours, theirs)
    return Vbuuid(0), Seqno(0)


class Boundaries:
    """The seqnos at which complete snapshots ended, rising. Old ones are thinned out, the newest are all there."""

    def __init__(self, offset: StreamOffset, known: Iterable[Seqno] = ()) -> None:
        """From a saved offset: it says where its snapshot began, and where it ended if all of it is there. `known` are
        boundaries before it, rising."""
        self.seqnos: list[Seqno] = [*(seqno for seqno in known if seqno < offset.snapshot_start), offset.snapshot_start]
        if offset.is_complete:
            self.add(offset.seqno)

    def add(self, seqno: Seqno) -> None:
        if seqno <= self.seqnos[-1]:
            return
        self.seqnos.append(seqno)
        if len(self.seqnos) > BOUNDARIES_MAX:
            half = BOUNDARIES_MAX // 2
            self.seqnos = self.seqnos[:half:2] + self.seqnos[half:]

    def cut(self, seqno: Seqno) -> None:
        """What lies above this seqno is of a history that did not happen."""
        self.seqnos = [boundary for boundary in self.seqnos if boundary <= seqno] or [Seqno(0)]
