"""Nodes come and go while an application writes and consumers read: nothing is lost, and everybody follows."""

from __future__ import annotations

import asyncio
from pathlib import Path

from support.clusters import PROCESS_VBUCKETS, ClusterProcesses
from support.followed_client import ClusterConsumer, stored_documents
from support.sdk import SdkWriter

PAUSE_S_MAX = 3.0
"""A single vbucket is without an active copy for milliseconds; the SDK's way of trying again takes longer."""


def test_one_node_becomes_three_and_then_two(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3) as cluster:
        asyncio.run(_rebalance(cluster))


async def _rebalance(cluster: ClusterProcesses) -> None:
    async with cluster.coordinator() as coordinator:
        await coordinator.init(replicas=1)
        async with SdkWriter(cluster.url(0)) as writer, ClusterConsumer(cluster.url(0)) as consumer:
            await asyncio.sleep(0.5)
            for node in cluster.nodes[1:]:
                await coordinator.add(node.address)
            moved = await coordinator.rebalance()
            assert moved.handed_over == PROCESS_VBUCKETS - 11
            await asyncio.sleep(0.5)
            await coordinator.remove(cluster.names[0])
            await asyncio.sleep(0.5)
            await writer.stop()
            assert writer.failures == []
            assert writer.written > 200
            assert await writer.missing() == []
            await consumer.becomes(await stored_documents(cluster.url(1, 2)))
            assert len(consumer.documents()) == len(writer.acknowledged)
            assert consumer.rollbacks == 0
            assert writer.longest_pause_s < PAUSE_S_MAX
    async with cluster.coordinator(1) as coordinator:
        status = await coordinator.status()
        assert [node.name for node in status.nodes] == cluster.names[1:]
        assert [(node.active, node.replica) for node in status.nodes] == [(16, 16), (16, 16)]
        assert status.settled
