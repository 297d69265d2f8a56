"""The two commands of the README, in a fresh clone: set-up, demo and all tests, which takes many minutes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "fresh-check"


@pytest.mark.soak
def test_a_fresh_clone_works() -> None:
    done = subprocess.run([SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-10_000:]
    assert "make demo: passed" in done.stdout
    assert "make test: passed" in done.stdout


def test_the_script_fails_where_a_command_fails(tmp_path: Path) -> None:
    """And it runs what is committed in the clone, with nothing left behind."""
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "Makefile").write_text("demo:\n\t@echo played in $$PWD\ntest:\n\t@exit 3\n")
    git = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([SCRIPT, repository], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode != 0
    assert f"played in {tmp_path}/headwater-fresh-" in done.stdout
    assert "make demo: passed" in done.stdout
    assert "make test: passed" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]
