"""Seeds in which consumers land the bucket as `headwater land` does, most of them under writers of hot keys."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import pytest

from headwater.sim.consumers import LandingMutant
from headwater.sim.run import SeedReport, run_seed
from headwater.sim.world import RunPlan
from headwater.store.vbuckets import Retention

SEEDS = (1, 2, 7, 16)
"""With drills, failovers, a landing with a limit on rows and one that lands to a target."""
MANY_SEEDS = range(300)
MUTANT_SEEDS = range(15, 115)
"""Any hundred would do. The first of these finds all mutants out, so the tests are quick."""
HOUR_S = 3600.0


def run_landing(seed: int, mutant: LandingMutant | None = None) -> SeedReport:
    return run_seed(seed, plan=RunPlan.landing(seed), mutant=mutant)


def counts_of_good(seeds: Iterable[int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    failed = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for report in pool.map(run_landing, seeds):
            counts.update(report.counts)
            if not report.is_good:
                failed[report.seed] = report.complaints[:3]
    assert not failed, failed
    return counts


def test_a_table_that_is_landed_is_the_bucket() -> None:
    counts = counts_of_good(SEEDS)
    assert counts["rows behind the plan"] > 0, "no snapshot went beyond its plan"
    assert counts["rollbacks consumed"] > 0, "nothing was ever rolled back"
    assert counts["kill consumer"] > 0, "no landing was ever killed"


@pytest.mark.soak
def test_many_tables_are_their_buckets() -> None:
    counts_of_good(MANY_SEEDS)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1])
def test_an_hour_of_hot_writes(seed: int) -> None:
    """Batches of two seconds, four documents that are rewritten ten times a second, and a fault every 15 seconds."""
    plan = replace(
        RunPlan.landing(seed),
        nodes=3,
        replicas=1,
        vbuckets=4,
        busy_s=HOUR_S,
        keys_per_writer=12,
        writers=1,
        pipelined=1,
        writes=int(2 * HOUR_S),
        consumers=0,
        landings=1,
        landing_every_s=(2.0,),
        hot_keys=4,
        hot_pause_s=0.1,
        fault_pause_s=15.0,
        fault_weights={
            "kill node": 1.0,
            "roll back": 2.0,
            "fail over": 1.0,
            "rebalance": 1.0,
            "kill consumer": 1.0,
            "cut": 0.5,
            "reset": 0.5,
        },
        # A minute of history: a drill goes back exactly, and what the judges have to read stays short.
        retention=Retention(history_s=60),
        compact_every_s=10.0,
        latency_s_max=0.005,
        disk_delay_s_max=0.002,
    )
    report = run_seed(seed, plan=plan)
    assert report.complaints == ()
    assert report.simulated_s > HOUR_S
    assert report.counts["batches landed"] > 1000
    assert report.counts["rows behind the plan"] > 100
    assert report.counts["rollbacks consumed"] > 10


@pytest.mark.parametrize(
    ("mutant", "complaints"),
    [
        (LandingMutant.DROPS_ROWS_BEHIND_PLAN, {"before the survey, at seqno", "is too old"}),
        (LandingMutant.REPEATS_ROWS_BEHIND_PLAN, {"is alive after"}),
        # And what that does to the documents.
        pytest.param(
            LandingMutant.GOES_BACK_TO_PLAN,
            {"goes into the middle of a snapshot", "and stored is"},
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_landing_that_does_it_wrong_is_found_out(mutant: LandingMutant, complaints: set[str]) -> None:
    missing = set(complaints)
    for seed in MUTANT_SEEDS:
        found = run_landing(seed, mutant).complaints
        missing -= {complaint for complaint in missing if any(complaint in one for one in found)}
        if not missing:
            return
    raise AssertionError(f"{mutant} is not found out by {missing}")


def test_the_simulation_loads_no_spark() -> None:
    program = "import sys, headwater.sim.run; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "headwater.landing.planning" in loaded
    assert not {"pyspark", "deltalake"} & set(loaded)
