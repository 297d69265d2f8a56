"""Runs: a received buffer cut into sequences of changes that belong to one stream, and single frames between them.

A consumer needs no single change until it makes columns: to follow its streams it needs to know which bytes belong to
which stream, how far the seqnos go, and where markers and stream ends are between them. So one walk over the headers
cuts the buffer into runs, and only the runs are handled in Python.

A producer may send its streams in turns, one change each; then there would be as many runs as changes. Such a buffer
is sorted by stream first. The order inside each stream stays, which is all that the protocol promises; the answer to a
stream request has the opaque of its stream, so it stays before the stream's first message.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    Int64s,
    UInt64Rows,
    copy_bytes,
    i64,
    inlined_part,
    kernel,
    kernel_part,
    load_u16,
    load_u32,
    load_u64,
    store_u16,
    store_u32,
    store_u64,
    u8,
    u16,
    u32,
    u64,
)
from headwater.protocol.features import Magic, Opcode
from headwater.protocol.frames import HEADER_BYTES, RequestInfo, decode_frame
from headwater.protocol.numbers import FRAME_BODY_BYTES_MAX
from headwater.protocol.values import Datatype

# --- frame headers -------------------------------------------------------------------------------------------------
#      0  magic
#      1  opcode
#      2  length of the key; in flexible framing one byte for the framing extras and one for the key
#      4  length of the extras
#      5  datatype
#      6  vbucket; the status of a response
#      8  length of the body, which is all that follows the header
#     12  opaque
#     16  CAS
#     24  framing extras, extras, key, value
#
# The extras of every change begin with its seqno and, except in aborts, its revision. Kernels compare bytes with plain
# numbers, so the members of the enumerations that they need are defined here as such.


REQUEST = int(Magic.REQUEST)
RESPONSE = int(Magic.RESPONSE)
FLEXIBLE_REQUEST = int(Magic.FLEXIBLE_REQUEST)
FLEXIBLE_RESPONSE = int(Magic.FLEXIBLE_RESPONSE)
SERVER_REQUEST = int(Magic.SERVER_REQUEST)
SERVER_RESPONSE = int(Magic.SERVER_RESPONSE)

GET = int(Opcode.GET)
GETQ = int(Opcode.GETQ)
GETK = int(Opcode.GETK)
GETKQ = int(Opcode.GETKQ)
SET = int(Opcode.SET)
SETQ = int(Opcode.SETQ)
SUBDOC_GET = int(Opcode.SUBDOC_GET)
SUBDOC_EXISTS = int(Opcode.SUBDOC_EXISTS)
SUBDOC_MULTI_LOOKUP = int(Opcode.SUBDOC_MULTI_LOOKUP)
MUTATION = int(Opcode.DCP_MUTATION)
DELETION = int(Opcode.DCP_DELETION)
EXPIRATION = int(Opcode.DCP_EXPIRATION)
SYSTEM_EVENT = int(Opcode.DCP_SYSTEM_EVENT)
PREPARE = int(Opcode.DCP_PREPARE)
COMMIT = int(Opcode.DCP_COMMIT)
ABORT = int(Opcode.DCP_ABORT)

RAW = int(Datatype.RAW)
JSON = int(Datatype.JSON)
SNAPPY = int(Datatype.SNAPPY)
XATTR = int(Datatype.XATTR)

MUTATION_EXTRAS_BYTES = 31
DELETION_EXTRAS_BYTES = 18
"""In a deletion without a time."""
TIMED_DELETION_EXTRAS_BYTES = 21
EXPIRATION_EXTRAS_BYTES = 20
PREPARE_EXTRAS_BYTES = 31
ABORT_EXTRAS_BYTES = 16
SYSTEM_EVENT_EXTRAS_BYTES = 13

STREAM_ID_BYTES = 3
"""The length of the frame info that names the stream of a change: a byte for kind and length, then the id."""
STREAM_ID_KIND = RequestInfo.STREAM_ID << 4 | 2


@kernel_part
def is_magic(byte: int) -> bool:
    return bool(
        byte == REQUEST or byte == RESPONSE or byte == FLEXIBLE_REQUEST or byte == FLEXIBLE_RESPONSE
        or byte == SERVER_REQUEST or byte == SERVER_RESPONSE
    )  # fmt: skip


@kernel_part
def is_document_change(opcode: int) -> bool:
    """Whether an opcode is a mutation, deletion or expiration, whose opcodes follow one another."""
    return bool(MUTATION <= opcode <= EXPIRATION)


@kernel_part
def stated_lengths(data: Bytes, at: int) -> tuple[int, int, int, int]:
    """Return the lengths of framing extras, extras, key and body that the header at `at` states."""
    extras_bytes = i64(data[at + 4])
    body_bytes = i64(load_u32(data, at + 8))
    if data[at] == FLEXIBLE_REQUEST or data[at] == FLEXIBLE_RESPONSE:
        return i64(data[at + 2]), extras_bytes, i64(data[at + 3]), body_bytes
    return i64(0), extras_bytes, i64(load_u16(data, at + 2)), body_bytes


# The collection id at the front of a key, for kernels: unsigned LEB128, which `frames` decodes for one key at a time.


@kernel_part
def prefix_bytes(data: Bytes, at: int, end: int) -> int:
    """Return the length of the collection id at `at`; 0 if it is cut off, overlong or beyond 32 bits."""
    for index in range(5):
        if at + index >= end:
            return 0
        byte = data[at + index]
        if byte < 0x80:
            overlong = byte == 0 and index > 0
            too_large = index == 4 and byte > 0x0F
            return 0 if overlong or too_large else index + 1
    return 0


@kernel_part
def collection_id(data: Bytes, at: int) -> int:
    """Return the collection id at `at`, which `prefix_bytes` has found sound."""
    value = u64(0)
    shift = u64(0)
    while data[at] >= 0x80:
        value |= u64(data[at] & 0x7F) << shift
        shift += u64(7)
        at += 1
    return value | (u64(data[at]) << shift)


SORTED_BELOW_ROWS = 8
"""A buffer whose runs are shorter than this on average is sorted by stream."""
_SEQNO_BYTES = 8


class FrameRun(NamedTuple):
    """Changes of one stream, or, if `rows` is 0, one frame of another kind."""

    start: int
    end: int
    opaque: int
    rows: int
    first_seqno: int
    last_seqno: int
    is_rising: int
    """Whether every seqno is higher than the one before."""


_WIDTH = len(FrameRun._fields)
_START, _END, _OPAQUE, _ROWS, _FIRST_SEQNO, _LAST_SEQNO, _IS_RISING = range(_WIDTH)
"""Columns of a table of runs."""


class FrameRuns(NamedTuple):
    data: Bytes
    """The buffer, or its frames sorted by stream."""
    runs: list[FrameRun]
    consumed_bytes: int
    """Where the incomplete frame starts."""


def cut_runs(
    buffer: Bytes, *, body_bytes_max: int = FRAME_BODY_BYTES_MAX, keeps_order: bool = False
) -> FrameRuns:  # fmt: skip
    """Cut all complete frames of a buffer. Raises the documented error for bytes that are no frames.

    With `keeps_order` nothing is sorted: if requests come between the streams, their order matters.
    """
    count, rows, consumed, faulty = _count_runs(buffer, body_bytes_max)
    if faulty:
        decode_frame(buffer.data, consumed, body_bytes_max=body_bytes_max)
        raise AssertionError(f"the kernel refuses the frame at byte {consumed}, the typed codec takes it")
    table = _runs_table(buffer, consumed, count)
    if not keeps_order and count > 1 and rows < count * SORTED_BELOW_ROWS:
        buffer, table = _sort_by_stream(buffer, table, consumed)
    return FrameRuns(buffer, [FrameRun(*row) for row in table.tolist()], consumed)


def _sort_by_stream(buffer: Bytes, table: Column, consumed: int) -> tuple[Bytes, Column]:
    opaques = table[:, _OPAQUE]
    if np.all(opaques[1:] >= opaques[:-1]):
        return buffer, table
    order = np.argsort(opaques, kind="stable")
    gathered = np.empty(consumed, dtype=np.uint8)
    _gather(buffer, table, order, gathered)
    count, _, _, _ = _count_runs(gathered, consumed)
    return gathered, _runs_table(gathered, consumed, count)


def _runs_table(buffer: Bytes, consumed: int, count: int) -> Column:
    table = np.zeros((count, _WIDTH), dtype=np.uint64)
    _fill_runs(buffer, consumed, table)
    return table


@kernel_part
def _is_change(data: Bytes, at: int) -> bool:
    """Whether a frame is a change, whose extras start with the seqno. One with shorter extras is left alone."""
    is_request = data[at] == REQUEST or data[at] == FLEXIBLE_REQUEST
    return bool(is_request and is_document_change(data[at + 1]) and data[at + 4] >= _SEQNO_BYTES)


@kernel
def _count_runs(data: AnyBytes, body_bytes_max: int) -> tuple[int, int, int, bool]:
    """Return how many runs and changes there are, where the last whole frame ends, and whether a fault ended this."""
    end = len(data)
    at = i64(0)
    runs = 0
    rows = 0
    run_opaque = i64(-1)
    while at < end:
        if not is_magic(data[at]):
            return runs, rows, at, True
        if end - at < HEADER_BYTES:
            break
        framing_bytes, extras_bytes, key_bytes, body_bytes = stated_lengths(data, at)
        if body_bytes > body_bytes_max or framing_bytes + extras_bytes + key_bytes > body_bytes:
            return runs, rows, at, True
        if at + HEADER_BYTES + body_bytes > end:
            break
        if _is_change(data, at):
            opaque = i64(load_u32(data, at + 12))
            rows += 1
            if opaque != run_opaque:
                runs += 1
            run_opaque = opaque
        else:
            runs += 1
            run_opaque = i64(-1)
        at += HEADER_BYTES + body_bytes
    return runs, rows, at, False


@kernel
def _fill_runs(data: AnyBytes, end: int, table: UInt64Rows) -> None:
    """Fill a table of zeros with what `_count_runs` has found sound, as rows of `FrameRun`."""
    at = i64(0)
    run = i64(-1)
    run_opaque = i64(-1)
    while at < end:
        framing_bytes, _, _, body_bytes = stated_lengths(data, at)
        frame_end = at + HEADER_BYTES + body_bytes
        opaque = i64(load_u32(data, at + 12))
        change = _is_change(data, at)
        if not change or opaque != run_opaque:
            run += 1
            table[run, _START] = u64(at)
            table[run, _OPAQUE] = u64(opaque)
            table[run, _IS_RISING] = u64(1)
        table[run, _END] = u64(frame_end)
        run_opaque = opaque if change else i64(-1)
        if change:
            seqno = load_u64(data, at + HEADER_BYTES + framing_bytes)
            if table[run, _ROWS] == u64(0):
                table[run, _FIRST_SEQNO] = seqno
            elif seqno <= table[run, _LAST_SEQNO]:
                table[run, _IS_RISING] = u64(0)
            table[run, _ROWS] += u64(1)
            table[run, _LAST_SEQNO] = seqno
        at = frame_end


@kernel
def _gather(data: AnyBytes, table: UInt64Rows, order: Int64s, gathered: Bytes) -> None:
    at = i64(0)
    for run in order:
        start = i64(table[run, _START])
        run_bytes = i64(table[run, _END]) - start
        copy_bytes(gathered, at, data, start, run_bytes)
        at += run_bytes


# --- what every response of a run carries ---------------------------------------------------------------------------


def with_framing_extras(frames: bytes, extras: bytes) -> bytes:
    """Return the same frames with these framing extras in every response. Other frames stay as they are.

    BinaryProtocol.md, "Response header with flexible framing extras": the two bytes of the key's length become one
    byte for each length, so a response whose key has more than 255 bytes stays as it is, too.
    """
    extended = np.empty(len(frames) + len(frames) // HEADER_BYTES * len(extras), dtype=np.uint8)
    used = _extend_responses(
        np.frombuffer(frames, dtype=np.uint8), np.frombuffer(extras, dtype=np.uint8), extended
    )  # fmt: skip
    return extended[:used].tobytes()


@kernel
def _extend_responses(data: AnyBytes, extras: AnyBytes, extended: Bytes) -> int:
    at = i64(0)
    to = i64(0)
    while at < len(data):
        body_bytes = i64(load_u32(data, at + 8))
        frame_end = at + HEADER_BYTES + body_bytes
        if data[at] != RESPONSE or load_u16(data, at + 2) > 0xFF:
            copy_bytes(extended, to, data, at, frame_end - at)
            to += frame_end - at
        else:
            copy_bytes(extended, to, data, at, HEADER_BYTES)
            extended[to] = FLEXIBLE_RESPONSE
            extended[to + 2] = u8(len(extras))
            store_u32(extended, to + 8, u32(body_bytes + len(extras)))
            copy_bytes(extended, to + HEADER_BYTES, extras, 0, len(extras))
            copy_bytes(extended, to + HEADER_BYTES + len(extras), data, at + HEADER_BYTES, body_bytes)
            to += HEADER_BYTES + len(extras) + body_bytes
        at = frame_end
    return to


@inlined_part
def write_response_header(
    data: Bytes, at: int, key_bytes: int, extras_bytes: int, datatype: int, status: int, body_bytes: int, cas: int,
    responses: Bytes, to: int,
) -> None:  # fmt: skip
    """Write the header of the response to the request at `at`."""
    responses[to] = RESPONSE
    responses[to + 1] = data[at + 1]
    store_u16(responses, to + 2, u16(key_bytes))
    responses[to + 4] = extras_bytes
    responses[to + 5] = datatype
    store_u16(responses, to + 6, u16(status))
    store_u32(responses, to + 8, u32(body_bytes))
    store_u32(responses, to + 12, load_u32(data, at + 12))
    store_u64(responses, to + 16, cas)
