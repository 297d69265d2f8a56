"""The outbound kernel: stored frames to the frames of one stream.

What is stored is what a collection-aware consumer with xattrs, delete times and the expiry opcode gets. Every stream
has its own opaque; beyond that each consumer may have asked for less: other collections left out, the prefix gone, no
values, no extended attributes, deletions without their time, expirations as deletions, a stream id in flexible framing.
Prepares, commits and aborts are for replicas that take part in durable writes; all others get the change that was
committed, which is what is stored (`store.prepares`).

The kernel walks a run and writes what this stream gets of it, until the consumer's window is full. Most consumers want
mutations as they are stored: those are copied whole.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from headwater.node.producer.outbound_frame import FRAME_GROWTH_BYTES, write_frame
from headwater.node.producer.output import Output
from headwater.node.producer.shape import (
    COMPRESS,
    INCLUDE_XATTRS,
    STRIP_PREFIX,
    SYNC_WRITES,
    VALUES_SHIFT,
    Shape,
    Values,
)
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.kernels.collection_prefix import collection_id
from headwater.protocol.kernels.frame_header import MUTATION, PREPARE, SYSTEM_EVENT, XATTR, is_document_change
from headwater.protocol.kernels.memory import (
    Bytes,
    Column,
    borrowed,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    load_u8,
    load_u32,
    load_u64,
    prefetch,
    store_u32,
    u8,
    u32,
    u64,
)
from headwater.protocol.kernels.snappy import HASH_BITS, compressed_bytes_max

NO_SUPERSEDED: Column = np.empty(0, dtype=np.uint64)
_ALL_COLLECTIONS: Column = np.empty(0, dtype=np.uint32)
_NO_TABLE: Column = np.empty(0, dtype=np.int64)
_NO_COLLECTION = 2**32
"""Ids are smaller."""
_PREFETCH_BYTES = 2048
"""How far ahead memory is asked for where frames are skipped."""
_PREFETCHED_FRAME_BYTES_MAX = 1024
_LINE_BYTES = 64

_KEEP = int(Values.KEEP)


class Stop(IntEnum):
    """Why the kernel stopped."""

    END = 0
    """The run is at its end, or the snapshot is."""
    WINDOW = 1
    """The window is full."""
    EVENT = 2
    """The next frame is a system event, which is not the kernel's business."""
    ROOM = 3
    """The output had no room for the next frame. Now it has."""


class Sent(NamedTuple):
    """What the kernel has done."""

    stop: int
    at: int
    """Where in the run it stopped."""
    to: int
    """Where in the output it stopped."""
    frames: int
    last_seqno: int
    """The last change that was sent, 0 for none."""
    passed_seqno: int
    """The last change that was looked at, sent or not; 0 for none."""
    prepares: int
    """How many of the frames are prepares."""


_END, _WINDOW, _EVENT, _ROOM = (int(stop) for stop in Stop)


def shape_run(
    run: Bytes,
    at: int,
    output: Output,
    shape: Shape,
    *,
    opaque: int,
    end_seqno: int,
    until: int,
    stream_id: int = 0,
    wanted: Column | None = None,
    superseded: Column = NO_SUPERSEDED,
    history_start_seqno: int = 0,
) -> Sent:
    """Write the changes of a run from `at` on, up to `end_seqno`, until that much of the output is used.

    It may be overdrawn by one frame. `wanted` are the ids of the collections to send, ascending, None for all.
    `superseded` are the seqnos, ascending, that are left out because a newer version of the same key comes later in the
    snapshot. Prepares of commits up to `history_start_seqno` may be gone.
    """
    table = np.zeros(1 << HASH_BITS, dtype=np.int64) if shape.compress else _NO_TABLE
    ids = _ALL_COLLECTIONS if wanted is None else wanted
    done = _shape(
        run, at, output.memory, output.used, until, end_seqno, superseded, opaque, stream_id, wanted is not None, ids,
        shape.bits, table, history_start_seqno,
    )  # fmt: skip
    sent = Sent._make(done)
    output.used = sent.to
    if sent.stop == Stop.ROOM:
        frame_bytes = HEADER_BYTES + int.from_bytes(run[sent.at + 8 : sent.at + 12])
        output.make_room(compressed_bytes_max(frame_bytes) + FRAME_GROWTH_BYTES)
    return sent


@kernel
def _is_in(sorted_values: Column, value: int) -> bool:
    position = np.searchsorted(sorted_values, value)
    return bool(position < len(sorted_values) and sorted_values[position] == value)


@kernel
def _shape(
    run: Bytes, at: int, target: Bytes, to: int, until: int, end_seqno: int, superseded: Column, opaque: int,
    sid: int, filtered: bool, wanted: Column, bits: int, table: Column, history_start: int,
) -> tuple[int, int, int, int, int, int, int]:  # fmt: skip
    """Walk the run from `at` on and write to `target` from `to` on. Returns a `Sent`."""
    # `write_frame` and the others get these once a frame.
    run = borrowed(run)
    target = borrowed(target)
    superseded = borrowed(superseded)
    wanted = borrowed(wanted)
    table = borrowed(table)
    sync_writes = bits & SYNC_WRITES != 0
    mutations_stay = _mutations_stay(bits, sid)
    changing_datatypes = u8(0) if bits & INCLUDE_XATTRS else u8(XATTR)
    at = i64(at)
    to = i64(to)
    frames = i64(0)
    prepares = i64(0)
    last_seqno = u64(0)
    passed_seqno = u64(0)
    last_collection = u64(_NO_COLLECTION)
    is_wanted = False
    stop = _END
    while at < len(run):
        seqno = load_u64(run, at + HEADER_BYTES)
        if seqno > u64(end_seqno):
            break
        if to >= until:
            stop = _WINDOW
            break
        opcode = load_u8(run, at + 1)
        if opcode == SYSTEM_EVENT:
            stop = _EVENT
            break
        end = at + HEADER_BYTES + i64(load_u32(run, at + 8))
        is_sent = True
        if filtered:
            # Documents of one collection tend to come together.
            collection = collection_id(run, at + HEADER_BYTES + i64(load_u8(run, at + 4)))
            if collection != last_collection:
                last_collection = collection
                is_wanted = _is_in(wanted, u32(collection))
            is_sent = is_wanted
        if not sync_writes and not is_document_change(opcode):
            is_sent = False
        # A commit ends a prepare that the consumer holds, whatever came of the document later. Where the prepare may
        # have been compacted away, the consumer has not got it, and gets the whole change.
        is_commit = sync_writes and load_u32(run, at + 12) != 0 and seqno > u64(history_start)
        if is_sent and not is_commit and len(superseded) and _is_in(superseded, seqno):
            is_sent = False
        if not is_sent:
            passed_seqno = seqno
            _prefetch_behind(run, at, end)
            at = end
            continue
        if to + _sent_bytes_max(end - at, bits) > len(target):
            stop = _ROOM
            break
        if mutations_stay and opcode == MUTATION and not load_u8(run, at + 5) & changing_datatypes:
            copy_bytes(target, to, run, at, end - at)
            store_u32(target, to + 12, u32(opaque))
            to += end - at
        else:
            sent_at = to
            to = write_frame(run, at, end, is_commit, target, sent_at, bits, opaque, sid, table)
            prepares += target[sent_at + 1] == PREPARE
        frames += 1
        last_seqno = seqno
        passed_seqno = seqno
        at = end
    return stop, at, to, frames, last_seqno, passed_seqno, prepares


@kernel_part
def _mutations_stay(bits: int, sid: int) -> bool:
    """Whether mutations are sent as they are stored, unless their datatype says otherwise."""
    return bool(sid == 0 and not bits & (STRIP_PREFIX | COMPRESS | SYNC_WRITES) and bits >> VALUES_SHIFT == _KEEP)


@kernel_part
def _sent_bytes_max(stored_bytes: int, bits: int) -> int:
    sent_bytes_max = stored_bytes + FRAME_GROWTH_BYTES
    if bits & COMPRESS:
        sent_bytes_max += 32 + stored_bytes // 6  # As `compressed_bytes_max` says.
    return sent_bytes_max


@kernel_part
def _prefetch_behind(run: Bytes, at: int, end: int) -> None:
    """Small frames that are skipped come faster than memory does, and the processor does not see the pattern."""
    if end - at <= _PREFETCHED_FRAME_BYTES_MAX:
        line_at = at + _PREFETCH_BYTES
        while line_at < end + _PREFETCH_BYTES:
            prefetch(run, line_at)
            line_at += _LINE_BYTES
