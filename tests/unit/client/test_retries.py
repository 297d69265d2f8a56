"""Several hosts that fail: which failure is reported, and which ends the search."""

from __future__ import annotations

import itertools

import pytest

from headwater.client.connection_string import Address
from headwater.client.retries import PROTOCOL_FAULTS_MAX, Backoff, HostFailures, Tolerance, is_final
from headwater.errors import (
    AccessDenied,
    AuthenticationFailed,
    BadMagic,
    Busy,
    ConnectionClosed,
    ConnectionFailed,
    HeadwaterError,
    HostUnreachable,
    InvalidInput,
    LocalProtocolError,
    MalformedJson,
    NoAnswer,
    StoreFull,
    TemporaryFailure,
    TlsFailed,
    UnknownBucket,
)
from headwater.protocol.status import Status
from support.cases import case, each

HOSTS = tuple(Address(host, 11210) for host in "abc")
DOWN = HostUnreachable("it can't be reached", hint="Start it")
SILENT = NoAnswer("it says nothing", hint="Look at it")
CLOSED = ConnectionClosed("it hung up", hint="Look at it")
NO_TLS = TlsFailed("it speaks no TLS", hint="Check the port")
NONSENSE = BadMagic("it speaks nonsense")
NO_BUCKET = UnknownBucket(Status.KEY_ENOENT, "there is no bucket 'x'")
NO_ACCESS = AccessDenied(Status.EACCESS, "the user may not")
BUSY = Busy(Status.EBUSY, "it is busy")


def verdict(*errors: HeadwaterError) -> HeadwaterError:
    failures = HostFailures()
    for address, error in zip(HOSTS, errors, strict=False):
        failures.add(address, error)
    return failures.verdict()


def test_one_host_is_told_as_it_is_with_its_address() -> None:
    with pytest.raises(LocalProtocolError, match="no host was named"):
        verdict()
    reported = verdict(DOWN)
    assert type(reported) is HostUnreachable
    assert str(reported) == "a:11210: it can't be reached. Start it"
    named = HostUnreachable("a:11210 can't be reached", hint="Start it")
    assert verdict(named).reason == "a:11210 can't be reached"


def test_hosts_that_are_all_down() -> None:
    reported = verdict(DOWN, DOWN)
    assert type(reported) is HostUnreachable
    assert reported.reason == "no host can be reached: a:11210: it can't be reached; b:11210: it can't be reached"
    assert reported.hint == "Start it"


@each("worst", [NO_BUCKET, NO_ACCESS, NO_TLS, NONSENSE, BUSY, CLOSED, SILENT])
@each("place", [0, 1, 2])
def test_what_tells_most_is_told_whatever_else_is_down(worst: HeadwaterError, place: int) -> None:
    errors: list[HeadwaterError] = [DOWN, DOWN]
    errors.insert(place, worst)
    reported = verdict(*errors)
    assert type(reported) is type(worst)
    assert reported.hint == worst.hint
    assert reported.reason.startswith("no host can be used: a:11210: ")
    assert worst.reason in reported.reason
    assert reported.reason.count("it can't be reached") == 2
    assert reported.__cause__ is worst
    assert getattr(reported, "status", None) == getattr(worst, "status", None)


def test_the_order_of_what_tells_most() -> None:
    order = [NO_BUCKET, NO_TLS, NONSENSE, BUSY, SILENT, DOWN]
    for better, worse in itertools.pairwise(order):
        assert type(verdict(worse, better)) is type(verdict(better, worse)) is type(better)
    assert type(verdict(NO_ACCESS, NO_BUCKET)) is AccessDenied, "the first of two that say the same much"


@case(AuthenticationFailed(Status.AUTH_ERROR, "the password is wrong"))
@case(InvalidInput("the file can't be used"))
@case(LocalProtocolError("a fault of ours"))
def test_what_is_the_same_everywhere_ends_the_search(error: HeadwaterError) -> None:
    failures = HostFailures()
    failures.add(HOSTS[0], DOWN)
    with pytest.raises(type(error)) as raised:
        failures.add(HOSTS[1], error)
    assert raised.value.reason == f"b:11210: {error.reason}"
    assert raised.value.__cause__ is error


# Whether and when to try again.


NODE = Address("node", 1)


def delays(random: float) -> list[float]:
    backoff = Backoff(delay_s_min=1.0, delay_s_max=5.0, random=lambda: random)
    return [backoff.delay_s(failures) for failures in (0, 1, 2, 3, 4, 10_000)]


def test_delays_double_up_to_a_bound() -> None:
    assert delays(0.0) == [0.5, 0.5, 1.0, 2.0, 2.5, 2.5]
    # No two clients wait for the same time.
    assert all(late > early for early, late in zip(delays(0.0), delays(0.9), strict=True))
    assert max(delays(0.999999)) <= 5.0


@case(ConnectionFailed("cut"), False)
@case(TlsFailed("not trusted"), True)
@case(AuthenticationFailed(Status.AUTH_ERROR, "wrong password"), True)
@case(TemporaryFailure(Status.ETMPFAIL, "not now"), False)
@case(MalformedJson("half of it"), False)
@case(StoreFull("full"), True)
def test_which_errors_are_final(error: HeadwaterError, is_the_last: bool) -> None:
    assert is_final(error) is is_the_last


def test_a_node_may_break_the_protocol_now_and_then_but_not_again_and_again() -> None:
    tolerance = Tolerance(within_s=100.0)
    assert not any(tolerance.ends_with(NODE, now_s * 50.0) for now_s in range(1000))
    outcomes = [tolerance.ends_with(NODE, 100_000.0) for _ in range(PROTOCOL_FAULTS_MAX)]
    assert outcomes == [False] * (PROTOCOL_FAULTS_MAX - 1) + [True]
    assert not any(Tolerance(within_s=None).ends_with(NODE, 0.0) for _ in range(1000))
