"""The cluster map: which node of a bucket has which vbucket, and the node's address for this client.

Every part of the client that contacts a vbucket uses a `ClusterMap`. `protocol.cluster_config` parses the JSON; this
module chooses the addresses. Nodes have addresses for each other and may have others for the outside, and a client can
seldom reach both. The address that the client itself was given decides, so each map records its `network`: a client
that reads a newer config should pass that network instead of choosing again.

The vbucket of a key is fixed: every client and server derives it from the CRC32 of the key.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from ipaddress import AddressValueError, IPv6Address

from headwater.client.connection_string import KV_PORT, Address, parse_address
from headwater.errors import InvalidConnectionString, NoSuchNetwork, NotMyVBucket, TemporaryFailure
from headwater.protocol.cluster_config import (
    HOST_PLACEHOLDER,
    ClusterConfig,
    ConfigNode,
    malformed_config,
)
from headwater.protocol.numbers import VBucketId
from headwater.protocol.numbers import vbucket_of as vbucket_of
from headwater.protocol.status import Status


class Network(StrEnum):
    """Which of a node's addresses to connect to."""

    AUTO = "auto"
    """The network of the address in the connection string."""
    DEFAULT = "default"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMap:
    """The nodes of a bucket, and the vbuckets of each. It is immutable: a newer config makes a new map."""

    epoch: int
    revision: int
    bucket: str
    uuid: str
    nodes: tuple[Address, ...]
    """The key-value addresses."""
    vbucket_nodes: tuple[tuple[int, ...], ...]
    """For each vbucket, the active node and the replicas, as indices of `nodes`; -1 means no node."""
    network: Network = Network.DEFAULT
    """The network of the addresses in `nodes`; never AUTO."""

    @property
    def vbuckets(self) -> int:
        return len(self.vbucket_nodes)

    @property
    def version(self) -> tuple[int, int]:
        """A map with a higher version is newer."""
        return self.epoch, self.revision

    def active_node(self, vbucket: int) -> int:
        """Return the index of the node where the vbucket is active, or -1."""
        return self.vbucket_nodes[vbucket][0]

    def address_of(self, vbucket: VBucketId) -> Address:
        """Return the address of the vbucket's active node; raises `NotMyVBucket` if it has none."""
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
        """Decode the JSON that the address `asked` (a key-value port or a cluster manager's) returned.

        Raises `TemporaryFailure` while the bucket is being created, `NoSuchNetwork` if nodes have no address on the
        network, and `MalformedJson` if the config is invalid.
        """
        read = ClusterConfig.decode(config)
        if not read.is_of_bucket:
            raise malformed_config("it has no vBucketServerMap, so it is the cluster's and not a bucket's")
        rows = read.rows
        if not rows:
            raise TemporaryFailure(
                Status.ETMPFAIL,
                "the bucket has no vbuckets yet",
                hint="Wait until the bucket has been created, and try again",
            )
        if read.has_nodes:
            nodes = read.bucket_nodes
            network = _choose_network(nodes, asked=asked, network=network)
            addresses = tuple(_address(node, asked=asked, network=network, tls=tls) for node in nodes)
        else:
            addresses = _server_addresses(read.servers, asked=asked, tls=tls, network=network)
            network = Network.DEFAULT
        return cls(
            epoch=read.epoch,
            revision=read.revision,
            bucket=read.bucket,
            uuid=read.uuid,
            nodes=addresses,
            vbucket_nodes=rows,
            network=network,
        )


# --- choosing addresses -------------------------------------------------------------------------------------------


def _choose_network(nodes: list[ConfigNode], *, asked: Address, network: Network) -> Network:
    """Return the network to use. The address that was asked decides, unless the caller does.

    A client outside can't reach the addresses that nodes use among themselves, and can only know the external ones.
    """
    if network is not Network.AUTO:
        return network
    is_inside = any(_is_at(node, asked) for node in nodes)
    is_outside = any(node.external is not None and _is_at(node.external, asked) for node in nodes)
    return Network.EXTERNAL if is_outside and not is_inside else Network.DEFAULT


def _is_at(node: ConfigNode, asked: Address) -> bool:
    host = asked.host if node.host is None else node.host
    return _comparable(host) == _comparable(asked.host) and asked.port in node.config_ports


def _comparable(host: str) -> str:
    """Normalize a host name, so that equal results mean the same host."""
    try:
        return str(IPv6Address(host))
    except AddressValueError:
        return host.lower().removesuffix(".")


def _address(node: ConfigNode, *, asked: Address, network: Network, tls: bool) -> Address:
    chosen = node if network is Network.DEFAULT else node.external
    port = None if chosen is None else chosen.kv_port(tls=tls)
    if chosen is not None and port is not None:
        return Address(asked.host if chosen.host is None else chosen.host, port)
    service = "kvSSL" if tls else "kv"
    if network is Network.DEFAULT:
        raise malformed_config(f"a node of the bucket has no service {service}")
    host = asked.host if node.host is None else node.host
    raise _no_network(f"node {host} has no external address for the service {service}")


def _server_addresses(servers: list[str], *, asked: Address, tls: bool, network: Network) -> tuple[Address, ...]:
    """Return the addresses from `serverList`, for servers that are too old for nodesExt."""
    if tls:
        raise malformed_config("it has no nodesExt, and so no ports with TLS")
    if network is Network.EXTERNAL:
        raise _no_network("the nodes have no external addresses")
    host = f"[{asked.host}]" if ":" in asked.host else asked.host
    addresses = []
    for server in servers:
        try:
            addresses.append(parse_address(server.replace(HOST_PLACEHOLDER, host), default_port=KV_PORT))
        except InvalidConnectionString as error:
            raise malformed_config(f"{server!r} in serverList is not a host and a port") from error
    return tuple(addresses)


def _no_network(reason: str) -> NoSuchNetwork:
    return NoSuchNetwork(
        f"the external network can't be used: {reason}",
        hint="Omit network=external, or give every node an alternate address",
    )
