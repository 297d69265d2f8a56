"""A landing that keeps an Iceberg table beside the Delta tables. Spark is simulated, the node is real."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import InvalidInput
from headwater.lake.iceberg_changes import IcebergSettings, load_catalog_of
from headwater.spark.landing import Landing
from support.driven_source import SimulatedLanding, without_spark
from support.landings import SourceBucket

pytest.importorskip("pyiceberg")


class IcebergLanding(SimulatedLanding):
    @property
    def iceberg(self) -> IcebergSettings:
        return IcebergSettings(catalog=f"sqlite:///{self.folder}.db")

    @property
    def landing(self) -> Landing:
        return replace(super().landing, iceberg=self.iceberg)

    def check_same(self) -> None:
        table = load_catalog_of(self.iceberg, str(self.folder)).load_table(self.iceberg.table)

        def places(rows: list[dict[str, Any]]) -> list[Any]:
            return sorted((row["batch"], row["vbucket"], row["seqno"], row["op"], row["void"]) for row in rows)

        assert places(table.scan().to_arrow().to_pylist()) == places(self.changes())
        self.check_equal()


def test_it_is_kept_through_rollbacks(bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_spark(monkeypatch)
    landing = IcebergLanding(bucket, tmp_path / "lake")
    for number in range(3):
        for vbucket in range(4):
            bucket.put(bucket.keys("a", 3, vbucket=vbucket), b'{"n":%d}' % number)
        landing.land()
        landing.check_same()
    bucket.fail_over(1, 4)
    landing.land()
    assert {row["vbucket"] for row in landing.changes() if row["void"]} == {1}
    landing.check_same()


def test_a_catalog_that_can_not_be_used_leaves_nothing_behind(
    bucket: SourceBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    landing = replace(SimulatedLanding(bucket, tmp_path / "lake").landing, iceberg=IcebergSettings(catalog="nobody"))
    with pytest.raises(InvalidInput, match="Iceberg catalog can't be used"):
        landing.prepare()
    assert not (tmp_path / "lake").exists()
