"""Python programs that start in milliseconds: they are forked from a process that has imported what they need.

Most of the time of a short command is spent importing libraries and loading compiled kernels, a second of processor
time each. `start_program` and `run_program` take the arguments after `python` on a command line, and the options of
`subprocess.Popen`. They return a real child of the test, with its own process id, signals, session, terminal,
streams, folder, environment and exit code. A test of startup, imports, or variables that Python and numba read when
they start, must use `subprocess` and a new interpreter.

The forking process is asked over a socket; the standard streams travel with the order. The program's parent exits
immediately, and the system reparents the program to the test, which is a subreaper at that moment.

A shell in a test finds `headwater` in `shell_commands()`: a small program that requests the real one, and stands in
for it until it ends.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import BufferedReader, BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from shutil import rmtree
from types import ModuleType
from typing import Any

from headwater.cli import load_command
from headwater.kernels.machine_code import compile_kernels
from headwater.node.bucket_lifecycle import KERNEL_PACKAGES

HEADWATER = ("-m", "headwater")
"""The arguments of `python` that run the command `headwater`."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ORDER_BYTES_MAX = 1 << 17
_COMMANDS = (
    "buckets", "check", "cluster", "collections", "decode", "export", "load", "replicate", "serve", "sim", "tail",
    "users",
)  # fmt: skip
_LIBRARIES = ("headwater.blocking", "headwater.testing", "support.group_member_process", "support.draining_process")


def start_program(*arguments: str, **how: Any) -> subprocess.Popen[Any]:
    """Start `python ARGUMENTS`, with the options of `subprocess.Popen`."""
    return _ForkedPopen([sys.executable, *arguments], **how)


def run_program(
    *arguments: str, input: Any = None, timeout: float | None = None, **how: Any
) -> subprocess.CompletedProcess[Any]:
    """Run `python ARGUMENTS` to its end, with the options of `subprocess.Popen`. By default, pipes carry text."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if input is not None:
        pipes["stdin"] = subprocess.PIPE
    with start_program(*arguments, **{**pipes, **how}) as process:
        try:
            stdout, stderr = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def shell_commands() -> Path:
    """Return the folder with `headwater` in it, to put in front of PATH."""
    return _forker().folder


class _ForkedPopen(subprocess.Popen[Any]):
    """Like `Popen`, except for the one method that creates the process."""

    def _execute_child(
        self, args: list[str], executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int,
        errread: int, errwrite: int, restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any,
        start_new_session: bool, process_group: Any,
    ) -> None:  # fmt: skip
        assert not any((executable, preexec_fn, pass_fds, shell)), "a program that is forked has none of these"
        streams = [given if given >= 0 else usual for usual, given in enumerate((p2cread, c2pwrite, errwrite))]
        order = {
            "arguments": args[1:],
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": dict(os.environ if env is None else env),
            "own_session": start_new_session,
            "parent": os.getpid(),
        }
        try:
            self.pid = _forker().fork(order, streams)
            self._child_created = True
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


class _Forker:
    """The tests' side: starts the forking process, and sends orders to it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-forks-"))
        self._address = str(self.folder / "socket")
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        command = self.folder / "headwater"
        command.write_text(f"#!{sys.executable} -IS\n{_STAND_IN.format(address=self._address)}")
        command.chmod(0o755)
        atexit.register(self.close)
        self._start()

    def _start(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            Path(self._address).unlink(missing_ok=True)
            listener.bind(self._address)
            listener.listen(64)
            kept = {name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")}
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**kept, "PYTHONPATH": os.pathsep.join(sys.path)},
                # Only the tests handle Ctrl-C.
                start_new_session=True,
            )

    def fork(self, order: dict[str, Any], streams: list[int]) -> int:
        """Start a program as a child of this process. Returns its process id."""
        with self._lock, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            if self._process is None or self._process.poll() is not None:
                # It was killed, by a test or because memory ran out.
                self._start()
            connection.connect(self._address)
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(connection, [json.dumps(order).encode()], streams)
                answer = connection.recv(100)
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)
        assert answer, "the process that forks programs gave no answer; what it says is on standard error"
        return int(answer)

    def close(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()
        rmtree(self.folder, ignore_errors=True)


@cache
def _forker() -> _Forker:
    """Return the one forker for all tests of this process. It ends with the process."""
    return _Forker()


_STAND_IN = """
import json, os, signal, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({address!r})
order = {{
    "arguments": ["-m", "headwater", *sys.argv[1:]],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "own_session": False,
    "parent": None,
}}
socket.send_fds(connection, [json.dumps(order).encode()], [0, 1, 2])
pid = int(connection.recv(100))
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = int(connection.recv(100))
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""
"""Looks like the command to a shell. It imports little, so it starts fast."""


# --- the process that forks -----------------------------------------------------------------------------------------


def main() -> None:
    """Import, and fork for each connection. The tests end when standard input ends."""
    atexit.register(_end_fast)
    listener = socket.socket(fileno=int(sys.argv[1]))
    _preload()
    assert threading.active_count() == 1, "a fork would leave the other threads' locks as they are"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _obey(connection)
            break
        connection.close()


def _preload() -> None:
    for name in _COMMANDS:
        load_command(name)
    for name in _LIBRARIES:
        import_module(name)
    compile_kernels(*KERNEL_PACKAGES)


def _obey(connection: socket.socket) -> None:
    """In the first child: fork the program, and give it to the test or wait for its end. In the second: become it."""
    message, streams, _, _ = socket.recv_fds(connection, _ORDER_BYTES_MAX, 3)
    order = json.loads(message)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    maker = os.getpid()
    pid = os.fork()
    if pid:
        if order["parent"] is None:
            connection.send(b"%d" % pid)
            connection.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    if order["own_session"]:
        os.setsid()
    if order["parent"] is not None:
        while os.getppid() == maker:
            os.sched_yield()
        connection.send(b"%d" % os.getpid())
    connection.close()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != (order["parent"] or maker):
        os._exit(1)
    _become(order, streams)


def _become(order: dict[str, Any], streams: list[int]) -> None:
    """Become the program: set up everything as Python does at its start. Ends like the interpreter."""
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    _open_standard_streams()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        run_arguments(order["arguments"])
        _exit_codes.append(0)
    except SystemExit as end:
        _exit_codes.append(end.code)
        raise


def run_arguments(arguments: list[str]) -> None:
    """Run what `python` would run for these arguments."""
    match arguments:
        case ["-m", module, *rest]:
            sys.path[0] = os.getcwd()
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path[0] = ""
            sys.argv = ["-c", *rest]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), main.__dict__)
        case [script, *rest]:
            sys.path[0] = str(Path(script).parent)
            sys.argv = [script, *rest]
            runpy.run_path(script, run_name="__main__")


def _open_standard_streams() -> None:
    """Open new objects for the standard streams, which have their own buffers and state."""
    encoding = sys.stdout.encoding
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    output = FileIO(1, "w", closefd=False)
    sys.stdin = sys.__stdin__ = TextIOWrapper(BufferedReader(FileIO(0, closefd=False)), encoding)
    sys.stdout = sys.__stdout__ = TextIOWrapper(
        output if is_unbuffered else BufferedWriter(output),
        encoding,
        write_through=is_unbuffered,
        line_buffering=output.isatty(),
    )
    sys.stderr = sys.__stderr__ = TextIOWrapper(
        BufferedWriter(FileIO(2, "w", closefd=False)), encoding, "backslashreplace", line_buffering=True
    )


def _end_fast() -> None:
    """Exit quickly, as the last exit handler: tearing down all imported modules would take a tenth of a second."""
    if _exit_codes and isinstance(code := _exit_codes[0] or 0, int):
        with suppress(OSError):  # If the output can't be written, the interpreter reports it, with its own exit code
            sys.stdout.flush()
            os._exit(code)


_exit_codes: list[object] = []
"""The exit code of this program, once it has ended by itself."""


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
