"""How the coordinator talks to the nodes of a cluster: over the key-value protocol, and nothing else.

Every operation on a cluster goes through `NodePort`; `take_inventory` asks all nodes at once for their copies,
`status_of` sums them up for people, and a `Publisher` sends a new config to all of them. This module does not decide
what a cluster should look like.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from headwater import errors
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import Login
from headwater.cluster.planning import Copy, Row, VBucketMap
from headwater.log_fields import LogEvent, fields
from headwater.node.service import ConfigVersion
from headwater.protocol.cluster_config import (
    NO_NODE,
    ClusterConfig,
    CopyCounts,
    NodeAddress,
    PublishedConfig,
    nodes_user,
)
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.session import GetClusterConfig, SetClusterConfig
from headwater.protocol.messages.vbuckets import DeleteVBucket, SetVBucket
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.sasl import Credentials

T = TypeVar("T")
Topology = tuple[list[str | None], ...]
_STATES = {state.name.lower(): state for state in VBucketState}
_RETRY_S = 0.05
_TRIES_MAX = 100


LOOK_S_MAX = 5.0
"""How long a command looks for nodes that it can do without, all at the same time. A node that hangs accepts
connections and never answers. It is as useless as one that refuses them, so the command must not wait longer for it."""
LOST_S_MAX = 1.0
"""The same for nodes that the command gives up, because the other nodes have to do without them meanwhile."""


async def answered(ask: Callable[[], Awaitable[T]], within_s: float | None) -> T:
    """A node's answer. Raises `NoAnswer` if it takes longer; None allows as long as the connection does."""
    try:
        async with asyncio.timeout(within_s):
            return await ask()
    except TimeoutError as error:
        raise errors.NoAnswer(
            f"it has not answered in {within_s:g} s", hint="Check that node's load and log"
        ) from error


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
    """The revision of the config that it gives to clients."""
    cluster_uuid: str
    cluster_name: str
    bucket_uuid: str
    vbuckets: int
    items: int


class NodePort:
    """One bucket on one node. Connects when it is first used, and again if the connection breaks."""

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
            # Nothing is in flight any more, and ending TLS properly takes longer than a finished command should.
            self._connection.abort()

    # --- looking --------------------------------------------------------------------------------------------------

    async def config(self) -> PublishedConfig | None:
        """The config that was published to the node, without the log-in; None if it is not in a cluster."""
        answer = await (await self.connection()).request(GetClusterConfig())
        return PublishedConfig.decode(bytes(getattr(answer, "value", b"")) or b"{}")

    async def nodes_login(self) -> Credentials | None:
        """How the nodes of its cluster log in to each other; None if it is in none."""
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
            raise errors.MalformedJson(f"{self.address} does not say by which address it is reached")
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
        """For each vbucket that was promoted on the node, how many changes are known to be lost; None for unknown."""
        losses: dict[VBucketId, int | None] = {}
        for name, line in (await (await self.connection()).statistics("headwater-lost")).items():
            kept, _, known = line.partition(" ")
            losses[VBucketId(int(name.removeprefix("vb_")))] = max(0, int(known) - int(kept)) if known else None
        return losses

    # --- changing -------------------------------------------------------------------------------------------------

    async def publish(self, config: PublishedConfig) -> None:
        """Send the node a config, and return once the node has stored it. It may already have it."""
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
            except errors.TemporaryFailure:
                await asyncio.sleep(_RETRY_S)
            except errors.KeyExists:
                # Another node may have passed it on before.
                known = await self.config()
                if known == replace(config, login=None):
                    return
                raise errors.Overtaken(str(self.address), revision=0 if known is None else known.revision) from None
        raise errors.HeadwaterError(
            f"{self.address} could not store the config", hint="Check the node's log and its disk"
        )

    async def remove_damaged(self, vbuckets: Iterable[VBucketId]) -> None:
        """Drop what is left of vbuckets of which the node has no whole copy, so that they begin there again, empty."""
        for vbucket in vbuckets:
            for _ in range(_TRIES_MAX):
                try:
                    await (await self.connection()).request(DeleteVBucket(vbucket=vbucket))
                    break
                except errors.NotMyVBucket:
                    break  # The node has nothing of it.
                except errors.TemporaryFailure:
                    await asyncio.sleep(_RETRY_S)

    async def activate(self, topologies: Mapping[VBucketId, Topology], *, version: ConfigVersion) -> None:
        """Make vbuckets active, each with its topology. The node does so only while it has this config."""
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
        except errors.KeyExists:
            known = await self.config()
            raise errors.Overtaken(str(self.address), revision=0 if known is None else known.revision) from None


# --- inventory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What the nodes of a cluster have: every copy of every vbucket, and the nodes that could not be asked."""

    copies: Mapping[str, Mapping[VBucketId, NodeCopy]]
    unreachable: Mapping[str, errors.HeadwaterError]

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
    """Ask these nodes, all at once. With `within_s`, one that has not answered by then counts as unreachable."""
    asked = (answered(port.copies, within_s) for port in ports.values())
    results = await asyncio.gather(*asked, return_exceptions=True)
    copies: dict[str, Mapping[VBucketId, NodeCopy]] = {}
    unreachable: dict[str, errors.HeadwaterError] = {}
    for name, result in zip(ports, results, strict=True):
        if isinstance(result, errors.HeadwaterError):
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
    """Changes that its replicas do not have yet, as far as their active copies can be reached."""
    unknown: int
    """Replicas whose lag is unknown, because the node or the one with the active copy can't be reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The nodes of a cluster, what each of them has, and what is missing."""

    bucket: str
    uuid: str
    revision: int
    replicas: int
    vbuckets: int
    settled: bool
    """Every copy is where the map says. If not, a rebalance is needed."""
    missing: int
    """Replicas for which the map has no node."""
    orphans: int
    """Vbuckets that no node has."""
    nodes: tuple[NodeStatus, ...]
    copies: CopyCounts
    disagreeing: tuple[str, ...] = ()
    """Nodes with another config, left behind by two commands at the same time. The next command resolves that."""


def status_of(config: PublishedConfig, found: Inventory, *, disagreeing: tuple[str, ...] = ()) -> ClusterStatus:
    copies = config.copies(found.unreachable)
    gone = {at for at, name in enumerate(config.names()) if name in found.unreachable}
    nodes = tuple(
        NodeStatus(
            name=node.kv_address,
            http=node.http_address,
            is_reachable=node.kv_address not in found.unreachable,
            active=sum(row[0] == at for row in config.rows),
            replica=sum(at in row[1:] for row in config.rows),
            building=sum(at in builders for builders in config.building.values()),
            behind=_behind(config, found, at),
            unknown=sum(at in row[1:] and (at in gone or row[0] in gone) for row in config.rows),
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
        missing=copies.replicas_missing,
        orphans=copies.active_missing,
        nodes=nodes,
        copies=copies,
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


# --- publishing -------------------------------------------------------------------------------------------------------
#
# Every change of the config goes to all nodes at once, with a higher revision, one after the other.
#
# A rebalance, a failover and the coordinator pass changes to a `Publisher`, made with `with_rows` and its siblings.
# Changes that arrive while one is being published are published together after it: a rebalance hands over many vbuckets
# at a time, and each of them waits only for its own change.
#
# Another coordinator may be at work. So before this one sends a config, it asks every node whether it still has the
# config that this one knows, and nothing acts on a config before every node has accepted it. A node accepts one config
# of a revision and no other. So at most one of two coordinators gets its config to all nodes; some node refuses the
# other one's, which ends its work (`Overtaken`).

logger = logging.getLogger(__name__)

Change = Callable[[PublishedConfig], PublishedConfig]

TRIES_MAX = 5
"""How often a leaving node, which has a config that another coordinator has sent to it alone, is sent a still higher
revision."""


class Publisher:
    """Holds the newest config, which replaces `seen`: the configs that nodes had when the coordinator looked."""

    def __init__(
        self,
        config: PublishedConfig,
        port_of: Callable[[str], NodePort],
        *,
        seen: Iterable[PublishedConfig] = (),
        is_first: bool = False,
    ) -> None:
        self.config = config
        self._is_first = is_first
        """The cluster is being created, so its nodes may be in none."""
        self._port_of = port_of
        self._seen = [replace(one, login=None) for one in seen]
        self._waiting: list[tuple[Change, asyncio.Future[None]]] = []
        self._publishing = asyncio.Lock()
        self._may_miss: frozenset[str] = frozenset()
        self._overtaken: errors.Overtaken | None = None

    def may_miss(self, names: frozenset[str]) -> None:
        """Send configs to these nodes as well, but continue if they do not get them."""
        self._may_miss = names

    def replaces(self, config: PublishedConfig) -> None:
        """Replace this config too, which a joining node has from before."""
        self._seen.append(replace(config, login=None))

    async def publish(self, change: Change) -> None:
        """Apply a change, and return once every node has the config with it."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        async with self._publishing:
            if not done.done():
                await self._publish_waiting()
        await done

    async def check_not_overtaken(self) -> None:
        """Raise `Overtaken` if another coordinator has published meanwhile, as far as the nodes answer."""
        try:
            await self._compare(self.config)
        except errors.Overtaken:
            raise
        except errors.HeadwaterError as error:
            about = fields(event=LogEvent.CLUSTER_CONFIG, reason=error.reason)
            logger.debug("could not check whether another command has been faster: %s", error.reason, extra=about)

    async def _publish_waiting(self) -> None:
        together, self._waiting = [one for one in self._waiting if not one[1].done()], []
        waiters = [done for _, done in together]
        try:
            await self._publish_together([change for change, _ in together])
        except asyncio.CancelledError:
            for done in waiters:
                done.cancel()
            raise
        except Exception as error:
            for done in waiters:
                done.set_exception(error)
            return
        for done in waiters:
            done.set_result(None)

    async def _publish_together(self, changes: Sequence[Change]) -> None:
        if self._overtaken is not None:
            raise self._overtaken
        before = config = self.config
        for change in changes:
            config = change(config)
        # Nodes that leave also get the config that leaves them out, if they listen.
        names = list(dict.fromkeys([*config.names(), *before.names()]))
        try:
            await self._compare(before)
            await self._send_until_all_have_it(names, config)
        except errors.Overtaken as overtaken:
            # The nodes would accept a higher revision again, and it would undo what the other coordinator has done.
            self._overtaken = overtaken
            raise

    # --- comparing ------------------------------------------------------------------------------------------------

    async def _compare(self, before: PublishedConfig) -> None:
        """Raise unless the nodes have the config that they were last seen with, or were sent.

        Nodes that may miss it are not asked: no command should wait for them twice, and their refusals count anyway.
        """
        names = [name for name in before.names() if name not in self._may_miss]
        results = await self._of_each(names, lambda name: self._port_of(name).config())
        for name, known in zip(names, results, strict=True):
            if isinstance(known, errors.HeadwaterError):
                raise known.reworded(f"config {before.revision + 1} could not be given to {name}: {known.reason}")
            if known is None and not self._is_first:
                # The node would take its empty vbuckets for those of the cluster, and the copies would follow it.
                raise errors.HeadwaterError(
                    f"{name} does not know that it is in the cluster: it was started on another data folder",
                    hint="Start it on its own folder, or fail it over with `headwater cluster failover` and add it "
                    "again",
                )
            if isinstance(known, PublishedConfig):
                is_older = known.version < before.version
                if not (is_older or known == replace(before, login=None) or known in self._seen):
                    raise errors.Overtaken(name, revision=known.revision)

    # --- sending --------------------------------------------------------------------------------------------------

    async def _send_until_all_have_it(self, names: Sequence[str], config: PublishedConfig) -> None:
        for tries_left in reversed(range(TRIES_MAX)):
            self.config = config = replace(config, revision=config.revision + 1)
            refused = await self._send(names, config)
            if refused is None:
                return
            if not tries_left:
                raise refused
            # All nodes that stay have accepted it, so the leaving one has a config that no node can act on. It must not
            # keep that config, or it would continue as if it belonged to the cluster.
            config = replace(config, revision=max(config.revision, refused.revision))

    async def _send(self, names: Sequence[str], config: PublishedConfig) -> errors.Overtaken | None:
        """Send to all nodes. Returns the refusal of a node that leaves; raises those of the others."""
        results = await self._of_each(names, lambda name: self._port_of(name).publish(config))
        refused: errors.Overtaken | None = None
        for name, result in zip(names, results, strict=True):
            if not isinstance(result, errors.HeadwaterError):
                continue
            if name in config.names() and name not in self._may_miss:
                if isinstance(result, errors.Overtaken):
                    raise result
                raise result.reworded(f"config {config.revision} could not be given to {name}: {result.reason}")
            if isinstance(result, errors.Overtaken):
                refused = result
            else:
                about = fields(
                    event=LogEvent.CLUSTER_CONFIG, config=config.revision, address=name, reason=result.reason
                )
                logger.warning("config %d has not reached %s: %s", config.revision, name, result.reason, extra=about)
        return refused

    async def _of_each(self, names: Sequence[str], ask: Callable[[str], Awaitable[object]]) -> list[object]:
        """What each of these nodes answers, or the error if it is a `HeadwaterError`."""

        async def ask_within(name: str) -> object:
            try:
                return await answered(partial(ask, name), LOST_S_MAX if name in self._may_miss else None)
            except errors.HeadwaterError as error:
                return error

        return list(await asyncio.gather(*(ask_within(name) for name in names)))


# --- changes of a config: the coordinator plans with names, and a config has indices ------------------------------


SECRET_BYTES = 32
"""The size of the secret with which nodes log in to each other."""


def rows_of(config: PublishedConfig) -> VBucketMap:
    names = config.names()
    return tuple(tuple(None if node == NO_NODE else names[node] for node in row) for row in config.rows)


def with_rows(config: PublishedConfig, changed: Mapping[VBucketId, Row]) -> PublishedConfig:
    """The same config with other rows of some vbuckets. The publisher raises the revision."""
    index = {name: at for at, name in enumerate(config.names())}
    rows = list(config.rows)
    for vbucket, row in changed.items():
        rows[vbucket] = tuple(NO_NODE if name is None else index[name] for name in row)
    return replace(config, rows=tuple(rows))


def with_building(config: PublishedConfig, changed: Mapping[VBucketId, Iterable[str]]) -> PublishedConfig:
    """The same config with other nodes that build some vbuckets. With an empty list, no node builds that vbucket."""
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
    """The same config with vbuckets on their way to these nodes; None if one has arrived, or will not arrive."""
    index = {name: at for at, name in enumerate(config.names())}
    handing_over = dict(config.handing_over)
    for vbucket, name in changed.items():
        if name is None:
            handing_over.pop(vbucket, None)
        else:
            handing_over[vbucket] = index[name]
    return replace(config, handing_over=handing_over)


def with_frozen(config: PublishedConfig, vbuckets: Iterable[int]) -> PublishedConfig:
    """The same config with these vbuckets, and all that are being handed over, frozen on every node."""
    frozen = {vbucket: config.rows[vbucket][0] for vbucket in (*vbuckets, *config.handing_over)}
    return replace(config, handing_over={vbucket: node for vbucket, node in sorted(frozen.items()) if node != NO_NODE})


def with_nodes(config: PublishedConfig, nodes: Iterable[NodeAddress]) -> PublishedConfig:
    """The same config with other nodes. What leaving nodes had is then on no node."""
    kept = tuple(nodes)
    new_index = {node.kv_address: at for at, node in enumerate(kept)}
    moved = [new_index.get(name, NO_NODE) for name in config.names()]

    def move(node: int) -> int:
        return NO_NODE if node == NO_NODE else moved[node]

    building = {
        vbucket: tuple(move(node) for node in builders if move(node) != NO_NODE)
        for vbucket, builders in config.building.items()
    }
    return replace(
        config,
        nodes=kept,
        rows=tuple(tuple(move(node) for node in row) for row in config.rows),
        building={vbucket: builders for vbucket, builders in building.items() if builders},
        handing_over={vbucket: move(node) for vbucket, node in config.handing_over.items() if move(node) != NO_NODE},
    )


def new_nodes_login(bucket: str, random_bytes: Callable[[int], bytes]) -> Credentials:
    """A log-in for the nodes among themselves, made once per cluster. It depends on nothing that may change."""
    return Credentials(nodes_user(bucket), random_bytes(SECRET_BYTES).hex())
