"""Requests and answers on one connection: in order, many at once, in pieces, and not at all."""

from __future__ import annotations

import pytest

from headwater.errors import BadMagic, KeyNotFound, LocalProtocolError, NoAnswer, UnexpectedMessage
from headwater.protocol import exchange as exchange_module
from headwater.protocol.exchange import UNANSWERED_MAX, Answered, Exchange, Pushed
from headwater.protocol.features import WITH_COLLECTIONS, Opcode
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import ErrorResponse, PlainResponse, Response
from headwater.protocol.messages.documents import Get, GetResponse
from headwater.protocol.messages.session import ClustermapChangeNotification, Stat
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.status import Status

REQUESTS = [Get(collection_id=DEFAULT_COLLECTION, key=b"key %d" % number) for number in range(3)]
NOTIFICATION = ClustermapChangeNotification(revision=1, key=b"default", value=b"{}").encode()


def new_exchange(requests: list[Get] = REQUESTS) -> Exchange:
    exchange = Exchange(peer="peer:1", negotiated=WITH_COLLECTIONS, answer_s_max=5.0)
    exchange.tick(100.0)
    assert [exchange.send(request) for request in requests] == list(range(len(requests)))
    return exchange


def sent(exchange: Exchange) -> list[int]:
    return [frame.opaque for frame in decode_frames(exchange.data_to_send())]


def answer(opaque: int) -> bytes:
    return GetResponse(opcode=Opcode.GET, opaque=opaque, value=b"value %d" % opaque).encode()


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_requests_are_sent_before_the_first_answer_is_there(chunk_bytes: int) -> None:
    exchange = new_exchange()
    assert sent(exchange) == [0, 1, 2]
    assert exchange.data_to_send() == b""
    refusal = ErrorResponse(opcode=Opcode.GET, status=Status.KEY_ENOENT, opaque=1).encode()
    data = answer(0) + NOTIFICATION + refusal + answer(2)
    events: list[Answered | Pushed] = []
    for at in range(0, len(data), chunk_bytes):
        exchange.receive_data(data[at : at + chunk_bytes])
        events += exchange.events()
    first, pushed, second, third = events
    assert pushed.frame.encode() == NOTIFICATION
    assert [first.request, second.request, third.request] == REQUESTS
    assert isinstance(second.result(), KeyNotFound)
    assert isinstance(second.response(), ErrorResponse)
    assert [getattr(event.result(), "value", None) for event in (first, third)] == [b"value 0", b"value 2"]
    assert exchange.is_idle
    assert exchange.oldest is exchange.deadline_s is None


def test_the_next_requests_wait_for_the_answers_to_those_before() -> None:
    requests = [REQUESTS[0]] * (2 * UNANSWERED_MAX + 1)
    exchange = new_exchange(requests)
    assert sent(exchange) == list(range(UNANSWERED_MAX))
    for answered in range(len(requests)):
        exchange.receive_data(answer(answered))
        (event,) = exchange.events()
        assert isinstance(event, Answered)
        assert isinstance(event.result(), Response)
        following = answered + UNANSWERED_MAX
        assert sent(exchange) == ([following] if following < len(requests) else [])
    assert exchange.is_idle


def test_a_limit_to_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "REQUESTS_MAX", 3)
    with pytest.raises(LocalProtocolError):
        new_exchange().send(REQUESTS[0])


@pytest.mark.parametrize(
    "data",
    [answer(1) + answer(0), answer(0) + answer(0), REQUESTS[0].encode(), PlainResponse(opcode=Opcode.NOOP).encode()],
    ids=["another order", "the same twice", "a request", "another opcode"],
)
def test_what_is_no_answer_to_the_request(data: bytes) -> None:
    exchange = new_exchange(REQUESTS[:2])
    exchange.receive_data(data)
    with pytest.raises(UnexpectedMessage, match="where the answer to Get was due"):
        exchange.events()


def test_what_comes_behind_the_last_answer_is_not_read() -> None:
    exchange = new_exchange(REQUESTS[:1])
    exchange.receive_data(answer(0) + b"anything")
    assert len(exchange.events()) == 1
    assert exchange.events() == []
    assert exchange.rest == b"anything"
    exchange.send(REQUESTS[0])
    with pytest.raises(BadMagic):
        exchange.events()


def test_statistics_come_in_many_frames() -> None:
    exchange = Exchange()
    exchange.send(Stat())
    exchange.send(Stat(key=b"none"))
    parts = [PlainResponse(opcode=Opcode.STAT, key=key, value=b"1").encode() for key in (b"a", b"b")]
    ends = [PlainResponse(opcode=Opcode.STAT, opaque=opaque).encode() for opaque in (0, 1)]
    exchange.receive_data(b"".join([*parts, *ends]))
    seen = [
        (event.opaque, event.frame.key, event.is_last) for event in exchange.events() if isinstance(event, Answered)
    ]
    assert seen == [(0, b"a", False), (0, b"b", False), (0, b"", True), (1, b"", True)]


def test_statistics_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "STATISTICS_MAX", 2)
    exchange = Exchange()
    exchange.send(Stat())
    exchange.send(Stat())
    exchange.receive_data(PlainResponse(opcode=Opcode.STAT, key=b"a", value=b"1").encode() * 4)
    with pytest.raises(UnexpectedMessage):
        exchange.events()


def test_silence() -> None:
    exchange = new_exchange()
    assert exchange.deadline_s == 105.0
    exchange.tick(104.9)
    exchange.receive_data(answer(0) + answer(1))
    exchange.events()
    with pytest.raises(NoAnswer, match="peer:1 has not answered for 5 seconds"):
        exchange.tick(105.0)
    exchange.receive_data(answer(2))
    exchange.events()
    exchange.tick(1000.0)
    exchange.send(REQUESTS[0])
    exchange.tick(1004.9)
