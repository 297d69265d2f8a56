"""The line at the bottom of the terminal: how fast changes come, how many came, and how far behind the reader is."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.control import Control
from rich.segment import ControlType
from rich.text import Text

from headwater.counted import counted

REDRAW_EVERY_S = 0.25
RATE_OVER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """What the line tells."""

    changes: int
    lag: int | None
    """Changes that the server has and the reader has not; None before it is known."""
    rollbacks: int
    reconnects: int


class LagLine:
    """Redraws itself until it is left. Where standard output is the same terminal, `above` makes way for a while."""

    def __init__(self, console: Console, look: Callable[[], Progress]) -> None:
        self._console = console
        self._look = look
        self._history: deque[tuple[float, int]] = deque()
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._redraw_often, name="headwater-lag-line", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._erase()

    @contextmanager
    def above(self) -> Iterator[None]:
        """What is written meanwhile stands above the line."""
        with self._lock:
            self._erase()
            yield
            self._draw()

    def _redraw_often(self) -> None:
        while not self._is_over.wait(REDRAW_EVERY_S):
            with self._lock:
                self._erase()
                self._draw()

    def _erase(self) -> None:
        self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))

    def _draw(self) -> None:
        progress = self._look()
        text = describe(progress, self.rate(progress.changes, time.monotonic()))
        # The last column stays free: a terminal may go to the next line by itself when it is written to.
        text.truncate(self._console.width - 1, overflow="ellipsis")
        self._console.print(text, end="", soft_wrap=True)

    def rate(self, changes: int, now_s: float) -> float:
        """Changes a second, over the last seconds."""
        self._history.append((now_s, changes))
        while now_s - self._history[0][0] > RATE_OVER_S:
            self._history.popleft()
        then_s, before = self._history[0]
        return (changes - before) / (now_s - then_s) if now_s > then_s else 0.0


def describe(progress: Progress, changes_per_s: float) -> Text:
    text = Text(f"{counted(progress.changes, 'change')}, {changes_per_s:,.0f}/s", no_wrap=True)
    text.append("  lag ")
    if progress.lag is None:
        text.append("?", style="dim")
    else:
        text.append(f"{progress.lag:,}", style="green" if progress.lag == 0 else "yellow")
    for name, count in (("rollbacks", progress.rollbacks), ("reconnects", progress.reconnects)):
        text.append(f"  {name} ", style="" if count else "dim")
        text.append(f"{count:,}", style="bold red" if count else "dim")
    return text
