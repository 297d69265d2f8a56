"""What the reader delivers: pieces of the changes, in order; and the file for pieces that exceed memory.

Streams make the pieces, and `batches` turns them into rows. Within a vbucket, pieces are in the stream's order. A run
contains frames as they were received: nothing is done per change before the bulk kernels decode them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import BinaryIO

from headwater.errors import StoreFull
from headwater.protocol.manifest import Event
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRun:
    """Mutations, deletions and expirations of one vbucket and snapshot, as consecutive frames."""

    vbucket: VBucketId
    vbuuid: Vbuuid
    """The branch of history on which they were read."""
    snapshot_start: Seqno
    snapshot_end: Seqno
    rows: int
    data: bytes | memoryview
    purge_seqno: Seqno = Seqno(0)
    """The seqno up to which deletions were purged, if it is above the first change and the server reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPiece:
    """A collection or a scope was created, dropped or modified."""

    vbucket: VBucketId
    vbuuid: Vbuuid
    snapshot_start: Seqno
    snapshot_end: Seqno
    seqno: Seqno
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackPiece:
    """A vbucket was rolled back: changes above `seqno` that were delivered are void."""

    vbucket: VBucketId
    seqno: Seqno
    """The last seqno that remains valid."""
    from_seqno: Seqno
    """The last seqno that had been delivered."""
    old_vbuuid: Vbuuid
    new_vbuuid: Vbuuid


Piece = ChangeRun | EventPiece | RollbackPiece


# --- on disk ------------------------------------------------------------------------------------------------------
#
# For snapshots that are too large to stay in memory until they are complete.

OpenSpool = Callable[[], BinaryIO]
"""Opens a new temporary file, which is deleted when it is closed."""


class Spool:
    """Keeps runs in a file, which is closed when the last run is read or dropped."""

    def __init__(self, open_file: OpenSpool) -> None:
        try:
            self._file = open_file()
        except OSError as error:
            raise _no_room(error) from error
        self._left = 0

    def put(self, run: ChangeRun) -> SpooledRun:
        try:
            start = self._file.seek(0, 2)
            self._file.write(run.data)
            self._file.flush()
        except OSError as error:
            raise _no_room(error) from error
        self._left += 1
        return SpooledRun(run=replace(run, data=b""), data_bytes=len(run.data), start=start, spool=self)

    def get(self, spooled: SpooledRun) -> ChangeRun:
        self._file.seek(spooled.start)
        run = replace(spooled.run, data=self._file.read(spooled.data_bytes))
        self.drop_one()
        return run

    def drop_one(self) -> None:
        """One of the runs is no longer needed."""
        self._left -= 1
        if not self._left:
            self.close()

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpooledRun:
    """A run whose bytes are on disk."""

    run: ChangeRun
    data_bytes: int
    start: int
    spool: Spool

    def load(self) -> ChangeRun:
        """Read the run back. Can be called once."""
        return self.spool.get(self)

    def drop(self) -> None:
        self.spool.drop_one()


def _no_room(error: OSError) -> StoreFull:
    return StoreFull(
        f"a snapshot too large for memory can't be put on disk: {error.strerror or error}",
        hint="Free space in the folder for temporary files (TMPDIR), raise held_bytes_max, or read as-they-come",
    )
