"""Asking other nodes for statistics: over one connection as long as it lasts, and never waiting for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headwater.client.kv_connection import Login
from headwater.errors import ConnectionFailed, HostUnreachable, NoAnswer
from headwater.node.membership import PEER_FEATURES
from headwater.node.node import Node
from headwater.node.node_folder import NodeEnvironment
from headwater.node.options import NodeOptions
from headwater.node.replication import peers as peer_statistics
from headwater.node.replication.peers import PeerStatistics
from headwater.node.service import BucketService
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.sasl import Credentials
from support.store_harness import new_bucket

GROUP = "headwater-vbuckets"


def asking(*ports: int) -> PeerStatistics:
    """This node is the first of the cluster, and never asked."""
    config = PublishedConfig(
        revision=1,
        bucket="default",
        uuid="0",
        nodes=tuple(NodeAddress(host="127.0.0.1", kv_port=port) for port in (9, *ports)),
        rows=((0,),),
    )
    login = Login(credentials=Credentials("ann", "pencil"), bucket="default", features=PEER_FEATURES)
    service = BucketService(bucket=new_bucket(), config=config, this_node=0)
    return PeerStatistics(service, login=lambda _: login)


def name(port: int) -> str:
    return f"127.0.0.1:{port}"


async def started(folder: Path, port: int = 0) -> tuple[Node, int]:
    options = NodeOptions(data=folder, port=port, http_port=0, user="ann", password="pencil", vbuckets=4)
    # Without HTTP there is no dashboard, whose numbers the nodes ask each other for.
    node = Node(options, NodeEnvironment(serves_http=False))
    url = (await node.start()).url
    return node, int(url.rpartition(":")[2])


async def test_a_node_is_asked_over_one_connection_and_over_another_when_that_broke(tmp_path: Path) -> None:
    node, port = await started(tmp_path)
    node.bucket_service("default").statistics["headwater-vbuckets"] = lambda: (("states", "1,1,1,1"),)
    peers = asking(port)
    assert peers.names() == [name(port)]
    for _ in range(3):
        assert await peers.ask(name(port), GROUP) == {"states": "1,1,1,1"}
    assert len(node._listener.connections) == 1
    await node.stop()
    with pytest.raises(ConnectionFailed):
        await peers.ask(name(port), GROUP)
    node, _ = await started(tmp_path, port)
    assert await peers.ask(name(port), GROUP) == {}
    peers.stop()
    with pytest.raises(ConnectionFailed):
        await peers.ask(name(port), GROUP)
    await node.stop()


async def test_where_nobody_listens_and_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_statistics, "ANSWER_S_MAX", 0.2)
    ended = asyncio.Event()

    async def listen_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(listen_only, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    peers = asking(port, 1)
    with pytest.raises(NoAnswer):
        await peers.ask(name(port), GROUP)
    await ended.wait()
    with pytest.raises(HostUnreachable):
        await peers.ask(name(1), GROUP)
    with pytest.raises(ConnectionFailed, match="not a node"):
        await peers.ask("127.0.0.1:2", GROUP)
    server.close()
    await server.wait_closed()
