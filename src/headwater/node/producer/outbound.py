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

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from headwater.node.producer.output import Output
from headwater.protocol.kernels.collection_prefix import collection_id, prefix_bytes
from headwater.protocol.kernels.memory import (
    Bytes,
    Column,
    copy_bytes,
    i64,
    kernel,
    load_u16,
    load_u32,
    load_u64,
    prefetch,
    store_u16,
    store_u32,
    store_u64,
    u8,
    u16,
    u32,
    u64,
)
from headwater.protocol.kernels.snappy import HASH_BITS, compress_value, compressed_bytes_max

_FRAME_GROWTH_BYTES = 4
"""A stream id in flexible framing, and the last byte of a deletion that was stored as an expiration."""
NO_SUPERSEDED: Column = np.empty(0, dtype=np.uint64)
_ALL_COLLECTIONS: Column = np.empty(0, dtype=np.uint32)
_NO_TABLE: Column = np.empty(0, dtype=np.int64)
_PREFETCH_BYTES = 2048
"""How far ahead memory is asked for where frames are skipped."""
_PREFETCHED_FRAME_BYTES_MAX = 1024
_LINE_BYTES = 64

_STRIP_PREFIX = 0x01
_INCLUDE_XATTRS = 0x02
_INCLUDE_DELETED_USER_XATTRS = 0x04
_INCLUDE_DELETE_TIMES = 0x08
_EXPIRY_OPCODE = 0x10
_COMPRESS = 0x20
_SYNC_WRITES = 0x40
_VALUES_SHIFT = 8


class Values(IntEnum):
    """What becomes of the values."""

    KEEP = 0
    DROP = 1
    DROP_BUT_KEEP_DATATYPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a consumer wants of each change: the same for all streams of a connection that ask for the same."""

    strip_prefix: bool = False
    values: Values = Values.KEEP
    include_xattrs: bool = True
    include_deleted_user_xattrs: bool = True
    """Attributes of removed documents that are not the system's."""
    include_delete_times: bool = True
    expiry_opcode: bool = True
    compress: bool = False
    """Values that get smaller by it are sent as snappy."""
    sync_writes: bool = False
    """The consumer takes part in durable writes: it gets prepares, commits and aborts as such."""
    bits: int = field(init=False, repr=False, compare=False)
    """The same as one number, for the kernel."""

    def __post_init__(self) -> None:
        bits = int(self.values) << _VALUES_SHIFT
        for is_set, bit in (
            (self.strip_prefix, _STRIP_PREFIX),
            (self.include_xattrs, _INCLUDE_XATTRS),
            (self.include_deleted_user_xattrs, _INCLUDE_DELETED_USER_XATTRS),
            (self.include_delete_times, _INCLUDE_DELETE_TIMES),
            (self.expiry_opcode, _EXPIRY_OPCODE),
            (self.compress, _COMPRESS),
            (self.sync_writes, _SYNC_WRITES),
        ):
            bits |= bit if is_set else 0
        object.__setattr__(self, "bits", bits)


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
        frame_bytes = 24 + int.from_bytes(run[sent.at + 8 : sent.at + 12])
        output.make_room(compressed_bytes_max(frame_bytes) + _FRAME_GROWTH_BYTES)
    return sent


@kernel
def _is_in(sorted_values: Column, value: int) -> bool:
    position = np.searchsorted(sorted_values, value)
    return bool(position < len(sorted_values) and sorted_values[position] == value)


@kernel
def _system_xattr_bytes(run: Bytes, at: int, end: int) -> int:
    """The length of the pairs whose names start with an underscore."""
    size = i64(0)
    while at + 4 < end:
        pair_bytes = 4 + i64(load_u32(run, at))
        if run[at + 4] == 0x5F and at + pair_bytes <= end:
            size += pair_bytes
        at += pair_bytes
    return size


@kernel
def _copy_system_xattrs(target: Bytes, to: int, run: Bytes, at: int, end: int, system_bytes: int) -> int:
    """Write a section of these pairs alone, none where there are none. Returns where it ends."""
    if system_bytes == 0:
        return to
    store_u32(target, to, u32(system_bytes))
    to += 4
    at += 4
    while at + 4 < end:
        pair_bytes = 4 + i64(load_u32(run, at))
        if run[at + 4] == 0x5F and at + pair_bytes <= end:
            copy_bytes(target, to, run, at, pair_bytes)
            to += pair_bytes
        at += pair_bytes
    return to


@kernel
def _shape(
    run: Bytes, at: int, target: Bytes, to: int, until: int, end_seqno: int, superseded: Column, opaque: int,
    sid: int, filtered: bool, wanted: Column, bits: int, table: Column, history_start: int,
) -> tuple[int, int, int, int, int, int, int]:  # fmt: skip
    strip_prefix = bits & _STRIP_PREFIX != 0
    include_xattrs = bits & _INCLUDE_XATTRS != 0
    include_deleted_user_xattrs = bits & _INCLUDE_DELETED_USER_XATTRS != 0
    include_delete_times = bits & _INCLUDE_DELETE_TIMES != 0
    expiry_opcode = bits & _EXPIRY_OPCODE != 0
    compress = bits & _COMPRESS != 0
    sync_writes = bits & _SYNC_WRITES != 0
    values = bits >> _VALUES_SHIFT
    mutations_stay = sid == 0 and not strip_prefix and values == 0 and not compress and not sync_writes
    changing_datatypes = u8(0) if include_xattrs else u8(0x04)
    at = i64(at)
    to = i64(to)
    frames = i64(0)
    last_seqno = u64(0)
    passed_seqno = u64(0)
    prepares = i64(0)
    last_collection = u64(2**32)  # None has this id.
    is_wanted = False
    while at < len(run):
        seqno = load_u64(run, at + 24)
        if seqno > u64(end_seqno):
            return 0, at, to, frames, last_seqno, passed_seqno, prepares
        if to >= until:
            return 1, at, to, frames, last_seqno, passed_seqno, prepares
        end = at + 24 + i64(load_u32(run, at + 8))
        opcode = run[at + 1]
        if opcode == 0x5F:
            return 2, at, to, frames, last_seqno, passed_seqno, prepares
        extras_bytes = i64(run[at + 4])
        key_bytes = i64(load_u16(run, at + 2))
        key_at = at + 24 + extras_bytes
        value_at = key_at + key_bytes
        is_sent = True
        if filtered:
            # Documents of one collection tend to come together.
            collection = collection_id(run, key_at)
            if collection != last_collection:
                last_collection = collection
                is_wanted = _is_in(wanted, u32(collection))
            is_sent = is_wanted
        if not sync_writes and (opcode == 0x60 or opcode == 0x63):
            is_sent = False
        distance = u64(load_u32(run, at + 12))
        # A commit ends a prepare that the consumer holds, whatever came of the document later. Where the prepare may
        # have been compacted away, the consumer has not got it, and gets the whole change.
        is_commit = sync_writes and distance != 0 and seqno > u64(history_start)
        if is_sent and not is_commit and len(superseded) and _is_in(superseded, seqno):
            is_sent = False
        if not is_sent:
            passed_seqno = seqno
            # Small frames that are skipped come faster than memory does, and the processor does not see the pattern.
            if end - at <= _PREFETCHED_FRAME_BYTES_MAX:
                line_at = at + _PREFETCH_BYTES
                while line_at < end + _PREFETCH_BYTES:
                    prefetch(run, line_at)
                    line_at += _LINE_BYTES
            at = end
            continue
        sent_bytes_max = end - at + _FRAME_GROWTH_BYTES
        if compress:
            sent_bytes_max += 32 + (end - at) // 6  # As `compressed_bytes_max` says.
        if to + sent_bytes_max > len(target):
            return 3, at, to, frames, last_seqno, passed_seqno, prepares
        passed_seqno = seqno
        datatype = run[at + 5]
        if mutations_stay and opcode == 0x57 and not datatype & changing_datatypes:
            copy_bytes(target, to, run, at, end - at)
            store_u32(target, to + 12, u32(opaque))
            to += end - at
            frames += 1
            last_seqno = seqno
            at = end
            continue

        # What is left of the value.
        value_bytes = end - value_at
        xattr_bytes = i64(0)
        if datatype & 0x04 and value_bytes >= 4:
            xattr_bytes = min(value_bytes, 4 + i64(load_u32(run, value_at)))
        kept_at = value_at
        kept_end = end
        kept_datatype = datatype
        if not include_xattrs and datatype & 0x04:
            kept_at = value_at + xattr_bytes
            kept_datatype &= u8(0xFB)
        if values != 0:
            kept_end = value_at + xattr_bytes if include_xattrs else kept_at
            if values == 1:
                kept_datatype &= u8(0x04)
        if is_commit:
            kept_at = kept_end
            kept_datatype = u8(0)
        kept_bytes = kept_end - kept_at
        system_bytes = i64(-1)
        is_removal = not is_commit and (opcode == 0x58 or opcode == 0x59)
        if is_removal and include_xattrs and not include_deleted_user_xattrs and xattr_bytes > 4:
            system_bytes = _system_xattr_bytes(run, value_at + 4, value_at + xattr_bytes)
            kept_bytes += system_bytes - (xattr_bytes - 4)
            if system_bytes == 0:
                kept_bytes -= 4
                kept_datatype &= u8(0xFB)
        if values == 2 and not is_commit:
            kept_datatype = datatype

        # The extras: all of a mutation's or prepare's; of a removal's as much as the consumer wants.
        sent_opcode = opcode
        sent_extras_bytes = extras_bytes
        if is_commit:
            sent_opcode = u8(0x62)
            sent_extras_bytes = i64(16)
        if is_removal:
            if opcode == 0x59 and not expiry_opcode:
                sent_opcode = u8(0x58)
            if sent_opcode == 0x59:
                sent_extras_bytes = i64(20)
            else:
                sent_extras_bytes = i64(21) if include_delete_times else i64(18)

        skip = prefix_bytes(run, key_at, value_at) if strip_prefix else i64(0)
        framing_bytes = i64(3) if sid != 0 else i64(0)
        frame_at = to
        target[to] = 0x08 if sid != 0 else 0x80
        target[to + 1] = sent_opcode
        if sid != 0:
            target[to + 2] = 3
            target[to + 3] = key_bytes - skip
        else:
            store_u16(target, to + 2, u16(key_bytes - skip))
        target[to + 4] = sent_extras_bytes
        target[to + 5] = kept_datatype
        store_u16(target, to + 6, load_u16(run, at + 6))
        body_bytes = framing_bytes + sent_extras_bytes + key_bytes - skip + kept_bytes
        store_u32(target, to + 8, u32(body_bytes))
        store_u32(target, to + 12, u32(opaque))
        if is_commit:
            store_u64(target, to + 16, u64(0))
        else:
            copy_bytes(target, to + 16, run, at + 16, 8)
        to += 24
        if sid != 0:
            target[to] = 0x22
            store_u16(target, to + 1, u16(sid))
            to += 3
        if is_commit or opcode == 0x63:
            # The prepare's seqno, then its own.
            store_u64(target, to, seqno - distance if is_commit else load_u64(run, at + 32))
            store_u64(target, to + 8, seqno)
        elif not is_removal:
            copy_bytes(target, to, run, at + 24, extras_bytes)
            prepares += opcode == 0x60
        else:
            copy_bytes(target, to, run, at + 24, 16)
            if sent_extras_bytes == 18:
                store_u16(target, to + 16, u16(0))
            else:
                copy_bytes(target, to + 16, run, at + 40, 4)
                if sent_extras_bytes == 21:
                    target[to + 20] = 0
        to += sent_extras_bytes
        copy_bytes(target, to, run, key_at + skip, key_bytes - skip)
        to += key_bytes - skip
        if system_bytes >= 0:
            to = _copy_system_xattrs(target, to, run, value_at, value_at + xattr_bytes, system_bytes)
            copy_bytes(target, to, run, value_at + xattr_bytes, kept_end - value_at - xattr_bytes)
            to += kept_end - value_at - xattr_bytes
        elif compress and kept_bytes > 0 and not kept_datatype & 0x02:
            packed_end = compress_value(run, kept_at, kept_end, target, to, table)
            if packed_end - to < kept_bytes:
                target[frame_at + 5] = kept_datatype | u8(0x02)
                store_u32(target, frame_at + 8, u32(body_bytes - kept_bytes + packed_end - to))
                to = packed_end
            else:
                copy_bytes(target, to, run, kept_at, kept_bytes)
                to += kept_bytes
        else:
            copy_bytes(target, to, run, kept_at, kept_bytes)
            to += kept_bytes
        frames += 1
        last_seqno = seqno
        at = end
    return 0, at, to, frames, last_seqno, passed_seqno, prepares
