"""A program that is forked for a test does what it does in a new interpreter."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from support.cases import case
from support.forked_program import run_program, shell_commands, start_program

ENDS_S_MAX = 60.0


@case("print('out'); import sys; print('err', file=sys.stderr); sys.exit(7)")
@case("import sys; sys.exit('a reason')")
@case("import sys; print(sys.argv, sys.stdin.read(), sys.stdout.isatty(), __name__)")
@case("import os; print(os.getcwd(), os.environ['GIVEN'], 'HOME' in os.environ)")
@case("import os; print('lost', end=''); os._exit(3)")
@case("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
@case("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
@case("import atexit; atexit.register(print, 'at the end'); 1 / 0")
@case("import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()")
@case("import os, sys; sys.stdout.buffer.write(os.fsencode('ö')); print('\\xf6')")
def test_it_ends_and_speaks_as_a_new_interpreter_does(tmp_path: Path, code: str) -> None:
    how = {"cwd": tmp_path, "env": {"GIVEN": "a value", "PYTHONPATH": ""}}
    forked = run_program("-c", code, "an argument", input="some input", timeout=ENDS_S_MAX, **how)
    new = subprocess.run(
        [sys.executable, "-c", code, "an argument"],
        input="some input",
        capture_output=True,
        text=True,
        check=False,
        **how,
    )
    assert (forked.returncode, forked.stdout) == (new.returncode, new.stdout)
    # The frames of what runs the program are in a traceback too; the error is the same.
    assert forked.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:]


def test_an_output_that_can_not_be_written() -> None:
    with open("/dev/full", "w") as full:
        ended = run_program("-c", "print('x')", stdout=full, env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert ended.returncode == 120
    assert "No space left on device" in ended.stderr


def test_it_is_a_child_with_a_session_of_its_own() -> None:
    with start_program("-c", "import time; time.sleep(600)", start_new_session=True) as process:
        assert process.poll() is None
        assert os.getsid(process.pid) == process.pid
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(ENDS_S_MAX) == -signal.SIGTERM


def test_a_shell_finds_the_command() -> None:
    done = subprocess.run(
        ["bash", "-c", "headwater --version | head -c 9; headwater tial; echo $?"],
        env={**os.environ, "PATH": f"{shell_commands()}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "headwater2\n"
    assert done.stderr.startswith("Error: No such command 'tial'")
