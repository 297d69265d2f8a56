"""Where `headwater serve` keeps its data when no folder is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.cli.serve import default_data_folder


def test_the_folder_for_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    usual = home / ".local" / "share" / "headwater" / "data"
    assert default_data_folder() == usual
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert default_data_folder() == usual, "the specification has it ignored"
    named = tmp_path / "named"
    monkeypatch.setenv("XDG_DATA_HOME", str(named))
    assert default_data_folder() == named / "headwater" / "data"
