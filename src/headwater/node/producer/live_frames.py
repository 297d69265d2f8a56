"""Live changes that many streams get: encoded once, and copied for every stream of the same kind.

A bucket may have many consumers that have come to the end of their vbuckets. What they get of a new commit differs in
nothing but the opaque and the id of the stream, if they have asked for the same form. So the first stream of a kind
whose turn it is does its work as always, and what it has written is kept until the next commit; the others copy it, and
a kernel sets their own opaques.

All streams of a bucket share one `LiveFrames`. `Stream.produce` decides when a stream is live, and looks here first.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from headwater.protocol.kernels.frame_header import FLEXIBLE_REQUEST
from headwater.protocol.kernels.memory import Bytes, i64, kernel, load_u32, store_u16, store_u32, u16, u32
from headwater.store.bucket import Bucket

KEPT_BYTES_MAX = 8 * 1024 * 1024
"""What is kept of one commit. Beyond that every stream does its own work."""
NO_KIND = -1
"""Of a stream that shares with no other."""
KINDS_MAX = 4096
"""Consumers may ask for any collections, and so for any number of forms."""
_HEADER_BYTES = 24


@dataclass(frozen=True, slots=True)
class LivePiece:
    """What a stream of one kind gets of a vbucket when it has everything before."""

    data: bytes
    frames: int
    prepares: int
    end_seqno: int
    """Where the stream is then."""


class LiveFrames:
    """What the streams of a bucket have been sent of the newest commit, by kind, vbucket and where they were before."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._kinds: dict[Hashable, int] = {}
        self._pieces: dict[tuple[int, int, int], LivePiece] = {}
        self._kept_bytes = 0
        self._commit = bucket.durable_commit

    def kind_of(self, form: Hashable) -> int:
        """A number for streams that have asked for changes in this form; `NO_KIND` where there are too many."""
        if form not in self._kinds and len(self._kinds) >= KINDS_MAX:
            return NO_KIND
        return self._kinds.setdefault(form, len(self._kinds))

    def find(self, kind: int, vbucket: int, after_seqno: int) -> LivePiece | None:
        if self._commit != self._bucket.durable_commit:
            self._pieces.clear()
            self._kept_bytes, self._commit = 0, self._bucket.durable_commit
        return self._pieces.get((kind, vbucket, after_seqno))

    def keep(self, kind: int, vbucket: int, after_seqno: int, piece: LivePiece) -> None:
        """Keep what was written for a stream for which `find` has just found nothing."""
        if self._kept_bytes + len(piece.data) <= KEPT_BYTES_MAX:
            self._pieces[kind, vbucket, after_seqno] = piece
            self._kept_bytes += len(piece.data)


@kernel
def set_stream(frames: Bytes, at: int, end: int, opaque: int, stream_id: int) -> None:
    """Make whole frames those of another stream: with its opaque, and with its id if they have one."""
    while at < end:
        store_u32(frames, at + 12, u32(opaque))
        if frames[at] == FLEXIBLE_REQUEST:
            # The id is the only frame info that a producer sends, and its kind and length are one byte.
            store_u16(frames, at + _HEADER_BYTES + 1, u16(stream_id))
        at += _HEADER_BYTES + i64(load_u32(frames, at + 8))
