"""The wheel in an empty environment outside of the clone: every command of the README, a notebook, the plug-in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check-wheel"


@pytest.mark.soak
def test_the_wheel_works_outside_of_the_clone() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-10_000:]
    for step in ("load", "tail", "land", "verify", "notebook", "pytest plug-in"):
        assert f"check-wheel: {step}: " in done.stdout
