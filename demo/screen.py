"""What the demo shows: a line a step, and on a terminal a bar for what is going on just now."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

SHOW_EVERY = 500
"""Of things that are counted one by one."""

T = TypeVar("T")


class Step:
    """What is being done. `done` is the line that is printed of it in the end."""

    def __init__(self, title: str, progress: Progress, task: TaskID) -> None:
        self.done = title
        self._progress = progress
        self._task = task

    def show(self, text: str = "", *, completed: float = 0, total: float | None = None) -> None:
        """With no total the bar says that it goes on, and not how far."""
        self._progress.update(self._task, text=text, completed=completed, total=total)

    def counted(self, things: Iterable[T], *, start: int, total: int, text: str) -> Iterator[T]:
        """The things, and the bar goes on with them."""
        for number, thing in enumerate(things, start=start):
            if number % SHOW_EVERY == 0:
                self.show(text, completed=number, total=total)
            yield thing


class Screen:
    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._began_s = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """A step that is shown as done, with the time it took, unless it fails."""
        began_s = time.monotonic()
        with self._bar() as progress:
            step = Step(title, progress, progress.add_task(title, total=None, text=""))
            yield step
        took_s = time.monotonic() - began_s
        self._console.print(f"[green]✓[/] {step.done} [dim]({took_s:.1f} s)[/]", soft_wrap=True)

    def _bar(self) -> Progress:
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("[dim]{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )

    def print(self, text: str = "") -> None:
        self._console.print(text, soft_wrap=True)

    def quote(self, text: str) -> None:
        """What can be typed, or was printed by a command."""
        for line in text.rstrip().splitlines():
            self._console.print(f"    {line}", markup=False, soft_wrap=True)

    def fail(self, text: str) -> None:
        self._console.print("[red]✗[/]", end=" ")
        self._console.print(text, markup=False, soft_wrap=True)

    def figures(self, rows: Sequence[tuple[str, str]]) -> None:
        table = Table(show_header=False, box=None, padding=(0, 2))
        table.add_column()
        table.add_column(justify="right", style="bold")
        for row in rows:
            table.add_row(*row)
        self._console.print(table)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
