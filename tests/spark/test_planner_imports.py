"""What a planner loads: its process is new for every query, so it loads nothing that only reading needs."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"headwater.client.asyncio_client", "headwater.client.batches", "llvmlite", "pandas", "deltalake"}


def loaded_after(program: str) -> set[str]:
    command = [sys.executable, "-c", f"{program}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_it_loads_neither_kernels_nor_pandas() -> None:
    assert not HEAVY & loaded_after("import headwater.spark.source")


def test_a_task_that_reads_does() -> None:
    assert loaded_after("import headwater.spark.task_read") >= HEAVY - {"deltalake", "pandas"}
