"""What a task does: read ranges of vbuckets and give their rows, no more and no less.

Four things may happen between the plan and the read, and none of them fails the task:

* The server has written on. Its snapshot goes beyond the range, and what lies behind the range is left out.
* A failover has taken back a part of the range. The reader sees a rollback; from there on the vbucket is left alone.
  The planner finds the new branch, nothing in the extents says that the vbucket was read to its end, and so the next
  batch rolls it back to a place that is sure.
* A node is lost or vbuckets move. The reader follows them.
* A collection that was asked for is dropped. The server takes no filter on it any more, so the task filters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headwater.client import asyncio_client, blocking_client
from headwater.client.batches import OPS, change_schema
from headwater.client.bucket_view import BucketView
from headwater.client.client_settings import ClientSettings
from headwater.client.offsets import Offsets
from headwater.client.surroundings import ClientSurroundings
from headwater.errors import ReadRolledBack, UnknownCollection, UnknownScope
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.planning import TaskPlan, VBucketRange, VBucketRollback
from headwater.spark.read_extents import NO_BRANCH, ExtentFolder, Extents, ReadExtent
from headwater.spark.selection_watch import Filtering, PlannedBucket
from headwater.spark.shipped_kernels import use_shipped_kernels
from headwater.spark.source_options import SourceOptions

_ROLLBACK = OPS.index("rollback")
_VBUCKETS_MAX = 0x10000


def read_plan(
    plan: TaskPlan, options: SourceOptions, bucket: PlannedBucket, *, fails_on_rollback: bool = False
) -> Iterator[pa.RecordBatch]:
    """All rows of a task, in the client's schema: the rollbacks that the planner has found, and those of the ranges."""
    if plan.rollbacks:
        yield rollback_rows(plan.rollbacks, xattrs=options.read.xattrs)
    yield from read_ranges(plan, options, bucket, fails_on_rollback=fails_on_rollback)


def rollback_rows(rollbacks: Iterable[VBucketRollback], *, xattrs: bool) -> pa.RecordBatch:
    rows = [_rollback_row(rollback) for rollback in rollbacks]
    return pa.RecordBatch.from_pylist(rows, schema=change_schema(xattrs=xattrs))


def _rollback_row(rollback: VBucketRollback) -> dict[str, Any]:
    told = {
        "from_seqno": rollback.before.seqno,
        "old_vbuuid": rollback.before.vbuuid,
        "new_vbuuid": rollback.after.vbuuid,
    }
    numbers = dict.fromkeys(("rev", "datatype", "flags", "expiry", "cas"), 0)
    return numbers | {
        "vbucket": rollback.vbucket,
        "vbuuid": rollback.after.vbuuid,
        "seqno": rollback.after.seqno,
        "op": "rollback",
        "value": json.dumps(told).encode(),
        "snapshot_start": rollback.after.seqno,
        "snapshot_end": rollback.after.seqno,
    }


def read_ranges(
    plan: TaskPlan, options: SourceOptions, bucket: PlannedBucket, *, fails_on_rollback: bool = False
) -> Iterator[pa.RecordBatch]:
    """The rows of all ranges, in the client's schema.

    With `fails_on_rollback` a range that can't be read to its end raises `ReadRolledBack`.
    """
    if not plan.ranges:
        return
    if bucket.filtering is Filtering.NOTHING_LEFT:
        _tell_extents(options, {read.vbucket: _passed_over(read) for read in plan.ranges})
        return
    use_shipped_kernels()
    reading = _Reading(plan, options, bucket.view)
    try:
        yield from reading.rows(bucket)
    except (UnknownCollection, UnknownScope):
        if bucket.filtering is not Filtering.BY_SERVER or not bucket.ids:
            raise
        # Dropped since the plan was made, so the server refuses the filter. Go on from there without.
        yield from reading.rows(bucket.filtered_by_task(options.read))
    if fails_on_rollback:
        _check_whole(reading.extents())
    _tell_extents(options, reading.extents())


class _Reading:
    """The read of a plan, which may be broken off and go on in another way."""

    def __init__(self, plan: TaskPlan, options: SourceOptions, view: BucketView) -> None:
        self._plan = plan
        self._options = options
        self._reached = Offsets(view.cluster_map.uuid, {read.vbucket: read.start for read in plan.ranges})
        self._ends = {read.vbucket: read.end_seqno for read in plan.ranges}
        self._cut = _Cut(self._ends)

    def rows(self, bucket: PlannedBucket) -> Iterator[pa.RecordBatch]:
        read_options = replace(bucket.read_options(self._options.read), start=self._reached, end=self._ends)
        with PlannedClient(self._options.settings, bucket.view) as client:
            batches = client.read(read_options)
            try:
                for batch in batches:
                    kept = _wanted(self._cut.keep(batch), bucket)
                    if kept.num_rows:
                        yield kept
            finally:
                self._reached = self._reached.updated(batches.offsets.offsets)

    def extents(self) -> dict[VBucketId, ReadExtent]:
        return _extents(self._plan, self._reached, self._cut.rolled_back)


class PlannedClient(blocking_client.Client):
    """A client that takes the bucket as the planner saw it, and makes no connection to look at it again.

    A map that is out of date does no harm: a read follows its vbuckets wherever they are.
    """

    def __init__(self, settings: ClientSettings, view: BucketView) -> None:
        super().__init__(settings)

        async def look(_: ClientSettings) -> BucketView:
            return view

        self._client = asyncio_client.Client(settings, ClientSurroundings(look=look))


def _wanted(batch: pa.RecordBatch, bucket: PlannedBucket) -> pa.RecordBatch:
    """Without what nobody asked for, where the server could not be told."""
    if bucket.filtering is not Filtering.BY_TASK:
        return batch
    ids = batch.column("collection_id")
    keep = pc.is_in(ids, pa.array(sorted(bucket.ids), ids.type))
    if bucket.scopes:
        scopes = batch.column("scope").cast(pa.string())
        keep = pc.or_(keep, pc.is_in(scopes, pa.array(bucket.scopes, pa.string())))
    return batch.filter(keep)


def _tell_extents(options: SourceOptions, extents: Extents) -> None:
    if options.progress_dir is not None:
        ExtentFolder(options.progress_dir).write(extents)


def _passed_over(read: VBucketRange) -> ReadExtent:
    """Nothing can be missing of what has no rows."""
    return ReadExtent(
        vbuuid=read.start.vbuuid, start_seqno=read.start.seqno, seqno=read.end_seqno, snapshot_end=read.end_seqno
    )


def _check_whole(extents: Extents) -> None:
    for vbucket, extent in extents.items():
        if extent.vbuuid == NO_BRANCH:
            raise ReadRolledBack(
                f"vbucket {vbucket} can't be read up to seqno {extent.seqno} any more: a failover has taken back a "
                "part of its history",
                hint="Read again; a stream tells rollbacks as rows",
            )


def _extents(plan: TaskPlan, reached: Offsets, rolled_back: set[int]) -> dict[VBucketId, ReadExtent]:
    """Of every range, also of those that could not be read to their end: another run of this task may get further, and
    that must not look as if it had been this one."""
    return {read.vbucket: _extent(read, reached.get(read.vbucket), rolled_back) for read in plan.ranges}


def _extent(read: VBucketRange, reached: StreamOffset | None, rolled_back: set[int]) -> ReadExtent:
    is_whole = reached is not None and reached.seqno >= read.end_seqno and read.vbucket not in rolled_back
    return ReadExtent(
        vbuuid=reached.vbuuid if reached is not None and is_whole else NO_BRANCH,
        start_seqno=read.start.seqno,
        seqno=read.end_seqno,
        snapshot_end=reached.snapshot_end if reached is not None and is_whole else read.end_seqno,
    )


class _Cut:
    """Leaves out what lies behind the ranges, and what comes after a rollback."""

    def __init__(self, ends: dict[VBucketId, Seqno]) -> None:
        self.rolled_back: set[int] = set()
        self._ends = np.zeros(_VBUCKETS_MAX, dtype=np.uint64)
        self._ends[list(ends)] = list(ends.values())

    def keep(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        vbuckets = batch.column("vbucket").to_numpy()
        is_rollback = batch.column("op").indices.to_numpy() == _ROLLBACK
        if is_rollback.any():
            batch = batch.filter(pa.array(self._before_rollbacks(vbuckets, is_rollback)))
            vbuckets = batch.column("vbucket").to_numpy()
        keep = batch.column("seqno").to_numpy() <= self._ends[vbuckets]
        return batch if keep.all() else batch.filter(pa.array(keep))

    def _before_rollbacks(self, vbuckets: np.ndarray, is_rollback: np.ndarray) -> np.ndarray:
        keep = np.ones(len(vbuckets), dtype=bool)
        for row in np.flatnonzero(is_rollback).tolist():
            vbucket = int(vbuckets[row])
            self.rolled_back.add(vbucket)
            # From now on nothing of this vbucket is wanted, whatever seqno it has.
            self._ends[vbucket] = 0
            keep[row:] &= vbuckets[row:] != vbucket
        return keep
