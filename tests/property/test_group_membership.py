"""Groups under faults: no vbucket is read by two at once, and when the faults end all are read in equal shares.

The statements are judged by `GroupChecker`. That it finds a group that breaks them is shown with members that are
broken on purpose, each in a situation where its fault matters and a sound member does well.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from headwater.client.groups.group_document import GroupDocument
from headwater.client.groups.lease_member import HandOverState, LeaseMember, ReaderReleased, plan_targets
from support.cases import each
from support.group_world import Action, GroupChecker, RuleBroken, Script, World

FAULTS = ("join", "replace", "restart", "kill", "leave", "stall", "pause", "cut")


def scripts(*kinds: str) -> st.SearchStrategy[Script]:
    actions = st.builds(
        Action, after_s=st.floats(0, 6), kind=st.sampled_from(kinds), which=st.integers(0, 9), for_s=st.floats(0, 12)
    )
    return st.builds(
        Script,
        seed=st.integers(0, 2**32),
        vbuckets=st.integers(1, 12),
        members=st.integers(1, 4),
        actions=st.lists(actions, max_size=8).map(tuple),
        loss=st.sampled_from((0.0, 0.05, 0.3)),
    )


@given(script=scripts(*FAULTS))
def test_no_two_read_at_once_and_in_the_end_all_is_read(script: Script) -> None:
    World(script).run()


@given(script=scripts(*FAULTS, "failover"))
def test_after_a_failover_no_two_read_at_once_for_longer_than_a_lease(script: Script) -> None:
    World(script).run()


RENEWED_WHILE_PAUSED = Script(
    seed=1224496,
    vbuckets=4,
    members=1,
    actions=(Action(5.0, "pause", 0, for_s=3.0), Action(5.21875, "pause", 0, for_s=3.0)),
)
"""The lease has run out when the process goes on, and then comes the answer to the write that has renewed it."""


@given(script=scripts(*FAULTS, "freeze"))
@example(RENEWED_WHILE_PAUSED)
def test_a_process_that_was_frozen_while_it_read_can_not_turn_offsets_back(script: Script) -> None:
    World(script).run()


# --- who is to have what ------------------------------------------------------------------------------------------

MEMBERS = ("a", "b", "c", "d", "e")
plans = st.lists(st.sampled_from((*MEMBERS, None)), max_size=40)
small_plans = st.lists(st.sampled_from((*MEMBERS[:3], None)), max_size=6)
some_members = st.sets(st.sampled_from(MEMBERS), min_size=1)


def moves(old: Sequence[str | None], new: Sequence[str | None], members: set[str]) -> int:
    """How many vbuckets are taken from a member that is there."""
    return sum(before in members and before != after for before, after in zip(old, new, strict=True))


def is_balanced(plan: Sequence[str | None], members: set[str]) -> bool:
    counts = [list(plan).count(member) for member in members]
    return sum(counts) == len(plan) and max(counts) - min(counts) <= 1


@given(current=plans, members=some_members)
def test_a_plan_is_balanced_and_lasts(current: list[str | None], members: set[str]) -> None:
    plan = plan_targets(current, members)
    assert is_balanced(plan, members)
    assert plan_targets(plan, members) == plan


@given(current=small_plans, members=st.sets(st.sampled_from(MEMBERS[:3]), min_size=1))
def test_no_balanced_plan_moves_less(current: list[str | None], members: set[str]) -> None:
    least = min(
        moves(current, plan, members)
        for plan in itertools.product(sorted(members), repeat=len(current))
        if is_balanced(plan, members)
    )
    assert moves(current, plan_targets(current, members), members) == least


# --- broken on purpose --------------------------------------------------------------------------------------------


class SkipsTheRelease(LeaseMember):
    """Gives away what it is to hand over without waiting for its reader."""

    def _note_moves(self, document: GroupDocument) -> None:
        super()._note_moves(document)
        for vbucket, held in list(self._held.items()):
            if held.state is HandOverState.HANDING_OVER:
                self._change(vbucket, ReaderReleased)


class NeverReleases(LeaseMember):
    """Keeps what it is to hand over."""

    def release(self, vbuckets: object, now_s: float) -> None:
        pass


class TakesFromOwners(LeaseMember):
    """Takes what it is to have, also from another."""

    def _taken(self, document: GroupDocument) -> GroupDocument:
        owners = tuple(
            None if target == self._seat_id != owner else owner
            for target, owner in zip(document.targets, document.owners, strict=True)
        )
        return super()._taken(replace(document, owners=owners))


class IgnoresItsLeaseEnd(LeaseMember):
    """Goes on reading until it is asked to stop."""

    def _has_run_out(self, now_s: float) -> bool:
        return False


class CountsFromTheAnswer(LeaseMember):
    """Counts its lease from when it knows of it, and not from before it asked."""

    def on_written(self, document: GroupDocument, *, sent_s: float, now_s: float) -> None:
        super().on_written(document, sent_s=now_s, now_s=now_s)


class IsImpatient(LeaseMember):
    """Clears the seats of others before their leases have run out."""

    def _run_out_seats(self, document: GroupDocument, now_s: float) -> list[str]:
        return super()._run_out_seats(document, now_s + self.terms.lease_s / 2)


class TrustsAnyDocument(LeaseMember):
    """Does not see that the document is behind what it knows."""

    def _is_as_known(self, document: GroupDocument) -> bool:
        return True


class TakesTheSameSeat(LeaseMember):
    """Sits down where its member id has sat before."""

    def _seated(self, document: GroupDocument, now_s: float) -> GroupDocument:
        self._seat_id = self.member_id
        self._new_seat_id = lambda: self.member_id
        return super()._seated(document, now_s)


SEEDS = range(100)

JOINS = (Action(3, "join", 0), Action(2, "join", 0), Action(2, "join", 0))
IS_CUT_OFF = (Action(3, "cut", 0, 12),)
IS_CUT_OFF_FOR_LESS_THAN_A_LEASE = (Action(3, "cut", 0, 3.5),)
IS_PAUSED_AND_CUT_OFF = (Action(3, "pause", 0, 2.9), Action(0.1, "cut", 0, 12))
FAILS_OVER = (*JOINS[:2], Action(1.5, "failover", 0, 3), Action(3, "leave", 0), Action(3, "join", 0))
IS_REPLACED = (Action(3, "replace", 0),)

BROKEN = {
    SkipsTheRelease: JOINS,
    NeverReleases: JOINS,
    TakesFromOwners: JOINS,
    IgnoresItsLeaseEnd: IS_CUT_OFF,
    CountsFromTheAnswer: IS_PAUSED_AND_CUT_OFF,
    IsImpatient: IS_CUT_OFF_FOR_LESS_THAN_A_LEASE,
    TrustsAnyDocument: FAILS_OVER,
    TakesTheSameSeat: IS_REPLACED,
}


def situation(seed: int, actions: Sequence[Action]) -> Script:
    return Script(seed=seed, vbuckets=12, members=2, actions=tuple(actions))


def is_broken(script: Script, member: type[LeaseMember], *, fences: bool = True) -> bool:
    try:
        World(script, member, GroupChecker(fences=fences)).run()
    except RuleBroken:
        return True
    return False


@each("member", BROKEN)
def test_the_checker_finds_a_member_that_breaks_the_rules(member: type[LeaseMember]) -> None:
    found = next((seed for seed in SEEDS if is_broken(situation(seed, BROKEN[member]), member)), None)
    assert found is not None
    assert not is_broken(situation(found, BROKEN[member]), LeaseMember)


IS_FROZEN = (Action(3, "freeze", 0, 12),)


def test_without_a_fence_a_process_that_was_frozen_turns_offsets_back() -> None:
    situations = [situation(seed, IS_FROZEN) for seed in SEEDS]
    script = next(script for script in situations if is_broken(script, LeaseMember, fences=False))
    world = World(script)
    world.run()
    assert world.checker.refused
