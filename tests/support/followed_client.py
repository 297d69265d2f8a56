"""A consumer that uses the real client: it keeps its state, is checked at every step, and can be stopped and resumed.

A step is a batch or, for a consumer that reads change by change, a change.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa

import headwater
from headwater.client.changes import Change, Deletion, Expiration, Mutation, Rollback
from headwater.client.kv_connection import Timeouts
from headwater.errors import ConnectionFailed, RemoteProtocolError
from headwater.lake.layout import raw_keys
from headwater.protocol.numbers import VBucketId, Vbuuid
from support.node_process import PASSWORD, USER
from support.oracle import ConsumerState, Row, StreamRules, offsets_of_json

READ_S_MAX = 40.0
"""Far longer than any read here takes, even if two cores are busy with other work."""

QUICK: dict[str, Any] = {"reconnect_delay_s_min": 0.001, "reconnect_delay_s_max": 0.05, "poll_interval_s": 0.5}
"""Options of a client that retries quickly."""


def rows_of(batch: pa.RecordBatch) -> list[Row]:
    """Return the rows of a batch, with keys as bytes, which the oracle compares."""
    keys = raw_keys(batch.column("key"), batch.column("key_bytes")).to_pylist()
    return [{**row, "key": key} for row, key in zip(batch.to_pylist(), keys, strict=True)]


def row_of(change: Change) -> Row:
    """Return a typed change as a row of a batch."""
    row = {"key": None, "value": None, "collection_id": None, **{name: getattr(change, name) for name in _NAMES}}
    if isinstance(change, Rollback):
        told = {"from_seqno": change.from_seqno, "old_vbuuid": change.old_vbuuid, "new_vbuuid": change.new_vbuuid}
        return {**row, "vbuuid": change.new_vbuuid, "value": json.dumps(told)}
    row |= {name: getattr(change, name) for name in ("vbuuid", "snapshot_start", "snapshot_end")}
    row["collection_id"] = getattr(change, "collection_id", None)
    if isinstance(change, Mutation | Deletion | Expiration):
        row |= {"key": change.key_bytes, "value": change.value, "cas": change.cas}
    return row


_NAMES = ("vbucket", "op", "seqno")


class FollowedClient:
    """Reads a bucket with as many clients as it takes, one after the other, each resuming from saved offsets."""

    def __init__(
        self,
        url: str,
        *,
        by_change: bool = False,
        tls: headwater.TlsSettings | None = None,
        timeouts: Timeouts | None = None,
        **options: Any,
    ) -> None:
        self.state = ConsumerState()
        self.saved: str | None = None
        """The offsets after the last step, as JSON."""
        self.rows: list[Row] = []
        """All rows that it has ever received."""
        self._url = url
        self._by_change = by_change
        self._settings = {"user": USER, "password": PASSWORD, "tls": tls, "timeouts": timeouts}
        self._options = {**QUICK, **options}
        self._rules = StreamRules(
            complete_snapshots=options.get("snapshots", "complete") == "complete",
            # A snapshot much larger than a batch may be cut.
            whole_in_step=not by_change and "batch_bytes" not in options,
            all_versions=options.get("history", False),
        )

    async def read(self, is_done: Callable[[ConsumerState], bool], *, steps_max: int | None = None) -> bool:
        """Read until the state is as wanted, or for some steps only. Returns whether it is as wanted."""
        if is_done(self.state):
            return True
        async with asyncio.timeout(READ_S_MAX):
            return await self._read(is_done, steps_max)

    async def read_to_end(self) -> None:
        """Read until the client reports the end."""
        async with asyncio.timeout(READ_S_MAX):
            await self._read(lambda state: False, None)

    async def _read(self, is_done: Callable[[ConsumerState], bool], steps_max: int | None) -> bool:
        async with self._reading() as reading:
            steps = 0
            async for step in reading:
                rows = [row_of(step)] if self._by_change else rows_of(step)
                self._take(rows, reading.offsets.to_json())
                if is_done(self.state):
                    return True
                steps += 1
                if steps == steps_max:
                    break
        return False

    @asynccontextmanager
    async def reading_on(self) -> AsyncIterator[asyncio.Task[bool]]:
        """Read until the block ends. Wait for the result with `reaches`."""
        task = asyncio.create_task(self._read(lambda state: False, None))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def reaches(self, is_done: Callable[[ConsumerState], bool], task: asyncio.Task[bool]) -> None:
        """Wait until the state of a running consumer is as wanted."""
        async with asyncio.timeout(READ_S_MAX):
            while not is_done(self.state):
                if task.done():
                    task.result()
                    raise AssertionError("the read has ended")
                await asyncio.sleep(0.005)

    def _take(self, rows: list[Row], offsets: str) -> None:
        self._rules.check(rows, offsets_of_json(offsets))
        self.state.apply(rows)
        self.saved = offsets
        self.rows += rows

    def pretend_branch(self, vbucket: int, *, vbuuid: int) -> None:
        """Resume as if this had been the branch that was read last."""
        assert self.saved is not None
        offsets = headwater.Offsets.from_json(self.saved)
        offset = replace(offsets[VBucketId(vbucket)], vbuuid=Vbuuid(vbuuid))
        self.saved = offsets.updated({VBucketId(vbucket): offset}).to_json()
        self._rules.pretend_branch(vbucket, vbuuid)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[Any]:
        start = "beginning" if self.saved is None else headwater.Offsets.from_json(self.saved)
        client = await self._connect()
        try:
            yield (client.changes if self._by_change else client.batches)(start=start, **self._options)
        finally:
            self._rules.left()
            await client.close()

    async def _connect(self) -> headwater.Client:
        """Retry the first connection: the client leaves that to its callers."""
        while True:
            client = headwater.connect(self._url, **self._settings)
            try:
                return await client.__aenter__()
            except (ConnectionFailed, RemoteProtocolError):
                continue


# A consumer of the whole cluster: keeps a copy of all documents, updated with the changes that it reads.


_SOON: dict[str, Any] = {"reconnect_delay_s_min": 0.01, "reconnect_delay_s_max": 0.2, "poll_interval_s": 0.5}


class ClusterConsumer:
    """Reads until it is stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._changes: defaultdict[int, list[Mutation | Deletion | Expiration]] = defaultdict(list)
        self.rollbacks = 0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ClusterConsumer:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _read(self) -> None:
        async with headwater.connect(f"{self._url}/default", user=USER, password=PASSWORD) as client:
            async for change in client.changes(start="beginning", **_SOON):
                seen = self._changes[change.vbucket]
                if isinstance(change, Rollback):
                    self.rollbacks += 1
                    seen[:] = [one for one in seen if one.seqno <= change.seqno]
                elif isinstance(change, Mutation | Deletion | Expiration):
                    assert not seen or change.seqno > seen[-1].seqno, "seqnos rise"
                    seen.append(change)

    def documents(self) -> dict[tuple[int, bytes], tuple[int, bytes]]:
        """Return CAS and value by collection and key."""
        documents: dict[tuple[int, bytes], tuple[int, bytes]] = {}
        for seen in self._changes.values():
            for change in seen:
                key = (change.collection_id, change.key_bytes)
                if isinstance(change, Mutation):
                    documents[key] = (change.cas, bytes(change.value or b""))
                else:
                    documents.pop(key, None)
        return documents

    async def becomes(self, wanted: dict[tuple[int, bytes], tuple[int, bytes]], *, within_s: float = 20.0) -> None:
        """Wait until this consumer has what another one has."""
        assert self._task is not None
        for _ in range(int(within_s / 0.05)):
            if self._task.done():
                self._task.result()
            if self.documents() == wanted:
                return
            await asyncio.sleep(0.05)
        held = self.documents()
        keys = [key for key in {**held, **wanted} if held.get(key) != wanted.get(key)]
        raise AssertionError(
            f"{len(keys)} documents differ: "
            + "; ".join(f"{key}: held {held.get(key)}, stored {wanted.get(key)}" for key in keys[:5])
        )


async def stored_documents(url: str) -> dict[tuple[int, bytes], tuple[int, bytes]]:
    """Return what a consumer that starts now has at the end."""
    consumer = ClusterConsumer(url)
    async with headwater.connect(f"{url}/default", user=USER, password=PASSWORD) as client:
        async for change in client.changes(start="beginning", end="now"):
            if isinstance(change, Mutation | Deletion | Expiration):
                consumer._changes[change.vbucket].append(change)
    return consumer.documents()
