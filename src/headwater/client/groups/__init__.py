"""What a reader and its consumer group say to each other.

The members of a group share the vbuckets of a bucket. A `Membership` gives a reader those that are its own, as an
`Assignment` that is replaced whenever that changes. What the reader does with it:

    assignment = await membership.start(bucket)
    begin to read assignment.vbuckets
    while reading:
        newer = await membership.assignment_changed(assignment)
        change = newer.since(assignment)
        stop to read change.drop, and save nothing of them
        stop to read change.hand_over, save their offsets, and then: await membership.release(change.hand_over)
        load the offsets of change.begin, and begin to read them
        assignment = newer
    stop to read, save the offsets
    await membership.stop()

Before it hands changes to its caller, a reader looks at `membership.current()`, which needs no waiting: a vbucket that
is not in it by then may be another member's, however quiet things are otherwise. And it saves offsets together with
the vbucket's `generation`, so that the store where they are kept can refuse what comes from a former owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headwater.errors import InvalidInput, LocalProtocolError
from headwater.options import suggest_keywords
from headwater.protocol.numbers import Cas, VBucketId

# --- the document ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document as it was read."""

    value: bytes
    cas: Cas


class DocumentPort(Protocol):
    """What a group needs of a key-value store: one document, which is changed only if it has not changed since it was
    read. One call at a time.

    That another writer was faster is a value, and no error. It may even have been an earlier attempt of our own whose
    answer was lost. An error of `add` or `replace` leaves open whether the write took place, or will yet.
    """

    async def read(self) -> StoredDocument | None:
        """The document, or None where there is none."""

    async def add(self, value: bytes) -> Cas | None:
        """The CAS of the new document, or None where there is one already."""

    async def replace(self, value: bytes, cas: Cas) -> Cas | None:
        """The new CAS, or None where the document has changed since the given one, or is gone."""

    async def close(self) -> None:
        """Let go of connections. The port is of no further use."""


_NOTHING: frozenset[VBucketId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one member may read. A change makes a new one."""

    number: int
    """Of two assignments of one membership the newer has the higher one."""
    vbuckets: frozenset[VBucketId] = _NOTHING
    """Read these, and no others."""
    to_release: frozenset[VBucketId] = _NOTHING
    """Stop to read these, save their offsets, and release them: another member waits for them."""
    generations: Mapping[VBucketId, int] = field(default_factory=dict)
    """Of all of the above, how often each had been taken, by any member, when this one took it. See `lease_member`."""

    is_last: bool = False
    """The membership has ended. The assignment is empty, and stays so."""

    def since(self, older: Assignment) -> AssignmentChange:
        """What to do to get here from an older assignment."""
        lasting = {vbucket for vbucket, _ in self.generations.items() & older.generations.items()}
        return AssignmentChange(
            begin=self.vbuckets - (lasting & older.vbuckets),
            hand_over=self.to_release,
            drop=(older.vbuckets | older.to_release) - lasting,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentChange:
    """What differs between two assignments."""

    begin: frozenset[VBucketId]
    """Read these from the offsets that are saved for them. One that is in `drop`, too, was another's in between."""
    hand_over: frozenset[VBucketId]
    """Stop to read these, save their offsets, release them. One that was never begun has nothing to be saved."""
    drop: frozenset[VBucketId]
    """Stop to read these at once and save nothing: they may be another's already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBucket:
    """The bucket whose vbuckets are shared."""

    vbuckets: int
    open_document: Callable[[bytes, str | None], DocumentPort]
    """Makes a way to a document by its key and collection, as `scope.collection`; None is the default collection."""


class Membership(Protocol):
    """One member of a group, as its reader sees it. Errors of any of these end the membership."""

    async def start(self, bucket: GroupBucket) -> Assignment:
        """Join. The first assignment may be empty, where others have to hand over first."""

    def current(self) -> Assignment:
        """What may be read now. It is looked up in memory, and by the clock."""

    async def assignment_changed(self, known: Assignment) -> Assignment:
        """Wait for an assignment that is newer than a known one. Those in between are left out.

        The end of the membership makes a last one, also for who is waiting.
        """

    async def release(self, vbuckets: Iterable[VBucketId]) -> None:
        """These are not read any more and their offsets are saved, so that others may take them.

        What is not to be released, or not any more because the lease has run out since, is passed over.
        """

    async def stop(self) -> None:
        """Leave. Nothing is read any more, and all offsets are saved."""


# --- static numbering -----------------------------------------------------------------------------------------------
#
# "Member 2 of 5" has the vbuckets that follow from these two numbers, and from nothing else. The members do not
# communicate, so a member that is missing, or is there twice, is not noticed. For that there is `lease_group`.


GENERATION = 0
"""Of every vbucket of a static member: no member ever takes over from another."""


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


@suggest_keywords
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
            raise LocalProtocolError("the member was started before", hint="Create a new one for each read")
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
            raise LocalProtocolError("the membership has ended", hint="Stop at the last assignment")
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
