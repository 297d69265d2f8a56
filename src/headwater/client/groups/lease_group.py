"""Elastic groups: members join, leave and crash, and the vbuckets are shared by those that are alive.

`lease_member` has the theory and the logic; this module adds a clock, randomness and the network.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from headwater.client.groups import Assignment, DocumentPort, GroupBucket
from headwater.client.groups.group_document import KEY_PREFIX, NAME_CHARS_MAX, GroupDocument
from headwater.client.groups.lease_member import INTERVAL_S, LEASE_S, MARGIN_S, LeaseMember, LeaseTerms, MemberState
from headwater.client.retries import Backoff, is_final
from headwater.errors import HeadwaterError, InvalidInput, LocalProtocolError, MemberReplaced
from headwater.options import suggest_keywords
from headwater.protocol.numbers import KEY_BYTES_MAX, VBucketId

GIVE_UP_AFTER_S = 300.0
"""How long the document may be unreachable before the membership fails."""
LEAVE_S_MAX = 5.0
"""How long `stop` tries to clear the seat. If that fails, the lease runs out by itself."""
MISS_PAUSE_S_MIN = 0.01
"""The first pause after a turn that failed. Pauses grow up to `busy_interval_s`."""

_SEAT_ID_BYTES = 8
_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", None)


def lease_clock_s() -> float:
    """The clock for leases. It keeps running while the system sleeps, if the platform has such a clock."""
    return time.monotonic() if _BOOT_CLOCK is None else time.clock_gettime(_BOOT_CLOCK)


@suggest_keywords
class LeaseGroup:
    """A member of the group `name`: `LeaseGroup("invoices", "worker-1")`. Each object is for one read.

    Each process needs its own member id. If two use the same one, the later one stays. Without an id, the process gets
    a new one every time. With an id, a process that was killed and restarted is recognized, and the others need not
    make room for both.

    Every heartbeat of every member writes the group's document, which is in the default collection unless another is
    named: readers of that collection receive these changes, too.
    """

    def __init__(
        self,
        name: str,
        member_id: str | None = None,
        *,
        lease_s: float = LEASE_S,
        interval_s: float = INTERVAL_S,
        margin_s: float = MARGIN_S,
        collection: str | None = None,
        give_up_after_s: float = GIVE_UP_AFTER_S,
        clock: Callable[[], float] = lease_clock_s,
    ) -> None:
        self.name = _checked("group", name)
        self.member_id = secrets.token_hex(_SEAT_ID_BYTES) if member_id is None else _checked("member", member_id)
        self.key = f"{KEY_PREFIX}{name}".encode()
        if len(self.key) > KEY_BYTES_MAX:
            raise InvalidInput(
                f"the name of the group makes a key of {len(self.key)} bytes", hint=f"Use up to {KEY_BYTES_MAX}"
            )
        self.terms = LeaseTerms(lease_s=lease_s, interval_s=interval_s, margin_s=margin_s)
        self.last_failure: HeadwaterError | None = None
        """Why the document was last unreachable; None while it is reachable."""
        self._collection = collection
        self._give_up_after_s = give_up_after_s
        self._clock = clock
        self._member: LeaseMember | None = None
        self._port: DocumentPort | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._backoff = Backoff(
            delay_s_min=min(MISS_PAUSE_S_MIN, self.terms.busy_interval_s),
            delay_s_max=self.terms.busy_interval_s,
            random=random.random,
        )
        self._misses = 0
        """The number of turns in a row that failed."""
        self._failure: Exception | None = None
        self._last: Assignment | None = None
        self._announced: Assignment | None = None
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()

    def __repr__(self) -> str:
        return f"LeaseGroup({self.name!r}, {self.member_id!r})"

    # --- the membership -------------------------------------------------------------------------------------------

    async def start(self, bucket: GroupBucket) -> Assignment:
        """Join the group. Raises the error if the first heartbeat fails."""
        if self._member is not None:
            raise LocalProtocolError("the membership was started before", hint="Create a new one for each read")
        self._member = LeaseMember(
            member_id=self.member_id,
            vbuckets=bucket.vbuckets,
            terms=self.terms,
            new_seat_id=lambda: secrets.token_hex(_SEAT_ID_BYTES),
            first_generation=lambda: int(time.time()),
        )
        self._port = bucket.open_document(self.key, self._collection)
        try:
            while self._member.state is MemberState.OUTSIDE and await self._wait_for_turn(self._member):
                await self._take_turn(self._member, self._port)
        except BaseException:
            self._end()
            await self._port.close()
            raise
        self._task = asyncio.create_task(self._run(self._member, self._port), name=f"headwater-group-{self.name}")
        return self.current()

    def current(self) -> Assignment:
        if self._last is not None:
            return self._last
        return self._started().assignment(self._clock())

    async def assignment_changed(self, known: Assignment) -> Assignment:
        if known.is_last:
            raise LocalProtocolError("the membership has ended", hint="Stop at the last assignment")
        while (current := self.current()).number <= known.number:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()
        return current

    async def release(self, vbuckets: Iterable[VBucketId]) -> None:
        """Release the vbuckets and return at once. The next turn, which is soon, writes the document."""
        self._started().release(vbuckets, self._clock())
        self._announce()
        self._wake.set()

    async def stop(self) -> None:
        """Leave, and try to clear the seat, so that others need not wait for the lease to run out."""
        if self._last is not None:
            return
        member = self._started()
        member.leave(self._clock())
        self._announce()
        self._wake.set()
        assert self._task is not None
        assert self._port is not None
        try:
            await asyncio.wait([self._task], timeout=LEAVE_S_MAX)
        finally:
            self._end()
            self._task.cancel()
            await self._port.close()
            await asyncio.wait([self._task])

    def _started(self) -> LeaseMember:
        if self._member is None:
            raise LocalProtocolError("the membership has not been started", hint="Await start() first")
        return self._member

    # --- notifying the reader -------------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Wake waiting callers if the assignment has changed, and schedule a check for the end of the lease."""
        member = self._started()
        assignment = self.current()
        if assignment is not self._announced:
            self._announced = assignment
            self._wake_waiting()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if member.lease_end_s is not None and self._last is None:
            delay_s = max(0.0, member.lease_end_s - self._clock())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._announce)

    def _wake_waiting(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _end(self) -> None:
        """End the membership: publish a last, empty assignment."""
        self._last = Assignment(number=self.current().number + 1, is_last=True)
        self._announce()

    def _fail(self, error: Exception) -> None:
        """Fail the membership: waiting callers and later ones get the error."""
        self._failure = error
        self._started().leave(self._clock())
        self._announce()
        self._wake_waiting()

    # --- the document ---------------------------------------------------------------------------------------------

    async def _run(self, member: LeaseMember, port: DocumentPort) -> None:
        """Take turns until the member has left. An error that ends this earlier is raised to the reader."""
        reached_s = self._clock()
        try:
            while await self._wait_for_turn(member):
                try:
                    await self._take_turn(member, port)
                    self.last_failure, reached_s = None, self._clock()
                except HeadwaterError as error:
                    if is_final(error) or self._clock() - reached_s >= self._give_up_after_s:
                        raise
                    self.last_failure = error
                    self._misses += 1
            if member.was_replaced:
                raise MemberReplaced(
                    f"another process has joined the group {self.name!r} as member {self.member_id!r}",
                    hint="Give every process its own member id, or none",
                )
        except Exception as error:
            self._fail(error)

    async def _wait_for_turn(self, member: LeaseMember) -> bool:
        """Wait until the next turn is due. Returns False if there will be none."""
        if self._misses:
            await asyncio.sleep(self._backoff.delay_s(self._misses))
        while (due_s := member.next_turn_s) is not None and due_s > self._clock():
            with suppress(TimeoutError):
                async with asyncio.timeout(due_s - self._clock()):
                    await self._wake.wait()
            self._wake.clear()
        return due_s is not None

    async def _take_turn(self, member: LeaseMember, port: DocumentPort) -> None:
        """Read the document, and write the member's changes unless another member was faster."""
        stored = await port.read()
        seen = None if stored is None else GroupDocument.decode(stored.value)
        document = member.next_document(seen, self._clock())
        self._announce()
        if document is not None:
            sent_s = self._clock()
            if stored is None:
                cas = await port.add(document.encode())
            else:
                cas = await port.replace(document.encode(), stored.cas)
            if cas is None:
                self._misses += 1
                return
            member.on_written(document, sent_s=sent_s, now_s=self._clock())
            self._announce()
        self._misses = 0


def _checked(what: str, name: str) -> str:
    if not (0 < len(name) <= NAME_CHARS_MAX and name.isprintable()):
        raise InvalidInput(
            f"{name!r} is not a valid name for a {what}", hint=f"Use 1 to {NAME_CHARS_MAX} printable characters"
        )
    return name
