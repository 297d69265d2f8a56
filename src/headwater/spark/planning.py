"""Which offsets a batch ends at, and which tasks read it. Pure: everything that is known comes in.

An offset of Spark has the four numbers of every vbucket, as they stood when the batch was planned. Its snapshot start
is the last seqno at which everything up to it is known to have been read (`read_extents` says why that is not always
the seqno itself). Its snapshot end says how far the snapshots went that were read since then, before this batch; it is
the seqno where they went no further. How far the batch itself came, its tasks tell in the extents.

A vbucket whose branch is no longer the newest is judged before it is read on. Where it can go on it gets the newest
branch's name. Where it can't, its offset goes *down*, to the nearest place that is sure (`known_places`): that batch
has one row of it, the rollback, and the next batch reads on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.errors import CheckpointAhead, InvalidInput
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.known_places import Places, with_place
from headwater.spark.read_extents import Extents, ReadExtent

ROWS_PER_PARTITION = 250_000
"""Beyond this a partition is worth a task of its own."""

Survey = Mapping[VBucketId, VBucketStatus]
PlacesOfOne = tuple[StreamOffset, ...]


# --- where a batch ends -------------------------------------------------------------------------------------------


def plan_end(
    start: Offsets,
    survey: Survey,
    extents: Extents,
    *,
    places: Places | None = None,
    target: Mapping[VBucketId, Seqno] | None = None,
    rows_max: int | None = None,
) -> Offsets:
    """The offsets to read to. With `target` no seqno beyond it is taken, with `rows_max` no more changes than that."""
    kept: dict[VBucketId, StreamOffset] = {}
    wanted: dict[VBucketId, int] = {}
    for vbucket, offset in start.offsets.items():
        status = survey[vbucket]
        known = (places or {}).get(vbucket, ())
        kept[vbucket] = _judge(vbucket, offset, status, extents.get(vbucket), known)
        if kept[vbucket].seqno == offset.seqno:
            end_seqno = status.high_seqno if target is None else min(status.high_seqno, target.get(vbucket, SEQNO_MAX))
            wanted[vbucket] = max(0, end_seqno - offset.seqno)
    if rows_max is not None:
        wanted = share_rows(wanted, rows_max)
    ends = {vbucket: _moved(offset, by=wanted.get(vbucket, 0)) for vbucket, offset in kept.items()}
    # A branch that has only got another name is no news: a batch with no row would be made of it again and again.
    ends |= {vbucket: offset for vbucket, offset in start.offsets.items() if ends[vbucket].seqno == offset.seqno}
    return Offsets(start.bucket_uuid, ends)


def note_places(start: Offsets, survey: Survey, extents: Extents, places: Places) -> dict[VBucketId, PlacesOfOne]:
    """What is known when the batch that ends at `start` is done: the places that a later plan may go back to."""
    noted = {}
    for vbucket, offset in start.offsets.items():
        status = survey[vbucket]
        is_newest = offset.vbuuid == status.failover_log.newest.vbuuid and offset.seqno <= status.high_seqno
        at = _judge(vbucket, offset, status, extents.get(vbucket), ()) if is_newest else offset
        noted[vbucket] = with_place(places.get(vbucket, ()), at, is_known=is_newest)
    return noted


def _judge(
    vbucket: VBucketId,
    offset: StreamOffset,
    status: VBucketStatus,
    extent: ReadExtent | None,
    places: PlacesOfOne,
) -> StreamOffset:
    """Where the vbucket goes on from: its seqno, or lower after a rollback."""
    log = status.failover_log
    newest = log.newest.vbuuid
    if not offset.seqno:
        return StreamOffset(vbuuid=newest)
    was_read = _matching(offset, extent)
    if offset.vbuuid == newest:
        if status.high_seqno < offset.seqno:
            raise CheckpointAhead(vbucket=vbucket, seqno=offset.seqno, high_seqno=status.high_seqno)
        if offset.snapshot_start == offset.seqno:
            return offset
        # No snapshot that was ever read of this branch can have gone further than it goes now.
        furthest = was_read.snapshot_end if was_read and was_read.vbuuid == newest else status.high_seqno
        return _gone_on(offset, newest, max(furthest, offset.snapshot_end))
    if was_read and was_read.vbuuid == newest and was_read.start_seqno == offset.snapshot_start:
        # Planned on a branch that is dead, but read on the newest, from a place where nothing was missing.
        return _gone_on(offset, newest, was_read.snapshot_end)
    shared_until = log.branch_end(offset.vbuuid, high_seqno=status.high_seqno)
    if shared_until is None:
        return StreamOffset(vbuuid=newest)
    if was_read and was_read.vbuuid == offset.vbuuid:
        furthest = max(was_read.snapshot_end, offset.snapshot_end)
        if furthest <= shared_until:
            return _gone_on(offset, newest, furthest)
    return _nearest_sure(offset, status, places, shared_until)


def _nearest_sure(
    offset: StreamOffset, status: VBucketStatus, places: PlacesOfOne, shared_until: Seqno
) -> StreamOffset:
    """The highest place, not beyond the offset, from where nothing that holds can be missed."""
    newest = status.failover_log.newest.vbuuid
    sure = offset.snapshot_start if offset.snapshot_start <= shared_until else Seqno(0)
    for place in reversed(places):
        if sure < place.seqno <= offset.seqno and _is_shared(place, status):
            return _gone_on(place, newest, place.snapshot_end)
    return _at(sure, newest)


def _is_shared(place: StreamOffset, status: VBucketStatus) -> bool:
    """Whether the newest branch has all that was read up to a place, also of what snapshots showed beyond it."""
    shared_until = status.failover_log.branch_end(place.vbuuid, high_seqno=status.high_seqno)
    return shared_until is not None and place.snapshot_end <= shared_until


def _matching(offset: StreamOffset, extent: ReadExtent | None) -> ReadExtent | None:
    """What is known of the read that ended at the offset."""
    return extent if extent is not None and extent.seqno == offset.seqno else None


def _at(seqno: Seqno, vbuuid: Vbuuid) -> StreamOffset:
    """All up to here has been read, and nothing further."""
    return StreamOffset(vbuuid=vbuuid, seqno=seqno, snapshot_start=seqno, snapshot_end=seqno)


def _gone_on(offset: StreamOffset, vbuuid: Vbuuid, furthest: Seqno) -> StreamOffset:
    """The same place on a branch, when snapshots up to `furthest` have been read of."""
    return (
        _at(offset.seqno, vbuuid) if furthest <= offset.seqno else replace(offset, vbuuid=vbuuid, snapshot_end=furthest)
    )


def _moved(offset: StreamOffset, *, by: int) -> StreamOffset:
    seqno = Seqno(offset.seqno + by)
    return replace(offset, seqno=seqno, snapshot_end=max(seqno, offset.snapshot_end))


def share_rows(wanted: Mapping[VBucketId, int], rows_max: int) -> dict[VBucketId, int]:
    """How many changes of each vbucket, so that they are no more than `rows_max` together: the same for each that wants
    so many.

    What one vbucket does not need is shared out among the others, so small ones are read whole. A vbucket is never
    starved: its share is at least one change, even if that makes a few more than were asked for.
    """
    left = rows_max
    waiting = [vbucket for vbucket in sorted(wanted, key=lambda vbucket: (wanted[vbucket], vbucket)) if wanted[vbucket]]
    shares = {}
    for position, vbucket in enumerate(waiting):
        shares[vbucket] = min(wanted[vbucket], max(1, left // (len(waiting) - position)))
        left -= shares[vbucket]
    return shares


# --- where a read ends that is no stream ----------------------------------------------------------------------------


def plan_read(start: Offsets, wanted: Offsets | None, survey: Survey) -> Offsets:
    """The offsets to read to: those that are wanted, or what there is now.

    No row of it could tell a rollback, and no later batch make up for one: start and end must lie on the newest branch.
    """
    now = plan_end(start, survey, {})
    for vbucket, offset in start.offsets.items():
        if now[vbucket].seqno < offset.seqno:
            raise InvalidInput(
                f"a failover has taken back the place from which vbucket {vbucket} is to be read",
                hint="Start from the beginning, or read a stream, which tells rollbacks as rows",
            )
    if wanted is None:
        return now
    ends = {
        vbucket: _checked_end(vbucket, start[vbucket], end, survey[vbucket]) for vbucket, end in wanted.offsets.items()
    }
    return Offsets(start.bucket_uuid, ends)


def _checked_end(vbucket: VBucketId, start: StreamOffset, end: StreamOffset, status: VBucketStatus) -> StreamOffset:
    log = status.failover_log
    problem = None
    if end.seqno < start.seqno:
        problem = f"vbucket {vbucket} is to be read from seqno {start.seqno} up to {end.seqno}, which lies before"
    elif end.seqno > status.high_seqno:
        problem = f"vbucket {vbucket} ends at seqno {status.high_seqno}, and is to be read up to {end.seqno}"
    elif end.seqno > (log.branch_end(end.vbuuid, high_seqno=status.high_seqno) or 0):
        problem = f"a failover has taken back the place up to which vbucket {vbucket} is to be read"
    if problem is not None:
        raise InvalidInput(problem, hint="Give other endingOffsets, or none for all there is")
    return replace(end, vbuuid=log.newest.vbuuid)


# --- which tasks read it ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketRange:
    """What one task reads of a vbucket: the changes behind `start`, up to `end_seqno`."""

    vbucket: VBucketId
    start: StreamOffset
    end_seqno: Seqno


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketRollback:
    """The row that says that everything behind `seqno` is void."""

    vbucket: VBucketId
    before: StreamOffset
    after: StreamOffset


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlan:
    ranges: tuple[VBucketRange, ...] = ()
    rollbacks: tuple[VBucketRollback, ...] = ()


def plan_tasks(start: Offsets, end: Offsets, *, node_of: Mapping[VBucketId, int], tasks_min: int) -> list[TaskPlan]:
    """Tasks of about the same size, each with vbuckets of one node, so that it needs one connection only."""
    rollbacks = []
    ranges_by_node: dict[int, list[VBucketRange]] = {}
    for vbucket, after in end.offsets.items():
        before = start.get(vbucket) or StreamOffset()
        if after.seqno < before.seqno:
            rollbacks.append(VBucketRollback(vbucket=vbucket, before=before, after=after))
        elif after.seqno > before.seqno:
            # The old branch may be one that the server has never heard of, though all was read on the new one.
            # What snapshots went beyond the batches is our affair, not the server's: rows of the next snapshot begin
            # where the batch does, and so a table can be taken back to there.
            start_at = _at(before.seqno, after.vbuuid) if before.seqno else StreamOffset()
            read = VBucketRange(vbucket=vbucket, start=start_at, end_seqno=after.seqno)
            ranges_by_node.setdefault(node_of.get(vbucket, -1), []).append(read)
    rows = sum(_rows(read) for reads in ranges_by_node.values() for read in reads)
    count = max(tasks_min, -(-rows // ROWS_PER_PARTITION))
    plans = [
        TaskPlan(ranges=tuple(share))
        for reads in ranges_by_node.values()
        for share in _deal_out(reads, max(1, round(count * sum(map(_rows, reads)) / rows)))
    ]
    return plans + ([TaskPlan(rollbacks=tuple(rollbacks))] if rollbacks else [])


def _rows(read: VBucketRange) -> int:
    return read.end_seqno - read.start.seqno


def _deal_out(reads: list[VBucketRange], shares: int) -> list[list[VBucketRange]]:
    """The largest first, each to whoever has least."""
    dealt: list[list[VBucketRange]] = [[] for _ in range(min(shares, len(reads)))]
    sizes = [0] * len(dealt)
    for read in sorted(reads, key=_rows, reverse=True):
        least = sizes.index(min(sizes))
        dealt[least].append(read)
        sizes[least] += _rows(read)
    return dealt
