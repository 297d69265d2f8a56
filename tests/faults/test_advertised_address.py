"""A node behind address translation tells clients the address that they see, and not the one it listens on."""

from __future__ import annotations

import json
from typing import Any

import httpx

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.protocol.sasl import Credentials
from support.fault_proxy import free_port
from support.node_process import PASSWORD, USER, StartNode

HOST = "127.0.0.1"
SEEN_PORT = 31210
SEEN_HTTP_PORT = 38091


def test_the_ports_that_clients_see(start_node: StartNode) -> None:
    port, http_port = free_port(), free_port()
    node = start_node(
        "--vbuckets", "4", "--port", str(port), "--http-port", str(http_port),
        "--advertise-host", "localhost",
        "--advertise-port", str(SEEN_PORT), "--advertise-http-port", str(SEEN_HTTP_PORT),
    )  # fmt: skip
    assert node.ready["ready"] == f"couchbase://localhost:{SEEN_PORT}"
    assert node.ready["http"] == f"http://localhost:{SEEN_HTTP_PORT}"
    login = Login(credentials=Credentials(USER, PASSWORD), bucket="default")
    address = Address(HOST, port)
    with KvConnection.open(address, login) as connection:
        config = connection.outcome.cluster_config
        assert config is not None
    assert ClusterMap.decode(config, asked=address).nodes == (Address("localhost", SEEN_PORT),)
    assert services(json.loads(config)) == {"kv": SEEN_PORT, "mgmt": SEEN_HTTP_PORT}
    with httpx.Client(auth=(USER, PASSWORD)) as client:
        url = f"http://{HOST}:{http_port}/pools/default/b/default"
        assert client.get(url).raise_for_status().content == config


def test_one_port_alone(start_node: StartNode) -> None:
    node = start_node("--vbuckets", "4", "--advertise-http-port", str(SEEN_HTTP_PORT))
    with node.connect() as connection:
        config = connection.outcome.cluster_config
        assert config is not None
    assert services(json.loads(config)) == {"kv": node.address.port, "mgmt": SEEN_HTTP_PORT}


def services(config: dict[str, Any]) -> dict[str, int]:
    """The ports of the only node."""
    assert len(config["nodesExt"]) == 1
    ports: dict[str, int] = config["nodesExt"][0]["services"]
    return ports
