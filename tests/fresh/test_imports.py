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


def test_verify_needs_neither_a_compiler_nor_spark() -> None:
    assert imported(HEAVY, "verify", "--help") == {"deltalake", "pyarrow.compute", "pyarrow.parquet"}


def test_first_outputs(start_node: StartNode) -> None:
    """Kernels are called by then."""
    url = f"couchbase://{start_node('--vbuckets', '16').address}/default"
    assert imported(HEAVY, "load", url, "--generate", "2") == set()
    for format_ in ("pretty", "jsonl"):
        assert imported(HEAVY, "tail", url, "--limit", "1", "--format", format_) == set()
