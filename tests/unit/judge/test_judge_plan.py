"""Plans of the judge: a seed decides everything, and the last step reaches every vbucket."""

from __future__ import annotations

import pytest

from headwater.errors import InvalidInput
from headwater.judge.plan import NODES_MAX, Shape, make_plan
from headwater.protocol.numbers import vbucket_of
from support.cases import case


def test_a_seed_decides_everything() -> None:
    assert make_plan(7, Shape()) == make_plan(7, Shape())
    assert make_plan(7, Shape()).steps != make_plan(8, Shape()).steps


def test_a_node_that_left_comes_back_before_another_leaves() -> None:
    actions: set[str] = set()
    for seed in range(50):
        away = None
        for step in make_plan(seed, Shape(restarts=seed % 2 == 0)).steps:
            actions.add(step.action)
            if step.action in ("fail over", "move"):
                assert away is None
                away = step.node
            elif step.action == "bring back":
                assert away == step.node
                away = None
            elif step.action in ("cut", "kill", "silence"):
                assert step.node != away
        assert away is None, "the cluster is whole at the end"
    assert actions == {"write", "roll back", "fail over", "bring back", "move", "cut", "kill", "silence", "restart"}


def test_the_last_step_writes_to_every_vbucket() -> None:
    plan = make_plan(1, Shape(vbuckets=64))
    assert {int(vbucket_of(write.key.encode(), 64)) for write in plan.steps[-1].writes} == set(range(64))
    written = [write for step in plan.steps for write in (*step.writes, *step.after)]
    assert {write.key for write in written} <= set(plan.keys())
    assert len({write.number for write in (*plan.first, *written)}) == len(plan.first) + len(written)


@case({"nodes": 1}, "nodes is 1. Give 2 to 5")
@case({"nodes": NODES_MAX + 1}, "Give 2 to 5")
@case({"documents": 0}, "documents is 0")
@case({"vbuckets": 12}, "power of two")
def test_a_shape_has_limits(given: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        Shape(**given)


def test_a_shape_is_written_as_options() -> None:
    assert Shape().options() == ""
    assert Shape(nodes=2, steps=4).options() == "--nodes 2 --steps 4 "
    assert Shape(restarts=True).options() == "--restarts "
