"""Received bytes, cut into runs of changes and single frames.

Changes of one stream that lie behind each other are handed on as one run, without a look at each. The order is kept:
between the streams come requests of whoever drives the connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headwater.protocol.frames import HEADER_BYTES, Frame, decode_frame
from headwater.protocol.kernels.frame_runs import cut_runs
from headwater.protocol.kernels.memory import Bytes
from headwater.protocol.opcodes import Magic, Opcode


@dataclass(frozen=True, slots=True)
class ChangeRun:
    """Changes of one stream, frame behind frame. They are valid until the next item is asked for."""

    opaque: int
    data: Bytes
    changes: int


@dataclass(frozen=True, slots=True)
class SingleFrame:
    frame: Frame
    size_bytes: int


class Inbound:
    """What has come and is not handled yet."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed_bytes = HEADER_BYTES
        """How much has to be there before another look is worth it: a large frame comes in many pieces."""
        self.is_paused = False
        """Set while items are handed out: the rest stays for later."""
        self.is_held = False
        self._looked_bytes = 0
        """Of what is held, where the next frame that was not looked at for a noop begins."""
        self._is_cut_short = False

    @property
    def is_held_back(self) -> bool:
        """There are whole frames that were left for later, and later is now."""
        return self._is_cut_short and not self.is_paused and not self.is_held

    @property
    def buffered_bytes(self) -> int:
        return len(self._buffer)

    def _stops_here(self) -> bool:
        self._is_cut_short = self.is_paused
        return self._is_cut_short

    def receive(self, data: bytes | bytearray | memoryview) -> Iterator[ChangeRun | SingleFrame]:
        """What came, as far as it is whole. Raises the documented error for bytes that are no frames."""
        self._buffer += data
        if self.is_paused or self.is_held or len(self._buffer) < self._needed_bytes:
            return
        self._is_cut_short = False
        received, self._buffer = self._buffer, bytearray()
        self._needed_bytes = HEADER_BYTES
        taken = 0
        try:
            cut = cut_runs(np.frombuffer(received, dtype=np.uint8), keeps_order=True)
            for run in cut.runs:
                taken = run.end
                if run.rows:
                    yield ChangeRun(run.opaque, cut.data[run.start : run.end], run.rows)
                else:
                    decoded = decode_frame(received, run.start)
                    assert decoded is not None, "runs are whole"
                    yield SingleFrame(decoded[0], run.end - run.start)
                if self._stops_here():
                    break
        finally:
            self._buffer[:0] = received[taken:]
            if len(self._buffer) >= HEADER_BYTES:
                self._needed_bytes = HEADER_BYTES + int.from_bytes(self._buffer[8:12])

    # --- holding --------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        """Hand out nothing that comes from now on, until `release`."""
        self.is_held, self._looked_bytes = True, 0

    def release(self) -> None:
        """Go on. What was held is handed out with what comes next, be it nothing."""
        self.is_held, self._needed_bytes = False, HEADER_BYTES
        self._is_cut_short = len(self._buffer) >= HEADER_BYTES

    def take_noops(self) -> list[int]:
        """Take the noops out of what is held, so that they can be answered at once. Returns their opaques."""
        opaques = []
        buffer, at = self._buffer, self._looked_bytes
        while self.is_held and len(buffer) - at >= HEADER_BYTES:
            end = at + HEADER_BYTES + int.from_bytes(buffer[at + 8 : at + 12])
            if buffer[at] == Magic.REQUEST and buffer[at + 1] == Opcode.DCP_NOOP and len(buffer) >= end:
                opaques.append(int.from_bytes(buffer[at + 12 : at + 16]))
                del buffer[at:end]
            elif len(buffer) >= end:
                at = end
            else:
                break
        self._looked_bytes = at
        return opaques
