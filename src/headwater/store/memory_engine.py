"""An engine that keeps its tables in memory: for warming up, for tests, and as the ground of the simulated disk."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headwater.store.engine import Change, Put, Table, View


class MemoryEngine:
    """Tables as sorted keys beside a dictionary. A view is a copy of the keys: rows are never changed in place."""

    def __init__(self) -> None:
        self._rows: dict[Table, dict[bytes, bytes]] = {table: {} for table in Table}
        self._keys: dict[Table, list[bytes]] = {table: [] for table in Table}

    @contextmanager
    def view(self) -> Iterator[View]:
        yield _MemoryView(
            {table: dict(rows) for table, rows in self._rows.items()},
            {table: list(keys) for table, keys in self._keys.items()},
        )

    def write(self, changes: Sequence[Change]) -> None:
        for change in changes:
            rows, keys = self._rows[change.table], self._keys[change.table]
            if isinstance(change, Put):
                if change.key not in rows:
                    insort(keys, change.key)
                rows[change.key] = bytes(change.value)
            elif rows.pop(change.key, None) is not None:
                del keys[bisect_left(keys, change.key)]

    def close(self) -> None:
        """Nothing to close: the tables stay, so that a bucket can be opened from them again."""


class _MemoryView:
    def __init__(self, rows: dict[Table, dict[bytes, bytes]], keys: dict[Table, list[bytes]]) -> None:
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
