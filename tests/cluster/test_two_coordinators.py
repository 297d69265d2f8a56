"""Two operators at the same time, who know nothing of each other: one goes on, nothing is lost, and nodes agree."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.cluster.coordinator import Coordinator
from headwater.cluster.nodes import NodePort, with_handing_over
from headwater.errors import HeadwaterError, NotMyVBucket, Overtaken
from headwater.node.replication.proxy import Proxy
from headwater.protocol.messages.dcp_streams import StreamFlags, VBucketState
from headwater.protocol.numbers import VBucketId
from support.clusters import LOGIN, VBUCKETS, InProcessNodes, in_process, soon

KEYS = [b"key-%d" % number for number in range(60)]


@asynccontextmanager
async def two_operators(folder: Path, nodes: int) -> AsyncIterator[tuple[InProcessNodes, Coordinator, Coordinator]]:
    """A cluster whose nodes have not been rebalanced, and two who may do it."""
    async with (
        in_process(folder, nodes) as cluster,
        cluster.coordinator(0) as first,
        cluster.coordinator(nodes - 1) as second,
    ):
        await first.init(replicas=1)
        for node in range(1, nodes):
            await first.add(cluster.address(node))
        await cluster.store(KEYS)
        yield cluster, first, second


def configs(nodes: InProcessNodes) -> list[object]:
    return [node.membership("default").config for node in nodes.running.values()]


def active(nodes: InProcessNodes, vbucket: int) -> list[int]:
    return [number for number, state in nodes.copies(vbucket).items() if state == "active"]


async def is_well(nodes: InProcessNodes, coordinator: Coordinator) -> None:
    """One command is enough: nodes agree, every vbucket is active once, and everything is there."""
    await coordinator.rebalance()
    status = await coordinator.status()
    assert (status.settled, status.missing, status.disagreeing) == (True, 0, ())
    assert all(config == configs(nodes)[0] for config in configs(nodes))
    assert [len(active(nodes, vbucket)) for vbucket in range(VBUCKETS)] == [1] * VBUCKETS
    assert await nodes.found(KEYS) == KEYS


@pytest.mark.parametrize("later_s", [0.0, *(pytest.param(later_s, marks=pytest.mark.soak) for later_s in (0.05, 0.2))])
async def test_two_rebalances(tmp_path: Path, later_s: float) -> None:
    async with two_operators(tmp_path, 3) as (nodes, first, second):

        async def later() -> None:
            await asyncio.sleep(later_s)
            await second.rebalance()

        results = await asyncio.gather(first.rebalance(), later(), return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        assert all(isinstance(failure, Overtaken) for failure in failures), failures
        async with nodes.coordinator(1) as third:
            await is_well(nodes, third)


async def test_a_failover_in_the_middle_of_a_rebalance(tmp_path: Path) -> None:
    """The copies do not come, and the one who rebalances waits for them; somebody else gives the node up."""
    async with two_operators(tmp_path, 3) as (nodes, first, second):
        nodes.running[1].hold_replicas("default")
        rebalance = asyncio.create_task(first.rebalance())
        await soon(lambda: bool(nodes.running[0].membership("default").config.building))
        await second.failover([nodes.name(1)])
        with pytest.raises(Overtaken):
            await rebalance
        await nodes.stop(1)
        await is_well(nodes, second)


async def published_twice(nodes: InProcessNodes) -> bool:
    """Give the first and the last node different configs of one revision. False where one has told the other before."""
    known = nodes.running[0].membership("default").config
    ports = [NodePort(nodes.address(number), LOGIN) for number in (0, 2)]
    one, other = (replace(known, revision=known.revision + 1, coordinator=name) for name in ("one", "other"))
    try:
        await asyncio.gather(ports[0].publish(one), ports[1].publish(other))
    except Overtaken:
        return False
    else:
        for port in ports:
            with pytest.raises(Overtaken):
                await port.publish(replace(known, revision=known.revision + 1, coordinator="a third"))
        return True
    finally:
        for port in ports:
            port.close()


async def test_nodes_with_different_configs_of_one_revision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with two_operators(tmp_path, 3) as (nodes, first, second):
        await first.rebalance()
        while not await published_twice(nodes):
            pass
        assert len((await second.status()).disagreeing) > 0
        await soon(lambda: "two commands have changed the cluster at the same time" in caplog.text)
        await is_well(nodes, second)


async def test_a_takeover_of_one_that_was_overtaken(tmp_path: Path) -> None:
    """It has published that a vbucket is on its way, and is slow to begin."""
    async with two_operators(tmp_path, 3) as (nodes, first, second):
        await first.rebalance()
        publisher = await first._publisher()
        source = 0
        vbucket = next(VBucketId(vb) for vb in range(VBUCKETS) if nodes.copies(vb)[source] == "active")
        target = next(number for number, state in nodes.copies(vbucket).items() if state == "replica")
        await publisher.publish(lambda config: with_handing_over(config, {vbucket: nodes.name(target)}))
        proxy = await Proxy.open(
            nodes.address(source), nodes.address(target), source_login=LOGIN, target_login=LOGIN, name="slow"
        )
        await second.rebalance()
        with pytest.raises(NotMyVBucket):
            await proxy.add_stream(vbucket, StreamFlags.TAKEOVER)
        proxy.close()
        assert active(nodes, vbucket) == [source]
        with pytest.raises(Overtaken):
            await publisher.publish(lambda config: config)
        await is_well(nodes, second)


async def test_a_promotion_of_one_that_was_overtaken(tmp_path: Path) -> None:
    async with two_operators(tmp_path, 3) as (nodes, first, second):
        await first.rebalance()
        version = (await first._publisher()).config.version
        await second.failover([nodes.name(0)])
        port = NodePort(nodes.address(1), LOGIN)
        vbucket = next(VBucketId(vb) for vb in range(VBUCKETS) if nodes.copies(vb).get(1) != "active")
        with pytest.raises(Overtaken):
            await port.activate({vbucket: ([nodes.name(1)],)}, version=version)
        port.close()
        assert nodes.copies(vbucket).get(1) != "active"


async def test_a_vbucket_that_is_active_nowhere_is_found_and_made_active(tmp_path: Path) -> None:
    """As a takeover may leave it: neither the map nor a mark says so."""
    async with two_operators(tmp_path, 2) as (nodes, first, second):
        await first.rebalance()
        service = nodes.running[0].bucket_service("default")
        vbucket = next(vb for vb in range(VBUCKETS) if nodes.copies(vb)[0] == "active")
        service.bucket.set_vbucket_state(vbucket, VBucketState.DEAD)
        service.on_change()
        await is_well(nodes, second)


async def test_a_making_that_was_cut_short_is_finished(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        made = await coordinator.init(replicas=1)
        # As if the second node had never been told.
        await nodes.stop(1)
        for file in (tmp_path / "node-1").rglob("*"):
            if file.is_file():
                file.unlink()
        await nodes.start(1)
        again = await coordinator.init(replicas=1)
        assert again.revision > made.revision
        assert replace(again, revision=0) == replace(made, revision=0)
        assert configs(nodes) == [again, again]


async def test_a_node_on_another_data_folder_is_not_taken_for_a_member(tmp_path: Path) -> None:
    """It is empty, and the copies of what it was active for would be rolled back to nothing."""
    async with two_operators(tmp_path, 2) as (nodes, first, _):
        await first.rebalance()
        await nodes.stop(1)
        for file in (tmp_path / "node-1").rglob("*"):
            if file.is_file():
                file.unlink()
        await nodes.start(1)
        with pytest.raises(HeadwaterError, match=r"another data folder.*failover"):
            await first.rebalance(without=[nodes.name(0)])
        await first.failover([nodes.name(1)])
        await first.add(nodes.address(1))
        await is_well(nodes, first)
