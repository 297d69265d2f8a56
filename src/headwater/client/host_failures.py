"""Several hosts, of which one is enough: which failures lead to the next host, and what is said if all have failed.

A host that is down says nothing about the others, nor does one that speaks nonsense, or that does not have the bucket
because it is not in the cluster yet. A wrong password is wrong on all of them: to try it everywhere would only look
like an attack. And where hosts have failed for different reasons, the one that tells most is the error: that there is
no such bucket, and not that some other host is down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from headwater.client.connection_string import Address
from headwater.errors import (
    AuthenticationFailed,
    HeadwaterError,
    HostUnreachable,
    InvalidInput,
    LocalProtocolError,
    RemoteProtocolError,
    StatusError,
    TlsFailed,
)

T = TypeVar("T")

_SAME_EVERYWHERE = (AuthenticationFailed, InvalidInput, LocalProtocolError)


def first_that_works(addresses: Iterable[Address], attempt: Callable[[Address], T]) -> T:
    """What the attempt gives for the first host that it works with, in their order."""
    failures = HostFailures()
    for address in addresses:
        try:
            return attempt(address)
        except HeadwaterError as error:
            failures.add(address, error)
    raise failures.verdict()


class HostFailures:
    """The failures of an attempt to use any of several hosts, in turn: see `first_that_works`."""

    def __init__(self) -> None:
        self._failures: list[tuple[Address, HeadwaterError]] = []

    def add(self, address: Address, error: HeadwaterError) -> None:
        """Remember why a host can't be used, or raise the error again where no other host would make a difference."""
        self._failures.append((address, error))
        if isinstance(error, _SAME_EVERYWHERE):
            raise error.retold(_told(address, error)) from error

    def verdict(self) -> HeadwaterError:
        """The error for all of them: of the class that tells most, and with what each of them has said."""
        if not self._failures:
            raise LocalProtocolError("no host has failed, and none was named", hint="Name at least one")
        worst = min((error for _, error in self._failures), key=_rank)
        verdict = worst.retold(self._reason())
        verdict.__cause__ = worst
        return verdict

    def _reason(self) -> str:
        reasons = "; ".join(_told(address, error) for address, error in self._failures)
        if len(self._failures) == 1:
            return reasons
        all_unreachable = all(isinstance(error, HostUnreachable) for _, error in self._failures)
        return f"no host can be {'reached' if all_unreachable else 'used'}: {reasons}"


def _told(address: Address, error: HeadwaterError) -> str:
    return error.reason if str(address) in error.reason else f"{address}: {error.reason}"


def _rank(error: HeadwaterError) -> int:
    """The lower, the more it tells."""
    if isinstance(error, StatusError):
        return 3 if error.retriable else 0
    if isinstance(error, TlsFailed):
        return 1
    if isinstance(error, RemoteProtocolError):
        return 2
    return 5 if isinstance(error, HostUnreachable) else 4
