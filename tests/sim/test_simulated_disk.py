"""The simulated disk: what a view shows, and what is left when it is full."""

from __future__ import annotations

from random import Random

import pytest

from headwater.errors import StoreFull
from headwater.node.auth.users import DECOY_SECRET_BYTES, Users
from headwater.sim.machines import SimulatedDisk, SimulatedFolder
from headwater.store.engine import DeleteRow, PutRow, Table


@pytest.fixture
def disk():
    return SimulatedDisk(Random(1), Users(decoy_secret=bytes(DECOY_SECRET_BYTES)))


def test_a_view_shows_what_was_there_when_it_was_taken(disk):
    engine = SimulatedFolder(disk).open_engine("b")
    engine.write([PutRow(Table.BLOCKS, b"1", b"one"), PutRow(Table.BLOCKS, b"2", b"two")])
    with engine.view() as before:
        engine.write([DeleteRow(Table.BLOCKS, b"1"), PutRow(Table.BLOCKS, b"3", b"three")])
        with engine.view() as after:
            assert [key for key, _ in before.scan(Table.BLOCKS, b"", b"9")] == [b"1", b"2"]
            assert [key for key, _ in after.scan(Table.BLOCKS, b"", b"9")] == [b"2", b"3"]
            assert after.get(Table.BLOCKS, b"1") is None
            assert bytes(after.last_before(Table.BLOCKS, b"3")[1]) == b"two"


def test_what_is_written_is_there_for_the_next_process(disk):
    SimulatedFolder(disk).open_engine("b").write([PutRow(Table.BUCKET, b"k", b"v")])
    folder = SimulatedFolder(disk)
    assert folder.bucket_names() == ["b"]
    with folder.open_engine("b").view() as view:
        assert bytes(view.get(Table.BUCKET, b"k")) == b"v"


def test_a_full_disk_takes_nothing_and_keeps_everything(disk):
    engine = SimulatedFolder(disk).open_engine("b")
    engine.write([PutRow(Table.BUCKET, b"k", b"v")])
    disk.is_full = True
    with pytest.raises(StoreFull):
        engine.write([PutRow(Table.BUCKET, b"k", b"w")])
    with engine.view() as view:
        assert bytes(view.get(Table.BUCKET, b"k")) == b"v"
