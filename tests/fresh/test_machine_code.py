"""Compiled kernels in new interpreters: kept, shared and renewed."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import headwater
from support.node_process import PASSWORD, USER, NodeProcess

CALL = """
import sys
import numpy as np
from headwater.transfer.set_frames import set_opaques

set_opaques(np.zeros(24, dtype=np.uint8), np.zeros(1, dtype=np.int64), 7)
print("compiled" if "numba" in sys.modules else "loaded")
"""


def how_called(source: Path, kept: Path) -> str:
    """Whether a kernel was compiled for its call, or its code was kept: numba is for compiling alone."""
    environment = os.environ | {"PYTHONPATH": str(source), "NUMBA_CACHE_DIR": str(kept)}
    called = subprocess.run([sys.executable, "-c", CALL], env=environment, capture_output=True, text=True, check=True)
    return called.stdout.strip()


def copied_to(folder: Path) -> Path:
    shutil.copytree(Path(headwater.__file__).parent, folder / "headwater", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def test_code_that_was_compiled_in_one_place_serves_in_another(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    assert how_called(copied_to(tmp_path / "here"), kept) == "compiled"
    assert how_called(copied_to(tmp_path / "there"), kept) == "loaded"


def test_no_code_serves_after_a_kernel_has_changed(tmp_path: Path) -> None:
    kept, source = tmp_path / "kept", copied_to(tmp_path / "here")
    assert how_called(source, kept) == "compiled"
    with (source / "headwater/store/search.py").open("a") as file:
        file.write("# another one might call this one\n")
    assert how_called(source, kept) == "compiled"


DAY_S = 24 * 60 * 60


def folder_used(kept: Path, name: str, *, ago_s: float) -> Path:
    folder = kept / "headwater" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "code.nbc").touch()
    used_s = time.time() - ago_s
    os.utime(folder, (used_s, used_s))
    return folder


def own_folder(kept: Path, code: str = "") -> Path:
    """The folder that a process chooses, after which it runs `code`."""
    ask = f"from headwater.kernels.machine_code import code_folder\nprint(code_folder())\n{code}"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(kept)}
    asked = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    return Path(asked.stdout.splitlines()[0])


def test_folders_that_are_in_use_stay(tmp_path: Path) -> None:
    used = [folder_used(tmp_path, f"used-{number}", ago_s=DAY_S / 2 + number) for number in range(6)]
    old = [folder_used(tmp_path, f"old-{number}", ago_s=DAY_S * 2 + number) for number in range(2)]
    own = own_folder(tmp_path)
    assert own.exists()
    assert all(folder.exists() for folder in used)
    assert not any(folder.exists() for folder in old)


def test_a_few_old_folders_stay(tmp_path: Path) -> None:
    old = [folder_used(tmp_path, f"old-{number}", ago_s=DAY_S * (2 + number)) for number in range(5)]
    own_folder(tmp_path)
    assert [folder.exists() for folder in old] == [True, True, True, False, False]


def test_to_choose_a_folder_is_to_use_it(tmp_path: Path) -> None:
    own = own_folder(tmp_path)
    long_ago_s = time.time() - DAY_S * 9
    os.utime(own, (long_ago_s, long_ago_s))
    assert own_folder(tmp_path) == own
    assert own.stat().st_mtime > time.time() - DAY_S


def test_the_folder_is_private(tmp_path: Path) -> None:
    own = own_folder(tmp_path)
    own.chmod(0o755)
    assert own_folder(tmp_path) == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    # Where others could write, they may have written.
    own.chmod(0o777)
    assert own_folder(tmp_path) != own


def test_a_folder_that_was_removed_comes_back_private(tmp_path: Path) -> None:
    own = own_folder(tmp_path, f"code_folder().rmdir()\n{CALL}")
    assert any(own.iterdir())
    assert stat.S_IMODE(own.stat().st_mode) == 0o700


def test_the_first_compilation_is_told_once_and_loading_is_not(tmp_path: Path) -> None:
    tell = "from headwater.phrases import report_first_compile\nreport_first_compile(lambda: print('compiling'))\n"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def told() -> list[str]:
        code = [sys.executable, "-c", tell + CALL]
        return subprocess.run(code, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    assert told() == ["compiling", "compiled"]
    assert told() == ["loaded"]


# --- after `headwater kernels` nothing has to be compiled any more, whatever is done ----------------------------------


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
