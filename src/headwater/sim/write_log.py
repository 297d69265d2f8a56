"""What was written, by whom, and what was answered: all that a judge needs to say what must be there in the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

Key = tuple[int, bytes]
"""Collection and key."""


class Outcome(Enum):
    UNDER_WAY = auto()
    ACKNOWLEDGED = auto()
    REFUSED = auto()
    """It has not happened."""
    UNKNOWN = auto()
    """It may have happened, or may still do."""


@dataclass(slots=True, kw_only=True)
class Write:
    """One write. Values are never written twice, so that a value tells its write."""

    value: bytes | None
    """None where the document was to be deleted."""
    is_durable: bool = False
    """A majority of the copies had to have it before it was acknowledged."""
    may_expire: bool = False
    began_s: float = 0.0
    """When it was made: it has happened later than this, if at all."""
    ended_s: float | None = None
    """When its outcome was known: if it was acknowledged, it has happened before this."""
    outcome: Outcome = Outcome.UNDER_WAY


@dataclass(slots=True)
class WriteLog:
    by_key: dict[Key, list[Write]] = field(default_factory=dict)
    """In the order in which they were made: there is one writer a key, with one write under way at a time."""

    def begin(self, key: Key, write: Write) -> Write:
        self.by_key.setdefault(key, []).append(write)
        return write

    def count(self, outcome: Outcome) -> int:
        return sum(write.outcome is outcome for writes in self.by_key.values() for write in writes)
