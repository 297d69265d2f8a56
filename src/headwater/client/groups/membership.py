"""What a reader and its consumer group say to each other.

The members of a group share the vbuckets of a bucket. A `Membership` tells a reader which are its own, as an
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
the vbucket's `generation`, so that the place where they are kept can refuse what comes from a former owner.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from headwater.client.groups.document_port import DocumentPort
from headwater.protocol.numbers import VBucketId

_NOTHING: frozenset[VBucketId] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one member may read. A change makes a new one."""

    number: int
    """Of two assignments of one membership the newer has the higher one."""
    vbuckets: frozenset[VBucketId] = _NOTHING
    """Read these, and no others."""
    to_release: frozenset[VBucketId] = _NOTHING
    """Stop to read these, save their offsets, and release them: somebody waits for them."""
    generations: Mapping[VBucketId, int] = field(default_factory=dict)
    """Of all of the above, how often each had been taken by anybody when it was taken for this. See `lease_member`."""

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


@asynccontextmanager
async def joined(membership: Membership, bucket: GroupBucket) -> AsyncIterator[Membership]:
    """A membership that is started, and stopped at the end."""
    await membership.start(bucket)
    try:
        yield membership
    finally:
        await membership.stop()


async def assignments(membership: Membership) -> AsyncIterator[Assignment]:
    """The assignment that is current, and every later one that the caller has not missed while it was busy."""
    assignment = membership.current()
    yield assignment
    while not assignment.is_last:
        assignment = await membership.assignment_changed(assignment)
        yield assignment
