"""Plans, case by case. `tests/property/test_landing_planning.py` holds them against a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.errors import CheckpointAhead
from headwater.landing.planning import (
    NOWHERE,
    ROWS_PER_PARTITION,
    RowShare,
    StreamPlans,
    VBucketRange,
    limit_ranges,
    plan_ranges,
    share_out,
)
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.numbers import SEQNO_MAX, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.cases import each

A, B = Vbuuid(0xA), Vbuuid(0xB)
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
    entries = tuple(FailoverEntry(vbuuid=vbuuid, seqno=Seqno(seqno)) for vbuuid, seqno in branches or ((A, 0),))
    return VBucketStatus(high_seqno=Seqno(high_seqno), failover_log=FailoverLog(entries))


def places(place: StreamOffset) -> Offsets:
    return Offsets("uuid", {VBUCKET: place})


def planned(place: StreamOffset, now: VBucketStatus, target: int | None = None) -> VBucketRange | None:
    """What is read of the one vbucket."""
    to = None if target is None else {VBUCKET: Seqno(target)}
    ranges = plan_ranges(places(place), {VBUCKET: now}, target=to)
    assert len(ranges) <= 1
    return ranges[0] if ranges else None


def wide(vbucket: int, rows: int) -> VBucketRange:
    return VBucketRange(vbucket=VBucketId(vbucket), start=NOWHERE, end_seqno=Seqno(rows), branch=A)


# --- what there is to read ----------------------------------------------------------------------------------------


@each(
    ("place", "now", "target", "end"),
    [
        (NOWHERE, status(0), None, None),
        (NOWHERE, status(0, (B, 0)), None, None),
        (at(A, 100), status(100), None, None),
        (at(A, 100), status(110), None, 110),
        (at(A, 100), status(110), 105, 105),
        (at(A, 100), status(110), 120, 110),
        (at(A, 100), status(110), 100, None),
        # Another branch is read whatever the seqnos are: the server says whether anything was taken back.
        (at(A, 100), status(50, (B, 50), (A, 0)), None, 50),
        (at(A, 100), status(100, (B, 90), (A, 0)), None, 100),
        (at(A, 100), status(120, (B, 90), (A, 0)), None, 120),
    ],
)
def test_what_is_new_is_read(place: StreamOffset, now: VBucketStatus, target: int | None, end: int | None) -> None:
    found = planned(place, now, target)
    if end is None:
        assert found is None
    else:
        assert found is not None
        assert (found.start, found.end_seqno, found.branch) == (place, end, now.failover_log.newest.vbuuid)


def test_a_server_that_has_lost_what_was_read_of_its_newest_branch() -> None:
    with pytest.raises(CheckpointAhead, match="vbucket 0"):
        planned(at(A, 100), status(90))


def test_a_place_behind_the_last_visible_seqno_is_where_a_durable_write_is_hidden() -> None:
    """The vbucket ends in a pending or an aborted one: 13 is visible, and a stream has come to 15."""
    hidden = replace(status(13, (A, 0)), last_seqno=Seqno(15))
    assert planned(at(A, 15), hidden) is None
    assert planned(at(A, 13), hidden) is None, "a live stream learns nothing of it"
    with pytest.raises(CheckpointAhead, match="16"):
        planned(at(A, 16), hidden)


def test_a_place_that_is_not_whole_may_have_been_read_as_far_as_its_branch_goes() -> None:
    found = planned(at(A, 100, start=80), status(110))
    assert found is not None
    assert found.start == at(A, 100, start=80, end=110)
    found = planned(at(A, 100, start=80), status(110, (B, 105), (A, 0)))
    assert found is not None
    assert found.start == at(A, 100, start=80, end=SEQNO_MAX), "so that the server demands a rollback"


# --- limits ---------------------------------------------------------------------------------------------------------


def taken(rows_max: int | None, ranges: list[VBucketRange], last_read: dict[int, int] | None = None) -> list[int]:
    known = {VBucketId(vbucket): batch for vbucket, batch in (last_read or {}).items()}
    return [int(it.vbucket) for it in limit_ranges(ranges, rows_max, last_read=known)]


def test_a_limit_takes_whole_vbuckets() -> None:
    ranges = [wide(0, 40), wide(1, 40), wide(2, 40), wide(3, 20)]
    assert taken(None, ranges) == [0, 1, 2, 3]
    assert taken(100, ranges) == [0, 1, 3]
    assert taken(1, ranges) == [0], "one at least, however large"


@each(
    ("rows", "batches"),
    [([50, 50, 50, 50], [[0, 1], [2, 3], [0, 1], [2, 3]]), ([60, 500, 60], [[0], [1], [2], [0]])],
)
def test_the_vbucket_that_was_read_longest_ago_is_first(rows: list[int], batches: list[list[int]]) -> None:
    """A large one is not passed over for ever."""
    ranges = [wide(vbucket, count) for vbucket, count in enumerate(rows)]
    last_read: dict[int, int] = {}
    for number, expected in enumerate(batches):
        assert taken(100, ranges, last_read) == expected
        last_read |= dict.fromkeys(expected, number)


def test_a_limit_counts_the_rows_that_are_read() -> None:
    """A sixth of the changes are of the collection that is read, and the first vbuckets have none of it."""
    left = [wide(vbucket, 600) for vbucket in range(1024)]
    share, batches = RowShare(), []
    while left:
        chosen = limit_ranges(left, 6_000, last_read={}, row_share=share.value)
        rows = sum(100 for it in chosen if it.vbucket >= 40)
        share.on_batch(chosen, rows=rows)
        batches.append(rows)
        left = [it for it in left if it not in chosen]
    assert batches[0] == 0
    assert min(batches[1:]) > 0
    assert max(batches) <= 3 * 6_000
    assert len(batches) <= 24, "by their seqnos it would be 103"


def test_what_a_server_says_counts_before_the_first_batch() -> None:
    share = RowShare(1 / 6)
    assert len(limit_ranges([wide(vbucket, 600) for vbucket in range(60)], 1_000, last_read={}, row_share=1 / 6)) == 10
    share.on_batch([], rows=0)
    assert share.value == 1 / 6, "an empty batch says nothing"


# --- tasks ----------------------------------------------------------------------------------------------------------


def test_tasks_have_vbuckets_of_one_node_and_about_the_same_size() -> None:
    ranges = [wide(vbucket, 100 + vbucket) for vbucket in range(40)]
    shares = share_out(ranges, node_of={VBucketId(v): v % 2 for v in range(40)}, tasks_min=4)
    assert sorted(it.vbucket for share in shares for it in share) == list(range(40))
    assert len(shares) == 4
    assert all(len({it.vbucket % 2 for it in share}) == 1 for share in shares)
    sizes = [sum(it.changes for it in share) for share in shares]
    assert max(sizes) < 1.2 * min(sizes)


def test_many_rows_make_more_tasks() -> None:
    ranges = [wide(vbucket, ROWS_PER_PARTITION) for vbucket in range(6)]
    assert len(share_out(ranges, node_of={}, tasks_min=1)) == 6
    assert len(share_out(ranges[:2], node_of={}, tasks_min=8)) == 2, "a vbucket is never cut"
    assert len(share_out(ranges, node_of={}, tasks_min=1, row_share=1 / 3)) == 2


def test_vbuckets_of_a_group_are_read_by_one_task() -> None:
    ranges = [wide(vbucket, 10 + vbucket) for vbucket in range(40)]
    shares = share_out(ranges, node_of={}, tasks_min=4, group_of=lambda vbucket: vbucket // 5)
    assert sorted(it.vbucket for share in shares for it in share) == [*range(40)]
    groups = [{it.vbucket // 5 for it in share} for share in shares]
    assert sorted(len(found) for found in groups) == [2, 2, 2, 2]
    assert sum(map(len, groups)) == 8


# --- the offsets of a stream ------------------------------------------------------------------------------------------


def test_an_offset_holds_the_planned_end_and_where_its_batch_began() -> None:
    """So that another process, after a crash, begins the batch at the same offset."""
    plans = StreamPlans()
    began = places(at(A, 50, start=0))
    end = plans.plan(began, {VBUCKET: status(100)}, {VBUCKET: StreamOffset.whole(A, Seqno(60))})
    assert end[VBUCKET] == at(A, 100, start=60)
    assert plans.ranges(began, end, dict)[0].start == at(A, 60)
    (repeated,) = StreamPlans().ranges(began, end, lambda: {VBUCKET: status(120)})
    assert (repeated.start, repeated.end_seqno) == (at(A, 60), 100)


def test_a_stream_that_starts_now_begins_with_an_empty_batch() -> None:
    """Spark does not keep the first offset, so it must not hold anything that changes."""
    plans, began = StreamPlans(), Offsets("uuid")
    end = plans.plan(began, {VBUCKET: status(100)}, {})
    assert end[VBUCKET] == at(A, 100)
    assert plans.ranges(began, end, dict) == []
    assert StreamPlans().ranges(began, end, dict) == [], "nor when it is repeated"
