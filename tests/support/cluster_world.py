"""Real nodes made a cluster, for tests of the dashboard: who has what, and what is done to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import httpx

from headwater.client.cluster_map import vbucket_of
from headwater.client.handshake import Credentials
from headwater.client.kv_connection import Login
from headwater.cluster.coordinator import Coordinator
from headwater.errors import NotMyVBucket
from headwater.node.membership import PEER_FEATURES
from headwater.protocol.messages.documents import Set
from support.node_process import PASSWORD, USER, NodeProcess

BUCKET = "default"


def make_cluster(nodes: Sequence[NodeProcess]) -> None:
    """With one replica of each vbucket."""

    async def steps(coordinator: Coordinator) -> None:
        await coordinator.init(replicas=1)
        for node in nodes[1:]:
            await coordinator.add(node.address)
        await coordinator.rebalance()

    _coordinate(nodes[0], steps)


def fail_over(left: NodeProcess, lost: str) -> None:
    async def steps(coordinator: Coordinator) -> None:
        await coordinator.failover([lost])

    _coordinate(left, steps)


def _coordinate(node: NodeProcess, steps: Callable[[Coordinator], Awaitable[None]]) -> None:
    async def run() -> None:
        login = Login(credentials=Credentials(USER, PASSWORD), bucket=BUCKET, features=PEER_FEATURES)
        coordinator = Coordinator([node.address], login)
        try:
            await steps(coordinator)
        finally:
            coordinator.close()

    asyncio.run(run())


def write(nodes: Sequence[NodeProcess], vbuckets: int, *keys: str) -> list[int]:
    """Write documents, each where its vbucket is active. Returns how many each node has taken."""
    taken = [0 for _ in nodes]
    connections = [node.connect() for node in nodes]
    try:
        for key in keys:
            request = Set(key=key.encode(), value=b"{}", vbucket=vbucket_of(key.encode(), vbuckets), collection_id=0)
            for at, connection in enumerate(connections):
                try:
                    connection.request(request)
                except NotMyVBucket:
                    continue
                taken[at] += 1
                break
    finally:
        for connection in connections:
            connection.close()
    assert sum(taken) == len(keys)
    return taken


def hold_replicas(node: NodeProcess) -> None:
    """Let the copies on this node fall behind."""
    url = f"{node.http_url}/headwater/buckets/{BUCKET}/replicas/hold"
    answer = httpx.post(url, auth=(USER, PASSWORD))
    assert answer.status_code == 200, answer.text


def keys_of(vbucket: int, vbuckets: int, count: int) -> list[str]:
    """Keys that belong to a vbucket."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        key = f"v{vbucket}-{number}"
        if vbucket_of(key.encode(), vbuckets) == vbucket:
            found.append(key)
        number += 1
    return found
