"""A runner returns results in the order of its tasks, however many run at a time, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import QueryFailed
from headwater.lake.lake import Runner, run_here
from headwater.lake.location import Location
from headwater.landing.tasks import LocalRunner, check_cancelled

WAIT_S_MAX = 30.0


@dataclass
class Doing:
    """A task that is a function."""

    run: Callable[[], Any]


@pytest.mark.parametrize("run", [run_here, LocalRunner(2)])
def test_results_are_in_the_order_of_tasks(run: Runner) -> None:
    assert run([Doing(lambda number=number: 2 * number) for number in range(50)]) == [*range(0, 100, 2)]
    assert run([]) == []


def test_threads_run_two_tasks_at_a_time() -> None:
    barrier = threading.Barrier(2)
    assert sorted(LocalRunner(2)([Doing(lambda: barrier.wait(WAIT_S_MAX))] * 6)) == [0, 0, 0, 1, 1, 1]


def begin_file(folder: Path, number: int) -> None:
    Location.of(str(folder)).open_output(f"{number}.parquet").close()


def test_after_a_failure_no_task_begins_and_no_file_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun: list[int] = []

    def write_or_fail() -> None:
        begun.append(1)
        begin_file(tmp_path, len(begun))
        if len(begun) > 1:
            raise ValueError("no room for this")

    with pytest.raises(QueryFailed, match="ValueError: no room for this"):
        LocalRunner(1)([Doing(write_or_fail)] * 50)
    assert len(begun) == 2
    assert [*tmp_path.iterdir()] == []
    assert "ValueError: no room for this" in capsys.readouterr().err, "the traceback is for the log"


def test_a_cancelled_job_ends_at_once_and_its_tasks_at_their_next_batch(tmp_path: Path) -> None:
    runner, reads, may_go_on, ended = LocalRunner(2), threading.Event(), threading.Event(), threading.Event()

    def read() -> None:
        begin_file(tmp_path, 1)
        reads.set()
        may_go_on.wait(WAIT_S_MAX)
        try:
            check_cancelled()
        finally:
            ended.set()

    def cancel() -> None:
        reads.wait(WAIT_S_MAX)
        runner.cancel()

    threading.Thread(target=cancel).start()
    with pytest.raises(QueryFailed, match="was stopped"):
        runner([Doing(read)])
    assert not ended.is_set(), "the caller does not wait for a task"
    may_go_on.set()
    assert ended.wait(WAIT_S_MAX)
    for thread in threading.enumerate():
        if thread.name == "headwater-task":
            thread.join(WAIT_S_MAX)
    assert [*tmp_path.iterdir()] == []
    check_cancelled()
    assert runner([Doing(lambda: 1)]) == [1], "the next job runs"
