"""What runs on the executors of a session: the tasks of a lake, as one Spark job, with the compiled kernels at hand.

`SparkRunner` is the runner of landings and of `headwater verify`. A task that it runs must be picklable, and may be run
twice.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import pickle
import signal
import sys
import uuid
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkFiles, TaskContext, cloudpickle
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from headwater import telemetry
from headwater.errors import SparkEnded
from headwater.kernels.machine_code import code_folder, compile_kernels, only_writer, sources_digest
from headwater.lake.catalogs import Catalog
from headwater.lake.chosen_rows import Transform, TransformFunction
from headwater.lake.lake import Task, TaskOutcome, results, run_task
from headwater.spark.query_errors import query_error
from headwater.spark.session import SessionCatalog, hide_password, is_remote, spark_logs, start_session, use_this_python

_DESCRIPTION, _POOL = "spark.job.description", "spark.scheduler.pool"
RESULT_SCHEMA = pa.schema([pa.field("number", pa.int64()), pa.field("result", pa.binary())])
RESULT_DDL = "number BIGINT, result BINARY"


class SparkRunner:
    """One Spark task for each task of a landing. `name` is what Spark's pages show its jobs under.

    Several may share a session. Each cancels its own jobs only, and has a pool of its own (Spark's "Fair Scheduler
    Pools"), unless its caller has chosen one: where the session schedules by FAIR, which those that we start do, each
    then gets an equal share of the executors.
    """

    def __init__(self, spark: SparkSession, name: str = "headwater") -> None:
        self._spark = spark
        self._name = name
        self._tag = f"headwater-{uuid.uuid4().hex}"
        self._is_prepared = False

    def session_catalog(self, name: str | None) -> Catalog:
        """The session's catalog of a name, or its current one, for the tables of a landing."""
        return SessionCatalog(self._spark, name)

    def cancel(self) -> None:
        """End the job that is running, if there is one. For any thread."""
        # A session that has ended by itself has nothing to cancel.
        with contextlib.suppress(Py4JError, PySparkException, ConnectionError):
            if is_remote(self._spark):
                self._spark.interruptTag(self._tag)
            else:
                self._spark.sparkContext.cancelJobsWithTag(self._tag)

    def __call__(self, tasks: Sequence[Task]) -> list[Any]:
        if not tasks:
            return []
        try:
            return results(self._outcomes(tasks))
        except (PySparkException, Py4JJavaError) as error:
            raise query_error(error) from error
        except (Py4JError, ConnectionError) as error:
            raise SparkEnded(
                "Spark has ended unexpectedly", hint="Start again: the landing resumes here. Spark's log may say why"
            ) from error

    def _outcomes(self, tasks: Sequence[Task]) -> list[TaskOutcome]:
        if not self._is_prepared:
            prepare_workers(self._spark)
            self._is_prepared = True
        count, job = len(tasks), _RunOne(tuple(pickle.dumps(task) for task in tasks), telemetry.traceparent())
        with self._marked(type(tasks[0])):
            if not is_remote(self._spark):
                # The first query of a session plans and compiles for seconds, which a job without SQL does not.
                return self._spark.sparkContext.parallelize(range(count), count).map(job.run).collect()
            # A range has exactly one row in each of its partitions, and needs no shuffle.
            rows = self._spark.range(0, count, 1, count).mapInArrow(job, RESULT_DDL).collect()
        return results_of((row.number, row.result) for row in rows)

    @contextlib.contextmanager
    def _marked(self, kind: type[Task]) -> Iterator[None]:
        """Jobs of this thread can be found and cancelled meanwhile. The caller's own marks come back."""
        context = None if is_remote(self._spark) else self._spark.sparkContext
        marks = {_DESCRIPTION: f"{self._name}: {(kind.__doc__ or '').partition(chr(10))[0]}", _POOL: self._name}
        before: dict[str, Any] = {}
        if context is None:
            self._spark.addTag(self._tag)
        else:
            context.addJobTag(self._tag)
            before = {mark: context.getLocalProperty(mark) for mark in marks}
            for mark, value in marks.items():
                if mark != _POOL or before[_POOL] is None:
                    context.setLocalProperty(mark, value)
        try:
            yield
        finally:
            with contextlib.suppress(Py4JError, ConnectionError):
                if context is None:
                    self._spark.removeTag(self._tag)
                else:
                    context.removeJobTag(self._tag)
                    for mark, value in before.items():
                        context.setLocalProperty(mark, value)


def shippable(function: TransformFunction) -> Transform:
    """A transform for executors that may not have its module: the code of the module itself is sent."""
    module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
    if module is None or module.__name__ in ("__main__", "builtins"):
        return Transform.of(function, cloudpickle.dumps)
    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    try:
        return Transform.of(function, cloudpickle.dumps)
    finally:
        cloudpickle.unregister_pickle_by_value(module)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def started_session(*, master: str, memory: str) -> Iterator[SparkSession]:
    """A session of its own for runners, ready for their tasks. It ends with the block."""
    with spark_logs() as folder:
        on_interrupt = signal.getsignal(signal.SIGINT)
        spark = start_session(master=master, memory=memory, log_folder=folder)
        # Spark's handler cancels all jobs first, which would look like a failure.
        signal.signal(signal.SIGINT, on_interrupt)
        try:
            # Here, as runners of several threads would ship the kernels at the same time.
            prepare_workers(spark)
            yield spark
        finally:
            # One that has died by itself has nothing to stop.
            with contextlib.suppress(Py4JError, PySparkException, ConnectionError):
                spark.stop()


@dataclass(frozen=True, slots=True)
class _RunOne:
    """What each Spark task does: run the tasks whose numbers it is given."""

    pickled: tuple[bytes, ...]
    parent: str | None = None
    """The `traceparent` of the job."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield result_batch(self.run(number), number)

    def run(self, number: int) -> TaskOutcome:
        use_shipped_kernels()
        outcome = run_task(pickle.loads(self.pickled[number]), self.parent)
        keep_loaded("lake")
        return outcome


@cache
def keep_loaded(after: str) -> None:
    """To be called at the end of a task. The first task of a kind is the one that loads things.

    A Python worker that is used again collects its garbage when a task has ended. With Arrow, pandas and the compiled
    kernels loaded that is a walk over a few hundred thousand objects which are all in use: it took a third of the
    processor time of the workers, more than anything else that they do. Objects that are frozen are left out of the
    walk. A process that is no worker of Spark, as where tests run tasks by themselves, is left alone.
    """
    if TaskContext.get() is not None:
        gc.collect()
        gc.freeze()


def result_batch(result: Any, number: int = 0) -> pa.RecordBatch:
    """One result as a batch of `RESULT_SCHEMA`."""
    return pa.RecordBatch.from_pydict({"number": [number], "result": [pickle.dumps(result)]}, RESULT_SCHEMA)


def results_of(rows: Iterable[tuple[int, bytes]]) -> list[Any]:
    """The results in the order of their tasks, from rows with `RESULT_DDL`."""
    return [pickle.loads(result) for _, result in sorted(rows, key=lambda row: row[0])]


def prepare_workers(spark: SparkSession) -> None:
    """Let the workers of a session run this Python, with the compiled kernels, and keep passwords out of its pages."""
    use_this_python(spark)
    ship_kernels(spark)
    hide_password(spark)


# --- compiled kernels for executors that have none --------------------------------------------------------------------
#
# They are compiled on the driver and carried by Spark. Compiling takes seconds and would happen in the first task of
# every new executor. Where driver and executors share a home, or ran Headwater before, there is nothing to carry.
# Machine code of another kind of processor is not used, by the name of its file: it is compiled there.


def _archive_name() -> str:
    return f"headwater-kernels-{sources_digest()}.zip"


_SHIPPED: set[tuple[str, str]] = set()
"""Remote sessions that have them, by their ids. A file of one name can be given to a session once."""


def ship_kernels(spark: SparkSession) -> None:
    """Compile what is not compiled yet, and let all executors of a session have it."""
    if is_remote(spark):
        shipped = (spark.session_id, _archive_name())  # type: ignore[attr-defined]
        if shipped in _SHIPPED:
            return
        _SHIPPED.add(shipped)
    elif Path(SparkFiles.get(_archive_name())).exists():
        return  # Another session of the context may have shipped them. What was compiled since can't replace them.
    compile_kernels("headwater.protocol", "headwater.client")
    folder = Path(mkdtemp(prefix="headwater-kernels-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    archive = folder / _archive_name()
    with zipfile.ZipFile(archive, "w") as packed:
        # Other processes may be writing there: what is not complete has another name.
        for path in sorted(code_folder().glob("*.o")):
            packed.write(path, path.name)
    # Spark 3.5 has artifacts in remote sessions only, and these have no context.
    if is_remote(spark):
        spark.addArtifacts(str(archive), file=True)
    else:
        spark.sparkContext.addFile(str(archive))


@cache
def use_shipped_kernels() -> bool:
    """In a task, before the first kernel is called: unpack what was shipped, and is not on this machine yet.

    Returns whether anything was unpacked.
    """
    if TaskContext.get() is None:
        return False  # tests run tasks without Spark
    archive = Path(SparkFiles.get(_archive_name()))
    if not archive.exists():
        return False
    folder = code_folder()
    with zipfile.ZipFile(archive) as packed:
        if not _missing(packed, folder):
            return False
        # Other workers of the machine look there meanwhile: a file is there as a whole, or not at all.
        with only_writer(folder), TemporaryDirectory(dir=folder.parent) as unpacked:
            names = _missing(packed, folder)
            packed.extractall(unpacked, names)
            for name in names:
                Path(unpacked, name).replace(folder / name)
            return bool(names)


def _missing(packed: zipfile.ZipFile, folder: Path) -> list[str]:
    return [name for name in packed.namelist() if not (folder / name).exists()]
