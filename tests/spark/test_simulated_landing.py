"""The whole pipeline but Spark, on a real node, with everything that may come at a bad moment.

A seed decides what is written, when a vbucket fails over, when a task is run twice and when all of it is killed: before
any step of the pipeline or of the lake. Whatever happens, in the end the tables are the bucket.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from headwater.lake.documents_merge import MergeRules
from support.driven_source import SimulatedLanding
from support.landings import ALWAYS_FRESH, NEVER_FRESH, SourceBucket, SparkNode

SEEDS = 2
SOAK_SEEDS = range(1000, 1200)
SOAK_SEEDS_AT_ONCE = 20
"""Each has a bucket, and a node gets slower with many of them."""
RUNS = 12
KEYS = 4
"""Of each vbucket."""
VBUCKETS = 2


class Killed(BaseException):
    """Nothing but the end of the process may catch it."""


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
        for _ in range(self.dice.randint(1, 5)):
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


def run_seed(bucket: SourceBucket, folder: Path, seed: int) -> None:
    disturbance = Disturbance(bucket, seed)
    dice = disturbance.dice
    pipeline = SimulatedLanding(
        bucket,
        folder,
        rules=MergeRules(history=dice.random() < 0.5, on_read=seed % 2 == 1),
        fresh=dice.choice([ALWAYS_FRESH, NEVER_FRESH]),
        options={"maxRowsPerTrigger": str(dice.randint(2, 12))} if dice.random() < 0.5 else {},
        step=disturbance.before,
        read_twice=disturbance.read_twice,
    )
    try:
        for _ in range(RUNS):
            disturbance.write()
            with contextlib.suppress(Killed):
                pipeline.land()
        disturbance.is_on = False
        pipeline.land()
        pipeline.check_equal()
    except BaseException as error:
        error.add_note(f"seed {seed}:\n" + "\n".join(disturbance.happened))
        raise


def run_seeds(seeds: Sequence[int], folder: Path) -> None:
    names = [f"seed-{seed}" for seed in seeds]
    with SparkNode(folder / "data", vbuckets=VBUCKETS, buckets=names) as node:
        for seed, name in zip(seeds, names, strict=True):
            with contextlib.closing(SourceBucket(node, name)) as bucket:
                run_seed(bucket, folder / f"lake-{seed}", seed)


def test_the_tables_are_the_bucket_whatever_happens(tmp_path: Path) -> None:
    run_seeds(range(SEEDS), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("first_seed", SOAK_SEEDS[::SOAK_SEEDS_AT_ONCE])
def test_many_seeds(tmp_path: Path, first_seed: int) -> None:
    run_seeds(range(first_seed, first_seed + SOAK_SEEDS_AT_ONCE), tmp_path)
