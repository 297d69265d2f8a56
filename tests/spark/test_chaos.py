"""Everything at once: writes that never pause, failovers, dropped collections, kill -9 of all that takes part;
and a checker that looks at the tables meanwhile.

Half a minute of it runs with the tests, half an hour under `make soak`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import pytest

from headwater.lake.verify import compare
from support.landings import LandProcess, SourceBucket, SparkNode, check_tables
from support.live_bucket import HotLoad, LiveChecker, LiveWriter

CLUSTER = "local-cluster[2,1,1024]"
"""Two executors, each with a Java machine of its own."""
SOAK_S = 30 * 60.0
HOT_S = 10 * 60.0
VERIFY_EVERY = 20
"""Looks."""
LOOK_EVERY_S = 0.5
EQUAL_S_MAX = 120.0
WRITTEN_MIN = 1000
SEED = 20_260

Kill = Callable[[LandProcess, SparkNode, random.Random], None]
KILLS: dict[str, Kill] = {
    "Python worker": lambda land, node, dice: land.kill_worker(),
    "node": lambda land, node, dice: node.kill_and_restart(),
    "driver": lambda land, node, dice: land.kill_all(),
    "driver's Python": lambda land, node, dice: land.kill_python(),
    "driver's Java": lambda land, node, dice: land.kill_java(),
}
CLUSTER_KILLS = {**KILLS, "executor": lambda land, node, dice: land.kill_executor(dice.randrange(2))}
GOES_ON = ("Python worker", "node", "executor")
"""What does not end the landing."""
MODES = ["--copy-on-write", "--merge-on-read"]


def run_chaos(folder: Path, kills: list[str], mode: str, *, master: str, between_s: float, seed: int = SEED) -> None:
    dice = random.Random(seed)
    with SparkNode(folder / "data") as node:
        bucket = SourceBucket(node)
        with LandProcess(bucket, folder / "lake", master, mode) as land:
            with LiveWriter(bucket, seed, disaster=0.001) as writer:
                checker = LiveChecker(land.folder, writer)
                for kill in [*kills, None]:
                    if not land.is_running:
                        land.start()
                    land.wait_for_batches(len(land.batches) + 1)
                    until_s = time.monotonic() + dice.uniform(0.5, 1) * between_s
                    while time.monotonic() < until_s:
                        checker.look()
                        assert land.is_running, land.log()
                        time.sleep(LOOK_EVERY_S)
                    if kill is not None:
                        process = land.process_id
                        CLUSTER_KILLS[kill](land, node, dice)
                        if kill in GOES_ON:
                            land.wait_for_batches(len(land.batches) + 2)
                            assert land.process_id == process, "the landing goes on by itself"
                    print(
                        f"{kill or 'at the end'}: {checker.looks} looks, {checker.compared:,} documents compared, "
                        f"{writer.written:,} writes, {writer.failovers} failovers, {writer.drops} drops"
                    )
                give_up_s = time.monotonic() + EQUAL_S_MAX
                while not (writer.written > WRITTEN_MIN and writer.failovers and writer.drops):
                    assert time.monotonic() < give_up_s, "the writer has not done all that it does"
                    checker.look()
                    time.sleep(LOOK_EVERY_S)
            give_up_s = time.monotonic() + EQUAL_S_MAX
            while not (verdict := compare(bucket.settings, str(land.folder))).is_equal or verdict.pending:
                assert time.monotonic() < give_up_s, verdict
                time.sleep(LOOK_EVERY_S)
        bucket.ids = writer.collections
        checker.check_end(bucket)
        check_tables(bucket, land.folder)
        bucket.close()


def test_some_seconds_of_chaos(tmp_path: Path) -> None:
    """A landing that has to go on by itself. (One that is started again is in the soaks, and in other files.)"""
    run_chaos(tmp_path, ["node"], "--merge-on-read", master="local[2]", between_s=3)


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_a_minute_of_chaos(tmp_path: Path, mode: str) -> None:
    run_chaos(tmp_path, ["Python worker", "node", "driver"], mode, master="local[2]", between_s=6)


@pytest.mark.soak
def test_half_an_hour_of_chaos(tmp_path: Path) -> None:
    kills = [*CLUSTER_KILLS] * 4
    random.Random(SEED).shuffle(kills)
    run_chaos(tmp_path, kills, "--merge-on-read", master=CLUSTER, between_s=SOAK_S / len(kills))


@pytest.mark.soak
@pytest.mark.parametrize("mode", MODES)
def test_ten_minutes_of_hot_writes(tmp_path: Path, mode: str) -> None:
    """5,000 sets a second on 500 of 100,000 documents: every live document is in `documents`, and none is older than
    two batches. The last is so if the table is as of one of the last two batches, and holds what it says. `verify`
    finds nothing wrong meanwhile, and counts what is pending."""
    with SparkNode(tmp_path / "data", vbuckets=128) as node:
        bucket = SourceBucket(node)
        with (
            HotLoad(bucket, documents=100_000, hot=500, per_s=5_000) as load,
            LandProcess(bucket, tmp_path / "lake", "local[2]", mode, every="5s") as land,
        ):
            checker = LiveChecker(land.folder, load)
            land.wait_for_batches(2)
            began_s, written, pending = time.monotonic(), load.written, list[int]()
            while time.monotonic() < began_s + HOT_S:
                checker.look(changes=False)
                assert checker.behind_batches <= 2, "documents is older than two batches"
                assert land.is_running, land.log()
                if checker.looks % VERIFY_EVERY == 0:
                    verdict = compare(bucket.settings, str(land.folder))
                    assert verdict.is_equal, verdict.sentence
                    pending.append(verdict.pending)
                time.sleep(1.0)
            rate = (load.written - written) / (time.monotonic() - began_s)
        print(
            f"{checker.looks} looks, {rate:,.0f} sets/s, {len(land.batches)} batches, age of documents "
            f"p50 {quantiles(checker.ages_s, n=100)[49]:.1f} s, p99 {quantiles(checker.ages_s, n=100)[98]:.1f} s"
        )
        print(f"verify: equal {len(pending)} times, with {min(pending)} to {max(pending)} changes pending")
        assert rate > 4_500
        assert any(pending)
        bucket.close()
