"""The interface between a reader and its consumer group.

The members of a group share the vbuckets of a bucket. A `Membership` gives a reader its vbuckets as an `Assignment`,
which is replaced whenever it changes. The reader follows it like this:

    assignment = await membership.start(bucket)
    begin reading assignment.vbuckets
    while reading:
        newer = await membership.assignment_changed(assignment)
        change = newer.since(assignment)
        stop reading change.drop, and save nothing of them
        stop reading change.hand_over, save their offsets, and then: await membership.release(change.hand_over)
        load the offsets of change.begin, and begin reading them
        assignment = newer
    stop reading, save the offsets
    await membership.stop()

Before a reader returns changes to its caller, it checks `membership.current()`, which does not block: a vbucket that
is no longer in it may belong to another member, even if no change of the assignment was announced. And it saves
offsets with the vbucket's `generation`, so that the store can refuse those of a former owner.
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
    """A document as it was read, with its CAS."""

    value: bytes
    cas: Cas


class DocumentPort(Protocol):
    """What a group needs from a key-value store: one document, changed only by compare-and-swap. One call at a time.

    If another writer was faster, a call returns None; that may be an earlier attempt of our own whose answer was lost.
    After an error of `add` or `replace`, the write may have taken place, or may still do so.
    """

    async def read(self) -> StoredDocument | None:
        """Return the document, or None if it does not exist."""

    async def add(self, value: bytes) -> Cas | None:
        """Return the CAS of the new document, or None if one exists."""

    async def replace(self, value: bytes, cas: Cas) -> Cas | None:
        """Return the new CAS, or None if the document is gone or has changed since the given CAS."""

    async def close(self) -> None:
        """Close the connections. The port can't be used after this."""


_NOTHING: frozenset[VBucketId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one member may read. It is immutable: a change makes a new one."""

    number: int
    """Rises with each new assignment of a membership."""
    vbuckets: frozenset[VBucketId] = _NOTHING
    """Read these, and no others."""
    to_release: frozenset[VBucketId] = _NOTHING
    """Stop reading these, save their offsets, and release them: another member waits for them."""
    generations: Mapping[VBucketId, int] = field(default_factory=dict)
    """How often each vbucket above had been taken, by any member, when this one took it. See `lease_member`."""

    is_last: bool = False
    """The membership has ended. The assignment is empty, and no other follows."""

    def since(self, older: Assignment) -> AssignmentChange:
        """Return what to do to get from an older assignment to this one."""
        lasting = {vbucket for vbucket, _ in self.generations.items() & older.generations.items()}
        return AssignmentChange(
            begin=self.vbuckets - (lasting & older.vbuckets),
            hand_over=self.to_release,
            drop=(older.vbuckets | older.to_release) - lasting,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentChange:
    """The difference between two assignments."""

    begin: frozenset[VBucketId]
    """Read these from their saved offsets. One that is also in `drop` belonged to another member in between."""
    hand_over: frozenset[VBucketId]
    """Stop reading these, save their offsets, and release them. One that was never begun has no offset to save."""
    drop: frozenset[VBucketId]
    """Stop reading these immediately and save nothing: another member may own them already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBucket:
    """The bucket whose vbuckets are shared."""

    vbuckets: int
    open_document: Callable[[bytes, str | None], DocumentPort]
    """Opens a document by its key and its collection, as `scope.collection`; None is the default collection."""


class Membership(Protocol):
    """One member of a group, as its reader sees it. An error of any method ends the membership."""

    async def start(self, bucket: GroupBucket) -> Assignment:
        """Join. The first assignment may be empty if other members have to hand over first."""

    def current(self) -> Assignment:
        """Return what may be read now. Does not block: it uses memory and the clock only."""

    async def assignment_changed(self, known: Assignment) -> Assignment:
        """Wait for an assignment newer than the known one, and return the newest.

        When the membership ends, pending calls return the last assignment, too.
        """

    async def release(self, vbuckets: Iterable[VBucketId]) -> None:
        """Report that these are no longer read and their offsets are saved, so that others may take them.

        Vbuckets that are not in `to_release`, for example because the lease has run out, are ignored.
        """

    async def stop(self) -> None:
        """Leave. The caller has stopped reading and saved all offsets."""


# --- static numbering -----------------------------------------------------------------------------------------------
#
# "Member 2 of 5" has the vbuckets that follow from these two numbers alone. The members do not communicate, so a
# member that is missing or started twice is not detected. `lease_group` does that.


GENERATION = 0
"""The generation of every vbucket of a static member: no member ever takes over from another."""


def vbuckets_of_member(number: int, *, of: int, vbuckets: int) -> frozenset[VBucketId]:
    """Return the vbuckets of one of `of` members, numbered from 1. The members' sets are disjoint and cover them all.

    The vbuckets are dealt like cards. Clusters give a node runs of neighbouring vbuckets, so every member gets an even
    share of every node: all members have the same load, and a slow node slows all of them a little instead of one of
    them a lot. Ranges would save connections, but assign whole nodes to single members.
    """
    _check_number(number, of=of)
    if of > vbuckets:
        raise InvalidInput(
            f"{of} members can't share {vbuckets} vbuckets", hint="Start at most as many members as there are vbuckets"
        )
    return frozenset(VBucketId(vbucket) for vbucket in range(number - 1, vbuckets, of))


@suggest_keywords
class StaticMember:
    """Member `number` of `of`, counted from 1: `StaticMember(2, of=5)`. All members must use the same `of`."""

    def __init__(self, number: int, *, of: int) -> None:
        _check_number(number, of=of)
        self.number = number
        self.of = of
        self._assignment: Assignment | None = None
        self._stopped = asyncio.Event()

    def __repr__(self) -> str:
        return f"StaticMember({self.number}, of={self.of})"

    async def start(self, bucket: GroupBucket) -> Assignment:
        """Compute the assignment. No network is used."""
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
        """Return when the member is stopped: until then, nothing changes."""
        if known.is_last:
            raise LocalProtocolError("the membership has ended", hint="Stop at the last assignment")
        await self._stopped.wait()
        return self.current()

    async def release(self, vbuckets: Iterable[VBucketId]) -> None:
        """Do nothing: `to_release` is always empty."""

    async def stop(self) -> None:
        self._assignment = Assignment(number=self.current().number + 1, is_last=True)
        self._stopped.set()


def _check_number(number: int, *, of: int) -> None:
    if of < 1:
        raise InvalidInput(f"a group can't have {of} members", hint="Give the number of members, 1 or more")
    if not 1 <= number <= of:
        raise InvalidInput(f"there is no member {number} of {of}", hint=f"Members are numbered from 1: use 1 to {of}")
