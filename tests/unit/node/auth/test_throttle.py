"""The throttle: free failures, growing delays, forgetting, and bounded memory."""

from __future__ import annotations

from headwater.node.auth.accounts import DELAYS_S, FREE_FAILURES, MEMORY_S, RECORDS_MAX, WINDOW_S, LoginThrottle

PEER, USER = "192.0.2.1", "ann"


def after(failures: int, *, now_s: float = 0.0) -> LoginThrottle:
    throttle = LoginThrottle()
    for _ in range(failures):
        throttle.failed(PEER, USER, now_s=now_s)
    return throttle


def test_a_peer_nobody_knows_need_not_wait() -> None:
    assert LoginThrottle().wait_s(PEER, USER, now_s=0.0) == 0.0


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


def test_delays_grow() -> None:
    assert sorted(set(DELAYS_S)) == list(DELAYS_S)


def test_a_refused_try_costs_nothing() -> None:
    throttle = after(FREE_FAILURES)
    for _ in range(100):
        assert throttle.wait_s(PEER, USER, now_s=0.0) == DELAYS_S[0]


def test_a_success_wipes_the_slate() -> None:
    throttle = after(FREE_FAILURES + 3)
    throttle.succeeded(PEER, USER)
    assert throttle.wait_s(PEER, USER, now_s=0.0) == 0.0
    assert len(throttle) == 0
    throttle.succeeded(PEER, "nobody")


def test_other_peers_and_other_users_are_not_held_off() -> None:
    throttle = after(FREE_FAILURES + 3)
    assert throttle.wait_s("192.0.2.2", USER, now_s=0.0) == 0.0
    assert throttle.wait_s(PEER, "bob", now_s=0.0) == 0.0


def test_free_failures_are_forgotten_after_a_quiet_window() -> None:
    throttle = after(FREE_FAILURES - 1)
    throttle.failed(PEER, USER, now_s=WINDOW_S)
    assert throttle.wait_s(PEER, USER, now_s=WINDOW_S) == 0.0

    throttle = after(FREE_FAILURES - 1)
    throttle.failed(PEER, USER, now_s=WINDOW_S - 0.25)
    assert throttle.wait_s(PEER, USER, now_s=WINDOW_S - 0.25) == DELAYS_S[0]


def test_costly_failures_are_remembered_longer() -> None:
    throttle = after(FREE_FAILURES)
    throttle.failed(PEER, USER, now_s=MEMORY_S - 1)
    assert throttle.wait_s(PEER, USER, now_s=MEMORY_S - 1) == DELAYS_S[1]

    throttle = after(FREE_FAILURES + 3)
    throttle.failed(PEER, USER, now_s=MEMORY_S)
    assert throttle.wait_s(PEER, USER, now_s=MEMORY_S) == 0.0


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


def test_memory_is_bounded_and_the_oldest_failure_is_forgotten() -> None:
    throttle = LoginThrottle(records_max=3)
    for user in ("ann", "bob", "cid"):
        for _ in range(FREE_FAILURES):
            throttle.failed(PEER, user, now_s=0.0)
    throttle.failed(PEER, "ann", now_s=1.0)
    throttle.failed(PEER, "dan", now_s=2.0)
    assert len(throttle) == 3
    assert [user for user in ("ann", "bob", "cid") if throttle.wait_s(PEER, user, now_s=0.5)] == ["ann", "cid"]


def test_a_flood_of_names_stays_within_the_bound() -> None:
    throttle = LoginThrottle()
    for number in range(RECORDS_MAX + 100):
        throttle.failed(PEER, str(number), now_s=0.0)
    assert len(throttle) == RECORDS_MAX
