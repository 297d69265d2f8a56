"""A node hangs, as one stopped by a signal does: it is failed over like a dead one, and is not active when it wakes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from headwater.client.cluster_map import vbucket_of
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.cluster.nodes import NodePort
from headwater.errors import NotMyVBucket, StatusError, TemporaryFailure
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from support.clusters import ClusterProcesses

VBUCKETS = 8
HUNG = 0
FAILOVER_S_MAX = 10.0
"""What an operator is to wait for. The answers of a node are waited for three times as long elsewhere."""


def test_it_is_failed_over_as_soon_as_a_dead_one_and_asks_before_it_serves(tmp_path: Path) -> None:
    async def story(cluster: ClusterProcesses) -> None:
        async with cluster.coordinator(0, 1, 2) as coordinator:
            await coordinator.init(replicas=1)
        active = await _active_on(cluster)
        key = next(key for key in (b"key-%d" % number for number in range(99)) if vbucket_of(key, VBUCKETS) in active)
        write = Set(vbucket=VBucketId(vbucket_of(key, VBUCKETS)), collection_id=DEFAULT_COLLECTION, key=key, value=b"1")
        connection = await AsyncKvConnection.open(cluster.nodes[HUNG].address, cluster.login)
        await connection.request(write)
        os.kill(cluster.nodes[HUNG].pid, signal.SIGSTOP)
        try:
            while " T " not in Path(f"/proc/{cluster.nodes[HUNG].pid}/stat").read_text():
                await asyncio.sleep(0.01)
            # It lies in the node's socket when the node wakes up, before anything that the node asks for itself.
            (late,) = connection.send([write])
            async with cluster.coordinator(0, 1, 2) as coordinator, asyncio.timeout(FAILOVER_S_MAX):
                done = await coordinator.failover([cluster.names[HUNG]])
        finally:
            os.kill(cluster.nodes[HUNG].pid, signal.SIGCONT)
        assert (done.promoted, done.lost) == (len(active), ())
        answer = (await late)[-1].result()
        while isinstance(answer, TemporaryFailure):
            answer = (await connection.send([write])[0])[-1].result()
        assert isinstance(answer, StatusError), "a node that was failed over has taken a write"
        assert isinstance(answer, NotMyVBucket)
        assert await _active_on(cluster) == set()
        connection.close()

    with ClusterProcesses(tmp_path, 3, vbuckets=VBUCKETS) as cluster:
        asyncio.run(story(cluster))


async def _active_on(cluster: ClusterProcesses) -> set[VBucketId]:
    port = NodePort(cluster.nodes[HUNG].address, cluster.login)
    try:
        return {vbucket for vbucket, copy in (await port.copies()).items() if copy.state == VBucketState.ACTIVE}
    finally:
        port.close()
