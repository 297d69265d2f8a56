"""Passes our errors through Spark: out of a worker, and as text inside Spark's errors in the program.

Planners import this, so it must not import Spark.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from headwater import errors
from headwater.errors import HeadwaterError, LakeFull, QueryFailed


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """For functions that Spark calls in a worker: of our errors, users see only the message, which says what to do.

    Spark adds Python's traceback, 20 lines of mostly its own code. A worker that raises ends, so the variable set here
    affects no other query. Bugs, which are not `HeadwaterError`s, keep their traceback.
    """
    try:
        yield
    except HeadwaterError:
        main = getattr(sys.modules["__main__"], "__spec__", None)
        if main is not None and main.name.startswith("pyspark."):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


_CAUSES = (
    # A pattern in Java's message, and our error for it.
    (
        re.compile("No space left on device|Disk quota exceeded"),
        lambda: LakeFull(
            "a disk that Spark uses for its own files is full",
            hint="Free space there, or set SPARK_LOCAL_DIRS to another disk: the landing resumes by itself",
        ),
    ),
    (
        re.compile("java.lang.OutOfMemoryError"),
        lambda: QueryFailed("Spark has run out of memory", hint="Give it more, such as with --memory 4g"),
    ),
)
_OURS = re.compile(r"headwater\.errors\.(?P<name>\w+): (?P<message>[^\n]+)")


def is_ours(error: BaseException) -> bool:
    """Whether an error is ours, or one of Spark's that contains one of ours."""
    return isinstance(error, HeadwaterError) or _OURS.search(str(error)) is not None


def query_error(error: BaseException) -> HeadwaterError:
    """Return our error that one of Spark's contains, or one with its first line. Our own are returned unchanged."""
    if isinstance(error, HeadwaterError):
        return error
    match = _OURS.search(str(error))
    if match is None:
        for pattern, cause in _CAUSES:
            if pattern.search(str(error)):
                return cause()
        first = str(error).strip().partition("\n")[0]
        return QueryFailed(f"the query failed: {first[:500]}", hint="See Spark's log for details")
    kind = getattr(errors, match["name"], None)
    if not isinstance(kind, type) or not issubclass(kind, HeadwaterError):
        kind = HeadwaterError
    found = kind.__new__(kind)
    # The message already ends with the hint.
    HeadwaterError.__init__(found, match["message"])
    return found
