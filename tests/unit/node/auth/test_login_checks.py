"""Checking log-ins: what failures cost whom, and in which order those that wait are checked."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from headwater.node.auth import login_checks
from headwater.node.auth.login_checks import (
    ADDRESS_FAILURES_PER_S,
    ADDRESS_FREE_FAILURES,
    DELAYS_S,
    FREE_FAILURES,
    MEMORY_S,
    NODE_FREE_FAILURES,
    WINDOW_S,
    LoginAttempt,
    LoginChecks,
    LoginOutcome,
    LoginThrottle,
    LoginVerdict,
    address_of,
)
from support.cases import case

PEER, USER = "192.0.2.1", "ann"


def after(failures: int, *, now_s: float = 0.0) -> LoginThrottle:
    throttle = LoginThrottle()
    for _ in range(failures):
        throttle.failed(PEER, USER, now_s=now_s)
    return throttle


def test_a_few_failures_are_free() -> None:
    for failures in range(FREE_FAILURES):
        assert after(failures).wait_s(PEER, USER, now_s=0.0) == 0.0


def test_from_then_on_each_failure_costs_more_up_to_the_bound() -> None:
    throttle, now_s = after(FREE_FAILURES - 1), 0.0
    for delay_s in (*DELAYS_S, DELAYS_S[-1], DELAYS_S[-1]):
        throttle.failed(PEER, USER, now_s=now_s)
        assert throttle.wait_s(PEER, USER, now_s=now_s) == delay_s
        assert throttle.wait_s(PEER, USER, now_s=now_s + delay_s - 0.25) == 0.25
        now_s += delay_s
        assert throttle.wait_s(PEER, USER, now_s=now_s) == 0.0


def test_what_costs_nothing() -> None:
    throttle = after(FREE_FAILURES)
    for _ in range(100):
        assert throttle.wait_s(PEER, USER, now_s=0.0) == DELAYS_S[0], "a refused try"
    assert throttle.wait_s("192.0.2.2", USER, now_s=0.0) == 0.0, "failures of another peer"
    assert throttle.wait_s(PEER, "bob", now_s=0.0) == 0.0, "failures of another user"
    throttle.succeeded(PEER, USER, now_s=0.0)
    assert (throttle.wait_s(PEER, USER, now_s=0.0), len(throttle)) == (0.0, 0), "failures before a success"


@case(FREE_FAILURES - 1, WINDOW_S, 0.0)
@case(FREE_FAILURES - 1, WINDOW_S - 0.25, DELAYS_S[0])
# Costly failures are remembered longer.
@case(FREE_FAILURES, MEMORY_S - 1, DELAYS_S[1])
@case(FREE_FAILURES + 3, MEMORY_S, 0.0)
def test_failures_are_forgotten_after_some_quiet(failures: int, at_s: float, delay_s: float) -> None:
    throttle = after(failures)
    throttle.failed(PEER, USER, now_s=at_s)
    assert throttle.wait_s(PEER, USER, now_s=at_s) == delay_s


def tries_within(hours: int, *, pause_s: float) -> int:
    """How many guesses a peer gets that pauses this long whenever it must wait, or just as long as it must."""
    throttle, now_s, tries = LoginThrottle(), 0.0, 0
    while now_s < hours * 3600:
        wait_s = throttle.wait_s(PEER, USER, now_s=now_s)
        if wait_s:
            now_s += max(wait_s, pause_s)
            continue
        throttle.failed(PEER, USER, now_s=now_s)
        tries += 1
    return tries


def test_no_way_of_pausing_pays() -> None:
    at_once = tries_within(24, pause_s=0.0)
    assert at_once < 1_500
    assert max(tries_within(24, pause_s=pause_s) for pause_s in (WINDOW_S, DELAYS_S[-1] + WINDOW_S, MEMORY_S)) < at_once


def test_memory_is_bounded_and_the_oldest_failure_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_checks, "RECORDS_MAX", 3)
    throttle = LoginThrottle()
    for user in ("ann", "bob", "cid"):
        for _ in range(FREE_FAILURES):
            throttle.failed(PEER, user, now_s=0.0)
    throttle.failed(PEER, "ann", now_s=1.0)
    throttle.failed(PEER, "dan", now_s=2.0)
    assert len(throttle) == 3
    assert [user for user in ("ann", "bob", "cid") if throttle.wait_s(PEER, user, now_s=0.5)] == ["ann", "cid"]


# --- the pace of addresses and of the node ------------------------------------------------------------------------


def test_names_that_are_made_up_slow_their_address_down_and_no_other() -> None:
    throttle = LoginThrottle()
    for number in range(ADDRESS_FREE_FAILURES):
        assert throttle.pace_s(PEER, now_s=0.0) == 0.0
        throttle.failed(PEER, f"user {number}", now_s=0.0)
    assert throttle.pace_s(PEER, now_s=0.0) == pytest.approx(1 / ADDRESS_FAILURES_PER_S)
    assert throttle.pace_s(PEER, now_s=1 / ADDRESS_FAILURES_PER_S) == 0.0
    assert throttle.pace_s("192.0.2.2", now_s=0.0) == 0.0


def test_guesses_from_many_addresses_slow_the_node_down() -> None:
    throttle = LoginThrottle()
    for number in range(NODE_FREE_FAILURES):
        throttle.failed(f"192.0.2.{number}", USER, now_s=0.0)
    assert throttle.pace_s("198.51.100.1", now_s=0.0) > 0.0


@case("192.0.2.1", "192.0.2.1")
@case("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::")
@case("fe80::1%eth0", "fe80::")
@case("::ffff:192.0.2.1", "192.0.2.1")
@case("a host", "a host")
def test_an_address_is_what_one_client_has(peer: str, address: str) -> None:
    assert address_of(peer) == address


# --- the line -----------------------------------------------------------------------------------------------------


@dataclass
class Checks:
    """Log-ins with proofs, which are checked as soon as it is their turn. The clock is set by hand."""

    now: float = 0.0
    order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.checks = LoginChecks(lambda: None, now_s=lambda: self.now)

    def begin(self, peer: str, user: str, *, is_right: bool = False) -> asyncio.Task[LoginVerdict]:
        def prove() -> bool:
            self.order.append(f"{user}@{peer}")
            return is_right

        return asyncio.create_task(self.checks.check(LoginAttempt(peer=peer, user=user, prove=prove)))


async def test_addresses_are_served_in_turn() -> None:
    checks = Checks()
    many = [checks.begin("192.0.2.1", f"guess {number}") for number in range(4)]
    await asyncio.gather(*many, checks.begin("192.0.2.2", "ann"))
    assert checks.order.index("ann@192.0.2.2") == 1


async def test_who_has_logged_in_from_there_before_goes_first() -> None:
    checks = Checks()
    await checks.begin(PEER, "ann", is_right=True)
    for number in range(ADDRESS_FREE_FAILURES):
        await checks.begin(PEER, f"guess {number}")
    guesses = [checks.begin(PEER, f"paced {number}") for number in range(90)]
    # The clock stands still, so that the address gets no further check: the guesses wait, and ann does not.
    assert (await checks.begin(PEER, "ann", is_right=True)).outcome is LoginOutcome.RIGHT
    assert not any(guess.done() for guess in guesses)
    for guess in guesses:
        guess.cancel()
    checks.checks.stop()


async def test_a_full_line_drops_the_newest_of_the_address_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_checks, "LINE_MAX", 3)
    checks = Checks()
    many = [checks.begin("192.0.2.1", f"guess {number}") for number in range(3)]
    other = checks.begin("192.0.2.2", "ann", is_right=True)
    outcomes = [verdict.outcome for verdict in await asyncio.gather(*many, other)]
    assert outcomes == [LoginOutcome.WRONG, LoginOutcome.WRONG, LoginOutcome.BUSY, LoginOutcome.RIGHT]


async def test_an_address_has_a_share_of_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_checks, "LINE_OF_ADDRESS_MAX", 2)
    checks = Checks()
    many = [checks.begin(PEER, f"guess {number}") for number in range(3)]
    other = checks.begin("192.0.2.2", "ann", is_right=True)
    outcomes = [verdict.outcome for verdict in await asyncio.gather(*many, other)]
    assert outcomes == [LoginOutcome.WRONG, LoginOutcome.WRONG, LoginOutcome.BUSY, LoginOutcome.RIGHT]


async def test_a_wait_that_is_cancelled_is_not_checked_and_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_checks, "LINE_OF_ADDRESS_MAX", 2)
    checks = Checks()
    first, second = checks.begin(PEER, "ann"), checks.begin(PEER, "bob")
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.sleep(0)
    await first
    await checks.begin(PEER, "cid")
    assert checks.order == [f"ann@{PEER}", f"cid@{PEER}"]
