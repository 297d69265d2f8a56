"""The plans of the landing and of the `dcp` stream against a model of a vbucket that deduplicates and fails over.

The bucket is a list of changes with branches. A read gives whole snapshots with the newest version of each key in them,
as a real server does, and goes back to a boundary where the server demands a rollback, as the reader does. Failovers
and writes happen anywhere: between a plan and its read, between a read and the next plan, more than once. Reports of
tasks may be lost, tasks may run in vain, and the process that plans may crash, so that a batch is repeated.

Whatever happens, a table that applies the rows and undoes the rollbacks ends up as the bucket, and in between it holds
every document that was written before the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.client.vbucket_stream import resume_point
from headwater.landing.planning import NOWHERE, StreamPlans, VBucketRange, plan_ranges
from headwater.protocol.failover_log import ConsumerPoint, FailoverLog, decide_rollback
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

VBUCKET = VBucketId(0)
KEYS = "abcdef"
Row = tuple[int, str, int]
"""Seqno, key and version. A rollback has no key."""


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

    def snapshots(self, start: int, lengths: Sequence[int]) -> Iterator[tuple[int, list[Row]]]:
        """The snapshots that follow: the end and the rows of each. All but the last have these lengths."""
        ends = [end for end in accumulate(lengths, initial=start) if start < end < len(self.history)]
        for first, end in pairwise([start, *ends, len(self.history)]):
            changes = enumerate(self.history[first:end], first + 1)
            newest = {key: (seqno, key, version) for seqno, (key, version) in changes}
            yield end, sorted(newest.values())

    def contents(self) -> dict[str, int]:
        return dict(self.history)

    def read(self, it: VBucketRange, lengths: Sequence[int]) -> tuple[list[Row], StreamOffset]:
        """What a task reads, and the place that it reports."""
        asked, high = it.start, Seqno(len(self.history))
        boundaries = [*(seqno for seqno in it.boundaries if seqno < it.start.snapshot_start), it.start.snapshot_start]
        while rollback := decide_rollback(_point(asked), failover_log=self.log, high_seqno=high, purge_seqno=Seqno(0)):
            asked = resume_point(
                asked, demanded=rollback.to_seqno, server_log=self.log, own_log=None, boundaries=boundaries
            )
        rows: list[Row] = [(asked.seqno, "", 0)] if asked.seqno < it.start.seqno else []
        end = min(max(it.end_seqno, asked.snapshot_end), high)
        reached = int(asked.seqno)
        for snapshot_end, snapshot in self.snapshots(asked.seqno, lengths):
            if reached < end:
                rows += snapshot
                reached = snapshot_end
        return rows, StreamOffset.whole(self.log.newest.vbuuid, Seqno(reached))


def _point(offset: StreamOffset) -> ConsumerPoint:
    return ConsumerPoint(
        vbuuid=offset.vbuuid,
        start_seqno=offset.seqno,
        snapshot_start_seqno=offset.snapshot_start,
        snapshot_end_seqno=offset.snapshot_end,
    )


@dataclass
class Table:
    """All rows that were taken and are not void."""

    rows: dict[int, Row] = field(default_factory=dict)
    repeated: int = 0
    rolled_back_to: list[int] = field(default_factory=list)

    def take(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row[1]:
                self.repeated += row[0] in self.rows
                self.rows[row[0]] = row
            else:
                self.rows = {seqno: held for seqno, held in self.rows.items() if seqno <= row[0]}
                self.rolled_back_to.append(row[0])

    def contents(self) -> dict[str, int]:
        return {key: version for _, key, version in sorted(self.rows.values())}


_writes = st.tuples(st.just("write"), st.lists(st.sampled_from(KEYS), min_size=1, max_size=6))
_failovers = st.tuples(st.just("fail over"), st.integers(0, 8))
_disturbance = st.one_of(st.none(), _writes, _failovers)
_lengths = st.lists(st.integers(1, 5), max_size=3).map(tuple)
Disturbance = tuple[str, object] | None


def _disturb(bucket: Bucket, disturbance: Disturbance) -> None:
    match disturbance:
        case ("write", list(keys)):
            for key in keys:
                bucket.write(key)
        case ("fail over", int(lost)):
            bucket.fail_over(lost)


def _check_holds(table: Table, bucket: Bucket, planned: dict[str, int]) -> None:
    """Every document of the plan is there in that version or a newer one, if no failover has taken it back."""
    for key, version in planned.items():
        if (key, version) in bucket.history:
            assert table.contents().get(key, 0) >= version, (key, version)


# --- the landing: the tables hold the places ----------------------------------------------------------------------


@dataclass
class Landing:
    bucket: Bucket
    table: Table = field(default_factory=Table)
    place: StreamOffset = NOWHERE
    boundaries: list[Seqno] = field(default_factory=list)

    def land(self, *, before: Disturbance = None, in_vain: Disturbance = None, lengths: Sequence[int] = ()) -> bool:
        """A batch, if there is anything to read."""
        survey, planned = {VBUCKET: self.bucket.status()}, self.bucket.contents()
        ranges = plan_ranges(Offsets("uuid", {VBUCKET: self.place}), survey, boundaries={VBUCKET: self.boundaries})
        for it in ranges:
            _disturb(self.bucket, in_vain)
            # A task that ran in vain has written files that no commit names.
            self.bucket.read(it, lengths)
            _disturb(self.bucket, before)
            rows, self.place = self.bucket.read(it, lengths)
            self.table.take(rows)
            for seqno, key, _ in rows:
                if not key:
                    self.boundaries = [known for known in self.boundaries if known <= seqno]
            self.boundaries.append(self.place.seqno)
            _check_holds(self.table, self.bucket, planned)
        return bool(ranges)


_landings = st.tuples(
    st.just("batch"), st.fixed_dictionaries({"before": _disturbance, "in_vain": _disturbance, "lengths": _lengths})
)


@given(st.lists(st.one_of(_writes, _failovers, _landings), max_size=25))
def test_the_tables_are_the_bucket(steps: list[tuple[str, object]]) -> None:
    bucket = Bucket()
    landing = Landing(bucket)
    for step in steps:
        match step:
            case ("batch", dict(how)):
                landing.land(**how)
            case _:
                _disturb(bucket, step)
    assert any(not landing.land() for _ in range(3)), "it comes to rest"
    assert landing.table.contents() == bucket.contents()
    assert not landing.table.repeated, "no change is landed twice"


@given(
    batches=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=2, max_size=8), lost=st.integers(0, 8)
)
def test_a_rollback_goes_back_to_the_newest_place_that_still_holds(batches: list[tuple[int, int]], lost: int) -> None:
    bucket = Bucket()
    landing = Landing(bucket)
    ends = [0]
    for before, meanwhile in batches:
        for number in range(before):
            bucket.write(KEYS[number])
        landing.land(before=("write", [KEYS[-1]] * meanwhile))
        ends.append(landing.place.seqno)
    bucket.fail_over(lost)
    shared = len(bucket.history)
    landing.land()
    expected = max(end for end in ends if end <= shared)
    assert landing.table.rolled_back_to == ([expected] if expected < ends[-1] else [])


# --- the stream: Spark holds offsets that were planned ---------------------------------------------------------------


@dataclass
class Query:
    """What Spark does, with one vbucket."""

    bucket: Bucket
    table: Table = field(default_factory=Table)
    offsets: Offsets = field(default_factory=lambda: Offsets("uuid", {VBUCKET: NOWHERE}))
    plans: StreamPlans = field(default_factory=StreamPlans)
    reached: dict[VBucketId, StreamOffset] = field(default_factory=dict)

    def survey(self) -> dict[VBucketId, VBucketStatus]:
        return {VBUCKET: self.bucket.status()}

    def plan(self) -> Offsets:
        return self.plans.plan(self.offsets, self.survey(), self.reached)

    def run(
        self, end: Offsets, *, before: Disturbance = None, lengths: Sequence[int] = (), reports: bool, is_kept: bool
    ) -> None:
        """Run the tasks of a batch. Without `is_kept` its rows go to no sink."""
        is_repeated = not self.plans.is_planned_here(end)
        ranges = self.plans.ranges(self.offsets, end, self.survey)
        _disturb(self.bucket, before)
        self.reached = {}
        for it in ranges:
            rows, place = self.bucket.read(it, lengths)
            if is_kept:
                self.table.take(rows)
            if reports and not is_repeated:
                self.reached = {VBUCKET: place}

    def batch(
        self,
        *,
        before: Disturbance = None,
        reports: bool = True,
        crash: str = "never",
        meanwhile: Disturbance = None,
        lengths: Sequence[int] = (),
    ) -> bool:
        """A batch, if there is anything to read. The process may crash before its sink has the rows or after it; then
        the sink takes the repeated rows as well, or skips them by the number of the batch."""
        planned = self.bucket.contents()
        end = self.plan()
        if end == self.offsets:
            return False
        self.run(end, before=before, lengths=lengths, reports=reports, is_kept=crash != "before the sink")
        if crash != "never":
            self.plans = StreamPlans()
            self.run(end, before=meanwhile, lengths=lengths, reports=reports, is_kept=crash != "skipped by the sink")
        self.offsets = end
        if crash != "skipped by the sink":
            _check_holds(self.table, self.bucket, planned)
        return True


_batches = st.tuples(
    st.just("batch"),
    st.fixed_dictionaries(
        {
            "before": _disturbance,
            "reports": st.booleans(),
            "crash": st.sampled_from(["never", "never", "before the sink", "after the sink"]),
            "meanwhile": _disturbance,
            "lengths": _lengths,
        }
    ),
)
_quiet_batches = st.tuples(
    st.just("batch"),
    st.fixed_dictionaries(
        {
            "before": st.one_of(st.none(), _writes),
            "reports": st.booleans(),
            "crash": st.sampled_from(["never", "skipped by the sink"]),
            "meanwhile": st.one_of(st.none(), _writes),
            "lengths": _lengths,
        }
    ),
)


def _end_up(steps: list[tuple[str, object]]) -> Query:
    query = Query(Bucket())
    for step in steps:
        match step:
            case ("batch", dict(how)):
                query.batch(**how)
            case _:
                _disturb(query.bucket, step)
    assert any(not query.batch() for _ in range(4)), "it comes to rest"
    return query


_SHORTER_BRANCH = [
    ("write", ["a", "a"]),
    ("batch", {"before": ("fail over", 1)}),
    ("write", ["a", "a"]),
    ("batch", {"crash": "before the sink"}),
    ("fail over", 2),
]
_ROLLED_BACK_WITHOUT_A_REPORT = [
    ("write", ["a", "a"]),
    ("batch", {}),
    ("fail over", 1),
    ("batch", {"before": ("write", ["a"]), "reports": False}),
    ("fail over", 1),
]
_READ_AGAIN_FROM_ZERO = [
    ("write", ["a"] * 5), ("batch", {}), ("fail over", 5), ("write", ["a"] * 10), ("batch", {"reports": False}),
    ("fail over", 5),
]  # fmt: skip


@given(st.lists(st.one_of(_writes, _failovers, _batches), max_size=25))
@example(_SHORTER_BRANCH)
@example(_ROLLED_BACK_WITHOUT_A_REPORT)
@example(_READ_AGAIN_FROM_ZERO)
def test_a_sink_of_the_stream_ends_up_as_the_bucket(steps: list[tuple[str, object]]) -> None:
    query = _end_up(steps)
    assert query.table.contents() == query.bucket.contents()


@given(st.lists(st.one_of(_writes, _quiet_batches), max_size=25))
def test_a_sink_that_skips_repeated_batches_misses_nothing(steps: list[tuple[str, object]]) -> None:
    """Without rollbacks: a rollback that only the repeated batch has would be skipped with it."""
    query = _end_up(steps)
    assert query.table.contents() == query.bucket.contents()


@given(
    st.lists(
        st.one_of(_writes, _failovers, st.tuples(st.just("batch"), st.fixed_dictionaries({"before": _disturbance}))),
        max_size=25,
    )
)
def test_with_all_reports_and_no_crash_nothing_is_repeated(steps: list[tuple[str, object]]) -> None:
    assert not _end_up(steps).table.repeated
