"""A membership between opening and starting: the node listens already, and does not know yet by which address."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from headwater.client.kv_connection import Login
from headwater.node.auth.accounts import Accounts, UserSharing
from headwater.node.commit_loop import CommitLoop
from headwater.node.membership import ClusterMembership, MemberSettings
from headwater.node.replication.peers import Peers
from headwater.node.service import BucketService
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.status import RequestRefused, Status
from headwater.sim.network import SimulatedDisk, SimulatedFolder
from headwater.store.vbuckets import Retention
from support.kv_harness import users
from support.store_harness import new_bucket

NODES = tuple(NodeAddress(host="127.0.0.1", kv_port=port) for port in (1, 2, 3))
CONFIG = PublishedConfig(revision=5, bucket="default", uuid="0" * 32, nodes=NODES[:1], rows=((0,),) * 4, settled=True)


def user_sharing() -> UserSharing:
    accounts = Accounts(SimulatedFolder(SimulatedDisk(Random(0), users())), random_bytes=bytes)
    accounts.load(None, None)
    return UserSharing(accounts, random_bytes=bytes)


def membership() -> tuple[ClusterMembership, BucketService]:
    service = BucketService(bucket=new_bucket())
    loop = CommitLoop(
        service.bucket, retention=Retention(), expiry_every_s=60, compact_every_s=60, on_durable=lambda: None,
        on_void=lambda commits: None, on_failed=lambda: None,
    )  # fmt: skip
    settings = MemberSettings(
        login=lambda bucket, credentials: Login(credentials=credentials, bucket=bucket), random_bytes=bytes,
        now_s=lambda: 0.0, on_config=lambda: None, on_login=lambda bucket, login: None, users=user_sharing(),
    )  # fmt: skip
    return ClusterMembership(service, loop, settings), service


async def test_a_config_that_comes_before_the_node_knows_its_address_is_refused_for_now() -> None:
    """Otherwise it would be a config that leaves this node out, and all that it has would be dead."""
    member, service = membership()
    with pytest.raises(RequestRefused) as refused:
        member.adopt(CONFIG)
    assert refused.value.status == Status.ETMPFAIL
    assert member.config is None
    member.on_void()
    await member.start(NODES[0])
    assert member.adopt(CONFIG)
    assert {service.bucket.vbuckets.state(vbucket) for vbucket in range(4)} == {VBucketState.ACTIVE}
    assert member.adopt(CONFIG)
    [formed] = service.history.events
    assert formed.sentence() == "the cluster was formed of 1 node: 127.0.0.1:1"
    await member.stop()


async def test_nodes_may_leave_while_the_others_are_asked() -> None:
    wide = PublishedConfig(revision=5, bucket="default", uuid="0", nodes=NODES, rows=((0,),) * 4)
    service = BucketService(bucket=new_bucket(), config=wide, this_node=0)
    login = Login(credentials=None, bucket="default")
    peers = Peers(service, login=lambda config: login, adopt=lambda config: True, users=user_sharing())
    asking = asyncio.create_task(peers.exchange())
    asyncio.get_running_loop().call_soon(setattr, service, "config", CONFIG)
    assert await asking == 0
