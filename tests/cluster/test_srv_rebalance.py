"""DNS is for the way in: which nodes there are after that, the cluster map says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import headwater
from headwater.client.changes import Mutation
from headwater.client.reading import Changes
from support.clusters import VBUCKETS, in_process
from support.machine import DnsServer
from support.node_process import PASSWORD, USER

NAME = "cb.example.com"
WAIT_S_MAX = 60.0


def test_a_read_follows_a_rebalance_to_nodes_that_dns_does_not_list(tmp_path: Path) -> None:
    with DnsServer() as server:
        asyncio.run(asyncio.wait_for(_rebalance(tmp_path, server), WAIT_S_MAX))


async def _rebalance(folder: Path, server: DnsServer) -> None:
    async with in_process(folder, 2) as nodes, nodes.coordinator(0) as coordinator:
        server.records[f"_couchbase._tcp.{NAME}"] = [(0, 0, nodes.address(0).port, "localhost.")]
        await coordinator.init(replicas=0)
        await nodes.store([b"before"])
        url = f"couchbase://{NAME}/default?{server.options}"
        async with headwater.connect(url, user=USER, password=PASSWORD) as client:
            read = client.changes(reconnect_delay_s_min=0.01, reconnect_delay_s_max=0.2, poll_interval_s=0.5)
            seen = await _until(read, {b"before"})
            server.records.clear()
            asked = len(server.questions)
            await coordinator.add(nodes.address(1))
            await coordinator.rebalance()
            assert "active" in {nodes.copies(vbucket).get(1) for vbucket in range(VBUCKETS)}
            keys = {f"after-{number}".encode() for number in range(40)}
            await nodes.store(sorted(keys))
            seen |= await _until(read, keys)
            assert seen == {b"before", *keys}
            assert len(server.questions) == asked


async def _until(read: Changes, wanted: set[bytes]) -> set[bytes]:
    """The keys that are read until all that are wanted are among them."""
    seen: set[bytes] = set()
    while not wanted <= seen:
        change = await anext(read)
        if isinstance(change, Mutation):
            seen.add(change.key_bytes)
    return seen
