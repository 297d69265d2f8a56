"""The state machines of DCP as tables: the two endpoints of a connection, and a stream on either side.

A machine is an enum of states and a table: state → event type → next state. What is not in the table is not allowed,
and `transition` raises for it. Events are types: the class of a message if a message is the event, else a small class
of its own. Producer and consumer run these tables, the diagrams in the docs are drawn from them, and a test visits
every pair of state and event. Nothing here acts on an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, TypeVar

from headwater.errors import UnexpectedMessage
from headwater.protocol.messages import dcp_streams
from headwater.protocol.messages.dcp_changes import (
    Abort,
    CacheTransfer,
    CacheTransferEnd,
    Commit,
    DcpFlush,
    Deletion,
    Expiration,
    Mutation,
    OsoSnapshot,
    Prepare,
    SeqnoAcknowledged,
    SeqnoAdvanced,
    SnapshotMarker,
    SystemEvent,
)

S = TypeVar("S", bound=Enum)

Table = Mapping[S, Mapping[type[Any], S]]


def transition(table: Table[S], state: S, event: type[Any]) -> S:
    """Return the state after `event`. Raises `UnexpectedMessage` if the table has none."""
    allowed = table[state]
    if event in allowed:
        return allowed[event]
    names = ", ".join(sorted(kind.__name__ for kind in allowed)) or "nothing"
    raise UnexpectedMessage(f"{event.__name__} in state {state.name}, which allows {names}")


def all_events(table: Table[S]) -> frozenset[type[Any]]:
    """Every event the machine knows, in any state."""
    return frozenset(event for row in table.values() for event in row)


# --- endpoints ----------------------------------------------------------------------------------------------------
#
# The two endpoints of a DCP connection, as a node sees what it receives. An open message makes a connection a DCP
# connection, and its producer flag says what the *receiver* becomes (kv_engine,
# docs/dcp/documentation/commands/open-connection.md). From then on the two kinds of endpoint understand different
# messages:
#
# * a producer gets stream requests and acknowledgements;
# * a consumer gets requests to add streams, and the changes of them.
#
# A message for the other kind of endpoint shows that the peers disagree about their roles, and the connection is closed
# without an answer, as the seeds say; in the tables that is a transition to CLOSED. A message that is only out of turn,
# such as a stream request before the open, is not in the tables: it is answered with EINVAL and the connection stays.


class EndpointState(Enum):
    UNOPENED = auto()
    OPEN = auto()
    CLOSED = auto()


class ConnectionLost:
    """The connection was lost, or another connection of the same name has replaced it."""


TO_A_PRODUCER = (dcp_streams.Control, dcp_streams.StreamRequest, dcp_streams.BufferAck, SeqnoAcknowledged)
TO_A_CONSUMER = (
    dcp_streams.AddStream, dcp_streams.StreamEnd, SnapshotMarker, Mutation, Deletion, Expiration, DcpFlush,
    dcp_streams.SetVBucketState, SystemEvent, Prepare, Commit, Abort, SeqnoAdvanced, OsoSnapshot, CacheTransfer,
    CacheTransferEnd,
)  # fmt: skip
TO_BOTH = (dcp_streams.CloseStream, dcp_streams.GetFailoverLog, dcp_streams.DcpNoop)


def _table(own: tuple[type[Any], ...], foreign: tuple[type[Any], ...]) -> Table[EndpointState]:
    opened = dict.fromkeys((*own, *TO_BOTH), EndpointState.OPEN)
    closed = dict.fromkeys((*foreign, ConnectionLost), EndpointState.CLOSED)
    return {
        EndpointState.UNOPENED: {dcp_streams.Open: EndpointState.OPEN, ConnectionLost: EndpointState.CLOSED},
        EndpointState.OPEN: {**opened, **closed},
        EndpointState.CLOSED: {},
    }


PRODUCER_ENDPOINT = _table(TO_A_PRODUCER, TO_A_CONSUMER)
CONSUMER_ENDPOINT = _table(TO_A_CONSUMER, TO_A_PRODUCER)


# --- streams ------------------------------------------------------------------------------------------------------
#
# Producer: an accepted stream first reads past changes from disk (backfill), then sends new ones as they come. A
# consumer that is too slow for that falls back to disk reads. Once a takeover stream has sent everything, it hands the
# vbucket over in two acknowledged steps: the consumer's copy becomes pending (the source stops taking writes and sends
# the last of them), then active. Whatever the cause, a stream ends once, and the cause decides the reason in the
# stream-end message.
#
# Consumer: the request is answered with success, a refusal, or a rollback, after which the consumer asks again from
# the seqno rolled back to; that may repeat. Changes are allowed inside a snapshot only. A stream that the consumer
# closes may still bring messages until the answer to the close has come.


# --- the producer's side ------------------------------------------------------------------------------------------


class ProducerStream(Enum):
    ACCEPTED = auto()
    """Only the answer was sent."""
    BACKFILLING = auto()
    STREAMING = auto()
    TAKEOVER_SENDING = auto()
    TAKEOVER_PENDING = auto()
    """Pending was sent; waiting for the answer."""
    TAKEOVER_ACTIVE = auto()
    """Active was sent; waiting for the answer."""
    ENDED = auto()


class BackfillStarted:
    """What the consumer lacks has to be read from disk; also when a slow consumer falls behind the live changes."""


class BackfillDone:
    """The disk snapshot is sent: what follows is live."""


class TakeoverStarted:
    """A takeover stream has caught up."""


class PendingSent:
    """Everything is sent, and so is the message that makes the consumer's copy pending."""


class HandOverAcknowledged:
    """The consumer has answered a set-vbucket-state."""


class EndReached:
    """The stream has sent its last requested seqno."""


class CloseRequested:
    """The consumer has sent a close-stream."""


class VBucketStateChanged:
    """The vbucket can no longer be streamed in its state, or was deleted."""


class ConsumerTooSlow:
    """The consumer has not read anything for too long."""


class BackfillFailed:
    """The disk could not be read."""


class VBucketRolledBack:
    """The changes sent are no longer the vbucket's history."""


class FilterEmptied:
    """The last collection of the stream's filter has been dropped."""


class PrivilegesLost:
    """The user may no longer read what the stream contains."""


END_REASONS: dict[type[Any], dcp_streams.StreamEndReason] = {
    EndReached: dcp_streams.StreamEndReason.OK,
    CloseRequested: dcp_streams.StreamEndReason.CLOSED,
    VBucketStateChanged: dcp_streams.StreamEndReason.STATE_CHANGED,
    ConnectionLost: dcp_streams.StreamEndReason.DISCONNECTED,
    ConsumerTooSlow: dcp_streams.StreamEndReason.TOO_SLOW,
    BackfillFailed: dcp_streams.StreamEndReason.BACKFILL_FAILED,
    VBucketRolledBack: dcp_streams.StreamEndReason.ROLLBACK,
    FilterEmptied: dcp_streams.StreamEndReason.FILTER_EMPTY,
    PrivilegesLost: dcp_streams.StreamEndReason.LOST_PRIVILEGES,
}
"""What ends a stream, and the reason in the stream-end message."""

_ENDS = dict.fromkeys(END_REASONS, ProducerStream.ENDED)
_ENDS_WITHOUT_BACKFILL = {event: state for event, state in _ENDS.items() if event is not BackfillFailed}

PRODUCER_STREAM: Table[ProducerStream] = {
    ProducerStream.ACCEPTED: {
        **_ENDS_WITHOUT_BACKFILL,
        BackfillStarted: ProducerStream.BACKFILLING,
        BackfillDone: ProducerStream.STREAMING,
    },
    ProducerStream.BACKFILLING: {**_ENDS, BackfillDone: ProducerStream.STREAMING},
    ProducerStream.STREAMING: {
        **_ENDS_WITHOUT_BACKFILL,
        BackfillStarted: ProducerStream.BACKFILLING,
        TakeoverStarted: ProducerStream.TAKEOVER_SENDING,
    },
    ProducerStream.TAKEOVER_SENDING: {**_ENDS_WITHOUT_BACKFILL, PendingSent: ProducerStream.TAKEOVER_PENDING},
    ProducerStream.TAKEOVER_PENDING: {**_ENDS_WITHOUT_BACKFILL, HandOverAcknowledged: ProducerStream.TAKEOVER_ACTIVE},
    ProducerStream.TAKEOVER_ACTIVE: {**_ENDS_WITHOUT_BACKFILL, HandOverAcknowledged: ProducerStream.ENDED},
    ProducerStream.ENDED: {},
}


# --- the consumer's side ------------------------------------------------------------------------------------------


class ConsumerStream(Enum):
    IDLE = auto()
    REQUESTED = auto()
    ROLLING_BACK = auto()
    OPEN = auto()
    """Between snapshots: what has come so far is consistent."""
    IN_SNAPSHOT = auto()
    IN_OSO_SNAPSHOT = auto()
    IN_CACHE_TRANSFER = auto()
    CLOSING = auto()
    ENDED = auto()


class StreamAccepted:
    """The answer was success, with the failover log."""


class RollbackDemanded:
    """The answer was ROLLBACK, with a seqno."""


class StreamRefused:
    """The answer was any other status."""


class RollbackDone:
    """Our own state is back at the seqno that was demanded."""


class SnapshotCompleted:
    """The last seqno of the snapshot has come."""


class OsoEnded:
    """The OSO snapshot's end marker has come."""


class CloseAnswered:
    """The answer to our close-stream has come."""


_CHANGES = (Mutation, Deletion, Expiration, SystemEvent, Prepare, Commit, Abort)
_IN_SNAPSHOT = (*_CHANGES, SeqnoAdvanced)
_LOST = {ConnectionLost: ConsumerStream.ENDED, dcp_streams.StreamEnd: ConsumerStream.ENDED}
_OPEN_ENDS = {**_LOST, dcp_streams.CloseStream: ConsumerStream.CLOSING}

CONSUMER_STREAM: Table[ConsumerStream] = {
    ConsumerStream.IDLE: {dcp_streams.StreamRequest: ConsumerStream.REQUESTED},
    ConsumerStream.REQUESTED: {
        StreamAccepted: ConsumerStream.OPEN,
        RollbackDemanded: ConsumerStream.ROLLING_BACK,
        StreamRefused: ConsumerStream.ENDED,
        # The stream was requested, and is no longer wanted.
        dcp_streams.CloseStream: ConsumerStream.CLOSING,
        ConnectionLost: ConsumerStream.ENDED,
    },
    ConsumerStream.ROLLING_BACK: {
        RollbackDone: ConsumerStream.IDLE,
        dcp_streams.CloseStream: ConsumerStream.CLOSING,
        ConnectionLost: ConsumerStream.ENDED,
    },
    ConsumerStream.OPEN: {
        **_OPEN_ENDS,
        SnapshotMarker: ConsumerStream.IN_SNAPSHOT,
        OsoSnapshot: ConsumerStream.IN_OSO_SNAPSHOT,
        CacheTransfer: ConsumerStream.IN_CACHE_TRANSFER,
        CacheTransferEnd: ConsumerStream.OPEN,
        dcp_streams.SetVBucketState: ConsumerStream.OPEN,
        DcpFlush: ConsumerStream.OPEN,
    },
    ConsumerStream.IN_SNAPSHOT: {
        **_OPEN_ENDS,
        **dict.fromkeys(_IN_SNAPSHOT, ConsumerStream.IN_SNAPSHOT),
        SnapshotCompleted: ConsumerStream.OPEN,
    },
    ConsumerStream.IN_OSO_SNAPSHOT: {
        **_OPEN_ENDS,
        **dict.fromkeys(_IN_SNAPSHOT, ConsumerStream.IN_OSO_SNAPSHOT),
        OsoEnded: ConsumerStream.OPEN,
    },
    ConsumerStream.IN_CACHE_TRANSFER: {
        **_OPEN_ENDS,
        CacheTransfer: ConsumerStream.IN_CACHE_TRANSFER,
        CacheTransferEnd: ConsumerStream.OPEN,
    },
    ConsumerStream.CLOSING: {
        **_LOST,
        # A stream-end may follow the answer, if the consumer asked for one; until either has come, messages that were
        # already on their way are dropped.
        **dict.fromkeys(
            (*_IN_SNAPSHOT, SnapshotMarker, OsoSnapshot, CacheTransfer, CacheTransferEnd), ConsumerStream.CLOSING
        ),
        CloseAnswered: ConsumerStream.ENDED,
    },
    ConsumerStream.ENDED: {dcp_streams.StreamEnd: ConsumerStream.ENDED, ConnectionLost: ConsumerStream.ENDED},
}
