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
from demo.story import LOST, PAID, README, WRITTEN, Story, written_into

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
            about = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except (OSError, ValueError):
            continue
        if str(folder).encode() in about:
            found.append(int(process.name))
    return found


def wait_until_gone(folder: Path) -> None:
    """Java ends a moment after its parent."""
    deadline_s = time.monotonic() + RUN_S_MAX
    while processes_of(folder):
        assert time.monotonic() < deadline_s, processes_of(folder)
        time.sleep(0.1)


@pytest.mark.soak
def test_the_demo_follows_one_order_and_ends_with_equal_tables(tmp_path: Path) -> None:
    with running_demo(tmp_path) as demo:
        printed, _ = demo.communicate(timeout=RUN_S_MAX)
        assert demo.returncode == 0, printed
        wait_until_gone(tmp_path)
    assert re.search(r"Equal: [\d,]+ documents in 1 collection", printed), printed
    assert [line for line in story_of_readme().splitlines() if f"    {line}\n" not in printed] == [], printed
    numbers = re.search(
        r"([\d,]+) changes landed = ([\d,]+) that hold \+ ([\d,]+) that the failover took back", printed
    )
    assert numbers is not None, printed
    landed, hold, taken_back = (int(number.replace(",", "")) for number in numbers.groups())
    assert landed == hold + taken_back
    assert taken_back > 0
    wrong = re.search(r"Wrong rows now: 0 in Headwater's table, ([\d,]+) in that of the connector", printed)
    assert wrong is not None, printed
    assert wrong[1] != "0"
    assert re.search(r"^ +order::1 +open ", printed, re.M), "the table itself"
    (folder,) = tmp_path.glob("headwater-*")
    assert f"headwater ui {folder}/lake" in printed
    assert {path.name for path in (folder / "lake" / "documents").iterdir()} == {"shop.orders"}


def story_of_readme() -> str:
    """What README opens with: `scripts/demo --readme` has written it."""
    place = re.search(r"<!-- written by: scripts/demo --readme -->\n\n```text\n(.*?)\n```\n", README.read_text(), re.S)
    assert place is not None
    return place[1]


def test_readme_opens_with_the_story_of_the_demo() -> None:
    """Its words are those of the demo; that they are true is seen by the test above, which runs it."""
    lines = story_of_readme().splitlines()
    key = lines[0].split()[0]
    cells = [tuple(re.split(r" {3,}", line)) for line in lines[1:]]
    assert [row[0] for row in cells] == [WRITTEN, PAID, LOST]
    assert cells[-1][1:] == ("open", "open", "paid"), "the bucket, Headwater's table, a connector without rollbacks"
    assert Story(key, cells).to_text() == "\n".join(lines)
    assert written_into(README.read_text(), Story(key, cells)) == README.read_text()


@pytest.mark.soak
@pytest.mark.parametrize("scene", ["Importing", "Two nodes", "The orders have landed", "kill -9"])
def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, scene: str) -> None:
    with running_demo(tmp_path) as demo:
        assert demo.stdout is not None
        printed = ""
        while scene not in printed:
            line = demo.stdout.readline()
            assert line, printed
            printed += line
        demo.send_signal(signal.SIGINT)
        rest, _ = demo.communicate(timeout=RUN_S_MAX)
        assert demo.returncode == EXIT_INTERRUPTED, printed + rest
        assert "interrupted" in rest
        assert "Traceback" not in rest
        wait_until_gone(tmp_path)
    assert list(tmp_path.glob("headwater-*")) == []


@pytest.mark.parametrize(("is_equal", "exit_code"), [(True, 0), (False, 1)])
def test_the_exit_code_tells_whether_the_tables_are_equal(tmp_path: Path, is_equal: bool, exit_code: int) -> None:
    played = "demo.scenes.Played(None, 'headwater serve')" if is_equal else None
    code = f"import demo.scenes, demo.__main__ as m; demo.scenes.Demo.play = lambda *_: {played}; m.main(['--remove'])"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=False)
    assert done.returncode == exit_code, done.stderr
    # What is not equal can be looked at.
    assert len(list(tmp_path.glob("headwater-demo-*"))) == exit_code
