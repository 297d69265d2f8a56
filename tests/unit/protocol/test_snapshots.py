"""Offsets and snapshot tracking on the consumer's side."""

from __future__ import annotations

import pytest

from headwater.errors import LocalProtocolError, SnapshotViolation
from headwater.protocol.messages.dcp_changes import OsoFlags, SnapshotFlags
from headwater.protocol.snapshots import SnapshotTracker, StreamOffset
from support.cases import case

MEMORY = SnapshotFlags.MEMORY


def offset(seqno: int, start: int, end: int) -> StreamOffset:
    return StreamOffset(vbuuid=0xA, seqno=seqno, snapshot_start=start, snapshot_end=end)


def tracker(seqno: int = 0, start: int | None = None, end: int | None = None) -> SnapshotTracker:
    return SnapshotTracker(offset=offset(seqno, seqno if start is None else start, seqno if end is None else end))


def marker(state: SnapshotTracker, start: int, end: int) -> SnapshotTracker:
    return state.on_marker(start=start, end=end, flags=MEMORY)


# --- offsets ------------------------------------------------------------------------------------------------------


def test_the_default_offset_is_the_beginning() -> None:
    assert StreamOffset() == StreamOffset(vbuuid=0, seqno=0, snapshot_start=0, snapshot_end=0)
    assert StreamOffset().is_complete


@pytest.mark.parametrize(("seqno", "start", "end"), [(5, 0, 10), (5, 5, 10), (5, 0, 5), (5, 5, 5)])
def test_an_offset_inside_its_snapshot_exists(seqno: int, start: int, end: int) -> None:
    assert offset(seqno, start, end).is_complete == (seqno == end)


@pytest.mark.parametrize(("seqno", "start", "end"), [(5, 6, 10), (5, 0, 4), (5, 6, 4), (0, 1, 1)])
def test_an_offset_outside_its_snapshot_does_not(seqno: int, start: int, end: int) -> None:
    with pytest.raises(LocalProtocolError, match=f"seqno {seqno} lies outside its snapshot {start} to {end}"):
        offset(seqno, start, end)


# --- markers ------------------------------------------------------------------------------------------------------


def test_as_recorded_the_first_marker_starts_at_the_requested_seqno_and_later_ones_after_the_last() -> None:
    """Couchbase 7.0.5, vbucket 0 from 0: markers 0 to 14, 15 to 15, 16 to 16, 18 to 18, with seqnos left out."""
    state = marker(tracker(), 0, 14)
    for seqno in (1, 4, 5, 6, 7, 8, 11, 12, 13):
        state = state.on_seqno(seqno)
        assert not state.is_complete
        assert state.offset == offset(seqno, 0, 14)
    state = state.on_seqno(14)
    assert state.is_complete
    for seqno in (15, 16, 18):
        state = marker(state, seqno, seqno).on_seqno(seqno)
        assert state.is_complete
    assert state.offset.seqno == 18


def test_a_tracker_starts_with_nothing_open() -> None:
    assert tracker(5).is_complete
    assert tracker(5).flags == 0


def test_a_marker_alone_does_not_move_the_offset() -> None:
    state = marker(tracker(10), 11, 20)
    assert state.offset == offset(10, 10, 20)
    assert state.flags == MEMORY
    assert not state.is_complete


# What is held of a snapshot goes back to its start, so that is what a rollback would have to undo.
@case((5, 2, 10), 5, (5, 2, 12))
# A resume after a whole snapshot holds nothing of the next.
@case((10, 2, 10), 10, (10, 10, 12))
# Servers start their first marker at the snapshot that was asked from, though all of that is held.
@case((10, 7, 10), 7, (10, 10, 12))
def test_what_a_resume_holds(held: tuple[int, int, int], start: int, expected: tuple[int, int, int]) -> None:
    assert marker(tracker(*held), start, 12).offset == offset(*expected)


@pytest.mark.parametrize(("start", "end"), [(12, 11), (5, 10), (0, 9), (10, 10)])
def test_a_marker_that_brings_nothing_new_is_refused(start: int, end: int) -> None:
    with pytest.raises(SnapshotViolation, match=f"from {start} to {end} after seqno 10"):
        marker(tracker(10), start, end)


def test_a_marker_inside_a_snapshot_is_refused() -> None:
    state = marker(tracker(), 0, 10).on_seqno(5)
    with pytest.raises(SnapshotViolation, match="inside an incomplete snapshot"):
        marker(state, 6, 12)


# --- seqnos -------------------------------------------------------------------------------------------------------


def test_a_seqno_outside_any_snapshot_is_refused() -> None:
    for state, seqno in ((tracker(), 1), (marker(tracker(), 0, 3).on_seqno(3), 4)):
        with pytest.raises(SnapshotViolation, match="outside any snapshot"):
            state.on_seqno(seqno)


@pytest.mark.parametrize("seqno", [5, 4, 0, 11])
def test_a_seqno_that_does_not_rise_or_leaves_its_snapshot_is_refused(seqno: int) -> None:
    state = marker(tracker(), 0, 10).on_seqno(5)
    with pytest.raises(SnapshotViolation, match=f"seqno {seqno} after 5 in a snapshot that ends at 10"):
        state.on_seqno(seqno)


# --- OSO ----------------------------------------------------------------------------------------------------------


def test_in_an_oso_snapshot_the_offset_waits_for_the_end() -> None:
    state = tracker().on_oso(OsoFlags.START)
    for seqno in (7, 3, 9, 1):
        state = state.on_seqno(seqno)
        assert state.offset == offset(0, 0, 0)
        assert not state.is_complete
    state = state.on_oso(OsoFlags.END)
    assert state.offset == offset(9, 9, 9)
    assert state.is_complete


def test_an_empty_oso_snapshot_stays_where_it_was() -> None:
    state = tracker(5).on_oso(OsoFlags.START).on_oso(OsoFlags.END)
    assert state.offset == offset(5, 5, 5)
    assert state.is_complete


def test_ordinary_snapshots_follow_an_oso_snapshot() -> None:
    state = tracker().on_oso(OsoFlags.START).on_seqno(9).on_oso(OsoFlags.END)
    assert marker(state, 10, 12).on_seqno(12).is_complete


def test_an_oso_snapshot_does_not_start_inside_another() -> None:
    for state in (marker(tracker(), 0, 10), tracker().on_oso(OsoFlags.START)):
        with pytest.raises(SnapshotViolation, match="starts inside another"):
            state.on_oso(OsoFlags.START)


def test_an_oso_snapshot_does_not_end_before_it_starts() -> None:
    with pytest.raises(SnapshotViolation, match="never started"):
        tracker().on_oso(OsoFlags.END)


def test_a_marker_inside_an_oso_snapshot_is_refused() -> None:
    with pytest.raises(SnapshotViolation, match="inside an incomplete snapshot"):
        marker(tracker().on_oso(OsoFlags.START), 0, 10)


@pytest.mark.parametrize("flags", [OsoFlags(0), OsoFlags.START | OsoFlags.END, OsoFlags(0x80)])
def test_an_oso_marker_must_say_which_it_is(flags: OsoFlags) -> None:
    """One that ends a snapshot by saying nothing would publish half of it."""
    for state in (tracker(), tracker().on_oso(OsoFlags.START)):
        with pytest.raises(SnapshotViolation, match="either start or end"):
            state.on_oso(flags)
