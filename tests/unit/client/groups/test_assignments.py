"""What a reader has to do when its assignment changes."""

from __future__ import annotations

from headwater.client.groups.membership import Assignment, AssignmentChange
from headwater.protocol.numbers import VBucketId


def vbuckets(*numbers: int) -> frozenset[VBucketId]:
    return frozenset(map(VBucketId, numbers))


def assignment(reading: dict[int, int], to_release: dict[int, int] | None = None, *, number: int = 1) -> Assignment:
    """By generations."""
    leaving = to_release or {}
    generations = {VBucketId(vbucket): generation for vbucket, generation in {**reading, **leaving}.items()}
    return Assignment(
        number=number, vbuckets=vbuckets(*reading), to_release=vbuckets(*leaving), generations=generations
    )


def change(
    begin: frozenset[VBucketId], hand_over: frozenset[VBucketId], drop: frozenset[VBucketId]
) -> AssignmentChange:
    return AssignmentChange(begin=begin, hand_over=hand_over, drop=drop)


NONE = vbuckets()


def test_what_is_new_begins_and_what_stays_goes_on() -> None:
    older = assignment({1: 7, 2: 3})
    assert assignment({1: 7, 2: 3, 3: 1}).since(older) == change(vbuckets(3), NONE, NONE)
    assert older.since(older) == change(NONE, NONE, NONE)


def test_what_moves_away_is_handed_over() -> None:
    assert assignment({1: 7}, {2: 3}).since(assignment({1: 7, 2: 3})) == change(NONE, vbuckets(2), NONE)


def test_what_was_handed_over_is_gone() -> None:
    """It is in `drop`, where it does no harm: the reader has stopped it before."""
    assert assignment({1: 7}).since(assignment({1: 7}, {2: 3})) == change(NONE, NONE, vbuckets(2))


def test_what_is_lost_is_dropped() -> None:
    assert assignment({}).since(assignment({1: 7}, {2: 3})) == change(NONE, NONE, vbuckets(1, 2))


def test_what_was_anothers_in_between_begins_anew() -> None:
    assert assignment({1: 9}).since(assignment({1: 7})) == change(vbuckets(1), NONE, vbuckets(1))


def test_what_came_and_goes_between_two_looks_has_only_to_be_released() -> None:
    assert assignment({}, {1: 9}).since(assignment({})) == change(NONE, vbuckets(1), NONE)
    assert assignment({}, {1: 9}).since(assignment({1: 7})) == change(NONE, vbuckets(1), vbuckets(1))
