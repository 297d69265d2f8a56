"""The plans of the Spark source against a model of a vbucket that deduplicates and fails over.

The bucket is a list of changes with branches. A read gives the newest version of each key behind its start, as a real
server does, and the rows behind the planned end are left out, as a task does. Failovers happen anywhere: between a plan
and its read, between a read and the next plan, more than once. Tasks may fail to tell how far their snapshot went.
Whatever happens, a table that applies the rows and undoes the rollbacks ends up as the bucket.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.planning import TaskPlan, plan_end, plan_tasks
from headwater.spark.read_extents import ReadExtent

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

    def snapshot(self, start: int) -> list[tuple[int, str, int]]:
        newest = {key: (seqno, key, version) for seqno, (key, version) in enumerate(self.history, 1) if seqno > start}
        return sorted(newest.values())

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

    def plan(self, rows_max: int | None) -> Offsets:
        return plan_end(self.offsets, {VBUCKET: self.bucket.status()}, self.extents, rows_max=rows_max)

    def run(self, end: Offsets, *, tells_extents: bool) -> None:
        for plan in plan_tasks(self.offsets, end, node_of={}, tasks_min=1):
            self._run_task(plan, tells_extents)
        self.offsets = end

    def _run_task(self, plan: TaskPlan, tells_extents: bool) -> None:
        for rollback in plan.rollbacks:
            self.table.roll_back(rollback.after.seqno)
        for read in plan.ranges:
            if not self._can_go_on(read.start):
                continue
            snapshot = self.bucket.snapshot(read.start.seqno)
            self.table.rows += [row for row in snapshot if row[0] <= read.end_seqno]
            if tells_extents:
                high = len(self.bucket.history)
                self.extents[VBUCKET] = ReadExtent(
                    vbuuid=self.bucket.log.newest.vbuuid,
                    seqno=Seqno(min(high, read.end_seqno)),
                    snapshot_end=Seqno(max(high, read.start.seqno)),
                )

    def _can_go_on(self, start: StreamOffset) -> bool:
        """The server's answer to the task's stream request; a task that is rolled back gives no rows."""
        if not start.seqno:
            return True
        shared = self.bucket.log.branch_end(start.vbuuid, high_seqno=Seqno(len(self.bucket.history)))
        return shared is not None and start.seqno <= shared


_writes = st.tuples(st.just("write"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
_failovers = st.tuples(st.just("fail over"), st.integers(0, 8))
_disturbance = st.one_of(st.none(), _writes, _failovers)
_batches = st.tuples(st.just("batch"), _disturbance, st.booleans(), st.one_of(st.none(), st.integers(1, 4)))


def _disturb(bucket: Bucket, disturbance: tuple[str, object] | None) -> None:
    match disturbance:
        case ("write", list(keys)):
            for key in keys:
                bucket.write(key)
        case ("fail over", int(lost)):
            bucket.fail_over(lost)


@settings(max_examples=600, deadline=None)
@given(st.lists(st.one_of(_writes, _failovers, _batches), max_size=25))
def test_the_table_ends_up_as_the_bucket(steps: list[tuple[object, ...]]) -> None:
    bucket = Bucket()
    query = Query(bucket)
    for step in steps:
        if step[0] == "batch":
            _, disturbance, tells_extents, rows_max = step
            end = query.plan(rows_max)  # type: ignore[arg-type]
            _disturb(bucket, disturbance)  # type: ignore[arg-type]
            query.run(end, tells_extents=bool(tells_extents))
        else:
            _disturb(bucket, step)  # type: ignore[arg-type]
    for _ in range(20):
        end = query.plan(None)
        if end == query.offsets:
            break
        query.run(end, tells_extents=True)
    assert query.plan(None) == query.offsets, "it comes to rest"
    assert query.table.contents() == bucket.contents()
    seqnos = [row[0] for row in query.table.rows]
    assert len(seqnos) == len(set(seqnos)), "no change is landed twice"
