"""A process that forks test nodes.

Most of a node's start is importing libraries and loading compiled kernels. The nursery does both once, in a separate
process without threads, and forks: the child becomes `headwater serve`. The nursery reads requests from its standard
input, a line of JSON per node, and answers with the child's process id. It ends when its input ends, and the system
then kills all its nodes, so that a killed test run leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Self

READY_S_MAX = 120.0
"""Long enough for the first start on a machine, which compiles the kernels."""
STOP_S_MAX = 30.0

_PR_SET_PDEATHSIG = 1


class NodeFailed(Exception):
    """A node, or the process that forks them, has ended or does not respond."""


class Nursery:
    """The tests' side. The first request for a node starts the process."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "nursery.log"
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> int | None:
        """End the process, if there is one. Returns its exit code, or None if it had to be killed."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            return process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None
        finally:
            process.stdout.close()

    def start(self, arguments: list[str], *, stdout: Path, stderr: Path) -> int:
        """Start a node. Returns its process id; its output shows when it is ready."""
        order = json.dumps({"arguments": arguments, "stdout": str(stdout), "stderr": str(stderr)})
        if self._process is not None and self._process.poll() is not None:
            # The process was killed, by a test or for lack of memory, and its nodes with it. Start another.
            self._close()
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(order + "\n")
            process.stdin.flush()
            answer = self._read_line(process)
        except (BrokenPipeError, NodeFailed) as error:
            code = self._close()
            how = "did not answer" if code is None else f"has ended with exit code {code}"
            raise NodeFailed(
                f"no node can be started: the process that makes them {how}; its log says:\n{self._log.read_text()}"
            ) from error
        return int(json.loads(answer)["pid"])

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
            with self._log.open("a") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "headwater.testing.nursery"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env=kept,
                    # Ctrl-C should reach only the tests, which end their nodes themselves.
                    start_new_session=True,
                )
        return self._process

    @staticmethod
    def _read_line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], READY_S_MAX)
        line = process.stdout.readline() if readable else ""
        if not line:
            raise NodeFailed("no answer")
        return line


# --- the process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Import everything, then fork for each line of input."""
    from headwater.cli.serve import serve
    from headwater.kernels.machine_code import compile_kernels
    from headwater.node.bucket_lifecycle import KERNEL_PACKAGES

    compile_kernels(*KERNEL_PACKAGES)
    assert threading.active_count() == 1, "a fork would leave the other threads' locks as they are"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become_node(serve, order, parent)
        sys.stdout.write(json.dumps({"pid": pid}) + "\n")
        sys.stdout.flush()


def _become_node(serve: Any, order: dict[str, Any], parent: int) -> NoReturn:
    """In the child: replace everything of the nursery's except its memory."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _connect(0, os.devnull, os.O_RDONLY)
        _connect(1, order["stdout"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        _connect(2, order["stderr"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        # The objects for the standard streams have their own buffers and state, so replace them.
        sys.stdout = os.fdopen(1, "w", buffering=1)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        serve.main(args=order["arguments"], prog_name="headwater serve", standalone_mode=False)
        code = 0
    except BaseException as error:
        sys.stderr.write(f"Error: {error}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # The nursery is its parent, so a test can't wait for it and get its exit code from the system.
        Path(f"{order['stdout']}.exit").write_text(str(code))
        os._exit(code)


def _connect(number: int, path: str, flags: int) -> None:
    opened = os.open(path, flags, 0o666)
    os.dup2(opened, number)
    os.close(opened)


if __name__ == "__main__":
    main()
