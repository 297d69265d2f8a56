"""The folder in which tasks tell how far the snapshots went that they read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwater.protocol.numbers import Seqno, VBucketId, Vbuuid
from headwater.spark.read_extents import FILES_MAX, ExtentFolder, ReadExtent

A, B = Vbuuid(0xA), Vbuuid(0xB)
VBUCKET, OTHER = VBucketId(7), VBucketId(8)


def extent(vbuuid: Vbuuid, seqno: int, snapshot_end: int, *, start: int = 0) -> ReadExtent:
    return ReadExtent(vbuuid=vbuuid, start_seqno=Seqno(start), seqno=Seqno(seqno), snapshot_end=Seqno(snapshot_end))


class Tasks:
    """Writes into a folder, each time a second later than the last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = ExtentFolder(str(path))
        self._time_s = 1_700_000_000

    def write(self, **extents: ReadExtent) -> None:
        before = set(self.path.glob("*"))
        self.folder.write({VBucketId(int(name.removeprefix("v"))): told for name, told in extents.items()})
        (written,) = set(self.path.glob("*")) - before
        self._time_s += 1
        os.utime(written, (self._time_s, self._time_s))


@pytest.fixture
def tasks(tmp_path: Path) -> Tasks:
    return Tasks(tmp_path / "not" / "there yet")


def test_a_folder_that_is_not_there_tells_nothing(tasks: Tasks) -> None:
    assert tasks.folder.read() == {}


def test_what_tasks_have_written(tasks: Tasks) -> None:
    tasks.write(v7=extent(A, 100, 105))
    tasks.write(v8=extent(B, 3, 3))
    assert tasks.folder.read() == {VBUCKET: extent(A, 100, 105), OTHER: extent(B, 3, 3)}


def test_large_vbuuids(tasks: Tasks) -> None:
    tasks.write(v7=extent(Vbuuid(2**64 - 1), 2**63, 2**63))
    assert tasks.folder.read() == {VBUCKET: extent(Vbuuid(2**64 - 1), 2**63, 2**63)}


def test_a_later_batch_takes_the_place_of_an_earlier_one(tasks: Tasks) -> None:
    tasks.write(v7=extent(A, 100, 105))
    tasks.write(v7=extent(A, 120, 120))
    assert tasks.folder.read()[VBUCKET] == extent(A, 120, 120)


@pytest.mark.parametrize("ends", [(105, 101), (101, 105)])
def test_of_a_task_that_ran_twice_the_worst_holds(tasks: Tasks, ends: tuple[int, int]) -> None:
    for end in ends:
        tasks.write(v7=extent(A, 100, end))
    assert tasks.folder.read()[VBUCKET] == extent(A, 100, 105)


def test_a_batch_that_ends_where_an_earlier_one_did_is_another_one(tasks: Tasks) -> None:
    """A rollback lies between them."""
    tasks.write(v7=extent(A, 100, 105, start=80))
    tasks.write(v7=extent(B, 100, 100, start=60))
    assert tasks.folder.read()[VBUCKET] == extent(B, 100, 100, start=60)


@pytest.mark.parametrize("branches", [(A, B), (B, A), (A, B, B), (B, A, B)])
def test_of_a_task_that_ran_twice_on_two_branches_nobody_knows_whose_rows_were_kept(
    tasks: Tasks, branches: tuple[Vbuuid, ...]
) -> None:
    """The rows that were kept may be of the branch that is dead, so it must not look as if all were of the newest."""
    for branch in branches:
        tasks.write(v7=extent(branch, 100, 100))
    assert tasks.folder.read()[VBUCKET].vbuuid not in (A, B)


def test_a_batch_after_that_is_known_again(tasks: Tasks) -> None:
    for branch in (A, B):
        tasks.write(v7=extent(branch, 100, 100))
    tasks.write(v7=extent(B, 110, 110))
    assert tasks.folder.read()[VBUCKET] == extent(B, 110, 110)


@pytest.mark.parametrize(
    "text", ["", "[", "[[7,10,", "17", "null", '{"a":1}', '[["x",1,2,3]]', "[[1,2]]", "[17]"], ids=repr
)
def test_a_file_that_was_cut_off_or_changed_tells_nothing(tasks: Tasks, text: str) -> None:
    tasks.write(v7=extent(A, 100, 105))
    (tasks.path / "ff.json").write_text(text)
    assert tasks.folder.read() == {VBUCKET: extent(A, 100, 105)}


def test_what_is_being_written_is_not_read(tasks: Tasks) -> None:
    tasks.write(v7=extent(A, 100, 105))
    (tasks.path / ".unfinished").write_text("[[7,11,0,100,100]]")
    assert tasks.folder.read() == {VBUCKET: extent(A, 100, 105)}


def test_many_files_become_one_that_tells_the_same(tasks: Tasks) -> None:
    for seqno in range(10, 20):
        tasks.write(v7=extent(A, seqno, seqno), v8=extent(B, 5, seqno))
    before = tasks.folder.read()
    tasks.folder.compact()
    assert len(list(tasks.path.glob("*.json"))) == 1
    assert tasks.folder.read() == before == {VBUCKET: extent(A, 19, 19), OTHER: extent(B, 5, 19)}


def test_what_nobody_knows_stays_so(tasks: Tasks) -> None:
    for branch in (A, B):
        tasks.write(v7=extent(branch, 100, 100))
    tasks.folder.compact()
    tasks.write(v7=extent(B, 100, 100))
    assert tasks.folder.read()[VBUCKET].vbuuid not in (A, B)


def test_a_single_file_is_left_alone(tasks: Tasks) -> None:
    tasks.write(v7=extent(A, 100, 105))
    (path,) = tasks.path.glob("*.json")
    tasks.folder.compact()
    assert list(tasks.path.glob("*.json")) == [path]


def test_a_uri(tmp_path: Path) -> None:
    folder = ExtentFolder(f"file://{tmp_path}/progress")
    folder.write({VBUCKET: extent(A, 100, 105)})
    assert folder.read() == {VBUCKET: extent(A, 100, 105)}
    assert [path.name for path in tmp_path.iterdir()] == ["progress"]


def test_there_is_a_limit_to_the_files_that_are_looked_at(tasks: Tasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are."""
    assert FILES_MAX >= 1024, "a batch writes one for each of its tasks"
    monkeypatch.setattr("headwater.spark.read_extents.FILES_MAX", 2)
    tasks.write(v8=extent(A, 1, 1))
    for seqno in (2, 3):
        tasks.write(v7=extent(A, seqno, seqno))
    assert tasks.folder.read() == {VBUCKET: extent(A, 3, 3)}
