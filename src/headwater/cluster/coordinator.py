"""The coordinator: operations on a whole cluster, from outside and over the key-value protocol only.

It stores nothing itself. Its state is the config that all nodes have, so any user can run an interrupted operation
again, and it resumes from there. Of two coordinators at the same time only one can succeed: the comment on publishing
in `nodes` says why, and docs/internals/cluster.md has the whole argument.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from headwater.client.connection_string import Address
from headwater.client.kv_connection import Login
from headwater.cluster.nodes import (
    LOOK_S_MAX,
    LOST_S_MAX,
    ClusterStatus,
    NodeFacts,
    NodePort,
    Publisher,
    answered,
    new_nodes_login,
    status_of,
    take_inventory,
    with_nodes,
    with_rows,
)
from headwater.cluster.planning import REPLICAS_MAX, Row, empty_map, plan
from headwater.cluster.rebalance import FailedOver, OnProgress, Rebalance, Rebalanced, fail_nodes_over, resolve
from headwater.errors import HeadwaterError, InvalidInput, Overtaken
from headwater.node.service import NO_CONFIG
from headwater.phrases import counted
from headwater.protocol.cluster_config import NO_NODE, PublishedConfig
from headwater.protocol.numbers import VBucketId
from headwater.protocol.sasl import Credentials

_NAME_BYTES = 8


class Coordinator:
    """Operates on one bucket of one cluster. `seeds` are nodes to ask first; one that answers is enough."""

    def __init__(self, seeds: Sequence[Address], login: Login, *, report: OnProgress = lambda progress: None) -> None:
        self._seeds = tuple(seeds)
        self._login = login
        self._report = report
        self._name = login.random_bytes(_NAME_BYTES).hex()
        self._ports: dict[str, NodePort] = {}

    def close(self) -> None:
        for port in self._ports.values():
            port.close()

    async def is_formed(self) -> bool:
        """Whether any of the seeds is in a cluster."""
        for address in self._seeds:
            if await self._port(str(address), address).config() is not None:
                return True
        return False

    # --- operations -----------------------------------------------------------------------------------------------

    async def init(self, *, replicas: int, settings: Mapping[str, Any] | None = None) -> PublishedConfig:
        """Make the seeds a cluster. The first one may have documents, and gives the bucket its uuid.

        `settings` are those of the bucket, for all nodes.
        """
        if not 0 <= replicas <= REPLICAS_MAX:
            raise InvalidInput(f"{replicas} replicas", hint=f"Give a number from 0 to {REPLICAS_MAX}")
        ports = [self._port(str(address), address) for address in self._seeds]
        facts = [await port.facts() for port in ports]
        known = await ports[0].config()
        if known is not None:
            if set(known.names()) == {fact.address.kv_address for fact in facts} and known.replicas == replicas:
                return await self._finish_init(list(zip(ports, facts, strict=True)))
            raise InvalidInput(
                f"{self._seeds[0]} is in a cluster of {counted(len(known.nodes), 'node')} already",
                hint="See cluster status",
            )
        for port, fact in zip(ports[1:], facts[1:], strict=True):
            await self._check_joins(port, fact, uuid=facts[0].bucket_uuid, vbuckets=facts[0].vbuckets, force=False)
        names = [fact.address.kv_address for fact in facts]
        copies = await ports[0].copies()
        is_new = facts[0].items == 0 and all(copy.copy.seqno == 0 for copy in copies.values())
        first_row: Row = (names[0], *(None,) * replicas)
        rows = plan(empty_map(facts[0].vbuckets, replicas), names, replicas=replicas) if is_new else None
        config = PublishedConfig(
            revision=max(fact.revision for fact in facts) + 1,
            bucket=self._bucket,
            uuid=facts[0].bucket_uuid,
            cluster_uuid=facts[0].cluster_uuid,
            cluster_name=facts[0].cluster_name,
            settings=settings,
            nodes=tuple(fact.address for fact in facts),
            replicas=replicas,
            rows=((NO_NODE,) * (replicas + 1),) * facts[0].vbuckets,
            settled=is_new,
            coordinator=self._name,
            login=new_nodes_login(self._bucket, self._login.random_bytes),
        )
        chosen = rows or (first_row,) * facts[0].vbuckets
        config = with_rows(config, {VBucketId(vbucket): row for vbucket, row in enumerate(chosen)})
        for node, name in enumerate(names):
            self._ports.setdefault(name, ports[node])
            await self._activate_own(ports[node], config, node)
        self._open_ports(config)
        publisher = Publisher(config, self._port_of, is_first=True)
        await publisher.publish(lambda config: config)
        return publisher.config

    async def _finish_init(self, nodes: Sequence[tuple[NodePort, NodeFacts]]) -> PublishedConfig:
        """Publish the config to nodes that did not get it, because the creation of the cluster was interrupted.

        If two coordinators created it at the same time, and each was refused, nodes can't even log in to each other.
        """
        found = await self._found()
        publisher = await self._publisher_of(found, is_first=True)
        config = publisher.config
        knows = [await port.config() is not None for port, _ in nodes]
        for (port, facts), known in zip(nodes, knows, strict=True):
            if not known:
                await self._check_joins(port, facts, uuid=config.uuid, vbuckets=len(config.rows), force=False)
                await self._activate_own(port, config, config.names().index(facts.address.kv_address))
        if not all(knows) or found.disagreeing:
            await publisher.publish(lambda config: config)
        return publisher.config

    async def change(self, change: Callable[[PublishedConfig], PublishedConfig]) -> PublishedConfig:
        """Publish what `change` makes of the config: other settings of the bucket, or another name of the cluster."""
        publisher = await self._publisher()
        await publisher.publish(change)
        return publisher.config

    async def add(self, address: Address, *, force: bool = False) -> PublishedConfig:
        """Add a node to the cluster. It gets its vbuckets with the next rebalance."""
        publisher = await self._publisher()
        config = publisher.config
        port = self._port(str(address), address)
        facts = await port.facts()
        name = facts.address.kv_address
        if name in config.names():
            return config
        known = await self._check_joins(port, facts, uuid=config.uuid, vbuckets=len(config.rows), force=force)
        if known is not None:
            publisher.replaces(known)
        self._ports.setdefault(name, port)

        def joined(config: PublishedConfig) -> PublishedConfig:
            wider = with_nodes(config, [*config.nodes, facts.address])
            # Clients of that node accept a config only if it is newer than the one they have from it.
            return replace(wider, revision=max(wider.revision, facts.revision), settled=False)

        await publisher.publish(joined)
        return publisher.config

    async def rebalance(self, *, without: Sequence[str] = ()) -> Rebalanced:
        """Spread the vbuckets over all nodes except those in `without`, which leave the cluster."""
        found = await self._found()
        config = found.config
        nodes = [name for name in config.names() if name not in without]
        unknown = [name for name in without if name not in config.names()]
        if unknown:
            raise _no_such_node(unknown[0], config)
        if not nodes:
            raise InvalidInput("no node would be left", hint="Stop the nodes instead")
        await self._check_all_reachable(config)
        publisher = await self._publisher(found)
        async with _overtaken_first(publisher):
            await resolve(publisher, {name: self._port_of(name) for name in config.names()})
            return await Rebalance(publisher, self._port_of, self._report).run(nodes)

    async def failover(self, lost: Sequence[str], *, force: bool = False) -> FailedOver:
        """Continue without lost nodes: promote the best copy of each vbucket that was active there."""
        found = await self._found(lost)
        for name in lost:
            if name not in found.config.names():
                raise _no_such_node(name, found.config)
        publisher = await self._publisher_of(found)
        async with _overtaken_first(publisher):
            return await fail_nodes_over(publisher, self._port_of, lost, force=force)

    async def remove(self, name: str) -> Rebalanced:
        """Move everything away from a node, and remove it from the cluster."""
        return await self.rebalance(without=[name])

    async def renew_login(self) -> PublishedConfig:
        """Change the secret with which nodes log in to each other, because removed machines and former admins know it.

        A node that was failed over and is not back has the old one, and can't learn any more that it was removed.
        """
        found = await self._found()
        await self._check_all_reachable(found.config)
        publisher = await self._publisher(found)
        login = new_nodes_login(self._bucket, self._login.random_bytes)
        await publisher.publish(lambda config: replace(config, login=login))
        return publisher.config

    async def status(self) -> ClusterStatus:
        found = await self._found()
        ports = {name: self._port_of(name) for name in found.config.names()}
        copies = await take_inventory(ports, within_s=LOOK_S_MAX)
        return status_of(found.config, copies, disagreeing=found.disagreeing)

    # --- finding the cluster --------------------------------------------------------------------------------------

    @property
    def _bucket(self) -> str:
        assert self._login.bucket is not None, "a coordinator is for one bucket"
        return self._login.bucket

    def _port(self, name: str, address: Address) -> NodePort:
        if name not in self._ports:
            self._ports[name] = NodePort(address, self._login)
        return self._ports[name]

    def _port_of(self, name: str) -> NodePort:
        return self._ports[name]

    def _open_ports(self, config: PublishedConfig) -> None:
        for node in config.nodes:
            self._port(node.kv_address, Address(node.host, node.kv_port_for(tls=self._login.tls is not None)))

    async def _found(self, lost: Collection[str] = ()) -> FoundCluster:
        found = await find_cluster(self._seeds, self._port, tls=self._login.tls is not None, lost=lost)
        if found is None:
            raise InvalidInput(f"{self._seeds[0]} is not in a cluster", hint="Create one with `headwater cluster init`")
        self._open_ports(found.config)
        return found

    async def _nodes_login(self, found: FoundCluster) -> Credentials:
        """How the nodes log in to each other, as reported by a node that has the config in force.

        The log-in changes only if it is renewed on purpose: the others must let a node in that was away, or it could
        not learn that they have continued without it.
        """
        failure: HeadwaterError | None = None
        for name in (name for name, config in found.by_node.items() if config == found.config):
            try:
                login = await self._port_of(name).nodes_login()
            except HeadwaterError as error:
                failure = error
            else:
                return login or new_nodes_login(self._bucket, self._login.random_bytes)
        assert failure is not None, "the config in force is one that a node has"
        raise failure

    async def _publisher_of(self, found: FoundCluster, *, is_first: bool = False) -> Publisher:
        login = await self._nodes_login(found)
        ours = replace(found.config, revision=found.highest_revision, coordinator=self._name, login=login)
        return Publisher(ours, self._port_of, seen=found.by_node.values(), is_first=is_first)

    async def _publisher(self, found: FoundCluster | None = None) -> Publisher:
        """Make the publisher for a change. If nodes disagree after two simultaneous commands, first make them agree."""
        found = found or await self._found()
        publisher = await self._publisher_of(found)
        if found.disagreeing:
            await publisher.publish(lambda config: config)
        return publisher

    async def _check_all_reachable(self, config: PublishedConfig) -> None:
        asked = (answered(self._port_of(name).connection, LOOK_S_MAX) for name in config.names())
        results = await asyncio.gather(*asked, return_exceptions=True)
        for name, result in zip(config.names(), results, strict=True):
            if isinstance(result, HeadwaterError):
                raise HeadwaterError(
                    f"{name} can't be reached: {result.reason}",
                    hint="Start it again, or continue without it with `headwater cluster failover`",
                ) from result
            if isinstance(result, BaseException):
                raise result

    async def _check_joins(
        self, port: NodePort, facts: NodeFacts, *, uuid: str, vbuckets: int, force: bool
    ) -> PublishedConfig | None:
        """Raise `InvalidInput` if a node can't join. Returns the config that it has from before."""
        known = await port.config()
        if known is not None and known.uuid != uuid:
            raise InvalidInput(
                f"{port.address} is in another cluster", hint="Remove it there, or start it on an empty data folder"
            )
        if facts.vbuckets != vbuckets:
            raise InvalidInput(
                f"bucket {self._bucket!r} has {facts.vbuckets} vbuckets on {port.address}, and {vbuckets} here",
                hint=f"Start that node with --vbuckets {vbuckets} on an empty data folder",
            )
        if facts.bucket_uuid != uuid and facts.items and not force:
            raise InvalidInput(
                f"{port.address} has {counted(facts.items, 'document')} of its own, which would be lost",
                hint="Start it on an empty data folder, or give --force",
            )
        return known

    # --- details --------------------------------------------------------------------------------------------------

    async def _activate_own(self, port: NodePort, config: PublishedConfig, node: int) -> None:
        """Make the vbuckets of a node of a new cluster active, even if the node was started with none."""
        copies = await port.copies()
        topologies = {
            VBucketId(vbucket): config.topology(vbucket)
            for vbucket, row in enumerate(config.rows)
            if row[0] == node and VBucketId(vbucket) not in copies
        }
        await port.activate(topologies, version=NO_CONFIG)


@asynccontextmanager
async def _overtaken_first(publisher: Publisher) -> AsyncIterator[None]:
    """If a command fails because another one was faster, raise `Overtaken`, whatever else failed."""
    try:
        yield
    except Overtaken:
        raise
    except HeadwaterError:
        await publisher.check_not_overtaken()
        raise


def _no_such_node(name: str, config: PublishedConfig) -> InvalidInput:
    return InvalidInput(f"{name} is not a node of the cluster", hint=f"Its nodes are {', '.join(config.names())}")


# --- finding the cluster ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCluster:
    """What the nodes report. The configs lack the log-in, because nodes do not show it."""

    config: PublishedConfig
    """The config in force."""
    by_node: Mapping[str, PublishedConfig]
    """The config of each node that could be asked."""

    @property
    def highest_revision(self) -> int:
        return max(config.revision for config in self.by_node.values())

    @property
    def disagreeing(self) -> tuple[str, ...]:
        """Nodes of the cluster that have another config, and will not replace it with the one in force."""
        config = self.config
        known = ((name, self.by_node[name]) for name in config.names() if name in self.by_node)
        return tuple(name for name, other in known if other.version >= config.version and other != config)


async def find_cluster(
    seeds: Iterable[Address], port_of: Callable[[str, Address], NodePort], *, tls: bool, lost: Collection[str] = ()
) -> FoundCluster | None:
    """Ask the seeds, the nodes that they know, and so on. None if no node is in a cluster.

    Nodes that do not answer soon count as unreachable, `lost` ones even sooner: what such a node has is checked when a
    config is published to it.
    """
    asked: dict[str, PublishedConfig | HeadwaterError | None] = {}
    addresses = {str(seed): seed for seed in seeds}
    while new := {name: address for name, address in addresses.items() if name not in asked}:
        answers = await asyncio.gather(
            *(_ask(port_of(name, address), LOST_S_MAX if name in lost else LOOK_S_MAX) for name, address in new.items())
        )
        asked |= dict(zip(new, answers, strict=True))
        for config in answers:
            if isinstance(config, PublishedConfig):
                addresses |= {node.kv_address: Address(node.host, node.kv_port_for(tls=tls)) for node in config.nodes}
    found = {name: config for name, config in asked.items() if isinstance(config, PublishedConfig)}
    if not found:
        for failure in asked.values():
            if isinstance(failure, HeadwaterError):
                raise failure
        return None
    return FoundCluster(config=in_force(found), by_node=found)


async def _ask(port: NodePort, within_s: float) -> PublishedConfig | HeadwaterError | None:
    try:
        return await answered(port.config, within_s)
    except HeadwaterError as error:
        return error


def in_force(found: Mapping[str, PublishedConfig]) -> PublishedConfig:
    """Decide which of the nodes' configs is in force.

    Nodes may have different ones, left by commands that were interrupted or ran at the same time. A command acts on its
    config only once all its nodes have it, so the newest config that all its nodes have is in force. If there is none,
    no command has acted on the newest ones yet, and any of them will do.
    """
    # A config is whole if all its nodes have it, as far as they could be asked.
    whole = [config for config in found.values() if all(found.get(name, config) == config for name in config.names())]
    # Comparing the names of the coordinators, too, makes every command choose the same config.
    chosen = max(whole or found.values(), key=lambda config: (config.version, config.coordinator))
    for other in whole:
        if other != chosen:
            one, another = chosen.names()[0], other.names()[0]
            raise InvalidInput(
                f"{one} and {another} are in different clusters, or each has continued without the other",
                hint="Give the URL of the one to keep, and use it with `headwater cluster add` to take the other node "
                "back, without the changes that only that node has",
            )
    return chosen
