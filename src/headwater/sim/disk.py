"""The disk of a simulated host: it outlives the processes on it, can be slow, and can be full.

A write is atomic and durable when it returns, as LMDB's are. A crash while one is under way leaves all of it or
nothing: the event loop lets a write take effect at one moment, somewhat before its caller hears of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from headwater.errors import StoreFull
from headwater.node.auth.users import Users
from headwater.store.engine import Change, Put, Table, View

Rows = dict[Table, dict[bytes, bytes]]
Keys = dict[Table, list[bytes]]


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

    def load_note(self, name: str) -> bytes | None:
        return self._disk.notes.get(name)

    def store_note(self, name: str, note: bytes) -> None:
        self._disk.before_write()
        self._disk.notes[name] = note


class SimulatedEngine:
    """The tables of a bucket. They are copied when they change while somebody looks at them."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self._disk = disk
        self._rows: Rows = {table: {} for table in Table}
        self._keys: Keys = {table: [] for table in Table}
        self._is_looked_at = 0

    @contextmanager
    def view(self) -> Iterator[View]:
        rows, keys = self._rows, self._keys
        self._is_looked_at += 1
        try:
            yield _SimulatedView(rows, keys)
        finally:
            if rows is self._rows:
                self._is_looked_at -= 1

    def write(self, changes: Sequence[Change]) -> None:
        self._disk.before_write()
        if self._is_looked_at:
            self._rows = {table: dict(rows) for table, rows in self._rows.items()}
            self._keys = {table: list(keys) for table, keys in self._keys.items()}
            self._is_looked_at = 0
        for change in changes:
            rows, keys = self._rows[change.table], self._keys[change.table]
            if isinstance(change, Put):
                if change.key not in rows:
                    insort(keys, change.key)
                rows[change.key] = bytes(change.value)
            elif rows.pop(change.key, None) is not None:
                del keys[bisect_left(keys, change.key)]

    def close(self) -> None:
        """The tables stay."""


class _SimulatedView:
    def __init__(self, rows: Rows, keys: Keys) -> None:
        self._rows = rows
        self._keys = keys

    def get(self, table: Table, key: bytes) -> memoryview | None:
        value = self._rows[table].get(key)
        return None if value is None else memoryview(value)

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, memoryview]]:
        rows, keys = self._rows[table], self._keys[table]
        for key in keys[bisect_left(keys, start) : bisect_left(keys, end)]:
            yield key, memoryview(rows[key])

    def last_before(self, table: Table, end: bytes) -> tuple[bytes, memoryview] | None:
        keys = self._keys[table]
        at = bisect_left(keys, end)
        return (keys[at - 1], memoryview(self._rows[table][keys[at - 1]])) if at else None
