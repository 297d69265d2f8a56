"""Work as a number that is the same on every machine: the calls and lines of Python that are run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def calls_of(work: Callable[[], object]) -> int:
    """How many calls, lines and returns there are in all that this does."""
    count = 0

    def look(frame: FrameType, event: str, argument: object) -> object:
        nonlocal count
        count += 1
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
