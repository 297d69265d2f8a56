"""A Spark session for those who bring none: on this machine, quiet, and with this Python."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from headwater.errors import InvalidInput

_LOGGING = """
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n
"""


_ARROW = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
"""Arrow's Java library looks at bounds and nulls each time that it gets a value. Spark has done so before, and without
it rows of Python cost Java a sixth less."""


def start_session(*, master: str = "local[*]", memory: str = "2g", log_folder: Path) -> SparkSession:
    """The session that is there, or a new one."""
    active = SparkSession.getActiveSession()
    if active is not None:
        return active
    _check_java()
    # Spark looks for data sources, and runs its workers, with the Python that these two name.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    log_folder.mkdir(parents=True, exist_ok=True)
    logging = log_folder / "log4j2.properties"
    logging.write_text(_LOGGING)
    return (
        SparkSession.builder.master(master)
        .appName("headwater")
        .config("spark.driver.memory", memory)
        # As a URI it has no spaces, at which options are taken apart.
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={logging.resolve().as_uri()} {_ARROW}")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "8")
        .config("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        # Larger batches between Spark and Python: what they cost is mostly paid once each.
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "50000")
        .getOrCreate()
    )


def _check_java() -> None:
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java") if home is None else shutil.which(str(Path(home, "bin", "java")))
    if java is None:
        raise InvalidInput("Spark needs Java, and none was found", hint="Install Java 17, or set JAVA_HOME")
