"""Where tables are printed: as wide as the terminal is, and never cut or folded in a file or a pipe."""

from __future__ import annotations

import sys

from rich.console import Console

UNCUT_CHARS = 10_000


def output_console() -> Console:
    """For standard output. Sentences are printed with `soft_wrap`, so that nothing breaks them but the terminal."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else UNCUT_CHARS)
