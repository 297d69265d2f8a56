"""A consumer on the real client: it keeps its state, is judged at every step, and stops and goes on as it is told.

A step is a batch or, for a consumer that reads change by change, a change.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import headwater
from headwater.client.changes import Change, Deletion, Expiration, Mutation, Rollback
from headwater.client.kv_connection import Timeouts
from headwater.errors import ConnectionFailed, RemoteProtocolError
from headwater.protocol.numbers import VBucketId, Vbuuid
from support.consumer_state import ConsumerState, Row
from support.node_process import PASSWORD, USER
from support.stream_rules import StreamRules, offsets_of_json

READ_S_MAX = 40.0
"""Far beyond what any read here takes, also where two cores do much else."""

QUICK: dict[str, Any] = {
    "reconnect_delay_s_min": 0.001,
    "reconnect_delay_s_max": 0.05,
    "poll_interval_s": 0.5,
}
"""Options of a client that does not wait for long before it tries again."""


def row_of(change: Change) -> Row:
    """A typed change as a row of a batch."""
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
    """Reads a bucket over as many clients as it takes, one after the other, each going on from saved offsets."""

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
        """The offsets behind the last step, as JSON."""
        self.rows: list[Row] = []
        """All that it was ever given."""
        self._url = url
        self._by_change = by_change
        self._settings = {"user": USER, "password": PASSWORD, "tls": tls, "timeouts": timeouts}
        self._options = {**QUICK, **options}
        self._rules = StreamRules(
            complete_snapshots=options.get("snapshots", "complete") == "complete",
            # One that is much larger than a batch may be cut.
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
        """Read until the client says that there is no more."""
        async with asyncio.timeout(READ_S_MAX):
            await self._read(lambda state: False, None)

    async def _read(self, is_done: Callable[[ConsumerState], bool], steps_max: int | None) -> bool:
        async with self._reading() as reading:
            steps = 0
            async for step in reading:
                rows = [row_of(step)] if self._by_change else step.to_pylist()
                self._take(rows, reading.offsets.to_json())
                if is_done(self.state):
                    return True
                steps += 1
                if steps == steps_max:
                    break
        return False

    @asynccontextmanager
    async def reading_on(self) -> AsyncIterator[asyncio.Task[bool]]:
        """Read while the block lasts. `reaches` waits for what comes of it."""
        task = asyncio.create_task(self._read(lambda state: False, None))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def reaches(self, is_done: Callable[[ConsumerState], bool], task: asyncio.Task[bool]) -> None:
        """Wait until the state of a consumer that reads on is as wanted."""
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
        """Go on as if this had been the branch that was read last."""
        assert self.saved is not None
        offsets = headwater.Offsets.from_json(self.saved)
        offset = replace(offsets[VBucketId(vbucket)], vbuuid=Vbuuid(vbuuid))
        self.saved = offsets.with_offset(VBucketId(vbucket), offset).to_json()
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
        """Who can't connect tries again: that is left to callers."""
        while True:
            client = headwater.connect(self._url, **self._settings)
            try:
                return await client.__aenter__()
            except (ConnectionFailed, RemoteProtocolError):
                continue
