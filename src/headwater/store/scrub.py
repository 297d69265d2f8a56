"""Scrubbing: everything that is stored is read for no other reason than to find damage while a copy is still there.

A node scrubs its buckets slowly while it runs (`node/commit_loop.py`), and `headwater check` the data of a stopped one.
Both go through all rows of all tables in steps, each in a view of its own: a view that stays open would keep the engine
from using again what has been freed since.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.errors import DataDamaged
from headwater.protocol.kernels.memory import read_only, u64
from headwater.store.checked_engine import FIRST, LAST, checked_value, damage
from headwater.store.data_format import (
    BUCKET_FACTS,
    BucketFacts,
    VBucketFacts,
    block_last_seqno,
    vbucket_of_block,
)
from headwater.store.engine import Engine, Table
from headwater.store.runs import as_run, first_seqno, is_sound


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A row that is not what was written."""

    table: Table
    key: bytes
    seqnos: tuple[int, int] | None
    """The first and the last change of a block, as far as they can still be seen."""
    error: DataDamaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """The last pass of a running node that came to its end."""

    passes: int = 0
    completed_ns: int = 0
    """When; 0 for never."""
    read_bytes: int = 0
    findings: int = 0


class Scrub:
    """One pass over all rows of a bucket."""

    def __init__(self, engine: Engine, bucket: str) -> None:
        self._engine = engine
        self._bucket = bucket
        self._tables = list(Table)
        self._from = FIRST
        self.read_bytes = 0
        self.rows = 0

    @property
    def is_done(self) -> bool:
        return not self._tables

    def step(self, bytes_max: int) -> list[Finding]:
        """Check rows until so many bytes are read, or the table ends. Returns those that are damaged."""
        table, until = self._tables[0], self.read_bytes + bytes_max
        found: list[Finding] = []
        with self._engine.view() as view:
            for key, row in view.scan(table, self._from, LAST):
                self._from = key + b"\0"
                self.rows += 1
                self.read_bytes += len(row)
                if not _is_sound_row(table, key, row):
                    seqnos = _seqnos(key, row) if table is Table.BLOCKS else None
                    error = damage(self._bucket, table, key)
                    found.append(Finding(table=table, key=key, seqnos=seqnos, error=error))
                if self.read_bytes >= until:
                    return found
        self._tables.pop(0)
        self._from = FIRST
        return found


def _is_sound_row(table: Table, key: bytes, row: memoryview) -> bool:
    """Whether a row is what was written, and what was written can be read."""
    value = checked_value(table, key, row)
    if value is None:
        return False
    try:
        if table is Table.VBUCKETS:
            VBucketFacts.decode(value)
        elif table is Table.BUCKET and key == BUCKET_FACTS:
            BucketFacts.decode(value)
        elif table is Table.BLOCKS:
            return is_sound(read_only(as_run(value)), vbucket_of_block(key), u64(0), u64(block_last_seqno(key)))
    except DataDamaged:
        return False
    return True


def _seqnos(key: bytes, row: memoryview) -> tuple[int, int]:
    return (first_seqno(as_run(row)) if len(row) >= 32 else 0), block_last_seqno(key)
