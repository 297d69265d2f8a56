"""The plans of the Spark source against a model of a vbucket that deduplicates and fails over.

The bucket is a list of changes with branches. A read gives snapshots with the newest version of each key in them, as a
real server does, and the rows behind the planned end are left out, as a task does. Failovers happen anywhere: between a
plan and its read, between a read and the next plan, more than once. Tasks may fail to tell how far their snapshot went,
may be run in vain before the run whose rows are kept, and once more after it.
Whatever happens, a table that applies the rows and undoes the rollbacks ends up as the bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.known_places import Places
from headwater.spark.planning import VBucketRange, note_places, plan_end, plan_tasks
from headwater.spark.read_extents import NO_BRANCH, ReadExtent

VBUCKET = VBucketId(0)
KEYS = "abcdef"


@dataclass
class Bucket:
    """One vbucket: `history[n]` is the key that seqno n+1 has changed, with its version."""

    history: list[tuple[str, int]] = field(default_factory=list)
    log: FailoverLog = field(default_factory=lambda: FailoverLog.start(Vbuuid(1)))
    versions: int = 0

    def write(self, key: str) -> None:
        self.versions += 1
        self.history.append((key, self.versions))

    def fail_over(self, lost: int) -> None:
        """A copy that lacks the newest changes becomes active."""
        kept = max(0, len(self.history) - lost)
        del self.history[kept:]
        self.log = self.log.branch(Vbuuid(self.log.newest.vbuuid + 1), at_seqno=Seqno(kept))

    def status(self) -> VBucketStatus:
        return VBucketStatus(high_seqno=Seqno(len(self.history)), failover_log=self.log)

    def snapshots(self, start: int, lengths: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, str, int]]]]:
        """The snapshots that follow: the end and the rows of each. All but the last have these lengths."""
        ends = [end for end in accumulate(lengths, initial=start) if start < end < len(self.history)]
        for first, end in pairwise([start, *ends, len(self.history)]):
            newest = {key: (seqno, key, version) for seqno, (key, version) in self._between(first, end)}
            yield end, sorted(newest.values())

    def _between(self, first: int, end: int) -> list[tuple[int, tuple[str, int]]]:
        return list(enumerate(self.history[first:end], first + 1))

    def contents(self) -> dict[str, int]:
        return dict(self.history)


@dataclass
class Table:
    """All rows that were landed and are not void."""

    rows: list[tuple[int, str, int]] = field(default_factory=list)

    def roll_back(self, seqno: int) -> None:
        self.rows = [row for row in self.rows if row[0] <= seqno]

    def contents(self) -> dict[str, int]:
        return {key: version for _, key, version in sorted(self.rows)}


@dataclass
class Query:
    """What Spark does, with one vbucket."""

    bucket: Bucket
    table: Table = field(default_factory=Table)
    offsets: Offsets = field(default_factory=lambda: Offsets("uuid", {VBUCKET: StreamOffset()}))
    extents: dict[VBucketId, ReadExtent] = field(default_factory=dict)
    places: Places = field(default_factory=dict)
    went_back_to: list[int] = field(default_factory=list)

    def plan(self, rows_max: int | None) -> Offsets:
        survey = {VBUCKET: self.bucket.status()}
        self.places = note_places(self.offsets, survey, self.extents, self.places)
        return plan_end(self.offsets, survey, self.extents, places=self.places, rows_max=rows_max)

    def run(self, end: Offsets, *, tells_extents: bool, lengths: Sequence[int] = (), keeps_rows: bool = True) -> None:
        """Without `keeps_rows` it is run in vain."""
        for plan in plan_tasks(self.offsets, end, node_of={}, tasks_min=1):
            for read in plan.ranges:
                rows = self._read(read, tells_extents, lengths)
                self.table.rows += rows if keeps_rows else []
            for rollback in plan.rollbacks if keeps_rows else ():
                self.table.roll_back(rollback.after.seqno)
                self.went_back_to.append(rollback.after.seqno)

    def _read(self, read: VBucketRange, tells_extents: bool, lengths: Sequence[int]) -> list[tuple[int, str, int]]:
        rows: list[tuple[int, str, int]] = []
        reached = read.start.seqno
        for snapshot_end, snapshot in self.bucket.snapshots(read.start.seqno, lengths):
            if reached < read.end_seqno and self._can_go_on(read.start):
                rows += [row for row in snapshot if row[0] <= read.end_seqno]
                reached = Seqno(snapshot_end)
        if tells_extents:
            is_whole = reached >= read.end_seqno
            extent = ReadExtent(
                vbuuid=self.bucket.log.newest.vbuuid if is_whole else NO_BRANCH,
                start_seqno=read.start.seqno,
                seqno=read.end_seqno,
                snapshot_end=reached if is_whole else read.end_seqno,
            )
            known = self.extents.get(VBUCKET)
            self.extents[VBUCKET] = known.joined(extent) if known else extent
        return rows

    def _can_go_on(self, start: StreamOffset) -> bool:
        """The server's answer to the task's stream request; a task that is rolled back gives no rows."""
        if not start.seqno:
            return True
        shared = self.bucket.log.branch_end(start.vbuuid, high_seqno=Seqno(len(self.bucket.history)))
        return shared is not None and start.seqno <= shared


_writes = st.tuples(st.just("write"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
_failovers = st.tuples(st.just("fail over"), st.integers(0, 8))
_disturbance = st.one_of(st.none(), _writes, _failovers)


@dataclass(frozen=True)
class Batch:
    """A batch, and what happens before each time that it is run."""

    rows_max: int | None
    in_vain: tuple[tuple[str, object] | None, ...]
    before: tuple[str, object] | None
    again: tuple[tuple[str, object] | None, ...]
    tells_extents: bool
    lengths: tuple[int, ...]


_runs = st.lists(_disturbance, max_size=1).map(tuple)
_batches = st.tuples(
    st.just("batch"),
    st.builds(
        Batch,
        rows_max=st.one_of(st.none(), st.integers(1, 4)),
        in_vain=_runs,
        before=_disturbance,
        again=_runs,
        tells_extents=st.booleans(),
        lengths=st.lists(st.integers(1, 5), max_size=3).map(tuple),
    ),
)


def _disturb(bucket: Bucket, disturbance: tuple[str, object] | None) -> None:
    match disturbance:
        case ("write", list(keys)):
            for key in keys:
                bucket.write(key)
        case ("fail over", int(lost)):
            bucket.fail_over(lost)


def _run_batch(query: Query, batch: Batch) -> None:
    end = query.plan(batch.rows_max)
    for disturbance in batch.in_vain:
        _disturb(query.bucket, disturbance)
        query.run(end, tells_extents=batch.tells_extents, lengths=batch.lengths, keeps_rows=False)
    _disturb(query.bucket, batch.before)
    query.run(end, tells_extents=batch.tells_extents, lengths=batch.lengths)
    for disturbance in batch.again:
        _disturb(query.bucket, disturbance)
        query.run(end, tells_extents=batch.tells_extents, lengths=batch.lengths, keeps_rows=False)
    query.offsets = end


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(_writes, _failovers, _batches), max_size=25))
def test_the_table_ends_up_as_the_bucket(steps: list[tuple[str, object]]) -> None:
    bucket = Bucket()
    query = Query(bucket)
    for step in steps:
        match step:
            case ("batch", Batch() as batch):
                _run_batch(query, batch)
            case _:
                _disturb(bucket, step)
    for _ in range(20):
        end = query.plan(None)
        if end == query.offsets:
            break
        query.run(end, tells_extents=True)
        query.offsets = end
    assert query.plan(None) == query.offsets, "it comes to rest"
    assert query.table.contents() == bucket.contents()
    seqnos = [row[0] for row in query.table.rows]
    assert len(seqnos) == len(set(seqnos)), "no change is landed twice"


@settings(max_examples=300, deadline=None)
@given(
    batches=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=3, max_size=8),
    lost=st.integers(0, 3),
    tells_extents=st.booleans(),
)
def test_with_writes_going_on_it_goes_back_no_further_than_it_must(
    batches: list[tuple[int, int]], lost: int, tells_extents: bool
) -> None:
    """Every batch reads snapshots that go beyond it. A failover takes back what came after the last of them began."""
    bucket = Bucket()
    query = Query(bucket)
    ends: list[int] = []
    for before, meanwhile in batches:
        for number in range(before):
            bucket.write(KEYS[number])
        end = query.plan(None)
        for number in range(meanwhile):
            bucket.write(KEYS[-number])
        query.run(end, tells_extents=tells_extents)
        query.offsets = end
        ends.append(end[VBUCKET].seqno)
    bucket.write("a")
    query.plan(None)
    bucket.fail_over(1 + min(lost, batches[-1][1]))
    query.run(end := query.plan(None), tells_extents=True)
    # The snapshots of the batch before the last had been read before the last batch was planned.
    assert end[VBUCKET].seqno >= ends[-2]
    assert not query.went_back_to or query.went_back_to == [ends[-2]]
