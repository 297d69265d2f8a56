"""A seed does the same every time, in every process: else a failure could not be looked at."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

SEEDS = (3, 7, 10, 17)
"""With clusters, failovers, rollbacks and landings among them."""


@cache
def digests(hash_seed: str) -> list[str]:
    command = [sys.executable, "-m", "headwater", "sim", "--seed", "{}", "--json"]
    reports = [
        subprocess.run(
            [part.format(seed) for part in command],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=False,
        )
        for seed in SEEDS
    ]
    return [json.loads(report.stdout)["digest"] for report in reports]


def test_two_processes_with_other_hashes_run_a_seed_the_same_way():
    assert digests("1") == digests("2")


def test_other_seeds_are_other_runs():
    assert len(set(digests("1"))) == len(SEEDS)
