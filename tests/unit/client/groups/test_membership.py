"""Static numbering: members share all vbuckets, evenly, whatever node they are on."""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from headwater.client.groups.membership import (
    GENERATION,
    Assignment,
    AssignmentChange,
    GroupBucket,
    StaticMember,
    assignments,
    joined,
    vbuckets_of_member,
)
from headwater.errors import InvalidInput, LocalProtocolError
from headwater.protocol.numbers import VBucketId


def no_document(key: bytes, collection: str | None) -> NoReturn:
    raise AssertionError("a static member needs no document")


def bucket(vbuckets: int = 10) -> GroupBucket:
    return GroupBucket(vbuckets=vbuckets, open_document=no_document)


@pytest.mark.parametrize(("vbuckets", "of"), [(1, 1), (10, 1), (10, 3), (64, 5), (1024, 7), (1024, 1024)])
def test_members_have_all_and_nothing_in_common_and_differ_by_one_at_most(vbuckets: int, of: int) -> None:
    shares = [vbuckets_of_member(number, of=of, vbuckets=vbuckets) for number in range(1, of + 1)]
    assert sorted(vbucket for share in shares for vbucket in share) == list(range(vbuckets))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_every_member_has_an_even_share_of_every_node(nodes: int) -> None:
    """A node has a run of neighbours."""
    runs = [range(1024 * node // nodes, 1024 * (node + 1) // nodes) for node in range(nodes)]
    for run in runs:
        counts = [len(vbuckets_of_member(number, of=5, vbuckets=1024) & set(run)) for number in range(1, 6)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("number", "of", "words"),
    [(0, 5, "no member 0 of 5"), (6, 5, "no member 6 of 5"), (-1, 5, "no member -1 of 5"), (1, 0, "have 0 members")],
)
def test_numbers_that_are_none_are_refused_at_once(number: int, of: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        StaticMember(number, of=of)
    assert caught.value.hint
    with pytest.raises(InvalidInput, match=words):
        vbuckets_of_member(number, of=of, vbuckets=64)


def test_more_members_than_vbuckets_are_refused_when_the_bucket_is_known() -> None:
    member = StaticMember(1, of=11)
    with pytest.raises(InvalidInput, match="11 members can't share 10 vbuckets"):
        asyncio.run(member.start(bucket()))


def test_an_assignment_lasts_until_the_member_is_stopped() -> None:
    async def scenario() -> list[Assignment]:
        seen = []
        async with joined(StaticMember(2, of=4), bucket()) as member:
            assignment = member.current()
            waiting = asyncio.create_task(member.assignment_changed(assignment))
            await member.release(assignment.vbuckets)
            await asyncio.sleep(0)
            assert not waiting.done()
            assert member.current() == assignment
            seen.append(assignment)
        seen += [await waiting, member.current()]
        return seen

    first, *last = asyncio.run(scenario())
    assert first.vbuckets == {1, 5, 9}
    assert first.generations == dict.fromkeys((1, 5, 9), GENERATION)
    assert not first.to_release
    for assignment in last:
        assert assignment.is_last
        assert not assignment.vbuckets
        assert assignment.number > first.number


def test_assignments_end_with_the_last() -> None:
    async def scenario() -> list[frozenset[VBucketId]]:
        member = StaticMember(1, of=5)
        await member.start(bucket())
        seen = []
        async for assignment in assignments(member):
            seen.append(assignment.vbuckets)
            await member.stop()
        return seen

    assert asyncio.run(scenario()) == [{0, 5}, frozenset()]


def test_what_is_asked_too_early_or_too_late_is_refused() -> None:
    async def scenario() -> None:
        member = StaticMember(1, of=5)
        with pytest.raises(LocalProtocolError, match="not been started"):
            member.current()
        await member.start(bucket())
        with pytest.raises(LocalProtocolError, match="started before"):
            await member.start(bucket())
        await member.stop()
        with pytest.raises(LocalProtocolError, match="has ended"):
            await member.assignment_changed(member.current())

    asyncio.run(scenario())
    assert repr(StaticMember(2, of=5)) == "StaticMember(2, of=5)"


# What a reader has to do when its assignment changes.


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
