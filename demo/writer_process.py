"""The writer in a process of its own, and what it has done so far."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.commands import STOP_S_MAX, CommandFailed, started


class WriterProcess:
    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._done: dict[str, int] = {}
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._done = json.loads(line)

    @property
    def written(self) -> int:
        """How many changes were made."""
        return sum(self._done.values())

    def check(self) -> None:
        """It goes on, or its error is raised."""
        if self._process.poll() is not None:
            raise CommandFailed(f"the writer has ended: {self._log.read_text().strip()[-1000:]}")

    def stop(self) -> str:
        """Let it end. Returns in words what it has done."""
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
        return ", ".join(f"{count:,} {what}" for what, count in sorted(self._done.items()))


@contextmanager
def running_writer(url: str, *, documents: int, seed: int, folder: Path) -> Iterator[WriterProcess]:
    log = folder / "writer.log"
    command = [sys.executable, "-m", "demo.writer", url, str(documents), str(seed)]
    with log.open("w") as errors, started(command, stdin=subprocess.PIPE, stderr=errors) as process:
        yield WriterProcess(process, log)
