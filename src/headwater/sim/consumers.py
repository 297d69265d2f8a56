"""Simulated consumers: the production client, slow or quick, and killed at any moment.

A consumer keeps what it holds and its offsets together, in one durable step, and begins again from there: that is how
exactly once is done. A mutant does one thing wrong on purpose, to see that the checkers notice.

`AnyConsumer` is what the director, the faults and the judges know of a consumer. `Consumer` follows the bucket without
an end; one that lands it batch by batch is in `landing_consumer`.
"""

from __future__ import annotations

import asyncio
import io
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from headwater.client.asyncio_client import Client
from headwater.client.environment import ClientEnvironment
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions, Snapshots
from headwater.client.reading import Batches
from headwater.errors import HeadwaterError
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.sim.checkers import ConsumerState, Document, Key, Row, RowRules, history_differences
from headwater.sim.machines import Process
from headwater.sim.world import World

RETRY_S = 0.2
SAVE_S = 0.2
CHECKED_SAVES = 5
"""Of each life, the first so many are compared with the server's history, and then every so many."""
CHECK_EVERY = 20


class Mutant(StrEnum):
    """What a consumer does wrong."""

    DROPS_ROLLBACKS = "drops-rollbacks"
    """It does not undo what a rollback takes back."""
    FORGETS_SNAPSHOT_END = "forgets-snapshot-end"
    """It resumes in the middle of a snapshot as if that had ended there."""
    TAKES_NEWEST_VBUUID = "takes-newest-vbuuid"
    """It resumes with the newest branch of the server's failover log, whatever branch it has read."""


@dataclass(frozen=True, slots=True)
class _Saved:
    state: ConsumerState
    offsets: Offsets | None
    rules: RowRules


@dataclass(slots=True)
class _InMemory:
    """What a life of a consumer has in memory."""

    state: ConsumerState
    rules: RowRules
    unsaved: int = 0
    """Batches since it was last saved."""
    saves: int = 0


class AnyConsumer(ABC):
    """One consumer over all its lives: how it starts, is killed, and fails."""

    def __init__(self, world: World, name: str, host: str) -> None:
        self.name = name
        self.host = host
        self.lives = 0
        self.failure: str | None = None
        self._world = world
        self._random = world.random_of(name)
        self._process: Process | None = None

    @property
    @abstractmethod
    def offsets(self) -> Offsets | None:
        """Where what it has kept ends; None before anything was kept."""

    @property
    @abstractmethod
    def rollbacks(self) -> int:
        """How many it has been given, as far as it has kept what came of them."""

    @abstractmethod
    def documents(self, vbucket: int) -> dict[Key, Document]:
        """The documents that follow from what it has kept."""

    @abstractmethod
    async def _consume(self, process: Process) -> None:
        """One life, from what was kept on."""

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.is_alive

    def start(self) -> None:
        if self.is_up:
            return
        self.lives += 1
        name = f"{self.name}.{self.lives}"
        self._process = process = self._new_process(name)
        process.on_killed.append(lambda: self._world.network.close_of(process))
        self._world.trace.note(name, "starts")
        process.run(self._world.loop, self._live(process))

    def _new_process(self, name: str) -> Process:
        return Process(name, self.host, random=self._world.random_of(name))

    def kill(self) -> None:
        if self._process is not None and self._process.is_alive:
            self._world.trace.note(self._process.name, "is killed")
            self._process.kill()

    async def _live(self, process: Process) -> None:
        try:
            await self._consume(process)
        except Exception as error:
            # A read that may take for ever has no reason to fail.
            self.failure = f"{process.name} failed: {error!r}"
            self._world.complain(self.failure)


class Consumer(AnyConsumer):
    """Follows all vbuckets, and saves what it holds every few batches."""

    def __init__(self, world: World, number: int, mutant: Mutant | None) -> None:
        super().__init__(world, f"consumer-{number}", f"10.0.2.{number}")
        self._mutant = mutant
        random = self._random
        self._options: dict[str, Any] = {
            "snapshots": random.choice([Snapshots.COMPLETE, Snapshots.AS_THEY_COME, Snapshots.AS_THEY_COME]),
            "batch_bytes": random.choice([1, 1, 300, 1 << 20]),
            "buffer_bytes": random.choice([1024, 1024, 1 << 20]),
            "noop_interval_s": random.choice([1, 2, 5]),
            "poll_interval_s": random.choice([0.5, 2.5]),
            "history": random.random() < 0.2,
            "compression": random.random() < 0.2,
            "connections_per_node": random.choice([1, 1, 2]),
            "reconnect_delay_s_min": 0.05,
            "reconnect_delay_s_max": 0.5,
            "give_up_after_s": None,
        }
        self._pause_s = random.choice([0.02, 0.1, 0.3])
        self._saves_every = random.choice([1, 1, 3])
        self._saved = _Saved(ConsumerState(), None, RowRules())

    @property
    def offsets(self) -> Offsets | None:
        return self._saved.offsets

    @property
    def rollbacks(self) -> int:
        return self._saved.state.rollbacks

    def documents(self, vbucket: int) -> dict[Key, Document]:
        return self._saved.state.documents(vbucket)

    # --- one life -------------------------------------------------------------------------------------------------

    async def _consume(self, process: Process) -> None:
        random = process.random
        environment = ClientEnvironment(
            random=random.random,
            random_bytes=random.randbytes,
            open_spool=io.BytesIO,
        )
        async with await self._connected(Client(self._world.client_settings(), environment)) as client:
            saved = self._saved
            start: dict[str, Any] = {}
            if saved.offsets is not None:
                start["start"] = self._begin_from(saved.offsets)
            held = _InMemory(saved.state.copy(), saved.rules.copy())
            reading = client.read(ReadOptions.make(name=self.name, **self._options, **start))
            saving = asyncio.create_task(self._save_when_quiet(reading, held))
            async for batch in reading:
                self._take(process, batch.to_pylist(), held)
                if held.unsaved >= self._saves_every:
                    self._save(reading, held)
                await self._rest()
            saving.cancel()

    def _take(self, process: Process, rows: list[Row], held: _InMemory) -> None:
        self._world.count_rows(len(rows))
        try:
            held.rules.check(rows, all_versions=self._options["history"])
        except AssertionError as error:
            self._world.complain(f"{process.name}: {error}")
        held.state.apply(rows, ignores_rollbacks=self._mutant is Mutant.DROPS_ROLLBACKS)
        held.unsaved += 1

    def _save(self, reading: Batches, held: _InMemory) -> None:
        """One durable step: what is held, and where that ends."""
        self._saved = _Saved(held.state.copy(), reading.offsets, held.rules.copy())
        held.unsaved = 0
        held.saves += 1
        if held.saves <= CHECKED_SAVES or held.saves % CHECK_EVERY == 0:
            world = self._world
            for wrong in history_differences(self.name, held.state.documents, reading.offsets, world.active_bucket):
                world.complain(wrong)

    async def _save_when_quiet(self, reading: Batches, held: _InMemory) -> None:
        """When nothing comes any more, no batch comes that saves the last of it."""
        while True:
            await asyncio.sleep(SAVE_S)
            if held.unsaved and self._world.is_quiet:
                self._save(reading, held)

    async def _connected(self, client: Client) -> Client:
        """The first connection is the caller's own to be patient with."""
        while True:
            try:
                await client.__aenter__()
                return _Entered(client)  # type: ignore[return-value]
            except HeadwaterError:
                await asyncio.sleep(RETRY_S)

    async def _rest(self) -> None:
        if not self._world.is_quiet:
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))

    # --- mutants --------------------------------------------------------------------------------------------------

    def _begin_from(self, offsets: Offsets) -> Offsets:
        return Offsets(
            offsets.bucket_uuid,
            {vbucket: self._resumed(vbucket, offset) for vbucket, offset in offsets.offsets.items()},
        )

    def _resumed(self, vbucket: VBucketId, offset: StreamOffset) -> StreamOffset:
        if self._mutant is Mutant.FORGETS_SNAPSHOT_END:
            return replace(offset, snapshot_start=offset.seqno, snapshot_end=offset.seqno)
        return self._on_newest_branch(vbucket, offset) if self._mutant is Mutant.TAKES_NEWEST_VBUUID else offset

    def _on_newest_branch(self, vbucket: VBucketId, offset: StreamOffset) -> StreamOffset:
        host = self._world.active_host(vbucket)
        if host is None or offset.seqno == 0:
            return offset
        facts = host.bucket.vbuckets.facts[vbucket]
        assert facts is not None
        return replace(offset, vbuuid=facts.failover_log.newest.vbuuid)


class _Entered:
    """A client that has been entered already."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def __aenter__(self) -> Client:
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
