"""Simulated writers: each has keys of its own, finds their nodes by the cluster map, and keeps the answers.

A writer of hot keys rewrites a few documents again and again, with hardly a pause. So between any two moments of a
consumer some of them change: DCP then sends the newest version only, and what a plan has counted on never comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from headwater.client.bootstrap import BucketView
from headwater.client.cluster_map import ClusterMap, vbucket_of
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.kv_connection import HostFailures, Login
from headwater.client.settings import ClientSettings
from headwater.client.survey import SURVEY_NAME, VBucketStatus
from headwater.errors import (
    ConnectionFailed,
    HeadwaterError,
    KeyNotFound,
    NotMyVBucket,
    StatusError,
    SyncWriteAmbiguous,
)
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.frames import DurabilityLevel, FrameInfo, durability
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_streams import (
    GetFailoverLog,
    GetFailoverLogResponse,
    Open,
    OpenFlags,
    VBucketState,
)
from headwater.protocol.messages.documents import Delete, Get, Set
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos, GetAllVbSeqnosResponse, GetCollectionsManifest
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, VBucketId
from headwater.sim.checkers import Outcome, Write
from headwater.sim.processes import Process

if TYPE_CHECKING:
    from headwater.sim.world import World

# What simulated clients do before they read or write: find the bucket, and ask how far it is, without a thread and
# without a real socket. The client's own means for it block, so these do the same under asyncio.


SURVEY_RETRY_S = 0.1
_NAME_RANDOM_BYTES = 6


def login_of(settings: ClientSettings, random: Random) -> Login:
    return replace(settings.login(), random_bytes=random.randbytes)


async def connect_any(settings: ClientSettings, random: Random) -> AsyncKvConnection:
    """A connection to the first host of the connection string that answers."""
    failures = HostFailures()
    for address in settings.addresses:
        try:
            return await AsyncKvConnection.open(address, login_of(settings, random))
        except HeadwaterError as error:
            failures.add(address, error)
    raise failures.verdict()


async def look_at_bucket(settings: ClientSettings, random: Random) -> BucketView:
    """As the client's own, which blocks."""
    connection = await connect_any(settings, random)
    try:
        answer = await connection.request(GetCollectionsManifest())
        assert isinstance(answer, PlainResponse)
        return BucketView(
            cluster_map=settings.decode_map(connection.outcome.cluster_config, asked=connection.address),
            manifest=Manifest.decode(answer.value),
            has_collections=True,
        )
    finally:
        connection.close()


def seed_addresses(hosts: list[str], port: int) -> tuple[Address, ...]:
    return tuple(Address(host, port) for host in hosts)


class PatientSurveyor:
    """Asks the nodes for high seqnos and failover logs, as the client's `Surveyor` does, until all have answered.

    Connections are kept from one survey to the next. What goes wrong is tried again without an end: in a simulation
    every fault ends.
    """

    def __init__(self, settings: ClientSettings, random: Random) -> None:
        self._settings = settings
        self._random = random
        self._map: ClusterMap | None = None
        self._connections: dict[Address, AsyncKvConnection] = {}

    @property
    def cluster_map(self) -> ClusterMap:
        """As it was when the last survey was made: it may be out of date by now."""
        assert self._map is not None, "a survey reads the map"
        return self._map

    async def survey(self, vbuckets: Iterable[VBucketId] | None = None) -> dict[VBucketId, VBucketStatus]:
        """The state of these vbuckets, or of all. Waits for those that have no active node at the moment."""
        found: dict[VBucketId, VBucketStatus] = {}
        while True:
            try:
                if self._map is None:
                    self._map = (await look_at_bucket(self._settings, self._random)).cluster_map
                every = map(VBucketId, range(self._map.vbuckets))
                missing = sorted(set(every if vbuckets is None else vbuckets) - found.keys())
                if not missing:
                    return found
                found |= await self._ask_nodes(self._map, missing)
                if not set(missing) - found.keys():
                    return found
            except HeadwaterError:
                self.close()
            self._map = None
            await asyncio.sleep(SURVEY_RETRY_S)

    async def _ask_nodes(
        self, cluster_map: ClusterMap, vbuckets: Iterable[VBucketId]
    ) -> dict[VBucketId, VBucketStatus]:
        by_node: dict[Address, list[VBucketId]] = {}
        for vbucket in vbuckets:
            node = cluster_map.active_node(vbucket)
            if node >= 0:
                by_node.setdefault(cluster_map.nodes[node], []).append(vbucket)
        found: dict[VBucketId, VBucketStatus] = {}
        for address, asked in by_node.items():
            connection = await self._connection(address)
            # In this order: a seqno is never of an older branch than the log that it is taken with.
            logs = await _failover_logs(connection, asked)
            answer = await connection.request(GetAllVbSeqnos(state=VBucketState.ACTIVE))
            assert isinstance(answer, GetAllVbSeqnosResponse)
            highs = {entry.vbucket: entry.seqno for entry in answer.seqnos}
            for vbucket in logs.keys() & highs.keys():
                found[vbucket] = VBucketStatus(high_seqno=highs[vbucket], failover_log=logs[vbucket])
        return {vbucket: found[vbucket] for vbucket in sorted(found)}

    async def _connection(self, address: Address) -> AsyncKvConnection:
        known = self._connections.get(address)
        if known is None or known.is_closed:
            known = await AsyncKvConnection.open(address, login_of(self._settings, self._random))
            self._connections[address] = known
            # Servers give failover logs on DCP connections only.
            name = f"{SURVEY_NAME}:{self._random.randbytes(_NAME_RANDOM_BYTES).hex()}"
            await known.request(Open(key=name.encode(), flags=OpenFlags.PRODUCER))
        return known

    def close(self) -> None:
        for connection in self._connections.values():
            connection.abort()
        self._connections.clear()


async def _failover_logs(connection: AsyncKvConnection, vbuckets: list[VBucketId]) -> dict[VBucketId, FailoverLog]:
    """The logs of those that the node has."""
    answers = await asyncio.gather(
        *(connection.request(GetFailoverLog(vbucket=vbucket)) for vbucket in vbuckets), return_exceptions=True
    )
    logs: dict[VBucketId, FailoverLog] = {}
    for vbucket, answer in zip(vbuckets, answers, strict=True):
        if isinstance(answer, GetFailoverLogResponse):
            logs[vbucket] = FailoverLog.of(answer.failover_log)
        elif not isinstance(answer, NotMyVBucket):
            assert isinstance(answer, BaseException), f"{answer} is no failover log"
            raise answer
    return logs


RETRY_S = 0.1
REFUSALS_MAX = 10
EXPIRY_S = 1
HOT_HOSTS = 100
"""The hosts of writers of hot keys are numbered from here on."""
DURABLE_TIMEOUT_MS = 2000
HOT_WEIGHTS = {"set": 1.0, "delete": 0.05}
"""Of hot keys: a document that is gone half of the time would hide that it is out of date."""
_LEVELS = {"majority": DurabilityLevel.MAJORITY, "persist": DurabilityLevel.PERSIST_TO_MAJORITY}


class Writer:
    """One process with several keys and, where the plan says so, several writes under way."""

    def __init__(self, world: World, number: int, *, is_hot: bool = False) -> None:
        self.name = f"hot-{number}" if is_hot else f"writer-{number}"
        self.is_stopped = False
        self._world = world
        self._random = world.random_of(self.name)
        host = f"10.0.1.{HOT_HOSTS + number if is_hot else number}"
        self._process = Process(self.name, host, random=self._random)
        self._settings: ClientSettings = world.client_settings()
        self._map: ClusterMap | None = None
        self._connections: dict[Address, AsyncKvConnection] = {}
        self._values = count(1)
        plan = world.plan
        keys = plan.hot_keys if is_hot else plan.keys_per_writer
        self._keys = [b"%s-%d" % (self.name.encode(), key) for key in range(keys)]
        self._lanes_count = keys if is_hot else plan.lanes
        self._pause_s = plan.hot_pause_s if is_hot else plan.write_pause_s
        self._weights = HOT_WEIGHTS if is_hot else plan.write_weights
        self._lanes: list[asyncio.Task[None]] = []

    def start(self) -> None:
        lanes = self._lanes_count
        for lane in range(lanes):
            keys = self._keys[lane::lanes]
            self._lanes.append(self._process.run(self._world.loop, self._write_on(keys), name=f"lane-{lane}"))

    async def stop(self) -> None:
        self.is_stopped = True
        await asyncio.gather(*self._lanes)
        for connection in self._connections.values():
            connection.close()

    async def _write_on(self, keys: list[bytes]) -> None:
        random = self._random
        while not self.is_stopped:
            await asyncio.sleep(random.expovariate(1 / self._pause_s))
            collection = self._world.collections.choose(random)
            await self._write(random.choice(keys), collection, _choose(random, self._weights))

    async def _write(self, key: bytes, collection: int, kind: str) -> None:
        place = {
            "collection_id": CollectionId(collection),
            "key": key,
            "vbucket": vbucket_of(key, self._world.plan.vbuckets),
        }
        if kind == "get":
            await self._ask(Get(**place), None)  # type: ignore[arg-type]
            return
        value = None if kind == "delete" else b'{"by":"%s","n":%d}' % (self.name.encode(), next(self._values))
        infos: tuple[FrameInfo, ...] = ()
        if kind in _LEVELS:
            infos = (durability(_LEVELS[kind], timeout_ms=DURABLE_TIMEOUT_MS),)
        expires = kind == "expire"
        began_s = self._world.loop.time()
        write = Write(value=value, is_durable=bool(infos), may_expire=expires, began_s=began_s)
        if collection == DEFAULT_COLLECTION:
            self._world.writes.begin((collection, key), write)
        if value is None:
            request: Request = Delete(frame_infos=infos, **place)  # type: ignore[arg-type]
        else:
            expiry = EXPIRY_S if expires else 0
            request = Set(value=value, expiry=expiry, frame_infos=infos, **place)  # type: ignore[arg-type]
        await self._ask(request, write)

    async def _ask(self, request: Request, write: Write | None) -> None:
        """Ask until there is an outcome: refusals that are not about the write are tried again, a few times."""
        outcome = Outcome.REFUSED
        for _ in range(REFUSALS_MAX):
            try:
                connection = await self._connection(request.vbucket)
            except HeadwaterError:
                self._map = None
                await asyncio.sleep(RETRY_S)
                if self.is_stopped:
                    break
                continue
            try:
                await connection.request(request)
                outcome = Outcome.ACKNOWLEDGED
                break
            except (ConnectionFailed, SyncWriteAmbiguous) as error:
                if isinstance(error, ConnectionFailed):
                    self._drop(connection)
                outcome = Outcome.UNKNOWN
                break
            except StatusError as error:
                if isinstance(error, KeyNotFound) or not error.retriable:
                    break
                self._map = None
                await asyncio.sleep(RETRY_S)
        if write is not None:
            write.outcome, write.ended_s = outcome, self._world.loop.time()

    async def _connection(self, vbucket: int) -> AsyncKvConnection:
        if self._map is None:
            self._map = await self._read_map()
        address = self._map.address_of(vbucket)  # type: ignore[arg-type]
        known = self._connections.get(address)
        if known is None or known.is_closed:
            opened = await AsyncKvConnection.open(address, login_of(self._settings, self._random))
            known = self._connections.get(address)
            if known is not None and not known.is_closed:
                opened.close()  # another lane was faster
                return known
            known = self._connections[address] = opened
        return known

    async def _read_map(self) -> ClusterMap:
        connection = await connect_any(self._settings, self._random)
        try:
            answer = await connection.request(GetClusterConfig())
            assert isinstance(answer, PlainResponse)
            return self._settings.decode_map(answer.value, asked=connection.address)
        finally:
            connection.close()

    def _drop(self, connection: AsyncKvConnection) -> None:
        connection.abort()
        self._map = None


def _choose(random: Random, weights: dict[str, float]) -> str:
    return random.choices(list(weights), list(weights.values()))[0]
