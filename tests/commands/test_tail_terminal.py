"""`headwater tail` on a terminal: the line with the lag, colours, and what is not for terminals."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.commands import END_S_MAX, TailedBucket, serving_buckets

COUNT = 40
COLUMNS = 100
ERASE = "\r\x1b[2K"
CODES = re.compile("\x1b\\[[0-9;]*m")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TailedBucket]:
    with serving_buckets(tmp_path_factory) as node:
        bucket = TailedBucket(node, "default")
        bucket.fill(COUNT)
        yield bucket


class Terminal:
    """A terminal of its own; what is shown on it is read until the command closes it or `until` has come."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        termios.tcsetwinsize(self.theirs, (24, COLUMNS))
        self.shown = b""

    def close_theirs(self) -> None:
        os.close(self.theirs)

    def read(self, until: bytes | None = None) -> str:
        while until is None or until not in self.shown:
            try:
                self.shown += os.read(self._ours, 65536)
            except OSError:  # nobody has it open any more
                assert until is None, self.shown
                break
        return self.shown.decode()

    def close(self) -> None:
        os.close(self._ours)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    opened.close()


TERM = {"TERM": "xterm-256color", "NO_COLOR": ""}


def test_the_lag_is_shown_while_output_goes_to_a_file(bucket: TailedBucket, terminal: Terminal, tmp_path: Path) -> None:
    with (
        (tmp_path / "changes").open("wb") as changes,
        bucket.start("--json", stdout=changes, stderr=terminal.theirs, env=TERM) as process,
    ):
        terminal.close_theirs()
        terminal.read(until=b"%d changes, " % COUNT)
        process.send_signal(signal.SIGINT)
        shown = terminal.read()
    assert len((tmp_path / "changes").read_bytes().splitlines()) == COUNT
    assert process.wait(END_S_MAX) == 130
    assert re.search(r"\d+ changes, [\d,]+/s  lag [\d,?]+  rollbacks 0  reconnects 0", CODES.sub("", shown))
    after = CODES.sub("", shown.rpartition(ERASE)[2])
    assert after.startswith(f"Interrupted after {COUNT} changes. To resume from there:"), "the line is gone"


def test_changes_stand_above_the_line(bucket: TailedBucket, terminal: Terminal) -> None:
    with bucket.start(stdin=terminal.theirs, stdout=terminal.theirs, stderr=terminal.theirs, env=TERM) as process:
        terminal.close_theirs()
        terminal.read(until=b"%d changes, " % COUNT)
        process.send_signal(signal.SIGINT)
        shown = terminal.read()
    assert process.wait(END_S_MAX) == 130
    rows = [CODES.sub("", row).rpartition(ERASE)[2] for row in shown.split("\r\n")]
    changes = [row for row in rows if "mutation" in row]
    assert len(changes) == COUNT
    assert all(len(row) <= COLUMNS and row.endswith("…") for row in changes)
    assert not any("lag" in row for row in rows), "no change is on a row with it"
    assert "\x1b[32mmutation" in shown


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminals_without_colours(bucket: TailedBucket, terminal: Terminal, variables: dict[str, str]) -> None:
    options = ("--to", "now", "--quiet")
    with bucket.start(*options, stdout=terminal.theirs, stderr=terminal.theirs, env={**TERM, **variables}) as process:
        terminal.close_theirs()
        shown = terminal.read()
    assert process.returncode == 0
    assert shown.count("mutation") == COUNT
    assert "\x1b" not in shown


def test_no_line_where_a_pipes_reader_may_write_to_the_terminal(bucket: TailedBucket, terminal: Terminal) -> None:
    """`tail | head` would have it in front of the first change."""
    with bucket.start("--json", stdout=subprocess.PIPE, stderr=terminal.theirs, env=TERM) as process:
        terminal.close_theirs()
        assert process.stdout is not None
        for _ in range(COUNT):
            process.stdout.readline()
        process.send_signal(signal.SIGINT)
        shown = terminal.read()
    assert process.wait(END_S_MAX) == 130
    assert shown.startswith(f"Interrupted after {COUNT} changes.")


@pytest.mark.parametrize(("options", "variables"), [(("--quiet",), {}), ((), {"TERM": "dumb"})])
def test_no_line(bucket: TailedBucket, terminal: Terminal, options: tuple[str, ...], variables: dict[str, str]) -> None:
    how = {"stdout": subprocess.DEVNULL, "stderr": terminal.theirs, "env": {**TERM, **variables}}
    with bucket.start("--to", "now", *options, **how) as process:
        terminal.close_theirs()
        shown = terminal.read()
    assert (process.returncode, shown) == (0, "")


def test_arrow_is_not_for_terminals(bucket: TailedBucket, terminal: Terminal) -> None:
    with bucket.start("--format", "arrow", stdout=terminal.theirs, stderr=subprocess.PIPE, env=TERM) as process:
        terminal.close_theirs()
        said = process.stderr.read().decode()
    assert process.returncode == 1
    assert said.startswith("Error: Arrow can't be written to a terminal. Send it to a file")
