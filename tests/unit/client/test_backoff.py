"""Whether and when to try again."""

from __future__ import annotations

import pytest

from headwater.client.connection_string import Address
from headwater.client.kv_connection import PROTOCOL_FAULTS_MAX, Backoff, Tolerance, is_final
from headwater.errors import (
    AuthenticationFailed,
    ConnectionFailed,
    HeadwaterError,
    MalformedJson,
    StoreFull,
    TemporaryFailure,
    TlsFailed,
)
from headwater.protocol.status import Status

NODE = Address("node", 1)


def delays(random: float) -> list[float]:
    backoff = Backoff(delay_s_min=1.0, delay_s_max=5.0, random=lambda: random)
    return [backoff.delay_s(failures) for failures in (0, 1, 2, 3, 4, 10_000)]


def test_delays_double_up_to_a_bound() -> None:
    assert delays(0.0) == [0.5, 0.5, 1.0, 2.0, 2.5, 2.5]


def test_no_two_clients_wait_for_the_same_time() -> None:
    assert all(late > early for early, late in zip(delays(0.0), delays(0.9), strict=True))
    assert max(delays(0.999999)) <= 5.0


@pytest.mark.parametrize(
    ("error", "is_the_last"),
    [
        (ConnectionFailed("cut"), False),
        (TlsFailed("not trusted"), True),
        (AuthenticationFailed(Status.AUTH_ERROR, "wrong password"), True),
        (TemporaryFailure(Status.ETMPFAIL, "not now"), False),
        (MalformedJson("half of it"), False),
        (StoreFull("full"), True),
    ],
)
def test_which_errors_are_final(error: HeadwaterError, is_the_last: bool) -> None:
    assert is_final(error) is is_the_last


def test_a_node_may_break_the_protocol_now_and_then_but_not_again_and_again() -> None:
    tolerance = Tolerance(within_s=100.0)
    assert not any(tolerance.ends_with(NODE, now_s * 50.0) for now_s in range(1000))
    outcomes = [tolerance.ends_with(NODE, 100_000.0) for _ in range(PROTOCOL_FAULTS_MAX)]
    assert outcomes == [False] * (PROTOCOL_FAULTS_MAX - 1) + [True]
    assert not any(Tolerance(within_s=None).ends_with(NODE, 0.0) for _ in range(1000))
