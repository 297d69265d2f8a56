"""What the demo shows: a line a step, and on a terminal a small table of what is where just now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

REFRESH_PER_S = 8


class Step:
    """What is being done. `done` is the line that is printed of it in the end."""

    def __init__(self, title: str, live: Live) -> None:
        self.done = title
        self._title = title
        self._spinner = Spinner("dots", title)
        self._live = live
        self.show({})

    def show(self, places: Mapping[str, Sequence[str]], *columns: str) -> None:
        """The table below the title: a row a place."""
        self._live.update(Group(self._spinner, _grid(places, columns)) if places else self._spinner)


def _grid(places: Mapping[str, Sequence[str]], columns: Sequence[str]) -> RenderableType:
    table = Table("", *columns, box=None, padding=(0, 3, 0, 2), header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    for place, cells in places.items():
        table.add_row(place, *cells)
    return table


class Screen:
    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._began_s = time.monotonic()

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """A step that is shown as done, with the time it took, unless it fails."""
        began_s = time.monotonic()
        with Live(
            console=self._console,
            refresh_per_second=REFRESH_PER_S,
            transient=True,
            auto_refresh=self._console.is_terminal,
        ) as live:
            step = Step(title, live)
            yield step
            live.update("")
        took_s = time.monotonic() - began_s
        self._console.print(f"[green]✓[/] {step.done} [dim]({took_s:.1f} s)[/]", soft_wrap=True)

    def print(self, text: str = "") -> None:
        self._console.print(text, soft_wrap=True)

    def quote(self, text: str) -> None:
        """What can be typed, or was printed by a command."""
        for line in text.rstrip().splitlines():
            self._console.print(f"    {line}", markup=False, soft_wrap=True)

    def fail(self, text: str) -> None:
        self._console.print("[red]✗[/]", end=" ")
        self._console.print(text, markup=False, soft_wrap=True)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]], *, marked: str) -> None:
        """The row that begins with `marked` stands out."""
        table = Table(*columns, box=None, padding=(0, 3, 0, 4), header_style="dim")
        for row in rows:
            table.add_row(*map(str, row), style="bold" if row[0] == marked else None)
        self._console.print(table)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s
