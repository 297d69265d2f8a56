"""The config that a coordinator publishes: what every node of a cluster is told, keeps, and acts on.

It is the cluster config that clients read (`cluster_config`) with one more member, `headwater`, which they ignore:

    {"building": {"12": [2]}, "handing_over": {"13": 0}, "settled": false, "coordinator": "5f0c…",
     "login": ["@cluster-…", "…"]}

* `building`: nodes that build a copy of a vbucket from its active node, though the map does not name them yet, or keep
  up one that the map no longer names. Such a copy may be promoted, and is part of no write's majority.
* `handing_over`: the vbucket is on its way to be active on this node. Neither that node nor the one that was active
  touches its state because of the config: the takeover decides. Where this is the node that is active already, the
  vbucket is *frozen*: nobody streams it to another node or takes it over, so that whoever coordinates can look at it.
* `settled`: every copy is where the map says. What a node has beyond it may go.
* `coordinator`: a name that each run of a command makes up, so that no two of them ever publish the same config.
* `login`: how the nodes log in with each other, for as long as there is the cluster. No config that is shown has it.

A config without that member is one of somebody else's (`set-cluster-config` on a bare node): it is shown, and not acted
on. The same bytes go to every node, and each marks itself as `thisNode` in what it shows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headwater.client.connection_string import Address
from headwater.client.handshake import Credentials
from headwater.errors import HeadwaterError, MalformedJson
from headwater.node.cluster_config import (
    NOBODY,
    BucketMap,
    Cluster,
    NodeAddress,
    bucket_members,
    check_map,
    encode_config,
    node_config,
)

OUR_MEMBER = "headwater"
NODES_USER = "@cluster"
"""Whom nodes log in to each other as, with the bucket's name behind it: each bucket is a cluster of its own."""
_EPOCH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedConfig:
    """See the module. A value: who changes it makes a new one with a higher revision."""

    revision: int
    epoch: int = _EPOCH
    bucket: str
    uuid: str
    nodes: tuple[NodeAddress, ...]
    replicas: int = 0
    rows: tuple[tuple[int, ...], ...]
    """For every vbucket the active node, then the replicas, as indices of `nodes`; -1 is nobody."""
    building: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    handing_over: Mapping[int, int] = field(default_factory=dict)
    settled: bool = False
    coordinator: str = ""
    login: Credentials | None = field(default=None, repr=False)

    @property
    def version(self) -> tuple[int, int]:
        return self.epoch, self.revision

    def names(self) -> tuple[str, ...]:
        """The nodes as topologies name them: by their key-value addresses."""
        return tuple(node.kv_address for node in self.nodes)

    def index_of(self, node: NodeAddress) -> int | None:
        """Which of the nodes this one is. A node is the one with its key-value address, whatever else has changed."""
        names = self.names()
        return names.index(node.kv_address) if node.kv_address in names else None

    def holders(self, vbucket: int) -> tuple[int, ...]:
        """All nodes that have, get or may still have a copy, each once."""
        row = [node for node in self.rows[vbucket] if node != NOBODY]
        handed = [self.handing_over[vbucket]] if vbucket in self.handing_over else []
        return tuple(dict.fromkeys([*row, *self.building.get(vbucket, ()), *handed]))

    def is_holder(self, vbucket: int, node: int) -> bool:
        """Whether a node is one of these. Asked of every vbucket, whenever there is a newer config."""
        return (
            node in self.rows[vbucket]
            or node in self.building.get(vbucket, ())
            or self.handing_over.get(vbucket, NOBODY) == node
        )

    def is_handed_over_to(self, vbucket: int, node: int | None) -> bool:
        """Whether a takeover may make the vbucket active on this node."""
        return node is not None and self.handing_over.get(vbucket) == node != self.rows[vbucket][0]

    def is_frozen(self, vbucket: int) -> bool:
        return self.handing_over.get(vbucket) == self.rows[vbucket][0]

    def topology(self, vbucket: int) -> tuple[list[str | None], ...]:
        """The chain of a vbucket's copies, as set-vbucket takes it."""
        names = self.names()
        return ([None if node == NOBODY else names[node] for node in self.rows[vbucket]],)

    def next(self, **changes: Any) -> PublishedConfig:
        return replace(self, revision=self.revision + 1, **changes)

    # --- JSON -----------------------------------------------------------------------------------------------------

    def encode(self, *, this_node: int | None = None, with_login: bool = False) -> bytes:
        """As clients read it, or with the log-in as nodes are told it and keep it."""
        members = bucket_members(self._cluster(this_node), self._bucket_map())
        if this_node is None:
            for node in members["nodesExt"]:
                node.pop("thisNode", None)
        ours: dict[str, Any] = {
            "building": {str(vbucket): list(nodes) for vbucket, nodes in self.building.items()},
            "handing_over": {str(vbucket): node for vbucket, node in self.handing_over.items()},
            "settled": self.settled,
            "coordinator": self.coordinator,
        }
        if with_login and self.login is not None:
            ours["login"] = [self.login.user, self.login.password]
        return encode_config(members | {OUR_MEMBER: ours})

    def encode_for_node(self, *, this_node: int | None) -> bytes:
        """The config of the node alone, for a connection with no bucket."""
        return node_config(self._cluster(this_node))

    def _cluster(self, this_node: int | None) -> Cluster:
        return Cluster(
            nodes=self.nodes,
            this_node=this_node or 0,
            revision=self.revision,
            revision_epoch=self.epoch,
            uuid=self.uuid,
        )

    def _bucket_map(self) -> BucketMap:
        return BucketMap(name=self.bucket, uuid=self.uuid, replicas=self.replicas, vbucket_map=self.rows)

    @classmethod
    def decode(cls, config: bytes | memoryview) -> PublishedConfig | None:
        """Read a config, or None where it is not one of a coordinator. `MalformedJson` is one that can't be read."""
        try:
            members = json.loads(bytes(config))
            if not isinstance(members, dict) or OUR_MEMBER not in members:
                return None
            return cls._decode(members)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise MalformedJson(f"the cluster config can't be read: {error!r}") from error
        except MalformedJson:
            raise
        except HeadwaterError as error:
            raise MalformedJson(f"the cluster config can't be read: {error.reason}") from error

    @classmethod
    def _decode(cls, members: dict[str, Any]) -> PublishedConfig:
        ours, server_map = members[OUR_MEMBER], members["vBucketServerMap"]
        nodes = tuple(node_address(node) for node in members["nodesExt"])
        login = ours.get("login")
        decoded = cls(
            revision=int(members["rev"]),
            epoch=int(members["revEpoch"]),
            bucket=str(members["name"]),
            uuid=str(members["uuid"]),
            nodes=nodes,
            replicas=int(server_map["numReplicas"]),
            rows=tuple(tuple(int(node) for node in row) for row in server_map["vBucketMap"]),
            building={
                int(vbucket): tuple(int(node) for node in builders) for vbucket, builders in ours["building"].items()
            },
            handing_over={int(vbucket): int(node) for vbucket, node in ours["handing_over"].items()},
            settled=bool(ours["settled"]),
            coordinator=str(ours.get("coordinator", "")),
            login=None if login is None else Credentials(str(login[0]), str(login[1])),
        )
        decoded._check()
        return decoded

    def _check(self) -> None:
        named = [node for builders in self.building.values() for node in builders] + list(self.handing_over.values())
        if not all(0 <= node < len(self.nodes) for node in named):
            raise MalformedJson(f"it names a node beyond its {len(self.nodes)}")
        if not all(0 <= vbucket < len(self.rows) for vbucket in (*self.building, *self.handing_over)):
            raise MalformedJson(f"it names a vbucket beyond its {len(self.rows)}")
        if self.login is not None and self.login.user != nodes_user(self.bucket):
            raise MalformedJson(f"nodes log in to each other as {nodes_user(self.bucket)}, and as nobody else")
        check_map(self._cluster(None), self._bucket_map())


def nodes_user(bucket: str) -> str:
    """The user that nodes of this bucket's cluster are to each other."""
    return f"{NODES_USER}-{bucket}"


def node_address(members: Mapping[str, Any]) -> NodeAddress:
    """A node as `nodesExt` has it."""
    services = members["services"]
    return NodeAddress(
        host=members["hostname"],
        kv_port=services.get("kv"),
        kv_tls_port=services.get("kvSSL"),
        http_port=services.get("mgmt"),
        http_tls_port=services.get("mgmtSSL"),
    )


def kv_address(node: NodeAddress, *, tls: bool) -> Address:
    """Where to connect to."""
    port = node.kv_tls_port if tls else node.kv_port
    return Address(node.host, port or node.kv_port or node.kv_tls_port or 0)
