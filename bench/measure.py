"""Timing in turns, in a process of its own where the state of the memory matters, and sizes to try a benchmark with."""

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
"""To try a benchmark with a part of its documents, such as 0.01. Its figures are worth nothing then."""


def scaled(count: int) -> int:
    return max(1, round(count * SCALE))


def load_now() -> str:
    """How busy the machine was in the last minute, to be told beside the figures."""
    return f"{os.getloadavg()[0]:.1f}"


def in_turns(*tasks: Callable[[], object], rounds: int, keep_results: bool = False) -> list[float]:
    """The median seconds of each task, the tasks taking turns so that noise hits all alike.

    With `keep_results` nothing is freed before the end, so that every result is made in fresh memory.
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
    """Call a function where no memory has been used and freed before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()
