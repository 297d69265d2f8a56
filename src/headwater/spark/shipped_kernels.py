"""Compiled kernels for executors that have none: made on the driver, carried there by Spark, used instead of compiling.

Compiling takes seconds and would happen in the first task of every new executor. Where driver and executors share a
home, or ran Headwater before, there is nothing to carry. Machine code of another kind of processor is not used: numba
looks at that, and compiles.
"""

from __future__ import annotations

import atexit
import zipfile
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from pyspark import SparkFiles
from pyspark.sql import SparkSession

from headwater.client.warm_up import warm_up
from headwater.protocol.kernels.machine_code import code_folder, sources_digest


def _archive_name() -> str:
    return f"headwater-kernels-{sources_digest()}.zip"


_SHIPPED: set[tuple[int, str]] = set()
"""The sessions that have them. A file can be given to a session once."""


def ship_kernels(spark: SparkSession) -> None:
    """Compile what is not compiled yet, and let all executors of a session have it."""
    shipped = (id(spark), _archive_name())
    if shipped in _SHIPPED:
        return
    _SHIPPED.add(shipped)
    warm_up()
    folder = Path(mkdtemp(prefix="headwater-kernels-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    archive = folder / _archive_name()
    with zipfile.ZipFile(archive, "w") as packed:
        for path in sorted(code_folder().iterdir()):
            packed.write(path, path.name)
    # Takes the place of SparkContext.addFile where the session is a remote one.
    spark.addArtifacts(str(archive), file=True)


@cache
def use_shipped_kernels() -> bool:
    """In a task, before the first kernel is called: unpack what was shipped, unless there is something already.

    Returns whether it was unpacked.
    """
    archive = Path(SparkFiles.get(_archive_name()))
    folder = code_folder()
    if any(folder.iterdir()) or not archive.exists():
        return False
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder)
    return True
