"""A cluster over TLS: commands, replication, takeovers and failover are what they are without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.settings import TlsSettings
from headwater.errors import HeadwaterError, TlsFailed
from headwater.protocol.messages.dcp_streams import VBucketState
from support.clusters import LOGIN, VBUCKETS, InProcessNodes
from support.machine import Authority, self_signed
from support.node_process import PASSWORD, USER

KEYS = [b"key-%d" % number for number in range(60)]
NODES = 3

Certificates = list[tuple[Path, Path]]


def one_for_all(folder: Path) -> tuple[Certificates, Path]:
    """All nodes show the same certificate, which vouches for itself."""
    certificate = self_signed(folder)
    return [certificate] * NODES, certificate[0]


def one_for_each(folder: Path) -> tuple[Certificates, Path]:
    """Every node has its own, by one authority."""
    authority = Authority(folder)
    return [authority.certify(f"node-{number}") for number in range(NODES)], authority.certificate


@asynccontextmanager
async def tls_nodes(folder: Path, certificates: Certificates, trusted: Path) -> AsyncIterator[InProcessNodes]:
    nodes = InProcessNodes(folder, login=replace(LOGIN, tls=TlsSettings(ca_file=trusted).context()))
    try:
        for certificate in certificates:
            await nodes.start_new(certificate=certificate)
        yield nodes
    finally:
        await nodes.stop_all()


async def soon(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():
            await asyncio.sleep(0.02)


def is_even(nodes: InProcessNodes) -> bool:
    """Whether all copies of each vbucket are at the same seqno."""
    buckets = [node.bucket_service("default").bucket for node in nodes.running.values()]
    return all(
        len({int(bucket.vbuckets.durable_seqnos[vb]) for bucket in buckets if bucket.vbuckets.exists(vb)}) == 1
        for vb in range(VBUCKETS)
    )


def active(nodes: InProcessNodes, number: int) -> int:
    return int((nodes.running[number].bucket_service("default").bucket.vbuckets.states == VBucketState.ACTIVE).sum())


@pytest.mark.parametrize("make", [one_for_all, one_for_each])
def test_the_whole_life_of_a_cluster(tmp_path: Path, make: Callable[[Path], tuple[Certificates, Path]]) -> None:
    certificates, trusted = make(tmp_path)

    async def story() -> None:
        async with tls_nodes(tmp_path, certificates, trusted) as nodes, nodes.coordinator(0, 1) as coordinator:
            config = await coordinator.init(replicas=1)
            assert all(node.kv_port is None and node.kv_tls_port is not None for node in config.nodes)
            await nodes.store(KEYS)
            await soon(lambda: is_even(nodes) if len(nodes.running) == 2 else True)
            await coordinator.add(nodes.address(2))
            moved = await coordinator.rebalance()
            assert moved.handed_over > 0, "takeovers go through proxies"
            assert active(nodes, 2) > 0
            await soon(lambda: is_even(nodes))
            peers = {view.peer for view in nodes.running[2].consumer_views("default")}
            assert peers <= {nodes.name(0), nodes.name(1)}
            assert peers
            await nodes.stop(2)
            failed_over = await coordinator.failover([nodes.name(2)])
            assert failed_over.promoted > 0
            assert await nodes.found(KEYS) == KEYS
            await nodes.start(2)
            await coordinator.add(nodes.address(2))
            await coordinator.rebalance()
            assert await nodes.found(KEYS) == KEYS
            await soon(lambda: is_even(nodes))
            assert (await coordinator.status()).settled

    asyncio.run(asyncio.wait_for(story(), 120))


def test_a_node_that_was_failed_over_hears_of_it_over_tls(tmp_path: Path) -> None:
    """It asks the others when it starts, and they tell it."""
    certificates, trusted = one_for_all(tmp_path)

    async def story() -> None:
        async with tls_nodes(tmp_path, certificates[:2], trusted) as nodes, nodes.coordinator(0, 1) as coordinator:
            await coordinator.init(replicas=1)
            await nodes.stop(1)
            await coordinator.failover([nodes.name(1)])
            await nodes.start(1)
            assert active(nodes, 1) == 0

    asyncio.run(asyncio.wait_for(story(), 60))


def test_without_tls_nobody_gets_in(tmp_path: Path) -> None:
    certificates, trusted = one_for_all(tmp_path)

    async def story() -> None:
        async with tls_nodes(tmp_path, certificates[:1], trusted) as nodes:
            with pytest.raises(HeadwaterError):
                await AsyncKvConnection.open(nodes.address(0), LOGIN)
            with pytest.raises(TlsFailed):
                await AsyncKvConnection.open(nodes.address(0), replace(LOGIN, tls=TlsSettings().context()))

    asyncio.run(asyncio.wait_for(story(), 60))


def test_the_commands(tmp_path: Path) -> None:
    certificates, trusted = one_for_each(tmp_path)

    async def story() -> None:
        async with tls_nodes(tmp_path, certificates[:2], trusted) as nodes:
            url = f"couchbases://{nodes.name(0)},{nodes.name(1)}/default"

            async def cluster(command: str, *arguments: str) -> str:
                words = ["cluster", command, url, *arguments, "--tls-ca", str(trusted)]
                env = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD, "COLUMNS": "200"}
                result = await asyncio.to_thread(CliRunner().invoke, main, words, env=env)
                assert result.exit_code == 0, result.output
                return result.stdout

            assert await cluster("init") == "bucket default is a cluster of 2 nodes with 1 replica\n"
            assert nodes.name(1) in await cluster("status")
            await nodes.stop(1)
            assert "4 vbuckets promoted" in await cluster("failover", nodes.name(1))
            await nodes.start(1)
            await cluster("add", nodes.name(1), "--rebalance")
            assert "missing" not in await cluster("status")

    asyncio.run(asyncio.wait_for(story(), 90))
