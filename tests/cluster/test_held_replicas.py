"""Replicas that are held fall behind, on connections that stay open, and catch up when they are released."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.client.cluster_map import vbucket_of
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.errors import StoreError, TemporaryFailure
from headwater.node.consumer.connection import ConsumerSettings
from headwater.node.replication import replicator
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import Get
from headwater.protocol.numbers import DEFAULT_COLLECTION, ManifestUid, VBucketId
from headwater.store.settling import settle_now
from support.clusters import LOGIN, VBUCKETS, ClusterProcesses, InProcessNodes, in_process, soon
from support.node_process import PASSWORD, USER

SHARED = [b"shared-%d" % number for number in range(40)]
LATER = [b"later-%d" % number for number in range(40)]
WITHIN_S = 20.0


async def replication(nodes: InProcessNodes, number: int) -> dict[str, str]:
    connection = await AsyncKvConnection.open(nodes.address(number), LOGIN)
    try:
        return await connection.statistics("replication")
    finally:
        connection.close()


@pytest.mark.parametrize("noop_interval_s", [20, 1], ids=["as it is", "with noops unanswered for too long"])
async def test_they_wait_and_catch_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noop_interval_s: int) -> None:
    monkeypatch.setattr(
        replicator,
        "ConsumerSettings",
        lambda consumer_name: ConsumerSettings(consumer_name=consumer_name, noop_interval_s=noop_interval_s),
    )
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.store(SHARED)
        await soon(nodes.is_even)
        assert (await replication(nodes, 1))["held"] == "false"
        before = nodes.running[0].bucket_service("default").producer_connections()
        held = nodes.durable_seqnos(1)

        assert nodes.running[1].hold_replicas("default") == VBUCKETS // 2
        await nodes.store(LATER)
        # Longer than a consumer may leave a noop unanswered, and a producer may be silent.
        await asyncio.sleep(0.3 if noop_interval_s > 1 else 4.5)
        told = await replication(nodes, 1)
        assert told["held"] == "true"
        assert told[f"{nodes.name(0)}:connected"] == "true"
        assert int(told[f"{nodes.name(0)}:held_bytes"]) > 0
        replicas = [vbucket for vbucket in range(VBUCKETS) if nodes.copies(vbucket)[1] == "replica"]
        assert [nodes.durable_seqnos(1)[vbucket] for vbucket in replicas] == [held[vbucket] for vbucket in replicas]
        assert nodes.running[0].bucket_service("default").producer_connections() == before, "the connection stays"

        assert nodes.running[1].release_replicas("default") == VBUCKETS // 2
        await soon(nodes.is_even)
        assert nodes.running[0].bucket_service("default").producer_connections() == before
        assert int((await replication(nodes, 1))[f"{nodes.name(0)}:held_bytes"]) == 0


async def test_a_failover_loses_what_was_held(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.store(SHARED)
        await soon(nodes.is_even)
        nodes.running[1].hold_replicas("default")
        await nodes.store(LATER)
        there = [key for key in LATER if nodes.copies(vbucket_of(key, VBUCKETS))[1] == "active"]
        await asyncio.sleep(0.3)
        await nodes.stop(0)
        await coordinator.failover([nodes.name(0)])
        nodes.running[1].release_replicas("default")
        assert await nodes.found(SHARED) == SHARED
        assert 0 < len(there) < len(LATER)
        assert await nodes.found(LATER) == there


async def test_one_that_starts_again_holds_nothing(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        nodes.running[1].hold_replicas("default")
        await nodes.store(SHARED)
        await nodes.stop(1)
        await nodes.start(1)
        await soon(nodes.is_even)


async def test_a_connection_that_is_made_meanwhile_is_held_too(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.store(SHARED)
        await soon(nodes.is_even)
        held = nodes.durable_seqnos(1)
        nodes.running[1].hold_replicas("default")
        await nodes.stop(0)
        await nodes.start(0)
        async with asyncio.timeout(WITHIN_S):
            while (await replication(nodes, 1))[f"{nodes.name(0)}:connected"] != "true":
                await asyncio.sleep(0.02)
        await nodes.store(LATER)
        await asyncio.sleep(0.3)
        replicas = [vbucket for vbucket in range(VBUCKETS) if nodes.copies(vbucket)[1] == "replica"]
        assert [nodes.durable_seqnos(1)[vbucket] for vbucket in replicas] == [held[vbucket] for vbucket in replicas]
        nodes.running[1].release_replicas("default")
        await soon(nodes.is_even)


def test_the_commands(tmp_path: Path) -> None:
    def drill(command: str) -> dict[str, object]:
        url = f"couchbase://{cluster.names[1]}/default"
        login = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
        done = CliRunner().invoke(main, ["drill", command, url, "--json"], env=login)
        assert done.exit_code == 0, done.output
        told: dict[str, object] = json.loads(done.output)
        return told

    with ClusterProcesses(tmp_path, 2, vbuckets=8) as cluster:
        cluster.form()
        assert drill("hold-replicas") == {"held": True, "replicas": 4}
        assert drill("release-replicas") == {"held": False, "replicas": 4}
        assert "'admin' holds 4 replicas of bucket 'default'" in cluster.nodes[1].log()


# --- damage on one node of two: a replica is fetched again by itself, and a replica takes the place of an active copy


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


# --- collections in a cluster: a change made on any node is in force on all of them ---------------------------------


def names(nodes: InProcessNodes, number: int) -> list[str]:
    manifest = nodes.bucket(number).manifest
    return sorted(collection.name for _, collection in manifest.collections())


async def create(nodes: InProcessNodes, number: int, name: str) -> Manifest:
    def change(manifest: Manifest) -> Manifest:
        return manifest.with_collection("_default", name)

    return await nodes.running[number].change_manifest("default", change)


@pytest.mark.parametrize("made_on", [0, 1, 2])
async def test_a_collection_reaches_every_node(tmp_path: Path, made_on: int) -> None:
    async with in_process(tmp_path, 3) as nodes, nodes.coordinator(0, 1, 2) as coordinator:
        await coordinator.init(replicas=1)
        await create(nodes, made_on, "orders")
        # Whoever made it can use it on any node at once.
        assert [names(nodes, number) for number in range(3)] == [["_default", "orders"]] * 3


async def test_changes_on_all_nodes_at_one_time_are_all_made(tmp_path: Path) -> None:
    async with in_process(tmp_path, 3) as nodes, nodes.coordinator(0, 1, 2) as coordinator:
        await coordinator.init(replicas=1)
        made = await asyncio.gather(*(create(nodes, number, f"made-on-{number}") for number in range(3)))
        assert sorted(manifest.uid for manifest in made) == [1, 2, 3]
        async with asyncio.timeout(10):
            while len({tuple(names(nodes, number)) for number in range(3)}) > 1:
                await asyncio.sleep(0.05)
        assert names(nodes, 0) == ["_default", "made-on-0", "made-on-1", "made-on-2"]
        ids = [collection.id for _, collection in made[0].collections()]
        assert len(ids) == len(set(ids))


async def test_a_node_that_was_away_gets_them(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.stop(1)
        await create(nodes, 0, "orders")
        await nodes.start(1)
        assert names(nodes, 1) == ["_default", "orders"]


async def test_a_node_that_joins_gets_them_and_gives_up_its_own(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator() as coordinator:
        await create(nodes, 0, "orders")
        for name in ("theirs", "others"):
            await create(nodes, 1, name)
        await coordinator.init(replicas=1)
        await coordinator.add(nodes.address(1))
        await coordinator.rebalance()
        async with asyncio.timeout(10):
            while names(nodes, 1) != ["_default", "orders"]:
                await asyncio.sleep(0.05)
        assert names(nodes, 0) == ["_default", "orders"]


async def test_without_the_first_node_nothing_is_changed(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.stop(0)
        with pytest.raises(StoreError, match=r"which manages the collections, can't be reached.*fail it over"):
            await create(nodes, 1, "orders")
        assert nodes.bucket(1).manifest.uid == ManifestUid(0)
        await coordinator.failover([nodes.name(0)])
        await create(nodes, 1, "orders")
        assert names(nodes, 1) == ["_default", "orders"]
