"""headwater load of tables on standard input."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.forked_program import HEADWATER, run_program
from support.loading_server import PASSWORD, USER, LoadingCluster

LOGIN = {"HEADWATER_USER": USER, "HEADWATER_PASSWORD": PASSWORD}


@pytest.fixture
def cluster() -> Iterator[LoadingCluster]:
    with LoadingCluster().running() as running:
        yield running


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
