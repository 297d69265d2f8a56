"""Range scans: the documents of one collection in one vbucket, in the order of their keys, as they were at one moment.

Handlers of the key-value side begin a scan and take its results part by part. A scan sees what was durable when it
began: until it is closed, it holds a view of the blocks and copies of the changes that were young. Walking all of
these may take long, so a scan is begun and taken in threads, one part at a time, and may be closed meanwhile.

The store has no order of keys: changes are stored in the order of their seqnos, and the index has hashes. So a scan
walks all changes of the vbucket and keeps the lowest keys that it meets, as many as a chunk holds. When the chunk is
full, the scan drops its higher half and ignores keys above the rest from then on. Once the chunk has been returned,
the next walk begins above it. A vbucket with fewer keys than a chunk, as nearly all have, is walked once. Changes come
oldest first and the sort is stable, so the last of several versions is the newest; it counts if it is a live document.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from threading import Lock

import numpy as np

from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    UInt64Rows,
    UInt64s,
    address_of,
    bytes_at,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    load_u16,
    load_u32,
    load_u64,
    store_u32,
    store_u64,
    u64,
)
from headwater.kernels.siphash import siphash128
from headwater.protocol.kernels.frame_runs import (
    MUTATION,
    SNAPPY,
    XATTR,
    collection_id,
    is_document_change,
    prefix_bytes,
)
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.messages.documents import RangeScanContinueResponse, ScannedDocument
from headwater.protocol.numbers import KEY_BYTES_MAX, CollectionId, VBucketId
from headwater.protocol.values import Datatype, body_offset
from headwater.store.bucket import Bucket
from headwater.store.checked_engine import CheckedView
from headwater.store.commits import GroupCommit
from headwater.store.data_format import Entry, block_last_seqno, blocks_of, decode_document
from headwater.store.engine import Table
from headwater.store.index import BASE, CAPACITY, SEQNO, probe
from headwater.store.runs import as_run, first_seqno, split_after

CHUNK_KEYS = 2**16
_KEY_BYTES_MEAN = 64
"""Room in a chunk for each key. If keys are longer, the chunk holds fewer."""
ABOVE_ALL_KEYS = b"\xff" * (KEY_BYTES_MAX + 1)
_META_BYTES = 25
"""The bytes before a document in a part: flags, expiry, seqno, CAS and datatype."""
_NO_DOCUMENT = -1
"""The frame start of a version that is deleted or has expired."""
_COMPRESSED = -1
"""Returned in place of a count: the next document has to be inflated first."""
_DRAWS = 16
_WALKED_BYTES_MAX = 1024 * 1024
"""The most that is read to find a random document of a nearly empty collection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """About this many documents, or all if there are fewer. The same seed selects the same ones."""

    documents: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanWanted:
    """What a scan is to find: keys from `low` on and below `high`."""

    collection: CollectionId
    low: bytes = b""
    high: bytes = ABOVE_ALL_KEYS
    keys_only: bool = False
    include_xattrs: bool = False
    sample: Sample | None = None


class RangeScan:
    """One scan (see the module). It holds a view until it is closed, or until all that is left of it is in memory."""

    def __init__(
        self, bucket: Bucket, vbucket: int, young: Sequence[GroupCommit], wanted: ScanWanted, *, now_s: int,
        chunk_keys: int = CHUNK_KEYS,
    ) -> None:  # fmt: skip
        """`young` are the young commits of the vbucket; only the event loop may take them from the bucket."""
        self._lock = Lock()
        """Held while a part is made."""
        self._is_closed = False
        self.wanted = wanted
        self._now_s = now_s
        self._chunk = _Chunk(chunk_keys)
        self._order: Column = np.empty(0, dtype=np.int64)
        self._given = 0
        """How many of `_order` have been returned."""
        self._next_low: bytes | None = wanted.low
        """Where the next chunk begins; None after the last one."""
        with ExitStack() as stack:
            view = stack.enter_context(bucket.reading(vbucket))
            self._runs = list(_runs(view, vbucket, young))
            self._addresses = np.array([address_of(run) for run in self._runs], dtype=np.int64)
            self._lengths = np.array([len(run) for run in self._runs], dtype=np.int64)
            self._draws = None if wanted.sample is None else self._begin_sample(wanted.sample)
            self._load()
            self._held = stack.pop_all()
        self._release()

    @property
    def is_complete(self) -> bool:
        return self._given == len(self._order) and self._next_low is None

    def take(self, *, items_max: int, bytes_max: int, datatypes: Datatype) -> bytes:
        """Return the next keys or documents, encoded: at least one, if any is left.

        `datatypes` are the bits that the receiver understands; the bit for extended attributes only if it wants them.
        """
        with self._lock:
            part = b"" if self._is_closed else self._take(items_max, bytes_max, datatypes)
        if self._is_closed:
            self.close()
        return part

    def _take(self, items_max: int, bytes_max: int, datatypes: Datatype) -> bytes:
        if self._given == len(self._order):
            self._load()
        end = min(len(self._order), self._given + items_max)
        if self.wanted.keys_only:
            chunk, order = self._chunk, self._order[self._given : end]
            out = np.empty(int(chunk.key_bytes[order].sum()) + 2 * len(order), dtype=np.uint8)
            count, used = _write_keys(chunk.keys, chunk.starts, order, bytes_max, out)
            part = out[:used].tobytes()
        else:
            count, part = self._documents(end, bytes_max, int(datatypes))
        self._given += int(count)
        self._release()
        return part

    def close(self) -> None:
        """Release the view. A closed scan returns nothing more, except the part that is being made."""
        self._is_closed = True
        if self._lock.acquire(blocking=False):
            self._runs, self._next_low = [], None
            self._order, self._given = self._order[:0], 0
            self._held.close()
            self._lock.release()

    def _release(self) -> None:
        """Release the view as soon as it is no longer needed."""
        if self.is_complete or (self.wanted.keys_only and self._next_low is None):
            self._runs = []
            self._held.close()

    # --- documents ------------------------------------------------------------------------------------------------

    def _documents(self, end: int, bytes_max: int, datatypes: int) -> tuple[int, bytes]:
        order = self._order[self._given : end]
        places = self._addresses, self._lengths, self._chunk.run_numbers, self._chunk.frame_starts, order
        out = np.empty(bytes_max, dtype=np.uint8)
        count, used = _write_documents(*places, datatypes, out)
        if count == _COMPRESSED:
            return 1, self._inflated(int(order[0]), datatypes)
        if used > bytes_max:
            # The first document is longer than a part, so the part becomes as long as that.
            out = np.empty(used, dtype=np.uint8)
            count, used = _write_documents(*places, datatypes, out)
        return count, out[:used].tobytes()

    def _inflated(self, item: int, datatypes: int) -> bytes:
        """Return a document that has to be inflated, for its receiver or to remove its extended attributes."""
        run = self._runs[self._chunk.run_numbers[item]]
        document = decode_document(run[self._chunk.frame_starts[item] :].data)
        value, datatype = document.value, document.datatype
        if datatype & Datatype.XATTR & ~datatypes:
            value, datatype = value[body_offset(value) :], datatype & ~Datatype.XATTR
        scanned = ScannedDocument(
            flags=document.flags, expiry=document.expiry, seqno=document.seqno, cas=document.cas, datatype=datatype,
            key=document.key, value=value,
        )  # fmt: skip
        return RangeScanContinueResponse(has_documents=1, documents=(scanned,)).encode_value()

    # --- chunks ---------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Load chunks until one has something to return, or none is left."""
        while self._given == len(self._order) and self._next_low is not None:
            self._order, self._given = self._next_chunk(), 0
            if self._draws is not None:
                self._order = self._sampled(self._draws)

    def _next_chunk(self) -> Column:
        """Return the lowest keys from `_next_low` on, in order."""
        assert self._next_low is not None
        chunk, low, high = self._chunk, as_run(self._next_low), self.wanted.high
        chunk.count = 0
        for number, run in enumerate(self._runs):
            at = 0
            while at < len(run):
                at, chunk.count = _collect(
                    run, number, at, int(self.wanted.collection), low, as_run(high), self._now_s, chunk.keys,
                    chunk.starts, chunk.run_numbers, chunk.frame_starts, chunk.count,
                )  # fmt: skip
                if at < len(run):
                    high = chunk.make_room() or high
        self._next_low = None if high == self.wanted.high else high
        order = chunk.newest()
        found: Column = order[chunk.frame_starts[order] != _NO_DOCUMENT]
        return found

    # --- samples --------------------------------------------------------------------------------------------------

    def _begin_sample(self, sample: Sample) -> _Draws:
        """Count the matching documents. Like servers, draw each document independently, with the chance that gives the
        number on average (kv_engine, range_scan_create.md)."""
        total = 0
        while self._next_low is not None:
            total += len(self._next_chunk())
        self._next_low = self.wanted.low
        chance = sample.documents / max(1, total)
        return _Draws(chance=chance, left=sample.documents, numbers=np.random.Generator(np.random.PCG64(sample.seed)))

    def _sampled(self, draws: _Draws) -> Column:
        order = self._order
        if draws.chance < 1:
            order = order[draws.numbers.random(len(order)) < draws.chance]
        order = order[: draws.left]
        draws.left -= len(order)
        if draws.left == 0:
            self._next_low = None
        return order


@dataclass(slots=True)
class _Draws:
    chance: float
    left: int
    numbers: np.random.Generator


def _runs(view: CheckedView, vbucket: int, young: Sequence[GroupCommit]) -> Iterator[Bytes]:
    """Yield the durable changes of a vbucket, oldest first, as runs that are valid as long as the view is open."""
    reached = 0
    for key, block in view.scan(Table.BLOCKS, *blocks_of(vbucket)):
        yield as_run(block)
        reached = block_last_seqno(key)
    # While commits are being settled, their changes are both in them and in blocks.
    for commit in young:
        run = commit.run(vbucket)
        # A copy, because a slice would keep the changes of all vbuckets in memory for as long as the scan lives.
        yield run[split_after(run, reached) :].copy()


class _Chunk:
    """Keys and the places of their documents, up to a fixed number and size."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.count = 0
        self.keys: Bytes = np.empty(max(capacity * _KEY_BYTES_MEAN, 4 * KEY_BYTES_MAX), dtype=np.uint8)
        self.starts = np.zeros(capacity + 1, dtype=np.int64)
        """Where each key starts, and where the last one ends."""
        self.run_numbers = np.empty(capacity, dtype=np.int64)
        self.frame_starts = np.empty(capacity, dtype=np.int64)

    @property
    def key_bytes(self) -> Column:
        lengths: Column = np.diff(self.starts)
        return lengths

    def newest(self) -> Column:
        """Return the last version of each key, in the order of the keys."""
        order, scratch = np.empty(self.count, dtype=np.int64), np.empty(self.count, dtype=np.int64)
        _sort(self.keys, self.starts, order, scratch)
        kept = _last_of_each(self.keys, self.starts, order)
        return order[:kept]

    def make_room(self) -> bytes | None:
        """Drop older versions, then higher keys if that is not enough. Returns the bound above the keys that stay."""
        order = self.newest()
        bound = None
        is_tight = 2 * len(order) > self.capacity or 2 * self.key_bytes[order].sum() > len(self.keys)
        if is_tight and len(order) > 1:
            order = order[: len(order) // 2]
            last = order[-1]
            bound = self.keys[self.starts[last] : self.starts[last + 1]].tobytes() + b"\0"
        lengths = self.key_bytes[order]
        keys, starts = np.empty_like(self.keys), np.zeros_like(self.starts)
        starts[1 : len(order) + 1] = np.cumsum(lengths)
        _gather(self.keys, self.starts, order, keys, starts)
        self.run_numbers[: len(order)] = self.run_numbers[order]
        self.frame_starts[: len(order)] = self.frame_starts[order]
        self.keys, self.starts, self.count = keys, starts, len(order)
        return bound


# --- without a scan -----------------------------------------------------------------------------------------------


def has_change(bucket: Bucket, vbucket: int, seqno: int) -> bool:
    """Whether the change of a seqno is durable and still stored."""
    return any(len(run) and first_seqno(run) == seqno for run in islice(bucket.runs(vbucket, after_seqno=seqno - 1), 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDocument:
    """The document that was found, if any; if none, `is_cut_short` says whether some were not looked at."""

    vbucket: VBucketId = VBucketId(0)
    entry: Entry | None = None
    is_cut_short: bool = False
    walked_bytes: int = 0


def random_document(bucket: Bucket, collection: CollectionId, *, draw: int, now_s: int) -> FoundDocument:
    """Return any document of a collection in an active vbucket; `draw` is a random number of 64 bits.

    Draws places of the index, and reads the documents there to see their collection. If that misses a small
    collection, walks the vbuckets one after the other, from a random one on, up to `_WALKED_BYTES_MAX`.
    """
    numbers = np.random.Generator(np.random.PCG64(draw))
    is_active = (bucket.numbers.states == VBucketState.ACTIVE) & (bucket.index.entries > 0)
    vbuckets = [VBucketId(vbucket) for vbucket in np.flatnonzero(is_active).tolist()]
    if not vbuckets:
        return FoundDocument()
    for place in numbers.integers(2**62, size=(_DRAWS, 2)).tolist():
        vbucket = vbuckets[place[0] % len(vbuckets)]
        entry = bucket.index.live_from(vbucket, place[1] % int(bucket.index.capacities[vbucket]), now_s=now_s)
        if entry is not None and bucket.read(vbucket, entry).collection_id == collection:
            return FoundDocument(vbucket=vbucket, entry=entry)
    first, walked_bytes = int(numbers.integers(len(vbuckets))), 0
    for vbucket in vbuckets[first:] + vbuckets[:first]:
        met, key = 0, b""
        for run in bucket.runs(vbucket):
            if walked_bytes > _WALKED_BYTES_MAX:
                return FoundDocument(is_cut_short=True, walked_bytes=walked_bytes)
            walked_bytes += len(run)
            index = bucket.index
            met, start, end = _draw_key(
                run, int(collection), index.slots, index.tables, vbucket, index.secret, now_s, draw >> 1, met
            )
            key = run[start:end].tobytes() if end else key
        entry = bucket.index.find(vbucket, as_run(key)) if key else None
        if entry is not None:
            return FoundDocument(vbucket=vbucket, entry=entry, walked_bytes=walked_bytes)
    return FoundDocument(walked_bytes=walked_bytes)


# --- kernels: keys ------------------------------------------------------------------------------------------------


@kernel_part
def _is_below(left: Bytes, left_at: int, left_end: int, right: Bytes, right_at: int, right_end: int) -> bool:
    """Whether one key comes before another, eight bytes at a time as far as both have them."""
    while left_end - left_at >= 8 and right_end - right_at >= 8:
        ours, theirs = load_u64(left, left_at), load_u64(right, right_at)
        if ours != theirs:
            return bool(ours < theirs)
        left_at += 8
        right_at += 8
    while left_at < left_end and right_at < right_end:
        if left[left_at] != right[right_at]:
            return bool(left[left_at] < right[right_at])
        left_at += 1
        right_at += 1
    return bool(left_end - left_at < right_end - right_at)


@kernel
def _collect(
    run: AnyBytes, run_number: int, at: int, collection: int, low: ReadOnlyBytes, high: ReadOnlyBytes, now_s: int,
    keys: Bytes, starts: Int64s, run_numbers: Int64s, frame_starts: Int64s, count: int,
) -> tuple[int, int]:  # fmt: skip
    """Enter the changes of a run from `at` on whose keys are wanted. Returns where it stopped, before the end if there
    was no more room, and how many keys the chunk has now."""
    at = i64(at)
    count = i64(count)
    while at < len(run):
        opcode = run[at + 1]
        if is_document_change(opcode):
            key_at = at + 24 + i64(run[at + 4])
            key_end = key_at + i64(load_u16(run, at + 2))
            if collection_id(run, key_at) == u64(collection):
                key_at += prefix_bytes(run, key_at, key_end)
                is_wanted = not _is_below(run, key_at, key_end, low, i64(0), len(low)) and _is_below(
                    run, key_at, key_end, high, i64(0), len(high)
                )
                if is_wanted:
                    key_bytes = key_end - key_at
                    if count == len(frame_starts) or starts[count] + key_bytes > len(keys):
                        return at, count
                    copy_bytes(keys, starts[count], run, key_at, key_bytes)
                    starts[count + 1] = starts[count] + key_bytes
                    run_numbers[count] = run_number
                    expiry = i64(load_u32(run, at + 44)) if opcode == MUTATION else i64(0)
                    is_live = opcode == MUTATION and (expiry == 0 or expiry > now_s)
                    frame_starts[count] = at if is_live else i64(_NO_DOCUMENT)
                    count += 1
        at += 24 + i64(load_u32(run, at + 8))
    return at, count


@kernel
def _sort(keys: Bytes, starts: Int64s, order: Int64s, scratch: Int64s) -> None:
    """Sort the numbers of keys by key; equal keys keep their order (a merge sort)."""
    count = len(order)
    for item in range(count):
        order[item] = item
    width = 1
    is_in_scratch = False
    while width < count:
        source, target = (scratch, order) if is_in_scratch else (order, scratch)
        for begin in range(0, count, 2 * width):
            middle, end = min(begin + width, count), min(begin + 2 * width, count)
            left, right = begin, middle
            for place in range(begin, end):
                takes_right = left == middle
                if not takes_right and right < end:
                    one, other = source[right], source[left]
                    takes_right = _is_below(keys, starts[one], starts[one + 1], keys, starts[other], starts[other + 1])
                if takes_right:
                    target[place] = source[right]
                    right += 1
                else:
                    target[place] = source[left]
                    left += 1
        is_in_scratch = not is_in_scratch
        width *= 2
    if is_in_scratch:
        for item in range(count):
            order[item] = scratch[item]


@kernel
def _last_of_each(keys: Bytes, starts: Int64s, order: Int64s) -> int:
    """Keep the last of equal keys, moved to the front of the sorted order. Returns how many are kept."""
    kept = i64(0)
    for place in range(len(order)):
        item = order[place]
        if place + 1 < len(order):
            after = order[place + 1]
            if not _is_below(keys, starts[item], starts[item + 1], keys, starts[after], starts[after + 1]):
                continue
        order[kept] = item
        kept += 1
    return int(kept)


@kernel
def _gather(keys: Bytes, starts: Int64s, order: Int64s, new_keys: Bytes, new_starts: Int64s) -> None:
    """Copy keys to their new places."""
    for place in range(len(order)):
        item = order[place]
        copy_bytes(new_keys, new_starts[place], keys, starts[item], starts[item + 1] - starts[item])


@kernel
def _draw_key(
    run: AnyBytes, collection: int, slots: UInt64Rows, tables: Int64Rows, vbucket: int, secret: UInt64s, now_s: int,
    draw: int, met: int,
) -> tuple[int, int, int]:  # fmt: skip
    """Draw one of the live documents of a collection, each with the same chance: the nth that is met replaces the one
    before with a chance of 1 in n. Returns how many were met, and where the key drawn from this run lies, if any."""
    at = i64(0)
    start = i64(0)
    end = i64(0)
    while at < len(run):
        if run[at + 1] == MUTATION:
            key_at = at + 24 + i64(run[at + 4])
            key_bytes = i64(load_u16(run, at + 2))
            if collection_id(run, key_at) == u64(collection):
                high, low = siphash128(run, key_at, key_bytes, secret[0], secret[1])
                slot = probe(slots, tables[vbucket, BASE], tables[vbucket, CAPACITY], high, low)
                expiry = i64(load_u32(run, at + 44))
                is_newest = slot >= 0 and slots[slot, SEQNO] == load_u64(run, at + 24)
                if is_newest and (expiry == 0 or expiry > now_s):
                    met += 1
                    # The hash of a key is as good as random; combined with `draw` it differs with each draw.
                    if ((low >> u64(1)) ^ u64(draw)) % u64(met) == 0:
                        start, end = key_at, key_at + key_bytes
        at += 24 + i64(load_u32(run, at + 8))
    return met, start, end


# --- kernels: parts, as `RangeScanContinueResponse` has them ------------------------------------------------------


@kernel_part
def _length_bytes(length: int) -> int:
    size = i64(1)
    while length > 0x7F:
        length >>= 7
        size += 1
    return int(size)


@kernel_part
def _put_length(out: Bytes, at: int, length: int) -> int:
    """Write a length as LEB128. Returns where it ends."""
    at = i64(at)
    length = i64(length)
    while length > 0x7F:
        out[at] = length & 0x7F | 0x80
        length >>= 7
        at += 1
    out[at] = length
    return int(at + 1)


@kernel
def _write_keys(keys: Bytes, starts: Int64s, order: Int64s, bytes_max: int, out: Bytes) -> tuple[int, int]:
    """Write keys, at least one whatever its length. Returns how many, and their bytes."""
    used = i64(0)
    for place in range(len(order)):
        item = order[place]
        key_bytes = starts[item + 1] - starts[item]
        if place and used + _length_bytes(key_bytes) + key_bytes > bytes_max:
            return place, used
        used = _put_length(out, used, key_bytes)
        copy_bytes(out, used, keys, starts[item], key_bytes)
        used += key_bytes
    return len(order), used


@kernel_part
def _spans(run: Bytes, at: int, datatypes: int) -> tuple[int, int, int, int]:
    """Where a stored mutation's key, its value, and the sent part of the value start, and where its frame ends."""
    key_at = at + 24 + i64(run[at + 4])
    value_at = key_at + i64(load_u16(run, at + 2))
    body_at = value_at + 4 + i64(load_u32(run, value_at)) if run[at + 5] & XATTR & ~datatypes else value_at
    return key_at + prefix_bytes(run, key_at, value_at), value_at, body_at, at + 24 + i64(load_u32(run, at + 8))


@kernel
def _write_documents(
    addresses: Int64s, lengths: Int64s, run_numbers: Int64s, frame_starts: Int64s, order: Int64s, datatypes: int,
    out: Bytes,
) -> tuple[int, int]:  # fmt: skip
    """Write as many documents as fit. Returns how many, and their bytes, or the bytes that the first needs. A
    compressed one that can't be sent as it is ends the part, or returns `_COMPRESSED` if it comes first."""
    used = i64(0)
    for place in range(len(order)):
        item = order[place]
        run = bytes_at(addresses[run_numbers[item]], lengths[run_numbers[item]])
        at = frame_starts[item]
        datatype = i64(run[at + 5])
        if datatype & SNAPPY and (datatype & XATTR or not datatypes & SNAPPY):
            return place or i64(_COMPRESSED), used
        key_at, value_at, body_at, end = _spans(run, at, datatypes)
        key_bytes, body_bytes = value_at - key_at, end - body_at
        size = _META_BYTES + _length_bytes(key_bytes) + key_bytes + _length_bytes(body_bytes) + body_bytes
        if used + size > len(out):
            return i64(place), used if place else size
        store_u32(out, used, load_u32(run, at + 40))
        store_u32(out, used + 4, load_u32(run, at + 44))
        store_u64(out, used + 8, load_u64(run, at + 24))
        store_u64(out, used + 16, load_u64(run, at + 16))
        out[used + 24] = datatype & datatypes
        used = _put_length(out, used + _META_BYTES, key_bytes)
        copy_bytes(out, used, run, key_at, key_bytes)
        used = _put_length(out, used + key_bytes, body_bytes)
        copy_bytes(out, used, run, body_at, body_bytes)
        used += body_bytes
    return i64(len(order)), used
