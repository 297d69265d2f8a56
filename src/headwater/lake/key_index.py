"""Rows by their key: which row of many is the newest of its document, and which rows have a key among those.

A hash table over the rows, made for one merge and then dropped. Two rows are of one document where the bytes of their
keys are equal and the numbers beside them, which say where the key is; so the hash only has to be good, not unique.
"""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from headwater.protocol.kernels.memory import (
    Bools,
    Bytes,
    Column,
    Int64s,
    ReadOnlyBytes,
    ReadOnlyInt64s,
    UInt32s,
    UInt64,
    i64,
    kernel,
    kernel_part,
    u32,
    u64,
)
from headwater.protocol.kernels.siphash import sip_bytes, sip_end, sip_start, sip_word

_SECRET: Any = (np.uint64(secrets.randbits(64)), np.uint64(secrets.randbits(64)))
_NO_BYTES = np.frombuffer(b"", dtype=np.uint8)
_NO_OFFSETS = np.frombuffer(bytes(8), dtype=np.int64)
"""Not to be written, as what is made of Arrow's buffers: numba compiles a kernel anew for arrays that are."""
Marks = NDArray[np.bool_]


class KeyIndex:
    """The rows of a merge by their key."""

    def __init__(self, keys: pa.Array, seqnos: Column, beside: Column | None = None) -> None:
        self._offsets, self._data = _parts(keys)
        self._beside = _numbers_beside(beside, len(keys))
        capacity = 1 << max(4, (2 * len(keys)).bit_length())
        self._rows = np.full(capacity, -1, dtype=np.int64)
        self._tags = np.zeros(capacity, dtype=np.uint32)
        self.newest: Marks = np.zeros(len(keys), dtype=np.bool_)
        """By row: it has the highest seqno of its key. Of rows that have the same, the last."""
        self.documents: NDArray[np.int64] = np.zeros(len(keys), dtype=np.int64)
        """By row: the first row of its key."""
        _insert(
            self._data, self._offsets, self._beside, np.array(seqnos, dtype=np.int64), self._rows, self._tags,
            _SECRET[0], _SECRET[1], self.newest, self.documents,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.newest)

    def find(self, keys: pa.Array, beside: Column | None = None) -> NDArray[np.int64]:
        """By key: the newest row that has it, or -1."""
        found = np.full(len(keys), -1, dtype=np.int64)
        if len(self) and len(keys):
            offsets, data = _parts(keys)
            _find(
                self._data, self._offsets, self._beside, self._rows, self._tags, _SECRET[0], _SECRET[1],
                data, offsets, _numbers_beside(beside, len(keys)), found,
            )  # fmt: skip
        return found


def document_places(vbuckets: Column, ids: Column) -> NDArray[np.int64]:
    """One number for a collection in a vbucket: there a key is one document.

    A key has one vbucket by its hash, but no server holds a client to that.
    """
    places: NDArray[np.int64] = ids.astype(np.int64) << 16 | vbuckets
    return places


def _parts(keys: pa.Array) -> tuple[NDArray[np.int64], Bytes]:
    """The offsets and the bytes of an array of binaries without nulls."""
    assert keys.null_count == 0, "every document has a key"
    keys = keys.cast(pa.large_binary())
    _, offsets, data = keys.buffers()
    if len(keys) == 0:
        return _NO_OFFSETS, _NO_BYTES
    places = _read_only(offsets, np.int64)[keys.offset : keys.offset + len(keys) + 1]
    return places, _NO_BYTES if data is None else _read_only(data, np.uint8)


def _read_only(buffer: pa.Buffer, dtype: type[np.generic]) -> Column:
    return np.frombuffer(memoryview(buffer).toreadonly(), dtype=dtype)


def _numbers_beside(beside: Column | None, rows: int) -> NDArray[np.int64]:
    return np.zeros(rows, dtype=np.int64) if beside is None else np.array(beside, dtype=np.int64)


# --- kernels ----------------------------------------------------------------------------------------------------------


@kernel_part
def _hash(data: Bytes, start: int, end: int, beside: int, secret0: int, secret1: int) -> int:
    state = sip_word(sip_start(secret0, secret1), u64(beside))
    return sip_end(sip_bytes(state, data, start, end - start))[0]


@kernel_part
def _are_equal(data: Bytes, start: int, end: int, other: Bytes, other_start: int, other_end: int) -> bool:
    if end - start != other_end - other_start:
        return False
    for i in range(end - start):
        if data[start + i] != other[other_start + i]:
            return False
    return True


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
