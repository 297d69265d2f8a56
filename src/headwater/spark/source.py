"""The data source `dcp`: `spark.read.format("dcp")` and `spark.readStream.format("dcp")`.

Spark makes one stream reader for planning, which lives as long as the query, and pickles others to the tasks. So a
reader holds options only, and what is made of them is made when it is first needed.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from headwater.client.backoff import Backoff, is_final
from headwater.client.bucket_view import BucketView
from headwater.client.offsets import Offsets
from headwater.client.read_options import Start
from headwater.client.survey import Surveyor
from headwater.errors import HeadwaterError, InvalidInput
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.known_places import Places, PlacesFile
from headwater.spark.manifest_connection import ManifestConnection
from headwater.spark.planning import Survey, TaskPlan, note_places, plan_end, plan_read, plan_tasks
from headwater.spark.read_extents import ExtentFolder, Extents
from headwater.spark.selection_watch import PlannedBucket, SelectionWatch
from headwater.spark.source_options import SourceOptions
from headwater.spark.source_schema import spark_schema
from headwater.spark.starting_place import first_start
from headwater.spark.worker_heap import keep_loaded

T = TypeVar("T")

BYTES_PER_ROW = 512
"""What a change is taken to have, where a limit is given in bytes: seqnos can be counted, bytes can't."""


class DcpPartition(InputPartition):
    """What one task reads, and all that it has to know of the bucket."""

    def __init__(self, plan: TaskPlan, bucket: PlannedBucket) -> None:
        super().__init__((plan, bucket))
        self.plan = plan
        self.bucket = bucket


class DcpDataSource(DataSource):
    """Changes of a Couchbase bucket, as rows."""

    @classmethod
    def name(cls) -> str:
        return "dcp"

    def schema(self) -> StructType:
        return spark_schema(self._checked)

    def reader(self, schema: StructType) -> DataSourceReader:
        return DcpBatchReader(self._checked, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  (Spark's name)
        return DcpStreamReader(self._checked, schema)

    @cached_property
    def _checked(self) -> SourceOptions:
        return SourceOptions.make(self.options)


class _Planner:
    """What both kinds of readers share: the connection to the bucket, and the way to rows."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._spark_schema = schema
        self._connected: Surveyor | None = None
        self._manifests: ManifestConnection | None = None
        self._watch = SelectionWatch(options.read, options.seen)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_connected": None, "_manifests": None}

    @property
    def _surveyor(self) -> Surveyor:
        if self._connected is None:
            self._connected = Surveyor(self._options.settings)
        return self._connected

    @property
    def _bucket_uuid(self) -> str:
        return self._surveyor.cluster_map.uuid

    def _first_offsets(self) -> Offsets:
        """Where `startingOffsets` says. Vbuckets that it does not name start at their beginning."""
        vbuckets = map(VBucketId, range(self._surveyor.cluster_map.vbuckets))
        offsets = Offsets(self._bucket_uuid, dict.fromkeys(vbuckets, StreamOffset()))
        start = self._options.start
        if isinstance(start, Offsets):
            self._check_offsets(start)
            return offsets.updated(start.offsets)
        return offsets if start is Start.BEGINNING else self._high_offsets()

    def _check_offsets(self, given: Offsets) -> None:
        """Whether they can be of this bucket."""
        given.check_bucket(self._bucket_uuid)
        vbuckets = self._surveyor.cluster_map.vbuckets
        unknown = [vbucket for vbucket in given if vbucket >= vbuckets]
        if unknown:
            raise InvalidInput(
                f"there is no vbucket {unknown[0]}: the bucket has {vbuckets}", hint="Check the offsets that were given"
            )

    def _high_offsets(self) -> Offsets:
        return _high_offsets(self._bucket_uuid, self._survey())

    def _survey(self, vbuckets: Iterable[VBucketId] | None = None) -> Survey:
        survey = self._patiently(lambda: self._surveyor.survey(vbuckets))
        self._watch.on_survey({vbucket: status.high_seqno for vbucket, status in survey.items()})
        return survey

    def _look(self) -> BucketView:
        if self._manifests is None:
            self._manifests = ManifestConnection(self._options.settings)
        return self._manifests.look(self._surveyor.cluster_map)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """As patient as a read is: a node that is started again does not end the query."""
        options = self._options.read
        backoff = Backoff(
            delay_s_min=options.reconnect_delay_s_min, delay_s_max=options.reconnect_delay_s_max, random=random.random
        )
        give_up_s = math.inf if options.give_up_after_s is None else time.monotonic() + options.give_up_after_s
        for failures in itertools.count(1):
            try:
                return ask()
            except HeadwaterError as error:
                if is_final(error) or time.monotonic() > give_up_s:
                    raise
                time.sleep(backoff.delay_s(failures))
        raise AssertionError("counting has no end")

    def _partitions(self, start: Offsets, end: Offsets) -> list[DcpPartition]:
        cluster_map = self._surveyor.cluster_map
        node_of = {VBucketId(vbucket): cluster_map.active_node(vbucket) for vbucket in range(cluster_map.vbuckets)}
        plans = plan_tasks(start, end, node_of=node_of, tasks_min=self._options.partitions_min)
        bucket = self._watch.plan(self._patiently(self._look), start)
        return [DcpPartition(plan, bucket) for plan in plans]

    def _close(self) -> None:
        for connected in (self._connected, self._manifests):
            if connected is not None:
                connected.close()

    def _rows(self, partition: InputPartition, *, fails_on_rollback: bool) -> Iterator[pa.RecordBatch]:
        # Here and not above: a planner is a process of its own, which is new for every query, and reads nothing.
        from headwater.spark.rows import SparkRows
        from headwater.spark.task_read import read_plan

        assert isinstance(partition, DcpPartition)
        rows = SparkRows(self._options, to_arrow_schema(self._spark_schema, timezone="UTC"))
        plan, bucket = partition.plan, partition.bucket
        for batch in read_plan(plan, self._options, bucket, fails_on_rollback=fails_on_rollback):
            yield rows.convert(batch)
        keep_loaded("read")


class DcpBatchReader(_Planner, DataSourceReader):
    """Everything from `startingOffsets` to `endingOffsets`, or to now."""

    def partitions(self) -> Sequence[InputPartition]:
        start = self._first_offsets()
        if self._options.end is not None:
            self._check_offsets(self._options.end)
        end = plan_read(start, self._options.end, self._survey())
        return self._partitions(start, end) or [DcpPartition(TaskPlan(), PlannedBucket(view=self._look()))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # No later batch would make up for what is missing.
        return self._rows(partition, fails_on_rollback=True)


class DcpStreamReader(_Planner, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Changes as they come, in batches that Spark can repeat."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self._target: dict[VBucketId, Seqno] | None = None
        self._last_survey: Survey | None = None
        self._places: Places | None = None

    # --- planning, in one process for the whole query -------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        folder = self._options.progress_dir
        if folder is not None and self._options.start is Start.NOW:
            return _to_spark(first_start(folder, self._first_offsets))
        return _to_spark(self._first_offsets())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        began = _from_spark(start)
        began.check_bucket(self._bucket_uuid)
        folder = self._options.progress_dir
        extents = {} if folder is None else ExtentFolder(folder).read()
        self._last_survey = self._settled_survey(began)
        places = self._note_places(began, self._last_survey, extents)
        rows_max = _rows_max(limit)
        end = plan_end(began, self._last_survey, extents, places=places, target=self._target, rows_max=rows_max)
        return _to_spark(end)

    def _note_places(self, began: Offsets, survey: Survey, extents: Extents) -> Places:
        file = None if self._options.progress_dir is None else PlacesFile(self._options.progress_dir)
        before = self._places if self._places is not None else (file.read() if file is not None else {})
        self._places = note_places(began, survey, extents, before)
        if file is not None and self._places != before:
            file.write(self._places)
        return self._places

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        survey = self._last_survey or self._survey()
        return _to_spark(_high_offsets(self._bucket_uuid, survey))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.rows_per_trigger_max is not None:
            return ReadMaxRows(self._options.rows_per_trigger_max)
        if self._options.bytes_per_trigger_max is not None:
            return ReadMaxBytes(self._options.bytes_per_trigger_max)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._target = {vbucket: status.high_seqno for vbucket, status in self._survey().items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return self._partitions(_from_spark(start), _from_spark(end))

    def commit(self, end: dict[str, Any]) -> None:
        if self._options.progress_dir is not None:
            ExtentFolder(self._options.progress_dir).compact()

    def stop(self) -> None:
        self._close()

    def _settled_survey(self, began: Offsets) -> Survey:
        """A failover in the middle of a survey looks like a server that has lost its newest changes: ask once more."""
        survey = self._survey(began.vbuckets)
        odd = [
            vbucket
            for vbucket, offset in began.offsets.items()
            if survey[vbucket].failover_log.newest.vbuuid == offset.vbuuid and survey[vbucket].high_seqno < offset.seqno
        ]
        return {**survey, **self._survey(odd)} if odd else survey

    # --- reading, in the tasks ------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return self._rows(partition, fails_on_rollback=False)


def _rows_max(limit: ReadLimit) -> int | None:
    if isinstance(limit, ReadMaxRows):
        return limit.max_rows
    if isinstance(limit, ReadMaxBytes):
        return max(1, limit.max_bytes // BYTES_PER_ROW)
    return None


def _high_offsets(bucket_uuid: str, survey: Survey) -> Offsets:
    return Offsets(
        bucket_uuid,
        {
            vbucket: StreamOffset(
                vbuuid=status.failover_log.newest.vbuuid,
                seqno=status.high_seqno,
                snapshot_start=status.high_seqno,
                snapshot_end=status.high_seqno,
            )
            for vbucket, status in survey.items()
        },
    )


def _to_spark(offsets: Offsets) -> dict[str, Any]:
    """Spark compares offsets as text: the same place must always be the same text."""
    told: dict[str, Any] = json.loads(offsets.to_json())
    return told


def _from_spark(offset: dict[str, Any]) -> Offsets:
    return Offsets.from_json(json.dumps(offset))
