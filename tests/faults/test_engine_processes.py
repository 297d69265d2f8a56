"""The engine and other processes: one at a time has the data, and a copy or a killed one is noticed."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from headwater.errors import DataInUse
from headwater.store.engine import Engine, PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine
from support.cases import case_apart
from support.forked_program import run_program, start_program

TABLE = Table.BLOCKS


def fill(engine: Engine, names: str = "aceg") -> None:
    engine.write([PutRow(TABLE, name.encode(), name.upper().encode()) for name in reversed(names)])


WRITE_AND_DIE = """
import os, signal, sys
from pathlib import Path
from headwater.store.engine import PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine
LmdbEngine(Path(sys.argv[1])).write([PutRow(Table.BLOCKS, b"b", b"2")])
os.kill(os.getpid(), signal.SIGKILL)
"""


def closed_engine(folder: Path, **rows: bytes) -> None:
    engine = LmdbEngine(folder)
    engine.write([PutRow(TABLE, key.encode(), value) for key, value in rows.items()])
    engine.close()


def left_alone(folder: Path) -> bool:
    engine = LmdbEngine(folder)
    engine.close()
    return engine.was_left_alone


def test_data_that_was_not_closed_is_not(tmp_path: Path) -> None:
    closed_engine(tmp_path / "data", a=b"1")
    killed = run_program("-c", WRITE_AND_DIE, str(tmp_path / "data"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not left_alone(tmp_path / "data")
    assert not left_alone(tmp_path / "data"), "to look at it changes nothing: a start may be given up before it begins"
    closed_engine(tmp_path / "data", b=b"3")
    assert left_alone(tmp_path / "data"), "it was opened and closed in order by now"


@case_apart("cp -r {data} {copy}", id="cp -r")
@case_apart("cp -a {data} {copy}", id="cp -a")
@case_apart("mkdir {copy}; tar -C {data} -c . | tar -C {copy} -x", id="tar")
def test_a_copy_is_not_left_alone(tmp_path: Path, copy: str) -> None:
    closed_engine(tmp_path / "data", a=b"1")
    subprocess.run(copy.format(data=tmp_path / "data", copy=tmp_path / "copy"), shell=True, check=True)
    assert not left_alone(tmp_path / "copy")
    assert left_alone(tmp_path / "data")
    # Laid over the original it is the same file with other contents, and their old time if the copy has kept it.
    closed_engine(tmp_path / "data", a=b"2")
    subprocess.run(["cp", "-a", f"{tmp_path}/copy/.", str(tmp_path / "data")], check=True)
    assert not left_alone(tmp_path / "data")


HOLD = """
import sys, time
from pathlib import Path
from headwater.store.lmdb_engine import LmdbEngine
engine = LmdbEngine(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
engine.close()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Another process that has the data open."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = start_program("-c", HOLD, str(folder), **pipes)
    assert process.stdout.readline() == "held\n"
    return process


def check_is_held(folder: Path) -> None:
    with pytest.raises(DataInUse) as raised:
        LmdbEngine(folder)
    assert raised.value.reason == f"another process uses the data in {folder}"
    assert raised.value.hint == "Stop it, or give this one its own folder"


@pytest.mark.parametrize("is_killed", [False, True], ids=["closed", "kill -9"])
def test_a_second_process_is_refused_until_the_first_is_gone(tmp_path: Path, is_killed: bool) -> None:
    with holder(tmp_path) as process:
        check_is_held(tmp_path)
        check_is_held(tmp_path)
        if is_killed:
            process.send_signal(signal.SIGKILL)
        else:
            process.communicate("\n")
        process.wait()
        engine = LmdbEngine(tmp_path)
        fill(engine)
        engine.close()
