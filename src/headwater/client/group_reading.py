"""The read of one member of a group: it reads the vbuckets that are its own, for as long as they are.

Assignments change between two batches, when the caller has finished with everything it was given: so what is handed
over to another member is saved up to the last change that anybody has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headwater.client.checkpoints.store import CheckpointStore
from headwater.client.groups.membership import Assignment, GroupBucket, Membership
from headwater.client.offsets import Offsets
from headwater.client.reading import Batches, ReadStart
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset

BeginAt = Callable[[dict[VBucketId, StreamOffset]], Awaitable[ReadStart]]
"""Starts a read of these vbuckets from these offsets."""


class GroupBatches(Batches):
    """Batches of the vbuckets that a membership assigns."""

    def __init__(
        self, begin_at: BeginAt, checkpoint: CheckpointStore, *, membership: Membership, bucket: GroupBucket
    ) -> None:
        super().__init__(self._begin_with_assignment, checkpoint)
        self._begin_at = begin_at
        self._store = checkpoint
        self._membership = membership
        self._bucket = bucket
        self._assignment = Assignment(number=0)
        self._has_joined = False

    async def _begin_with_assignment(self) -> ReadStart:
        if not self._has_joined:
            await self._membership.start(self._bucket)
            self._has_joined = True
        self._assignment = self._membership.current()
        return await self._begin_at(await self._saved_offsets(self._assignment.vbuckets))

    async def _saved_offsets(self, vbuckets: frozenset[VBucketId]) -> dict[VBucketId, StreamOffset]:
        saved: Offsets | None = await self._store.load()
        return {vbucket: (saved and saved.get(vbucket)) or StreamOffset() for vbucket in sorted(vbuckets)}

    async def _take_next(self) -> None:
        while (started := await self._start_once()) is not None and not self._is_closed:
            await self._keep_to_assignment(started)
            await self._save_if_due()
            if self._assignment.is_last:
                await self.aclose()
                return
            # From here to the hand-out nothing is waited for, so the assignment is still the one that was looked at.
            if self._membership.current().number == self._assignment.number and (pieces := started.edge.take_now()):
                self._taken = pieces
                return
            await self._wait_for_news(started)

    async def _keep_to_assignment(self, started: ReadStart) -> None:
        """Do what the newest assignment says. The caller has finished with all that it was given."""
        reader = started.edge.reader
        newest = self._membership.current()
        change = newest.since(self._assignment)
        # First of all: what may be another member's by now must not be saved.
        reader.leave(change.drop, forget=change.drop)
        self._finished = reader.offsets
        if newest.number == self._assignment.number:
            return
        reader.leave(change.hand_over)
        await self.save()
        await self._membership.release(change.hand_over)
        reader.leave(change.hand_over, forget=change.hand_over)
        offsets = await self._saved_offsets(change.begin)
        started.edge.follow(offsets)
        # Only now: a caller that gives up while something is waited for comes back to all of this.
        self._assignment = newest

    async def _wait_for_news(self, started: ReadStart) -> None:
        """Until there is something to take, or another assignment. Nothing is taken here, so nothing can get lost."""
        waits: set[asyncio.Task[object]] = {asyncio.create_task(self._membership.assignment_changed(self._assignment))}
        if not started.edge.reader.is_finished:
            waits.add(asyncio.create_task(started.edge.wait()))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def aclose(self) -> None:
        if self._is_closed:
            return
        if self._started is not None:
            own = self._membership.current()
            lost = own.since(self._assignment).drop
            self._finished = {vbucket: offset for vbucket, offset in self._finished.items() if vbucket not in lost}
        try:
            await super().aclose()
        finally:
            await self._membership.stop()
