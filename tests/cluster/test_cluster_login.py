"""How the nodes of a cluster log in to each other, and what that log-in is not good for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from nodes_in_process import LOGIN, in_process

from headwater.errors import StatusError
from headwater.node.auth.users import Action
from headwater.node.replication.peer_connection import PeerConnection
from headwater.protocol.messages.session import SetClusterConfig
from headwater.protocol.status import Status


def test_the_log_in_of_the_nodes_is_for_their_bucket_only(tmp_path: Path) -> None:
    async def story() -> None:
        async with in_process(tmp_path, 1) as nodes, nodes.coordinator() as coordinator:
            config = await coordinator.init(replicas=0)
            assert config.login is not None
            peer = await PeerConnection.open(nodes.address(0), replace(LOGIN, credentials=config.login))
            with pytest.raises(StatusError) as refused:
                await peer.request(SetClusterConfig(epoch=9, revision=1, key=b"", value=b"{}"))
            peer.close()
            assert refused.value.status == Status.EACCESS
            users = nodes.running[0]._users
            assert users.may(config.login.user, Action.ADMIN, "default")
            assert not users.may(config.login.user, Action.READ, "another")

    asyncio.run(asyncio.wait_for(story(), 30))
