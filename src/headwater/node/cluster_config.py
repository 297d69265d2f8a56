"""The cluster config that clients bootstrap from, as JSON: who is in the cluster, and which node has which vbucket.

There are two forms. That of a bucket has the vbucket map. That of the node alone must have no `uuid` and no
`nodeLocator`: gocbcore takes a config with one and not the other for a bucket of a kind that it does not know.

Real servers write `$HOST` where a node does not know its own name, and clients put in the host they have connected to.
Not all of them do so everywhere, so a config of ours names the host that clients can reach, and nothing else.

Pure: what goes in are values, what comes out is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headwater.errors import LocalProtocolError

PORT_MAX = 0xFFFF
NOBODY = -1
"""In a row of the vbucket map: no node has this copy."""

BUCKET_CAPABILITIES = (
    "collections",
    "durableWrite",
    "tombstonedUserXAttrs",
    "subdoc.ReplaceBodyWithXattr",
    "subdoc.DocumentMacroSupport",
    "subdoc.ReviveDocument",
    "preserveExpiry",
    "cbhello",
    "touch",
    "cccp",
    "nodesExt",
    "xattr",
)
"""What the key-value front end serves. Clients leave alone what is not named here, views ("couchapi") above all."""

_NO_ADDRESSES = frozenset({"", "0.0.0.0", "::", "$HOST"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Where clients reach a node. A port that is None is not served."""

    host: str
    """A name or an address, IPv6 without brackets; never the wildcard that a server listens on."""
    kv_port: int | None = None
    kv_tls_port: int | None = None
    http_port: int | None = None
    http_tls_port: int | None = None

    def __post_init__(self) -> None:
        if self.host in _NO_ADDRESSES:
            raise LocalProtocolError(
                f"clients can't reach a node by the host {self.host!r}", hint="Give the name that clients know it by"
            )
        if self.kv_port is None and self.kv_tls_port is None:
            raise LocalProtocolError("a node has a key-value port, or one with TLS")
        for port in (self.kv_port, self.kv_tls_port, self.http_port, self.http_tls_port):
            if port is not None and not 0 < port <= PORT_MAX:
                raise LocalProtocolError(f"{port} is not a port", hint=f"A port is a number from 1 to {PORT_MAX}")

    @property
    def kv_address(self) -> str:
        """As the server list has it."""
        return join_host_port(self.host, self.kv_port or self.kv_tls_port)

    @property
    def http_address(self) -> str:
        return join_host_port(self.host, self.http_port or self.http_tls_port or self.kv_port or self.kv_tls_port)

    def services(self) -> dict[str, int]:
        """The ports by the names that clients know them by.

        Clients wait for ever for a management port that is missing, so a node that has none names its key-value port,
        where a request of HTTP ends at its first byte, which is no magic.
        """
        ports = {
            "kv": self.kv_port,
            "kvSSL": self.kv_tls_port,
            "mgmt": self.http_port or self.kv_port,
            "mgmtSSL": self.http_tls_port or self.kv_tls_port,
        }
        return {name: port for name, port in ports.items() if port is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The nodes, and the revision of all that a config says. Clients take a config only if its revision is higher."""

    nodes: tuple[NodeAddress, ...]
    this_node: int = 0
    """The node that gives the config, as an index of `nodes`."""
    revision: int
    revision_epoch: int = 1
    uuid: str
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.this_node < len(self.nodes):
            raise LocalProtocolError(f"node {self.this_node} is not one of {len(self.nodes)} nodes")
        if self.revision < 1 or self.revision_epoch < 1:
            raise LocalProtocolError("revisions and their epochs are numbered from 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketMap:
    """A bucket, and where its vbuckets are."""

    name: str
    uuid: str
    replicas: int = 0
    vbucket_map: Sequence[Sequence[int]]
    """For every vbucket the active node, then the replicas, as indices of the cluster's nodes; -1 is nobody."""
    capabilities: tuple[str, ...] = BUCKET_CAPABILITIES


def bucket_config(cluster: Cluster, bucket: BucketMap) -> bytes:
    """The config for a connection that has selected the bucket."""
    return encode_config(bucket_members(cluster, bucket))


def bucket_members(cluster: Cluster, bucket: BucketMap) -> dict[str, Any]:
    """The same for whoever adds to it."""
    check_map(cluster, bucket)
    return {
        "rev": cluster.revision,
        "revEpoch": cluster.revision_epoch,
        "name": bucket.name,
        "nodeLocator": "vbucket",
        "bucketType": "membase",
        "uuid": bucket.uuid,
        "uri": bucket_uri("buckets", bucket.name, bucket.uuid),
        "streamingUri": bucket_uri("bucketsStreaming", bucket.name, bucket.uuid),
        "numVBuckets": len(bucket.vbucket_map),
        "bucketCapabilitiesVer": "",
        "bucketCapabilities": bucket.capabilities,
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": bucket.replicas,
            "serverList": [node.kv_address for node in cluster.nodes],
            "vBucketMap": bucket.vbucket_map,
        },
        # As many as there are in nodesExt: gocbcore connects to no node beyond.
        "nodes": [_node(node) for node in cluster.nodes],
        **_cluster_members(cluster),
    }


def node_config(cluster: Cluster) -> bytes:
    """The config for a connection that has selected no bucket."""
    return encode_config({"rev": cluster.revision, "revEpoch": cluster.revision_epoch, **_cluster_members(cluster)})


def bucket_uri(kind: str, name: str, uuid: str) -> str:
    """The path of a bucket's resource on the HTTP side. The uuid tells apart two buckets of one name in turn."""
    return f"/pools/default/{kind}/{quote(name, safe='')}?bucket_uuid={quote(uuid, safe='')}"


def join_host_port(host: str, port: int | None) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _node(node: NodeAddress) -> dict[str, Any]:
    return {"hostname": node.http_address, "ports": {"direct": node.kv_port or node.kv_tls_port}}


def _cluster_members(cluster: Cluster) -> dict[str, Any]:
    return {
        "nodesExt": [_node_ext(node, is_this_node=at == cluster.this_node) for at, node in enumerate(cluster.nodes)],
        "clusterCapabilitiesVer": [1, 0],
        "clusterCapabilities": {},
        "clusterUUID": cluster.uuid,
        "clusterName": cluster.name,
    }


def _node_ext(node: NodeAddress, *, is_this_node: bool) -> dict[str, Any]:
    members: dict[str, Any] = {"services": node.services(), "hostname": node.host}
    if is_this_node:
        members["thisNode"] = True
    return members


def check_map(cluster: Cluster, bucket: BucketMap) -> None:
    copies = bucket.replicas + 1
    for vbucket, row in enumerate(bucket.vbucket_map):
        if len(row) != copies or min(row) < NOBODY or max(row) >= len(cluster.nodes):
            raise LocalProtocolError(
                f"vbucket {vbucket} has the row {list(row)}, not {copies} of {len(cluster.nodes)} nodes"
            )


def encode_config(members: dict[str, Any]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()
