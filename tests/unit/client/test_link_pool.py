"""Which connections there are, and when a lost one is tried again."""

from __future__ import annotations

from headwater.client.connection_string import Address
from headwater.client.dcp_link import DcpLink
from headwater.client.handshake import ClientHandshake
from headwater.client.kv_connection import Backoff
from headwater.client.link_pool import SCOUT, CloseConnection, LinkPool, OpenConnection, Slot, VBucketWaits
from headwater.errors import ConnectionFailed
from headwater.protocol.numbers import VBucketId

A, B = Address("a", 1), Address("b", 2)
CUT = ConnectionFailed("cut")


def new_link(slot: Slot, is_loopback: bool, now_s: float) -> DcpLink:
    return DcpLink(ClientHandshake(credentials=None, bucket="b", nonce=b""), None, now_s=now_s)


def new_pool() -> LinkPool:
    return LinkPool(
        new_link=new_link, backoff=Backoff(delay_s_min=1.0, delay_s_max=8.0, random=lambda: 0.999999999999999)
    )


def opened(pool: LinkPool) -> list[Address]:
    commands, pool.commands = pool.commands, []
    return [command.address for command in commands if isinstance(command, OpenConnection)]


def ready(pool: LinkPool, address: Address, lane: int = 0) -> Slot:
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
        pool.forget(next(iter(pool.slots.values())), CUT, now_s=now_s)
        pool.get(A, 0, now_s=now_s + delay_s - 0.1)
        assert opened(pool) == []
        now_s += delay_s
    assert pool.failures_in_a_row(A) == 5
    assert pool.last_failure(A) is CUT


def test_a_link_that_is_ready_makes_up_for_all_failures() -> None:
    pool = new_pool()
    pool.forget(ready(pool, A), CUT, now_s=0)
    pool.get(A, 0, now_s=5)
    slot = next(iter(pool.slots.values()))
    assert pool.on_ready(slot), "it had been lost"
    assert (pool.failures_in_a_row(A), pool.last_failure(A), pool.retry_at_s(A)) == (0, None, 0.0)


def test_a_connection_that_was_given_up_meanwhile_gets_no_link() -> None:
    pool = new_pool()
    pool.get(A, 0, now_s=0)
    slot = next(iter(pool.slots.values()))
    pool.forget(slot, None, now_s=0)
    assert pool.commands == [OpenConnection(slot.id, A), CloseConnection(slot.id)]
    assert pool.on_connected(slot.id, is_loopback=True, now_s=0) is None
    assert pool.failures_in_a_row(A) == 0


def test_one_scout_at_a_time_to_the_host_that_failed_longest_ago() -> None:
    pool = new_pool()
    pool.scout([A, B], now_s=0)
    pool.scout([A, B], now_s=0)
    assert opened(pool) == [A]
    scout = next(iter(pool.slots.values()))
    assert scout.lane == SCOUT
    pool.forget(scout, CUT, now_s=0)
    pool.scout([A, B], now_s=5)
    assert opened(pool) == [B]


def test_scouts_carry_no_streams() -> None:
    pool = new_pool()
    pool.scout([A], now_s=0)
    scout = next(iter(pool.slots.values()))
    assert not pool.on_ready(scout)
    assert pool.ready == []


# Vbuckets that wait for a stream.


ONE, TWO = VBucketId(1), VBucketId(2)


def new_waits() -> VBucketWaits:
    waits = VBucketWaits(Backoff(delay_s_min=1.0, delay_s_max=8.0, random=lambda: 0.0))
    waits.begin(ONE, now_s=0.0)
    return waits


def test_one_that_is_asked_for_is_not_due_whatever_is_heard_of_it() -> None:
    waits = new_waits()
    assert list(waits.due(0.0)) == [ONE]
    waits.asked(ONE)
    waits.hurry(ONE, now_s=1.0)
    assert list(waits.due(1e9)) == []


def test_the_delay_grows_with_refusals_and_not_with_what_is_to_be_tried_at_once() -> None:
    waits = new_waits()
    waits.again(ONE, CUT, now_s=0.0, at_once=True)
    assert list(waits.due(0.0)) == [ONE]
    for due_s in (0.5, 1.0, 2.0):
        waits.again(ONE, CUT, now_s=0.0, at_once=False)
        assert list(waits.due(due_s - 0.01)) == []
        assert list(waits.due(due_s)) == [ONE]


def test_news_make_it_due() -> None:
    waits = new_waits()
    waits.again(ONE, CUT, now_s=0.0, at_once=False)
    waits.hurry(ONE, now_s=0.1)
    waits.hurry(TWO, now_s=0.1)
    assert list(waits.due(0.1)) == [ONE]


def test_patience_ends_for_one_that_waits_on_and_begins_anew_with_a_stream() -> None:
    waits = new_waits()
    waits.again(ONE, CUT, now_s=5.0, at_once=False)
    waits.asked(ONE)
    assert waits.overdue(10.0, after_s=10.0) is None
    assert waits.overdue(10.1, after_s=10.0) == (ONE, CUT)
    waits.end(ONE)
    waits.again(ONE, None, now_s=10.0, at_once=True)
    assert waits.overdue(10.1, after_s=10.0) is None
