"""The command `headwater`, run as a user runs it: a node that goes on, and commands that end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USER, PASSWORD, BUCKET = "demo", "demo-password", "default"
STOP_S_MAX = 20.0
_COMMAND = [sys.executable, "-m", "headwater"]


class CommandFailed(Exception):
    """A command has ended with another exit code than 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node that is running."""

    url: str
    """Of its bucket."""
    data: Path


@contextmanager
def running_node(data: Path) -> Iterator[Node]:
    arguments = ["serve", "--data", str(data), "--port", "0", "--http-port", "0", "--json"]
    with data.with_name("node.log").open("w") as log, started([*_COMMAND, *arguments], stderr=log) as process:
        assert process.stdout is not None
        ready = process.stdout.readline()
        if not ready:
            raise CommandFailed(f"the node did not start: {Path(log.name).read_text().strip()}")
        yield Node(url=f"{json.loads(ready)['ready']}/{BUCKET}", data=data)


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended, whatever happens. Ctrl-C on the terminal is not for it, but for whoever ends it."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=_environment(), start_new_session=True, **options
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def headwater(*arguments: str) -> str:
    """Run a command to its end. Returns what it has printed."""
    done = _run(*arguments)
    if done.returncode:
        raise CommandFailed(f"headwater {arguments[0]} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def compare(url: str, lake: Path) -> dict[str, Any]:
    """What `headwater verify` finds. It ends with an exit code of its own where the two are not equal."""
    done = _run("verify", url, str(lake), "--json")
    if not done.stdout:
        raise CommandFailed(f"headwater verify failed: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "equal": done.returncode == 0}


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*_COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Processes that are started meanwhile write their standard error to a file. Java and its workers say a lot."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with path.open("w") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _environment() -> dict[str, str]:
    return {**os.environ, "HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD, "COLUMNS": "100"}
