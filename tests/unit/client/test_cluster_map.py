"""The cluster map: which address a vbucket has, in all the forms a config comes in; and which vbucket a key has."""

from __future__ import annotations

import json
import zlib
from typing import Any

import pytest

from headwater.client.cluster_map import ClusterMap, Network, vbucket_of
from headwater.client.connection_string import Address
from headwater.errors import MalformedJson, NoSuchNetwork, NotMyVBucket, TemporaryFailure
from headwater.protocol.numbers import VBucketId
from support.cases import case

ASKED = Address("10.0.0.1", 11210)


def config(**changes: Any) -> dict[str, Any]:
    """Two nodes, four vbuckets, as a server gives it."""
    return {
        "rev": 7,
        "revEpoch": 2,
        "name": "travel",
        "uuid": "abc",
        "nodesExt": [
            {"services": {"mgmt": 8091, "kv": 11210, "kvSSL": 11207}, "thisNode": True, "hostname": "10.0.0.1"},
            {"services": {"kv": 11310, "kvSSL": 11307}, "hostname": "10.0.0.2"},
            {"services": {"n1ql": 8093}, "hostname": "10.0.0.3"},
        ],
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": 1,
            "serverList": ["10.0.0.1:11210", "10.0.0.2:11310"],
            "vBucketMap": [[0, 1], [0, 1], [1, 0], [1, -1]],
        },
        **changes,
    }


def decode(root: Any, *, asked: Address = ASKED, tls: bool = False, network: Network = Network.AUTO) -> ClusterMap:
    return ClusterMap.decode(json.dumps(root).encode(), asked=asked, tls=tls, network=network)


def test_a_vbucket_has_the_address_of_its_active_node() -> None:
    found = decode(config())
    assert found.vbuckets == 4
    assert found.nodes == (Address("10.0.0.1", 11210), Address("10.0.0.2", 11310))
    assert [found.address_of(VBucketId(vbucket)).host for vbucket in range(4)] == [
        "10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2",
    ]  # fmt: skip
    assert found.vbucket_nodes[3] == (1, -1)


def test_what_else_the_config_says() -> None:
    found = decode(config())
    assert (found.bucket, found.uuid, found.version) == ("travel", "abc", (2, 7))
    old = config()
    del old["revEpoch"]
    assert decode(old).version == (0, 7)
    assert decode(config(), tls=True).nodes == (Address("10.0.0.1", 11207), Address("10.0.0.2", 11307))


@pytest.mark.parametrize("hostname", [None, "$HOST"])
def test_a_node_without_a_name_is_the_one_that_was_asked(hostname: str | None) -> None:
    root = config()
    root["nodesExt"][0]["hostname"] = hostname
    if hostname is None:
        del root["nodesExt"][0]["hostname"]
    assert decode(root, asked=Address("db.example.com", 1)).nodes[0] == Address("db.example.com", 11210)
    assert decode(root, asked=Address("::1", 1)).nodes[0] == Address("::1", 11210)


def test_an_old_server_has_only_a_server_list_one_network_and_no_tls() -> None:
    root = config()
    del root["nodesExt"]
    root["vBucketServerMap"]["serverList"] = ["$HOST:11210", "[fe80::2]:11310"]
    assert decode(root).nodes == (Address("10.0.0.1", 11210), Address("fe80::2", 11310))
    assert decode(root, asked=Address("::1", 5)).nodes[0] == Address("::1", 11210)
    root["vBucketServerMap"]["serverList"] = ["10.0.0.1", "10.0.0.2:1"]
    found = decode(root, asked=Address("10.0.0.1", 8091))
    assert (found.nodes[0], found.network) == (Address("10.0.0.1", 11210), Network.DEFAULT)
    with pytest.raises(NoSuchNetwork):
        decode(root, network=Network.EXTERNAL)
    with pytest.raises(MalformedJson, match="no ports with TLS"):
        decode(root, tls=True)


def test_a_vbucket_that_nobody_has() -> None:
    root = config()
    root["vBucketServerMap"]["vBucketMap"][2] = [-1, -1]
    found = decode(root)
    assert found.active_node(2) == -1
    with pytest.raises(NotMyVBucket, match="vbucket 2 has no active node"):
        found.address_of(VBucketId(2))


# --- alternate addresses ------------------------------------------------------------------------------------------


def with_external(*, ports: bool = True) -> dict[str, Any]:
    root = config()
    for index, node in enumerate(root["nodesExt"][:2]):
        node["services"] = {**node["services"], "mgmt": 8091 + index, "mgmtSSL": 18091 + index}
        external: dict[str, Any] = {"hostname": f"public{index}.example.com"}
        if ports:
            external["ports"] = {
                "kv": 30000 + index, "kvSSL": 31000 + index, "mgmt": 32000 + index, "mgmtSSL": 33000 + index,
            }  # fmt: skip
        node["alternateAddresses"] = {"external": external}
    return root


INSIDE = (Address("10.0.0.1", 11210), Address("10.0.0.2", 11310))
OUTSIDE = (Address("public0.example.com", 30000), Address("public1.example.com", 30001))


@case(ASKED, Network.AUTO, INSIDE)
@case(Address("10.0.0.2", 8092), Network.AUTO, INSIDE)
@case(Address("public1.example.com", 30001), Network.AUTO, OUTSIDE)
@case(Address("Public0.Example.com.", 30000), Network.AUTO, OUTSIDE)
@case(Address("public1.example.com", 32001), Network.AUTO, OUTSIDE)
@case(Address("public1.example.com", 33001), Network.AUTO, OUTSIDE)
@case(Address("public1.example.com", 8091), Network.AUTO, INSIDE)
@case(Address("public1.example.com", 30000), Network.AUTO, INSIDE)
@case(Address("somewhere", 11210), Network.AUTO, INSIDE)
@case(ASKED, Network.EXTERNAL, OUTSIDE)
@case(Address("public1.example.com", 30001), Network.DEFAULT, INSIDE)
def test_the_asked_address_decides_the_network(asked: Address, network: Network, nodes: tuple[Address, ...]) -> None:
    found = decode(with_external(), asked=asked, network=network)
    assert found.nodes == nodes
    assert found.network is (Network.DEFAULT if nodes is INSIDE else Network.EXTERNAL)


def test_hosts_are_compared_as_addresses_and_inside_counts_first() -> None:
    root = with_external(ports=False)
    root["nodesExt"][0]["alternateAddresses"]["external"]["hostname"] = ASKED.host
    assert decode(root).nodes == INSIDE
    root = with_external()
    root["nodesExt"][0]["alternateAddresses"]["external"]["hostname"] = "[2001:DB8:0::1]"
    root["nodesExt"][1]["hostname"] = "[fe80::2]"
    found = decode(root, asked=Address("2001:db8::1", 30000))
    assert (found.network, found.nodes[1]) == (Network.EXTERNAL, OUTSIDE[1])
    assert decode(root).nodes[1] == Address("fe80::2", 11310), "without brackets"


@pytest.mark.parametrize("port", [0, None, "8091", True])
def test_a_port_that_is_only_compared_may_be_anything(port: Any) -> None:
    root = with_external()
    root["nodesExt"][0]["services"]["mgmt"] = port
    assert decode(root).nodes == INSIDE


def test_external_addresses_with_tls_and_without_ports() -> None:
    found = decode(with_external(), tls=True, network=Network.EXTERNAL)
    assert found.nodes == (Address("public0.example.com", 31000), Address("public1.example.com", 31001))
    found = decode(with_external(ports=False), network=Network.EXTERNAL)
    assert found.nodes == (Address("public0.example.com", 11210), Address("public1.example.com", 11310))


def test_an_external_network_that_not_every_node_has() -> None:
    root = with_external()
    root["nodesExt"][1]["alternateAddresses"]["external"]["ports"] = {"mgmt": 8091}
    with pytest.raises(NoSuchNetwork, match=r"10\.0\.0\.2 has no external address for the service kv"):
        decode(root, network=Network.EXTERNAL)
    with pytest.raises(NoSuchNetwork):
        decode(root, asked=OUTSIDE[0])
    assert decode(root).nodes == INSIDE
    del root["nodesExt"][1]["alternateAddresses"]
    with pytest.raises(NoSuchNetwork):
        decode(root, network=Network.EXTERNAL)


def test_a_node_that_is_only_for_others() -> None:
    """What it has inside does not matter to those outside."""
    root = with_external()
    del root["nodesExt"][0]["services"]["kv"]
    assert decode(root, asked=OUTSIDE[0]).nodes == OUTSIDE
    with pytest.raises(MalformedJson, match="no service kv"):
        decode(root)


def test_a_bucket_that_is_being_made() -> None:
    with pytest.raises(TemporaryFailure, match="no vbuckets yet") as raised:
        decode(broken(["vBucketServerMap", "vBucketMap"], []))
    assert raised.value.retriable


# --- configs that can't be read -----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_config(text: bytes) -> None:
    with pytest.raises(MalformedJson) as raised:
        ClusterMap.decode(text, asked=ASKED)
    assert "Check that the server" in raised.value.hint


def broken(path: list[Any], value: Any) -> dict[str, Any]:
    root = config()
    parent: Any = root
    for step in path[:-1]:
        parent = parent[step]
    parent[path[-1]] = value
    return root


@case({})
@case(broken(["vBucketServerMap"], []))
@case(broken(["vBucketServerMap", "vBucketMap"], [[0]] * 0x10001))
@case(broken(["vBucketServerMap", "vBucketMap", 1], []))
@case(broken(["vBucketServerMap", "vBucketMap", 1], [2]))
@case(broken(["vBucketServerMap", "vBucketMap", 1], [-2]))
@case(broken(["vBucketServerMap", "vBucketMap", 1], [True]))
@case(broken(["vBucketServerMap", "vBucketMap", 1], ["0"]))
@case(broken(["vBucketServerMap", "serverList"], None))
@case(broken(["rev"], "7"))
@case(broken(["rev"], True))
@case(broken(["name"], 5))
@case(broken(["nodesExt"], [{}]))
@case(broken(["nodesExt", 0], 5))
@case(broken(["nodesExt", 0, "services"], {"mgmt": 8091}))
@case(broken(["nodesExt", 0, "services", "kv"], 0))
@case(broken(["nodesExt", 0, "services", "kv"], "11210"))
@case(broken(["nodesExt", 0, "hostname"], ""))
@case(broken(["nodesExt", 0, "hostname"], 5))
@case(broken(["nodesExt", 0, "alternateAddresses"], 5))
def test_a_config_with_a_fault_in_it(root: dict[str, Any]) -> None:
    with pytest.raises(MalformedJson):
        decode(root)


@pytest.mark.parametrize("server", [5, "a:b:c", "host:0", ""])
def test_a_server_list_with_a_fault_in_it(server: Any) -> None:
    root = broken(["vBucketServerMap", "serverList", 0], server)
    del root["nodesExt"]
    with pytest.raises(MalformedJson, match="in serverList"):
        decode(root)


# --- keys to vbuckets ---------------------------------------------------------------------------------------------


def test_keys_belong_where_couchbase_puts_them() -> None:
    """Computed from the definition: bits 16 to 30 of the key's CRC32, modulo the number of vbuckets."""
    assert zlib.crc32(b"123456789") == 0xCBF43926, "the check value of CRC-32"
    assert vbucket_of(b"123456789", 1024) == 0x4BF4 % 1024
    assert vbucket_of(b"", 1024) == 0
    assert vbucket_of(b"anything", 1) == 0
