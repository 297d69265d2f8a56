"""The rewrite kernel: runs of stored frames to runs of frames for one stream.

What is stored is what is sent: frames in classic framing, keys with their collection id. A stream changes little of
it: its own opaque always; some get only certain collections; a consumer that knows no collections gets the default
one with the prefix gone; and a consumer may want no values.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from headwater.errors import LengthMismatch, MalformedMessage
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
    store_u16,
    store_u32,
    u16,
    u32,
    u64,
)


class Values(IntEnum):
    """What becomes of the values."""

    KEEP = 0
    DROP = 1
    DROP_BUT_KEEP_DATATYPE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewritten:
    """The frames to send."""

    data: Bytes
    frames: int
    last_seqno: int
    """The seqno of the last frame that stayed; 0 where none did."""


def rewrite_frames(
    run: bytes | bytearray | memoryview | Bytes,
    *,
    opaque: int,
    keep_collections: Collection[int] | None = None,
    strip_prefix: bool = False,
    values: Values = Values.KEEP,
) -> Rewritten:
    """Rewrite a run of whole frames.

    Frames that belong to no document (system events) always stay, unless the prefix is stripped: whoever knows no
    collections could not read them.
    """
    source = np.frombuffer(run, dtype=np.uint8)
    target = np.empty(len(source), dtype=np.uint8)
    keep = np.array(sorted(keep_collections or ()), dtype=np.uint32)
    length, frames, last_seqno, fault_at = _rewrite(
        source, target, u32(opaque), keep_collections is not None, keep, strip_prefix, int(values)
    )
    if fault_at >= 0:
        _raise_fault(source, fault_at)
    return Rewritten(data=target[:length], frames=frames, last_seqno=last_seqno)


def _raise_fault(source: Bytes, at: int) -> None:
    header = source[at : at + 24]
    if len(header) < 24 or at + 24 + int.from_bytes(header[8:12]) > len(source):
        raise LengthMismatch("the run ends inside a frame", offset=at)
    raise MalformedMessage("a stored frame is not what the store writes", offset=at)


@kernel
def _rewrite(
    source: Bytes, target: Bytes, opaque: int, filtered: bool, keep: Column, strip_prefix: bool, values: int
) -> tuple[int, int, int, int]:
    end = len(source)
    at = 0
    to = 0
    frames = 0
    last_seqno = u64(0)
    while at < end:
        if end - at < 24:
            return to, frames, last_seqno, at
        opcode = source[at + 1]
        key_bytes = i64(load_u16(source, at + 2))
        extras_bytes = i64(source[at + 4])
        body_bytes = i64(load_u32(source, at + 8))
        frame_end = at + 24 + body_bytes
        if frame_end > end or source[at] != 0x80 or extras_bytes < 8 or extras_bytes + key_bytes > body_bytes:
            return to, frames, last_seqno, at
        # Mutation, deletion, expiration, prepare, commit, abort: the frames of a document.
        of_document = (0x57 <= opcode <= 0x59) or opcode == 0x60 or opcode == 0x62 or opcode == 0x63
        key_at = at + 24 + extras_bytes
        value_at = key_at + key_bytes
        prefix = i64(0)
        if of_document and (filtered or strip_prefix):
            prefix = prefix_bytes(source, key_at, value_at)
            if prefix == 0:
                return to, frames, last_seqno, at
            if filtered and not _contains(keep, collection_id(source, key_at)):
                at = frame_end
                continue
        elif strip_prefix:
            at = frame_end
            continue

        strip_bytes = prefix if strip_prefix else i64(0)
        value_bytes = frame_end - value_at
        if values != 0 and of_document:
            value_bytes = 0
        if strip_bytes == 0 and value_bytes == frame_end - value_at:
            copy_bytes(target, to, source, at, frame_end - at)
        else:
            copy_bytes(target, to, source, at, 24 + extras_bytes)
            copy_bytes(target, to + 24 + extras_bytes, source, key_at + strip_bytes, key_bytes - strip_bytes)
            copy_bytes(target, to + 24 + extras_bytes + key_bytes - strip_bytes, source, value_at, value_bytes)
            store_u16(target, to + 2, u16(key_bytes - strip_bytes))
            store_u32(target, to + 8, u32(extras_bytes + key_bytes - strip_bytes + value_bytes))
        if values == 1 and of_document:
            target[to + 5] = 0
        store_u32(target, to + 12, opaque)
        # A commit and an abort say the seqno they were prepared at first, and their own after it.
        if opcode == 0x62 or opcode == 0x63:
            if extras_bytes != 16:
                return to, frames, last_seqno, at
            last_seqno = load_u64(source, at + 32)
        else:
            last_seqno = load_u64(source, at + 24)
        to += 24 + extras_bytes + key_bytes - strip_bytes + value_bytes
        frames += 1
        at = frame_end
    return to, frames, last_seqno, -1


@kernel
def _contains(keep: Column, collection: int) -> bool:
    """Binary search in the sorted ids."""
    low = 0
    high = len(keep)
    while low < high:
        middle = (low + high) // 2
        if keep[middle] < collection:
            low = middle + 1
        else:
            high = middle
    return bool(low < len(keep) and keep[low] == collection)
