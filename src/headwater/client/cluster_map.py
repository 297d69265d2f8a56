"""The cluster map: which node has which vbucket, read from the cluster config that a server gives as JSON.

The parts of a config that matter here:

* `vBucketServerMap.serverList` lists the nodes of the bucket, and `vBucketMap` has a row for every vbucket: the index
  of its active node in that list, then those of its replicas, -1 where there is none;
* `nodesExt` lists the same nodes in the same order (and after them nodes that the bucket is not on) with the ports of
  every service, TLS ones included, and with the addresses they have for others (`alternateAddresses`);
* a host that is missing, or is `$HOST`, is the one the config was asked of: a node may not know its own name.

A client can reach the nodes by the addresses they have among themselves, or by those they have for others, seldom by
both. The address that it was given itself tells which, so every map says what it was made for (`network`): a client
that reads a newer config should ask for that network, and not guess again.

Which vbucket a key belongs to is no one's choice: every client and server takes it from the CRC32 of the key.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import AddressValueError, IPv6Address
from typing import Any

from headwater.client.connection_string import KV_PORT, Address, parse_address
from headwater.errors import InvalidConnectionString, MalformedJson, NoSuchNetwork, NotMyVBucket, TemporaryFailure
from headwater.protocol.numbers import VBucketId
from headwater.protocol.status import Status

VBUCKETS_MAX = 0x10000
"""What the 16 bits of a request's header can name. A bucket has 1024 in Couchbase."""

_HINT = "Check that the server is a Couchbase or Headwater node; if it is, this config is a fault of it"
_HOST_PLACEHOLDER = "$HOST"


class Network(StrEnum):
    """Which of its addresses to reach a node by."""

    AUTO = "auto"
    """The one that the connection string has used."""
    DEFAULT = "default"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMap:
    """The nodes of a bucket, and what each has. A newer config makes a new map."""

    epoch: int
    revision: int
    bucket: str
    uuid: str
    nodes: tuple[Address, ...]
    """The key-value addresses."""
    vbucket_nodes: tuple[tuple[int, ...], ...]
    """For every vbucket the active node and the replicas, as indices of `nodes`; -1 is nobody."""
    network: Network = Network.DEFAULT
    """Which of their addresses `nodes` are; never AUTO."""

    @property
    def vbuckets(self) -> int:
        return len(self.vbucket_nodes)

    @property
    def version(self) -> tuple[int, int]:
        """Maps with a higher one are newer."""
        return self.epoch, self.revision

    def active_node(self, vbucket: int) -> int:
        """The index of the node that has the vbucket, or -1."""
        return self.vbucket_nodes[vbucket][0]

    def address_of(self, vbucket: VBucketId) -> Address:
        """The node that has the vbucket; `NotMyVBucket` while nobody has it."""
        node = self.active_node(vbucket)
        if node < 0:
            raise NotMyVBucket(
                Status.NOT_MY_VBUCKET,
                f"vbucket {vbucket} has no active node",
                hint="Wait for the failover or the rebalance to end, and read the cluster map again",
            )
        return self.nodes[node]

    @classmethod
    def decode(cls, config: bytes, *, asked: Address, tls: bool = False, network: Network = Network.AUTO) -> ClusterMap:
        """Read the JSON that was given at `asked`, which is a key-value port or a cluster manager's.

        `TemporaryFailure` is the answer of a bucket that is being made, `NoSuchNetwork` that of nodes which can't be
        reached on the network, and `MalformedJson` all that is wrong.
        """
        root = _parse(config)
        vbucket_map = _get(root, "vBucketServerMap", dict)
        server_list = _get(vbucket_map, "serverList", list)
        vbucket_nodes = _decode_vbucket_map(_get(vbucket_map, "vBucketMap", list), nodes=len(server_list))
        if "nodesExt" in root:
            extended = _decode_nodes_ext(_get(root, "nodesExt", list), count=len(server_list), asked=asked, tls=tls)
            network = _choose_network(extended, asked=asked, network=network)
            nodes = _addresses(extended, network=network, tls=tls)
        else:
            nodes = _decode_server_list(server_list, asked=asked, tls=tls, network=network)
            network = Network.DEFAULT
        return cls(
            epoch=_get(root, "revEpoch", int, 0),
            revision=_get(root, "rev", int, 0),
            bucket=_get(root, "name", str, ""),
            uuid=_get(root, "uuid", str, ""),
            nodes=nodes,
            vbucket_nodes=vbucket_nodes,
            network=network,
        )


# --- reading the config -------------------------------------------------------------------------------------------


_CONFIG_SERVICES = ("kv", "kvSSL", "mgmt", "mgmtSSL")
"""Where a config can be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A node on one network."""

    host: str
    port: int | None
    """The key-value port; None where the service is not there, with or without TLS as it is needed."""
    ports: frozenset[int]
    """Those of a key-value service or a cluster manager."""

    def is_at(self, asked: Address) -> bool:
        return _comparable(self.host) == _comparable(asked.host) and asked.port in self.ports


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    default: _Place
    external: _Place | None


def _malformed(reason: str) -> MalformedJson:
    return MalformedJson(f"the cluster config can't be read: {reason}", hint=_HINT)


def _parse(config: bytes) -> dict[str, Any]:
    try:
        root = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise _malformed("it is not JSON") from error
    if not isinstance(root, dict):
        raise _malformed("it is not an object")
    if "vBucketServerMap" not in root:
        raise _malformed("it has no vBucketServerMap, so it is the cluster's and not a bucket's")
    return root


def _get(parent: dict[str, Any], name: str, kind: type, default: Any = None) -> Any:
    value = parent.get(name, default)
    # True is an int to Python, and no number to anybody else.
    if not isinstance(value, kind) or isinstance(value, bool):
        raise _malformed(f"{name} is missing or not what it should be")
    return value


def _decode_vbucket_map(rows: list[Any], *, nodes: int) -> tuple[tuple[int, ...], ...]:
    if not rows:
        raise TemporaryFailure(
            Status.ETMPFAIL, "the bucket has no vbuckets yet", hint="Wait until the bucket is made, and try again"
        )
    if len(rows) > VBUCKETS_MAX:
        raise _malformed(f"a bucket has 1 to {VBUCKETS_MAX} vbuckets, not {len(rows)}")
    for vbucket, row in enumerate(rows):
        if not (isinstance(row, list) and row and all(type(node) is int and -1 <= node < nodes for node in row)):
            raise _malformed(f"vbucket {vbucket} is at {row!r}, while there are {nodes} nodes")
    return tuple(tuple(row) for row in rows)


def _decode_nodes_ext(nodes: list[Any], *, count: int, asked: Address, tls: bool) -> list[_Node]:
    if len(nodes) < count:
        raise _malformed(f"nodesExt has {len(nodes)} nodes of the {count} in serverList")
    return [_decode_node(node, asked=asked, tls=tls) for node in nodes[:count]]


def _decode_node(node: Any, *, asked: Address, tls: bool) -> _Node:
    if not isinstance(node, dict):
        raise _malformed("a node in nodesExt is not an object")
    services = _get(node, "services", dict)
    alternates = _get(node, "alternateAddresses", dict, {})
    default = _decode_place(node.get("hostname"), services, asked=asked, tls=tls)
    if "external" not in alternates:
        return _Node(default=default, external=None)
    external = _get(alternates, "external", dict)
    # Without ports of its own the other address has the node's own ports; with some, only those are reachable.
    ports = _get(external, "ports", dict) if "ports" in external else services
    return _Node(default=default, external=_decode_place(external.get("hostname"), ports, asked=asked, tls=tls))


def _decode_place(host: Any, services: dict[str, Any], *, asked: Address, tls: bool) -> _Place:
    # Only compared, never connected to: what is no port is just none that was asked.
    ports = (services.get(service) for service in _CONFIG_SERVICES)
    return _Place(
        host=_decode_host(host, asked),
        port=_decode_port(services, _service(tls=tls)),
        ports=frozenset(port for port in ports if type(port) is int),
    )


def _service(*, tls: bool) -> str:
    return "kvSSL" if tls else "kv"


def _decode_port(services: dict[str, Any], service: str) -> int | None:
    port = services.get(service)
    if port is not None and not (type(port) is int and 0 < port <= 0xFFFF):
        raise _malformed(f"{port!r} is not a port")
    return port


def _decode_host(host: Any, asked: Address) -> str:
    if host is None or host == _HOST_PLACEHOLDER:
        return asked.host
    if not isinstance(host, str) or not host:
        raise _malformed(f"{host!r} is not a host name")
    return host.removeprefix("[").removesuffix("]")


def _comparable(host: str) -> str:
    """Two hosts are one if this is the same of both."""
    try:
        return str(IPv6Address(host))
    except AddressValueError:
        return host.lower().removesuffix(".")


def _decode_server_list(servers: list[Any], *, asked: Address, tls: bool, network: Network) -> tuple[Address, ...]:
    """The nodes of servers so old that they have no nodesExt."""
    if tls:
        raise _malformed("it has no nodesExt, and so no ports with TLS")
    if network is Network.EXTERNAL:
        raise _no_network("the nodes have no external addresses")
    return tuple(_decode_server(server, asked=asked) for server in servers)


def _decode_server(server: Any, *, asked: Address) -> Address:
    if not isinstance(server, str):
        raise _malformed(f"{server!r} in serverList is not a host and a port")
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    try:
        return parse_address(server.replace(_HOST_PLACEHOLDER, host), default_port=KV_PORT)
    except InvalidConnectionString as error:
        raise _malformed(f"{server!r} in serverList is not a host and a port") from error


def _choose_network(nodes: list[_Node], *, asked: Address, network: Network) -> Network:
    """The network to use. The address that was asked decides, unless the caller does.

    A client outside can't reach the addresses that nodes have among themselves, and it can only know those of outside.
    """
    if network is not Network.AUTO:
        return network
    is_inside = any(node.default.is_at(asked) for node in nodes)
    is_outside = any(node.external is not None and node.external.is_at(asked) for node in nodes)
    return Network.EXTERNAL if is_outside and not is_inside else Network.DEFAULT


def _addresses(nodes: list[_Node], *, network: Network, tls: bool) -> tuple[Address, ...]:
    return tuple(_address(node, network=network, tls=tls) for node in nodes)


def _address(node: _Node, *, network: Network, tls: bool) -> Address:
    place = node.default if network is Network.DEFAULT else node.external
    if place is not None and place.port is not None:
        return Address(place.host, place.port)
    service = _service(tls=tls)
    if network is Network.DEFAULT:
        raise _malformed(f"a node of the bucket has no service {service}")
    raise _no_network(f"node {node.default.host} has no external address for the service {service}")


def _no_network(reason: str) -> NoSuchNetwork:
    return NoSuchNetwork(
        f"the external network can't be used: {reason}",
        hint="Leave network=external out, or give every node an alternate address",
    )


# --- keys to vbuckets ---------------------------------------------------------------------------------------------


def vbucket_of(key: bytes, vbuckets: int) -> VBucketId:
    """The vbucket of a key, given without its collection id."""
    return VBucketId((zlib.crc32(key) >> 16 & 0x7FFF) % vbuckets)
