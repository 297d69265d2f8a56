"""Whether another attempt makes sense, and how long to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.client.connection_string import Address
from headwater.errors import HeadwaterError, RemoteProtocolError

PROTOCOL_FAULTS_MAX = 16
"""How often a node may break the protocol within the time that a read is patient for."""
_DOUBLINGS_MAX = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """The delays of one kind of attempt: longer each time, up to a bound.

    They are never the same for everybody: clients that lost one server must not all come back at the same moment.
    """

    delay_s_min: float
    delay_s_max: float
    random: Callable[[], float]
    """A number from 0 up to 1."""

    def delay_s(self, failures: int) -> float:
        """The delay after that many failures in a row."""
        doublings = min(max(failures - 1, 0), _DOUBLINGS_MAX)
        whole_s: float = min(self.delay_s_min * 2**doublings, self.delay_s_max)
        return whole_s * (0.5 + self.random() / 2)


class Tolerance:
    """A node that breaks the protocol once may do better next time. One that goes on with it will not."""

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


def is_final(error: HeadwaterError) -> bool:
    """No later attempt will do better: a wrong password, a certificate that is not trusted."""
    # Bytes that were cut off look like nonsense, too.
    return not (error.retriable or isinstance(error, RemoteProtocolError))
