"""A checkpoint in the bucket, over connections that break anywhere.

A save whose answer is lost may have been carried out. It must neither be taken for another reader's nor be lost, and
what a save leaves behind when it fails is, for every vbucket, what was saved before or what was to be saved.
"""

from __future__ import annotations

import asyncio

import pytest

from headwater.client.bucket_kv import BucketKv
from headwater.client.checkpoints.xattrs import XattrCheckpoint
from headwater.client.kv_connection import Timeouts
from headwater.client.offsets import Offsets
from headwater.client.settings import ClientSettings
from headwater.errors import CheckpointFailed, CheckpointInUse
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.fault_proxy import Cut, Ending, FaultSchedule, ProxiedNode, Way, no_faults
from support.node_process import PASSWORD, USER

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


@pytest.mark.parametrize("seed", range(SEEDS))
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
        for number, after_bytes in enumerate(range(1, 6000, 239)):
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
        assert 5 < failed < number

    asyncio.run(save_and_cut())
