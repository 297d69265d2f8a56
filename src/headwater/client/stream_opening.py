"""The conversation by which streams are opened, sans-IO: what a node is asked, in which order, and what it answers.

    high seqnos ─→ stream request ─→ accepted
                                  ─→ refused
                                  ─→ a rollback is demanded ─→ failover log ─→ high seqnos ─→ stream request …
    high seqnos ─→ failover log ─→ stream request …                         (from what there is now on)

High seqnos are asked for only where the stream starts from now on, or has an end: after a failover the new history may
be shorter than the end that was wanted, and the stream would wait for ever. One answer tells them of all vbuckets of a
node, so streams that need them while they are on their way wait for that answer: a server takes requests in order, and
whatever we know of by now was so before it counted.

A place at "now" is settled when a server has accepted it. Until then nothing has come of the vbucket and nobody relies
on its place, so whatever goes wrong it is placed anew.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from headwater.client.link_pool import Slot, VBucketWaits
from headwater.client.metrics import ReaderMetrics
from headwater.client.pieces import RollbackPiece
from headwater.client.read_options import End, ReadOptions
from headwater.client.vbucket_stream import Passed, VBucketStream
from headwater.errors import CheckpointAhead, StatusError, status_error
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages import ErrorResponse, Request, Response
from headwater.protocol.messages.dcp_streams import (
    GetFailoverLog,
    GetFailoverLogResponse,
    StreamEndReason,
    StreamFlags,
    StreamRequestResponse,
    VBucketState,
)
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """Who is told what has become of a stream."""

    placed: Callable[[VBucketId, StreamOffset], None]
    """The place that a vbucket starts from is known."""
    passed: Callable[[VBucketStream, list[Passed]], None]
    """The stream is open, and this is the first that it passes on."""
    refused: Callable[[VBucketStream, StatusError, float], None]
    let_go: Callable[[VBucketStream], None]
    """What it has not passed on will be asked for again."""


class StreamOpening:
    """Opens the streams of one reader, over all its links."""

    def __init__(
        self,
        options: ReadOptions,
        *,
        flags: StreamFlags,
        value: bytes,
        waits: VBucketWaits,
        metrics: ReaderMetrics,
        outcomes: Outcomes,
    ) -> None:
        self._end = options.end
        self._flags = flags
        self._value = value
        self._waits = waits
        self._metrics = metrics
        self._outcomes = outcomes
        self._from_now: dict[VBucketId, Seqno] = {}
        """Vbuckets that start at their high seqno, and no server has accepted that yet."""
        self._demanded: dict[VBucketId, Seqno] = {}
        """Rollbacks that wait for the server's failover log."""

    # --- which ----------------------------------------------------------------------------------------------------

    def start_from_now(self, vbucket: VBucketId) -> None:
        """It starts at what there is when it is first asked for."""
        self._from_now[vbucket] = Seqno(0)

    @property
    def is_placed(self) -> bool:
        """Whether every vbucket has a place to start from that will hold."""
        return not self._from_now

    def break_off(self, vbucket: VBucketId) -> None:
        """The link is gone, or the stream is not wanted there any more: the next conversation begins anew."""
        self._demanded.pop(vbucket, None)

    def forget(self, vbucket: VBucketId) -> None:
        self._from_now.pop(vbucket, None)
        self._demanded.pop(vbucket, None)

    # --- asking ---------------------------------------------------------------------------------------------------

    def ask(self, slot: Slot, streams: list[VBucketStream]) -> None:
        """Ask for streams, after the high seqnos where they are needed."""
        assert slot.link is not None
        for stream in streams:
            self._waits.asked(stream.vbucket)
        surveyed = [stream for stream in streams if self._needs_high_seqno(stream)]
        for stream in streams:
            if not self._needs_high_seqno(stream):
                self._request(slot, stream)
        if surveyed and slot.surveyed:
            next(reversed(slot.surveyed.values())).extend(surveyed)
        elif surveyed:
            slot.surveyed[slot.link.request(GetAllVbSeqnos(state=VBucketState.ACTIVE))] = surveyed

    def _needs_high_seqno(self, stream: VBucketStream) -> bool:
        return self._end is not None or stream.vbucket in self._from_now

    def _request(self, slot: Slot, stream: VBucketStream) -> None:
        assert slot.link is not None
        request = stream.request(flags=self._flags, value=self._value, opaque=slot.link.next_opaque)
        slot.streams[slot.link.request(request)] = stream
        self._metrics.on_stream_request()

    # --- answers --------------------------------------------------------------------------------------------------

    def on_high_seqnos(
        self, slot: Slot, streams: list[VBucketStream], highs: dict[VBucketId, Seqno], now_s: float
    ) -> None:
        """The streams waited for these."""
        for stream in streams:
            high = highs.get(stream.vbucket)
            if high is None:
                self._outcomes.refused(stream, _not_there(stream.vbucket), now_s)
            else:
                self._set_end(stream, high)
                self._ask_with_end(slot, stream, high)

    def _set_end(self, stream: VBucketStream, high: Seqno) -> None:
        if isinstance(self._end, End):
            stream.end_seqno = min(stream.end_seqno, high)
        elif self._end is not None:
            stream.end_seqno = min(stream.end_seqno, self._end[stream.vbucket], high)

    def _ask_with_end(self, slot: Slot, stream: VBucketStream, high: Seqno) -> None:
        assert slot.link is not None
        if stream.vbucket not in self._from_now:
            self._request(slot, stream)
            return
        self._from_now[stream.vbucket] = high
        slot.streams[slot.link.request(GetFailoverLog(vbucket=stream.vbucket))] = stream

    def on_stream_answer(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        stream = slot.streams.get(request.opaque)
        if stream is None:
            # It was left while it was being asked for. It is closed: the server takes requests in order.
            return
        if not isinstance(answer, StreamRequestResponse):
            del slot.streams[request.opaque]
            stream.on_refused()
            told = refusal(answer, f"the stream of vbucket {stream.vbucket} was refused")
            self._outcomes.refused(stream, told, now_s)
        elif answer.rollback_seqno is not None and stream.vbucket in self._from_now:
            del slot.streams[request.opaque]
            stream.on_refused()
            told = status_error(answer.status, f"vbucket {stream.vbucket} was rolled back while its end was looked for")
            self._waits.again(stream.vbucket, told, now_s=now_s, at_once=False)
        elif answer.rollback_seqno is not None:
            stream.on_rollback_demanded()
            del slot.streams[request.opaque]
            self._demanded[stream.vbucket] = answer.rollback_seqno
            assert slot.link is not None
            slot.streams[slot.link.request(GetFailoverLog(vbucket=stream.vbucket))] = stream
        else:
            self._waits.end(stream.vbucket)
            self._from_now.pop(stream.vbucket, None)
            passed = stream.on_accepted(FailoverLog.of(answer.failover_log))
            for item in passed:
                if isinstance(item.piece, RollbackPiece):
                    self._metrics.on_rollback(item.piece)
            self._outcomes.passed(stream, passed)

    def on_failover_log(self, slot: Slot, request: Request, answer: Response, now_s: float) -> None:
        stream = slot.streams.get(request.opaque)
        if stream is None:
            return
        log = FailoverLog.of(answer.failover_log) if isinstance(answer, GetFailoverLogResponse) else None
        del slot.streams[request.opaque]
        demanded = self._demanded.pop(stream.vbucket, None)
        if log is None:
            self._outcomes.let_go(stream)
            self._outcomes.refused(stream, refusal(answer, "the failover log can't be read"), now_s)
            return
        if demanded is None:
            self._place(stream, log)
            self._request(slot, stream)
            return
        _check_not_ahead(stream, log, demanded)
        stream.on_server_log(log, demanded=demanded)
        self.ask(slot, [stream])

    def _place(self, stream: VBucketStream, log: FailoverLog) -> None:
        """Let a stream start from now on."""
        high = self._from_now[stream.vbucket]
        offset = StreamOffset(vbuuid=log.newest.vbuuid, seqno=high, snapshot_start=high, snapshot_end=high)
        stream.start_from(offset)
        self._outcomes.placed(stream.vbucket, offset)


def _check_not_ahead(stream: VBucketStream, log: FailoverLog, demanded: Seqno) -> None:
    """On its newest branch a server has all there is: a consumer that has more got it elsewhere."""
    is_given = stream.failover_log is None
    if is_given and demanded and stream.asked.vbuuid == log.newest.vbuuid:
        raise CheckpointAhead(vbucket=stream.vbucket, seqno=stream.asked.seqno, high_seqno=demanded)


def refusal(answer: Response, what: str) -> StatusError:
    """The error that an answer is, in the server's words where it has any."""
    context = answer.context if isinstance(answer, ErrorResponse) and answer.status != Status.NOT_MY_VBUCKET else ""
    return status_error(answer.status, f"{what}: {context or answer.status.name}")


def _not_there(vbucket: VBucketId) -> StatusError:
    return status_error(Status.NOT_MY_VBUCKET, f"the node that should have vbucket {vbucket} does not have it")


# What a reader does when a stream ends, by the reason the server gives; and when a stream request is refused.


class AfterEnd(Enum):
    FINISHED = auto()
    """Nothing more will come. (A stream that ended before its last seqno is asked for again.)"""
    ASK_AT_ONCE = auto()
    ASK_LATER = auto()
    FIND_AND_ASK = auto()
    """The vbucket may be elsewhere: read the cluster map, then ask."""
    FAIL = auto()


AFTER_END: dict[StreamEndReason, AfterEnd] = {
    StreamEndReason.OK: AfterEnd.FINISHED,
    StreamEndReason.CLOSED: AfterEnd.ASK_LATER,
    StreamEndReason.STATE_CHANGED: AfterEnd.FIND_AND_ASK,
    StreamEndReason.DISCONNECTED: AfterEnd.FIND_AND_ASK,
    StreamEndReason.TOO_SLOW: AfterEnd.ASK_AT_ONCE,
    StreamEndReason.BACKFILL_FAILED: AfterEnd.ASK_LATER,
    # Asked again, the server tells to which seqno.
    StreamEndReason.ROLLBACK: AfterEnd.ASK_AT_ONCE,
    # The collections that were asked for are gone: that is the end of their changes.
    StreamEndReason.FILTER_EMPTY: AfterEnd.FINISHED,
    StreamEndReason.LOST_PRIVILEGES: AfterEnd.FAIL,
}


def after_end(reason: StreamEndReason) -> AfterEnd:
    """A reason that nobody knows yet is taken as one that passes."""
    return AFTER_END.get(reason, AfterEnd.ASK_LATER)
