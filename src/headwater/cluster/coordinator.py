"""The coordinator: what is done to a cluster as a whole, from outside and over the key-value protocol only.

It keeps nothing of its own. What is known is in the config that all nodes have, so an operation that was cut short is
run again, by anybody, and goes on from there. Two coordinators at one time can't both succeed: a config is taken only
if its revision is higher, so the second one's is refused, and it stops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from headwater.client.connection_string import Address
from headwater.client.kv_connection import Login
from headwater.cluster.cluster_status import ClusterStatus, NodeStatus, status_of
from headwater.cluster.config_changes import nodes_login, with_nodes, with_rows
from headwater.cluster.failing_over import FailedOver, fail_nodes_over
from headwater.cluster.handing_over import resolve
from headwater.cluster.kv_port import NodeFacts, NodePort
from headwater.cluster.planning import REPLICAS_MAX, Row, empty_map, plan
from headwater.cluster.publisher import Publisher
from headwater.cluster.rebalancing import Progress, Rebalance, Rebalanced, Report
from headwater.cluster.survey import survey
from headwater.errors import HeadwaterError, InvalidInput
from headwater.node.cluster_config import NOBODY
from headwater.node.published_config import PublishedConfig, kv_address
from headwater.protocol.numbers import VBucketId


class Coordinator:
    """One bucket of one cluster. `seeds` are nodes to ask first; one that answers is enough."""

    def __init__(self, seeds: Sequence[Address], login: Login, *, report: Report = lambda progress: None) -> None:
        self._seeds = tuple(seeds)
        self._login = login
        self._report = report
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

    async def init(self, *, replicas: int) -> PublishedConfig:
        """Make the seeds a cluster. The first one may have documents, and gives the bucket its uuid."""
        if not 0 <= replicas <= REPLICAS_MAX:
            raise InvalidInput(f"{replicas} replicas", hint=f"Take a number from 0 to {REPLICAS_MAX}")
        ports = [self._port(str(address), address) for address in self._seeds]
        facts = [await port.facts() for port in ports]
        known = await ports[0].config()
        if known is not None:
            if set(known.names()) == {fact.address.kv_address for fact in facts} and known.replicas == replicas:
                return known
            raise InvalidInput(
                f"{self._seeds[0]} is in a cluster of {len(known.nodes)} nodes already", hint="See cluster status"
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
            nodes=tuple(fact.address for fact in facts),
            replicas=replicas,
            rows=((NOBODY,) * (replicas + 1),) * facts[0].vbuckets,
            settled=is_new,
            login=nodes_login(self._login.credentials, bucket=self._bucket, uuid=facts[0].bucket_uuid),
        )
        chosen = rows or (first_row,) * facts[0].vbuckets
        config = with_rows(config, {VBucketId(vbucket): row for vbucket, row in enumerate(chosen)})
        for node, name in enumerate(names):
            self._ports[name] = ports[node]
            await self._activate_own(ports[node], config, node)
        publisher = self._publisher(config)
        await publisher.publish(lambda config: config)
        return publisher.config

    async def add(self, address: Address, *, force: bool = False) -> PublishedConfig:
        """Take a node into the cluster. It gets its vbuckets with the next rebalance."""
        publisher = await self._found()
        config = publisher.config
        port = NodePort(address, self._login)
        self._ports[str(address)] = port
        facts = await port.facts()
        name = facts.address.kv_address
        if name in config.names():
            return config
        await self._check_joins(port, facts, uuid=config.uuid, vbuckets=len(config.rows), force=force)
        self._ports[name] = port

        def joined(config: PublishedConfig) -> PublishedConfig:
            wider = with_nodes(config, [*config.nodes, facts.address])
            # Clients of that node take a config only if it is newer than the one they have of it.
            return replace(wider, revision=max(wider.revision, facts.revision), settled=False)

        await publisher.publish(joined)
        return publisher.config

    async def rebalance(self, *, without: Sequence[str] = ()) -> Rebalanced:
        """Spread the vbuckets over all nodes, or all but these, which leave the cluster."""
        publisher = await self._found()
        config = publisher.config
        nodes = [name for name in config.names() if name not in without]
        unknown = [name for name in without if name not in config.names()]
        if unknown:
            raise _no_such_node(unknown[0], config)
        if not nodes:
            raise InvalidInput("no node would be left", hint="Stop the nodes instead")
        await self._check_all_reachable(config)
        await resolve(publisher, {name: self._port_of(name) for name in config.names()})
        return await Rebalance(publisher, self._port_of, self._report).run(nodes)

    async def failover(self, lost: Sequence[str], *, force: bool = False) -> FailedOver:
        """Go on without nodes that are gone: of each vbucket that was active there, the best copy is promoted."""
        publisher = await self._found()
        for name in lost:
            if name not in publisher.config.names():
                raise _no_such_node(name, publisher.config)
        return await fail_nodes_over(publisher, self._port_of, lost, force=force)

    async def remove(self, name: str) -> Rebalanced:
        """Move everything away from a node, and let it leave."""
        return await self.rebalance(without=[name])

    async def status(self) -> ClusterStatus:
        config = (await self._found()).config
        return status_of(config, await survey({name: self._port_of(name) for name in config.names()}))

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
            self._port(node.kv_address, kv_address(node, tls=self._login.tls is not None))

    def _publisher(self, config: PublishedConfig) -> Publisher:
        self._open_ports(config)
        return Publisher(config, self._port_of)

    async def _found(self) -> Publisher:
        """The newest config that any node has."""
        config: PublishedConfig | None = None
        failure: HeadwaterError | None = None
        for address in self._seeds:
            try:
                config = await self._port(str(address), address).config()
            except HeadwaterError as error:
                failure = failure or error
                continue
            if config is not None:
                break
        if config is None:
            if failure is not None:
                raise failure
            raise InvalidInput(f"{self._seeds[0]} is in no cluster", hint="Make one with `headwater cluster init`")
        self._open_ports(config)
        results = await asyncio.gather(
            *(self._port_of(name).config() for name in config.names()), return_exceptions=True
        )
        for other in results:
            if isinstance(other, PublishedConfig) and other.version > config.version:
                config = other
        login = nodes_login(self._login.credentials, bucket=config.bucket, uuid=config.uuid)
        return self._publisher(replace(config, login=login))

    async def _check_all_reachable(self, config: PublishedConfig) -> None:
        for name in config.names():
            try:
                await self._port_of(name).connection()
            except HeadwaterError as error:
                raise HeadwaterError(
                    f"{name} can't be reached: {error.reason}",
                    hint="Start it again, or go on without it by `headwater cluster failover`",
                ) from error

    async def _check_joins(self, port: NodePort, facts: NodeFacts, *, uuid: str, vbuckets: int, force: bool) -> None:
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
                f"{port.address} has {facts.items} documents of its own, which would be gone",
                hint="Start it on an empty data folder, or give --force",
            )

    # --- details --------------------------------------------------------------------------------------------------

    async def _activate_own(self, port: NodePort, config: PublishedConfig, node: int) -> None:
        """A node of a new cluster has its own vbuckets active, also if it was started with none."""
        copies = await port.copies()
        topologies = {
            VBucketId(vbucket): config.topology(vbucket)
            for vbucket, row in enumerate(config.rows)
            if row[0] == node and VBucketId(vbucket) not in copies
        }
        await port.activate(topologies)


def _no_such_node(name: str, config: PublishedConfig) -> InvalidInput:
    return InvalidInput(f"{name} is no node of the cluster", hint=f"Its nodes are {', '.join(config.names())}")


__all__ = ["ClusterStatus", "Coordinator", "FailedOver", "NodeStatus", "Progress", "Rebalanced"]
