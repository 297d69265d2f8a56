"""Our errors on their way through Spark: out of a worker, and as text in one of Spark's own in the program.

Planners import this: it loads nothing of Spark.
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
    """Around what Spark calls in a worker: an error of ours reaches the user as its sentence, which says what to do.

    Spark puts Python's traceback above it, 20 lines that are mostly of its own code. A worker that raises ends with
    that, so what is set here is set for no other query. Faults, which are not of our tree of errors, keep theirs.
    """
    try:
        yield
    except HeadwaterError:
        main = getattr(sys.modules["__main__"], "__spec__", None)
        if main is not None and main.name.startswith("pyspark."):
            os.environ["SPARK_HIDE_TRACEBACK"] = "1"
        raise


_CAUSES = (
    # What Java says in any of its lines, and what that is to the user.
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
    """Whether it is an error of ours, or one of Spark's with one in it."""
    return isinstance(error, HeadwaterError) or _OURS.search(str(error)) is not None


def query_error(error: BaseException) -> HeadwaterError:
    """Our own error inside one of Spark's, or one with its first line."""
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
    # The sentence has the hint at its end already.
    HeadwaterError.__init__(found, match["message"])
    return found
