"""Nodes that do one thing wrong on purpose: the checkers must notice."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest

from headwater.node import durability
from headwater.node.consumer import connection
from headwater.sim.run import run_seed
from headwater.sim.world import RunPlan

SEEDS_MAX = 100

pytestmark = pytest.mark.soak


def plans(*, writes: str | None = None, fault: str) -> Iterator[RunPlan]:
    """Those of the first seeds in which it matters."""
    for seed in range(1000):
        plan = RunPlan.draw(seed)
        if plan.replicas and plan.fault_weights[fault] and (writes is None or plan.write_weights[writes]):
            yield plan


def is_found_out(candidates: Iterator[RunPlan]) -> bool:
    return any(not run_seed(plan.seed, plan=plan).is_good for plan in islice(candidates, SEEDS_MAX))


def test_a_write_that_is_committed_before_a_majority_has_it(monkeypatch):
    monkeypatch.setattr(durability, "majority", lambda chain: 1)
    candidates = (plan for plan in plans(writes="majority", fault="fail over") if not plan.fault_weights["roll back"])
    assert is_found_out(candidates)


def test_a_copy_that_does_not_go_back_when_it_has_to(monkeypatch):
    monkeypatch.setattr(connection, "take_back", lambda service, vbucket, to_seqno: to_seqno)
    assert is_found_out(plans(fault="roll back"))
