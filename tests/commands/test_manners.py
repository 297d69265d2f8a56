"""How commands behave in a shell: pipes, full disks, Ctrl-C, narrow terminals, and names that are almost right."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
from click import Option
from click.testing import CliRunner, Result

from headwater.cli import COMMANDS, load_command, main
from support.cases import case, case_apart
from support.forked_program import HEADWATER, run_program, start_program
from support.lake_model import SmallLake

LONG_S = 120.0
CAPTURE = "805c0000 00000000 00000000 00000007 0000000000000000\n" * 2000


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "HEADWATER_USER": "me", "HEADWATER_PASSWORD": "secret", **more}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, env=environment(), prog_name="headwater")


# --- output that is not taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["decode", "-"], ["sim", "--seed", "5", "--seeds", "2"], ["--help"]])
def test_a_reader_that_has_seen_enough(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with start_program(
        *HEADWATER, *arguments, stdin=subprocess.PIPE, stdout=writer, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(writer)
        _, stderr = process.communicate(CAPTURE, timeout=LONG_S)
    assert (process.returncode, stderr) == (0, "")


@pytest.mark.parametrize("arguments", [["decode", "-"], ["--help"]])
def test_a_disk_that_is_full(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run_program(*HEADWATER, *arguments, input=CAPTURE, stdout=full)
    assert done.returncode == 1
    assert done.stderr == "Error: standard output can't be written: No space left on device\n"


# --- signals ------------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_a_run_in_many_processes() -> None:
    """It goes to all processes of a terminal, and one of them answers."""
    with start_program(
        *HEADWATER,
        *("sim", "--seed", "5", "--seeds", "100000", "--jobs", "2", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=LONG_S)
    assert (process.returncode, stderr) == (130, "Error: interrupted\n")


@pytest.fixture
def silent_url() -> Iterator[str]:
    """Of a server that takes connections and says nothing."""
    with socket.socket() as silent, ExitStack() as accepted:
        silent.bind(("127.0.0.1", 0))
        silent.listen()

        def accept_all() -> None:
            with suppress(OSError):
                while True:
                    accepted.enter_context(silent.accept()[0])

        threading.Thread(target=accept_all, daemon=True).start()
        yield f"couchbase://127.0.0.1:{silent.getsockname()[1]}/travel"
        silent.shutdown(socket.SHUT_RDWR)


@case_apart(["export", "URL", "--into", "out"], signal.SIGINT, 130)
@case_apart(["export", "URL", "--into", "out"], signal.SIGTERM, 143)
@case_apart(["collections", "list", "URL"], signal.SIGINT, 130)
@case_apart(["replicate", "--from", "URL", "--to", "URL-2"], signal.SIGINT, 130)
@case_apart(["replicate", "--from", "URL", "--to", "URL-2"], signal.SIGTERM, 143)
@case_apart(["land", "URL", "--into", "lake"], signal.SIGTERM, 143)
@case_apart(["land", "URL", "--into", "lake"], signal.SIGHUP, 129)
def test_a_signal_while_a_node_is_waited_for(
    silent_url: str, tmp_path: Path, arguments: list[str], number: signal.Signals, exit_code: int
) -> None:
    words = [word.replace("URL", silent_url) for word in arguments]
    with start_program(
        *HEADWATER, *words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not _is_connected(process.pid, int(silent_url.rpartition(":")[2].partition("/")[0])):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=LONG_S)
    assert (process.returncode, stdout) == (exit_code, "")
    assert stderr.startswith("Error: interrupted")
    assert len(stderr.splitlines()) == 1


def _is_connected(pid: int, port: int) -> bool:
    """Whether a process has a connection to that port of this machine."""
    with open(f"/proc/{pid}/net/tcp") as table:
        ours = {row.split()[9] for row in table.readlines()[1:] if row.split()[2].endswith(f":{port:04X}")}
    sockets = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    return any(f"socket:[{inode}]" in sockets for inode in ours)


def test_ctrl_c_at_the_question_for_a_password() -> None:
    terminal, other_end = pty.openpty()
    with start_program(
        *HEADWATER,
        *("tail", "couchbase://127.0.0.1:1/travel", "--user", "me"),
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        start_new_session=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("HEADWATER_")},
    ) as process:
        os.close(other_end)
        said = b""
        while b"Password of me" not in said:
            said += os.read(terminal, 1000)
        time.sleep(0.2)  # the terminal is set to hide what is typed after the question
        process.send_signal(signal.SIGINT)
        assert process.wait(LONG_S) == 130
        said = os.read(terminal, 1000)
    os.close(terminal)
    assert b"Error: interrupted" in said


# --- terminals ----------------------------------------------------------------------------------------------------


def test_help_is_whole_on_a_narrow_terminal() -> None:
    code = (
        "from headwater.cli import COMMANDS, main\n"
        "for name in COMMANDS:\n"
        "    main([name, '--help'], prog_name='headwater', standalone_mode=False)\n"
        "    print('\\f', end='')\n"
    )
    done = run_program("-c", code, env=environment(COLUMNS="60"))
    assert done.returncode == 0, done.stderr
    pages = dict(zip(COMMANDS, done.stdout.split("\f"), strict=False))
    for name, page in pages.items():
        assert max(map(len, page.splitlines())) <= 60, name
        assert not [line for line in page.splitlines() if line.startswith("│") and "…" in line]
        for parameter in load_command(name).params:
            if isinstance(parameter, Option) and parameter.hidden:
                continue
            assert all(option in page for option in parameter.opts if option.startswith("--")), name
    assert len(pages) == len(COMMANDS)


# --- names that are almost right ----------------------------------------------------------------------------------


@case(["tial"], "No such command 'tial'. Did you mean tail? See headwater --help")
@case(["colections", "list"], "No such command 'colections'. Did you mean collections? See headwater --help")
@case(["collections", "creat"], "No such command 'creat'. Did you mean create? See headwater collections --help")
@case(["load", "--generat", "1"], "No such option '--generat'. Did you mean --generate? See headwater load --help")
@case(["tail", "--limt", "1"], "No such option '--limt'. Did you mean --limit? See headwater tail --help")
def test_the_nearest_name_is_named(arguments: list[str], said: str) -> None:
    result = run(*arguments)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {said}\n")


# --- what is not installed ----------------------------------------------------------------------------------------


def test_a_command_whose_libraries_are_missing() -> None:
    code = (
        "import sys\n"
        "for name in ('pyspark', 'py4j', 'deltalake', 'lmdb', 'uvloop', 'starlette', 'uvicorn'):\n"
        "    sys.modules[name] = None\n"
        "from headwater.cli import main\n"
        "main(sys.argv[1:], prog_name='headwater')\n"
    )
    for arguments, extra in ((["land", "couchbase://h/b", "--into", "lake"], "lake"), (["serve", "--json"], "node")):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        [said] = done.stderr.splitlines()
        assert "which is not installed. Run " in said
        assert f"[{extra}]" in said
        assert sys.executable in said


# --- `headwater ui` as a shell runs it --------------------------------------------------------------------------------


def test_no_spark_is_loaded() -> None:
    program = "import sys, headwater.cli.ui; sys.exit('pyspark' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_lake_at_rest_is_shown_until_ctrl_c(tmp_path: Path) -> None:
    small = SmallLake(tmp_path / "lake")
    small.write(0, "a")
    small.land()
    command = (*HEADWATER, "ui", str(small.directory), "--listen", "0")
    with start_program(*command, stderr=subprocess.PIPE, text=True) as running:
        said = running.stderr.readline()
        address = re.search(r"is shown at (http://127\.0\.0\.1:\d+/ui/)$", said)
        assert address is not None, said
        shown = httpx.get(f"{address[1]}api/state").json()
        assert (shown["landing"]["state"], shown["lake"]["documents"]) == ("unknown", 1)
        # Nothing is kept open: the page can be asked while the program ends.
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 0
        assert running.stderr.read() == ""
