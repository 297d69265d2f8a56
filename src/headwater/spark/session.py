"""A Spark session for a caller that has none: on this machine, quiet, and with this Python. Also what all sessions
need: workers with this Python, and hidden passwords.

`SessionCatalog` is a catalog of a session: its own, a Hive metastore, Unity Catalog, or any other that Spark supports.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from py4j.protocol import Py4JError, Py4JJavaError
from pyspark import SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import Row, SparkSession

from headwater.errors import CatalogError, CatalogUnreachable, HeadwaterError, InvalidInput, QueryFailed
from headwater.lake.catalogs import TableEntry
from headwater.spark.query_errors import query_error

_LOGGING = """
rootLogger.level = error
rootLogger.appenderRef.file.ref = file
appender.file.type = RollingFile
appender.file.name = file
appender.file.fileName = FOLDER/spark.log
appender.file.filePattern = FOLDER/spark.log.1
appender.file.policies.type = SizeBasedTriggeringPolicy
appender.file.policies.size = 10MB
appender.file.strategy.type = DefaultRolloverStrategy
appender.file.strategy.max = 1
appender.file.layout.type = PatternLayout
appender.file.layout.pattern = %d{yyyy-MM-dd HH:mm:ss} %p %c{1}: %m%n
"""
_OUTPUT = "spark.out"
"""The standard output and standard error of Java and the workers."""


_ARROW = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Arrow's Java library checks bounds and nulls at every access. Spark has already done that; without these checks,
rows of Python cost Java a sixth less."""


_MASTERS = "Give one that answers, such as local[*], local[2] or spark://host:7077"


@contextmanager
def spark_logs() -> Iterator[Path]:
    """Make a folder for Spark's log. It is removed at the end, unless Spark fails: then the error names it."""
    folder = Path(mkdtemp(prefix="headwater-spark-"))
    is_kept = False
    try:
        yield folder
    except QueryFailed as error:
        is_kept = True
        raise QueryFailed(error.reason, hint=f"{error.hint}{error.hint and '. '}Spark's log is in {folder}") from error
    except HeadwaterError as error:
        is_kept = str(folder) in str(error)
        raise
    finally:
        if not is_kept:
            rmtree(folder, ignore_errors=True)


def start_session(*, master: str = "local[*]", memory: str = "2g", log_folder: Path) -> SparkSession:
    """Return the active session, or a new one, which writes its log to a folder and nothing to the terminal. Raises
    `InvalidInput` if Java is missing, or if Spark does not start with this master and memory."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    _check_java()
    if master != "yarn" and not master.startswith(("local", "spark", "k8s")):
        raise InvalidInput(f"Spark knows no master {master!r}", hint=_MASTERS)
    # Spark finds data sources, and runs its workers, with these two.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    log_folder.mkdir(parents=True, exist_ok=True)
    logging = log_folder / "log4j2.properties"
    # The file may contain only ASCII, with JSON's escapes.
    logging.write_text(_LOGGING.replace("FOLDER", json.dumps(str(log_folder.resolve()))[1:-1]))
    settings = {
        "spark.master": master,
        "spark.app.name": "headwater",
        "spark.driver.memory": memory,
        # A URI has no spaces, at which Spark splits options.
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={logging.resolve().as_uri()} {_ARROW}",
        # Jobs of several landings share the executors; those of one landing run one after the other.
        "spark.scheduler.mode": "FAIR",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "8",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        # Larger batches between Spark and Python, because the cost is mostly per batch.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
        # Pass the filters of a query to the source, which then need not read the excluded rows.
        "spark.sql.python.filterPushdown.enabled": "true",
    }
    conf = SparkConf().setAll(list(settings.items()))
    try:
        if SparkContext._gateway is None:
            # Otherwise PySpark starts Java with our standard output and standard error, and Java writes there before
            # it has read its logging configuration.
            with open(log_folder / _OUTPUT, "ab") as output:
                gateway = launch_gateway(conf, {"stdout": output, "stderr": output})  # type: ignore[no-untyped-call]
            SparkContext._ensure_initialized(gateway=gateway)
        return SparkSession.builder.config(conf=conf).getOrCreate()
    except (PySparkException, Py4JError) as error:
        raise InvalidInput(
            f"Spark does not start with {memory} of memory and the master {master!r}",
            hint=f"{_MASTERS}. Spark says more in {log_folder}",
        ) from error


def use_this_python(spark: SparkSession) -> None:
    """Make workers run this program's Python. Raises `InvalidInput` if theirs lacks Headwater and can't be changed.

    Spark runs workers with `PYSPARK_PYTHON`, or else the first python3 on the path. In an environment that is not
    activated, such as that of a notebook's kernel, that is another Python.
    """
    if is_remote(spark):
        return  # the server chooses
    context = spark.sparkContext
    if context.pythonExec in (sys.executable, *_HAVE_HEADWATER):
        return
    if "PYSPARK_PYTHON" not in os.environ and (context.master or "").startswith("local"):
        # Spark reads the first for every function that it gets, and the second for the next session.
        context.pythonExec = os.environ["PYSPARK_PYTHON"] = sys.executable
        return
    hint = f"Set PYSPARK_PYTHON to a Python that has it, such as {sys.executable}, before the session is started"
    try:
        [(path, missing)] = context.parallelize([0], 1).map(_looks_for_headwater()).collect()
    except (PySparkException, Py4JError) as error:
        reason = query_error(error).reason
        raise InvalidInput(f"Spark's workers do not run with {context.pythonExec}: {reason}", hint=hint) from None
    if missing is not None:
        raise InvalidInput(f"Spark's workers run {path}, which has no Headwater: {missing}", hint=hint)
    _HAVE_HEADWATER.add(context.pythonExec)


_HAVE_HEADWATER: set[str] = set()
"""The Pythons that were found to have Headwater."""


def _looks_for_headwater() -> Callable[[int], tuple[str, str | None]]:
    def look(_: int) -> tuple[str, str | None]:
        # A nested function is pickled as a whole, so that a worker without our modules can run it.
        import sys
        from importlib import import_module

        try:
            import_module("headwater.landing.tasks")
        except ImportError as error:
            return sys.executable, str(error)
        return sys.executable, None

    return look


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java") if home is None else shutil.which(str(Path(home, "bin", "java")))
    if java is None:
        raise InvalidInput("Spark needs Java, and none was found", hint="Install Java 17, or set JAVA_HOME")


# --- Spark Connect: the program is here, and Spark is a server elsewhere ----------------------------------------------
#
# The source and the pipeline work there as elsewhere, with one difference: the server shows requests in its pages as
# received, including options.


_REDACTION = "spark.sql.redaction.string.regex"
_PASSWORD = r'(?i)key:\s*"(?:tlsKey)?password"\s*value:\s*"(?:[^"\\]|\\.)*"'
"""Matches a password option in the text of a request."""


def is_remote(spark: SparkSession) -> bool:
    """Whether this is a Spark Connect session. Its classes can't be imported if gRPC is not installed."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def hide_password(spark: SparkSession) -> None:
    """Make a server redact the option `password` in its pages. Other sessions do that by themselves."""
    if not is_remote(spark):
        return
    pattern = spark.conf.get(_REDACTION, None) or ""
    if _PASSWORD not in pattern:
        spark.conf.set(_REDACTION, f"{pattern}|{_PASSWORD}" if pattern else _PASSWORD)


# --- the catalog of a session -----------------------------------------------------------------------------------------


PROVIDER = "delta"
_NO_PROVIDER = "DATA_SOURCE_NOT_FOUND"
_LOCATION = "Location"


@dataclass(frozen=True, slots=True)
class SessionCatalog:
    """A catalog of a session with Delta Lake. It stores no columns: Delta reads them from the table's log, with all
    comments, at each use of the table."""

    spark: SparkSession
    name: str | None = None
    """None for the current catalog of the session."""

    def register(self, schema: str, entry: TableEntry) -> None:
        parts = [schema, entry.name] if self.name is None else [self.name, schema, entry.name]
        full_name = ".".join(map(_quoted, parts))
        try:
            if self.spark.catalog.tableExists(full_name):
                entry.is_current(".".join(parts), uri=self._uri_of(full_name), properties={})
                return
            self.spark.sql(f"CREATE SCHEMA IF NOT EXISTS {'.'.join(map(_quoted, parts[:-1]))}")
            self.spark.sql(f"CREATE TABLE {full_name} USING {PROVIDER} LOCATION {_literal(entry.uri)}")
        except (PySparkException, Py4JJavaError) as error:
            if _NO_PROVIDER in str(error):
                raise CatalogUnreachable(
                    "the Spark session has no Delta Lake, which its catalog needs",
                    hint="Start it with Delta's package and extension, or give unity:// or glue:// in --catalog",
                ) from error
            raise CatalogError(
                f"Spark does not register the table: {query_error(error).reason}",
                hint="Check the catalog's name in --catalog, and that the session can write to it",
            ) from error
        except (Py4JError, ConnectionError) as error:
            raise CatalogUnreachable("the Spark session has ended", hint="Start the landing again") from error

    def _uri_of(self, full_name: str) -> str:
        rows: list[Row] = self.spark.sql(f"DESCRIBE TABLE EXTENDED {full_name}").collect()
        return next((str(row[1]) for row in reversed(rows) if row[0] == _LOCATION), "")


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"


def _literal(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
