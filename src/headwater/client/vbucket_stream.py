"""One vbucket as a consumer follows it, sans-IO: where it is, what it still holds, and how it comes through a rollback.

The stream keeps three places apart:

* `offset`: up to here everything has been passed on. A stream that breaks goes on from here.
* `asked`: the point of the last stream request. It is the offset, or below it while a rollback is being settled.
* the tracker's offset: up to here changes have been received. What lies between is held until its snapshot is complete.

The saved vbuuid stays in the request until the server has judged it; only its yes puts the newest one in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.client.dcp_link import StreamRun
from headwater.client.pieces import ChangeRun, EventPiece, Piece, RollbackPiece, SpooledRun
from headwater.errors import SnapshotViolation, UnexpectedMessage
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages import Request
from headwater.protocol.messages.dcp_changes import (
    Deletion,
    Expiration,
    Mutation,
    SeqnoAdvanced,
    SnapshotMarker,
    SystemEvent,
)
from headwater.protocol.messages.dcp_streams import StreamEnd, StreamEndReason, StreamFlags, StreamRequest
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import SnapshotTracker, StreamOffset
from headwater.protocol.states import (
    ConsumerStream,
    RollbackDemanded,
    RollbackDone,
    SnapshotCompleted,
    StreamAccepted,
    StreamRefused,
    consumer_stream_after,
)
from headwater.protocol.system_events import decode_event

# After a rollback: from which point can a consumer go on, so that nothing of the new branch is missed?
#
# The server names the last seqno that both histories share, but a consumer can't go back to just any seqno. A snapshot
# holds the newest version of each key only: if it was read from 0 to 100 in one snapshot, and the histories part at 55,
# then a key whose version 40 was overshadowed by version 60 has never been seen in version 40, and taking back 60 does
# not bring 40 back. The server, asked for what comes after 55, would not send it either. So a consumer goes back to a
# *boundary*: a seqno at which it held a complete snapshot, and hence everything up to there. Without one it
# starts at 0.
#
# The server judges the branch it is asked with. Where it does not know that branch at all it says 0, but the two may
# still share an older one: each failover log names the ancestors of its branch, so the best point is where the newest
# branch that both know has parted.


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


@dataclass(slots=True, kw_only=True)
class Passed:
    """Something that the stream passes on, and where the consumer is once it has taken it."""

    vbucket: VBucketId
    piece: Piece | SpooledRun | None
    """None where the place has moved and there is nothing to see."""
    offset: StreamOffset
    data_bytes: int = 0
    link: int = 0
    """The link that it came on, while the server has no room back for it; 0 otherwise."""


class VBucketStream:
    """The stream of one vbucket, over all its connections."""

    def __init__(
        self, vbucket: VBucketId, offset: StreamOffset, *, whole_snapshots: bool, boundaries: Iterable[Seqno] = ()
    ) -> None:
        """`boundaries` are seqnos below the offset at which the consumer held complete snapshots, rising."""
        self.vbucket = vbucket
        self.offset = offset
        self.asked = offset
        self.end_seqno: Seqno = SEQNO_MAX
        self.state = ConsumerStream.IDLE
        self.failover_log: FailoverLog | None = None
        self.held: list[Passed] = []
        """Of a snapshot that is not complete."""
        self.held_bytes = 0
        """What of it is in memory."""
        self._boundaries = Boundaries(offset, boundaries)
        self._whole_snapshots = whole_snapshots
        self._tracker = SnapshotTracker(offset=offset)

    @property
    def received_seqno(self) -> Seqno:
        return self._tracker.offset.seqno

    @property
    def has_reached_end(self) -> bool:
        return self._tracker.is_complete and self.offset.seqno >= self.end_seqno

    @property
    def is_accepted(self) -> bool:
        """The server sends it. What it has is on the branch that the server is on."""
        return self.state in (ConsumerStream.OPEN, ConsumerStream.IN_SNAPSHOT)

    @property
    def is_idle(self) -> bool:
        return self.state in (ConsumerStream.IDLE, ConsumerStream.ENDED)

    # --- asking ---------------------------------------------------------------------------------------------------

    def start_from(self, offset: StreamOffset) -> None:
        """The place to start from was not known when the stream was made."""
        self.offset = self.asked = offset
        self._boundaries = Boundaries(offset)
        self._tracker = SnapshotTracker(offset=offset)

    def request(self, *, flags: StreamFlags, value: bytes, opaque: int = 0) -> StreamRequest:
        """Ask for what comes after `asked`."""
        if self.state is ConsumerStream.ENDED:
            self.state = ConsumerStream.IDLE
        self._move(StreamRequest)
        return StreamRequest(
            opaque=opaque,
            vbucket=self.vbucket,
            flags=flags,
            start_seqno=self.asked.seqno,
            # A start beyond the end is refused before the branch is judged, and the judgement is what we need. And a
            # snapshot that we hold a part of is read to its end.
            end_seqno=max(self.end_seqno, self.asked.snapshot_end),
            vbuuid=self.asked.vbuuid,
            snapshot_start_seqno=self.asked.snapshot_start,
            snapshot_end_seqno=self.asked.snapshot_end,
            value=value,
        )

    def on_accepted(self, failover_log: FailoverLog) -> list[Passed]:
        """The server goes on from `asked`: if that is below the offset, what lies between is rolled back."""
        self._move(StreamAccepted)
        before, self.failover_log = self.offset, failover_log
        self.offset = self.asked = replace(self.asked, vbuuid=failover_log.newest.vbuuid)
        self._tracker = SnapshotTracker(offset=self.offset)
        if self.offset.seqno >= before.seqno:
            # The branch may have another name now, and the caller should know the place by that.
            return [Passed(vbucket=self.vbucket, piece=None, offset=self.offset)] if self.offset != before else []
        self._boundaries.cut(self.offset.seqno)
        rollback = RollbackPiece(
            vbucket=self.vbucket,
            seqno=self.offset.seqno,
            from_seqno=before.seqno,
            old_vbuuid=before.vbuuid,
            new_vbuuid=self.offset.vbuuid,
        )
        return [Passed(vbucket=self.vbucket, piece=rollback, offset=self.offset)]

    def on_rollback_demanded(self) -> None:
        """The server's failover log is needed next: `on_server_log`."""
        self._move(RollbackDemanded)
        if self.asked == StreamOffset():
            raise UnexpectedMessage("a rollback is demanded of a consumer that has nothing")

    def on_server_log(self, server_log: FailoverLog, *, demanded: Seqno) -> None:
        """Choose the point to ask from next."""
        self._move(RollbackDone)
        self.asked = resume_point(
            self.asked,
            demanded=demanded,
            server_log=server_log,
            own_log=self.failover_log,
            boundaries=self._boundaries.seqnos,
        )

    def on_refused(self) -> None:
        self._move(StreamRefused)

    # --- following ------------------------------------------------------------------------------------------------

    def on_run(self, run: StreamRun, link: int) -> list[Passed]:
        self._move(Mutation)  # for deletions and expirations the table says the same
        tracker = self._tracker.on_seqnos(first=Seqno(run.first_seqno), last=Seqno(run.last_seqno))
        offset = tracker.offset
        piece = ChangeRun(
            vbucket=self.vbucket,
            vbuuid=offset.vbuuid,
            snapshot_start=offset.snapshot_start,
            snapshot_end=offset.snapshot_end,
            rows=run.rows,
            data=run.data,
        )
        return self._advance(tracker, piece, link=link, data_bytes=len(run.data))

    def on_message(self, message: Request) -> list[Passed]:
        """Any message of the stream but its changes. The caller acts on a stream end."""
        self._move(type(message))
        if isinstance(message, SnapshotMarker):
            self._tracker = self._tracker.on_marker(
                start=message.start_seqno, end=message.end_seqno, flags=message.flags
            )
        elif isinstance(message, SystemEvent):
            return self._on_system_event(message)
        elif isinstance(message, SeqnoAdvanced):
            return self._advance(self._tracker.on_seqno(message.seqno), None)
        elif isinstance(message, StreamEnd) and self.is_done_with(message.reason):
            return self._finish()
        elif isinstance(message, Mutation | Deletion | Expiration):
            raise SnapshotViolation(f"a {type(message).__name__} whose extras are cut off")
        return []

    def is_done_with(self, reason: StreamEndReason) -> bool:
        """Whether a stream that ends for this reason has brought all that was wanted.

        A server that has come to the end says OK, though the last seqno it has sent may be lower: what lies between is
        hidden from us. And where the collections that were asked for are gone, nothing can follow.
        """
        has_end = self.end_seqno != SEQNO_MAX
        is_last = reason == StreamEndReason.FILTER_EMPTY or (reason == StreamEndReason.OK and has_end)
        return is_last or (self._tracker.is_complete and self.received_seqno >= self.end_seqno)

    def on_lost(self) -> list[Passed]:
        """The connection or the stream is gone. What is held is asked for again, and returned to be let go."""
        if self.state is not ConsumerStream.IDLE:
            self.state = ConsumerStream.ENDED
        self._tracker = SnapshotTracker(offset=self.offset)
        return self._let_go()

    def _on_system_event(self, message: SystemEvent) -> list[Passed]:
        tracker = self._tracker.on_seqno(message.seqno)
        piece = EventPiece(
            vbucket=self.vbucket,
            vbuuid=tracker.offset.vbuuid,
            snapshot_start=tracker.offset.snapshot_start,
            snapshot_end=tracker.offset.snapshot_end,
            seqno=message.seqno,
            event=decode_event(message),
        )
        return self._advance(tracker, piece)

    def _advance(
        self, tracker: SnapshotTracker, piece: Piece | None, *, link: int = 0, data_bytes: int = 0
    ) -> list[Passed]:
        self._tracker = tracker
        self.held_bytes += data_bytes
        self.held.append(
            Passed(vbucket=self.vbucket, piece=piece, offset=tracker.offset, data_bytes=data_bytes, link=link)
        )
        if tracker.is_complete:
            self._move(SnapshotCompleted)
            self._boundaries.add(tracker.offset.seqno)
        elif self._whole_snapshots:
            return []
        return self._pass_held()

    def _finish(self) -> list[Passed]:
        """The server has sent all that was asked for. What is left up to the end of its snapshot is hidden from us: the
        place is the end of the snapshot all the same, and at least the end that was asked for."""
        received = self._tracker.offset
        seqno = received.snapshot_end
        if self.end_seqno != SEQNO_MAX:
            seqno = max(seqno, self.end_seqno)
        passed = self._pass_held()
        if seqno > received.seqno:
            self.offset = self.asked = replace(received, seqno=seqno, snapshot_end=seqno)
            self._tracker = SnapshotTracker(offset=self.offset)
            self._boundaries.add(seqno)
            passed.append(Passed(vbucket=self.vbucket, piece=None, offset=self.offset))
        return passed

    def _pass_held(self) -> list[Passed]:
        self.offset = self.asked = self._tracker.offset
        return self._let_go()

    def _let_go(self) -> list[Passed]:
        held, self.held = self.held, []
        self.held_bytes = 0
        return held

    def _move(self, event: type[Any]) -> None:
        self.state = consumer_stream_after(self.state, event)
