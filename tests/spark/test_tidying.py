"""Upkeep of a landing by time: the next run does it when it is due, however short the runs are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from headwater.lake import dead_files, layout
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import Lake
from support.driven_source import SimulatedLanding, without_spark
from support.landings import SourceBucket

OLD_S = 30 * 24 * 3600


def leave_file(lake: Path, name: str) -> Path:
    """What an attempt that was killed a month ago has left in a table."""
    path = lake / "changes" / name
    path.write_bytes(b"no commit names me")
    os.utime(path, times=(time.time() - OLD_S,) * 2)
    return path


def test_old_files_are_deleted_when_it_is_due(
    bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    landing = SimulatedLanding(bucket, tmp_path / "lake")

    def land(key: bytes) -> None:
        bucket.put([key], b"{}")
        landing.land()
        assert len(landing.batches) == 1

    land(b"first")
    left = leave_file(landing.folder, "left.parquet")
    land(b"second")
    assert left.exists(), "it was looked for a moment ago"
    monkeypatch.setattr("headwater.spark.landing_loop.TIDY_EVERY_S", 0.0)
    land(b"third")
    assert not left.exists()
    landing.check_equal()


def test_dead_files_are_deleted_by_bytes_also_where_each_run_ends_soon(
    bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    for name in ("READERS_S_MIN", "DEAD_BYTES_MIN"):
        monkeypatch.setattr(dead_files, name, 0)
    landing = SimulatedLanding(bucket, tmp_path / "lake")
    for turn in range(12):
        bucket.put([b"key-%d" % number for number in range(8)], b'{"turn": %d}' % turn)
        query = landing.start()
        query.awaitTermination()
    files = [path for path in landing.folder.rglob("*.parquet") if "_delta_log" not in path.parts]
    status, on_disk = query.landing_status, sum(path.stat().st_size for path in files)
    assert status.live_bytes is not None
    assert status.dead_bytes == on_disk - status.live_bytes
    assert 0 < status.dead_bytes <= 4 * status.live_bytes
    # The newest, and four times as much: that are three files where the newest is the smallest.
    assert len([path for path in files if "documents" in path.parts]) in (4, 5)
    landing.check_equal()


@pytest.mark.parametrize(("asked", "groups"), [(2, 2), (None, 4)])
def test_tables_that_have_grown_are_cut_into_more_groups_unless_their_number_is_given(
    bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int | None, groups: int
) -> None:
    without_spark(monkeypatch)
    for name, number in (("GROUP_DOCUMENTS", 4), ("GROUPS_MIN", 2)):
        monkeypatch.setattr(layout, name, number)
    landing = SimulatedLanding(bucket, tmp_path / "lake", rules=MergeRules(history=True), groups=asked)
    for turn in range(2):
        bucket.put([b"key-%d-%d" % (turn, number) for number in range(20)], b'{"n": 1}')
        landing.land()
        landing.check_equal()
    lake = Lake.open(str(landing.folder))
    assert lake is not None
    assert (lake.facts.groups, lake.documents) == (groups, 40)
