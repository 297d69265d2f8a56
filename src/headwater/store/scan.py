"""Scans over the durable changes of a vbucket: what a producer must know about a snapshot before it sends it.

The producer calls `scan_snapshot`, `completed_prepares` and `sync_seqnos` before a snapshot's marker, the handler of
GET_ALL_VB_SEQNOS uses `CollectionSeqnos`, and the dashboard `CollectionDocuments`. Each is one walk of a kernel over
runs, which keeps and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    Int64s,
    UInt32s,
    UInt64,
    UInt64Rows,
    UInt64s,
    i64,
    kernel,
    load_u16,
    load_u32,
    load_u64,
    u32,
    u64,
)
from headwater.kernels.siphash import siphash128
from headwater.protocol.kernels.frame_runs import ABORT, PREPARE, SYSTEM_EVENT, collection_id, is_document_change
from headwater.protocol.manifest import CollectionCreated
from headwater.protocol.numbers import CollectionId
from headwater.store.checked_engine import CheckedView
from headwater.store.commits import GroupCommit
from headwater.store.data_format import blocks_of
from headwater.store.engine import Table
from headwater.store.prepares import sync_frames
from headwater.store.runs import as_run
from headwater.store.vbuckets import events_in

if TYPE_CHECKING:
    from headwater.store.bucket import Bucket

_FRAME_BYTES_MIN = 24 + 18 + 2
_SLOTS_MIN = 256
_DURABLE_WRITE = np.uint64(1 << 63)
"""Marks a remembered seqno as that of a prepare, commit or abort. No vbucket reaches seqnos of 64 bits."""
NO_SEQNOS: Column = np.empty(0, dtype=np.uint64)
_NO_COLLECTIONS: Column = np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotScan:
    """Which changes of a snapshot are superseded within it, and where it really ends for a stream."""

    superseded: Column
    """The seqnos to leave out, ascending."""
    last_wanted_seqno: int
    """The last change that the stream will get; 0 for none."""
    end_seqno: int
    """Where the snapshot has to end: at the seqno asked for, or before a change that must not be in the same one."""


def newest_in_snapshot(bucket: Bucket, vbucket: int, *, after_seqno: int, end_seqno: int) -> Column | None:
    """Return the seqnos of the newest versions of all keys at the end of a snapshot, ascending, from the index.

    Returns None if a scan reads less, or if the index does not know them: it has no prepares, and if a key has changed
    since that end, it does not know the version that the key had there.
    """
    if end_seqno - after_seqno < bucket.index.entries[vbucket]:
        return None
    if bucket.prepares.high_prepared[vbucket] or bucket.numbers.completed_seqnos[vbucket]:
        return None
    seqnos = bucket.index.newest_seqnos(vbucket)
    return None if len(seqnos) and seqnos[-1] > end_seqno else seqnos


def scan_snapshot(
    bucket: Bucket,
    vbucket: int,
    *,
    after_seqno: int,
    end_seqno: int,
    wanted: Column | None,
    with_events: bool,
    with_prepares: bool = False,
    splits: bool = False,
) -> SnapshotScan:
    """Scan the changes of a snapshot. `wanted` are the collections of the stream, None for all.

    A snapshot holds a key once: its newest version at the snapshot's end. The store keeps older versions inside the
    history window, so the scan remembers the newest of each key by the hash of the key, and leaves out the one before
    it. Prepares and aborts are not versions of their documents: with `with_prepares` they supersede one another, else
    the stream does not get them.

    With `splits` no prepare, commit or abort is left out: the snapshot ends before the second one of a key.
    """
    table = _empty_table(_SLOTS_MIN)
    found: list[Column] = []
    filtered, ids = wanted is not None, _NO_COLLECTIONS if wanted is None else wanted
    keys = last = 0
    for run in bucket.runs(vbucket, after_seqno=after_seqno):
        frames_max = len(run) // _FRAME_BYTES_MIN + 1
        if 2 * (keys + frames_max) > len(table):
            smaller, table = table, _empty_table(4 * (keys + frames_max))
            _reenter(smaller, table)
        superseded = np.empty(frames_max, dtype=np.uint64)
        count, fresh, reached, is_split = _scan(
            run, u64(end_seqno), bucket.index.secret, filtered, ids, with_events, with_prepares, splits, table,
            superseded,
        )  # fmt: skip
        found.append(superseded[:count])
        keys += fresh
        last = int(reached) or last
        if is_split:
            end_seqno = last
            break
    return SnapshotScan(
        superseded=np.sort(np.concatenate(found)) if found else NO_SEQNOS, last_wanted_seqno=last, end_seqno=end_seqno
    )


def _empty_table(slots: int) -> Column:
    return np.zeros((1 << (slots - 1).bit_length(), 3), dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSeqnos:
    """The durable writes of a snapshot. Each number is 0 if there is none."""

    first_visible: int
    """The first change that is neither a prepare nor an abort."""
    max_visible: int
    """The last of those."""
    high_prepared: int
    high_completed: int
    """The highest seqno of a prepare that is committed or aborted."""


def sync_seqnos(bucket: Bucket, vbucket: int, *, after_seqno: int, end_seqno: int) -> SyncSeqnos:
    first = visible = prepared = completed = 0
    for run in bucket.runs(vbucket, after_seqno=after_seqno):
        found = [int(seqno) for seqno in _sync_seqnos(run, u64(end_seqno))]
        first, visible = first or found[0], found[1] or visible
        prepared, completed = found[2] or prepared, max(found[3], completed)
    return SyncSeqnos(first_visible=first, max_visible=visible, high_prepared=prepared, high_completed=completed)


def completed_prepares(bucket: Bucket, vbucket: int, *, after_seqno: int, end_seqno: int) -> Column:
    """Return the seqnos of the prepares that a snapshot commits or aborts, unordered; they may precede it."""
    runs = bucket.runs(vbucket, after_seqno=after_seqno)
    return np.concatenate([NO_SEQNOS, *(sync_frames(run, end_seqno=end_seqno)[1] for run in runs)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSeqnos:
    """The last durable seqnos of a collection. Prepares and aborts count, as in a server of 7.0.5.

    The store does not track these, so `high_seqnos` reads the changes themselves, the newest first. It finds a
    collection that is written to at once; for another it reads everything after the last change. That may take long,
    so it may run in a thread: `of` has taken from the bucket what it needs.
    """

    bucket: Bucket
    collection: CollectionId
    young: dict[int, list[GroupCommit]]
    """By vbucket, oldest first."""

    @classmethod
    def of(cls, bucket: Bucket, vbuckets: Sequence[int], collection: CollectionId) -> CollectionSeqnos:
        young = {vbucket: bucket.young.of(vbucket) for vbucket in vbuckets}
        return cls(bucket=bucket, collection=collection, young=young)

    def high_seqnos(self) -> list[int]:
        """Return the seqno for each vbucket: at least that of the collection's creation, 0 if there was none."""
        return [self._high_seqno(vbucket) for vbucket in self.young]

    def _high_seqno(self, vbucket: int) -> int:
        with self.bucket.reading(vbucket) as view:
            for run in _runs_newest_first(view, vbucket, self.young[vbucket]):
                created = (
                    seqno
                    for seqno, event in events_in(run)
                    if type(event) is CollectionCreated and event.collection_id == self.collection
                )
                seqno = max(int(_last_of_collection(run, self.collection)), *created, 0)
                if seqno:
                    return seqno
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionDocuments:
    """The number of documents of each collection in a vbucket, without the deleted.

    The index does not know collections, so `count` reads the changes, the newest first, until it has found every
    document. That may take long, so it may run in a thread: `of` has taken from the bucket what it needs.
    """

    bucket: Bucket
    vbucket: int
    seqnos: Column
    """The seqnos of the newest changes of all documents, ascending."""
    young: list[GroupCommit]

    @classmethod
    def of(cls, bucket: Bucket, vbucket: int) -> CollectionDocuments:
        seqnos = bucket.index.live_seqnos(vbucket)
        return cls(bucket=bucket, vbucket=vbucket, seqnos=seqnos, young=bucket.young.of(vbucket))

    def count(self, *, is_over: Callable[[], bool]) -> dict[int, int] | None:
        """Return the counts by collection id; None if `is_over` returned True first."""
        found = np.full(len(self.seqnos), _NOT_FOUND, dtype=np.int64)
        left = len(found)
        with self.bucket.reading(self.vbucket) as view:
            for run in _runs_newest_first(view, self.vbucket, self.young):
                if left == 0:
                    break
                if is_over():
                    return None
                left -= int(_find_collections(run, self.seqnos, found))
        ids, counts = np.unique(found[found != _NOT_FOUND], return_counts=True)
        return dict(zip(ids.tolist(), counts.tolist(), strict=True))


_NOT_FOUND = -1


def _runs_newest_first(view: CheckedView, vbucket: int, young: Sequence[GroupCommit]) -> Iterator[Bytes]:
    for commit in reversed(young):
        yield commit.run(vbucket)
    start, end = blocks_of(vbucket)
    while (last := view.last_before(Table.BLOCKS, end)) is not None and last[0] >= start:
        yield as_run(last[1])
        end = last[0]


# --- kernels ------------------------------------------------------------------------------------------------------


@kernel
def _scan(
    run: AnyBytes, end_seqno: UInt64, secret: UInt64s, filtered: bool, wanted: UInt32s, with_events: bool,
    with_prepares: bool, splits: bool, table: UInt64Rows, superseded: UInt64s,
) -> tuple[int, int, int, bool]:  # fmt: skip
    """Returns how many are superseded, how many keys are new, the last seqno for the stream, whether it is split."""
    at = i64(0)
    count = i64(0)
    keys = i64(0)
    last = u64(0)
    is_split = False
    mask = len(table) - 1
    while at < len(run):
        seqno = load_u64(run, at + 24)
        if seqno > end_seqno:
            break
        opcode = run[at + 1]
        if opcode == SYSTEM_EVENT:
            if with_events:
                last = seqno
        elif with_prepares or (opcode != PREPARE and opcode != ABORT):
            key_at = at + 24 + i64(run[at + 4])
            position = np.searchsorted(wanted, u32(collection_id(run, key_at)))
            if not filtered or (position < len(wanted) and wanted[position] == collection_id(run, key_at)):
                is_undecided = opcode == PREPARE or opcode == ABORT
                is_durable_write = is_undecided or load_u32(run, at + 12) != 0
                high, low = siphash128(run, key_at, i64(load_u16(run, at + 2)), secret[0], secret[1])
                if is_undecided:
                    low = ~low
                slot = i64(high & u64(mask))
                while table[slot, 2] != 0 and (table[slot, 0] != high or table[slot, 1] != low):
                    slot = (slot + 1) & mask
                if table[slot, 2] == 0:
                    keys += 1
                elif splits and (is_durable_write or table[slot, 2] & _DURABLE_WRITE != 0):
                    is_split = True
                    break
                else:
                    superseded[count] = table[slot, 2] & ~_DURABLE_WRITE
                    count += 1
                table[slot, 0] = high
                table[slot, 1] = low
                table[slot, 2] = seqno | _DURABLE_WRITE if is_durable_write else seqno
                last = seqno
        at += 24 + i64(load_u32(run, at + 8))
    return count, keys, last, is_split


@kernel
def _reenter(table: UInt64Rows, larger: UInt64Rows) -> None:
    mask = len(larger) - 1
    for old in range(len(table)):
        if table[old, 2] != 0:
            slot = i64(table[old, 0] & u64(mask))
            while larger[slot, 2] != 0:
                slot = (slot + 1) & mask
            for word in range(3):
                larger[slot, word] = table[old, word]


@kernel
def _sync_seqnos(run: AnyBytes, end_seqno: UInt64) -> tuple[int, int, int, int]:
    at = i64(0)
    first = u64(0)
    visible = u64(0)
    prepared = u64(0)
    completed = u64(0)
    while at < len(run):
        seqno = load_u64(run, at + 24)
        if seqno > end_seqno:
            break
        opcode = run[at + 1]
        if opcode == PREPARE:
            prepared = seqno
        elif opcode == ABORT:
            completed = max(completed, load_u64(run, at + 32))
        else:
            visible = seqno
            if first == 0:
                first = seqno
            if load_u32(run, at + 12) != 0:
                completed = max(completed, seqno - u64(load_u32(run, at + 12)))
        at += 24 + i64(load_u32(run, at + 8))
    return first, visible, prepared, completed


@kernel
def _find_collections(run: AnyBytes, seqnos: UInt64s, found: Int64s) -> int:
    """Enter the collections of the changes with these ascending seqnos. Returns how many were not known before."""
    at = i64(0)
    new = i64(0)
    while at < len(run):
        if is_document_change(run[at + 1]):
            seqno = load_u64(run, at + 24)
            position = np.searchsorted(seqnos, seqno)
            if position < len(seqnos) and seqnos[position] == seqno and found[position] == _NOT_FOUND:
                found[position] = i64(collection_id(run, at + 24 + i64(run[at + 4])))
                new += 1
        at += 24 + i64(load_u32(run, at + 8))
    return new


@kernel
def _last_of_collection(run: AnyBytes, wanted: int) -> int:
    """Return the seqno of the last change in a run that is about a document of a collection; 0 if there is none."""
    at = i64(0)
    seqno = u64(0)
    while at < len(run):
        extras_at = at + 24
        key_at = extras_at + i64(run[at + 4])
        if run[at + 1] != SYSTEM_EVENT and collection_id(run, key_at) == u64(wanted):
            seqno = load_u64(run, extras_at)
        at = extras_at + i64(load_u32(run, at + 8))
    return int(seqno)
