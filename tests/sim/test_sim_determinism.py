"""A seed does the same every time, in every process: else a failure could not be looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest


@cache
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
@pytest.mark.parametrize("seed", [7, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (3, 10, 17))])
def test_two_processes_with_other_hashes_run_a_seed_the_same_way(seed: int) -> None:
    assert digest(seed, "1") == digest(seed, "2")


def test_other_seeds_are_other_runs() -> None:
    assert digest(7, "1") != digest(5, "1")
