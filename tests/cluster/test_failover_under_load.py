"""A node is killed with kill -9 and failed over while an application writes, and comes back as a replica."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from couchbase.durability import DurabilityLevel, ServerDurability

from support.clusters import PROCESS_VBUCKETS, ClusterProcesses
from support.followed_client import ClusterConsumer, stored_documents
from support.sdk import SdkWriter

MAJORITY = ServerDurability(DurabilityLevel.MAJORITY)
SETTLED_S_MAX = 20.0


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.soak)], ids=["once", "ten times"])
def test_a_node_is_killed_and_comes_back(tmp_path: Path, kills: int) -> None:
    with ClusterProcesses(tmp_path, 3) as cluster:
        asyncio.run(_kill_and_fail_over(cluster, kills))


async def _kill_and_fail_over(cluster: ClusterProcesses, kills: int) -> None:
    async with cluster.coordinator(0, 1, 2) as coordinator:
        await coordinator.init(replicas=1)
    async with (
        SdkWriter(cluster.url(0, 1, 2), durability=MAJORITY, timeout_s=2.5) as writer,
        ClusterConsumer(cluster.url(0, 1, 2)) as consumer,
    ):
        for kill in range(kills):
            await asyncio.sleep(0.5)
            await _lose(cluster, kill % 3)
        await asyncio.sleep(0.5)
        await writer.stop()
        assert len(writer.acknowledged) > 20, writer.failures[:5]
        assert await writer.missing() == []
        await consumer.becomes(await stored_documents(cluster.url(0, 1, 2)))
    await _replicas_have_all(cluster)


async def _lose(cluster: ClusterProcesses, lost: int) -> None:
    seeds = [node for node in range(3) if node != lost]
    cluster.nodes[lost].kill()
    async with cluster.coordinator(*seeds) as coordinator:
        done = await coordinator.failover([cluster.names[lost]])
        assert done.promoted > 0
        assert done.lost == ()
        status = await coordinator.status()
        assert sum(node.active for node in status.nodes) == PROCESS_VBUCKETS
        await asyncio.sleep(0.5)
        await asyncio.to_thread(cluster.nodes[lost].start)
        await coordinator.add(cluster.nodes[lost].address)
        await coordinator.rebalance()


async def _replicas_have_all(cluster: ClusterProcesses) -> None:
    async with cluster.coordinator(0) as coordinator, asyncio.timeout(SETTLED_S_MAX):
        status = await coordinator.status()
        while any(node.behind for node in status.nodes):
            await asyncio.sleep(0.1)
            status = await coordinator.status()
        assert status.settled
        assert [node.active + node.replica for node in status.nodes] == pytest.approx(
            [2 * PROCESS_VBUCKETS / 3] * 3, abs=1.5
        )
