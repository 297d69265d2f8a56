"""The writer in a process of its own, and what it answers."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.commands import STOP_S_MAX, CommandFailed, started

ANSWER_S_MAX = 60.0
"""For one that is asked while the SDK waits for a node that is gone."""


class WriterProcess:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(json.loads(line))

    def set_status(self, status: str) -> None:
        """Have the followed order written."""
        if self._ask(status) is None:
            raise CommandFailed(f"the writer could not write: {self._log.read_text().strip()[-1000:]}")

    def status(self) -> str | None:
        """Of the followed order, as the bucket has it. None while the bucket does not answer."""
        answer = self._ask("")
        return None if answer is None else str(answer["status"])

    def _ask(self, line: str) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        self.check()
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        deadline_s = time.monotonic() + ANSWER_S_MAX
        while time.monotonic() < deadline_s:
            try:
                return self._answers.get(timeout=0.2)
            except queue.Empty:
                self.check()
        raise CommandFailed(f"the writer did not answer in {ANSWER_S_MAX:.0f} s")

    def check(self) -> None:
        """It goes on, or its error is raised."""
        if self._process.poll() is not None:
            raise CommandFailed(f"the writer has ended: {self._log.read_text().strip()[-1000:]}")

    def stop(self) -> None:
        self.check()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            code = self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            raise CommandFailed(f"the writer did not end in {STOP_S_MAX:.0f} s") from None
        if code:
            raise CommandFailed(f"the writer has failed: {self._log.read_text().strip()[-1000:]}")
        self._reading.join()


@contextmanager
def running_writer(url: str, followed: str, *, orders: int, seed: int, folder: Path) -> Iterator[WriterProcess]:
    log = folder / "writer.log"
    command = [sys.executable, "-m", "demo.writer", url, followed, str(orders), str(seed)]
    with log.open("w") as errors, started(command, stdin=subprocess.PIPE, stderr=errors) as process:
        yield WriterProcess(process, log)
