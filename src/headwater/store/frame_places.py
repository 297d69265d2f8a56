"""Where stored frames lie in memory, for kernels that read documents by the run.

The index knows of a change its vbucket, its seqno and the commit it came with. Kernels find its frame from there: in
the pending commit, in the commit in flight or a young one (`YoungCommits.places`), or in a block, of which this module
keeps the addresses. `Bucket.read_frame` does the same for one document and is what these must agree with.

A block is a row of the engine, which maps its file into memory. Where a row lies does not change until it is written
again; `Engine.block_versions` says when that has happened to a vbucket. The directory of a block (`checksums`) is
copied when the block is first read: what was checked once can't change any more then. The piece that a frame lies in
is in the mapped file, and is checked each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headwater.protocol.kernels.memory import (
    Bytes,
    Column,
    address_of,
    bytes_at,
    i64,
    int64s_at,
    kernel_part,
    load_u32,
    load_u64,
    read_only,
    u32,
    u64,
)
from headwater.store.checksums import BLOCK_END_BYTES, ENTRY_BYTES, checksum_of, directory_start, row_seed
from headwater.store.commits import PLACE_DATA, PLACE_NUMBER, PLACE_STARTS
from headwater.store.data_format import block_last_seqno, blocks_of
from headwater.store.engine import Table, View
from headwater.store.runs import as_run, find_seqno

BLOCKS_MAX = 64 * 1024
"""Blocks whose places are kept. Beyond that all are forgotten, and found again as they are needed."""

VERSION, ROWS, COUNT = range(3)
"""Columns of `BlockPlaces.heads`: the version of a vbucket's blocks, and where and how many their rows are."""
LAST_SEQNO, ADDRESS, DIRECTORY, PIECES = range(4)
"""Columns of a vbucket's rows, one a block, in the order of seqnos. Directory and pieces are 0 until it is read."""
ROW_WORDS = 4

NOT_FOUND, UNKNOWN_BLOCKS, UNKNOWN_DIRECTORY, DAMAGED_PIECE = 0, -1, -2, -3
"""In place of an address: the change is not there; the vbucket's blocks, or the directory of one, have to be entered;
the change is there and not as it was written."""


@dataclass(slots=True)
class _Entered:
    """What is known of a vbucket's blocks, kept so that the addresses stay good."""

    rows: Column
    keys: list[bytes]
    blocks: list[Bytes]
    directories: dict[int, Bytes] = field(default_factory=dict)


class BlockPlaces:
    """The blocks of a bucket that were read by kernels."""

    def __init__(self, vbuckets: int) -> None:
        self.heads = np.zeros((vbuckets, 3), dtype=np.int64)
        self.heads[:, VERSION] = -1
        self._entered: dict[int, _Entered] = {}
        self._blocks = 0

    def enter_blocks(self, view: View, vbucket: int, *, version: int) -> None:
        """Note where the blocks of a vbucket lie. The version must have been read before the view was taken."""
        self._forget(vbucket)
        found = [(key, as_run(block)) for key, block in view.scan(Table.BLOCKS, *blocks_of(vbucket))]
        if self._blocks + len(found) > BLOCKS_MAX:
            for known in list(self._entered):
                self._forget(known)
        rows = np.zeros((len(found), ROW_WORDS), dtype=np.int64)
        for row, (key, block) in zip(rows, found, strict=True):
            row[LAST_SEQNO], row[ADDRESS] = block_last_seqno(key), address_of(block)
        self._entered[vbucket] = _Entered(rows, [key for key, _ in found], [block for _, block in found])
        self._blocks += len(found)
        self.heads[vbucket] = version, address_of(rows), len(rows)

    def enter_directory(self, vbucket: int, seqno: int) -> bool:
        """Copy the directory of the block that holds a seqno. False where it is damaged."""
        entered = self._entered[vbucket]
        number = int(np.searchsorted(entered.rows[:, LAST_SEQNO], seqno))
        row = read_only(entered.blocks[number])
        start = directory_start(row, u32(row_seed(Table.BLOCKS.value, entered.keys[number])))
        if start < 0:
            return False
        directory = entered.directories[number] = row[start : len(row) - BLOCK_END_BYTES].copy()
        entered.rows[number, DIRECTORY] = address_of(directory)
        entered.rows[number, PIECES] = len(directory) // ENTRY_BYTES
        return True

    def _forget(self, vbucket: int) -> None:
        self.heads[vbucket] = -1, 0, 0
        entered = self._entered.pop(vbucket, None)
        self._blocks -= 0 if entered is None else len(entered.blocks)


# --- for kernels: each returns the address of a frame and its length ------------------------------------------------


@kernel_part
def in_run(address: int, run_bytes: int, seqno: int) -> tuple[int, int]:
    start, end = find_seqno(bytes_at(address, run_bytes), seqno)
    if start < 0:
        return i64(NOT_FOUND), i64(0)
    return address + start, end - start


@kernel_part
def in_pending(
    frames: Bytes, item_vbuckets: Column, item_starts: Column, count: int, used: int, vbucket: int, seqno: int
) -> tuple[int, int]:
    """What was written last is looked at first."""
    end = used
    for item in range(count - 1, -1, -1):
        start = item_starts[item]
        if i64(item_vbuckets[item]) == vbucket:
            found, found_end = find_seqno(frames[start:end], seqno)
            if found >= 0:
                return frames.ctypes.data + start + found, found_end - found
        end = start
    return i64(NOT_FOUND), i64(0)


@kernel_part
def in_young(commits: Column, commit_low: int, vbucket: int, seqno: int) -> tuple[int, int]:
    row = commit_low & (len(commits) - 1)
    if commits[row, PLACE_NUMBER] != commit_low:
        return i64(NOT_FOUND), i64(0)
    starts = int64s_at(commits[row, PLACE_STARTS], vbucket + 2)
    return in_run(commits[row, PLACE_DATA] + starts[vbucket], starts[vbucket + 1] - starts[vbucket], seqno)


@kernel_part
def in_blocks(heads: Column, version: int, vbucket: int, seqno: int) -> tuple[int, int]:
    if heads[vbucket, VERSION] != version:
        return i64(UNKNOWN_BLOCKS), i64(0)
    count = heads[vbucket, COUNT]
    rows = int64s_at(heads[vbucket, ROWS], count * ROW_WORDS)
    block, after = i64(0), count
    while block < after:
        middle = (block + after) >> 1
        if rows[middle * ROW_WORDS + LAST_SEQNO] < seqno:
            block = middle + 1
        else:
            after = middle
    if block == count:
        return i64(NOT_FOUND), i64(0)
    row = block * ROW_WORDS
    if rows[row + DIRECTORY] == 0:
        return i64(UNKNOWN_DIRECTORY), i64(0)
    return _in_block(rows[row + ADDRESS], rows[row + DIRECTORY], rows[row + PIECES], seqno)


@kernel_part
def _in_block(address: int, directory_address: int, pieces: int, seqno: int) -> tuple[int, int]:
    directory = bytes_at(directory_address, pieces * ENTRY_BYTES)
    piece, after = i64(0), i64(pieces)
    while piece < after:
        middle = (piece + after) >> 1
        if load_u64(directory, middle * ENTRY_BYTES) < u64(seqno):
            piece = middle + 1
        else:
            after = middle
    if piece == pieces:
        return i64(NOT_FOUND), i64(0)
    start = i64(load_u32(directory, (piece - 1) * ENTRY_BYTES + 8)) if piece else i64(0)
    end = i64(load_u32(directory, piece * ENTRY_BYTES + 8))
    if checksum_of(bytes_at(address, end), start, end) != load_u32(directory, piece * ENTRY_BYTES + 12):
        return i64(DAMAGED_PIECE), i64(0)
    return in_run(address + start, end - start, seqno)
