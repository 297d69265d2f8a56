"""Elastic membership as a reader uses it: waiting, releasing, failing and stopping, in virtual time."""

from __future__ import annotations

import asyncio
import re

import pytest

from headwater import errors
from headwater.client.groups import Assignment
from headwater.client.groups.lease_group import LEAVE_S_MAX, LeaseGroup
from headwater.protocol.numbers import VBucketId
from headwater.protocol.status import Status
from support.group_fakes import ANSWER_S, MemoryDocument, VirtualLoop, joined, run, virtual_clock_s

LEASE_S, INTERVAL_S, MARGIN_S = 10.0, 2.0, 3.0
GIVE_UP_AFTER_S = 60.0

LOOP_FACTORY = VirtualLoop


@pytest.fixture
def document() -> MemoryDocument:
    return MemoryDocument()


def group(member: str | None = None, name: str = "g", collection: str | None = None) -> LeaseGroup:
    return LeaseGroup(
        name,
        member,
        lease_s=LEASE_S,
        interval_s=INTERVAL_S,
        margin_s=MARGIN_S,
        collection=collection,
        give_up_after_s=GIVE_UP_AFTER_S,
        clock=virtual_clock_s,
    )


class FollowingReader:
    """Does what a reader does with its assignments, and remembers them."""

    def __init__(self, membership: LeaseGroup) -> None:
        self.membership = membership
        self.reading: frozenset[VBucketId] = frozenset()
        self.task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        assignment = Assignment(number=0)
        while not assignment.is_last:
            newer = await self.membership.assignment_changed(assignment)
            change = newer.since(assignment)
            self.reading = newer.vbuckets
            await self.membership.release(change.hand_over)
            assignment = newer


def all_of(*readers: FollowingReader) -> list[int]:
    """What they read, in order; with one that two of them read in it twice."""
    return sorted(vbucket for reader in readers for vbucket in reader.reading)


# --- coming and going ---------------------------------------------------------------------------------------------


async def test_members_share_and_hand_back_when_they_leave(document: MemoryDocument) -> None:
    async with joined(ada := group("ada"), document.bucket()):
        reader = FollowingReader(ada)
        await asyncio.sleep(1)
        assert len(reader.reading) == 6
        async with joined(bea := group("bea"), document.bucket()):
            other = FollowingReader(bea)
            await asyncio.sleep(2 * INTERVAL_S)
            assert len(reader.reading) == len(other.reading) == 3
            assert all_of(reader, other) == list(range(6))
        assert document.members() == ["ada"]
        await asyncio.sleep(INTERVAL_S + 1)
        assert len(reader.reading) == 6
    await reader.task
    await other.task
    assert document.members() == []
    assert reader.reading == frozenset()
    assert all(port.is_closed for port in document.ports)


async def test_a_member_that_is_gone_without_a_word_is_taken_over(document: MemoryDocument) -> None:
    ada = group("ada")
    await ada.start(document.bucket())
    async with joined(bea := group("bea"), document.bucket()):
        reader = FollowingReader(bea)
        await asyncio.sleep(1)
        document.ports[0].is_silent = True
        await asyncio.sleep(LEASE_S)
        assert not ada.current().vbuckets
        assert not reader.reading
        await asyncio.sleep(MARGIN_S + INTERVAL_S)
        assert len(reader.reading) == 6
    await ada.stop()


async def test_a_release_is_written_at_once_also_after_trouble(document: MemoryDocument) -> None:
    async with joined(ada := group("ada"), document.bucket()):
        document.ports[0].failure = UNREACHABLE
        await asyncio.sleep(INTERVAL_S + 4)
        document.ports[0].failure = None
        await asyncio.sleep(1)
        async with joined(group("bea"), document.bucket()):
            moved = await ada.assignment_changed(ada.current())
            await asyncio.sleep(5 * ANSWER_S)
            assert document.decoded().owners.count(None) == 0
            await ada.release(moved.to_release)
            await asyncio.sleep(5 * ANSWER_S)
            assert document.decoded().owners.count(None) == 3


def test_the_document_is_named_after_the_group_and_in_its_collection(document: MemoryDocument) -> None:
    async def scenario() -> None:
        async with joined(group(name="invoices", collection="ops.groups"), document.bucket()):
            pass

    run(scenario())
    assert document.asked_for == [(b"_headwater:group:invoices", "ops.groups")]


def test_without_a_member_id_there_is_a_new_one_every_time() -> None:
    assert group().member_id != group().member_id
    assert repr(group("ada")) == "LeaseGroup('g', 'ada')"


async def test_writes_that_others_were_faster_with_are_tried_again(document: MemoryDocument) -> None:
    ada = group("ada")
    starting = asyncio.create_task(ada.start(document.bucket()))
    await asyncio.sleep(0)
    document.ports[0].races = 5
    assert len((await starting).vbuckets) == 6
    for _ in range(20):
        document.ports[0].races = 2
        await asyncio.sleep(INTERVAL_S)
    assert len(ada.current().vbuckets) == 6
    assert ada.current().number == 2, "the lease has never been lost"
    await ada.stop()


# --- failures -----------------------------------------------------------------------------------------------------

UNREACHABLE = errors.HostUnreachable("nobody is there", hint="Wait")
DENIED = errors.AccessDenied(Status.EACCESS, "you may not")


@pytest.mark.parametrize("error", [UNREACHABLE, errors.TemporaryFailure(Status.ETMPFAIL)])
async def test_an_unreachable_document_costs_only_the_lease(
    document: MemoryDocument, error: errors.HeadwaterError
) -> None:
    async with joined(ada := group("ada"), document.bucket()):
        reader = FollowingReader(ada)
        document.ports[0].failure = error
        await asyncio.sleep(INTERVAL_S + 1)
        assert ada.last_failure is error
        assert len(reader.reading) == 6, "the lease is still good"
        calls = document.ports[0].calls
        await asyncio.sleep(LEASE_S)
        assert not reader.reading
        assert document.ports[0].calls - calls < 50, "a server that is down is asked again and again"
        document.ports[0].failure = None
        await asyncio.sleep(INTERVAL_S)
        assert len(reader.reading) == 6
        assert ada.last_failure is None


@pytest.mark.parametrize("error", [UNREACHABLE, DENIED], ids=["unreachable", "denied"])
async def test_what_is_in_the_way_of_joining_is_raised(document: MemoryDocument, error: errors.HeadwaterError) -> None:
    ada = group("ada")
    starting = asyncio.create_task(ada.start(document.bucket()))
    await asyncio.sleep(0)
    document.ports[0].failure = error
    with pytest.raises(type(error)):
        await starting
    assert document.ports[0].is_closed
    await ada.stop()


async def failure_of(membership: LeaseGroup) -> errors.HeadwaterError:
    """What a reader gets that follows its assignments."""
    reader = FollowingReader(membership)
    with pytest.raises(errors.HeadwaterError) as caught:
        await reader.task
    assert not reader.reading, "it was told to stop before it was told why"
    return caught.value


def test_a_document_that_stays_out_of_reach_fails_the_membership(document: MemoryDocument) -> None:
    async def scenario() -> float:
        async with joined(ada := group("ada"), document.bucket()):
            began_s = virtual_clock_s()
            document.ports[0].failure = UNREACHABLE
            assert await failure_of(ada) is UNREACHABLE
            failed_s = virtual_clock_s()
        return failed_s - began_s

    assert GIVE_UP_AFTER_S <= run(scenario()) < GIVE_UP_AFTER_S + 2 * INTERVAL_S


async def test_the_time_to_give_up_is_counted_from_the_last_success(document: MemoryDocument) -> None:
    async with joined(ada := group("ada"), document.bucket()):
        for failure in (UNREACHABLE, None) * 4:
            document.ports[0].failure = failure
            await asyncio.sleep(GIVE_UP_AFTER_S / 2)
        assert len(ada.current().vbuckets) == 6


async def test_what_will_never_be_better_fails_the_membership_at_once(document: MemoryDocument) -> None:
    async with joined(ada := group("ada"), document.bucket()):
        document.ports[0].failure = DENIED
        denied_s = virtual_clock_s()
        assert await failure_of(ada) is DENIED
        assert virtual_clock_s() <= denied_s + INTERVAL_S + 1
        with pytest.raises(errors.AccessDenied):
            await ada.assignment_changed(ada.current())
    assert ada.current().is_last


async def test_a_document_that_somebody_has_spoiled_is_left_alone(document: MemoryDocument) -> None:
    async with joined(ada := group("ada"), document.bucket()):
        document.value, document.cas = b"{}", document.cas + 1
        assert isinstance(await failure_of(ada), errors.GroupDocumentInvalid)
    assert document.value == b"{}"


async def test_a_fault_of_our_own_reaches_the_reader(document: MemoryDocument, monkeypatch: pytest.MonkeyPatch) -> None:
    async with joined(ada := group("ada"), document.bucket()):
        monkeypatch.setattr(document.ports[0], "read", None)
        reader = FollowingReader(ada)
        with pytest.raises(TypeError):
            await reader.task
        assert not reader.reading


async def test_who_comes_later_by_the_same_id_stays(document: MemoryDocument) -> None:
    ada, again = group("ada"), group("ada")
    async with joined(ada, document.bucket()), joined(again, document.bucket()):
        reader = FollowingReader(again)
        error = await failure_of(ada)
        assert isinstance(error, errors.MemberReplaced)
        assert "'ada'" in error.reason
        await asyncio.sleep(INTERVAL_S)
        assert len(reader.reading) == 6


# --- stopping -----------------------------------------------------------------------------------------------------


def test_stopping_waits_for_a_limited_time_only(document: MemoryDocument) -> None:
    async def scenario() -> float:
        ada = group("ada")
        await ada.start(document.bucket())
        document.ports[0].is_silent = True
        began_s = virtual_clock_s()
        await ada.stop()
        assert document.ports[0].is_closed
        await ada.stop()
        return virtual_clock_s() - began_s

    assert run(scenario()) == pytest.approx(LEAVE_S_MAX)
    assert document.members() == ["ada"], "its lease runs out by itself"


def test_stopping_is_tried_again_where_the_document_is_out_of_reach(document: MemoryDocument) -> None:
    async def scenario() -> None:
        ada = group("ada")
        await ada.start(document.bucket())
        document.ports[0].failure = UNREACHABLE
        stopping = asyncio.create_task(ada.stop())
        await asyncio.sleep(1)
        assert not ada.current().vbuckets
        document.ports[0].failure = None
        await stopping

    run(scenario())
    assert document.members() == []


async def test_who_waits_is_told_of_the_end(document: MemoryDocument) -> None:
    ada = group("ada")
    known = await ada.start(document.bucket())
    waiting = asyncio.create_task(ada.assignment_changed(known))
    await ada.stop()
    assert not (await waiting).vbuckets
    last = ada.current()
    assert last.is_last
    with pytest.raises(errors.LocalProtocolError, match="has ended"):
        await ada.assignment_changed(last)


async def test_a_start_that_is_cancelled_leaves_nothing_open(document: MemoryDocument) -> None:
    ada = group("ada")
    starting = asyncio.create_task(ada.start(document.bucket()))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert document.ports[0].is_closed
    assert ada.current().is_last


# --- what is refused ----------------------------------------------------------------------------------------------


async def test_what_is_asked_too_early_or_twice_is_refused(document: MemoryDocument) -> None:
    ada = group("ada")
    for call in (ada.current, lambda: asyncio.ensure_future(ada.stop())):
        with pytest.raises(errors.LocalProtocolError, match="not been started"):
            await call()
    async with joined(ada, document.bucket()):
        with pytest.raises(errors.LocalProtocolError, match="started before"):
            await ada.start(document.bucket())


@pytest.mark.parametrize("name", ["", "x" * 101, "a\nb", "\0"])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(errors.InvalidInput, match="not a valid name for a group"):
        group(name=name)
    with pytest.raises(errors.InvalidInput, match="not a valid name for a member"):
        group(name)


def test_a_name_that_makes_the_key_too_long_is_refused() -> None:
    with pytest.raises(errors.InvalidInput, match=re.escape("a key of 317 bytes")):
        group(name="€" * 100)
