"""Runs the tasks of a lake on the executors of a session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from headwater.spark.lake.tasks import RESULT_DDL, TASK_DDL, results_of, run_task_batches, task_rows
from headwater.spark.worker_heap import keep_loaded


class SparkRunner:
    """A `Runner`: one Spark task for each task of the lake."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        if not tasks:
            return []
        frame = self._spark.createDataFrame(task_rows(tasks), TASK_DDL).repartition(len(tasks))
        rows = frame.mapInArrow(_run_in_worker, RESULT_DDL).collect()
        return results_of((row.number, row.result) for row in rows)


def _run_in_worker(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from run_task_batches(batches)
    keep_loaded("lake")
