"""The engine as the rest of the store sees it: rows get a checksum when they are written, which is checked when read.

A bucket opens its engine through this (`CheckedEngine.over`), so no other module of the store can write a row without
its checksum, or read one that the disk has changed: that raises `VBucketDamaged` for what belongs to a vbucket, and
`DataDamaged` for what belongs to the bucket. How rows end is in `checksums`.

The one row that is stored as it is given is that of the bucket's facts. Its checksum is a member of its JSON, so that a
program of any version can read the format from it, and refuse the data with the right reason.

Data of formats 1 and 2, whose rows have no checksums, is sealed row by row when it is opened (`upgrade`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from headwater.errors import DataDamaged, VBucketDamaged
from headwater.protocol.kernels.memory import Bytes, Column, Int64s, read_only, u32, u64
from headwater.store.checksums import (
    ABSENT,
    DAMAGED,
    check_block,
    check_front,
    find_frame,
    open_row,
    row_seed,
    seal_block,
    seal_row,
)
from headwater.store.data_format import (
    BUCKET_FACTS,
    FORMAT_VERSION,
    BucketFacts,
    block_last_seqno,
    blocks_of,
    commit_number,
    vbucket_of_block,
    vbucket_of_key,
)
from headwater.store.engine import Change, DeleteRow, Engine, PutRow, Table, View
from headwater.store.runs import as_run

FIRST, LAST = b"", b"\xff" * 16
"""Below and above all keys."""
_UPGRADE = b"upgrade"
"""There while data of an older format is sealed: the last row that has been, as its table, a zero byte and its key."""
_UPGRADE_STEP_BYTES = 16 * 1024 * 1024


class CheckedEngine:
    """An engine whose rows have checksums."""

    def __init__(self, engine: Engine, bucket: str) -> None:
        self.unchecked = engine
        self._bucket = bucket

    @classmethod
    def over(cls, engine: Engine, bucket: str) -> CheckedEngine:
        """The engine with checksums; itself, where it has them already."""
        return engine if isinstance(engine, CheckedEngine) else cls(engine, bucket)

    @property
    def was_left_alone(self) -> bool:
        return self.unchecked.was_left_alone

    @property
    def block_versions(self) -> Int64s:
        return self.unchecked.block_versions

    @contextmanager
    def view(self) -> Iterator[CheckedView]:
        with self.unchecked.view() as view:
            yield CheckedView(view, self._bucket)

    def write(self, changes: Sequence[Change]) -> None:
        self.unchecked.write([sealed(change) if isinstance(change, PutRow) else change for change in changes])

    def close(self) -> None:
        self.unchecked.close()


def sealed(row: PutRow) -> PutRow:
    """A row with its checksum."""
    if row.table is Table.BUCKET and row.key == BUCKET_FACTS:
        return row
    seed = row_seed(row.table.value, row.key)
    if row.table is Table.BLOCKS:
        return replace(row, value=seal_block(as_run(row.value), seed).data)
    return replace(row, value=seal_row(row.value, seed).data)


class CheckedView:
    """What `View` has, every row checked. Beside it is what need not read a whole row."""

    def __init__(self, view: View, bucket: str) -> None:
        self._view = view
        self._bucket = bucket

    def get(self, table: Table, key: bytes) -> memoryview | None:
        row = self._view.get(table, key)
        return None if row is None else self._checked(table, key, row)

    def scan(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, memoryview]]:
        for key, row in self._view.scan(table, start, end):
            yield key, self._checked(table, key, row)

    def last_before(self, table: Table, end: bytes) -> tuple[bytes, memoryview] | None:
        found = self._view.last_before(table, end)
        return None if found is None else (found[0], self._checked(table, *found))

    def sizes(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, int]]:
        """The keys of rows and how long those are: for what removes or counts them, damaged or not."""
        return ((key, len(row)) for key, row in self._view.scan(table, start, end))

    def last_size_before(self, table: Table, end: bytes) -> tuple[bytes, int] | None:
        """The key and the length of the last row before a key."""
        found = self._view.last_before(table, end)
        return None if found is None else (found[0], len(found[1]))

    def frame(self, vbucket: int, seqno: int) -> Bytes | None:
        """The frame of a seqno, if a block holds it. Only the piece of the block that it lies in is checked."""
        for key, value in self._view.scan(Table.BLOCKS, *blocks_of(vbucket, from_seqno=seqno)):
            row = read_only(as_run(value))
            start, end = find_frame(row, u32(row_seed(Table.BLOCKS.value, key)), u64(seqno))
            if start == DAMAGED:
                raise self._damage(Table.BLOCKS, key)
            return None if start == ABSENT else row[start:end]
        return None

    def changes(
        self, vbucket: int, *, after_seqno: int, needed: Column | None = None, needed_upto: int = 0
    ) -> Iterator[tuple[int, Bytes]]:
        """The blocks of a vbucket that have changes behind a seqno: the last seqno of each, and its frames, which may
        begin with some up to that seqno. What lies before those is not checked again: a stream comes here often.

        With `needed`, seqnos in their order, blocks that hold none of them are passed over, except those that begin
        before `needed_upto`.
        """
        passed = after_seqno
        for key, value in self._view.scan(Table.BLOCKS, *blocks_of(vbucket, from_seqno=after_seqno + 1)):
            if needed is not None:
                begin, passed = passed, block_last_seqno(key)
                first, last = np.searchsorted(needed, (u64(begin), u64(passed)), side="right").tolist()
                if first == last and begin >= needed_upto:
                    continue
            row = read_only(as_run(value))
            start, end = check_block(row, u32(row_seed(Table.BLOCKS.value, key)), u64(after_seqno))
            if start < 0:
                raise self._damage(Table.BLOCKS, key)
            yield block_last_seqno(key), row[start:end]

    def fronts(self, vbucket: int) -> Iterator[tuple[bytes, Bytes, int]]:
        """Of each block of a vbucket: its key, its first changes, which are checked, and the length of all of them."""
        for key, value in self._view.scan(Table.BLOCKS, *blocks_of(vbucket)):
            row = read_only(as_run(value))
            front, size = check_front(row, u32(row_seed(Table.BLOCKS.value, key)))
            if front == DAMAGED:
                raise self._damage(Table.BLOCKS, key)
            yield key, row[:front], size

    def _checked(self, table: Table, key: bytes, row: memoryview) -> memoryview:
        value = checked_value(table, key, row)
        if value is None:
            raise self._damage(table, key)
        return value

    def _damage(self, table: Table, key: bytes) -> DataDamaged:
        return damage(self._bucket, table, key)


def checked_value(table: Table, key: bytes, row: memoryview) -> memoryview | None:
    """What was stored in a row; None where the row is not as it was written."""
    if table is Table.BUCKET and key == BUCKET_FACTS:
        return row  # `BucketFacts.decode` checks it.
    seed = row_seed(table.value, key)
    if table is not Table.BLOCKS:
        return open_row(row, seed)
    _, size = check_block(read_only(as_run(row)), u32(seed), u64(0))
    return None if size < 0 else row[:size]


def damage(bucket: str, table: Table, key: bytes) -> DataDamaged:
    """The error for a row that is not as it was written."""
    where = f"bucket {bucket}: {row_name(table, key)}"
    reason = f"{where} in the table {table.value.decode()} is not what was written: its checksum does not fit"
    if table is Table.BLOCKS:
        return VBucketDamaged(reason, vbucket=vbucket_of_block(key))
    if table is Table.VBUCKETS:
        return VBucketDamaged(reason, vbucket=vbucket_of_key(key))
    hint = "Restore a backup, or start the node on an empty data folder and add it to its cluster again"
    return DataDamaged(reason, hint=hint)


def row_name(table: Table, key: bytes) -> str:
    """A row as a person would call it."""
    if table is Table.BLOCKS:
        return f"vbucket {vbucket_of_block(key)}, the block of changes up to seqno {block_last_seqno(key)},"
    if table is Table.VBUCKETS:
        return f"vbucket {vbucket_of_key(key)}, its state and failover log,"
    return f"commit {commit_number(key)}" if table is Table.JOURNAL else f"{key.decode(errors='replace')!r}"


# --- the formats before -------------------------------------------------------------------------------------------
#
# Rows are sealed in place, in the order of tables and keys, some at a time. Each step is one durable write with a row
# that says how far it has come, so a process that dies leaves data that the next one goes on with. The first step sets
# the version: from then on programs that know no checksums refuse the data.


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an upgrade has come."""

    rows: int
    bytes: int


def upgrade(engine: Engine, facts: BucketFacts, report: Callable[[Progress], None]) -> BucketFacts:
    """Seal what has no checksums yet. Returns the facts as they are then; does nothing where all is sealed."""
    if facts.version < FORMAT_VERSION:
        facts = replace(facts, version=FORMAT_VERSION)
        begun = sealed(PutRow(Table.BUCKET, _UPGRADE, Table.BUCKET.value + b"\0"))
        engine.write([PutRow(Table.BUCKET, BUCKET_FACTS, facts.encode()), begun])
    rows = size = 0
    while (changes := _next_step(engine, facts)) is not None:
        engine.write(changes)
        rows += len(changes)
        size += sum(len(change.value) for change in changes if isinstance(change, PutRow))
        report(Progress(rows, size))
    return facts


def _next_step(engine: Engine, facts: BucketFacts) -> list[Change] | None:
    """The rows to seal next, and how far that is; None where there is nothing left to do."""
    with engine.view() as view:
        stored = view.get(Table.BUCKET, _UPGRADE)
        if stored is None:
            return None
        reached = checked_value(Table.BUCKET, _UPGRADE, stored)
        if reached is None:
            raise damage(facts.name, Table.BUCKET, _UPGRADE)
        name, _, after = bytes(reached).partition(b"\0")
        tables = list(Table)
        for table in tables[tables.index(Table(name)) :]:
            changes: list[Change] = []
            size = 0
            for key, value in view.scan(table, after + b"\0" if after else FIRST, LAST):
                if table is Table.BUCKET and key in (BUCKET_FACTS, _UPGRADE):
                    continue
                changes.append(sealed(PutRow(table, key, value)))
                size += len(value)
                if size >= _UPGRADE_STEP_BYTES:
                    break
            if changes:
                return [*changes, sealed(PutRow(Table.BUCKET, _UPGRADE, table.value + b"\0" + changes[-1].key))]
            after = b""
        return [DeleteRow(Table.BUCKET, _UPGRADE)]
