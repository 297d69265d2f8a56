"""The landing as its user holds it: what it says of itself, how it goes on when something dies, and how it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkRuntimeError

from headwater.client.options import parse_interval_s
from headwater.errors import InvalidInput, LakeInUse, QueryFailed, ReadRolledBack
from headwater.lake import layout
from headwater.lake.lake import Lake
from headwater.spark import landing, landing_loop
from headwater.spark.landing_loop import FAILURES_MAX
from headwater.spark.task_read import LandShare
from support.driven_source import RunHere, SimulatedLanding, without_spark
from support.lake_model import table_rows
from support.landings import DEFAULT, SourceBucket, SparkNode

EVERY_S = 0.05


@pytest.fixture
def pipeline(bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedLanding:
    without_spark(monkeypatch)
    monkeypatch.setattr(landing_loop, "_RETRY_S_MIN", 0.01)
    monkeypatch.setattr(landing_loop, "_RETRY_S_MAX", 0.02)
    bucket.put([b"a", b"b"], b'{"n":1}')
    return SimulatedLanding(bucket, tmp_path / "lake")


@dataclass
class Failing(RunHere):
    """Raises what is in the list, one for each job, and then runs."""

    failures: list[Exception] = field(default_factory=list)

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        if self.failures:
            raise self.failures.pop()
        return super().__call__(tasks)


def died() -> Exception:
    return PySparkRuntimeError(message="[JOB_FAILED] Python worker exited unexpectedly (crashed)")


def start(pipeline: SimulatedLanding, runner: Any, every_s: float | None = None) -> landing.LandingQuery:
    made = pipeline.landing
    return made.run(runner, made.prepare(), every_s=every_s, on_batch=pipeline.batches.append)


# --- what it says -------------------------------------------------------------------------------------------------


def test_it_has_the_manners_of_a_streaming_query(pipeline: SimulatedLanding) -> None:
    query = pipeline.start(every_s=EVERY_S)
    try:
        assert query.isActive
        assert query.exception() is None
        query.processAllAvailable()
        progress = query.lastProgress
        assert progress is not None
        assert (progress["batchId"], progress["numInputRows"], progress["name"]) == (0, 2, query.name)
        assert query.recentProgress == [progress]
        assert set(query.status) == {"message", "isDataAvailable", "isTriggerActive"}
        assert query.awaitTermination(0.01) is False
        assert "batch 0" in repr(query)
    finally:
        query.stop()
    assert not query.isActive
    assert query.awaitTermination() is True
    assert query.landing_status.doing == "stopped"


def test_it_ends_by_itself_where_no_interval_is_given(pipeline: SimulatedLanding) -> None:
    query = pipeline.start()
    assert query.awaitTermination() is True
    assert (query.landing_status.batch, query.landing_status.documents) == (0, 2)


def test_it_can_be_stopped_in_the_middle_of_a_batch(pipeline: SimulatedLanding) -> None:
    """A batch that is not committed by then has not happened."""
    is_running, may_go_on = threading.Event(), threading.Event()

    class Slow(RunHere):
        def __call__(self, tasks: Sequence[Any]) -> list[Any]:
            is_running.set()
            may_go_on.wait(10)
            raise died()

        def cancel(self) -> None:
            may_go_on.set()

    query = start(pipeline, Slow(), EVERY_S)
    assert is_running.wait(10)
    query.stop()
    assert (query.isActive, query.exception()) == (False, None)
    assert table_rows(pipeline.folder / "changes") == []


def test_it_can_be_stopped_by_what_it_calls(pipeline: SimulatedLanding) -> None:
    made, stopped = pipeline.landing, threading.Event()

    def stop(_: object) -> None:
        query.stop()
        stopped.set()

    query = made.run(RunHere(), made.prepare(), every_s=EVERY_S, on_batch=stop)
    assert stopped.wait(20)
    assert query.awaitTermination(20) is True


@pytest.mark.parametrize(
    ("text", "seconds"), [("5 seconds", 5), ("500 milliseconds", 0.5), ("1 minute", 60), ("250ms", 0.25)]
)
def test_intervals_are_written_as_for_spark(text: str, seconds: float) -> None:
    assert parse_interval_s(text) == seconds


@pytest.mark.parametrize("text", ["5", "five seconds", "5 parsecs", ""])
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(InvalidInput, match="is no time"):
        parse_interval_s(text)


# --- processes that die -------------------------------------------------------------------------------------------


def test_a_process_that_dies_does_not_end_it(pipeline: SimulatedLanding, caplog: pytest.LogCaptureFixture) -> None:
    """Nor several of them, in reads and in merges; the log has them."""
    with caplog.at_level(logging.WARNING, logger=landing_loop.__name__):
        start(pipeline, Failing(failures=[died() for _ in range(FAILURES_MAX)])).awaitTermination()
    pipeline.check_equal()
    failed = [record for record in caplog.records if vars(record).get("event") == "batch_failed"]
    assert len(failed) == FAILURES_MAX
    assert "Python worker exited unexpectedly" in failed[0].getMessage()


@dataclass
class FailingMerges(RunHere):
    """So many jobs that are no reads fail."""

    left: int = 2

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        if not isinstance(tasks[0], LandShare) and self.left:
            self.left -= 1
            raise died()
        return super().__call__(tasks)


@pytest.mark.parametrize("every_s", [None, 30.0], ids=["at its end", "while it waits"])
def test_a_process_that_dies_in_a_merge_does_not_end_it(pipeline: SimulatedLanding, every_s: float | None) -> None:
    """Merges are made after a batch, at the end, and while the next batch is waited for."""
    pipeline.fresh = landing.Freshness(merge_share=0, wait_s_max=0.2)
    failing = land_first_and_more(pipeline, 2)
    query = start(pipeline, failing, every_s)
    try:
        give_up_s = time.monotonic() + 20
        while len(table_rows(pipeline.folder / "documents" / DEFAULT)) < 3:
            assert query.exception() is None
            assert time.monotonic() < give_up_s
            time.sleep(0.1)
    finally:
        query.stop()
    assert failing.left == 0
    pipeline.check_equal()


def land_first_and_more(pipeline: SimulatedLanding, failures: int) -> FailingMerges:
    """The first batch is not merged: its documents come with it."""
    pipeline.land()
    pipeline.batches.clear()
    pipeline.bucket.put([b"c"], b'{"n":1}')
    return FailingMerges(left=failures)


@pytest.mark.parametrize("fresh", [landing.Freshness(), landing.Freshness(merge_share=0, wait_s_max=1e9)])
def test_merges_that_always_fail_end_it(pipeline: SimulatedLanding, fresh: landing.Freshness) -> None:
    """Turns without a merge in between do not make up for them."""
    pipeline.fresh = fresh
    with pytest.raises(QueryFailed, match="Python worker exited unexpectedly"):
        start(pipeline, land_first_and_more(pipeline, 10_000)).awaitTermination(30)


def test_the_first_batch_comes_with_its_documents(pipeline: SimulatedLanding, monkeypatch: pytest.MonkeyPatch) -> None:
    # A small table has fewer groups than the lake has tasks: its documents are merged, which takes no time.
    monkeypatch.setattr(layout, "SMALL_GROUP_DOCUMENTS", 0)
    ran: list[str] = []

    class Watched(RunHere):
        def __call__(self, tasks: Sequence[Any]) -> list[Any]:
            ran.extend(type(task).__name__ for task in tasks)
            return super().__call__(tasks)

    start(pipeline, Watched()).awaitTermination()
    assert {*ran} == {"LandShare"}
    pipeline.check_equal()


def test_a_batch_that_is_landed_is_reported_whatever_fails_then(pipeline: SimulatedLanding) -> None:
    start(pipeline, land_first_and_more(pipeline, 1)).awaitTermination()
    assert [(batch.batch_id, batch.rows) for batch in pipeline.batches] == [(1, 1)]


def test_it_can_be_stopped_while_the_bucket_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_spark(monkeypatch)
    with SparkNode(tmp_path / "data") as node:
        bucket = SourceBucket(node)
        bucket.put([b"a"], b"{}")
        pipeline = SimulatedLanding(bucket, tmp_path / "lake")
        query = pipeline.start(every_s=EVERY_S)
        query.processAllAvailable()
        bucket.close()
        node.process.kill()
        time.sleep(1.0)
        began_s = time.monotonic()
        query.stop()
        assert time.monotonic() - began_s < 10
        assert query.exception() is None
        node.process.start()


def test_it_is_given_up_after_a_bound(pipeline: SimulatedLanding) -> None:
    query = start(pipeline, Failing(failures=[died() for _ in range(FAILURES_MAX + 1)]), EVERY_S)
    with pytest.raises(QueryFailed, match="Python worker exited unexpectedly"):
        query.awaitTermination(60)
    assert not query.isActive
    assert query.landing_status.failures == FAILURES_MAX + 1


def test_failures_with_a_batch_between_them_do_not_add_up(pipeline: SimulatedLanding) -> None:
    runner = Failing()
    query = start(pipeline, runner, EVERY_S)
    try:
        for number in range(FAILURES_MAX + 2):
            runner.failures = [died()]
            pipeline.bucket.put([b"key-%d" % number], b"{}")
            query.processAllAvailable()
    finally:
        query.stop()
    pipeline.check_equal()


def test_what_will_not_get_better_ends_it_at_once(pipeline: SimulatedLanding) -> None:
    ours = PySparkRuntimeError(message="…\nheadwater.errors.ReadRolledBack: it was taken back. Read again\n")
    for failure, error, text in (
        (ours, ReadRolledBack, "it was taken back"),
        (Py4JNetworkError("Answer from Java side is empty"), QueryFailed, "Spark has ended unexpectedly"),
    ):
        with pytest.raises(error, match=text):
            start(pipeline, Failing(failures=[failure])).awaitTermination()


# --- others at the same tables ------------------------------------------------------------------------------------


def test_of_two_landings_one_goes_on(pipeline: SimulatedLanding) -> None:
    """The second lands between the read and the commit of the first."""
    other = SimulatedLanding(pipeline.bucket, pipeline.folder)

    class Interrupted(RunHere):
        def __call__(self, tasks: Sequence[Any]) -> list[Any]:
            results = super().__call__(tasks)
            if isinstance(tasks[0], LandShare):
                other.land()
            return results

    with pytest.raises(LakeInUse, match="Let only one pipeline write"):
        start(pipeline, Interrupted()).awaitTermination()
    pipeline.check_equal()


def test_a_tool_that_tidies_up_does_not_end_it(pipeline: SimulatedLanding) -> None:
    """An entry in the log that holds nothing new, between the read and the commit of a batch."""
    tidied: list[int] = []

    class Tidied(RunHere):
        def __call__(self, tasks: Sequence[Any]) -> list[Any]:
            results = super().__call__(tasks)
            if not tidied:
                lake = Lake.open(str(pipeline.folder))
                assert lake is not None
                lake.changes._table.alter.set_table_properties({"headwater.test": "1"}, raise_if_not_exists=False)
                tidied.append(1)
            return results

    start(pipeline, Tidied()).awaitTermination()
    assert tidied
    pipeline.check_equal()


# --- where it starts ----------------------------------------------------------------------------------------------


def test_starting_now_holds_from_the_first_commit_on(pipeline: SimulatedLanding) -> None:
    """Also if it is killed before its first batch."""
    pipeline.options = {"startingOffsets": "now"}
    pipeline.land()
    assert pipeline.batches == []
    pipeline.bucket.put([b"c"], b"{}")
    pipeline.options = {}
    pipeline.land()
    assert [row["key"] for row in table_rows(pipeline.folder / "documents" / DEFAULT)] == ["c"]


# --- freshness ----------------------------------------------------------------------------------------------------


def test_a_landing_that_waits_merges_what_is_due(pipeline: SimulatedLanding) -> None:
    """A long interval between batches does not keep changes from `documents`."""
    pipeline.fresh = landing.Freshness(merge_share=0, wait_s_max=1.0)
    query = pipeline.start(every_s=30)
    try:
        give_up_s = time.monotonic() + 20
        while len(table_rows(pipeline.folder / "documents" / DEFAULT)) < 2:
            assert time.monotonic() < give_up_s
            time.sleep(0.1)
    finally:
        query.stop()
