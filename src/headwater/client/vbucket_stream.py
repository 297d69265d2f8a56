"""One vbucket as a reader follows it, sans-IO: its offset, what it still holds, and its conversation with the nodes.

The stream outlives its connections: the reader opens it on one link after the other. It keeps three offsets apart:

* `offset`: up to here everything was delivered. A stream that breaks resumes from here.
* `asked`: the offset of the last stream request. It is `offset`, or below it until a rollback is accepted.
* the tracker's offset: up to here changes were received. What lies between is held until its snapshot is complete.

The saved vbuuid stays in the request until the server has judged it; only when the server accepts it, the newest one
takes its place. What a node is asked until the stream is open, and in which order:

    high seqnos ─→ stream request ─→ accepted
                                  ─→ refused
                                  ─→ a rollback is demanded ─→ failover log ─→ high seqnos ─→ stream request …
    high seqnos ─→ failover log ─→ stream request …                         (for a start at "now")

High seqnos are asked for only where the stream starts at "now", or has an end: after a failover the new history may be
shorter than the end that was wanted, and the stream would wait for ever. One answer has those of all vbuckets of a
node, so streams that need them while a request for them is unanswered wait for that answer: a server takes requests in
order, and whatever we know by now was so before it counted.

A start at "now" holds when a server has accepted it. Until then nothing of the vbucket was delivered and no caller
relies on its offset, so whatever goes wrong the conversation starts again from the high seqno.

The reader is the only caller: it passes in the answers, delivers the items that come out, and decides about retries.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from headwater import errors
from headwater.client.metrics import ReaderMetrics
from headwater.client.pieces import ChangeRun, EventPiece, Piece, RollbackPiece, SpooledRun
from headwater.client.read_options import End
from headwater.client.retries import Backoff
from headwater.protocol import states
from headwater.protocol.consumer import StreamRun
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.manifest import decode_event
from headwater.protocol.messages import ErrorResponse, Request, Response, dcp_changes, dcp_streams
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import ConsumedStream, StreamOffset
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import StreamRequestValue

if TYPE_CHECKING:
    from headwater.client.links import DcpLink, PooledLink

# --- rollbacks ----------------------------------------------------------------------------------------------------
#
# After a rollback: from which offset can a consumer resume, so that nothing of the new branch is missed?
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


@dataclass(slots=True)
class Wait:
    """A vbucket waits from when it is first wanted, or its stream is lost, until a server has accepted it."""

    since_s: float
    due_s: float
    """When to ask for it. Infinity once it is asked for: not before the node has answered, or its link is lost."""
    failures: int = 0
    last: errors.HeadwaterError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTerms:
    """What all streams of a read have in common."""

    metrics: ReaderMetrics
    end: End | Mapping[VBucketId, Seqno] | None = None
    whole_snapshots: bool = True
    needs_history_behind_end: bool = False
    flags: dcp_streams.StreamFlags = dcp_streams.StreamFlags(0)
    value: StreamRequestValue | None = None
    """What each stream is asked for with; None on servers without collections."""


class VBucketStream(ConsumedStream):
    """The stream of one vbucket, over all its connections, and the conversation that opens it."""

    def __init__(
        self,
        vbucket: VBucketId,
        offset: StreamOffset,
        terms: StreamTerms,
        *,
        boundaries: Iterable[Seqno] = (),
        from_now: bool = False,
        now_s: float,
    ) -> None:
        """`boundaries` are seqnos below the offset at which the consumer held complete snapshots, rising."""
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
        self.wait: Wait | None = Wait(now_s, now_s)
        """None once a server has accepted it."""
        self.slot: PooledLink | None = None
        """The connection that it is asked for or sent on."""
        self.survey: int | None = None
        """The opaque of the request for high seqnos that it waits for."""
        self.now_seqno = Seqno(0) if from_now else None
        """If it starts at "now" and no server has accepted that yet: its high seqno, or 0 until that is known."""
        self._opaque = 0
        """What comes on its connection under this opaque is its own; 0 for none."""
        self._demanded: Seqno | None = None
        """A rollback that waits for the server's failover log."""
        self._boundaries = Boundaries(offset, boundaries)
        self._terms = terms

    @property
    def received_seqno(self) -> Seqno:
        return self.tracker.offset.seqno

    @property
    def has_reached_end(self) -> bool:
        return self.tracker.is_complete and self.offset.seqno >= self.end_seqno

    @property
    def is_accepted(self) -> bool:
        """The server sends it. What was received is on the branch that the server is on."""
        return self.state in (states.ConsumerStream.OPEN, states.ConsumerStream.IN_SNAPSHOT)

    @property
    def is_idle(self) -> bool:
        return self.state in (states.ConsumerStream.IDLE, states.ConsumerStream.ENDED)

    # --- waiting --------------------------------------------------------------------------------------------------

    def is_due(self, now_s: float) -> bool:
        return self.wait is not None and self.wait.due_s <= now_s and self.is_idle

    def retry(self, error: errors.HeadwaterError | None, *, now_s: float, backoff: Backoff | None) -> None:
        """It was refused, or its stream is lost: ask again after a delay that grows, or at once without a backoff."""
        wait = self.wait = self.wait or Wait(now_s, now_s)
        wait.last = error or wait.last
        wait.failures += backoff is not None
        wait.due_s = now_s if backoff is None else now_s + backoff.delay_s(wait.failures)

    def hurry(self, now_s: float) -> None:
        """The cluster map has changed for it: stop waiting, unless it is asked for already."""
        if self.wait is not None and self.wait.due_s != math.inf:
            self.wait.due_s = min(self.wait.due_s, now_s)

    # --- opening --------------------------------------------------------------------------------------------------

    def open(self, slot: PooledLink) -> None:
        """Ask for the stream on this connection, after the high seqnos where they are needed."""
        assert self.wait is not None
        self.slot, self.wait.due_s = slot, math.inf
        if self._terms.end is not None or self.now_seqno is not None:
            self.survey = slot.survey()
        else:
            self._send(self.request())

    def on_high_seqno(self, high: Seqno | None) -> None:
        """The survey is answered; with None the node does not have the vbucket, which raises `NotMyVBucket`."""
        self.survey = None
        if high is None:
            reason = f"the node that should have vbucket {self.vbucket} does not have it"
            raise errors.status_error(Status.NOT_MY_VBUCKET, reason)
        end = self._terms.end
        if end is not None:
            wanted = high if isinstance(end, End) else end[self.vbucket]
            self.end_seqno = min(self.end_seqno, wanted, high)
        if self.now_seqno is None:
            self._send(self.request())
        else:
            self.now_seqno = high
            self._send(dcp_streams.GetFailoverLog(vbucket=self.vbucket))

    def on_answer(self, request: Request, answer: Response) -> list[StreamItem]:
        """Continue with what a node has answered. Returns the first items of a stream that is open.

        Raises a `StatusError` for a refusal.
        """
        if isinstance(answer, dcp_streams.StreamRequestResponse):
            if answer.rollback_seqno is None:
                return self.on_accepted(FailoverLog.of(answer.failover_log))
            self._on_rollback_demanded(answer.rollback_seqno)
        elif isinstance(answer, dcp_streams.GetFailoverLogResponse):
            self._on_failover_log(FailoverLog.of(answer.failover_log))
        elif isinstance(request, dcp_streams.GetFailoverLog):
            raise refusal(answer, "the failover log can't be read")
        else:
            raise refusal(answer, f"the stream of vbucket {self.vbucket} was refused")
        return []

    def request(self) -> dcp_streams.StreamRequest:
        """Ask for what comes after `asked`."""
        if self.state is states.ConsumerStream.ENDED:
            self.state = states.ConsumerStream.IDLE
        self.move(dcp_streams.StreamRequest)
        terms, asked = self._terms, self.asked
        value = b""
        if terms.value is not None:
            value = replace(terms.value, purge_seqno=asked.purge_seqno or None).encode()
        terms.metrics.on_stream_request()
        return dcp_streams.StreamRequest(
            vbucket=self.vbucket,
            flags=terms.flags,
            start_seqno=asked.seqno,
            # A start beyond the end is refused before the branch is judged, and the judgement is what we need. And a
            # snapshot that we hold a part of is read to its end.
            end_seqno=max(self.end_seqno, asked.snapshot_end),
            vbuuid=asked.vbuuid,
            snapshot_start_seqno=asked.snapshot_start,
            snapshot_end_seqno=asked.snapshot_end,
            value=value,
        )

    def on_accepted(self, failover_log: FailoverLog) -> list[StreamItem]:
        """The server continues from `asked`: if that is below the offset, what lies between is rolled back."""
        self.move(states.StreamAccepted)
        self.wait = self.now_seqno = None
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
        self._terms.metrics.on_rollback(rollback)
        return [StreamItem(vbucket=self.vbucket, piece=rollback, offset=self.offset)]

    def _on_rollback_demanded(self, demanded: Seqno) -> None:
        if self.now_seqno is not None:
            reason = f"vbucket {self.vbucket} was rolled back while its end was looked for"
            raise errors.status_error(Status.ETMPFAIL, reason)
        self.move(states.RollbackDemanded)
        if self.asked == StreamOffset():
            raise errors.UnexpectedMessage("a rollback is demanded of a consumer that has nothing")
        self._demanded = demanded
        self._send(dcp_streams.GetFailoverLog(vbucket=self.vbucket))

    def _on_failover_log(self, log: FailoverLog) -> None:
        """Ask for the stream: from the end of this history if it starts at "now", or after its rollback."""
        demanded, self._demanded = self._demanded, None
        if demanded is None:
            assert self.now_seqno is not None
            self.offset = self.asked = StreamOffset.whole(log.newest.vbuuid, self.now_seqno)
            self._boundaries = Boundaries(self.offset)
            self.restart(self.offset)
            self._send(self.request())
            return
        # On its newest branch a server has every seqno: a consumer that has more got it elsewhere.
        if self.failover_log is None and demanded and self.asked.vbuuid == log.newest.vbuuid:
            raise errors.CheckpointAhead(vbucket=self.vbucket, seqno=self.asked.seqno, high_seqno=demanded)
        self.move(states.RollbackDone)
        self.asked = resume_point(
            self.asked,
            demanded=demanded,
            server_log=log,
            own_log=self.failover_log,
            boundaries=self._boundaries.seqnos,
        )
        assert self.slot is not None
        self.open(self.slot)

    @property
    def _link(self) -> DcpLink:
        assert self.slot is not None
        assert self.slot.link is not None
        return self.slot.link

    def _send(self, request: Request) -> None:
        self._link.streams.pop(self._opaque, None)
        self._opaque = self._link.send_request(request, stream=self)

    # --- following ------------------------------------------------------------------------------------------------

    def on_run(self, run: StreamRun[Any], link: int) -> list[StreamItem]:
        self.move(dcp_changes.Mutation)  # for deletions and expirations the table says the same
        purge_seqno = self.tracker.offset.purge_seqno
        self.advance(first=Seqno(run.first_seqno), last=Seqno(run.last_seqno))
        offset = self.tracker.offset
        piece = ChangeRun(
            vbucket=self.vbucket,
            vbuuid=offset.vbuuid,
            snapshot_start=offset.snapshot_start,
            snapshot_end=offset.snapshot_end,
            rows=run.rows,
            data=bytes(run.data),
            purge_seqno=purge_seqno,
        )
        return self._deliver(piece, link=link, data_bytes=len(piece.data))

    def on_message(self, message: Request) -> list[StreamItem]:
        """Any message of the stream but its changes. The caller acts on a stream end."""
        if isinstance(message, dcp_changes.SnapshotMarker):
            is_filtered = self._terms.value is not None and self._terms.value.is_filtered
            items = self._end_hidden_snapshot(message) if is_filtered and self.tracker.is_open else []
            goes_beyond = message.end_seqno > self.end_seqno and dcp_changes.SnapshotFlags.HISTORY not in message.flags
            if self._terms.needs_history_behind_end and goes_beyond:
                raise errors.NoConsistentCut(
                    f"the server no longer has all versions of vbucket {self.vbucket} around seqno {self.end_seqno}",
                    hint="Increase its history retention beyond the time that a batch takes",
                )
            self.begin_snapshot(message)
            return items
        self.move(type(message))
        if isinstance(message, dcp_changes.SystemEvent):
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
        if isinstance(message, dcp_changes.SeqnoAdvanced):
            self.advance(first=message.seqno, last=message.seqno)
            return self._deliver(None)
        if isinstance(message, dcp_streams.StreamEnd) and self.is_done_with(message.reason):
            return self._finish()
        if isinstance(message, dcp_changes.Mutation | dcp_changes.Deletion | dcp_changes.Expiration):
            raise errors.SnapshotViolation(f"a {type(message).__name__} whose extras are cut off")
        return []

    def is_done_with(self, reason: dcp_streams.StreamEndReason) -> bool:
        """Whether a stream that ends for this reason has brought all that was wanted.

        A server that has come to the end says OK, though the last seqno it has sent may be lower: what lies between is
        hidden from us. And where the collections that were asked for are gone, nothing can follow.
        """
        has_end = self.end_seqno != SEQNO_MAX
        is_last = reason == dcp_streams.StreamEndReason.FILTER_EMPTY or (
            reason == dcp_streams.StreamEndReason.OK and has_end
        )
        return is_last or (self.tracker.is_complete and self.received_seqno >= self.end_seqno)

    def close(self) -> list[StreamItem]:
        """Close it on its connection, without waiting for the answer. Returns what `drop` does."""
        if self.slot is not None and self._opaque in self._link.streams:
            self._link.send_request(dcp_streams.CloseStream(vbucket=self.vbucket))
        return self.drop()

    def drop(self) -> list[StreamItem]:
        """The connection or the stream is lost, or refused. What is held is returned: it will be asked for again."""
        if self.slot is not None:
            self._link.streams.pop(self._opaque, None)
        self.slot = self.survey = self._demanded = None
        self._opaque = 0
        if self.state is not states.ConsumerStream.IDLE:
            self.state = states.ConsumerStream.ENDED
        self.restart(self.offset)
        return self._take_held()

    def _deliver(self, piece: Piece | None, *, link: int = 0, data_bytes: int = 0) -> list[StreamItem]:
        """What the caller may have by now, with the piece that has brought the tracker to its offset."""
        offset = self.tracker.offset
        self.held_bytes += data_bytes
        self.held.append(StreamItem(vbucket=self.vbucket, piece=piece, offset=offset, data_bytes=data_bytes, link=link))
        if self.tracker.is_complete:
            self._boundaries.add(offset.seqno)
        elif self._terms.whole_snapshots:
            return []
        self.offset = self.asked = offset
        return self._take_held()

    def _end_hidden_snapshot(self, next_marker: dcp_changes.SnapshotMarker) -> list[StreamItem]:
        """A server of 8.0 may leave out the end of a filtered snapshot when the last changes are of other collections
        (MB-73354). A stream is in order, so the next marker says that nothing more of this snapshot will come."""
        seqno = Seqno(min(self.tracker.offset.snapshot_end, next_marker.start_seqno - 1))
        if seqno < self.tracker.offset.seqno:
            return []  # The marker goes back: `begin_snapshot` refuses it.
        self.tracker = self.tracker.on_hidden_end(seqno)
        self.move(states.SnapshotCompleted)
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


def refusal(answer: Response, what: str) -> errors.StatusError:
    """The error for an answer, with the context that the server has given."""
    context = answer.context if isinstance(answer, ErrorResponse) and answer.status != Status.NOT_MY_VBUCKET else ""
    return errors.status_error(answer.status, f"{what}: {context or answer.status.name}")


# --- stream ends --------------------------------------------------------------------------------------------------


class AfterEnd(Enum):
    """What a reader does when a stream ends."""

    FINISHED = auto()
    """Nothing more will come. (A stream that ended before its last seqno is asked for again.)"""
    ASK_AT_ONCE = auto()
    ASK_LATER = auto()
    """Also for reasons that are not in the table."""
    FIND_AND_ASK = auto()
    """The vbucket may be elsewhere: read the cluster map, then ask."""
    FAIL = auto()


# The reasons are those of kv_engine, docs/dcp/documentation/commands/stream-end.md.
AFTER_END: dict[dcp_streams.StreamEndReason, AfterEnd] = {
    dcp_streams.StreamEndReason.OK: AfterEnd.FINISHED,
    dcp_streams.StreamEndReason.CLOSED: AfterEnd.ASK_LATER,
    dcp_streams.StreamEndReason.STATE_CHANGED: AfterEnd.FIND_AND_ASK,
    dcp_streams.StreamEndReason.DISCONNECTED: AfterEnd.FIND_AND_ASK,
    dcp_streams.StreamEndReason.TOO_SLOW: AfterEnd.ASK_AT_ONCE,
    dcp_streams.StreamEndReason.BACKFILL_FAILED: AfterEnd.ASK_LATER,
    # Asked again, the server says to which seqno.
    dcp_streams.StreamEndReason.ROLLBACK: AfterEnd.ASK_AT_ONCE,
    # The collections that were asked for are gone: that is the end of their changes.
    dcp_streams.StreamEndReason.FILTER_EMPTY: AfterEnd.FINISHED,
    dcp_streams.StreamEndReason.LOST_PRIVILEGES: AfterEnd.FAIL,
}
