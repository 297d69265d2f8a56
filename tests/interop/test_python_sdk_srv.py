"""The PyPI package `couchbase` and this client, with one connection string and one DNS server, take the same way in."""

from __future__ import annotations

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.options import ClusterOptions

import headwater.blocking
from headwater.client.changes import Mutation
from support.machine import DnsServer
from support.node_process import PASSWORD, USER, NodeProcess

NAME = "cb.example.com"


def test_the_sdk_asks_for_the_same_records(sdk_node: NodeProcess, key: str) -> None:
    with DnsServer({f"_couchbase._tcp.{NAME}": [(0, 0, sdk_node.address.port, "localhost.")]}) as server:
        dns = {"dns_nameserver": "127.0.0.1", "dns_port": server.port}
        cluster = Cluster(f"couchbase://{NAME}", ClusterOptions(PasswordAuthenticator(USER, PASSWORD), **dns))
        try:
            cluster.bucket("default").default_collection().upsert(key, {"found": True})
        finally:
            cluster.close()
        of_sdk = set(server.questions)
        url = f"couchbase://{NAME}/default?{server.options}"
        with headwater.blocking.connect(url, user=USER, password=PASSWORD) as client:
            assert key in [change.key for change in client.changes(end="now") if isinstance(change, Mutation)]
        assert of_sdk == set(server.questions) == {f"_couchbase._tcp.{NAME}"}
