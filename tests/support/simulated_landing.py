"""The landing pipeline without Spark: all of it but the executors, in this process, so that it can end anywhere."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.lake.verify import compare
from headwater.spark import task_read
from headwater.spark.freshness import Freshness
from headwater.spark.landing import Landing, LandingQuery
from headwater.spark.landing_loop import LandedBatch
from support.lake_checks import check_no_duplicates, table_rows
from support.landed_bucket import ALWAYS_FRESH, GROUPS, check_delivery
from support.small_lake import with_columns
from support.spark_node import SourceBucket

Step = Callable[[str], None]


def _no_step(name: str) -> None:
    """Nothing happens."""


def _never() -> bool:
    return False


def without_spark(patch: pytest.MonkeyPatch) -> None:
    """Tasks run here, where nothing was shipped to."""
    patch.setattr(task_read, "use_shipped_kernels", lambda: False)


@dataclass
class RunHere:
    """Runs tasks as executors do: from their pickles, perhaps twice. `step` is called before each of them."""

    step: Step = _no_step
    read_twice: Callable[[], bool] = _never

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        results = []
        for pickled in [pickle.dumps(task) for task in tasks]:
            self.step("run task")
            results.append(pickle.loads(pickled).run())
            if self.read_twice():
                self.step("run task again")
                pickle.loads(pickled).run()
        return results

    def cancel(self) -> None:
        """It ends by itself."""


@dataclass
class SimulatedLanding:
    """Needs `without_spark`."""

    bucket: SourceBucket
    folder: Path
    rules: MergeRules = field(default_factory=MergeRules)
    fresh: Freshness = ALWAYS_FRESH
    options: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    """Typed columns by table."""
    step: Step = _no_step
    """Called before everything that a crash could come before. What it raises ends the landing."""
    read_twice: Callable[[], bool] = _never
    batches: list[LandedBatch] = field(default_factory=list)
    """Of the last landing."""

    @property
    def landing(self) -> Landing:
        return Landing(
            source={**self.bucket.options, "minPartitions": "2", **self.options},
            into=str(self.folder),
            lake=with_columns(LakeSettings(merging=self.rules), self.columns),
            fresh=self.fresh,
            groups=GROUPS,
        )

    def start(self, *, every_s: float | None = None) -> LandingQuery:
        self.batches.clear()
        lake = self.landing.prepare()
        lake.step = self.step
        runner = RunHere(self.step, self.read_twice)
        return self.landing.run(runner, lake, every_s=every_s, on_batch=self.batches.append)

    def land(self) -> None:
        """Land what there is."""
        self.start().awaitTermination()

    def changes(self) -> list[dict[str, Any]]:
        return table_rows(self.folder / "changes")

    def check_equal(self) -> None:
        found = compare(self.bucket.settings, str(self.folder))
        assert found.is_equal, [one.sentence for one in found.findings]
        assert found.pending == 0
        changes = self.changes()
        check_no_duplicates(changes)
        check_delivery(changes)
