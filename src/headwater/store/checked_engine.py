"""The engine as the rest of the store sees it: it adds a checksum to every row on write, and checks it on read.

A bucket opens its engine through this (`CheckedEngine.over`), so no other module of the store can write a row without
its checksum, or read a row that the disk has changed. Reading such a row raises `VBucketDamaged` if it belongs to a
vbucket, and `DataDamaged` if it belongs to the bucket. `checksums` defines how rows end.

Only the row of the bucket's facts is stored unchanged. Its checksum is a member of its JSON, so that a program of any
version can read the format from it, and refuse the data with the right reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from headwater.errors import DataDamaged, VBucketDamaged
from headwater.kernels.memory import Bytes, Column, Int64s, read_only, u32, u64
from headwater.store.checksums import (
    ABSENT,
    CHECKSUM_BYTES,
    DAMAGED,
    bits_of,
    check_block,
    check_front,
    check_wanted,
    close_row,
    find_frame,
    open_row,
    piece_bits,
    row_seed,
    seal_block,
    seal_row,
)
from headwater.store.data_format import (
    BUCKET_FACTS,
    BucketFacts,
    VBucketFacts,
    block_last_seqno,
    blocks_of,
    commit_number,
    vbucket_of_block,
    vbucket_of_key,
)
from headwater.store.engine import Change, Engine, PutRow, Table, View
from headwater.store.runs import as_run, first_seqno, is_sound

_BLOCKS = Table.BLOCKS.value
FIRST, LAST = b"", b"\xff" * 16
"""Below and above all keys."""


class CheckedEngine:
    """An engine whose rows have checksums."""

    def __init__(self, engine: Engine, bucket: str) -> None:
        self.unchecked = engine
        self._bucket = bucket

    @classmethod
    def over(cls, engine: Engine, bucket: str) -> CheckedEngine:
        """Return the engine with checksums; the engine itself if it has them already."""
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
    """Return a row with its checksum."""
    if row.table is Table.BUCKET and row.key == BUCKET_FACTS:
        return row
    seed = row_seed(row.table.value, row.key)
    if row.table is Table.BLOCKS:
        return replace(row, value=seal_block(as_run(row.value), seed).data)
    if row.has_room:
        close_row(as_run(row.value), seed)
        return row
    return replace(row, value=seal_row(row.value, seed).data)


KNOWN_BLOCKS_MAX = 32 * 1024
"""Limit for the blocks in `KnownPieces`, some 20 MB. When it is reached, all are forgotten, and entered again as they
are read."""


class KnownPieces:
    """What the pieces of blocks hold (`checksums.piece_bits`), for blocks that streams of some collections have read.
    The next stream of a collection then reads only pieces that have changes of it.

    A block is identified by its key and its directory's checksum. A vbucket that gets another history is forgotten.
    """

    def __init__(self) -> None:
        self._found: dict[int, dict[bytes, tuple[bytes, Column]]] = {}
        self._blocks = 0

    def find(self, vbucket: int, key: bytes, row: Bytes) -> Column | None:
        found = self._found.get(vbucket, {}).get(key)
        return found[1] if found is not None and found[0] == row[-CHECKSUM_BYTES:].tobytes() else None

    def enter(self, vbucket: int, key: bytes, row: Bytes, directory: int) -> None:
        """Remember what the pieces of a block hold. The block has been checked."""
        if self._blocks >= KNOWN_BLOCKS_MAX:
            self._found, self._blocks = {}, 0
        self._found.setdefault(vbucket, {})[key] = row[-CHECKSUM_BYTES:].tobytes(), piece_bits(row, directory)
        self._blocks += 1

    def forget(self, vbucket: int) -> None:
        self._blocks -= len(self._found.pop(vbucket, ()))


class CheckedView:
    """A `View` that checks every row, with calls that need not read a whole row."""

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

    def journal(self) -> Iterator[tuple[bytes, memoryview, bool]]:
        """Yield the rows of the journal: the key, the commit, and whether the row is as it was written."""
        for key, row in self._view.scan(Table.JOURNAL, FIRST, LAST):
            value = checked_value(Table.JOURNAL, key, row)
            yield key, row[:-CHECKSUM_BYTES] if value is None else value, value is not None

    def sizes(self, table: Table, start: bytes, end: bytes) -> Iterator[tuple[bytes, int]]:
        """Yield the keys and lengths of rows, for callers that remove or count them, damaged or not."""
        return ((key, len(row)) for key, row in self._view.scan(table, start, end))

    def last_size_before(self, table: Table, end: bytes) -> tuple[bytes, int] | None:
        """Return the key and the length of the last row before a key."""
        found = self._view.last_before(table, end)
        return None if found is None else (found[0], len(found[1]))

    def frame(self, vbucket: int, seqno: int) -> Bytes | None:
        """Return the frame of a seqno, or None if no block has it. Checks only the piece of the block that has it."""
        for key, value in self._view.scan(Table.BLOCKS, *blocks_of(vbucket, from_seqno=seqno)):
            row = read_only(as_run(value))
            start, end = find_frame(row, u32(row_seed(Table.BLOCKS.value, key)), u64(seqno))
            if start == DAMAGED:
                raise self._damage(Table.BLOCKS, key)
            return None if start == ABSENT else row[start:end]
        return None

    def changes(
        self,
        vbucket: int,
        *,
        after_seqno: int,
        needed: Column | None = None,
        needed_upto: int = 0,
        wanted: Column | None = None,
        known: KnownPieces | None = None,
    ) -> Iterator[tuple[int, Bytes]]:
        """Yield the blocks of a vbucket that have changes after a seqno: the last seqno of each, and its frames,
        which may begin with some up to that seqno. Earlier pieces are not checked, because streams call this often.

        `needed` are seqnos, ascending: blocks that hold none of them are skipped, except those that begin before
        `needed_upto`. `wanted` are collection ids: pieces known to hold neither these nor system events are skipped,
        so a block may come in several parts, or not at all.
        """
        passed = after_seqno
        bits_wanted = 0 if wanted is None else bits_of(wanted)
        for key, value in self._view.scan(Table.BLOCKS, *blocks_of(vbucket, from_seqno=after_seqno + 1)):
            if needed is not None:
                begin, passed = passed, block_last_seqno(key)
                first, last = np.searchsorted(needed, (u64(begin), u64(passed)), side="right").tolist()
                if first == last and begin >= needed_upto:
                    continue
            row, seed = read_only(as_run(value)), u32(row_seed(_BLOCKS, key))
            bits = None if known is None or wanted is None else known.find(vbucket, key, row)
            if bits is None:
                start, end = check_block(row, seed, u64(after_seqno))
                if start < 0:
                    raise self._damage(Table.BLOCKS, key)
                if start == 0 and known is not None and wanted is not None:
                    known.enter(vbucket, key, row, end)
                yield block_last_seqno(key), row[start:end]
                continue
            piece = 0
            while piece < len(bits):
                start, end, piece = check_wanted(row, seed, u64(after_seqno), piece, bits, bits_wanted)
                if start < 0:
                    raise self._damage(Table.BLOCKS, key)
                if start < end:
                    yield block_last_seqno(key), row[start:end]

    def fronts(self, vbucket: int) -> Iterator[tuple[bytes, Bytes, int]]:
        """For each block of a vbucket, yield its key, its first changes, which are checked, and the length of all."""
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
    """Return what was stored in a row; None if the row is not as it was written."""
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
    """Return the name of a row for a message."""
    if table is Table.BLOCKS:
        return f"vbucket {vbucket_of_block(key)}, the block of changes up to seqno {block_last_seqno(key)},"
    if table is Table.VBUCKETS:
        return f"vbucket {vbucket_of_key(key)}, its state and failover log,"
    return f"commit {commit_number(key)}" if table is Table.JOURNAL else f"{key.decode(errors='replace')!r}"


# --- scrubbing -----------------------------------------------------------------------------------------------------
# A node scrubs its buckets slowly while it runs (`node/commit_loop.py`), and `headwater check` scrubs the data of a
# stopped one. Both read all rows of all tables in steps, each in its own view: a view that stays open would keep the
# engine from reusing space that was freed since.


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A row that is not what was written."""

    table: Table
    key: bytes
    seqnos: tuple[int, int] | None
    """The first and the last seqno of a block, as far as they can still be read."""
    error: DataDamaged


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrubbed:
    """The last complete pass of a running node."""

    passes: int = 0
    completed_ns: int = 0
    """When it ended; 0 for never."""
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
        """Check rows until `bytes_max` bytes are read or the table ends. Returns the damaged ones."""
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
    """Whether a row is as it was written, and can be decoded."""
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
