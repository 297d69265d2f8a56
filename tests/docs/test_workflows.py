"""Workflows run targets of the Makefile that exist, and use files of the repository that exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"


def steps() -> list[dict[str, Any]]:
    files = [yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yml")]
    return [step for file in files for job in file["jobs"].values() for step in [job, *job.get("steps", [])]]


def test_every_command_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"].split() for step in steps() if "run" in step and "name" not in step]
    assert {command[0] for command in commands} == {"make"}
    assert {name for command in commands for name in command[1:]} <= targets


def test_actions_and_workflows_of_the_repository_exist() -> None:
    ours = [step["uses"] for step in steps() if step.get("uses", "").startswith("./")]
    assert ours
    for path in map(ROOT.joinpath, ours):
        assert path.is_file() or (path / "action.yml").is_file()
    for path in (ROOT / ".github").rglob("*.yml"):
        yaml.safe_load(path.read_text())


def test_every_tested_version_is_named_in_the_package() -> None:
    [tested] = [step["strategy"]["matrix"]["python"] for step in steps() if "strategy" in step]
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text())
    assert tested == named
