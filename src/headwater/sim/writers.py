"""Simulated writers: each has keys of its own, finds their nodes by the cluster map, and keeps the answers.

A writer of hot keys rewrites a few documents again and again, with hardly a pause. So between any two moments of a
consumer some of them change: DCP then sends the newest version only, and what a plan has counted on never comes.
"""

from __future__ import annotations

import asyncio
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from headwater.client.bootstrap import connect_any
from headwater.client.cluster_map import ClusterMap, vbucket_of
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.settings import ClientSettings
from headwater.errors import (
    ConnectionFailed,
    HeadwaterError,
    KeyNotFound,
    StatusError,
    SyncWriteAmbiguous,
)
from headwater.protocol.frames import DurabilityLevel, FrameInfo, durability
from headwater.protocol.messages import PlainResponse
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.documents import Delete, Get, Set
from headwater.protocol.messages.session import GetClusterConfig
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.sim.checkers import KnownOutcome, Write
from headwater.sim.network import Process, login_of

if TYPE_CHECKING:
    from headwater.sim.world import World

RETRY_S = 0.1
REFUSALS_MAX = 10
EXPIRY_S = 1
OTHER_COLLECTION_CHANCE = 0.3
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
            others = list(self._world.collections)
            is_other = bool(others) and random.random() < OTHER_COLLECTION_CHANCE
            collection = random.choice(others) if is_other else DEFAULT_COLLECTION
            await self._write(random.choice(keys), collection, _choose(random, self._weights))

    async def _write(self, key: bytes, collection: int, kind: str) -> None:
        target = {
            "collection_id": CollectionId(collection),
            "key": key,
            "vbucket": vbucket_of(key, self._world.plan.vbuckets),
        }
        if kind == "get":
            await self._ask(Get(**target), None)  # type: ignore[arg-type]
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
            request: Request = Delete(frame_infos=infos, **target)  # type: ignore[arg-type]
        else:
            expiry = EXPIRY_S if expires else 0
            request = Set(value=value, expiry=expiry, frame_infos=infos, **target)  # type: ignore[arg-type]
        await self._ask(request, write)

    async def _ask(self, request: Request, write: Write | None) -> None:
        """Ask until there is an outcome: refusals that are not about the write are tried again, a few times."""
        outcome = KnownOutcome.REFUSED
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
                outcome = KnownOutcome.ACKNOWLEDGED
                break
            except (ConnectionFailed, SyncWriteAmbiguous) as error:
                if isinstance(error, ConnectionFailed):
                    self._drop(connection)
                outcome = KnownOutcome.UNKNOWN
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
        connection = await connect_any(self._settings, random_bytes=self._random.randbytes)
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
