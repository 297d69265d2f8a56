"""The config that a coordinator publishes: kept whole, shown without its log-in, and refused where it is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.errors import MalformedJson
from headwater.protocol.cluster_config import NodeAddress, PublishedConfig
from headwater.protocol.sasl import Credentials

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


@pytest.mark.parametrize(
    "changes",
    [
        {"rev": "x"},
        {"nodesExt": []},
        {"headwater": []},
        {"headwater": {"building": {"0": [9]}, "handing_over": {}, "settled": True}},
        {"headwater": {"building": {"9": [0]}, "handing_over": {}, "settled": True}},
        {"headwater": {"building": {}, "handing_over": {"0": -1}, "settled": True}},
        {"vBucketServerMap": {"numReplicas": 1, "vBucketMap": [[0]]}},
    ],
)
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
