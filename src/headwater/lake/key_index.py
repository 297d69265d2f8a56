"""Documents by their key: an in-memory index of the changes of one merge, and an index of the rows in a file.

`KeyIndex` is a hash table over rows in memory, created for one merge and then dropped. Two rows are of one document if
the bytes of their keys are equal, and so are the numbers beside them, which say in which collection and vbucket the key
is. Since keys are compared, the hash need not be unique.

`KeyPlaces` finds the rows of a file that have some keys, without reading the file's keys. Without it a merge of few
changes into a large table would read all keys of the table. A file of a table with deletion vectors has this index
behind its last row group, where Parquet readers never look (`data_files`):

    secret (16 bytes) | first hash of each block (8 bytes each) | blocks of 128 entries
    a block: hash of each entry (8 bytes each) | place of each entry (4 bytes each)

All numbers are little-endian. There is an entry for each row, ordered by hash; the last block is padded with all bits
set. The low bits of a place are the row's number, as many as the file's rows need; the bits above are from the hash's
second half. So 76 bits of a hash are compared in a file of a million rows, and in the life of a lake no two keys are
confused: that would take a billion changes a day for 200,000 years. Each file has its own secret, so that no client can
find keys that collide.

A lookup reads the first hashes of all blocks, 0.06 bytes a row, and the blocks that may have a wanted hash.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.kernels.memory import (
    Bools,
    Bytes,
    Column,
    Int64s,
    ReadOnlyBytes,
    ReadOnlyInt64s,
    UInt32s,
    UInt64,
    UInt64Rows,
    i64,
    kernel,
    kernel_part,
    load_u64,
    read_only,
    u32,
    u64,
)
from headwater.kernels.siphash import sip_bytes, sip_end, sip_start, sip_word
from headwater.lake.layout import raw_keys

Marks = NDArray[np.bool_]
Hashes = NDArray[np.uint64]
"""Two words per row."""


_SECRET: Any = (np.uint64(secrets.randbits(64)), np.uint64(secrets.randbits(64)))
_FILTER_PLACES_MAX = 1 << 22
_SECRET_BYTES = 16
BLOCK_ROWS = 128
_BLOCK_BYTES = 12 * BLOCK_ROWS
"""A block has 1.5 KiB: small compared with the cost of opening a file, and large compared with its first hash."""
_PLACES_SHARE = 4
"""Read all blocks at once if at least one in this many is wanted: then requests cost more than bytes."""
_NO_BYTES = np.frombuffer(b"", dtype=np.uint8)
_NO_OFFSETS = np.frombuffer(bytes(8), dtype=np.int64)
"""Read-only, like arrays of Arrow's buffers: for writable arrays, numba would compile each kernel once more."""


class KeyIndex:
    """The rows of a merge by key."""

    def __init__(self, keys: pa.Array, seqnos: Column, beside: Column | None = None) -> None:
        self._offsets, self._data = _parts(keys)
        self._beside = _numbers_beside(beside, len(keys))
        capacity = 1 << max(4, (2 * len(keys)).bit_length())
        self._rows = np.full(capacity, -1, dtype=np.int64)
        self._tags = np.zeros(capacity, dtype=np.uint32)
        self.newest: Marks = np.zeros(len(keys), dtype=np.bool_)
        """By row: whether it has the highest seqno of its key. Among equal seqnos, the last row."""
        self.documents: NDArray[np.int64] = np.zeros(len(keys), dtype=np.int64)
        """By row: the first row with its key."""
        _insert(
            self._data, self._offsets, self._beside, np.array(seqnos, dtype=np.int64), self._rows, self._tags,
            _SECRET[0], _SECRET[1], self.newest, self.documents,
        )  # fmt: skip
        self._filter: Marks | None = None

    def __len__(self) -> int:
        return len(self.newest)

    def maybe(self, keys: pa.Array) -> NDArray[np.int64]:
        """Return the numbers of those keys that may be in the index. Of the others, hardly one in thirty passes. This
        takes a tenth of the time of `find`, which matters for tables with many keys that are not in the index."""
        marks: Marks = np.zeros(len(keys), dtype=np.bool_)
        if len(self) and len(keys):
            if self._filter is None:
                self._filter = np.zeros(min(16 * len(self._rows), _FILTER_PLACES_MAX), dtype=np.bool_)
                _add_to_filter(self._data, self._offsets, self._filter)
            offsets, data = _parts(keys)
            _look_in_filter(data, offsets, self._filter, marks)
        return np.flatnonzero(marks)

    def hashes(self, secret: bytes) -> Hashes:
        """Return the hash of each row's key, with a secret of 16 bytes."""
        return _hashed(self._offsets, self._data, self._beside, secret)

    def find(self, keys: pa.Array, beside: Column | None = None) -> NDArray[np.int64]:
        """By key: return the newest row that has it, or -1."""
        found = np.full(len(keys), -1, dtype=np.int64)
        if len(self) and len(keys):
            offsets, data = _parts(keys)
            _find(
                self._data, self._offsets, self._beside, self._rows, self._tags, _SECRET[0], _SECRET[1],
                data, offsets, _numbers_beside(beside, len(keys)), found,
            )  # fmt: skip
        return found


class KeyPlaces:
    """The index of a file's rows by key, as stored in the file. `read` returns byte ranges of it, each given by start
    and end, in their order."""

    def __init__(self, rows: int, read: Callable[[Sequence[tuple[int, int]]], Sequence[bytes]]) -> None:
        self.rows = rows
        self._read = read
        blocks = -(-rows // BLOCK_ROWS)
        self._blocks_at = _SECRET_BYTES + 8 * blocks
        (head,) = read([(0, self._blocks_at)])
        self._secret = head[:_SECRET_BYTES]
        self._firsts = np.frombuffer(head, "<u8", offset=_SECRET_BYTES)

    def find(self, index: KeyIndex) -> NDArray[np.int64]:
        """Return the numbers of the file's rows, dead ones included, whose keys an index has, in ascending order."""
        if not self.rows or not len(index):
            return np.zeros(0, dtype=np.int64)
        wanted = index.hashes(self._secret)
        wanted = wanted[np.argsort(wanted[:, 0])]
        hashes, places = self._entries(self._blocks_of(wanted[:, 0]))
        low, high = (np.searchsorted(hashes, wanted[:, 0], side) for side in ("left", "right"))
        counts = high - low
        # One item for each pair of a wanted hash and an entry with that hash: nearly always exactly one.
        entries = np.repeat(low - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts) + np.arange(counts.sum())
        bits = _row_bits(self.rows)
        found = places[entries]
        rows = found & np.uint32((1 << int(bits)) - 1)
        is_same = (found >> bits == _tags(np.repeat(wanted[:, 1], counts), bits)) & (rows < self.rows)
        return np.unique(rows[is_same]).astype(np.int64)

    def _blocks_of(self, wanted: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the numbers of the blocks that may have some hashes."""
        # A hash at the start of a block may also be at the end of the block before.
        first = np.maximum(np.searchsorted(self._firsts, wanted, "left") - 1, 0)
        last = np.searchsorted(self._firsts, wanted, "right") - 1
        steps = np.zeros(len(self._firsts) + 1, dtype=np.int64)
        np.add.at(steps, first, 1)
        np.add.at(steps, np.maximum(last, first) + 1, -1)
        return np.flatnonzero(np.cumsum(steps)[:-1])

    def _entries(self, blocks: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Return the hashes and places of at least these blocks, ordered by hash."""
        if _PLACES_SHARE * len(blocks) >= len(self._firsts):
            blocks = np.arange(len(self._firsts))
        # Read neighbours together.
        firsts = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
        lasts = np.append(firsts[1:], len(blocks)) - 1
        starts, ends = (self._blocks_at + _BLOCK_BYTES * it for it in (blocks[firsts], blocks[lasts] + 1))
        read = self._read([*zip(starts.tolist(), ends.tolist(), strict=True)])
        data = np.frombuffer(b"".join(read), np.uint8).reshape(-1, _BLOCK_BYTES)
        hashes, places = np.split(data, [8 * BLOCK_ROWS], axis=1)
        return hashes.copy().view("<u8").ravel(), places.copy().view("<u4").ravel()


def packed_places(hashes: Hashes, secret: bytes) -> bytes:
    """Encode an index for `KeyPlaces` from the hashes of a file's rows, in row order, made with the secret."""
    order, bits = np.argsort(hashes[:, 0], kind="stable"), _row_bits(len(hashes))
    blocks = -(-len(hashes) // BLOCK_ROWS)
    firsts = np.full((blocks, BLOCK_ROWS), -1).astype("<u8")
    firsts.ravel()[: len(order)] = hashes[order, 0]
    places = np.full((blocks, BLOCK_ROWS), -1).astype("<u4")
    places.ravel()[: len(order)] = (_tags(hashes[order, 1], bits) << bits) | order.astype(np.uint32)
    entries = np.hstack([firsts.view(np.uint8), places.view(np.uint8)])
    return b"".join([secret, firsts[:, 0].tobytes(), entries.tobytes()])


def _row_bits(rows: int) -> np.uint32:
    """Return how many bits a row's number needs in a file of `rows` rows."""
    assert rows <= 1 << 31, "a place has 32 bits"
    return np.uint32(max(1, (rows - 1).bit_length()))


def _tags(seconds: NDArray[np.uint64], row_bits: np.uint32) -> NDArray[np.uint32]:
    """Return the bits that places store of the second halves of hashes."""
    return (seconds >> np.uint64(32 + int(row_bits))).astype(np.uint32)


def new_secret() -> bytes:
    return secrets.token_bytes(_SECRET_BYTES)


def key_hashes(keys: pa.Array, beside: Column, secret: bytes) -> Hashes:
    """Return the hashes of keys, with a secret of 16 bytes."""
    return _hashed(*_parts(keys), _numbers_beside(beside, len(keys)), secret)


def _hashed(offsets: NDArray[np.int64], data: Bytes, beside: NDArray[np.int64], secret: bytes) -> Hashes:
    hashes = np.empty((len(beside), 2), dtype=np.uint64)
    secret0, secret1 = np.frombuffer(secret, "<u8").astype(np.uint64)
    _hash_keys(data, offsets, beside, secret0, secret1, hashes)
    return hashes


# --- keys -------------------------------------------------------------------------------------------------------------


def raw_keys_of(rows: pa.Table) -> pa.Array:
    return raw_keys(rows.column("key"), rows.column("key_bytes")).combine_chunks()


def key_spaces(vbuckets: Column, ids: Column) -> NDArray[np.int64]:
    """Return a number for each pair of collection and vbucket, within which a key is one document.

    A key's hash determines its vbucket, but servers do not force clients to follow this.
    """
    spaces: NDArray[np.int64] = ids.astype(np.int64) << 16 | vbuckets
    return spaces


def _parts(keys: pa.Array) -> tuple[NDArray[np.int64], Bytes]:
    """Return the offsets and the bytes of an array of binaries without nulls."""
    assert keys.null_count == 0, "every document has a key"
    keys = keys.cast(pa.large_binary())
    _, offsets, data = keys.buffers()
    if len(keys) == 0:
        return _NO_OFFSETS, _NO_BYTES
    ends = read_only(np.frombuffer(offsets, np.int64))[keys.offset : keys.offset + len(keys) + 1]
    return ends, _NO_BYTES if data is None else read_only(np.frombuffer(data, np.uint8))


def _numbers_beside(beside: Column | None, rows: int) -> NDArray[np.int64]:
    return np.zeros(rows, dtype=np.int64) if beside is None else np.array(beside, dtype=np.int64)


# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel_part
def _hash_both(data: Bytes, start: int, end: int, beside: int, secret0: int, secret1: int) -> tuple[int, int]:
    state = sip_word(sip_start(secret0, secret1), u64(beside))
    return sip_end(sip_bytes(state, data, start, end - start))


@kernel_part
def _hash(data: Bytes, start: int, end: int, beside: int, secret0: int, secret1: int) -> int:
    hashed: int = _hash_both(data, start, end, beside, secret0, secret1)[0]
    return hashed


@kernel_part
def _are_equal(data: Bytes, start: int, end: int, other: Bytes, other_start: int, other_end: int) -> bool:
    if end - start != other_end - other_start:
        return False
    at = 0
    while at < end - start and data[start + at] == other[other_start + at]:
        at += 1
    return at == end - start


@kernel_part
def _place_in_filter(data: Bytes, start: int, end: int, places: int) -> int:
    """Return a number below `places`, a power of two, from the first and last bytes of a key and its length."""
    first, last = u64(end - start), u64(0)
    if end - start >= 8:
        first, last = first ^ load_u64(data, start), load_u64(data, end - 8)
    else:
        for at in range(start, end):
            last = (last << u64(8)) | u64(data[at])
    mixed = (first * u64(0x9E3779B97F4A7C15)) ^ (last * u64(0xC2B2AE3D27D4EB4F))
    mixed = (mixed ^ (mixed >> u64(29))) * u64(0x9E3779B97F4A7C15)
    place: int = i64((mixed >> u64(32)) & u64(places - 1))
    return place


@kernel
def _hash_keys(
    data: ReadOnlyBytes, offsets: ReadOnlyInt64s, beside: Int64s, secret0: UInt64, secret1: UInt64, hashes: UInt64Rows
) -> None:
    for row in range(len(beside)):
        first, second = _hash_both(data, offsets[row], offsets[row + 1], beside[row], secret0, secret1)
        hashes[row, 0] = first
        hashes[row, 1] = second


@kernel
def _add_to_filter(data: ReadOnlyBytes, offsets: ReadOnlyInt64s, places: Bools) -> None:
    for row in range(len(offsets) - 1):
        places[_place_in_filter(data, offsets[row], offsets[row + 1], len(places))] = True


@kernel
def _look_in_filter(data: ReadOnlyBytes, offsets: ReadOnlyInt64s, places: Bools, marks: Bools) -> None:
    for row in range(len(marks)):
        marks[row] = places[_place_in_filter(data, offsets[row], offsets[row + 1], len(places))]


@kernel
def _insert(
    data: ReadOnlyBytes, offsets: ReadOnlyInt64s, beside: Int64s, seqnos: Int64s, rows: Int64s, tags: UInt32s,
    secret0: UInt64, secret1: UInt64, newest: Bools, documents: Int64s,
) -> None:  # fmt: skip
    mask = u64(len(rows) - 1)
    for row in range(len(newest)):
        start, end = offsets[row], offsets[row + 1]
        hashed = _hash(data, start, end, beside[row], secret0, secret1)
        tag = u32(hashed >> u64(32))
        slot = i64(hashed & mask)
        newest[row] = True
        documents[row] = row
        while rows[slot] >= 0:
            other = rows[slot]
            if (
                tags[slot] == tag
                and beside[other] == beside[row]
                and _are_equal(data, start, end, data, offsets[other], offsets[other + 1])
            ):
                documents[row] = documents[other]
                is_newer = seqnos[row] >= seqnos[other]
                newest[other if is_newer else row] = False
                if is_newer:
                    rows[slot] = row
                break
            slot = i64(u64(slot + 1) & mask)
        if rows[slot] < 0:
            rows[slot] = row
            tags[slot] = tag


@kernel
def _find(
    data: ReadOnlyBytes, offsets: ReadOnlyInt64s, beside: Int64s, rows: Int64s, tags: UInt32s, secret0: UInt64,
    secret1: UInt64, wanted: ReadOnlyBytes, wanted_offsets: ReadOnlyInt64s, wanted_beside: Int64s, found: Int64s,
) -> None:  # fmt: skip
    mask = u64(len(rows) - 1)
    for i in range(len(found)):
        start, end = wanted_offsets[i], wanted_offsets[i + 1]
        hashed = _hash(wanted, start, end, wanted_beside[i], secret0, secret1)
        tag = u32(hashed >> u64(32))
        slot = i64(hashed & mask)
        while rows[slot] >= 0:
            other = rows[slot]
            if (
                tags[slot] == tag
                and beside[other] == wanted_beside[i]
                and _are_equal(wanted, start, end, data, offsets[other], offsets[other + 1])
            ):
                found[i] = other
                break
            slot = i64(u64(slot + 1) & mask)
