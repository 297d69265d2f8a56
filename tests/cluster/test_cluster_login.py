"""How the nodes of a cluster log in to each other, and what that log-in is not good for."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.settings import TlsSettings
from headwater.cluster.nodes import SECRET_BYTES, NodePort, new_nodes_login
from headwater.errors import AuthenticationFailed, HeadwaterError, StatusError, TlsFailed
from headwater.node.auth.users import SALTS_BYTES, Action, Grant, Role, Users
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.session import SetClusterConfig
from headwater.protocol.sasl import Credentials
from headwater.protocol.status import Status
from support.clusters import LOGIN, VBUCKETS, InProcessNodes, in_process, soon
from support.machine import Authority, self_signed
from support.node_process import PASSWORD, USER


async def test_the_log_in_of_the_nodes_is_for_their_bucket_only(tmp_path: Path) -> None:
    async with in_process(tmp_path, 1) as nodes, nodes.coordinator() as coordinator:
        config = await coordinator.init(replicas=0)
        assert config.login is not None
        peer = await AsyncKvConnection.open(nodes.address(0), replace(LOGIN, credentials=config.login))
        with pytest.raises(StatusError) as refused:
            await peer.request(SetClusterConfig(epoch=9, revision=1, key=b"", value=b"{}"))
        peer.close()
        assert refused.value.status == Status.EACCESS
        users = nodes.running[0].users
        assert users.may(config.login.user, Action.ADMIN, "default")
        assert not users.may(config.login.user, Action.READ, "another")


async def test_the_log_in_is_drawn_once_and_all_commands_keep_it(tmp_path: Path) -> None:
    async with in_process(tmp_path, 3) as nodes:
        async with nodes.coordinator(0, 1) as coordinator:
            first = (await coordinator.init(replicas=1)).login
        assert first is not None
        # Every command is another coordinator, which knows nothing of the ones before.
        async with nodes.coordinator(1) as coordinator:
            assert (await coordinator.add(nodes.address(2))).login == first
        async with nodes.coordinator(0) as coordinator:
            await coordinator.rebalance()
        await nodes.stop(0)
        async with nodes.coordinator(1) as coordinator:
            await coordinator.failover([nodes.name(0)])
        for number in (1, 2):
            service = nodes.running[number].bucket_service("default")
            assert service.nodes_login == first
            assert first.password.encode() not in nodes.running[number].cluster_config("default")


async def test_an_admin_of_the_bucket_does_not_become_a_node(tmp_path: Path) -> None:
    """It may read no documents, so it must not learn the nodes' secret, set another one, or name other nodes."""
    async with in_process(tmp_path, 1) as nodes, nodes.coordinator() as coordinator:
        config = await coordinator.init(replicas=0)
        await nodes.running[0].change_users(_with_bucket_admin)
        port = NodePort(nodes.address(0), replace(LOGIN, credentials=Credentials("kim", PASSWORD)))
        own = replace(config, revision=config.revision + 1, login=new_nodes_login("default", os.urandom))
        foreign = replace(own, login=config.login, nodes=(*config.nodes, NodeAddress(host="192.0.2.1", kv_port=1)))
        for attempt in (port.publish(own), port.publish(foreign), port.nodes_login()):
            with pytest.raises(StatusError) as refused:
                await attempt
            assert refused.value.status == Status.EACCESS
        known = await port.config()
        assert (known.version, known.nodes) == (config.version, config.nodes)
        port.close()


def _with_bucket_admin(users: Users) -> Users:
    grants = [Grant(Role.BUCKET_ADMIN, "default")]
    return users.put(users.new_user("kim", PASSWORD, grants, salts=bytes(SALTS_BYTES)))


async def test_a_node_that_has_left_lets_the_others_in_no_more_not_even_after_a_restart(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes:
        async with nodes.coordinator(0, 1) as coordinator:
            login = (await coordinator.init(replicas=0)).login
            assert nodes.running[1].is_node_user(login.user)
            await coordinator.remove(nodes.name(1))
        for _ in range(2):
            with pytest.raises(AuthenticationFailed):
                await AsyncKvConnection.open(nodes.address(1), replace(LOGIN, credentials=login))
            await nodes.stop(1)
            await nodes.start(1)
        (await AsyncKvConnection.open(nodes.address(0), replace(LOGIN, credentials=login))).close()


async def test_a_new_secret_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        old = (await coordinator.init(replicas=1)).login
        new = (await coordinator.renew_login()).login
        assert old is not None
        assert new not in (None, old)
        for number in range(2):
            assert nodes.running[number].bucket_service("default").nodes_login == new
            with pytest.raises(AuthenticationFailed):
                await AsyncKvConnection.open(nodes.address(number), replace(LOGIN, credentials=old))
        await nodes.store([b"key-%d" % number for number in range(20)])
        while any(node.behind for node in (await coordinator.status()).nodes):
            await asyncio.sleep(0.05)


def test_no_two_clusters_have_the_same(tmp_path: Path) -> None:
    """Though the password of their admins is the same, and the bucket may be a copy of the other."""

    async def drawn(folder: Path) -> str:
        async with in_process(folder, 1) as nodes, nodes.coordinator() as coordinator:
            login = (await coordinator.init(replicas=0)).login
            return login.password

    first, second = (asyncio.run(asyncio.wait_for(drawn(tmp_path / name), 30)) for name in ("one", "other"))
    assert first != second
    assert len(first) == 2 * SECRET_BYTES


async def test_nodes_that_two_commands_have_made_a_cluster_of_get_one_log_in(tmp_path: Path) -> None:
    """Each command was refused by a node that had the config of the other one. The next one mends it."""
    async with in_process(tmp_path, 2) as nodes, nodes.coordinator(0, 1) as coordinator:
        ports = [NodePort(nodes.address(number), LOGIN) for number in range(2)]
        facts = [await port.facts() for port in ports]
        config = PublishedConfig(
            revision=max(fact.revision for fact in facts) + 1,
            bucket="default",
            uuid=facts[0].bucket_uuid,
            nodes=tuple(fact.address for fact in facts),
            rows=((0,),) * VBUCKETS,
        )
        for port in ports:
            login = new_nodes_login("default", os.urandom)
            await port.publish(replace(config, coordinator=str(port.address), login=login))
        made = await coordinator.init(replicas=0)
        for port in ports:
            assert await port.config() == replace(made, login=None)
            assert await port.nodes_login() == made.login
            port.close()


# --- A cluster over TLS: commands, replication, takeovers and failover are what they are without it -------------------

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


def active(nodes: InProcessNodes, number: int) -> int:
    return int((nodes.bucket(number).vbuckets.states == VBucketState.ACTIVE).sum())


@pytest.mark.parametrize("make", [pytest.param(one_for_all, marks=pytest.mark.soak), one_for_each])
async def test_the_whole_life_of_a_cluster(tmp_path: Path, make: Callable[[Path], tuple[Certificates, Path]]) -> None:
    certificates, trusted = make(tmp_path)
    async with tls_nodes(tmp_path, certificates, trusted) as nodes, nodes.coordinator(0, 1) as coordinator:
        config = await coordinator.init(replicas=1)
        assert all(node.kv_port is None and node.kv_tls_port is not None for node in config.nodes)
        await nodes.store(KEYS)
        await soon(lambda: nodes.is_even() if len(nodes.running) == 2 else True)
        await coordinator.add(nodes.address(2))
        moved = await coordinator.rebalance()
        assert moved.handed_over > 0, "takeovers go through proxies"
        assert active(nodes, 2) > 0
        await soon(lambda: nodes.is_even())
        peers = {view.peer for view in nodes.running[2].bucket_service("default").consumer_views(now_s=0.0)}
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
        await soon(lambda: nodes.is_even())
        assert (await coordinator.status()).settled


async def test_a_node_that_was_failed_over_hears_of_it_over_tls(tmp_path: Path) -> None:
    """It asks the others when it starts, and they tell it."""
    certificates, trusted = one_for_all(tmp_path)
    async with tls_nodes(tmp_path, certificates[:2], trusted) as nodes, nodes.coordinator(0, 1) as coordinator:
        await coordinator.init(replicas=1)
        await nodes.stop(1)
        await coordinator.failover([nodes.name(1)])
        await nodes.start(1)
        assert active(nodes, 1) == 0


async def test_without_tls_nobody_gets_in(tmp_path: Path) -> None:
    certificates, trusted = one_for_all(tmp_path)
    async with tls_nodes(tmp_path, certificates[:1], trusted) as nodes:
        with pytest.raises(HeadwaterError):
            await AsyncKvConnection.open(nodes.address(0), LOGIN)
        with pytest.raises(TlsFailed):
            await AsyncKvConnection.open(nodes.address(0), replace(LOGIN, tls=TlsSettings().context()))


async def test_the_commands(tmp_path: Path) -> None:
    certificates, trusted = one_for_each(tmp_path)
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
