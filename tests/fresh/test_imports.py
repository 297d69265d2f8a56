"""What a command imports until it is done: a library that it does not need costs every user its import.

It counts modules and no seconds. Where one of these has to be imported after all, look at what that costs first.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from conftest import StartNode
from support.node_process import PASSWORD, USER

HEAVY = {"deltalake", "numba", "numpy.ma", "pandas", "pyarrow.compute", "pyarrow.parquet", "pyspark"}
LIBRARIES = {"asyncio", "llvmlite", "numpy", "pyarrow"}

RUN = """
import atexit, sys
atexit.register(lambda: print("\\nIMPORTED", *sys.modules, file=sys.stderr))
from headwater.cli import main
main(prog_name="headwater")
"""


BARE = """
import sys
missing = set("boto3 deltalake dpkt llvmlite lmdb numba obstore pandas pyroaring pyspark rich_click".split())
missing |= set("sqlglot starlette uvicorn uvloop".split())
class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
from importlib import util
find, util.find_spec = util.find_spec, lambda name, package=None: None if name in missing else find(name, package)
from headwater.cli import main
main(prog_name="headwater")
"""
"""The command where nothing is installed but what every installation has."""


def imported(of: set[str], *arguments: str) -> set[str]:
    """Which of these modules are imported when a command is done."""
    login = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}
    command = [sys.executable, "-c", RUN, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | login)
    assert done.stdout
    return of & set(done.stderr.rpartition("IMPORTED")[2].split())


@pytest.mark.parametrize("arguments", ["--version", "--help", "--completion bash"])
def test_what_needs_no_command_imports_no_library(arguments: str) -> None:
    assert imported(HEAVY | LIBRARIES, *arguments.split()) == set()


def test_the_garbage_collector_never_looks_at_what_is_imported() -> None:
    program = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()));" + RUN
    command = [sys.executable, "-c", program, "verify", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(shown.stdout.split()[-1]) > 50_000


def test_verify_needs_neither_a_compiler_nor_spark() -> None:
    assert imported(HEAVY, "verify", "--help") == {"deltalake", "pyarrow.compute", "pyarrow.parquet"}


def test_first_outputs(start_node: StartNode) -> None:
    """Kernels are called by then."""
    url = f"couchbase://{start_node('--vbuckets', '16').address}/default"
    assert imported(HEAVY, "load", url, "--generate", "2") == set()
    for format_ in ("pretty", "jsonl"):
        assert imported(HEAVY, "tail", url, "--limit", "1", "--format", format_) == set()


def test_a_bare_installation_reads_what_a_full_one_reads(start_node: StartNode) -> None:
    url = f"couchbase://{start_node('--vbuckets', '16').address}/default"
    login = os.environ | {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}

    def lines(code: str, *arguments: str) -> list[str]:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=login)
        return sorted((done.stdout if done.returncode == 0 else done.stderr).splitlines())

    lines(RUN, "load", url, "--generate", "100")
    tail = ("tail", url, "--to", "now", "--json")
    assert len(lines(BARE, *tail)) >= 100
    assert lines(BARE, *tail) == lines(RUN, *tail)
    for command, library, extra in (("load", "numba", "fast"), ("decode", "dpkt", "cli"), ("land", "numba", "lake")):
        [said] = lines(BARE, command)
        assert f"Needs {library}, which is not installed" in said
        assert f"[{extra}]" in said
