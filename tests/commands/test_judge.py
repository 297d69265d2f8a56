"""`headwater judge`: real clusters, a right consumer and wrong ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from headwater.cli import main
from headwater.judge.plan import Shape, make_plan
from headwater.judge.run import Outcome, Verdict, judge_seed
from headwater.testing.nursery import Nursery
from support.cases import case

EXAMPLES = Path(__file__).parents[2] / "examples" / "judge"
SMALL = Shape(nodes=2, vbuckets=4, documents=40, steps=2)


def judged(
    nursery: Nursery, folder: Path, *command: str, seed: int, patience_s: float = 10.0, shape: Shape = SMALL
) -> Verdict:
    plan = make_plan(seed, shape)
    return judge_seed(nursery, folder, plan, [sys.executable, *command], patience_s=patience_s)


def test_a_right_consumer_is_equal(nursery: Nursery, tmp_path: Path) -> None:
    shape = replace(SMALL, steps=4, restarts=True)
    verdict = judged(nursery, tmp_path, str(EXAMPLES / "consumer.py"), seed=5, shape=shape)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.EQUAL, 0), verdict.lines()
    assert verdict.counts["vbuckets_rolled_back"] > 0
    assert verdict.counts["rollbacks"] > 0


@pytest.mark.parametrize(("mistake", "seed"), [("ignores-rollbacks", 3), ("newest-vbuuid", 4), ("snapshot-end", 1)])
def test_a_wrong_consumer_differs(nursery: Nursery, tmp_path: Path, mistake: str, seed: int) -> None:
    verdict = judged(nursery, tmp_path, str(EXAMPLES / "wrong.py"), mistake, seed=seed, patience_s=4.0)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.DIFFERS, 1), verdict.lines()
    assert verdict.first is not None
    assert f"in vbucket {verdict.first.vbucket}: the bucket has " in verdict.lines()[1]
    assert "step" in verdict.before


@case(
    "import sys; sys.exit('no such host')",
    "exit code 1 before the judge was done; its standard error ends with:\nno such host",
)
@case("print('{\"op\": 7}', flush=True); import time; time.sleep(60)", 'line 1 of the consumer: "op" is 7')
def test_a_consumer_that_ends_is_reported(nursery: Nursery, tmp_path: Path, program: str, message: str) -> None:
    folder = tmp_path / str(time.monotonic_ns())
    folder.mkdir()
    verdict = judged(nursery, folder, "-c", program, seed=1)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.CRASHED, 3)
    assert message in verdict.reason


def test_a_hanging_consumer_is_stuck_and_killed_with_its_children(nursery: Nursery, tmp_path: Path) -> None:
    program = """if 1:
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = os.fork()
        if child:
            open(os.environ["HEADWATER_STATE"] + "/child", "w").write(str(child))
            print('{"op": "set", "key": "judge::0000", "seqno": 1}', flush=True)
        time.sleep(600)
    """
    verdict = judged(nursery, tmp_path, "-c", program, seed=1, patience_s=0.2, shape=replace(SMALL, steps=0))
    assert (verdict.outcome, verdict.exit_code) == (Outcome.STUCK, 3)
    child = int((tmp_path / "state" / "child").read_text())
    deadline_s = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_lines_come_by_http() -> None:
    program = """if 1:
        import os
        from urllib.request import urlopen
        for body in (b'{"op": "set"}', b'{"op": "delete"}\\n{"op": "rollback"}\\n'):
            assert urlopen(os.environ["JUDGE_URL"], body).status == 204
        raise SystemExit(7)
    """
    command = [sys.executable, str(EXAMPLES / "http_lines.py"), sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout.splitlines()) == (
        7, ['{"op": "set"}', '{"op": "delete"}', '{"op": "rollback"}']
    ), ended.stderr  # fmt: skip


@case(["--seeds", "2"], 2, "Give the command of the consumer behind --")
@case(["--", "no-such-program"], 2, "There is no program 'no-such-program'")
@case(["--nodes", "9", "--", "true"], 2, "Give 2 to 5")
@case(["--seeds", "2", "--keep", "OLD", "--", "true"], 2, "has seed-2 of an earlier run")
@case(["--plan", "--seed", "5"], 0, "seed 5: start: ")
def test_the_command_line(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    (tmp_path / "seed-2").mkdir(exist_ok=True)
    result = CliRunner().invoke(main, ["judge", *(part.replace("OLD", str(tmp_path)) for part in arguments)])
    assert result.exit_code == code, result.output
    assert message in result.output


def test_seeds_are_reported_as_json_and_bad_ones_are_kept(tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The first run is right, the second one has ended before it has read anything.
    program = f"mkdir {tmp_path}/once && exec headwater tail '{{url}}' --json; echo twice"
    options = ["--json", "--seeds", "2", "--nodes", "2", "--steps", "0", "--keep", str(tmp_path / "kept")]
    result = CliRunner(env={"PATH": path}).invoke(main, ["judge", *options, "--", "sh", "-c", program])
    assert result.exit_code == 3, result.output
    verdicts = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(one["seed"], one["outcome"], one["first"]) for one in verdicts] == [
        (1, "equal", None),
        (2, "crashed", None),
    ]
    assert [folder.name for folder in (tmp_path / "kept").iterdir()] == ["seed-2"]
    assert (tmp_path / "kept" / "seed-2" / "consumer.out").read_text() == "twice\n"
    assert (tmp_path / "kept" / "seed-2" / "node-0" / "node.log").exists()
