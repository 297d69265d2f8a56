"""One connection: its states, what it makes of bytes, the room it gives back; and which connections there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from headwater.client import links
from headwater.client.connection_string import Address
from headwater.client.handshake import ClientHandshake
from headwater.client.retries import Backoff
from headwater.errors import AccessDenied, ConnectionFailed, NotSupported, UnexpectedMessage
from headwater.protocol.consumer import DcpControl, StreamRun
from headwater.protocol.features import WITH_COLLECTIONS, Feature, Opcode
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import ErrorResponse, Message, PlainResponse, Request, decode_message
from headwater.protocol.messages.dcp_changes import Mutation, SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import DcpNoop, Open, OpenFlags
from headwater.protocol.messages.session import ClustermapChangeNotification, GetClusterConfig, Hello, HelloResponse
from headwater.protocol.numbers import CollectionId, Seqno
from headwater.protocol.status import Status
from support.cases import case

BUFFER_BYTES = 1000


def opening() -> links.DcpOpening:
    return links.DcpOpening(
        name="test",
        flags=OpenFlags.PRODUCER,
        controls=(
            DcpControl(key="enable_noop", value="true"),
            DcpControl(key="connection_buffer_size", value=str(BUFFER_BYTES)),
            DcpControl(key="needed", value="1", is_required=True),
            DcpControl(key="nice", value="1"),
        ),
        buffer_bytes=BUFFER_BYTES,
        noop_interval_s=10,
    )


@dataclass
class Talk:
    """A link and the server's end of it. Requests that `refuse` picks get that status."""

    is_scout: bool = False
    refuse: Callable[[Request], Status | None] = lambda request: None
    events: list[links.LinkEvent] = field(default_factory=list)
    heard: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        handshake = ClientHandshake(credentials=None, bucket="b", nonce=b"")
        self.link = links.DcpLink(handshake, None if self.is_scout else opening(), now_s=0.0)

    def listen(self) -> list[Message]:
        """What the link has to say."""
        said = [decode_message(frame, WITH_COLLECTIONS) for frame in decode_frames(self.link.data_to_send())]
        self.heard += said
        return said

    def answer(self) -> bool:
        answers = [self._answer(said) for said in self.listen() if isinstance(said, Request)]
        for data in answers:
            self.say(data)
        return bool(answers)

    def _answer(self, request: Request) -> bytes:
        status = self.refuse(request)
        if status is not None:
            return ErrorResponse(opcode=Opcode(request.opcode), opaque=request.opaque, status=status).encode()
        if isinstance(request, Hello):
            return HelloResponse(opaque=request.opaque, features=(Feature.COLLECTIONS,)).encode()
        return PlainResponse(opcode=Opcode(request.opcode), opaque=request.opaque, value=b"").encode()

    def say(self, data: bytes, *, now_s: float = 0.0) -> None:
        self.link.receive_data(data, now_s=now_s)
        for event in self.link.events():
            # The bytes of a run are those of the receive buffer.
            self.events.append(replace(event, data=bytes(event.data)) if isinstance(event, StreamRun) else event)

    def make_ready(self) -> Talk:
        while self.answer():
            pass
        assert [type(event) for event in self.events] == [links.LinkReady]
        self.events.clear()
        self.heard.clear()
        return self


def mutation(seqno: int, opaque: int = 9, value: bytes = b"") -> bytes:
    parts = {"rev_seqno": 1, "key": b"k", "collection_id": CollectionId(0)}
    return Mutation(opaque=opaque, seqno=Seqno(seqno), value=value, **parts).encode()


def test_a_link_is_ready_when_all_controls_are_answered() -> None:
    talk = Talk()
    while not any(isinstance(message, Open) for message in talk.heard):
        assert talk.events == []
        assert talk.answer()
    assert [type(event) for event in talk.events] == [links.LinkReady]


def test_a_scout_opens_nothing() -> None:
    talk = Talk(is_scout=True)
    while talk.answer():
        pass
    assert [type(event) for event in talk.events] == [links.LinkReady]
    assert not any(isinstance(message, Open) for message in talk.heard)


def test_what_a_server_may_refuse() -> None:
    Talk(refuse=lambda request: Status.EINVAL if b"nice" in request.encode() else None).make_ready()
    with pytest.raises(NotSupported, match="needed=1"):
        Talk(refuse=lambda request: Status.EINVAL if b"needed" in request.encode() else None).make_ready()
    with pytest.raises(AccessDenied):
        Talk(refuse=lambda request: Status.EACCESS if isinstance(request, Open) else None).make_ready()


@pytest.mark.parametrize("piece_bytes", [1, 7, 24, 100_000])
def test_any_split_of_the_bytes_gives_the_same_changes(piece_bytes: int) -> None:
    talk = Talk().make_ready()
    marker = SnapshotMarker(opaque=9, start_seqno=Seqno(0), end_seqno=Seqno(3), flags=SnapshotFlags.MEMORY)
    data = marker.encode() + mutation(1) + mutation(2) + mutation(3)
    for start in range(0, len(data), piece_bytes):
        talk.say(data[start : start + piece_bytes])
    first, *runs = talk.events
    assert first.window_bytes == len(marker.encode())
    assert b"".join(run.data for run in runs if isinstance(run, StreamRun)) == mutation(1) + mutation(2) + mutation(3)
    assert sum(run.rows for run in runs if isinstance(run, StreamRun)) == 3


def test_a_frame_larger_than_the_buffer() -> None:
    talk = Talk().make_ready()
    talk.say(mutation(1, value=b"x" * 3_000_000))
    (run,) = talk.events
    assert isinstance(run, StreamRun)
    assert len(run.data) > 3_000_000


def test_an_answer_comes_with_its_request() -> None:
    talk = Talk().make_ready()
    opaque = talk.link.send_request(GetClusterConfig())
    talk.answer()
    (event,) = talk.events
    assert (event.request.opaque, event.answer.opaque) == (opaque, opaque)


@case(PlainResponse(opcode=Opcode.GET_CLUSTER_CONFIG, opaque=77).encode())
@case(PlainResponse(opcode=Opcode.DCP_NOOP, opaque=5).encode())
@case(mutation(2) + mutation(2))
def test_what_no_server_should_say(data: bytes) -> None:
    talk = Talk().make_ready()
    while talk.link.send_request(GetClusterConfig()) < 5:
        pass
    with pytest.raises(UnexpectedMessage):
        talk.say(data)


def test_noops_are_answered_and_pushed_maps_told() -> None:
    talk = Talk().make_ready()
    talk.say(DcpNoop(opaque=3).encode())
    (answer,) = talk.listen()
    assert (answer.opcode, answer.opaque) == (Opcode.DCP_NOOP, 3)
    talk.say(ClustermapChangeNotification(revision=1, value=b"{}").encode())
    (event,) = talk.events
    assert event.config == b"{}"


def test_room_is_given_back_in_pieces_that_are_worth_a_message() -> None:
    talk = Talk().make_ready()
    data = mutation(1, value=b"x" * 300)
    talk.say(data)
    assert talk.link.owed_bytes == len(data)
    talk.link.release(100)
    assert talk.listen() == []
    talk.link.release(len(data) - 100)
    (ack,) = talk.listen()
    assert ack.acked_bytes == len(data)
    assert talk.link.owed_bytes == 0


def test_a_link_is_pressed_from_half_of_its_window_on() -> None:
    talk = Talk().make_ready()
    talk.say(mutation(1, value=b"x" * 300))
    assert not talk.link.is_pressed
    talk.say(mutation(2, value=b"x" * 300))
    assert talk.link.is_pressed


def test_a_server_that_knows_no_flow_control() -> None:
    talk = Talk().make_ready()
    too_much = b"".join(mutation(seqno, value=b"x" * 1_000_000) for seqno in range(1, 30))
    with pytest.raises(UnexpectedMessage, match="flow-control buffer of 1000"):
        talk.say(too_much)


def test_a_silent_server_is_dead_after_two_and_a_half_noops() -> None:
    link = Talk().make_ready().link
    for second in range(26):
        link.tick(float(second))
    with pytest.raises(ConnectionFailed, match="silent"):
        link.tick(26.0)


def test_we_were_away_ourselves() -> None:
    link = Talk().make_ready().link
    link.tick(1000.0)


def test_a_handshake_without_an_answer() -> None:
    link = Talk().link
    for second in range(int(links.ANSWER_TIMEOUT_S) + 1):
        link.tick(float(second))
    with pytest.raises(ConnectionFailed):
        link.tick(links.ANSWER_TIMEOUT_S + 1)


def test_the_end_of_the_connection() -> None:
    with pytest.raises(ConnectionFailed, match="closed"):
        Talk().make_ready().link.receive_end()


# --- the pool -----------------------------------------------------------------------------------------------------

A, B = Address("a", 1), Address("b", 2)
CUT = ConnectionFailed("cut")


def new_link(slot: links.PooledLink, is_loopback: bool, now_s: float) -> links.DcpLink:
    return links.DcpLink(ClientHandshake(credentials=None, bucket="b", nonce=b""), None, now_s=now_s)


def new_pool() -> links.LinkPool:
    return links.LinkPool(
        new_link=new_link, backoff=Backoff(delay_s_min=1.0, delay_s_max=8.0, random=lambda: 0.999999999999999)
    )


def opened(pool: links.LinkPool) -> list[Address]:
    commands, pool.commands = pool.commands, []
    return [command.address for command in commands if isinstance(command, links.OpenConnection)]


def ready(pool: links.LinkPool, address: Address, lane: int = 0) -> links.PooledLink:
    pool.get(address, lane, now_s=0)
    slot = next(slot for slot in pool.slots.values() if (slot.address, slot.lane) == (address, lane))
    pool.on_connected(slot.id, is_loopback=True, now_s=0)
    pool.on_ready(slot)
    return slot


def test_a_lane_has_one_link_and_it_is_there_when_it_is_ready() -> None:
    pool = new_pool()
    assert pool.get(A, 0, now_s=0) is None
    assert pool.get(A, 0, now_s=0) is None
    assert opened(pool) == [A]
    slot = ready(pool, A)
    assert pool.get(A, 0, now_s=0) is slot
    assert pool.get(A, 1, now_s=0) is None
    assert opened(pool) == [A]


def test_a_lost_node_is_tried_again_later_each_time() -> None:
    pool = new_pool()
    now_s = 0.0
    for delay_s in (1, 2, 4, 8, 8):
        pool.get(A, 0, now_s=now_s)
        assert opened(pool) == [A]
        pool.drop(next(iter(pool.slots.values())), CUT, now_s=now_s)
        pool.get(A, 0, now_s=now_s + delay_s - 0.1)
        assert opened(pool) == []
        now_s += delay_s
    assert pool.failures(A).count == 5
    assert pool.failures(A).last is CUT


def test_a_link_that_is_ready_makes_up_for_all_failures() -> None:
    pool = new_pool()
    pool.drop(ready(pool, A), CUT, now_s=0)
    pool.get(A, 0, now_s=5)
    slot = next(iter(pool.slots.values()))
    assert pool.on_ready(slot), "it had been lost"
    assert (pool.failures(A).count, pool.failures(A).last, pool.failures(A).retry_at_s) == (0, None, 0.0)


def test_a_connection_that_was_given_up_meanwhile_gets_no_link() -> None:
    pool = new_pool()
    pool.get(A, 0, now_s=0)
    slot = next(iter(pool.slots.values()))
    pool.close(slot)
    assert pool.commands == [links.OpenConnection(slot.id, A), links.CloseConnection(slot.id)]
    assert pool.on_connected(slot.id, is_loopback=True, now_s=0) is None
    assert pool.failures(A).count == 0


def test_one_scout_at_a_time_to_the_host_that_failed_longest_ago() -> None:
    pool = new_pool()
    pool.scout([A, B], now_s=0)
    pool.scout([A, B], now_s=0)
    assert opened(pool) == [A]
    scout = next(iter(pool.slots.values()))
    assert scout.lane == links.SCOUT
    pool.drop(scout, CUT, now_s=0)
    pool.scout([A, B], now_s=5)
    assert opened(pool) == [B]


def test_scouts_carry_no_streams() -> None:
    pool = new_pool()
    pool.scout([A], now_s=0)
    scout = next(iter(pool.slots.values()))
    assert not pool.on_ready(scout)
    assert pool.ready == []
