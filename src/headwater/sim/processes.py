"""Simulated processes: everything that runs belongs to one, and a process that is killed runs no more.

A process is a value of a context variable, which asyncio hands on to every task and callback that is made in it. The
event loop looks at it before it runs anything: what belongs to a process that was killed is dropped. That is kill -9:
no `finally`, no handler, no last word. A process that starts again is a new one with the same host.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headwater.sim.event_loop import SimulatedLoop

CURRENT: ContextVar[Process | None] = ContextVar("simulated process", default=None)


class Process:
    """One incarnation of a program on a host."""

    def __init__(self, name: str, host: str, *, random: Random, disk: DiskDelay | None = None) -> None:
        self.name = name
        self.host = host
        self.random = random
        self.disk_delay: DiskDelay = disk or (lambda: 0.0)
        self.is_alive = True
        self.on_killed: list[Callable[[], None]] = []
        """What the network and the disk do about it."""
        self.context: Context = copy_context()
        self.context.run(CURRENT.set, self)

    def run(self, loop: SimulatedLoop, main: Coroutine[Any, Any, Any], *, name: str = "main") -> asyncio.Task[Any]:
        """Start a task of this process."""
        return loop.create_task(main, name=f"{self.name}/{name}", context=self.context)

    def kill(self) -> None:
        """As kill -9."""
        if not self.is_alive:
            return
        self.is_alive = False
        for action in self.on_killed:
            action()

    def __repr__(self) -> str:
        return f"<{self.name}{'' if self.is_alive else ', dead'}>"


DiskDelay = Callable[[], float]
"""How long the next thing takes that is done on the process's disk, in seconds."""


# What happened in a run, in order: a digest of all of it, and lines to read where somebody wants them.


LINES_MAX = 200_000
"""Kept for a reader. The digest goes on."""


class Trace:
    """The digest covers every line and every byte that was delivered: two runs with the same one are the same run."""

    def __init__(self, *, keeps_lines: bool = False) -> None:
        self.lines: list[str] = []
        self.now_s: Callable[[], float] = lambda: 0.0
        self._keeps_lines = keeps_lines
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, who: str, what: str) -> None:
        line = f"{self.now_s():11.6f} {who:<14} {what}"
        self._digest.update(line.encode())
        if self._keeps_lines and len(self.lines) < LINES_MAX:
            self.lines.append(line)

    def delivered(self, data: bytes) -> None:
        self._digest.update(f"{self.now_s():.9f}".encode())
        self._digest.update(data)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()
