"""Work that any process can do: a task is pickled, carried to where it is run, and its result is carried back.

A task only writes files that nobody sees yet. It can be run twice, or be given up half-way, and nothing is harmed.

A runner takes tasks and gives their results in the same order. `run_here` is the simplest. On Spark, the tasks become
the rows of a data frame, and `run_task_batches` is what `mapInArrow` gets.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

TASK_SCHEMA = pa.schema([pa.field("number", pa.int64()), pa.field("task", pa.binary())])
RESULT_SCHEMA = pa.schema([pa.field("number", pa.int64()), pa.field("result", pa.binary())])
RESULT_DDL = "number BIGINT, result BINARY"
TASK_DDL = "number BIGINT, task BINARY"


class Task(Protocol):
    """A piece of work."""

    def run(self) -> Any: ...


Runner = Callable[[Sequence[Any]], list[Any]]
"""Runs tasks, wherever that is, and gives their results in their order."""


def run_here(tasks: Sequence[Task]) -> list[Any]:
    """Run the tasks in this process, one after another."""
    return [task.run() for task in tasks]


def task_rows(tasks: Sequence[Task]) -> list[tuple[int, bytes]]:
    """The tasks as the rows of a data frame with `TASK_DDL`."""
    return [(number, pickle.dumps(task)) for number, task in enumerate(tasks)]


def run_task_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run the tasks in batches of `TASK_SCHEMA`, and give their results in batches of `RESULT_SCHEMA`."""
    for batch in batches:
        for number, task in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield result_batch(pickle.loads(task).run(), number)


def result_batch(result: Any, number: int = 0) -> pa.RecordBatch:
    """One result as a batch of `RESULT_SCHEMA`."""
    return pa.RecordBatch.from_pydict({"number": [number], "result": [pickle.dumps(result)]}, RESULT_SCHEMA)


def results_of(rows: Iterable[tuple[int, bytes]]) -> list[Any]:
    """The results in the order of their tasks, from rows with `RESULT_DDL`."""
    return [pickle.loads(result) for _, result in sorted(rows, key=lambda row: row[0])]
