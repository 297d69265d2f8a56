"""Runs the tasks of a lake on the executors of a session, as one Spark job, with the compiled kernels.

`SparkRunner` is the runner of landings and of `headwater verify`. Its tasks must be picklable, and may run twice.
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
    """Runs one Spark task for each task of a landing. Spark's pages show its jobs as `name`.

    Several runners may share a session. Each cancels only its own jobs, and has its own pool (Spark's "Fair Scheduler
    Pools"), unless its caller has chosen one: in sessions with the FAIR scheduler, such as those that we start, each
    then gets an equal share of the executors.
    """

    def __init__(self, spark: SparkSession, name: str = "headwater") -> None:
        self._spark = spark
        self._name = name
        self._tag = f"headwater-{uuid.uuid4().hex}"
        self._is_prepared = False

    def session_catalog(self, name: str | None) -> Catalog:
        """Return the session's catalog with this name, or its current one, for the tables of a landing."""
        return SessionCatalog(self._spark, name)

    def cancel(self) -> None:
        """Cancel the running job, if there is one. May be called from any thread."""
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
                # The first query of a session spends seconds on planning and compiling; a job without SQL does not.
                return self._spark.sparkContext.parallelize(range(count), count).map(job.run).collect()
            # A range has exactly one row per partition, and needs no shuffle.
            rows = self._spark.range(0, count, 1, count).mapInArrow(job, RESULT_DDL).collect()
        return results_of((row.number, row.result) for row in rows)

    @contextlib.contextmanager
    def _marked(self, kind: type[Task]) -> Iterator[None]:
        """Mark the jobs of this thread, to find and cancel them. The caller's marks are restored at the end."""
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
    """Make a transform for executors that may lack its module: pickle the code of the module, too."""
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
    """Start a session for runners, ready for their tasks. It ends with the block."""
    with spark_logs() as folder:
        on_interrupt = signal.getsignal(signal.SIGINT)
        spark = start_session(master=master, memory=memory, log_folder=folder)
        # Restore our handler: Spark's cancels all jobs first, which would look like a failure.
        signal.signal(signal.SIGINT, on_interrupt)
        try:
            # Prepare here, because runners in several threads would ship the kernels at the same time.
            prepare_workers(spark)
            yield spark
        finally:
            # A session that has died has nothing to stop.
            with contextlib.suppress(Py4JError, PySparkException, ConnectionError):
                spark.stop()


@dataclass(frozen=True, slots=True)
class _RunOne:
    """The function of each Spark task: runs the tasks whose numbers it gets."""

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
    """Freeze loaded objects. Called at the end of a task, because the first task of a kind loads most of them.

    A reused Python worker collects its garbage at the end of each task. With Arrow, pandas and the compiled kernels
    loaded, that walks over a few hundred thousand live objects: it took a third of the workers' processor time, more
    than anything else. The walk skips frozen objects. Processes that are not Spark workers, such as tests that run
    tasks, are left alone.
    """
    if TaskContext.get() is not None:
        gc.collect()
        gc.freeze()


def result_batch(result: Any, number: int = 0) -> pa.RecordBatch:
    """One result as a batch of `RESULT_SCHEMA`."""
    return pa.RecordBatch.from_pydict({"number": [number], "result": [pickle.dumps(result)]}, RESULT_SCHEMA)


def results_of(rows: Iterable[tuple[int, bytes]]) -> list[Any]:
    """Return the results in the order of their tasks, from rows with `RESULT_DDL`."""
    return [pickle.loads(result) for _, result in sorted(rows, key=lambda row: row[0])]


def prepare_workers(spark: SparkSession) -> None:
    """Make the workers of a session run this Python, ship the compiled kernels, and hide passwords in its pages."""
    use_this_python(spark)
    ship_kernels(spark)
    hide_password(spark)


# --- compiled kernels for executors that have none --------------------------------------------------------------------
#
# They are compiled on the driver and shipped by Spark, because compiling takes seconds and would happen in the first
# task of every new executor. If driver and executors share a home, or have run Headwater before, nothing is unpacked.
# File names identify the kind of processor: machine code of another kind is not used, and the executor compiles.


def _archive_name() -> str:
    return f"headwater-kernels-{sources_digest()}.zip"


_SHIPPED: set[tuple[str, str]] = set()
"""Remote sessions that have the kernels. A session accepts a file name only once."""


def ship_kernels(spark: SparkSession) -> None:
    """Compile missing kernels, and ship all of them to the executors of a session."""
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
        # Other processes may be writing here: incomplete files have other names.
        for path in sorted(code_folder().glob("*.o")):
            packed.write(path, path.name)
    # Spark 3.5 has artifacts only in remote sessions, and these have no context.
    if is_remote(spark):
        spark.addArtifacts(str(archive), file=True)
    else:
        spark.sparkContext.addFile(str(archive))


@cache
def use_shipped_kernels() -> bool:
    """In a task, before it calls the first kernel: unpack shipped kernels that are missing on this machine.

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
        # Other workers of the machine read this folder: each file must appear completely or not at all.
        with only_writer(folder), TemporaryDirectory(dir=folder.parent) as unpacked:
            names = _missing(packed, folder)
            packed.extractall(unpacked, names)
            for name in names:
                Path(unpacked, name).replace(folder / name)
            return bool(names)


def _missing(packed: zipfile.ZipFile, folder: Path) -> list[str]:
    return [name for name in packed.namelist() if not (folder / name).exists()]
