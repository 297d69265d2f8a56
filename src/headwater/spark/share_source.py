"""The landing's own source: the batches of `dcp`, with a row for each task that says what it has to read.

`landing_tasks` tells why. What is loaded here is loaded by a planner and by tasks that do no more than hand such a row
on, in processes that are new for every query: so nothing that reads or writes is, nor the compiler of the kernels.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import BinaryType, StructField, StructType

from headwater.spark.planning import TaskPlan
from headwater.spark.selection_watch import PlannedBucket
from headwater.spark.source import DcpDataSource, DcpPartition, DcpStreamReader
from headwater.spark.source_options import SourceOptions
from headwater.spark.worker_heap import keep_loaded

SHARE = "share"
_SCHEMA = pa.schema([pa.field(SHARE, pa.binary(), nullable=False)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one task has to read of a batch, and all that it has to know for it."""

    options: SourceOptions
    plan: TaskPlan
    bucket: PlannedBucket


class ShareSource(DcpDataSource):
    """The batches of `dcp`, with a row for each task."""

    @classmethod
    def name(cls) -> str:
        return "dcp_shares"

    def schema(self) -> StructType:
        return StructType([StructField(SHARE, BinaryType(), nullable=False)])

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  (Spark's name)
        return ShareReader(self._checked, schema)


class ShareReader(DcpStreamReader):
    """Plans as any stream of `dcp` does, and reads nothing."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, DcpPartition)
        share = Share(options=self._options, plan=partition.plan, bucket=partition.bucket)
        yield pa.RecordBatch.from_arrays([_one_binary(pickle.dumps(share))], schema=_SCHEMA)
        keep_loaded("hand on")


def _one_binary(value: bytes) -> pa.Array:
    """`pa.array([value])`, which would load pandas first, to see that the list is none of its series."""
    offsets = struct.pack("=ii", 0, len(value))
    return pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(value)])
