"""Configs and maps: the coordinator plans with names, and a config has indices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from headwater.client.handshake import Credentials
from headwater.cluster.planning import Row, VBucketMap
from headwater.node.cluster_config import NOBODY, NodeAddress
from headwater.node.published_config import PublishedConfig, nodes_user
from headwater.protocol.numbers import VBucketId

SECRET_BYTES = 32
"""Of the log-in of the nodes among themselves."""


def rows_of(config: PublishedConfig) -> VBucketMap:
    names = config.names()
    return tuple(tuple(None if node == NOBODY else names[node] for node in row) for row in config.rows)


def with_rows(config: PublishedConfig, changed: Mapping[VBucketId, Row]) -> PublishedConfig:
    """The same config with other rows of some vbuckets. The revision stays for the publisher to raise."""
    index = {name: at for at, name in enumerate(config.names())}
    rows = list(config.rows)
    for vbucket, row in changed.items():
        rows[vbucket] = tuple(NOBODY if name is None else index[name] for name in row)
    return replace(config, rows=tuple(rows))


def with_building(config: PublishedConfig, changed: Mapping[VBucketId, Iterable[str]]) -> PublishedConfig:
    """The same config with other nodes that build some vbuckets; with none of them, nobody does."""
    index = {name: at for at, name in enumerate(config.names())}
    building = dict(config.building)
    for vbucket, names in changed.items():
        nodes = tuple(index[name] for name in names if index[name] not in config.rows[vbucket])
        if nodes:
            building[vbucket] = nodes
        else:
            building.pop(vbucket, None)
    return replace(config, building=building)


def with_handing_over(config: PublishedConfig, changed: Mapping[VBucketId, str | None]) -> PublishedConfig:
    """The same config with vbuckets on their way to these nodes; None where one has arrived, or will not."""
    index = {name: at for at, name in enumerate(config.names())}
    handing_over = dict(config.handing_over)
    for vbucket, name in changed.items():
        if name is None:
            handing_over.pop(vbucket, None)
        else:
            handing_over[vbucket] = index[name]
    return replace(config, handing_over=handing_over)


def with_frozen(config: PublishedConfig, vbuckets: Iterable[int]) -> PublishedConfig:
    """The same config with vbuckets, and all that are on their way, kept as they are on every node."""
    frozen = {vbucket: config.rows[vbucket][0] for vbucket in (*vbuckets, *config.handing_over)}
    return replace(config, handing_over={vbucket: node for vbucket, node in sorted(frozen.items()) if node != NOBODY})


def with_nodes(config: PublishedConfig, nodes: Iterable[NodeAddress]) -> PublishedConfig:
    """The same config with other nodes. What the ones that go had is nobody's."""
    kept = tuple(nodes)
    new_index = {node.kv_address: at for at, node in enumerate(kept)}
    moved = [new_index.get(name, NOBODY) for name in config.names()]

    def move(node: int) -> int:
        return NOBODY if node == NOBODY else moved[node]

    building = {
        vbucket: tuple(move(node) for node in builders if move(node) != NOBODY)
        for vbucket, builders in config.building.items()
    }
    return replace(
        config,
        nodes=kept,
        rows=tuple(tuple(move(node) for node in row) for row in config.rows),
        building={vbucket: builders for vbucket, builders in building.items() if builders},
        handing_over={vbucket: move(node) for vbucket, node in config.handing_over.items() if move(node) != NOBODY},
    )


def new_nodes_login(bucket: str, random_bytes: Callable[[int], bytes]) -> Credentials:
    """A log-in of the nodes among themselves, made once for a cluster. It follows from nothing that may change."""
    return Credentials(nodes_user(bucket), random_bytes(SECRET_BYTES).hex())
