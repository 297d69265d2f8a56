"""What the store requires of an engine: a few ordered tables, atomic durable writes, and views that do not change.

The engine is the only part of the store that touches a disk. LMDB is the one for real data (`lmdb_engine`);
`MemoryEngine` serves tests, and the simulation puts its disk on top of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from headwater.kernels.memory import Int64s
from headwater.protocol.cluster_config import VBUCKETS_MAX


class Table(Enum):
    BUCKET = b"bucket"
    """A handful of named facts about the bucket."""
    VBUCKETS = b"vbuckets"
    """Vbucket → its state, failover log and bounds."""
    JOURNAL = b"journal"
    """Commit number → the changes of that commit, grouped by vbucket, until they are settled."""
    BLOCKS = b"blocks"
    """Vbucket and last seqno → a run of changes in seqno order."""


@dataclass(frozen=True, slots=True)
class PutRow:
    table: Table
    key: bytes
    value: bytes | memoryview
    has_room: bool = False
    """The last `CHECKSUM_BYTES` of the value are reserved for the checksum, so that megabytes are not copied for it."""


@dataclass(frozen=True, slots=True)
class DeleteRow:
    """Deleting a key that does not exist is not an error."""

    table: Table
    key: bytes


Change = PutRow | DeleteRow


class View(Protocol):
    """The tables as they were when the view was taken. Values it returns are valid until it is closed."""

    def get(self, table: Table, key: bytes) -> memoryview | None: ...

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the rows from `start` on and before `end`, in the order of their keys."""
        ...

    def last_before(self, table: Table, end: bytes) -> tuple[bytes, memoryview] | None:
        """Return the row with the highest key before `end`."""
        ...


class Engine(Protocol):
    @property
    def was_left_alone(self) -> bool:
        """Whether the tables are as they were last closed, and not a copy or a restored backup."""
        ...

    @property
    def block_versions(self) -> Int64s:
        """For each vbucket a number that rises after a write to its blocks; the last rises with every such write."""
        ...

    def view(self) -> AbstractContextManager[View]: ...

    def write(self, changes: Sequence[Change]) -> None:
        """Write all of the changes or none, durable when this returns. Raises `StoreFull` if there is no room."""
        ...

    def close(self) -> None: ...


def new_block_versions() -> Int64s:
    return np.zeros(VBUCKETS_MAX + 1, dtype=np.int64)


def count_block_writes(versions: Int64s, changes: Sequence[Change]) -> None:
    """Raise the versions of the vbuckets whose blocks have been changed. Called once the changes are durable.

    The last one is raised first, so a reader that finds it unchanged has read no version that was raised since.
    """
    changed = [int.from_bytes(change.key[:2]) for change in changes if change.table is Table.BLOCKS]
    if changed:
        versions[-1] += 1
        versions[changed] += 1


# --- tables in memory ---------------------------------------------------------------------------------------------


Rows = dict[Table, dict[bytes, bytes]]
Keys = dict[Table, list[bytes]]


class MemoryEngine:
    """Tables as dictionaries with sorted keys. A write copies them first if a view of them is open."""

    was_left_alone = True

    def __init__(self) -> None:
        self._rows: Rows = {table: {} for table in Table}
        self._keys: Keys = {table: [] for table in Table}
        self.block_versions: Int64s = new_block_versions()
        self._open_views = 0
        """The number of open views of the current tables."""

    @contextmanager
    def view(self) -> Iterator[View]:
        rows, keys = self._rows, self._keys
        self._open_views += 1
        try:
            yield _MemoryView(rows, keys)
        finally:
            if rows is self._rows:
                self._open_views -= 1

    def write(self, changes: Sequence[Change]) -> None:
        if self._open_views:
            self._rows = {table: dict(rows) for table, rows in self._rows.items()}
            self._keys = {table: list(keys) for table, keys in self._keys.items()}
            self._open_views = 0
        for change in changes:
            rows, keys = self._rows[change.table], self._keys[change.table]
            if isinstance(change, PutRow):
                if change.key not in rows:
                    insort(keys, change.key)
                rows[change.key] = bytes(change.value)
            elif rows.pop(change.key, None) is not None:
                del keys[bisect_left(keys, change.key)]
        count_block_writes(self.block_versions, changes)

    def close(self) -> None:
        """Nothing to close: the tables stay, so that a bucket can be opened from them again."""


class _MemoryView:
    def __init__(self, rows: Rows, keys: Keys) -> None:
        self._rows = rows
        self._keys = keys

    def get(self, table: Table, key: bytes) -> memoryview | None:
        value = self._rows[table].get(key)
        return None if value is None else memoryview(value)

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, memoryview]]:
        keys = self._keys[table]
        for key in keys[bisect_left(keys, start) : bisect_left(keys, end)]:
            yield key, memoryview(self._rows[table][key])

    def last_before(self, table: Table, end: bytes) -> tuple[bytes, memoryview] | None:
        keys = self._keys[table]
        at = bisect_left(keys, end)
        return (keys[at - 1], memoryview(self._rows[table][keys[at - 1]])) if at else None
