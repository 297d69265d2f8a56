"""Simulated consumers: the production client, slow or fast, killed at any moment.

A consumer saves its state and its offsets together in one durable step, and restarts from there: this is how
exactly-once processing works. A mutant does one thing wrong on purpose, to test that the checkers notice.

`AnyConsumer` is the interface for the director, the faults and the judges. `Consumer` follows the bucket without an
end; `LandingConsumer` lands it batch by batch.
"""

from __future__ import annotations

import asyncio
import io
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from headwater.client.asyncio_client import Client
from headwater.client.bootstrap import BucketView, ClientEnvironment, look_at_bucket
from headwater.client.cluster_map import ClusterMap
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions, Snapshots
from headwater.client.reading import Batches
from headwater.client.settings import ClientSettings
from headwater.client.survey import AsyncSurveyor, VBucketStatus
from headwater.errors import HeadwaterError
from headwater.landing.planning import Survey, VBucketRange, contradictions, limit_ranges, plan_ranges, share_out
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.sim.checkers import ConsumerState, Document, Key, Row, RowRules, history_differences
from headwater.sim.landing_judge import ROLLBACK, BucketTruth, LandedTable, LandingJudge, Look, ReadBatch
from headwater.sim.network import Process

if TYPE_CHECKING:
    from headwater.sim.world import World

T = TypeVar("T")

RETRY_S = 0.2
SAVE_S = 0.2
CHECKED_SAVES = 5
"""Compare the first saves of each life with the server's history, and after that every `CHECK_EVERY`th."""
CHECK_EVERY = 20


async def patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """Retry until a call succeeds: every fault of a simulation ends."""
    while True:
        try:
            return await ask()
        except HeadwaterError:
            await asyncio.sleep(RETRY_S)


class Mutant(StrEnum):
    """What a mutant consumer does wrong."""

    DROPS_ROLLBACKS = "drops-rollbacks"
    """It does not undo the changes that a rollback takes back."""
    FORGETS_SNAPSHOT_END = "forgets-snapshot-end"
    """It resumes in the middle of a snapshot as if the snapshot had ended there."""
    TAKES_NEWEST_VBUUID = "takes-newest-vbuuid"
    """It resumes on the newest branch of the server's failover log, regardless of the branch it has read."""


@dataclass(frozen=True, slots=True)
class _Saved:
    state: ConsumerState
    offsets: Offsets | None
    rules: RowRules


@dataclass(slots=True)
class _InMemory:
    """A consumer's state in memory during one life."""

    state: ConsumerState
    rules: RowRules
    unsaved: int = 0
    """Batches since the last save."""
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
        """The saved offsets; None before the first save."""

    @property
    @abstractmethod
    def rollbacks(self) -> int:
        """The number of saved rollbacks."""

    @abstractmethod
    def documents(self, vbucket: int) -> dict[Key, Document]:
        """Return the documents that follow from the saved changes."""

    @abstractmethod
    async def _consume(self, process: Process) -> None:
        """Run one life, starting from the saved state."""

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
            # A read that is allowed to take forever has no reason to fail.
            self.failure = f"{process.name} failed: {error!r}"
            self._world.complain(self.failure)


class Consumer(AnyConsumer):
    """Follows all vbuckets, and saves its state every few batches."""

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
        environment = ClientEnvironment(random=random.random, random_bytes=random.randbytes, open_spool=io.BytesIO)
        client = Client(self._world.client_settings(), environment)
        # The caller itself must retry the first connection.
        await patiently(client.__aenter__)
        try:
            saved = self._saved
            start: dict[str, Any] = {}
            if saved.offsets is not None:
                start["start"] = Offsets(
                    saved.offsets.bucket_uuid,
                    {vbucket: self._resumed(vbucket, offset) for vbucket, offset in saved.offsets.offsets.items()},
                )
            held = _InMemory(saved.state.copy(), saved.rules.copy())
            reading = client.read(ReadOptions.make(name=self.name, **self._options, **start))
            saving = asyncio.create_task(self._save_when_quiet(reading, held))
            async for batch in reading:
                self._take(process, batch.to_pylist(), held)
                if held.unsaved >= self._saves_every:
                    self._save(reading, held)
                await self._rest()
            saving.cancel()
        finally:
            await client.close()

    def _take(self, process: Process, rows: list[Row], held: _InMemory) -> None:
        self._world.rows += len(rows)
        try:
            held.rules.check(rows, all_versions=self._options["history"])
        except AssertionError as error:
            self._world.complain(f"{process.name}: {error}")
        held.state.apply(rows, ignores_rollbacks=self._mutant is Mutant.DROPS_ROLLBACKS)
        held.unsaved += 1

    def _save(self, reading: Batches, held: _InMemory) -> None:
        """Save the state and its offsets in one durable step."""
        self._saved = _Saved(held.state.copy(), reading.offsets, held.rules.copy())
        held.unsaved = 0
        held.saves += 1
        if held.saves <= CHECKED_SAVES or held.saves % CHECK_EVERY == 0:
            world = self._world
            for wrong in history_differences(self.name, held.state.documents, reading.offsets, world.active_bucket):
                world.complain(wrong)

    async def _save_when_quiet(self, reading: Batches, held: _InMemory) -> None:
        """Save during quiet times: when no more changes arrive, no further batch triggers a save."""
        while True:
            await asyncio.sleep(SAVE_S)
            if held.unsaved and self._world.is_quiet:
                self._save(reading, held)

    async def _rest(self) -> None:
        if not self._world.is_quiet:
            await asyncio.sleep(self._random.expovariate(1 / self._pause_s))

    # --- mutants --------------------------------------------------------------------------------------------------

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


# --- a consumer that lands --------------------------------------------------------------------------------------------

COMMIT_S_MAX = 0.02
"""The maximum time until a commit takes effect, and again until its writer is notified."""
PAUSE_S_MIN = 0.02
"""The minimum pause between a batch and the next survey: otherwise time would never advance without new changes."""
LOST_TASK_CHANCE = 0.05
SURVEY_RETRY_S = 0.1


class LandingMutant(StrEnum):
    """What a mutant landing does wrong."""

    DROPS_ROWS_BEHIND_PLAN = "drops-rows-behind-plan"
    """It discards the rows after the planned end, and resumes at the planned end."""
    REPEATS_ROWS_BEHIND_PLAN = "repeats-rows-behind-plan"
    """It keeps the rows after the planned end, but resumes at the planned end."""
    GOES_BACK_TO_PLAN = "goes-back-to-plan"
    """It assumes that a rollback can go back to planned ends, whether or not a snapshot ended there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _BatchPlan:
    """What is known before a batch is read."""

    look: Look
    """What was stored before the survey, for the judge."""
    chosen: list[VBucketRange]
    postponed: frozenset[VBucketId]


class LandingConsumer(AnyConsumer):
    """One landing over all its lives: it lands the bucket like `headwater land`, into a table in memory.

    It uses the production code for planning (`landing.planning`) and the client's reader. A batch is

        survey ─→ plan ─→ tasks read, each range to the end of the snapshot that holds its planned end ─→ commit

    and the table is the only memory: if a life is killed between two steps, the committed batches remain, and the
    next life continues after them. A commit takes effect shortly before its writer is notified, so a life may also
    die without knowing of its last batch. The time that Spark takes to start a task passes between the plan and the
    read. A task may be lost, and is then run again with the same plan.
    """

    def __init__(self, world: World, number: int, mutant: LandingMutant | None, truth: BucketTruth) -> None:
        super().__init__(world, f"landing-{number}", f"10.0.5.{number}")
        random = self._random
        self.batches = 0
        self.rows_behind_plan = 0
        self._mutant = mutant
        self._every_s = random.choice(world.plan.landing_every_s)
        self._rows_max: int | None = random.choice([None, None, 1, 20])
        self._to_target = random.random() < 0.3
        """Whether each pass lands the state of one survey, like repeated runs of `land --once`."""
        self._start_task_s = random.choice([0.001, 0.02, 0.1])
        """The mean time to start a task."""
        self._tasks_min = random.choice([1, 2, 4])
        self._options: dict[str, Any] = {
            "snapshots": Snapshots.AS_THEY_COME,
            "batch_bytes": random.choice([1, 300, 1 << 20]),
            "buffer_bytes": random.choice([1024, 1 << 20]),
            "noop_interval_s": random.choice([1, 2, 5]),
            "poll_interval_s": random.choice([0.5, 2.5]),
            "reconnect_delay_s_min": 0.05,
            "reconnect_delay_s_max": 0.5,
            "give_up_after_s": None,
        }
        self._table = LandedTable()
        self._bucket_uuid = ""
        self._rules = RowRules()
        self._truth = truth
        self._judge = LandingJudge(world, self.name, self._table, truth, is_limited=self._rows_max is not None)

    @property
    def offsets(self) -> Offsets | None:
        return Offsets(self._bucket_uuid, self._table.offsets) if self._table.offsets else None

    @property
    def rollbacks(self) -> int:
        return self._table.rollbacks

    def documents(self, vbucket: int) -> dict[Key, Document]:
        return self._judge.documents(vbucket)

    def _new_process(self, name: str) -> Process:
        random = self._world.random_of(name)
        return Process(name, self.host, random=random, disk=lambda: random.uniform(0.0, COMMIT_S_MAX))

    # --- one life -------------------------------------------------------------------------------------------------

    async def _consume(self, process: Process) -> None:
        self._judge.on_start()
        surveyor = PatientSurveyor(self._world.client_settings(), process.random)
        last_read: dict[VBucketId, int] = {}
        look: Look | None = None
        target: dict[VBucketId, Seqno] | None = None
        while True:
            if look is None or target is None:
                look = self._truth.look()
            survey = await self._survey(surveyor)
            if self._to_target and target is None:
                target = {vbucket: status.high_seqno for vbucket, status in survey.items()}
            ranges = plan_ranges(self._landed, survey, boundaries=self._table.boundaries, target=target)
            if ranges:
                chosen = limit_ranges(ranges, self._rows_max, last_read=last_read)
                postponed = frozenset(it.vbucket for it in ranges) - {it.vbucket for it in chosen}
                await self._land(process, surveyor, _BatchPlan(look=look, chosen=chosen, postponed=postponed))
                last_read |= dict.fromkeys((it.vbucket for it in chosen), self._table.batch)
            else:
                self._judge.on_nothing_new(look)
                target = None
            if not ranges or not self._to_target:
                await asyncio.sleep(max(PAUSE_S_MIN, self._every_s))

    @property
    def _landed(self) -> Offsets:
        return Offsets(self._bucket_uuid, self._table.offsets)

    async def _survey(self, surveyor: PatientSurveyor) -> Survey:
        """Survey the bucket like a landing's driver: during a failover, a server seems to have lost its newest
        changes, so vbuckets that contradict the offsets are surveyed twice."""
        survey = await surveyor.survey()
        self._bucket_uuid = surveyor.cluster_map.uuid
        odd = contradictions(self._landed, survey)
        return {**survey, **await surveyor.survey(odd)} if odd else survey

    async def _land(self, process: Process, surveyor: PatientSurveyor, plan: _BatchPlan) -> None:
        settings, random_bytes = self._world.client_settings(), process.random.randbytes
        view = await patiently(lambda: look_at_bucket(settings, random_bytes=random_bytes))
        view = replace(view, cluster_map=surveyor.cluster_map)
        cluster_map = view.cluster_map
        node_of = {VBucketId(vbucket): cluster_map.active_node(vbucket) for vbucket in range(cluster_map.vbuckets)}
        shares = share_out(plan.chosen, node_of=node_of, tasks_min=self._tasks_min)
        results = await asyncio.gather(*(self._run_task(process, view, share) for share in shares))
        rows = [row for task_rows, _ in results for row in task_rows]
        reached = {vbucket: offset for _, offsets in results for vbucket, offset in offsets.items()}
        rules = self._rules.copy()
        if self._mutant is None:
            try:
                rules.check(rows, all_versions=False)
            except AssertionError as error:
                self._world.complain(f"{process.name}: {error}")
        batch = self._mutated(plan.chosen, rows, reached)

        def commit() -> None:
            committed = self._table.commit(batch, reads_torn_again=self._mutant is not LandingMutant.GOES_BACK_TO_PLAN)
            self._rules = rules
            self._count(plan.chosen, rows)
            self._world.trace.note(process.name, f"batch {committed.batch} of {len(rows)} rows is in the table")
            self._judge.on_commit(committed, plan.look, postponed=plan.postponed)

        await self._world.loop.run_in_executor(self, commit)

    # --- a task ---------------------------------------------------------------------------------------------------

    async def _run_task(
        self, process: Process, view: BucketView, ranges: tuple[VBucketRange, ...]
    ) -> tuple[list[Row], dict[VBucketId, StreamOffset]]:
        """Read one share of a batch. The rows of a lost task are discarded."""
        while True:
            await asyncio.sleep(process.random.expovariate(1 / self._start_task_s))
            is_lost = process.random.random() < LOST_TASK_CHANCE
            read = await self._read(process, view, ranges, batches_max=process.random.randrange(3) if is_lost else None)
            if read is not None:
                return read

    async def _read(
        self, process: Process, view: BucketView, ranges: tuple[VBucketRange, ...], *, batches_max: int | None
    ) -> tuple[list[Row], dict[VBucketId, StreamOffset]] | None:
        """Read ranges. Returns None if the task is lost, which happens after `batches_max` batches."""
        options = ReadOptions.make(
            name=self.name,
            start=Offsets(self._bucket_uuid, {it.vbucket: it.start for it in ranges}),
            end={it.vbucket: it.end_seqno for it in ranges},
            boundaries={it.vbucket: it.boundaries for it in ranges},
            **self._options,
        )

        async def look(_: ClientSettings) -> BucketView:
            return view

        environment = ClientEnvironment(
            look=look, random=process.random.random, random_bytes=process.random.randbytes, open_spool=io.BytesIO
        )
        rows: list[Row] = []
        async with Client(self._world.client_settings(), environment) as client:
            reading = client.read(options)
            batches = 0
            async for batch in reading:
                rows += batch.to_pylist()
                batches += 1
                if batches_max is not None and batches >= batches_max:
                    return None
            reached = dict(reading.offsets.offsets)
        for vbucket, offset in reached.items():
            assert offset.is_complete, f"the read of vbucket {vbucket} has ended inside a snapshot: {offset}"
            reached[vbucket] = offset.as_whole()
        return rows, reached

    # --- the batch to commit --------------------------------------------------------------------------------------

    def _mutated(
        self, ranges: list[VBucketRange], rows: list[Row], reached: dict[VBucketId, StreamOffset]
    ) -> ReadBatch:
        """Return the batch to commit, with the mutant's mistake."""
        planned = {it.vbucket: Seqno(min(it.end_seqno, reached[it.vbucket].seqno)) for it in ranges}
        boundaries = {vbucket: offset.seqno for vbucket, offset in reached.items()}
        if self._mutant is LandingMutant.DROPS_ROWS_BEHIND_PLAN:
            rows = [row for row in rows if row["op"] == ROLLBACK or row["seqno"] <= planned[row["vbucket"]]]
        if self._mutant in (LandingMutant.DROPS_ROWS_BEHIND_PLAN, LandingMutant.REPEATS_ROWS_BEHIND_PLAN):
            reached = {
                vbucket: StreamOffset.whole(offset.vbuuid, planned[vbucket]) for vbucket, offset in reached.items()
            }
        if self._mutant is not None:
            boundaries = planned
        return ReadBatch(rows=rows, reached=reached, boundaries=boundaries)

    def _count(self, ranges: list[VBucketRange], rows: list[Row]) -> None:
        ends = {it.vbucket: it.end_seqno for it in ranges}
        self.batches += 1
        self.rows_behind_plan += sum(row["seqno"] > ends[row["vbucket"]] for row in rows)
        self._world.rows += len(rows)


class PatientSurveyor:
    """The client's surveyor with unlimited retries: in a simulation every fault ends."""

    def __init__(self, settings: ClientSettings, random: Random) -> None:
        self._settings = settings
        self._random = random
        self._surveyor: AsyncSurveyor | None = None

    @property
    def cluster_map(self) -> ClusterMap:
        """The cluster map as of the last survey. It may be out of date."""
        assert self._surveyor is not None, "a survey reads the map"
        return self._surveyor.cluster_map

    async def survey(self, vbuckets: Iterable[VBucketId] | None = None) -> dict[VBucketId, VBucketStatus]:
        """Return the state of these vbuckets, or of all. Waits for those without an active node."""
        found: dict[VBucketId, VBucketStatus] = {}
        while True:
            try:
                if self._surveyor is None:
                    self._surveyor = await AsyncSurveyor.open(self._settings, random_bytes=self._random.randbytes)
                every = map(VBucketId, range(self._surveyor.cluster_map.vbuckets))
                missing = set(every if vbuckets is None else vbuckets) - found.keys()
                found |= await self._surveyor.ask_once(missing)
                if not missing - found.keys():
                    return {vbucket: found[vbucket] for vbucket in sorted(found)}
            except HeadwaterError:
                pass
            if self._surveyor is not None:
                self._surveyor.close()
                self._surveyor = None
            await asyncio.sleep(SURVEY_RETRY_S)
