"""The cluster config: the JSON that says who is in a cluster, and which node has which vbucket.

The only module that knows this JSON. Nodes write it (`bucket_config`, `node_config`), a coordinator publishes it with
members of its own (`PublishedConfig`), and clients, commands and the dashboard read it (`ClusterConfig`). Pure: values
in, bytes out, and back; it opens no connection and decides nothing.

There are two forms. A bucket's config has the vbucket map. The config of a node alone must have no `uuid` and no
`nodeLocator`: gocbcore treats a config with only one of them as a bucket of an unknown kind.

The parts that matter to all readers:

* `vBucketServerMap.serverList` lists the nodes of the bucket, and `vBucketMap` has a row for every vbucket: the index
  of its active node in that list, then those of its replicas, -1 where there is none;
* `nodesExt` lists the same nodes in the same order (and after them nodes that the bucket is not on) with the ports of
  every service, TLS ones included, and with the addresses they have for others (`alternateAddresses`);
* `rev` and `revEpoch` are the version: a reader takes a config only if it has a higher one.

Real servers write `$HOST` if a node does not know its own name, and clients replace it with the host they have
connected to. Not all clients do so everywhere, so our configs always name the host that clients can reach.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

from headwater.errors import HeadwaterError, LocalProtocolError, MalformedJson
from headwater.protocol.sasl import Credentials

T = TypeVar("T")

PORT_MAX = 0xFFFF
VBUCKETS_MAX = 0x10000
"""The number of vbuckets that the 16 bits of a request's header can name. A bucket has 1024 in Couchbase."""
NO_NODE = -1
"""In a row of the vbucket map: no node has this copy."""
HOST_PLACEHOLDER = "$HOST"
"""Stands for the host that the config was requested from."""

BUCKET_CAPABILITIES = (
    "collections", "durableWrite", "tombstonedUserXAttrs", "subdoc.ReplaceBodyWithXattr",
    "subdoc.DocumentMacroSupport", "subdoc.ReviveDocument", "subdoc.ReplicaRead", "subdoc.BinaryXattr",
    "preserveExpiry", "rangeScan", "cbhello", "touch", "cccp", "nodesExt", "xattr",
)  # fmt: skip
"""What the key-value front end serves. Clients do not use what is not named here, above all views ("couchapi")."""

_KV, _KV_TLS, _HTTP, _HTTP_TLS = "kv", "kvSSL", "mgmt", "mgmtSSL"
"""The names of the services that a config can be requested from."""
_NO_ADDRESSES = frozenset({"", "0.0.0.0", "::", HOST_PLACEHOLDER})
_HINT = "Check that the server is a Couchbase or Headwater node; if it is, this config is a fault of it"


# --- what a node writes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """Where clients reach a node. A port that is None is not served."""

    host: str
    """A name or an address, IPv6 without brackets; never the wildcard that a server listens on."""
    kv_port: int | None = None
    kv_tls_port: int | None = None
    http_port: int | None = None
    http_tls_port: int | None = None
    uuid: str = ""
    """Distinguishes two nodes that have had one address in turn; empty if it is not known."""

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
        """The address in the server list."""
        return join_host_port(self.host, self.kv_port or self.kv_tls_port)

    @property
    def http_address(self) -> str:
        return join_host_port(self.host, self.http_port or self.http_tls_port or self.kv_port or self.kv_tls_port)

    @property
    def kv_ports(self) -> frozenset[int]:
        return frozenset(port for port in (self.kv_port, self.kv_tls_port) if port is not None)

    def kv_port_for(self, *, tls: bool) -> int:
        """Return the key-value port to connect to, with or without TLS; the other one if there is only that."""
        port = self.kv_tls_port if tls else self.kv_port
        return port or self.kv_port or self.kv_tls_port or 0

    def services(self) -> dict[str, int]:
        """Return the ports by the names that clients know them by.

        Clients wait forever for a management port that is missing, so a node that has none names its key-value port,
        which ends an HTTP request at its first byte, because that is no magic.
        """
        ports = {
            _KV: self.kv_port,
            _KV_TLS: self.kv_tls_port,
            _HTTP: self.http_port or self.kv_port,
            _HTTP_TLS: self.http_tls_port or self.kv_tls_port,
        }
        return {name: port for name, port in ports.items() if port is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNodes:
    """The nodes, and the revision of everything in a config."""

    nodes: tuple[NodeAddress, ...]
    this_node: int | None = 0
    """The node that gives the config, as an index of `nodes`; None marks none."""
    revision: int
    revision_epoch: int = 1
    uuid: str
    name: str = ""

    def __post_init__(self) -> None:
        if self.this_node is not None and not 0 <= self.this_node < len(self.nodes):
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
    """For every vbucket the active node, then the replicas, as indices of the cluster's nodes; -1 is no node."""
    capabilities: tuple[str, ...] = BUCKET_CAPABILITIES


def bucket_config(cluster: ClusterNodes, bucket: BucketMap) -> bytes:
    """The config for a connection that has selected the bucket."""
    return _encode(_bucket_members(cluster, bucket))


def node_config(cluster: ClusterNodes) -> bytes:
    """The config for a connection that has selected no bucket."""
    return _encode({"rev": cluster.revision, "revEpoch": cluster.revision_epoch, **_cluster_members(cluster)})


def bucket_uri(kind: str, name: str, uuid: str) -> str:
    """The path of a bucket's resource on the HTTP side. The uuid differs for two buckets that had one name in turn."""
    return f"/pools/default/{kind}/{quote(name, safe='')}?bucket_uuid={quote(uuid, safe='')}"


def join_host_port(host: str, port: int | None) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bucket_members(cluster: ClusterNodes, bucket: BucketMap) -> dict[str, Any]:
    _check_map(cluster, bucket)
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
        "nodes": [
            {"hostname": node.http_address, "ports": {"direct": node.kv_port or node.kv_tls_port}}
            for node in cluster.nodes
        ],
        **_cluster_members(cluster),
    }


def _cluster_members(cluster: ClusterNodes) -> dict[str, Any]:
    return {
        "nodesExt": [
            {
                "services": node.services(),
                "hostname": node.host,
                **({"nodeUUID": node.uuid} if node.uuid else {}),
                **({"thisNode": True} if at == cluster.this_node else {}),
            }
            for at, node in enumerate(cluster.nodes)
        ],
        "clusterCapabilitiesVer": [1, 0],
        "clusterCapabilities": {},
        "clusterUUID": cluster.uuid,
        "clusterName": cluster.name,
    }


def _check_map(cluster: ClusterNodes, bucket: BucketMap) -> None:
    copies = bucket.replicas + 1
    for vbucket, row in enumerate(bucket.vbucket_map):
        if len(row) != copies or min(row) < NO_NODE or max(row) >= len(cluster.nodes):
            raise LocalProtocolError(
                f"vbucket {vbucket} has the row {list(row)}, not {copies} of {len(cluster.nodes)} nodes"
            )


def _encode(members: dict[str, Any]) -> bytes:
    return json.dumps(members, separators=(",", ":")).encode()


# --- what a coordinator publishes ---------------------------------------------------------------------------------

# A published config is a bucket's config with one more member, `headwater`, which clients ignore:
#
#     {"building": {"12": [2]}, "handing_over": {"13": 0}, "settled": false, "coordinator": "5f0c…",
#      "login": ["@cluster-…", "…"]}
#
# A config without that member was set by another program (`set-cluster-config` on a bare node): nodes show it, and do
# not act on it. The same bytes go to every node, and each marks itself as `thisNode` in what it shows.

_OUR_MEMBER = "headwater"
NODES_USER = "@cluster"
"""The user as which nodes log in to each other, followed by the bucket's name: each bucket is a cluster of its own."""


def nodes_user(bucket: str) -> str:
    """Return the user as which nodes of this bucket's cluster log in to each other."""
    return f"{NODES_USER}-{bucket}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCounts:
    """Where the copies of a bucket are, according to the nodes that can be reached.

    What an unreachable node has is not known: its replicas may be old, or gone with its disk.
    """

    vbuckets: int
    active: int
    """Vbuckets whose active copy is on a reachable node."""
    active_unreachable: int
    active_missing: int
    """Vbuckets for which the map has no active node."""
    replicas_wanted: int
    replicas: int
    """On reachable nodes."""
    replicas_unknown: int
    """On unreachable nodes."""
    replicas_missing: int
    """Replicas that the map has no node for."""

    @property
    def unserved(self) -> int:
        """Vbuckets whose documents can't be read or written."""
        return self.active_unreachable + self.active_missing


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConfig:
    """What every node of a bucket's cluster receives, stores and acts on. Each change makes a higher revision."""

    revision: int
    epoch: int = 1
    bucket: str
    uuid: str
    cluster_uuid: str = ""
    """The uuid of the cluster, which all its buckets share. Older nodes used the bucket's uuid instead."""
    cluster_name: str = ""
    settings: Mapping[str, Any] | None = None
    """The settings of the bucket for all nodes; None if each node uses the ones it has."""
    nodes: tuple[NodeAddress, ...]
    replicas: int = 0
    rows: tuple[tuple[int, ...], ...]
    """For every vbucket the active node, then the replicas, as indices of `nodes`; -1 is no node."""
    building: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Nodes that build a copy of a vbucket from its active node, though the map does not name them yet, or that keep
    one up to date which the map no longer names. Such a copy may be promoted, and is part of no write's majority."""
    handing_over: Mapping[int, int] = field(default_factory=dict)
    """The node on which a vbucket is to become active. Neither that node nor the one that was active changes its state
    because of the config: the takeover decides. If this is the node that is active already, the vbucket is *frozen*:
    no node streams it to another one or takes it over, so that a coordinator can inspect it."""
    settled: bool = False
    """Whether every copy is where the map says. Nodes may then drop any other copy."""
    coordinator: str = ""
    """A name that each run of a command makes up, so that no two runs ever publish the same config."""
    login: Credentials | None = field(default=None, repr=False)
    """How the nodes log in to each other for as long as the cluster exists. No config that is shown has it."""

    @property
    def version(self) -> tuple[int, int]:
        return self.epoch, self.revision

    def names(self) -> tuple[str, ...]:
        """Return the nodes by their key-value addresses, as topologies name them."""
        return tuple(node.kv_address for node in self.nodes)

    def index_of(self, node: NodeAddress) -> int | None:
        """Return which of the nodes this one is, by its host and one of its key-value ports, whatever else has
        changed: it may have got ports with TLS since, or given up those without."""
        at_host = ((at, known) for at, known in enumerate(self.nodes) if known.host == node.host)
        return next((at for at, known in at_host if known.kv_ports & node.kv_ports), None)

    def holders(self, vbucket: int) -> tuple[int, ...]:
        """Return all nodes that have, get or may still have a copy, each once."""
        row = [node for node in self.rows[vbucket] if node != NO_NODE]
        handed = [self.handing_over[vbucket]] if vbucket in self.handing_over else []
        return tuple(dict.fromkeys([*row, *self.building.get(vbucket, ()), *handed]))

    def is_holder(self, vbucket: int, node: int) -> bool:
        """Whether a node is one of `holders`. Called for every vbucket whenever there is a newer config."""
        return (
            node in self.rows[vbucket]
            or node in self.building.get(vbucket, ())
            or self.handing_over.get(vbucket, NO_NODE) == node
        )

    def copies(self, unreachable: Collection[str]) -> CopyCounts:
        """Count the copies by whether their nodes can be reached. `unreachable` has the names of those that can't."""
        gone = [at for at, name in enumerate(self.names()) if name in unreachable]
        active = Counter(row[0] for row in self.rows)
        replicas = Counter(node for row in self.rows for node in row[1:])
        active_unreachable, unknown = sum(active[at] for at in gone), sum(replicas[at] for at in gone)
        return CopyCounts(
            vbuckets=len(self.rows),
            active=len(self.rows) - active_unreachable - active[NO_NODE],
            active_unreachable=active_unreachable,
            active_missing=active[NO_NODE],
            replicas_wanted=replicas.total(),
            replicas=replicas.total() - unknown - replicas[NO_NODE],
            replicas_unknown=unknown,
            replicas_missing=replicas[NO_NODE],
        )

    def is_handed_over_to(self, vbucket: int, node: int | None) -> bool:
        """Whether a takeover may make the vbucket active on this node."""
        return node is not None and self.handing_over.get(vbucket) == node != self.rows[vbucket][0]

    def is_frozen(self, vbucket: int) -> bool:
        return self.handing_over.get(vbucket) == self.rows[vbucket][0]

    def topology(self, vbucket: int) -> tuple[list[str | None], ...]:
        """Return the chain of a vbucket's copies, as set-vbucket takes it."""
        names = self.names()
        return ([None if node == NO_NODE else names[node] for node in self.rows[vbucket]],)

    def encode(self, *, this_node: int | None = None, with_login: bool = False) -> bytes:
        """Encode the config for clients, or with the log-in for nodes, which store it."""
        ours: dict[str, Any] = {
            "building": {str(vbucket): list(nodes) for vbucket, nodes in self.building.items()},
            "handing_over": {str(vbucket): node for vbucket, node in self.handing_over.items()},
            "settled": self.settled,
            "coordinator": self.coordinator,
        }
        if self.settings is not None:
            ours["settings"] = dict(self.settings)
        if with_login and self.login is not None:
            ours["login"] = [self.login.user, self.login.password]
        return _encode(_bucket_members(self._cluster(this_node), self._bucket_map()) | {_OUR_MEMBER: ours})

    def encode_for_node(self, *, this_node: int | None) -> bytes:
        """Encode the config of the node alone, for a connection with no bucket."""
        return node_config(self._cluster(this_node))

    def _cluster(self, this_node: int | None) -> ClusterNodes:
        return ClusterNodes(
            nodes=self.nodes,
            this_node=this_node,
            revision=self.revision,
            revision_epoch=self.epoch,
            uuid=self.cluster_uuid or self.uuid,
            name=self.cluster_name,
        )

    def _bucket_map(self) -> BucketMap:
        return BucketMap(name=self.bucket, uuid=self.uuid, replicas=self.replicas, vbucket_map=self.rows)

    @classmethod
    def decode(cls, config: bytes | memoryview) -> PublishedConfig | None:
        """Read a config; None if no coordinator has published it. Raises `MalformedJson` if it can't be read."""
        try:
            members = json.loads(bytes(config))
            if not isinstance(members, dict) or _OUR_MEMBER not in members:
                return None
            ours, server_map = members[_OUR_MEMBER], members["vBucketServerMap"]
            login = ours.get("login")
            decoded = cls(
                revision=int(members["rev"]),
                epoch=int(members["revEpoch"]),
                bucket=str(members["name"]),
                uuid=str(members["uuid"]),
                cluster_uuid=_cluster_uuid(members),
                cluster_name=str(members.get("clusterName", "")),
                settings=None if ours.get("settings") is None else dict(ours["settings"]),
                nodes=tuple(
                    _node_address(node["hostname"], node["services"], node.get("nodeUUID", ""))
                    for node in members["nodesExt"]
                ),
                replicas=int(server_map["numReplicas"]),
                rows=tuple(tuple(int(node) for node in row) for row in server_map["vBucketMap"]),
                building={int(vbucket): tuple(map(int, builders)) for vbucket, builders in ours["building"].items()},
                handing_over={int(vbucket): int(node) for vbucket, node in ours["handing_over"].items()},
                settled=bool(ours["settled"]),
                coordinator=str(ours.get("coordinator", "")),
                login=None if login is None else Credentials(str(login[0]), str(login[1])),
            )
            decoded._check()
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise MalformedJson(f"the cluster config can't be read: {error!r}") from error
        except MalformedJson:
            raise
        except HeadwaterError as error:
            raise MalformedJson(f"the cluster config can't be read: {error.reason}") from error
        return decoded

    def _check(self) -> None:
        named = [node for builders in self.building.values() for node in builders] + list(self.handing_over.values())
        if not all(0 <= node < len(self.nodes) for node in named):
            raise MalformedJson(f"it names a node beyond its {len(self.nodes)}")
        if not all(0 <= vbucket < len(self.rows) for vbucket in (*self.building, *self.handing_over)):
            raise MalformedJson(f"it names a vbucket beyond its {len(self.rows)}")
        if self.login is not None and self.login.user != nodes_user(self.bucket):
            raise MalformedJson(f"nodes log in to each other as {nodes_user(self.bucket)}, and as no other user")
        _check_map(self._cluster(None), self._bucket_map())


def _cluster_uuid(members: Mapping[str, Any]) -> str:
    """Return the uuid of the cluster; empty if it is the bucket's own, as in configs that older nodes published."""
    uuid = str(members.get("clusterUUID", ""))
    return "" if uuid == members["uuid"] else uuid


def _node_address(host: str, services: Mapping[str, Any], uuid: object = "") -> NodeAddress:
    return NodeAddress(
        host=host,
        kv_port=services.get(_KV),
        kv_tls_port=services.get(_KV_TLS),
        http_port=services.get(_HTTP),
        http_tls_port=services.get(_HTTP_TLS),
        uuid=str(uuid),
    )


# --- what is read from any server ---------------------------------------------------------------------------------


def malformed_config(reason: str) -> MalformedJson:
    return MalformedJson(f"the cluster config can't be read: {reason}", hint=_HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigNode:
    """A node in `nodesExt`, by one of its addresses."""

    host: str | None
    """None stands for the host that the config was requested from: a node may not know its own name."""
    services: Mapping[str, Any]
    """Ports by service. An invalid one matters only to callers that use it."""
    is_this_node: bool = False
    """Whether this node has given the config."""
    uuid: str = ""
    external: ConfigNode | None = None
    """The same node as clients outside of its network reach it."""

    def kv_port(self, *, tls: bool) -> int | None:
        return self._port(_KV_TLS if tls else _KV)

    def http_port(self, *, tls: bool) -> int | None:
        return self._port(_HTTP_TLS if tls else _HTTP)

    @property
    def config_ports(self) -> frozenset[int]:
        """The ports at which a config can be requested. They are only compared, so invalid ones are left out."""
        ports = (self.services.get(service) for service in (_KV, _KV_TLS, _HTTP, _HTTP_TLS))
        return frozenset(port for port in ports if type(port) is int)

    def address(self) -> NodeAddress:
        if self.host is None:
            raise malformed_config("a node does not say by which host it is reached")
        return _node_address(self.host, self.services, self.uuid)

    def _port(self, service: str) -> int | None:
        port = self.services.get(service)
        if port is not None and not (type(port) is int and 0 < port <= PORT_MAX):
            raise malformed_config(f"{port!r} is not a port")
        return port


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """A config as a server gave it. Each part is checked when it is read, and is empty if it may be missing.

    Every fault raises `MalformedJson`.
    """

    _members: dict[str, Any]

    @classmethod
    def decode(cls, config: bytes) -> ClusterConfig:
        """Read a config; no bytes, as a bare node gives them, are an empty config."""
        try:
            members = json.loads(config or b"{}")
        except (ValueError, RecursionError) as error:
            raise malformed_config("it is not JSON") from error
        return cls.of(members)

    @classmethod
    def of(cls, members: Any) -> ClusterConfig:
        """Return the same for JSON that is parsed already."""
        if not isinstance(members, dict):
            raise malformed_config("it is not an object")
        return cls(members)

    @property
    def epoch(self) -> int:
        return _get(self._members, "revEpoch", int, 0)

    @property
    def revision(self) -> int:
        return _get(self._members, "rev", int, 0)

    @property
    def bucket(self) -> str:
        return _get(self._members, "name", str, "")

    @property
    def uuid(self) -> str:
        return _get(self._members, "uuid", str, "")

    @property
    def cluster_uuid(self) -> str:
        return _get(self._members, "clusterUUID", str, "")

    @property
    def cluster_name(self) -> str:
        return _get(self._members, "clusterName", str, "")

    @property
    def capabilities(self) -> list[str]:
        return _get(self._members, "bucketCapabilities", list, [])

    # --- vbuckets -------------------------------------------------------------------------------------------------

    @property
    def is_of_bucket(self) -> bool:
        """Whether it has a vbucket map."""
        return "vBucketServerMap" in self._members

    @property
    def server_map(self) -> dict[str, Any]:
        """The vbucket map as JSON, for a reader that passes it on."""
        return _get(self._members, "vBucketServerMap", dict, {})

    @property
    def replicas(self) -> int:
        return _get(self.server_map, "numReplicas", int, 0)

    @property
    def servers(self) -> list[str]:
        """The key-value addresses of the bucket's nodes, with `HOST_PLACEHOLDER` where a node does not know its own."""
        servers = _get(self.server_map, "serverList", list, None if self.is_of_bucket else [])
        for server in servers:
            if not isinstance(server, str):
                raise malformed_config(f"{server!r} in serverList is not a host and a port")
        return servers

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """For every vbucket the active node, then the replicas, as indices of `servers`; -1 is no node."""
        rows = _get(self.server_map, "vBucketMap", list, None if self.is_of_bucket else [])
        nodes = len(self.servers)
        if len(rows) > VBUCKETS_MAX:
            raise malformed_config(f"a bucket has 1 to {VBUCKETS_MAX} vbuckets, not {len(rows)}")
        for vbucket, row in enumerate(rows):
            if not (
                isinstance(row, list) and row and all(type(node) is int and NO_NODE <= node < nodes for node in row)
            ):
                raise malformed_config(f"vbucket {vbucket} is at {row!r}, while there are {nodes} nodes")
        return tuple(tuple(row) for row in rows)

    # --- nodes ----------------------------------------------------------------------------------------------------

    @property
    def has_nodes(self) -> bool:
        """Whether it has `nodesExt`, which very old servers do not."""
        return "nodesExt" in self._members

    @property
    def nodes(self) -> list[ConfigNode]:
        """All nodes of the cluster, those of the bucket first."""
        return [_config_node(node) for node in _get(self._members, "nodesExt", list, [])]

    @property
    def bucket_nodes(self) -> list[ConfigNode]:
        """The nodes of the bucket, in the order of `servers`. The others are not checked."""
        nodes, count = _get(self._members, "nodesExt", list, []), len(self.servers)
        if len(nodes) < count:
            raise malformed_config(f"nodesExt has {len(nodes)} nodes of the {count} in serverList")
        return [_config_node(node) for node in nodes[:count]]

    @property
    def this_node(self) -> ConfigNode | None:
        """The node that has given the config."""
        return next((node for node in self.nodes if node.is_this_node), None)


def _config_node(members: Any) -> ConfigNode:
    if not isinstance(members, dict):
        raise malformed_config("a node in nodesExt is not an object")
    services = _get(members, "services", dict, {})
    alternates = _get(members, "alternateAddresses", dict, {})
    external = None
    if "external" in alternates:
        outside = _get(alternates, "external", dict)
        # An external address without ports has the node's own ports; with ports, only those are reachable.
        ports = _get(outside, "ports", dict) if "ports" in outside else services
        external = ConfigNode(host=_host(outside.get("hostname")), services=ports)
    return ConfigNode(
        host=_host(members.get("hostname")),
        services=services,
        is_this_node=bool(members.get("thisNode")),
        uuid=_get(members, "nodeUUID", str, ""),
        external=external,
    )


def _host(host: Any) -> str | None:
    if host is None or host == HOST_PLACEHOLDER:
        return None
    if not isinstance(host, str) or not host:
        raise malformed_config(f"{host!r} is not a host name")
    return host.removeprefix("[").removesuffix("]")


def _get(parent: dict[str, Any], name: str, kind: type[T], default: T | None = None) -> T:
    value = parent.get(name, default)
    # True is an int to Python, and no number to any other reader.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise malformed_config(f"{name} is missing or not what it should be")
    return value
