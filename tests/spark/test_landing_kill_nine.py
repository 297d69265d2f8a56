"""kill -9 of all that takes part in a landing, at random moments, while somebody writes: nothing is lost or doubled."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from busy_writer import BusyWriter
from land_process import LandProcess
from landed_bucket import check_delivery
from spark_node import SourceBucket, SparkNode

from headwater.spark.verification import Comparison, compare
from lake_checks import check_no_duplicates, table_rows

CLUSTER = "local-cluster[2,1,1024]"
"""Two executors, each with a Java machine of its own."""
SOAK_RUNS = 3
KILLS = {
    "driver": 4,
    "driver's Python": 3,
    "driver's Java": 3,
    "executor": 10,
    "node": 10,
}
"""How often each is killed in a soak: 30 times in all."""
POLL_S = 0.2
SEED = 20_260


@dataclass
class KilledLanding:
    """A landing under way."""

    node: SparkNode
    bucket: SourceBucket
    land: LandProcess
    writer: BusyWriter
    dice: random.Random
    kills: list[str] = field(default_factory=list)

    def kill(self, what: str, *, after_s_max: float) -> None:
        """At some moment of the time after the next batch."""
        self.land.wait_for_batches(len(self.land.batches) + 1)
        time.sleep(self.dice.uniform(0, after_s_max))
        _KILLS[what](self)
        self.kills.append(what)

    def start_again(self) -> None:
        if not self.land.is_running:
            self.land.start()
            self.land.wait_for_batches(1)

    def check_equal(self) -> None:
        """With no writes going on, the tables become the bucket."""
        self.start_again()
        with self.writer.paused():
            self.land.wait_for(lambda: self._compare().is_equal)
            changes = table_rows(self.land.folder / "changes")
        check_no_duplicates(changes)
        check_delivery(changes)

    def _compare(self) -> Comparison:
        time.sleep(POLL_S)
        return compare(self.bucket.settings, str(self.land.folder))


_KILLS: dict[str, Callable[[KilledLanding], None]] = {
    "driver": lambda landing: landing.land.kill_all(),
    "driver's Python": lambda landing: landing.land.kill_python(),
    "driver's Java": lambda landing: landing.land.kill_java(),
    "executor": lambda landing: landing.land.kill_executor(landing.dice.randrange(2)),
    "node": lambda landing: landing.node.kill_and_restart(),
}


def run_kills(folder: Path, seed: int, kills: list[str], *, master: str, after_s_max: float) -> None:
    with SparkNode(folder / "data") as node:
        bucket = SourceBucket(node)
        bucket.put([b"first"], b'{"n":0}')
        bucket.close()
        with BusyWriter(bucket, seed) as writer, LandProcess(bucket, folder / "lake", master) as land:
            landing = KilledLanding(node, bucket, land, writer, random.Random(seed))
            for what in kills:
                landing.start_again()
                landing.kill(what, after_s_max=after_s_max)
                landing.check_equal()
                print(f"killed the {what}: equal; {writer.written} writes, {writer.failovers} failovers")


@pytest.mark.soak
def test_some_kills(tmp_path: Path) -> None:
    run_kills(tmp_path, SEED, ["executor", "node", "driver"], master=CLUSTER, after_s_max=1.0)


def soak_kills(run: int) -> list[str]:
    """The part of the kills that is of one run, in a random order."""
    kills = [what for what, count in KILLS.items() for _ in range(count)]
    random.Random(SEED).shuffle(kills)
    return kills[run::SOAK_RUNS]


def test_a_soak_has_thirty_kills_of_every_kind() -> None:
    runs = [soak_kills(run) for run in range(SOAK_RUNS)]
    assert Counter(kill for kills in runs for kill in kills) == KILLS
    assert [len(kills) for kills in runs] == [10, 10, 10]
    assert KILLS.keys() == _KILLS.keys()


@pytest.mark.soak
@pytest.mark.parametrize("run", range(SOAK_RUNS))
def test_thirty_kills(tmp_path: Path, run: int) -> None:
    """Each is at a random moment of a batch, and the tables are equal to the bucket after each."""
    run_kills(tmp_path, SEED + run, soak_kills(run), master=CLUSTER, after_s_max=3.0)
