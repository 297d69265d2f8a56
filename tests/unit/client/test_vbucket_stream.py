"""One vbucket as a consumer follows it."""

from __future__ import annotations

import pytest

from headwater.client.pieces import ChangeRun, RollbackPiece
from headwater.client.vbucket_stream import BOUNDARIES_MAX, Boundaries, StreamItem, VBucketStream, resume_point
from headwater.errors import NoConsistentCut, SnapshotViolation, UnexpectedMessage
from headwater.protocol.consumer import StreamRun
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.messages.dcp_changes import Mutation, SeqnoAdvanced, SnapshotFlags, SnapshotMarker
from headwater.protocol.messages.dcp_streams import StreamEnd, StreamEndReason, StreamFlags, StreamRequest
from headwater.protocol.numbers import SEQNO_MAX, CollectionId, Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset

OLD = FailoverLog.start(Vbuuid(1))


def new(*, whole: bool = True, offset: StreamOffset | None = None) -> VBucketStream:
    return VBucketStream(VBucketId(4), offset or StreamOffset(), whole_snapshots=whole)


def ask(stream: VBucketStream) -> StreamRequest:
    return stream.request(flags=StreamFlags(0), value=b"")


def accepted(**options: bool) -> VBucketStream:
    stream = new(**options)
    ask(stream)
    stream.on_accepted(OLD)
    return stream


def marker(start: int, end: int) -> SnapshotMarker:
    return SnapshotMarker(start_seqno=Seqno(start), end_seqno=Seqno(end), flags=SnapshotFlags.MEMORY)


def run(first: int, last: int) -> StreamRun:
    return StreamRun(1, last - first + 1, first, last, b"x" * 10)


def seqnos(passed: list[StreamItem]) -> list[int]:
    return [item.offset.seqno for item in passed]


def read(stream: VBucketStream, *ends: int) -> None:
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
    stream = accepted(whole=False)
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
    stream = VBucketStream(VBucketId(4), StreamOffset(), whole_snapshots=True, is_filtered=True)
    ask(stream)
    stream.on_accepted(OLD)
    stream.on_message(marker(0, 5))
    stream.on_run(run(1, 3), 1)
    assert seqnos(stream.on_message(marker(6, 9))) == [3, 5]
    assert stream.offset.is_complete
    with pytest.raises(UnexpectedMessage):
        stream.on_message(marker(2, 12))
    everything = accepted()
    everything.on_message(marker(0, 5))
    with pytest.raises(UnexpectedMessage):
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
    stream.on_rollback_demanded()
    server = OLD.branch(Vbuuid(2), at_seqno=Seqno(25))
    stream.on_server_log(server, demanded=Seqno(25))
    assert ask(stream).start_seqno == 20
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
    stream = new()
    ask(stream)
    with pytest.raises(UnexpectedMessage):
        stream.on_rollback_demanded()


@pytest.mark.parametrize(
    ("reason", "end", "is_done"),
    [
        (StreamEndReason.OK, 50, True),
        (StreamEndReason.OK, SEQNO_MAX, False),
        (StreamEndReason.FILTER_EMPTY, SEQNO_MAX, True),
        (StreamEndReason.STATE_CHANGED, 50, False),
        (StreamEndReason.STATE_CHANGED, 3, False),
    ],
)
def test_what_is_held_is_passed_on_at_the_end_of_all_and_only_then(
    reason: StreamEndReason, end: int, is_done: bool
) -> None:
    """What is left of the snapshot is hidden from us, and its end is the place. A stream that breaks off inside of a
    snapshot is asked for again, also if the end that was wanted has come."""
    stream = accepted()
    stream.end_seqno = Seqno(end)
    stream.on_message(marker(0, 100))
    stream.on_run(run(1, 3), 1)
    assert stream.is_done_with(reason) is is_done
    assert seqnos(stream.on_message(StreamEnd(reason=reason))) == ([3, 100] if is_done else [])
    assert stream.offset.is_complete


@pytest.mark.parametrize("whole", [True, False])
def test_a_snapshot_that_broke_off_is_asked_for_to_its_end(whole: bool) -> None:
    stream = accepted(whole=whole)
    stream.end_seqno = Seqno(3)
    stream.on_message(marker(0, 10))
    stream.on_run(run(1, 5), 1)
    stream.drop()
    assert ask(stream).end_seqno == (3 if whole else 10)


def test_a_stream_that_has_nothing_to_send_ends_at_the_end_that_was_asked_for() -> None:
    stream = accepted()
    stream.end_seqno = Seqno(50)
    (passed,) = stream.on_message(StreamEnd(reason=StreamEndReason.OK))
    assert (passed.piece, passed.offset.seqno, passed.offset.is_complete) == (None, 50, True)


def test_a_rollback_goes_back_to_a_boundary_from_before_the_start() -> None:
    start = StreamOffset(vbuuid=Vbuuid(1), seqno=Seqno(30), snapshot_start=Seqno(30), snapshot_end=Seqno(30))
    for demanded, kept in ((25, 20), (20, 20), (5, 0)):
        stream = VBucketStream(VBucketId(0), start, whole_snapshots=True, boundaries=(Seqno(10), Seqno(20)))
        ask(stream)
        stream.on_rollback_demanded()
        stream.on_server_log(OLD, demanded=Seqno(demanded))
        assert stream.asked.seqno == kept


def test_a_start_beyond_the_end_is_judged_all_the_same() -> None:
    stream = accepted()
    read(stream, 10)
    stream.end_seqno = Seqno(5)
    stream.drop()
    assert ask(stream).end_seqno == 10


@pytest.mark.parametrize(("first", "last"), [(6, 6), (3, 3), (5, 9)])
def test_seqnos_that_do_not_belong_there(first: int, last: int) -> None:
    stream = accepted(whole=False)
    stream.on_message(marker(0, 5))
    stream.on_run(run(1, 3), 1)
    with pytest.raises(SnapshotViolation):
        stream.on_run(run(first, last), 1)


def test_a_change_before_the_answer_or_outside_a_snapshot() -> None:
    stream = new()
    ask(stream)
    with pytest.raises(UnexpectedMessage):
        stream.on_run(run(1, 1), 1)
    with pytest.raises(UnexpectedMessage):
        accepted().on_run(run(1, 1), 1)


def test_a_change_whose_extras_are_cut_off() -> None:
    stream = accepted()
    stream.on_message(marker(0, 5))
    with pytest.raises(SnapshotViolation, match="cut off"):
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
    asked: StreamOffset,
    demanded: int,
    server: FailoverLog,
    boundaries: list[int],
    own: FailoverLog | None = None,
) -> StreamOffset:
    return resume_point(
        asked,
        demanded=Seqno(demanded),
        server_log=server,
        own_log=own,
        boundaries=[Seqno(boundary) for boundary in boundaries],
    )


SERVER = log((NEW, 55), (OLD_BRANCH, 0))


def test_the_last_complete_snapshot_before_the_demanded_seqno() -> None:
    assert resumed(at(OLD_BRANCH, 100), 55, SERVER, [0, 30, 50, 80, 100]) == at(OLD_BRANCH, 50)


def test_a_boundary_that_is_the_demanded_seqno_itself() -> None:
    assert resumed(at(OLD_BRANCH, 100), 55, SERVER, [0, 55, 100]) == at(OLD_BRANCH, 55)


def test_without_a_boundary_everything_is_read_again() -> None:
    """The demanded seqno lies inside a snapshot: versions before it were never seen."""
    assert resumed(at(OLD_BRANCH, 100), 55, SERVER, [0, 100]) == StreamOffset()


def test_a_demand_to_start_anew_is_obeyed_though_boundaries_are_known() -> None:
    """Deletions have been purged: what is held can't be trusted at any seqno."""
    assert resumed(at(NEW, 100), 0, SERVER, [0, 30, 100]) == StreamOffset()


def test_a_branch_that_the_server_does_not_know_is_traced_back_to_one_that_both_know() -> None:
    own = log((OLD_BRANCH, 60), (OLDEST, 0))
    server = log((NEW, 45), (OLDEST, 0))
    assert resumed(at(OLD_BRANCH, 100), 0, server, [0, 20, 40, 70, 100], own) == at(OLDEST, 40)


def test_our_own_branch_may_have_parted_first() -> None:
    own = log((OLD_BRANCH, 30), (OLDEST, 0))
    server = log((NEW, 45), (OLDEST, 0))
    assert resumed(at(OLD_BRANCH, 100), 0, server, [0, 20, 40, 100], own) == at(OLDEST, 20)


@pytest.mark.parametrize("own", [None, log((OLD_BRANCH, 0)), log((OLD_BRANCH, 7), (OTHER, 0))])
def test_with_nothing_in_common_everything_is_read_again(own: FailoverLog | None) -> None:
    assert resumed(at(OLD_BRANCH, 100), 0, log((NEW, 0)), [0, 50, 100], own) == StreamOffset()


def test_asking_again_always_comes_to_an_end() -> None:
    """A server that demands what was asked for, over and over, is asked from ever lower points."""
    boundaries = [0, 10, 20, 30]
    point, asked = at(OLD_BRANCH, 30), []
    while point.seqno:
        point = resumed(point, point.seqno, SERVER, boundaries)
        asked.append(point.seqno)
    assert asked == [20, 10, 0]


def test_boundaries_start_with_what_a_saved_offset_tells() -> None:
    assert Boundaries(at(OLD_BRANCH, 100, 60)).seqnos == [60, 100]
    inside = StreamOffset(vbuuid=OLD_BRANCH, seqno=Seqno(80), snapshot_start=Seqno(60), snapshot_end=Seqno(100))
    assert Boundaries(inside).seqnos == [60]


def test_boundaries_are_few_the_newest_all_there_and_the_first_kept() -> None:
    boundaries = Boundaries(StreamOffset())
    for seqno in range(1, 10_000):
        boundaries.add(Seqno(seqno))
        assert len(boundaries.seqnos) <= BOUNDARIES_MAX
    assert boundaries.seqnos == sorted(set(boundaries.seqnos))
    assert boundaries.seqnos[0] == 0
    assert boundaries.seqnos[-16:] == list(range(9_984, 10_000))


def test_what_was_rolled_back_is_no_boundary() -> None:
    boundaries = Boundaries(at(OLD_BRANCH, 10))
    boundaries.add(Seqno(20))
    boundaries.cut(Seqno(15))
    assert boundaries.seqnos == [10]
    boundaries.cut(Seqno(3))
    assert boundaries.seqnos == [0]


# --- a reader that leaves out what comes behind its end -----------------------------------------------------------


def test_a_snapshot_beyond_the_end_must_have_all_versions() -> None:
    """In one that has not, the only version that is sent of a document may lie behind the end."""
    for flags, end in ((SnapshotFlags.DISK, 5), (SnapshotFlags.HISTORY, 9), (SnapshotFlags.DISK, 6)):
        stream = VBucketStream(VBucketId(4), StreamOffset(), whole_snapshots=False, needs_history_behind_end=True)
        stream.end_seqno = Seqno(5)
        ask(stream)
        stream.on_accepted(OLD)
        begins = SnapshotMarker(start_seqno=Seqno(0), end_seqno=Seqno(end), flags=flags)
        if end == 6:
            with pytest.raises(NoConsistentCut, match="vbucket 4 around seqno 5"):
                stream.on_message(begins)
        else:
            stream.on_message(begins)
            assert seqnos(stream.on_run(run(1, 5), 1)) == [5]
