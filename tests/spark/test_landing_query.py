"""The landing as its user holds it: what it says of itself, how it goes on when something dies, and how it ends."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from py4j.protocol import Py4JNetworkError
from pyspark.errors import PySparkRuntimeError

import headwater.landing
from headwater.errors import InvalidInput, LakeInUse, QueryFailed, ReadRolledBack
from headwater.lake import layout
from headwater.lake.lake import Lake
from headwater.landing import loop
from headwater.landing.loop import FAILURES_MAX
from headwater.landing.planning import Freshness
from headwater.landing.query import LandingQuery
from headwater.landing.tasks import LandShare
from headwater.options import parse_interval_s
from headwater.spark.executors import SparkRunner
from support.cases import each
from support.driven_source import RunHere, SimulatedLanding
from support.lake_model import table_rows
from support.landings import DEFAULT, SourceBucket, SparkNode, wait_until
from support.node_process import PASSWORD, USER

EVERY_S = 0.05


@pytest.fixture
def pipeline(bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimulatedLanding:
    monkeypatch.setattr(loop, "_RETRY_S_MIN", 0.01)
    monkeypatch.setattr(loop, "_RETRY_S_MAX", 0.02)
    bucket.put([b"a", b"b"], b'{"n":1}')
    return SimulatedLanding(bucket, tmp_path / "lake")


@dataclass
class Failing(RunHere):
    """So many jobs fail, and then it runs. With `of_merges` they are those that do not read."""

    left: int = 0
    of_merges: bool = False

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        if self.left and not (self.of_merges and isinstance(tasks[0], LandShare)):
            self.left -= 1
            raise died()
        return super().__call__(tasks)


def died() -> Exception:
    return QueryFailed("Python worker exited unexpectedly (crashed)")


def start(pipeline: SimulatedLanding, runner: Any, every_s: float | None = None) -> LandingQuery:
    made = pipeline.landing
    return made.start(runner, every=every_s, on_batch=pipeline.batches.append)


# --- what it says -------------------------------------------------------------------------------------------------


def test_it_has_the_manners_of_a_streaming_query(pipeline: SimulatedLanding) -> None:
    query = pipeline.start(every=EVERY_S)
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

    query = made.start(RunHere(), every=EVERY_S, on_batch=stop)
    assert stopped.wait(20)
    assert query.awaitTermination(20) is True


@each(("text", "seconds"), [("5 seconds", 5), ("500 milliseconds", 0.5), ("1 minute", 60), ("250ms", 0.25)])
def test_intervals_are_written_as_for_spark(text: str, seconds: float) -> None:
    assert parse_interval_s(text) == seconds


@each("text", ["5", "five seconds", "5 parsecs", ""])
def test_what_is_no_interval(text: str) -> None:
    with pytest.raises(InvalidInput, match="is no time"):
        parse_interval_s(text)


# --- processes that die -------------------------------------------------------------------------------------------


def test_a_process_that_dies_does_not_end_it(pipeline: SimulatedLanding, caplog: pytest.LogCaptureFixture) -> None:
    """Nor several of them, in reads and in merges; the log has them."""
    with caplog.at_level(logging.WARNING, logger=loop.__name__):
        start(pipeline, Failing(left=FAILURES_MAX)).awaitTermination()
    pipeline.check_equal()
    failed = [record for record in caplog.records if vars(record).get("event") == "batch_failed"]
    assert len(failed) == FAILURES_MAX
    assert "Python worker exited unexpectedly" in failed[0].getMessage()


@pytest.mark.parametrize("every_s", [None, 30.0], ids=["at its end", "while it waits"])
def test_a_process_that_dies_in_a_merge_does_not_end_it(pipeline: SimulatedLanding, every_s: float | None) -> None:
    """Merges are made after a batch, at the end, and while the next batch is waited for, however long that takes."""
    pipeline.fresh = Freshness(merge_share=0, wait_s_max=0.2)
    failing = land_first_and_more(pipeline, 2)
    query = start(pipeline, failing, every_s)
    try:
        wait_until(lambda: len(table_rows(pipeline.folder / "documents" / DEFAULT)) == 3)
    finally:
        query.stop()
    assert failing.left == 0
    assert [(batch.batch_id, batch.rows) for batch in pipeline.batches] == [(1, 1)], "reported whatever fails then"
    pipeline.check_equal()


def land_first_and_more(pipeline: SimulatedLanding, failures: int) -> Failing:
    """The first batch is not merged: its documents come with it."""
    pipeline.land()
    pipeline.batches.clear()
    pipeline.bucket.put([b"c"], b'{"n":1}')
    return Failing(left=failures, of_merges=True)


@pytest.mark.parametrize("fresh", [Freshness(), Freshness(merge_share=0, wait_s_max=1e9)])
def test_merges_that_always_fail_end_it(pipeline: SimulatedLanding, fresh: Freshness) -> None:
    """Turns without a merge in between do not make up for them."""
    pipeline.fresh = fresh
    with pytest.raises(QueryFailed, match="Python worker exited unexpectedly"):
        start(pipeline, land_first_and_more(pipeline, 10_000)).awaitTermination(30)


def test_the_first_batch_comes_with_its_documents(pipeline: SimulatedLanding, monkeypatch: pytest.MonkeyPatch) -> None:
    # A small table has fewer groups than the lake has tasks: its documents are merged, which takes no time.
    monkeypatch.setattr(layout, "SMALL_GROUP_DOCUMENTS", 0)
    ran: list[Any] = []
    query = start(pipeline, RunHere(before=ran.extend))
    assert query.awaitTermination() is True
    assert (query.landing_status.batch, query.landing_status.documents) == (0, 2)
    assert {type(task) for task in ran} == {LandShare}
    pipeline.check_equal()


def test_it_can_be_stopped_while_the_bucket_is_away(tmp_path: Path) -> None:
    with SparkNode(tmp_path / "data") as node:
        bucket = SourceBucket(node)
        bucket.put([b"a"], b"{}")
        pipeline = SimulatedLanding(bucket, tmp_path / "lake")
        query = pipeline.start(every=EVERY_S)
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
    query = start(pipeline, Failing(left=FAILURES_MAX + 1), EVERY_S)
    with pytest.raises(QueryFailed, match="Python worker exited unexpectedly"):
        query.awaitTermination(60)
    assert not query.isActive
    assert query.landing_status.failures == FAILURES_MAX + 1


def test_failures_with_a_batch_between_them_do_not_add_up(pipeline: SimulatedLanding) -> None:
    runner = Failing()
    query = start(pipeline, runner, EVERY_S)
    try:
        for number in range(FAILURES_MAX + 2):
            runner.left = 1
            pipeline.bucket.put([b"key-%d" % number], b"{}")
            query.processAllAvailable()
    finally:
        query.stop()
    pipeline.check_equal()


def test_what_will_not_get_better_ends_it_at_once(pipeline: SimulatedLanding, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = PySparkRuntimeError(message="…\nheadwater.errors.ReadRolledBack: it was taken back. Read again\n")
    for failure, error, text in (
        (ours, ReadRolledBack, "it was taken back"),
        (Py4JNetworkError("Answer from Java side is empty"), QueryFailed, "Spark has ended unexpectedly"),
    ):
        monkeypatch.setattr(SparkRunner, "_outcomes", Mock(side_effect=failure))
        with pytest.raises(error, match=text):
            start(pipeline, SparkRunner(Mock())).awaitTermination()


# --- others at the same tables ------------------------------------------------------------------------------------


def test_of_two_landings_one_goes_on(pipeline: SimulatedLanding) -> None:
    """The second lands between the read and the commit of the first."""
    other = SimulatedLanding(pipeline.bucket, pipeline.folder)

    def land_other(tasks: Sequence[Any]) -> None:
        if isinstance(tasks[0], LandShare):
            other.land()

    with pytest.raises(LakeInUse, match="Let only one pipeline write"):
        start(pipeline, RunHere(after=land_other)).awaitTermination()
    pipeline.check_equal()


def test_a_tool_that_tidies_up_does_not_end_it(pipeline: SimulatedLanding) -> None:
    """An entry in the log that holds nothing new, between the read and the commit of a batch."""
    tidied: list[int] = []

    def tidy(_: Sequence[Any]) -> None:
        if not tidied:
            lake = Lake.open(str(pipeline.folder))
            assert lake is not None
            lake.changes._table.alter.set_table_properties({"headwater.test": "1"}, raise_if_not_exists=False)
            tidied.append(1)

    start(pipeline, RunHere(after=tidy)).awaitTermination()
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


def test_starting_at_a_time_holds_too(pipeline: SimulatedLanding) -> None:
    time.sleep(0.01)
    pipeline.options = {"startAt": datetime.now(UTC).isoformat()}
    pipeline.bucket.put([b"c"], b"{}")
    for key in (b"d", b"e"):
        pipeline.land()
        pipeline.options = {"startAt": "-1ms"}
        pipeline.bucket.put([key], b"{}")
        time.sleep(0.01)
    pipeline.land()
    assert {row["key"] for row in table_rows(pipeline.folder / "documents" / DEFAULT)} == {"c", "d", "e"}


# --- A landing in this process: the same tables, and nothing of Spark is loaded ---------------------------------------

COMMAND_S_MAX = 120
VBUCKET = 1
COMMAND = """
import sys
from headwater.cli import main
try:
    main(sys.argv[1:])
finally:
    print([one for one in ("pyspark", "py4j", "pandas") if one in sys.modules])
"""


def unchanged(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch


def land(bucket: SourceBucket, folder: Path) -> str:
    """The command, with no Java on its path. Returns what it says."""
    login = ("--user", USER, "--password", PASSWORD)
    command = ("land", bucket.url, "--into", str(folder), "--once", "--runner", "local", *login)
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND, *command],
        capture_output=True,
        text=True,
        timeout=COMMAND_S_MAX,
        check=True,
        env={"PATH": "/nowhere", "COLUMNS": "200"},
    )
    assert ran.stdout == "[]\n"
    return ran.stderr


def test_the_command_loads_no_spark_and_undoes_a_rollback(bucket: SourceBucket, tmp_path: Path) -> None:
    bucket.put(bucket.keys("key", 300, vbucket=VBUCKET), b'{"n":1}')
    bucket.put([b"other-%d" % number for number in range(700)], b'{"n":2}')
    kept = bucket.high_seqnos()[VBUCKET]
    bucket.put(bucket.keys("lost", 5, vbucket=VBUCKET), b"{}")
    assert "1,005 changes landed" in land(bucket, tmp_path / "lake")
    bucket.fail_over(VBUCKET, kept)
    bucket.put(bucket.keys("new", 1, vbucket=VBUCKET), b"{}")
    assert "1 rollback; 1,001 documents" in land(bucket, tmp_path / "lake")
    assert headwater.landing.verify(bucket.url, str(tmp_path / "lake"), user=USER, password=PASSWORD).is_equal


def test_a_program_lands_verifies_and_stops(bucket: SourceBucket, tmp_path: Path) -> None:
    batches: list[headwater.landing.LandedBatch] = []
    query = headwater.landing.land(
        bucket.url,
        str(tmp_path / "lake"),
        every=0.05,
        transform=unchanged,
        on_batch=batches.append,
        user=USER,
        password=PASSWORD,
    )
    try:
        bucket.put([b"a", b"b"], b'{"n":1}')
        query.processAllAvailable()
    finally:
        query.stop()
    assert query.exception() is None
    assert sum(batch.rows for batch in batches) == 2
    found = headwater.landing.verify(
        bucket.url, str(tmp_path / "lake"), transform=unchanged, user=USER, password=PASSWORD
    )
    assert found.is_equal
    assert headwater.landing.look(str(tmp_path / "lake")).documents == 2
