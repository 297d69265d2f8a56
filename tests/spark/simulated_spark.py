"""What Spark does with a source and a sink, in this process and one step after the other, so that it can end anywhere.

It keeps the checkpoint that Spark keeps, in the same files, and calls the source in Spark's order: after a crash the
batch that was not committed is planned again with the offsets of the log. Tasks get the reader and their partition
pickled. `step` is called before everything that a crash could come before; what it raises ends the process, so to
speak: all that is left is on disk.
"""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.datasource import DataSource

BATCHES_MAX = 100
"""A query that has no end by then goes in circles."""

Step = Callable[[str], None]


class ResultRow(NamedTuple):
    number: int
    result: bytes


@dataclass
class SimulatedSpark:
    """A session, as far as `Landing.start` uses one."""

    step: Step = lambda name: None
    read_twice: Callable[[], bool] = lambda: False
    """Whether a task is run a second time, with nobody who wants its results."""
    _source: type[DataSource] | None = None
    _options: dict[str, str] = field(default_factory=dict)

    @property
    def dataSource(self) -> SimulatedSpark:  # noqa: N802  (Spark's names)
        return self

    def register(self, source: type[DataSource]) -> None:
        self._source = source

    def addArtifacts(self, *paths: str, file: bool) -> None:  # noqa: N802
        """Its tasks run here: they have all that there is."""

    @property
    def readStream(self) -> SimulatedSpark:  # noqa: N802
        return self

    def format(self, name: str) -> SimulatedSpark:
        assert self._source is not None
        assert self._source.name() == name
        return self

    def options(self, **options: str) -> SimulatedSpark:
        self._options = options
        return self

    def load(self) -> SimulatedQuery:
        assert self._source is not None
        source = self._source(self._options)
        return SimulatedQuery(self, source.streamReader(source.schema()))


@dataclass
class SimulatedQuery:
    """A query. `start` runs it to its end."""

    session: SimulatedSpark
    reader: Any
    sink: Callable[[Any, int], None] | None = None
    folder: Path | None = None
    is_for_ever: bool = False

    # --- how it is written --------------------------------------------------------------------------------------

    @property
    def writeStream(self) -> SimulatedQuery:  # noqa: N802
        return self

    def foreachBatch(self, sink: Callable[[Any, int], None]) -> SimulatedQuery:  # noqa: N802
        self.sink = sink
        return self

    def option(self, name: str, value: str) -> SimulatedQuery:
        assert name == "checkpointLocation"
        self.folder = Path(value)
        return self

    def trigger(self, **trigger: Any) -> SimulatedQuery:
        assert trigger == {"availableNow": True}
        return self

    # --- what it does -------------------------------------------------------------------------------------------

    def start(self) -> SimulatedQuery:
        try:
            self._run_all()
        finally:
            # A process that is killed leaves no connection open, either.
            self.reader.stop()
        return self

    def _run_all(self) -> None:
        self._begin()
        last = self._last("offsets")
        if last >= 0 and self._last("commits") < last:
            self._run(last, self._start_of(last), self._offset(last))
        self.reader.prepareForTriggerAvailableNow()
        limit = self.reader.getDefaultReadLimit()
        for number in range(last + 1, last + 1 + BATCHES_MAX):
            start = self._start_of(number)
            self.session.step("plan")
            end = self.reader.latestOffset(json.loads(start), limit)
            text = json.dumps(end)
            if text == start:
                return
            json.dumps(self.reader.reportLatestOffset())
            self.session.step("log offsets")
            self._write("offsets", number, text)
            if number:
                self.reader.commit(json.loads(start))
            self._run(number, start, text)
        raise AssertionError("the query does not come to rest")

    def awaitTermination(self) -> None:  # noqa: N802
        """It has ended."""

    def _run(self, number: int, start: str, end: str) -> None:
        assert self.sink is not None
        self.session.step("plan tasks")
        frame = SimulatedFrame(self, self.reader.partitions(json.loads(start), json.loads(end)))
        self.sink(frame, number)
        self.session.step("log commit")
        self._write("commits", number, "{}")

    # --- the checkpoint -----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        assert self.folder is not None
        for name in ("offsets", "commits"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        if not (self.folder / "metadata").exists():
            (self.folder / "metadata").write_text(json.dumps({"id": str(uuid.uuid4())}))

    def _last(self, log: str) -> int:
        assert self.folder is not None
        return max((int(path.name) for path in (self.folder / log).iterdir()), default=-1)

    def _write(self, log: str, number: int, line: str) -> None:
        assert self.folder is not None
        (self.folder / log / str(number)).write_text("\n".join(["v1", "{}", line]))

    def _offset(self, number: int) -> str:
        assert self.folder is not None
        return (self.folder / "offsets" / str(number)).read_text().splitlines()[2]

    def _start_of(self, number: int) -> str:
        return self._offset(number - 1) if number else json.dumps(self.reader.initialOffset())


@dataclass
class SimulatedFrame:
    """The rows of a batch."""

    query: SimulatedQuery
    partitions: Iterable[Any]
    function: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]] | None = None

    @property
    def sparkSession(self) -> SimulatedSpark:  # noqa: N802
        return self.query.session

    def mapInArrow(self, function: Any, ddl: str) -> SimulatedFrame:  # noqa: N802
        return SimulatedFrame(self.query, self.partitions, function)

    def collect(self) -> list[ResultRow]:
        return [row for partition in self.partitions for row in self._run_task(partition)]

    def _run_task(self, partition: Any) -> list[ResultRow]:
        assert self.function is not None
        reader, partition, function = pickle.loads(pickle.dumps((self.query.reader, partition, self.function)))
        self.query.session.step("run task")
        results = [ResultRow(*row.values()) for batch in function(reader.read(partition)) for row in batch.to_pylist()]
        if self.query.session.read_twice():
            self.query.session.step("run task again")
            for _ in function(reader.read(partition)):
                pass
        return results
