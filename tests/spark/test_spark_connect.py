"""Spark Connect and spark-submit: sessions that others have made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.fault_proxy import free_port
from support.landings import LOGIN, SourceBucket, check_tables
from support.node_process import PASSWORD

CLIENT = Path(__file__).parents[1] / "support" / "connect_client.py"
SUBMITTED = """\
import sys
from pyspark.sql import SparkSession
from headwater.spark import land

land(SparkSession.builder.getOrCreate(), sys.argv[1], sys.argv[2]).awaitTermination()
"""
PAGES = ("jobs", "stages", "SQL", "StreamingQuery", "connect")
"""Of Spark, in a browser."""
END_S_MAX = 300.0

pytestmark = pytest.mark.soak


def _environment() -> dict[str, str]:
    return {**os.environ, **LOGIN, "PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}


class ConnectClient:
    """The program, and what it tells."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def told(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"it has ended; its log:\n{self._log.read_text()}"
        step: dict[str, Any] = json.loads(line)
        return step

    def land(self, name: str, *, rows: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{name}\n")
        self._process.stdin.flush()
        assert self.told() == {"landed": name, "rows": rows}


@contextmanager
def connect_client(bucket: SourceBucket, folder: Path, *, ui_port: int) -> Iterator[ConnectClient]:
    log = folder / "client.log"
    arguments = f"--conf spark.ui.port={ui_port} pyspark-shell"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, str(CLIENT), bucket.url, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env={**_environment(), "PYSPARK_SUBMIT_ARGS": arguments},
            start_new_session=True,
        )
    with process:
        try:
            yield ConnectClient(process, log)
        except BaseException:
            os.killpg(process.pid, 9)
            raise
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(END_S_MAX) == 0, log.read_text()


@pytest.mark.spark_versions("Spark Connect", since="4.0")
def test_a_client_of_spark_connect_reads_and_lands(bucket: SourceBucket, tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect needs pyspark[connect]")
    for vbucket in range(4):
        bucket.put(bucket.keys("a", 5, vbucket=vbucket), b'{"a":1}')
    ui_port = free_port()
    with connect_client(bucket, tmp_path, ui_port=ui_port) as client:
        assert client.told() == {"read": 20, "session": "pyspark.sql.connect.session"}
        assert client.told() == {"streamed": 20, "read_again": 20}
        assert "has no option 'colections'" in client.told()["refused"]
        assert client.told()["full"].startswith("the disk of the tables is full. Free space there")

        client.land("all", rows=20)
        assert len(check_tables(bucket, tmp_path / "lake")) == 20

        bucket.put(bucket.keys("a", 2, vbucket=0), b'{"a":2}')
        bucket.delete(bucket.keys("a", 1, vbucket=1))
        client.land("what has changed", rows=3)
        bucket.fail_over(0, 5)
        client.land("a rollback", rows=1)
        changes = check_tables(bucket, tmp_path / "lake")
        assert [row["op"] for row in changes if row["vbucket"] == 0 and row["op"] == "rollback"] == ["rollback"]
        pages = [httpx.get(f"http://localhost:{ui_port}/{page}/").raise_for_status().text for page in PAGES]
        assert any("redacted" in page for page in pages), "the options are shown somewhere"
        assert not [name for name, page in zip(PAGES, pages, strict=True) if PASSWORD in page]
        assert PASSWORD not in (tmp_path / "client.log").read_text()


@pytest.mark.spark_versions("spark-submit")
def test_a_script_is_submitted(bucket: SourceBucket, tmp_path: Path) -> None:
    submit = shutil.which("spark-submit", path=str(Path(sys.executable).parent))
    assert submit is not None, "it comes with PySpark"
    bucket.put(bucket.keys("a", 5, vbucket=1), b'{"a":1}')
    script = tmp_path / "script.py"
    script.write_text(SUBMITTED)
    command = [submit, "--master", "local[2]", str(script), bucket.url, str(tmp_path / "lake")]
    done = subprocess.run(
        command, env=_environment(), cwd=tmp_path, capture_output=True, text=True, check=False, timeout=END_S_MAX
    )
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert len(check_tables(bucket, tmp_path / "lake")) == 5
