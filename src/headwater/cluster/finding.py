"""The config that is in force: asked of all nodes that any node knows of.

Nodes may have different ones, left by commands that were cut short or ran at the same time. A command acts by its
config only when all nodes of it have it, so a config counts that all its nodes have, and of several the newest. Where
there is none, nobody has acted by the newest ones yet, and any of these will do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headwater.client.connection_string import Address
from headwater.cluster.kv_port import NodePort
from headwater.errors import HeadwaterError, InvalidInput
from headwater.node.published_config import PublishedConfig, kv_address


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCluster:
    """What the nodes say. No config has its log-in: it is not in what nodes show."""

    config: PublishedConfig
    """The one in force."""
    by_node: Mapping[str, PublishedConfig]
    """What each node has that could be asked."""

    @property
    def highest_revision(self) -> int:
        return max(config.revision for config in self.by_node.values())

    @property
    def disagreeing(self) -> tuple[str, ...]:
        """Nodes of the cluster that have another config, and will not give it up for the one in force."""
        return tuple(name for name in self.config.names() if self._disagrees(self.by_node.get(name)))

    def _disagrees(self, known: PublishedConfig | None) -> bool:
        return known is not None and known.version >= self.config.version and known != self.config


async def find_cluster(
    seeds: Iterable[Address], port_of: Callable[[str, Address], NodePort], *, tls: bool
) -> FoundCluster | None:
    """Ask the seeds, the nodes that they know, and so on. None where nobody is in a cluster."""
    asked: dict[str, PublishedConfig | HeadwaterError | None] = {}
    addresses = {str(seed): seed for seed in seeds}
    while new := {name: address for name, address in addresses.items() if name not in asked}:
        answers = await asyncio.gather(*(_ask(port_of(name, address)) for name, address in new.items()))
        asked |= dict(zip(new, answers, strict=True))
        for config in answers:
            if isinstance(config, PublishedConfig):
                addresses |= {node.kv_address: kv_address(node, tls=tls) for node in config.nodes}
    found = {name: config for name, config in asked.items() if isinstance(config, PublishedConfig)}
    if not found:
        for failure in asked.values():
            if isinstance(failure, HeadwaterError):
                raise failure
        return None
    return FoundCluster(config=in_force(found), by_node=found)


async def _ask(port: NodePort) -> PublishedConfig | HeadwaterError | None:
    try:
        return await port.config()
    except HeadwaterError as error:
        return error


def in_force(found: Mapping[str, PublishedConfig]) -> PublishedConfig:
    """Which of the configs that nodes have counts."""
    whole = [config for config in found.values() if _is_whole(config, found)]
    # The names of the coordinators make it the same one whoever looks.
    chosen = max(whole or found.values(), key=lambda config: (config.version, config.coordinator))
    for other in whole:
        if other != chosen:
            raise _not_one_cluster(chosen, other)
    return chosen


def _is_whole(config: PublishedConfig, found: Mapping[str, PublishedConfig]) -> bool:
    """Whether all its nodes have it, as far as they could be asked."""
    return all(found.get(name, config) == config for name in config.names())


def _not_one_cluster(config: PublishedConfig, other: PublishedConfig) -> InvalidInput:
    one, another = config.names()[0], other.names()[0]
    return InvalidInput(
        f"{one} and {another} are in different clusters, or each was told to go on without the other",
        hint="Give the URL of the one to keep. `headwater cluster add` with it takes the other node back, without what "
        "that one has alone",
    )
