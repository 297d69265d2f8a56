"""One member of an elastic group, sans-IO: it takes the group's document, and returns what to write and what to read.

`lease_group` connects it to a clock and the network. It must never compare two clocks.

## The document

All members share one document, and change it only by compare-and-swap, so its states form a single chain in which each
follows from the one before. A member has a *seat* in it, with a heartbeat. A vbucket has an *owner*, the one seat that
may read it, and a *target*, the seat that should read it. The targets are a balanced plan over the current seats
(`plan_targets`). A member that sees that the plan is outdated, because a seat has come or gone, makes a new one.

## Hand-over in two steps

A plan changes only targets. The owner sees that, has its reader stop and save its offsets, and only then writes that
the vbucket has no owner. The target sees that, writes itself as the owner, and reads once this write is acknowledged.
So the owner changes from a seat to none to a seat, and never directly from seat to seat:

    no owner ──taken by its target──► a seat ──released by that seat itself, or its lease has run out──► no owner

## Leases, without a common clock

A dead member can't release its vbuckets. So they are leased to it, for `lease_s` after every heartbeat. This compares
no two clocks, only spans of time on each clock:

* A member counts its lease from *before* it sent the heartbeat's write, once it knows that the write succeeded.
* Another member counts from *after* the read that first showed it the heartbeat, and waits `lease_s + margin_s`. If
  the heartbeat has not changed by then, it may clear the seat, by compare-and-swap.

No member can read a heartbeat before it is written, so the others start counting later, and count longer. The member
has stopped by then, as long as its clock does not lose more than the margin during a lease. And if it is alive and has
renewed its lease in the meantime, the others' compare-and-swap fails.

A member whose lease has run out forgets its vbuckets. If its seat still exists, no other member has taken anything
from it, and its next heartbeat restores everything. Otherwise it joins again, with a new seat.

A member that finds the document older than its own knowledge (its last heartbeat is missing, or one of its vbuckets
has another owner) also stops at once and joins again. That happens if the document was deleted, or if a failover lost
the newest writes to it.

## What remains

* **A process that is stopped for longer than its lease** (SIGSTOP, swapping, a virtual machine that is moved) between
  checking its `assignment` and acting on it may return one batch too many when it resumes, and save its offsets. The
  batch is at-least-once delivery. The *generation* prevents the save: a number per vbucket that rises whenever the
  vbucket is taken. The store of the offsets must remember the highest generation that it has seen of a vbucket, at the
  latest when a new owner loads them, and refuse saves with a lower one. Other targets of the changes can do the same.
* **A failover that loses writes to the document**, because the new active copy had not received them, or an operator
  who deletes it. A member that owns a vbucket by a lost write continues until its next turn, where it notices, or, if
  it gets no turn, until its lease ends. Meanwhile another may take the vbucket, after a failover even with the same
  generation.
* **A margin that is too small** for the reader's work between two checks of its assignment, or for the clocks. The
  caller's work on a batch may take longer than any margin; the batch is then delivered again elsewhere.
* **A reader that does not release** vbuckets that it should hand over keeps them while it renews its lease.
* **A recreated document** starts new generations from the calendar time of the machine that creates it. They exceed
  the old ones unless its clock is far behind, or vbuckets were constantly taken more than once a second.
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
# Which member should have which vbucket: balanced to within one, with the fewest moves.
#
# Pure and deterministic: all members compute the same plan from the same document. Planning is idempotent: the plan of
# a plan is that plan, so it can be computed at any time.
#
# The number of moves: with `v` vbuckets and `m` members, each member gets `v // m` of them, and `v % m` members one
# more. Members that have more give up the excess, and no others give up anything. The moves are fewest if the members
# that already have the most get the extra vbuckets.


def plan_targets(current: Sequence[str | None], members: Iterable[str]) -> tuple[str | None, ...]:
    """Return the target member of every vbucket. Those in `current` that are not in `members` lose their vbuckets."""
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
    """Return how many vbuckets each member should have."""
    least, rest = divmod(vbuckets, len(counts))
    by_count = sorted(counts, key=lambda member: (-counts[member], member))
    return {member: least + (rank < rest) for rank, member in enumerate(by_count)}


def _spread(vbuckets: list[int], count: int) -> list[int]:
    """Pick `count` vbuckets at even distances: neighbours are mostly on one node, and nodes should give equally."""
    return [vbuckets[at * len(vbuckets) // count] for at in range(count)] if count > 0 else []


def _deal(targets: list[str | None], missing: dict[str, int]) -> None:
    """Give the vbuckets without a member to the members that lack some, in turns."""
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
"""How many heartbeats must fit into a lease, so that losing one does no harm."""
_IMPATIENCE = 4
"""How much more often a member reads the document while vbuckets move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The times of one member. Members may use different ones: each lease states its length."""

    lease_s: float = LEASE_S
    """A member that has not renewed its lease for this long stops reading."""
    interval_s: float = INTERVAL_S
    """The time between two heartbeats."""
    margin_s: float = MARGIN_S
    """How much longer than the lease others wait before they take a member's vbuckets.

    It covers work that a member still finishes after its lease, and clocks that run at different speeds.
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
        """The time between two reads of the document while vbuckets move."""
        return self.interval_s / _IMPATIENCE


# --- the states of a member ---------------------------------------------------------------------------------------


class MemberState(Enum):
    OUTSIDE = auto()
    """No lease: the member may read nothing, and wants a seat."""
    INSIDE = auto()
    """The member has a lease."""
    REPLACED = auto()
    """Another process joined with the same member id. The member hands over everything."""
    LEAVING = auto()
    """The reader has stopped; the seat must be cleared."""
    ENDED = auto()


class LeaseGranted:
    """A write with a heartbeat of our seat succeeded."""


class LeaseEnded:
    """The lease has run out, or the document contradicts what we knew."""


class ReplacementSeen:
    """The document says that another process has our member id."""


class LeaveAsked:
    """The reader has stopped."""


class HandedOver:
    """The replaced member has released everything."""


class SeatCleared:
    """Our seat is no longer in the document."""


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
    """The reader was told to stop. This can't be undone: it may already be stopping."""
    RELEASED = auto()
    """The reader has stopped, and the document does not show that yet."""


class Taken:
    """A write that makes us the owner succeeded."""


class MovedAway:
    """The vbucket has another target."""


class ReaderReleased:
    """The reader has stopped reading the vbucket, and has saved its offset."""


class ReleaseSeen:
    """The document shows that the vbucket is no longer ours."""


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
    """Pass the document to `next_document` whenever `next_turn_s` is due, and write the result by compare-and-swap.

    All times are of one clock, that of the process, which must not stop while the process does.
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
        """`first_generation` returns the first generation of a new document: a higher one at each call."""
        self.member_id = member_id
        self.terms = terms
        self.state = MemberState.OUTSIDE
        self.was_replaced = False
        self._vbuckets = vbuckets
        self._new_seat_id = new_seat_id
        self._first_generation = first_generation
        self._seat_id = new_seat_id()
        self._heartbeat = 0
        """The last heartbeat of our seat that is known to be written; 0 without a lease."""
        self._renewed_s = 0.0
        self._looked_s = -math.inf
        self._full_since_s: float | None = None
        """Since when we have waited for a seat."""
        self._is_settled = False
        self._held: dict[VBucketId, _Held] = {}
        self._observed: dict[str, _Observation] = {}
        self._assignment = Assignment(number=1)

    # --- for the reader -------------------------------------------------------------------------------------------

    @property
    def lease_end_s(self) -> float | None:
        """When reading must stop; None if there is no lease."""
        return self._renewed_s + self.terms.lease_s if self._heartbeat else None

    def assignment(self, now_s: float) -> Assignment:
        """Return what may be read now."""
        self.tick(now_s)
        return self._assignment

    def release(self, vbuckets: Iterable[VBucketId], now_s: float) -> None:
        """The reader has stopped reading these. Vbuckets that it was not told to release are ignored."""
        self.tick(now_s)
        for vbucket in vbuckets:
            held = self._held.get(vbucket)
            if held is not None and held.state is HandOverState.HANDING_OVER:
                self._change(vbucket, ReaderReleased)
        self._publish()

    def leave(self, now_s: float) -> None:
        """The reader has stopped reading everything. The next turn clears the seat."""
        self.tick(now_s)
        if self.state not in (MemberState.LEAVING, MemberState.ENDED):
            self._move(LeaveAsked)
        self._held.clear()
        self._publish()

    def tick(self, now_s: float) -> None:
        """Update the time: a lease that has run out is lost."""
        if self._has_run_out(now_s):
            self._lose_lease()

    def _has_run_out(self, now_s: float) -> bool:
        return self.lease_end_s is not None and now_s >= self.lease_end_s

    # --- for the document -----------------------------------------------------------------------------------------

    @property
    def next_turn_s(self) -> float | None:
        """The earliest time to pass the document next; None for never."""
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
        """Return what to write over the document that was just read; None if nothing.

        `seen` is None if there is no document yet; `now_s` is a time after the read was answered.
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
        """A write succeeded. `sent_s` is a time before it was sent."""
        self.tick(now_s)
        self._is_settled = document.is_settled
        seat = document.seat(self._seat_id)
        if self.state is MemberState.LEAVING and seat is None:
            self._end()
        if seat is None or self.state in (MemberState.LEAVING, MemberState.ENDED):
            # Either the seat was given up since, or the write was under way when the reader stopped.
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
            # The document's entry for the old seat, and observations of others, may belong to lost writes.
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
        """Whether the parts that only we may change are unchanged."""
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
        """Return the document with our seat, if there is room. Other seats with our member id are marked as
        replaced."""
        if document.seat(self._seat_id) is not None:
            return document
        if len(document.seats) >= SEATS_MAX:
            self._wait_for_room(document, now_s)
            return document
        self._full_since_s = None
        # Never reuse a seat id: a member that did not see the seat go would continue from its old heartbeat.
        self._seat_id = self._new_seat_id()
        others = tuple(
            replace(seat, is_replaced=True) if seat.member_id == self.member_id else seat for seat in document.seats
        )
        own = Seat(id=self._seat_id, member_id=self.member_id, heartbeat=0, lease_s=self.terms.lease_s)
        return replace(document, seats=(*others, own))

    def _wait_for_room(self, document: GroupDocument, now_s: float) -> None:
        """Raise `GroupFull` if no seat was freed for long enough to detect and clear dead members."""
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
        """Return the document with us as the owner of our targets that have no owner."""
        owners, takings = list(document.owners), list(document.takings)
        for vbucket, target in enumerate(document.targets):
            # Don't take a vbucket in the write that releases it: the reader must see it go first.
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
        """Make a new assignment if it has changed."""
        reading = frozenset(v for v, held in self._held.items() if held.state is HandOverState.READING)
        to_release = frozenset(v for v, held in self._held.items() if held.state is HandOverState.HANDING_OVER)
        generations = {v: self._held[v].generation for v in sorted(reading | to_release)}
        known = self._assignment
        if (known.vbuckets, known.to_release, known.generations) != (reading, to_release, generations):
            self._assignment = Assignment(
                number=known.number + 1, vbuckets=reading, to_release=to_release, generations=generations
            )
