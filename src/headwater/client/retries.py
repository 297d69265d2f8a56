"""Decides which failures are retried: at which host, after which delay, and how often.

A host that is down says nothing about the others; neither does one that sends nonsense, or that lacks the bucket
because it is not in the cluster yet. A wrong password is wrong on all hosts, and trying it everywhere would look like
an attack. If hosts fail for different reasons, the error is the most helpful one: that there is no such bucket, not
that some other host is down. Bootstraps, readers, groups and planners retry by these rules; nothing here sleeps or
connects.
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
    """The failures of an attempt to use any of several hosts in turn: see `bootstrap.first_that_works`."""

    def __init__(self) -> None:
        self._failures: list[tuple[Address, errors.HeadwaterError]] = []

    def add(self, address: Address, error: errors.HeadwaterError) -> None:
        """Record why a host can't be used. Raises the error if every other host would fail the same way."""
        self._failures.append((address, error))
        if isinstance(error, _SAME_EVERYWHERE):
            raise error.reworded(_with_address(address, error)) from error

    def verdict(self) -> errors.HeadwaterError:
        """Return the error for all hosts: its class is the most informative one, its message lists all reasons."""
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
    """Rank an error: the lower, the more it says about what to do."""
    if isinstance(error, errors.StatusError):
        return 3 if error.retriable else 0
    if isinstance(error, errors.TlsFailed):
        return 1
    if isinstance(error, errors.RemoteProtocolError):
        return 2
    return 5 if isinstance(error, errors.HostUnreachable) else 4


# --- the next attempt ---------------------------------------------------------------------------------------------

PROTOCOL_FAULTS_MAX = 16
"""How often a node may break the protocol within the patience of a read (`give_up_after_s`)."""
_DOUBLINGS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The delays between attempts: they grow up to a limit.

    They are random, so that clients which lost the same server do not all come back at the same moment.
    """

    delay_s_min: float
    delay_s_max: float
    random: Callable[[], float]
    """Returns a number from 0 up to 1."""

    @classmethod
    def of(cls, options: ReadOptions, random: Callable[[], float]) -> Self:
        """The delays between the connection attempts of a read."""
        return cls(delay_s_min=options.reconnect_delay_s_min, delay_s_max=options.reconnect_delay_s_max, random=random)

    def delay_s(self, failures: int) -> float:
        """Return the delay after this many failures in a row."""
        doublings = min(max(failures - 1, 0), _DOUBLINGS_MAX)
        whole_s: float = min(self.delay_s_min * 2**doublings, self.delay_s_max)
        return whole_s * (0.5 + self.random() / 2)


class Attempts:
    """Attempts at one operation, with the same patience as a read has for its connections."""

    def __init__(self, options: ReadOptions, *, random: Callable[[], float], now_s: float) -> None:
        self._backoff = Backoff.of(options, random)
        self._give_up_s = math.inf if options.give_up_after_s is None else now_s + options.give_up_after_s
        self._failures = 0

    def delay_s_after(self, error: errors.HeadwaterError, now_s: float) -> float:
        """Return the delay before the next attempt. Raises the error if there should be none."""
        self._failures += 1
        if is_final(error) or now_s > self._give_up_s:
            raise error
        return self._backoff.delay_s(self._failures)


class Tolerance:
    """Tolerates protocol violations of a node: one may be temporary, but repeated ones are not."""

    def __init__(self, *, within_s: float | None) -> None:
        """With None, it tolerates violations forever."""
        self._within_s = within_s
        self._faults: dict[Address, tuple[float, int]] = {}
        """For each node, the time of the first violation and their number."""

    def ends_with(self, node: Address, now_s: float) -> bool:
        """The node has broken the protocol. Returns whether that is once too often."""
        if self._within_s is None:
            return False
        since_s, count = self._faults.get(node, (now_s, 0))
        if now_s - since_s > self._within_s:
            since_s, count = now_s, 0
        self._faults[node] = (since_s, count + 1)
        return count + 1 >= PROTOCOL_FAULTS_MAX


def is_final(error: errors.HeadwaterError) -> bool:
    """Return whether no later attempt can succeed, as with a wrong password or an untrusted certificate."""
    # Truncated data is also a `RemoteProtocolError`, and retrying may help.
    return not (error.retriable or isinstance(error, errors.RemoteProtocolError))
