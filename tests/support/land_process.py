"""`headwater land` in processes of its own, to be killed: the driver with its Java machine, or its executors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from support.node_process import PASSWORD, USER
from support.spark_node import SourceBucket

BATCH_S_MAX = 300.0
"""Far beyond what a start of Spark and its first batch take, also where others use the machine."""
POLL_S = 0.1


class LandProcess:
    """Lives while the `with` block lasts, with all that it has started."""

    def __init__(self, bucket: SourceBucket, folder: Path, master: str, *, every: str = "100ms") -> None:
        self.bucket = bucket
        self.folder = folder
        self.batches: list[dict[str, Any]] = []
        """What was told of each, since the start."""
        self._log_path = folder.with_name(f"{folder.name}.log")
        self._master = master
        self._every = every
        self._process: subprocess.Popen[str] | None = None
        self._reading: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def start(self, master: str | None = None) -> Self:
        assert self._process is None, "it is running"
        self._master = master or self._master
        self.batches = []
        command = [sys.executable, "-m", "headwater", "land", self.bucket.url, "--into", str(self.folder)]
        options = ["--every", self._every, "--master", self._master, "--memory", "1g", "--min-partitions", "2", "--json"]
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                [*command, *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD},
                # A group of its own, that can be ended as a whole.
                start_new_session=True,
            )
        self._reading = threading.Thread(target=self._read, args=(self._process, self.batches), daemon=True)
        self._reading.start()
        return self

    @staticmethod
    def _read(process: subprocess.Popen[str], batches: list[dict[str, Any]]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            batches.append(json.loads(line))

    # --- looking at it --------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        return self._log_path.read_text()

    def wait_for_batches(self, count: int) -> None:
        """Until it has landed so many since its start."""
        self.wait_for(lambda: len(self.batches) >= count)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + BATCH_S_MAX
        while not condition():
            assert self.is_running, f"it has ended by itself; its log:\n{self.log()}"
            assert time.monotonic() < give_up_s, f"it does not get there; its log:\n{self.log()}"
            time.sleep(POLL_S)

    # --- its end --------------------------------------------------------------------------------------------------

    def kill_all(self) -> None:
        """kill -9 of driver, Java machine and executors. Does nothing where there are none."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._ended()

    def kill_python(self) -> None:
        """kill -9 of the driver's Python alone. Its Java machine finds itself alone, and ends a little later."""
        assert self._process is not None
        self._process.kill()
        self._ended()

    def kill_java(self) -> None:
        """kill -9 of the driver's Java machine alone. The command can't go on without."""
        assert self._process is not None
        (java,) = _children(self._process.pid, "java")
        os.kill(java, signal.SIGKILL)
        code = self._process.wait(BATCH_S_MAX)
        assert code != 0
        self.kill_all()

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill_worker(self) -> None:
        """kill -9 of a Python process that runs tasks. Its tasks fail, and so does the batch where Spark is local."""
        self.wait_for(lambda: bool(self._workers()))
        os.kill(self._workers()[-1], signal.SIGKILL)

    def _workers(self) -> list[int]:
        """The children of the daemons that Java has forked workers from."""
        assert self._process is not None
        javas = _children(self._process.pid, "java")
        daemons = [daemon for java in javas for daemon in _children(java, "pyspark")]
        return [worker for daemon in daemons for worker in _children(daemon, "pyspark")]

    def kill_executor(self, number: int) -> None:
        """kill -9 of an executor, of a `local-cluster`. Spark starts another one."""
        assert self._process is not None
        (java,) = _children(self._process.pid, "java")
        # One that was killed a moment ago may not have been replaced yet.
        self.wait_for(lambda: bool(_children(java, "CoarseGrainedExecutorBackend")))
        executors = _children(java, "CoarseGrainedExecutorBackend")
        os.kill(executors[number % len(executors)], signal.SIGKILL)

    def _ended(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._reading is not None
        self._process.wait()
        self._reading.join()
        self._process.stdout.close()
        self._process = None


def _children(parent: int, named: str) -> list[int]:
    """The processes that a process has started, by what their command line holds."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                status = (path / "stat").read_text().rpartition(")")[2].split()
                command = (path / "cmdline").read_text()
            except OSError:
                continue
            if int(status[1]) == parent and named in command and status[0] != "Z":
                found.append(int(path.name))
    return sorted(found)
