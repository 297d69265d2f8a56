"""Runs the tasks of a lake on the executors of a session, as one Spark job."""

from __future__ import annotations

import contextlib
import pickle
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater.spark.connect_session import is_remote
from headwater.spark.lake.tasks import RESULT_DDL, Task, result_batch, results_of
from headwater.spark.worker_heap import keep_loaded

_DESCRIPTION = "spark.job.description"


class SparkRunner:
    """A `Runner`: one Spark task for each task of the lake. `name` is what Spark's pages show its jobs under."""

    def __init__(self, spark: SparkSession, name: str = "headwater") -> None:
        self._spark = spark
        self._name = name
        self._tag = f"headwater-{uuid.uuid4().hex}"

    def cancel(self) -> None:
        """End the job that is running, if there is one. For any thread."""
        # A session that has ended by itself has nothing to cancel.
        with contextlib.suppress(Py4JError, PySparkException, ConnectionError):
            self._spark.interruptTag(self._tag)

    def __call__(self, tasks: Sequence[Task]) -> list[Any]:
        if not tasks:
            return []
        count = len(tasks)
        with self._marked(type(tasks[0])):
            # A range has exactly one row in each of its partitions, and needs no shuffle.
            frame = self._spark.range(0, count, 1, count)
            rows = frame.mapInArrow(_RunOne(tuple(pickle.dumps(task) for task in tasks)), RESULT_DDL).collect()
        return results_of((row.number, row.result) for row in rows)

    @contextlib.contextmanager
    def _marked(self, kind: type[Task]) -> Iterator[None]:
        """Jobs of this thread can be found and cancelled meanwhile. The caller's own marks come back."""
        context = None if is_remote(self._spark) else self._spark.sparkContext
        before = None if context is None else context.getLocalProperty(_DESCRIPTION)
        self._spark.addTag(self._tag)
        if context is not None:
            context.setLocalProperty(_DESCRIPTION, f"{self._name}: {(kind.__doc__ or '').partition(chr(10))[0]}")
        try:
            yield
        finally:
            with contextlib.suppress(Py4JError, ConnectionError):
                self._spark.removeTag(self._tag)
                if context is not None:
                    context.setLocalProperty(_DESCRIPTION, before)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _RunOne:
    """What each Spark task does: run the tasks whose numbers it is given."""

    pickled: tuple[bytes, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield result_batch(pickle.loads(self.pickled[number]).run(), number)
        keep_loaded("lake")
