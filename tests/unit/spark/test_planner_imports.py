"""What a planner loads: its process is new for every query, so it loads nothing that only reading needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"headwater.client.asyncio_client", "headwater.client.batches", "numba", "pandas", "deltalake"}
HAND_ON = """
from headwater.spark.planning import TaskPlan
from headwater.spark.selection_watch import PlannedBucket
from headwater.spark.share_source import ShareSource
from headwater.spark.source import DcpPartition

source = ShareSource({"url": "couchbase://127.0.0.1/b"})
reader = source.streamReader(source.schema())
(batch,) = reader.read(DcpPartition(TaskPlan(), PlannedBucket(view=None)))
assert batch.num_rows == 1
"""


def loaded_after(program: str) -> set[str]:
    command = [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("program", ["import headwater.spark.source", HAND_ON], ids=["plan", "hand a share on"])
def test_it_loads_neither_kernels_nor_pandas(program: str) -> None:
    assert not HEAVY & loaded_after(program)


def test_a_task_that_reads_does() -> None:
    assert loaded_after("import headwater.spark.landing_tasks") >= HEAVY - {"deltalake"}
