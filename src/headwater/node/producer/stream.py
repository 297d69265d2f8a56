"""One stream: the changes of one vbucket, for one consumer, as snapshots.

A stream remembers only how far it has come. It reads changes when it sends them: from young commits in memory or from
blocks on disk, whichever hold the next ones. So a slow consumer costs no memory, and there is no switch from backfill
to live: both send "what is durable after the last passed seqno".
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from dataclasses import dataclass, field

from headwater.errors import StoreError
from headwater.kernels.memory import Bytes, i64, kernel, load_u32, store_u16, store_u32, u16, u32
from headwater.node.producer.controls import Controls, OsoMode, Shape, StreamFilter, read_event
from headwater.node.producer.outbound import FROM_DISK, Listing, OutboundStop, Output, shape_run
from headwater.node.producer.snapshot import Snapshot, history_start, snapshot_marker, take_snapshot
from headwater.protocol import states
from headwater.protocol.features import Magic
from headwater.protocol.frames import HEADER, encode_frame_infos, stream_id
from headwater.protocol.kernels.frame_runs import FLEXIBLE_REQUEST
from headwater.protocol.manifest import CollectionDropped, CollectionModified
from headwater.protocol.messages.base import Request
from headwater.protocol.messages.dcp_changes import OsoFlags, OsoSnapshot, SeqnoAdvanced, SystemEvent
from headwater.protocol.messages.dcp_streams import SetVBucketState, StreamEnd, StreamFlags, VBucketState
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId
from headwater.protocol.states import ProducerStream
from headwater.store.bucket import Bucket

# --- live changes that many streams get ----------------------------------------------------------------------------
# A bucket may have many consumers that have reached the end of their vbuckets. If they have asked for the same form,
# what they get of a new commit differs only in the opaque and the id of the stream. So the first stream of a kind that
# has its turn encodes the changes as usual, and `LiveFrames` keeps the result until the next commit; the others copy
# it, and a kernel sets their own opaques and ids.
#
# All streams of a bucket share one `LiveFrames`. `Stream.produce` decides when a stream is live, and looks here first.


KEPT_BYTES_MAX = 8 * 1024 * 1024
"""The most bytes that are kept of one commit. Beyond that, every stream encodes for itself."""
NO_KIND = -1
"""The kind of a stream that shares its changes with no other."""
KINDS_MAX = 4096
"""A limit, because consumers may ask for any set of collections, and so for any number of forms."""
_HEADER_BYTES = 24


@dataclass(frozen=True, slots=True)
class LivePiece:
    """The frames that take a stream of one kind from a certain seqno of a vbucket to its end."""

    data: bytes
    frames: int
    prepares: int
    end_seqno: int
    """The seqno that the stream has then passed."""


class LiveFrames:
    """The frames of the newest commit that streams were sent, by kind, vbucket and the seqno passed before."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        # Views of the arrays: reading a single number takes a fifth of the time, and streams do so all the time.
        numbers = bucket.vbuckets
        self.states, self.vbuuids = numbers.states.data, numbers.vbuuids.data
        self.durable_seqnos = numbers.durable_seqnos.data
        self._kinds: dict[Hashable, int] = {}
        self._pieces: dict[tuple[int, int, int], LivePiece] = {}
        self._kept_bytes = 0
        self._commit = bucket.durable_commit

    def kind_of(self, form: Hashable) -> int:
        """The number of this form, for streams that ask for it; `NO_KIND` if there are too many forms."""
        if form not in self._kinds and len(self._kinds) >= KINDS_MAX:
            return NO_KIND
        return self._kinds.setdefault(form, len(self._kinds))

    def find(self, kind: int, vbucket: int, after_seqno: int) -> LivePiece | None:
        if self._commit != self._bucket.durable_commit:
            self._pieces.clear()
            self._kept_bytes, self._commit = 0, self._bucket.durable_commit
        return self._pieces.get((kind, vbucket, after_seqno))

    def keep(self, kind: int, vbucket: int, after_seqno: int, piece: LivePiece) -> None:
        """Keep what a stream has written, after `find` found nothing for it."""
        if self._kept_bytes + len(piece.data) <= KEPT_BYTES_MAX:
            self._pieces[kind, vbucket, after_seqno] = piece
            self._kept_bytes += len(piece.data)


@kernel
def set_stream(frames: Bytes, at: int, end: int, opaque: int, stream_id: int) -> None:
    """Rewrite whole frames for another stream: set its opaque and, if they have one, its stream id."""
    while at < end:
        store_u32(frames, at + 12, u32(opaque))
        if frames[at] == FLEXIBLE_REQUEST:
            # The stream id is the only frame info that a producer sends; its kind and its length share one byte.
            store_u16(frames, at + _HEADER_BYTES + 1, u16(stream_id))
        at += _HEADER_BYTES + i64(load_u32(frames, at + 8))


_END_EXTRAS = {cause: StreamEnd(reason=reason).encode_extras() for cause, reason in states.END_REASONS.items()}
CHUNK_BYTES = 512 * 1024
"""How much a stream sends before the next one has its turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTerms:
    """What streams of one connection have in common if their requests ask for the same."""

    bucket: Bucket
    flags: StreamFlags
    stream_id: int | None
    shape: Shape
    first_shape: Shape
    """If the stream starts at seqno 0: the shape for what the vbucket held when the stream began."""
    stream_filter: StreamFilter
    """Shared. Before an event changes the filter of one stream, that stream takes a copy."""
    controls: Controls
    hides_completed_prepares: bool
    live: LiveFrames
    kind: int
    """The number of the streams that share live changes."""
    is_takeover: bool = field(init=False)
    is_disk_only: bool = field(init=False)
    ignores_purges: bool = field(init=False)
    framing: bytes = field(init=False)
    """The framing extras of all messages: the id of the stream, if it has one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_takeover", StreamFlags.TAKEOVER in self.flags)
        object.__setattr__(self, "is_disk_only", StreamFlags.DISK_ONLY in self.flags)
        object.__setattr__(self, "ignores_purges", StreamFlags.IGNORE_PURGED_TOMBSTONES in self.flags)
        infos = () if self.stream_id is None else (stream_id(self.stream_id),)
        object.__setattr__(self, "framing", encode_frame_infos(infos))


class Stream:
    """See the module."""

    def __init__(
        self,
        terms: StreamTerms,
        *,
        vbucket: VBucketId,
        opaque: int,
        start_seqno: int,
        snapshot_start_seqno: int,
        end_seqno: int,
        from_disk_until: int = 0,
    ) -> None:
        """Up to `from_disk_until`, commits are sent as whole changes, as from disk.

        A consumer that resumes inside a snapshot may have got its first part from disk, without the prepares that the
        rest completes.
        """
        self._bucket = bucket = terms.bucket
        self._controls = terms.controls
        self._shape = terms.shape
        self._first_shape = terms.first_shape
        self._filter = terms.stream_filter
        self._first_marker_start: int | None = snapshot_start_seqno
        self._hides_completed_prepares = terms.hides_completed_prepares
        self._from_disk_until = from_disk_until
        self.is_takeover = terms.is_takeover
        self._is_disk_only = terms.is_disk_only
        self._dead_commit: int | None = None
        """The commit that makes the vbucket dead here. Once it is durable, the consumer's copy may become active."""
        self._snapshot: Snapshot | None = None
        self._live = terms.live
        self._kind = terms.kind
        self.vbucket = vbucket
        numbers = bucket.vbuckets
        facts = numbers.facts[vbucket]
        self.state_at_start = terms.live.states[vbucket]
        self._purge_seqno_known = SEQNO_MAX if terms.ignores_purges or facts is None else facts.purge_seqno
        """As of the request. If deletions are purged later that were not sent yet, the consumer would miss them."""
        self.vbuuid_at_start = terms.live.vbuuids[vbucket]
        self.opaque = opaque
        self.stream_id = terms.stream_id
        self._framing = terms.framing
        self.start_seqno = start_seqno
        self.passed_seqno = start_seqno
        """Everything up to here has been sent, or is not for this stream."""
        self.end_seqno = end_seqno
        self._high_seqno_at_start = int(numbers.durable_seqnos[vbucket])
        self.state = ProducerStream.ACCEPTED
        self.was_rolled_back = False
        """The vbucket was rolled back, so this stream has to end, whatever it has sent."""
        self.frames_sent = 0
        self.bytes_sent = 0
        self.prepares_sent = 0

    # --- work -----------------------------------------------------------------------------------------------------

    @property
    def is_ended(self) -> bool:
        return self.state is ProducerStream.ENDED

    @property
    def has_work(self) -> bool:
        """Whether there is something to send, even if the window is full."""
        return not self.is_ended and (
            self._snapshot is not None
            or self._live.durable_seqnos[self.vbucket] != self.passed_seqno
            or self.passed_seqno >= self.end_seqno
            or self.was_rolled_back
            or self._has_another_vbucket
            or (self.is_takeover and self.state in (ProducerStream.ACCEPTED, ProducerStream.STREAMING))
            or self._may_become_active
        )

    @property
    def _has_another_vbucket(self) -> bool:
        """Whether the vbucket has changed its state or has begun another branch, other than by this hand-over."""
        live, vbucket = self._live, self.vbucket
        is_another = live.states[vbucket] != self.state_at_start or live.vbuuids[vbucket] != self.vbuuid_at_start
        return is_another and not self.is_handing_over

    def produce(self, output: Output, room_bytes: int) -> None:
        """Write the next frames, only whole ones, until the room is used up or there is nothing more.

        The last frame may exceed the room.
        """
        if not self._is_live:
            self._produce_or_end(output, room_bytes)
        elif not self._copy_live(output, room_bytes):
            start, after_seqno, frames, prepares = output.used, self.passed_seqno, self.frames_sent, self.prepares_sent
            self._produce_or_end(output, room_bytes)
            if self._is_live and self.passed_seqno == self._live.durable_seqnos[self.vbucket]:
                piece = LivePiece(
                    bytes(output.data[start:]),
                    frames=self.frames_sent - frames,
                    prepares=self.prepares_sent - prepares,
                    end_seqno=self.passed_seqno,
                )
                self._live.keep(self._kind, self.vbucket, after_seqno, piece)

    def _produce_or_end(self, output: Output, room_bytes: int) -> None:
        start = output.used
        try:
            self._produce(output, until=start + min(room_bytes, CHUNK_BYTES))
        except StoreError:
            # Live changes are read like a backfill, and may fail like one. A hand-over that fails is cancelled.
            self._advance(states.BackfillStarted)
            output.append(self.end(states.VBucketStateChanged if self.is_handing_over else states.BackfillFailed))
        self.bytes_sent += output.used - start

    def _produce(self, output: Output, *, until: int) -> None:
        damage = self._bucket.vbuckets.damage.get(self.vbucket)
        if damage is not None:
            raise damage
        ending = self._cause_to_end()
        if ending is not None:
            output.append(self.end(ending))
            return
        while output.used < until and not self.is_ended:
            if self._snapshot is None:
                output.append(self._begin_snapshot())
                if self._snapshot is None:
                    return
            self._send_changes(output, self._snapshot, until)
            if self._snapshot is not None:
                return

    # --- live changes ---------------------------------------------------------------------------------------------

    @property
    def _is_live(self) -> bool:
        """Whether this stream differs from others of its kind at the same seqno only in its opaque and its id."""
        return (
            self._kind != NO_KIND
            and self.state is ProducerStream.STREAMING
            and self._snapshot is None
            and self._first_marker_start is None
            and self.passed_seqno >= self._high_seqno_at_start
            and not (self.is_takeover or self._is_disk_only or self.was_rolled_back)
            and not self._bucket.vbuckets.damage
        )

    def _copy_live(self, output: Output, room_bytes: int) -> bool:
        """Copy what another stream of its kind was sent from here on. False if there is none, or not enough room."""
        piece = self._live.find(self._kind, self.vbucket, self.passed_seqno)
        if piece is None or len(piece.data) > room_bytes or self._has_another_vbucket:
            return False
        if piece.end_seqno >= self.end_seqno or piece.end_seqno != self._live.durable_seqnos[self.vbucket]:
            return False
        start = output.used
        output.append(piece.data)
        set_stream(output.memory, start, output.used, self.opaque, self.stream_id or 0)
        self.passed_seqno = piece.end_seqno
        self.frames_sent += piece.frames
        self.prepares_sent += piece.prepares
        self.bytes_sent += len(piece.data)
        return True

    def _cause_to_end(self) -> type | None:
        numbers = self._bucket.vbuckets
        facts = numbers.facts[self.vbucket]
        if numbers.states[self.vbucket] != self.state_at_start and not self.is_handing_over:
            return states.VBucketStateChanged
        if self.was_rolled_back or numbers.durable_seqno(self.vbucket) < self.passed_seqno:
            return states.VBucketRolledBack
        if self._has_another_vbucket:
            # If the new branch begins before what was sent, changes were lost, even if new writes use their seqnos.
            is_lost = facts is not None and facts.failover_log.newest.seqno < self.passed_seqno
            return states.VBucketRolledBack if is_lost else states.VBucketStateChanged
        purge_seqno = 0 if facts is None else facts.purge_seqno
        if purge_seqno > self._purge_seqno_known and 0 < self.passed_seqno < purge_seqno:
            # The stream would never get the purged deletions. If the consumer requests it again, the answer is a
            # rollback to 0.
            return states.VBucketRolledBack
        if self._is_overtaken:
            return states.ConsumerTooSlow
        if self._filter.is_empty:
            return states.FilterEmptied
        return None

    @property
    def _is_overtaken(self) -> bool:
        """Whether versions of the snapshot may have been compacted away, so that it can't be completed.

        Those that were superseded inside it are not needed, unless it holds history.
        """
        if self._snapshot is None:
            return False
        needed_after = self.passed_seqno if self._snapshot.has_history else self._snapshot.end_seqno
        return history_start(self._bucket, self.vbucket) > max(needed_after, self._snapshot.window_start_seqno)

    # --- snapshots ------------------------------------------------------------------------------------------------

    def _begin_snapshot(self) -> bytes:
        """Begin the next snapshot, end the stream, or do nothing. Returns the message to send, which may be empty."""
        if self.passed_seqno >= self.end_seqno:
            # Also if start and end are equal: the recorded 7.0.5 server ends such a stream without a marker.
            return self.end(states.EndReached)
        high_seqno = self._bucket.vbuckets.durable_seqno(self.vbucket)
        if high_seqno <= self.passed_seqno:
            return self._hand_over()
        snapshot = take_snapshot(
            self._bucket,
            self.vbucket,
            after_seqno=self.passed_seqno,
            stream_filter=self._filter,
            wants_history=self._controls.change_streams,
            with_prepares=self._shape.sync_writes,
            hides_completed=self._hides_completed_prepares,
            from_disk=self._is_disk_only or self.passed_seqno < self._from_disk_until,
            is_live=self._high_seqno_at_start <= self.passed_seqno
            and high_seqno < self.end_seqno
            and not self.is_takeover,
        )
        if snapshot.is_void:
            self.passed_seqno = snapshot.end_seqno
            return b""
        self._advance(states.BackfillDone if snapshot.in_memory else states.BackfillStarted)
        self._snapshot = snapshot
        first_start, self._first_marker_start = self._first_marker_start, None
        # Out-of-order snapshots are for the first backfill of a filtered stream (kv_engine, DCP docs, OSO snapshots).
        is_first_backfill = self._filter.collections is not None and first_start == 0 == self.passed_seqno
        if self._controls.oso is not OsoMode.OFF and is_first_backfill:
            snapshot.is_oso = True
            return self._encode(OsoSnapshot(flags=OsoFlags.START))
        return self._encode(
            snapshot_marker(snapshot, self._bucket, self.vbucket, self._controls, first_start_seqno=first_start)
        )

    def _finish_snapshot(self, output: Output, snapshot: Snapshot) -> None:
        self.passed_seqno = max(self.passed_seqno, snapshot.end_seqno)
        hides_its_end = snapshot.last_sent_seqno < snapshot.end_seqno
        # A seqno-advanced tells a filtered stream that the snapshot's last change is not for it (kv_engine, DCP docs,
        # "Seqno Advanced"). Inside an OSO snapshot, it is sent only if the control has asked for it.
        if hides_its_end and (not snapshot.is_oso or self._controls.oso is OsoMode.ON_WITH_SEQNO_ADVANCED):
            output.append(self._encode(SeqnoAdvanced(seqno=Seqno(snapshot.end_seqno))))
        if snapshot.is_oso:
            output.append(self._encode(OsoSnapshot(flags=OsoFlags.END)))
        self._snapshot = None
        if self.state is ProducerStream.BACKFILLING:
            self._advance(states.BackfillDone)
        if self._filter.is_empty:
            output.append(self.end(states.FilterEmptied))

    # --- changes --------------------------------------------------------------------------------------------------

    def _send_changes(self, output: Output, snapshot: Snapshot, until: int) -> None:
        needed = snapshot.listed if snapshot.listing is Listing.NEWEST else None
        # The scope may get another collection inside the snapshot.
        is_fixed = self._filter.scope is None and not snapshot.keeps_dropped_collections
        wanted = self._filter.wanted(self._bucket.manifest) if is_fixed else None
        for run in self._bucket.runs(self.vbucket, after_seqno=self.passed_seqno, needed=needed, wanted=wanted):
            if not self._send_run(output, snapshot, run, until):
                return
            if self.passed_seqno >= snapshot.end_seqno:
                break
        self._finish_snapshot(output, snapshot)

    def _send_run(self, output: Output, snapshot: Snapshot, run: Bytes, until: int) -> bool:
        """Write what the stream gets of a run. Returns False if part of the run is left."""
        at = 0
        keeps_all = snapshot.keeps_dropped_collections
        while at < len(run):
            if output.used >= until:
                return False
            is_initial = self.start_seqno == 0 and snapshot.after_seqno < self._high_seqno_at_start
            sent = shape_run(
                run,
                at,
                output,
                self._first_shape if is_initial else self._shape,
                opaque=self.opaque,
                stream_id=self.stream_id or 0,
                wanted=None if keeps_all else self._filter.wanted(self._bucket.manifest),
                end_seqno=snapshot.end_seqno,
                until=until,
                listed=snapshot.listed,
                listing=snapshot.listing,
                commits_after_seqno=history_start(self._bucket, self.vbucket) if snapshot.in_memory else FROM_DISK,
            )
            at = sent.at
            if sent.passed_seqno:
                self.passed_seqno = sent.passed_seqno
            if sent.frames:
                self.frames_sent += sent.frames
                self.prepares_sent += sent.prepares
                snapshot.last_sent_seqno = sent.last_seqno
            if sent.stop == OutboundStop.END:
                break
            if sent.stop == OutboundStop.WINDOW:
                return False
            if sent.stop == OutboundStop.EVENT:
                at = self._send_event(output, snapshot, run, at)
        return True

    def _send_event(self, output: Output, snapshot: Snapshot, run: Bytes, at: int) -> int:
        """Write the system event at `at` in this consumer's form, if it gets the event. Returns where that ends."""
        found = read_event(run, at)
        self.passed_seqno = found.seqno
        event, as_flatbuffers = found.known.event, self._controls.flatbuffers_events
        if isinstance(event, CollectionDropped) and not self._filter.lets_all_pass:
            # The event narrows the filter. Other streams that share it may not have reached the event, so take a copy.
            self._kind, self._filter = NO_KIND, copy(self._filter)
        is_expressible = as_flatbuffers or not isinstance(event, CollectionModified)
        if is_expressible and self._filter.concerns(event):
            snapshot.last_sent_seqno = found.seqno
            self.frames_sent += 1
            extras, key, value = found.known.parts(found.seqno, as_flatbuffers=as_flatbuffers)
            output.append(self._frame(SystemEvent.opcode, extras, key, value))
        return found.end

    # --- takeover -------------------------------------------------------------------------------------------------

    @property
    def is_handing_over(self) -> bool:
        return self.state in (ProducerStream.TAKEOVER_PENDING, ProducerStream.TAKEOVER_ACTIVE)

    @property
    def _may_become_active(self) -> bool:
        return self._dead_commit is not None and self._bucket.durable_commit >= self._dead_commit

    def _hand_over(self) -> bytes:
        """Hand the vbucket over if this takeover stream has sent everything: pending first, later active."""
        if self._may_become_active:
            self._dead_commit = None
            return self._encode(SetVBucketState(state=VBucketState.ACTIVE))
        if not self.is_takeover or self.state not in (ProducerStream.ACCEPTED, ProducerStream.STREAMING):
            return b""
        if self.state is ProducerStream.ACCEPTED:
            self._advance(states.BackfillDone)
        self._advance(states.TakeoverStarted)
        self._advance(states.PendingSent)
        return self._encode(SetVBucketState(state=VBucketState.PENDING))

    def on_hand_over_answer(self) -> bytes:
        """The consumer has applied the state it was sent. After pending, send active; after active, end the stream.

        First the vbucket becomes dead here and takes no more writes. Those taken since pending was sent precede active.
        """
        if self._dead_commit is not None:
            return b""
        was_pending = self.state is ProducerStream.TAKEOVER_PENDING
        self._advance(states.HandOverAcknowledged)
        if was_pending:
            self._dead_commit = self._bucket.set_vbucket_state(self.vbucket, VBucketState.DEAD)
            return b""
        return self._end_message(states.EndReached)

    # --- ending ---------------------------------------------------------------------------------------------------

    def close(self, *, sends_end: bool) -> bytes:
        """The consumer has closed the stream."""
        self._advance(states.CloseRequested)
        return self._end_message(states.CloseRequested) if sends_end else b""

    def disconnect(self) -> None:
        if not self.is_ended:
            self._advance(states.ConnectionLost)

    def end(self, cause: type) -> bytes:
        """End the stream for a cause in the table of states. Returns the message to send."""
        self._advance(cause)
        self._snapshot = None
        return self._end_message(cause)

    def _advance(self, event: type) -> None:
        if event in (states.BackfillStarted, states.BackfillDone) and self.is_handing_over:
            return
        if event is states.BackfillStarted and self.state is ProducerStream.BACKFILLING:
            return
        if event is states.BackfillDone and self.state is ProducerStream.STREAMING:
            return
        self.state = states.transition(states.PRODUCER_STREAM, self.state, event)

    # --- messages -------------------------------------------------------------------------------------------------

    def _end_message(self, cause: type) -> bytes:
        return self._frame(StreamEnd.opcode, _END_EXTRAS[cause])

    def _encode(self, message: Request) -> bytes:
        return self._frame(message.opcode, message.encode_extras(), message.encode_key(), message.encode_value())

    def _frame(self, opcode: int, extras: bytes, key: bytes = b"", value: bytes = b"") -> bytes:
        """Encode a message of this stream: its parts behind a header that names the stream."""
        framing, lengths, magic = self._framing, len(key), Magic.REQUEST
        if framing:
            lengths, magic = len(framing) << 8 | len(key), Magic.FLEXIBLE_REQUEST
        body_bytes = len(framing) + len(extras) + len(key) + len(value)
        header = HEADER.pack(magic, opcode, lengths, len(extras), 0, self.vbucket, body_bytes, self.opaque, 0)
        return header + framing + extras + key + value
