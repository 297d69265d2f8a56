"""The bar that `headwater load` shows on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from headwater.cli.loading.report import Report

SHOW_EVERY_S = 0.1


def progress_bar(
    report: Report, done: Callable[[], int], *, total: int | None, shown: bool
) -> AbstractContextManager[Callable[[], None]]:
    """What is to be called as the load goes on: it moves the bar, if there is a terminal to show it on.

    `done` tells how much of `total` is: bytes of a file that were read, or generated documents that were written.
    """
    if not shown or not sys.stderr.isatty():
        return nullcontext(lambda: None)
    return _Bar(report, done, total=total)


class _Bar(AbstractContextManager[Callable[[], None]]):
    def __init__(self, report: Report, done: Callable[[], int], *, total: int | None) -> None:
        self._report = report
        self._done = done
        self._shown_s = 0.0
        self._progress = Progress(
            TextColumn("loading"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[documents]} documents, {task.fields[rate]}/s"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task("", total=total, documents="0", rate="0")

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _show(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s < SHOW_EVERY_S:
            return
        self._shown_s = now_s
        written = self._report.documents
        rate = self._report.per_second(written)
        self._progress.update(self._task, completed=self._done(), documents=f"{written:,}", rate=f"{rate:,.0f}")
