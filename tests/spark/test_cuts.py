"""What a version of `documents` is: the sentence of the guide, and with `consistent` a state that the bucket had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from headwater.client.blocking_bucket import Surveyor
from headwater.client.offsets import Offsets
from headwater.errors import InvalidInput, NoConsistentCut
from headwater.landing import bucket_watch
from headwater.landing.bucket_watch import BucketWatch
from headwater.landing.loop import CUTS_MISSED_MAX
from headwater.landing.planning import Survey
from headwater.landing.tasks import LandedShare
from headwater.spark.executors import SparkRunner
from support.driven_source import RunHere, SimulatedLanding
from support.landings import DEFAULT, LandedBucket, SourceBucket, SparkNode
from support.turn_writer import OTHER, CutChecker, TurnWriter

FOUR_TASKS = {"minPartitions": "4"}
VBUCKETS = 16
BATCHES = 8
SOAK_S = 120.0


@pytest.mark.parametrize("durability", [pytest.param("disk", marks=pytest.mark.soak), "memory"])
@pytest.mark.parametrize("consistent", [False, True])
def test_every_version_is_what_the_guide_says(tmp_path: Path, durability: str, consistent: bool) -> None:
    with SparkNode(tmp_path / "data", "--durability", durability, vbuckets=VBUCKETS) as node:
        bucket = SourceBucket(node)
        landing = SimulatedLanding(bucket, tmp_path / "lake", options=FOUR_TASKS, consistent=consistent)
        with TurnWriter(bucket) as writer:
            query = landing.start(every=0.05)
            try:
                while len(landing.batches) < BATCHES:
                    assert not query.awaitTermination(0.02)
            finally:
                query.stop()
        checker = CutChecker(landing.folder, writer)
        checker.check(consistent=consistent)
        assert checker.looked_at > BATCHES
        assert consistent or checker.torn, "this writer does not show what it is for"
        landing.land()
        landing.check_equal()
        bucket.close()


@pytest.mark.parametrize("answer", ["has_change_streams", "are_ours"])
def test_where_no_history_is_kept_it_is_refused(
    bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """By the bucket; or by a collection of Couchbase Server, which is not known to keep history unless it says so."""
    monkeypatch.setattr(Surveyor, answer, lambda surveyor: False)
    what = f"bucket {bucket.name}" if answer == "has_change_streams" else f"collection {DEFAULT}"
    with pytest.raises(NoConsistentCut, match=f"keeps no history of {what}.*Leave --consistent out"):
        SimulatedLanding(bucket, tmp_path / "lake", consistent=True).land()
    assert not (tmp_path / "lake").exists()


def test_a_limited_batch_is_refused(bucket: SourceBucket, tmp_path: Path) -> None:
    landing = SimulatedLanding(bucket, tmp_path / "lake", options={"maxRowsPerTrigger": "5"}, consistent=True)
    with pytest.raises(InvalidInput, match="has all vbuckets"):
        landing.land()


def test_where_answers_are_not_of_one_moment_a_quiet_one_is_looked_for(
    bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with several nodes, or Couchbase Server."""
    monkeypatch.setattr(BucketWatch, "_answers_at_once", lambda watch: False)
    monkeypatch.setattr(bucket_watch, "QUIET_WAIT_S_MAX", 0.5)
    survey, is_busy = BucketWatch.survey, True

    def survey_while_written(watch: BucketWatch, offsets: Offsets | None = None) -> Survey:
        if is_busy:
            bucket.put([b"a"], b"{}")
        return survey(watch, offsets)

    monkeypatch.setattr(BucketWatch, "survey", survey_while_written)
    landing = SimulatedLanding(bucket, tmp_path / "lake", consistent=True)
    with pytest.raises(NoConsistentCut, match="no moment was found"):
        landing.land()
    assert landing.changes() == []
    is_busy = False
    landing.land()
    landing.check_equal()


@pytest.mark.parametrize("event", ["failover", "drop", "make"])
def test_what_comes_between_a_cut_and_its_read(bucket: SourceBucket, tmp_path: Path, event: str) -> None:
    """The batch is given up and planned again: the tables never hold the vbucket or collection as it was later."""
    landing = SimulatedLanding(bucket, tmp_path / "lake", options=FOUR_TASKS, consistent=True)
    keys = [key for vbucket in range(bucket.node.vbuckets) for key in bucket.keys("a", 2, vbucket=vbucket)]
    bucket.create_collection(OTHER)
    bucket.put(keys, b"{}")
    steps: list[str] = []

    def step(name: str) -> None:
        steps.append(name)
        if steps.count("run task") == 1 == len(steps) - steps.index("run task"):
            if event == "failover":
                bucket.fail_over(0, bucket.high_seqnos()[0] - 1)
                bucket.put(keys, b'{"is":"later"}')
            elif event == "drop":
                bucket.drop_collection(OTHER)
            else:
                bucket.create_collection("_default.third")

    landing.step = step
    landing.land()
    assert (steps.count("plan tasks"), steps.count("commit changes")) == (2, 1)
    landing.check_equal()


class Missing(RunHere):
    """Some batches miss their cut, as if the server had lost versions meanwhile."""

    left = 0

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        results = super().__call__(tasks)
        if self.left and isinstance(results[0], LandedShare):
            self.left -= 1
            results[-1] = replace(results[-1], missed="its window has passed")
        return results


@pytest.mark.parametrize("missed", [CUTS_MISSED_MAX, CUTS_MISSED_MAX + 1])
def test_a_window_that_is_too_short_ends_the_landing(bucket: SourceBucket, tmp_path: Path, missed: int) -> None:
    landing, runner = SimulatedLanding(bucket, tmp_path / "lake", consistent=True), Missing()
    bucket.put([b"a"], b"{}")
    runner.left = missed
    query = landing.landing.start(runner)
    if missed > CUTS_MISSED_MAX:
        with pytest.raises(NoConsistentCut, match=r"6 batches in a row .* its window has passed.*land once without"):
            query.awaitTermination()
        assert landing.changes() == []
    else:
        query.awaitTermination()
        landing.check_equal()


@pytest.mark.soak
@pytest.mark.parametrize("consistent", [False, True])
def test_every_version_of_a_long_landing(spark: SparkSession, tmp_path: Path, consistent: bool) -> None:
    with SparkNode(tmp_path / "data", "--durability", "memory", vbuckets=64) as node:
        bucket = SourceBucket(node)
        landing = LandedBucket(bucket, spark, tmp_path / "lake", options=FOUR_TASKS, consistent=consistent)
        with TurnWriter(bucket) as writer:
            query = landing.landing.start(SparkRunner(spark), every=0.2)
            try:
                assert not query.awaitTermination(SOAK_S)
            finally:
                query.stop()
        checker = CutChecker(landing.folder, writer)
        checker.check(consistent=consistent)
        assert checker.looked_at > BATCHES
        print(f"{len(writer.acknowledged_s)} writes, {checker.looked_at} states, {checker.torn} that never were")
        bucket.close()
