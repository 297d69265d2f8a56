"""One stream: the changes of one vbucket, for one consumer, as snapshots.

A stream remembers how far it has come and nothing else: what it sends it reads anew, from young commits in memory or
from blocks on disk, whichever hold what comes next. So a slow consumer costs no memory, and there is no seam between
backfill and live: both are "what is durable after the last seqno that was passed".

A snapshot ends at what is durable when it begins. Inside it a key comes once, in its newest version at that end.
Versions that a later one supersedes within the snapshot are found by a survey before the first is sent, unless the
vbucket has no superseded versions at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from headwater.errors import StoreError
from headwater.node.producer.controls import Controls, OsoMode
from headwater.node.producer.outbound import NO_SUPERSEDED, Shape, Stop, shape_run
from headwater.node.producer.survey import survey, sync_seqnos
from headwater.protocol.connection_state import ConnectionLost
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frame_info import FrameInfo, stream_id
from headwater.protocol.frames import decode_frame
from headwater.protocol.kernels.memory import Bytes, Column
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_snapshot import (
    OsoFlags,
    OsoSnapshot,
    SeqnoAdvanced,
    SnapshotFlags,
    SnapshotMarker,
)
from headwater.protocol.messages.dcp_stream import SetVBucketState, StreamEnd, VBucketState
from headwater.protocol.messages.dcp_system_event import SystemEvent
from headwater.protocol.numbers import DEFAULT_COLLECTION, SEQNO_MAX, CollectionId, ScopeId, Seqno, VBucketId
from headwater.protocol.stream_state import (
    END_REASONS,
    BackfillDone,
    BackfillFailed,
    BackfillStarted,
    CloseRequested,
    ConsumerTooSlow,
    EndReached,
    FilterEmptied,
    HandOverAcknowledged,
    PendingSent,
    PrivilegesLost,
    ProducerStream,
    TakeoverStarted,
    VBucketRolledBack,
    VBucketStateChanged,
    producer_stream_after,
)
from headwater.protocol.system_events import (
    FLATBUFFERS_VERSION,
    CollectionCreated,
    CollectionDropped,
    CollectionModified,
    Event,
    ScopeDropped,
    decode_event,
    encode_event,
)
from headwater.store.bucket import Bucket
from headwater.store.runs import first_seqno

Piece = bytes | memoryview
"""Some frames. The changes are handed on in the memory that the kernel wrote them to."""

CHUNK_BYTES = 512 * 1024
"""What a stream sends before the next one has its turn."""
_FRAME_BYTES_MIN = 24 + 13 + 12


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The snapshot that is being sent."""

    end_seqno: int
    superseded: Column = field(default_factory=lambda: NO_SUPERSEDED)
    last_sent_seqno: int = 0
    is_oso: bool = False
    has_history: bool = False
    """It holds every version, and not only the newest of each key."""
    window_start_seqno: int = 0
    """Where the history window began when the snapshot did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFilter:
    """Which changes a stream gets: all, those of some collections, or those of a scope."""

    collections: frozenset[CollectionId] | None = None
    scope: ScopeId | None = None
    knows_collections: bool = True
    """A consumer that does not gets the default collection, and no system events."""


class Stream:
    """See the module."""

    def __init__(
        self,
        bucket: Bucket,
        vbucket: VBucketId,
        shape: Shape,
        stream_filter: StreamFilter,
        controls: Controls,
        *,
        start_seqno: Seqno,
        end_seqno: Seqno,
        snapshot_start_seqno: Seqno,
        is_takeover: bool = False,
        ignores_purges: bool = False,
    ) -> None:
        self._bucket = bucket
        self._controls = controls
        self._shape = shape
        self._filter = stream_filter
        self._live = set(stream_filter.collections or ())
        self._is_scope_dropped = False
        self._first_marker_start: int | None = snapshot_start_seqno
        self._is_takeover = is_takeover
        self._dead_commit: int | None = None
        """The commit that makes the vbucket dead here. Once it is durable, the consumer's may become active."""
        self._snapshot: Snapshot | None = None
        self.state_at_start = bucket.vbuckets.states[vbucket]
        facts = bucket.vbuckets.facts[vbucket]
        self._purge_seqno_known = SEQNO_MAX if ignores_purges or facts is None else facts.purge_seqno
        """The consumer was accepted with this one. Deletions that are purged later and were not sent, it would miss."""
        self.vbuuid_at_start = bucket.vbuckets.vbuuids[vbucket]
        self.vbucket = vbucket
        self.start_seqno = start_seqno
        self.passed_seqno: int = start_seqno
        """Everything up to here has been sent, or is not for this stream."""
        self.end_seqno = end_seqno
        self.state = ProducerStream.ACCEPTED
        self.was_rolled_back = False
        """The vbucket was taken back, so that this stream is over, wherever it had come."""
        self.frames_sent = 0
        self.bytes_sent = 0
        self.prepares_sent = 0
        if stream_filter.scope is not None:
            self._live = {c.id for scope, c in bucket.manifest.collections() if scope.id == stream_filter.scope}

    # --- what there is to do --------------------------------------------------------------------------------------

    @property
    def opaque(self) -> int:
        return self._shape.opaque

    @property
    def stream_id(self) -> int | None:
        return self._shape.stream_id or None

    @property
    def is_ended(self) -> bool:
        return self.state is ProducerStream.ENDED

    @property
    def has_work(self) -> bool:
        """Whether there is something to send, window or not."""
        if self.is_ended:
            return False
        numbers = self._bucket.vbuckets
        is_caught_up = self.state in (ProducerStream.ACCEPTED, ProducerStream.STREAMING)
        may_hand_over = (self._is_takeover and is_caught_up) or self._may_become_active
        return (
            self._snapshot is not None
            or int(numbers.durable_seqnos[self.vbucket]) != self.passed_seqno
            or self.passed_seqno >= self.end_seqno
            or self.was_rolled_back
            or self._has_another_vbucket
            or may_hand_over
        )

    @property
    def _has_another_vbucket(self) -> bool:
        """The vbucket is not what it was: it has changed its state, or has begun another branch of its history."""
        numbers = self._bucket.vbuckets
        return not self.is_handing_over and bool(
            numbers.states[self.vbucket] != self.state_at_start or numbers.vbuuids[self.vbucket] != self.vbuuid_at_start
        )

    def backlog(self) -> int:
        """How many seqnos the stream is behind."""
        return max(0, int(self._bucket.vbuckets.durable_seqnos[self.vbucket]) - self.passed_seqno)

    def produce(self, room_bytes: int) -> Iterator[Piece]:
        """The next frames, whole ones, until the room is used up or there is nothing more.

        The room may be overdrawn by one frame.
        """
        room = min(room_bytes, CHUNK_BYTES)
        try:
            for data in self._produce(room):
                self.bytes_sent += len(data)
                yield data
        except StoreError:
            # Live changes are read like a backfill, and may fail like one. A hand-over that can't go on is off.
            self._advance(BackfillStarted)
            yield from self._end(VBucketStateChanged if self.is_handing_over else BackfillFailed)

    def _produce(self, room: int) -> Iterator[Piece]:
        ending = self._cause_to_end()
        if ending is not None:
            yield from self._end(ending)
            return
        while room > 0 and not self.is_ended:
            if self._snapshot is None:
                begun = list(self._begin_snapshot())
                yield from begun
                room -= sum(len(data) for data in begun)
                if self._snapshot is None:
                    return
            for data in self._send_changes(self._snapshot, room):
                room -= len(data)
                yield data
            if self._snapshot is not None:
                return

    def _cause_to_end(self) -> type | None:
        numbers = self._bucket.vbuckets
        facts = numbers.facts[self.vbucket]
        if numbers.states[self.vbucket] != self.state_at_start and not self.is_handing_over:
            return VBucketStateChanged
        if self.was_rolled_back or int(numbers.durable_seqnos[self.vbucket]) < self.passed_seqno:
            return VBucketRolledBack
        if self._has_another_vbucket:
            # Where the new branch parts before what was sent, writes have made up for the seqnos but not for the loss.
            is_lost = facts is not None and facts.failover_log.newest.seqno < self.passed_seqno
            return VBucketRolledBack if is_lost else VBucketStateChanged
        if self._misses_deletions:
            # It would never hear of those deletions. Asked for again, the stream is answered with a rollback to 0.
            return VBucketRolledBack
        if self._is_overtaken:
            return ConsumerTooSlow
        if self._is_filter_empty:
            return FilterEmptied
        return None

    @property
    def _misses_deletions(self) -> bool:
        facts = self._bucket.vbuckets.facts[self.vbucket]
        purge_seqno = 0 if facts is None else facts.purge_seqno
        return purge_seqno > self._purge_seqno_known and 0 < self.passed_seqno < purge_seqno

    @property
    def _is_overtaken(self) -> bool:
        """Versions that belong to the snapshot may have been compacted away, so that it can't be completed.

        Those that were superseded inside it are not needed, unless it holds history.
        """
        if self._snapshot is None:
            return False
        window_start = self._window_start()
        needed_after = self.passed_seqno if self._snapshot.has_history else self._snapshot.end_seqno
        return window_start > max(needed_after, self._snapshot.window_start_seqno)

    # --- snapshots ------------------------------------------------------------------------------------------------

    def _begin_snapshot(self) -> Iterator[bytes]:
        """Begin the next snapshot, or end the stream, or find that there is nothing to do."""
        if self.passed_seqno >= self.end_seqno:
            yield from self._end(EndReached)
            return
        end = int(self._bucket.vbuckets.durable_seqnos[self.vbucket])
        if end <= self.passed_seqno:
            yield from self._hand_over()
            return
        in_memory = self._is_young(self.passed_seqno + 1)
        window_start = self._window_start()
        has_history = self._controls.change_streams and self.passed_seqno >= window_start
        if self._controls.change_streams and not has_history:
            # Before the window only the newest versions are left, so that is a snapshot of its own.
            end = min(end, window_start)
        snapshot = self._surveyed(end, has_history=has_history)
        if snapshot is None:
            # Nothing of it is for this stream, which knows of no seqno-advanced: pass it in silence.
            self.passed_seqno = end
            return
        self._advance(BackfillDone if in_memory else BackfillStarted)
        self._snapshot = snapshot
        snapshot.has_history = has_history
        snapshot.window_start_seqno = window_start
        if self._use_oso():
            snapshot.is_oso = True
            yield self._encode(OsoSnapshot(flags=OsoFlags.START))
        else:
            yield self._encode(self._marker(snapshot, in_memory=in_memory))
        self._first_marker_start = None

    def _window_start(self) -> int:
        """The seqno after which every version is kept."""
        facts = self._bucket.vbuckets.facts[self.vbucket]
        return 0 if facts is None else facts.history_start_seqno

    def _surveyed(self, end: int, *, has_history: bool) -> Snapshot | None:
        """The snapshot up to `end`, with what has to be known before its marker is sent."""
        numbers = self._bucket.vbuckets
        knows_collections = self._filter.knows_collections
        keeps_all = has_history or numbers.superseded[self.vbucket] == 0
        if knows_collections and keeps_all:
            return Snapshot(end_seqno=end)
        found = survey(
            self._bucket.runs(self.vbucket, after_seqno=self.passed_seqno),
            end_seqno=end,
            secret=self._bucket.index.secret,
            # A scope gets collections inside the snapshot, too.
            wanted=None if self._filter.scope is not None else self._wanted(),
            with_events=knows_collections,
            with_prepares=self._shape.sync_writes,
        )
        superseded = NO_SUPERSEDED if has_history else found.superseded
        if knows_collections:
            return Snapshot(end_seqno=end, superseded=superseded)
        if found.last_wanted_seqno == 0:
            return None
        return Snapshot(end_seqno=found.last_wanted_seqno, superseded=superseded)

    def _marker(self, snapshot: Snapshot, *, in_memory: bool) -> SnapshotMarker:
        is_first = self._first_marker_start is not None
        start = self._first_marker_start if self._first_marker_start is not None else self.passed_seqno + 1
        if in_memory:
            flags = SnapshotFlags.MEMORY | (SnapshotFlags.CHECKPOINT if is_first else SnapshotFlags(0))
        else:
            flags = SnapshotFlags.DISK | SnapshotFlags.CHECKPOINT
        if snapshot.has_history:
            flags |= SnapshotFlags.HISTORY | SnapshotFlags.MAY_CONTAIN_DUPLICATES
        marker = SnapshotMarker(start_seqno=Seqno(start), end_seqno=Seqno(snapshot.end_seqno), flags=flags)
        if self._controls.marker_version == "1.0":
            return marker
        visible, prepared, completed = self._sync_seqnos(snapshot)
        marker = replace(marker, max_visible_seqno=visible, high_completed_seqno=completed)
        if self._controls.marker_version == "2.0":
            return marker
        facts = self._bucket.vbuckets.facts[self.vbucket]
        purge_seqno = facts.purge_seqno if facts else Seqno(0)
        return replace(marker, high_prepared_seqno=prepared, purge_seqno=purge_seqno)

    def _sync_seqnos(self, snapshot: Snapshot) -> tuple[Seqno, Seqno, Seqno]:
        """What a marker tells of durable writes: the highest seqnos that are visible, prepared and completed."""
        end, prepares = snapshot.end_seqno, self._bucket.prepares
        known_prepared = int(prepares.high_prepared[self.vbucket])
        known_completed = int(prepares.high_completed[self.vbucket])
        if known_prepared == known_completed == 0:
            return Seqno(end), Seqno(0), Seqno(0)
        found = sync_seqnos(self._bucket.runs(self.vbucket, after_seqno=self.passed_seqno), end_seqno=end)
        # What came before the snapshot counts as well, as far as it is known not to have come after it.
        prepared = found.high_prepared or (known_prepared if known_prepared <= self.passed_seqno else 0)
        completed = found.high_completed or (known_completed if known_completed <= self.passed_seqno else 0)
        return Seqno(found.max_visible or self.passed_seqno), Seqno(prepared), Seqno(completed)

    def _use_oso(self) -> bool:
        """Out of order snapshots serve the first backfill of a filtered stream."""
        is_filtered = self._filter.collections is not None
        return (
            self._controls.oso is not OsoMode.OFF and is_filtered and self._first_marker_start == 0 == self.passed_seqno
        )

    def _is_young(self, seqno: int) -> bool:
        """Whether the changes from a seqno on are all in commits that are still in memory."""
        commits = self._bucket.young.of(self.vbucket, after_seqno=seqno - 1)
        return bool(commits) and first_seqno(commits[0].run(self.vbucket)) <= seqno

    # --- changes --------------------------------------------------------------------------------------------------

    def _send_changes(self, snapshot: Snapshot, room: int) -> Iterator[Piece]:
        for run in self._bucket.runs(self.vbucket, after_seqno=self.passed_seqno):
            at = 0
            while at < len(run):
                if room <= 0:
                    return
                sent = shape_run(
                    run,
                    at,
                    self._current_shape(),
                    end_seqno=snapshot.end_seqno,
                    window_bytes=room,
                    superseded=snapshot.superseded,
                    history_start_seqno=self._window_start(),
                )
                at = sent.at
                self.passed_seqno = max(self.passed_seqno, sent.passed_seqno)
                self.frames_sent += sent.frames
                self.prepares_sent += sent.prepares
                snapshot.last_sent_seqno = sent.last_seqno or snapshot.last_sent_seqno
                if sent.frames:
                    room -= len(sent.data)
                    yield sent.data.data
                if sent.stop is Stop.WINDOW:
                    return
                if sent.stop is Stop.END:
                    break
                data, at = self._send_event(snapshot, run, at)
                room -= len(data)
                if data:
                    yield data
                if self.is_ended:
                    return
            if self.passed_seqno >= snapshot.end_seqno:
                break
        yield from self._finish_snapshot(snapshot)

    def _finish_snapshot(self, snapshot: Snapshot) -> Iterator[bytes]:
        self.passed_seqno = max(self.passed_seqno, snapshot.end_seqno)
        hides_its_end = snapshot.last_sent_seqno < snapshot.end_seqno
        if snapshot.is_oso:
            if hides_its_end and self._controls.oso is OsoMode.ON_WITH_SEQNO_ADVANCED:
                yield self._encode(SeqnoAdvanced(seqno=Seqno(snapshot.end_seqno)))
            yield self._encode(OsoSnapshot(flags=OsoFlags.END))
        elif hides_its_end:
            yield self._encode(SeqnoAdvanced(seqno=Seqno(snapshot.end_seqno)))
        self._snapshot = None
        if self.state is ProducerStream.BACKFILLING:
            self._advance(BackfillDone)
        if self._is_filter_empty:
            yield from self._end(FilterEmptied)

    @property
    def _is_filter_empty(self) -> bool:
        return self._is_scope_dropped or (self._filter.collections is not None and not self._live)

    def _current_shape(self) -> Shape:
        wanted = self._wanted_ids()
        if wanted != self._shape.collections:
            self._shape = replace(self._shape, collections=wanted)
        return self._shape

    def _wanted_ids(self) -> frozenset[CollectionId] | None:
        """The collections whose changes this stream gets now, or None for all."""
        if not self._filter.knows_collections:
            return frozenset({DEFAULT_COLLECTION})
        if self._filter.collections is not None or self._filter.scope is not None:
            return frozenset(self._live)
        manifest = self._bucket.manifest
        if not manifest.has_dropped:
            return None
        return frozenset(collection.id for _, collection in manifest.collections())

    def _wanted(self) -> Column | None:
        ids = self._wanted_ids()
        return None if ids is None else np.array(sorted(ids), dtype=np.uint32)

    # --- system events --------------------------------------------------------------------------------------------

    def _send_event(self, snapshot: Snapshot, run: Bytes, at: int) -> tuple[bytes, int]:
        """The system event at `at` as this consumer gets it, maybe not at all, and where the next change starts."""
        decoded = decode_frame(run[at:].data)
        assert decoded is not None, "stored frames are whole"
        message = decode_message(decoded[0], WITH_COLLECTIONS)
        assert isinstance(message, SystemEvent)
        self.passed_seqno = message.seqno
        event = decode_event(message)
        if not self._concerns(event):
            return b"", at + decoded[1]
        snapshot.last_sent_seqno = message.seqno
        self.frames_sent += 1
        return self._encode(self._told(message, event)), at + decoded[1]

    def _told(self, message: SystemEvent, event: Event) -> SystemEvent:
        as_flatbuffers = self._controls.flatbuffers_events
        if not as_flatbuffers and message.version != FLATBUFFERS_VERSION:
            return message
        encoded = encode_event(event, as_flatbuffers=as_flatbuffers)
        return replace(message, version=encoded.version, key=encoded.key, value=encoded.value)

    def _concerns(self, event: Event) -> bool:
        """Whether the event is for this stream; a filter follows what it tells."""
        if not self._filter.knows_collections:
            return False
        if isinstance(event, CollectionModified) and not self._controls.flatbuffers_events:
            return False
        if self._filter.scope is not None:
            if event.scope_id != self._filter.scope:
                return False
            if isinstance(event, CollectionCreated):
                self._live.add(event.collection_id)
            elif isinstance(event, CollectionDropped):
                self._live.discard(event.collection_id)
            self._is_scope_dropped |= isinstance(event, ScopeDropped)
            return True
        if self._filter.collections is None:
            return True
        if not isinstance(event, CollectionCreated | CollectionDropped):
            return False
        concerns = event.collection_id in self._filter.collections
        if concerns and isinstance(event, CollectionDropped):
            self._live.discard(event.collection_id)
        return concerns

    # --- takeover -------------------------------------------------------------------------------------------------

    @property
    def is_handing_over(self) -> bool:
        return self.state in (ProducerStream.TAKEOVER_PENDING, ProducerStream.TAKEOVER_ACTIVE)

    @property
    def _may_become_active(self) -> bool:
        return self._dead_commit is not None and self._bucket.durable_commit >= self._dead_commit

    def _hand_over(self) -> Iterator[bytes]:
        """A takeover stream that has sent everything hands the vbucket over."""
        if self._may_become_active:
            self._dead_commit = None
            yield self._encode(SetVBucketState(state=VBucketState.ACTIVE))
            return
        if not self._is_takeover or self.state not in (ProducerStream.ACCEPTED, ProducerStream.STREAMING):
            return
        if self.state is ProducerStream.ACCEPTED:
            self._advance(BackfillDone)
        self._advance(TakeoverStarted)
        self._advance(PendingSent)
        yield self._encode(SetVBucketState(state=VBucketState.PENDING))

    def on_hand_over_answer(self) -> Iterator[bytes]:
        """The consumer has taken the state it was told. After pending comes active; after active the stream is over.

        Before active come the last writes: none is taken any more, but some may have been since pending was told.
        """
        if self._dead_commit is not None:
            return
        was_pending = self.state is ProducerStream.TAKEOVER_PENDING
        self._advance(HandOverAcknowledged)
        if was_pending:
            self._dead_commit = self._bucket.set_vbucket_state(self.vbucket, VBucketState.DEAD)
        else:
            yield self._encode(StreamEnd(reason=END_REASONS[EndReached]))

    # --- ending ---------------------------------------------------------------------------------------------------

    def close(self, *, tell: bool) -> Iterator[bytes]:
        """The consumer has closed the stream."""
        self._advance(CloseRequested)
        if tell:
            yield self._encode(StreamEnd(reason=END_REASONS[CloseRequested]))

    def lose_privileges(self) -> Iterator[bytes]:
        """The user may no longer read what the stream holds."""
        yield from self._end(PrivilegesLost)

    def disconnect(self) -> None:
        if not self.is_ended:
            self._advance(ConnectionLost)

    def _end(self, cause: type) -> Iterator[bytes]:
        self._advance(cause)
        self._snapshot = None
        yield self._encode(StreamEnd(reason=END_REASONS[cause]))

    def _advance(self, event: type) -> None:
        if event in (BackfillStarted, BackfillDone) and self.is_handing_over:
            return
        if event is BackfillStarted and self.state is ProducerStream.BACKFILLING:
            return
        if event is BackfillDone and self.state is ProducerStream.STREAMING:
            return
        self.state = producer_stream_after(self.state, event)

    def _encode(self, message: Request) -> bytes:
        infos: tuple[FrameInfo, ...] = (stream_id(self._shape.stream_id),) if self._shape.stream_id else ()
        return replace(message, vbucket=self.vbucket, opaque=self._shape.opaque, frame_infos=infos).encode()
