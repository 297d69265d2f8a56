"""`make demo`, small: it ends with equal tables, and leaves nothing behind that it should not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXIT_INTERRUPTED = 130
RUN_S_MAX = 600.0
"""Far beyond what it takes, also where the machine is busy."""


@contextmanager
def running_demo(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The demo with its temporary folder in `folder`. A failing test ends it with all that it has started."""
    environment = {
        **os.environ,
        "TMPDIR": str(folder),
        "COLUMNS": "400",
        "PYTHONUNBUFFERED": "1",
        "HEADWATER_DEMO_DOCUMENTS": "3000",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "demo", *options],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        for pid in processes_of(folder):
            os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> list[int]:
    """The processes that have the folder in their command line or in their environment."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except (OSError, ValueError):
            continue
        if str(folder).encode() in told:
            found.append(int(process.name))
    return found


def wait_until_gone(folder: Path) -> None:
    """Java ends a moment after its parent."""
    deadline_s = time.monotonic() + RUN_S_MAX
    while processes_of(folder):
        assert time.monotonic() < deadline_s, processes_of(folder)
        time.sleep(0.1)


@pytest.mark.soak
def test_the_demo_ends_with_equal_tables(tmp_path: Path) -> None:
    with running_demo(tmp_path) as demo:
        told, _ = demo.communicate(timeout=RUN_S_MAX)
        assert demo.returncode == 0, told
        wait_until_gone(tmp_path)
    assert re.search(r"Equal: [\d,]+ documents in 3 collections", told), told
    undone = re.search(r"(\d+) rollbacks undone, ([\d,]+) changes marked void", told)
    assert undone is not None, told
    assert 0 < int(undone[1]) <= 512, "the vbuckets of one node of two"
    assert "512 vbuckets, as the parts of a bucket are called, are active on the second node" in told
    (folder,) = tmp_path.glob("headwater-*")
    assert f"The tables lie in {folder}/lake" in told
    assert {path.name for path in (folder / "lake" / "documents").iterdir()} >= {"shop.customers", "shop.orders"}


@pytest.mark.soak
@pytest.mark.parametrize("scene", ["Importing", "Spark", "An application", "kill -9"])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, scene: str) -> None:
    with running_demo(tmp_path) as demo:
        assert demo.stdout is not None
        told = ""
        while scene not in told:
            line = demo.stdout.readline()
            assert line, told
            told += line
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=RUN_S_MAX)
        assert demo.returncode == EXIT_INTERRUPTED, told + rest
        assert "interrupted" in rest
        assert "Traceback" not in rest
        wait_until_gone(tmp_path)
    assert list(tmp_path.glob("headwater-*")) == []


@pytest.mark.parametrize(("is_equal", "exit_code"), [(True, 0), (False, 1)])
def test_the_exit_code_tells_whether_the_tables_are_equal(tmp_path: Path, is_equal: bool, exit_code: int) -> None:
    told = "headwater serve" if is_equal else None
    code = f"import demo.scenes, demo.__main__ as m; demo.scenes.Demo.play = lambda *_: {told!r}; m.main(['--remove'])"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == exit_code, done.stderr
    # What is not equal can be looked at.
    assert len(list(tmp_path.glob("headwater-demo-*"))) == exit_code
