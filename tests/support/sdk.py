"""The SDK's cluster object, connected to a node while a block of code runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.exceptions import CouchbaseException
from couchbase.options import ClusterOptions, ClusterTimeoutOptions, UpsertOptions

from support.node_process import PASSWORD, USER

READY_TIMEOUT = timedelta(seconds=30)


@contextmanager
def connected(url: str, user: str, password: str) -> Iterator[Cluster]:
    cluster = Cluster(url, ClusterOptions(PasswordAuthenticator(user, password)))
    try:
        cluster.wait_until_ready(READY_TIMEOUT)
        yield cluster
    finally:
        cluster.close()


# An application that writes with the PyPI package `couchbase`, and records the acknowledgements.


THREADS = 4
_READY = timedelta(seconds=30)


class SdkWriter:
    """Writes documents in turns until the `with` block ends. Every thread has its own documents."""

    def __init__(self, url: str, *, keys: int = 50, durability: Any = None, timeout_s: float = 10.0) -> None:
        self.acknowledged: dict[str, int] = {}
        """The highest version of each document that the cluster has acknowledged."""
        self.failures: list[str] = []
        self.longest_pause_s = 0.0
        """The longest duration of one write."""
        self._url = url
        self._keys = keys
        self._durability = durability
        self._timeout = timedelta(seconds=timeout_s)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(at,), daemon=True) for at in range(THREADS)]
        self._cluster: Cluster
        self._written = [0] * THREADS

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self._start)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()
        await asyncio.to_thread(self._cluster.close)

    def _start(self) -> None:
        # Requests that the SDK has queued for a dying node wait there until they time out, whatever the config says.
        timeouts = ClusterTimeoutOptions(kv_timeout=self._timeout, kv_durable_timeout=self._timeout)
        options = ClusterOptions(PasswordAuthenticator(USER, PASSWORD), timeout_options=timeouts)
        self._cluster = Cluster(self._url, options)
        self._cluster.wait_until_ready(_READY)
        self.collection = self._cluster.bucket("default").default_collection()
        for thread in self._threads:
            thread.start()

    async def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    @property
    def written(self) -> int:
        return sum(self._written)

    async def missing(self) -> list[str]:
        """Return the acknowledged writes that are missing, read through the same client."""
        return await asyncio.to_thread(self._missing)

    def _missing(self) -> list[str]:
        missing = []
        for key, version in self.acknowledged.items():
            try:
                found = self.collection.get(key).content_as[dict]["version"]
            except CouchbaseException as error:
                missing.append(f"{key}: {version} was acknowledged, and reading it is {type(error).__name__}")
                continue
            if found < version:
                missing.append(f"{key}: {version} was acknowledged, {found} is there")
        return missing

    def _write(self, thread: int) -> None:
        options = UpsertOptions() if self._durability is None else UpsertOptions(durability=self._durability)
        while not self._stop.is_set():
            self._written[thread] += 1
            version = self._written[thread]
            key = f"key-{thread}-{version % self._keys}"
            began_s = time.monotonic()
            try:
                self.collection.upsert(key, {"version": version}, options)
            except CouchbaseException as error:
                self.failures.append(f"{key} {version}: {type(error).__name__} {str(error)[:500]}")
            else:
                self.acknowledged[key] = version
            self.longest_pause_s = max(self.longest_pause_s, time.monotonic() - began_s)
