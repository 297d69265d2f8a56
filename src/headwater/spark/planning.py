"""Which offsets a batch ends at, and which tasks read it. Pure: everything that is known comes in.

An offset of Spark has the four numbers of every vbucket. Its snapshot start is the last seqno at which everything up to
it is known to have been read (`read_extents` says why that is not always the seqno itself), its snapshot end is always
the seqno.

A vbucket whose branch is no longer the newest is judged before it is read on. Where it can go on it gets the newest
branch's name. Where it can't, its offset goes *down*: that batch has one row of it, the rollback, and the next batch
reads on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.errors import CheckpointAhead
from headwater.protocol.numbers import Seqno, VBucketId
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.read_extents import ReadExtent

ROWS_PER_PARTITION = 250_000
"""Beyond this a partition is worth a task of its own."""

Survey = Mapping[VBucketId, VBucketStatus]
Extents = Mapping[VBucketId, ReadExtent]


# --- where a batch ends -------------------------------------------------------------------------------------------


def plan_end(
    start: Offsets,
    survey: Survey,
    extents: Extents,
    *,
    target: Mapping[VBucketId, Seqno] | None = None,
    rows_max: int | None = None,
) -> Offsets:
    """The offsets to read to. With `target` no seqno beyond it is taken, with `rows_max` no more changes than that."""
    ends: dict[VBucketId, StreamOffset] = {}
    for vbucket, offset in start.offsets.items():
        status = survey[vbucket]
        kept = _judge(vbucket, offset, status, extents.get(vbucket))
        high = status.high_seqno
        if target is not None:
            high = min(high, max(target.get(vbucket, high), kept.seqno))
        ends[vbucket] = kept if kept.seqno < offset.seqno else _moved(kept, Seqno(max(high, kept.seqno)))
    # A branch that has only got another name is no news: a batch with no row would be made of it again and again.
    ends = {vbucket: start[vbucket] if _is_idle(start[vbucket], end) else end for vbucket, end in ends.items()}
    return Offsets(start.bucket_uuid, ends if rows_max is None else share_rows(start, ends, rows_max))


def _is_idle(start: StreamOffset, end: StreamOffset) -> bool:
    return start.seqno == end.seqno


def _judge(vbucket: VBucketId, offset: StreamOffset, status: VBucketStatus, extent: ReadExtent | None) -> StreamOffset:
    """Where the vbucket goes on from: its seqno, or lower after a rollback."""
    log = status.failover_log
    if not offset.seqno:
        return StreamOffset(vbuuid=log.newest.vbuuid)
    snapshot_end = _snapshot_end(offset, extent)
    boundary = offset.seqno if snapshot_end == offset.seqno else offset.snapshot_start
    if log.newest.vbuuid == offset.vbuuid:
        if status.high_seqno < offset.seqno:
            raise CheckpointAhead(vbucket=vbucket, seqno=offset.seqno, high_seqno=status.high_seqno)
        return _at(offset.seqno, offset, boundary=boundary)
    shared_until = log.branch_end(offset.vbuuid, high_seqno=status.high_seqno)
    was_read_on_newest = extent is not None and extent.vbuuid == log.newest.vbuuid and extent.seqno == offset.seqno
    newest = StreamOffset(vbuuid=log.newest.vbuuid)
    if was_read_on_newest or (shared_until is not None and snapshot_end is not None and snapshot_end <= shared_until):
        return _at(offset.seqno, newest, boundary=boundary)
    if shared_until is None or offset.snapshot_start > shared_until:
        return newest
    return _at(offset.snapshot_start, newest, boundary=offset.snapshot_start)


def _snapshot_end(offset: StreamOffset, extent: ReadExtent | None) -> Seqno | None:
    """The end of the last snapshot that was read of; None where nobody knows."""
    if offset.snapshot_start == offset.seqno:
        return offset.seqno
    if extent is not None and (extent.vbuuid, extent.seqno) == (offset.vbuuid, offset.seqno):
        return extent.snapshot_end
    return None


def _at(seqno: Seqno, branch: StreamOffset, *, boundary: Seqno) -> StreamOffset:
    return StreamOffset(vbuuid=branch.vbuuid, seqno=seqno, snapshot_start=boundary, snapshot_end=seqno)


def _moved(kept: StreamOffset, seqno: Seqno) -> StreamOffset:
    return _at(seqno, kept, boundary=kept.snapshot_start)


def share_rows(start: Offsets, ends: Mapping[VBucketId, StreamOffset], rows_max: int) -> dict[VBucketId, StreamOffset]:
    """Cut the ends so that no more than `rows_max` changes lie between: the same share for each that wants so much.

    What one vbucket does not need is shared out among the others, so small ones are read whole. A vbucket is never
    starved: its share is at least one change, even if that makes a few more than were asked for.
    """
    wanted = {
        vbucket: end.seqno - start[vbucket].seqno for vbucket, end in ends.items() if end.seqno > start[vbucket].seqno
    }
    left, shares = rows_max, {}
    for position, vbucket in enumerate(sorted(wanted, key=lambda vbucket: (wanted[vbucket], vbucket))):
        shares[vbucket] = min(wanted[vbucket], max(1, left // (len(wanted) - position)))
        left -= shares[vbucket]
    return {
        vbucket: _moved(end, Seqno(start[vbucket].seqno + shares[vbucket])) if vbucket in shares else end
        for vbucket, end in ends.items()
    }


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
            read = VBucketRange(vbucket=vbucket, start=before, end_seqno=after.seqno)
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
