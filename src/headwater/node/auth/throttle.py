"""Slows down those who guess passwords.

Failed log-ins are counted by peer address and user name. A few are free, because people mistype; from then on each
failure makes the next try wait, longer and longer up to a bound. A success wipes the slate, and so does time.

Ask `wait_s` just before a password or a proof is checked, and report the outcome in the same step. A peer that opens a
thousand connections at once then gains nothing, since the checks come one after the other. A try that was refused is
not reported: it has told the peer nothing, and a client that retries with the right password is not held off for ever.

Sans-IO: the time comes in as an argument, in seconds of a clock that never goes back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

FREE_FAILURES = 5

WINDOW_S = 60.0
"""Free failures with this much quiet after them are forgotten."""

DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""What the last free failure costs, and each one after it; the last entry is the bound."""

MEMORY_S = 900.0
"""Costly failures are remembered longer. After a mere WINDOW_S of quiet it would pay to use up the free failures, wait,
and begin anew, rather than to bear the delays."""

RECORDS_MAX = 4_096
"""Peers and users that are remembered at a time; beyond that the one with the oldest failure is forgotten."""


@dataclass(frozen=True, slots=True)
class _Record:
    failures: int
    last_failure_s: float

    @property
    def delay_s(self) -> float:
        costly = self.failures - FREE_FAILURES
        return 0.0 if costly < 0 else DELAYS_S[min(costly, len(DELAYS_S) - 1)]

    def is_forgotten(self, now_s: float) -> bool:
        return now_s - self.last_failure_s >= (WINDOW_S if self.failures < FREE_FAILURES else MEMORY_S)


class LoginThrottle:
    """Counts failed log-ins, and says how long the next try has to wait."""

    def __init__(self, *, records_max: int = RECORDS_MAX) -> None:
        self._records_max = records_max
        self._records: OrderedDict[tuple[str, str], _Record] = OrderedDict()
        """By (peer, user), the oldest failure first."""

    def __len__(self) -> int:
        return len(self._records)

    def wait_s(self, peer: str, user: str, *, now_s: float) -> float:
        """How long this peer must wait before it may try this user; 0 where it may try now.

        `peer` is the address without the port, which changes with every connection.
        """
        record = self._records.get((peer, user))
        if record is None or record.is_forgotten(now_s):
            return 0.0
        return max(0.0, record.last_failure_s + record.delay_s - now_s)

    def failed(self, peer: str, user: str, *, now_s: float) -> None:
        """The password or the proof was wrong, or there is no such user: the two must not be told apart."""
        record = self._records.pop((peer, user), None)
        before = 0 if record is None or record.is_forgotten(now_s) else record.failures
        self._records[peer, user] = _Record(before + 1, now_s)
        if len(self._records) > self._records_max:
            self._records.popitem(last=False)

    def succeeded(self, peer: str, user: str) -> None:
        """The log-in was right: what was before does not count any more."""
        self._records.pop((peer, user), None)
