"""The queue between the streams and the caller, and the flow control that bounds it.

A server may send as much as fits its window, and gets room back when the caller takes pieces, so the caller's speed
bounds what waits here. Snapshots that are not complete can't be taken, and one larger than the window could never be
completed: so when nothing waits for the caller, what is held is acknowledged without being taken, and goes to a
temporary file where it is more than memory is meant for. At any time at most a window of every connection and
`held_bytes_max` are in memory.

The reader puts in what streams deliver, in order; `persistence_gate.PersistenceHold` may stand between the two. Nothing
is reordered or left out here, but for vbuckets that are closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from headwater.client.pieces import ChangeRun, OpenSpool, Piece, Spool, SpooledRun
from headwater.client.vbucket_stream import StreamItem, VBucketStream
from headwater.protocol.numbers import VBucketId
from headwater.protocol.snapshots import StreamOffset

Release = Callable[[int, int], None]
"""Lets the server of a link send as many bytes again: the link, and the bytes."""


class TakenPieces(NamedTuple):
    pieces: list[Piece]
    vbuckets: set[VBucketId]
    """Those whose offset has moved."""


class Delivery:
    """What waits for the caller, and the offsets that the caller has come to."""

    def __init__(self, *, release: Release, held_bytes_max: int, open_spool: OpenSpool) -> None:
        self.offsets: dict[VBucketId, StreamOffset] = {}
        """Behind the last piece that the caller has taken, by vbucket."""
        self.held_bytes = 0
        """In memory, of snapshots that are not complete."""
        self.waiting_bytes = 0
        self._release = release
        self._held_bytes_max = held_bytes_max
        self._open_spool = open_spool
        self._spool: Spool | None = None
        """One for all streams: a file each would be more than a process may have."""
        self._held_by: dict[VBucketId, int] = {}
        self._waiting: deque[StreamItem] = deque()

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    # --- from the streams -----------------------------------------------------------------------------------------

    def put(self, items: Iterable[StreamItem]) -> None:
        for item in items:
            self.waiting_bytes += item.data_bytes
            self._waiting.append(item)

    def note_held(self, stream: VBucketStream) -> None:
        """A stream holds more or less than before. Where the memory for that is used up, it goes to disk."""
        self._count_held(stream)
        if self.held_bytes > self._held_bytes_max and stream.held_bytes:
            self._put_on_disk(stream)
            self._count_held(stream)

    def _count_held(self, stream: VBucketStream) -> None:
        self.held_bytes += stream.held_bytes - self._held_by.get(stream.vbucket, 0)
        self._held_by[stream.vbucket] = stream.held_bytes

    def _put_on_disk(self, stream: VBucketStream) -> None:
        if self._spool is None or self._spool.is_closed:
            self._spool = Spool(self._open_spool)
        for item in stream.held:
            if isinstance(item.piece, ChangeRun):
                item.piece = self._spool.put(item.piece)
        stream.held_bytes = 0

    def release_held(self, streams: Iterable[VBucketStream]) -> None:
        """Acknowledge what streams hold, though no caller has taken it: without more there will be nothing to take."""
        for stream in streams:
            for item in stream.held:
                self._release_window(item)

    def drop(self, items: Iterable[StreamItem]) -> None:
        """These will be asked for again, or are not wanted any more."""
        for item in items:
            if isinstance(item.piece, SpooledRun):
                item.piece.drop()
            self._release_window(item)

    def close_vbucket(self, vbucket: VBucketId) -> None:
        """Deliver nothing more of this vbucket."""
        closed = [item for item in self._waiting if item.vbucket == vbucket]
        self.drop(closed)
        self.waiting_bytes -= sum(item.data_bytes for item in closed)
        self._waiting = deque(item for item in self._waiting if item.vbucket != vbucket)

    def close(self) -> None:
        """Leave no file open."""
        if self._spool is not None:
            self._spool.close()

    # --- to the caller --------------------------------------------------------------------------------------------

    def take(self, bytes_max: int) -> TakenPieces:
        """The next pieces, up to about that many bytes, and at least one if any waits.

        A snapshot is not cut in two for being a little too much; a large one is.
        """
        pieces: list[Piece] = []
        vbuckets: set[VBucketId] = set()
        taken_bytes = 0
        at_end_of_snapshot = True
        while self._waiting and taken_bytes < (bytes_max if at_end_of_snapshot else 2 * bytes_max):
            item = self._waiting.popleft()
            at_end_of_snapshot = item.offset.is_complete
            taken_bytes += item.data_bytes
            self.waiting_bytes -= item.data_bytes
            self.offsets[item.vbucket] = item.offset
            vbuckets.add(item.vbucket)
            self._release_window(item)
            if item.piece is not None:
                pieces.append(item.piece.load() if isinstance(item.piece, SpooledRun) else item.piece)
        return TakenPieces(pieces, vbuckets)

    def _release_window(self, item: StreamItem) -> None:
        if item.link:
            self._release(item.link, item.data_bytes)
            item.link = 0
