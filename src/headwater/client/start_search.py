"""Finds where to start a read at a time: in each vbucket, just before its first change at or after that time.

DCP can't seek by time, only by seqno. But every change has a CAS, and the CAS is a hybrid logical clock: a node gives
a new version a CAS above all earlier ones of the vbucket, a failover preserves that clock, and its upper bits are the
time. So within a vbucket times rise with seqnos, with two exceptions:

* A durable write keeps the CAS of its prepare, and has the seqno of its commit. The difference is seconds, which
  `MARGIN_S` covers.
* A version that is written with its metadata (replication between clusters, a restored backup) keeps its original CAS.
  One from the future raises the vbucket's clock. One from the past lies among newer ones.

The search reads keys and metadata from the beginning of each vbucket. While more than `SCANNED_SEQNOS_MAX` seqnos are
left, it instead requests a stream from their middle, looks at its first changes, and continues in the half that has
the time: a few short streams per vbucket, however large it is. It reads the last seqnos one after the other. So a
vbucket of up to that size is searched exactly. In a larger one, versions from elsewhere could mislead the search: if
it sees times out of order by more than the margin, it stops jumping and reads the vbucket from its beginning.

A consumer that starts in the middle needs no earlier changes, so the offset is that of a complete snapshot. If
deletions were purged after it, a server accepts that offset only with its purge seqno, which servers before 8.0 do not
report. So the search tries each start, and a vbucket whose start is refused is read from its beginning.

This module is sans-IO. The client runs a reader for it; `step` tells it which vbuckets to follow from where.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import numpy as np

from headwater.client.pieces import ChangeRun, Piece, RollbackPiece
from headwater.client.read_options import End, ReadOptions, Snapshots, Start
from headwater.client.reader import Reader
from headwater.kernels.memory import Column
from headwater.protocol.kernels.decode import decode_runs
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

MARGIN_S = 60
"""Changes may be out of order by this much. A durable write times out earlier."""
SCANNED_SEQNOS_MAX = 16_384
"""Reading this many keys costs about as much as requesting one more stream: a millisecond or two."""
BUFFER_BYTES = 256 * 1024
"""How much a server may send ahead. Most data of a stream in the middle is not needed."""

_LOGICAL_BITS = np.uint64(0xFFFF)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def search_options(options: ReadOptions) -> ReadOptions:
    """Return the options to search for the start of a read: the same changes without values, up to now."""
    vbuckets = options.vbuckets
    if isinstance(options.end, Mapping):
        vbuckets = frozenset(options.end) if vbuckets is None else vbuckets & frozenset(options.end)
    return replace(
        options,
        start=Start.BEGINNING,
        end=End.NOW,
        vbuckets=vbuckets,
        boundaries={},
        no_value=True,
        xattrs=False,
        compression=False,
        needs_history_behind_end=False,
        mitigate_rollbacks=False,
        snapshots=Snapshots.AS_THEY_COME,
        buffer_bytes=min(options.buffer_bytes, BUFFER_BYTES),
    )


@dataclass(slots=True)
class _VBucketSearch:
    """The state of the search in one vbucket."""

    older: Seqno = Seqno(0)
    """All changes up to this seqno are older than the time, so a read may start after it."""
    newer: Seqno | None = None
    """A change soon after this seqno is not older. None until one was seen."""
    refused: Seqno = Seqno(0)
    """The server accepts no start up to this seqno."""
    asked: Seqno = Seqno(0)
    """The seqno after which the stream began."""
    jumped_to: Seqno | None = None
    """The same, if the stream was a jump and none of its changes has been received yet."""
    is_settled: bool = False
    """The start is `older`, provided that the server accepts it."""
    is_gapless: bool = True
    """All changes up to `older` were read."""
    is_disordered: bool = False
    """Times that do not rise with the seqnos were seen."""
    older_us: int = 0
    """The newest time seen up to `older`."""
    newer_us: int | None = None
    """The oldest time seen after `newer`."""
    vbuuid: Vbuuid = Vbuuid(0)
    purge_seqno: Seqno = Seqno(0)

    def offset(self, seqno: Seqno) -> StreamOffset:
        return (
            replace(StreamOffset.whole(self.vbuuid, seqno), purge_seqno=self.purge_seqno) if seqno else StreamOffset()
        )


class StartSearch:
    """The search in all vbuckets of a read, in parallel."""

    def __init__(self, at: datetime, vbuckets: Iterable[VBucketId], *, collections: bool) -> None:
        self.found: dict[VBucketId, StreamOffset] = {}
        """The start offsets of vbuckets whose search is done."""
        self._at_us = (at - _EPOCH) // timedelta(microseconds=1)
        self._collections = collections
        self._searches = {vbucket: _VBucketSearch() for vbucket in vbuckets}
        self._moves: dict[VBucketId, StreamOffset] = {}

    @property
    def is_finished(self) -> bool:
        return not self._searches

    def step(self, pieces: Sequence[Piece], reader: Reader) -> dict[VBucketId, StreamOffset]:
        """Process all pieces that the reader had. Closes streams that are no longer needed, and returns the vbuckets
        to follow, with their offsets."""
        self._moves = {}
        done = set(self.found)
        for vbucket, offset in reader.offsets.items():
            if (search := self._searches.get(vbucket)) is not None:
                search.vbuuid = offset.vbuuid
        for piece, seqnos, times in self._rows_of(pieces):
            search = self._searches.get(piece.vbucket)
            if search is None or piece.vbucket in self._moves:
                continue  # An earlier piece has already decided.
            if isinstance(piece, RollbackPiece):
                self._on_rollback(search, piece, reader)
            elif search.is_settled:
                self._finish(search, piece.vbucket)
            elif isinstance(piece, ChangeRun):
                search.purge_seqno = max(search.purge_seqno, piece.purge_seqno)
                self._on_run(search, piece.vbucket, seqnos, times, reader)
        for vbucket in [it for it in self._searches if it not in self._moves and reader.end_seqno(it) is None]:
            self._on_end(self._searches[vbucket], vbucket, reader)
        reader.close_vbuckets([*(self.found.keys() - done), *self._moves])
        return self._moves

    def _rows_of(self, pieces: Sequence[Piece]) -> Iterable[tuple[Piece, Column, Column]]:
        """Yield each piece with the seqnos and the times (in microseconds) of its changes."""
        runs = [piece for piece in pieces if isinstance(piece, ChangeRun)]
        decoded = decode_runs([run.data for run in runs], collections=self._collections)
        seqnos = decoded.batch.column("seqno").to_numpy()
        times = ((decoded.batch.column("cas").to_numpy() & ~_LOGICAL_BITS) // np.uint64(1000)).astype(np.int64)
        ends = iter(np.cumsum(decoded.rows).tolist())
        row = 0
        for piece in pieces:
            end = next(ends) if isinstance(piece, ChangeRun) else row
            yield piece, seqnos[row:end], times[row:end]
            row = end

    # --- one vbucket ----------------------------------------------------------------------------------------------

    def _on_run(
        self, search: _VBucketSearch, vbucket: VBucketId, seqnos: Column, times: Column, reader: Reader
    ) -> None:
        if not search.is_disordered and _is_disordered(search, seqnos, times):
            search.is_disordered = True
            search.newer = None
            if search.jumped_to is not None or not search.is_gapless:
                search.older = search.older if search.is_gapless else Seqno(0)
                self._ask_again(search, vbucket, reader)
                return
        if search.jumped_to is not None:
            # Use the newest of the times: one old version must not move the search past the start.
            if times.max() >= self._at_us - MARGIN_S * 1_000_000:
                search.newer, search.newer_us = search.jumped_to, int(times.min())
                self._ask_again(search, vbucket, reader)
                return
            search.jumped_to, search.is_gapless = None, False
        hits = np.flatnonzero(times >= self._at_us)
        if len(hits):
            if hits[0]:
                search.older = Seqno(int(seqnos[hits[0] - 1]))
            self._settle(search, vbucket)
            return
        search.older, search.older_us = Seqno(int(seqnos[-1])), max(search.older_us, int(times.max()))
        if self._middle(search, vbucket, reader) is not None:
            self._ask_again(search, vbucket, reader)

    def _on_end(self, search: _VBucketSearch, vbucket: VBucketId, reader: Reader) -> None:
        """The stream of the vbucket has ended."""
        if search.is_settled:
            self._finish(search, vbucket)
        elif search.jumped_to is None:
            self._settle(search, vbucket)
        else:
            search.newer = search.jumped_to  # Nothing follows it.
            self._ask_again(search, vbucket, reader)

    def _on_rollback(self, search: _VBucketSearch, rollback: RollbackPiece, reader: Reader) -> None:
        """A start in the middle was refused, or there was a failover. The stream continues at the rollback."""
        if rollback.old_vbuuid == rollback.new_vbuuid:
            search.refused = search.asked
            if search.is_settled:
                self._finish(search, rollback.vbucket)
            else:
                self._ask_again(search, rollback.vbucket, reader)
            return
        search.older = search.asked = min(search.older, rollback.seqno)
        search.newer = search.newer_us = search.jumped_to = None
        search.refused = Seqno(0)
        search.is_settled = False

    def _middle(self, search: _VBucketSearch, vbucket: VBucketId, reader: Reader) -> Seqno | None:
        """Return the seqno to jump to; None if the rest is short enough to read."""
        if search.is_disordered:
            return None
        lower = max(search.older, search.refused)
        upper = reader.end_seqno(vbucket) if search.newer is None else search.newer
        return None if upper is None or upper - lower <= SCANNED_SEQNOS_MAX else Seqno((lower + upper) // 2)

    def _ask_again(self, search: _VBucketSearch, vbucket: VBucketId, reader: Reader) -> None:
        """Request a stream from the middle of what is left, or from `older`."""
        search.jumped_to = self._middle(search, vbucket, reader)
        if search.jumped_to is None and search.refused and search.older <= search.refused:
            self._finish(search, vbucket)
        else:
            self._ask(search, vbucket, search.older if search.jumped_to is None else search.jumped_to)

    def _ask(self, search: _VBucketSearch, vbucket: VBucketId, seqno: Seqno) -> None:
        search.asked = seqno
        self._moves[vbucket] = search.offset(seqno)

    def _settle(self, search: _VBucketSearch, vbucket: VBucketId) -> None:
        """The start is `older`. Try it, unless the current stream began there."""
        search.is_settled = True
        if search.older in (0, search.asked):
            self._finish(search, vbucket)
        else:
            self._ask(search, vbucket, search.older)

    def _finish(self, search: _VBucketSearch, vbucket: VBucketId) -> None:
        self.found[vbucket] = search.offset(Seqno(0) if search.older <= search.refused else search.older)
        del self._searches[vbucket]


def _is_disordered(search: _VBucketSearch, seqnos: Column, times: Column) -> bool:
    """Whether the times of a run are out of order, in itself or compared with those seen before and after it."""
    margin_us = MARGIN_S * 1_000_000
    is_before_newer = search.newer is not None and seqnos[-1] <= search.newer
    return bool(
        (np.maximum.accumulate(times) - times).max() > margin_us
        or times[0] < search.older_us - margin_us
        or (is_before_newer and search.newer_us is not None and times.max() > search.newer_us + margin_us)
    )
