"""How long a vbucket waits for a stream, and what follows on the end of one."""

from __future__ import annotations

import pytest

from headwater.client.retries import Backoff
from headwater.client.stream_opening import AFTER_END, AfterEnd, VBucketWaits, after_end
from headwater.errors import ConnectionFailed
from headwater.protocol.messages.dcp_streams import StreamEndReason
from headwater.protocol.numbers import VBucketId

CUT = ConnectionFailed("cut")


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


# --- waiting ------------------------------------------------------------------------------------------------------

ONE, TWO = VBucketId(1), VBucketId(2)


def new_waits() -> VBucketWaits:
    waits = VBucketWaits(Backoff(delay_s_min=1.0, delay_s_max=8.0, random=lambda: 0.0))
    waits.begin(ONE, now_s=0.0)
    return waits


def test_one_that_is_asked_for_is_not_due_whatever_is_heard_of_it() -> None:
    waits = new_waits()
    assert list(waits.due(0.0)) == [ONE]
    waits.asked(ONE)
    waits.hurry(ONE, now_s=1.0)
    assert list(waits.due(1e9)) == []


def test_the_delay_grows_with_refusals_and_not_with_what_is_to_be_tried_at_once() -> None:
    waits = new_waits()
    waits.retry(ONE, CUT, now_s=0.0, at_once=True)
    assert list(waits.due(0.0)) == [ONE]
    for due_s in (0.5, 1.0, 2.0):
        waits.retry(ONE, CUT, now_s=0.0, at_once=False)
        assert list(waits.due(due_s - 0.01)) == []
        assert list(waits.due(due_s)) == [ONE]


def test_news_make_it_due() -> None:
    waits = new_waits()
    waits.retry(ONE, CUT, now_s=0.0, at_once=False)
    waits.hurry(ONE, now_s=0.1)
    waits.hurry(TWO, now_s=0.1)
    assert list(waits.due(0.1)) == [ONE]


def test_patience_ends_for_one_that_waits_on_and_begins_again_with_a_stream() -> None:
    waits = new_waits()
    waits.retry(ONE, CUT, now_s=5.0, at_once=False)
    waits.asked(ONE)
    assert waits.overdue(10.0, after_s=10.0) is None
    assert waits.overdue(10.1, after_s=10.0) == (ONE, CUT)
    waits.end(ONE)
    waits.retry(ONE, None, now_s=10.0, at_once=True)
    assert waits.overdue(10.1, after_s=10.0) is None
