"""One stored frame as a stream gets it. The kernels here write one part each: framing, extras, value, header.

The header comes last: by then it is known how long the parts have become, and what the value is.
"""

from __future__ import annotations

from headwater.node.producer.shape import (
    COMPRESS,
    EXPIRY_OPCODE,
    INCLUDE_DELETE_TIMES,
    INCLUDE_DELETED_USER_XATTRS,
    INCLUDE_XATTRS,
    STRIP_PREFIX,
    VALUES_SHIFT,
    Values,
)
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.kernels.collection_prefix import prefix_bytes
from headwater.protocol.kernels.frame_header import (
    ABORT,
    COMMIT,
    DELETION,
    DELETION_EXTRAS_BYTES,
    EXPIRATION,
    EXPIRATION_EXTRAS_BYTES,
    FLEXIBLE_REQUEST,
    RAW,
    REQUEST,
    SNAPPY,
    STREAM_ID_BYTES,
    STREAM_ID_KIND,
    TIMED_DELETION_EXTRAS_BYTES,
    XATTR,
)
from headwater.protocol.kernels.memory import (
    Bytes,
    Column,
    copy_bytes,
    i64,
    kernel_part,
    load_u16,
    load_u32,
    load_u64,
    store_u16,
    store_u32,
    store_u64,
    u16,
    u32,
    u64,
)
from headwater.protocol.kernels.snappy import compress_value

FRAME_GROWTH_BYTES = 4
"""A stream id in flexible framing, and the last byte of a deletion that was stored as an expiration."""

_KEEP = int(Values.KEEP)
_DROP_BUT_KEEP_DATATYPE = int(Values.DROP_BUT_KEEP_DATATYPE)
_TWO_SEQNOS_BYTES = 16
_SYSTEM_MARK = ord("_")
"""The names of the system's attributes start with it."""


@kernel_part
def write_frame(
    run: Bytes, at: int, end: int, is_commit: bool, target: Bytes, to: int, bits: int, opaque: int, sid: int,
    table: Column,
) -> int:  # fmt: skip
    """Write what a consumer gets of the change at `at`, a commit of it if so said. Returns where that ends."""
    key_at = at + HEADER_BYTES + i64(run[at + 4])
    value_at = key_at + i64(load_u16(run, at + 2))
    if bits & STRIP_PREFIX:
        key_at += prefix_bytes(run, key_at, value_at)
    key_bytes = value_at - key_at
    opcode = _sent_opcode(run[at + 1], is_commit, bits)

    extras_at = _write_framing(target, to + HEADER_BYTES, sid)
    extras_end = _write_extras(run, at, opcode, target, extras_at, bits)
    copy_bytes(target, extras_end, run, key_at, key_bytes)
    sent_end = extras_end + key_bytes
    datatype = RAW
    if not is_commit:
        sent_end, datatype = _write_value(run, at, value_at, end, target, sent_end, bits, table)

    target[to + 1] = opcode
    if sid != 0:
        target[to] = FLEXIBLE_REQUEST
        target[to + 2] = STREAM_ID_BYTES
        target[to + 3] = key_bytes
    else:
        target[to] = REQUEST
        store_u16(target, to + 2, u16(key_bytes))
    target[to + 4] = extras_end - extras_at
    target[to + 5] = datatype
    store_u16(target, to + 6, load_u16(run, at + 6))
    store_u32(target, to + 8, u32(sent_end - to - HEADER_BYTES))
    store_u32(target, to + 12, u32(opaque))
    store_u64(target, to + 16, u64(0) if is_commit else load_u64(run, at + 16))
    return sent_end


@kernel_part
def _sent_opcode(opcode: int, is_commit: bool, bits: int) -> int:
    if is_commit:
        return COMMIT
    return DELETION if opcode == EXPIRATION and not bits & EXPIRY_OPCODE else i64(opcode)


@kernel_part
def _write_framing(target: Bytes, to: int, sid: int) -> int:
    """The id of the stream, if it has one. Returns where it ends."""
    if sid == 0:
        return to
    target[to] = STREAM_ID_KIND
    store_u16(target, to + 1, u16(sid))
    return to + STREAM_ID_BYTES


@kernel_part
def _write_extras(run: Bytes, at: int, opcode: int, target: Bytes, to: int, bits: int) -> int:
    """All of a mutation's or prepare's; of a removal's as much as the consumer wants. Returns where they end."""
    stored_at = at + HEADER_BYTES
    if opcode in (COMMIT, ABORT):
        # The prepare's seqno, then its own. A stored commit tells in its opaque how far the prepare is behind.
        seqno = load_u64(run, stored_at)
        prepared = seqno - u64(load_u32(run, at + 12)) if opcode == COMMIT else load_u64(run, stored_at + 8)
        store_u64(target, to, prepared)
        store_u64(target, to + 8, seqno)
        return to + _TWO_SEQNOS_BYTES
    if opcode != DELETION and opcode != EXPIRATION:
        copy_bytes(target, to, run, stored_at, i64(run[at + 4]))
        return to + i64(run[at + 4])
    copy_bytes(target, to, run, stored_at, 16)
    if opcode == DELETION and not bits & INCLUDE_DELETE_TIMES:
        store_u16(target, to + 16, u16(0))
        return to + DELETION_EXTRAS_BYTES
    copy_bytes(target, to + 16, run, stored_at + 16, 4)
    if opcode == EXPIRATION:
        return to + EXPIRATION_EXTRAS_BYTES
    target[to + 20] = 0
    return to + TIMED_DELETION_EXTRAS_BYTES


@kernel_part
def _write_value(
    run: Bytes, at: int, value_at: int, end: int, target: Bytes, to: int, bits: int, table: Column
) -> tuple[int, int]:
    """What the consumer wants of attributes and body. Returns where it ends, and its datatype."""
    stored_datatype = i64(run[at + 5])
    body_at = value_at
    if stored_datatype & XATTR and end - value_at >= 4:
        body_at = min(end, value_at + 4 + i64(load_u32(run, value_at)))
    kept_end = end if bits >> VALUES_SHIFT == _KEEP else body_at

    keeps_xattrs = bits & INCLUDE_XATTRS != 0
    is_removal = run[at + 1] == DELETION or run[at + 1] == EXPIRATION
    if keeps_xattrs and is_removal and not bits & INCLUDE_DELETED_USER_XATTRS and body_at - value_at > 4:
        section_end = _copy_system_xattrs(run, value_at, body_at, target, to)
        copy_bytes(target, section_end, run, body_at, kept_end - body_at)
        return section_end + kept_end - body_at, _kept_datatype(stored_datatype, section_end > to, bits)

    datatype = _kept_datatype(stored_datatype, keeps_xattrs, bits)
    kept_at = value_at if keeps_xattrs else body_at
    kept_bytes = kept_end - kept_at
    if bits & COMPRESS and kept_bytes > 0 and not datatype & SNAPPY:
        packed_end = compress_value(run, kept_at, kept_end, target, to, table)
        if packed_end - to < kept_bytes:
            return packed_end, datatype | SNAPPY
    copy_bytes(target, to, run, kept_at, kept_bytes)
    return to + kept_bytes, datatype


@kernel_part
def _kept_datatype(stored: int, keeps_xattrs: bool, bits: int) -> int:
    values = bits >> VALUES_SHIFT
    if values == _DROP_BUT_KEEP_DATATYPE:
        return stored
    kept = stored if values == _KEEP else stored & XATTR
    return kept if keeps_xattrs else kept & ~XATTR


@kernel_part
def _copy_system_xattrs(run: Bytes, section_at: int, section_end: int, target: Bytes, to: int) -> int:
    """Write a section of the system's attributes alone, none where there are none. Returns where it ends."""
    pairs_at = to + 4
    pairs_end = pairs_at
    at = section_at + 4
    while at + 4 < section_end:
        pair_bytes = 4 + i64(load_u32(run, at))
        if run[at + 4] == _SYSTEM_MARK and at + pair_bytes <= section_end:
            copy_bytes(target, pairs_end, run, at, pair_bytes)
            pairs_end += pair_bytes
        at += pair_bytes
    if pairs_end == pairs_at:
        return to
    store_u32(target, to, u32(pairs_end - pairs_at))
    return pairs_end
