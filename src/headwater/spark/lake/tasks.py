"""Work that any process can do: a task is pickled, carried to where it is run, and its result is carried back.

A task only writes files that no commit names yet. It can be run twice, or be given up half-way, and nothing is harmed.

A runner takes tasks and gives their results in the same order. `run_here` is the simplest; `headwater.spark` has one
that runs a Spark job.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import pyarrow as pa

RESULT_SCHEMA = pa.schema([pa.field("number", pa.int64()), pa.field("result", pa.binary())])
RESULT_DDL = "number BIGINT, result BINARY"


class Task(Protocol):
    """A piece of work."""

    def run(self) -> Any: ...


Runner = Callable[[Sequence[Any]], list[Any]]
"""Runs tasks, wherever that is, and gives their results in their order."""


def run_here(tasks: Sequence[Task]) -> list[Any]:
    """Run the tasks in this process, one after another."""
    return [task.run() for task in tasks]


def result_batch(result: Any, number: int = 0) -> pa.RecordBatch:
    """One result as a batch of `RESULT_SCHEMA`."""
    return pa.RecordBatch.from_pydict({"number": [number], "result": [pickle.dumps(result)]}, RESULT_SCHEMA)


def results_of(rows: Iterable[tuple[int, bytes]]) -> list[Any]:
    """The results in the order of their tasks, from rows with `RESULT_DDL`."""
    return [pickle.loads(result) for _, result in sorted(rows, key=lambda row: row[0])]
