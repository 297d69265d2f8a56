"""A failover while the node that is given up still lives, or a vbucket is on its way: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.client.cluster_map import vbucket_of
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.cluster import failover
from headwater.cluster.planning import Row
from headwater.cluster.publisher import with_handing_over
from headwater.errors import HeadwaterError
from headwater.protocol.features import Feature
from headwater.protocol.frames import DurabilityLevel, durability
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from support.clusters import LOGIN, VBUCKETS, in_process

DURABLE_LOGIN = replace(LOGIN, features=(*LOGIN.features, Feature.ALT_REQUEST, Feature.SYNC_REPLICATION))
KEYS = [b"key-%d" % number for number in range(60)]
LATE_KEYS = [b"late-%d" % number for number in range(60)]


async def is_written_durably(connection: AsyncKvConnection, key: bytes) -> bool:
    request = Set(
        vbucket=VBucketId(vbucket_of(key, VBUCKETS)),
        collection_id=DEFAULT_COLLECTION,
        key=key,
        value=b'{"a": 1}',
        frame_infos=(durability(DurabilityLevel.MAJORITY, timeout_ms=1500),),
    )
    try:
        await connection.request(request)
    except HeadwaterError:
        return False
    return True


def test_a_majority_that_comes_about_during_the_failover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies are compared, one is chosen, and only then the other one gets, and acknowledges, a write."""
    promote = failover._promote
    acknowledged: list[bytes] = []

    async def story() -> None:
        async with in_process(tmp_path, 3) as nodes, nodes.coordinator(0, 1, 2) as coordinator:
            await coordinator.init(replicas=2)
            numbers = {nodes.name(number): number for number in range(3)}
            key = next(key for key in KEYS if nodes.copies(vbucket_of(key, VBUCKETS))[0] == "active")
            late = next(key for key in LATE_KEYS if nodes.copies(vbucket_of(key, VBUCKETS))[0] == "active")
            connection = await AsyncKvConnection.open(nodes.address(0), DURABLE_LOGIN)
            assert await is_written_durably(connection, key), "the copies are there"

            async def write_then_promote(port_of: Any, rows: Mapping[VBucketId, Row], *rest: Any) -> int:
                chosen = rows[VBucketId(vbucket_of(late, VBUCKETS))][0]
                assert chosen is not None
                nodes.running[numbers[chosen]].hold_replicas("default")
                if await is_written_durably(connection, late):
                    acknowledged.append(late)
                promoted = await promote(port_of, rows, *rest)
                nodes.running[numbers[chosen]].release_replicas("default")
                return promoted

            monkeypatch.setattr(failover, "_promote", write_then_promote)
            await coordinator.failover([nodes.name(0)])
            connection.close()
            await nodes.stop(0)
            assert await nodes.found([key, *acknowledged]) == [key, *acknowledged]

    asyncio.run(asyncio.wait_for(story(), 60))


def test_a_vbucket_on_its_way_stays_where_it_is_active(tmp_path: Path) -> None:
    """Another node is lost meanwhile. The copy that was to take over has as much, but that one goes on writing."""

    async def story() -> None:
        async with in_process(tmp_path, 3) as nodes, nodes.coordinator(0, 1, 2) as coordinator:
            await coordinator.init(replicas=2)
            await nodes.store(KEYS)
            publisher = await coordinator._publisher()
            vbucket = next(VBucketId(vb) for vb in range(VBUCKETS) if nodes.copies(vb)[0] == "active")
            await publisher.publish(lambda config: with_handing_over(config, {vbucket: nodes.name(1)}))
            await nodes.stop(2)
            await coordinator.failover([nodes.name(2)])
            assert nodes.copies(vbucket)[0] == "active"
            assert await nodes.found(KEYS) == KEYS

    asyncio.run(asyncio.wait_for(story(), 60))
