"""The commit loop: makes what a bucket has pending durable, one commit after the other, and keeps house in between.

The node starts one for each bucket and passes its methods to the bucket's service. House-keeping is settling, expiry
and compaction. All writing to a bucket's engine happens in one thread of its own, so commits and house-keeping never
meet, and the event loop never waits for a disk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np

from headwater.errors import StoreError, VBucketDamaged
from headwater.log_fields import LogEvent, fields
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store.bucket import Bucket
from headwater.store.compaction import Retention, compact_vbucket, expire_documents, finish_compaction, worth_compacting
from headwater.store.engine import Change, Table
from headwater.store.scrub import Finding, Scrub, Scrubbed
from headwater.store.settling import Settling, abandon, is_due

logger = logging.getLogger(__name__)
T = TypeVar("T")

SCRUB_STEP_S = 0.1
SCRUB_REST_S = 60.0
"""Between two passes: a small bucket is not to be read without end."""

RETRY_S = 0.5
"""How long to wait after a commit could not be written."""


class CommitLoop:
    """Runs one bucket."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        retention: Callable[[], Retention],
        expiry_every_s: float,
        compact_every_s: float,
        scrub_bytes_per_s: int = 0,
        on_durable: Callable[[], None],
        on_void: Callable[[Collection[int]], None],
        on_failed: Callable[[], None],
    ) -> None:
        self._bucket = bucket
        self._retention = retention
        self._expiry_every_s = expiry_every_s
        self._compact_every_s = compact_every_s
        self._scrub_bytes_per_s = scrub_bytes_per_s
        self.scrubbed = Scrubbed()
        self._on_durable = on_durable
        self._on_void = on_void
        self._on_failed = on_failed
        self._dirty = asyncio.Event()
        self._resting = asyncio.Lock()
        self._disk = ThreadPoolExecutor(1, thread_name_prefix=f"disk-{bucket.facts.name}")
        self._tasks: list[asyncio.Task[Any]] = []
        self._is_stopped = False

    def on_change(self) -> None:
        """There is something to commit."""
        self._dirty.set()

    def is_at_rest(self) -> bool:
        """Whether no commit is being written and no house-keeping done."""
        return not self._resting.locked()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._bucket.on_damage = self._on_damage
        for error in self._bucket.vbuckets.damage.values():
            self._log_damage(error)
        self._tasks = [
            asyncio.create_task(self._commit_forever()),
            asyncio.create_task(self._expire_forever()),
            asyncio.create_task(self._compact_forever()),
        ]
        if self._scrub_bytes_per_s:
            self._tasks.append(asyncio.create_task(self._scrub_forever()))
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        """These tasks run until they are cancelled. One that fails leaves writers without answers: stop the node."""
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        about = fields(
            event=LogEvent.NODE_FAILED, bucket=self._bucket.facts.name, error=type(error).__name__, reason=str(error)
        )
        logger.critical("bucket %s: the node stops: %r", self._bucket.facts.name, error, exc_info=error, extra=about)
        self._on_failed()

    async def stop(self) -> None:
        """Stop after everything taken so far is durable."""
        # A task that holds the lock is in the middle of a write, and what is cut short there would be lost.
        async with self._resting:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._commit_all()
            self._is_stopped = True
        self._disk.shutdown()

    def run_at_rest(self, action: Callable[[], None]) -> None:
        """As `at_rest`, for callers that do not wait."""
        self._rest(action).add_done_callback(self._on_task_end)

    async def at_rest(self, action: Callable[[], T]) -> T:
        """Run something that must not meet a commit, such as a rollback.

        It runs in the event loop, as what it changes is what sessions read and write, and nothing happens meanwhile.
        A caller that is cancelled takes the action with it, but not the commit that is being written. A `StoreError`
        says that the bucket was closed first.
        """
        is_given_up = False

        def unless_given_up() -> T:
            if is_given_up:
                raise asyncio.CancelledError
            return action()

        resting = self._rest(unless_given_up)
        try:
            return await asyncio.shield(resting)
        except asyncio.CancelledError:
            is_given_up = True
            if resting.cancelled():
                raise StoreError(
                    f"bucket {self._bucket.facts.name} is being closed", hint="Check that it exists"
                ) from None
            raise

    def _rest(self, action: Callable[[], T]) -> asyncio.Task[T]:
        task = asyncio.create_task(self._act_at_rest(action))
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        return task

    async def _act_at_rest(self, action: Callable[[], T]) -> T:
        try:
            async with self._resting:
                if self._is_stopped:
                    raise asyncio.CancelledError
                # What is written beforehand, others need not wait for. There may be no end to it while clients write.
                await self._settle()
                await self._commit_next()
                return action()
        finally:
            self._on_durable()

    async def _in_disk_thread(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._disk, action)

    # --- committing -----------------------------------------------------------------------------------------------

    async def _commit_forever(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            async with self._resting:
                # One at a time: while clients keep writing there is always a next one, and house-keeping has its turn.
                if await self._commit_next():
                    self._dirty.set()
                if is_due(self._bucket):
                    await self._settle()

    async def _commit_all(self) -> None:
        while await self._commit_next():
            pass

    async def _commit_next(self) -> bool:
        """Make what is pending durable. Returns whether there may be more by now."""
        commit = self._bucket.seal()
        if commit is None:
            return False
        try:
            await self._in_disk_thread(partial(self._bucket.persist, commit))
        except StoreError as error:
            logger.error(
                "bucket %s: a commit could not be written: %s",
                self._bucket.facts.name,
                error,
                extra=self._failure(error),
            )
            self._on_void(abandon(self._bucket))
            await asyncio.sleep(RETRY_S)
            return False
        self._bucket.publish(commit)
        self._on_durable()
        return True

    def _failure(self, error: StoreError) -> dict[str, Any]:
        name, reason = type(error).__name__, error.reason
        return fields(event=LogEvent.STORE_FAILED, bucket=self._bucket.facts.name, error=name, reason=reason)

    # --- house-keeping --------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        settling = Settling(self._bucket)
        steps = settling.steps()
        try:
            while await self._in_disk_thread(lambda: self._write_next(steps)):
                # Writers go in between, with the less at a time the further they are ahead (`BucketService.has_room`).
                await self._commit_next()
        except StoreError as error:
            logger.error(
                "bucket %s: commits could not be settled: %s",
                self._bucket.facts.name,
                error,
                extra=self._failure(error),
            )
            return
        settling.finish()

    def _write_next(self, steps: Iterator[list[Change]]) -> bool:
        changes = next(steps, None)
        if changes is None:
            return False
        self._bucket.engine.write(changes)
        return True

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_every_s)
            for vbucket in np.flatnonzero(self._bucket.vbuckets.states == VBucketState.ACTIVE).tolist():
                # Damage that this meets has stopped the vbucket and is reported.
                with suppress(VBucketDamaged):
                    if expire_documents(self._bucket, vbucket):
                        self._dirty.set()
                await asyncio.sleep(0)

    async def _compact_forever(self) -> None:
        while True:
            await asyncio.sleep(self._compact_every_s)
            for vbucket in worth_compacting(self._bucket):
                async with self._resting:
                    await self._compact(vbucket)

    async def _compact(self, vbucket: int) -> None:
        after: Seqno | None = Seqno(0)
        while after is not None and self._bucket.vbuckets.facts[vbucket] is not None:
            try:
                compacted = compact_vbucket(self._bucket, vbucket, self._retention(), after_seqno=after)
                await self._in_disk_thread(partial(self._bucket.engine.write, compacted.changes))
            except StoreError as error:
                logger.error(
                    "bucket %s: vbucket %d could not be compacted: %s",
                    *(self._bucket.facts.name, vbucket, error),
                    extra={**self._failure(error), **fields(vbucket=vbucket)},
                )
                return
            finish_compaction(self._bucket, vbucket, compacted)
            after = compacted.reached_seqno

    # --- damage ---------------------------------------------------------------------------------------------------

    def _on_damage(self, error: VBucketDamaged) -> None:
        """A vbucket was stopped, by whichever thread has read it."""
        self._loop.call_soon_threadsafe(self._announce_damage, error)

    def _announce_damage(self, error: VBucketDamaged) -> None:
        self._log_damage(error)
        # Streams look at their vbuckets when there is something new, and those of this one have to end.
        self._on_durable()

    def _log_damage(self, error: VBucketDamaged) -> None:
        about = fields(
            event=LogEvent.VBUCKET_DAMAGED, bucket=self._bucket.facts.name, vbucket=error.vbucket, reason=error.reason
        )
        logger.error("%s; the vbucket is stopped, the others go on", error, extra=about)

    async def _scrub_forever(self) -> None:
        """Read everything that is stored, slowly, again and again."""
        while True:
            scrub = Scrub(self._bucket.engine.unchecked, self._bucket.facts.name)
            found = 0
            while not scrub.is_done:
                for finding in await asyncio.to_thread(scrub.step, max(1, int(self._scrub_bytes_per_s * SCRUB_STEP_S))):
                    found += 1
                    await self._on_finding(finding)
                await asyncio.sleep(SCRUB_STEP_S)
            self.scrubbed = Scrubbed(
                passes=self.scrubbed.passes + 1,
                completed_ns=self._bucket.environment.now_ns(),
                read_bytes=scrub.read_bytes,
                findings=found,
            )
            await asyncio.sleep(SCRUB_REST_S)

    async def _on_finding(self, finding: Finding) -> None:
        if isinstance(finding.error, VBucketDamaged):
            self._bucket.stop_vbucket(finding.error)
            return
        about = fields(event=LogEvent.VBUCKET_DAMAGED, bucket=self._bucket.facts.name, reason=finding.error.reason)
        logger.error("%s", finding.error, extra=about)
        if finding.table is Table.JOURNAL:
            # What the row held is in memory. Settled, it is stored once more, and the row goes.
            async with self._resting:
                await self._settle()
