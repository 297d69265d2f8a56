"""Nodes come, go, die and hang while an application writes and consumers read: nothing is lost, and all follow."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from couchbase.durability import DurabilityLevel, ServerDurability

from support.clusters import PROCESS_VBUCKETS, ClusterProcesses
from support.followed_client import ClusterConsumer, stored_documents
from support.sdk import SdkWriter

MAJORITY = ServerDurability(DurabilityLevel.MAJORITY)
SETTLED_S_MAX = 20.0
PAUSE_S_MAX = 3.0
"""A single vbucket is without an active copy for milliseconds; the SDK's way of trying again takes longer."""


async def test_one_node_becomes_three_and_then_two(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3) as cluster:
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


async def test_an_acknowledged_durable_write_survives_kill_9_of_the_active_node(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3) as cluster:
        async with cluster.coordinator() as coordinator:
            await coordinator.init(replicas=2)
            for node in cluster.nodes[1:]:
                await coordinator.add(node.address)
            await coordinator.rebalance()
            async with SdkWriter(cluster.url(0, 1, 2), durability=MAJORITY, timeout_s=2.5) as writer:
                await asyncio.sleep(2)
                assert len(writer.acknowledged) > 20
                assert writer.failures == []
                cluster.nodes[2].kill()
                await coordinator.failover([cluster.names[2]])
                acknowledged = sum(writer.acknowledged.values())
                async with asyncio.timeout(30):
                    while sum(writer.acknowledged.values()) == acknowledged:
                        await asyncio.sleep(0.1)
                await asyncio.sleep(2)
                await writer.stop()
                # Writes to the node that died may have any outcome, and their writers know that.
                assert await writer.missing() == []


@pytest.mark.parametrize(
    ("losses", "hangs"),
    [
        pytest.param(1, False, id="killed once"),
        pytest.param(10, False, id="killed ten times", marks=pytest.mark.soak),
        pytest.param(5, True, id="hung five times", marks=pytest.mark.soak),
    ],
)
def test_a_node_is_lost_and_comes_back(tmp_path: Path, losses: int, hangs: bool) -> None:
    with ClusterProcesses(tmp_path, 3) as cluster:
        asyncio.run(_lose_and_fail_over(cluster, losses, hangs=hangs))


async def _lose_and_fail_over(cluster: ClusterProcesses, losses: int, *, hangs: bool) -> None:
    async with cluster.coordinator(0, 1, 2) as coordinator:
        await coordinator.init(replicas=1)
    async with (
        SdkWriter(cluster.url(0, 1, 2), durability=MAJORITY, timeout_s=2.5) as writer,
        ClusterConsumer(cluster.url(0, 1, 2)) as consumer,
    ):
        for loss in range(losses):
            await asyncio.sleep(0.5)
            await _lose(cluster, loss % 3, hangs=hangs)
        await asyncio.sleep(0.5)
        await writer.stop()
        assert len(writer.acknowledged) > 20, writer.failures[:5]
        assert await writer.missing() == []
        await consumer.becomes(await stored_documents(cluster.url(0, 1, 2)))
    await _replicas_have_all(cluster)


async def _lose(cluster: ClusterProcesses, lost: int, *, hangs: bool) -> None:
    seeds = [node for node in range(3) if node != lost]
    if hangs:
        os.kill(cluster.nodes[lost].pid, signal.SIGSTOP)
    else:
        cluster.nodes[lost].kill()
    async with cluster.coordinator(*seeds) as coordinator:
        done = await coordinator.failover([cluster.names[lost]])
        assert done.promoted > 0
        assert done.lost == ()
        status = await coordinator.status()
        assert sum(node.active for node in status.nodes) == PROCESS_VBUCKETS
        await asyncio.sleep(0.5)
        if hangs:
            os.kill(cluster.nodes[lost].pid, signal.SIGCONT)
        else:
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
