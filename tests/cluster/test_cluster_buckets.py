"""Buckets of three nodes by REST: made, changed and dropped on all of them, or an answer that says where it was not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from support.clusters import ClusterProcesses
from support.node_process import PASSWORD, USER, NodeProcess


def ask(node: NodeProcess, method: str, path: str, **form: str) -> httpx.Response:
    url = f"{node.http_url}/pools/default{path}"
    return httpx.request(method, url, auth=(USER, PASSWORD), data=form or None, timeout=30)


def config(node: NodeProcess, bucket: str) -> Any:
    return ask(node, "GET", f"/b/{bucket}").raise_for_status().json()


def names(node: NodeProcess) -> list[str]:
    return [bucket["name"] for bucket in ask(node, "GET", "/buckets").json()]


async def form(cluster: ClusterProcesses) -> None:
    async with cluster.coordinator(0, 1, 2) as coordinator:
        await coordinator.init(replicas=1)


def test_buckets_of_three_nodes(tmp_path: Path) -> None:
    with ClusterProcesses(tmp_path, 3, vbuckets=8) as cluster:
        first, second, third = cluster.nodes
        asyncio.run(form(cluster))
        assert ask(second, "POST", "/buckets", name="travel", numVBuckets="16", replicaNumber="1").status_code == 202
        made = config(third, "travel")
        assert [len(set(row)) for row in made["vBucketServerMap"]["vBucketMap"]] == [2] * 16
        assert {row[0] for row in made["vBucketServerMap"]["vBucketMap"]} == {0, 1, 2}
        assert len({node["nodeUUID"] for node in made["nodesExt"]}) == 3

        # Settings and names are the same everywhere.
        assert ask(third, "POST", "/buckets/travel", flushEnabled="1", replicaNumber="2").status_code == 200
        assert ask(third, "POST", "", clusterName="the lake").status_code == 200
        changed = ask(first, "GET", "/buckets/travel").json()
        assert ("flush" in changed["controllers"], changed["replicaNumber"]) == (True, 2)
        for bucket in ("default", "travel"):
            assert (config(second, bucket)["clusterName"], config(second, bucket)["clusterUUID"]) == (
                "the lake",
                config(first, "default")["clusterUUID"],
            )

        # Without one of the nodes nothing is half done.
        third.kill()
        refused = ask(first, "POST", "/buckets", name="shop")
        assert refused.status_code == 503
        assert f"not on {third.address}: it can't be reached" in refused.json()["errors"]["_"]
        refused = ask(first, "DELETE", "/buckets/travel")
        assert refused.status_code == 503
        assert str(third.address) in refused.json()["errors"]["_"]
        assert (names(first), names(second)) == (["default", "travel"], ["default"])
        third.start()
        assert names(third) == ["default", "travel"]

        # Asked again, the rest is done; and the nodes know each other without any bucket.
        assert ask(first, "DELETE", "/buckets/travel").status_code == 200
        assert ask(second, "DELETE", "/buckets/default").status_code == 200
        assert [names(node) for node in cluster.nodes] == [[], [], []]
        assert ask(third, "POST", "/buckets", name="again", numVBuckets="8").status_code == 202
        assert [names(node) for node in cluster.nodes] == [["again"]] * 3
        assert config(first, "again")["clusterName"] == "the lake"
