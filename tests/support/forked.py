"""Running something in a process of its own: for limits that can't be taken back, and for what may end a process."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

FAILED = 99
"""The exit code of a function that raised what it should not have."""


def forked(function: Callable[[], int | None]) -> int:
    """What a function returns in a fork of this process; the negative number of the signal that ended it, if one did.

    A fork has everything loaded, compiled kernels too, and takes milliseconds where a new process takes a second.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            code = function() or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
