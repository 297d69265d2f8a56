"""The landing pipeline on a simulated Spark: all of it but Spark itself, in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from landed_bucket import ALWAYS_MERGE, GROUPS, check_delivery
from simulated_spark import SimulatedSpark, Step
from spark_node import SourceBucket

from headwater.spark import landing, task_read
from headwater.spark.lake.lake import Lake, LakeSettings, with_columns
from headwater.spark.lake.merge_plan import MergeRules
from headwater.spark.lake.tasks import run_here
from headwater.spark.landing import LandedBatch, Landing
from headwater.spark.verification import compare
from lake_checks import check_no_duplicates, table_rows

_open_lake = Lake.open


def _no_step(name: str) -> None:
    """Nothing happens."""


def _never() -> bool:
    return False


def without_spark(patch: pytest.MonkeyPatch, step: Step = _no_step) -> None:
    """Let the pipeline do by itself what it lets Spark do. `step` is called before each step of the lake's."""

    def open_lake(*arguments: Any, **options: Any) -> Lake | None:
        return _open_lake(*arguments, **{**options, "step": step})

    patch.setattr(landing, "SparkRunner", lambda session: run_here)
    patch.setattr(landing.Lake, "open", open_lake)
    # There are no executors to ship anything to.
    patch.setattr(landing, "ship_kernels", lambda session: None)
    patch.setattr(task_read, "use_shipped_kernels", lambda: False)


@dataclass
class SimulatedLanding:
    """Needs `without_spark`."""

    bucket: SourceBucket
    folder: Path
    rules: MergeRules = ALWAYS_MERGE
    options: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    """Typed columns by table."""
    step: Step = _no_step
    read_twice: Callable[[], bool] = _never
    batches: list[LandedBatch] = field(default_factory=list)
    """Of the last landing."""

    @property
    def landing(self) -> Landing:
        return Landing(
            source={**self.bucket.options, "minPartitions": "2", **self.options},
            into=str(self.folder),
            lake=with_columns(LakeSettings(merging=self.rules), self.columns),
            groups=GROUPS,
        )

    @property
    def spark(self) -> Any:
        return SimulatedSpark(step=self.step, read_twice=self.read_twice)

    def land(self) -> None:
        """Land what there is."""
        self.batches.clear()
        self.landing.start(self.spark, on_batch=self.batches.append)

    def changes(self) -> list[dict[str, Any]]:
        return table_rows(self.folder / "changes")

    def check_equal(self) -> None:
        comparison = compare(self.bucket.settings, str(self.folder))
        assert comparison.is_equal, comparison
        changes = self.changes()
        check_no_duplicates(changes)
        check_delivery(changes)
