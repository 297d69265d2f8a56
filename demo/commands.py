"""The command `headwater`, run as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

USER, PASSWORD, BUCKET = "demo", "demo-password", "default"
STOP_S_MAX = 20.0
HEADWATER = [sys.executable, "-m", "headwater"]


class CommandFailed(Exception):
    """A command has ended with another exit code than 0."""


def headwater(*arguments: str) -> Any:
    """Run a command to its end. Returns its JSON."""
    done = _run(*arguments, "--json")
    if done.returncode:
        raise _failed(arguments, done.stderr or done.stdout)
    return json.loads(done.stdout)


def load(url: str, lines: Iterable[str], *, collection: str, key: str) -> dict[str, Any]:
    """`headwater load`, from what is written to its standard input."""
    arguments = ["load", url, "-", "--collection", collection, "--key", key, "--json"]
    with started([*HEADWATER, *arguments], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        # One that has ended early says why.
        with suppress(BrokenPipeError):
            process.stdin.writelines(lines)
        output, error = process.communicate()
        if process.returncode:
            raise _failed(arguments, error)
    loaded: dict[str, Any] = json.loads(output)
    return loaded


def verify(url: str, lake: Path) -> dict[str, Any]:
    """What `headwater verify` finds. It ends with an exit code of its own where the two are not equal."""
    done = _run("verify", url, str(lake), "--json")
    if not done.stdout:
        raise _failed(["verify"], done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A process that is ended, whatever happens. Ctrl-C on the terminal does not reach it: this process ends it."""
    with ExitStack() as running:
        with interrupted_later():
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, text=True, env=_environment(), start_new_session=True, **options
            )
            running.callback(_end, process)
        yield process


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Ctrl-C counts when the block is over: a process that is half started can't be ended.

    The handlers are then as they were: Spark puts in one of its own, which cancels jobs and prints a lot. Only the main
    thread is interrupted, so that others need none of this.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in handlers:
        signal.signal(number, lambda came_number, _: came.append(came_number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            # What was not sent yet can't be sent any more.
            with suppress(BrokenPipeError):
                pipe.close()


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    with started([*HEADWATER, *arguments], stderr=subprocess.PIPE) as process:
        output, error = process.communicate()
        return subprocess.CompletedProcess(arguments, process.returncode, output, error)


def _failed(arguments: Iterable[str], said: str) -> CommandFailed:
    return CommandFailed(f"headwater {next(iter(arguments))} failed: {said.strip()}")


def _environment() -> dict[str, str]:
    return {**os.environ, "HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD, "COLUMNS": "100"}
