"""The whole pipeline but Spark, on a real node, with everything that may come at a bad moment.

A seed decides what is written, when a vbucket fails over, when a task is run twice and when all of it is killed: before
any step of Spark's or of the lake's. Whatever happens, in the end the tables are the bucket.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from landed_bucket import GROUPS, check_delivery
from simulated_spark import SimulatedSpark
from spark_node import SourceBucket, SparkNode

from headwater.spark import landing, task_read
from headwater.spark.lake.lake import Lake, LakeSettings
from headwater.spark.lake.merge_plan import MergeRules
from headwater.spark.lake.tasks import run_here
from headwater.spark.landing import Landing
from headwater.spark.verification import compare
from lake_checks import check_no_duplicates, table_rows

SEEDS = 12
SOAK_SEEDS = 500
RUNS = 12
KEYS = 8
"""Of each vbucket."""
VBUCKETS = 2


class Killed(BaseException):
    """Nothing but the end of the process may catch it."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkNode]:
    names = [f"seed-{number}" for number in range(SEEDS)]
    with SparkNode(tmp_path_factory.mktemp("simulated") / "data", vbuckets=VBUCKETS, buckets=names) as node:
        yield node


class Disturbance:
    """What happens meanwhile."""

    def __init__(self, bucket: SourceBucket, seed: int) -> None:
        self.dice = random.Random(seed)
        self.is_on = True
        self.happened: list[str] = []
        self._bucket = bucket
        self._keys = [bucket.keys("key", KEYS, vbucket=vbucket) for vbucket in range(VBUCKETS)]
        self._written = 0

    def before(self, step: str) -> None:
        """Called before every step."""
        self.happened.append(step)
        if not self.is_on:
            return
        chance = self.dice.random()
        if chance < 0.03:
            self.happened.append("killed")
            raise Killed
        if chance < 0.2:
            self.write()
        elif chance < 0.28:
            self.fail_over()

    def read_twice(self) -> bool:
        return self.is_on and self.dice.random() < 0.1

    def write(self) -> None:
        vbucket = self.dice.randrange(VBUCKETS)
        for _ in range(self.dice.randint(1, 6)):
            key = self.dice.choice(self._keys[vbucket])
            self._written += 1
            if self.dice.random() < 0.25 and self._bucket.get(key) is not None:
                self._bucket.delete([key])
            else:
                self._bucket.put([key], b'{"n":%d}' % self._written)
        self.happened.append(f"{vbucket} written to {self._bucket.high_seqnos()[vbucket]}")

    def fail_over(self) -> None:
        vbucket = self.dice.randrange(VBUCKETS)
        high = self._bucket.high_seqnos()[vbucket]
        kept = max(0, high - self.dice.randint(0, 8))
        self._bucket.fail_over(vbucket, kept)
        self.happened.append(f"{vbucket} failed over from {high} to {kept}")


def run_seed(bucket: SourceBucket, folder: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbance = Disturbance(bucket, seed)
    dice = disturbance.dice

    def open_lake(*arguments: Any, **options: Any) -> Lake | None:
        return real_open(*arguments, **{**options, "step": disturbance.before})

    real_open = Lake.open
    monkeypatch.setattr(landing, "SparkRunner", lambda session: run_here)
    monkeypatch.setattr(landing.Lake, "open", open_lake)
    # There are no executors to ship anything to.
    monkeypatch.setattr(landing, "ship_kernels", lambda session: None)
    monkeypatch.setattr(task_read, "use_shipped_kernels", lambda: False)
    options = {"minPartitions": "2", "giveUpAfter": "60"}
    if dice.random() < 0.5:
        options["maxRowsPerTrigger"] = str(dice.randint(2, 12))
    rules = MergeRules(fraction=dice.choice([0, 0.2, 3]), history=dice.random() < 0.5)

    def run() -> bool:
        """Returns whether it came to its end."""
        pipeline = Landing(
            source={**bucket.options, **options}, into=str(folder), lake=LakeSettings(merging=rules), groups=GROUPS
        )
        spark: Any = SimulatedSpark(step=disturbance.before, read_twice=disturbance.read_twice)
        try:
            pipeline.start(spark)
        except Killed:
            return False
        finally:
            landing._LAKES.clear()
        return True

    try:
        for _ in range(RUNS):
            disturbance.write()
            run()
        disturbance.is_on = False
        options.pop("maxRowsPerTrigger", None)
        assert run()
        comparison = compare(bucket.settings, str(folder))
        assert comparison.is_equal, comparison
        changes = table_rows(folder / "changes")
        check_no_duplicates(changes)
        check_delivery(changes)
    except BaseException as error:
        error.add_note(f"seed {seed}:\n" + "\n".join(disturbance.happened))
        raise


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_tables_are_the_bucket_whatever_happens(
    node: SparkNode, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(SourceBucket(node, f"seed-{seed}")) as bucket:
        run_seed(bucket, tmp_path / "lake", seed, monkeypatch)
