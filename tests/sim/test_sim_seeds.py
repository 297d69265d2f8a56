"""Many seeds, as long as the time allows: `HEADWATER_SIM_S` says how many seconds. Which ones come first is fixed."""

from __future__ import annotations

import os
import time
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import count

import pytest

from headwater.sim.consumers import Mutant
from headwater.sim.run import SeedReport, run_seed

BUDGET_S = float(os.environ.get("HEADWATER_SIM_S", "10"))
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
