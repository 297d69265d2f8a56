"""A landing that keeps Iceberg tables beside the Delta tables. Spark is simulated, the node is real."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headwater.errors import InvalidInput
from headwater.lake.iceberg import IcebergSettings, load_catalog_of
from headwater.lake.location import Location
from headwater.landing.query import Landing
from support.driven_source import SimulatedLanding
from support.landings import SourceBucket
from support.object_store import S3Server

pytest.importorskip("pyiceberg")

from support.iceberg_rest import IcebergRestServer

Rows = list[dict[str, Any]]


@dataclass
class IcebergLanding(SimulatedLanding):
    store: S3Server | None = None
    """Where the lake is, if not in `folder`."""
    uri: str = field(default="")
    catalog: str = field(default="")

    @property
    def iceberg(self) -> IcebergSettings:
        return IcebergSettings(catalog=self.catalog or f"sqlite:///{self.folder}.db")

    @property
    def landing(self) -> Landing:
        options = {} if self.store is None else self.store.options
        return replace(
            super().landing, iceberg=self.iceberg, into=self.uri or str(self.folder), storage_options=options
        )

    def check_same(self) -> None:
        location = Location.of(self.landing.into, self.landing.storage_options)
        catalog = load_catalog_of(self.iceberg, location)

        def iceberg(name: str) -> Rows:
            rows: Rows = catalog.load_table(f"headwater.{name}").scan().to_arrow().to_pylist()
            return sorted(rows, key=_place)

        def delta(name: str) -> Rows:
            table = DeltaTable(f"{location.uri}/{name}", storage_options=location.delta_options).to_pyarrow_table()
            rows: Rows = [{key: row[key] for key in row if key != "vbucket_group"} for row in table.to_pylist()]
            return sorted(rows, key=_place)

        assert iceberg("changes") == delta("changes")
        assert iceberg("documents__default__default") == delta("documents/_default._default")


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["vbucket"], row["seqno"], row.get("batch"), row.get("op")


@pytest.mark.parametrize("place", ["directory", pytest.param("S3", marks=pytest.mark.soak)])
def test_they_are_kept_through_rollbacks(
    bucket: SourceBucket, tmp_path: Path, place: str, request: pytest.FixtureRequest
) -> None:
    store = request.getfixturevalue("store") if place == "S3" else None
    uri = "" if store is None else "s3://lakes/iceberg"
    landing = IcebergLanding(bucket, tmp_path / "lake", store=store, uri=uri)
    for number in range(3):
        for vbucket in range(4):
            bucket.put(bucket.keys("a", 3, vbucket=vbucket), b'{"n":%d}' % number)
        landing.land()
        landing.check_same()
    bucket.delete(bucket.keys("a", 1, vbucket=0))
    bucket.fail_over(1, 4)
    landing.land()
    landing.check_same()
    location = Location.of(landing.landing.into, landing.landing.storage_options)
    changes = DeltaTable(f"{location.uri}/changes", storage_options=location.delta_options).to_pyarrow_table()
    assert {row["vbucket"] for row in changes.to_pylist() if row["void"]} == {1}


def test_a_rest_service_gets_the_tables_with_their_comments(bucket: SourceBucket, tmp_path: Path) -> None:
    with IcebergRestServer(tmp_path) as service:
        landing = IcebergLanding(bucket, tmp_path / "lake", catalog=service.url)
        for value in (b'{"n":1}', b'{"city":"Bonn"}'):
            bucket.put([b"a"], value)
            landing.land()
            landing.check_same()
        catalog = load_catalog_of(landing.iceberg, Location.of(str(landing.folder)))
        table = catalog.load_table("headwater.documents__default__default")
        assert table.properties["comment"] == "The live documents of _default._default"
        assert table.schema().find_field("city").doc == "The field 'city' of the document"


def test_a_catalog_that_can_not_be_used_leaves_nothing_behind(bucket: SourceBucket, tmp_path: Path) -> None:
    landing = replace(SimulatedLanding(bucket, tmp_path / "lake").landing, iceberg=IcebergSettings(catalog="missing"))
    with pytest.raises(InvalidInput, match="Iceberg catalog can't be used"):
        landing.prepare()
    assert not (tmp_path / "lake").exists()
