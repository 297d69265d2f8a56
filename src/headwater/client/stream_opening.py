"""The conversation by which streams are opened, sans-IO: what a node is asked, in which order, and what follows.

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

The reader is the only caller. Here also stands how long a vbucket waits before it is asked for again (`VBucketWaits`),
and what a reader does when a stream ends (`AFTER_END`). Nothing here touches what streams hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from headwater.client.links import PooledLink
from headwater.client.metrics import ReaderMetrics
from headwater.client.pieces import RollbackPiece
from headwater.client.read_options import End, ReadOptions
from headwater.client.retries import Backoff
from headwater.client.vbucket_stream import StreamItem, VBucketStream
from headwater.errors import CheckpointAhead, HeadwaterError, StatusError, status_error
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
from headwater.protocol.stream_requests import StreamRequestValue

# --- waiting ------------------------------------------------------------------------------------------------------

_NEVER = math.inf
"""When a vbucket is due that has been asked for: not before the node has answered, or its link is lost."""


@dataclass(slots=True)
class _Wait:
    since_s: float
    due_s: float
    failures: int = 0
    last: HeadwaterError | None = None


class VBucketWaits:
    """A vbucket waits from when it is first wanted, or its stream is lost, until a server has accepted it."""

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self._waits: dict[VBucketId, _Wait] = {}

    def begin(self, vbucket: VBucketId, *, now_s: float) -> None:
        """It is wanted, and may be asked for at once."""
        self._waits[vbucket] = _Wait(now_s, now_s)

    def retry(self, vbucket: VBucketId, error: HeadwaterError | None, *, now_s: float, at_once: bool) -> None:
        """It was refused, or its stream is lost: ask again, at once or after a delay that grows."""
        wait = self._waits.setdefault(vbucket, _Wait(now_s, now_s))
        wait.last = error or wait.last
        wait.failures += not at_once
        wait.due_s = now_s if at_once else now_s + self._backoff.delay_s(wait.failures)

    def end(self, vbucket: VBucketId) -> None:
        self._waits.pop(vbucket, None)

    def asked(self, vbucket: VBucketId) -> None:
        """It has been asked for. It still waits, for the answer."""
        self._waits[vbucket].due_s = _NEVER

    def hurry(self, vbucket: VBucketId, *, now_s: float) -> None:
        """The cluster map has changed for it: don't wait any longer, unless it is asked for already."""
        wait = self._waits.get(vbucket)
        if wait is not None and wait.due_s != _NEVER:
            wait.due_s = min(wait.due_s, now_s)

    def due(self, now_s: float) -> Iterator[VBucketId]:
        """Those to be asked for now."""
        return (vbucket for vbucket, wait in self._waits.items() if wait.due_s <= now_s)

    def overdue(self, now_s: float, *, after_s: float) -> tuple[VBucketId, HeadwaterError | None] | None:
        """One that has waited for longer than that, and what stood in its way last."""
        for vbucket, wait in self._waits.items():
            if now_s - wait.since_s > after_s:
                return vbucket, wait.last
        return None


# --- opening ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What the reader does with the outcome of a request."""

    started: Callable[[VBucketId, StreamOffset], None]
    """The offset that a vbucket starts from is known."""
    delivered: Callable[[VBucketStream, list[StreamItem]], None]
    """The stream is open, and these are its first items."""
    refused: Callable[[VBucketStream, StatusError, float], None]
    dropped: Callable[[VBucketStream], None]
    """What the stream holds will be asked for again."""


class StreamOpening:
    """Opens the streams of one reader, over all its links."""

    def __init__(
        self,
        options: ReadOptions,
        *,
        flags: StreamFlags,
        value: StreamRequestValue | None,
        waits: VBucketWaits,
        metrics: ReaderMetrics,
        outcomes: Outcomes,
    ) -> None:
        self._end = options.end
        self._flags = flags
        self._value = value
        self._encoded_value = b"" if value is None else value.encode()
        self._waits = waits
        self._metrics = metrics
        self._outcomes = outcomes
        self._from_now: dict[VBucketId, Seqno] = {}
        """Vbuckets that start at their high seqno, which is 0 until it is known. No server has accepted that yet."""
        self._demanded: dict[VBucketId, Seqno] = {}
        """Rollbacks that wait for the server's failover log."""

    # --- which ----------------------------------------------------------------------------------------------------

    def start_from_now(self, vbucket: VBucketId) -> None:
        """It starts at the high seqno that it has when it is first asked for."""
        self._from_now[vbucket] = Seqno(0)

    @property
    def has_offsets(self) -> bool:
        """Whether every vbucket has an offset to start from, which a server has accepted if it is "now"."""
        return not self._from_now

    def drop(self, vbucket: VBucketId) -> None:
        """The link is lost, or the vbucket has moved: the next conversation starts at its beginning."""
        self._demanded.pop(vbucket, None)

    def close(self, vbucket: VBucketId) -> None:
        """The vbucket is not read any more."""
        self._from_now.pop(vbucket, None)
        self._demanded.pop(vbucket, None)

    # --- asking ---------------------------------------------------------------------------------------------------

    def ask(self, slot: PooledLink, streams: list[VBucketStream]) -> None:
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
            slot.surveyed[slot.link.send_request(GetAllVbSeqnos(state=VBucketState.ACTIVE))] = surveyed

    def _needs_high_seqno(self, stream: VBucketStream) -> bool:
        return self._end is not None or stream.vbucket in self._from_now

    def _request(self, slot: PooledLink, stream: VBucketStream) -> None:
        assert slot.link is not None
        value, purge_seqno = self._encoded_value, stream.asked.purge_seqno
        if purge_seqno and self._value is not None:
            value = replace(self._value, purge_seqno=purge_seqno).encode()
        request = stream.request(flags=self._flags, value=value, opaque=slot.link.take_opaque())
        slot.link.send_request(request, stream=stream)
        self._metrics.on_stream_request()

    # --- answers --------------------------------------------------------------------------------------------------

    def on_high_seqnos(
        self, slot: PooledLink, streams: list[VBucketStream], highs: dict[VBucketId, Seqno], now_s: float
    ) -> None:
        """The streams waited for these."""
        assert slot.link is not None
        for stream in streams:
            vbucket, high = stream.vbucket, highs.get(stream.vbucket)
            if high is None:
                reason = f"the node that should have vbucket {vbucket} does not have it"
                self._outcomes.refused(stream, status_error(Status.NOT_MY_VBUCKET, reason), now_s)
                continue
            if isinstance(self._end, End):
                stream.end_seqno = min(stream.end_seqno, high)
            elif self._end is not None:
                stream.end_seqno = min(stream.end_seqno, self._end[vbucket], high)
            if vbucket in self._from_now:
                self._from_now[vbucket] = high
                slot.link.send_request(GetFailoverLog(vbucket=vbucket), stream=stream)
            else:
                self._request(slot, stream)

    def on_stream_answer(
        self, slot: PooledLink, request: Request, stream: VBucketStream | None, answer: Response, now_s: float
    ) -> None:
        if stream is None:
            # It was closed while it was being asked for. It is closed: the server takes requests in order.
            return
        assert slot.link is not None
        vbucket = stream.vbucket
        if not isinstance(answer, StreamRequestResponse):
            del slot.link.streams[request.opaque]
            stream.on_refused()
            error = refusal(answer, f"the stream of vbucket {vbucket} was refused")
            self._outcomes.refused(stream, error, now_s)
        elif answer.rollback_seqno is not None and vbucket in self._from_now:
            del slot.link.streams[request.opaque]
            stream.on_refused()
            error = status_error(answer.status, f"vbucket {vbucket} was rolled back while its end was looked for")
            self._waits.retry(vbucket, error, now_s=now_s, at_once=False)
        elif answer.rollback_seqno is not None:
            stream.on_rollback_demanded()
            del slot.link.streams[request.opaque]
            self._demanded[vbucket] = answer.rollback_seqno
            slot.link.send_request(GetFailoverLog(vbucket=vbucket), stream=stream)
        else:
            self._waits.end(vbucket)
            self._from_now.pop(vbucket, None)
            items = stream.on_accepted(FailoverLog.of(answer.failover_log))
            for item in items:
                if isinstance(item.piece, RollbackPiece):
                    self._metrics.on_rollback(item.piece)
            self._outcomes.delivered(stream, items)

    def on_failover_log(
        self, slot: PooledLink, request: Request, stream: VBucketStream | None, answer: Response, now_s: float
    ) -> None:
        if stream is None:
            return
        assert slot.link is not None
        log = FailoverLog.of(answer.failover_log) if isinstance(answer, GetFailoverLogResponse) else None
        del slot.link.streams[request.opaque]
        demanded = self._demanded.pop(stream.vbucket, None)
        if log is None:
            self._outcomes.dropped(stream)
            self._outcomes.refused(stream, refusal(answer, "the failover log can't be read"), now_s)
        elif demanded is None:
            high = self._from_now[stream.vbucket]
            offset = StreamOffset.whole(log.newest.vbuuid, high)
            stream.start_from(offset)
            self._outcomes.started(stream.vbucket, offset)
            self._request(slot, stream)
        else:
            _check_not_ahead(stream, log, demanded)
            stream.on_server_log(log, demanded=demanded)
            self.ask(slot, [stream])


def _check_not_ahead(stream: VBucketStream, log: FailoverLog, demanded: Seqno) -> None:
    """On its newest branch a server has every seqno: a consumer that has more got it elsewhere."""
    is_given = stream.failover_log is None
    if is_given and demanded and stream.asked.vbuuid == log.newest.vbuuid:
        raise CheckpointAhead(vbucket=stream.vbucket, seqno=stream.asked.seqno, high_seqno=demanded)


def refusal(answer: Response, what: str) -> StatusError:
    """The error for an answer, with the context that the server has given."""
    context = answer.context if isinstance(answer, ErrorResponse) and answer.status != Status.NOT_MY_VBUCKET else ""
    return status_error(answer.status, f"{what}: {context or answer.status.name}")


# --- stream ends --------------------------------------------------------------------------------------------------


class AfterEnd(Enum):
    FINISHED = auto()
    """Nothing more will come. (A stream that ended before its last seqno is asked for again.)"""
    ASK_AT_ONCE = auto()
    ASK_LATER = auto()
    FIND_AND_ASK = auto()
    """The vbucket may be elsewhere: read the cluster map, then ask."""
    FAIL = auto()


# The reasons are those of kv_engine, docs/dcp/documentation/commands/stream-end.md.
AFTER_END: dict[StreamEndReason, AfterEnd] = {
    StreamEndReason.OK: AfterEnd.FINISHED,
    StreamEndReason.CLOSED: AfterEnd.ASK_LATER,
    StreamEndReason.STATE_CHANGED: AfterEnd.FIND_AND_ASK,
    StreamEndReason.DISCONNECTED: AfterEnd.FIND_AND_ASK,
    StreamEndReason.TOO_SLOW: AfterEnd.ASK_AT_ONCE,
    StreamEndReason.BACKFILL_FAILED: AfterEnd.ASK_LATER,
    # Asked again, the server says to which seqno.
    StreamEndReason.ROLLBACK: AfterEnd.ASK_AT_ONCE,
    # The collections that were asked for are gone: that is the end of their changes.
    StreamEndReason.FILTER_EMPTY: AfterEnd.FINISHED,
    StreamEndReason.LOST_PRIVILEGES: AfterEnd.FAIL,
}


def after_end(reason: StreamEndReason) -> AfterEnd:
    """A reason that is not in the table is taken as one that passes."""
    return AFTER_END.get(reason, AfterEnd.ASK_LATER)
