"""The `dcp` source called like Spark calls it, but without Spark: for tests of its plans and of what its tasks read.

It is imported only where it is used: landings are tested with PySpark 3.5, too, which has no Python data sources.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.landing.loop import LandedBatch
from headwater.landing.planning import Freshness
from headwater.landing.query import Landing, LandingQuery
from headwater.spark.versions import ReadAllAvailable, ReadLimit
from support.lake_model import table_rows, with_columns
from support.landings import ALWAYS_FRESH, GROUPS, SourceBucket, check_tables

Row = dict[str, Any]


class DrivenStream:
    """A stream, as the planner sees it."""

    def __init__(self, bucket: SourceBucket, **options: str) -> None:
        from headwater.spark.source import DcpDataSource, DcpStreamReader

        source = DcpDataSource({**bucket.options, **options})
        reader = source.streamReader(source.schema())
        assert isinstance(reader, DcpStreamReader)
        self.reader = reader

    def __enter__(self) -> DrivenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.stop()

    def initial(self) -> str:
        return json.dumps(self.reader.initialOffset())

    def latest(self, start: str, limit: ReadLimit | None = None) -> str:
        """Return where a batch from `start` ends."""
        return json.dumps(self.reader.latestOffset(json.loads(start), limit or ReadAllAvailable()))

    def partitions(self, start: str, end: str) -> list[Any]:
        return list(self.reader.partitions(json.loads(start), json.loads(end)))

    def read(self, start: str, end: str) -> list[Row]:
        """Return what the tasks of a batch read."""
        return [row for partition in self.partitions(start, end) for row in self.read_partition(partition)]

    def read_partition(self, partition: Any) -> list[Row]:
        reader, partition = pickle.loads(pickle.dumps((self.reader, partition)))
        return rows_of(reader.read(partition))


def read_batch(bucket: SourceBucket, **options: str) -> list[Row]:
    """Return what `spark.read` returns."""
    reader = batch_reader(bucket, **options)
    with closing(reader):
        return [row for partition in reader.partitions() for row in rows_of(reader.read(partition))]


def batch_reader(bucket: SourceBucket, **options: str) -> Any:
    """Return the reader of a batch, with a method `close`."""
    from headwater.spark.source import DcpBatchReader, DcpDataSource

    class ClosedReader(DcpBatchReader):
        def close(self) -> None:
            if self._watching is not None:
                self._watching.close()

    source = DcpDataSource({**bucket.options, **options})
    return ClosedReader(source._checked, source.schema())


def rows_of(batches: Any) -> list[Row]:
    rows: list[Row] = []
    for batch in batches:
        rows += batch.to_pylist()
    return rows


# The landing pipeline without Spark: everything except the executors, in this process, so that it can end anywhere.


Step = Callable[[str], None]


def _no_step(name: str) -> None:
    """Do nothing."""


def _never() -> bool:
    return False


@dataclass
class RunHere:
    """Runs tasks like executors do: from their pickles, perhaps twice. `step` is called before each task, `before`
    and `after` around each job."""

    step: Step = _no_step
    read_twice: Callable[[], bool] = _never
    before: Callable[[Sequence[Any]], object] = len
    after: Callable[[Sequence[Any]], object] = len

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        results = []
        self.before(tasks)
        for pickled in [pickle.dumps(task) for task in tasks]:
            self.step("run task")
            results.append(pickle.loads(pickled).run())
            if self.read_twice():
                self.step("run task again")
                pickle.loads(pickled).run()
        self.after(tasks)
        return results

    def cancel(self) -> None:
        """Do nothing: the job ends by itself."""


@dataclass
class SimulatedLanding:
    """Lands without Spark, and checks the tables."""

    bucket: SourceBucket
    folder: Path
    rules: MergeRules = field(default_factory=MergeRules)
    fresh: Freshness = ALWAYS_FRESH
    options: dict[str, str] = field(default_factory=dict)
    consistent: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    """Typed columns by table."""
    groups: int | None = GROUPS
    step: Step = _no_step
    """Called at every point where a crash is possible. An exception that it raises ends the landing."""
    read_twice: Callable[[], bool] = _never
    batches: list[LandedBatch] = field(default_factory=list)
    """The batches of the last landing."""

    @property
    def landing(self) -> Landing:
        return Landing(
            source={**self.bucket.options, "minPartitions": "2", **self.options},
            into=str(self.folder),
            lake=with_columns(LakeSettings(merging=self.rules), self.columns),
            fresh=self.fresh,
            consistent=self.consistent,
            groups=self.groups,
        )

    def start(self, *, every: float | None = None) -> LandingQuery:
        self.batches.clear()
        lake = self.landing.prepare()
        lake.step = self.step
        runner = RunHere(self.step, self.read_twice)
        return self.landing.start(runner, lake=lake, every=every, on_batch=self.batches.append)

    def land(self) -> None:
        """Land everything in the bucket."""
        self.start().awaitTermination()

    def changes(self) -> list[dict[str, Any]]:
        return table_rows(self.folder / "changes")

    def check_equal(self) -> None:
        check_tables(self.bucket, self.folder)
