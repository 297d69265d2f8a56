"""Simulated machines: processes that can be killed, the disk that outlives them, and the trace of what they did.

Everything that runs belongs to a process, and a process that was killed runs no longer. A process is a value of a
context variable, which asyncio hands on to every task and callback that is made in it. The event loop looks at it
before it runs anything: what belongs to a process that was killed is dropped. That is kill -9: no `finally`, no
handler, no last word. A process that starts again is a new one with the same host.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from random import Random
from typing import Any

from headwater.errors import StoreFull
from headwater.node.auth.users import Users
from headwater.node.node_folder import NodeIdentity
from headwater.store.engine import Change, MemoryEngine

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

    def run(
        self, loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Any], *, name: str = "main"
    ) -> asyncio.Task[Any]:
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


# --- the disk: it outlives the processes on it, can be slow, and can be full ------------------------------------------
#
# A write is atomic and durable when it returns, as LMDB's are. A crash while one is under way leaves all of it or
# nothing: the event loop lets a write take effect at one moment, somewhat before its caller hears of it.


class SimulatedDisk:
    """All that a host keeps, but for what only processes know."""

    def __init__(self, random: Random, users: Users) -> None:
        self.random = random
        self.users = users
        self.identity = NodeIdentity(uuid="", cluster_uuid="0" * 32)
        self.delay_s_max = 0.002
        self.is_full = False
        self.writes = 0
        self.engines: dict[str, SimulatedEngine] = {}

    def delay_s(self) -> float:
        return self.random.uniform(0.00005, self.delay_s_max)

    def before_write(self) -> None:
        if self.is_full:
            raise StoreFull("the simulated disk is full", hint="Wait for the fault to end")
        self.writes += 1


class SimulatedFolder:
    """A node's folder on a simulated disk."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk

    def __call__(self, data: Path) -> SimulatedFolder:
        """There is one folder on a disk, whatever its name."""
        return self

    def make(self) -> None:
        pass

    def bucket_names(self) -> list[str]:
        return sorted(self._disk.engines)

    def open_engine(self, bucket: str) -> SimulatedEngine:
        if bucket not in self._disk.engines:
            self._disk.engines[bucket] = SimulatedEngine(self._disk)
        return self._disk.engines[bucket]

    def disk_bytes(self, bucket: str) -> int:
        return 0

    def remove_bucket(self, bucket: str) -> None:
        del self._disk.engines[bucket]

    def remove_dropped(self) -> None:
        pass

    def load_identity(self) -> NodeIdentity:
        return self._disk.identity

    def store_identity(self, identity: NodeIdentity) -> None:
        self._disk.identity = identity

    def load_users(self) -> Users:
        return self._disk.users

    def store_users(self, users: Users) -> None:
        self._disk.users = users

    def store_password(self, password: str) -> None:
        raise AssertionError("simulated nodes are given their users")

    def forget_password(self) -> None:
        raise AssertionError("no password was generated")


class SimulatedEngine(MemoryEngine):
    """The tables of a bucket, as far as their disk takes them."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__()
        self._disk = disk

    def write(self, changes: Sequence[Change]) -> None:
        self._disk.before_write()
        super().write(changes)


# --- the trace: a digest of all that happened, in order, and lines to read where they are wanted ----------------------


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
