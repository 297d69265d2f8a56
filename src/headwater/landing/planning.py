"""Plans what a batch reads: which vbuckets, from where, up to where, and by which tasks; and when to merge documents.
Pure: all knowledge is passed in, including clocks and counts.

An *offset* is a consumer's position in a vbucket: `(vbuuid, seqno, snapshot start, snapshot end)`. It is *whole* if
all three seqnos are equal: everything up to there has been read, to the end of a snapshot, and nothing beyond. A task
reads to the end of the snapshot that contains the planned end and reports the offset that it has reached, so offsets
are whole as long as reports arrive. If one is missing (a stream of `dcp` after a restart, a lake of an earlier
version), the seqno is right, but a snapshot may have been read beyond it; the offset shows that by a snapshot that
starts earlier, at the last offset that was whole.

A plan never judges a rollback. A vbucket whose newest branch differs from that of its offset is read whatever its
seqnos are: the server judges the stream request, and the reader goes back to the best of the given boundaries.

The landing (`loop`), the `dcp` source and the simulation use these plans.

Two numbers say how far `changes` is behind. The lag in seqnos comes from the bucket's high seqnos, which are requested
every second, independently of batches. The lag in seconds is the age of the newest survey that the tables fully
contain: everything written before it is in the tables. Both show a batch that never ends.

`documents` is behind `changes` by what is not merged yet. Merging every batch would be freshest, but costs most when a
few changes touch many files. So a merge waits until as much time has passed as the last one took, and until it writes
at most a multiple of the changed bytes, unless a change would wait longer than allowed.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.errors import CheckpointAhead, InvalidInput
from headwater.options import suggest_keywords
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

ROWS_PER_PARTITION = 250_000
"""With more rows than this, a partition gets another task."""
BATCH_GROWTH_MAX = 8
"""How many times larger than the batch before a batch can be, if `maxRowsPerTrigger` limits them."""
BYTES_PER_ROW = 512
"""The assumed size of a change."""

Survey = Mapping[VBucketId, VBucketStatus]
Boundaries = Mapping[VBucketId, Sequence[Seqno]]
NOWHERE = StreamOffset()


@dataclass(frozen=True, slots=True, kw_only=True)
class VBucketRange:
    """What a task reads of a vbucket: the changes after `start`, to the end of the snapshot with `end_seqno`."""

    vbucket: VBucketId
    start: StreamOffset
    end_seqno: Seqno
    branch: Vbuuid
    """The newest branch when the range was planned."""
    boundaries: tuple[Seqno, ...] = ()
    """Seqnos before the start to which a rollback can go back, sorted."""

    @property
    def changes(self) -> int:
        """The most changes that the range can have, by its seqnos. A branch that must be judged counts as one."""
        return max(1, self.end_seqno - self.start.seqno)


# --- offsets ----------------------------------------------------------------------------------------------------------


def given_offsets(offsets: Offsets) -> Offsets:
    """Normalize a user's offsets: if a snapshot is complete, its start does not matter."""
    whole = {vbucket: at.as_whole() for vbucket, at in offsets.offsets.items() if at.is_complete}
    return offsets.updated(whole)


def high_offsets(bucket_uuid: str, survey: Survey) -> Offsets:
    """Return the newest offset of every vbucket."""
    newest = {
        vbucket: StreamOffset.whole(status.failover_log.newest.vbuuid, status.high_seqno)
        for vbucket, status in survey.items()
    }
    return Offsets(bucket_uuid, newest)


def starting_point(offset: StreamOffset, status: VBucketStatus) -> StreamOffset:
    """Return the offset for the stream request, with which the server judges everything that may have been read.

    The server compares the end of the snapshot with where the histories part (kv_engine,
    docs/dcp/documentation/rollback.md; `protocol.failover_log.decide_rollback`). A snapshot that was read from the
    newest branch can't reach beyond that branch's current end. For any other branch its reach is unknown: then the
    server demands a rollback, and the reader goes back to a boundary.
    """
    if not offset.seqno or offset.is_whole:
        return offset
    is_newest = offset.vbuuid == status.failover_log.newest.vbuuid
    furthest = max(offset.seqno, status.last_seqno) if is_newest else SEQNO_MAX
    return replace(offset, snapshot_end=Seqno(furthest))


def contradictions(offsets: Offsets, survey: Survey) -> list[VBucketId]:
    """Return the vbuckets that end before an offset on their newest branch. That happens during a failover, and if a
    server has lost its newest changes: a second survey distinguishes the two."""
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
    """Return the range of every vbucket that has something new. With `target`, nothing beyond it is planned."""
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
    """Convert a limit in bytes to one in rows, because seqnos can be counted in advance, and bytes can't."""
    return None if bytes_max is None else max(1, bytes_max // BYTES_PER_ROW)


class RowShare:
    """The approximate share of a read's changes that become rows: collections and conditions leave some out.

    Before the first batch, it comes from the server's counts per collection, or is 1. Then it is the share of the
    batches so far, of which the newest counts most.
    """

    def __init__(self, expected: float = 1.0) -> None:
        self.value = expected
        self._changes = self._rows = 0.0

    def on_batch(self, ranges: Iterable[VBucketRange], *, rows: int) -> None:
        """Learn from a batch: the ranges that were read, and how many rows they had."""
        self._changes = self._changes / 2 + sum(it.changes for it in ranges)
        self._rows = self._rows / 2 + rows
        if self._changes:
            # A few vbuckets without rows say little about the next ones, so this bounds the growth of batches.
            least = self.value / BATCH_GROWTH_MAX
            self.value = min(1.0, max(least, self._rows / self._changes))


def limit_ranges(
    ranges: Iterable[VBucketRange],
    rows_max: int | None,
    *,
    last_read: Mapping[VBucketId, int],
    row_share: float = 1.0,
) -> list[VBucketRange]:
    """Choose whole ranges that together have at most `rows_max` rows, but at least one range.

    Ranges that were read longest ago come first (`last_read` has the batch numbers), so every vbucket gets its turn:
    one that does not fit now is the first of a later batch.
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
    """Distribute the ranges over tasks of about the same size.

    All vbuckets of a task are on one node, so that it needs one connection; or, with `group_of`, all vbuckets of a
    group are in one task.
    """
    parts: dict[int, list[list[VBucketRange]]] = {}
    """The units to distribute, by node."""
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
        # The largest first, each to the task that has the least.
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
    """The plans of one stream, in the process that makes them. `headwater.spark.source` explains its offsets."""

    def __init__(self) -> None:
        self._reported: dict[VBucketId, StreamOffset] = {}
        """The offsets that tasks have reported."""
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
        """Return the end of the batch after `began`. `reached` is what the tasks of the batch before have reported."""
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
        """The ranges of the batch that was planned last."""
        return [] if self._planned is None else self._planned[1]

    def starts(self, began: Offsets) -> Offsets:
        """Return where the batch after `began` starts: where the one before was read to, or was planned to end.

        A reported offset counts only if a repeated batch, which knows only the offsets, would find it: it is on the
        planned branch, and not before the planned end. Otherwise a failover came between plan and read, and the next
        batch goes back to the start of that one.
        """
        known = {}
        for vbucket, at in self._reported.items():
            planned = began.get(vbucket)
            if planned is not None and at.vbuuid == planned.vbuuid and at.seqno >= planned.seqno:
                known[vbucket] = at
        return began.updated(known)

    def is_planned_here(self, end: Offsets) -> bool:
        """Return whether this process planned the batch that ends there; if not, Spark repeats it after a crash."""
        return self._planned is not None and self._planned[0] == end

    def ranges(self, began: Offsets, end: Offsets, survey: Callable[[], Survey]) -> list[VBucketRange]:
        """Return the ranges of the batch between two offsets. Reported offsets of its vbuckets are dropped."""
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
    """Return the end of a range, as far as known before it is read, with the last whole offset as the snapshot start.

    It is never a whole offset: a snapshot may go beyond it. On another branch, the range may first have to be rolled
    back, to an offset that is not known yet.
    """
    start = it.start.snapshot_start if it.branch == it.start.vbuuid else Seqno(0)
    end = max(it.end_seqno, start + 1)
    return StreamOffset(vbuuid=it.branch, seqno=it.end_seqno, snapshot_start=start, snapshot_end=Seqno(end))


def _repeated_start(began: StreamOffset, end: StreamOffset) -> StreamOffset:
    """Return where the batch between two offsets starts: where the first attempt started, if the end shows that."""
    if began.is_whole or end.snapshot_start < began.seqno:
        return began
    return StreamOffset.whole(began.vbuuid, end.snapshot_start)


# --- a read that is no stream -----------------------------------------------------------------------------------------


def plan_read(start: Offsets, wanted: Offsets | None, survey: Survey) -> list[VBucketRange]:
    """Return the ranges of a batch read from `start` to the offsets in `wanted`, or to now.

    Such a read has no rows for rollbacks, and no later batch corrects it: start and end must be on the newest branch.
    Vbuckets that the survey lacks are not read.
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
    """Return the seqno up to which a branch is part of the newest branch."""
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


# --- how far the tables are behind, and when the documents are merged -------------------------------------------------


WAIT_S_MAX = 60.0
MERGE_SHARE = 0.5
WRITE_RATIO = 8.0
WRITE_BYTES_S = 64 * 1024
_SURVEYS_MAX = 256
_SLOW_MERGES = 3
_LATE = 1.1
"""Tolerance for a merge that started in time but took a little longer than expected."""


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How fresh to keep `documents`."""

    wait_s_max: float = WAIT_S_MAX
    """The longest time that a change waits to be merged, if the machine can keep up."""
    merge_share: float = MERGE_SHARE
    """The share of time for merging, from 0 to 1, while no change waits longer than that."""
    write_ratio: float = WRITE_RATIO
    """While no change waits longer than that, merges write at most this many times the changed bytes…"""
    write_bytes_s: float = WRITE_BYTES_S
    """…plus this many bytes a second, so that small tables are merged at once."""


class MergeClock:
    """Decides when to merge."""

    def __init__(self, rules: Freshness) -> None:
        self._rules = rules
        self._ended_s = float("-inf")
        self._took_s = 0.0
        self._slow = 0
        """The number of slow merges in a row."""

    def on_merged(self, *, began_s: float, ended_s: float, waited_s: float = 0.0) -> None:
        """A merge has ended. When it began, the oldest change had waited for `waited_s`."""
        took_s, rested_s = ended_s - began_s, began_s - self._ended_s
        is_slow = took_s > rested_s or waited_s + took_s > _LATE * self._rules.wait_s_max
        self._slow = self._slow + 1 if is_slow else 0
        self._ended_s, self._took_s = ended_s, took_s

    @property
    def is_behind(self) -> bool:
        """Whether merges repeatedly took more than half of the time, or changes waited longer than they may."""
        return self._slow >= _SLOW_MERGES

    def is_due(self, *, now_s: float, waited_s: float, changed_bytes: float = 0, expected_bytes: float = 0) -> bool:
        """Return whether to merge now, when the oldest change has waited for `waited_s`.

        `changed_bytes` wait in `changes`, and the merge is expected to write `expected_bytes`.
        """
        rules, rested_s = self._rules, now_s - self._ended_s
        if waited_s + self._took_s >= rules.wait_s_max:
            return True
        share = rules.merge_share
        if not share or rested_s < self._took_s * (1 - share) / share:
            return False
        return expected_bytes <= rules.write_ratio * changed_bytes + rules.write_bytes_s * rested_s


class LandingLag:
    """The lag of `changes` behind the bucket. May be used from several threads."""

    def __init__(self, held: Offsets, *, as_of_s: float | None) -> None:
        """`as_of_s` is recorded in the tables: the time up to which they are known to contain everything."""
        self._lock = threading.Lock()
        self._surveys: list[tuple[float, dict[VBucketId, StreamOffset]]] = []
        """Surveys that the tables do not fully contain yet: times and newest offsets, oldest first."""
        self._apart_s = 0.0
        self._high: Mapping[VBucketId, Seqno] | None = None
        self._last: Mapping[VBucketId, Seqno] = {}
        """The last seqnos with the prepares and aborts at the ends of vbuckets, which the tables may have passed."""
        self._as_of_s = as_of_s
        self._held = held

    @property
    def seqnos(self) -> int | None:
        """The number of seqnos that the bucket has and the tables lack.

        None if unknown: the bucket is unreachable, or a failover has taken back what the tables contain.
        """
        with self._lock:
            if self._high is None:
                return None
            ahead = [self._ahead(vbucket, high) for vbucket, high in self._high.items()]
        return sum(ahead) if min(ahead, default=0) >= 0 else None

    @property
    def as_of_s(self) -> float | None:
        """Everything written to the bucket before this time is in the tables."""
        with self._lock:
            return self._as_of_s

    def seconds(self, now_s: float) -> float | None:
        as_of_s = self.as_of_s
        return None if as_of_s is None else max(0.0, now_s - as_of_s)

    def on_high_seqnos(self, high_seqnos: Mapping[VBucketId, Seqno]) -> None:
        """The bucket has returned its high seqnos."""
        with self._lock:
            self._high = high_seqnos

    def on_unreachable(self) -> None:
        """The bucket can't be reached, so its high seqnos are unknown."""
        with self._lock:
            self._high = None

    def on_survey(self, survey: Survey, *, at_s: float) -> None:
        """The bucket was surveyed at this time, or a little later."""
        newest = dict(high_offsets("", survey).offsets)
        with self._lock:
            self._high = {vbucket: at.seqno for vbucket, at in newest.items()}
            self._last = {vbucket: status.last_seqno for vbucket, status in survey.items()}
            self._surveys.append((at_s, newest))
            self._settle()
            if len(self._surveys) > 1 and at_s - self._surveys[-2][0] < self._apart_s:
                del self._surveys[-1]
            elif len(self._surveys) > _SURVEYS_MAX:
                # The lag is long by now: fewer surveys, twice as far apart, show it well enough.
                self._apart_s = 2 * (at_s - self._surveys[0][0]) / len(self._surveys)
                self._surveys = self._surveys[::2]

    def on_offsets(self, held: Offsets, *, is_missing: bool = False) -> None:
        """The tables contain this now. With `is_missing`, they have lost something that they contained."""
        with self._lock:
            self._held = held
            if is_missing:
                self._as_of_s = None
            self._settle()

    def _ahead(self, vbucket: VBucketId, high: Seqno) -> int:
        """Return how many seqnos a vbucket is ahead of the tables; below 0 if the tables have more than it."""
        offset = self._held.get(vbucket)
        held = 0 if offset is None else offset.seqno
        return 0 if high < held <= self._last.get(vbucket, high) else high - held

    def _settle(self) -> None:
        """Take `as_of_s` from the newest survey that the tables fully contain. Drop that and earlier ones: after a
        failover, those may have seqnos that never come."""
        for number in range(len(self._surveys) - 1, -1, -1):
            at_s, newest = self._surveys[number]
            if all(self._holds(vbucket, at) for vbucket, at in newest.items()):
                self._as_of_s = at_s if self._as_of_s is None else max(at_s, self._as_of_s)
                del self._surveys[: number + 1]
                self._apart_s = self._apart_s if self._surveys else 0.0
                return

    def _holds(self, vbucket: VBucketId, newest: StreamOffset) -> bool:
        """Return whether the tables have what a vbucket had. On another branch, the same seqnos are other changes."""
        offset = self._held.get(vbucket)
        if offset is None or not offset.seqno:
            return not newest.seqno
        return offset.vbuuid == newest.vbuuid and offset.seqno >= newest.seqno
