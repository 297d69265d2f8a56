"""How the nodes of a cluster log in to each other, and what that log-in is not good for."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.cluster.nodes import NodePort
from headwater.cluster.publisher import SECRET_BYTES, new_nodes_login
from headwater.errors import AuthenticationFailed, StatusError
from headwater.node.auth.users import SALTS_BYTES, Action, Grant, Role, Users
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.messages.session import SetClusterConfig
from headwater.protocol.sasl import Credentials
from headwater.protocol.status import Status
from support.clusters import LOGIN, VBUCKETS, in_process
from support.node_process import PASSWORD


def test_the_log_in_of_the_nodes_is_for_their_bucket_only(tmp_path: Path) -> None:
    async def story() -> None:
        async with in_process(tmp_path, 1) as nodes, nodes.coordinator() as coordinator:
            config = await coordinator.init(replicas=0)
            assert config.login is not None
            peer = await AsyncKvConnection.open(nodes.address(0), replace(LOGIN, credentials=config.login))
            with pytest.raises(StatusError) as refused:
                await peer.request(SetClusterConfig(epoch=9, revision=1, key=b"", value=b"{}"))
            peer.close()
            assert refused.value.status == Status.EACCESS
            users = nodes.running[0]._users
            assert users.may(config.login.user, Action.ADMIN, "default")
            assert not users.may(config.login.user, Action.READ, "another")

    asyncio.run(asyncio.wait_for(story(), 30))


def test_the_log_in_is_drawn_once_and_all_commands_keep_it(tmp_path: Path) -> None:
    async def story() -> None:
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

    asyncio.run(asyncio.wait_for(story(), 60))


def test_an_admin_of_the_bucket_does_not_become_a_node(tmp_path: Path) -> None:
    """It may read no documents, so it must not learn the nodes' secret, set another one, or name other nodes."""

    async def story() -> None:
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
            assert known is not None
            assert (known.version, known.nodes) == (config.version, config.nodes)
            port.close()

    asyncio.run(asyncio.wait_for(story(), 30))


def _with_bucket_admin(users: Users) -> Users:
    grants = [Grant(Role.BUCKET_ADMIN, "default")]
    return users.put(users.new_user("kim", PASSWORD, grants, salts=bytes(SALTS_BYTES)))


def test_a_node_that_has_left_lets_the_others_in_no_more_not_even_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with in_process(tmp_path, 2) as nodes:
            async with nodes.coordinator(0, 1) as coordinator:
                login = (await coordinator.init(replicas=0)).login
                assert login is not None
                assert nodes.running[1].is_node_user(login.user)
                await coordinator.remove(nodes.name(1))
            for _ in range(2):
                with pytest.raises(AuthenticationFailed):
                    await AsyncKvConnection.open(nodes.address(1), replace(LOGIN, credentials=login))
                await nodes.stop(1)
                await nodes.start(1)
            (await AsyncKvConnection.open(nodes.address(0), replace(LOGIN, credentials=login))).close()

    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_new_secret_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    async def story() -> None:
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

    asyncio.run(asyncio.wait_for(story(), 30))


def test_no_two_clusters_have_the_same(tmp_path: Path) -> None:
    """Though the password of their admins is the same, and the bucket may be a copy of the other."""

    async def drawn(folder: Path) -> str:
        async with in_process(folder, 1) as nodes, nodes.coordinator() as coordinator:
            login = (await coordinator.init(replicas=0)).login
            assert login is not None
            return login.password

    first, second = (asyncio.run(asyncio.wait_for(drawn(tmp_path / name), 30)) for name in ("one", "other"))
    assert first != second
    assert len(first) == 2 * SECRET_BYTES


def test_nodes_that_two_commands_have_made_a_cluster_of_get_one_log_in(tmp_path: Path) -> None:
    """Each command was refused by a node that had the config of the other one. The next one mends it."""

    async def story() -> None:
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

    asyncio.run(asyncio.wait_for(story(), 30))
