"""Key-value requests over blocking connections, in a thread, so that the event loop goes on."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from headwater.client.bootstrap import bootstrap
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import Backoff, KvConnection
from headwater.client.settings import ClientSettings
from headwater.errors import (
    BucketReplaced,
    HeadwaterError,
    NotMyVBucket,
    NotSupported,
    StatusError,
)
from headwater.protocol.features import Feature
from headwater.protocol.messages import Request, Response
from headwater.protocol.messages.vbuckets import GetCollectionId, GetCollectionIdResponse
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId
from headwater.protocol.status import Status

# Many requests over one blocking connection, sent without waiting for the answers to those before.
#
# A server that brings every write to the disk does so for all that have come until then. Asked one by one, it would
# have to do it for each: a thousand writes in seconds instead of milliseconds.


WINDOW_REQUESTS = 128
"""What may be sent and not answered. They are small, and must fit into the buffers between us and the server: while we
send, nobody takes its answers."""


def answers_to(connection: KvConnection, requests: Sequence[Request]) -> Iterator[Response | StatusError]:
    for answered in connection.answers(requests):
        yield answered.result()


RETRY_S_MAX = 60.0
"""How long the requests of one call are tried again, unless told."""
RETRY_DELAY_S_MIN = 0.01
RETRY_DELAY_S_MAX = 1.0

T = TypeVar("T")


class ThreadedKv:
    """A `KvPort` with one connection to each node, made when it is first needed."""

    def __init__(self, settings: ClientSettings, *, retry_s_max: float = RETRY_S_MAX) -> None:
        needed = (Feature.XATTR, Feature.MUTATION_SEQNO)
        self._settings = replace(settings, features=(*dict.fromkeys((*settings.features, *needed)),))
        self._retry_s_max = retry_s_max
        self._backoff = Backoff(delay_s_min=RETRY_DELAY_S_MIN, delay_s_max=RETRY_DELAY_S_MAX, random=random.random)
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._map: ClusterMap | None = None
        self._map_is_stale = False
        self._connections: dict[Address, KvConnection] = {}

    async def cluster_map(self) -> ClusterMap:
        return await self._in_thread(self._newest_map)

    async def collection_id(self, name: str | None) -> CollectionId | None:
        return await self._in_thread(lambda: self._find_collection(name))

    async def request(self, requests: Sequence[Request]) -> list[Response | StatusError]:
        return await self._in_thread(lambda: self._request_all(requests))

    async def close(self) -> None:
        """Let go of the connections. A request that is still being tried is given up."""
        self._closing.set()
        await self._in_thread(self._drop_all)

    # --- in a thread ----------------------------------------------------------------------------------------------

    async def _in_thread(self, function: Callable[[], T]) -> T:
        def run() -> T:
            with self._turn:
                return function()

        return await asyncio.to_thread(run)

    def _drop_all(self) -> None:
        for address in list(self._connections):
            self._drop(address)
        self._closing.clear()

    def _drop(self, address: Address) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.close()

    def _newest_map(self) -> ClusterMap:
        if self._map is None or self._map_is_stale:
            newest = bootstrap(self._settings).cluster_map
            known = self._map or newest
            if (newest.uuid, newest.vbuckets) != (known.uuid, known.vbuckets):
                raise BucketReplaced(self._settings.bucket)
            self._map = max(known, newest, key=lambda cluster_map: cluster_map.version)
            self._map_is_stale = False
        return self._map

    def _connection_to(self, address: Address) -> KvConnection:
        if address not in self._connections:
            self._connections[address] = KvConnection.open(address, self._settings.login())
        return self._connections[address]

    def _find_collection(self, name: str | None) -> CollectionId | None:
        connection = self._connection_to(self._newest_map().nodes[0])
        if not connection.outcome.negotiated.collections:
            if name is not None:
                raise NotSupported(
                    Status.NOT_SUPPORTED,
                    f"{connection.address} has no collections",
                    hint="Name none, or use a server of version 7 or newer",
                )
            return None
        if name is None:
            return DEFAULT_COLLECTION
        answer = connection.request(GetCollectionId(value=name.encode()))
        assert isinstance(answer, GetCollectionIdResponse)
        return CollectionId(answer.id)

    # --- requests -------------------------------------------------------------------------------------------------

    def _request_all(self, requests: Sequence[Request]) -> list[Response | StatusError]:
        call = _Call(requests)
        give_up_s = time.monotonic() + self._retry_s_max
        attempts = 0
        while call.due:
            failure = self._attempt(call)
            attempts += 1
            delay_s = self._backoff.delay_s(attempts)
            if call.due and (time.monotonic() + delay_s > give_up_s or self._closing.wait(delay_s)):
                if failure is not None:
                    raise failure
                break
        return call.answers()

    def _attempt(self, call: _Call) -> HeadwaterError | None:
        """Send what is due, each to its node. Gives what was in the way, where there are some without an answer."""
        try:
            by_node = self._sorted_by_node(call)
        except HeadwaterError as error:
            return _retriable(error)
        failure: HeadwaterError | None = None
        for address, numbers in by_node.items():
            try:
                call.take_answers(numbers, self._connection_to(address))
            except HeadwaterError as error:
                # Its answers can't be told apart any more, and the vbuckets may be another node's by now.
                self._drop(address)
                self._map_is_stale = True
                failure = _retriable(error)
        self._map_is_stale |= call.has_misplaced
        return failure

    def _sorted_by_node(self, call: _Call) -> dict[Address, list[int]]:
        cluster_map = self._newest_map()
        by_node: dict[Address, list[int]] = {}
        for number in call.due:
            try:
                address = cluster_map.address_of(call.requests[number].vbucket)
            except NotMyVBucket as error:
                call.answered[number] = error
                self._map_is_stale = True
            else:
                by_node.setdefault(address, []).append(number)
        return by_node


class _Call:
    """Requests by their numbers, and the answers to them so far."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.answered: dict[int, Response | StatusError] = {}

    @property
    def due(self) -> list[int]:
        """Those that have no answer yet, or one that may be another the next time."""
        return [number for number in range(len(self.requests)) if _is_due(self.answered.get(number))]

    @property
    def has_misplaced(self) -> bool:
        return any(isinstance(answer, StatusError) and answer.stale_topology for answer in self.answered.values())

    def take_answers(self, numbers: Sequence[int], connection: KvConnection) -> None:
        answers = answers_to(connection, [self.requests[number] for number in numbers])
        for number, answer in zip(numbers, answers, strict=True):
            self.answered[number] = answer

    def answers(self) -> list[Response | StatusError]:
        return [self.answered[number] for number in range(len(self.requests))]


def _is_due(answer: Response | StatusError | None) -> bool:
    return answer is None or (isinstance(answer, StatusError) and answer.retriable)


def _retriable(error: HeadwaterError) -> HeadwaterError:
    if not error.retriable:
        raise error
    return error
