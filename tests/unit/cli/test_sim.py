"""`headwater sim`: what it tells, and its exit code."""

from __future__ import annotations

import json

from click.testing import CliRunner

from headwater.cli.sim import sim

GOOD_SEED = 1


def test_a_good_seed_is_told_and_traced():
    result = CliRunner().invoke(sim, ["--seed", str(GOOD_SEED), "--trace"])
    assert result.exit_code == 0, result.output
    assert f"seed {GOOD_SEED} is good" in result.output
    assert "node-1.1" in result.output


def test_a_failing_seed_is_named_and_ends_with_code_1():
    options = ["--seed", "0", "--seeds", "2", "--jobs", "1", "--mutant", "drops-rollbacks"]
    result = CliRunner().invoke(sim, options)
    assert result.exit_code == 1, result.output
    assert "replay one with: headwater sim --seed" in result.output


def test_json_has_a_line_for_each_seed():
    result = CliRunner().invoke(sim, ["--seed", str(GOOD_SEED), "--json"])
    (report,) = [json.loads(line) for line in result.output.splitlines()]
    assert (report["seed"], report["good"], report["complaints"]) == (GOOD_SEED, True, [])


def test_a_trace_is_for_one_seed():
    result = CliRunner().invoke(sim, ["--seeds", "2", "--trace"])
    assert result.exit_code == 2
    assert "--trace is for one seed" in result.output
