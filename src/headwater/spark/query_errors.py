"""What an error of a query means: Spark wraps ours in several layers of its own, as text."""

from __future__ import annotations

import re

from headwater import errors
from headwater.errors import HeadwaterError, QueryFailed

_OURS = re.compile(r"headwater\.errors\.(?P<name>\w+): (?P<told>[^\n]+)")


def told_error(error: BaseException) -> HeadwaterError:
    """Our own error inside one of Spark's, or one that tells the first line of it."""
    if isinstance(error, HeadwaterError):
        return error
    match = _OURS.search(str(error))
    if match is None:
        first = str(error).strip().partition("\n")[0]
        return QueryFailed(f"the query failed: {first[:500]}", hint="Spark's log has the rest of it")
    kind = getattr(errors, match["name"], None)
    if not isinstance(kind, type) or not issubclass(kind, HeadwaterError):
        kind = HeadwaterError
    found = kind.__new__(kind)
    # The sentence has the hint at its end already.
    HeadwaterError.__init__(found, match["told"])
    return found
