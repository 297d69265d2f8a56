"""Standard output as bytes, past the interpreter's buffers: what was written is out, and nothing is left for later."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any

from headwater.errors import HeadwaterError

_WRITE_BYTES = 256 * 1024


class StandardOutput:
    """Writes all it is given before it returns. A closed pipe shows as `BrokenPipeError`."""

    def __init__(self) -> None:
        sys.stdout.flush()
        buffered: Any = sys.stdout.buffer
        self._raw = getattr(buffered, "raw", buffered)

    @property
    def is_terminal(self) -> bool:
        return sys.stdout.isatty()

    @property
    def file(self) -> int | None:
        """The number of the file, where it is one of the system's."""
        try:
            return sys.stdout.fileno()
        except (OSError, io.UnsupportedOperation):
            return None

    def write(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            try:
                written = self._raw.write(rest[:_WRITE_BYTES])
            except BrokenPipeError:
                raise
            except OSError as error:
                raise HeadwaterError(
                    f"standard output can't be written to: {error.strerror}",
                    hint="Check the disk and the space on it",
                ) from error
            if written is None:
                # Somebody who shares the pipe has made it non-blocking.
                select.select([], [self._raw], [])
                continue
            rest = rest[written:]

    def abandon(self) -> None:
        """Nothing more is written, also not by the interpreter on its way out."""
        if self.file is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file)
