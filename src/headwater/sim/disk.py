"""The disk of a simulated host: it outlives the processes on it, can be slow, and can be full.

A write is atomic and durable when it returns, as LMDB's are. A crash while one is under way leaves all of it or
nothing: the event loop lets a write take effect at one moment, somewhat before its caller hears of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from headwater.errors import StoreFull
from headwater.node.auth.users import Users
from headwater.store.engine import Change
from headwater.store.memory_engine import MemoryEngine


class SimulatedDisk:
    """All that a host keeps, but for what only processes know."""

    def __init__(self, random: Random, users: Users) -> None:
        self.random = random
        self.users = users
        self.delay_s_max = 0.002
        self.is_full = False
        self.writes = 0
        self.engines: dict[str, SimulatedEngine] = {}
        self.notes: dict[str, bytes] = {}

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

    def load_users(self) -> Users:
        return self._disk.users

    def store_users(self, users: Users) -> None:
        self._disk.users = users

    def store_password(self, password: str) -> None:
        raise AssertionError("simulated nodes are given their users")

    def forget_password(self) -> None:
        raise AssertionError("no password was generated")

    def load_note(self, name: str) -> bytes | None:
        return self._disk.notes.get(name)

    def store_note(self, name: str, note: bytes) -> None:
        self._disk.before_write()
        self._disk.notes[name] = note


class SimulatedEngine(MemoryEngine):
    """The tables of a bucket, as far as their disk takes them."""

    def __init__(self, disk: SimulatedDisk) -> None:
        super().__init__()
        self._disk = disk

    def write(self, changes: Sequence[Change]) -> None:
        self._disk.before_write()
        super().write(changes)
