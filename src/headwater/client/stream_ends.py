"""What a reader does when a stream ends, by the reason the server gives; and when a stream request is refused."""

from __future__ import annotations

from enum import Enum, auto

from headwater.protocol.messages.dcp_stream import StreamEndReason


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
