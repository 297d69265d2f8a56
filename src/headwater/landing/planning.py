"""What a batch reads: which vbuckets, from where, up to where, and by which tasks. Pure: everything known comes in.

An *offset* is where a consumer is in a vbucket: `(vbuuid, seqno, snapshot start, snapshot end)`. It is *whole* where
all three seqnos are the same: everything up to there has been read, to the end of a snapshot, and nothing beyond. A
task reads to the end of the snapshot that holds the planned end and reports the offset that it has really reached, so
offsets are whole as long as reports arrive. Where one is missing (a stream of `dcp` after a restart, a lake of an
earlier version), the seqno is right, but a snapshot may have been read beyond it; the offset says so by a snapshot that
starts earlier, at the last offset that was whole.

A plan never judges a rollback. A vbucket whose newest branch is another one than that of its offset is read whatever
its seqnos are: the server judges the stream request, and the reader goes back to the best of the boundaries it is
given.

The landing (`landing_loop`), the `dcp` source and the simulation plan with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.errors import CheckpointAhead, InvalidInput
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

ROWS_PER_PARTITION = 250_000
"""Beyond this a partition is worth a task of its own."""
BATCH_GROWTH_MAX = 8
"""A batch has at most so many times as many changes as the one before, where `maxRowsPerTrigger` limits them."""
BYTES_PER_ROW = 512
"""What a change is taken to have."""

Survey = Mapping[VBucketId, VBucketStatus]
Boundaries = Mapping[VBucketId, Sequence[Seqno]]
NOWHERE = StreamOffset()


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketRange:
    """What a task reads of a vbucket: the changes after `start`, to the end of the snapshot that holds `end_seqno`."""

    vbucket: VBucketId
    start: StreamOffset
    end_seqno: Seqno
    branch: Vbuuid
    """The newest branch when it was planned."""
    boundaries: tuple[Seqno, ...] = ()
    """Seqnos before the start that a rollback can go back to, rising."""

    @property
    def changes(self) -> int:
        """How many it has at most, by its seqnos. A branch to be judged counts as one."""
        return max(1, self.end_seqno - self.start.seqno)


# --- offsets ----------------------------------------------------------------------------------------------------------


def given_offsets(offsets: Offsets) -> Offsets:
    """Offsets as a user gives them: where their snapshot is complete, how it began does not matter."""
    whole = {vbucket: at.as_whole() for vbucket, at in offsets.offsets.items() if at.is_complete}
    return offsets.updated(whole)


def high_offsets(bucket_uuid: str, survey: Survey) -> Offsets:
    """The newest offset of every vbucket."""
    newest = {
        vbucket: StreamOffset.whole(status.failover_log.newest.vbuuid, status.high_seqno)
        for vbucket, status in survey.items()
    }
    return Offsets(bucket_uuid, newest)


def starting_point(offset: StreamOffset, status: VBucketStatus) -> StreamOffset:
    """What to ask the server with, so that it judges an offset by all that may have been read.

    The server compares the end of the snapshot with where the histories part (kv_engine,
    docs/dcp/documentation/rollback.md; `protocol.failover_log.decide_rollback`). No snapshot that was read of the
    newest branch can have gone further than that branch goes now. On any other branch it is not known how far it went:
    then the server demands a rollback, and the reader goes back to a boundary.
    """
    if not offset.seqno or offset.is_whole:
        return offset
    is_newest = offset.vbuuid == status.failover_log.newest.vbuuid
    furthest = max(offset.seqno, status.last_seqno) if is_newest else SEQNO_MAX
    return replace(offset, snapshot_end=Seqno(furthest))


def contradictions(offsets: Offsets, survey: Survey) -> list[VBucketId]:
    """The vbuckets that end before an offset on their newest branch. A failover in the middle of a survey looks like
    this, and so does a server that has lost its newest changes: a second survey shows which."""
    return [
        vbucket
        for vbucket, status in survey.items()
        if (offset := offsets.get(vbucket)) is not None
        and offset.vbuuid == status.failover_log.newest.vbuuid
        and offset.seqno > status.last_seqno
    ]


# --- what is new ------------------------------------------------------------------------------------------------------


def plan_ranges(
    offsets: Offsets,
    survey: Survey,
    *,
    boundaries: Boundaries | None = None,
    target: Mapping[VBucketId, Seqno] | None = None,
) -> list[VBucketRange]:
    """The range of every vbucket that has something new. With `target`, nothing beyond it is asked for."""
    ranges = []
    for vbucket, status in survey.items():
        offset = offsets.get(vbucket) or NOWHERE
        end_seqno = status.high_seqno if target is None else min(status.high_seqno, target.get(vbucket, Seqno(0)))
        is_newest = offset.vbuuid == status.failover_log.newest.vbuuid
        if is_newest and status.last_seqno < offset.seqno:
            raise CheckpointAhead(vbucket=vbucket, seqno=offset.seqno, high_seqno=status.last_seqno)
        if end_seqno <= offset.seqno and (is_newest or not offset.seqno):
            continue
        ranges.append(
            VBucketRange(
                vbucket=vbucket,
                start=starting_point(offset, status),
                end_seqno=end_seqno,
                branch=status.failover_log.newest.vbuuid,
                boundaries=tuple((boundaries or {}).get(vbucket, ())),
            )
        )
    return ranges


def rows_of_bytes(bytes_max: int | None) -> int | None:
    """A limit in bytes as one in rows: seqnos can be counted, bytes can't."""
    return None if bytes_max is None else max(1, bytes_max // BYTES_PER_ROW)


class RowShare:
    """How many of the changes that a read goes past are rows of it, about: collections and conditions leave some out.

    Before the first batch it is what the server says of its collections, or all. Then it is what the batches had, the
    newest counting most.
    """

    def __init__(self, expected: float = 1.0) -> None:
        self.value = expected
        self._changes = self._rows = 0.0

    def on_batch(self, ranges: Iterable[VBucketRange], *, rows: int) -> None:
        """These have been read, and had so many rows."""
        self._changes = self._changes / 2 + sum(it.changes for it in ranges)
        self._rows = self._rows / 2 + rows
        if self._changes:
            # No rows in some vbuckets say little of the next ones, so batches do not grow faster than this.
            least = self.value / BATCH_GROWTH_MAX
            self.value = min(1.0, max(least, self._rows / self._changes))


def limit_ranges(
    ranges: Iterable[VBucketRange],
    rows_max: int | None,
    *,
    last_read: Mapping[VBucketId, int],
    row_share: float = 1.0,
) -> list[VBucketRange]:
    """As many whole ranges as have no more than `rows_max` rows together, and at least one.

    Those that were read longest ago come first (`last_read` counts batches), so every vbucket has its turn: one that
    does not fit now is the first of a later batch.
    """
    waiting = sorted(ranges, key=lambda it: (last_read.get(it.vbucket, -1), it.vbucket))
    if rows_max is None:
        return waiting
    chosen: list[VBucketRange] = []
    rows = 0.0
    for it in waiting:
        if not chosen or rows + it.changes * row_share <= rows_max:
            chosen.append(it)
            rows += it.changes * row_share
    return chosen


def share_out(
    ranges: Sequence[VBucketRange],
    *,
    node_of: Mapping[VBucketId, int],
    tasks_min: int,
    row_share: float = 1.0,
    group_of: Callable[[VBucketId], int] | None = None,
) -> list[tuple[VBucketRange, ...]]:
    """The ranges in tasks of about the same size.

    The vbuckets of a task are of one node, so that it needs one connection; or, with `group_of`, all vbuckets of a
    group are in one task.
    """
    parts: dict[int, list[list[VBucketRange]]] = {}
    """What is dealt together, by node."""
    if group_of is None:
        for it in ranges:
            parts.setdefault(node_of.get(it.vbucket, -1), []).append([it])
    else:
        groups: dict[int, list[VBucketRange]] = {}
        for it in ranges:
            groups.setdefault(group_of(it.vbucket), []).append(it)
        parts[-1] = [*groups.values()]
    count = max(tasks_min, math.ceil(_changes(ranges) * row_share / ROWS_PER_PARTITION))
    shares = []
    for held in parts.values():
        wanted = max(1, round(count * sum(map(_changes, held)) / _changes(ranges)))
        dealt: list[list[VBucketRange]] = [[] for _ in range(min(wanted, len(held)))]
        sizes = [0] * len(dealt)
        # The largest first, each to the task that has least.
        for part in sorted(held, key=_changes, reverse=True):
            least = sizes.index(min(sizes))
            dealt[least] += part
            sizes[least] += _changes(part)
        shares += [tuple(share) for share in dealt]
    return shares


def _changes(ranges: Iterable[VBucketRange]) -> int:
    return sum(it.changes for it in ranges)


# --- a stream of `dcp`: offsets that are logged before the batch is read ----------------------------------------------


class StreamPlans:
    """The plans of one stream, in the process that makes them. `headwater.spark.source` says what its offsets mean."""

    def __init__(self) -> None:
        self._reported: dict[VBucketId, StreamOffset] = {}
        """Where vbuckets are, as far as tasks have reported it."""
        self._last_read: dict[VBucketId, int] = {}
        self._batches = 0
        self._planned: tuple[Offsets, list[VBucketRange]] | None = None

    def plan(
        self,
        began: Offsets,
        survey: Survey,
        reached: Mapping[VBucketId, StreamOffset],
        *,
        target: Mapping[VBucketId, Seqno] | None = None,
        rows_max: int | None = None,
        row_share: float = 1.0,
    ) -> Offsets:
        """Where the batch after `began` ends. `reached` is what the tasks of the batch before it have reported."""
        self._reported |= reached
        if not began.offsets:
            return high_offsets(began.bucket_uuid, survey)
        named = {vbucket: survey[vbucket] for vbucket in began if vbucket in survey}
        ranges = plan_ranges(self.starts(began), named, target=target)
        chosen = limit_ranges(ranges, rows_max, last_read=self._last_read, row_share=row_share)
        end = began.updated({it.vbucket: _planned_offset(it) for it in chosen})
        self._planned = end, chosen
        return end

    @property
    def chosen(self) -> list[VBucketRange]:
        """What the batch that was planned last reads."""
        return [] if self._planned is None else self._planned[1]

    def starts(self, began: Offsets) -> Offsets:
        """Where the batch after `began` begins: where the one before was read to, or where it was planned to end.

        A reported offset counts only if a repetition of the batch would find it, which knows the offsets alone: it lies
        on the branch that was planned, and not before the planned end. Else a failover came between a plan and its
        read, and the next batch goes back to where that one began.
        """
        known = {}
        for vbucket, at in self._reported.items():
            planned = began.get(vbucket)
            if planned is not None and at.vbuuid == planned.vbuuid and at.seqno >= planned.seqno:
                known[vbucket] = at
        return began.updated(known)

    def is_planned_here(self, end: Offsets) -> bool:
        """Whether the batch that ends there was planned by this process; else it is repeated after a crash."""
        return self._planned is not None and self._planned[0] == end

    def ranges(self, began: Offsets, end: Offsets, survey: Callable[[], Survey]) -> list[VBucketRange]:
        """What the batch between two offsets reads. From here on the offsets that it begins at do not count."""
        if self._planned is not None and self._planned[0] == end:
            ranges = self._planned[1]
        elif began.offsets:
            now = survey()
            moved = [vbucket for vbucket, at in end.offsets.items() if at != began.get(vbucket) and vbucket in now]
            starts = {vbucket: _repeated_start(began.get(vbucket) or NOWHERE, end[vbucket]) for vbucket in moved}
            named = {vbucket: now[vbucket] for vbucket in moved}
            target = {vbucket: end[vbucket].seqno for vbucket in moved}
            ranges = plan_ranges(began.updated(starts), named, target=target)
        else:
            ranges = []
        for it in ranges:
            self._last_read[it.vbucket] = self._batches
            self._reported.pop(it.vbucket, None)
        self._batches += 1
        return ranges


def _planned_offset(it: VBucketRange) -> StreamOffset:
    """Where a range ends, as far as that is known before it is read; and, as the start, the last whole offset.

    It is never a whole offset itself: a snapshot may go beyond it. Where the branch is another one the range may have
    to be rolled back first, to an offset that is not known yet.
    """
    start = it.start.snapshot_start if it.branch == it.start.vbuuid else Seqno(0)
    end = max(it.end_seqno, start + 1)
    return StreamOffset(vbuuid=it.branch, seqno=it.end_seqno, snapshot_start=start, snapshot_end=Seqno(end))


def _repeated_start(began: StreamOffset, end: StreamOffset) -> StreamOffset:
    """Where the batch between two offsets begins: where the first attempt began, if the end says so."""
    if began.is_whole or end.snapshot_start < began.seqno:
        return began
    return StreamOffset.whole(began.vbuuid, end.snapshot_start)


# --- a read that is no stream -----------------------------------------------------------------------------------------


def plan_read(start: Offsets, wanted: Offsets | None, survey: Survey) -> list[VBucketRange]:
    """What a read from `start` to the offsets that are wanted, or to now, has to read.

    It has no row for a rollback, and no later batch would make up for one: start and end must lie on the newest branch.
    Vbuckets that the survey does not have are not read.
    """
    for vbucket, status in survey.items():
        offset = start[vbucket]
        if offset.seqno and offset.snapshot_end > _shared_seqno(offset.vbuuid, status):
            raise InvalidInput(
                f"a failover has taken back the offset from which vbucket {vbucket} is to be read",
                hint="Start from the beginning, or read a stream, which has rollbacks as rows",
            )
    if wanted is None:
        return plan_ranges(start, survey)
    named = {vbucket: survey[vbucket] for vbucket in wanted if vbucket in survey}
    for vbucket, status in named.items():
        _check_end(vbucket, start[vbucket], wanted[vbucket], status)
    return plan_ranges(start, named, target={vbucket: end.seqno for vbucket, end in wanted.offsets.items()})


def _shared_seqno(vbuuid: Vbuuid, status: VBucketStatus) -> int:
    """Up to where the newest branch has what a branch has."""
    return status.failover_log.branch_end(vbuuid, high_seqno=status.last_seqno) or 0


def _check_end(vbucket: VBucketId, start: StreamOffset, end: StreamOffset, status: VBucketStatus) -> None:
    problem = None
    if end.seqno < start.seqno:
        problem = f"vbucket {vbucket} is to be read from seqno {start.seqno} up to {end.seqno}, which lies before"
    elif end.seqno > status.last_seqno:
        problem = f"vbucket {vbucket} ends at seqno {status.last_seqno}, and is to be read up to {end.seqno}"
    elif end.seqno > _shared_seqno(end.vbuuid, status):
        problem = f"a failover has taken back the offset up to which vbucket {vbucket} is to be read"
    if problem is not None:
        raise InvalidInput(problem, hint="Give other endingOffsets, or none for all there is")
