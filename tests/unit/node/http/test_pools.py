"""What clients bootstrap from: the pool, its buckets, and their configs."""

from __future__ import annotations

import json
import os
import platform

import pytest

from support.http_node import ADMIN, READER, UUID, Client, Node


def test_the_nodes_of_the_pool(ask: Client) -> None:
    """The SDKs' own suites begin here."""
    (node,) = ask("GET", "/pools/nodes", auth=READER).json()["nodes"]
    assert node["version"].startswith("7.6.0")
    assert ask("GET", "/pools/nodes", auth=None).status_code == 401


def test_pools(ask: Client) -> None:
    pools = ask("GET", "/pools").json()
    assert pools["implementationVersion"] == "7.6.0-0-headwater"
    assert pools["uuid"] == UUID
    assert pools["isAdminCreds"] is True
    assert pools["pools"] == [
        {
            "name": "default",
            "uri": f"/pools/default?uuid={UUID}",
            "streamingUri": f"/poolsStreaming/default?uuid={UUID}",
        }
    ]
    assert ask("GET", "/pools", auth=READER).json()["isAdminCreds"] is False


def test_every_uri_that_is_told_leads_somewhere(ask: Client) -> None:
    bucket = ask("GET", "/pools/default/buckets/beer").json()
    pool = ask("GET", "/pools/default").json()
    uris = [ask("GET", "/pools").json()["pools"][0]["uri"], bucket["uri"], pool["buckets"]["uri"]]
    for uri in [*uris, pool["nodeServicesUri"], pool["buckets"]["terseBucketsBase"] + "beer"]:
        assert ask("GET", uri).status_code == 200, uri


def test_the_pool(ask: Client) -> None:
    pool = ask("GET", "/pools/default").json()
    assert (pool["name"], pool["clusterName"]) == ("default", "the lake")
    assert pool["bucketNames"] == [{"bucketName": "beer", "uuid": "ab" * 16}]
    assert pool["nodes"] == [
        {
            "hostname": "127.0.0.1:8091",
            "otpNode": "ns_1@127.0.0.1",
            "os": f"{platform.machine()}-linux",
            "ports": {"direct": 11210},
            "services": ["kv"],
            "version": "7.6.0-0-headwater",
            "clusterCompatibility": 7 << 16 | 6,
            "clusterMembership": "active",
            "recoveryType": "none",
            "status": "healthy",
            "thisNode": True,
            "uptime": "12",
        }
    ]


@pytest.mark.parametrize("path", ["/", "/pools", "/pools/default/buckets/beer", "/no/such/path"])
def test_a_node_that_is_not_ready_says_so_and_no_more(node: Node, ask: Client, path: str) -> None:
    node.is_ready = False
    for auth in (ADMIN, None):
        answer = ask("GET", path, auth=auth)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["message"] == "The node is not ready: it opens bucket 'beer', 1 of 1"


def test_a_host_that_the_config_leaves_out_is_the_one_that_was_asked(node: Node, ask: Client) -> None:
    config = {"rev": 3, "nodesExt": [{"services": {"kvSSL": 11207, "mgmtSSL": 18091}}]}
    node.cluster_config = lambda bucket: json.dumps(config).encode()
    (told,) = ask("GET", "/pools/default").json()["nodes"]
    assert (told["hostname"], told["ports"]) == ("node:18091", {"direct": 11207, "httpsMgmt": 18091})


def test_a_bucket(node: Node, ask: Client) -> None:
    bucket = ask("GET", "/pools/default/buckets/beer").json()
    config = json.loads(node.cluster_config("beer"))
    assert ask("GET", "/pools/default/buckets").json() == [bucket]
    for same in ("name", "uuid", "uri", "streamingUri", "bucketCapabilities", "vBucketServerMap", "nodeLocator"):
        assert bucket[same] == config[same], same
    assert (bucket["bucketType"], bucket["numVBuckets"], bucket["replicaNumber"]) == ("membase", 4, 0)
    assert bucket["nodes"][0]["hostname"] == "127.0.0.1:8091"
    assert bucket["collectionsManifestUid"] == "0"
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert bucket["quota"] == {"ram": machine_bytes, "rawRAM": machine_bytes}
    statistics = bucket["basicStats"]
    assert (statistics["itemCount"], statistics["memUsed"]) == (0, node.stored.memory_bytes)
    assert statistics["diskUsed"] == statistics["dataUsed"] > 0
    assert 0 < statistics["quotaPercentUsed"] < 100


def test_the_terse_config_is_the_one_of_the_key_value_side(node: Node, ask: Client) -> None:
    answer = ask("GET", "/pools/default/b/beer", auth=READER)
    assert answer.content == node.cluster_config("beer")
    assert answer.headers["content-type"] == "application/json"
    assert ask("GET", "/pools/default/nodeServices").content == node.cluster_config(None)


def test_health_and_readiness_need_no_log_in(node: Node, ask: Client) -> None:
    assert ask("GET", "/", auth=None).status_code == 200
    assert ask("GET", "/health", auth=None).json() == {"status": "ok"}
    assert ask("GET", "/ready", auth=None).json() == {"status": "ready"}
    node.is_ready = False
    assert ask("GET", "/health", auth=None).status_code == 200
    answer = ask("GET", "/ready", auth=None)
    assert (answer.status_code, answer.json()) == (
        503,
        {"status": "not ready", "message": "The node is not ready: it opens bucket 'beer', 1 of 1"},
    )


def test_nothing_is_kept_by_caches(ask: Client) -> None:
    assert "no-store" in ask("GET", "/pools").headers["cache-control"]
