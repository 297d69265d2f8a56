"""After `headwater kernels` nothing has to be compiled any more, whatever is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.node_process import PASSWORD, USER, NodeProcess


class Headwater:
    """The command, with a folder for machine code that was empty."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, work: Path) -> None:
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(work / "kernels"))
        monkeypatch.setenv("HEADWATER_USER", USER)
        monkeypatch.setenv("HEADWATER_PASSWORD", PASSWORD)
        monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
        self._work = work

    def __call__(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "headwater", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=self._work, env=os.environ)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.mark.soak
def test_nothing_is_compiled_after_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    headwater = Headwater(monkeypatch, tmp_path)
    folder = Path(json.loads(headwater("kernels", "--json"))["folder"])
    compiled = {path.name for path in folder.iterdir()}
    with NodeProcess(tmp_path / "data").start() as node:
        url = f"couchbase://{node.address}/default"
        (tmp_path / "hotels.csv").write_text("id,city\n1,Graz\n2,Lyon\n")
        headwater("load", url, "--generate", "20000", "--expiry", "3600")
        headwater("load", url, "hotels.csv", "--key", "hotel::{id}")
        headwater("tail", url, "--to", "now")
        headwater("tail", url, "--to", "now", "--json")
        headwater("export", url, "--into", "out.jsonl")
        headwater("load", url, "out.jsonl")
        headwater("land", url, "--into", "lake", "--once")
        headwater("verify", url, "lake")
        node.kill()
        node.start()
    assert {path.name for path in folder.iterdir()} - compiled == set()
