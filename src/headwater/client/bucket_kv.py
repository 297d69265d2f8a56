"""Key-value requests to one bucket: each goes to the node of its vbucket, and is retried if that may help.

Checkpoints in the bucket and group documents use it. It opens one connection per node, when that is first needed. It
does not interpret refusals: that is left to the caller.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from headwater.client.bootstrap import bootstrap, find_collection
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_asyncio import AsyncKvConnection
from headwater.client.retries import Backoff
from headwater.client.settings import ClientSettings
from headwater.errors import BucketReplaced, HeadwaterError, NotMyVBucket, StatusError
from headwater.protocol.features import Feature
from headwater.protocol.messages import Request, Response
from headwater.protocol.numbers import CollectionId

RETRY_S_MAX = 60.0
"""How long the requests of one call are retried, unless the caller sets another limit."""
RETRY_DELAY_S_MIN = 0.01
RETRY_DELAY_S_MAX = 1.0


class KvPort(Protocol):
    """The operations of a client that checkpoints and groups need."""

    async def cluster_map(self) -> ClusterMap:
        """Return the newest known map."""

    async def collection_id(self, name: str | None) -> CollectionId | None:
        """Return the id of a collection given as `scope.collection`, or of the default collection for None.

        Returns None if the server has no collections.
        """

    async def request(self, requests: Sequence[Request]) -> list[Response | StatusError]:
        """Return the answers in the order of the requests. A refusal is returned, not raised.

        Requests that may succeed later are retried for a limited time, with a newer map if needed. So a request may
        have been executed although its answer is a refusal: the answer to an earlier attempt was lost. Raises
        `ConnectionFailed` if a node can't be reached in that time.
        """

    async def close(self) -> None:
        """Close the connections."""


class BucketKv:
    """A `KvPort` over the network. Calls on one loop run one after the other."""

    def __init__(self, settings: ClientSettings, *, retry_s_max: float = RETRY_S_MAX) -> None:
        needed = (Feature.XATTR, Feature.MUTATION_SEQNO)
        self._settings = replace(settings, features=(*dict.fromkeys((*settings.features, *needed)),))
        self._retry_s_max = retry_s_max
        self._backoff = Backoff(delay_s_min=RETRY_DELAY_S_MIN, delay_s_max=RETRY_DELAY_S_MAX, random=random.random)
        self._turn = asyncio.Lock()
        self._closing = asyncio.Event()
        self._map: ClusterMap | None = None
        self._map_is_stale = False
        self._connections: dict[Address, AsyncKvConnection] = {}

    async def cluster_map(self) -> ClusterMap:
        async with self._turn:
            return await self._newest_map()

    async def collection_id(self, name: str | None) -> CollectionId | None:
        async with self._turn:
            return await find_collection(await self._connection_to((await self._newest_map()).nodes[0]), name)

    async def close(self) -> None:
        """Close the connections. Requests that are being retried stop."""
        self._closing.set()
        async with self._turn:
            for address in list(self._connections):
                self._drop(address)
            self._closing.clear()

    async def request(self, requests: Sequence[Request]) -> list[Response | StatusError]:
        async with self._turn:
            clock = asyncio.get_running_loop().time
            answered: dict[int, Response | StatusError] = {}
            give_up_s = clock() + self._retry_s_max
            attempts = 0
            due = list(range(len(requests)))
            while due:
                failure = await self._attempt(requests, due, answered)
                due = [number for number in due if _is_due(answered.get(number))]
                attempts += 1
                delay_s = self._backoff.delay_s(attempts)
                if due and (clock() + delay_s > give_up_s or await self._is_closed_within(delay_s)):
                    if failure is not None:
                        raise failure
                    break
            return [answered[number] for number in range(len(requests))]

    async def _is_closed_within(self, delay_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._closing.wait()
        return self._closing.is_set()

    async def _attempt(
        self, requests: Sequence[Request], due: list[int], answered: dict[int, Response | StatusError]
    ) -> HeadwaterError | None:
        """Send the due requests, each to its node. Returns the error if some have no answer."""
        by_node: dict[Address, list[int]] = {}
        try:
            cluster_map = await self._newest_map()
        except HeadwaterError as error:
            return _retriable(error)
        for number in due:
            try:
                by_node.setdefault(cluster_map.address_of(requests[number].vbucket), []).append(number)
            except NotMyVBucket as error:
                answered[number] = error
        failure: HeadwaterError | None = None
        for address, numbers in by_node.items():
            try:
                connection = await self._connection_to(address)
                waiting = connection.send([requests[number] for number in numbers])
                for number, answer in zip(numbers, waiting, strict=True):
                    answered[number] = (await answer)[-1].result()
            except HeadwaterError as error:
                # The vbuckets may have moved to another node.
                self._drop(address)
                self._map_is_stale = True
                failure = _retriable(error)
        self._map_is_stale |= any(
            isinstance(answer, StatusError) and answer.stale_topology for answer in answered.values()
        )
        return failure

    async def _newest_map(self) -> ClusterMap:
        if self._map is None or self._map_is_stale:
            newest = (await bootstrap(self._settings)).cluster_map
            known = self._map or newest
            if (newest.uuid, newest.vbuckets) != (known.uuid, known.vbuckets):
                raise BucketReplaced(self._settings.bucket)
            self._map = max(known, newest, key=lambda cluster_map: cluster_map.version)
            self._map_is_stale = False
            self._settings = replace(self._settings, bucket_was_seen=True)
        return self._map

    async def _connection_to(self, address: Address) -> AsyncKvConnection:
        known = self._connections.get(address)
        if known is None or not known.is_usable:
            known = self._connections[address] = await AsyncKvConnection.open(address, self._settings.login())
        return known

    def _drop(self, address: Address) -> None:
        connection = self._connections.pop(address, None)
        if connection is not None:
            connection.abort()


def _is_due(answer: Response | StatusError | None) -> bool:
    """Whether the request must be sent again: it has no answer, or a refusal that may pass."""
    return answer is None or (isinstance(answer, StatusError) and answer.retriable)


def _retriable(error: HeadwaterError) -> HeadwaterError:
    if not error.retriable:
        raise error
    return error
