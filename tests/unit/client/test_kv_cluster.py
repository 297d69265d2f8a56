"""A cluster as a client sees it, by both ways to bootstrap."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from handshake_peer import PASSWORD, USER, Peer
from peer_server import answering, answering_http, down, http_answer, serving

from headwater.client.bootstrap import KvCluster
from headwater.client.settings import ClientSettings
from headwater.errors import HostUnreachable, UnexpectedMessage
from headwater.protocol.messages.session import GetClusterConfig, Noop
from node_process import PASSWORD as NODE_PASSWORD
from node_process import USER as NODE_USER
from node_process import StartNode

TERSE = "/pools/default/b/travel"


def settings(where: str, **options: Any) -> ClientSettings:
    return ClientSettings.make(f"couchbase://{where}", **{"user": USER, "password": PASSWORD, **options})


def config(*ports: int) -> bytes:
    nodes = [{"services": {"kv": port}, "hostname": "127.0.0.1"} for port in ports]
    servers = [f"127.0.0.1:{port}" for port in ports]
    rows = [[at] for at in range(len(ports))]
    server_map = {"serverList": servers, "vBucketMap": rows}
    return json.dumps({"rev": 1, "name": "travel", "nodesExt": nodes, "vBucketServerMap": server_map}).encode()


def test_a_real_node_by_both_ways(start_node: StartNode) -> None:
    node = start_node("--bucket", "travel", "--vbuckets", "4")
    login = {"user": NODE_USER, "password": NODE_PASSWORD}
    http_host = node.http_url.partition("://")[2]
    for where in (f"{node.address}/travel", f"{http_host}/travel?bootstrap=http"):
        cluster = KvCluster(settings(where, **login))
        with cluster.connect() as connection:
            assert connection.address == node.address
            assert cluster.map_of(connection) == cluster.read_map()
        cluster.open(node.address).close()


def test_over_http_any_node_of_the_map_will_do() -> None:
    with serving(answering(Peer)) as node:
        answer = http_answer(config(down().port, node.port))
        with serving(answering_http({TERSE: answer}, [])) as manager:
            cluster = KvCluster(settings(f"{down()},{manager}/travel?bootstrap=http"))
            with cluster.connect() as connection:
                assert connection.address == node


def test_over_http_all_nodes_of_the_map_may_be_down() -> None:
    nodes = (down(), down())
    answer = http_answer(config(*(node.port for node in nodes)))
    with serving(answering_http({TERSE: answer}, [])) as manager:
        cluster = KvCluster(settings(f"{manager}/travel?bootstrap=http"))
        with pytest.raises(HostUnreachable) as raised:
            cluster.connect()
    assert all(str(address) in raised.value.reason for address in (manager, *nodes))


def test_a_socket_of_its_own_has_nothing_left_in_it() -> None:
    """Who gets the socket alone would never see what has been received already."""
    trailing = [b""]

    def talk(sock: socket.socket) -> None:
        peer = Peer()
        while data := sock.recv(1 << 16):
            answers = peer.receive_data(data)
            if isinstance(peer.seen[-1], GetClusterConfig):
                answers += trailing[0]
            sock.sendall(answers)

    with serving(talk) as address:
        cluster = KvCluster(settings(f"{address}/travel"))
        cluster.open(address).close()
        trailing[0] = Noop().encode()
        with pytest.raises(UnexpectedMessage, match="more than the answers"):
            cluster.open(address)
