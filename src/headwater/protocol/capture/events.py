"""What a capture consists of, whatever file it came in: who sent which bytes, and where some are missing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Direction(Enum):
    """Who sent the bytes. A server is who was connected to; on DCP, requests go both ways."""

    CLIENT_TO_SERVER = "C->S"
    SERVER_TO_CLIENT = "S->C"


@dataclass(frozen=True, slots=True)
class Flow:
    """One direction of one connection. Input that does not tell has one flow, with no name and no direction."""

    connection: str = ""
    direction: Direction | None = None

    def __str__(self) -> str:
        if self.direction is None:
            return self.connection
        return f"{self.connection} {self.direction.value}"


UNKNOWN_FLOW = Flow()


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A new connection begins under this name; what an older one of that name had negotiated is void."""

    connection: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes that follow the flow's last ones."""

    flow: Flow = UNKNOWN_FLOW
    data: bytes
    where: str = ""
    """The place in the input as its own tools count it: `line 7`, `packet 12`."""
    starts_frame: bool = False
    """The input says that a frame starts here, so an unfinished one before it stays unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The flow's next bytes are not in the capture."""

    flow: Flow
    missing_bytes: int | None
    """None where the capture began after the connection did."""


CaptureEvent = Opened | Chunk | Gap
