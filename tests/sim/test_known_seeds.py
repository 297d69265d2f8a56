"""Seeds that once showed a fault, each by its name."""

from __future__ import annotations

import pytest

from headwater.sim.plan import RunPlan
from headwater.sim.run import run_seed

FAULTS = {
    "a stream reads on while versions are being compacted away": 10354,
    "the same, with a stream that ends at what is dropped": 10502,
    "a vbucket is rolled back to nothing after the last write": 10015,
    "a copy is at the right seqno of another branch": 10362,
}


@pytest.mark.parametrize("seed", FAULTS.values(), ids=FAULTS.keys())
def test_a_seed_that_once_failed(seed: int) -> None:
    assert run_seed(seed, plan=RunPlan.mixture(seed)).complaints == ()
