"""How long a lease lasts, and how often it is renewed."""

from __future__ import annotations

from dataclasses import dataclass

from headwater.client.groups.group_document import LEASE_S_MAX
from headwater.errors import InvalidInput

LEASE_S = 15.0
INTERVAL_S = 3.0
MARGIN_S = 5.0

_RENEWALS_MIN = 2
"""How many heartbeats a lease must have room for, so that a single one that is lost does no harm."""
_IMPATIENCE = 4
"""How much more often a member looks at the document while vbuckets are under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTerms:
    """The times of one member. Members of a group may differ in them: a lease says how long it is."""

    lease_s: float = LEASE_S
    """A member that has not renewed its lease for so long stops reading."""
    interval_s: float = INTERVAL_S
    """Between two heartbeats."""
    margin_s: float = MARGIN_S
    """How much longer others wait before they take what it had.

    It covers what a member that has stopped may still be busy with, and clocks that don't run equally fast.
    """

    def __post_init__(self) -> None:
        if not 0 < self.lease_s <= LEASE_S_MAX:
            raise InvalidInput(f"lease_s is {self.lease_s}", hint=f"Use up to {LEASE_S_MAX:.0f} seconds")
        if not 0 < self.interval_s * _RENEWALS_MIN <= self.lease_s:
            raise InvalidInput(
                f"interval_s is {self.interval_s} for leases of {self.lease_s} seconds",
                hint=f"Use at most lease_s / {_RENEWALS_MIN}, so that a heartbeat may be lost",
            )
        if not 0 < self.margin_s <= LEASE_S_MAX:
            raise InvalidInput(f"margin_s is {self.margin_s}", hint=f"Use up to {LEASE_S_MAX:.0f} seconds")

    @property
    def busy_interval_s(self) -> float:
        """Between two looks at the document while vbuckets are under way."""
        return self.interval_s / _IMPATIENCE
