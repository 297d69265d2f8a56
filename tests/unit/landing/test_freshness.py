"""When documents are merged, and how far the tables are behind."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.client.offsets import Offsets
from headwater.client.survey import VBucketStatus
from headwater.landing.planning import _SURVEYS_MAX, Freshness, LandingLag, MergeClock
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.source import LagListener, progress_lag
from support.cases import each


def clock(*, took_s: float, share: float = 0.5, wait_s_max: float = 60.0) -> MergeClock:
    """The last merge has ended at 100."""
    made = MergeClock(Freshness(merge_share=share, wait_s_max=wait_s_max))
    made.on_merged(began_s=100 - took_s, ended_s=100)
    return made


def test_the_first_merge_is_due_at_once() -> None:
    assert MergeClock(Freshness()).is_due(now_s=0, waited_s=0)


@pytest.mark.parametrize(("share", "rest_s"), [(0.5, 4), (0.25, 12), (1, 0)])
def test_merging_takes_its_share_of_the_time(share: float, rest_s: float) -> None:
    merged = clock(took_s=4, share=share)
    assert merged.is_due(now_s=100 + rest_s, waited_s=1)
    assert not merged.is_due(now_s=100 + rest_s - 0.1, waited_s=1)


def test_a_change_does_not_wait_for_longer_than_it_may() -> None:
    """The merge itself counts: it has to end by then."""
    merged = clock(took_s=20, wait_s_max=60)
    assert merged.is_due(now_s=101, waited_s=40)
    assert not merged.is_due(now_s=101, waited_s=39)
    assert not clock(took_s=1, share=0, wait_s_max=1e9).is_due(now_s=1e6, waited_s=1e6), "both can be turned off"


def test_a_merge_waits_until_enough_has_changed_for_what_it_writes() -> None:
    merged = clock(took_s=1)
    table = 6 * 2**20
    due = partial(merged.is_due, waited_s=1, expected_bytes=table)
    assert not due(now_s=110, changed_bytes=10_000)
    assert due(now_s=110, changed_bytes=table / 8), "it writes eight times what has changed"
    assert due(now_s=100 + table / 2**16, changed_bytes=1), "a machine that has nothing else to do may write a little"
    assert merged.is_due(now_s=102, waited_s=1, changed_bytes=1, expected_bytes=100_000), "small tables need not wait"
    assert merged.is_due(now_s=101, waited_s=59, changed_bytes=1, expected_bytes=table), "no change waits for longer"


# --- the lag ------------------------------------------------------------------------------------------------------


def places(*seqnos: int, branch: int = 1) -> Offsets:
    return Offsets(
        "uuid",
        {VBucketId(number): StreamOffset.whole(Vbuuid(branch), Seqno(seqno)) for number, seqno in enumerate(seqnos)},
    )


def test_tables_that_have_passed_a_hidden_durable_write_are_not_ahead() -> None:
    lag = LandingLag(places(15), as_of_s=None)
    hidden = VBucketStatus(
        high_seqno=Seqno(13), last_seqno=Seqno(15), failover_log=FailoverLog.start(Vbuuid(1))
    )  # fmt: skip
    lag.on_survey({VBucketId(0): hidden}, at_s=5)
    assert (lag.seqnos, lag.as_of_s) == (0, 5)
    lag.on_offsets(places(16))
    assert lag.seqnos is None


def survey(lag: LandingLag, at_s: float, *seqnos: int, branch: int = 1) -> None:
    lag.on_survey(
        {
            VBucketId(number): VBucketStatus(high_seqno=Seqno(seqno), failover_log=FailoverLog.start(Vbuuid(branch)))
            for number, seqno in enumerate(seqnos)
        },
        at_s=at_s,
    )


def test_what_the_tables_say_holds_until_more_is_known() -> None:
    assert (LandingLag(places(), as_of_s=None).seqnos, LandingLag(places(), as_of_s=None).seconds(100)) == (None, None)
    lag = LandingLag(places(5), as_of_s=40)
    assert (lag.seqnos, lag.seconds(100)) == (None, 60)
    survey(lag, 100, 8)
    assert (lag.seqnos, lag.seconds(100)) == (3, 60), "the tables lack something that was written after 40"
    survey(lag, 110, 8)
    lag.on_offsets(places(8))
    assert (lag.seqnos, lag.seconds(111)) == (0, 1)
    survey(lag, 120, 8, 7)
    assert lag.seqnos == 7, "a vbucket that is not in the tables counts in full"


def test_the_lag_in_seconds_is_the_age_of_the_newest_survey_that_is_held() -> None:
    lag = LandingLag(places(0, 0), as_of_s=None)
    for second in range(10):
        survey(lag, second, second * 10, 0)
    lag.on_offsets(places(45, 0))
    assert (lag.seqnos, lag.seconds(9)) == (45, 5), "what was written before 4 is in the tables"
    lag.on_high_seqnos({VBucketId(0): Seqno(99)})
    assert (lag.seqnos, lag.seconds(9)) == (54, 5), "a look at the seqnos alone says nothing of branches"
    lag.on_unreachable()
    assert (lag.seqnos, lag.seconds(31)) == (None, 27), "what is held is still held"


def test_the_same_seqnos_on_another_branch_are_other_changes() -> None:
    """A failover to 900, and writes to 950 since: the tables, at 1000 of the dead branch, have none of them."""
    lag = LandingLag(places(1000), as_of_s=0)
    survey(lag, 1, 1500)
    survey(lag, 2, 950, branch=2)
    assert (lag.seqnos, lag.seconds(11)) == (None, 11)
    lag.on_offsets(places(950, branch=2))
    assert (lag.seqnos, lag.seconds(11)) == (0, 9), "what the dead branch had does not count for ever"


def test_tables_that_have_lost_something_are_as_old_as_what_they_still_lack() -> None:
    lag = LandingLag(places(5), as_of_s=50)
    survey(lag, 60, 9)
    lag.on_offsets(places(), is_missing=True)
    assert (lag.seqnos, lag.seconds(70)) == (9, None)


def test_a_long_lag_is_remembered_in_few_surveys() -> None:
    lag = LandingLag(places(0), as_of_s=None)
    for second in range(10 * _SURVEYS_MAX):
        survey(lag, second, second)
    assert len(lag._surveys) <= _SURVEYS_MAX
    lag.on_offsets(places(5 * _SURVEYS_MAX))
    found_s = lag.seconds(10 * _SURVEYS_MAX)
    assert found_s is not None
    assert 5 * _SURVEYS_MAX <= found_s < 6 * _SURVEYS_MAX, "too old by a few surveys at most, and never too young"


# How far a query is behind, from what Spark reports of its progress.


def offsets(*seqnos: int) -> str:
    at = [
        StreamOffset(vbuuid=Vbuuid(5), seqno=Seqno(seqno), snapshot_start=Seqno(seqno), snapshot_end=Seqno(seqno))
        for seqno in seqnos
    ]
    return Offsets("uuid", {VBucketId(vbucket): offset for vbucket, offset in enumerate(at)}).to_json()


@each(
    ("latest", "end", "lag"),
    [
        (offsets(10, 20), offsets(10, 20), 0),
        (offsets(10, 20), offsets(4, 20), 6),
        (offsets(10, 20), offsets(4, 10), 16),
        (offsets(10, 20), offsets(12, 18), 2),
        (offsets(10, 20), offsets(10), 20),
        (offsets(), offsets(5), 0),
        (None, None, None),
        (None, offsets(1), None),
        (offsets(1), None, None),
        ('{"logOffset":3}', offsets(1), None),
        ("no JSON", offsets(1), None),
    ],
)
def test_the_lag_between_two_offsets(latest: str | None, end: str | None, lag: int | None) -> None:
    reported = progress(latest, end)
    assert progress_lag(reported) == lag
    assert progress_lag(SimpleNamespace(json=json.dumps(reported))) == lag
    if lag is not None:
        assert progress_lag(progress(json.loads(latest or ""), json.loads(end or ""))) == lag


@each("reported", [{}, {"sources": []}, {"sources": [{}]}])
def test_a_progress_that_says_nothing(reported: dict[str, Any]) -> None:
    assert progress_lag(reported) is None


def progress(latest: Any, end: Any) -> dict[str, Any]:
    return {"name": None, "id": "the-id", "sources": [{"latestOffset": latest, "endOffset": end}]}


@pytest.mark.parametrize(("name", "shown"), [("mine", "mine"), (None, "the-id")])
def test_the_listener(name: str | None, shown: str) -> None:
    heard: list[tuple[str, int]] = []
    listener = LagListener(lambda query, lag: heard.append((query, lag)))
    for reported in (progress(offsets(10), offsets(4)), progress(None, None)):
        event: Any = SimpleNamespace(progress=SimpleNamespace(json=json.dumps(reported), name=name, id="the-id"))
        listener.onQueryProgress(event)
    assert heard == [(shown, 6)]


@pytest.mark.parametrize(
    ("took_s", "rest_s", "waited_s", "is_behind"),
    [(2, 3, 1, False), (3, 2, 1, True), (1, 30, 59.5, False), (1, 30, 80, True)],
)
def test_merges_that_take_most_of_the_time_or_come_late_are_noticed(
    took_s: float, rest_s: float, waited_s: float, is_behind: bool
) -> None:
    merging = MergeClock(Freshness())
    for turn in range(4):
        began_s = turn * (took_s + rest_s)
        assert not merging.is_behind, "a few may be so"
        merging.on_merged(began_s=began_s, ended_s=began_s + took_s, waited_s=waited_s if turn else 0)
    assert merging.is_behind == is_behind
    merging.on_merged(began_s=10_000, ended_s=10_001, waited_s=1)
    assert not merging.is_behind
