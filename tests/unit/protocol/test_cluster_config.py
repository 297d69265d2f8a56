"""The cluster config: what real clients look for, in both forms, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.errors import LocalProtocolError, MalformedJson
from headwater.protocol.cluster_config import (
    BUCKET_CAPABILITIES,
    BucketMap,
    ClusterConfig,
    ClusterNodes,
    NodeAddress,
    bucket_config,
    node_config,
)

NODE = NodeAddress(host="127.0.0.1", kv_port=11210, http_port=8091)
OTHER = NodeAddress(host="db.example.com", kv_port=11310, kv_tls_port=11307, http_port=9091, http_tls_port=19091)
CLUSTER = ClusterNodes(nodes=(NODE, OTHER), this_node=1, revision=7, uuid="c0ffee", name="the lake")
BUCKET = BucketMap(name="beer", uuid="ab12", replicas=1, vbucket_map=[[0, 1], [1, 0], [1, -1], [-1, -1]])


def of_bucket(cluster: ClusterNodes = CLUSTER, bucket: BucketMap = BUCKET) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(bucket_config(cluster, bucket))
    return config


# --- a bucket's ---------------------------------------------------------------------------------------------------


def test_a_bucket_s_config_has_what_clients_look_for() -> None:
    config = of_bucket()
    assert (config["rev"], config["revEpoch"]) == (7, 1)
    assert (config["name"], config["uuid"], config["nodeLocator"]) == ("beer", "ab12", "vbucket")
    assert config["uri"] == "/pools/default/buckets/beer?bucket_uuid=ab12"
    assert config["streamingUri"] == "/pools/default/bucketsStreaming/beer?bucket_uuid=ab12"
    assert config["vBucketServerMap"] == {
        "hashAlgorithm": "CRC",
        "numReplicas": 1,
        "serverList": ["127.0.0.1:11210", "db.example.com:11310"],
        "vBucketMap": [[0, 1], [1, 0], [1, -1], [-1, -1]],
    }
    assert config["numVBuckets"] == 4
    assert (config["clusterUUID"], config["clusterName"]) == ("c0ffee", "the lake")


def test_nodes_are_told_twice_in_the_same_order() -> None:
    config = of_bucket()
    assert config["nodes"] == [
        {"hostname": "127.0.0.1:8091", "ports": {"direct": 11210}},
        {"hostname": "db.example.com:9091", "ports": {"direct": 11310}},
    ]
    assert config["nodesExt"] == [
        {"services": {"kv": 11210, "mgmt": 8091}, "hostname": "127.0.0.1"},
        {
            "services": {"kv": 11310, "kvSSL": 11307, "mgmt": 9091, "mgmtSSL": 19091},
            "hostname": "db.example.com",
            "thisNode": True,
        },
    ]


def test_no_host_is_left_for_the_client_to_fill_in() -> None:
    assert b"$HOST" not in bucket_config(CLUSTER, BUCKET) + node_config(CLUSTER)


def test_only_what_is_served_is_a_capability() -> None:
    capabilities = of_bucket()["bucketCapabilities"]
    assert capabilities == list(BUCKET_CAPABILITIES)
    served = {"collections", "xattr", "cccp", "durableWrite", "nodesExt", "rangeScan", "subdoc.ReplicaRead"}
    assert served <= set(capabilities)
    assert not {"couchapi", "querySystemCollection"} & set(capabilities)
    assert of_bucket(bucket=replace(BUCKET, capabilities=("dcp",)))["bucketCapabilities"] == ["dcp"]


def test_a_bucket_s_name_is_escaped_in_its_uri() -> None:
    assert of_bucket(bucket=replace(BUCKET, name="a%b"))["uri"].startswith("/pools/default/buckets/a%25b?")


def test_our_own_client_reads_it() -> None:
    cluster_map = ClusterMap.decode(bucket_config(CLUSTER, BUCKET), asked=Address("127.0.0.1", 11210))
    assert [str(address) for address in cluster_map.nodes] == ["127.0.0.1:11210", "db.example.com:11310"]
    assert cluster_map.vbuckets == 4


def test_a_bucket_without_vbuckets_has_an_empty_map() -> None:
    assert of_bucket(bucket=replace(BUCKET, vbucket_map=[]))["vBucketServerMap"]["vBucketMap"] == []


# --- the node's ---------------------------------------------------------------------------------------------------


def test_the_node_s_config_is_of_no_bucket() -> None:
    config = json.loads(node_config(CLUSTER))
    assert not {"uuid", "name", "nodeLocator", "vBucketServerMap", "bucketCapabilities"} & config.keys()
    assert (config["rev"], config["revEpoch"], config["clusterUUID"]) == (7, 1, "c0ffee")
    assert config["nodesExt"] == of_bucket()["nodesExt"]


# --- addresses ----------------------------------------------------------------------------------------------------


def test_ipv6_has_brackets_only_where_a_port_follows() -> None:
    cluster = replace(CLUSTER, nodes=(replace(NODE, host="::1"),), this_node=0)
    config = of_bucket(cluster, replace(BUCKET, replicas=0, vbucket_map=[[0]]))
    assert config["vBucketServerMap"]["serverList"] == ["[::1]:11210"]
    assert config["nodes"][0]["hostname"] == "[::1]:8091"
    assert config["nodesExt"][0]["hostname"] == "::1"


def test_a_node_without_http_names_its_key_value_port_for_it() -> None:
    assert NodeAddress(host="h", kv_port=1).services() == {"kv": 1, "mgmt": 1}
    assert NodeAddress(host="h", kv_port=1, kv_tls_port=2).services() == {"kv": 1, "kvSSL": 2, "mgmt": 1, "mgmtSSL": 2}


def test_a_node_may_serve_tls_only() -> None:
    node = NodeAddress(host="h", kv_tls_port=2, http_tls_port=3)
    assert node.services() == {"kvSSL": 2, "mgmtSSL": 3}
    assert (node.kv_address, node.http_address) == ("h:2", "h:3")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "$HOST"])
def test_what_a_server_listens_on_is_no_address_for_clients(host: str) -> None:
    with pytest.raises(LocalProtocolError, match="clients can't reach"):
        NodeAddress(host=host, kv_port=11210)


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_ports_are_ports(port: int) -> None:
    with pytest.raises(LocalProtocolError, match="is not a port"):
        replace(NODE, http_port=port)


def test_a_node_has_a_key_value_port() -> None:
    with pytest.raises(LocalProtocolError, match="key-value port"):
        NodeAddress(host="h", http_port=8091)


# --- what does not fit together -----------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [[0], [0, 1, 0], [0, 2], [-2, 0], []])
def test_a_row_names_as_many_nodes_as_there_are_copies(row: list[int]) -> None:
    with pytest.raises(LocalProtocolError, match="vbucket 1 has the row"):
        bucket_config(CLUSTER, replace(BUCKET, vbucket_map=[[0, 1], row]))


def test_this_node_is_one_of_the_nodes() -> None:
    with pytest.raises(LocalProtocolError, match="not one of 2 nodes"):
        replace(CLUSTER, this_node=2)


def test_revisions_start_at_1() -> None:
    with pytest.raises(LocalProtocolError, match="numbered from 1"):
        replace(CLUSTER, revision=0)
    with pytest.raises(LocalProtocolError, match="numbered from 1"):
        replace(CLUSTER, revision_epoch=0)


# --- reading any server's -----------------------------------------------------------------------------------------


def test_what_was_written_is_read() -> None:
    read = ClusterConfig.decode(bucket_config(CLUSTER, BUCKET))
    assert (read.epoch, read.revision, read.bucket, read.uuid) == (1, 7, "beer", "ab12")
    assert (read.cluster_uuid, read.cluster_name, read.replicas) == ("c0ffee", "the lake", 1)
    assert read.servers == ["127.0.0.1:11210", "db.example.com:11310"]
    assert read.rows == ((0, 1), (1, 0), (1, -1), (-1, -1))
    assert [node.address() for node in read.nodes] == [NODE, OTHER]
    assert read.this_node is not None
    assert read.this_node.address() == OTHER


def test_what_may_be_missing_is_empty() -> None:
    for config in (b"", b"{}"):
        read = ClusterConfig.decode(config)
        assert not read.is_of_bucket
        assert (read.revision, read.servers, read.rows, read.nodes, read.this_node) == (0, [], (), [], None)


def test_a_host_that_is_not_said_is_the_one_that_was_asked() -> None:
    for node in ({"services": {"kv": 1}}, {"services": {"kv": 1}, "hostname": "$HOST"}):
        [read] = ClusterConfig.of({"nodesExt": [node]}).nodes
        assert read.host is None
        with pytest.raises(MalformedJson, match="by which host"):
            read.address()


def test_a_port_matters_only_when_it_is_asked_for() -> None:
    [node] = ClusterConfig.of({"nodesExt": [{"services": {"kv": 11210, "mgmt": "x"}, "hostname": "h"}]}).nodes
    assert (node.kv_port(tls=False), node.kv_port(tls=True), node.config_ports) == (11210, None, {11210})
    with pytest.raises(MalformedJson, match="'x' is not a port"):
        node.http_port(tls=False)


@pytest.mark.parametrize("config", [b"{", b"[]", b"1", b"[" * 100_000])
def test_what_is_no_config(config: bytes) -> None:
    with pytest.raises(MalformedJson):
        ClusterConfig.decode(config)


@pytest.mark.parametrize(
    ("members", "part"),
    [
        ({"rev": True}, "revision"),
        ({"nodesExt": {}}, "nodes"),
        ({"nodesExt": [1]}, "nodes"),
        ({"nodesExt": [{"services": {}, "hostname": ""}]}, "nodes"),
        ({"vBucketServerMap": {}}, "servers"),
        ({"vBucketServerMap": {"serverList": [1]}}, "servers"),
        ({"vBucketServerMap": {"serverList": ["h:1"], "vBucketMap": [[1]]}}, "rows"),
        ({"vBucketServerMap": {"serverList": ["h:1"]}, "nodesExt": []}, "bucket_nodes"),
    ],
)
def test_what_is_wrong_is_refused_when_it_is_asked_for(members: dict[str, Any], part: str) -> None:
    read = ClusterConfig.of(members)
    with pytest.raises(MalformedJson, match="can't be read"):
        getattr(read, part)
