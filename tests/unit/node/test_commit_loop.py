"""The commit loop: whoever gives up waiting for it must not take a commit with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from headwater.node.commit_loop import CommitLoop
from headwater.store.bucket import Bucket
from headwater.store.compaction import Retention
from headwater.store.engine import Change, MemoryEngine
from headwater.store.settling import settle_now
from support.store_harness import FailingEngine, new_bucket, put


class SlowEngine(FailingEngine):
    """Writes nothing until it is let."""

    def __init__(self) -> None:
        super().__init__(MemoryEngine())
        self.is_writing = threading.Event()
        self.may_write = threading.Event()
        self.may_write.set()

    def write(self, changes: Sequence[Change]) -> None:
        if changes:
            self.is_writing.set()
            assert self.may_write.wait(10)
        super().write(changes)


@asynccontextmanager
async def running(bucket: Bucket) -> AsyncIterator[CommitLoop]:
    loop = CommitLoop(
        bucket, retention=Retention(), expiry_every_s=60, compact_every_s=60,
        on_durable=lambda: None, on_void=lambda commits: None, on_failed=lambda: None,
    )  # fmt: skip
    loop.start()
    try:
        yield loop
    finally:
        await loop.stop()


def test_a_commit_is_finished_though_nobody_waits_for_the_rest_any_more() -> None:
    async def story() -> None:
        engine = SlowEngine()
        bucket = new_bucket(engine)
        settle_now(bucket)
        done: list[str] = []
        async with running(bucket) as loop:
            put(bucket, 0, b"k")
            engine.is_writing.clear()
            engine.may_write.clear()
            waiting = asyncio.create_task(loop.at_rest(lambda: done.append("given up")))
            assert await asyncio.to_thread(engine.is_writing.wait, 10)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            engine.may_write.set()
            await loop.at_rest(lambda: done.append("at rest"))
            assert bucket.in_flight is None
            put(bucket, 0, b"k")
        assert bucket.vbuckets.durable_seqnos[0] == bucket.vbuckets.high_seqnos[0] == 2
        assert done == ["at rest"]

    asyncio.run(asyncio.wait_for(story(), 20))
