"""A real node in a separate process, for tests that need sockets, signals and files.

`NodeProcess` starts `headwater serve` on free ports and waits for its ready line. Whatever a test does to the
process, it is gone when the `with` block ends. Its log can be read, and is shown if a test fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from headwater.client.connection_string import Address
from headwater.client.kv_connection import KvConnection, Login
from headwater.protocol.frames import Frame, FrameBuffer
from headwater.protocol.sasl import Credentials
from support.forked_program import run_program, start_program

USER = "admin"
PASSWORD = "a secret for tests"
SERVE = ("-m", "headwater", "serve")

READY_S_MAX = 60.0
"""Far longer than a start takes, even if kernels must be compiled first."""
STOP_S_MAX = 30.0
_LOOK_EVERY_S = 0.002


class NodeProcess:
    """One process at a time on one data folder. `start` after `kill` or `stop` opens the same data.

    The process is forked from one that has everything loaded (`support.forked_program`). With `fresh`, it is a new
    interpreter, like one that a shell starts.
    """

    def __init__(
        self,
        data: Path,
        *options: str,
        user: str | None = USER,
        password: str = PASSWORD,
        as_json: bool = True,
        fresh: bool = False,
        program: tuple[str, ...] = SERVE,
    ) -> None:
        self.data = data
        self.options = options
        self.user = user
        self.password = password
        self.as_json = as_json
        self.fresh = fresh
        self.program = program
        """The arguments between `python` and the options."""
        self.ready_line = ""
        self.ready_s = 0.0
        """How long the last start took."""
        self.stopped_s = 0.0
        """How long the last end took."""
        self._log_path = data.with_name(f"{data.name}.log")
        self._output_path = data.with_name(f"{data.name}.out")
        self._process: subprocess.Popen[Any] | None = None

    # --- life and death -------------------------------------------------------------------------------------------

    def start(self) -> Self:
        assert self._process is None, "the node is running"
        arguments = ["--data", str(self.data), "--port", "0", "--http-port", "0", *self.options]
        if self.as_json:
            arguments.append("--json")
        if self.user is not None:
            arguments += ["--user", self.user, "--password", self.password]
        self._output_path.unlink(missing_ok=True)
        began_s = time.monotonic()
        with self._output_path.open("w") as stdout, self._log_path.open("a") as stderr:
            streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr, "env": environment()}
            if self.fresh:
                self._process = subprocess.Popen([sys.executable, *self.program, *arguments], **streams)
            else:
                self._process = start_program(*self.program, *arguments, **streams)
        try:
            self.ready_line = self._read_ready_line(began_s + READY_S_MAX)
        except BaseException:
            self.kill()
            raise
        self.ready_s = time.monotonic() - began_s
        return self

    def _read_ready_line(self, deadline_s: float) -> str:
        assert self._process is not None
        while time.monotonic() < deadline_s:
            has_ended = not self.is_running
            lines = self._output_path.read_text().splitlines(keepends=True) if self._output_path.exists() else []
            if lines and lines[0].endswith("\n"):
                return lines[0]
            assert not has_ended, f"the node ended before it was ready; its log:\n{self.log()}"
            time.sleep(_LOOK_EVERY_S)
        raise AssertionError(f"the node did not get ready in {READY_S_MAX:.0f} s; its log:\n{self.log()}")

    def kill(self) -> None:
        """kill -9. Does nothing if no process is running."""
        self._end(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Stop the node. Returns the exit code."""
        return self._end(number)

    def _end(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        began_s = time.monotonic()
        process.send_signal(number)
        try:
            return process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(f"the node did not stop in {STOP_S_MAX:.0f} s; its log:\n{self.log()}") from None
        finally:
            self.stopped_s = time.monotonic() - began_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        if kind is not None:
            sys.stderr.write(f"--- log of the node on {self.data} ---\n{self.log()}\n")

    # --- looking at it --------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self._process is not None, "the node is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def ready(self) -> dict[str, Any]:
        """The ready line, decoded."""
        decoded: dict[str, Any] = json.loads(self.ready_line)
        return decoded

    @property
    def url(self) -> str:
        """The connection string."""
        return str(self.ready["ready"])

    @property
    def http_url(self) -> str:
        return str(self.ready["http"])

    @property
    def address(self) -> Address:
        host, _, port = self.url.partition("://")[2].rpartition(":")
        return Address(host, int(port))

    def log(self) -> str:
        """Return what the node has written to its standard error, over all its starts."""
        return self._log_path.read_text() if self._log_path.exists() else ""

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def connect(self, bucket: str | None = "default") -> KvConnection:
        """Return a connection that has logged in and selected its bucket."""
        assert self.user is not None
        return KvConnection.open(self.address, Login(credentials=Credentials(self.user, self.password), bucket=bucket))


def exchange(connection: KvConnection, requests: bytes, *, answers: int) -> list[Frame]:
    """Send many requests in one write, and return their answers in order of arrival."""
    connection.sock.sendall(requests)
    buffer, frames = FrameBuffer(), list[Frame]()
    while len(frames) < answers:
        received = connection.sock.recv(1 << 20)
        assert received, f"the connection ended after {len(frames)} of {answers} answers"
        buffer.receive_data(received)
        frames += buffer.frames()
    return frames


def memory_bytes(node: NodeProcess) -> int:
    """Return the node's anonymous memory: the system can reclaim mapped pages of data files."""
    status = Path(f"/proc/{node.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


class StartNode(Protocol):
    """The type of the fixture `start_node`."""

    def __call__(self, *options: str, data: Path | None = None, fresh: bool = False) -> NodeProcess: ...


def serve_command(*arguments: str) -> list[str]:
    return [sys.executable, *SERVE, *arguments]


def run_serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `headwater serve` to its end."""
    return run_program(*serve_command(*arguments)[1:], timeout=READY_S_MAX, env=environment())


def environment() -> dict[str, str]:
    """Return the tests' environment without the commands' variables, and so wide that sentences are not wrapped."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
    return {**kept, "COLUMNS": "400", "PYTHONUNBUFFERED": "1"}
