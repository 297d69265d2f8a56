"""What a node takes from the machine it runs on: clocks, randomness, a folder, and what becomes of it when it fails.

The defaults are a real machine. The simulation gives a node others, and it can't tell the difference.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headwater.node.node_folder import Folder, NodeFolder
from headwater.protocol.numbers import Vbuuid

_VBUUID_BYTES = 6
"""Real servers use 48 bits, too."""


def _end_process() -> None:
    signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    now_ns: Callable[[], int] = time.time_ns
    """The time of day."""
    now_s: Callable[[], float] = time.monotonic
    """A clock that never goes back."""
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    open_folder: Callable[[Path], Folder] = NodeFolder
    end_process: Callable[[], None] = _end_process
    """Called when the node can't go on, to have it stopped."""
    serves_http: bool = True

    def random_number(self, *, bits: int) -> int:
        return int.from_bytes(self.random_bytes(bits // 8))

    def new_vbuuid(self) -> Vbuuid:
        return Vbuuid(int.from_bytes(self.random_bytes(_VBUUID_BYTES)) | 1)
