"""Flow control and dead-connection detection."""

from __future__ import annotations

import pytest

from headwater.errors import UnexpectedMessage
from headwater.protocol.features import Opcode
from headwater.protocol.frames import Frame
from headwater.protocol.messages.dcp_streams import Control, DcpNoop
from headwater.protocol.status import Status
from support.dcp_world import Consumer, World, brief

FRAME_BYTES_MAX = 24 + 31 + 4 + 20
"""Of a mutation in these tests."""


@pytest.fixture
def filled(world: World) -> World:
    world.store(*(f"k{number:03}" for number in range(100)), value=b"x" * 20)
    return world


def _bytes(frames: list[Frame]) -> int:
    return sum(len(frame.encode()) for frame in frames)


def _until_full(consumer: Consumer) -> int:
    return _bytes(consumer.frames())


def test_without_flow_control_everything_is_sent(filled: World) -> None:
    for size in (None, "1000"):
        consumer = filled.consumer(**({} if size is None else {"connection_buffer_size": size}))
        consumer.open(end_seqno=100)
        if size is not None:
            _until_full(consumer)
            consumer.control("connection_buffer_size", "0")
        assert consumer.brief()[-1] == "end OK"


def test_flow_control_on_sends_while_any_room_is_left(filled: World) -> None:
    consumer = filled.consumer(connection_buffer_size="1000")
    consumer.open()
    # Whole frames, headers included, and at most one beyond the room. Real servers sent 1004 to 1048.
    assert 1000 <= _until_full(consumer) < 1000 + FRAME_BYTES_MAX
    assert consumer.frames() == []


def test_an_acknowledgement_reopens_the_window(filled: World) -> None:
    """It has no answer, and more than was sent does not widen the window."""
    consumer = filled.consumer(connection_buffer_size="1000")
    consumer.ack(100_000)
    assert consumer.received() == []
    consumer.open()
    sent = _until_full(consumer)
    assert sent < 1000 + FRAME_BYTES_MAX
    consumer.ack(sent - 1000)
    assert consumer.frames() == []
    consumer.ack(1)
    assert len(consumer.frames()) == 1


def test_acknowledging_all_that_comes_brings_everything_once(filled: World) -> None:
    consumer = filled.consumer(connection_buffer_size="500")
    consumer.open(end_seqno=100)
    lines: list[str] = []
    while frames := consumer.frames():
        assert _bytes(frames) < 500 + FRAME_BYTES_MAX
        lines += brief(consumer.decode(frames))
        consumer.ack(_bytes(frames))
    assert len(lines) == len(set(lines)) == 102
    assert lines[-1] == "end OK"


def test_the_buffer_becomes_larger_and_smaller(filled: World) -> None:
    consumer = filled.consumer(connection_buffer_size="1000")
    consumer.open()
    sent = _until_full(consumer)
    consumer.control("connection_buffer_size", "2000")
    sent += _until_full(consumer)
    assert 2000 <= sent < 2000 + FRAME_BYTES_MAX
    consumer.control("connection_buffer_size", "1000")
    consumer.ack(sent - 1000)
    assert consumer.frames() == []


def test_a_frame_larger_than_the_buffer_is_sent(world: World) -> None:
    world.store("big", value=b"x" * 5000)
    consumer = world.consumer(connection_buffer_size="100")
    consumer.open()
    assert consumer.brief() == ["marker 0..1", "set big@1"]


def test_the_window_is_one_for_all_streams(world: World) -> None:
    for vbucket in range(4):
        world.put(*(f"k{number:03}" for number in range(50)), value=b"x" * 20, vbucket=vbucket)
    world.settle()
    consumer = world.consumer(connection_buffer_size="1000")
    for vbucket in range(4):
        consumer.open(vbucket=vbucket)
    assert 1000 <= _until_full(consumer) < 1000 + FRAME_BYTES_MAX


def test_the_stream_end_of_a_close_counts(filled: World) -> None:
    consumer = filled.consumer(connection_buffer_size="1000", send_stream_end_on_client_close_stream="true")
    consumer.open()
    sent = _until_full(consumer)
    consumer.close_stream()
    dcp = consumer.session.dcp
    assert dcp.window.unacked_bytes == sent + 28


def test_answers_do_not_wait_for_the_window(filled: World) -> None:
    consumer = filled.consumer(connection_buffer_size="1000")
    consumer.open()
    _until_full(consumer)
    assert consumer.call(Control(key=b"set_priority", value=b"low")).status == Status.SUCCESS
    assert consumer.close_stream() == Status.SUCCESS


# --- noops --------------------------------------------------------------------------------------------------------


def _after(consumer: Consumer, seconds: float) -> list[str]:
    consumer.world.node.clock.advance(seconds)
    return brief(consumer.tick())


def test_noop_is_sent_every_interval(world: World) -> None:
    consumer = world.consumer(enable_noop="true", set_noop_interval="20")
    assert _after(consumer, 19) == []
    world.node.clock.advance(2)
    (noop,) = consumer.tick()
    assert isinstance(noop, DcpNoop)
    consumer.answer(noop, Opcode.DCP_NOOP)
    assert _after(consumer, 10) == []
    assert _after(consumer, 10) == ["noop"]


def test_a_consumer_that_answers_no_noop_is_dead(world: World) -> None:
    """One noop is sent at a time, and none unless the control asks for them."""
    assert _after(world.consumer(set_noop_interval="20"), 10_000) == []
    consumer = world.consumer(enable_noop="true", set_noop_interval="20")
    assert _after(consumer, 20) == ["noop"]
    assert _after(consumer, 20) == []
    with pytest.raises(UnexpectedMessage, match="has not answered a noop"):
        _after(consumer, 21)


def test_a_noop_is_sent_while_the_window_is_full_and_does_not_count(filled: World) -> None:
    consumer = filled.consumer(enable_noop="true", set_noop_interval="1", connection_buffer_size="1000")
    consumer.open()
    _until_full(consumer)
    dcp = consumer.session.dcp
    before = dcp.window.unacked_bytes
    assert _after(consumer, 2) == ["noop"]
    assert dcp.window.unacked_bytes == before
