"""What came of a task, as a value: an error goes the same way as a result, whatever carries them.

An error that is raised in a worker of Spark reaches the driver as text in an error of Java, and Spark logs hundreds of
lines of traceback. As a value it keeps its class and its sentence, through Py4J and through Spark Connect.

A batch of which one task has failed is run again as a whole. So the files of all its tasks are removed: on a full disk
they would take the room that was made for the next attempt.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from headwater.errors import HeadwaterError
from headwater.lake.lake import Task
from headwater.lake.location import lake_error, noting_outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcome:
    """A result, or what the task has failed with."""

    result: Any = None
    failure: HeadwaterError | None = None
    outputs: tuple[str, ...] = ()
    """The files that it has written on a disk."""


def run_task(task: Task) -> TaskOutcome:
    """Run a task. Whatever it raises becomes an error of ours."""
    with noting_outputs() as outputs:
        try:
            return TaskOutcome(result=task.run(), outputs=tuple(outputs))
        except HeadwaterError as error:
            failure = error
        except Exception as error:
            # The sentence has the cause. Where it came from is for the log of the worker.
            traceback.print_exc()
            failure = lake_error(error, "the tables")
    _remove(outputs)
    # Tracebacks keep what the task held, such as files that are open.
    failure.__cause__ = failure.__context__ = None
    return TaskOutcome(failure=failure.with_traceback(None))


def results(outcomes: Iterable[TaskOutcome]) -> list[Any]:
    """The results of all tasks. If one has failed, remove what the others have written, and raise its error."""
    outcomes = list(outcomes)
    for failed in outcomes:
        if failed.failure is not None:
            for outcome in outcomes:
                _remove(outcome.outputs)
            raise failed.failure
    return [outcome.result for outcome in outcomes]


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        # Vacuum removes later what can't be removed now. A file that is open takes its room until it is truncated.
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
            os.unlink(path)
