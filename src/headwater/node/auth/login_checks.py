"""Checks log-ins: throttles after failures, and queues passwords to be checked one at a time.

Key-value sessions and HTTP pass every password and every SCRAM proof to the node's one `LoginChecks`. A password takes
about ten milliseconds to hash, by design, so a thread hashes them one at a time: the event loop serves others
meanwhile, and log-ins take at most one core. Three counters slow down guessing, and none of them lets the guesses of
one client lock out another:

- **Address and user.** A few failures are free, because people mistype. After that, each failure delays the next try
  longer, up to a limit; earlier tries are refused unchecked. A success, or enough time, clears the count.
- **Address.** The first counter does not slow down guessing of names, as each is a new one. So an address that has
  failed often, whatever the names, is served at a steady pace. Its log-ins are not refused, but wait in the queue.
- **Node.** All failures on the node together also have a pace, against guessing from many addresses.

Waiting log-ins are served round-robin by address, so that an address with a thousand connections is no faster than one
with a single connection. A user who has logged in from the same address before is *known* there, goes ahead of all that
are not, and has no pace. When the queue is full, the address with the most log-ins in it loses its newest.

A limitation remains: a user who shares both address and name with an attacker has to wait as well, up to a minute per
try. Nothing distinguishes the two before the password is checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from ipaddress import IPv6Address, ip_address
from typing import TypeVar

from headwater.errors import HeadwaterError
from headwater.node.auth.users import User, Users

K = TypeVar("K")
V = TypeVar("V")

# --- throttling after failures ------------------------------------------------------------------------------------

FREE_FAILURES = 5

WINDOW_S = 60.0
"""Free failures are forgotten after this long without another."""

DELAYS_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0)
"""The delay after the last free failure, and after each further one; the last entry is the longest delay."""

MEMORY_S = 900.0
"""Failures with a delay are remembered this long. If they were forgotten after `WINDOW_S`, using up the free failures,
waiting and beginning again would be faster than the delays."""

RECORDS_MAX = 4_096
"""How many pairs of peer and user are remembered; beyond that the one with the oldest failure is forgotten."""

ADDRESS_FREE_FAILURES, ADDRESS_FAILURES_PER_S = 20, 20.0
NODE_FREE_FAILURES, NODE_FAILURES_PER_S = 100, 50.0
"""How many failures are free, and how many are allowed per second after that. The node's pace takes half a core."""

KNOWN_S = 7 * 86_400.0
"""How long a user is known at an address after a log-in from it."""

_IPV6_HOST_BITS = 64
"""An IPv6 client can choose these bits freely, so all addresses of such a network count as one."""


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


class _Pace:
    """A token bucket for failures: `free` of them cost nothing, then `per_s` are allowed per second."""

    def __init__(self, free: int, per_s: float) -> None:
        self._free, self._per_s = float(free), per_s
        self._left = self._free
        self._at_s = float("-inf")

    def wait_s(self, now_s: float) -> float:
        return max(0.0, (1.0 - self._left_at(now_s)) / self._per_s)

    def failed(self, now_s: float) -> None:
        self._left, self._at_s = max(0.0, self._left_at(now_s) - 1.0), now_s

    def _left_at(self, now_s: float) -> float:
        return min(self._free, self._left + max(0.0, now_s - self._at_s) * self._per_s)


class LoginThrottle:
    """Counts failed log-ins: by address and user, by address, and of the whole node.

    Call `wait_s` just before a password or a proof is checked, and report the outcome in the same step. A peer that
    opens a thousand connections at once then gains nothing, since the checks are done one after the other. Do not
    report a try that was refused: the peer has learned nothing from it, and a client that retries with the right
    password must not be locked out forever. Times are seconds of a monotonic clock; a peer is an address without port.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[tuple[str, str], _Record] = OrderedDict()
        """Failures by (peer, user), the oldest failure first."""
        self._addresses: OrderedDict[str, _Pace] = OrderedDict()
        """The paces of addresses, the oldest failure first."""
        self._node = _Pace(NODE_FREE_FAILURES, NODE_FAILURES_PER_S)
        self._known: OrderedDict[tuple[str, str], float] = OrderedDict()
        """When users last logged in, by (address, user), the oldest first."""

    def __len__(self) -> int:
        return len(self._records)

    def wait_s(self, peer: str, user: str, *, now_s: float) -> float:
        """How long this peer must wait before it may try this user; 0 if it may try now."""
        record = self._records.get((peer, user))
        if record is None or record.is_forgotten(now_s):
            return 0.0
        return max(0.0, record.last_failure_s + record.delay_s - now_s)

    def pace_s(self, peer: str, *, now_s: float) -> float:
        """How long the next check for this address has to wait, unless its user is known there."""
        address = self._addresses.get(address_of(peer))
        return max(self._node.wait_s(now_s), 0.0 if address is None else address.wait_s(now_s))

    def is_known(self, peer: str, user: str, *, now_s: float) -> bool:
        """Whether this user has logged in from this address before."""
        last_s = self._known.get((address_of(peer), user))
        return last_s is not None and now_s - last_s < KNOWN_S

    def failed(self, peer: str, user: str, *, now_s: float) -> None:
        """Count a failed log-in: a wrong password or proof, or an unknown user. A peer must not see which."""
        record = self._records.get((peer, user))
        before = 0 if record is None or record.is_forgotten(now_s) else record.failures
        _keep_newest(self._records, (peer, user), _Record(before + 1, now_s), most=RECORDS_MAX)
        address = address_of(peer)
        pace = self._addresses.get(address) or _Pace(ADDRESS_FREE_FAILURES, ADDRESS_FAILURES_PER_S)
        pace.failed(now_s)
        _keep_newest(self._addresses, address, pace, most=RECORDS_MAX)
        self._node.failed(now_s)

    def succeeded(self, peer: str, user: str, *, now_s: float) -> None:
        """Forget earlier failures of this user from this peer, because a log-in was right."""
        self._records.pop((peer, user), None)
        _keep_newest(self._known, (address_of(peer), user), now_s, most=RECORDS_MAX)


def _keep_newest(entries: OrderedDict[K, V], key: K, value: V, *, most: int) -> None:
    """Add an entry as the newest, and remove the oldest if there are too many."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > most:
        entries.popitem(last=False)


def address_of(peer: str) -> str:
    """The address that is counted for a peer: for IPv6, the network that a client is assigned."""
    try:
        address = ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if not isinstance(address, IPv6Address):
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(IPv6Address(int(address) >> _IPV6_HOST_BITS << _IPV6_HOST_BITS))


# --- attempts -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LoginAttempt:
    """An attempt to log in, with a password or with a proof. A proof takes hardly any time to check."""

    peer: str
    user: str
    password: str | None = field(default=None, repr=False)
    prove: Callable[[], bool] = field(default=lambda: False, repr=False)
    """Returns whether the proof is right, if there is no password."""

    def is_right(self, users: Users) -> bool:
        """Check the attempt. A password takes about ten milliseconds."""
        try:
            return self.prove() if self.password is None else users.check_password(self.user, self.password)
        except HeadwaterError:
            return False


class LoginOutcome(Enum):
    RIGHT = auto()
    WRONG = auto()
    THROTTLED = auto()
    """Not checked, because of too many earlier failures."""
    BUSY = auto()
    """Not checked, because too many log-ins are waiting."""


@dataclass(frozen=True, slots=True)
class LoginVerdict:
    outcome: LoginOutcome
    wait_s: float = 0.0
    """How long to wait before a retry, if the attempt was not checked."""


def judge(
    attempt: LoginAttempt, throttle: LoginThrottle, *, is_right: Callable[[], bool], now_s: float
) -> LoginVerdict:
    """Ask the throttle, check the attempt, and report the outcome, in one step."""
    wait_s = throttle.wait_s(attempt.peer, attempt.user, now_s=now_s)
    if wait_s > 0:
        return LoginVerdict(LoginOutcome.THROTTLED, wait_s)
    if is_right():
        throttle.succeeded(attempt.peer, attempt.user, now_s=now_s)
        return LoginVerdict(LoginOutcome.RIGHT)
    throttle.failed(attempt.peer, attempt.user, now_s=now_s)
    return LoginVerdict(LoginOutcome.WRONG)


# --- the queue ----------------------------------------------------------------------------------------------------

LINE_MAX = 1_024
"""The most waiting log-ins. A connection has one at a time."""
LINE_OF_ADDRESS_MAX = 256
"""The most waiting log-ins from one address by users that are not known there. Each keeps a connection waiting."""
BUSY_S = 1.0
"""How long to wait before a retry after the queue was full."""
PASSWORDS_KNOWN_MAX = 1_024
PASSWORD_KNOWN_S = 60.0
"""How many right passwords are remembered, as keyed hashes, and how long: clients poll, and open many connections at
once."""
_KEY_BYTES = 32


@dataclass(slots=True, eq=False)
class _Waiting:
    attempt: LoginAttempt
    verdict: asyncio.Future[LoginVerdict]


class _Line:
    """The queue of waiting log-ins: known users first, then address by address in turn."""

    def __init__(self) -> None:
        self._known: deque[_Waiting] = deque()
        self._others: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        """Log-ins of users that are not known, by address, the next address in turn first."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, waiting: _Waiting, *, is_known: bool) -> None:
        line = self._known if is_known else self._others.setdefault(address_of(waiting.attempt.peer), deque())
        line.append(waiting)
        self._count += 1
        if not is_known and len(line) > LINE_OF_ADDRESS_MAX:
            self._drop_newest(line)
        elif self._count > LINE_MAX:
            longest = max(self._others.values(), key=len, default=self._known)
            self._drop_newest(longest if len(longest) >= len(self._known) else self._known)

    def _drop_newest(self, line: deque[_Waiting]) -> None:
        dropped = line[-1]
        self.remove(dropped)
        if not dropped.verdict.done():
            dropped.verdict.set_result(LoginVerdict(LoginOutcome.BUSY, BUSY_S))

    def remove(self, waiting: _Waiting) -> None:
        """Remove a log-in from the queue, if it is still in it."""
        address = address_of(waiting.attempt.peer)
        for line in (self._known, self._others.get(address, deque())):
            with suppress(ValueError):
                line.remove(waiting)
                self._count -= 1
        if not self._others.get(address, True):
            del self._others[address]

    def take(self, throttle: LoginThrottle, now_s: float) -> _Waiting | float:
        """Take the next log-in from the queue. Returns how long to wait instead if the paces allow none now."""
        if self._known:
            self._count -= 1
            return self._known.popleft()
        soonest_s = float("inf")
        for address, line in self._others.items():
            pace_s = throttle.pace_s(address, now_s=now_s)
            if pace_s <= 0:
                self._count -= 1
                waiting = line.popleft()
                del self._others[address]
                if line:
                    self._others[address] = line
                return waiting
            soonest_s = min(soonest_s, pace_s)
        return soonest_s


class LoginChecks:
    """Checks the log-ins of a node, one after the other. `users` returns the users in force when it is called."""

    def __init__(self, users: Callable[[], Users], *, now_s: Callable[[], float]) -> None:
        self.throttle = LoginThrottle()
        self._users = users
        self._now_s = now_s
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._right: OrderedDict[bytes, tuple[User, float]] = OrderedDict()
        """The user and time of expiry of right passwords, by hash of name and password, the oldest first. They count
        only for this very `User` value: one that was removed or changed since is another."""
        self._line = _Line()
        self._has_come = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="passwords")

    async def check(self, attempt: LoginAttempt) -> LoginVerdict:
        """Wait for the turn of an attempt and check it. The wait may be cancelled."""
        now_s = self._now_s()
        # Ask the throttle first: otherwise a remembered password would reveal a right guess among throttled ones.
        wait_s = self.throttle.wait_s(attempt.peer, attempt.user, now_s=now_s)
        if wait_s > 0:
            return LoginVerdict(LoginOutcome.THROTTLED, wait_s)
        if self._is_remembered(attempt):
            return LoginVerdict(LoginOutcome.RIGHT)
        waiting = _Waiting(attempt, asyncio.get_running_loop().create_future())
        is_known = self.throttle.is_known(attempt.peer, attempt.user, now_s=now_s)
        self._line.add(waiting, is_known=is_known)
        self._has_come.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._serve_line())
        try:
            return await waiting.verdict
        finally:
            self._line.remove(waiting)

    async def _serve_line(self) -> None:
        while self._line:
            self._has_come.clear()
            taken = self._line.take(self.throttle, self._now_s())
            if not isinstance(taken, _Waiting):
                try:
                    async with asyncio.timeout(taken):
                        await self._has_come.wait()
                except TimeoutError:
                    pass
            elif not taken.verdict.done():
                verdict = await self._judge(taken.attempt)
                if not taken.verdict.done():
                    taken.verdict.set_result(verdict)

    async def _judge(self, attempt: LoginAttempt) -> LoginVerdict:
        users = self._users()
        if attempt.password is None:
            # A proof takes a few hashes, which is less than calling a thread.
            return judge(attempt, self.throttle, is_right=lambda: attempt.is_right(users), now_s=self._now_s())
        is_right = self._is_remembered(attempt)  # by another connection, while this one waited
        if not is_right and self.throttle.wait_s(attempt.peer, attempt.user, now_s=self._now_s()) <= 0:
            is_right = await asyncio.get_running_loop().run_in_executor(self._thread, attempt.is_right, users)
        verdict = judge(attempt, self.throttle, is_right=lambda: is_right, now_s=self._now_s())
        if verdict.outcome is LoginOutcome.RIGHT:
            remembered = users.by_name[attempt.user], self._now_s() + PASSWORD_KNOWN_S
            _keep_newest(self._right, self._digest(attempt), remembered, most=PASSWORDS_KNOWN_MAX)
        return verdict

    def stop(self) -> None:
        """Stop checking log-ins. The caller has to cancel the ones that wait."""
        if self._worker is not None:
            self._worker.cancel()
        self._thread.shutdown(wait=False)

    # --- remembered passwords -------------------------------------------------------------------------------------

    def _is_remembered(self, attempt: LoginAttempt) -> bool:
        if attempt.password is None:
            return False
        digest = self._digest(attempt)
        known = self._right.get(digest)
        if known is None:
            return False
        if known[1] > self._now_s() and self._users().by_name.get(attempt.user) is known[0]:
            return True
        del self._right[digest]
        return False

    def _digest(self, attempt: LoginAttempt) -> bytes:
        name, password = attempt.user.encode(), (attempt.password or "").encode()
        return hmac.digest(self._key, len(name).to_bytes(4) + name + password, hashlib.sha256)
