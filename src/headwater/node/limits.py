"""The limits of the server side, each of them an option of `headwater serve`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    connections_max: int = 10_000
    auth_s: float = 30.0
    """How long a connection may take to log in."""
    idle_s: float = 3600.0
    """How long a connection may go without a whole request."""
    unsent_bytes_max: int = 16 * 1024 * 1024
    """Answers that wait, for a commit or for the peer to read them, before no more requests are taken."""
    stalled_s: float = 120.0
    """How long a peer may leave its answers unread."""
