"""The commit loop: whoever gives up waiting for it must not take a commit with them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from headwater.node.commit_loop import CommitLoop
from headwater.store.bucket import Bucket
from headwater.store.data_format import block_key, commit_key
from headwater.store.engine import Change, MemoryEngine, PutRow, Table
from headwater.store.settling import settle_now
from headwater.store.vbuckets import Retention
from support.store_harness import FailingEngine, new_bucket, put, reopened, value_of


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
async def running(
    bucket: Bucket, *, scrub_bytes_per_s: int = 0, compact_every_s: float = 60
) -> AsyncIterator[CommitLoop]:
    loop = CommitLoop(
        bucket, retention=Retention, expiry_every_s=60, compact_every_s=compact_every_s,
        scrub_bytes_per_s=scrub_bytes_per_s,
        on_durable=lambda: None, on_void=lambda commits: None, on_failed=lambda: None,
    )  # fmt: skip
    loop.start()
    try:
        yield loop
    finally:
        await loop.stop()


async def test_a_commit_is_finished_though_nobody_waits_for_the_rest_any_more() -> None:
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
    assert bucket.young_commits == 0, "a clean stop leaves changes in the journal"
    assert done == ["at rest"]


async def test_documents_of_a_dropped_collection_are_soon_counted_no_more() -> None:
    """Nothing of them is superseded, and none is settled: nothing else would ever have them compacted."""
    bucket = new_bucket()
    fruit = bucket.manifest.with_collection("_default", "fruit")
    bucket.set_manifest(fruit)
    for number in range(5):
        put(bucket, 0, b"a%d" % number, collection_id=8)
    put(bucket, 0, b"kept")
    bucket.commit_now()
    async with running(bucket, compact_every_s=0.01) as loop:
        bucket.set_manifest(fruit.without_collection("_default", "fruit"))
        loop.on_change()
        async with asyncio.timeout(20):
            while bucket.live_documents() > 1:
                await asyncio.sleep(0.01)
        while bucket.vbuckets.dropped_seqnos.any():
            await asyncio.sleep(0.01)
    assert value_of(bucket, 0, b"kept") == b"{}"
    assert reopened(bucket).live_documents() == 1


def test_a_scrub_finds_damage_that_is_not_read_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        bucket = new_bucket()
        for vbucket in range(4):
            put(bucket, vbucket, b"k")
        bucket.commit_now()
        settle_now(bucket)
        put(bucket, 0, b"young")
        bucket.commit_now()
        memory = bucket.engine.unchecked
        for table, key in ((Table.BLOCKS, block_key(2, 1)), (Table.JOURNAL, commit_key(bucket.durable_commit))):
            with memory.view() as view:
                row = bytearray(view.get(table, key) or b"")
            row[30] ^= 4
            memory.write([PutRow(table, key, bytes(row))])
        async with running(bucket, scrub_bytes_per_s=2**30) as loop:
            while not loop.scrubbed.passes:
                await asyncio.sleep(0.01)
            assert loop.scrubbed.findings == 2
            assert loop.scrubbed.completed_ns == bucket.environment.now_ns()
            assert list(bucket.vbuckets.damage) == [2]
        # What the journal's row held was in memory, and is stored once more.
        assert list(reopened(bucket).vbuckets.damage) == [2]
        assert value_of(reopened(bucket), 0, b"young") == b"{}"

    asyncio.run(asyncio.wait_for(story(), 20))
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
