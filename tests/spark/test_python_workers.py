"""What our tasks do to the Python processes of Spark that run them."""

from __future__ import annotations

import gc
import os
from types import SimpleNamespace

from pyspark.sql import SparkSession

from headwater.spark.executors import SparkRunner, keep_loaded

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
