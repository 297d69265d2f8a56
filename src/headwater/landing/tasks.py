"""The tasks of a landing: where they run, and what each one reads.

A *runner* runs tasks. `headwater.spark.executors.SparkRunner` runs them on Spark's executors, `LocalRunner` in threads
of this process: that needs no Java and starts immediately, for a laptop, a cron job or CI.

A task reads a few vbuckets, each to the end of the snapshot that contains its planned end. It cuts nothing off, except
for landings that request that, with all versions (`--consistent`).

Several things may happen between the plan and the read, and none of them fails the task:

* The bucket was written to. The snapshot goes beyond the planned end, and the server sends all of it (the seed
  "Protocol Flow", "Reading the Stream"), so the task reads all of it: DCP sends only the newest version of each key in
  a snapshot, so a row after the planned end may be the only version of a live document.
* A failover lost changes. The reader goes back to a boundary, returns the rollback as a row, and continues with the
  new branch. (A batch read can't use such a row, and fails.)
* A node is lost, or vbuckets move. The reader follows them.
* A requested collection is dropped. The server no longer accepts it in a filter, so the task filters.

At the end, `reached` has the offset of every vbucket, where the next batch starts.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater import telemetry
from headwater.client import asyncio_client, blocking_client
from headwater.client.batches import OPS
from headwater.client.bootstrap import BucketView, ClientEnvironment
from headwater.client.changes import split_keys
from headwater.client.offsets import Offsets
from headwater.client.settings import ClientSettings
from headwater.errors import NoConsistentCut, QueryFailed, ReadRolledBack, UnknownCollection, UnknownScope
from headwater.lake.catalogs import Catalog
from headwater.lake.change_files import ChangeReport, ChangeWriter
from headwater.lake.chosen_rows import ChosenRows, without_system
from headwater.lake.documents_merge import FirstDocuments, Merged
from headwater.lake.lake import Task, TaskOutcome, remove_outputs, results, run_task
from headwater.lake.where import met
from headwater.landing.bucket_watch import Filtering, PlannedBucket
from headwater.landing.planning import VBucketRange
from headwater.landing.source_options import TEXT_COLUMNS, Conditions, SourceOptions
from headwater.phrases import may_be_escaped
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset

THREADS_MAX = 8
"""With more tasks at a time, they would wait for the interpreter lock, and each uses memory."""


class JobRunner(Protocol):
    """Runs tasks somewhere and returns their results in order. Another thread may cancel it."""

    def __call__(self, tasks: Sequence[Any]) -> list[Any]: ...

    def cancel(self) -> None: ...


@runtime_checkable
class SessionRunner(Protocol):
    """A runner on a Spark session, in whose catalogs tables can be registered."""

    def session_catalog(self, name: str | None) -> Catalog: ...


class TaskSlots:
    """Limits how many tasks run at a time, across all jobs that share the slots. A job without a running task does not
    wait, so a job whose tasks hang on a missing server does not block others. A free slot goes to the job that has the
    fewest, and among these to the one that has waited longest."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or min(THREADS_MAX, len(os.sched_getaffinity(0)))
        self._taken: Counter[_Job] = Counter()
        self._waiting: list[_Job] = []
        """The job of each waiting thread, in order of arrival."""
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken_by(self, job: _Job) -> Iterator[None]:
        """Wait for a slot, and hold it during the block. A cancelled job does not wait."""
        with self._changed:
            self._waiting.append(job)
            self._changed.wait_for(lambda: job.is_cancelled() or self._is_next(job))
            self._waiting.remove(job)
            self._taken[job] += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._taken -= Counter([job])  # which forgets a job that has none
                self._changed.notify_all()

    def _is_next(self, job: _Job) -> bool:
        if not self._taken[job]:
            return True
        return self._taken.total() < self.count and min(self._waiting, key=self._taken.__getitem__) is job

    def wake(self) -> None:
        """Wake the threads of a cancelled job."""
        with self._changed:
            self._changed.notify_all()


class LocalRunner:
    """Runs tasks in threads of this process, one per processor: kernels, Arrow and sockets release the interpreter
    lock. A program that ends does not wait for its threads. Runners of several landings can share their slots."""

    def __init__(self, threads: int | None = None, *, slots: TaskSlots | None = None) -> None:
        self._slots = slots or TaskSlots(threads)
        self._job: _Job | None = None

    def __call__(self, tasks: Sequence[Task]) -> list[Any]:
        self._job = job = _Job(tasks, self._slots)
        for _ in range(min(self._slots.count, len(tasks))):
            threading.Thread(target=job.work, name="headwater-task", daemon=True).start()
        return results(job.outcomes())

    def cancel(self) -> None:
        """Cancel the running job, if there is one. Tasks that read stop at their next batch; no result is used."""
        if (job := self._job) is not None:
            job.cancel()


_JOB: ContextVar[_Job | None] = ContextVar("job", default=None)


def check_cancelled() -> None:
    """Raise if the job of this task was cancelled. Tasks call this between batches."""
    if (job := _JOB.get()) is not None and job.is_cancelled():
        raise _cancelled()


def _cancelled() -> QueryFailed:
    return QueryFailed("the landing was stopped", hint="Start again: it resumes from here")


class _Job:
    """Tasks that run together. If one fails, those that have not started are skipped."""

    def __init__(self, tasks: Sequence[Task], slots: TaskSlots) -> None:
        self._tasks = tasks
        self._slots = slots
        self._parent = telemetry.traceparent()
        self._begun = 0
        self._ended: dict[int, TaskOutcome] = {}
        self._has_failed = False
        self._cancelled = threading.Event()
        self._changed = threading.Condition()

    def work(self) -> None:
        """Run one task after the other, in a thread of the runner."""
        _JOB.set(self)
        is_left = True
        while is_left:
            with self._slots.taken_by(self):
                is_left = self._run_next()

    def _run_next(self) -> bool:
        """Run the next task. Returns whether there may be more."""
        with self._changed:
            if self._has_failed or self.is_cancelled() or self._begun == len(self._tasks):
                return False
            number = self._begun
            self._begun += 1
        try:
            outcome = run_task(self._tasks[number], self._parent)
        except BaseException:
            self.cancel()  # otherwise the caller would wait for this task forever
            raise
        with self._changed:
            self._ended[number] = outcome
            self._has_failed |= outcome.failure is not None
            self._changed.notify_all()
            if self.is_cancelled():
                remove_outputs(outcome.outputs)
        return True

    def outcomes(self) -> list[TaskOutcome]:
        """Wait for the tasks. Raises at once if the job is cancelled; running tasks then remove their own files."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_cancelled() or len(self._ended) == self._wanted)
            if self.is_cancelled():
                for outcome in self._ended.values():
                    remove_outputs(outcome.outputs)
                raise _cancelled()
            return [outcome for _, outcome in sorted(self._ended.items())]

    def is_cancelled(self) -> bool:
        return self._cancelled.is_set()

    @property
    def _wanted(self) -> int:
        return self._begun if self._has_failed else len(self._tasks)

    def cancel(self) -> None:
        with self._changed:
            self._cancelled.set()
            self._changed.notify_all()
        self._slots.wake()


# --- what a task reads ------------------------------------------------------------------------------------------------

_ROLLBACK = OPS.index("rollback")


@dataclass(slots=True, kw_only=True)
class ShareReading:
    """The read of one task: iterate over it, then get `reached` and `rows`."""

    options: SourceOptions
    bucket: PlannedBucket
    ranges: tuple[VBucketRange, ...]
    fails_on_rollback: bool = False
    is_cut: bool = False
    """Leave out rows after the planned ends, which are of one moment. The options must then request all versions."""
    reached: dict[VBucketId, StreamOffset] = field(default_factory=dict)
    rows: int = 0
    """The number of rows so far."""
    missed: str | None = None
    """With `is_cut`: why the read could not be cut there and has to be planned again."""

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows, in the client's schema."""
        if not self.ranges:
            return
        self.reached = {it.vbucket: it.start for it in self.ranges}
        if self.bucket.filtering is Filtering.NOTHING_LEFT:
            yield from self._pass_over()
        else:
            try:
                yield from self._read(self.bucket)
            except (UnknownCollection, UnknownScope):
                if self.bucket.filtering is not Filtering.BY_SERVER or not self.bucket.ids:
                    raise
                # A collection was dropped since the plan, so the server refuses the filter. Continue without it.
                yield from self._read(self.bucket.filtered_by_task(self.options.read))
            except NoConsistentCut as error:
                self.missed = error.reason
                return
        for vbucket, offset in self.reached.items():
            assert offset.is_complete, f"the read of vbucket {vbucket} has ended inside a snapshot: {offset}"
            self.reached[vbucket] = offset.as_whole()
        if self.is_cut:
            self._cut_reached()
        if self.fails_on_rollback:
            for it in self.ranges:
                if self.reached[it.vbucket].seqno < it.end_seqno:
                    raise _rolled_back(it.vbucket)

    def _cut_reached(self) -> None:
        """Set `reached` to where the kept rows end. With all versions, any seqno is the end of a snapshot."""
        for it in self.ranges:
            offset = self.reached[it.vbucket]
            if offset.vbuuid != it.branch:
                self.missed = f"vbucket {it.vbucket} has begun another branch of its history"
            self.reached[it.vbucket] = StreamOffset.whole(offset.vbuuid, min(offset.seqno, self._end_of(it)))

    @staticmethod
    def _end_of(it: VBucketRange) -> Seqno:
        """Return the last seqno to keep: the planned end, or the start if that is higher."""
        return max(it.end_seqno, it.start.seqno)

    def _before_cut(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Keep the rows up to the planned ends, and end their snapshots there."""
        ends = np.zeros(max(it.vbucket for it in self.ranges) + 1, dtype=np.uint64)
        for it in self.ranges:
            ends[it.vbucket] = self._end_of(it)
        ends_of_rows = pa.array(ends[batch.column("vbucket").to_numpy()])
        is_rollback = pc.equal(batch.column("op").indices, _ROLLBACK)
        keep = pc.or_(is_rollback, pc.less_equal(batch.column("seqno"), ends_of_rows))
        snapshot_ends = pc.min_element_wise(batch.column("snapshot_end"), ends_of_rows)
        at = batch.schema.get_field_index("snapshot_end")
        return batch.set_column(at, batch.schema.field(at), snapshot_ends).filter(keep)

    def _pass_over(self) -> Iterator[pa.RecordBatch]:
        """Everything requested has been dropped: move the offsets to the planned ends, and read only rollbacks."""
        parted = [it for it in self.ranges if it.start.seqno and it.branch != it.start.vbuuid]
        for it in self.ranges:
            if it not in parted:
                self.reached[it.vbucket] = StreamOffset.whole(it.branch, it.end_seqno)
        if parted:
            yield from self._read(replace(self.bucket, filtering=Filtering.BY_TASK, ids=frozenset()), parted)

    def _read(self, bucket: PlannedBucket, ranges: Sequence[VBucketRange] | None = None) -> Iterator[pa.RecordBatch]:
        wanted = self.ranges if ranges is None else ranges
        options = replace(
            bucket.read_options(self.options.read),
            start=Offsets(bucket.view.cluster_map.uuid, {it.vbucket: self.reached[it.vbucket] for it in wanted}),
            end={it.vbucket: it.end_seqno for it in wanted},
            boundaries={it.vbucket: it.boundaries for it in wanted},
            needs_history_behind_end=self.is_cut,
        )
        with PlannedClient(self.options.settings, bucket.view) as client:
            batches = client.read(options)
            try:
                for batch in batches:
                    check_cancelled()
                    if self.fails_on_rollback:
                        _check_no_rollback(batch)
                    kept = rows_chosen(_wanted(batch, bucket), self.options)
                    if self.is_cut:
                        kept = self._before_cut(kept)
                    if kept.num_rows:
                        self.rows += kept.num_rows
                        yield kept
            finally:
                self.reached.update(batches.offsets.offsets)


class PlannedClient(blocking_client.Client):
    """A client that uses the planner's view of the bucket, and makes no connection to look at it again.

    An outdated map does no harm: a read follows its vbuckets wherever they are.
    """

    def __init__(self, settings: ClientSettings, view: BucketView) -> None:
        super().__init__(settings)

        async def look(_: ClientSettings) -> BucketView:
            return view

        self._client = asyncio_client.Client(settings, ClientEnvironment(look=look))


def _wanted(batch: pa.RecordBatch, bucket: PlannedBucket) -> pa.RecordBatch:
    """Drop rows that were not requested, if the server could not filter. Rollbacks apply to every collection."""
    if bucket.filtering is not Filtering.BY_TASK:
        return batch
    ids = batch.column("collection_id")
    keep = pc.is_in(ids, pa.array(sorted(bucket.ids), ids.type))
    if bucket.scopes:
        scopes = batch.column("scope").cast(pa.string())
        keep = pc.or_(keep, pc.is_in(scopes, pa.array(bucket.scopes, pa.string())))
    keep = pc.or_(keep, pc.equal(batch.column("op").indices, _ROLLBACK))
    return batch.filter(keep)


def rows_chosen(batch: pa.RecordBatch, options: SourceOptions) -> pa.RecordBatch:
    """Drop rows of the system, and rows that do not meet the conditions, as the options say."""
    if not options.system:
        batch = without_system(batch, scope=not options.read.scopes and not options.read.collections)
    return rows_meeting(batch, options.where)


def rows_meeting(batch: pa.RecordBatch, conditions: Conditions) -> pa.RecordBatch:
    """Drop rows that do not meet the conditions. Rollbacks stay, because a stream always needs them."""
    marks = [
        _is_in(batch.column(name), conditions.allowed[name]) for name in TEXT_COLUMNS if name in conditions.allowed
    ]
    if conditions.others:
        marks.append(pa.array(met(conditions.others, batch)))
    if not marks:
        return batch
    is_rollback = pc.equal(batch.column("op").indices, _ROLLBACK)
    return batch.filter(pc.or_(is_rollback, functools.reduce(pc.and_, marks)))


def _is_in(column: pa.Array, values: Collection[str]) -> pa.Array:
    """Return for each row whether it has one of these values; false for null."""
    if pa.types.is_dictionary(column.type):
        is_wanted = pc.is_in(column.dictionary, pa.array(sorted(values), column.dictionary.type))
        return is_wanted.take(column.indices).fill_null(False)
    if any(map(may_be_escaped, values)):
        return pc.is_in(split_keys(column)[0], pa.array(sorted(values), pa.string()))
    return pc.is_in(column, pa.array([value.encode() for value in sorted(values)], column.type))


def _check_no_rollback(batch: pa.RecordBatch) -> None:
    rollbacks = batch.filter(pc.equal(batch.column("op").indices, _ROLLBACK))
    if rollbacks.num_rows:
        raise _rolled_back(rollbacks.column("vbucket")[0])


def _rolled_back(vbucket: object) -> ReadRolledBack:
    return ReadRolledBack(
        f"vbucket {vbucket} was rolled back while it was read: a failover has taken back a part of its history",
        hint="Read again; a stream has rollbacks as rows",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LandShare:
    """Read a share of a batch and write it to files of `changes`; in the first batch, the documents as well."""

    # Rows from a Spark source to a Python function pass through Java twice, which took more processor time than
    # reading the bucket and writing the files. So the task of a landing reads the bucket itself.
    options: SourceOptions
    bucket: PlannedBucket
    ranges: tuple[VBucketRange, ...]
    writer: ChangeWriter
    chosen: ChosenRows
    first: FirstDocuments | None = None
    is_cut: bool = False
    """Land nothing after the planned ends."""

    def run(self) -> LandedShare:
        reading = ShareReading(options=self.options, bucket=self.bucket, ranges=self.ranges, is_cut=self.is_cut)
        batches = map(self.chosen.function(), reading)
        if self.first is None:
            report, documents = self.writer.write(batches), []
        else:
            held = self.first.hold()
            report = self.writer.write(batches, held.take)
            documents = self.first.write(report, held)
        report.reached = dict(reading.reached)
        return LandedShare(report, documents, reading.missed)


@dataclass(frozen=True, slots=True)
class LandedShare:
    """The result of a share."""

    report: ChangeReport
    documents: list[Merged]
    """In the first batch: documents that need not be merged any more."""
    missed: str | None = None
    """Why the share could not be cut at its planned end."""
