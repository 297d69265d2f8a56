"""Snappy kernels: inflate all compressed values of a decoded batch in one go, and compress single values.

The typed codec uses a library, one call per value; a batch of fifty thousand values can't afford fifty thousand calls.
The raw format is small: the inflated length, then literals and copies of what was already written. Every length and
offset is checked before it is used; the library reports the error for what the kernel refuses.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from headwater.errors import LocalProtocolError, MalformedSnappy
from headwater.kernels.memory import (
    Bytes,
    Column,
    Int64s,
    ReadOnlyBytes,
    ReadOnlyInt32s,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
)
from headwater.protocol.kernels.decode import binary_column
from headwater.protocol.numbers import VALUE_BYTES_MAX
from headwater.protocol.values import Datatype, decompress

_BATCH_BYTES_MAX = 2**31 - 1  # Arrow's binary columns count in 32 bits


def decompress_values(batch: pa.RecordBatch, *, value_bytes_max: int = VALUE_BYTES_MAX) -> pa.RecordBatch:
    """Return the batch with every SNAPPY value inflated and its SNAPPY bit cleared. The other rows stay as they are."""
    datatypes = batch.column("datatype").to_numpy()
    values = batch.column("value")
    data, offsets = binary_column(values)
    inflated_offsets = np.empty(len(values) + 1, dtype=np.int64)
    bad_row = _measure(datatypes, offsets, data, value_bytes_max, inflated_offsets)
    if bad_row >= 0:
        _raise_fault(values[bad_row].as_py(), value_bytes_max)
    if inflated_offsets[-1] > _BATCH_BYTES_MAX:
        raise LocalProtocolError(
            f"the batch inflates to {inflated_offsets[-1]} bytes", hint="Decode smaller buffers at a time"
        )
    inflated = np.empty(inflated_offsets[-1], dtype=np.uint8)
    bad_row = _inflate(datatypes, offsets, data, inflated_offsets, inflated)
    if bad_row >= 0:
        _raise_fault(values[bad_row].as_py(), value_bytes_max)
    new_values = pa.Array.from_buffers(
        pa.binary(),
        len(values),
        [None, pa.py_buffer(inflated_offsets.astype(np.int32)), pa.py_buffer(inflated)],
    )
    new_datatypes = pa.array(datatypes & ~np.uint8(Datatype.SNAPPY))
    schema = batch.schema
    return batch.set_column(schema.get_field_index("datatype"), schema.field("datatype"), new_datatypes).set_column(
        schema.get_field_index("value"), schema.field("value"), new_values
    )


def _raise_fault(value: bytes, value_bytes_max: int) -> None:
    decompress(value, bytes_max=value_bytes_max)
    raise MalformedSnappy("the value is not snappy: it refers to bytes outside itself")


@kernel
def _measure(
    datatypes: ReadOnlyBytes,
    offsets: ReadOnlyInt32s,
    data: ReadOnlyBytes,
    value_bytes_max: int,
    inflated_offsets: Int64s,
) -> int:
    """Compute where each inflated value will end. Returns the first row with an impossible length, or -1."""
    inflated_offsets[0] = 0
    for row in range(len(datatypes)):
        start = i64(offsets[row])
        end = i64(offsets[row + 1])
        length = end - start
        if datatypes[row] & 0x02:
            length, _ = stated_length(data, start, end)
            if length < 0 or length > value_bytes_max:
                return row
        inflated_offsets[row + 1] = inflated_offsets[row] + length
    return -1


@kernel_part
def stated_length(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the inflated length that a value begins with, and where the elements start; -1 if there is no length."""
    length = i64(0)
    shift = 0
    while at < end and shift <= 28:
        byte = i64(data[at])
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return length, at
        shift += 7
    return i64(-1), at


@kernel
def _inflate(
    datatypes: ReadOnlyBytes, offsets: ReadOnlyInt32s, data: ReadOnlyBytes, inflated_offsets: Int64s, inflated: Bytes
) -> int:
    """Inflate or copy each value to its offset. Returns the first row that is not snappy, or -1."""
    for row in range(len(datatypes)):
        start = i64(offsets[row])
        end = i64(offsets[row + 1])
        to = inflated_offsets[row]
        if datatypes[row] & 0x02:
            _, elements_at = stated_length(data, start, end)
            if not inflate_value(data, elements_at, end, inflated, to, inflated_offsets[row + 1]):
                return row
        else:
            copy_bytes(inflated, to, data, start, end - start)
    return -1


@kernel_part
def _element(data: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return for the element at `at` where what follows its tag starts, its length, and how far back it copies from.

    A literal, whose bytes follow the tag, has 0 for the last; an element that is cut off has -1 for its length.
    """
    tag = i64(data[at])
    at += 1
    kind = tag & 3
    extra = i64(1) if kind == 1 else (i64(2) if kind == 2 else i64(4))
    if kind == 0:  # The length of a literal is in the tag, or in one to four bytes after it.
        extra = max(i64(0), (tag >> 2) - 59)
    if at + extra > end:
        return at, i64(-1), i64(0)
    number = i64(0)
    for i in range(extra):
        number |= i64(data[at + i]) << (8 * i)
    at += extra
    if kind == 0:
        return at, (number if extra else tag >> 2) + 1, i64(0)
    if kind == 1:
        number |= (tag >> 5) << 8
        return at, ((tag >> 2) & 7) + 4, number if number else i64(-1)
    return at, (tag >> 2) + 1, number if number else i64(-1)


@kernel_part
def inflate_value(data: Bytes, at: int, end: int, inflated: Bytes, start: int, limit: int) -> bool:
    """Inflate the elements at `at` to exactly `inflated[start:limit]`. Returns False if that fails."""
    to = start
    while at < end:
        at, length, offset = _element(data, at, end)
        if length < 0 or length > limit - to:
            return False
        if offset == 0:
            if length > end - at:
                return False
            copy_bytes(inflated, to, data, at, length)
            at += length
        elif offset < 0 or offset > to - start:
            return False
        elif offset >= length:
            copy_bytes(inflated, to, inflated, to - offset, length)
        else:  # the copy reads what it has just written
            for i in range(length):
                inflated[to + i] = inflated[to + i - offset]
        to += length
    return bool(to == limit)


@kernel_part
def inflated_bytes(data: Bytes, at: int, end: int) -> int:
    """Return the length that a value inflates to; -1 if it has a fault."""
    limit, at = stated_length(data, at, end)
    to = i64(0)
    while at < end:
        at, length, offset = _element(data, at, end)
        if length < 0 or length > limit - to or offset < 0 or offset > to or (offset == 0 and length > end - at):
            return -1
        if offset == 0:
            at += length
        to += length
    return int(limit) if to == limit else -1


# --- compressing --------------------------------------------------------------------------------------------------

HASH_BITS = 12
"""The table of `compress_value` has `2 ** HASH_BITS` entries."""


def compressed_bytes_max(length: int) -> int:
    """Return the most bytes that a value of this length can take when it is compressed."""
    return 32 + length + length // 6


@kernel_part
def _load_four(data: Bytes, at: int) -> int:
    return i64(data[at]) | i64(data[at + 1]) << 8 | i64(data[at + 2]) << 16 | i64(data[at + 3]) << 24


@kernel_part
def compress_value(data: Bytes, start: int, end: int, target: Bytes, to: int, table: Column) -> int:
    """Compress `data[start:end]` to `target[to:]`, which has room for it, and return where that ends.

    `table` has, by their hash, where four bytes were last seen. It needs no clearing between values, because each
    entry is checked against the bytes.
    """
    length = end - start
    while length >= 0x80:
        target[to] = (length & 0x7F) | 0x80
        length >>= 7
        to += 1
    target[to] = length
    to += 1
    literal_at = start
    at = start
    while at + 4 <= end:
        four = _load_four(data, at)
        slot = ((four * 0x1E35A7BD) & 0xFFFFFFFF) >> (32 - HASH_BITS)
        candidate = table[slot]
        table[slot] = at
        if candidate < start or candidate >= at or at - candidate > 0xFFFF or _load_four(data, candidate) != four:
            at += 1
            continue
        to = _emit_literal(data, literal_at, at, target, to)
        matched = 4
        while at + matched < end and data[candidate + matched] == data[at + matched]:
            matched += 1
        to = _emit_copy(at - candidate, matched, target, to)
        at += matched
        literal_at = at
    return _emit_literal(data, literal_at, end, target, to)


@kernel_part
def _emit_literal(data: Bytes, start: int, end: int, target: Bytes, to: int) -> int:
    length = end - start
    if length == 0:
        return to
    if length <= 60:
        target[to] = (length - 1) << 2
        to += 1
    else:
        extra = 1 if length <= 0x100 else (2 if length <= 0x10000 else (3 if length <= 0x1000000 else 4))
        target[to] = (59 + extra) << 2
        for i in range(extra):
            target[to + 1 + i] = ((length - 1) >> (8 * i)) & 0xFF
        to += 1 + extra
    copy_bytes(target, to, data, start, length)
    return to + length


@kernel_part
def _emit_copy(offset: int, length: int, target: Bytes, to: int) -> int:
    while length > 0:
        # A copy holds 64 bytes; fewer than four left over could not be written in the shorter form.
        part = min(length, 64)
        target[to] = ((part - 1) << 2) | 2
        target[to + 1] = offset & 0xFF
        target[to + 2] = offset >> 8
        to += 3
        length -= part
    return to
