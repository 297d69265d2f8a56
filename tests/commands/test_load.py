"""headwater load as a shell runs it."""

from __future__ import annotations

import os
import pty
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.forked_program import HEADWATER, run_program, start_program
from support.loading_server import PASSWORD, USER, LoadingCluster

LOGIN = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}


@pytest.fixture
def cluster() -> Iterator[LoadingCluster]:
    with LoadingCluster().running() as running:
        yield running


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return start_program(*HEADWATER, "load", *arguments, env={**os.environ, **LOGIN}, **options)


def test_interrupted(cluster: LoadingCluster) -> None:
    with start(cluster.url(), "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdin.write(b"1\n" * 2500)
        process.stdin.flush()
        give_up_s = time.monotonic() + 60
        while len(cluster.documents) < 2500 and time.monotonic() < give_up_s:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert stderr.decode().splitlines() == ["Error: interrupted", "2,500 documents were written"]


@pytest.mark.parametrize(
    "kind", ["file", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("pipe", "generated"))]
)
def test_a_bar_on_a_terminal(cluster: LoadingCluster, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "numbers.jsonl"
    file.write_text("1\n" * 20_000)
    ours, theirs = pty.openpty()
    source = {"file": (str(file),), "pipe": ("-",), "generated": ("--generate", "20000")}[kind]
    with (
        file.open("rb") as stdin,
        start(
            cluster.url(),
            *source,
            stdin=subprocess.PIPE if kind == "pipe" else stdin,
            stdout=subprocess.PIPE,
            stderr=theirs,
        ) as process,
    ):
        os.close(theirs)
        if process.stdin is not None:
            process.stdin.write(file.read_bytes())
            process.stdin.close()
        shown = b""
        while True:
            try:
                shown += os.read(ours, 4096)
            except OSError:
                break
        printed = process.stdout.read().decode()
    os.close(ours)
    assert process.returncode == 0, shown
    assert b"loading" in shown
    assert b"documents" in shown
    assert printed.startswith("20,000 documents in ")


def test_parquet_from_a_pipe(cluster: LoadingCluster) -> None:
    arguments = ("load", cluster.url(), "-", "--format", "parquet")
    done = run_program(*HEADWATER, *arguments, input="PAR1", env={**LOGIN, "PATH": ""})
    assert done.returncode == 1
    assert done.stderr.startswith("Error: Parquet can't be read from a pipe. Give the file itself")


def test_memory_is_bounded(cluster: LoadingCluster, tmp_path: Path) -> None:
    """A file of 100 MB, in one row group, is read with far less than that."""
    note = "x" * 50_000
    table = pa.table({"id": pa.array(range(2000)), "note": pa.array([f"{number}{note}" for number in range(2000)])})
    file = tmp_path / "large.parquet"
    pq.write_table(table, file, compression="none", use_dictionary=False, row_group_size=2000)
    del table
    code = (
        "import resource, sys\n"
        "from headwater.transfer.key_template import KeyTemplate\n"
        "from headwater.transfer.tables import ParquetRows, TableDocuments\n"
        "source = TableDocuments(ParquetRows(open(sys.argv[1], 'rb')), KeyTemplate.parse('{id}'))\n"
        "batches = source.batches(); next(batches)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "rows = sum(len(batch) for batch in batches)\n"
        "print(rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=True)
    rows, grown_kib = map(int, done.stdout.split())
    assert rows > 1800
    assert grown_kib < 50_000, resource.getpagesize()
