"""What a Python worker of Spark has loaded is not looked through for garbage after each of its tasks.

A worker that is used again collects its garbage when a task has ended. With Arrow, pandas and the compiled kernels
loaded that is a walk over a few hundred thousand objects which are all in use: it took a third of the processor time of
the workers, more than anything else that they do. Objects that are frozen are left out of the walk.
"""

from __future__ import annotations

import gc
from functools import cache

from pyspark import TaskContext


@cache
def keep_loaded(after: str) -> None:
    """To be called at the end of a task. The first task of a kind is the one that loads things.

    A process that is no worker of Spark, as where tests run tasks by themselves, is left alone.
    """
    if TaskContext.get() is not None:
        gc.collect()
        gc.freeze()
