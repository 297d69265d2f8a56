"""The places that a vbucket can go back to: which are kept, and where they are written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.protocol.snapshots import StreamOffset
from headwater.spark.known_places import PLACES_MAX, PlacesFile, with_place


def place(seqno: int, furthest: int | None = None) -> StreamOffset:
    end = seqno if furthest is None else furthest
    return StreamOffset(vbuuid=Vbuuid(7), seqno=Seqno(seqno), snapshot_start=Seqno(0), snapshot_end=Seqno(end))


def test_a_new_place_is_kept_with_the_last_ones() -> None:
    places: tuple[StreamOffset, ...] = ()
    for seqno in range(10, 10 * (PLACES_MAX + 3), 10):
        places = with_place(places, place(seqno), is_known=True)
    assert places == tuple(place(10 * number) for number in range(3, PLACES_MAX + 3))


def test_where_the_vbucket_has_gone_back_what_lay_behind_is_forgotten() -> None:
    places = (place(10), place(20), place(30))
    assert with_place(places, place(20), is_known=False) == (place(10), place(20))
    assert with_place(places, place(15), is_known=True) == (place(10), place(15))
    assert with_place(places, StreamOffset(), is_known=True) == ()


def test_a_place_that_is_known_stays_as_it_was_when_all_was_read() -> None:
    """Later it is not known any better how far the snapshots went: the bucket has gone on."""
    assert with_place((place(10, 12),), place(10, 50), is_known=True) == (place(10, 12),)


def test_a_branch_that_is_not_the_newest_makes_no_place() -> None:
    assert with_place((place(10),), place(20), is_known=False) == (place(10),)


def test_they_are_written_down(tmp_path: Path) -> None:
    file = PlacesFile(str(tmp_path / "progress"))
    assert file.read() == {}
    places = {VBucketId(3): (place(10, 12), place(20)), VBucketId(4): ()}
    file.write(places)
    assert file.read() == {VBucketId(3): (place(10, 12), place(20))}
    assert [path.name for path in (tmp_path / "progress").iterdir()] == ["places"]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a":[]}', '{"1":[[1,2]]}', '{"1":3}'])
def test_what_can_not_be_read_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "places").write_text(text)
    assert PlacesFile(str(tmp_path)).read() == {}
