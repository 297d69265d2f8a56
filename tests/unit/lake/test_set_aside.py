"""What is wrong with one table stops no other, and nothing that it misses is lost."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from headwater.errors import LakeDamaged, LakeFull, LakeGone, LakeUnreachable
from headwater.lake import column_values, commits, documents_merge, layout
from headwater.lake.commits import begin_batch, commit_batch, first_documents, merge
from headwater.lake.documents_merge import Merged, MergeTask
from headwater.lake.lake import Lake, run_here
from headwater.lake.location import Location
from headwater.lake.set_aside import RETRY_S_MAX, RETRY_S_MIN, AsideTables, own_fault, set_aside_error
from headwater.lake.upkeep import clean_logs, grow_groups, join_files, trim_changes, vacuum
from support.lake_model import HOTEL, SmallLake, batches, check_documents, merging, verify_model

DEFAULT, OTHER = "_default._default", "inventory.hotel"


class Clock:
    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def small(tmp_path: Path, clock: Clock) -> SmallLake:
    """A lake with two tables that hold everything."""
    small = SmallLake(tmp_path / "lake", settings=merging(history=True))
    small.lake.aside = AsideTables(clock)
    write(small, "first")
    small.land()
    return small


def write(small: SmallLake, word: str) -> None:
    for vbucket in range(4):
        for collection in (0, HOTEL):
            value = b'{"%s": 1}' % word.encode()
            small.write(vbucket, f"{word}-{vbucket}", "again", collection=collection, value=value)


def data_file(small: SmallLake, table: str) -> Path:
    return Path(DeltaTable(small.directory / table).file_uris()[0].removeprefix("file://"))


def missing(small: SmallLake) -> set[str]:
    """The tables that do not hold the documents of the bucket."""
    expected = small.bucket.sent_documents()
    found = set()
    for name, collection in ((DEFAULT, 0), (OTHER, HOTEL)):
        try:
            rows = small.rows(f"documents/{name}")
            check_documents(rows, {place: it for place, it in expected.items() if place[1] == collection})
        except (AssertionError, OSError, ValueError, DeltaError):
            found.add(name)
    return found


def aside(small: SmallLake) -> list[str]:
    return [table.name for table in small.lake.aside.tables]


def check_whole(small: SmallLake) -> None:
    assert (missing(small), aside(small)) == (set(), [])
    small.reopen()
    assert verify_model(small.lake, small.bucket).findings.first() == ()


def test_a_table_with_a_damaged_file_is_set_aside_until_it_is_repaired(small: SmallLake, clock: Clock) -> None:
    file = data_file(small, f"documents/{OTHER}")
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    for turn in range(3):
        write(small, f"turn{turn}")
        small.land()
        assert (missing(small), aside(small)) == ({OTHER}, [OTHER])
        assert not small.lake.has_pending
    (table,) = small.lake.aside.tables
    assert file.name in table.reason
    assert (table.hint, table.failures, table.retry_s - clock.now_s) == (table.hint, 1, RETRY_S_MIN)
    assert str(set_aside_error([table])).startswith(f"the table of {OTHER} is set aside: the file ")
    # It is tried again, fails again, and is left alone for longer.
    assert not small.lake.try_set_aside()
    for failures in (2, 3, 10):
        clock.now_s = small.lake.aside.tables[0].retry_s
        assert small.lake.try_set_aside()
        assert small.lake.has_pending
        merge(small.lake)
        (table,) = small.lake.aside.tables
        assert table.failures == min(failures, 4)
        assert table.retry_s - clock.now_s <= RETRY_S_MAX
    file.write_bytes(content)
    clock.now_s = small.lake.aside.tables[0].retry_s
    small.lake.try_set_aside()
    assert aside(small) == [OTHER], "whether it is in order shows when it is merged"
    merge(small.lake)
    check_whole(small)


def test_a_table_whose_log_is_damaged_is_set_aside_when_a_landing_opens_the_lake(
    small: SmallLake, clock: Clock
) -> None:
    entry = small.directory / f"documents/{OTHER}/_delta_log/{0:020}.json"
    content = entry.read_bytes()
    entry.write_text("{")
    with pytest.raises(LakeDamaged, match=f"documents/{re.escape(OTHER)}"):
        small.reopen()
    lake = Lake.open(str(small.directory), settings=small.lake.settings, aside=AsideTables(clock))
    assert lake is not None
    small.lake = lake
    write(small, "second")
    small.land()
    assert (missing(small), aside(small)) == ({OTHER}, [OTHER])
    # Upkeep leaves it alone, and what it misses.
    join_files(lake)
    vacuum(lake, retention_hours=1)
    clean_logs(lake)
    grow_groups(lake)
    assert trim_changes(lake, datetime.now(UTC) + timedelta(days=1)) == 0
    entry.write_bytes(content)
    clock.now_s += RETRY_S_MIN
    lake.try_set_aside()
    merge(lake)
    check_whole(small)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_table_that_can_not_be_made_is_set_aside(tmp_path: Path, clock: Clock, is_first: bool) -> None:
    small = SmallLake(tmp_path / "lake")
    small.lake.aside = AsideTables(clock)
    (tmp_path / "lake/documents").mkdir()
    in_the_way = tmp_path / "lake/documents" / OTHER
    in_the_way.write_text("a file where the folder should be")
    write(small, "first")
    first = first_documents(small.lake) if is_first else None
    batch = begin_batch(small.lake)
    held = None if first is None else first.hold()
    rows = [row for vbucket in range(4) for row in small.bucket.rows(vbucket)]
    report = batch.writer.write(batches(rows, 100), *([] if held is None else [held.take]))
    report.reached = small.reached(range(4))
    written = [] if first is None or held is None else first.write(report, held)
    commit_batch(small.lake, batch, [report])
    small.bucket.mark_sent(range(4))
    merge(small.lake, written=written)
    assert (missing(small), aside(small)) == ({OTHER}, [OTHER])
    in_the_way.unlink()
    clock.now_s += RETRY_S_MAX
    small.lake.try_set_aside()
    merge(small.lake)
    check_whole(small)


def test_columns_that_never_come_up_set_their_table_aside_after_some_rounds(
    small: SmallLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """delta-rs cuts the name of a column off at NUL. Were that not known, the column would be added for ever."""
    monkeypatch.setattr(column_values, "_FORBIDDEN", re.compile(r"[ ,;{}()\n\t=]"))
    small.write(0, "poison", collection=HOTEL, value=b'{"n\\u0000m": 1}')
    small.write(0, "plain", value=b'{"plain": 1}')
    runs = 0

    def counting(tasks: Sequence[Any]) -> list[Any]:
        nonlocal runs
        runs += 1
        return run_here(tasks)

    small.land(run=counting)
    assert runs <= commits._COLUMN_ROUNDS_MAX + 1
    assert (missing(small), aside(small)) == ({OTHER}, [OTHER])
    assert "the columns of inventory.hotel differ after each of 8 attempts" in small.lake.aside.tables[0].reason


def test_a_full_disk_and_a_store_that_does_not_answer_set_no_table_aside(
    small: SmallLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(small, "second")
    opened = Location.open_output
    for error, raised in (
        (OSError(errno.ENOSPC, "no room"), LakeFull),
        (LakeUnreachable("the store is away"), LakeUnreachable),
        (MemoryError(), MemoryError),
    ):

        def fail(location: Location, path: str, error: Exception = error) -> Any:
            if "documents" in location.uri:
                raise error
            return opened(location, path)

        monkeypatch.setattr(Location, "open_output", fail)
        with pytest.raises(raised):
            small.land()
        assert aside(small) == []
    monkeypatch.undo()
    merge(small.lake)
    check_whole(small)


def test_what_says_nothing_of_a_table_is_no_fault_of_it() -> None:
    assert own_fault(KeyboardInterrupt()) is None
    wrapped = LakeDamaged("can't be written")
    wrapped.__cause__ = Exception("Generic LocalFileSystem error: No space left on device (os error 28)")
    assert own_fault(wrapped) is None
    fault = own_fault(ValueError("odd\n  value"))
    assert fault is not None
    assert (fault.reason, "report" in fault.hint) == ("ValueError: odd value", True)


def test_a_table_that_is_set_aside_is_not_called_idle(small: SmallLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "_IDLE_BATCHES_MAX", 1)
    merge_documents = MergeTask._merge_documents

    def fail(task: MergeTask, target: documents_merge.DocumentsTarget, pending: Any) -> list[Merged]:
        assert target.name != OTHER, "it can't be merged"
        return merge_documents(task, target, pending)

    monkeypatch.setattr(MergeTask, "_merge_documents", fail)
    for turn in range(4):
        write(small, f"turn{turn}")
        small.land()
    assert (missing(small), aside(small)) == ({OTHER}, [OTHER])
    monkeypatch.undo()
    small.reopen()
    assert small.lake.pending.names == {OTHER}
    merge(small.lake)
    check_whole(small)


def test_growing_that_was_begun_goes_on_without_a_table_that_fails(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = SmallLake(tmp_path / "lake", vbuckets=8, groups=1)
    small.lake.aside = AsideTables(clock)
    write(small, "first")
    small.land()
    monkeypatch.setattr(layout, "GROUP_DOCUMENTS", 1)
    file = data_file(small, f"documents/{OTHER}")
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    grow_groups(small.lake)
    assert (small.lake.facts.groups, aside(small)) == (4, [OTHER])
    write(small, "second")
    small.land()
    assert missing(small) == {OTHER}
    file.write_bytes(content)
    clock.now_s += RETRY_S_MAX
    small.lake.try_set_aside()
    merge(small.lake)
    check_whole(small)


def test_a_table_that_is_removed_while_it_is_in_use_is_built_again_and_a_lake_is_not(
    small: SmallLake, clock: Clock
) -> None:
    shutil.rmtree(small.directory / "documents" / OTHER)
    write(small, "second")
    small.land()
    assert (missing(small), aside(small)) == ({OTHER}, [OTHER])
    clock.now_s += RETRY_S_MAX
    small.lake.try_set_aside()
    merge(small.lake)
    check_whole(small)
    write(small, "third")
    small.land(merges=False)
    small.directory.rename(small.directory.with_name("elsewhere"))
    with pytest.raises((LakeGone, DeltaError)):
        merge(small.lake)
    assert aside(small) == []
    assert not small.directory.exists()


def test_a_table_of_long_ago_stays_aside_until_it_is_built_again(tmp_path: Path, clock: Clock) -> None:
    long_ago, yesterday = datetime(2024, 1, 1, tzinfo=UTC), datetime.now(UTC) - timedelta(days=1)
    small = SmallLake(tmp_path / "lake")
    write(small, "first")
    small.land(landed_at=long_ago)
    table = tmp_path / "lake/documents" / OTHER
    shutil.copytree(table, tmp_path / "backup")
    for _ in range(5):
        write(small, "first")
        small.bucket.change(0, "deletion", HOTEL, b"first-0")
        small.land(landed_at=long_ago)
    assert trim_changes(small.lake, yesterday) > 0
    shutil.rmtree(table)
    shutil.move(tmp_path / "backup", table)
    lake = Lake.open(str(tmp_path / "lake"), aside=AsideTables(clock))
    assert lake is not None
    small.lake = lake
    for _ in range(2):
        assert "lacks changes that have been trimmed" in lake.aside.tables[0].reason
        clock.now_s += RETRY_S_MAX
        assert lake.try_set_aside()
        merge(lake)
        assert aside(small) == [OTHER], "what it misses is gone: merged, it would hold what was removed"
    shutil.rmtree(table)
    clock.now_s += RETRY_S_MAX
    lake.try_set_aside()
    merge(lake)
    check_whole(small)
