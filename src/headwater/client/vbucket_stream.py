"""One vbucket as a reader follows it, sans-IO: its offset, the data it holds, and its conversation with the nodes.

The stream outlives its connections: the reader opens it on one link after the other. It has three offsets:

* `offset`: everything up to here was delivered. A stream that breaks resumes from here.
* `asked`: the offset of the last stream request. It equals `offset`, or is below it until a rollback is accepted.
* the tracker's offset: changes up to here were received. After `offset`, they are held until a snapshot is complete.

The request keeps the saved vbuuid until the server has judged it; only when the server accepts it, the newest one
replaces it. The requests until a stream is open, in order:

    high seqnos ─→ stream request ─→ accepted
                                  ─→ refused
                                  ─→ a rollback is demanded ─→ failover log ─→ high seqnos ─→ stream request …
    high seqnos ─→ failover log ─→ stream request …                         (for a start at "now")

High seqnos are requested only if the stream starts at "now", or has an end: after a failover the new history may be
shorter than the requested end, and the stream would wait forever. One answer has those of all vbuckets of a node, so
streams that need them share a request that is under way. That is correct because a server processes requests in order:
the answer is newer than anything we know now.

A start at "now" is final when a server has accepted it. Until then nothing of the vbucket was delivered and no caller
relies on its offset, so after any failure the conversation starts again from the high seqno.

Only the reader calls this: it passes in the answers, delivers the returned items, and decides about retries.
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
# The question after a rollback: from which offset can a consumer resume without missing changes of the new branch?
#
# The server names the last seqno that both histories share (kv_engine, docs/dcp/documentation/rollback.md), but a
# consumer can't resume from an arbitrary seqno. A snapshot contains only the newest version of each key: if the
# consumer read 0 to 100 in one snapshot, and the histories part at 55, then it has never seen version 40 of a key that
# has a version 60, and undoing 60 does not restore 40. Nor would the server send version 40 if asked for changes after
# 55. So a consumer goes back to a *boundary*: a seqno at which it had a complete snapshot, and hence everything up to
# there. Without one it starts at 0.
#
# The server judges the branch in the request. If it does not know that branch at all it demands 0 (rollback.md,
# "Diverging History"), but the two may still share an older one: each failover log names the ancestors of its branch,
# so the best seqno is where the newest branch that both logs contain has parted.

BOUNDARIES_MAX = 64
"""How many boundaries of a vbucket are kept; older ones are thinned out."""


def resume_point(
    asked: StreamOffset,
    *,
    demanded: Seqno,
    server_log: FailoverLog,
    own_log: FailoverLog | None,
    boundaries: Sequence[Seqno],
) -> StreamOffset:
    """Return the offset for the next request. It is always below `asked`, so that repeated rollbacks end at 0."""
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
    """The seqnos at which complete snapshots ended, sorted. Old ones are thinned out, the newest are all kept."""

    def __init__(self, offset: StreamOffset, known: Iterable[Seqno] = ()) -> None:
        """Start from a saved offset, which has the start of its snapshot, and the end if the snapshot is complete.
        `known` are boundaries before it, sorted."""
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
        """Remove the boundaries above this seqno, which belong to a history that is void."""
        self.seqnos = [boundary for boundary in self.seqnos if boundary <= seqno] or [Seqno(0)]


# --- the stream ---------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class StreamItem:
    """A part of the stream for the caller, and the offset once the caller has taken it."""

    vbucket: VBucketId
    piece: Piece | SpooledRun | None
    """None if only the offset has moved."""
    offset: StreamOffset
    data_bytes: int = 0
    link: int = 0
    """The link on which it arrived, until its bytes are released to the server; then 0."""


@dataclass(slots=True)
class Wait:
    """The wait of a vbucket: from its first request, or the loss of its stream, until a server has accepted it."""

    since_s: float
    due_s: float
    """When to request the stream. Infinity while a request is under way: wait for its answer or loss."""
    failures: int = 0
    last: errors.HeadwaterError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTerms:
    """The settings that all streams of a read share."""

    metrics: ReaderMetrics
    end: End | Mapping[VBucketId, Seqno] | None = None
    whole_snapshots: bool = True
    needs_history_behind_end: bool = False
    flags: dcp_streams.StreamFlags = dcp_streams.StreamFlags(0)
    value: StreamRequestValue | None = None
    """The value of each stream request; None on servers without collections."""


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
        """`boundaries` are sorted seqnos below the offset at which the consumer had complete snapshots."""
        super().__init__(offset)
        self.vbucket = vbucket
        self.offset = offset
        self.asked = offset
        self.end_seqno: Seqno = SEQNO_MAX
        self.failover_log: FailoverLog | None = None
        self.held: list[StreamItem] = []
        """The items of an incomplete snapshot."""
        self.held_bytes = 0
        """The bytes of `held` that are in memory."""
        self.wait: Wait | None = Wait(now_s, now_s)
        """None once a server has accepted the stream."""
        self.slot: PooledLink | None = None
        """The connection on which the stream is requested or sent."""
        self.survey: int | None = None
        """The opaque of the request for high seqnos for which the stream waits."""
        self.now_seqno = Seqno(0) if from_now else None
        """For a start at "now" that no server has accepted yet: its high seqno, or 0 until that is known."""
        self._opaque = 0
        """Messages with this opaque on the connection belong to the stream; 0 for none."""
        self._demanded: Seqno | None = None
        """The demanded seqno of a rollback that waits for the server's failover log."""
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
        """Whether the server sends the stream. Received data is then on the server's current branch."""
        return self.state in (states.ConsumerStream.OPEN, states.ConsumerStream.IN_SNAPSHOT)

    @property
    def is_idle(self) -> bool:
        return self.state in (states.ConsumerStream.IDLE, states.ConsumerStream.ENDED)

    # --- waiting --------------------------------------------------------------------------------------------------

    def is_due(self, now_s: float) -> bool:
        return self.wait is not None and self.wait.due_s <= now_s and self.is_idle

    def retry(self, error: errors.HeadwaterError | None, *, now_s: float, backoff: Backoff | None) -> None:
        """The stream was refused or lost. Request it again: after a growing delay, or at once without a backoff."""
        wait = self.wait = self.wait or Wait(now_s, now_s)
        wait.last = error or wait.last
        wait.failures += backoff is not None
        wait.due_s = now_s if backoff is None else now_s + backoff.delay_s(wait.failures)

    def hurry(self, now_s: float) -> None:
        """The vbucket's node has changed: stop waiting, unless a request is under way."""
        if self.wait is not None and self.wait.due_s != math.inf:
            self.wait.due_s = min(self.wait.due_s, now_s)

    # --- opening --------------------------------------------------------------------------------------------------

    def open(self, slot: PooledLink) -> None:
        """Request the stream on this connection, after the high seqnos if they are needed."""
        assert self.wait is not None
        self.slot, self.wait.due_s = slot, math.inf
        if self._terms.end is not None or self.now_seqno is not None:
            self.survey = slot.survey()
        else:
            self._send(self.request())

    def on_high_seqno(self, high: Seqno | None) -> None:
        """The high seqnos were received. With None the node does not have the vbucket: raises `NotMyVBucket`."""
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
        """Process a node's answer, and continue. Returns the first items of a stream that is open.

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
        """Make the request for the changes after `asked`."""
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
            # A server refuses a start beyond the end before it judges the branch, and we need that judgement. And a
            # snapshot of which we have a part is read to its end.
            end_seqno=max(self.end_seqno, asked.snapshot_end),
            vbuuid=asked.vbuuid,
            snapshot_start_seqno=asked.snapshot_start,
            snapshot_end_seqno=asked.snapshot_end,
            value=value,
        )

    def on_accepted(self, failover_log: FailoverLog) -> list[StreamItem]:
        """The server continues from `asked`. If that is below the offset, the changes in between are rolled back."""
        self.move(states.StreamAccepted)
        self.wait = self.now_seqno = None
        before, self.failover_log = self.offset, failover_log
        self.offset = self.asked = replace(self.asked, vbuuid=failover_log.newest.vbuuid)
        self.restart(self.offset)
        if self.offset.seqno >= before.seqno:
            # The branch may have a new vbuuid, which the caller's offset should get.
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
        """Request the stream: from the end of this history for a start at "now", or after a rollback."""
        demanded, self._demanded = self._demanded, None
        if demanded is None:
            assert self.now_seqno is not None
            self.offset = self.asked = StreamOffset.whole(log.newest.vbuuid, self.now_seqno)
            self._boundaries = Boundaries(self.offset)
            self.restart(self.offset)
            self._send(self.request())
            return
        # On its newest branch a server has every seqno: a consumer that is ahead of it got its data elsewhere.
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
        self.move(dcp_changes.Mutation)  # the table has the same entry for deletions and expirations
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
        """Process any message of the stream except changes. The caller handles a stream end."""
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
        """Return whether a stream that ended for this reason is complete.

        A server that has reached the end sends OK, even if the last seqno it sent is lower: the rest is hidden from
        us. And if the requested collections are gone, nothing can follow.
        """
        has_end = self.end_seqno != SEQNO_MAX
        is_last = reason == dcp_streams.StreamEndReason.FILTER_EMPTY or (
            reason == dcp_streams.StreamEndReason.OK and has_end
        )
        return is_last or (self.tracker.is_complete and self.received_seqno >= self.end_seqno)

    def close(self) -> list[StreamItem]:
        """Close the stream on its connection, without waiting for the answer. Returns what `drop` returns."""
        if self.slot is not None and self._opaque in self._link.streams:
            self._link.send_request(dcp_streams.CloseStream(vbucket=self.vbucket))
        return self.drop()

    def drop(self) -> list[StreamItem]:
        """The connection or the stream is lost, or refused. Returns the held items, which will be requested again."""
        if self.slot is not None:
            self._link.streams.pop(self._opaque, None)
        self.slot = self.survey = self._demanded = None
        self._opaque = 0
        if self.state is not states.ConsumerStream.IDLE:
            self.state = states.ConsumerStream.ENDED
        self.restart(self.offset)
        return self._take_held()

    def _deliver(self, piece: Piece | None, *, link: int = 0, data_bytes: int = 0) -> list[StreamItem]:
        """Add a piece that brought the tracker to its offset, and return the items that the caller may have now."""
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
        """A server of 8.0 may omit the end of a filtered snapshot if the last changes are in other collections
        (MB-73354). A stream is in order, so the next marker shows that nothing more of this snapshot follows: end
        it."""
        seqno = Seqno(min(self.tracker.offset.snapshot_end, next_marker.start_seqno - 1))
        if seqno < self.tracker.offset.seqno:
            return []  # The marker goes back, so `begin_snapshot` refuses it.
        self.tracker = self.tracker.on_hidden_end(seqno)
        self.move(states.SnapshotCompleted)
        return self._deliver(None)

    def _finish(self) -> list[StreamItem]:
        """The server has sent everything that was requested. The rest of its last snapshot is hidden from us, so the
        offset is the end of that snapshot, and at least the requested end."""
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
    """Make the error for a refusal, with the server's context."""
    context = answer.context if isinstance(answer, ErrorResponse) and answer.status != Status.NOT_MY_VBUCKET else ""
    return errors.status_error(answer.status, f"{what}: {context or answer.status.name}")


# --- stream ends --------------------------------------------------------------------------------------------------


class AfterEnd(Enum):
    """What a reader does when a stream ends."""

    FINISHED = auto()
    """Nothing follows. (A stream that ended before its last seqno is requested again.)"""
    ASK_AT_ONCE = auto()
    ASK_LATER = auto()
    """Also for reasons that are not in the table."""
    FIND_AND_ASK = auto()
    """The vbucket may have moved: read the cluster map, then request the stream."""
    FAIL = auto()


# The reasons are those of kv_engine, docs/dcp/documentation/commands/stream-end.md.
AFTER_END: dict[dcp_streams.StreamEndReason, AfterEnd] = {
    dcp_streams.StreamEndReason.OK: AfterEnd.FINISHED,
    dcp_streams.StreamEndReason.CLOSED: AfterEnd.ASK_LATER,
    dcp_streams.StreamEndReason.STATE_CHANGED: AfterEnd.FIND_AND_ASK,
    dcp_streams.StreamEndReason.DISCONNECTED: AfterEnd.FIND_AND_ASK,
    dcp_streams.StreamEndReason.TOO_SLOW: AfterEnd.ASK_AT_ONCE,
    dcp_streams.StreamEndReason.BACKFILL_FAILED: AfterEnd.ASK_LATER,
    # When asked again, the server answers with the seqno.
    dcp_streams.StreamEndReason.ROLLBACK: AfterEnd.ASK_AT_ONCE,
    # The requested collections are gone, and so their changes have ended.
    dcp_streams.StreamEndReason.FILTER_EMPTY: AfterEnd.FINISHED,
    dcp_streams.StreamEndReason.LOST_PRIVILEGES: AfterEnd.FAIL,
}
