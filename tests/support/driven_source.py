"""The `dcp` source called as Spark calls it, without Spark: for tests of what it plans and what its tasks read."""

from __future__ import annotations

import json
import pickle
from contextlib import closing
from typing import Any

import pyarrow as pa
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from headwater.spark.source import DcpBatchReader, DcpDataSource, DcpStreamReader
from support.spark_node import SourceBucket

Row = dict[str, Any]


class DrivenStream:
    """A stream: the planner's side of it."""

    def __init__(self, bucket: SourceBucket, **options: str) -> None:
        source = DcpDataSource({**bucket.options, **options})
        reader = source.streamReader(source.schema())
        assert isinstance(reader, DcpStreamReader)
        self.reader = reader

    def __enter__(self) -> DrivenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.stop()

    def initial(self) -> str:
        return json.dumps(self.reader.initialOffset())

    def latest(self, start: str, limit: ReadLimit | None = None) -> str:
        """Where a batch from `start` ends."""
        return json.dumps(self.reader.latestOffset(json.loads(start), limit or ReadAllAvailable()))

    def partitions(self, start: str, end: str) -> list[Any]:
        return list(self.reader.partitions(json.loads(start), json.loads(end)))

    def read(self, start: str, end: str) -> list[Row]:
        """What the tasks of a batch read."""
        return [row for partition in self.partitions(start, end) for row in self.read_partition(partition)]

    def read_partition(self, partition: Any) -> list[Row]:
        reader, partition = pickle.loads(pickle.dumps((self.reader, partition)))
        return rows_of(reader.read(partition))


def read_batch(bucket: SourceBucket, **options: str) -> list[Row]:
    """What `spark.read` gives."""
    reader = batch_reader(bucket, **options)
    with closing(reader):
        return [row for partition in reader.partitions() for row in rows_of(reader.read(partition))]


class ClosedReader(DcpBatchReader):
    def close(self) -> None:
        if self._watching is not None:
            self._watching.close()


def batch_reader(bucket: SourceBucket, **options: str) -> ClosedReader:
    source = DcpDataSource({**bucket.options, **options})
    return ClosedReader(source._checked, source.schema())


def rows_of(batches: Any) -> list[Row]:
    rows: list[Row] = []
    for batch in batches:
        assert isinstance(batch, pa.RecordBatch)
        rows += batch.to_pylist()
    return rows
