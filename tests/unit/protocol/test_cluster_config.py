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
    PublishedConfig,
    bucket_config,
    node_config,
)
from headwater.protocol.sasl import Credentials
from support.cases import case

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


@case({"rev": True}, "revision")
@case({"nodesExt": {}}, "nodes")
@case({"nodesExt": [1]}, "nodes")
@case({"nodesExt": [{"services": {}, "hostname": ""}]}, "nodes")
@case({"vBucketServerMap": {}}, "servers")
@case({"vBucketServerMap": {"serverList": [1]}}, "servers")
@case({"vBucketServerMap": {"serverList": ["h:1"], "vBucketMap": [[1]]}}, "rows")
@case({"vBucketServerMap": {"serverList": ["h:1"]}, "nodesExt": []}, "bucket_nodes")
def test_what_is_wrong_is_refused_when_it_is_asked_for(members: dict[str, Any], part: str) -> None:
    read = ClusterConfig.of(members)
    with pytest.raises(MalformedJson, match="can't be read"):
        getattr(read, part)


# --- the config that a coordinator publishes: kept whole, shown without its log-in, and refused where it is wrong -----

NODES = tuple(NodeAddress(host="127.0.0.1", kv_port=port, http_port=port + 1) for port in (1000, 2000, 3000))
CONFIG = PublishedConfig(
    revision=7,
    bucket="beer",
    uuid="ab12",
    nodes=NODES,
    replicas=1,
    rows=((0, 1), (1, -1), (2, 0)),
    building={1: (2,)},
    handing_over={2: 1},
    login=Credentials("@cluster-beer", "a secret"),
)


def test_nodes_keep_all_of_it() -> None:
    assert PublishedConfig.decode(CONFIG.encode(with_login=True)) == CONFIG


def test_what_it_says_of_the_cluster_and_the_bucket_s_settings() -> None:
    nodes = tuple(replace(node, uuid=f"node-{at}") for at, node in enumerate(NODES))
    config = replace(CONFIG, cluster_uuid="cd34", cluster_name="the lake", settings={"replicas": 1}, nodes=nodes)
    assert PublishedConfig.decode(config.encode(with_login=True)) == config
    shown = json.loads(config.encode())
    assert (shown["clusterUUID"], shown["clusterName"]) == ("cd34", "the lake")
    assert [node["nodeUUID"] for node in shown["nodesExt"]] == ["node-0", "node-1", "node-2"]
    # Of old the bucket's uuid stood for the cluster's.
    assert json.loads(CONFIG.encode())["clusterUUID"] == CONFIG.uuid


def test_what_is_shown_has_no_log_in() -> None:
    shown = CONFIG.encode(this_node=1)
    assert b"a secret" not in shown
    assert PublishedConfig.decode(shown) == replace(CONFIG, login=None)
    assert "a secret" not in repr(CONFIG)


def test_clients_read_it() -> None:
    found = ClusterMap.decode(CONFIG.encode(this_node=1), asked=Address("127.0.0.1", 2000))
    assert found.vbucket_nodes == CONFIG.rows
    assert found.version == CONFIG.version == (1, 7)


@pytest.mark.parametrize("this_node", [None, 0, 2])
def test_a_node_marks_itself(this_node: int | None) -> None:
    config = json.loads(CONFIG.encode(this_node=this_node))
    marked = [at for at, node in enumerate(config["nodesExt"]) if node.get("thisNode")]
    assert marked == ([] if this_node is None else [this_node])


def test_a_node_is_known_by_its_key_value_address() -> None:
    assert CONFIG.index_of(replace(NODES[1], http_port=9)) == 1
    assert CONFIG.index_of(replace(NODES[1], kv_port=9)) is None
    # A node of a cluster that had TLS ports alone may have others beside since.
    of_old = replace(CONFIG, nodes=tuple(NodeAddress(host="h", kv_tls_port=port) for port in (1, 2, 3)))
    assert of_old.index_of(NodeAddress(host="h", kv_port=9, kv_tls_port=2)) == 1


def test_holders_are_all_that_may_have_a_copy() -> None:
    assert [CONFIG.holders(vbucket) for vbucket in range(3)] == [(0, 1), (1, 2), (2, 0, 1)]


def test_a_chain_has_a_place_for_who_is_missing() -> None:
    assert CONFIG.topology(1) == (["127.0.0.1:2000", None],)


def test_what_others_have_set_is_not_acted_on() -> None:
    members = json.loads(CONFIG.encode())
    del members["headwater"]
    assert PublishedConfig.decode(json.dumps(members).encode()) is None
    assert PublishedConfig.decode(b"[]") is None


@case({"rev": "x"})
@case({"nodesExt": []})
@case({"headwater": []})
@case({"headwater": {"building": {"0": [9]}, "handing_over": {}, "settled": True}})
@case({"headwater": {"building": {"9": [0]}, "handing_over": {}, "settled": True}})
@case({"headwater": {"building": {}, "handing_over": {"0": -1}, "settled": True}})
@case({"vBucketServerMap": {"numReplicas": 1, "vBucketMap": [[0]]}})
def test_what_can_t_be_read(changes: dict[str, Any]) -> None:
    members = json.loads(CONFIG.encode()) | changes
    with pytest.raises(MalformedJson):
        PublishedConfig.decode(json.dumps(members).encode())


def test_what_is_not_even_json() -> None:
    with pytest.raises(MalformedJson):
        PublishedConfig.decode(b"{")


def test_nodes_log_in_as_their_own_user_only() -> None:
    """A user who may publish the config of one bucket must not give the node's admin another password by it."""
    config = replace(CONFIG, login=Credentials("Administrator", "mine now"))
    with pytest.raises(MalformedJson, match="as no other user"):
        PublishedConfig.decode(config.encode(with_login=True))
