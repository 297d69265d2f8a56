"""Several processes with one SQLite checkpoint."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from headwater.client.bucket_kv import BucketKv
from headwater.client.checkpoints import SqliteCheckpoint
from headwater.client.checkpoints.xattrs import XattrCheckpoint
from headwater.client.kv_connection import Timeouts
from headwater.client.offsets import Offsets
from headwater.client.settings import ClientSettings
from headwater.errors import CheckpointFailed, CheckpointInUse
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support import node_process
from support.checkpoint_samples import offsets_at, run
from support.fault_proxy import Cut, Ending, FaultSchedule, ProxiedNode, Way, no_faults
from support.forked_program import start_program
from support.node_process import PASSWORD, USER


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "orders.db"


def saved(path: Path, name: str = "orders") -> object:
    """What any other reader would load."""
    store = SqliteCheckpoint(path, name=name)
    try:
        return run(store.load())
    finally:
        run(store.close())


SAVE_MANY = """
import asyncio, sqlite3, sys
sys.path[:0] = sys.argv[3:]
from support.checkpoint_samples import offsets_at
from headwater.client.checkpoints import SqliteCheckpoint
store = SqliteCheckpoint(sys.argv[1], name=sys.argv[2])
async def save_all():
    for seqno in range(1, 51):
        await store.save(offsets_at(seqno))
    await store.close()
asyncio.run(save_all())
"""


@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_many_processes_at_once(path: Path, journal: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA journal_mode = {journal}")
    names = [f"reader {number}" for number in range(3)]
    folders = [str(Path(node_process.__file__).parents[1])]
    processes = [
        start_program("-c", SAVE_MANY, str(path), name, *folders, stderr=subprocess.PIPE, text=True) for name in names
    ]
    for process in processes:
        _, complaint = process.communicate(timeout=120)
        assert process.returncode == 0, complaint
    for name in names:
        assert saved(path, name) == offsets_at(50)


# --- A checkpoint in the bucket, over connections that break anywhere -------------------------------------------------
#
# A save whose answer is lost may have been carried out. It must neither be taken for another reader's nor be lost, and
# what a save leaves behind when it fails is, for every vbucket, what was saved before or what was to be saved.

SEEDS = 12
SAVES = 6
RETRY_S = 0.1
BUCKET = "default"


class ProxiedCheckpoint:
    def __init__(self, node: ProxiedNode, group: str) -> None:
        self.node = node
        self.group = group
        node.proxy.use(no_faults)
        self.uuid = asyncio.run(self._kv().cluster_map()).uuid

    def _kv(self, *, retry_s_max: float = 60.0) -> BucketKv:
        settings = ClientSettings.make(
            f"couchbase://127.0.0.1:{self.node.proxy.port}/{BUCKET}",
            user=USER,
            password=PASSWORD,
            timeouts=Timeouts(connect_s=5.0, answer_s=1.0),
        )
        return BucketKv(settings, retry_s_max=retry_s_max)

    def new(self, *, retry_s_max: float = 60.0) -> XattrCheckpoint:
        return XattrCheckpoint(self._kv(retry_s_max=retry_s_max), group=self.group)

    def at(self, seqno: int) -> Offsets:
        offset = StreamOffset(vbuuid=Vbuuid(7), seqno=Seqno(seqno), snapshot_end=Seqno(seqno))
        return Offsets(self.uuid, dict.fromkeys(map(VBucketId, range(self.node.vbuckets)), offset))

    async def saved(self) -> Offsets | None:
        """What another reader would load over good connections."""
        self.node.proxy.use(no_faults)
        store = self.new()
        try:
            return await store.load()
        finally:
            await store.close()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(4, SEEDS))])
def test_saves_get_through_in_the_end(shared_node: ProxiedNode, seed: int) -> None:
    checkpoint = ProxiedCheckpoint(shared_node, f"schedule-{seed}")
    # Requests are small, and so that faults meet them they have to come early.
    schedule = FaultSchedule(seed, to_client_bytes_max=1 << 12, to_server_bytes_max=1 << 12)

    async def save_all() -> None:
        store = checkpoint.new()
        # To begin with, the address might be wrong, and so it is not tried again.
        await store.load()
        shared_node.proxy.use(schedule)
        for seqno in range(1, SAVES + 1):
            await store.save(checkpoint.at(seqno * 10))
        await store.close()
        assert await checkpoint.saved() == checkpoint.at(SAVES * 10)

    asyncio.run(save_all())


def test_a_save_that_is_cut_at_any_byte(shared_node: ProxiedNode) -> None:
    """It fails. Another attempt, by the same reader or by the next one, goes on from whatever there is."""
    checkpoint = ProxiedCheckpoint(shared_node, "cut")

    async def save_and_cut() -> None:
        before, failed = 0, 0
        for number, after_bytes in enumerate(range(1, 6000, 479)):
            way = (Way.TO_SERVER, Way.TO_CLIENT)[number % 2]
            cut = Cut(way, after_bytes, Ending.RESET)
            store = checkpoint.new(retry_s_max=RETRY_S)
            await store.load()
            # That ends the connections. Of every two that follow the first is for the map, the second for requests.
            shared_node.proxy.use(lambda connection, cut=cut: [cut] if connection % 2 else [])
            wanted = 10 * (number + 1)
            try:
                await store.save(checkpoint.at(wanted))
            except CheckpointInUse:
                raise
            except CheckpointFailed:
                failed += 1
            saved = await checkpoint.saved()
            seqnos = {0} if saved is None else {offset.seqno for offset in saved.offsets.values()}
            assert seqnos <= {before, wanted}
            await store.save(checkpoint.at(wanted + 1))
            await store.close()
            assert await checkpoint.saved() == checkpoint.at(wanted + 1)
            before = wanted + 1
        assert 2 < failed < number

    asyncio.run(save_and_cut())
