"""The cluster as its config tells it: the nodes, and who has which vbucket."""

from __future__ import annotations

import json
from typing import Any

_NO_NODE = -1


def show_cluster(config: bytes) -> dict[str, Any]:
    """The nodes, and for each vbucket the node that has it active and those that have copies.

    There may be no config: a bare node has none until one is set.
    """
    try:
        told = json.loads(config) if config else {}
    except ValueError:
        told = {}
    server_map = told.get("vBucketServerMap", {})
    members = told.get("nodesExt", [])
    servers = server_map.get("serverList", [])
    return {
        "revision": told.get("rev", 0),
        "nodes": [_node(members[index] if index < len(members) else {}, kv) for index, kv in enumerate(servers)],
        "map": server_map.get("vBucketMap", []),
        "replicas": server_map.get("numReplicas", 0),
    }


def _node(member: dict[str, Any], kv_address: str) -> dict[str, Any]:
    services = member.get("services", {})
    host = member.get("hostname") or kv_address.rpartition(":")[0].replace("$HOST", "")
    port, scheme = services.get("mgmt"), "http"
    if port is None and services.get("mgmtSSL") is not None:
        port, scheme = services["mgmtSSL"], "https"
    return {
        "name": kv_address,
        "this": bool(member.get("thisNode")),
        "url": f"{scheme}://{host}:{port}/ui/" if host and port else None,
    }
