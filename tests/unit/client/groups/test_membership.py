"""Static numbering: members share all vbuckets, evenly, whatever node they are on."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

import pytest

from headwater.client import groups
from headwater.errors import InvalidInput, LocalProtocolError
from headwater.protocol.numbers import VBucketId
from support.cases import case
from support.group_fakes import joined


def no_document(key: bytes, collection: str | None) -> NoReturn:
    raise AssertionError("a static member needs no document")


def bucket(vbuckets: int = 10) -> groups.GroupBucket:
    return groups.GroupBucket(vbuckets=vbuckets, open_document=no_document)


@pytest.mark.parametrize(("vbuckets", "of"), [(1, 1), (10, 1), (10, 3), (64, 5), (1024, 7), (1024, 1024)])
def test_members_have_all_and_nothing_in_common_and_differ_by_one_at_most(vbuckets: int, of: int) -> None:
    shares = [groups.vbuckets_of_member(number, of=of, vbuckets=vbuckets) for number in range(1, of + 1)]
    assert sorted(vbucket for share in shares for vbucket in share) == list(range(vbuckets))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_every_member_has_an_even_share_of_every_node(nodes: int) -> None:
    """A node has a run of neighbours."""
    runs = [range(1024 * node // nodes, 1024 * (node + 1) // nodes) for node in range(nodes)]
    for run in runs:
        counts = [len(groups.vbuckets_of_member(number, of=5, vbuckets=1024) & set(run)) for number in range(1, 6)]
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("number", "of", "words"),
    [(0, 5, "no member 0 of 5"), (6, 5, "no member 6 of 5"), (-1, 5, "no member -1 of 5"), (1, 0, "have 0 members")],
)
def test_numbers_that_are_none_are_refused_at_once(number: int, of: int, words: str) -> None:
    with pytest.raises(InvalidInput, match=words) as caught:
        groups.StaticMember(number, of=of)
    assert caught.value.hint
    with pytest.raises(InvalidInput, match=words):
        groups.vbuckets_of_member(number, of=of, vbuckets=64)


def test_more_members_than_vbuckets_are_refused_when_the_bucket_is_known() -> None:
    member = groups.StaticMember(1, of=11)
    with pytest.raises(InvalidInput, match="11 members can't share 10 vbuckets"):
        asyncio.run(member.start(bucket()))


def test_an_assignment_lasts_until_the_member_is_stopped() -> None:
    async def scenario() -> list[groups.Assignment]:
        seen = []
        async with joined(groups.StaticMember(2, of=4), bucket()) as member:
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
    assert first.generations == dict.fromkeys((1, 5, 9), groups.GENERATION)
    assert not first.to_release
    for assignment in last:
        assert assignment.is_last
        assert not assignment.vbuckets
        assert assignment.number > first.number


def test_what_is_asked_too_early_or_too_late_is_refused() -> None:
    async def scenario() -> None:
        member = groups.StaticMember(1, of=5)
        with pytest.raises(LocalProtocolError, match="not been started"):
            member.current()
        await member.start(bucket())
        with pytest.raises(LocalProtocolError, match="started before"):
            await member.start(bucket())
        await member.stop()
        with pytest.raises(LocalProtocolError, match="has ended"):
            await member.assignment_changed(member.current())

    asyncio.run(scenario())
    assert repr(groups.StaticMember(2, of=5)) == "StaticMember(2, of=5)"


def vbuckets(*numbers: int) -> frozenset[VBucketId]:
    return frozenset(map(VBucketId, numbers))


def assignment(reading: dict[int, int], to_release: dict[int, int] | None = None) -> groups.Assignment:
    """By generations."""
    leaving = to_release or {}
    generations = {VBucketId(vbucket): generation for vbucket, generation in {**reading, **leaving}.items()}
    return groups.Assignment(
        number=1, vbuckets=vbuckets(*reading), to_release=vbuckets(*leaving), generations=generations
    )


# What is new begins, and what stays goes on.
@case(({1: 7, 2: 3},), ({1: 7, 2: 3, 3: 1},), {3}, (), ())
@case(({1: 7, 2: 3},), ({1: 7, 2: 3},), (), (), ())
# What moves away is handed over, and gone then: `drop` does no harm to what the reader has stopped before.
@case(({1: 7, 2: 3},), ({1: 7}, {2: 3}), (), {2}, ())
@case(({1: 7}, {2: 3}), ({1: 7},), (), (), {2})
# What is lost is dropped, and what was another's in between begins again.
@case(({1: 7}, {2: 3}), ({},), (), (), {1, 2})
@case(({1: 7},), ({1: 9},), {1}, (), {1})
# What came and goes between two looks has only to be released.
@case(({},), ({}, {1: 9}), (), {1}, ())
@case(({1: 7},), ({}, {1: 9}), (), {1}, {1})
def test_what_a_reader_does_with_a_change(
    older: Any, newer: Any, begin: set[int], hand_over: set[int], drop: set[int]
) -> None:
    assert assignment(*newer).since(assignment(*older)) == groups.AssignmentChange(
        begin=vbuckets(*begin), hand_over=vbuckets(*hand_over), drop=vbuckets(*drop)
    )
