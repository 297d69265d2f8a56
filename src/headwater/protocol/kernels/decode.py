"""The decode kernels: received frames to Arrow columns.

`decode_changes` takes one buffer. Mutations, deletions and expirations become rows. Frames with any other opcode stay
in the buffer and are reported with the row that follows them, so that the caller can handle snapshot markers, stream
ends and the like with the typed codec, in order. An incomplete frame is left over. `decode_runs`, which the client
calls, makes one batch of changes in many buffers. (Joining the runs first would copy every byte once more, which takes
a third of the time of decoding them.)

A kernel walks over the bytes once to check every length and to count, and once to copy. The first walk reads only the
headers and costs a fraction of the second; in return the columns have exactly the size they need, and the copying has
nothing left to check. (Guessing the size instead made results four times too large: pages that are never written are
not free if the system allocates huge ones.)

It makes no Python object per item and raises nothing: at a fault it stops and reports where, and the typed codec,
which is its oracle, raises the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from headwater.errors import LocalProtocolError, TruncatedFrame, UnexpectedMessage
from headwater.kernels.memory import (
    Bytes,
    Column,
    Int32s,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    ReadOnlyInt32s,
    UInt16s,
    UInt32s,
    UInt64s,
    bytes_at,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    load_u16,
    load_u32,
    load_u64,
    read_only,
    u16,
    u32,
)
from headwater.protocol.features import NOTHING_NEGOTIATED, WITH_COLLECTIONS
from headwater.protocol.frames import HEADER_BYTES, Frame, decode_frame
from headwater.protocol.kernels.frame_runs import (
    DELETION,
    DELETION_EXTRAS_BYTES,
    EXPIRATION_EXTRAS_BYTES,
    FLEXIBLE_REQUEST,
    MUTATION,
    MUTATION_EXTRAS_BYTES,
    REQUEST,
    SNAPPY,
    STREAM_ID_BYTES,
    STREAM_ID_KIND,
    TIMED_DELETION_EXTRAS_BYTES,
    collection_id,
    is_document_change,
    is_magic,
    prefix_bytes,
    stated_lengths,
)
from headwater.protocol.messages import decode_message
from headwater.protocol.numbers import FRAME_BODY_BYTES_MAX, KEY_BYTES_MAX

CHANGES_SCHEMA = pa.schema(
    [
        pa.field("vbucket", pa.uint16(), nullable=False),
        pa.field("opaque", pa.uint32(), nullable=False),
        pa.field("stream_id", pa.uint16(), nullable=False),
        pa.field("opcode", pa.uint8(), nullable=False),
        pa.field("datatype", pa.uint8(), nullable=False),
        pa.field("seqno", pa.uint64(), nullable=False),
        pa.field("rev_seqno", pa.uint64(), nullable=False),
        pa.field("cas", pa.uint64(), nullable=False),
        pa.field("flags", pa.uint32(), nullable=False),
        pa.field("expiry", pa.uint32(), nullable=False),
        pa.field("delete_time", pa.uint32(), nullable=False),
        pa.field("collection_id", pa.uint32(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
    ]
)
"""What a message does not have is 0: the stream id without flexible framing, the flags and expiry of a removal, the
delete time of a mutation or of a removal without one, the collection id if collections were not negotiated."""

BUFFER_BYTES_MAX = 2**31 - 1
"""Arrow's binary columns count in 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherFrame:
    """A frame that is no change: its place in the buffer, and the row that follows it."""

    start: int
    end: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedChanges:
    """The content of a buffer."""

    batch: pa.RecordBatch
    others: tuple[OtherFrame, ...]
    consumed_bytes: int
    """Where the incomplete frame starts; the length of the buffer if there is none."""
    compressed_rows: int
    """How many values have the SNAPPY bit and are still compressed (`decompress_values`)."""


def decode_changes(
    data: bytes | bytearray | memoryview | Bytes,
    *,
    collections: bool,
    body_bytes_max: int = FRAME_BODY_BYTES_MAX,
) -> DecodedChanges:
    """Decode all complete frames of a buffer."""
    buffer = read_only(np.frombuffer(data, dtype=np.uint8))
    if len(buffer) > BUFFER_BYTES_MAX:
        raise LocalProtocolError(f"a buffer of {len(buffer)} bytes exceeds {BUFFER_BYTES_MAX}")
    measured = _measure(buffer, collections, body_bytes_max)
    rows, other_count, key_bytes, value_bytes, compressed, consumed, faulty = measured
    if faulty:
        _raise_fault(buffer.data, consumed, collections=collections, body_bytes_max=body_bytes_max)
    columns = _Columns(rows, key_bytes, value_bytes)
    others = np.empty((other_count, 2), dtype=np.int64)
    _extract(buffer, consumed, collections, others, *columns.arrays)
    return DecodedChanges(
        batch=columns.to_batch(rows),
        others=_others(buffer, others),
        consumed_bytes=consumed,
        compressed_rows=compressed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedRuns:
    batch: pa.RecordBatch
    """The changes, with the schema of `decode_changes`."""
    rows: Column
    """The number of changes in each run."""


def decode_runs(runs: Sequence[bytes | memoryview], *, collections: bool) -> DecodedRuns:
    """Decode runs of whole frames that are all changes."""
    # The buffers keep the bytes alive while the kernels work with addresses only.
    buffers = [pa.py_buffer(run) for run in runs]
    addresses = np.array([buffer.address for buffer in buffers], dtype=np.int64)
    lengths = np.array([buffer.size for buffer in buffers], dtype=np.int64)
    if lengths.sum() > BUFFER_BYTES_MAX:
        raise LocalProtocolError(
            f"runs of {lengths.sum()} bytes exceed {BUFFER_BYTES_MAX}", hint="Decode fewer of them at a time"
        )
    counts = np.empty((len(runs), 3), dtype=np.int64)
    bad_run = _measure_runs(addresses, lengths, collections, FRAME_BODY_BYTES_MAX, counts)
    if bad_run >= 0:
        _raise_fault_of_run(runs[bad_run], collections=collections)
    rows, key_bytes, value_bytes = counts.sum(axis=0).tolist()
    columns = _Columns(rows, key_bytes, value_bytes)
    _extract_runs(addresses, lengths, collections, counts, *columns.arrays)
    return DecodedRuns(batch=columns.to_batch(rows), rows=counts[:, 0].copy())


def binary_column(column: pa.Array) -> tuple[ReadOnlyBytes, ReadOnlyInt32s]:
    """Return the bytes of a binary or text column, and where each of its rows begins; the last offset is the end."""
    _, offsets, data = column.buffers()
    starts = np.frombuffer(offsets, dtype=np.int32)[column.offset : column.offset + len(column) + 1]
    return read_only(np.frombuffer(data if data is not None else b"", dtype=np.uint8)), read_only(starts)


class _Columns:
    """Room for the rows, in one block of Arrow's own pool, which reuses freed blocks while they are in the cache."""

    def __init__(self, rows: int, key_bytes: int, value_bytes: int) -> None:
        lengths = [rows * width for width in _FIXED_WIDTHS]
        lengths += [(rows + 1) * _OFFSET.itemsize, key_bytes, (rows + 1) * _OFFSET.itemsize, value_bytes]
        starts = np.cumsum([0, *(_aligned(length) for length in lengths)]).tolist()
        self._block = pa.allocate_buffer(starts[-1])
        block = np.frombuffer(self._block, dtype=np.uint8)
        self._spans = list(zip(starts, lengths, strict=False))
        self.arrays = [
            block[start : start + length].view(dtype)
            for (start, length), dtype in zip(self._spans, (*_FIXED_DTYPES, *_BINARY_DTYPES), strict=True)
        ]

    def to_batch(self, rows: int) -> pa.RecordBatch:
        buffers = [self._block.slice(start, length) for start, length in self._spans]
        columns = [
            pa.Array.from_buffers(type_, rows, [None, buffer])
            for type_, buffer in zip(_FIXED_TYPES, buffers, strict=False)
        ]
        key_offsets, keys, value_offsets, values = buffers[len(_FIXED_TYPES) :]
        columns.append(pa.Array.from_buffers(pa.binary(), rows, [None, key_offsets, keys]))
        columns.append(pa.Array.from_buffers(pa.binary(), rows, [None, value_offsets, values]))
        return pa.RecordBatch.from_arrays(columns, schema=CHANGES_SCHEMA)


_ALIGNMENT_BYTES = 64  # what Arrow recommends
_OFFSET = np.dtype(np.int32)
_FIXED_TYPES = [field.type for field in CHANGES_SCHEMA if field.type != pa.binary()]
# Integers have the same names in Arrow. (`to_pandas_dtype` of older versions asks for pandas.)
_FIXED_DTYPES = [np.dtype(str(type_)) for type_ in _FIXED_TYPES]
_FIXED_WIDTHS = [dtype.itemsize for dtype in _FIXED_DTYPES]
_BINARY_DTYPES = 2 * (_OFFSET, np.dtype(np.uint8))


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _others(buffer: Bytes, rows: Column) -> tuple[OtherFrame, ...]:
    return tuple(
        OtherFrame(start=start, end=start + HEADER_BYTES + int.from_bytes(buffer[start + 8 : start + 12]), row=row)
        for start, row in rows.tolist()
    )


def other_message_frame(data: bytes | memoryview, other: OtherFrame) -> Frame:
    """Return the frame of an `OtherFrame`, for the typed codec."""
    decoded = decode_frame(data[other.start : other.end])
    assert decoded is not None, "the kernel reports complete frames only"
    return decoded[0]


def _raise_fault(data: memoryview, offset: int, *, collections: bool, body_bytes_max: int) -> None:
    """Let the typed codec raise the error for the fault that the kernel found at `offset`."""
    decoded = decode_frame(data, offset, body_bytes_max=body_bytes_max)
    if decoded is not None:
        decode_message(decoded[0], WITH_COLLECTIONS if collections else NOTHING_NEGOTIATED)
    raise AssertionError(f"the kernel refuses the frame at byte {offset}, the typed codec takes it")


def _raise_fault_of_run(run: bytes | memoryview, *, collections: bool) -> None:
    """Raise the error for what is wrong with a run."""
    decoded = decode_changes(run, collections=collections)
    if decoded.others:
        # Such as a change whose framing extras hold more than the id of its stream.
        raise UnexpectedMessage("a frame among changes that is none", offset=decoded.others[0].start)
    raise TruncatedFrame("a run of changes ends inside a frame", offset=decoded.consumed_bytes)


# --- kernels --------------------------------------------------------------------------------------------------------


@kernel_part
def _is_change(data: Bytes, at: int, framing_bytes: int) -> bool:
    """Whether a frame is a change. Producers send only a stream id as framing; the typed codec handles any other."""
    if not is_document_change(data[at + 1]):
        return False
    if framing_bytes == 0:
        return bool(data[at] == REQUEST or data[at] == FLEXIBLE_REQUEST)
    is_stream_id = framing_bytes == STREAM_ID_BYTES and data[at + HEADER_BYTES] == STREAM_ID_KIND
    return bool(data[at] == FLEXIBLE_REQUEST and is_stream_id)


@kernel_part
def _extras_fit(opcode: int, extras_bytes: int) -> bool:
    if opcode == MUTATION:
        return bool(extras_bytes == MUTATION_EXTRAS_BYTES)
    with_time = TIMED_DELETION_EXTRAS_BYTES if opcode == DELETION else EXPIRATION_EXTRAS_BYTES
    return bool(extras_bytes == DELETION_EXTRAS_BYTES or extras_bytes == with_time)


@kernel
def _measure(data: ReadOnlyBytes, collections: bool, body_bytes_max: int) -> tuple[int, int, int, int, int, int, bool]:
    """Check every frame and count. Stops at a fault, which the last value reports, or at an incomplete frame."""
    end = len(data)
    at = i64(0)
    rows = 0
    others = 0
    compressed = 0
    keys_bytes = i64(0)
    values_bytes = i64(0)
    while at < end:
        if not is_magic(data[at]):
            return rows, others, keys_bytes, values_bytes, compressed, at, True
        if end - at < HEADER_BYTES:
            break
        framing_bytes, extras_bytes, key_bytes, body_bytes = stated_lengths(data, at)
        if body_bytes > body_bytes_max or framing_bytes + extras_bytes + key_bytes > body_bytes:
            return rows, others, keys_bytes, values_bytes, compressed, at, True
        frame_end = at + HEADER_BYTES + body_bytes
        if frame_end > end:
            break
        if not _is_change(data, at, framing_bytes):
            others += 1
            at = frame_end
            continue
        key_at = at + HEADER_BYTES + framing_bytes + extras_bytes
        value_at = key_at + key_bytes
        if collections:
            prefix = prefix_bytes(data, key_at, value_at)
            key_bytes = key_bytes - prefix if prefix > 0 else i64(-1)
        if not _extras_fit(data[at + 1], extras_bytes) or key_bytes < 1 or key_bytes > KEY_BYTES_MAX:
            return rows, others, keys_bytes, values_bytes, compressed, at, True
        rows += 1
        keys_bytes += key_bytes
        values_bytes += frame_end - value_at
        if data[at + 5] & SNAPPY:
            compressed += 1
        at = frame_end
    return rows, others, keys_bytes, values_bytes, compressed, at, False


@kernel
def _extract(
    data: ReadOnlyBytes, end: int, collections: bool, others: Int64Rows, vbuckets: UInt16s, opaques: UInt32s,
    stream_ids: UInt16s, opcodes: Bytes, datatypes: Bytes, seqnos: UInt64s, rev_seqnos: UInt64s, cas: UInt64s,
    flags: UInt32s, expiries: UInt32s, delete_times: UInt32s, collection_ids: UInt32s, key_offsets: Int32s,
    keys: Bytes, value_offsets: Int32s, values: Bytes,
) -> None:  # fmt: skip
    """Copy what was measured and found sound, up to `end`."""
    at = i64(0)
    row = 0
    other = 0
    key_end = i64(0)
    value_end = i64(0)
    key_offsets[0] = 0
    value_offsets[0] = 0
    while at < end:
        framing_bytes, extras_bytes, key_bytes, body_bytes = stated_lengths(data, at)
        frame_end = at + HEADER_BYTES + body_bytes
        if not _is_change(data, at, framing_bytes):
            others[other, 0] = at
            others[other, 1] = row
            other += 1
            at = frame_end
            continue
        extras_at = at + HEADER_BYTES + framing_bytes
        key_at = extras_at + extras_bytes
        value_at = key_at + key_bytes
        opcode = data[at + 1]
        vbuckets[row] = load_u16(data, at + 6)
        opaques[row] = load_u32(data, at + 12)
        stream_ids[row] = load_u16(data, at + HEADER_BYTES + 1) if framing_bytes else u16(0)
        opcodes[row] = opcode
        datatypes[row] = data[at + 5]
        seqnos[row] = load_u64(data, extras_at)
        rev_seqnos[row] = load_u64(data, extras_at + 8)
        cas[row] = load_u64(data, at + 16)
        is_mutation = opcode == MUTATION
        flags[row] = load_u32(data, extras_at + 16) if is_mutation else u32(0)
        expiries[row] = load_u32(data, extras_at + 20) if is_mutation else u32(0)
        has_time = not is_mutation and extras_bytes > DELETION_EXTRAS_BYTES
        delete_times[row] = load_u32(data, extras_at + 16) if has_time else u32(0)
        collection_ids[row] = 0
        if collections:
            collection_ids[row] = collection_id(data, key_at)
            key_at += prefix_bytes(data, key_at, value_at)
        copy_bytes(keys, key_end, data, key_at, value_at - key_at)
        copy_bytes(values, value_end, data, value_at, frame_end - value_at)
        key_end += value_at - key_at
        value_end += frame_end - value_at
        row += 1
        key_offsets[row] = key_end
        value_offsets[row] = value_end
        at = frame_end


@kernel
def _measure_runs(addresses: Int64s, lengths: Int64s, collections: bool, body_bytes_max: int, counts: Int64Rows) -> int:
    """Check every frame, and count the rows of each run and the bytes of their keys and values.

    Returns the first run that is not changes from its first byte to its last, or -1.
    """
    for run in range(len(addresses)):
        data = bytes_at(addresses[run], lengths[run])
        rows, others, key_bytes, value_bytes, _, consumed, faulty = _measure(data, collections, body_bytes_max)
        if faulty or others > 0 or consumed != lengths[run]:
            return run
        counts[run, 0] = rows
        counts[run, 1] = key_bytes
        counts[run, 2] = value_bytes
    return -1


@kernel
def _extract_runs(
    addresses: Int64s, lengths: Int64s, collections: bool, counts: Int64Rows, vbuckets: UInt16s, opaques: UInt32s,
    stream_ids: UInt16s, opcodes: Bytes, datatypes: Bytes, seqnos: UInt64s, rev_seqnos: UInt64s, cas: UInt64s,
    flags: UInt32s, expiries: UInt32s, delete_times: UInt32s, collection_ids: UInt32s, key_offsets: Int32s,
    keys: Bytes, value_offsets: Int32s, values: Bytes,
) -> None:  # fmt: skip
    """Copy what was measured and found sound, run after run."""
    no_others = counts[:0]
    row = i64(0)
    key_at = i64(0)
    value_at = i64(0)
    key_offsets[0] = 0
    value_offsets[0] = 0
    for run in range(len(addresses)):
        data = bytes_at(addresses[run], lengths[run])
        _extract(
            data, lengths[run], collections, no_others,
            vbuckets[row:], opaques[row:], stream_ids[row:], opcodes[row:], datatypes[row:], seqnos[row:],
            rev_seqnos[row:], cas[row:], flags[row:], expiries[row:], delete_times[row:], collection_ids[row:],
            key_offsets[row:], keys[key_at:], value_offsets[row:], values[value_at:],
        )  # fmt: skip
        end = row + counts[run, 0]
        for i in range(row, end + 1):
            key_offsets[i] += key_at
            value_offsets[i] += value_at
        row = end
        key_at += counts[run, 1]
        value_at += counts[run, 2]
