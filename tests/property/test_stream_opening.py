"""How streams are opened: how many questions that takes, and that a start from now on holds whatever happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from headwater.client.read_options import End
from headwater.protocol.messages.dcp_streams import GetFailoverLog, StreamRequest
from headwater.protocol.messages.vbuckets import GetAllVbSeqnos
from headwater.protocol.numbers import VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from support.reader_world import VBUCKETS, Run, arrive, connect, run_of_one_node

FIRST = VBucketId(0)
ALL = {VBucketId(vbucket): StreamOffset() for vbucket in range(VBUCKETS)}


def a_run(*, from_now: bool = False, **options: Any) -> Run:
    """With five documents in each vbucket."""
    run = run_of_one_node(**options)
    write(run, 5)
    run.reader = run.new_reader(ALL, from_now=from_now)
    return run


def write(run: Run, count: int) -> None:
    for vbucket in run.cluster.vbuckets:
        vbucket.history += [(b"key%d" % (len(vbucket.history) + n), b"value") for n in range(count)]


def arrive_all(run: Run) -> None:
    while any(connection.outbox for connection in run.wires.values()):
        arrive(run)


def fail_over(run: Run, *, keeping: int) -> None:
    """Every vbucket goes on from an older copy."""
    for number, vbucket in enumerate(run.cluster.vbuckets):
        del vbucket.history[keeping:]
        vbucket.log = vbucket.log.branch(Vbuuid(900 + number), at_seqno=vbucket.high)


def seen(run: Run) -> dict[int, list[int]]:
    """The seqnos that the caller is given until all is there that is written now."""
    run.settle()
    return {vbucket: sorted(rows) for vbucket, rows in run.consumer.rows.items()}


# --- how many questions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "surveys"),
    [({}, 0), ({"end": End.NOW}, 1), ({"from_now": True}, 1), ({"from_now": True, "end": End.NOW}, 1)],
)
def test_a_link_is_asked_for_its_high_seqnos_once(options: dict[str, Any], surveys: int) -> None:
    run = a_run(**options)
    connection = connect(run)
    arrive_all(run)
    assert run.reader.has_offsets
    assert connection.asked[GetAllVbSeqnos] == surveys
    assert connection.asked[GetFailoverLog] == (VBUCKETS if "from_now" in options else 0)
    assert connection.asked[StreamRequest] == VBUCKETS


def test_vbuckets_that_roll_back_together_share_the_question_for_their_high_seqnos() -> None:
    run = a_run()
    seen(run)
    fail_over(run, keeping=2)
    run.options = replace(run.options, end=End.NOW)
    run.restart()
    connection = connect(run)
    arrive_all(run)
    assert connection.asked[StreamRequest] >= 2 * VBUCKETS
    assert connection.asked[GetAllVbSeqnos] == 2, "before the streams, and after the rollbacks"


def test_a_vbucket_that_comes_later_is_not_asked_about_for_the_others() -> None:
    """One that starts from now on needs its high seqno, and those that wait beside it do not."""
    run = a_run()
    run.reader.close_vbuckets([FIRST])
    run.reader.follow({FIRST: StreamOffset()}, from_now=True, now_s=run.now_s)
    connection = connect(run)
    assert connection.asked[StreamRequest] == VBUCKETS - 1
    arrive_all(run)
    assert (connection.asked[StreamRequest], connection.asked[GetAllVbSeqnos]) == (VBUCKETS, 1)


# --- from now on --------------------------------------------------------------------------------------------------

STEPS_TO_OFFSETS = 3
"""The high seqnos, the failover logs, the streams."""


@pytest.mark.parametrize("steps", range(STEPS_TO_OFFSETS + 1))
def test_a_start_from_now_on_comes_through_a_lost_connection(steps: int) -> None:
    """Whatever is written once all vbuckets are placed is seen, and nothing of what was there before the read."""
    run = a_run(from_now=True)
    connection = connect(run)
    for _ in range(steps):
        arrive(run)
    connection.is_cut = True
    arrive(run)  # what is on the wire, and its end
    has_offsets = run.reader.has_offsets
    assert has_offsets == (steps + 1 >= STEPS_TO_OFFSETS)
    write(run, 2)
    expected = set(range(6, 8)) if has_offsets else set()
    run.now_s += 1
    while not run.reader.has_offsets:
        run.step()
    write(run, 3)
    expected |= set(range(8, 11))
    assert {frozenset(seqnos) for seqnos in seen(run).values()} == {frozenset(expected)}


@pytest.mark.parametrize("steps", range(STEPS_TO_OFFSETS - 1))
def test_a_failover_while_now_is_looked_for_just_moves_it(steps: int) -> None:
    """The place is in the future of the shorter history, and nobody has seen anything yet that could be undone."""
    run = a_run(from_now=True)
    connect(run)
    for _ in range(steps):
        arrive(run)
    fail_over(run, keeping=2)
    while not run.reader.has_offsets:
        run.step()
    write(run, 3)
    assert all(seqnos == [3, 4, 5] for seqnos in seen(run).values())
    assert run.consumer.rollbacks == 0


def test_a_rollback_after_the_start_is_told() -> None:
    run = a_run(from_now=True)
    connection = connect(run)
    arrive_all(run)
    assert run.reader.has_offsets
    write(run, 2)
    seen(run)
    fail_over(run, keeping=6)
    connection.is_cut = True
    run.settle()
    assert run.consumer.rollbacks == VBUCKETS
