"""What a version of `documents` is: the sentence of the guide, and with `consistent` a state that the bucket had."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from support.driven_source import SimulatedLanding, without_spark
from support.landings import LandedBucket, SourceBucket, SparkNode
from support.turn_writer import CutChecker, TurnWriter

FOUR_TASKS = {"minPartitions": "4"}
VBUCKETS = 16
BATCHES = 8
SOAK_S = 120.0


@pytest.mark.parametrize("durability", ["disk", "memory"])
@pytest.mark.parametrize("consistent", [False, True])
def test_every_version_is_what_the_guide_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, durability: str, consistent: bool
) -> None:
    without_spark(monkeypatch)
    with SparkNode(tmp_path / "data", "--durability", durability, vbuckets=VBUCKETS) as node:
        bucket = SourceBucket(node)
        landing = SimulatedLanding(bucket, tmp_path / "lake", options=FOUR_TASKS, consistent=consistent)
        with TurnWriter(bucket) as writer:
            query = landing.start(every_s=0.05)
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


@pytest.mark.soak
@pytest.mark.parametrize("consistent", [False, True])
def test_every_version_of_a_long_landing(spark: SparkSession, tmp_path: Path, consistent: bool) -> None:
    with SparkNode(tmp_path / "data", "--durability", "memory", vbuckets=64) as node:
        bucket = SourceBucket(node)
        landing = LandedBucket(bucket, spark, tmp_path / "lake", options=FOUR_TASKS, consistent=consistent)
        with TurnWriter(bucket) as writer:
            query = landing.landing.start(spark, every=0.2)
            try:
                assert not query.awaitTermination(SOAK_S)
            finally:
                query.stop()
        checker = CutChecker(landing.folder, writer)
        checker.check(consistent=consistent)
        assert checker.looked_at > BATCHES
        print(f"{len(writer.acknowledged_s)} writes, {checker.looked_at} states, {checker.torn} that never were")
        bucket.close()
