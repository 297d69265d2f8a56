"""A node as the coordinator talks to it: over the key-value protocol, and nothing else.

Every operation on a cluster goes through `NodePort`; `take_inventory` asks all nodes at once for their copies, and
`status_of` sums them up for people. Nothing here decides what a cluster should look like.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Login
from headwater.cluster.planning import Copy
from headwater.errors import HeadwaterError, KeyExists, MalformedJson, NoAnswer, Overtaken, TemporaryFailure
from headwater.node.service import ConfigVersion
from headwater.protocol.cluster_config import NO_NODE, ClusterConfig, NodeAddress, PublishedConfig
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.session import GetClusterConfig, SetClusterConfig
from headwater.protocol.messages.vbuckets import SetVBucket
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.sasl import Credentials

T = TypeVar("T")
Topology = tuple[list[str | None], ...]
_STATES = {state.name.lower(): state for state in VBucketState}
_RETRY_S = 0.05
_TRIES_MAX = 100


LOOK_S_MAX = 5.0
"""How long a command looks for nodes that it may do without, all at the same time. One that hangs takes connections and
never answers: it is as good as one that refuses them, and must not be waited for any longer."""
LOST_S_MAX = 1.0
"""The same for nodes that the command gives up: the others are without them meanwhile."""


async def answered(ask: Callable[[], Awaitable[T]], within_s: float | None) -> T:
    """The answer of a node, or `NoAnswer` if it takes longer; None is as long as the connection allows."""
    try:
        async with asyncio.timeout(within_s):
            return await ask()
    except TimeoutError as error:
        raise NoAnswer(f"it has not answered in {within_s:g} s", hint="Look at that node's load and log") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCopy:
    """A copy of a vbucket on one node."""

    state: VBucketState
    copy: Copy


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a node is, whether it is in a cluster or not."""

    address: NodeAddress
    revision: int
    """Of the config that it gives."""
    cluster_uuid: str
    cluster_name: str
    bucket_uuid: str
    vbuckets: int
    items: int


class NodePort:
    """One node and one bucket of it. Connects when it is first used, and again when the connection broke."""

    def __init__(self, address: Address, login: Login) -> None:
        self.address = address
        self.login = login
        self._connection: AsyncKvConnection | None = None
        self._connecting = asyncio.Lock()

    async def connection(self) -> AsyncKvConnection:
        async with self._connecting:
            if self._connection is None or self._connection.is_closed:
                self._connection = await AsyncKvConnection.open(self.address, self.login)
            return self._connection

    def close(self) -> None:
        if self._connection is not None:
            # Nothing is on its way any more, and the farewell of TLS takes longer than a command that is done has left.
            self._connection.abort()

    # --- looking --------------------------------------------------------------------------------------------------

    async def config(self) -> PublishedConfig | None:
        """The config that was published to the node, without the log-in; None where it is in no cluster."""
        answer = await (await self.connection()).request(GetClusterConfig())
        return PublishedConfig.decode(bytes(getattr(answer, "value", b"")) or b"{}")

    async def nodes_login(self) -> Credentials | None:
        """How the nodes of its cluster log in to each other; None where it is in none."""
        login = await (await self.connection()).statistics("headwater-login")
        return Credentials(login["user"], login["password"]) if login else None

    async def facts(self) -> NodeFacts:
        statistics = await (await self.connection()).statistics()
        whole = await AsyncKvConnection.open(self.address, replace(self.login, bucket=None))
        try:
            config = ClusterConfig.decode(whole.outcome.cluster_config or b"")
        finally:
            whole.close()
        this_node = config.this_node
        if this_node is None:
            raise MalformedJson(f"{self.address} does not say by which address it is reached")
        return NodeFacts(
            address=this_node.address(),
            revision=config.revision,
            cluster_uuid=config.cluster_uuid,
            cluster_name=config.cluster_name,
            bucket_uuid=statistics.get("ep_bucket_uuid", ""),
            vbuckets=int(statistics.get("ep_max_vbuckets", 0)),
            items=int(statistics.get("curr_items_tot", 0)),
        )

    async def copies(self) -> dict[VBucketId, NodeCopy]:
        """All vbuckets that the node has."""
        statistics = await (await self.connection()).statistics("headwater-copies")
        copies: dict[VBucketId, NodeCopy] = {}
        for name, line in statistics.items():
            state, seqno, branches = line.split(" ")
            copy = Copy(seqno=Seqno(int(seqno)), branches=tuple(int(branch) for branch in branches.split(",")))
            copies[VBucketId(int(name.removeprefix("vb_")))] = NodeCopy(state=_STATES[state], copy=copy)
        return copies

    async def losses(self) -> dict[VBucketId, int | None]:
        """Of the vbuckets that were promoted on the node: how many changes are known to be lost; None for unknown."""
        losses: dict[VBucketId, int | None] = {}
        for name, line in (await (await self.connection()).statistics("headwater-lost")).items():
            kept, _, known = line.partition(" ")
            losses[VBucketId(int(name.removeprefix("vb_")))] = max(0, int(known) - int(kept)) if known else None
        return losses

    # --- changing -------------------------------------------------------------------------------------------------

    async def publish(self, config: PublishedConfig) -> None:
        """Give the node a config, and return once it has it for good. One that it has already is fine."""
        request = SetClusterConfig(
            epoch=config.epoch,
            revision=config.revision,
            key=config.bucket.encode(),
            value=config.encode(with_login=True),
        )
        for _ in range(_TRIES_MAX):
            try:
                await (await self.connection()).request(request)
                return
            except TemporaryFailure:
                await asyncio.sleep(_RETRY_S)
            except KeyExists:
                # Another node may have passed it on before we came.
                known = await self.config()
                if known == replace(config, login=None):
                    return
                raise Overtaken(str(self.address), revision=0 if known is None else known.revision) from None
        raise HeadwaterError(f"{self.address} could not keep the config", hint="Look at the node's log and its disk")

    async def activate(self, topologies: Mapping[VBucketId, Topology], *, version: ConfigVersion) -> None:
        """Make vbuckets active, with the chain of their copies. The node does it only while it has this config."""
        requests: list[Request] = [
            SetVBucket(
                vbucket=vbucket,
                state=VBucketState.ACTIVE,
                value=json.dumps({"topology": list(topology), "config": list(version)}).encode(),
            )
            for vbucket, topology in topologies.items()
        ]
        if not requests:
            return
        try:
            await (await self.connection()).request_all(requests)
        except KeyExists:
            known = await self.config()
            raise Overtaken(str(self.address), revision=0 if known is None else known.revision) from None


# --- inventory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What the nodes of a cluster have: every copy of every vbucket, and the nodes that could not be asked."""

    copies: Mapping[str, Mapping[VBucketId, NodeCopy]]
    unreachable: Mapping[str, HeadwaterError]

    def state(self, node: str, vbucket: VBucketId) -> VBucketState | None:
        copy = self.copies.get(node, {}).get(vbucket)
        return None if copy is None else copy.state

    def copy(self, node: str, vbucket: VBucketId) -> Copy | None:
        copy = self.copies.get(node, {}).get(vbucket)
        return None if copy is None else copy.copy

    def copies_of(self, vbucket: VBucketId, nodes: Iterable[str]) -> dict[str, Copy]:
        found = {node: self.copy(node, vbucket) for node in nodes}
        return {node: copy for node, copy in found.items() if copy is not None}


async def take_inventory(ports: Mapping[str, NodePort], *, within_s: float | None = None) -> Inventory:
    """Ask these nodes, all at once. With `within_s`, one that has not answered by then is unreachable."""
    asked = (answered(port.copies, within_s) for port in ports.values())
    results = await asyncio.gather(*asked, return_exceptions=True)
    copies: dict[str, Mapping[VBucketId, NodeCopy]] = {}
    unreachable: dict[str, HeadwaterError] = {}
    for name, result in zip(ports, results, strict=True):
        if isinstance(result, HeadwaterError):
            unreachable[name] = result
        elif isinstance(result, BaseException):
            raise result
        else:
            copies[name] = result
    return Inventory(copies=copies, unreachable=unreachable)


# --- status -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What one node of a cluster has."""

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
    """The nodes of a cluster, what each of them has, and what is missing."""

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


def status_of(config: PublishedConfig, found: Inventory, *, disagreeing: tuple[str, ...] = ()) -> ClusterStatus:
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
        missing=sum(node == NO_NODE for row in config.rows for node in row[1:]),
        orphans=sum(row[0] == NO_NODE for row in config.rows),
        nodes=nodes,
        disagreeing=disagreeing,
    )


def _behind(config: PublishedConfig, found: Inventory, node: int) -> int:
    behind = 0
    names = config.names()
    for number, row in enumerate(config.rows):
        vbucket = VBucketId(number)
        if node not in row[1:] or row[0] == NO_NODE:
            continue
        active, copy = found.copy(names[row[0]], vbucket), found.copy(names[node], vbucket)
        if active is not None:
            behind += max(0, active.seqno - (0 if copy is None else copy.seqno))
    return behind
