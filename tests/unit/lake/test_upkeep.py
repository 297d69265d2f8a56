"""Joining files, trimming changes, deleting what is dead: and the tables are what they were."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headwater.lake import upkeep
from headwater.lake.commits import merge, plan_merges
from headwater.lake.data_files import DataFile
from headwater.lake.upkeep import files_to_join, join_changes, join_files, trim_changes
from headwater.protocol.numbers import VBucketId
from support.lake_model import SmallLake, check_documents, check_no_duplicates, merging

DEFAULT = "_default._default"
LONG_AGO = datetime.now(UTC) - timedelta(days=10)
YESTERDAY = datetime.now(UTC) - timedelta(days=1)


# --- joining ------------------------------------------------------------------------------------------------------


def sized(*sizes: int, partition: str = "0") -> list[DataFile]:
    where = (("vbucket_group", partition),)
    return [DataFile(path=f"{partition}-{n}", size_bytes=size, rows=1, partition=where) for n, size in enumerate(sizes)]


def test_files_of_about_one_size_are_joined() -> None:
    small, large = sized(*[1000] * 8), sized(*[300_000] * 7)
    (found,) = files_to_join([*small, *large], file_bytes=10**8)
    assert list(found) == small
    assert files_to_join(small[:7], file_bytes=10**8) == []
    assert files_to_join([*small[:7], *sized(*[1000] * 7, partition="1")], file_bytes=10**8) == []


def test_what_is_large_enough_is_left_alone_and_sets_do_not_grow_beyond_it() -> None:
    assert files_to_join(sized(*[60_000_000] * 20), file_bytes=10**8) == []
    found = files_to_join(sized(*[10_000_000] * 25), file_bytes=10**8)
    assert [len(part) for part in found] == [10, 10]


def test_every_row_is_joined_only_so_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand batches of one size: what is written again is a few times what was written."""
    files: list[DataFile] = []
    rewritten = 0
    for number in range(1000):
        files.append(DataFile(path=str(number), size_bytes=50_000, rows=1))
        for part in files_to_join(files, file_bytes=10**9):
            total = sum(file.size_bytes for file in part)
            rewritten += total
            files = [file for file in files if file not in part]
            files.append(DataFile(path=f"joined-{number}-{part[0].path}", size_bytes=total, rows=1))
    assert len(files) < 40
    assert rewritten < 6 * 1000 * 50_000


def test_large_sets_of_changes_wait_until_there_are_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = SmallLake(tmp_path)
    for number in range(9):
        small.write(number % 4, f"key-{number}")
        small.land(merges=False)
    one_set = sum(file.size_bytes for file in small.lake.changes.files())
    assert join_changes(small.lake, bytes_max=one_set - 1) == 0
    monkeypatch.setattr(upkeep, "CHANGE_FILES_MAX", 8)
    assert join_changes(small.lake, bytes_max=one_set - 1) == 8


@pytest.mark.parametrize("bytes_a_time", [1, 2**28])
def test_joined_files_hold_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_a_time: int) -> None:
    monkeypatch.setattr(upkeep, "JOIN_BYTES_A_TIME", bytes_a_time)
    small = SmallLake(tmp_path, settings=merging(history=True))
    for number in range(12):
        small.write(number % 4, f"new-{number}", f"key-{number}")
        small.land()
    before = {
        name: sorted(small.rows(name), key=str) for name in ("changes", f"documents/{DEFAULT}", f"history/{DEFAULT}")
    }
    assert join_files(small.lake) > 5
    assert len(small.lake.changes.files()) == 1
    for name, rows in before.items():
        assert sorted(small.rows(name), key=str) == rows
    # Pending changes are found in joined files as well.
    small.write(0, "pending")
    small.land(merges=False)
    for number in range(8):
        small.write(1, f"pending-{number}")
        small.land(merges=False)
    join_files(small.lake)
    small.reopen()
    check_documents(small.documents_now(), small.bucket.sent_documents())
    merge(small.lake)
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())
    assert small.lake.held_offsets() == small.bucket.offsets()


# --- trimming -----------------------------------------------------------------------------------------------------


def old_and_young(directory: Path) -> SmallLake:
    small = SmallLake(directory, settings=merging(history=True))
    for number in range(5):
        small.write(0, "a", "b", value=b'{"n": %d}' % number)
        small.write(1, "gone")
        small.bucket.change(1, "deletion", 0, b"gone")
        small.land(landed_at=LONG_AGO)
    small.write(0, "a", value=b'{"young": 1}')
    small.write(0, "a", value=b'{"young": 2}')
    small.land()
    return small


def test_old_changes_are_folded_and_young_ones_stay(tmp_path: Path) -> None:
    small = old_and_young(tmp_path)
    assert trim_changes(small.lake, YESTERDAY) == 22 - 2 - 3
    rows = sorted((row["vbucket"], row["seqno"], row["key"]) for row in small.rows("changes"))
    # Of the first vbucket what it held, of the second the row that tells how far back it goes.
    assert rows == [(0, 9, "a"), (0, 10, "b"), (0, 11, "a"), (0, 12, "a"), (1, 10, "gone")]
    check_no_duplicates(small.rows("changes"))
    small.reopen()
    check_documents(small.documents_now(), small.bucket.sent_documents())


def test_a_rollback_behind_what_was_trimmed_has_the_vbucket_read_again(tmp_path: Path) -> None:
    small = old_and_young(tmp_path)
    trim_changes(small.lake, YESTERDAY)
    small.bucket.fail_over(0, 9)
    small.write(0, "c")
    committed = small.land()
    assert committed.read_again == {0}
    assert small.rows(f"documents/{DEFAULT}") == []
    assert small.lake.held_offsets().get(VBucketId(0)) is None
    # The next batch begins where the tables end: at 0, in this vbucket.
    small.reopen()
    small.bucket.mark_unread(0)
    small.land()
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())
    check_no_duplicates(small.rows("changes"))


def test_what_is_young_or_not_merged_is_not_trimmed_and_nothing_before_it_pays(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a", "b", "c", "a")
    small.land(landed_at=LONG_AGO)
    assert trim_changes(small.lake, YESTERDAY) == 0
    for number in range(5):
        small.write(0, "a", value=b'{"n": %d}' % number)
        small.land(landed_at=LONG_AGO, merges=False)
    assert trim_changes(small.lake, YESTERDAY) == 0
    merge(small.lake)
    assert trim_changes(small.lake, LONG_AGO) == 0
    assert trim_changes(small.lake, YESTERDAY) == 6


def test_a_history_that_missed_what_was_trimmed_does_not_go_on(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, settings=merging(history=True))
    small.write(0, "a")
    small.land(landed_at=LONG_AGO)
    small.reopen(merging(history=False))
    for number in range(5):
        small.write(0, "a", value=b'{"n": %d}' % number)
        small.land(landed_at=LONG_AGO)
    assert trim_changes(small.lake, YESTERDAY) > 0
    small.reopen(merging(history=True))
    merge(small.lake)
    assert [(table.name, table.reason) for table in small.lake.aside.tables] == [
        (DEFAULT, f"the history of {DEFAULT} was not kept for a while, and the missing changes have been trimmed")
    ]
    shutil.rmtree(tmp_path / "history" / DEFAULT)
    small.reopen()
    merge(small.lake)
    assert [(row["seqno"], row["is_current"]) for row in small.rows(f"history/{DEFAULT}")] == [(6, True)]


@pytest.mark.usefixtures("large_tables")
def test_the_largest_group_is_merged_first(tmp_path: Path) -> None:
    small = SmallLake(tmp_path, groups=4)
    for vbucket, count in enumerate((1, 300, 30, 900)):
        small.write(vbucket, *(f"{vbucket}-{number}" for number in range(count)))
    small.land()
    for vbucket in range(4):
        small.write(vbucket, f"{vbucket}-0")
    small.land(merges=False)
    assert [task.group for task in plan_merges(small.lake)] == [3, 1, 2, 0]
