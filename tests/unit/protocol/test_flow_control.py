"""Flow control: what counts, when a producer stops, and when a consumer acknowledges."""

from __future__ import annotations

import pytest

from headwater.protocol.features import Opcode
from headwater.protocol.flow_control import COUNTED, ReceiveWindow, SendWindow, counted_bytes
from headwater.protocol.messages.dcp_changes import Mutation, SnapshotFlags, SnapshotMarker
from support.cases import case, each

# --- what counts --------------------------------------------------------------------------------------------------


@each("opcode", [opcode for opcode in Opcode if opcode.name.startswith("DCP_")])
def test_data_counts_and_the_talk_about_it_does_not(opcode: Opcode) -> None:
    talk = {
        "DCP_OPEN", "DCP_ADD_STREAM", "DCP_CLOSE_STREAM", "DCP_STREAM_REQUEST", "DCP_GET_FAILOVER_LOG", "DCP_NOOP",
        "DCP_BUFFER_ACK", "DCP_CONTROL", "DCP_SEQNO_ACKNOWLEDGED",
    }  # fmt: skip
    assert (opcode in COUNTED) == (opcode.name not in talk)


@case(Opcode.DCP_MUTATION, 100)
@case(Opcode.DCP_STREAM_END, 100)
@case(Opcode.DCP_NOOP, 0)
@case(Opcode.DCP_CONTROL, 0)
@case(Opcode.GET, 0)
@case(0xEE, 0)
# Real producers count two bytes more than they send.
@case(Opcode.DCP_PREPARE, 102)
def test_whole_frames_count(opcode: int, counted: int) -> None:
    assert counted_bytes(opcode, 100) == counted


# --- the producer's side ------------------------------------------------------------------------------------------


def send_until_closed(window: SendWindow, *frame_bytes: int) -> SendWindow:
    """Sends the frames in turn, the last one over and over, until the window closes."""
    frames = list(frame_bytes)
    while window.is_open:
        window = window.sent(frames.pop(0) if len(frames) > 1 else frames[0])
    return window


MARKER_BYTES = len(SnapshotMarker(start_seqno=0, end_seqno=9, flags=SnapshotFlags.MEMORY).encode())


def mutation_bytes(body_bytes: int) -> int:
    return len(Mutation(seqno=1, rev_seqno=1, key=b"k", value=bytes(body_bytes - 1)).encode())


@pytest.mark.parametrize(("body_bytes", "sent_bytes"), [(5, 1004), (9, 1004), (14, 1010), (196, 1048)])
def test_as_recorded_a_buffer_of_1000_took_1004_to_1048_without_an_ack(body_bytes: int, sent_bytes: int) -> None:
    """A real server, with a buffer of 1000 bytes and never sent an ack, stopped after 1004 to 1048.

    It sends while any room is left and counts headers: a marker of 44 bytes and as many mutations as it takes.
    """
    window = send_until_closed(SendWindow(size_bytes=1000), MARKER_BYTES, mutation_bytes(body_bytes))
    assert window.unacked_bytes == sent_bytes
    assert 1004 <= window.unacked_bytes <= 1048


@each("frame_bytes", range(24, 200))
def test_a_window_is_overdrawn_by_less_than_one_frame(frame_bytes: int) -> None:
    window = send_until_closed(SendWindow(size_bytes=1000), frame_bytes)
    assert 1000 <= window.unacked_bytes < 1000 + frame_bytes


@case(SendWindow(size_bytes=100).sent(99), 1)
@case(SendWindow(size_bytes=100).sent(100), 0)
# A frame larger than the buffer is sent all the same, and an ack opens the window only as far as it goes.
@case(SendWindow(size_bytes=10).sent(5000), -4990)
@case(SendWindow(size_bytes=100).sent(150).acked(50), 0)
@case(SendWindow(size_bytes=100).sent(150).acked(51), 1)
# An ack of more than was sent gains nothing.
@case(SendWindow(size_bytes=100).sent(30).acked(5000), 100)
# Without a size there is no limit.
@case(SendWindow().sent(2**40), None)
def test_a_window_is_open_while_it_has_room(window: SendWindow, room_bytes: int | None) -> None:
    assert window.room_bytes == room_bytes
    assert window.is_open == (room_bytes is None or room_bytes > 0)


def test_what_was_sent_before_flow_control_counts_once_it_is_on() -> None:
    window = SendWindow().sent(150).resized(100)
    assert not window.is_open
    assert window.resized(200).room_bytes == 50
    assert window.resized(0).is_open


# --- the consumer's side ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("taken_bytes", "is_due"), [(0, False), (199, False), (200, True), (5000, True)])
def test_an_ack_is_due_at_a_fifth_of_the_buffer(taken_bytes: int, is_due: bool) -> None:
    assert ReceiveWindow(size_bytes=1000).taken(taken_bytes).ack_is_due == is_due
    assert not ReceiveWindow(size_bytes=0).taken(taken_bytes).ack_is_due, "without flow control"


def test_an_ack_names_all_that_was_taken_and_starts_again() -> None:
    acked_bytes, window = ReceiveWindow(size_bytes=1000).taken(150).taken(75).acknowledge()
    assert acked_bytes == 225
    assert window == ReceiveWindow(size_bytes=1000)


def test_the_two_ends_never_lock_each_other_up() -> None:
    """A consumer that acknowledges when it is due keeps the window of any producer open."""
    for frame_bytes in (24, 67, 150, 1500):
        producer, consumer = SendWindow(size_bytes=1000), ReceiveWindow(size_bytes=1000)
        for _ in range(200):
            assert producer.is_open
            producer, consumer = producer.sent(frame_bytes), consumer.taken(frame_bytes)
            if consumer.ack_is_due:
                acked_bytes, consumer = consumer.acknowledge()
                producer = producer.acked(acked_bytes)
