"""What happened in a run, in order: a digest of all of it, and lines to read where somebody wants them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

LINES_MAX = 200_000
"""Kept for a reader. The digest goes on."""


class Trace:
    """The digest covers every line and every byte that was delivered: two runs with the same one are the same run."""

    def __init__(self, *, keeps_lines: bool = False) -> None:
        self.lines: list[str] = []
        self.now_s: Callable[[], float] = lambda: 0.0
        self._keeps_lines = keeps_lines
        self._digest = hashlib.blake2b(digest_size=16)

    def note(self, who: str, what: str) -> None:
        line = f"{self.now_s():11.6f} {who:<14} {what}"
        self._digest.update(line.encode())
        if self._keeps_lines and len(self.lines) < LINES_MAX:
            self.lines.append(line)

    def delivered(self, data: bytes) -> None:
        self._digest.update(f"{self.now_s():.9f}".encode())
        self._digest.update(data)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()
