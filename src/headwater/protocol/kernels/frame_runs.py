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

from headwater.protocol.frames import decode_frame
from headwater.protocol.kernels.memory import Bytes, Column, copy_bytes, i64, kernel, load_u16, load_u32, load_u64, u64
from headwater.protocol.limits import FRAME_BODY_BYTES_MAX

SORTED_BELOW_ROWS = 8
"""A buffer whose runs are shorter than this on average is sorted by stream."""


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
    table = _fill_runs(buffer, consumed, count)
    if not keeps_order and count > 1 and rows < count * SORTED_BELOW_ROWS:
        buffer, table = _sort_by_stream(buffer, table, consumed)
    return FrameRuns(buffer, [FrameRun(*row) for row in table.tolist()], consumed)


def _sort_by_stream(buffer: Bytes, table: Column, consumed: int) -> tuple[Bytes, Column]:
    opaques = table[:, 2]
    if np.all(opaques[1:] >= opaques[:-1]):
        return buffer, table
    order = np.argsort(opaques, kind="stable")
    gathered = np.empty(consumed, dtype=np.uint8)
    _gather(buffer, table, order, gathered)
    count, _, _, _ = _count_runs(gathered, consumed)
    return gathered, _fill_runs(gathered, consumed, count)


@kernel
def _is_magic(byte: int) -> bool:
    return byte == 0x80 or byte == 0x81 or byte == 0x08 or byte == 0x18 or byte == 0x82 or byte == 0x83


@kernel
def _framing_bytes(data: Bytes, at: int) -> int:
    return i64(data[at + 2]) if data[at] == 0x08 or data[at] == 0x18 else i64(0)


@kernel
def _is_change(data: Bytes, at: int) -> bool:
    """Mutations, deletions and expirations start their extras with the seqno. One with too little is left alone."""
    opcode = data[at + 1]
    return (data[at] == 0x80 or data[at] == 0x08) and opcode >= 0x57 and opcode <= 0x59 and data[at + 4] >= 8


@kernel
def _count_runs(data: Bytes, body_bytes_max: int) -> tuple[int, int, int, bool]:
    """How many runs and changes there are, where the last whole frame ends, and whether a fault stopped the walk."""
    end = len(data)
    at = i64(0)
    runs = 0
    rows = 0
    run_opaque = i64(-1)
    while at < end:
        if not _is_magic(data[at]):
            return runs, rows, at, True
        if end - at < 24:
            break
        body_bytes = i64(load_u32(data, at + 8))
        is_flexible = data[at] == 0x08 or data[at] == 0x18
        key_bytes = i64(data[at + 3]) if is_flexible else i64(load_u16(data, at + 2))
        if body_bytes > body_bytes_max or _framing_bytes(data, at) + i64(data[at + 4]) + key_bytes > body_bytes:
            return runs, rows, at, True
        if at + 24 + body_bytes > end:
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
        at += 24 + body_bytes
    return runs, rows, at, False


@kernel
def _fill_runs(data: Bytes, end: int, count: int) -> Column:
    """What `_count_runs` has found sound, as rows of `FrameRun`."""
    table = np.zeros((count, 7), dtype=np.uint64)
    at = i64(0)
    run = i64(-1)
    run_opaque = i64(-1)
    while at < end:
        frame_end = at + 24 + i64(load_u32(data, at + 8))
        opaque = i64(load_u32(data, at + 12))
        change = _is_change(data, at)
        if not change or opaque != run_opaque:
            run += 1
            table[run, 0] = u64(at)
            table[run, 2] = u64(opaque)
            table[run, 6] = u64(1)
        table[run, 1] = u64(frame_end)
        run_opaque = opaque if change else i64(-1)
        if change:
            seqno = load_u64(data, at + 24 + _framing_bytes(data, at))
            if table[run, 3] == u64(0):
                table[run, 4] = seqno
            elif seqno <= table[run, 5]:
                table[run, 6] = u64(0)
            table[run, 3] += u64(1)
            table[run, 5] = seqno
        at = frame_end
    return table


@kernel
def _gather(data: Bytes, table: Column, order: Column, gathered: Bytes) -> None:
    at = i64(0)
    for run in order:
        start = i64(table[run, 0])
        run_bytes = i64(table[run, 1]) - start
        copy_bytes(gathered, at, data, start, run_bytes)
        at += run_bytes
