"""The point that a consumer goes on from after a rollback."""

from __future__ import annotations

import pytest

from headwater.client.vbucket_stream import BOUNDARIES_MAX, Boundaries, resume_point
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.numbers import Seqno, Vbuuid
from headwater.protocol.snapshots import StreamOffset

OLD, NEW, OLDEST, OTHER = Vbuuid(0xA), Vbuuid(0xB), Vbuuid(0xC), Vbuuid(0xD)


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


SERVER = log((NEW, 55), (OLD, 0))


def test_the_last_complete_snapshot_before_the_demanded_seqno() -> None:
    assert resumed(at(OLD, 100), 55, SERVER, [0, 30, 50, 80, 100]) == at(OLD, 50)


def test_a_boundary_that_is_the_demanded_seqno_itself() -> None:
    assert resumed(at(OLD, 100), 55, SERVER, [0, 55, 100]) == at(OLD, 55)


def test_without_a_boundary_everything_is_read_again() -> None:
    """The demanded seqno lies inside a snapshot: versions before it were never seen."""
    assert resumed(at(OLD, 100), 55, SERVER, [0, 100]) == StreamOffset()


def test_a_demand_to_start_anew_is_obeyed_though_boundaries_are_known() -> None:
    """Deletions have been purged: what is held can't be trusted at any seqno."""
    assert resumed(at(NEW, 100), 0, SERVER, [0, 30, 100]) == StreamOffset()


def test_a_branch_that_the_server_does_not_know_is_traced_back_to_one_that_both_know() -> None:
    own = log((OLD, 60), (OLDEST, 0))
    server = log((NEW, 45), (OLDEST, 0))
    assert resumed(at(OLD, 100), 0, server, [0, 20, 40, 70, 100], own) == at(OLDEST, 40)


def test_our_own_branch_may_have_parted_first() -> None:
    own = log((OLD, 30), (OLDEST, 0))
    server = log((NEW, 45), (OLDEST, 0))
    assert resumed(at(OLD, 100), 0, server, [0, 20, 40, 100], own) == at(OLDEST, 20)


@pytest.mark.parametrize("own", [None, log((OLD, 0)), log((OLD, 7), (OTHER, 0))])
def test_with_nothing_in_common_everything_is_read_again(own: FailoverLog | None) -> None:
    assert resumed(at(OLD, 100), 0, log((NEW, 0)), [0, 50, 100], own) == StreamOffset()


def test_asking_again_always_comes_to_an_end() -> None:
    """A server that demands what was asked for, over and over, is asked from ever lower points."""
    boundaries = [0, 10, 20, 30]
    point, asked = at(OLD, 30), []
    while point.seqno:
        point = resumed(point, point.seqno, SERVER, boundaries)
        asked.append(point.seqno)
    assert asked == [20, 10, 0]


def test_boundaries_start_with_what_a_saved_offset_tells() -> None:
    assert Boundaries(at(OLD, 100, 60)).seqnos == [60, 100]
    inside = StreamOffset(vbuuid=OLD, seqno=Seqno(80), snapshot_start=Seqno(60), snapshot_end=Seqno(100))
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
    boundaries = Boundaries(at(OLD, 10))
    boundaries.add(Seqno(20))
    boundaries.cut(Seqno(15))
    assert boundaries.seqnos == [10]
    boundaries.cut(Seqno(3))
    assert boundaries.seqnos == [0]
