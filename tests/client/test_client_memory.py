"""However much there is to read, and however slowly it is taken, a client holds a bounded part of it, in few files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.forked_program import HEADWATER, run_program
from support.node_process import PASSWORD, USER, NodeProcess

MB = 1_000_000
DRAIN_S_MAX = 300.0
SMALL_DOCUMENTS = 500
INTERLEAVED_DOCUMENTS = 15_000
FILES_MAX = 200
TESTS = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    documents: int
    value_bytes: int
    vbuckets: int
    grown_bytes_max: int

    def __str__(self) -> str:
        return f"{self.documents} documents of {self.value_bytes} bytes in {self.vbuckets} vbuckets"


FEW_LARGE_SNAPSHOTS = Data(documents=100_000, value_bytes=2000, vbuckets=2, grown_bytes_max=100 * MB)
"""Each is larger than what may be held of snapshots in memory."""
MANY_SMALL_SNAPSHOTS = Data(documents=1_000_000, value_bytes=1000, vbuckets=1024, grown_bytes_max=200 * MB)


@pytest.fixture(
    scope="module", params=[FEW_LARGE_SNAPSHOTS, pytest.param(MANY_SMALL_SNAPSHOTS, marks=pytest.mark.soak)], ids=str
)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[NodeProcess, Data]]:
    """A node with two buckets: `small` has a few documents."""
    data: Data = request.param
    folder = tmp_path_factory.mktemp("memory") / "data"
    with NodeProcess(folder, "--vbuckets", str(data.vbuckets), "--bucket", "default", "--bucket", "small") as node:
        node.start()
        load(node, "small", SMALL_DOCUMENTS, data.value_bytes)
        load(node, "default", data.documents, data.value_bytes)
        yield node, data


def load(node: NodeProcess, bucket: str, documents: int, value_bytes: int) -> None:
    what = ("--generate", str(documents), "--value-bytes", str(value_bytes))
    login = ("--user", USER, "--password", PASSWORD)
    ended = run_program(*HEADWATER, "load", f"{node.url}/{bucket}", *what, *login, timeout=DRAIN_S_MAX)
    assert ended.returncode == 0, ended.stderr


def run(*arguments: str) -> str:
    """A Python process; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    ended = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, timeout=DRAIN_S_MAX, check=False, env=environment,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def drain(*arguments: str) -> dict[str, Any]:
    """What the process that reads reports."""
    report: dict[str, Any] = json.loads(run("-m", "support.draining_process", *arguments))
    return report


@pytest.mark.parametrize(
    ("client", "speed"),
    [
        ("asyncio", "stopped"),
        pytest.param("blocking", "slow", marks=pytest.mark.soak),
        pytest.param("asyncio", "fast", marks=pytest.mark.soak),
        pytest.param("blocking", "stopped", marks=pytest.mark.soak),
    ],
)
def test_memory_is_bounded(loaded: tuple[NodeProcess, Data], client: str, speed: str) -> None:
    node, data = loaded
    report = drain("memory", f"{node.url}/small", f"{node.url}/default", client, speed)
    grown_mb, took_s = report["grown_bytes"] / MB, report["took_s"]
    print(f"{client}, {speed}: {grown_mb:.0f} MB more, {report['batches']} batches, {took_s:.1f} s")
    assert report["rows"] == data.documents
    assert report["grown_bytes"] < data.grown_bytes_max


def test_files_are_few(tmp_path: Path) -> None:
    """Snapshots too large for memory may come interleaved, from many vbuckets, to a process that may open few files.

    A small window makes the node take turns, as other servers do with any.
    """
    with NodeProcess(tmp_path / "data", "--vbuckets", "1024") as node:
        node.start()
        load(node, "default", INTERLEAVED_DOCUMENTS, 100)
        report = drain("few-files", f"{node.url}/default", str(FILES_MAX))
    assert report["rows"] == INTERLEAVED_DOCUMENTS
