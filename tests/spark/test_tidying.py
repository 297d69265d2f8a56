"""Upkeep of a landing by time: the next run does it when it is due, however short the runs are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

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
