"""Blocking versions of `bootstrap` and `survey`, for callers without an event loop: Spark's planners and the loader.

They run the asyncio functions on an event loop in a thread. The loader's sockets are the exception: the loader selects
among them itself, so this module opens them and logs in, and then gives them to the loader.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Self, TypeVar

from headwater.client import bootstrap as asyncio_bootstrap
from headwater.client.bootstrap import Bootstrap, BucketView, connect_any, find_collection, map_of
from headwater.client.cluster_map import ClusterMap
from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection
from headwater.client.settings import ClientSettings
from headwater.client.survey import AsyncSurveyor, VBucketStatus
from headwater.client.threads import LoopThread, run_blocking
from headwater.errors import UnexpectedMessage
from headwater.protocol.numbers import CollectionId, Seqno, VBucketId

T = TypeVar("T")


def bootstrap(settings: ClientSettings) -> Bootstrap:
    """Ask one host after the other for the cluster map."""
    return run_blocking(lambda: asyncio_bootstrap.bootstrap(settings))


def look_at_bucket(settings: ClientSettings) -> BucketView:
    """Return the bucket's map, scopes and collections."""
    return run_blocking(lambda: asyncio_bootstrap.look_at_bucket(settings))


class Surveyor:
    """Asks the nodes of a bucket. Use it in `with`, or call `close`; a call after that connects again."""

    def __init__(self, settings: ClientSettings) -> None:
        self._thread: LoopThread | None = None
        self._surveyor: AsyncSurveyor = self._run(lambda: AsyncSurveyor.open(settings))

    @property
    def cluster_map(self) -> ClusterMap:
        return self._surveyor.cluster_map

    def survey(self, vbuckets: Iterable[VBucketId] | None = None) -> dict[VBucketId, VBucketStatus]:
        """Return the state of these vbuckets, or of all. Waits for vbuckets that are moving between nodes."""
        return self._run(lambda: self._surveyor.survey(vbuckets))

    def high_seqnos(self) -> dict[VBucketId, Seqno]:
        """Return the high seqno of every vbucket. It does not retry: raises if a request fails or the map is stale."""
        return self._run(self._surveyor.high_seqnos)

    def are_ours(self) -> bool:
        """Return whether all nodes with active vbuckets are Headwater's."""
        return self._run(self._surveyor.are_ours)

    def has_change_streams(self) -> bool:
        """Return whether all of these nodes can stream every version of a document, at least for a while."""
        return self._run(self._surveyor.has_change_streams)

    def documents_by_collection(self) -> dict[int, int]:
        """Return the number of documents by collection id; empty if the nodes do not count them."""
        return self._run(self._surveyor.documents_by_collection)

    def documents(self) -> int:
        """Return the number of documents in the bucket; 0 if the nodes do not count them."""
        return self._run(self._surveyor.documents)

    def refresh_map(self) -> None:
        """Read the cluster map again, over new connections."""
        self._run(self._surveyor.refresh_map)

    def look(self) -> BucketView:
        """Return the bucket's current collections, with the cluster map that is already known."""
        return self._run(self._surveyor.look)

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self._thread is None:
            self._thread = LoopThread("headwater-survey")
        try:
            return self._thread.run(work)
        except BaseException:
            # A caller may give up after any failure; close, so that no thread is left behind.
            self.close()
            raise

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                if hasattr(self, "_surveyor"):
                    thread.run(partial(_close, self._surveyor))
            finally:
                thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


async def _close(surveyor: AsyncSurveyor) -> None:
    surveyor.close()


class KvCluster:
    """The nodes of one bucket, for a caller that writes to all of them."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._login = settings.login()

    def read_map(self) -> ClusterMap:
        """Fetch the newest cluster map."""
        return bootstrap(self._settings).cluster_map

    def open(self, address: Address) -> socket.socket:
        """Open a socket to one node, logged in and with the bucket selected."""
        connection = KvConnection.open(address, self._login)
        if connection.buffered_bytes:
            connection.close()
            raise UnexpectedMessage(f"{address} has sent more than the answers")
        return connection.sock

    def find(self, collections: Sequence[str]) -> tuple[ClusterMap, tuple[CollectionId, ...]]:
        """Return the newest map, and the ids of the collections; without names, that of the default collection.

        If the server has no collections, there are no ids, and a name raises an error.
        """
        return run_blocking(lambda: self._find(collections))

    async def _find(self, collections: Sequence[str]) -> tuple[ClusterMap, tuple[CollectionId, ...]]:
        connection = await connect_any(self._settings)
        try:
            found = [await find_collection(connection, name) for name in collections or (None,)]
            return map_of(connection, self._settings), tuple(each for each in found if each is not None)
        finally:
            connection.abort()
