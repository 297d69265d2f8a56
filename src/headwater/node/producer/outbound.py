"""The outbound kernel: stored frames to the frames of one stream.

Stored frames have the form that a collection-aware consumer with xattrs, delete times and the expiry opcode gets. Every
stream sets its own opaque, and each consumer may have asked for less: only some collections, no prefix, no values, no
extended attributes, deletions without their time, expirations as deletions, a stream id in flexible framing. Only
replicas that take part in durable writes get prepares, commits and aborts; all others get the committed change, which
is what is stored (`store.prepares`).

A stream calls `shape_run`. The kernel walks a run and writes what this stream gets of it, until the consumer's window
is full. Most consumers want mutations as they are stored: the kernel copies those whole.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    Int64s,
    UInt32s,
    UInt64s,
    borrowed,
    copy_bytes,
    i64,
    inlined_part,
    kernel,
    kernel_part,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    prefetch,
    store_u16,
    store_u32,
    store_u64,
    u16,
    u32,
    u64,
)
from headwater.node.producer.controls import (
    COMPRESS,
    COMPRESS_PREPARES,
    EXPIRY_OPCODE,
    INCLUDE_DELETE_TIMES,
    INCLUDE_DELETED_USER_XATTRS,
    INCLUDE_XATTRS,
    SKIP_REMOVALS,
    STRIP_PREFIX,
    SYNC_WRITES,
    TAKES_COMPRESSED,
    VALUES_SHIFT,
    Shape,
    Values,
)
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.kernels.frame_runs import (
    ABORT,
    COMMIT,
    DELETION,
    DELETION_EXTRAS_BYTES,
    EXPIRATION,
    EXPIRATION_EXTRAS_BYTES,
    FLEXIBLE_REQUEST,
    MUTATION,
    PREPARE,
    RAW,
    REQUEST,
    SNAPPY,
    STREAM_ID_BYTES,
    STREAM_ID_KIND,
    SYSTEM_EVENT,
    TIMED_DELETION_EXTRAS_BYTES,
    XATTR,
    collection_id,
    is_document_change,
    prefix_bytes,
)
from headwater.protocol.kernels.snappy import HASH_BITS, compress_value, inflate_value, stated_length
from headwater.store.scan import NO_SEQNOS

OUTPUT_BYTES = 1024 * 1024 + 64 * 1024
"""The size of a turn, plus the frame that may exceed it. A larger frame gets more memory for that turn."""
FRAME_GROWTH_BYTES = 4
"""A sent frame may be larger by a stream id, and by the last byte of a deletion that was stored as an expiration."""

_KEEP = int(Values.KEEP)
_DROP_BUT_KEEP_DATATYPE = int(Values.DROP_BUT_KEEP_DATATYPE)
_TWO_SEQNOS_BYTES = 16
_SYSTEM_MARK = ord("_")
"""The names of system attributes start with it."""
_ALL_COLLECTIONS: Column = np.empty(0, dtype=np.uint32)
_NO_TABLE: Column = np.empty(0, dtype=np.int64)
_NO_COLLECTION = 2**32
"""Higher than any collection id."""
_PREFETCH_BYTES = 2048
"""How far ahead memory is prefetched while frames are skipped."""
_PREFETCHED_FRAME_BYTES_MAX = 1024
_LINE_BYTES = 64


class Output:
    """The frames of one turn, in one buffer that all streams of a connection write to.

    Markers, changes and ends follow each other, so that a turn of a thousand streams is one write to the socket. The
    buffer is reused for the next turn, of any connection: it is warm, and nothing has to be allocated.
    """

    __slots__ = ("_view", "memory", "used")

    def __init__(self, size_bytes: int = OUTPUT_BYTES) -> None:
        self.memory: Bytes = np.empty(size_bytes, dtype=np.uint8)
        self._view = self.memory.data
        self.used = 0
        """The end of the frames. Kernels write behind it."""

    @property
    def data(self) -> memoryview:
        """The bytes to send. Valid until the buffer is reused."""
        return self._view[: self.used]

    def append(self, data: bytes) -> None:
        end = self.used + len(data)
        if end > len(self.memory):
            self.make_room(len(data))
        self._view[self.used : end] = data
        self.used = end

    def make_room(self, size_bytes: int) -> None:
        """Make room for this many more bytes."""
        if self.used + size_bytes <= len(self.memory):
            return
        larger = np.empty(max(self.used + size_bytes, 2 * len(self.memory)), dtype=np.uint8)
        larger[: self.used] = self.memory[: self.used]
        self.memory, self._view = larger, larger.data


class SpareOutput:
    """The one output that connections share, if each has sent all that it wrote before the next one has its turn."""

    def __init__(self) -> None:
        self._spare: Output | None = None

    def take(self) -> Output:
        spare, self._spare = self._spare, None
        return Output() if spare is None else spare

    def give_back(self, output: Output) -> None:
        """Return an output whose bytes were all sent. One that has grown is not kept."""
        if len(output.memory) == OUTPUT_BYTES:
            output.used = 0
            self._spare = output


class OutboundStop(IntEnum):
    """Why the kernel stopped."""

    END = 0
    """The run or the snapshot is at its end."""
    WINDOW = 1
    """The window is full."""
    EVENT = 2
    """The next frame is a system event, which the kernel does not handle."""
    ROOM = 3
    """The output had no room for the next frame. `shape_run` has made room since."""


class Listing(IntEnum):
    """What a list of seqnos says of the versions in a snapshot."""

    NOTHING = 0
    """There is no list: all versions are sent."""
    SUPERSEDED = 1
    """The listed versions are left out: a newer version of the same key comes later in the snapshot."""
    NEWEST = 2
    """Only the listed versions are sent."""


class Sent(NamedTuple):
    """What the kernel has done."""

    stop: int
    at: int
    """Where in the run it stopped."""
    to: int
    """Where in the output it stopped."""
    frames: int
    last_seqno: int
    """The last change that was sent; 0 for none."""
    passed_seqno: int
    """The last change that was examined, sent or not; 0 for none."""
    prepares: int
    """How many of the frames are prepares."""


FROM_DISK = 2**63 - 1
"""A `commits_after_seqno` above all seqnos: in a snapshot from disk, every commit is sent as the whole change."""
_END, _WINDOW, _EVENT, _ROOM = (int(stop) for stop in OutboundStop)
_NO_LIST, _NEWEST = int(Listing.NOTHING), int(Listing.NEWEST)


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
    listed: Column = NO_SEQNOS,
    listing: Listing = Listing.NOTHING,
    commits_after_seqno: int = 0,
) -> Sent:
    """Write the changes of a run from `at` on, up to `end_seqno`, until the output is filled up to `until`.

    The last frame may exceed `until`. `wanted` are the ids of the collections to send, ascending; None for all.
    `listed` are seqnos, ascending; `listing` says what they mean. A consumer with sync writes gets commits after
    `commits_after_seqno` as commits, and others as the whole change: their prepares may be gone, or come from disk.
    """
    bits = shape.bits
    if commits_after_seqno == FROM_DISK and shape.sync_writes and shape.takes_compressed:
        # As recorded from 7.0.5, some values that a replica gets from disk, not from the cache, are compressed: those
        # of prepares, and what is left of removed documents. Other values are sent as they are stored.
        bits |= COMPRESS_PREPARES
    table = np.zeros(1 << HASH_BITS, dtype=np.int64) if bits & (COMPRESS | COMPRESS_PREPARES) else _NO_TABLE
    ids = _ALL_COLLECTIONS if wanted is None else wanted
    done = _shape(
        run, at, output.memory, output.used, until, end_seqno, listed, int(listing), opaque, stream_id,
        wanted is not None, ids, bits, table, commits_after_seqno,
    )  # fmt: skip
    sent = Sent._make(done)
    output.used = sent.to
    if sent.stop == OutboundStop.ROOM:
        output.make_room(_room_for(run, sent.at, bits))
    return sent


# --- walking a run ------------------------------------------------------------------------------------------------


@kernel_part
def _is_in(sorted_values: Column, value: int) -> bool:
    position = np.searchsorted(sorted_values, value)
    return bool(position < len(sorted_values) and sorted_values[position] == value)


@kernel
def _shape(
    run: AnyBytes, at: int, target: Bytes, to: int, until: int, end_seqno: int, listed: UInt64s, listing: int,
    opaque: int, sid: int, filtered: bool, wanted: UInt32s, bits: int, table: Int64s, commits_after_seqno: int,
) -> tuple[int, int, int, int, int, int, int]:  # fmt: skip
    """Walk the run from `at` on and write to `target` from `to` on. Returns a `Sent`."""
    # Borrow the arrays, because they are passed to `write_frame` and others once per frame.
    run = borrowed(run)
    target = borrowed(target)
    listed = borrowed(listed)
    wanted = borrowed(wanted)
    table = borrowed(table)
    sync_writes = bits & SYNC_WRITES != 0
    skip_removals = bits & SKIP_REMOVALS != 0
    mutations_stay = _mutations_stay(bits, sid)
    changing_datatypes = i64(0 if bits & INCLUDE_XATTRS else XATTR) | i64(0 if bits & TAKES_COMPRESSED else SNAPPY)
    at = i64(at)
    to = i64(to)
    frames = i64(0)
    prepares = i64(0)
    last_seqno = u64(0)
    passed_seqno = u64(0)
    last_collection = u64(_NO_COLLECTION)
    is_wanted = False
    next_listed = i64(-1)
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
            # Documents of one collection are often next to each other.
            collection = collection_id(run, at + HEADER_BYTES + i64(load_u8(run, at + 4)))
            if collection != last_collection:
                last_collection = collection
                is_wanted = _is_in(wanted, u32(collection))
            is_sent = is_wanted
        if not sync_writes and not is_document_change(opcode):
            is_sent = False
        if skip_removals and (opcode == DELETION or opcode == EXPIRATION):
            is_sent = False
        # A commit completes a prepare that the consumer holds, whatever happened to the document later. If the prepare
        # may have been compacted away, the consumer does not have it, and gets the whole change.
        is_commit = sync_writes and load_u32(run, at + 12) != 0 and seqno > u64(commits_after_seqno)
        if listing != _NO_LIST and is_sent and not is_commit:
            if next_listed < 0:
                next_listed = i64(np.searchsorted(listed, seqno))
            # Seqnos ascend, so the list is walked only once.
            while next_listed < len(listed) and listed[next_listed] < seqno:
                next_listed += 1
            is_listed = next_listed < len(listed) and listed[next_listed] == seqno
            is_sent = is_listed == (listing == _NEWEST)
        if not is_sent:
            passed_seqno = seqno
            _prefetch_behind(run, at, end)
            at = end
            continue
        if to + sent_bytes_max(run, at, end, bits) > len(target):
            stop = _ROOM
            break
        if mutations_stay and opcode == MUTATION and not i64(load_u8(run, at + 5)) & changing_datatypes:
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


@inlined_part
def _mutations_stay(bits: int, sid: int) -> bool:
    """Whether mutations are sent as they are stored, unless their datatype says otherwise."""
    return bool(sid == 0 and not bits & (STRIP_PREFIX | COMPRESS | SYNC_WRITES) and bits >> VALUES_SHIFT == _KEEP)


@inlined_part
def sent_bytes_max(run: Bytes, at: int, end: int, bits: int) -> int:
    """The most bytes that are sent of the change at `at`."""
    stored_bytes = end - at
    bytes_max: int = stored_bytes + FRAME_GROWTH_BYTES
    if load_u8(run, at + 5) & SNAPPY:
        if not bits & TAKES_COMPRESSED:
            bytes_max += _inflated_bytes(run, at, end)
    elif bits & (COMPRESS | COMPRESS_PREPARES):
        bytes_max += 32 + stored_bytes // 6  # As `compressed_bytes_max` says.
    return bytes_max


@inlined_part
def _inflated_bytes(run: Bytes, at: int, end: int) -> int:
    """The length that the compressed value of a change states."""
    length, _ = stated_length(run, at + HEADER_BYTES + i64(run[at + 4]) + i64(load_u16(run, at + 2)), end)
    return max(i64(0), length)


@kernel
def _room_for(run: AnyBytes, at: int, bits: int) -> int:
    """The most bytes that are sent of the change at `at`."""
    return sent_bytes_max(run, at, at + HEADER_BYTES + i64(load_u32(run, at + 8)), bits)


@inlined_part
def _prefetch_behind(run: Bytes, at: int, end: int) -> None:
    """Prefetch behind a small frame that is skipped: memory is too slow for these, and the CPU sees no pattern."""
    if end - at <= _PREFETCHED_FRAME_BYTES_MAX:
        line_at = at + _PREFETCH_BYTES
        while line_at < end + _PREFETCH_BYTES:
            prefetch(run, line_at)
            line_at += _LINE_BYTES


# --- one frame ----------------------------------------------------------------------------------------------------
#
# Each part writes one thing: framing, extras, value, header. The header comes last: it needs the lengths of the others
# and the datatype of the value.


@inlined_part
def write_frame(
    run: Bytes, at: int, end: int, is_commit: bool, target: Bytes, to: int, bits: int, opaque: int, sid: int,
    table: Column,
) -> int:  # fmt: skip
    """Write what a consumer gets of the change at `at`, or of its commit if `is_commit`. Returns where that ends."""
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
    # In recorded sessions neither has a CAS. A stored abort has one, which tells its age.
    store_u64(target, to + 16, u64(0) if opcode in (COMMIT, ABORT) else load_u64(run, at + 16))
    return sent_end


@inlined_part
def _sent_opcode(opcode: int, is_commit: bool, bits: int) -> int:
    if is_commit:
        return COMMIT
    return DELETION if opcode == EXPIRATION and not bits & EXPIRY_OPCODE else i64(opcode)


@inlined_part
def _write_framing(target: Bytes, to: int, sid: int) -> int:
    """Write the stream id, if there is one. Returns where it ends."""
    if sid == 0:
        return to
    target[to] = STREAM_ID_KIND
    store_u16(target, to + 1, u16(sid))
    return to + STREAM_ID_BYTES


@inlined_part
def _write_extras(run: Bytes, at: int, opcode: int, target: Bytes, to: int, bits: int) -> int:
    """Write both seqnos of a commit or abort, all extras of a mutation or prepare, or the wanted ones of a removal.

    Returns where they end.
    """
    stored_at = at + HEADER_BYTES
    if opcode in (COMMIT, ABORT):
        # The prepare's seqno, then its own. A stored commit keeps in its opaque how far before it the prepare is.
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


@inlined_part
def _write_value(
    run: Bytes, at: int, value_at: int, end: int, target: Bytes, to: int, bits: int, table: Column
) -> tuple[int, int]:
    """Write the attributes and the body that the consumer wants. Returns where they end, and their datatype."""
    stored_datatype = i64(run[at + 5])
    if stored_datatype & SNAPPY and bits >> VALUES_SHIFT == _KEEP and not bits & TAKES_COMPRESSED:
        # It has no attributes: a value with attributes is never stored compressed.
        length, elements_at = stated_length(run, value_at, end)
        if inflate_value(run, elements_at, end, target, to, to + length):
            return to + length, stored_datatype & ~SNAPPY
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
    is_rare = is_removal or run[at + 1] == PREPARE
    compresses = bits & COMPRESS != 0 or (bits & COMPRESS_PREPARES != 0 and is_rare)
    if compresses and kept_bytes > 0 and not datatype & SNAPPY:
        packed_end = compress_value(run, kept_at, kept_end, target, to, table)
        if packed_end - to < kept_bytes:
            return packed_end, datatype | SNAPPY
    copy_bytes(target, to, run, kept_at, kept_bytes)
    return to + kept_bytes, datatype


@inlined_part
def _kept_datatype(stored: int, keeps_xattrs: bool, bits: int) -> int:
    values = bits >> VALUES_SHIFT
    if values == _DROP_BUT_KEEP_DATATYPE:
        return stored if bits & TAKES_COMPRESSED else stored & ~SNAPPY
    kept = stored if values == _KEEP else stored & XATTR
    return kept if keeps_xattrs else kept & ~XATTR


@inlined_part
def _copy_system_xattrs(run: Bytes, section_at: int, section_end: int, target: Bytes, to: int) -> int:
    """Write only the system attributes of a section; nothing if there are none. Returns where they end."""
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
