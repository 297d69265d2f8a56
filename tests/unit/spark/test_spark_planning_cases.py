"""Plans of the Spark source, case by case. `tests/property/test_spark_planning.py` holds them against a model."""

from __future__ import annotations

import pytest

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.errors import CheckpointAhead
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.planning import ROWS_PER_PARTITION, TaskPlan, VBucketRange, plan_end, plan_tasks, share_rows
from headwater.spark.read_extents import NO_BRANCH, ReadExtent

A, B, C = Vbuuid(0xA), Vbuuid(0xB), Vbuuid(0xC)
VBUCKET = VBucketId(0)


def at(vbuuid: Vbuuid, seqno: int, start: int | None = None, end: int | None = None) -> StreamOffset:
    return StreamOffset(
        vbuuid=vbuuid,
        seqno=Seqno(seqno),
        snapshot_start=Seqno(seqno if start is None else start),
        snapshot_end=Seqno(seqno if end is None else end),
    )


def status(high_seqno: int, *branches: tuple[Vbuuid, int]) -> VBucketStatus:
    """The newest branch first."""
    entries = tuple(FailoverEntry(vbuuid=vbuuid, seqno=Seqno(seqno)) for vbuuid, seqno in branches)
    return VBucketStatus(high_seqno=Seqno(high_seqno), failover_log=FailoverLog(entries))


def extent(vbuuid: Vbuuid, start: int, seqno: int, snapshot_end: int) -> ReadExtent:
    return ReadExtent(vbuuid=vbuuid, start_seqno=Seqno(start), seqno=Seqno(seqno), snapshot_end=Seqno(snapshot_end))


def planned(
    start: StreamOffset, now: VBucketStatus, was_read: ReadExtent | None = None, **limits: int | None
) -> StreamOffset:
    """Where the one vbucket's batch ends."""
    extents = {} if was_read is None else {VBUCKET: was_read}
    target = limits.get("target")
    end = plan_end(
        Offsets("uuid", {VBUCKET: start}),
        {VBUCKET: now},
        extents,
        target=None if target is None else {VBUCKET: Seqno(target)},
        rows_max=limits.get("rows_max"),
    )
    return end[VBUCKET]


# --- on one branch ------------------------------------------------------------------------------------------------


def test_the_first_batch_ends_at_the_high_seqno() -> None:
    assert planned(StreamOffset(), status(100, (A, 0))) == at(A, 100, start=0)


def test_an_empty_vbucket_is_left_where_it_is() -> None:
    assert planned(StreamOffset(), status(0, (A, 0))) == StreamOffset()


def test_a_batch_that_was_read_out_of_a_snapshot_that_ended_with_it() -> None:
    """Everything up to 100 is there, so that is where a rollback can go back to."""
    assert planned(at(A, 100, start=0), status(110, (A, 0)), extent(A, 0, 100, 100)) == at(A, 110, start=100)


def test_a_batch_that_was_read_out_of_a_snapshot_that_went_further() -> None:
    assert planned(at(A, 100, start=0), status(110, (A, 0)), extent(A, 0, 100, 105)) == at(A, 110, start=0)


@pytest.mark.parametrize("was_read", [None, extent(A, 0, 90, 90), extent(NO_BRANCH, 0, 100, 100)])
def test_what_is_not_known_went_as_far_as_it_could(was_read: ReadExtent | None) -> None:
    planned_to_105 = planned(at(A, 100, start=0), status(110, (A, 0)), was_read, rows_max=5)
    assert planned_to_105 == at(A, 105, start=0, end=110)


def test_what_was_not_known_is_made_up_for() -> None:
    """No snapshot before that batch can have gone beyond 110, and it was read out of one that ended there."""
    assert planned(at(A, 110, start=0), status(120, (A, 0)), extent(A, 100, 110, 110)) == at(A, 120, start=110)


def test_a_long_snapshot_of_an_earlier_batch_is_remembered() -> None:
    """Up to 103 a server may send a short snapshot, but what the one to 105 has hidden is still not there."""
    offset = planned(at(A, 100, start=50), status(110, (A, 0)), extent(A, 50, 100, 105), rows_max=3)
    assert offset == at(A, 103, start=50, end=105)
    assert planned(offset, status(110, (A, 0)), extent(A, 100, 103, 103)) == at(A, 110, start=50)


def test_it_is_forgotten_when_all_of_it_was_read() -> None:
    offset = at(A, 110, start=50, end=110)
    assert planned(offset, status(120, (A, 0)), extent(A, 103, 110, 110)) == at(A, 120, start=110)


def test_nothing_new() -> None:
    offset = at(A, 100, start=50)
    assert planned(offset, status(100, (A, 0)), extent(A, 50, 100, 100)) is not None
    assert planned(offset, status(100, (A, 0)), extent(A, 50, 100, 100)) == offset


def test_a_target_is_not_passed() -> None:
    assert planned(at(A, 100), status(150, (A, 0)), target=120) == at(A, 120, start=100)


def test_a_target_that_has_been_passed() -> None:
    assert planned(at(A, 100), status(150, (A, 0)), target=90) == at(A, 100)


def test_a_server_that_has_lost_changes_and_does_not_say_so() -> None:
    with pytest.raises(CheckpointAhead, match=r"seqno 100 of vbucket 0, .* ends at 90"):
        planned(at(A, 100), status(90, (A, 0)))


# --- after a failover ---------------------------------------------------------------------------------------------


def test_a_failover_that_takes_nothing() -> None:
    """The read ended before the branches parted."""
    assert planned(at(A, 100, start=80), status(130, (B, 110), (A, 0)), extent(A, 80, 100, 105)) == at(B, 130, start=80)


def test_one_that_takes_nothing_and_brings_nothing_makes_no_batch() -> None:
    offset = at(A, 100, start=80)
    assert planned(offset, status(100, (B, 100), (A, 0)), extent(A, 80, 100, 100)) == offset


def test_a_failover_that_takes_changes_back() -> None:
    assert planned(at(A, 100, start=80), status(130, (B, 90), (A, 0)), extent(A, 80, 100, 100)) == at(B, 80)


def test_a_failover_that_takes_back_what_has_hidden_changes() -> None:
    """Nothing that was read is lost, but of a key that was changed at 105 the version before was never seen."""
    assert planned(at(A, 100, start=80), status(130, (B, 102), (A, 0)), extent(A, 80, 100, 105)) == at(B, 80)


def test_a_failover_that_takes_back_what_has_hidden_changes_from_an_earlier_batch() -> None:
    offset = at(A, 103, start=50, end=105)
    assert planned(offset, status(130, (B, 104), (A, 0)), extent(A, 100, 103, 103)) == at(B, 50)
    assert planned(offset, status(130, (B, 105), (A, 0)), extent(A, 100, 103, 103)) == at(B, 130, start=50, end=130)


@pytest.mark.parametrize("was_read", [None, extent(NO_BRANCH, 80, 100, 100), extent(A, 60, 80, 80)])
def test_without_knowledge_the_worst_is_assumed(was_read: ReadExtent | None) -> None:
    assert planned(at(A, 100, start=80), status(130, (B, 110), (A, 0)), was_read) == at(B, 80)


def test_a_failover_to_before_all_that_is_known() -> None:
    assert planned(at(A, 100, start=80), status(130, (B, 70), (A, 0)), extent(A, 80, 100, 100)) == at(B, 0)


def test_a_branch_that_the_server_does_not_know() -> None:
    assert planned(at(A, 100, start=80), status(130, (C, 70), (B, 0)), extent(A, 80, 100, 100)) == at(C, 0)


def test_a_rollback_is_never_cut_short_by_a_limit() -> None:
    assert planned(at(A, 100, start=80), status(130, (B, 90), (A, 0)), None, rows_max=1, target=200) == at(B, 80)


def test_a_failover_between_the_plan_and_the_read() -> None:
    """Planned on A, but all of the batch was read on B, from where nothing was missing."""
    assert planned(at(A, 100, start=80), status(130, (B, 90), (A, 0)), extent(B, 80, 100, 120)) == at(B, 130, start=80)


def test_a_failover_between_the_plan_and_the_read_where_something_was_missing() -> None:
    """What came before 95 was read out of a snapshot of A that may have gone beyond 90."""
    assert planned(at(A, 100, start=80), status(130, (B, 97), (A, 0)), extent(B, 95, 100, 120)) == at(B, 80)


# --- fair shares --------------------------------------------------------------------------------------------------


def shares(rows_max: int, *wanted: int) -> list[int]:
    shared = share_rows({VBucketId(vbucket): rows for vbucket, rows in enumerate(wanted)}, rows_max)
    return [shared.get(VBucketId(vbucket), 0) for vbucket in range(len(wanted))]


@pytest.mark.parametrize(
    ("rows_max", "wanted", "shared"),
    [
        (30, (100, 100, 100), [10, 10, 10]),
        (31, (100, 100, 100), [10, 10, 11]),
        (30, (2, 100, 100), [2, 14, 14]),
        (30, (100, 2, 0), [28, 2, 0]),
        (1000, (100, 2, 3), [100, 2, 3]),
        (2, (100, 100, 100), [1, 1, 1]),
        (1, (0, 0, 0), [0, 0, 0]),
    ],
)
def test_shares(rows_max: int, wanted: tuple[int, ...], shared: list[int]) -> None:
    assert shares(rows_max, *wanted) == shared


# --- tasks --------------------------------------------------------------------------------------------------------


def tasks(starts: list[StreamOffset], ends: list[StreamOffset], nodes: list[int], tasks_min: int = 1) -> list[TaskPlan]:
    return plan_tasks(
        Offsets("uuid", {VBucketId(vbucket): offset for vbucket, offset in enumerate(starts)}),
        Offsets("uuid", {VBucketId(vbucket): offset for vbucket, offset in enumerate(ends)}),
        node_of={VBucketId(vbucket): node for vbucket, node in enumerate(nodes)},
        tasks_min=tasks_min,
    )


def read(vbucket: int, start: StreamOffset, end_seqno: int) -> VBucketRange:
    return VBucketRange(vbucket=VBucketId(vbucket), start=start, end_seqno=Seqno(end_seqno))


def test_a_task_asks_by_the_branch_that_was_planned_on() -> None:
    """The server may know nothing of the one before, though the place is on this one, too."""
    (task,) = tasks([at(A, 10, start=5, end=12)], [at(B, 20)], [0])
    assert task == TaskPlan(ranges=(read(0, at(B, 10), 20),)), "how far snapshots went is the planner's affair"


def test_from_the_beginning_no_branch_is_named() -> None:
    (task,) = tasks([StreamOffset()], [at(B, 20)], [0])
    assert task == TaskPlan(ranges=(read(0, StreamOffset(), 20),))


def test_a_vbucket_that_has_not_moved_is_not_read() -> None:
    assert tasks([at(A, 10)], [at(A, 10)], [0]) == []


def test_rollbacks_are_a_task_of_their_own() -> None:
    plans = tasks([at(A, 10), at(A, 10), at(A, 10)], [at(B, 4), at(A, 20), at(B, 0)], [0, 0, 0])
    assert [[read.vbucket for read in plan.ranges] for plan in plans] == [[1], []]
    assert [(it.vbucket, it.before, it.after) for it in plans[1].rollbacks] == [
        (0, at(A, 10), at(B, 4)),
        (2, at(A, 10), at(B, 0)),
    ]


def test_a_task_has_vbuckets_of_one_node() -> None:
    plans = tasks([StreamOffset()] * 4, [at(A, 10)] * 4, [0, 1, 0, 1])
    assert sorted([read.vbucket for read in plan.ranges] for plan in plans) == [[0, 2], [1, 3]]


def test_at_least_so_many_tasks_as_are_asked_for() -> None:
    plans = tasks([StreamOffset()] * 4, [at(A, 10), at(A, 30), at(A, 10), at(A, 10)], [0] * 4, tasks_min=2)
    assert sorted([read.vbucket for read in plan.ranges] for plan in plans) == [[0, 2, 3], [1]]


def test_no_more_tasks_than_vbuckets() -> None:
    assert len(tasks([StreamOffset()] * 3, [at(A, 10)] * 3, [0] * 3, tasks_min=50)) == 3


def test_many_rows_make_many_tasks() -> None:
    assert len(tasks([StreamOffset()] * 4, [at(A, ROWS_PER_PARTITION)] * 4, [0] * 4)) == 4
