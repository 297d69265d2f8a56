"""Whether another attempt makes sense, and how long to wait for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headwater.errors import ConnectionFailed, HeadwaterError, RemoteProtocolError, StatusError, TlsFailed

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


def is_final(error: HeadwaterError) -> bool:
    """No later attempt will do better: a wrong password, a certificate that is not trusted."""
    if isinstance(error, StatusError):
        return not error.retriable
    if isinstance(error, RemoteProtocolError):
        # Bytes that were cut off look like nonsense, too.
        return False
    return isinstance(error, TlsFailed) or not isinstance(error, ConnectionFailed)
