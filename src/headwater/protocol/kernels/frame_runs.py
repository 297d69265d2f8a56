"""Runs: a received buffer cut into stretches of changes that belong to one stream, and single frames between them.

A consumer needs no change by itself until it wants columns: to follow its streams it needs to know whose bytes are
whose, how far the seqnos go, and where markers and stream ends stand between them. So one walk over the headers cuts
the buffer into runs, and only the runs are handled in Python.

A producer may send its streams in turns, one change each; then runs would be as many as changes. Such a buffer is
sorted by stream first. The order inside each stream stays, which is all the protocol promises, and the answer to a
stream request has the opaque of its stream, so it stays before the stream's first message.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headwater.protocol.frames import HEADER_BYTES, decode_frame
from headwater.protocol.kernels.frame_header import (
    FLEXIBLE_REQUEST,
    FLEXIBLE_RESPONSE,
    REQUEST,
    RESPONSE,
    is_document_change,
    is_magic,
    stated_lengths,
)
from headwater.protocol.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    Int64s,
    UInt64Rows,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    load_u16,
    load_u32,
    load_u64,
    store_u32,
    u8,
    u32,
    u64,
)
from headwater.protocol.numbers import FRAME_BODY_BYTES_MAX

SORTED_BELOW_ROWS = 8
"""A buffer whose runs are shorter than this on average is sorted by stream."""
_SEQNO_BYTES = 8


class FrameRun(NamedTuple):
    """Changes of one stream, or, where `rows` is 0, one frame of another kind."""

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
    """Where the frame starts that is not complete yet."""


def cut_runs(
    buffer: Bytes, *, body_bytes_max: int = FRAME_BODY_BYTES_MAX, keeps_order: bool = False
) -> FrameRuns:  # fmt: skip
    """Cut all complete frames of a buffer. Raises the documented error for bytes that are no frames.

    With `keeps_order` nothing is sorted: where requests come between the streams, their order means something.
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
    """Mutations, deletions and expirations start their extras with the seqno. One with too little is left alone."""
    is_request = data[at] == REQUEST or data[at] == FLEXIBLE_REQUEST
    return bool(is_request and is_document_change(data[at + 1]) and data[at + 4] >= _SEQNO_BYTES)


@kernel
def _count_runs(data: AnyBytes, body_bytes_max: int) -> tuple[int, int, int, bool]:
    """How many runs and changes there are, where the last whole frame ends, and whether a fault stopped the walk."""
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
    """What `_count_runs` has found sound, as rows of `FrameRun`, into a table of zeros."""
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
    """The same frames, every response with these framing extras. Other frames stay as they are.

    BinaryProtocol.md, "Response header with flexible framing extras": the two bytes of the key's length become one of
    each length, so a response whose key has more than 255 bytes stays as it is, too.
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
