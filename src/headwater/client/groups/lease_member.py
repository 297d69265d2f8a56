"""One member of an elastic group, sans-IO: it is shown the group's document, and says what to write and what to read.

`lease_group` gives it a clock and the document over the network. It must never compare two clocks.

## The document

All members share one document, and change it only by compare-and-swap, so that its states are a single chain and each
follows from the one before it. A member has a *seat* in it with a heartbeat. A vbucket has an *owner*, the one seat
that may read it, and a *target*, the seat that is to. The targets are a balanced plan over the seats that are there
(`plan_targets`). A member that sees that they are not, because a seat has come or gone, makes a new plan.

## Hand-over in two steps

A plan moves only the target. The owner sees it, lets its reader stop and save its offsets, and only then writes that
the vbucket has no owner. The target sees that, and writes itself in as the owner. It reads when this write has been
answered. So the owner changes from a seat to none to a seat, and never from seat to seat:

    no owner ──taken by its target──► a seat ──released by that seat itself, or its lease has run out──► no owner

## Leases, without a common clock

A member that is dead can't release. So what it has is lent to it, for `lease_s` after every heartbeat. No two clocks
are compared for that, only spans of time on one clock each:

* A member counts the lease from *before* the heartbeat's write was sent, once it knows that the write took place.
* Another member counts from *after* the read that first showed it the heartbeat, and waits `lease_s + margin_s`. A
  heartbeat that it has not seen change in that time belongs to a seat that it may clear, by compare-and-swap.

No member can have read the heartbeat before it was written, so the others start to count later, and count longer. The
member has stopped by then, as long as its clock does not lose more than the margin in the time of a lease. And if it
was not dead and has renewed meanwhile, the document is no longer the one that the others want to swap.

A member whose lease has run out forgets what it had. Where it finds its seat still there, no other member has taken
anything from it, and its next heartbeat gives it all back. Where it does not, it joins again, with a new seat.

A member that finds the document behind what it knows (its last heartbeat is missing, or a vbucket that it has is
another's) stops at once and joins again, too. That happens where the document was deleted, or where a failover took
back the newest writes to it.

## What remains

* **A process that is stopped for longer than its lease** (SIGSTOP, swapping, a virtual machine that is moved) between
  its look at `assignment` and what it does with the answer may hand out one batch too many when it goes on, and save
  its offsets. The first is at-least-once delivery. Against the second there is the *generation*: a number per vbucket
  that rises whenever it is taken. The store that keeps the offsets has to remember the highest generation that it has
  seen of a vbucket, at the latest when a new owner loads them, and to refuse to save with a lower one. The same can
  be done wherever else the changes are written to.
* **A failover that takes back writes to the document**, because they had not come to the copy that is active now, or
  an operator who deletes it. A member that is the owner of a vbucket by a write that is gone goes on until its next
  turn, which is where it finds out, or until its lease ends, where it has no turn. Meanwhile another may take the
  vbucket, after a failover even with the same generation.
* **A margin that is too small** for what a reader does between two looks at its assignment, or for the clocks. What
  its caller does with a batch may take longer than any margin, and is delivered again elsewhere then.
* **A reader that does not release** what it is to hand over keeps it, for as long as it renews its lease.
* **A document that is made again** starts new generations, by the calendar of the machine that makes it. They are
  higher than the old ones unless that is far behind, or vbuckets were taken more than once a second all the time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from headwater.client.groups import Assignment
from headwater.client.groups.group_document import LEASE_S_MAX, SEATS_MAX, GroupDocument, Seat
from headwater.errors import GroupDocumentInvalid, GroupFull, InvalidInput
from headwater.protocol.numbers import VBucketId
from headwater.protocol.states import Table, transition

# --- the plan -----------------------------------------------------------------------------------------------------
#
# Who is to have which vbucket: balanced within one, and with as few moves as that takes.
#
# Pure and deterministic: every member that makes the plan from the same document makes the same one. And the plan of a
# plan is the plan itself, so that it can be made again at any time.
#
# How few moves is that? With `v` vbuckets and `m` members, each member is to have `v // m` of them, and `v % m` members
# one more. Those that have more than that have to give up the rest, and no other gives up anything. That is least
# where those that have the most are the ones that may have one more.


def plan_targets(current: Sequence[str | None], members: Iterable[str]) -> tuple[str | None, ...]:
    """For every vbucket the member that is to have it. One that is in the plan so far and is no member has lost all."""
    held: dict[str, list[int]] = {member: [] for member in sorted(members)}
    if not held:
        return (None,) * len(current)
    for vbucket, member in enumerate(current):
        if member in held:
            held[member].append(vbucket)
    shares = _shares({member: len(vbuckets) for member, vbuckets in held.items()}, vbuckets=len(current))
    targets = [member if member in held else None for member in current]
    for member, vbuckets in held.items():
        for vbucket in _spread(vbuckets, len(vbuckets) - shares[member]):
            targets[vbucket] = None
    _deal(targets, {member: shares[member] - len(vbuckets) for member, vbuckets in held.items()})
    return tuple(targets)


def _shares(counts: dict[str, int], *, vbuckets: int) -> dict[str, int]:
    """How many each is to have."""
    least, rest = divmod(vbuckets, len(counts))
    by_count = sorted(counts, key=lambda member: (-counts[member], member))
    return {member: least + (rank < rest) for rank, member in enumerate(by_count)}


def _spread(vbuckets: list[int], count: int) -> list[int]:
    """So many of them at even distances: neighbours mostly live on one node, and all nodes are to give alike."""
    return [vbuckets[at * len(vbuckets) // count] for at in range(count)] if count > 0 else []


def _deal(targets: list[str | None], missing: dict[str, int]) -> None:
    """Give what has no member to those that miss some, in turns."""
    waiting = deque(member for member, count in missing.items() if count > 0)
    for vbucket, target in enumerate(targets):
        if target is None:
            member = waiting.popleft()
            targets[vbucket] = member
            missing[member] -= 1
            if missing[member]:
                waiting.append(member)


# --- leases -------------------------------------------------------------------------------------------------------


LEASE_S = 15.0
INTERVAL_S = 3.0
MARGIN_S = 5.0

_RENEWALS_MIN = 2
"""How many heartbeats a lease must have room for, so that a single one that is lost does no harm."""
_IMPATIENCE = 4
"""How much more often a member looks at the document while vbuckets are under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The times of one member. Members of a group may differ in them: a lease says how long it is."""

    lease_s: float = LEASE_S
    """A member that has not renewed its lease for so long stops reading."""
    interval_s: float = INTERVAL_S
    """Between two heartbeats."""
    margin_s: float = MARGIN_S
    """How much longer others wait before they take what it had.

    It covers what a member that has stopped may still be busy with, and clocks that don't run equally fast.
    """

    def __post_init__(self) -> None:
        if not 0 < self.lease_s <= LEASE_S_MAX:
            raise InvalidInput(f"lease_s is {self.lease_s}", hint=f"Use up to {LEASE_S_MAX:.0f} seconds")
        if not 0 < self.interval_s * _RENEWALS_MIN <= self.lease_s:
            raise InvalidInput(
                f"interval_s is {self.interval_s} for leases of {self.lease_s} seconds",
                hint=f"Use at most lease_s / {_RENEWALS_MIN}, so that a heartbeat may be lost",
            )
        if not 0 < self.margin_s <= LEASE_S_MAX:
            raise InvalidInput(f"margin_s is {self.margin_s}", hint=f"Use up to {LEASE_S_MAX:.0f} seconds")

    @property
    def busy_interval_s(self) -> float:
        """Between two looks at the document while vbuckets are under way."""
        return self.interval_s / _IMPATIENCE


# --- the states of a member ---------------------------------------------------------------------------------------


class MemberState(Enum):
    OUTSIDE = auto()
    """No lease: nothing may be read, and a seat is to be taken."""
    INSIDE = auto()
    """There is a lease."""
    REPLACED = auto()
    """Another process has come by the same member id. All is handed over to it and the others."""
    LEAVING = auto()
    """Nothing is read any more, and the seat is to be cleared."""
    ENDED = auto()


class LeaseGranted:
    """A write with a heartbeat of our seat took place."""


class LeaseEnded:
    """The lease has run out, or the document is not what we knew it to be."""


class ReplacementSeen:
    """The document says that another process has our member id."""


class LeaveAsked:
    """The reader has stopped."""


class HandedOver:
    """Who was replaced has released everything."""


class SeatCleared:
    """The document has no seat of ours."""


MEMBER: Table[MemberState] = {
    MemberState.OUTSIDE: {
        LeaseGranted: MemberState.INSIDE,
        ReplacementSeen: MemberState.REPLACED,
        LeaveAsked: MemberState.LEAVING,
    },
    MemberState.INSIDE: {
        LeaseGranted: MemberState.INSIDE,
        LeaseEnded: MemberState.OUTSIDE,
        ReplacementSeen: MemberState.REPLACED,
        LeaveAsked: MemberState.LEAVING,
    },
    MemberState.REPLACED: {
        LeaseGranted: MemberState.REPLACED,
        LeaseEnded: MemberState.ENDED,
        HandedOver: MemberState.LEAVING,
        LeaveAsked: MemberState.LEAVING,
    },
    MemberState.LEAVING: {LeaseEnded: MemberState.ENDED, SeatCleared: MemberState.ENDED},
    MemberState.ENDED: {},
}


# --- the states of a vbucket, for one member ----------------------------------------------------------------------


class HandOverState(Enum):
    NOT_MINE = auto()
    READING = auto()
    HANDING_OVER = auto()
    """The reader has been asked to stop. There is no way back from here: it may have begun to."""
    RELEASED = auto()
    """The reader has stopped, and the document does not say so yet."""


class Taken:
    """A write that makes us its owner took place."""


class MovedAway:
    """Another member is to have it."""


class ReaderReleased:
    """The reader has stopped to read it, and has saved its offset."""


class ReleaseSeen:
    """The document says that it is not ours."""


_LOST: dict[type[Any], HandOverState] = {LeaseEnded: HandOverState.NOT_MINE}

HAND_OVER: Table[HandOverState] = {
    HandOverState.NOT_MINE: {Taken: HandOverState.READING},
    HandOverState.READING: {MovedAway: HandOverState.HANDING_OVER, **_LOST},
    HandOverState.HANDING_OVER: {ReaderReleased: HandOverState.RELEASED, **_LOST},
    HandOverState.RELEASED: {ReleaseSeen: HandOverState.NOT_MINE, **_LOST},
}


# --- the member ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Held:
    """A vbucket that is not `NOT_MINE`."""

    state: HandOverState
    generation: int


@dataclass(frozen=True, slots=True)
class _Observation:
    heartbeat: int
    since_s: float


class LeaseMember:
    """Show it the document every time that `next_turn_s` says, and write what it says, by compare-and-swap.

    All times are of one clock, that of the process. It must not stand still while the process does.
    """

    def __init__(
        self,
        *,
        member_id: str,
        vbuckets: int,
        terms: LeaseTerms,
        new_seat_id: Callable[[], str],
        first_generation: Callable[[], int],
    ) -> None:
        """`first_generation` says where the generations of a new document start: higher every time it is asked."""
        self.member_id = member_id
        self.terms = terms
        self.state = MemberState.OUTSIDE
        self.was_replaced = False
        self._vbuckets = vbuckets
        self._new_seat_id = new_seat_id
        self._first_generation = first_generation
        self._seat_id = new_seat_id()
        self._heartbeat = 0
        """The last one of our seat that is known to have been written."""
        self._renewed_s = 0.0
        self._looked_s = -math.inf
        self._full_since_s: float | None = None
        """Since when we wait for a seat."""
        self._is_settled = False
        self._held: dict[VBucketId, _Held] = {}
        self._observed: dict[str, _Observation] = {}
        self._assignment = Assignment(number=1)

    # --- for the reader -------------------------------------------------------------------------------------------

    @property
    def lease_end_s(self) -> float | None:
        """When reading must stop; None where nothing may be read as it is."""
        return self._renewed_s + self.terms.lease_s if self._heartbeat else None

    def assignment(self, now_s: float) -> Assignment:
        """What may be read now."""
        self.tick(now_s)
        return self._assignment

    def release(self, vbuckets: Iterable[VBucketId], now_s: float) -> None:
        """The reader has stopped to read these. What it was not to release is passed over."""
        self.tick(now_s)
        for vbucket in vbuckets:
            held = self._held.get(vbucket)
            if held is not None and held.state is HandOverState.HANDING_OVER:
                self._change(vbucket, ReaderReleased)
        self._publish()

    def leave(self, now_s: float) -> None:
        """The reader has stopped to read anything. The next turn clears the seat."""
        self.tick(now_s)
        if self.state not in (MemberState.LEAVING, MemberState.ENDED):
            self._move(LeaveAsked)
        self._held.clear()
        self._publish()

    def tick(self, now_s: float) -> None:
        """Note the time: a lease that has run out is lost."""
        if self._has_run_out(now_s):
            self._lose_lease()

    def _has_run_out(self, now_s: float) -> bool:
        return self.lease_end_s is not None and now_s >= self.lease_end_s

    # --- for the document -----------------------------------------------------------------------------------------

    @property
    def next_turn_s(self) -> float | None:
        """When to show the document next, at the earliest; None for never."""
        if self.state is MemberState.ENDED:
            return None
        if self.state is MemberState.LEAVING or any(h.state is HandOverState.RELEASED for h in self._held.values()):
            return -math.inf
        busy_s = self._looked_s + self.terms.busy_interval_s
        if not self._heartbeat:
            return busy_s
        renewal_s = self._renewed_s + self.terms.interval_s
        return renewal_s if self._is_settled else min(renewal_s, busy_s)

    def next_document(self, seen: GroupDocument | None, now_s: float) -> GroupDocument | None:
        """What is to be written over the document that was just read; None where there is no need.

        `seen` is None where there is no document yet; `now_s` is a time after the answer has come.
        """
        self.tick(now_s)
        document = seen or GroupDocument.empty(vbuckets=self._vbuckets, first_generation=self._first_generation())
        if document.vbuckets != self._vbuckets:
            raise GroupDocumentInvalid(
                f"the group's document is for {document.vbuckets} vbuckets, and the bucket has {self._vbuckets}",
                hint="Delete the document if the bucket was created again; otherwise give the group another name",
            )
        self._look(document, now_s)
        if self.state is MemberState.ENDED:
            return None
        if self.state is MemberState.LEAVING:
            return self._planned(document.without_seats([self._seat_id]))
        document = self._seated(document.without_seats(self._run_out_seats(document, now_s)), now_s)
        document = self._taken(self._released(self._planned(document)))
        is_due = not self._heartbeat or now_s >= self._renewed_s + self.terms.interval_s
        seat = document.seat(self._seat_id)
        if seat is not None and (is_due or document != seen):
            return document.with_seat(replace(seat, heartbeat=seat.heartbeat + 1))
        return document if document != seen else None

    def on_written(self, document: GroupDocument, *, sent_s: float, now_s: float) -> None:
        """A write took place. `sent_s` is a time before it was sent."""
        self.tick(now_s)
        self._is_settled = document.is_settled
        seat = document.seat(self._seat_id)
        if self.state is MemberState.LEAVING and seat is None:
            self._end()
        if seat is None or self.state in (MemberState.LEAVING, MemberState.ENDED):
            # A write of a seat that has been given up since, or one that was on its way when the reader stopped.
            return
        self._heartbeat = seat.heartbeat
        self._renewed_s = sent_s
        self._move(LeaseGranted)
        for vbucket, owner in enumerate(document.owners):
            if owner == seat.id and VBucketId(vbucket) not in self._held:
                self._take(VBucketId(vbucket), document.generation(vbucket))
        self._note_moves(document)
        self._publish()
        self.tick(now_s)

    # --- looking at the document ----------------------------------------------------------------------------------

    def _look(self, document: GroupDocument, now_s: float) -> None:
        self._looked_s = now_s
        self._is_settled = document.is_settled
        if not self._is_as_known(document):
            self._lose_lease()
            # What the document says of the old seat, and what was seen of the others, may never have been.
            self._seat_id = self._new_seat_id()
            self._observed = {}
        if self.state is MemberState.ENDED:
            return
        self._note_moves(document)
        seat = document.seat(self._seat_id)
        if seat is not None and seat.is_replaced and self.state in (MemberState.OUTSIDE, MemberState.INSIDE):
            self.was_replaced = True
            self._move(ReplacementSeen)
        if self.state is MemberState.REPLACED and not self._held:
            self._move(HandedOver)
        if self.state is MemberState.LEAVING and seat is None:
            self._end()
        self._observe(document, now_s)
        self._publish()

    def _is_as_known(self, document: GroupDocument) -> bool:
        """Whether no other member has changed what is ours alone to change."""
        if not self._heartbeat:
            return True
        seat = document.seat(self._seat_id)
        if seat is None or seat.heartbeat < self._heartbeat:
            return False
        return all(
            document.owners[vbucket] == seat.id and document.generation(vbucket) == held.generation
            for vbucket, held in self._held.items()
            if held.state is not HandOverState.RELEASED
        )

    def _note_moves(self, document: GroupDocument) -> None:
        for vbucket, held in list(self._held.items()):
            if held.state is HandOverState.READING and document.targets[vbucket] != self._seat_id:
                self._change(vbucket, MovedAway)
            elif held.state is HandOverState.RELEASED and document.owners[vbucket] != self._seat_id:
                self._change(vbucket, ReleaseSeen)

    def _observe(self, document: GroupDocument, now_s: float) -> None:
        observed: dict[str, _Observation] = {}
        for seat in document.seats:
            known = self._observed.get(seat.id)
            if known is None or known.heartbeat != seat.heartbeat:
                known = _Observation(seat.heartbeat, now_s)
            observed[seat.id] = known
        self._observed = observed

    # --- changing it ----------------------------------------------------------------------------------------------

    def _run_out_seats(self, document: GroupDocument, now_s: float) -> list[str]:
        return [
            seat.id
            for seat in document.seats
            if seat.id != self._seat_id
            and now_s - self._observed[seat.id].since_s >= seat.lease_s + self.terms.margin_s
        ]

    def _seated(self, document: GroupDocument, now_s: float) -> GroupDocument:
        """With our seat in it, if there is room, and with the others that have our member id marked as replaced."""
        if document.seat(self._seat_id) is not None:
            return document
        if len(document.seats) >= SEATS_MAX:
            self._wait_for_room(document, now_s)
            return document
        self._full_since_s = None
        # Never the same seat twice: a member that has not seen it go would count on from its old heartbeats.
        self._seat_id = self._new_seat_id()
        others = tuple(
            replace(seat, is_replaced=True) if seat.member_id == self.member_id else seat for seat in document.seats
        )
        own = Seat(id=self._seat_id, member_id=self.member_id, heartbeat=0, lease_s=self.terms.lease_s)
        return replace(document, seats=(*others, own))

    def _wait_for_room(self, document: GroupDocument, now_s: float) -> None:
        """Seats of the dead are cleared only by a member that has watched them for long enough."""
        if self._full_since_s is None:
            self._full_since_s = now_s
        longest_s = max(seat.lease_s for seat in document.seats) + self.terms.margin_s + self.terms.interval_s
        if now_s - self._full_since_s >= longest_s:
            raise GroupFull(f"the group has {SEATS_MAX} members, and all are alive", hint="Stop some members")

    def _planned(self, document: GroupDocument) -> GroupDocument:
        members = [seat.id for seat in document.seats if not seat.is_replaced]
        return replace(document, targets=plan_targets(document.targets, members))

    def _released(self, document: GroupDocument) -> GroupDocument:
        owners = list(document.owners)
        for vbucket, held in self._held.items():
            if held.state is HandOverState.RELEASED:
                owners[vbucket] = None
        return replace(document, owners=tuple(owners))

    def _taken(self, document: GroupDocument) -> GroupDocument:
        """With us as the owner of what we are to have and has no owner."""
        owners, takings = list(document.owners), list(document.takings)
        for vbucket, target in enumerate(document.targets):
            # What has just been released is not taken in the same write: the reader has to see it go first.
            if target == self._seat_id and owners[vbucket] is None and VBucketId(vbucket) not in self._held:
                owners[vbucket] = self._seat_id
                takings[vbucket] += 1
        return replace(document, owners=tuple(owners), takings=tuple(takings))

    # --- own state ------------------------------------------------------------------------------------------------

    def _move(self, event: type[Any]) -> None:
        self.state = transition(MEMBER, self.state, event)

    def _take(self, vbucket: VBucketId, generation: int) -> None:
        self._held[vbucket] = _Held(transition(HAND_OVER, HandOverState.NOT_MINE, Taken), generation)

    def _change(self, vbucket: VBucketId, event: type[Any]) -> None:
        held = self._held.pop(vbucket)
        state = transition(HAND_OVER, held.state, event)
        if state is not HandOverState.NOT_MINE:
            self._held[vbucket] = _Held(state, held.generation)

    def _lose_lease(self) -> None:
        for vbucket in list(self._held):
            self._change(vbucket, LeaseEnded)
        self._heartbeat = 0
        self._move(LeaseEnded)
        self._publish()

    def _end(self) -> None:
        self._heartbeat = 0
        self._move(SeatCleared)

    def _publish(self) -> None:
        """Make a new assignment where it has changed."""
        reading = frozenset(v for v, held in self._held.items() if held.state is HandOverState.READING)
        to_release = frozenset(v for v, held in self._held.items() if held.state is HandOverState.HANDING_OVER)
        generations = {v: self._held[v].generation for v in sorted(reading | to_release)}
        known = self._assignment
        if (known.vbuckets, known.to_release, known.generations) != (reading, to_release, generations):
            self._assignment = Assignment(
                number=known.number + 1, vbuckets=reading, to_release=to_release, generations=generations
            )
