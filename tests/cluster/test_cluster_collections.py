"""Collections in a cluster: a change made on any node is in force on all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headwater.errors import StoreError
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import ManifestUid
from support.clusters import InProcessNodes, in_process


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
