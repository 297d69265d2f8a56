"""A snapshot of a stream: where it ends, what is left out of it, and how it is announced.

A snapshot ends at what is durable when it begins. Inside it a key comes once, in its newest version at that end.
Versions that a later one supersedes within the snapshot are found by a survey before the first is sent, unless the
vbucket has no superseded versions at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from headwater.node.producer.controls import Controls
from headwater.node.producer.outbound import NO_SUPERSEDED
from headwater.node.producer.stream_filter import StreamFilter
from headwater.protocol.kernels.frame_header import ABORT, PREPARE, SYSTEM_EVENT, collection_id
from headwater.protocol.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
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
from headwater.protocol.kernels.siphash import siphash128
from headwater.protocol.messages.dcp_changes import SnapshotFlags, SnapshotMarker
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.store.bucket import Bucket
from headwater.store.runs import first_seqno

# Surveying a snapshot before it is sent: which of its changes are superseded within it, and where it really ends.
#
# A snapshot holds a key once: its newest version at the snapshot's end. The store keeps older versions inside the
# history window, so a snapshot that may hold some has to be looked through first. One walk, newest versions remembered
# by the hash of their key.


_FRAME_BYTES_MIN = 24 + 18 + 2
_SLOTS_MIN = 256
NO_SEQNOS: Column = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    superseded: Column
    """The seqnos to leave out, ascending."""
    last_wanted_seqno: int
    """The last change that the stream will get, 0 for none."""


def survey(
    runs: Iterable[Bytes],
    *,
    end_seqno: int,
    secret: Column,
    wanted: Column | None,
    with_events: bool,
    with_prepares: bool = False,
) -> Survey:
    """Look through the changes of a snapshot. `wanted` are the collections of the stream, None for all.

    Prepares and aborts are no versions of their documents: they neither supersede nor are they superseded.
    """
    table = _empty_table(_SLOTS_MIN)
    found: list[Column] = []
    filtered = wanted is not None
    ids = np.empty(0, dtype=np.uint32) if wanted is None else wanted
    keys = last = 0
    for run in runs:
        frames_max = len(run) // _FRAME_BYTES_MIN + 1
        if 2 * (keys + frames_max) > len(table):
            table = _grown(table, 4 * (keys + frames_max))
        superseded = np.empty(frames_max, dtype=np.uint64)
        count, fresh, reached = _survey(
            run, u64(end_seqno), secret, filtered, ids, with_events, with_prepares, table, superseded
        )
        found.append(superseded[:count])
        keys += fresh
        last = int(reached) or last
    return Survey(superseded=np.sort(np.concatenate(found)) if found else NO_SEQNOS, last_wanted_seqno=last)


def _empty_table(slots: int) -> Column:
    return np.zeros((1 << (slots - 1).bit_length(), 3), dtype=np.uint64)


def _grown(table: Column, slots: int) -> Column:
    larger = _empty_table(slots)
    _reenter(table, larger)
    return larger


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
def _survey(
    run: AnyBytes, end_seqno: UInt64, secret: UInt64s, filtered: bool, wanted: UInt32s, with_events: bool,
    with_prepares: bool, table: UInt64Rows, superseded: UInt64s,
) -> tuple[int, int, int]:  # fmt: skip
    at = i64(0)
    count = i64(0)
    keys = i64(0)
    last = u64(0)
    mask = len(table) - 1
    while at < len(run):
        seqno = load_u64(run, at + 24)
        if seqno > end_seqno:
            break
        opcode = run[at + 1]
        if opcode == SYSTEM_EVENT:
            if with_events:
                last = seqno
        elif opcode == PREPARE or opcode == ABORT:
            if with_prepares:
                last = seqno
        else:
            key_at = at + 24 + i64(run[at + 4])
            position = np.searchsorted(wanted, u32(collection_id(run, key_at)))
            if not filtered or (position < len(wanted) and wanted[position] == collection_id(run, key_at)):
                high, low = siphash128(run, key_at, i64(load_u16(run, at + 2)), secret[0], secret[1])
                slot = i64(high & u64(mask))
                while table[slot, 2] != 0 and (table[slot, 0] != high or table[slot, 1] != low):
                    slot = (slot + 1) & mask
                if table[slot, 2] != 0:
                    superseded[count] = table[slot, 2]
                    count += 1
                else:
                    keys += 1
                table[slot, 0] = high
                table[slot, 1] = low
                table[slot, 2] = seqno
                last = seqno
        at += 24 + i64(load_u32(run, at + 8))
    return count, keys, last


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSeqnos:
    """What a snapshot holds of durable writes. Each is 0 where there is none."""

    max_visible: int
    """The last change that is neither a prepare nor an abort."""
    high_prepared: int
    high_completed: int
    """The highest seqno of a prepare that is committed or aborted."""


def sync_seqnos(runs: Iterable[Bytes], *, end_seqno: int) -> SyncSeqnos:
    visible = prepared = completed = 0
    for run in runs:
        found = [int(seqno) for seqno in _sync_seqnos(run, u64(end_seqno))]
        visible, prepared, completed = found[0] or visible, found[1] or prepared, max(found[2], completed)
    return SyncSeqnos(max_visible=visible, high_prepared=prepared, high_completed=completed)


@kernel
def _sync_seqnos(run: AnyBytes, end_seqno: UInt64) -> tuple[int, int, int]:
    at = i64(0)
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
            if load_u32(run, at + 12) != 0:
                completed = max(completed, seqno - u64(load_u32(run, at + 12)))
        at += 24 + i64(load_u32(run, at + 8))
    return visible, prepared, completed


_FROM_DISK = SnapshotFlags.DISK | SnapshotFlags.CHECKPOINT
_FIRST_FROM_MEMORY = SnapshotFlags.MEMORY | SnapshotFlags.CHECKPOINT
_WITH_HISTORY = SnapshotFlags.HISTORY | SnapshotFlags.MAY_CONTAIN_DUPLICATES


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The snapshot that is being sent."""

    after_seqno: int
    """It holds what comes behind this one."""
    end_seqno: int
    in_memory: bool
    """Everything in it was young when it began."""
    has_history: bool
    """It holds every version, and not only the newest of each key."""
    window_start_seqno: int
    """Where the history window began when the snapshot did."""
    superseded: Column = field(default_factory=lambda: NO_SUPERSEDED)
    is_void: bool = False
    """Nothing in it is for the stream, which can't be told so."""
    is_oso: bool = False
    last_sent_seqno: int = 0


def take_snapshot(
    bucket: Bucket,
    vbucket: VBucketId,
    *,
    after_seqno: int,
    stream_filter: StreamFilter,
    wants_history: bool,
    with_prepares: bool,
) -> Snapshot:
    """The snapshot of what is durable behind a seqno, with what has to be known before its marker is sent."""
    end = int(bucket.vbuckets.durable_seqnos[vbucket])
    window_start = history_start(bucket, vbucket)
    has_history = wants_history and after_seqno >= window_start
    if wants_history and not has_history:
        # Before the window only the newest versions are left, so that is a snapshot of its own.
        end = min(end, window_start)
    snapshot = Snapshot(
        after_seqno=after_seqno,
        end_seqno=end,
        in_memory=_is_young(bucket, vbucket, after_seqno + 1),
        has_history=has_history,
        window_start_seqno=window_start,
    )
    keeps_all = has_history or bucket.vbuckets.superseded[vbucket] == 0
    if not (stream_filter.knows_collections and keeps_all):
        _look_through(snapshot, bucket, vbucket, stream_filter, with_prepares=with_prepares)
    return snapshot


def _look_through(
    snapshot: Snapshot, bucket: Bucket, vbucket: VBucketId, stream_filter: StreamFilter, *, with_prepares: bool
) -> None:
    found = survey(
        bucket.runs(vbucket, after_seqno=snapshot.after_seqno),
        end_seqno=snapshot.end_seqno,
        secret=bucket.index.secret,
        # A scope gets collections inside the snapshot, too.
        wanted=None if stream_filter.scope is not None else stream_filter.wanted(bucket.manifest),
        with_events=stream_filter.knows_collections,
        with_prepares=with_prepares,
    )
    if not snapshot.has_history:
        snapshot.superseded = found.superseded
    if not stream_filter.knows_collections:
        # It knows of no seqno-advanced either, so the snapshot has to end with a change that it gets.
        snapshot.is_void = found.last_wanted_seqno == 0
        snapshot.end_seqno = found.last_wanted_seqno or snapshot.end_seqno


def snapshot_marker(
    snapshot: Snapshot, bucket: Bucket, vbucket: VBucketId, controls: Controls, *, first_start_seqno: int | None
) -> SnapshotMarker:
    """The marker that announces a snapshot. The first of a stream starts where the consumer's own snapshot did."""
    start = snapshot.after_seqno + 1 if first_start_seqno is None else first_start_seqno
    from_memory = SnapshotFlags.MEMORY if first_start_seqno is None else _FIRST_FROM_MEMORY
    flags = from_memory if snapshot.in_memory else _FROM_DISK
    if snapshot.has_history:
        flags |= _WITH_HISTORY
    marker = SnapshotMarker(start_seqno=Seqno(start), end_seqno=Seqno(snapshot.end_seqno), flags=flags)
    if controls.marker_version == "1.0":
        return marker
    visible, prepared, completed = _stream_sync_seqnos(snapshot, bucket, vbucket)
    marker = replace(marker, max_visible_seqno=visible, high_completed_seqno=completed)
    if controls.marker_version == "2.0":
        return marker
    facts = bucket.vbuckets.facts[vbucket]
    purge_seqno = facts.purge_seqno if facts else Seqno(0)
    return replace(marker, high_prepared_seqno=prepared, purge_seqno=purge_seqno)


def _stream_sync_seqnos(snapshot: Snapshot, bucket: Bucket, vbucket: VBucketId) -> tuple[Seqno, Seqno, Seqno]:
    """What a marker tells of durable writes: the highest seqnos that are visible, prepared and completed."""
    after, prepares = snapshot.after_seqno, bucket.prepares
    known_prepared = int(prepares.high_prepared[vbucket])
    known_completed = int(prepares.high_completed[vbucket])
    if known_prepared == known_completed == 0:
        return Seqno(snapshot.end_seqno), Seqno(0), Seqno(0)
    found = sync_seqnos(bucket.runs(vbucket, after_seqno=after), end_seqno=snapshot.end_seqno)
    # What came before the snapshot counts as well, as far as it is known not to have come after it.
    prepared = found.high_prepared or (known_prepared if known_prepared <= after else 0)
    completed = found.high_completed or (known_completed if known_completed <= after else 0)
    return Seqno(found.max_visible or after), Seqno(prepared), Seqno(completed)


def history_start(bucket: Bucket, vbucket: VBucketId) -> int:
    """The seqno after which every version is kept."""
    facts = bucket.vbuckets.facts[vbucket]
    return 0 if facts is None else facts.history_start_seqno


def _is_young(bucket: Bucket, vbucket: VBucketId, seqno: int) -> bool:
    """Whether the changes from a seqno on are all in commits that are still in memory."""
    commits = bucket.young.of(vbucket, after_seqno=seqno - 1)
    return bool(commits) and first_seqno(commits[0].run(vbucket)) <= seqno
