"""The change feed of `documents`, as deltalake reads it. `test_lake_model` has it through any sequence of changes."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headwater.errors import InvalidInput
from headwater.lake import data_files, history, upkeep
from headwater.lake.lake import LakeSettings, run_here
from headwater.lake.repair import _build_tables
from headwater.lake.typed_columns import ColumnMode
from headwater.lake.upkeep import READERS_S_MIN, DeadBytes, DeadFiles, join_files
from support.lake_model import Follower, SmallLake, lake_of_before, merging, with_columns

pytestmark = pytest.mark.usefixtures("large_tables")
DEFAULT = "_default._default"
WITH_FEED = merging(change_feed=True)


def begun(directory: Path, settings: LakeSettings = WITH_FEED) -> tuple[SmallLake, Follower]:
    """A lake with documents in both of its groups, and a copy of the table."""
    small = SmallLake(directory / "lake", settings=settings)
    small.write(0, "a", "b", "c", value=b'{"n": 1, "m": {"x": [1]}}')
    small.write(2, "d")
    small.land()
    return small, Follower(small.directory / "documents" / DEFAULT)


def cdc_files(small: SmallLake) -> list[Path]:
    return sorted((small.directory / "documents" / DEFAULT).glob("_change_data/**/*.parquet"))


@pytest.mark.parametrize("on_read", [False, True])
def test_says_what_each_merge_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_read: bool) -> None:
    # The rows that change lie in several row groups: deltalake 1.6.6 aborts where it has to derive them from vectors.
    monkeypatch.setattr(data_files, "KEYED_ROW_GROUP_ROWS", 1)
    small, copy = begun(tmp_path, merging(change_feed=True, on_read=on_read))
    small.write(0, "e")
    small.write(2, "f")
    small.land()
    assert cdc_files(small) == []
    copy.follow()
    assert copy.seen == {"insert": 2}
    # One group changes rows, and the other one only adds one: both are in the files of the feed.
    small.write(0, "a", value=b'{"n": 2}')
    small.bucket.change(0, "deletion", 0, b"b")
    small.write(2, "g")
    small.land()
    assert len(cdc_files(small)) == 2
    copy.follow()
    assert copy.seen == {"insert": 3, "update_preimage": 1, "update_postimage": 1, "delete": 1}
    # The same value with a new CAS is a change.
    small.write(0, "c", value=b'{"n": 1, "m": {"x": [1]}}')
    small.land()
    copy.follow()
    assert copy.seen["update_postimage"] == 2


def test_says_of_a_rollback_only_what_is_different_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "FEED_HELD_BYTES", 0)
    small, copy = begun(tmp_path)
    kept = small.bucket.vbuckets[0].high_seqno
    small.write(0, "a", "new", value=b'{"n": 2}')
    small.bucket.change(0, "deletion", 0, b"b")
    small.land()
    copy.follow()
    copy.seen.clear()
    small.bucket.fail_over(0, kept)
    small.land()
    copy.follow()
    assert copy.seen == {"update_preimage": 1, "update_postimage": 1, "insert": 1, "delete": 1}
    # What the next one takes back has left no trace: no row changes, though all of the vbucket are written again.
    small.write(0, "gone")
    small.bucket.change(0, "deletion", 0, b"gone")
    small.land()
    written = cdc_files(small)
    small.bucket.fail_over(0, kept)
    small.land()
    copy.follow()
    assert (copy.seen.total(), cdc_files(small)) == (4, written)


def test_says_what_other_columns_change_and_nothing_of_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "JOIN_FILES_MIN", 2)
    small, copy = begun(tmp_path, replace(WITH_FEED, columns={"*": ColumnMode.NONE}))
    small.bucket.change(2, "mutation", 0, b"bytes", b"\xff", is_json=False)
    small.land()
    assert join_files(small.lake) > 0
    copy.follow()
    assert copy.seen == {"insert": 1}
    small.reopen(replace(WITH_FEED, columns={"*": ColumnMode.INFER}))
    small.write(0, "a", value=b'{"n": 2}')
    small.land()
    copy.follow()
    assert copy.seen == {"insert": 1, "update_preimage": 4, "update_postimage": 4}


def test_says_what_a_repair_changes(tmp_path: Path) -> None:
    small, copy = begun(tmp_path)
    DeltaTable(small.directory / "documents" / DEFAULT).delete("key = 'b'")
    lake = small.reopen()
    _build_tables(lake, lake.tables[DEFAULT], run_here, with_history=False, with_feed=True)
    copy.follow()
    assert copy.seen == {"delete": 1, "insert": 1}


def test_its_files_are_deleted_as_others_that_are_dead(tmp_path: Path) -> None:
    small, copy = begun(tmp_path)
    dead, now_s = DeadFiles(DeadBytes(0.0, 0), keep_hours=168), time.time()
    dead.keep_within_bound(small.lake, now_s=now_s)
    small.write(0, "a", value=b'{"n": 2}')
    small.land()
    dead.keep_within_bound(small.lake, now_s=now_s)
    (file,) = cdc_files(small)
    assert dead.dead_bytes >= file.stat().st_size
    dead.keep_within_bound(small.lake, now_s=now_s + READERS_S_MIN)
    assert cdc_files(small) == []
    with pytest.raises(Exception, match=f"{file.name} not found"):
        copy.follow()


def test_can_be_switched_on_and_off(tmp_path: Path) -> None:
    """Also in a lake of the version before. Where nothing is said of it, a table stays as it is."""
    small = lake_of_before(tmp_path, WITH_FEED)
    small.write(0, "key-1", value=b'{"n": 3}')
    small.land()
    copy = Follower(small.directory / "documents" / DEFAULT)
    small.reopen(LakeSettings())
    small.write(0, "key-1", value=b'{"n": 4}')
    small.land()
    copy.follow()
    assert copy.seen == {"update_preimage": 1, "update_postimage": 1}
    written = cdc_files(small)
    small.reopen(merging(change_feed=False))
    small.write(0, "key-1", value=b'{"n": 5}')
    small.land()
    assert cdc_files(small) == written


def test_refuses_columns_with_the_names_of_the_feed(tmp_path: Path) -> None:
    small, _ = begun(tmp_path, with_columns(merging(), {"*": "_change_type STRING"}))
    with pytest.raises(InvalidInput, match="can't have a change feed: it has the column _change_type"):
        small.reopen(replace(small.lake.settings, merging=WITH_FEED.merging))
    # A field of that name gets no column.
    inferred, copy = begun(tmp_path / "inferred")
    inferred.write(0, "a", value=b'{"_change_type": 7, "n": 8}')
    inferred.land()
    copy.follow()
    (row,) = (row for row in copy.rows.values() if row["key"] == "a")
    assert row["n"] == 8


@pytest.mark.parametrize("on_read", [False, True])
def test_the_copy_of_the_guide_is_equal_through_failovers(tmp_path: Path, on_read: bool) -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/following.md").read_text()
    (code,) = (block for block in guide.split("```") if "def follow(" in block)
    program, copy = code.partition("\n")[2].rpartition("\n\n\n")[0], tmp_path / "copy.db"
    exec(program, names := dict[str, Any]())
    small, _ = begun(tmp_path, merging(change_feed=True, on_read=on_read))

    def follows() -> None:
        names["follow"](str(small.directory / "documents" / DEFAULT), str(copy))
        with contextlib.closing(sqlite3.connect(copy)) as opened:
            rows = opened.execute("SELECT key, document, seqno FROM documents").fetchall()
        table = small.rows(f"documents/{DEFAULT}")
        assert sorted(rows) == sorted((row["key"], row["document"], row["seqno"]) for row in table)

    follows()
    for turn in range(4):
        kept = small.bucket.vbuckets[0].high_seqno
        small.write(0, "a", f"new-{turn}", value=b'{"n": %d}' % turn)
        small.bucket.change(0, "deletion", 0, b"c" if turn % 2 else b"b")
        small.land()
        follows()
        small.bucket.fail_over(0, kept - 1)
        small.write(0, "a", "c", value=b'{"n": %d}' % -turn)
        small.land()
        if turn % 2:
            follows()
