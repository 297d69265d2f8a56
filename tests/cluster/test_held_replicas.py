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
from headwater.node.consumer.connection import ConsumerSettings
from headwater.node.replication import replicator
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
        there = [key for key in LATER if await _is_on(nodes, key, 1)]
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


async def _is_on(nodes: InProcessNodes, key: bytes, number: int) -> bool:
    return nodes.copies(vbucket_of(key, VBUCKETS))[number] == "active"
