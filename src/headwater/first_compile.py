"""Telling somebody that kernels are compiled, which on a new machine takes long and would look like standing still.

Whoever has people to tell asks for it here; where nobody does, nothing is told. This imports nothing, so that a command
can ask before the libraries are loaded.
"""

from __future__ import annotations

from collections.abc import Callable

COMPILING = "compiling the kernels, once on this machine, which takes up to a minute; `headwater kernels` does it ahead"

_to_tell: list[Callable[[], None]] = []
"""At most one, and none once it was told."""


def tell_first_compile(tell: Callable[[], None] | None) -> None:
    """Call this once, when a kernel has to be compiled for the first time. It takes the place of who asked before."""
    _to_tell[:] = [] if tell is None else [tell]


def is_compiling() -> None:
    """A kernel is about to be compiled: its machine code is not kept anywhere."""
    if _to_tell:
        _to_tell.pop()()
