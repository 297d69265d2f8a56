"""Deleting what no table needs: by hours, by bytes, and in the logs. The tests count bytes on the disk."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from headwater.errors import InvalidInput
from headwater.lake import upkeep
from headwater.lake.data_files import DataFile
from headwater.lake.upkeep import DeadBytes, DeadFiles, clean_logs, join_files, vacuum
from support.lake_model import SmallLake, batches, check_documents, mark_rows

DEFAULT = "_default._default"
MERGE_S = 60.0


def make_old(directory: Path, days: int = 30) -> None:
    at = time.time() - days * 24 * 3600
    for file in directory.rglob("*.parquet"):
        os.utime(file, (at, at))


def test_only_what_no_table_needs_is_deleted(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a")
    small.land()
    batch = small.begin()
    small.write(1, "never committed")
    (orphan,) = batch.writer.write(batches(small.bucket.rows(1), 10)).files
    # As young as this, it may be about to be committed.
    version = small.lake.changes.version
    assert vacuum(small.lake) == 0
    clean_logs(small.lake)
    small.lake.changes.refresh()
    assert small.lake.changes.version == version
    with pytest.raises(InvalidInput, match="safely"):
        vacuum(small.lake, retention_hours=0)
    make_old(tmp_path)
    assert vacuum(small.lake) == 1
    assert not (tmp_path / "changes" / orphan.path).exists()
    assert len(small.rows("changes")) == 1
    assert len(small.rows(f"documents/{DEFAULT}")) == 1
    assert small.reopen().held_offsets() == small.bucket.offsets()


def test_a_file_that_was_removed_lately_stays_for_its_readers(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    small.write(0, "a")
    small.land()
    small.write(0, "a", value=b"{}")
    small.land()
    make_old(tmp_path)
    assert vacuum(small.lake, retention_hours=1) == 0


def test_landing_goes_on_after_all_of_it(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    for number in range(10):
        small.write(0, f"key-{number}")
        small.land()
    join_files(small.lake)
    make_old(tmp_path)
    old = time.time() - 60 * 24 * 3600
    for entry in tmp_path.rglob("_delta_log/*"):
        os.utime(entry, (old, old))
    vacuum(small.lake)
    clean_logs(small.lake)
    small.write(0, "last")
    small.land()
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())
    assert small.reopen().held_offsets() == small.bucket.offsets()


def test_logs_are_kept_for_as_long_as_it_is_wanted(tmp_path: Path) -> None:
    small = SmallLake(tmp_path)
    for key in ("a", "b"):
        small.write(0, key)
        small.land()
    # What is old goes up to a checkpoint that is old as well: all that is younger can still be read.
    DeltaTable(tmp_path / "changes").create_checkpoint()
    old = time.time() - 3 * 24 * 3600
    for entry in (tmp_path / "changes/_delta_log").iterdir():
        os.utime(entry, (old, old))
    clean_logs(small.lake, retention_days=4)
    first = tmp_path / "changes/_delta_log" / f"{0:020}.json"
    assert first.exists()
    clean_logs(small.lake, retention_days=2)
    assert not first.exists()
    assert small.reopen().held_offsets() == small.bucket.offsets()


# --- bytes --------------------------------------------------------------------------------------------------------


def file_bytes(table: Path) -> int:
    """Of all files of rows, as the disk has them."""
    return sum(path.stat().st_size for path in table.rglob("*.parquet") if "_delta_log" not in path.parts)


def live_bytes(table: Path) -> int:
    return sum(os.path.getsize(uri.removeprefix("file://")) for uri in DeltaTable(table).file_uris())


def overwrite(small: SmallLake, turns: int, documents: int = 300) -> None:
    """Each merge leaves as many dead bytes as the table has live ones."""
    for turn in range(turns):
        for number in range(documents):
            small.write(number % 4, f"key-{number}", value=b'{"turn": %d, "n": %d}' % (turn, number))
        small.land()


@pytest.fixture
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "DEAD_BYTES_MIN", 0)


@pytest.mark.usefixtures("tight")
def test_dead_files_of_a_table_have_a_bound_in_bytes(small: SmallLake) -> None:
    table, dead = small.directory / "documents" / DEFAULT, DeadFiles(DeadBytes.parse("4x"), keep_hours=168)
    now_s, seen = time.time(), []
    for _ in range(20):
        overwrite(small, 1)
        now_s += MERGE_S
        dead.keep_within_bound(small.lake, now_s=now_s)
        seen.append(file_bytes(table) / live_bytes(table))
    # Without a bound there would be twenty.
    assert max(seen) < 6.5
    assert seen[-1] < 1.1 * seen[8], "it is flat after the bound"
    assert dead.live_bytes + dead.dead_bytes == sum(
        file_bytes(folder) for folder in (small.directory / "changes", table)
    )
    newest = DeltaTable(table).version()
    for version in range(newest - 2, newest + 1):
        assert DeltaTable(table, version=version).to_pyarrow_table().num_rows == 300, "readers may have opened it"
    with pytest.raises(FileNotFoundError):
        DeltaTable(table, version=newest - 10).to_pyarrow_table()
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())


@pytest.mark.usefixtures("tight")
def test_what_earlier_runs_have_left_is_dead_as_well(small: SmallLake) -> None:
    table = small.directory / "documents" / DEFAULT
    overwrite(small, 8)
    DeltaTable(table).create_checkpoint()
    overwrite(small, 2)
    small.reopen()
    orphan = table / "vbucket_group=0" / "left.parquet"
    orphan.write_bytes(bytes(10_000))
    now_s = time.time()
    before, dead = file_bytes(table), DeadFiles(DeadBytes.parse("0x"), keep_hours=168)
    dead.keep_within_bound(small.lake, now_s=now_s)
    assert file_bytes(table) == before, "all of it is too young"
    dead.keep_within_bound(small.lake, now_s=now_s + upkeep.READERS_S_MIN + 1)
    assert file_bytes(table) == live_bytes(table) + 10_000, "the file that no commit names may be about to be named"
    dead.keep_within_bound(small.lake, now_s=now_s + 3700)
    assert file_bytes(table) == live_bytes(table)
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())


@pytest.mark.usefixtures("tight")
def test_a_version_that_was_restored_keeps_its_files(small: SmallLake) -> None:
    table, dead = small.directory / "documents" / DEFAULT, DeadFiles(DeadBytes.parse("0x"), keep_hours=168)
    overwrite(small, 2)
    dead.keep_within_bound(small.lake)
    version = DeltaTable(table).version()
    overwrite(small, 1)
    dead.keep_within_bound(small.lake)
    DeltaTable(table).restore(version)
    dead.keep_within_bound(small.lake, now_s=time.time() + 3700)
    assert DeltaTable(table).to_pyarrow_table().num_rows == 300


@pytest.mark.usefixtures("tight")
def test_checkpoints_do_not_name_files_that_are_long_gone(small: SmallLake) -> None:
    dead, now_s = DeadFiles(DeadBytes.parse("1x"), keep_hours=168), time.time()
    overwrite(small, 3)
    documents = small.lake.tables[DEFAULT].documents
    assert documents is not None
    dead.keep_within_bound(small.lake, now_s=now_s)
    assert documents.log.tombstone_hours == 168
    dead.keep_within_bound(small.lake, now_s=now_s + 600)
    assert documents.log.tombstone_hours == 1
    # Few changes come now: what they leave stays for longer, and so do its names.
    dead.keep_within_bound(small.lake, now_s=now_s + 3 * 3600)
    assert documents.log.tombstone_hours == 8
    overwrite(small, 1)
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())


def test_logs_have_a_bound_in_bytes(small: SmallLake, monkeypatch: pytest.MonkeyPatch) -> None:
    log = small.directory / "documents" / DEFAULT / "_delta_log"
    for _ in range(5):
        overwrite(small, 6, documents=4)
        DeltaTable(log.parent).create_checkpoint()
    for number, entry in enumerate(sorted(log.iterdir(), reverse=True)):
        os.utime(entry, (time.time() - number * 3600,) * 2)
    size_bytes, entries = sum(entry.stat().st_size for entry in log.iterdir()), {*log.iterdir()}
    clean_logs(small.lake)
    assert {*log.iterdir()} == entries
    monkeypatch.setattr(upkeep, "LOG_BYTES_MIN", size_bytes // 2)
    clean_logs(small.lake, bound=DeadBytes(0.0, 0))
    assert sum(entry.stat().st_size for entry in log.iterdir()) < 0.8 * size_bytes
    overwrite(small, 1, documents=4)
    check_documents(small.rows(f"documents/{DEFAULT}"), small.bucket.sent_documents())
    assert small.reopen().held_offsets() == small.bucket.offsets()


@pytest.mark.parametrize(
    ("text", "live", "bound"), [("4x", 10**9, 4 * 10**9), ("1.5X", 0, 2**24), ("10GB", 7, 10 * 2**30)]
)
def test_bounds_are_a_multiple_or_a_size(text: str, live: int, bound: int) -> None:
    assert DeadBytes.parse(text).of(live) == bound


@pytest.mark.parametrize("text", ["", "x", "-1x", "4y", "10 apples", "1e3x"])
def test_other_bounds_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="Write 4x for four times the live table"):
        DeadBytes.parse(text)


# --- deletion vectors and the change data feed --------------------------------------------------------------------


@pytest.mark.parametrize("way", ["as they die", "found in a new run", "by hours"])
@pytest.mark.usefixtures("tight")
def test_dead_vectors_and_files_of_the_feed_are_deleted_and_live_ones_never(small: SmallLake, way: str) -> None:
    small.write(0, *(f"key-{number}" for number in range(9)))
    small.land()
    table = small.lake.tables[DEFAULT].documents
    assert table is not None
    log, dead, now_s = table.log, DeadFiles(DeadBytes.parse("0x"), keep_hours=168), time.time()
    log.set_vectors(True, table.state)
    log.set_properties({"delta.enableChangeDataFeed": "true"}, table.state)
    dead.keep_within_bound(small.lake, now_s=now_s)
    for number in range(3):
        marks = mark_rows(log, lambda row, number=number: row["key"] == f"key-{number}", inline_bytes_max=0)  # type: ignore[misc]
        path = small.directory / "documents" / DEFAULT / "_change_data" / f"{number}.parquet"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"rows")
        log.commit(replace(marks, cdc=[DataFile(path=f"_change_data/{path.name}", size_bytes=4, rows=1)]))
        dead.keep_within_bound(small.lake, now_s=now_s)
    assert names(small, "*.bin") + names(small, "_change_data/*") == 6
    live = small.rows(f"documents/{DEFAULT}")
    assert len(live) == 6
    if way == "by hours":
        for path in (small.directory / "documents").rglob("*.*"):
            os.utime(path, (now_s - 9999, now_s - 9999))
        assert vacuum(small.lake, retention_hours=1) == 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda: now_s + 4000)
            vacuum(small.lake, retention_hours=1)
    else:
        small.reopen()
        later = dead if way == "as they die" else DeadFiles(DeadBytes.parse("0x"), keep_hours=168)
        later.keep_within_bound(small.lake, now_s=now_s + upkeep.READERS_S_MIN + 1)
    assert (names(small, "*.bin"), names(small, "_change_data/*")) == (1, 0)
    assert small.rows(f"documents/{DEFAULT}") == live
    small.write(0, "key-8", value=b"{}")
    small.land()
    assert len(small.rows(f"documents/{DEFAULT}")) == 9 - 3


def names(small: SmallLake, pattern: str) -> int:
    return len([*(small.directory / "documents" / DEFAULT).glob(pattern)])
