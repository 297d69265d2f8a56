"""How a cluster is: its nodes, what each of them has, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.cluster.survey import Survey
from headwater.node.cluster_config import NOBODY
from headwater.node.published_config import PublishedConfig
from headwater.protocol.numbers import VBucketId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    name: str
    http: str
    is_reachable: bool
    active: int
    replica: int
    building: int
    behind: int
    """Changes that its replicas have not got yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    bucket: str
    uuid: str
    revision: int
    replicas: int
    vbuckets: int
    settled: bool
    """Every copy is where the map says. If not, there is a rebalance to be done."""
    missing: int
    """Replicas that the map has no node for."""
    orphans: int
    """Vbuckets that no node has."""
    nodes: tuple[NodeStatus, ...]
    disagreeing: tuple[str, ...] = ()
    """Nodes that go by another config, as two commands at one time may leave them. The next command ends it."""


def status_of(config: PublishedConfig, found: Survey, *, disagreeing: tuple[str, ...] = ()) -> ClusterStatus:
    nodes = tuple(
        NodeStatus(
            name=node.kv_address,
            http=node.http_address,
            is_reachable=node.kv_address not in found.unreachable,
            active=sum(row[0] == at for row in config.rows),
            replica=sum(at in row[1:] for row in config.rows),
            building=sum(at in builders for builders in config.building.values()),
            behind=_behind(config, found, at),
        )
        for at, node in enumerate(config.nodes)
    )
    return ClusterStatus(
        bucket=config.bucket,
        uuid=config.uuid,
        revision=config.revision,
        replicas=config.replicas,
        vbuckets=len(config.rows),
        settled=config.settled,
        missing=sum(node == NOBODY for row in config.rows for node in row[1:]),
        orphans=sum(row[0] == NOBODY for row in config.rows),
        nodes=nodes,
        disagreeing=disagreeing,
    )


def _behind(config: PublishedConfig, found: Survey, node: int) -> int:
    behind = 0
    names = config.names()
    for number, row in enumerate(config.rows):
        vbucket = VBucketId(number)
        if node not in row[1:] or row[0] == NOBODY:
            continue
        active, copy = found.copy(names[row[0]], vbucket), found.copy(names[node], vbucket)
        if active is not None:
            behind += max(0, active.seqno - (0 if copy is None else copy.seqno))
    return behind
