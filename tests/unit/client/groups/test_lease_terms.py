"""Times that make no sense are refused."""

from __future__ import annotations

import math

import pytest

from headwater.client.groups.group_document import LEASE_S_MAX
from headwater.client.groups.lease_member import LeaseTerms
from headwater.errors import InvalidInput


def test_there_is_room_for_lost_heartbeats_unless_told() -> None:
    terms = LeaseTerms()
    assert terms.interval_s * 3 <= terms.lease_s
    assert 0 < terms.busy_interval_s < terms.interval_s


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lease_s", 0),
        ("lease_s", -1),
        ("lease_s", LEASE_S_MAX + 1),
        ("lease_s", math.nan),
        ("interval_s", 0),
        ("interval_s", 8),
        ("interval_s", math.nan),
        ("margin_s", 0),
        ("margin_s", math.inf),
        ("margin_s", math.nan),
    ],
)
def test_times_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidInput, match=name) as caught:
        LeaseTerms(**{name: value})
    assert caught.value.hint
