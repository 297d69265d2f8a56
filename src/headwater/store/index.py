"""The index: the metadata of every document, by its key, in memory.

Each vbucket has an open-addressing table, and all tables are in one arena of slots, so that a compiled loop can serve
a batch that touches every vbucket. A slot has six words:

    0, 1  the 128-bit hash of the key with its collection id (`siphash`)
    2     seqno of the newest change; 0 marks an empty slot
    3     CAS
    4     revision << 8 | flags
    5     expiry << 32 | the low half of the number of the commit that holds the change

A slot has no location: the store finds a change by its seqno, in its commit while that is young and in the vbucket's
blocks later. So settling and compaction need not update locations. Deleted documents stay in the index until they are
purged, for their revision. Opening a bucket rebuilds the index from the stored frames.

The bucket and the kernels of the store read and write slots; no module outside the store does.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np

from headwater.errors import HeadwaterError
from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    UInt32s,
    UInt64,
    UInt64Rows,
    UInt64s,
    i64,
    kernel,
    kernel_part,
    load_u16,
    load_u32,
    load_u64,
    u32,
    u64,
)
from headwater.kernels.siphash import siphash128
from headwater.protocol.kernels.frame_runs import (
    ABORT,
    EXPIRATION,
    MUTATION,
    PREPARE,
    collection_id,
    is_document_change,
)
from headwater.protocol.numbers import Cas, Seqno
from headwater.store.data_format import Entry

HASH_HIGH, HASH_LOW, SEQNO, CAS, REVISION, PLACE = range(6)
SLOT_WORDS = 6
_SLOT_BYTES = 8 * SLOT_WORDS
DELETED = 0x01
LOCKED = 0x02
HAS_XATTRS = 0x04

TABLE_SLOTS_MIN = 64
_LOAD_NUMERATOR, _LOAD_DENOMINATOR = 4, 5
_FORESEEN_MAX = 4
"""A table grows to at most this many times the documents that it needs now, however many are expected."""
_ARENA_BYTES = 64 * 2**30
_ARENA_BYTES_MIN = 2**28
_MAP_NORESERVE = 0x4000
_MADV_POPULATE_WRITE = 23

BASE, CAPACITY, COUNT = range(3)
"""Columns of `tables`: the first slot, the number of slots and those in use."""


class Index:
    """The documents of all vbuckets of a bucket."""

    def __init__(self, vbuckets: int, *, secret: tuple[int, int]) -> None:
        self.secret = np.array(secret, dtype=np.uint64)
        self.tables = np.zeros((vbuckets, 3), dtype=np.int64)
        self._arena = _reserve_arena()
        words = np.frombuffer(self._arena, dtype=np.uint64)
        self.slots = words[: len(words) // SLOT_WORDS * SLOT_WORDS].reshape(-1, SLOT_WORDS)
        self._next_slot = 0
        self._free: dict[int, list[int]] = {}

    def find(self, vbucket: int, key: Bytes) -> Entry | None:
        """Return the entry of a key, which starts with its collection id."""
        slot = _find(self.slots, self.tables, vbucket, self.secret, key, 0, len(key))
        return None if slot < 0 else _entry(self.slots[slot])

    def expired(self, vbucket: int, *, now_s: int, entries_max: int) -> list[Entry]:
        """Return documents whose expiry has passed, at most `entries_max`."""
        found = np.empty(entries_max, dtype=np.int64)
        count = _expired_slots(self.slots, self.tables, vbucket, now_s, found)
        return [_entry(self.slots[slot]) for slot in found[:count].tolist()]

    def live_from(self, vbucket: int, place: int, *, now_s: int) -> Entry | None:
        """Return the first live document at or after a place of the table, around its end; None if there is none."""
        slot = _live_slot(self.slots, self.tables, vbucket, place, now_s)
        return None if slot < 0 else _entry(self.slots[slot])

    def put(self, vbucket: int, key: Bytes, entry: Entry) -> None:
        self.make_room(vbucket, 1)
        flags = DELETED * entry.is_deleted | LOCKED * entry.is_locked | HAS_XATTRS * entry.has_xattrs
        _put(
            self.slots, self.tables, vbucket, self.secret, key, 0, len(key),
            u64(entry.seqno), u64(entry.cas), u64(entry.rev_seqno << 8 | flags), u64(entry.expiry << 32 | entry.commit),
        )  # fmt: skip

    @property
    def entries(self) -> Column:
        """The number of documents of each vbucket, including deleted ones."""
        return self.tables[:, COUNT]

    @property
    def capacities(self) -> Column:
        """The number of slots of each vbucket, all of which are read to count its documents."""
        return self.tables[:, CAPACITY]

    @property
    def memory_bytes(self) -> int:
        return int(self.capacities.sum()) * _SLOT_BYTES

    def count_live(self, vbuckets: Column, counts: Column) -> None:
        """Count the documents of some vbuckets, without the deleted. `counts` has one entry per vbucket."""
        _count_live(self.slots, self.tables, vbuckets, counts)

    def live_documents(self, vbucket: int | None = None) -> int:
        """Count the documents of one vbucket or of all, without the deleted."""
        vbuckets = np.arange(len(self.tables)) if vbucket is None else np.array([vbucket])
        counts = np.zeros(len(self.tables), dtype=np.int64)
        self.count_live(vbuckets, counts)
        return int(counts.sum())

    def live_seqnos(self, vbucket: int) -> Column:
        """Return the seqnos of the newest changes of all documents, without the deleted, ascending."""
        base, capacity, _ = self.tables[vbucket].tolist()
        slots = self.slots[base : base + capacity]
        is_live = (slots[:, SEQNO] != 0) & (slots[:, REVISION] & np.uint64(DELETED) == 0)
        live: Column = np.sort(slots[is_live, SEQNO])
        return live

    def newest_seqnos(self, vbucket: int) -> Column:
        """Return the seqnos of the newest changes of all documents, including deleted ones, ascending."""
        base, capacity, count = self.tables[vbucket].tolist()
        seqnos: Column = np.sort(self.slots[base : base + capacity, SEQNO])
        return seqnos[capacity - count :]

    def make_room(self, vbucket: int, documents: int, *, expected: int = 0) -> None:
        """Grow the table of a vbucket so that this many more documents fit.

        A table that has to grow does so for all that are expected, up to a few times what it holds then.
        """
        _, capacity, count = self.tables[vbucket].tolist()
        held = count + documents
        needed = _slots_for(held)
        if needed > capacity:
            foreseen = _slots_for(min(count + expected, _FORESEEN_MAX * held))
            grown = max(TABLE_SLOTS_MIN, needed, foreseen, capacity * 3 // 2)
            self._resize(vbucket, -(-grown // TABLE_SLOTS_MIN) * TABLE_SLOTS_MIN)

    def forget(self, vbucket: int, seqnos: Column) -> int:
        """Drop the documents whose newest changes have these seqnos, because those are no longer stored.

        Returns how many were still in the index.
        """
        capacity = int(self.tables[vbucket, CAPACITY])
        forgotten = _clear_seqnos(self.slots, self.tables, vbucket, np.sort(seqnos))
        # An empty slot would hide entries that were placed after it, so the rest of the table is entered again.
        if forgotten:
            self._resize(vbucket, capacity)
        return int(forgotten)

    def forget_flushed(self, vbucket: int, flushes: Mapping[int, int], runs: Iterable[Bytes]) -> int:
        """Drop the documents of collections that were flushed. Returns how many were still there.

        `flushes` has the seqno of the last flush of each collection, `runs` all stored changes of the vbucket: the
        index does not know the collections of documents, but the changes do.
        """
        ids = np.array(sorted(flushes), dtype=np.uint32)
        before = np.array([flushes[number] for number in sorted(flushes)], dtype=np.uint64)
        void: list[Column] = []
        for run in runs:
            seqnos = np.empty(count_documents(run), dtype=np.uint64)
            void.append(seqnos[: _flushed_seqnos(run, ids, before, seqnos)])
        return self.forget(vbucket, np.concatenate(void)) if void else 0

    def locked(self, vbucket: int) -> Column:
        """Return copies of the slots of locked documents."""
        base, capacity, _ = self.tables[vbucket].tolist()
        slots = self.slots[base : base + capacity]
        locked: Column = slots[(slots[:, SEQNO] != 0) & (slots[:, REVISION] & np.uint64(LOCKED) != 0)]
        return locked

    def lock_again(self, vbucket: int, locked: Column) -> None:
        """Lock documents again that were locked before the table was rebuilt, if they have not changed since."""
        base, capacity, _ = self.tables[vbucket].tolist()
        for high, low, seqno in locked[:, : SEQNO + 1]:
            slot = probe(self.slots, base, capacity, high, low) if capacity else -1
            if slot >= 0 and self.slots[slot, SEQNO] == seqno:
                self.slots[slot, REVISION] |= np.uint64(LOCKED)

    def clear(self, vbucket: int) -> None:
        base, capacity, _ = self.tables[vbucket].tolist()
        self._release(base, capacity)
        self.tables[vbucket] = 0

    def _resize(self, vbucket: int, capacity: int) -> None:
        old_base, old_capacity, count = self.tables[vbucket].tolist()
        base = self._allocate(capacity)
        self._populate(base, capacity)
        _rehash(self.slots, old_base, old_capacity, base, capacity)
        self.tables[vbucket] = (base, capacity, count)
        self._release(old_base, old_capacity)

    def _allocate(self, capacity: int) -> int:
        """Return the first of `capacity` adjacent slots, which are all empty."""
        free = self._free.get(capacity)
        if free:
            return free.pop()
        base = self._next_slot
        if base + capacity > len(self.slots):
            raise HeadwaterError(
                f"the index is full at {base} slots",
                hint="Distribute the bucket over more nodes, or give this one more memory",
            )
        self._next_slot += capacity
        return base

    def _populate(self, base: int, capacity: int) -> None:
        """Populate the memory of slots at once: hashing soon reaches all of it, and each page would be faulted in
        twice, when it is first read and when it is first written."""
        first, end = base * _SLOT_BYTES // mmap.PAGESIZE * mmap.PAGESIZE, (base + capacity) * _SLOT_BYTES
        with suppress(OSError):  # on a system before Linux 5.14
            self._arena.madvise(_MADV_POPULATE_WRITE, first, end - first)

    def _release(self, base: int, capacity: int) -> None:
        """Empty slots and return their memory: a table that grows leaves nearly as much memory behind as it takes."""
        if capacity == 0:
            return
        self.slots[base : base + capacity] = 0
        first, last = base * _SLOT_BYTES, (base + capacity) * _SLOT_BYTES
        whole_pages = range(-(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE)
        if whole_pages:
            self._arena.madvise(mmap.MADV_DONTNEED, whole_pages.start, len(whole_pages))
        self._free.setdefault(capacity, []).append(base)


def _slots_for(documents: int) -> int:
    return documents * _LOAD_DENOMINATOR // _LOAD_NUMERATOR + 1


def _reserve_arena() -> mmap.mmap:
    """Reserve address space for the slots. Pages become memory when they are first written, and start as zeros."""
    size = _ARENA_BYTES
    while True:
        try:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            return mmap.mmap(-1, size, flags=flags)
        except OSError:
            if size <= _ARENA_BYTES_MIN:
                raise
            size //= 2


def _entry(slot: Column) -> Entry:
    _, _, seqno, cas, revision, place = slot.tolist()
    return Entry(
        seqno=Seqno(seqno),
        cas=Cas(cas),
        rev_seqno=revision >> 8,
        expiry=place >> 32,
        commit=place & 0xFFFFFFFF,
        is_deleted=bool(revision & DELETED),
        is_locked=bool(revision & LOCKED),
        has_xattrs=bool(revision & HAS_XATTRS),
    )


# --- kernels ------------------------------------------------------------------------------------------------------


@kernel
def probe(slots: UInt64Rows, base: int, capacity: int, high: UInt64, low: UInt64) -> int:
    """Return the slot of a hash; if it has none, ~slot of the free slot that it would take. The table is never full."""
    # Scale the upper half of the hash to the table, which may have any number of slots.
    at = i64(((high >> u64(32)) * u64(capacity)) >> u64(32))
    while True:
        slot = base + at
        if slots[slot, SEQNO] == 0:
            return ~slot
        if slots[slot, HASH_HIGH] == high and slots[slot, HASH_LOW] == low:
            return slot
        at = at + 1 if at + 1 < capacity else i64(0)


@kernel
def _find(
    slots: UInt64Rows, tables: Int64Rows, vbucket: int, secret: UInt64s, key: ReadOnlyBytes, key_at: int, key_bytes: int
) -> int:
    capacity = tables[vbucket, CAPACITY]
    if capacity == 0:
        return -1
    high, low = siphash128(key, key_at, key_bytes, secret[0], secret[1])
    return probe(slots, tables[vbucket, BASE], capacity, high, low)


@kernel
def _put(
    slots: UInt64Rows, tables: Int64Rows, vbucket: int, secret: UInt64s, key: ReadOnlyBytes, key_at: int,
    key_bytes: int, seqno: UInt64, cas: UInt64, revision: UInt64, place: UInt64,
) -> None:  # fmt: skip
    """Set a key's entry. The caller has made room."""
    high, low = siphash128(key, key_at, key_bytes, secret[0], secret[1])
    slot = probe(slots, tables[vbucket, BASE], tables[vbucket, CAPACITY], high, low)
    if slot < 0:
        slot = ~slot
        slots[slot, HASH_HIGH] = high
        slots[slot, HASH_LOW] = low
        tables[vbucket, COUNT] += 1
    slots[slot, SEQNO] = seqno
    slots[slot, CAS] = cas
    slots[slot, REVISION] = revision
    slots[slot, PLACE] = place


@kernel_part
def is_full(tables: Column, vbucket: int) -> bool:
    """Whether a vbucket's table has to grow for one more document."""
    return bool((tables[vbucket, COUNT] + 1) * _LOAD_DENOMINATOR > tables[vbucket, CAPACITY] * _LOAD_NUMERATOR)


@kernel_part
def needs_closer_look(revision: int, place: int, now_s: int) -> bool:
    """Whether only the handlers can serve a document: its lock may have run out, or it has expired and must become an
    expiration before anything else happens to it."""
    expiry = i64(place >> u64(32))
    return bool(revision & u64(LOCKED) or (0 < expiry <= now_s and not revision & u64(DELETED)))


@kernel
def _count_live(slots: UInt64Rows, tables: Int64Rows, vbuckets: Int64s, counts: Int64s) -> None:
    for index in range(len(vbuckets)):
        vbucket = vbuckets[index]
        live = 0
        base = tables[vbucket, BASE]
        for slot in range(base, base + tables[vbucket, CAPACITY]):
            if slots[slot, SEQNO] != 0 and not slots[slot, REVISION] & u64(DELETED):
                live += 1
        counts[vbucket] = live


@kernel
def _clear_seqnos(slots: UInt64Rows, tables: Int64Rows, vbucket: int, seqnos: UInt64s) -> int:
    cleared = 0
    base = tables[vbucket, BASE]
    for slot in range(base, base + tables[vbucket, CAPACITY]):
        seqno = slots[slot, SEQNO]
        if seqno == 0:
            continue
        position = np.searchsorted(seqnos, seqno)
        if position < len(seqnos) and seqnos[position] == seqno:
            slots[slot, SEQNO] = 0
            tables[vbucket, COUNT] -= 1
            cleared += 1
    return cleared


@kernel
def _rehash(slots: UInt64Rows, old_base: int, old_capacity: int, base: int, capacity: int) -> None:
    for old in range(old_base, old_base + old_capacity):
        if slots[old, SEQNO] != 0:
            slot = ~probe(slots, base, capacity, slots[old, HASH_HIGH], slots[old, HASH_LOW])
            for word in range(SLOT_WORDS):
                slots[slot, word] = slots[old, word]


@kernel
def _expired_slots(slots: UInt64Rows, tables: Int64Rows, vbucket: int, now_s: int, found: Int64s) -> int:
    """Find the slots of documents whose expiry has passed, as many as `found` holds. Returns how many."""
    count = 0
    base = tables[vbucket, BASE]
    for slot in range(base, base + tables[vbucket, CAPACITY]):
        expiry = slots[slot, PLACE] >> u64(32)
        if slots[slot, SEQNO] == 0 or expiry == 0 or expiry > u64(now_s) or slots[slot, REVISION] & u64(DELETED):
            continue
        if count == len(found):
            break
        found[count] = slot
        count += 1
    return count


@kernel
def _live_slot(slots: UInt64Rows, tables: Int64Rows, vbucket: int, place: int, now_s: int) -> int:
    """Return the first slot from a place on, around the end, whose document is not deleted and not expired; or -1."""
    base, capacity = tables[vbucket, BASE], tables[vbucket, CAPACITY]
    for step in range(capacity):
        slot = base + (place + step) % capacity
        expiry = slots[slot, PLACE] >> u64(32)
        is_live = slots[slot, SEQNO] != 0 and not slots[slot, REVISION] & u64(DELETED)
        if is_live and (expiry == 0 or expiry > u64(now_s)):
            return int(slot)
    return -1


@kernel
def count_documents(run: AnyBytes) -> int:
    """Count the frames of a stored run that are about a document."""
    at = i64(0)
    documents = 0
    while at < len(run):
        opcode = run[at + 1]
        if is_document_change(opcode):
            documents += 1
        at += 24 + i64(load_u32(run, at + 8))
    return documents


@kernel
def _flushed_seqnos(run: AnyBytes, ids: UInt32s, before: UInt64s, found: UInt64s) -> int:
    """Find the seqnos of changes that a later flush of their collection has voided. Returns how many."""
    at = i64(0)
    count = i64(0)
    while at < len(run):
        if is_document_change(run[at + 1]):
            collection = u32(collection_id(run, at + 24 + i64(run[at + 4])))
            position = np.searchsorted(ids, collection)
            seqno = load_u64(run, at + 24)
            if position < len(ids) and ids[position] == collection and seqno < before[position]:
                found[count] = seqno
                count += 1
        at += 24 + i64(load_u32(run, at + 8))
    return count


@kernel
def index_run(
    slots: UInt64Rows, tables: Int64Rows, vbucket: int, secret: UInt64s, run: AnyBytes, commit: int
) -> tuple[int, int, int]:
    """Enter the frames of a stored run, oldest first.

    Returns how many superseded an older one, the highest CAS, and the highest revision of a deleted document. Prepares
    are not documents; they count as superseded, because they are needed only until the write is decided.
    """
    at = i64(0)
    superseded = 0
    cas_max = u64(0)
    deleted_rev = u64(0)
    base = tables[vbucket, BASE]
    capacity = tables[vbucket, CAPACITY]
    while at < len(run):
        opcode = run[at + 1]
        frame_end = at + 24 + i64(load_u32(run, at + 8))
        if is_document_change(opcode):
            key_at = at + 24 + i64(run[at + 4])
            high, low = siphash128(run, key_at, i64(load_u16(run, at + 2)), secret[0], secret[1])
            slot = probe(slots, base, capacity, high, low)
            if slot < 0:
                slot = ~slot
                slots[slot, HASH_HIGH] = high
                slots[slot, HASH_LOW] = low
                tables[vbucket, COUNT] += 1
            else:
                superseded += 1
            is_mutation = opcode == MUTATION
            cas = load_u64(run, at + 16)
            cas_max = max(cas_max, cas)
            expiry = u64(load_u32(run, at + 44)) if is_mutation else u64(0)
            slots[slot, SEQNO] = load_u64(run, at + 24)
            slots[slot, CAS] = cas
            rev = load_u64(run, at + 32)
            if not is_mutation:
                deleted_rev = max(deleted_rev, rev + u64(1) if opcode == EXPIRATION else rev)
            flags = u64(0) if is_mutation else u64(DELETED)
            if run[at + 5] & 0x04:
                flags |= u64(HAS_XATTRS)
            slots[slot, REVISION] = (rev << u64(8)) | flags
            slots[slot, PLACE] = (expiry << u64(32)) | u64(commit)
        elif opcode in (PREPARE, ABORT):
            superseded += opcode == PREPARE
            cas_max = max(cas_max, load_u64(run, at + 16))
        at = frame_end
    return superseded, cas_max, deleted_rev
