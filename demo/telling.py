"""What the demo shows: a line a step, and on a terminal what is going on just now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.table import Table


class Step:
    """What is being done. `done` is what is told of it in the end."""

    def __init__(self, title: str, status: Status) -> None:
        self.done = title
        self._title = title
        self._status = status

    def show(self, text: str) -> None:
        self._status.update(f"{self._title}: {text}")


class Teller:
    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._began_s = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """A step that is told as done, with the time it took, unless it fails."""
        began_s = time.monotonic()
        with self._console.status(title) as status:
            step = Step(title, status)
            yield step
        took_s = time.monotonic() - began_s
        self._console.print(f"[green]✓[/] {step.done} [dim]({took_s:.1f} s)[/]", soft_wrap=True)

    def tell(self, text: str = "") -> None:
        self._console.print(text, soft_wrap=True)

    def quote(self, text: str) -> None:
        """What a command has printed."""
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
