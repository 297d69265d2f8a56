"""What the connections of a bucket have moved, also those that are gone.

Every connection counts for itself. What it has counted is added here when it ends, so that sums over all connections
never go back, and nothing is counted twice on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.node.producer.connection import ProducerConnection


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Totals since the node started."""

    requests: int = 0
    """Key-value requests, of all kinds."""
    sent_messages: int = 0
    """Messages of DCP streams."""
    sent_bytes: int = 0
    rollbacks: int = 0
    """Stream requests that were answered with a rollback."""

    def add_connection(self, connection: ProducerConnection) -> None:
        self.sent_messages += connection.sent_messages
        self.sent_bytes += connection.sent_bytes
