"""One vbucket as a reader follows it, sans-IO: its offset, what it still holds, and how it comes through a rollback.

The stream outlives its connections: the reader opens it on one link after the other. It keeps three offsets apart:

* `offset`: up to here everything was delivered. A stream that breaks goes on from here.
* `asked`: the offset of the last stream request. It is `offset`, or below it until a rollback is accepted.
* the tracker's offset: up to here changes were received. What lies between is held until its snapshot is complete.

The saved vbuuid stays in the request until the server has judged it; only when the server accepts it, the newest one
takes its place. Nothing here sends a byte: the caller sends what `request` returns and reports what was answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headwater.client.pieces import ChangeRun, EventPiece, Piece, RollbackPiece, SpooledRun
from headwater.errors import NoConsistentCut, SnapshotViolation, UnexpectedMessage
from headwater.protocol.consumer import StreamRun
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages import Request
from headwater.protocol.messages.dcp_changes import (
    Deletion,
    Expiration,
    Mutation,
    SeqnoAdvanced,
    SnapshotFlags,
    SnapshotMarker,
    SystemEvent,
)
from headwater.protocol.messages.dcp_streams import StreamEnd, StreamEndReason, StreamFlags, StreamRequest
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import ConsumedStream, StreamOffset
from headwater.protocol.states import (
    ConsumerStream,
    RollbackDemanded,
    RollbackDone,
    SnapshotCompleted,
    StreamAccepted,
    StreamRefused,
)
from headwater.protocol.system_events import decode_event

# --- rollbacks ----------------------------------------------------------------------------------------------------
#
# After a rollback: from which offset can a consumer go on, so that nothing of the new branch is missed?
#
# The server names the last seqno that both histories share (kv_engine, docs/dcp/documentation/rollback.md), but a
# consumer can't go back to just any seqno. A snapshot holds the newest version of each key only: if it was read from 0
# to 100 in one snapshot, and the histories part at 55, then a key whose version 40 was overshadowed by version 60 has
# never been seen in version 40, and taking back 60 does not bring 40 back. The server, asked for what comes after 55,
# would not send it either. So a consumer goes back to a *boundary*: a seqno at which it held a complete snapshot, and
# hence everything up to there. Without one it starts at 0.
#
# The server judges the branch it is asked with. Where it does not know that branch at all it demands 0 (rollback.md,
# "Diverging History"), but the two may still share an older one: each failover log names the ancestors of its branch,
# so the best seqno is where the newest branch that both know has parted.

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
    """The offset to ask from next, always below `asked`, so that asking again and again comes to an end at 0."""
    vbuuid, shared_until = asked.vbuuid, demanded
    if not server_log.knows(asked.vbuuid):
        vbuuid, shared_until = _common_branch(own_log, server_log)
    below = min(shared_until, max(asked.seqno - 1, 0))
    seqno = max((boundary for boundary in boundaries if boundary <= below), default=Seqno(0))
    if not seqno:
        return StreamOffset()
    return StreamOffset.whole(vbuuid, seqno)


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
    """The seqnos at which complete snapshots ended, rising. Old ones are thinned out, the newest are all kept."""

    def __init__(self, offset: StreamOffset, known: Iterable[Seqno] = ()) -> None:
        """From a saved offset: it has the start of its snapshot, and the end if the snapshot is complete. `known` are
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


# --- the stream ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class StreamItem:
    """Something of the stream for the caller, and the offset once the caller has taken it."""

    vbucket: VBucketId
    piece: Piece | SpooledRun | None
    """None where only the offset has moved."""
    offset: StreamOffset
    data_bytes: int = 0
    link: int = 0
    """The link that it came on, until its bytes are released to the server; 0 then."""


class VBucketStream(ConsumedStream):
    """The stream of one vbucket, over all its connections."""

    def __init__(
        self,
        vbucket: VBucketId,
        offset: StreamOffset,
        *,
        whole_snapshots: bool,
        is_filtered: bool = False,
        needs_history_behind_end: bool = False,
        boundaries: Iterable[Seqno] = (),
    ) -> None:
        """`boundaries` are seqnos below the offset at which the consumer held complete snapshots, rising. A stream that
        `is_filtered` has some collections only."""
        super().__init__(offset)
        self.vbucket = vbucket
        self.offset = offset
        self.asked = offset
        self.end_seqno: Seqno = SEQNO_MAX
        self.failover_log: FailoverLog | None = None
        self.held: list[StreamItem] = []
        """Of a snapshot that is not complete."""
        self.held_bytes = 0
        """What of it is in memory."""
        self._boundaries = Boundaries(offset, boundaries)
        self._whole_snapshots = whole_snapshots
        self._is_filtered = is_filtered
        self._needs_history_behind_end = needs_history_behind_end

    @property
    def received_seqno(self) -> Seqno:
        return self.tracker.offset.seqno

    @property
    def has_reached_end(self) -> bool:
        return self.tracker.is_complete and self.offset.seqno >= self.end_seqno

    @property
    def is_accepted(self) -> bool:
        """The server sends it. What was received is on the branch that the server is on."""
        return self.state in (ConsumerStream.OPEN, ConsumerStream.IN_SNAPSHOT)

    @property
    def is_idle(self) -> bool:
        return self.state in (ConsumerStream.IDLE, ConsumerStream.ENDED)

    # --- asking ---------------------------------------------------------------------------------------------------

    def start_from(self, offset: StreamOffset) -> None:
        """The offset to start from was not known when the stream was made."""
        self.offset = self.asked = offset
        self._boundaries = Boundaries(offset)
        self.restart(offset)

    def request(self, *, flags: StreamFlags, value: bytes, opaque: int = 0) -> StreamRequest:
        """Ask for what comes after `asked`."""
        if self.state is ConsumerStream.ENDED:
            self.state = ConsumerStream.IDLE
        self.move(StreamRequest)
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

    def on_accepted(self, failover_log: FailoverLog) -> list[StreamItem]:
        """The server goes on from `asked`: if that is below the offset, what lies between is rolled back."""
        self.move(StreamAccepted)
        before, self.failover_log = self.offset, failover_log
        self.offset = self.asked = replace(self.asked, vbuuid=failover_log.newest.vbuuid)
        self.restart(self.offset)
        if self.offset.seqno >= before.seqno:
            # The branch may have another vbuuid now, and the caller's offset should have that.
            return [StreamItem(vbucket=self.vbucket, piece=None, offset=self.offset)] if self.offset != before else []
        self._boundaries.cut(self.offset.seqno)
        rollback = RollbackPiece(
            vbucket=self.vbucket,
            seqno=self.offset.seqno,
            from_seqno=before.seqno,
            old_vbuuid=before.vbuuid,
            new_vbuuid=self.offset.vbuuid,
        )
        return [StreamItem(vbucket=self.vbucket, piece=rollback, offset=self.offset)]

    def on_rollback_demanded(self) -> None:
        """The server's failover log is needed next: `on_server_log`."""
        self.move(RollbackDemanded)
        if self.asked == StreamOffset():
            raise UnexpectedMessage("a rollback is demanded of a consumer that has nothing")

    def on_server_log(self, server_log: FailoverLog, *, demanded: Seqno) -> None:
        """Choose the offset to ask from next."""
        self.move(RollbackDone)
        self.asked = resume_point(
            self.asked,
            demanded=demanded,
            server_log=server_log,
            own_log=self.failover_log,
            boundaries=self._boundaries.seqnos,
        )

    def on_refused(self) -> None:
        self.move(StreamRefused)

    # --- following ------------------------------------------------------------------------------------------------

    def on_run(self, run: StreamRun[Any], link: int) -> list[StreamItem]:
        self.move(Mutation)  # for deletions and expirations the table says the same
        self.advance(first=Seqno(run.first_seqno), last=Seqno(run.last_seqno))
        offset = self.tracker.offset
        piece = ChangeRun(
            vbucket=self.vbucket,
            vbuuid=offset.vbuuid,
            snapshot_start=offset.snapshot_start,
            snapshot_end=offset.snapshot_end,
            rows=run.rows,
            data=bytes(run.data),
        )
        return self._deliver(piece, link=link, data_bytes=len(piece.data))

    def on_message(self, message: Request) -> list[StreamItem]:
        """Any message of the stream but its changes. The caller acts on a stream end."""
        if isinstance(message, SnapshotMarker):
            items = self._end_hidden_snapshot(message) if self._is_filtered and self.tracker.is_open else []
            goes_beyond = message.end_seqno > self.end_seqno and SnapshotFlags.HISTORY not in message.flags
            if self._needs_history_behind_end and goes_beyond:
                raise NoConsistentCut(
                    f"the server no longer has all versions of vbucket {self.vbucket} around seqno {self.end_seqno}",
                    hint="Have it keep its history for longer than a batch takes",
                )
            self.begin_snapshot(message)
            return items
        self.move(type(message))
        if isinstance(message, SystemEvent):
            self.advance(first=message.seqno, last=message.seqno)
            offset = self.tracker.offset
            piece = EventPiece(
                vbucket=self.vbucket,
                vbuuid=offset.vbuuid,
                snapshot_start=offset.snapshot_start,
                snapshot_end=offset.snapshot_end,
                seqno=message.seqno,
                event=decode_event(message),
            )
            return self._deliver(piece)
        if isinstance(message, SeqnoAdvanced):
            self.advance(first=message.seqno, last=message.seqno)
            return self._deliver(None)
        if isinstance(message, StreamEnd) and self.is_done_with(message.reason):
            return self._finish()
        if isinstance(message, Mutation | Deletion | Expiration):
            raise SnapshotViolation(f"a {type(message).__name__} whose extras are cut off")
        return []

    def is_done_with(self, reason: StreamEndReason) -> bool:
        """Whether a stream that ends for this reason has brought all that was wanted.

        A server that has come to the end says OK, though the last seqno it has sent may be lower: what lies between is
        hidden from us. And where the collections that were asked for are gone, nothing can follow.
        """
        has_end = self.end_seqno != SEQNO_MAX
        is_last = reason == StreamEndReason.FILTER_EMPTY or (reason == StreamEndReason.OK and has_end)
        return is_last or (self.tracker.is_complete and self.received_seqno >= self.end_seqno)

    def drop(self) -> list[StreamItem]:
        """The connection or the stream is lost, or closed. What is held is returned: it will be asked for again."""
        if self.state is not ConsumerStream.IDLE:
            self.state = ConsumerStream.ENDED
        self.restart(self.offset)
        return self._take_held()

    def _deliver(self, piece: Piece | None, *, link: int = 0, data_bytes: int = 0) -> list[StreamItem]:
        """What the caller may have by now, with the piece that has brought the tracker to its offset."""
        offset = self.tracker.offset
        self.held_bytes += data_bytes
        self.held.append(StreamItem(vbucket=self.vbucket, piece=piece, offset=offset, data_bytes=data_bytes, link=link))
        if self.tracker.is_complete:
            self._boundaries.add(offset.seqno)
        elif self._whole_snapshots:
            return []
        self.offset = self.asked = offset
        return self._take_held()

    def _end_hidden_snapshot(self, next_marker: SnapshotMarker) -> list[StreamItem]:
        """A server of 8.0 may leave out the end of a filtered snapshot when the last changes are of other collections
        (MB-73354). A stream is in order, so the next marker says that nothing more of this snapshot will come."""
        seqno = Seqno(min(self.tracker.offset.snapshot_end, next_marker.start_seqno - 1))
        if seqno < self.tracker.offset.seqno:
            return []  # The marker goes back: `begin_snapshot` refuses it.
        self.tracker = self.tracker.on_hidden_end(seqno)
        self.move(SnapshotCompleted)
        return self._deliver(None)

    def _finish(self) -> list[StreamItem]:
        """The server has sent all that was asked for. What is left up to the end of its snapshot is hidden from us: the
        offset is the end of the snapshot all the same, and at least the end that was asked for."""
        received = self.offset = self.asked = self.tracker.offset
        seqno = received.snapshot_end
        if self.end_seqno != SEQNO_MAX:
            seqno = max(seqno, self.end_seqno)
        items = self._take_held()
        if seqno > received.seqno:
            self.offset = self.asked = replace(received, seqno=seqno, snapshot_end=seqno)
            self.restart(self.offset)
            self._boundaries.add(seqno)
            items.append(StreamItem(vbucket=self.vbucket, piece=None, offset=self.offset))
        return items

    def _take_held(self) -> list[StreamItem]:
        held, self.held = self.held, []
        self.held_bytes = 0
        return held
