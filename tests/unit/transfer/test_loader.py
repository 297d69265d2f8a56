"""A lane of the loader: its window, what it does with refusals, and what it makes of nonsense."""

from __future__ import annotations

import numpy as np
import pytest

from headwater import errors
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS, Opcode
from headwater.protocol.frames import Frame, decode_frames
from headwater.protocol.messages import ErrorResponse, decode_message
from headwater.protocol.messages.documents import Set, StoreResponse
from headwater.protocol.status import Status
from headwater.transfer.loader import RETRY_PAUSE_S, RETRY_PAUSE_S_MAX, RETRY_S_MAX, WriteLane, retry_pause_s
from headwater.transfer.set_frames import Documents, SetFrames, encode_sets, vbuckets_of
from support.cases import case


def sets(*keys: str, collections: bool = True) -> SetFrames:
    ones = np.arange(1, len(keys) + 1)
    documents = Documents(
        keys=np.frombuffer("".join(keys).encode(), dtype=np.uint8),
        key_ends=np.cumsum([len(key.encode()) for key in keys], dtype=np.int64),
        values=np.full(len(keys), ord("1"), dtype=np.uint8),
        value_starts=ones - 1,
        value_ends=ones,
    )
    return encode_sets(documents, vbuckets=4, collections=(300,) if collections else ())


def lane_at(now_s: float, *keys: str, window_bytes_max: int = 1000) -> WriteLane:
    lane = WriteLane(window_bytes_max=window_bytes_max)
    lane.tick(now_s)
    lane.send_sets(sets(*keys))
    return lane


def sent_frames(lane: WriteLane) -> list[Frame]:
    data = b""
    while (part := lane.data_to_send()) is not None:
        # Half of it at a time, as a full socket would.
        taken = max(1, len(part) // 2)
        data += bytes(part[:taken])
        lane.sent(taken)
    return decode_frames(data)


def sent_keys(lane: WriteLane, *, collections: bool = True) -> list[str]:
    negotiated = WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED
    messages = [decode_message(frame, negotiated) for frame in sent_frames(lane)]
    assert all(isinstance(message, Set) for message in messages)
    return [message.key.decode() for message in messages if isinstance(message, Set)]


def answers(first: int, *statuses: Status, value: bytes = b"") -> bytes:
    encoded = b""
    for opaque, status in enumerate(statuses, start=first):
        if status == Status.SUCCESS:
            encoded += StoreResponse(opcode=Opcode.SET, opaque=opaque, cas=1).encode()
        else:
            encoded += ErrorResponse(opcode=Opcode.SET, opaque=opaque, status=status, value=value).encode()
    return encoded


OK, LATER, ELSEWHERE = Status.SUCCESS, Status.ETMPFAIL, Status.NOT_MY_VBUCKET


def test_what_is_sent_is_numbered_and_counted_when_answered() -> None:
    lane = lane_at(0, "a", "b")
    lane.send_sets(sets("c"))
    assert [frame.opaque for frame in sent_frames(lane)] == [0, 1, 2]
    assert lane.data_to_send() is None
    assert (lane.written, lane.is_idle, lane.is_waiting_for_answers) == (0, False, True)
    lane.receive_data(answers(0, OK))
    assert (lane.written, lane.is_idle) == (1, False)
    lane.receive_data(answers(1, OK, OK))
    assert (lane.written, lane.is_idle, lane.is_waiting_for_answers) == (3, True, False)
    assert lane.written_bytes == len(sets("a", "b").data) + len(sets("c").data)


def test_the_window_is_bounded() -> None:
    lane = lane_at(0, window_bytes_max=100)
    assert lane.has_room
    lane.send_sets(sets(*"abcdef"))
    assert not lane.has_room
    sent_frames(lane)
    assert not lane.has_room, "sent is not answered"
    lane.receive_data(answers(0, *[OK] * 6))
    assert lane.has_room


def test_nothing_is_sent_for_nothing() -> None:
    lane = lane_at(0)
    assert lane.data_to_send() is None
    assert lane.is_idle


def test_what_is_put_off_is_sent_again_after_a_pause() -> None:
    lane = lane_at(5.0, "a", "b", "c", window_bytes_max=1)
    sent_frames(lane)
    lane.receive_data(answers(0, LATER, OK, Status.EBUSY))
    assert (lane.written, lane.retried, lane.is_idle) == (1, 2, False)
    assert not lane.has_room, "what waits for another try is still held"
    assert lane.next_retry_s == 5.0 + RETRY_PAUSE_S
    lane.tick(5.0 + RETRY_PAUSE_S / 2)
    assert sent_keys(lane) == []
    lane.tick(5.0 + RETRY_PAUSE_S)
    assert sent_keys(lane) == ["a", "c"]
    assert lane.next_retry_s is None
    lane.receive_data(answers(3, OK, OK))
    assert (lane.written, lane.is_idle, lane.has_room) == (3, True, True)
    assert lane.written_bytes == len(sets("a", "b", "c").data)


def test_the_pause_doubles_up_to_a_limit() -> None:
    assert retry_pause_s(0) == RETRY_PAUSE_S
    assert retry_pause_s(1) == 2 * RETRY_PAUSE_S
    assert retry_pause_s(10_000) == RETRY_PAUSE_S_MAX


def test_a_document_is_not_tried_for_ever() -> None:
    lane = lane_at(0.0, "a")
    tries = int(RETRY_S_MAX / RETRY_PAUSE_S_MAX)
    for opaque in range(tries):
        sent_frames(lane)
        lane.receive_data(answers(opaque, LATER))
        lane.tick((opaque + 1) * RETRY_PAUSE_S_MAX)
    sent_frames(lane)
    with pytest.raises(errors.TemporaryFailure, match=f"refused document 'a' {tries + 1} times: ETMPFAIL"):
        lane.receive_data(answers(tries, LATER))
    assert lane.written == 0


def test_what_is_misplaced_is_handed_back() -> None:
    lane = lane_at(1.0, "a", "b")
    sent_frames(lane)
    lane.receive_data(answers(0, OK, ELSEWHERE, value=b'{"rev": 2}'))
    assert not lane.is_idle
    (retry,) = lane.take_misplaced()
    assert lane.is_idle
    assert lane.take_misplaced() == []
    assert retry.attempts == 1
    assert retry.due_s > 1.0
    assert retry.give_up_s == 1.0 + RETRY_S_MAX

    other = lane_at(2.0)
    other.send_sets(retry.frames, attempts=retry.attempts, give_up_s=retry.give_up_s)
    assert sent_keys(other) == ["b"]
    other.tick(retry.give_up_s)
    with pytest.raises(errors.StatusError, match="2 times"):
        other.receive_data(answers(0, ELSEWHERE))


def test_a_refusal_is_raised_after_everything_is_counted() -> None:
    lane = lane_at(0, "a", "bad\u00e9", "c")
    sent_frames(lane)
    with pytest.raises(errors.InvalidArguments, match="refused document 'badé': EINVAL"):
        lane.receive_data(answers(0, OK, Status.EINVAL, OK))
    assert lane.written == 2


def test_a_status_that_nobody_knows_is_kept() -> None:
    lane = lane_at(0, "a")
    sent_frames(lane)
    with pytest.raises(errors.StatusError, match="UNKNOWN_0x7777") as raised:
        lane.receive_data(answers(0, Status(0x7777)))
    assert raised.value.status == 0x7777


def test_a_key_without_a_collection_is_named_as_it_is() -> None:
    lane = WriteLane(collections=False)
    lane.send_sets(sets("key", collections=False))
    sent_frames(lane)
    with pytest.raises(errors.StatusError, match="refused document 'key'"):
        lane.receive_data(answers(0, Status.E2BIG))


def test_more_failures_than_are_scanned_at_once() -> None:
    keys = [f"k{number}" for number in range(3000)]
    lane = lane_at(0, *keys)
    sent_frames(lane)
    lane.receive_data(answers(0, *[LATER] * 3000))
    lane.tick(1)
    assert sent_keys(lane) == keys


def test_the_numbers_go_round() -> None:
    lane = lane_at(0)
    lane._next_opaque = lane._due_opaque = 0xFFFFFFFF
    lane.send_sets(sets("a", "b"))
    assert [frame.opaque for frame in sent_frames(lane)] == [0xFFFFFFFF, 0]
    lane.receive_data(answers(0xFFFFFFFF, OK) + answers(0, OK))
    assert lane.is_idle


@case(b"HTTP/1.1 400 Bad Request", errors.BadMagic)
@case(Set(key=b"a", opaque=0).encode(), errors.BadMagic)
@case(answers(1, OK), errors.UnexpectedMessage)
@case(StoreResponse(opcode=Opcode.ADD, opaque=0).encode(), errors.UnexpectedMessage)
@case(b"\x81\x01\x00\x05" + bytes(20), errors.LengthMismatch)
@case(b"\x18\x01\x02\x05" + bytes(20), errors.LengthMismatch)
@case(b"\x81\x01" + bytes(6) + b"\x7f\xff\xff\xff" + bytes(12), errors.FrameTooLarge)
def test_nonsense(data: bytes, error: type[Exception]) -> None:
    lane = lane_at(0, "a")
    sent_frames(lane)
    with pytest.raises(error):
        lane.receive_data(data)
    assert lane.written == 0


def test_an_answer_to_nothing() -> None:
    with pytest.raises(errors.UnexpectedMessage, match="not sent"):
        lane_at(0).receive_data(answers(0, OK))


@pytest.mark.parametrize("vbuckets", [0, 0x10001])
def test_an_impossible_number_of_vbuckets(vbuckets: int) -> None:
    with pytest.raises(ValueError, match="vbuckets"):
        vbuckets_of(np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.int64), vbuckets)
