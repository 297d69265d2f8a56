"""Where a query that starts now has started, kept for when its first batch is repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.client.offsets import Offsets
from headwater.errors import InvalidOffsets
from headwater.spark.starting_place import first_start


def test_the_first_now_holds(tmp_path: Path) -> None:
    folder = str(tmp_path / "not" / "there yet")
    assert first_start(folder, lambda: Offsets("first")) == Offsets("first")
    assert first_start(folder, lambda: Offsets("later")) == Offsets("first")


def test_a_uri(tmp_path: Path) -> None:
    first_start(f"file://{tmp_path}/progress", lambda: Offsets("first"))
    assert first_start(str(tmp_path / "progress"), lambda: Offsets("later")) == Offsets("first")


def test_a_crash_while_it_was_written(tmp_path: Path) -> None:
    (tmp_path / ".0123").write_text('{"version":1,"bucket_')
    assert first_start(str(tmp_path), lambda: Offsets("first")) == Offsets("first")


def test_a_file_that_was_changed(tmp_path: Path) -> None:
    first_start(str(tmp_path), lambda: Offsets("first"))
    (written,) = tmp_path.iterdir()
    written.write_text("something else")
    with pytest.raises(InvalidOffsets):
        first_start(str(tmp_path), lambda: Offsets("later"))
