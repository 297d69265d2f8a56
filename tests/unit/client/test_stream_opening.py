"""What follows on the end of a stream."""

from __future__ import annotations

import pytest

from headwater.client.stream_opening import AFTER_END, AfterEnd, after_end
from headwater.protocol.messages.dcp_streams import StreamEndReason


def test_every_known_reason_has_its_row() -> None:
    assert set(AFTER_END) == set(StreamEndReason)


@pytest.mark.parametrize(
    ("reason", "after"),
    [
        (StreamEndReason.OK, AfterEnd.FINISHED),
        (StreamEndReason.STATE_CHANGED, AfterEnd.FIND_AND_ASK),
        (StreamEndReason.ROLLBACK, AfterEnd.ASK_AT_ONCE),
        (StreamEndReason.LOST_PRIVILEGES, AfterEnd.FAIL),
        (StreamEndReason(77), AfterEnd.ASK_LATER),
    ],
)
def test_reasons(reason: StreamEndReason, after: AfterEnd) -> None:
    assert after_end(reason) is after
