"""Fixtures: a small lake, and where its Iceberg tables are listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.lake import layout
from headwater.lake.iceberg import IcebergSettings
from support.lake_model import SmallLake


@pytest.fixture
def small(tmp_path: Path) -> SmallLake:
    return SmallLake(tmp_path / "lake")


@pytest.fixture
def large_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have as many groups as the lake, though they hold few documents."""
    monkeypatch.setattr(layout, "SMALL_GROUP_DOCUMENTS", -1)


@pytest.fixture
def settings(tmp_path: Path) -> IcebergSettings:
    return IcebergSettings(catalog=f"sqlite:///{tmp_path}/catalog.db", table="shop.changes")
