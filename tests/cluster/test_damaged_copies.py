"""Damage on one node of two: a replica is fetched again by itself, and a replica takes the place of an active copy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headwater.client.cluster_map import vbucket_of
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.errors import TemporaryFailure
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Get
from headwater.protocol.numbers import DEFAULT_COLLECTION, VBucketId
from headwater.store.settling import settle_now
from support.clusters import LOGIN, VBUCKETS, InProcessNodes, in_process, soon

KEYS = [b"document-%03d" % number for number in range(120)]


def are_alike(nodes: InProcessNodes) -> bool:
    """Whether both nodes hold the same changes of every vbucket, and none is stopped."""
    buckets = [nodes.bucket(number) for number in nodes.running]
    if any(bucket.vbuckets.damage for bucket in buckets):
        return False
    runs = [[b"".join(map(bytes, bucket.runs(vbucket))) for vbucket in range(VBUCKETS)] for bucket in buckets]
    return len(buckets) == 2 and runs[0] == runs[1] and all(runs[0])


async def settle(nodes: InProcessNodes, number: int) -> None:
    done = asyncio.Event()

    def settle_all() -> None:
        settle_now(nodes.bucket(number))
        done.set()

    nodes.running[number].bucket_service("default").when_at_rest(settle_all)
    await done.wait()


def damage(data: Path, key: bytes) -> None:
    """Flip a bit of a document on the disk, in the block and wherever an older page still has it."""
    path = data / "buckets" / "default" / "data.mdb"
    stored = bytearray(path.read_bytes())
    assert key in stored
    at = stored.find(key)
    while at >= 0:
        stored[at] ^= 0x01
        at = stored.find(key, at + 1)
    path.write_bytes(stored)


async def damaged_by_restart(nodes: InProcessNodes, number: int, key: bytes, folder: Path) -> None:
    await settle(nodes, number)
    await nodes.stop(number)
    damage(folder / f"node-{number}", key)
    await nodes.start(number)


def a_key(nodes: InProcessNodes, number: int, state: VBucketState) -> bytes:
    """A document whose vbucket has this state on a node."""
    return next(key for key in KEYS if nodes.bucket(number).vbuckets.state(vbucket_of(key, VBUCKETS)) is state)


async def test_a_damaged_replica_is_fetched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with in_process(tmp_path, 2) as nodes:
        async with nodes.coordinator(0, 1) as coordinator:
            await coordinator.init(replicas=1)
        await nodes.store(KEYS)
        await soon(lambda: are_alike(nodes))
        key = a_key(nodes, 1, VBucketState.REPLICA)
        await damaged_by_restart(nodes, 1, key, tmp_path)
        await soon(lambda: are_alike(nodes))
        assert await nodes.found(KEYS) == KEYS
        # While it runs: a read finds it, the replicator sees it.
        await settle(nodes, 1)
        damage(tmp_path / "node-1", key)
        vbucket = VBucketId(vbucket_of(key, VBUCKETS))
        with pytest.raises(Exception, match=f"vbucket {vbucket}"):
            list(nodes.bucket(1).runs(vbucket))
        assert list(nodes.bucket(1).vbuckets.damage) == [vbucket]
        await soon(lambda: are_alike(nodes))
        assert nodes.bucket(1).vbuckets.state(vbucket) is VBucketState.REPLICA

    messages = [record.getMessage() for record in caplog.records]
    assert sum("was damaged and is fetched from" in message for message in messages) == 2
    assert sum("the vbucket is stopped, the others go on" in message for message in messages) == 2


async def test_a_replica_takes_the_place_of_a_damaged_active_copy(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes:
        async with nodes.coordinator(0, 1) as coordinator:
            await coordinator.init(replicas=1)
        await nodes.store(KEYS)
        await soon(lambda: are_alike(nodes))
        key = a_key(nodes, 0, VBucketState.ACTIVE)
        await damaged_by_restart(nodes, 0, key, tmp_path)
        vbucket = VBucketId(vbucket_of(key, VBUCKETS))
        connection = await AsyncKvConnection.open(nodes.address(0), LOGIN)
        with pytest.raises(TemporaryFailure, match=f"vbucket {vbucket}, .* is not what was written"):
            await connection.request(Get(vbucket=vbucket, collection_id=DEFAULT_COLLECTION, key=key))
        connection.close()
        others = [other for other in KEYS if vbucket_of(other, VBUCKETS) != vbucket]
        assert await nodes.found(KEYS) == others
        # The damaged copy is not taken for one: nothing is lost with the node.
        async with nodes.coordinator(1) as coordinator:
            assert not (await coordinator.failover([nodes.name(0)])).lost
            assert await nodes.found(KEYS) == KEYS
            await coordinator.add(nodes.address(0))
            await coordinator.rebalance()
        assert await nodes.found(KEYS) == KEYS
        await soon(lambda: are_alike(nodes))


async def test_a_forced_failover_begins_a_damaged_last_copy_again(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(1) as coordinator:
        async with nodes.coordinator(0, 1) as both:
            await both.init(replicas=1)
        await nodes.store(KEYS)
        await soon(lambda: are_alike(nodes))
        key = a_key(nodes, 1, VBucketState.REPLICA)
        vbucket = vbucket_of(key, VBUCKETS)
        await nodes.stop(0)
        await damaged_by_restart(nodes, 1, key, tmp_path)
        assert list(nodes.bucket(1).vbuckets.damage) == [vbucket]
        done = await coordinator.failover([nodes.name(0)], force=True)
        assert done.lost == (vbucket,)
        assert not nodes.bucket(1).vbuckets.damage
        assert await nodes.found(KEYS) == [other for other in KEYS if vbucket_of(other, VBUCKETS) != vbucket]
        await nodes.store(KEYS)
        assert await nodes.found(KEYS) == KEYS
