"""What our tasks do to the Python processes of Spark that run them."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from pyspark.sql import SparkSession

from headwater.spark import executors
from headwater.spark.executors import SparkRunner, keep_loaded, ship_kernels

TASKS = 8


def test_what_a_worker_has_loaded_is_no_garbage_to_look_for(spark: SparkSession) -> None:
    run = SparkRunner(spark)
    pids = set(run([SimpleNamespace(run=os.getpid)] * TASKS))
    assert os.getpid() not in pids
    frozen = run([SimpleNamespace(run=gc.get_freeze_count)] * TASKS)
    assert max(frozen) > 10_000, "Arrow alone has more"


def test_a_process_that_is_no_worker_is_left_alone() -> None:
    frozen = gc.get_freeze_count()
    keep_loaded("test")
    assert gc.get_freeze_count() == frozen


def test_another_session_of_the_context_can_be_used_after_more_was_compiled(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ship_kernels(spark)
    (tmp_path / "another.o").write_bytes(b"compiled")
    monkeypatch.setattr(executors, "code_folder", lambda: tmp_path)
    ship_kernels(spark.newSession())
