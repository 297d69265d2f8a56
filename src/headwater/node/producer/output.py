"""What is to be sent next, in one piece of memory that all streams of a connection write to.

Markers, changes and ends lie one behind the other, so that a turn of a thousand streams is one write to the socket. The
memory is used again for the next turn, of any connection: it is warm, and nothing has to be allocated.
"""

from __future__ import annotations

import numpy as np

from headwater.protocol.kernels.memory import Bytes

OUTPUT_BYTES = 1024 * 1024 + 64 * 1024
"""A turn, and the frame by which it may be overdrawn. A larger one gets more memory for that turn."""


class Output:
    """Frames of one turn."""

    __slots__ = ("_view", "memory", "used")

    def __init__(self, size_bytes: int = OUTPUT_BYTES) -> None:
        self.memory: Bytes = np.empty(size_bytes, dtype=np.uint8)
        self._view = self.memory.data
        self.used = 0
        """Up to here there are frames. Kernels write behind it."""

    @property
    def data(self) -> memoryview:
        """What there is to send. Valid until the memory is used again."""
        return self._view[: self.used]

    def append(self, data: bytes) -> None:
        end = self.used + len(data)
        if end > len(self.memory):
            self.make_room(len(data))
        self._view[self.used : end] = data
        self.used = end

    def make_room(self, size_bytes: int) -> None:
        """Have room for so much more."""
        if self.used + size_bytes <= len(self.memory):
            return
        larger = np.empty(max(self.used + size_bytes, 2 * len(self.memory)), dtype=np.uint8)
        larger[: self.used] = self.memory[: self.used]
        self.memory, self._view = larger, larger.data


class SpareOutput:
    """The one output that connections share, as long as each has sent all it wrote before the next has its turn."""

    def __init__(self) -> None:
        self._spare: Output | None = None

    def take(self) -> Output:
        spare, self._spare = self._spare, None
        return Output() if spare is None else spare

    def give_back(self, output: Output) -> None:
        """Nobody looks at what was written any more. One that has grown is not kept."""
        if len(output.memory) == OUTPUT_BYTES:
            output.used = 0
            self._spare = output
