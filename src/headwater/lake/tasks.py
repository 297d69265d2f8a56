"""Work that any process can do: a task is pickled, carried to where it is run, and its result is carried back.

A task only writes files that no commit names yet. It can be run twice, or be given up half-way, and nothing is harmed.

A runner takes tasks and gives their results in the same order. `run_here` is the simplest; `headwater.spark` has one
that runs a Spark job.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
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


def run_in_threads(tasks: Sequence[Task], *, threads: int = 2) -> list[Any]:
    """Run the tasks in this process, some at a time: for tasks that wait for a server between their computations.

    A program that is ended does not wait for them.
    """
    waiting: SimpleQueue[int] = SimpleQueue()
    for number in range(len(tasks)):
        waiting.put(number)
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work() -> None:
        with contextlib.suppress(Empty):
            while not errors:
                number = waiting.get_nowait()
                try:
                    results[number] = tasks[number].run()
                except BaseException as error:
                    errors.append(error)

    workers = [threading.Thread(target=work, name="headwater-task", daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(tasks))]


def result_batch(result: Any, number: int = 0) -> pa.RecordBatch:
    """One result as a batch of `RESULT_SCHEMA`."""
    return pa.RecordBatch.from_pydict({"number": [number], "result": [pickle.dumps(result)]}, RESULT_SCHEMA)


def results_of(rows: Iterable[tuple[int, bytes]]) -> list[Any]:
    """The results in the order of their tasks, from rows with `RESULT_DDL`."""
    return [pickle.loads(result) for _, result in sorted(rows, key=lambda row: row[0])]
