"""`headwater health` of landings: by the address of their page and by their tables, with exit codes for monitoring."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headwater.cli import main
from headwater.cli.health import _report
from headwater.findings import Finding, Level
from headwater.http import TOKEN_VARIABLE
from headwater.lake.lake_look import LandingNote, keep_landing
from headwater.lake.location import Location
from headwater.lake_page.app import LakeState, PageAddress, serving_page
from support.lake_model import SmallLake

TOKEN = "a-token-of-some-length"


def health(*words: str) -> Result:
    return CliRunner().invoke(main, ["health", *words], env={"COLUMNS": "200"})


def note(*, ago_s: float = 0.0, **others: Any) -> LandingNote:
    now_s = time.time() - ago_s
    facts = {"source": "couchbase://h/shop", "bucket": "shop", "host": "here", "every_s": 5.0, "is_running": True}
    return LandingNote(**{"time_s": now_s, "started_s": now_s, "status": {"lag_s": 1.0}, **facts, **others})


ASIDE = {"set_aside": [{"name": "shop.orders", "reason": "broken", "hint": "Bring it back"}], "tables_set_aside": 3}
CASES: list[tuple[dict[str, Any], int, str]] = [
    ({}, 0, "ok: Healthy: the landing is running, "),
    ({"status": {"lag_s": 400.0}}, 3, "warning: The landing is 40"),
    ({"status": {"failures": 2, "failure": "no"}}, 3, "warning: The landing failed 2 times in a row, and retries"),
    ({"status": ASIDE}, 4, "shop.orders is set aside, and lacks changes that the others have: broken\n  Bring"),
    ({"status": ASIDE}, 4, "critical: 2 more tables set aside"),
    ({"status": {"catalog_failure": "it fails"}}, 3, "warning: It fails"),
    ({"is_running": False}, 4, "critical: The landing was stopped at"),
    ({"is_running": False, "every_s": None}, 0, "ok: Healthy: the landing has landed everything"),
    ({"is_running": False, "failure": "no bucket"}, 4, ": no bucket\n  Fix that. Start `headwater land` again"),
    ({"ago_s": 60.0}, 4, "critical: No sign of the landing since"),
]  # fmt: skip


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small = SmallLake(tmp_path_factory.mktemp("health") / "lake")
    small.write(0, "a")
    small.land()
    return small.directory


def test_a_lake_says_how_its_landing_is(lake: Path) -> None:
    unknown = health(str(lake))
    assert (unknown.exit_code, "there is no status file" in unknown.stdout) == (3, True), unknown.output
    for said, code, words in CASES:
        keep_landing(Location.of(str(lake)), note(**said))
        result = health(str(lake))
        assert (result.exit_code, words in result.stdout) == (code, True), result.output


def test_what_all_nodes_say_is_said_once() -> None:
    gone = Finding(check="nodes", level=Level.BAD, text="c is gone", do="Ask a")
    full = Finding(check="disk", level=Level.WARN, text="The disk is full", do="Free space")
    found = [("a", "", gone), ("b", "", replace(gone, do="Ask b")), ("b", "", full), ("b", "", replace(full, text="!"))]
    report = _report(found, of={"a", "b"}, well="", parts={})
    lines = ["critical: c is gone", "  Ask a", "warning: The disk is full (b)", "  Free space", "warning: ! (b)"]
    assert [*report.lines()] == lines


def test_a_page_says_it_too(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_landing(Location.of(str(lake)), note(is_running=False))
    state = LakeState(Location.of(str(lake)))
    with serving_page({"orders": state, "shop": state}, PageAddress.make("0", TOKEN)) as url:
        refused = health(url)
        assert (refused.exit_code, f"Set {TOKEN_VARIABLE}" in refused.stderr) == (1, True)
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        result = health("--json", url)
    found = json.loads(result.stdout)
    assert (result.exit_code, found["level"], found["parts"].keys()) == (4, "bad", {"orders", "shop"}), result.output
    [finding] = found["findings"]
    assert (finding["check"], finding["where"]) == ("running", [])
