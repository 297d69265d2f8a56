"""Bootstrapping from real nodes."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

from headwater.client.blocking_bucket import KvCluster, bootstrap
from headwater.client.bootstrap import connect_any, map_of
from headwater.client.connection_string import Address, BootstrapBy
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.settings import ClientSettings
from headwater.protocol.numbers import DEFAULT_COLLECTION
from support.fake_servers import PASSWORD, USER, down
from support.node_process import PASSWORD as NODE_PASSWORD
from support.node_process import USER as NODE_USER
from support.node_process import StartNode


def settings(addresses: list[Address], query: str = "", **options: Any) -> ClientSettings:
    options = {"user": USER, "password": PASSWORD, **options}
    where = ",".join(str(address) for address in addresses)
    return ClientSettings.make(f"couchbase://{where}/travel{query}", **options)


def test_a_real_node_by_both_ways(start_node: StartNode) -> None:
    node = start_node("--bucket", "travel", "--vbuckets", "4")
    login = {"user": NODE_USER, "password": NODE_PASSWORD}
    host, _, port = node.http_url.partition("://")[2].rpartition(":")
    by_kv = bootstrap(settings([down(), node.address], **login))
    by_http = bootstrap(settings([down(), Address(host, int(port))], "?bootstrap=http", **login))
    assert (by_kv.by, by_http.by) == (BootstrapBy.KV, BootstrapBy.HTTP)
    assert by_kv.cluster_map == by_http.cluster_map
    assert by_kv.cluster_map.vbuckets == 4
    assert by_kv.bucket_uuid == by_http.bucket_uuid != ""
    assert by_kv.asked == by_kv.cluster_map.nodes[0] == node.address
    assert pickle.loads(pickle.dumps(by_kv)) == by_kv


def cluster_settings(where: str, **options: Any) -> ClientSettings:
    return ClientSettings.make(f"couchbase://{where}", **{"user": USER, "password": PASSWORD, **options})


def any_node(settings: ClientSettings) -> AsyncKvConnection:
    """A connection to it that has been closed."""

    async def connect() -> AsyncKvConnection:
        connection = await connect_any(settings)
        connection.abort()
        return connection

    return asyncio.run(connect())


def test_a_cluster_of_one_real_node_by_both_ways(start_node: StartNode) -> None:
    node = start_node("--bucket", "travel", "--vbuckets", "4")
    login = {"user": NODE_USER, "password": NODE_PASSWORD}
    http_host = node.http_url.partition("://")[2]
    for where in (f"{node.address}/travel", f"{http_host}/travel?bootstrap=http"):
        settings = cluster_settings(where, **login)
        connection = any_node(settings)
        assert connection.address == node.address
        cluster = KvCluster(settings)
        assert map_of(connection, settings) == cluster.read_map()
        assert cluster.find(()) == (cluster.read_map(), (DEFAULT_COLLECTION,))
        cluster.open(node.address).close()
