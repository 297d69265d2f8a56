"""A snapshot of a stream: where it ends, what is left out of it, and how it is announced.

A stream sends one snapshot after the other. A snapshot ends at the seqno that is durable when it begins, and has every
key once, in its newest version up to that end. Before the first change is sent, the index or a scan (`store.scan`)
finds the versions that later ones in the snapshot supersede, unless the vbucket has no superseded versions at all.

Durable writes, as recorded from a 7.0.5 server:

- A consumer with sync writes gets a prepare, and its commit or abort as such, while the snapshot is in memory. There
  a key has at most one prepare or abort and one version, and neither replaces the other. A second one begins the next
  snapshot, as a replica of a real server refuses a snapshot with both. From disk it gets the newest prepare or abort
  of a key, and commits as the whole change. As in 8.0, it does not get prepares that the snapshot completes.
- Any other consumer gets only what was committed. A stream that has reached the end before passes a snapshot of only
  prepares and aborts in silence. One that begins later gets a marker and a seqno-advanced for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from headwater.kernels.memory import Column
from headwater.node.producer.controls import Controls, StreamFilter
from headwater.node.producer.outbound import Listing
from headwater.protocol.messages.dcp_changes import SnapshotFlags, SnapshotMarker
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.store.bucket import Bucket
from headwater.store.scan import (
    NO_SEQNOS,
    SnapshotScan,
    completed_prepares,
    newest_in_snapshot,
    scan_snapshot,
    sync_seqnos,
)

_FROM_DISK = SnapshotFlags.DISK | SnapshotFlags.CHECKPOINT
_BEGINS_CHECKPOINT = SnapshotFlags.MEMORY | SnapshotFlags.CHECKPOINT
_WITH_HISTORY = SnapshotFlags.HISTORY | SnapshotFlags.MAY_CONTAIN_DUPLICATES


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The snapshot that is being sent."""

    after_seqno: int
    """It holds the changes after this seqno."""
    end_seqno: int
    in_memory: bool
    """Everything in it was still in memory when it began."""
    has_history: bool
    """It holds every version, not only the newest of each key."""
    window_start_seqno: int
    """Where the history window began when the snapshot began."""
    listed: Column = field(default_factory=lambda: NO_SEQNOS)
    """Seqnos, ascending."""
    listing: Listing = Listing.NOTHING
    keeps_dropped_collections: bool = False
    """It keeps changes of collections that were dropped meanwhile: the drop itself comes in a later snapshot."""
    is_void: bool = False
    """It has nothing for the stream, and no message is sent for it."""
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
    hides_completed: bool,
    from_disk: bool,
    is_live: bool,
) -> Snapshot:
    """The snapshot of what is durable after a seqno, with everything that must be known before its marker is sent.

    With `hides_completed`, a snapshot from disk leaves out prepares that it commits or aborts itself. With `from_disk`,
    it counts as one from disk even if it is in memory. `is_live` means that the stream has been at the end of the
    vbucket before, and will not end with this snapshot.
    """
    numbers = bucket.vbuckets
    end = int(numbers.durable_seqnos[vbucket])
    window_start = history_start(bucket, vbucket)
    has_history = wants_history and after_seqno >= window_start
    if wants_history and not has_history:
        # Before the window only the newest versions are left, so that part is a snapshot of its own.
        end = min(end, window_start)
    snapshot = Snapshot(
        after_seqno=after_seqno,
        end_seqno=end,
        in_memory=not from_disk and bucket.is_young(vbucket, from_seqno=after_seqno + 1),
        has_history=has_history,
        window_start_seqno=window_start,
    )
    if is_live and not with_prepares and stream_filter.lets_all_pass and numbers.visible_seqnos[vbucket] <= after_seqno:
        snapshot.is_void = True
        return snapshot
    # A prepare counts as superseded, so a vbucket that has any is always examined.
    keeps_all = has_history or numbers.superseded[vbucket] == 0
    may_hide_its_end = with_prepares and snapshot.in_memory and stream_filter.wanted(bucket.manifest) is not None
    if stream_filter.knows_collections and keeps_all and not may_hide_its_end:
        return snapshot
    newest = None
    if stream_filter.knows_collections and not may_hide_its_end:
        newest = newest_in_snapshot(bucket, vbucket, after_seqno=after_seqno, end_seqno=end)
    if newest is None:
        _look_through(snapshot, bucket, vbucket, stream_filter, with_prepares=with_prepares)
        if hides_completed and with_prepares and snapshot.listing is Listing.SUPERSEDED and not snapshot.in_memory:
            completed = completed_prepares(
                bucket, vbucket, after_seqno=snapshot.after_seqno, end_seqno=snapshot.end_seqno
            )
            snapshot.listed = np.union1d(snapshot.listed, completed)
    else:
        snapshot.listed, snapshot.listing = newest, Listing.NEWEST
    return snapshot


def _look_through(
    snapshot: Snapshot, bucket: Bucket, vbucket: VBucketId, stream_filter: StreamFilter, *, with_prepares: bool
) -> None:
    def scan(wanted: Column | None) -> SnapshotScan:
        return scan_snapshot(
            bucket,
            vbucket,
            after_seqno=snapshot.after_seqno,
            end_seqno=snapshot.end_seqno,
            wanted=wanted,
            with_events=stream_filter.knows_collections,
            with_prepares=with_prepares,
            splits=with_prepares and snapshot.in_memory,
        )

    # A scope may get collections inside the snapshot, so all changes are scanned.
    found = scan(None if stream_filter.scope is not None else stream_filter.wanted(bucket.manifest))
    hides_its_end = found.last_wanted_seqno < (snapshot.end_seqno if snapshot.has_history else found.end_seqno)
    takes_all = stream_filter.knows_collections and stream_filter.lets_all_pass
    if hides_its_end and takes_all and with_prepares and snapshot.in_memory:
        # The collection of the last change was dropped just now. As recorded from 8.0.2, a consumer with sync writes
        # does not know seqno-advanced, so that change itself has to be sent.
        snapshot.keeps_dropped_collections = True
        found = scan(None)
    if not snapshot.has_history:
        snapshot.listed, snapshot.listing = found.superseded, Listing.SUPERSEDED
        snapshot.end_seqno = found.end_seqno
    if not stream_filter.knows_collections:
        # It does not know seqno-advanced either, so the snapshot has to end with a change that it gets.
        snapshot.is_void = found.last_wanted_seqno == 0
        snapshot.end_seqno = found.last_wanted_seqno or snapshot.end_seqno


def snapshot_marker(
    snapshot: Snapshot, bucket: Bucket, vbucket: VBucketId, controls: Controls, *, first_start_seqno: int | None
) -> SnapshotMarker:
    """The marker that announces a snapshot. The first one of a stream starts where the consumer's snapshot did."""
    # As recorded from a 7.0.5 server: the first marker of a stream from 0 starts at 0, later ones at the last seqno
    # plus 1. Markers from disk have the flags 0x06, those from memory 0x01 or 0x05.
    start = _later_start(snapshot, bucket, vbucket, controls) if first_start_seqno is None else first_start_seqno
    begins_checkpoint = first_start_seqno is not None or _may_repeat_a_key(bucket, vbucket, controls)
    from_memory = _BEGINS_CHECKPOINT if begins_checkpoint else SnapshotFlags.MEMORY
    flags = from_memory if snapshot.in_memory else _FROM_DISK
    if snapshot.has_history:
        flags |= _WITH_HISTORY
    marker = SnapshotMarker(start_seqno=Seqno(start), end_seqno=Seqno(snapshot.end_seqno), flags=flags)
    # As recorded from an 8.0.2 server: version 2.2 only adds to disk snapshots, so those in memory have 2.0 with sync
    # writes and 1.0 without. Before 2.2, only consumers with sync writes got another version than 1.0.
    # A consumer with sync writes but without a name is no replica: it gets 1.0.
    is_2_2 = controls.marker_version == "2.2" and not snapshot.in_memory
    is_replica = controls.sync_writes and bool(controls.consumer_name)
    if not (is_2_2 or is_replica or controls.marker_version == "2.0"):
        return marker
    if is_replica or not is_2_2:
        visible, prepared, completed = _stream_sync_seqnos(snapshot, bucket, vbucket)
    else:
        # As recorded from 8.0.2: a consumer that gets no prepares does not get these seqnos either.
        visible = prepared = completed = Seqno(0)
    # A replica needs the high completed seqno of a snapshot from disk, which has no commits as such. It closes the
    # connection if the marker lacks that seqno. In memory, it counts commits itself.
    marker = replace(
        marker, max_visible_seqno=visible, high_completed_seqno=Seqno(0) if snapshot.in_memory else completed
    )
    if not is_2_2:
        return marker
    facts = bucket.vbuckets.facts[vbucket]
    return replace(marker, purge_seqno=facts.purge_seqno if facts else Seqno(0), high_prepared_seqno=prepared)


def _may_repeat_a_key(bucket: Bucket, vbucket: VBucketId, controls: Controls) -> bool:
    """Whether a replica may get a key again that is in its open checkpoint and can't be replaced there.

    A 7.0.5 replica replaces plain changes of a key, but closes the connection if one of the two is a durable write. Its
    checkpoint stays open until a marker begins another one. The node does not track the keys of that checkpoint: once
    the vbucket has seen durable writes, every snapshot begins a new one.
    """
    has_durable_writes = bucket.prepares.high_prepared[vbucket] or bucket.vbuckets.completed_seqnos[vbucket]
    return controls.sync_writes and bool(has_durable_writes)


def _stream_sync_seqnos(snapshot: Snapshot, bucket: Bucket, vbucket: VBucketId) -> tuple[Seqno, Seqno, Seqno]:
    """What a marker reports of durable writes: the highest seqnos that are visible, prepared and completed.

    The high prepared seqno is in the snapshot, or is 0: newer servers refuse any other (kv_engine,
    dcp_snapshot_marker_codec.cc).
    """
    after, numbers = snapshot.after_seqno, bucket.vbuckets
    known_completed = int(numbers.completed_seqnos[vbucket])
    if not bucket.prepares.high_prepared[vbucket] and not known_completed:
        return Seqno(snapshot.end_seqno), Seqno(0), Seqno(0)
    found = sync_seqnos(bucket, vbucket, after_seqno=after, end_seqno=snapshot.end_seqno)
    # Seqnos before the snapshot count as well, if they are known not to be after it. The commit or abort of a prepare
    # may have been compacted away, but the vbucket's own number is kept.
    visible = found.max_visible or min(after, int(numbers.visible_seqnos[vbucket]))
    completed = found.high_completed or (known_completed if known_completed <= after else 0)
    if snapshot.end_seqno == numbers.durable_seqnos[vbucket]:
        completed = known_completed
    # Whatever was completed was prepared, even if the prepare is gone or never came to this copy.
    prepared = max(found.high_prepared, completed if completed > after else 0)
    return Seqno(visible), Seqno(prepared), Seqno(completed)


def _later_start(snapshot: Snapshot, bucket: Bucket, vbucket: VBucketId, controls: Controls) -> int:
    """The start of a snapshot that is not the first of its stream: after the last one, as recorded from 7.0.5.

    That server's memory markers start at the first change that the consumer gets, which shows if prepares precede it.
    """
    start = snapshot.after_seqno + 1
    if controls.sync_writes or not snapshot.in_memory or not bucket.prepares.high_prepared[vbucket]:
        return start
    found = sync_seqnos(bucket, vbucket, after_seqno=snapshot.after_seqno, end_seqno=snapshot.end_seqno)
    return found.first_visible or start


def history_start(bucket: Bucket, vbucket: VBucketId) -> int:
    """The seqno after which every version is kept."""
    facts = bucket.vbuckets.facts[vbucket]
    return 0 if facts is None else facts.history_start_seqno
