"""Keep freed memory: the node makes and drops buffers of some hundred kilobytes all the time.

By default glibc takes such buffers from the system and gives them back at once, and every page of every buffer is then
faulted in anew, which costs more than filling it.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
MMAP_FROM_BYTES = 32 * 1024 * 1024
"""glibc's own upper bound for it."""
KEEP_BYTES = 128 * 1024 * 1024


def keep_freed_memory() -> None:
    """Tell the allocator, where it is glibc's."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_M_MMAP_THRESHOLD, MMAP_FROM_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
