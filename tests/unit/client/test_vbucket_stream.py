"""One vbucket as a consumer follows it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from headwater import errors
from headwater.client import vbucket_stream
from headwater.client.metrics import ReaderMetrics
from headwater.client.pieces import ChangeRun, RollbackPiece
from headwater.client.retries import Backoff
from headwater.protocol.consumer import StreamRun
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.messages import ErrorResponse, Request, Response, dcp_streams
from headwater.protocol.messages.dcp_changes import Mutation, SeqnoAdvanced, SnapshotFlags, SnapshotMarker
from headwater.protocol.numbers import SEQNO_MAX, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.status import Status
from headwater.protocol.stream_requests import StreamRequestValue
from support.cases import case

OLD = FailoverLog.start(Vbuuid(1))


TERMS = vbucket_stream.StreamTerms(metrics=ReaderMetrics("reader", "bucket"))
AS_THEY_COME = replace(TERMS, whole_snapshots=False)
FILTERED = replace(TERMS, value=StreamRequestValue(collections=(CollectionId(8),)))
CUT = errors.ConnectionFailed("cut")
BACKOFF = Backoff(delay_s_min=1.0, delay_s_max=8.0, random=lambda: 0.0)


def new(
    terms: vbucket_stream.StreamTerms = TERMS,
    offset: StreamOffset = StreamOffset(),  # noqa: B008
    **options: Any,
) -> vbucket_stream.VBucketStream:
    return vbucket_stream.VBucketStream(VBucketId(4), offset, terms, now_s=0.0, **options)


class Slot:
    """A connection that keeps what is asked."""

    def __init__(self) -> None:
        self.link = self
        self.streams: dict[int, vbucket_stream.VBucketStream] = {}
        self.asked: list[Request] = []

    def send_request(self, request: Request, stream: vbucket_stream.VBucketStream | None = None) -> int:
        self.asked.append(request)
        if stream is not None:
            self.streams[len(self.asked)] = stream
        return len(self.asked)

    def survey(self) -> int:
        return 77


def ask(stream: vbucket_stream.VBucketStream, *answers: Response) -> dcp_streams.StreamRequest:
    """Open the stream, let a node answer, and return what it was asked last."""
    slot: Any = Slot()
    stream.retry(None, now_s=0.0, backoff=None)
    stream.open(slot)
    for answer in answers:
        stream.on_answer(slot.asked[-1], answer)
    assert len(slot.streams) == 1
    assert isinstance(slot.asked[-1], dcp_streams.StreamRequest)
    return slot.asked[-1]


def demand(seqno: int) -> dcp_streams.StreamRequestResponse:
    return dcp_streams.StreamRequestResponse(status=Status.ROLLBACK, rollback_seqno=Seqno(seqno))


def history(log: FailoverLog) -> dcp_streams.GetFailoverLogResponse:
    return dcp_streams.GetFailoverLogResponse(failover_log=log.entries)


def accepted(terms: vbucket_stream.StreamTerms = TERMS) -> vbucket_stream.VBucketStream:
    stream = new(terms)
    ask(stream)
    stream.on_accepted(OLD)
    return stream


def marker(start: int, end: int) -> SnapshotMarker:
    return SnapshotMarker(start_seqno=Seqno(start), end_seqno=Seqno(end), flags=SnapshotFlags.MEMORY)


def run(first: int, last: int) -> StreamRun:
    return StreamRun(1, last - first + 1, first, last, b"x" * 10)


def seqnos(passed: list[vbucket_stream.StreamItem]) -> list[int]:
    return [item.offset.seqno for item in passed]


def read(stream: vbucket_stream.VBucketStream, *ends: int) -> None:
    for end in ends:
        stream.on_message(marker(stream.received_seqno, end))
        stream.on_run(run(stream.received_seqno + 1, end), 1)


def test_a_snapshot_is_passed_on_when_it_is_complete() -> None:
    stream = accepted()
    stream.on_message(marker(0, 5))
    assert stream.on_run(run(1, 3), 1) == []
    assert (stream.offset.seqno, stream.received_seqno, stream.held_bytes) == (0, 3, 10)
    assert seqnos(stream.on_run(run(4, 5), 1)) == [3, 5]
    assert (stream.offset.seqno, stream.held_bytes) == (5, 0)


def test_or_as_it_comes() -> None:
    stream = accepted(AS_THEY_COME)
    stream.on_message(marker(0, 5))
    assert seqnos(stream.on_run(run(1, 3), 1)) == [3]
    assert stream.offset == StreamOffset(
        vbuuid=Vbuuid(1), seqno=Seqno(3), snapshot_start=Seqno(0), snapshot_end=Seqno(5)
    )


def test_seqnos_that_are_hidden_complete_a_snapshot_with_nothing_to_see() -> None:
    stream = accepted()
    stream.on_message(marker(0, 5))
    (passed,) = stream.on_message(SeqnoAdvanced(seqno=Seqno(5)))
    assert passed.piece is None
    assert passed.offset.is_complete


def test_a_filtered_snapshot_whose_end_is_left_out_ends_with_the_next_marker() -> None:
    stream = accepted(FILTERED)
    stream.on_message(marker(0, 5))
    stream.on_run(run(1, 3), 1)
    assert seqnos(stream.on_message(marker(6, 9))) == [3, 5]
    assert stream.offset.is_complete
    with pytest.raises(errors.UnexpectedMessage):
        stream.on_message(marker(2, 12))
    everything = accepted()
    everything.on_message(marker(0, 5))
    with pytest.raises(errors.UnexpectedMessage):
        everything.on_message(marker(6, 9))


def test_what_was_held_is_asked_for_again_when_the_stream_is_lost() -> None:
    stream = accepted()
    read(stream, 2)
    stream.on_message(marker(3, 9))
    stream.on_run(run(3, 4), 1)
    assert seqnos(stream.drop()) == [4]
    assert ask(stream).start_seqno == 2
    assert stream.held_bytes == 0


def test_a_rollback_goes_back_to_a_complete_snapshot_and_is_told_when_it_is_accepted() -> None:
    stream = accepted()
    read(stream, 10, 20, 30)
    stream.drop()
    assert ask(stream).vbuuid == 1, "the saved branch, until the server has judged it"
    stream.drop()
    server = OLD.branch(Vbuuid(2), at_seqno=Seqno(25))
    assert ask(stream, demand(25), history(server)).start_seqno == 20
    (passed,) = stream.on_accepted(server)
    assert passed.piece == RollbackPiece(
        vbucket=VBucketId(4), seqno=Seqno(20), from_seqno=Seqno(30), old_vbuuid=Vbuuid(1), new_vbuuid=Vbuuid(2)
    )
    stream.on_message(marker(20, 21))
    (change,) = stream.on_run(run(21, 21), 1)
    assert isinstance(change.piece, ChangeRun)
    assert change.piece.vbuuid == 2


def test_a_branch_with_a_new_name_moves_the_place_and_nothing_else() -> None:
    stream = accepted()
    read(stream, 10)
    stream.drop()
    ask(stream)
    (passed,) = stream.on_accepted(OLD.branch(Vbuuid(2), at_seqno=Seqno(10)))
    assert passed.piece is None
    assert (passed.offset.vbuuid, passed.offset.seqno) == (2, 10)


def test_a_rollback_that_is_demanded_of_one_who_has_nothing() -> None:
    with pytest.raises(errors.UnexpectedMessage):
        ask(new(), demand(0))


def test_what_a_node_refuses_is_raised_and_the_stream_is_asked_for_again_later() -> None:
    stream = new()
    with pytest.raises(errors.TemporaryFailure, match="the stream of vbucket 4 was refused: ETMPFAIL"):
        ask(stream, ErrorResponse(opcode=dcp_streams.StreamRequest.opcode, status=Status.ETMPFAIL))
    stream.drop()
    assert stream.slot is None
    with pytest.raises(errors.NotMyVBucket, match="the node that should have vbucket 4 does not have it"):
        stream.on_high_seqno(None)
    from_now = new(from_now=True)
    from_now.open(cast(Any, Slot()))
    with pytest.raises(errors.TemporaryFailure, match="rolled back while its end was looked for"):
        from_now.on_answer(dcp_streams.StreamRequest(), demand(3))


def test_a_stream_that_is_closed_before_it_is_open_is_closed_on_its_connection() -> None:
    slot: Any = Slot()
    stream = new()
    stream.open(slot)
    stream.close()
    assert [type(request) for request in slot.asked] == [dcp_streams.StreamRequest, dcp_streams.CloseStream]
    assert slot.streams == {}


def test_a_checkpoint_that_is_ahead_of_the_newest_branch() -> None:
    stream = new(offset=StreamOffset.whole(Vbuuid(1), Seqno(30)))
    with pytest.raises(errors.CheckpointAhead):
        ask(stream, demand(25), history(OLD))


# --- waiting ------------------------------------------------------------------------------------------------------


def test_one_that_is_asked_for_is_not_due_whatever_is_heard_of_it() -> None:
    stream = new()
    assert stream.is_due(0.0)
    ask(stream)
    stream.hurry(1.0)
    assert not stream.is_due(1e9)


def test_the_delay_grows_with_refusals_and_not_with_what_is_to_be_tried_at_once() -> None:
    stream = new()
    stream.retry(CUT, now_s=0.0, backoff=None)
    assert stream.is_due(0.0)
    for due_s in (0.5, 1.0, 2.0):
        stream.retry(CUT, now_s=0.0, backoff=BACKOFF)
        assert not stream.is_due(due_s - 0.01)
        assert stream.is_due(due_s)
    stream.hurry(0.1)
    assert stream.is_due(0.1)


# --- ends ---------------------------------------------------------------------------------------------------------


def test_every_known_reason_has_its_row() -> None:
    assert set(vbucket_stream.AFTER_END) == set(dcp_streams.StreamEndReason)


@case(dcp_streams.StreamEndReason.OK, 50, True)
@case(dcp_streams.StreamEndReason.OK, SEQNO_MAX, False)
@case(dcp_streams.StreamEndReason.FILTER_EMPTY, SEQNO_MAX, True)
@case(dcp_streams.StreamEndReason.STATE_CHANGED, 50, False)
@case(dcp_streams.StreamEndReason.STATE_CHANGED, 3, False)
def test_held_changes_are_passed_on_only_at_the_end_of_all(
    reason: dcp_streams.StreamEndReason, end: int, is_done: bool
) -> None:
    """What is left of the snapshot is hidden from us, and its end is the place. A stream that breaks off inside of a
    snapshot is asked for again, also if the end that was wanted has come."""
    stream = accepted()
    stream.end_seqno = Seqno(end)
    stream.on_message(marker(0, 100))
    stream.on_run(run(1, 3), 1)
    assert stream.is_done_with(reason) is is_done
    assert seqnos(stream.on_message(dcp_streams.StreamEnd(reason=reason))) == ([3, 100] if is_done else [])
    assert stream.offset.is_complete


@pytest.mark.parametrize(("terms", "end"), [(TERMS, 3), (AS_THEY_COME, 10)])
def test_a_snapshot_that_broke_off_is_asked_for_to_its_end(terms: vbucket_stream.StreamTerms, end: int) -> None:
    stream = accepted(terms)
    stream.end_seqno = Seqno(3)
    stream.on_message(marker(0, 10))
    stream.on_run(run(1, 5), 1)
    stream.drop()
    assert ask(stream).end_seqno == end


def test_a_stream_that_has_nothing_to_send_ends_at_the_end_that_was_asked_for() -> None:
    stream = accepted()
    stream.end_seqno = Seqno(50)
    (passed,) = stream.on_message(dcp_streams.StreamEnd(reason=dcp_streams.StreamEndReason.OK))
    assert (passed.piece, passed.offset.seqno, passed.offset.is_complete) == (None, 50, True)


def test_a_rollback_goes_back_to_a_boundary_from_before_the_start() -> None:
    start = StreamOffset.whole(Vbuuid(1), Seqno(30))
    for demanded, kept in ((25, 20), (20, 20), (5, 0)):
        stream = new(offset=start, boundaries=(Seqno(10), Seqno(20)))
        server = OLD.branch(Vbuuid(2), at_seqno=Seqno(demanded))
        assert ask(stream, demand(demanded), history(server)).start_seqno == kept


def test_a_start_beyond_the_end_is_judged_all_the_same() -> None:
    stream = accepted()
    read(stream, 10)
    stream.end_seqno = Seqno(5)
    stream.drop()
    assert ask(stream).end_seqno == 10


@pytest.mark.parametrize(("first", "last"), [(6, 6), (3, 3), (5, 9)])
def test_seqnos_that_do_not_belong_there(first: int, last: int) -> None:
    stream = accepted(AS_THEY_COME)
    stream.on_message(marker(0, 5))
    stream.on_run(run(1, 3), 1)
    with pytest.raises(errors.SnapshotViolation):
        stream.on_run(run(first, last), 1)


def test_a_change_before_the_answer_or_outside_a_snapshot() -> None:
    asked = new()
    ask(asked)
    for stream in (asked, accepted()):
        with pytest.raises(errors.UnexpectedMessage):
            stream.on_run(run(1, 1), 1)


def test_a_change_whose_extras_are_cut_off() -> None:
    stream = accepted()
    stream.on_message(marker(0, 5))
    with pytest.raises(errors.SnapshotViolation, match="cut off"):
        stream.on_message(Mutation(seqno=Seqno(1), rev_seqno=1, key=b"k", collection_id=CollectionId(0)))


def test_whether_the_server_sends_it() -> None:
    stream = new()
    ask(stream)
    assert not stream.is_accepted
    assert not stream.is_idle
    stream.on_accepted(OLD)
    assert stream.is_accepted
    stream.on_message(marker(0, 5))
    assert stream.is_accepted
    stream.drop()
    assert not stream.is_accepted
    assert stream.is_idle


# The point that a consumer goes on from after a rollback.


OLD_BRANCH, NEW, OLDEST, OTHER = Vbuuid(0xA), Vbuuid(0xB), Vbuuid(0xC), Vbuuid(0xD)


def log(*entries: tuple[Vbuuid, int]) -> FailoverLog:
    return FailoverLog(tuple(FailoverEntry(vbuuid=vbuuid, seqno=Seqno(seqno)) for vbuuid, seqno in entries))


def at(vbuuid: Vbuuid, seqno: int, start: int | None = None) -> StreamOffset:
    return StreamOffset(
        vbuuid=vbuuid,
        seqno=Seqno(seqno),
        snapshot_start=Seqno(seqno if start is None else start),
        snapshot_end=Seqno(seqno),
    )


def resumed(
    asked: StreamOffset, demanded: int, server: FailoverLog, boundaries: list[int], own: FailoverLog | None = None
) -> StreamOffset:
    return vbucket_stream.resume_point(
        asked,
        demanded=Seqno(demanded),
        server_log=server,
        own_log=own,
        boundaries=[Seqno(boundary) for boundary in boundaries],
    )


SERVER = log((NEW, 55), (OLD_BRANCH, 0))


OWN_60, OWN_30 = log((OLD_BRANCH, 60), (OLDEST, 0)), log((OLD_BRANCH, 30), (OLDEST, 0))
PARTED_45 = log((NEW, 45), (OLDEST, 0))


# The last complete snapshot before the demanded seqno, or a boundary that is this seqno itself.
@case(at(OLD_BRANCH, 100), 55, SERVER, [0, 30, 50, 80, 100], None, at(OLD_BRANCH, 50))
@case(at(OLD_BRANCH, 100), 55, SERVER, [0, 55, 100], None, at(OLD_BRANCH, 55))
# The demanded seqno lies inside a snapshot: versions before it were never seen.
@case(at(OLD_BRANCH, 100), 55, SERVER, [0, 100], None, StreamOffset())
# Deletions have been purged: what is held can't be trusted at any seqno.
@case(at(NEW, 100), 0, SERVER, [0, 30, 100], None, StreamOffset())
# A branch that the server does not know is traced back to one that both know, which either may have left first.
@case(at(OLD_BRANCH, 100), 0, PARTED_45, [0, 20, 40, 70, 100], OWN_60, at(OLDEST, 40))
@case(at(OLD_BRANCH, 100), 0, PARTED_45, [0, 20, 40, 100], OWN_30, at(OLDEST, 20))
# Nothing in common.
@case(at(OLD_BRANCH, 100), 0, log((NEW, 0)), [0, 50, 100], None, StreamOffset())
@case(at(OLD_BRANCH, 100), 0, log((NEW, 0)), [0, 50, 100], log((OLD_BRANCH, 0)), StreamOffset())
@case(at(OLD_BRANCH, 100), 0, log((NEW, 0)), [0, 50, 100], log((OLD_BRANCH, 7), (OTHER, 0)), StreamOffset())
def test_the_point_to_resume_from(
    asked: StreamOffset,
    demanded: int,
    server: FailoverLog,
    boundaries: list[int],
    own: FailoverLog | None,
    point: StreamOffset,
) -> None:
    assert resumed(asked, demanded, server, boundaries, own) == point


def test_asking_again_always_comes_to_an_end() -> None:
    """A server that demands what was asked for, over and over, is asked from ever lower points."""
    boundaries = [0, 10, 20, 30]
    point, asked = at(OLD_BRANCH, 30), []
    while point.seqno:
        point = resumed(point, point.seqno, SERVER, boundaries)
        asked.append(point.seqno)
    assert asked == [20, 10, 0]


def test_boundaries_start_with_what_a_saved_offset_tells() -> None:
    assert vbucket_stream.Boundaries(at(OLD_BRANCH, 100, 60)).seqnos == [60, 100]
    inside = StreamOffset(vbuuid=OLD_BRANCH, seqno=Seqno(80), snapshot_start=Seqno(60), snapshot_end=Seqno(100))
    assert vbucket_stream.Boundaries(inside).seqnos == [60]


def test_boundaries_are_few_the_newest_all_there_and_the_first_kept() -> None:
    boundaries = vbucket_stream.Boundaries(StreamOffset())
    for seqno in range(1, 10_000):
        boundaries.add(Seqno(seqno))
        assert len(boundaries.seqnos) <= vbucket_stream.BOUNDARIES_MAX
    assert boundaries.seqnos == sorted(set(boundaries.seqnos))
    assert boundaries.seqnos[0] == 0
    assert boundaries.seqnos[-16:] == list(range(9_984, 10_000))


def test_what_was_rolled_back_is_no_boundary() -> None:
    boundaries = vbucket_stream.Boundaries(at(OLD_BRANCH, 10))
    boundaries.add(Seqno(20))
    boundaries.cut(Seqno(15))
    assert boundaries.seqnos == [10]
    boundaries.cut(Seqno(3))
    assert boundaries.seqnos == [0]


# --- a reader that leaves out what comes behind its end -----------------------------------------------------------


def test_a_snapshot_beyond_the_end_must_have_all_versions() -> None:
    """In one that has not, the only version that is sent of a document may lie behind the end."""
    for flags, end in ((SnapshotFlags.DISK, 5), (SnapshotFlags.HISTORY, 9), (SnapshotFlags.DISK, 6)):
        stream = accepted(replace(AS_THEY_COME, needs_history_behind_end=True))
        stream.end_seqno = Seqno(5)
        begins = SnapshotMarker(start_seqno=Seqno(0), end_seqno=Seqno(end), flags=flags)
        if end == 6:
            with pytest.raises(errors.NoConsistentCut, match="vbucket 4 around seqno 5"):
                stream.on_message(begins)
        else:
            stream.on_message(begins)
            assert seqnos(stream.on_run(run(1, 5), 1)) == [5]
