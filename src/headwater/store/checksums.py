"""CRC32C over stored rows: these kernels add a checksum to a row on write, and check it on read.

All writes and reads of the store go through them, so that data the disk has changed is found before it is used. Every
row ends in a checksum, which also covers its table and key (`row_seed`): a row in the wrong place counts as damage.

A block is large, and a get needs only one frame of it. So a block is divided into pieces of whole frames, each a
little longer than `PIECE_BYTES` and with its own checksum, and ends in a directory of the pieces (big-endian):

    the frames | for each piece: last seqno, 8 bytes; where it ends, 4; its CRC32C, 4 | pieces, 4 | CRC32C, 4

The last checksum covers the directory. A get finds the piece of a seqno in the directory, and checks and walks only
that piece (`find_frame`); streams and scans check all pieces that they read (`check_block`). Every read checks again:
the engine maps its file, and the system may drop a page and read it from the disk again at any time.

The processor's CRC32C instruction takes three cycles, so the kernels compute three pieces side by side in that time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from headwater.kernels.machine_code import Intrinsic
from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    UInt32,
    UInt32s,
    UInt64,
    copy_bytes,
    i64,
    inlined_part,
    kernel,
    kernel_part,
    load_u32,
    load_u64,
    read_only,
    store_u32,
    store_u64,
    u32,
    u64,
)
from headwater.protocol.kernels.frame_runs import SYSTEM_EVENT, collection_id

PIECE_BYTES = 4096
CHECKSUM_BYTES = 4
ENTRY_BYTES = 16
"""Length of a piece's entry in the directory of a block."""
BLOCK_END_BYTES = 8
_EVENT_BIT = 31
"""The bit for system events in the word that says what a piece holds. The bits below are for collections, id % 31."""
_GAP_PIECES = 3
ABSENT, DAMAGED = -1, -2
"""What `find_frame` returns in place of a position."""

# --- one step of the checksum -------------------------------------------------------------------------------------

_POLYNOMIAL = 0x82F63B78
"""Castagnoli's, its bits in reverse (RFC 3720, appendix B.4)."""


def _step_tables() -> Column:
    """`tables[k, b]`: what byte b does to the checksum when k more bytes follow it in its word."""
    tables = np.zeros((8, 256), dtype=np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
        tables[0, byte] = crc
    for following in range(1, 8):
        before = tables[following - 1]
        tables[following] = (before >> 8) ^ tables[0][before & 0xFF]
    return tables


_TABLES = _step_tables()


@kernel_part
def step_by_tables(array: Bytes, at: int, crc: int) -> int:
    """Add eight bytes to a checksum, for processors without an instruction for it."""
    result: int = u32(0)
    for index in range(8):
        byte = u32(array[at + index])
        if index < 4:
            byte ^= crc >> u32(8 * index) & u32(0xFF)
        result ^= _TABLES[7 - index, byte]
    return result


_step: Any = Intrinsic("headwater.store.checksum_step", "step")


@kernel_part
def _finish(array: Bytes, at: int, end: int, crc: int) -> int:
    """Continue the checksum `crc` over the bytes from `at` to `end`."""
    while at + 8 <= end:
        crc = _step(array, at, crc)
        at += 8
    while at < end:
        crc = u32(crc >> u32(8)) ^ _TABLES[0, (crc ^ u32(array[at])) & u32(0xFF)]
        at += 1
    return crc


_ONES: Any = np.uint32(0xFFFFFFFF)
"""A checksum starts with all bits set, and is inverted at the end."""


_KEPT_SEEDS = 16 * 1024
"""The seeds that are cached, because streams read the same blocks again and again."""


# --- whole rows ---------------------------------------------------------------------------------------------------


@kernel
def crc32c(data: AnyBytes, seed: UInt32) -> int:
    """Return the checksum of `data`, continuing `seed`: the checksum of the bytes before it, or 0 for none."""
    return int(_finish(data, i64(0), i64(len(data)), u32(seed) ^ _ONES) ^ _ONES)


@lru_cache(_KEPT_SEEDS)
def row_seed(table: bytes, key: bytes) -> int:
    """Return the checksum of a row's table and key, which the row's own checksum continues."""
    return int(crc32c(np.frombuffer(table + b"\0" + key, dtype=np.uint8), u32(0)))


def seal_row(value: bytes | memoryview, seed: int) -> Bytes:
    """Return a value as the row of any table but that of the blocks."""
    row = np.empty(len(value) + CHECKSUM_BYTES, dtype=np.uint8)
    row[:-CHECKSUM_BYTES] = np.frombuffer(value, dtype=np.uint8)
    close_row(row, seed)
    return row


def close_row(row: Bytes, seed: int) -> None:
    """Write the checksum of a row into its last bytes, which are reserved for it."""
    crc = int(crc32c(row[:-CHECKSUM_BYTES], u32(seed)))
    row[-CHECKSUM_BYTES:] = np.frombuffer(crc.to_bytes(CHECKSUM_BYTES), dtype=np.uint8)


def open_row(row: memoryview, seed: int) -> memoryview | None:
    """Return the value of a sealed row; None if the row is not as it was written."""
    if len(row) < CHECKSUM_BYTES:
        return None
    value = row[:-CHECKSUM_BYTES]
    crc = int(crc32c(read_only(np.frombuffer(value, dtype=np.uint8)), u32(seed)))
    return value if crc == int.from_bytes(row[-CHECKSUM_BYTES:]) else None


# --- blocks -------------------------------------------------------------------------------------------------------


def seal_block(run: Bytes, seed: int) -> Bytes:
    """Return a run as the row of a block."""
    row = np.empty(len(run) + (len(run) // PIECE_BYTES + 1) * ENTRY_BYTES + BLOCK_END_BYTES, dtype=np.uint8)
    return row[: _seal_block(run, u32(seed), row)]


@kernel
def _seal_block(run: AnyBytes, seed: UInt32, row: Bytes) -> int:
    """Write a run with its directory. Returns where the row ends. Bytes that are no frame must not lead beyond it."""
    start = i64(0)
    at = i64(0)
    last = u64(0)
    entry: int = i64(len(run))
    while at < len(run):
        if len(run) - at >= 32:
            last = load_u64(run, at + 24)
            at = min(at + 24 + i64(load_u32(run, at + 8)), i64(len(run)))
        else:
            at = i64(len(run))
        if at - start >= PIECE_BYTES or at >= len(run):
            copy_bytes(row, start, run, start, at - start)
            store_u64(row, entry, last)
            store_u32(row, entry + 8, u32(at))
            # The bytes that were copied are in the cache by now.
            store_u32(row, entry + 12, _finish(row, start, at, _ONES) ^ _ONES)
            entry += ENTRY_BYTES
            start = at
    store_u32(row, entry, u32((entry - len(run)) // ENTRY_BYTES))
    store_u32(row, entry + 4, _finish(row, i64(len(run)), entry + 4, u32(seed) ^ _ONES) ^ _ONES)
    return entry + BLOCK_END_BYTES


@inlined_part
def _directory(row: Bytes, seed: int) -> int:
    """Return where the directory of a block starts, which is where its frames end; -1 if it is damaged."""
    size = i64(len(row))
    if size < BLOCK_END_BYTES:
        return -1
    start: int = size - BLOCK_END_BYTES - ENTRY_BYTES * i64(load_u32(row, size - BLOCK_END_BYTES))
    if start < 0 or _finish(row, start, size - 4, u32(seed) ^ _ONES) ^ _ONES != load_u32(row, size - 4):
        return -1
    return start


@inlined_part
def piece_start(row: Bytes, directory: int, piece: int) -> int:
    return int(load_u32(row, directory + (piece - 1) * ENTRY_BYTES + 8)) if piece else 0


@inlined_part
def first_piece(row: Bytes, directory: int, pieces: int, seqno: int) -> int:
    """Return the first piece that ends at or after a seqno; `pieces` if there is none."""
    low: int = i64(0)
    high = i64(pieces)
    while low < high:
        middle = (low + high) // 2
        if load_u64(row, directory + middle * ENTRY_BYTES) < seqno:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def check_block(row: AnyBytes, seed: UInt32, after_seqno: UInt64) -> tuple[int, int]:
    """Return where the frames of a block's row start and end, without pieces that hold nothing after a seqno.

    Returns -1 twice if any of the other pieces, or the directory, is not as it was written.
    """
    directory = _directory(row, seed)
    if directory < 0:
        return i64(-1), i64(-1)
    pieces = (i64(len(row)) - BLOCK_END_BYTES - directory) // ENTRY_BYTES
    piece = first_piece(row, directory, pieces, after_seqno + u64(1))
    if not _are_sound(row, directory, piece, pieces):
        return i64(-1), i64(-1)
    return i64(piece_start(row, directory, piece)), i64(directory)


@kernel_part
def _are_sound(row: Bytes, directory: int, piece: int, pieces: int) -> bool:
    """Whether the pieces from `piece` on, before `pieces`, are as they were written."""
    while piece + 3 <= pieces:
        entry = directory + piece * ENTRY_BYTES
        first = piece_start(row, directory, piece)
        second = i64(load_u32(row, entry + 8))
        third = i64(load_u32(row, entry + ENTRY_BYTES + 8))
        end = i64(load_u32(row, entry + 2 * ENTRY_BYTES + 8))
        together = min(second - first, third - second, end - third) & ~i64(7)
        one = two = three = _ONES
        for at in range(i64(0), together, i64(8)):
            one = _step(row, first + at, one)
            two = _step(row, second + at, two)
            three = _step(row, third + at, three)
        if (
            _finish(row, first + together, second, one) ^ _ONES != load_u32(row, entry + 12)
            or _finish(row, second + together, third, two) ^ _ONES != load_u32(row, entry + ENTRY_BYTES + 12)
            or _finish(row, third + together, end, three) ^ _ONES != load_u32(row, entry + 2 * ENTRY_BYTES + 12)
        ):
            return False
        piece += 3
    while piece < pieces:
        if not is_piece_sound(row, directory, piece):
            return False
        piece += 1
    return True


# --- which pieces have changes of a collection ----------------------------------------------------------------------
#
# A stream of one small collection needs only few pieces of a block. One word says what a piece holds: a bit for each
# collection, which several may share, and one for system events, which all streams must see.


def bits_of(collections: Column) -> int:
    """Return the bits of the pieces that a stream of these collections has to read."""
    bits = 1 << _EVENT_BIT
    for number in collections.tolist():
        bits |= 1 << number % _EVENT_BIT
    return bits


def piece_bits(row: Bytes, directory: int) -> Column:
    """Return what each piece of a block holds. All pieces have been checked."""
    bits = np.zeros((len(row) - BLOCK_END_BYTES - directory) // ENTRY_BYTES, dtype=np.uint32)
    _find_bits(row, directory, bits)
    return bits


@kernel
def _find_bits(row: AnyBytes, directory: int, bits: UInt32s) -> None:
    at = i64(0)
    for piece in range(len(bits)):
        found = u64(0)
        end = i64(load_u32(row, directory + piece * ENTRY_BYTES + 8))
        while at < end:
            bit = u64(_EVENT_BIT)
            if row[at + 1] != SYSTEM_EVENT:
                bit = collection_id(row, at + 24 + i64(row[at + 4])) % u64(_EVENT_BIT)
            found |= u64(1) << bit
            at += 24 + i64(load_u32(row, at + 8))
        bits[piece] = u32(found)


@kernel
def check_wanted(
    row: AnyBytes, seed: UInt32, after_seqno: UInt64, piece: int, bits: UInt32s, wanted: int
) -> tuple[int, int, int]:
    """Find the next pieces of a block, from `piece` on, that hold what is wanted. Returns where they start and end, and
    the piece after them; -1 if any of these, or the directory, is damaged; the same position twice if none is left.

    Short gaps are read, because starting again takes as long.
    """
    directory = _directory(row, seed)
    if directory < 0:
        return i64(-1), i64(-1), i64(-1)
    pieces = i64(len(bits))
    piece = max(i64(piece), first_piece(row, directory, pieces, after_seqno + u64(1)))
    while piece < pieces and not i64(bits[piece]) & wanted:
        piece += 1
    last = behind = piece
    while behind < pieces and behind - last <= _GAP_PIECES:
        if i64(bits[behind]) & wanted:
            last = behind + 1
        behind += 1
    if not _are_sound(row, directory, piece, last):
        return i64(-1), i64(-1), i64(-1)
    return i64(piece_start(row, directory, piece)), i64(piece_start(row, directory, last)), last


@kernel_part
def is_piece_sound(row: Bytes, directory: int, piece: int) -> bool:
    """Whether one piece of a block, whose directory is sound, is as it was written."""
    entry = directory + piece * ENTRY_BYTES
    end = i64(load_u32(row, entry + 8))
    return bool(_finish(row, piece_start(row, directory, piece), end, _ONES) ^ _ONES == load_u32(row, entry + 12))


@kernel
def find_frame(row: AnyBytes, seed: UInt32, seqno: UInt64) -> tuple[int, int]:
    """Return where the frame of a seqno starts and ends in a block's row; `ABSENT` twice, or `DAMAGED` twice.

    Checks the piece that holds the frame, and the directory, but not the rest of the block.
    """
    directory = _directory(row, seed)
    if directory < 0:
        return i64(DAMAGED), i64(DAMAGED)
    pieces = (i64(len(row)) - BLOCK_END_BYTES - directory) // ENTRY_BYTES
    piece = first_piece(row, directory, pieces, seqno)
    if piece == pieces:
        return i64(ABSENT), i64(ABSENT)
    if not is_piece_sound(row, directory, piece):
        return i64(DAMAGED), i64(DAMAGED)
    at = i64(piece_start(row, directory, piece))
    piece_end = i64(load_u32(row, directory + piece * ENTRY_BYTES + 8))
    while at < piece_end and load_u64(row, at + 24) <= seqno:
        end = at + 24 + i64(load_u32(row, at + 8))
        if load_u64(row, at + 24) == seqno:
            return at, end
        at = end
    return i64(ABSENT), i64(ABSENT)


@kernel_part
def checksum_of(data: Bytes, start: int, end: int) -> int:
    """Return the checksum of a part of some bytes, as the directory of a block has it for a piece."""
    return int(_finish(data, start, end, _ONES) ^ _ONES)


@kernel
def directory_start(row: AnyBytes, seed: UInt32) -> int:
    """Return where the directory of a block starts; -1 if it is damaged."""
    return _directory(row, seed)


@kernel
def check_front(row: AnyBytes, seed: UInt32) -> tuple[int, int]:
    """Return where the first piece of a block, once checked, and all its frames end; `DAMAGED` twice if not sound."""
    directory = _directory(row, seed)
    if directory < 0 or (directory > 0 and not is_piece_sound(row, directory, i64(0))):
        return i64(DAMAGED), i64(DAMAGED)
    return piece_start(row, directory, i64(1)) if directory > 0 else i64(0), directory
