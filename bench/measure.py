"""Timing in turns, in a separate process if the state of the memory matters, and sizes for trying a benchmark."""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SCALE = float(os.environ.get("HEADWATER_BENCH_SCALE", "1"))
"""Use a fraction of the documents to try a benchmark, such as 0.01. The figures are then meaningless."""


def scaled(count: int) -> int:
    return max(1, round(count * SCALE))


def load_now() -> str:
    """Return how busy the machine was in the last minute, to be reported with the figures."""
    return f"{os.getloadavg()[0]:.1f}"


def in_turns(*tasks: Callable[[], object], rounds: int, keep_results: bool = False) -> list[float]:
    """Return the median seconds of each task. The tasks take turns, so that noise affects all alike.

    With `keep_results`, nothing is freed before the end, so that every result needs fresh memory.
    """
    times: list[list[float]] = [[] for _ in tasks]
    kept: list[object] = []
    for task in tasks:
        task()
    gc.disable()
    try:
        for _ in range(rounds):
            for task, taken in zip(tasks, times, strict=True):
                start = time.perf_counter()
                result = task()
                taken.append(time.perf_counter() - start)
                if keep_results:
                    kept.append(result)
    finally:
        gc.enable()
    return [statistics.median(taken) for taken in times]


def in_new_process(function: Callable[..., T], *args: object) -> T:
    """Call a function in a new process, where no memory was used and freed before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
