"""Fixtures: a small lake, and where its Iceberg tables are listed."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.lake.iceberg_changes import IcebergSettings
from support.lake_model import SmallLake


@pytest.fixture
def small(tmp_path: Path) -> SmallLake:
    return SmallLake(tmp_path / "lake")


@pytest.fixture
def settings(tmp_path: Path) -> IcebergSettings:
    return IcebergSettings(catalog=f"sqlite:///{tmp_path}/catalog.db", table="shop.changes")
