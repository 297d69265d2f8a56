"""What a batch reads: which vbuckets, from where, up to where, and by which tasks; and when its documents are merged.
Pure: everything known comes in, clocks and counts too.

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

Two numbers say how far `changes` is behind. The lag in seqnos is counted from the high seqnos of the bucket, which are
asked for every second, whatever the batches do. The lag in seconds is the age of the newest survey that the tables hold
everything of: whatever was written before it is in the tables. A batch that never ends shows in both.

`documents` is behind `changes` by what is not merged yet. Merging every batch would be best, and costs most where a few
changes touch many files. So a merge waits until the machine has done something else for as long as the last one took,
and until it writes at most a multiple of what has changed, unless a change would wait for longer than it may.
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


# --- how far the tables are behind, and when the documents are merged -------------------------------------------------


WAIT_S_MAX = 60.0
MERGE_SHARE = 0.5
WRITE_RATIO = 8.0
WRITE_BYTES_S = 64 * 1024
_SURVEYS_MAX = 256
_SLOW_MERGES = 3
_LATE = 1.1
"""A merge that is begun in time may end a little later than it was expected to."""


@suggest_keywords
@dataclass(frozen=True, slots=True, kw_only=True)
class Freshness:
    """How fresh `documents` is kept."""

    wait_s_max: float = WAIT_S_MAX
    """The longest time that a change waits to be merged, if the machine can keep up."""
    merge_share: float = MERGE_SHARE
    """The share of the time that merging may take while no change waits for longer than that: from 0 to 1."""
    write_ratio: float = WRITE_RATIO
    """While no change waits for longer than that, merges write at most this many times the bytes that changed…"""
    write_bytes_s: float = WRITE_BYTES_S
    """…plus this many bytes a second, so that small tables are merged at once."""


class MergeClock:
    """When it is time to merge."""

    def __init__(self, rules: Freshness) -> None:
        self._rules = rules
        self._ended_s = float("-inf")
        self._took_s = 0.0
        self._slow = 0
        """How many merges in a row were slow."""

    def on_merged(self, *, began_s: float, ended_s: float, waited_s: float = 0.0) -> None:
        """When a merge began, the oldest change had waited for `waited_s`."""
        took_s, rested_s = ended_s - began_s, began_s - self._ended_s
        is_slow = took_s > rested_s or waited_s + took_s > _LATE * self._rules.wait_s_max
        self._slow = self._slow + 1 if is_slow else 0
        self._ended_s, self._took_s = ended_s, took_s

    @property
    def is_behind(self) -> bool:
        """Merges take more than half of the time again and again, or changes wait for longer than they may."""
        return self._slow >= _SLOW_MERGES

    def is_due(self, *, now_s: float, waited_s: float, changed_bytes: float = 0, expected_bytes: float = 0) -> bool:
        """Whether to merge now, when the oldest change has waited for `waited_s`.

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
    """How far `changes` is behind the bucket. May be used from several threads."""

    def __init__(self, held: Offsets, *, as_of_s: float | None) -> None:
        """`as_of_s` is what the tables say of themselves: when the bucket was last known to be in them."""
        self._lock = threading.Lock()
        self._surveys: list[tuple[float, dict[VBucketId, StreamOffset]]] = []
        """Times and newest offsets, oldest first, that the tables do not hold everything of."""
        self._apart_s = 0.0
        self._high: Mapping[VBucketId, Seqno] | None = None
        self._last: Mapping[VBucketId, Seqno] = {}
        """With the prepares and aborts at the ends of vbuckets, which the tables may have passed."""
        self._as_of_s = as_of_s
        self._held = held

    @property
    def seqnos(self) -> int | None:
        """How many seqnos the bucket has that the tables do not.

        None where that is not known: the bucket can't be asked, or a failover has taken back what the tables hold.
        """
        with self._lock:
            if self._high is None:
                return None
            ahead = [self._ahead(vbucket, high) for vbucket, high in self._high.items()]
        return sum(ahead) if min(ahead, default=0) >= 0 else None

    @property
    def as_of_s(self) -> float | None:
        """Everything that was written to the bucket before this time is in the tables."""
        with self._lock:
            return self._as_of_s

    def seconds(self, now_s: float) -> float | None:
        as_of_s = self.as_of_s
        return None if as_of_s is None else max(0.0, now_s - as_of_s)

    def on_high_seqnos(self, high_seqnos: Mapping[VBucketId, Seqno]) -> None:
        """The bucket was asked how far its vbuckets are."""
        with self._lock:
            self._high = high_seqnos

    def on_unreachable(self) -> None:
        """The bucket can't be asked: how far it is, is not known."""
        with self._lock:
            self._high = None

    def on_survey(self, survey: Survey, *, at_s: float) -> None:
        """The bucket was asked at this time, or a little later, how far its vbuckets are and on which branch."""
        newest = dict(high_offsets("", survey).offsets)
        with self._lock:
            self._high = {vbucket: at.seqno for vbucket, at in newest.items()}
            self._last = {vbucket: status.last_seqno for vbucket, status in survey.items()}
            self._surveys.append((at_s, newest))
            self._settle()
            if len(self._surveys) > 1 and at_s - self._surveys[-2][0] < self._apart_s:
                del self._surveys[-1]
            elif len(self._surveys) > _SURVEYS_MAX:
                # The lag is long by now: surveys that are twice as far apart show it well enough.
                self._apart_s = 2 * (at_s - self._surveys[0][0]) / len(self._surveys)
                self._surveys = self._surveys[::2]

    def on_offsets(self, held: Offsets, *, is_missing: bool = False) -> None:
        """The tables hold this now; with `is_missing` they have lost something that they held."""
        with self._lock:
            self._held = held
            if is_missing:
                self._as_of_s = None
            self._settle()

    def _ahead(self, vbucket: VBucketId, high: Seqno) -> int:
        """How many seqnos a vbucket is ahead of the tables; below 0 where they hold what it does not."""
        offset = self._held.get(vbucket)
        held = 0 if offset is None else offset.seqno
        return 0 if high < held <= self._last.get(vbucket, high) else high - held

    def _settle(self) -> None:
        """The newest survey that the tables hold all of says since when they do. Those before it say nothing more: a
        failover may have left them with seqnos that will never come."""
        for number in range(len(self._surveys) - 1, -1, -1):
            at_s, newest = self._surveys[number]
            if all(self._holds(vbucket, at) for vbucket, at in newest.items()):
                self._as_of_s = at_s if self._as_of_s is None else max(at_s, self._as_of_s)
                del self._surveys[: number + 1]
                self._apart_s = self._apart_s if self._surveys else 0.0
                return

    def _holds(self, vbucket: VBucketId, newest: StreamOffset) -> bool:
        """Whether the tables have what a vbucket had. On another branch the same seqnos are other changes."""
        offset = self._held.get(vbucket)
        if offset is None or not offset.seqno:
            return not newest.seqno
        return offset.vbuuid == newest.vbuuid and offset.seqno >= newest.seqno
