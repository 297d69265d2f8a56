"""The two commands of the README, in a fresh clone: set-up, demo and all tests, which takes many minutes."""

from __future__ import annotations

import os
import re
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


def test_both_times_are_printed_at_the_end(tmp_path: Path) -> None:
    done = check(repository_with("demo:\n\t@echo played\ntest:\n\t@echo tested\n", tmp_path), tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"fresh-check: a fresh clone works\n"
        r"fresh-check: make demo: passed in \d+ s\nfresh-check: make test: passed in \d+ s\n",
        "".join(done.stdout.splitlines(keepends=True)[-3:]),
    )


def test_the_script_fails_where_a_command_fails(tmp_path: Path) -> None:
    """And it runs what is committed in the clone, with nothing left behind."""
    done = check(repository_with("demo:\n\t@echo played in $$PWD\ntest:\n\t@exit 3\n", tmp_path), tmp_path)
    assert done.returncode != 0
    assert f"played in {tmp_path}/headwater-fresh-" in done.stdout
    assert "make demo: passed" in done.stdout
    assert "make test: passed" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


def repository_with(makefile: str, folder: Path) -> Path:
    repository = folder / "repository"
    repository.mkdir()
    (repository / "Makefile").write_text(makefile)
    git = ["git", "-C", str(repository), "-c", "user.name=x", "-c", "user.email=x@example.com"]
    for arguments in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    return repository


def check(repository: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.run([SCRIPT, repository], capture_output=True, text=True, check=False, env=environment)
