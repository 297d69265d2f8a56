"""What the store needs of an engine: a few ordered tables, atomic durable writes, and views that do not change.

The engine is the only part of the store that touches a disk. LMDB is the one for real data (`lmdb_engine`); the
simulation has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


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
class Put:
    table: Table
    key: bytes
    value: bytes | memoryview


@dataclass(frozen=True, slots=True)
class Delete:
    """A key that is not there is no fault."""

    table: Table
    key: bytes


Change = Put | Delete


class View(Protocol):
    """The tables as they were when the view was taken. What it gives is valid until the view is closed."""

    def get(self, table: Table, key: bytes) -> memoryview | None: ...

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """The rows from `start` on and before `end`, in the order of their keys."""
        ...

    def last_before(self, table: Table, end: bytes) -> tuple[bytes, memoryview] | None:
        """The row with the highest key before `end`."""
        ...


class Engine(Protocol):
    @property
    def was_left_alone(self) -> bool:
        """Whether the tables are those that were closed last, where they were closed: no copy, nor brought back."""
        ...

    def view(self) -> AbstractContextManager[View]: ...

    def write(self, changes: Sequence[Change]) -> None:
        """All of the changes or none, durable when it returns. `StoreFull` where there is no room."""
        ...

    def close(self) -> None: ...
