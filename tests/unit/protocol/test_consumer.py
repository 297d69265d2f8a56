"""Received bytes cut into runs and single frames, whatever pieces they come in, and what a consumer makes of them."""

from __future__ import annotations

import random

import pytest

from headwater.errors import BadMagic, FrameTooLarge, UnexpectedMessage
from headwater.protocol.consumer import (
    OPAQUE_MAX,
    ConsumerLimits,
    ConsumerOpened,
    DcpConsumer,
    DcpControl,
    ReceiveBuffer,
    RequestAnswered,
    StreamMessage,
    StreamRun,
)
from headwater.protocol.features import WITH_COLLECTIONS, Opcode
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import ErrorResponse, PlainResponse
from headwater.protocol.messages.dcp_changes import Mutation, SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import DcpNoop, StreamRequest
from headwater.protocol.numbers import CollectionId, Seqno
from headwater.protocol.status import Status
from support.cases import each

NOOP = DcpNoop(opaque=9).encode()
MARKER = SnapshotMarker(opaque=1, start_seqno=Seqno(0), end_seqno=Seqno(9), flags=SnapshotFlags.MEMORY).encode()


def _set(seqno: int, opaque: int = 1, value: bytes = b"v") -> bytes:
    return Mutation(
        opaque=opaque, seqno=Seqno(seqno), rev_seqno=1, collection_id=CollectionId(0), key=b"k", value=value
    ).encode()  # fmt: skip


WIRE = MARKER + _set(1) + _set(2) + NOOP + _set(3) + _set(1, opaque=2) + _set(4) + NOOP


def _buffer() -> ReceiveBuffer:
    return ReceiveBuffer(keeps_order=True)


def _items(buffer: ReceiveBuffer, data: bytes) -> list[tuple[int, bytes]]:
    """Opaque and bytes of the items."""
    buffer.receive_data(data)
    return [(run.opaque, view.tobytes()) for run, view in buffer.items()]


def test_changes_of_one_stream_are_one_run_and_the_order_stays() -> None:
    assert _items(_buffer(), WIRE) == [
        (1, MARKER), (1, _set(1) + _set(2)), (9, NOOP), (1, _set(3)), (2, _set(1, opaque=2)), (1, _set(4)), (9, NOOP),
    ]  # fmt: skip


@each("seed", range(20))
def test_any_split_gives_the_same_bytes(seed: int) -> None:
    rng = random.Random(seed)
    buffer, found, at = _buffer(), b"", 0
    while at < len(WIRE):
        size = rng.choice((1, 2, 23, 24, 60, 200))
        found += b"".join(data for _, data in _items(buffer, WIRE[at : at + size]))
        at += size
    assert found == WIRE
    assert buffer.buffered_bytes == 0


def test_a_large_frame_is_not_looked_at_before_it_is_whole() -> None:
    wire = _set(1, value=bytes(1_000_000))
    buffer = _buffer()
    for at in range(0, len(wire) - 1000, 1000):
        assert _items(buffer, wire[at : at + 1000]) == []
    assert buffer.buffered_bytes > 900_000
    rest = wire[buffer.buffered_bytes :]
    assert _items(buffer, rest) == [(1, wire)]


def test_bytes_that_are_no_frames() -> None:
    with pytest.raises(BadMagic):
        _items(_buffer(), b"\x00" * 24)
    too_large = bytearray(_set(1)[:24])
    too_large[8:12] = b"\xff" * 4
    with pytest.raises(FrameTooLarge):
        _items(_buffer(), bytes(too_large))


@pytest.mark.parametrize("piece_bytes", [1, 23, 24, 25, 1000])
def test_what_is_held_waits_but_for_the_noops(piece_bytes: int) -> None:
    buffer = _buffer()
    begun = _set(7, value=NOOP)
    assert _items(buffer, begun[:30]) == []
    buffer.hold()
    wire, noops = begun[30:] + WIRE, []
    for at in range(0, len(wire), piece_bytes):
        assert _items(buffer, wire[at : at + piece_bytes]) == []
        noops += buffer.take_noops()
    assert noops == [9, 9]
    assert not buffer.is_held_back
    buffer.resume()
    assert buffer.is_held_back
    held = (begun + WIRE).replace(NOOP, b"")
    assert b"".join(data for _, data in _items(buffer, b"")).replace(NOOP, b"") == held
    assert not buffer.is_held_back
    assert buffer.buffered_bytes == 0
    assert [data for _, data in _items(buffer, NOOP)] == [NOOP]
    assert buffer.take_noops() == []


def test_what_comes_behind_a_pause_waits() -> None:
    buffer = _buffer()
    found = []
    buffer.receive_data(NOOP + _set(1) + MARKER)
    for item in buffer.items():
        found.append(item)
        buffer.is_paused = True
    assert len(found) == 1
    assert not buffer.is_held_back
    assert _items(buffer, NOOP) == []
    buffer.is_paused = False
    assert buffer.is_held_back
    assert [data for _, data in _items(buffer, b"")] == [_set(1), MARKER, NOOP]
    assert not buffer.is_held_back


# --- the connection -----------------------------------------------------------------------------------------------


def _consumer(*, strict: bool = True) -> DcpConsumer[str]:
    limits = ConsumerLimits(buffer_bytes=1000, silence_s_max=40.0)
    return DcpConsumer(limits, now_s=0.0, negotiated=WITH_COLLECTIONS, ignores_stray_answers=not strict)


def _answer(opcode: int, opaque: int) -> bytes:
    return PlainResponse(opcode=Opcode(opcode), opaque=opaque).encode()


def test_controls_are_sent_in_order_and_their_answers_counted() -> None:
    consumer = _consumer()
    consumer.send_opening([DcpControl(key=key, value="1") for key in ("a", "b", "c")], first_stream_opaque=0x1000)
    sent = decode_frames(consumer.data_to_send())
    assert [(frame.opaque, frame.key) for frame in sent] == [(1, b"a"), (2, b"b"), (3, b"c")]
    refused = ErrorResponse(opcode=Opcode.DCP_CONTROL, opaque=2, status=Status.EINVAL).encode()
    consumer.receive_data(_answer(Opcode.DCP_CONTROL, 1) + refused, now_s=0.0)
    assert list(consumer.events()) == []
    consumer.receive_data(_answer(Opcode.DCP_CONTROL, 3), now_s=0.0)
    assert [type(event) for event in consumer.events()] == [ConsumerOpened]
    assert consumer.granted == {"a", "c"}
    assert consumer.take_opaque() == 0x1000


def test_frames_go_to_the_stream_that_has_their_opaque() -> None:
    consumer = _consumer()
    opaque = consumer.send_request(StreamRequest(), stream="one")
    other = consumer.send_request(StreamRequest(), stream="two")
    marker = SnapshotMarker(opaque=other, start_seqno=Seqno(0), end_seqno=Seqno(9), flags=SnapshotFlags.MEMORY)
    answers = _answer(Opcode.DCP_STREAM_REQUEST, opaque) + _answer(Opcode.DCP_STREAM_REQUEST, other)
    consumer.receive_data(answers + marker.encode() + _set(1, opaque=opaque) + _set(1, opaque=77), now_s=0.0)
    found = [(type(event), getattr(event, "stream", "")) for event in consumer.events()]
    assert sorted(found, key=str) == sorted(
        [
            (RequestAnswered, "one"),
            (RequestAnswered, "two"),
            (StreamMessage, "two"),
            (StreamRun, "one"),
            (StreamRun, None),
        ],
        key=str,
    )


def test_an_opaque_is_given_again_only_when_it_is_free() -> None:
    consumer = _consumer()
    consumer.streams[1] = "open"
    consumer._next_opaque = OPAQUE_MAX
    assert [consumer.take_opaque() for _ in range(2)] == [OPAQUE_MAX, 2]


def test_an_answer_to_what_was_not_asked() -> None:
    stray = _answer(Opcode.DCP_SEQNO_ACKNOWLEDGED, 5)
    lenient = _consumer(strict=False)
    lenient.receive_data(stray, now_s=0.0)
    assert list(lenient.events()) == []
    strict = _consumer()
    strict.receive_data(stray, now_s=0.0)
    with pytest.raises(UnexpectedMessage, match="not asked"):
        list(strict.events())


def test_noops_are_answered_also_while_everything_else_is_held() -> None:
    consumer = _consumer()
    consumer.hold()
    consumer.receive_data(_set(1) + NOOP, now_s=0.0)
    assert list(consumer.events()) == []
    assert consumer.data_to_send() == _answer(Opcode.DCP_NOOP, 9)
    consumer.resume()
    assert [type(event) for event in consumer.events()] == [StreamRun]
    assert consumer.data_to_send() == b""
