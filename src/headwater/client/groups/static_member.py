"""Static numbering: "member 2 of 5" has the vbuckets that follow from these two numbers, and from nothing else.

Nobody talks to anybody, so nobody notices when a member is missing, or is there twice. For that there is
`lease_group`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from headwater.client.groups.membership import Assignment, GroupBucket
from headwater.errors import InvalidInput, LocalProtocolError
from headwater.protocol.numbers import VBucketId

GENERATION = 0
"""Of every vbucket of a static member: nobody ever takes over from another."""


def vbuckets_of_member(number: int, *, of: int, vbuckets: int) -> frozenset[VBucketId]:
    """The vbuckets of one of `of` members, numbered from 1. Together they have all, and no two have one in common.

    The vbuckets are dealt like cards. Clusters give a node runs of neighbouring vbuckets, so that in this way every
    member has an even share of every node: all members are as busy as each other whatever a node is doing, and a
    slow node slows all of them a little instead of one of them much. Ranges would save connections, and give whole
    nodes to single members.
    """
    _check_number(number, of=of)
    if of > vbuckets:
        raise InvalidInput(
            f"{of} members can't share {vbuckets} vbuckets", hint="Start at most as many members as there are vbuckets"
        )
    return frozenset(VBucketId(vbucket) for vbucket in range(number - 1, vbuckets, of))


class StaticMember:
    """Member `number` of `of`: `StaticMember(2, of=5)`."""

    def __init__(self, number: int, *, of: int) -> None:
        _check_number(number, of=of)
        self.number = number
        self.of = of
        self._assignment: Assignment | None = None
        self._stopped = asyncio.Event()

    def __repr__(self) -> str:
        return f"StaticMember({self.number}, of={self.of})"

    async def start(self, bucket: GroupBucket) -> Assignment:
        """No network is used."""
        vbuckets = vbuckets_of_member(self.number, of=self.of, vbuckets=bucket.vbuckets)
        if self._assignment is not None:
            raise LocalProtocolError("the member was started before", hint="Make a new one for another read")
        self._assignment = Assignment(
            number=1, vbuckets=vbuckets, generations=dict.fromkeys(sorted(vbuckets), GENERATION)
        )
        return self._assignment

    def current(self) -> Assignment:
        if self._assignment is None:
            raise LocalProtocolError("the member has not been started", hint="Await start() first")
        return self._assignment

    async def assignment_changed(self, known: Assignment) -> Assignment:
        """Returns only when the member is stopped: until then nothing ever changes."""
        if known.is_last:
            raise LocalProtocolError("the membership has ended", hint="Stop at the assignment that says it is the last")
        await self._stopped.wait()
        return self.current()

    async def release(self, vbuckets: Iterable[VBucketId]) -> None:
        """Nothing is ever to be released, so all is passed over."""

    async def stop(self) -> None:
        self._assignment = Assignment(number=self.current().number + 1, is_last=True)
        self._stopped.set()


def _check_number(number: int, *, of: int) -> None:
    if of < 1:
        raise InvalidInput(f"a group can't have {of} members", hint="Give the number of members, 1 or more")
    if not 1 <= number <= of:
        raise InvalidInput(f"there is no member {number} of {of}", hint=f"Members are numbered from 1: use 1 to {of}")
