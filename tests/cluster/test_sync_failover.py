"""A node dies while an application writes durably: nothing that it was told is there is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

from couchbase.durability import Durability, ServerDurability

from support.clusters import ClusterProcesses
from support.sdk import SdkWriter

DURABLE = ServerDurability(Durability.MAJORITY)


def test_an_acknowledged_durable_write_survives_kill_9_of_the_active_node(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3) as cluster:
        asyncio.run(_lose_a_node(cluster))


async def _lose_a_node(cluster: ClusterProcesses) -> None:
    async with cluster.coordinator() as coordinator:
        await coordinator.init(replicas=2)
        for node in cluster.nodes[1:]:
            await coordinator.add(node.address)
        await coordinator.rebalance()
        async with SdkWriter(cluster.url(0, 1, 2), durability=DURABLE, timeout_s=2.5) as writer:
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
