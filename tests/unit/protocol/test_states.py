"""Every (state, event) pair of the four machines: the allowed ones land where the table says, the others raise."""

from __future__ import annotations

from collections import deque

import pytest

from headwater.errors import UnexpectedMessage
from headwater.protocol.messages import REQUESTS
from headwater.protocol.messages.dcp_changes import Mutation, SeqnoAdvanced, SnapshotMarker
from headwater.protocol.messages.dcp_streams import (
    AddStream,
    CloseStream,
    Open,
    StreamEnd,
    StreamEndReason,
    StreamRequest,
)
from headwater.protocol.states import (
    CONSUMER_ENDPOINT,
    CONSUMER_STREAM,
    END_REASONS,
    PRODUCER_ENDPOINT,
    PRODUCER_STREAM,
    TO_A_CONSUMER,
    TO_A_PRODUCER,
    TO_BOTH,
    BackfillDone,
    BackfillStarted,
    CloseAnswered,
    ConnectionLost,
    ConsumerStream,
    EndpointState,
    HandOverAcknowledged,
    PendingSent,
    ProducerStream,
    RollbackDemanded,
    RollbackDone,
    SnapshotCompleted,
    StreamAccepted,
    TakeoverStarted,
    all_events,
    transition,
)
from support.cases import each

MACHINES = {
    "producer endpoint": (PRODUCER_ENDPOINT, EndpointState.UNOPENED, EndpointState.CLOSED),
    "consumer endpoint": (CONSUMER_ENDPOINT, EndpointState.UNOPENED, EndpointState.CLOSED),
    "producer stream": (PRODUCER_STREAM, ProducerStream.ACCEPTED, ProducerStream.ENDED),
    "consumer stream": (CONSUMER_STREAM, ConsumerStream.IDLE, ConsumerStream.ENDED),
}
PAIRS = [
    pytest.param(table, state, event, id=f"{name}: {state.name} + {event.__name__}")
    for name, (table, _, _) in MACHINES.items()
    for state in table
    for event in sorted(all_events(table), key=lambda kind: kind.__name__)
]


@each(("table", "state", "event"), PAIRS)
def test_every_pair_moves_as_the_table_says_or_raises(table, state, event):
    if event in table[state]:
        assert transition(table, state, event) is table[state][event]
    else:
        with pytest.raises(UnexpectedMessage, match=f"{event.__name__} in state {state.name}"):
            transition(table, state, event)


@pytest.mark.parametrize("name", MACHINES)
def test_every_state_has_a_row_and_can_be_reached_and_left(name):
    table, start, end = MACHINES[name]
    assert set(table) == set(type(start)), "a state without a row would be a KeyError"
    assert _reachable(table, start) | {start} == set(table), "a state that can't be reached"
    for state in table:
        assert state is end or end in _reachable(table, state), f"{state.name} can't end"


def _reachable(table, start):
    reached, queue = set(), deque([start])
    while queue:
        for following in table[queue.popleft()].values():
            if following not in reached:
                reached.add(following)
                queue.append(following)
    return reached


def test_every_dcp_message_has_its_place_at_an_endpoint():
    dcp = {message for opcode, message in REQUESTS.items() if 0x50 <= opcode <= 0x67}
    assert {Open, *TO_A_PRODUCER, *TO_A_CONSUMER, *TO_BOTH} == dcp


def test_a_message_for_the_other_kind_of_endpoint_disconnects():
    assert transition(PRODUCER_ENDPOINT, EndpointState.OPEN, AddStream) is EndpointState.CLOSED
    assert transition(CONSUMER_ENDPOINT, EndpointState.OPEN, StreamRequest) is EndpointState.CLOSED


@pytest.mark.parametrize("event", [StreamRequest, Open])
def test_what_is_only_out_of_turn_does_not_close(event):
    state = EndpointState.OPEN if event is Open else EndpointState.UNOPENED
    with pytest.raises(UnexpectedMessage):
        transition(PRODUCER_ENDPOINT, state, event)


def test_every_stream_end_reason_has_exactly_one_cause():
    assert sorted(END_REASONS.values()) == sorted(StreamEndReason)
    assert END_REASONS[ConnectionLost] is StreamEndReason.DISCONNECTED


def test_a_takeover_hands_over_in_two_acknowledged_steps():
    state = ProducerStream.ACCEPTED
    for event in (BackfillStarted, BackfillDone, TakeoverStarted, PendingSent):
        state = transition(PRODUCER_STREAM, state, event)
    assert state is ProducerStream.TAKEOVER_PENDING
    state = transition(PRODUCER_STREAM, state, HandOverAcknowledged)
    assert state is ProducerStream.TAKEOVER_ACTIVE
    assert transition(PRODUCER_STREAM, state, HandOverAcknowledged) is ProducerStream.ENDED


def test_a_slow_consumer_goes_back_to_disk_and_comes_again():
    state = transition(PRODUCER_STREAM, ProducerStream.STREAMING, BackfillStarted)
    assert state is ProducerStream.BACKFILLING
    assert transition(PRODUCER_STREAM, state, BackfillDone) is ProducerStream.STREAMING


def test_a_consumer_may_be_rolled_back_more_than_once_before_it_is_accepted():
    state = ConsumerStream.IDLE
    for event in (StreamRequest, RollbackDemanded, RollbackDone, StreamRequest, RollbackDemanded, RollbackDone):
        state = transition(CONSUMER_STREAM, state, event)
    state = transition(CONSUMER_STREAM, transition(CONSUMER_STREAM, state, StreamRequest), StreamAccepted)
    assert state is ConsumerStream.OPEN


def test_changes_are_allowed_inside_a_snapshot_only():
    with pytest.raises(UnexpectedMessage):
        transition(CONSUMER_STREAM, ConsumerStream.OPEN, Mutation)
    state = transition(CONSUMER_STREAM, ConsumerStream.OPEN, SnapshotMarker)
    for event in (Mutation, SeqnoAdvanced):
        state = transition(CONSUMER_STREAM, state, event)
    assert transition(CONSUMER_STREAM, state, SnapshotCompleted) is ConsumerStream.OPEN


def test_what_was_on_its_way_when_the_consumer_closed_is_no_fault():
    state = transition(CONSUMER_STREAM, ConsumerStream.IN_SNAPSHOT, CloseStream)
    state = transition(CONSUMER_STREAM, state, Mutation)
    state = transition(CONSUMER_STREAM, state, CloseAnswered)
    assert transition(CONSUMER_STREAM, state, StreamEnd) is ConsumerStream.ENDED
