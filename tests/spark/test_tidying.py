"""Upkeep of a landing by time: whoever lands next when it is due does it, however short the runs are."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from simulated_landing import SimulatedLanding, without_spark
from spark_node import SourceBucket

from headwater.spark.landing import TIDY_EVERY_S

OLD_S = 30 * 24 * 3600


def leave_file(lake: Path, name: str) -> Path:
    """What an attempt that was killed a month ago has left in a table."""
    path = lake / "changes" / name
    path.write_bytes(b"nobody knows of me")
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
    tidied = landing.folder / "_headwater" / "tidied"
    os.utime(tidied, times=(time.time() - TIDY_EVERY_S - 1,) * 2)
    land(b"third")
    assert not left.exists()
    assert time.time() - tidied.stat().st_mtime < OLD_S / 2
    landing.check_equal()
