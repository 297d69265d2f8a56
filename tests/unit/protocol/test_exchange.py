"""Many requests over one connection, with a peer that is made of the protocol package."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from headwater.client.checkpoints.threaded_kv import WINDOW_REQUESTS, answers_to
from headwater.client.connection_string import Address
from headwater.client.handshake import HandshakeOutcome
from headwater.client.kv_connection import KvConnection
from headwater.errors import ConnectionClosed, KeyNotFound, NoAnswer, UnexpectedMessage
from headwater.protocol.features import WITH_COLLECTIONS, Opcode
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import ErrorResponse, Response
from headwater.protocol.messages.documents import Get, GetResponse
from headwater.protocol.messages.session import ClustermapChangeNotification
from headwater.protocol.numbers import DEFAULT_COLLECTION
from headwater.protocol.status import Status

REQUESTS = [Get(collection_id=DEFAULT_COLLECTION, key=b"key %d" % number) for number in range(3)]


@pytest.fixture
def peer() -> Iterator[tuple[KvConnection, socket.socket]]:
    """A connection, and the other end of it."""
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    outcome = HandshakeOutcome(negotiated=WITH_COLLECTIONS, mechanism=None, cluster_config=None)
    with ours, theirs:
        yield KvConnection(ours, Address("peer", 1), outcome), theirs


def answer(opaque: int) -> bytes:
    return GetResponse(opcode=Opcode.GET, opaque=opaque, value=b"value %d" % opaque).encode()


def test_requests_are_sent_before_the_first_answer_is_there(peer: tuple[KvConnection, socket.socket]) -> None:
    connection, theirs = peer
    notification = ClustermapChangeNotification(revision=1, key=b"default", value=b"{}").encode()
    refusal = ErrorResponse(opcode=Opcode.GET, status=Status.KEY_ENOENT, opaque=1).encode()
    theirs.sendall(answer(0) + notification + refusal + answer(2))
    first, second, third = answers_to(connection, REQUESTS)
    assert [request.opaque for request in decode_frames(theirs.recv(10_000))] == [0, 1, 2]
    assert isinstance(first, GetResponse)
    assert isinstance(second, KeyNotFound)
    assert isinstance(third, GetResponse)
    assert (first.value, third.value) == (b"value 0", b"value 2")


def test_the_next_window_waits_for_the_one_before(peer: tuple[KvConnection, socket.socket]) -> None:
    connection, theirs = peer
    requests = [REQUESTS[0]] * (2 * WINDOW_REQUESTS + 1)
    theirs.sendall(b"".join(map(answer, range(len(requests)))))
    sent: list[int] = []
    for number, given in enumerate(answers_to(connection, requests)):
        assert isinstance(given, Response)
        if number % WINDOW_REQUESTS == 0:
            sent += [frame.opaque for frame in decode_frames(theirs.recv(1_000_000))]
            assert sent == list(range(min(number + WINDOW_REQUESTS, len(requests))))


@pytest.mark.parametrize(
    "data",
    [answer(1) + answer(0), answer(0) + answer(0), REQUESTS[0].encode()],
    ids=["another order", "the same twice", "a request"],
)
def test_what_is_no_answer_to_the_request(peer: tuple[KvConnection, socket.socket], data: bytes) -> None:
    connection, theirs = peer
    theirs.sendall(data)
    with pytest.raises(UnexpectedMessage):
        list(answers_to(connection, REQUESTS[:2]))


def test_answers_before_the_end_are_handed_out(peer: tuple[KvConnection, socket.socket]) -> None:
    connection, theirs = peer
    theirs.sendall(answer(0) + answer(1)[:-1])
    theirs.shutdown(socket.SHUT_WR)
    answers = answers_to(connection, REQUESTS)
    assert isinstance(next(answers), GetResponse)
    with pytest.raises(ConnectionClosed):
        next(answers)


def test_silence(peer: tuple[KvConnection, socket.socket]) -> None:
    connection, _ = peer
    connection.sock.settimeout(0.01)
    with pytest.raises(NoAnswer, match=r"0\.01 seconds"):
        next(answers_to(connection, REQUESTS))
