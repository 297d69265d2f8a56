"""One member of an elastic group: its tables, its leases, and each step of a hand-over.

How members do together under faults is shown by simulation, in `tests/property`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from headwater.client.groups.group_document import LEASE_S_MAX, SEATS_MAX, GroupDocument, Seat
from headwater.client.groups.lease_member import (
    HAND_OVER,
    MEMBER,
    HandedOver,
    HandOverState,
    LeaseEnded,
    LeaseGranted,
    LeaseMember,
    LeaseTerms,
    LeaveAsked,
    MemberState,
    MovedAway,
    ReaderReleased,
    ReleaseSeen,
    ReplacementSeen,
    SeatCleared,
    Taken,
    plan_targets,
)
from headwater.errors import GroupDocumentInvalid, GroupFull, InvalidInput, UnexpectedMessage
from headwater.protocol.numbers import VBucketId
from headwater.protocol.states import Table, all_events, transition
from support.cases import case, case_apart

TERMS = LeaseTerms(lease_s=8, interval_s=2, margin_s=3)
VBUCKETS = 4
START_S = 1000.0


class Shared:
    """The document, and members that take their turns at it without a network between."""

    def __init__(self, vbuckets: int = VBUCKETS) -> None:
        self.vbuckets = vbuckets
        self.document: GroupDocument | None = None
        self.first_generation = 100
        self._numbers = itertools.count(1)

    def member(self, member_id: str, terms: LeaseTerms = TERMS) -> LeaseMember:
        return LeaseMember(
            member_id=member_id,
            vbuckets=self.vbuckets,
            terms=terms,
            new_seat_id=lambda: f"{member_id}-{next(self._numbers)}",
            first_generation=lambda: self.first_generation,
        )

    def turn(self, member: LeaseMember, now_s: float) -> bool:
        """Whether it wrote."""
        written = member.next_document(self.document, now_s)
        if written is not None:
            self.document = written
            member.on_written(written, sent_s=now_s, now_s=now_s)
        return written is not None

    def seats(self) -> list[str]:
        return [seat.member_id for seat in self.document.seats]

    def owners(self) -> str:
        """The first letter of the member that owns each vbucket."""
        return "".join("-" if owner is None else owner[0] for owner in self.document.owners)


@pytest.fixture
def shared() -> Shared:
    return Shared()


def vbuckets(*numbers: int) -> frozenset[VBucketId]:
    return frozenset(map(VBucketId, numbers))


def reading(member: LeaseMember, now_s: float) -> frozenset[VBucketId]:
    return member.assignment(now_s).vbuckets


# --- the tables ---------------------------------------------------------------------------------------------------

MEMBER_EVENTS = (LeaseGranted, LeaseEnded, ReplacementSeen, LeaveAsked, HandedOver, SeatCleared)
VBUCKET_EVENTS = (Taken, MovedAway, ReaderReleased, ReleaseSeen, LeaseEnded)

MEMBER_WALKS = {
    (MemberState.OUTSIDE, LeaseGranted): MemberState.INSIDE,
    (MemberState.OUTSIDE, ReplacementSeen): MemberState.REPLACED,
    (MemberState.OUTSIDE, LeaveAsked): MemberState.LEAVING,
    (MemberState.INSIDE, LeaseGranted): MemberState.INSIDE,
    (MemberState.INSIDE, LeaseEnded): MemberState.OUTSIDE,
    (MemberState.INSIDE, ReplacementSeen): MemberState.REPLACED,
    (MemberState.INSIDE, LeaveAsked): MemberState.LEAVING,
    (MemberState.REPLACED, LeaseGranted): MemberState.REPLACED,
    (MemberState.REPLACED, LeaseEnded): MemberState.ENDED,
    (MemberState.REPLACED, HandedOver): MemberState.LEAVING,
    (MemberState.REPLACED, LeaveAsked): MemberState.LEAVING,
    (MemberState.LEAVING, LeaseEnded): MemberState.ENDED,
    (MemberState.LEAVING, SeatCleared): MemberState.ENDED,
}
VBUCKET_WALKS = {
    (HandOverState.NOT_MINE, Taken): HandOverState.READING,
    (HandOverState.READING, MovedAway): HandOverState.HANDING_OVER,
    (HandOverState.READING, LeaseEnded): HandOverState.NOT_MINE,
    (HandOverState.HANDING_OVER, ReaderReleased): HandOverState.RELEASED,
    (HandOverState.HANDING_OVER, LeaseEnded): HandOverState.NOT_MINE,
    (HandOverState.RELEASED, ReleaseSeen): HandOverState.NOT_MINE,
    (HandOverState.RELEASED, LeaseEnded): HandOverState.NOT_MINE,
}


@case_apart(MEMBER, MemberState, MEMBER_EVENTS, MEMBER_WALKS, id="member")
@case_apart(HAND_OVER, HandOverState, VBUCKET_EVENTS, VBUCKET_WALKS, id="vbucket")
def test_every_state_and_event(
    table: Table, states: Iterable, events: tuple[type, ...], walks: dict[tuple, object]
) -> None:
    assert all_events(table) == frozenset(events)
    for state, event in itertools.product(states, events):
        if (state, event) in walks:
            assert transition(table, state, event) is walks[state, event]
        else:
            with pytest.raises(UnexpectedMessage):
                transition(table, state, event)


# --- joining and renewing -----------------------------------------------------------------------------------------


def test_the_first_member_makes_the_document_and_has_all(shared: Shared) -> None:
    ada = shared.member("ada")
    assert not reading(ada, START_S)
    shared.turn(ada, START_S)
    assignment = ada.assignment(START_S)
    assert assignment.vbuckets == vbuckets(0, 1, 2, 3)
    assert assignment.generations == dict.fromkeys(range(4), 101)
    assert shared.owners() == "aaaa"


def test_nothing_is_read_before_the_write_is_known_to_have_taken_place(shared: Shared) -> None:
    ada = shared.member("ada")
    written = ada.next_document(None, START_S)
    assert written.owners.count(None) == 0
    assert not reading(ada, START_S)


def test_the_lease_is_counted_from_before_the_heartbeat_was_sent(shared: Shared) -> None:
    ada = shared.member("ada")
    written = ada.next_document(None, START_S)
    assert written is not None
    ada.on_written(written, sent_s=START_S, now_s=START_S + 5)
    assert ada.lease_end_s == START_S + 8
    assert reading(ada, START_S + 7.9)
    assert not reading(ada, START_S + 8)


def test_an_answer_that_comes_after_the_end_of_its_lease_gives_none(shared: Shared) -> None:
    ada = shared.member("ada")
    written = ada.next_document(None, START_S)
    assert written is not None
    ada.on_written(written, sent_s=START_S, now_s=START_S + 9)
    assert ada.state is MemberState.OUTSIDE
    assert not reading(ada, START_S + 9)


def test_a_heartbeat_is_written_when_it_is_due_and_not_before(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    assert ada.next_turn_s == START_S + 2
    assert not shared.turn(ada, START_S + 1.9)
    assert shared.turn(ada, START_S + 2)
    assert [seat.heartbeat for seat in shared.document.seats] == [2]
    assert ada.lease_end_s == START_S + 10


def test_a_write_that_was_not_made_renews_nothing(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    ada.next_document(shared.document, START_S + 4)
    assert ada.lease_end_s == START_S + 8


def test_a_join_whose_answer_was_lost_is_found_in_the_document(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.document = ada.next_document(None, 0.0)
    assert shared.turn(ada, 0.1)
    assert shared.seats() == ["ada"]
    assert ada.assignment(1.0).generations == dict.fromkeys(range(4), 101)


# --- handing over -------------------------------------------------------------------------------------------------


def test_a_hand_over_takes_two_steps(shared: Shared) -> None:
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S + 1)
    assert shared.owners() == "aaaa"
    assert not reading(bea, START_S + 1)

    shared.turn(ada, START_S + 1.5)
    moving = ada.assignment(START_S + 1.5)
    assert (moving.vbuckets, moving.to_release) == (vbuckets(1, 3), vbuckets(0, 2))
    shared.turn(bea, START_S + 2)
    assert shared.owners() == "aaaa"

    ada.release(moving.to_release, START_S + 2.1)
    assert ada.assignment(START_S + 2.1).to_release == vbuckets()
    shared.turn(bea, START_S + 2.2)
    assert shared.owners() == "aaaa"
    assert shared.turn(ada, START_S + 2.3)
    assert shared.owners() == "-a-a"
    shared.turn(bea, START_S + 2.4)
    assert shared.owners() == "baba"
    assert bea.assignment(START_S + 2.4).generations == {0: 102, 2: 102}


def test_what_is_being_handed_over_does_not_come_back_before_it_was(shared: Shared) -> None:
    """The reader may have begun to stop."""
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S + 1)
    shared.turn(ada, START_S + 1.5)
    bea.leave(START_S + 1.6)
    shared.turn(bea, START_S + 1.6)
    shared.turn(ada, START_S + 1.7)
    assert ada.assignment(START_S + 1.7).to_release == vbuckets(0, 2)
    ada.release(vbuckets(0, 2), START_S + 1.8)
    shared.turn(ada, START_S + 1.9)
    assert shared.owners() == "-a-a"
    shared.turn(ada, START_S + 2.0)
    assert ada.assignment(START_S + 2.0).generations == {0: 102, 1: 101, 2: 102, 3: 101}


def test_what_is_not_to_be_released_is_passed_over(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    before = ada.assignment(START_S)
    ada.release([VBucketId(0), VBucketId(99)], START_S)
    assert ada.assignment(START_S) is before


def test_a_release_whose_answer_was_lost_is_seen(shared: Shared) -> None:
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S + 1)
    shared.turn(ada, START_S + 1.5)
    ada.release(vbuckets(0, 2), START_S + 1.6)
    shared.document = ada.next_document(shared.document, START_S + 1.7)
    shared.turn(bea, START_S + 1.8)
    assert shared.owners() == "baba"
    shared.turn(ada, START_S + 1.9)
    assert shared.owners() == "baba"
    assert reading(ada, START_S + 2) == vbuckets(1, 3)
    assert ada.next_turn_s == START_S + 2


def test_turns_are_more_frequent_while_vbuckets_are_under_way(shared: Shared) -> None:
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S + 1)
    assert bea.next_turn_s == START_S + 1.5
    shared.turn(ada, START_S + 1.5)
    ada.release(vbuckets(0, 2), START_S + 1.6)
    assert ada.next_turn_s is not None
    assert ada.next_turn_s < START_S


def test_an_assignment_is_the_same_until_it_changes(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    before = ada.assignment(START_S)
    shared.turn(ada, START_S + 2)
    assert ada.assignment(START_S + 2) is before


# --- leases that run out ------------------------------------------------------------------------------------------


def test_a_dead_member_is_cleared_after_its_lease_and_the_margin(shared: Shared) -> None:
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S + 1)
    for late_s in (3, 5, 7, 9, 11.9):
        shared.turn(bea, START_S + late_s)
        assert shared.seats() == ["ada", "bea"]
    shared.turn(bea, START_S + 12)
    assert shared.seats() == ["bea"]
    assert shared.owners() == "bbbb"
    assert reading(bea, START_S + 12) == vbuckets(0, 1, 2, 3)


def test_the_length_of_a_lease_is_what_its_member_says(shared: Shared) -> None:
    ada, bea = shared.member("ada", LeaseTerms(lease_s=20, interval_s=2, margin_s=1)), shared.member("bea")
    shared.turn(ada, START_S)
    for late_s in range(0, 23, 2):
        shared.turn(bea, START_S + late_s)
        assert shared.seats() == ["ada", "bea"]
    shared.turn(bea, START_S + 23)
    assert shared.seats() == ["bea"]


def test_who_has_just_come_waits_for_the_whole_lease(shared: Shared) -> None:
    """How long the member has been dead before that can't be seen any more."""
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S + 1000)
    shared.turn(bea, START_S + 1010.9)
    assert shared.seats() == ["ada", "bea"]
    shared.turn(bea, START_S + 1011)
    assert shared.seats() == ["bea"]


def test_a_heartbeat_starts_the_wait_anew(shared: Shared) -> None:
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S + 1)
    shared.turn(ada, START_S + 7)
    shared.turn(bea, START_S + 8)
    shared.turn(bea, START_S + 13)
    assert shared.seats() == ["ada", "bea"]


def test_a_member_that_nobody_has_missed_gets_all_back(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    assert not reading(ada, START_S + 500)
    assert ada.state is MemberState.OUTSIDE
    shared.turn(ada, START_S + 500)
    assert ada.assignment(START_S + 500).generations == dict.fromkeys(range(4), 101)
    assert shared.seats() == ["ada"]


def test_a_member_that_was_cleared_joins_with_a_new_seat(shared: Shared) -> None:
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    (old,) = shared.document.seats
    shared.turn(bea, START_S + 1)
    shared.turn(bea, START_S + 12)
    shared.turn(ada, START_S + 12)
    assert shared.seats() == ["bea", "ada"]
    assert old.id not in [seat.id for seat in shared.document.seats]
    assert not reading(ada, START_S + 12)


def test_a_write_that_was_on_its_way_when_the_seat_was_lost_gives_nothing(shared: Shared) -> None:
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S + 1)
    late = ada.next_document(shared.document, START_S + 7)
    assert late is not None
    shared.turn(bea, START_S + 12)
    ada.next_document(shared.document, START_S + 12)
    ada.on_written(late, sent_s=START_S + 7, now_s=START_S + 12)
    assert ada.state is MemberState.OUTSIDE
    assert not reading(ada, START_S + 12)


# --- a document that is not what it was ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["deleted", "taken back", "given to another", "taken once more"])
def test_a_member_stops_when_the_document_is_behind_what_it_knows(shared: Shared, what: str) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    older = shared.document
    shared.turn(ada, START_S + 2)
    assert older is not None
    other = Seat(id="other", member_id="other", heartbeat=1, lease_s=8)
    strange = {
        "deleted": None,
        "taken back": older,
        "given to another": replace(shared.document.with_seat(other), owners=("other",) * 4),
        "taken once more": replace(shared.document, takings=(2,) * 4),
    }
    ada.next_document(strange[what], START_S + 3)
    assert ada.state is MemberState.OUTSIDE
    assert not reading(ada, START_S + 3)


def test_a_document_that_is_made_anew_starts_new_generations(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    shared.document, shared.first_generation = None, 200
    shared.turn(ada, START_S + 2)
    assert ada.assignment(START_S + 2).generations == dict.fromkeys(range(4), 201)


def test_the_seat_that_a_document_has_wrong_is_left_to_run_out(shared: Shared) -> None:
    """Others may read what it had, by writes that never were."""
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    older = shared.document
    shared.turn(ada, START_S + 2)
    shared.document = older
    shared.turn(ada, START_S + 3)
    assert shared.seats() == ["ada", "ada"]
    assert not reading(ada, START_S + 3)
    for late_s in range(5, 14, 2):
        shared.turn(ada, START_S + late_s)
        assert not reading(ada, START_S + late_s)
    shared.turn(ada, START_S + 14)
    assert reading(ada, START_S + 14) == vbuckets(0, 1, 2, 3)


def test_a_document_for_another_number_of_vbuckets_is_refused(shared: Shared) -> None:
    shared.document = GroupDocument.empty(vbuckets=5, first_generation=1)
    with pytest.raises(GroupDocumentInvalid, match="for 5 vbuckets, and the bucket has 4"):
        shared.turn(shared.member("ada"), START_S)


# --- leaving ------------------------------------------------------------------------------------------------------


def test_who_leaves_frees_all_at_once(shared: Shared) -> None:
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S + 1)
    ada.leave(START_S + 1)
    assert not reading(ada, START_S + 1)
    shared.turn(ada, START_S + 1.1)
    assert (ada.state, ada.next_turn_s) == (MemberState.ENDED, None)
    assert shared.seats() == ["bea"]
    shared.turn(bea, START_S + 1.2)
    assert shared.owners() == "bbbb"


def test_generations_outlive_all_members(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    ada.leave(START_S)
    shared.turn(ada, START_S)
    assert shared.seats() == []
    bea = shared.member("bea")
    shared.turn(bea, START_S)
    assert bea.assignment(START_S).generations == dict.fromkeys(range(4), 102)


def test_a_leave_whose_answer_was_lost_is_seen(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    ada.leave(START_S)
    shared.document = ada.next_document(shared.document, START_S)
    assert not shared.turn(ada, START_S + 1)
    assert ada.state is MemberState.ENDED


def test_leaving_is_given_up_when_the_lease_has_run_out(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.turn(ada, START_S)
    ada.leave(START_S + 1)
    ada.leave(START_S + 1)
    ada.tick(START_S + 8)
    assert (ada.state, ada.next_turn_s) == (MemberState.ENDED, None)
    ada.leave(START_S + 9)
    assert not shared.turn(ada, START_S + 9)


def test_who_never_joined_can_leave(shared: Shared) -> None:
    ada = shared.member("ada")
    ada.leave(START_S)
    assert not shared.turn(ada, START_S)
    assert ada.state is MemberState.ENDED


def test_a_write_that_was_on_its_way_when_the_reader_stopped_gives_nothing(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.document = ada.next_document(None, START_S)
    assert shared.document is not None
    ada.leave(START_S)
    ada.on_written(shared.document, sent_s=START_S, now_s=START_S)
    assert not reading(ada, START_S)
    shared.turn(ada, START_S)
    assert shared.seats() == []


# --- two processes of one member id -------------------------------------------------------------------------------


def test_who_comes_later_by_the_same_id_replaces_who_was_there(shared: Shared) -> None:
    old, new = shared.member("ada"), shared.member("ada")
    shared.turn(old, START_S)
    shared.turn(new, START_S + 1)
    assert not reading(new, START_S + 1)
    shared.turn(old, START_S + 2)
    assert old.was_replaced
    assert old.assignment(START_S + 2).to_release == vbuckets(0, 1, 2, 3)
    shared.turn(old, START_S + 4)
    assert shared.owners() == "aaaa"
    assert old.lease_end_s == START_S + 12, "it holds its lease until it has handed over"
    old.release(vbuckets(0, 1, 2, 3), START_S + 5)
    shared.turn(old, START_S + 5)
    shared.turn(old, START_S + 5.1)
    assert old.state is MemberState.ENDED
    shared.turn(new, START_S + 6)
    assert reading(new, START_S + 6) == vbuckets(0, 1, 2, 3)
    assert not new.was_replaced


def test_who_was_replaced_does_not_come_back_when_its_lease_has_run_out(shared: Shared) -> None:
    old, new = shared.member("ada"), shared.member("ada")
    shared.turn(old, START_S)
    shared.turn(new, START_S + 1)
    shared.turn(old, START_S + 2)
    old.tick(START_S + 10)
    assert (old.state, old.was_replaced) == (MemberState.ENDED, True)


def test_a_process_that_comes_back_after_a_crash_gets_its_share_and_no_other_has_to_make_room(shared: Shared) -> None:
    ada, bea = shared.member("ada"), shared.member("bea")
    shared.turn(ada, START_S)
    shared.turn(bea, START_S)
    shared.turn(ada, START_S)
    ada.release(ada.assignment(START_S).to_release, START_S)
    shared.turn(ada, START_S)
    shared.turn(bea, START_S)
    before = reading(bea, START_S)
    again = shared.member("ada")
    for late_s in range(1, 13):
        shared.turn(bea, START_S + late_s)
        shared.turn(again, START_S + late_s)
    assert reading(bea, START_S + 12) == before
    assert reading(again, START_S + 12) == vbuckets(0, 1, 2, 3) - before


# --- a full group -------------------------------------------------------------------------------------------------


def full_of(seats: Iterable[Seat]) -> GroupDocument:
    return replace(GroupDocument.empty(vbuckets=VBUCKETS, first_generation=1), seats=tuple(seats))


def crowd(heartbeat: int) -> list[Seat]:
    return [Seat(id=f"s{n}", member_id=f"m{n}", heartbeat=heartbeat, lease_s=8) for n in range(SEATS_MAX)]


def test_a_full_group_of_the_dead_makes_room(shared: Shared) -> None:
    """Nobody else is there to clear them."""
    ada = shared.member("ada")
    shared.document = full_of(crowd(1))
    shared.turn(ada, START_S)
    assert ada.state is MemberState.OUTSIDE
    assert ada.next_turn_s == START_S + 0.5
    shared.turn(ada, START_S + 11)
    assert shared.seats() == ["ada"]


def test_a_full_group_of_the_living_lets_nobody_in(shared: Shared) -> None:
    ada = shared.member("ada")
    for late_s in range(13):
        shared.document = full_of(crowd(late_s))
        shared.turn(ada, START_S + late_s)
    shared.document = full_of(crowd(13))
    with pytest.raises(GroupFull, match=str(SEATS_MAX)):
        shared.turn(ada, START_S + 13)


def test_a_second_wait_for_room_is_as_long_as_the_first(shared: Shared) -> None:
    ada = shared.member("ada")
    shared.document = full_of(crowd(0))
    shared.turn(ada, START_S)
    shared.document = None
    shared.turn(ada, START_S + 1)
    assert ada.state is MemberState.INSIDE
    for late_s in range(100, 113):
        shared.document = full_of(crowd(late_s))
        shared.turn(ada, START_S + late_s)
        assert ada.state is MemberState.OUTSIDE


def test_more_members_than_vbuckets_share_what_there_is(shared: Shared) -> None:
    members = [shared.member(f"{letter}-member") for letter in "abcdef"]
    for late_s in range(6):
        for member in members:
            shared.turn(member, START_S + late_s)
            member.release(member.assignment(START_S + late_s).to_release, START_S + late_s)
    assert sorted(len(reading(member, START_S + 6)) for member in members) == [0, 0, 1, 1, 1, 1]


# Plans of who is to have what, by example. That they are balanced and move little is shown in `tests/property`.


def test_vbuckets_are_dealt_in_turns_and_move_from_every_node() -> None:
    assert plan_targets([None] * 6, ["c", "a", "b"]) == ("a", "b", "c", "a", "b", "c")
    assert plan_targets(["a", "b"], []) == (None, None)
    # A node has a run of neighbours, so the half that moves must not be a half of the bucket.
    plan = plan_targets(["a"] * 8, ["a", "b"])
    assert plan[:4].count("b") == plan[4:].count("b") == 2


# Times that make no sense are refused.


@case("lease_s", 0)
@case("lease_s", -1)
@case("lease_s", LEASE_S_MAX + 1)
@case("lease_s", math.nan)
@case("interval_s", 0)
@case("interval_s", 8)
@case("interval_s", math.nan)
@case("margin_s", 0)
@case("margin_s", math.inf)
@case("margin_s", math.nan)
def test_times_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=name) as caught:
        LeaseTerms(**{name: value})
    assert caught.value.hint
