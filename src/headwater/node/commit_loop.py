"""The commit loop: makes the pending changes of a bucket durable, and does the housekeeping between two commits.

The node starts one for each bucket and passes its methods to the bucket's service. Housekeeping is settling, expiry and
compaction. One thread does all writing to a bucket's engine, so that commits and housekeeping never run at the same
time, and the event loop never waits for a disk. After a commit `on_durable` lets waiting answers and streams proceed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, Unpack

from headwater.errors import StoreError, VBucketDamaged
from headwater.log_fields import Fields, LogEvent, fields
from headwater.protocol.numbers import Seqno
from headwater.store import compaction
from headwater.store.bucket import Bucket
from headwater.store.checked_engine import Finding, Scrubbed
from headwater.store.engine import Table
from headwater.store.settling import Settling, abandon, is_due
from headwater.store.vbuckets import Retention

logger = logging.getLogger(__name__)
T = TypeVar("T")

SCRUB_STEP_S = 0.1
SCRUB_REST_S = 60.0
"""The pause between two passes, so that a small bucket is not read continuously."""

RETRY_S = 0.5
"""How long to wait after writing a commit has failed."""


class CommitLoop:
    """Commits and housekeeping of one bucket."""

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
        """Wake the loop: something is pending."""
        self._dirty.set()

    def is_at_rest(self) -> bool:
        """Whether neither a commit nor housekeeping is under way."""
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
        """Stop the node if a task has failed: writers would get no answers. Tasks otherwise run until cancelled."""
        if task.cancelled() or task.exception() is None:
            return
        error = task.exception()
        about = fields(
            event=LogEvent.NODE_FAILED, bucket=self._bucket.facts.name, error=type(error).__name__, reason=str(error)
        )
        logger.critical("bucket %s: the node stops: %r", self._bucket.facts.name, error, exc_info=error, extra=about)
        self._on_failed()

    async def stop(self) -> None:
        """Make all accepted writes durable, and settle them into blocks: damage to a block affects only its vbucket."""
        # A task that holds the lock is in the middle of a write: cancelling it there would lose that write.
        async with self._resting:
            if self._is_stopped:
                return
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            while await self._commit_next():
                pass
            await self._settle()
            self._is_stopped = True
        self._disk.shutdown()

    def run_at_rest(self, action: Callable[[], None]) -> None:
        """Like `at_rest`, but do not wait for the action."""
        self._rest(action).add_done_callback(self._on_task_end)

    async def at_rest(self, action: Callable[[], T]) -> T:
        """Run an action that must not run beside a commit, such as a rollback.

        It runs in the event loop, because sessions read and write what it changes. If the caller is cancelled first,
        the action is skipped, but a commit in progress continues. Raises `StoreError` if the bucket is closed first.
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
                # Commit once: the action need not wait for later writes, and while clients write they may never end.
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
                # One commit at a time: while clients write there is always a next one, and housekeeping needs its turn.
                if await self._commit_next():
                    self._dirty.set()
                if is_due(self._bucket) and await self._settle(oldest=True) and is_due(self._bucket):
                    self._dirty.set()

    async def _commit_next(self) -> bool:
        """Make pending changes durable. Returns True if a commit was written, so more changes may be pending by now."""
        commit = self._bucket.seal()
        if commit is None:
            return False
        try:
            await self._in_disk_thread(partial(self._bucket.persist, commit))
        except StoreError as error:
            self._log_failure("a commit could not be written", error)
            self._on_void(abandon(self._bucket))
            await asyncio.sleep(RETRY_S)
            return False
        self._bucket.publish(commit)
        self._on_durable()
        return True

    def _log_failure(self, what: str, cause: StoreError, **about: Unpack[Fields]) -> None:
        name, kind = self._bucket.facts.name, type(cause).__name__
        failure = fields(event=LogEvent.STORE_FAILED, bucket=name, error=kind, reason=cause.reason)
        logger.error("bucket %s: %s: %s", name, what, cause, extra={**failure, **fields(**about)})

    # --- housekeeping ---------------------------------------------------------------------------------------------

    async def _settle(self, *, oldest: bool = False) -> bool:
        """Settle young commits into blocks. Returns False if a block could not be written."""
        settling = Settling(self._bucket, oldest=oldest)
        try:
            while await self._in_disk_thread(settling.write_step):
                # Commit in between. The further writers are ahead, the smaller a commit is (`BucketService.has_room`).
                await self._commit_next()
        except StoreError as error:
            self._log_failure("commits could not be settled", error)
            return False
        settling.finish()
        return True

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(self._expiry_every_s)
            for vbucket in self._bucket.vbuckets.active():
                # If this finds damage, the store has already stopped the vbucket and reported it.
                with suppress(VBucketDamaged):
                    if compaction.expire_documents(self._bucket, vbucket):
                        self._dirty.set()
                await asyncio.sleep(0)

    async def _compact_forever(self) -> None:
        while True:
            await asyncio.sleep(self._compact_every_s)
            for vbucket in compaction.worth_compacting(self._bucket):
                async with self._resting:
                    if compaction.needs_settling(self._bucket, vbucket):
                        await self._settle()
                    await self._compact(vbucket)

    async def _compact(self, vbucket: int) -> None:
        after: Seqno | None = Seqno(0)
        retention = self._retention()
        while after is not None and self._bucket.vbuckets.facts[vbucket] is not None:
            try:
                reading = partial(compaction.read_part, self._bucket, vbucket, retention, after_seqno=after)
                compacted = compaction.compact_part(
                    self._bucket, vbucket, retention, await self._in_disk_thread(reading)
                )
                await self._in_disk_thread(partial(compaction.write_compacted, self._bucket, compacted))
            except StoreError as error:
                self._log_failure(f"vbucket {vbucket} could not be compacted", error, vbucket=vbucket)
                return
            compaction.finish_compaction(self._bucket, vbucket, compacted)
            after = compacted.reached_seqno

    # --- damage ---------------------------------------------------------------------------------------------------

    def _on_damage(self, error: VBucketDamaged) -> None:
        """Log a vbucket that was stopped. Any thread that reads the bucket may call this."""
        self._loop.call_soon_threadsafe(self._log_damage, error)
        # Wake streams: those of this vbucket have to end, and a stream checks its vbucket only when it is woken.
        self._loop.call_soon_threadsafe(self._on_durable)

    def _log_damage(self, error: VBucketDamaged) -> None:
        about = fields(
            event=LogEvent.VBUCKET_DAMAGED, bucket=self._bucket.facts.name, vbucket=error.vbucket, reason=error.reason
        )
        logger.error("%s; the vbucket is stopped, the others go on", error, extra=about)

    async def _scrub_forever(self) -> None:
        """Read everything that is stored, slowly, in endless passes."""
        while True:
            scrub = self._bucket.scrub()
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
            # The contents of the row are still in memory. Settling stores them again and removes the damaged row.
            async with self._resting:
                await self._settle()


class ChangeSignal:
    """Signals any number of waiters that something has changed. No waiter can miss a change.

    A waiter reads `count`, looks at the state it is interested in, then awaits `after(count)`. Not thread-safe: call
    `notify` in the event loop of the waiters.
    """

    def __init__(self) -> None:
        self.count = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        self.count += 1
        self._next.set()
        self._next = asyncio.Event()

    async def after(self, count: int) -> None:
        """Return once there have been more changes than `count`."""
        while self.count <= count:
            await self._next.wait()
