"""Offsets, and what may come next on a consumer's stream: the rules of snapshots, for the client and for the node.

A stream is a sequence of snapshots: a marker says which seqnos follow, then the changes come, each seqno higher than
the one before. A consumer's state is consistent only where a snapshot is complete, which is when a change or a
seqno-advanced reaches its end. In an out-of-order (OSO) snapshot the changes come in any order and the end is marked.
(kv_engine, docs/dcp/documentation/rollback.md and commands/snapshot-marker.md.) Nothing here handles bytes or data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from headwater.errors import LocalProtocolError, SnapshotViolation
from headwater.protocol.messages.dcp_changes import OsoFlags, SnapshotFlags, SnapshotMarker
from headwater.protocol.numbers import Seqno, Vbuuid
from headwater.protocol.states import CONSUMER_STREAM, ConsumerStream, SnapshotCompleted, transition


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffset:
    """Where a consumer is in a vbucket: all that it needs to request the rest.

    Raises `LocalProtocolError` if the seqno is outside its snapshot.
    """

    vbuuid: Vbuuid = Vbuuid(0)
    seqno: Seqno = Seqno(0)
    snapshot_start: Seqno = Seqno(0)
    snapshot_end: Seqno = Seqno(0)
    purge_seqno: Seqno = Seqno(0)
    """The seqno up to which deletions were purged when the server sent the snapshot; 0 once the offset has passed it.

    A consumer below the server's purge seqno may have missed deletions and has to start again, unless it says that it
    has seen this purge seqno (kv_engine, docs/dcp/documentation/commands/stream-request-value.md, `purge_seqno`).
    """

    @classmethod
    def whole(cls, vbuuid: Vbuuid, seqno: Seqno) -> StreamOffset:
        """Return the offset where everything up to `seqno` is there, and nothing beyond."""
        return cls(vbuuid=vbuuid, seqno=seqno, snapshot_start=seqno, snapshot_end=seqno)

    def __post_init__(self) -> None:
        if self.purge_seqno and self.purge_seqno <= self.seqno:
            object.__setattr__(self, "purge_seqno", Seqno(0))
        if not self.snapshot_start <= self.seqno <= self.snapshot_end:
            raise LocalProtocolError(
                f"seqno {self.seqno} lies outside its snapshot {self.snapshot_start} to {self.snapshot_end}"
            )

    @property
    def is_complete(self) -> bool:
        """Whether the whole snapshot is there, so that the state at this offset is consistent."""
        return self.seqno == self.snapshot_end

    @property
    def is_whole(self) -> bool:
        """Whether everything up to the seqno is there and nothing beyond, so that no snapshot has to be named."""
        return self.snapshot_start == self.seqno == self.snapshot_end

    def as_whole(self) -> StreamOffset:
        """Return the offset of a complete snapshot without the start of that snapshot."""
        return replace(self, snapshot_start=self.seqno, snapshot_end=self.seqno)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotTracker:
    """How far a stream has come inside its snapshot. Every event returns a new tracker."""

    offset: StreamOffset
    flags: SnapshotFlags = SnapshotFlags(0)
    is_open: bool = False
    """Whether a marker has come whose snapshot is not complete."""
    oso_high_seqno: Seqno | None = None
    """Inside an OSO snapshot: the highest seqno seen so far."""

    @property
    def is_complete(self) -> bool:
        """Whether everything received so far makes a consistent state."""
        return not self.is_open and self.oso_high_seqno is None

    def on_marker(
        self, *, start: Seqno, end: Seqno, flags: SnapshotFlags, purge_seqno: Seqno | None = None
    ) -> SnapshotTracker:
        """Begin a snapshot. A stream's first marker starts at the snapshot we requested from, later ones after it.

        If we hold everything up to our seqno, the new snapshot starts there for us, whatever the marker says. If we
        stopped inside a snapshot, we still hold a part of it, so the new one starts where that one did.
        """
        if self.is_open or self.oso_high_seqno is not None:
            raise SnapshotViolation(f"a snapshot marker {start} to {end} inside an incomplete snapshot")
        seqno = self.offset.seqno
        if start > end or end <= seqno:
            raise SnapshotViolation(f"a snapshot from {start} to {end} after seqno {seqno}")
        held_from = seqno if self.offset.is_complete else Seqno(min(start, self.offset.snapshot_start))
        offset = StreamOffset(
            vbuuid=self.offset.vbuuid,
            seqno=seqno,
            snapshot_start=held_from,
            snapshot_end=end,
            purge_seqno=self.offset.purge_seqno if purge_seqno is None else purge_seqno,
        )
        return SnapshotTracker(offset=offset, flags=flags, is_open=True)

    def on_hidden_end(self, seqno: Seqno) -> SnapshotTracker:
        """End the snapshot at this seqno: the rest of it is hidden from us, and is not sent."""
        offset = replace(self.offset, seqno=seqno, snapshot_end=seqno)
        return SnapshotTracker(offset=offset, flags=self.flags)

    def on_seqno(self, seqno: Seqno) -> SnapshotTracker:
        """Note a change, or a seqno-advanced in place of changes that are hidden from us."""
        return self.on_seqnos(first=seqno, last=seqno)

    def on_seqnos(self, *, first: Seqno, last: Seqno) -> SnapshotTracker:
        """Note changes whose seqnos rise from the first to the last."""
        if self.oso_high_seqno is not None:
            return replace(self, oso_high_seqno=max(last, self.oso_high_seqno))
        if not self.is_open:
            raise SnapshotViolation(f"seqno {first} outside any snapshot")
        had, end = self.offset.seqno, self.offset.snapshot_end
        for seqno in (first, last):
            if not had < seqno <= end:
                raise SnapshotViolation(f"seqno {seqno} after {had} in a snapshot that ends at {end}")
        # Written out, because this is done for every run of changes, and `replace` takes three times as long.
        offset = StreamOffset(
            vbuuid=self.offset.vbuuid,
            seqno=last,
            snapshot_start=self.offset.snapshot_start,
            snapshot_end=end,
            purge_seqno=self.offset.purge_seqno,
        )
        return SnapshotTracker(offset=offset, flags=self.flags, is_open=last < end)

    def on_oso(self, flags: OsoFlags) -> SnapshotTracker:
        """Start or end an OSO snapshot.

        Until its end the offset stays where it was: a stream can't be resumed from a part of such a snapshot.
        """
        starts = OsoFlags.START in flags
        if starts == (OsoFlags.END in flags):
            raise SnapshotViolation("an OSO marker must either start or end a snapshot")
        if starts:
            if self.is_open or self.oso_high_seqno is not None:
                raise SnapshotViolation("an OSO snapshot starts inside another snapshot")
            return replace(self, oso_high_seqno=self.offset.seqno)
        if self.oso_high_seqno is None:
            raise SnapshotViolation("an OSO snapshot ends that never started")
        high = self.oso_high_seqno
        offset = replace(self.offset, seqno=high, snapshot_start=high, snapshot_end=high)
        return replace(self, offset=offset, oso_high_seqno=None)


class ConsumedStream:
    """Checks which message and which seqno of a stream may come next.

    The table `CONSUMER_STREAM` decides which message may come in which state: changes inside a snapshot only. The
    tracker decides which seqno: above the last one, up to the marker's end. Both kinds of consumer use this class.
    """

    def __init__(self, offset: StreamOffset) -> None:
        self.state = ConsumerStream.IDLE
        self.tracker = SnapshotTracker(offset=offset)

    def move(self, event: type[Any]) -> None:
        """Apply an event. Raises `UnexpectedMessage` if the state does not allow it."""
        self.state = transition(CONSUMER_STREAM, self.state, event)

    def restart(self, offset: StreamOffset) -> None:
        """Continue from another offset, outside of any snapshot."""
        self.tracker = SnapshotTracker(offset=offset)

    def begin_snapshot(self, marker: SnapshotMarker) -> None:
        self.move(SnapshotMarker)
        self.tracker = self.tracker.on_marker(
            start=marker.start_seqno, end=marker.end_seqno, flags=marker.flags, purge_seqno=marker.purge_seqno
        )

    def advance(self, *, first: Seqno, last: Seqno) -> bool:
        """Note seqnos that rise from the first to the last. Returns whether they complete the snapshot."""
        self.tracker = self.tracker.on_seqnos(first=first, last=last)
        if self.tracker.is_complete:
            self.move(SnapshotCompleted)
        return self.tracker.is_complete
