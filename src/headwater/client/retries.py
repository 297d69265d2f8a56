"""Which failures lead to another attempt: at which host, after which delay, and how often.

A host that is down says nothing about the others, nor does one that speaks nonsense, or that does not have the bucket
because it is not in the cluster yet. A wrong password is wrong on all of them: to try it everywhere would only look
like an attack. And where hosts have failed for different reasons, the error is the one that helps most: that there is
no such bucket, and not that some other host is down. Bootstraps, readers, groups and planners retry by these rules;
nothing here sleeps or connects.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from headwater import errors
from headwater.client.connection_string import Address
from headwater.client.read_options import ReadOptions

_SAME_EVERYWHERE = (errors.AuthenticationFailed, errors.InvalidInput, errors.LocalProtocolError)


class HostFailures:
    """The failures of an attempt to use any of several hosts, in turn: see `bootstrap.first_that_works`."""

    def __init__(self) -> None:
        self._failures: list[tuple[Address, errors.HeadwaterError]] = []

    def add(self, address: Address, error: errors.HeadwaterError) -> None:
        """Remember why a host can't be used, or raise the error again where no other host would make a difference."""
        self._failures.append((address, error))
        if isinstance(error, _SAME_EVERYWHERE):
            raise error.reworded(_with_address(address, error)) from error

    def verdict(self) -> errors.HeadwaterError:
        """The error for all of them: of the class that says most, and with what each of them has said."""
        if not self._failures:
            raise errors.LocalProtocolError("no host was named", hint="Name at least one")
        worst = min((error for _, error in self._failures), key=_rank)
        verdict = worst.reworded(self._reason())
        verdict.__cause__ = worst
        return verdict

    def _reason(self) -> str:
        reasons = "; ".join(_with_address(address, error) for address, error in self._failures)
        if len(self._failures) == 1:
            return reasons
        all_unreachable = all(isinstance(error, errors.HostUnreachable) for _, error in self._failures)
        return f"no host can be {'reached' if all_unreachable else 'used'}: {reasons}"


def _with_address(address: Address, error: errors.HeadwaterError) -> str:
    return error.reason if str(address) in error.reason else f"{address}: {error.reason}"


def _rank(error: errors.HeadwaterError) -> int:
    """The lower, the more the error says about what to do."""
    if isinstance(error, errors.StatusError):
        return 3 if error.retriable else 0
    if isinstance(error, errors.TlsFailed):
        return 1
    if isinstance(error, errors.RemoteProtocolError):
        return 2
    return 5 if isinstance(error, errors.HostUnreachable) else 4


# --- the next attempt ---------------------------------------------------------------------------------------------

PROTOCOL_FAULTS_MAX = 16
"""How often a node may break the protocol within the time that a read is patient for."""
_DOUBLINGS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The delays of one kind of attempt: longer each time, up to a bound.

    They are never the same for two clients: those that lost one server must not all come back at the same moment.
    """

    delay_s_min: float
    delay_s_max: float
    random: Callable[[], float]
    """A number from 0 up to 1."""

    @classmethod
    def of(cls, options: ReadOptions, random: Callable[[], float]) -> Self:
        """The delays between the connections of a read."""
        return cls(delay_s_min=options.reconnect_delay_s_min, delay_s_max=options.reconnect_delay_s_max, random=random)

    def delay_s(self, failures: int) -> float:
        """The delay after that many failures in a row."""
        doublings = min(max(failures - 1, 0), _DOUBLINGS_MAX)
        whole_s: float = min(self.delay_s_min * 2**doublings, self.delay_s_max)
        return whole_s * (0.5 + self.random() / 2)


class Attempts:
    """Attempts at one thing, as patient as a read is with its connections: how long to wait after each failure."""

    def __init__(self, options: ReadOptions, *, random: Callable[[], float], now_s: float) -> None:
        self._backoff = Backoff.of(options, random)
        self._give_up_s = math.inf if options.give_up_after_s is None else now_s + options.give_up_after_s
        self._failures = 0

    def delay_s_after(self, error: errors.HeadwaterError, now_s: float) -> float:
        """The delay before the next attempt. Raises the error if there is to be none."""
        self._failures += 1
        if is_final(error) or now_s > self._give_up_s:
            raise error
        return self._backoff.delay_s(self._failures)


class Tolerance:
    """A node that breaks the protocol once may do better next time. One that keeps doing it will not."""

    def __init__(self, *, within_s: float | None) -> None:
        """None is for ever patient."""
        self._within_s = within_s
        self._faults: dict[Address, tuple[float, int]] = {}
        """Since when, and how often."""

    def ends_with(self, node: Address, now_s: float) -> bool:
        """The node has broken the protocol: whether that is once too often."""
        if self._within_s is None:
            return False
        since_s, count = self._faults.get(node, (now_s, 0))
        if now_s - since_s > self._within_s:
            since_s, count = now_s, 0
        self._faults[node] = (since_s, count + 1)
        return count + 1 >= PROTOCOL_FAULTS_MAX


def is_final(error: errors.HeadwaterError) -> bool:
    """No later attempt will do better: a wrong password, a certificate that is not trusted."""
    # Bytes that were cut off look like nonsense, too.
    return not (error.retriable or isinstance(error, errors.RemoteProtocolError))
