"""Runners give results in the order of their tasks, however many run at a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from headwater.lake.lake import Runner, run_here, run_in_threads

WAIT_S_MAX = 30.0


@dataclass
class Doubling:
    number: int

    def run(self) -> int:
        return 2 * self.number


@dataclass
class Failing:
    began: list[int]

    def run(self) -> None:
        self.began.append(1)
        raise ValueError("no")


@dataclass
class Meeting:
    """Ends only while another one runs."""

    barrier: threading.Barrier

    def run(self) -> bool:
        self.barrier.wait(WAIT_S_MAX)
        return True


@pytest.mark.parametrize("run", [run_here, run_in_threads])
def test_results_are_in_the_order_of_tasks(run: Runner) -> None:
    assert run([Doubling(number) for number in range(50)]) == [2 * number for number in range(50)]
    assert run([]) == []


@pytest.mark.parametrize("run", [run_here, run_in_threads])
def test_an_error_ends_it(run: Runner) -> None:
    began: list[int] = []
    with pytest.raises(ValueError, match="no"):
        run([Failing(began) for _ in range(50)])
    assert len(began) <= 2, "no task is begun after one has failed"


def test_threads_run_two_tasks_at_a_time() -> None:
    barrier = threading.Barrier(2)
    assert run_in_threads([Meeting(barrier) for _ in range(6)]) == [True] * 6
