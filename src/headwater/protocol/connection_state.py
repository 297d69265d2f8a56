"""The two endpoints of a DCP connection, as a node sees what it receives.

An open message makes a connection a DCP connection, and its producer flag says what the *receiver* becomes. From then
on the two kinds of endpoint understand different messages:

* a producer is asked for streams and told how much was taken;
* a consumer is told to add streams, and gets the changes of them.

A message for the other kind of endpoint shows that the peers disagree about who is who, and the connection is closed
without an answer, as the seeds say; in the tables that is a transition to CLOSED. A message that is only out of turn,
such as a stream request before the open, is not in the tables: it is answered with EINVAL and the connection lives.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from headwater.protocol.messages.dcp_changes import (
    Abort,
    Commit,
    DcpFlush,
    Deletion,
    Expiration,
    Mutation,
    Prepare,
    SeqnoAcknowledged,
)
from headwater.protocol.messages.dcp_connection import BufferAck, Control, DcpNoop, Open
from headwater.protocol.messages.dcp_snapshot import (
    CacheTransfer,
    CacheTransferEnd,
    OsoSnapshot,
    SeqnoAdvanced,
    SnapshotMarker,
)
from headwater.protocol.messages.dcp_stream import (
    AddStream,
    CloseStream,
    GetFailoverLog,
    SetVBucketState,
    StreamEnd,
    StreamRequest,
)
from headwater.protocol.messages.dcp_system_event import SystemEvent
from headwater.protocol.state_machine import Table, transition


class EndpointState(Enum):
    UNOPENED = auto()
    OPEN = auto()
    CLOSED = auto()


class ConnectionLost:
    """The socket is gone, or a connection of the same name has taken its place."""


TO_A_PRODUCER = (Control, StreamRequest, BufferAck, SeqnoAcknowledged)
TO_A_CONSUMER = (
    AddStream,
    StreamEnd,
    SnapshotMarker,
    Mutation,
    Deletion,
    Expiration,
    DcpFlush,
    SetVBucketState,
    SystemEvent,
    Prepare,
    Commit,
    Abort,
    SeqnoAdvanced,
    OsoSnapshot,
    CacheTransfer,
    CacheTransferEnd,
)
TO_BOTH = (CloseStream, GetFailoverLog, DcpNoop)


def _table(own: tuple[type[Any], ...], foreign: tuple[type[Any], ...]) -> Table[EndpointState]:
    opened = dict.fromkeys((*own, *TO_BOTH), EndpointState.OPEN)
    closed = dict.fromkeys((*foreign, ConnectionLost), EndpointState.CLOSED)
    return {
        EndpointState.UNOPENED: {Open: EndpointState.OPEN, ConnectionLost: EndpointState.CLOSED},
        EndpointState.OPEN: {**opened, **closed},
        EndpointState.CLOSED: {},
    }


PRODUCER_ENDPOINT = _table(TO_A_PRODUCER, TO_A_CONSUMER)
CONSUMER_ENDPOINT = _table(TO_A_CONSUMER, TO_A_PRODUCER)


def producer_endpoint_after(state: EndpointState, event: type[Any]) -> EndpointState:
    return transition(PRODUCER_ENDPOINT, state, event)


def consumer_endpoint_after(state: EndpointState, event: type[Any]) -> EndpointState:
    return transition(CONSUMER_ENDPOINT, state, event)
