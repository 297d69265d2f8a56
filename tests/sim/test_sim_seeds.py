"""Many seeds, as long as the time allows: `HEADWATER_SIM_S` says how many seconds. Which ones come first is fixed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count

import pytest

from headwater.kernels.machine_code import compile_kernels
from headwater.node.bucket_lifecycle import KERNEL_PACKAGES
from headwater.sim.consumers import Mutant
from headwater.sim.run import SeedReport, run_seed
from headwater.sim.world import RunPlan
from support.machine import loaded_kernels

BUDGET_S = float(os.environ.get("HEADWATER_SIM_S", "4"))
MUTANT_SEEDS = 100


def reports_within(budget_s: float, jobs: int) -> list[SeedReport]:
    seeds, reports = count(), []
    deadline_s = time.monotonic() + budget_s
    with ProcessPoolExecutor(jobs) as pool:
        running: set[Future[SeedReport]] = set()
        while running or time.monotonic() < deadline_s:
            while len(running) < 2 * jobs and time.monotonic() < deadline_s:
                running.add(pool.submit(run_seed, next(seeds)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            reports += [future.result() for future in done]
    return reports


def test_seeds_are_good(capsys):
    jobs = os.cpu_count() or 1
    began_s = time.monotonic()
    reports = reports_within(BUDGET_S, jobs)
    minutes = (time.monotonic() - began_s) / 60
    with capsys.disabled():
        print(f"\n{len(reports)} seeds, {len(reports) / minutes:.0f} a minute on {jobs} cores")
    failed = {report.seed: report.complaints[:3] for report in reports if not report.is_good}
    assert not failed, failed
    assert sum(report.counts.get("rollbacks consumed", 0) for report in reports) > 0, "nothing was ever rolled back"


@pytest.mark.parametrize(
    "mutant",
    [
        # It takes the most seeds to find.
        pytest.param(mutant, marks=[pytest.mark.soak] if mutant is Mutant.FORGETS_SNAPSHOT_END else [])
        for mutant in Mutant
    ],
)
def test_a_consumer_that_does_it_wrong_is_found_out(mutant):
    with ProcessPoolExecutor() as pool:
        for report in pool.map(_run_mutant, [mutant] * MUTANT_SEEDS, range(MUTANT_SEEDS)):
            if not report.is_good:
                pool.shutdown(wait=False, cancel_futures=True)
                return
    pytest.fail(f"{MUTANT_SEEDS} seeds have not found out that a consumer {mutant}")


def _run_mutant(mutant: Mutant, seed: int) -> SeedReport:
    return run_seed(seed, mutant=mutant)


# --- seeds that once showed a fault, each by its name. In all of them nodes crash, compact and roll back --------------

FAULTS = {
    "a stream reads on while versions are being compacted away": 10354,
    "the same, with a stream that ends at what is dropped": 10502,
    "a vbucket is rolled back to nothing after the last write": 10015,
    "a copy is at the right seqno of another branch": 10362,
}


@pytest.mark.parametrize("seed", FAULTS.values(), ids=FAULTS.keys())
def test_a_seed_that_once_failed(seed: int) -> None:
    # A node has all its kernels when it is ready. Its consumers are clients.
    compile_kernels(*KERNEL_PACKAGES, "headwater.protocol", "headwater.client")
    before = loaded_kernels()
    assert run_seed(seed, plan=RunPlan.mixture(seed)).complaints == ()
    assert loaded_kernels() == before


# --- A seed does the same every time, in every process: else a failure could not be looked at -------------------------


def digest(seed: int, hash_seed: str) -> str:
    report = subprocess.run(
        [sys.executable, "-m", "headwater", "sim", "--seed", str(seed), "--json"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    return str(json.loads(report.stdout)["digest"])


# With clusters, failovers, rollbacks and landings among them.
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (3, 7, 10, 17))])
def test_two_processes_with_other_hashes_run_a_seed_the_same_way(seed: int) -> None:
    assert digest(seed, "1") == digest(seed, "2") != run_seed(5).digest
