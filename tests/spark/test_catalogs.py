"""Landings that register their tables. The node is real, Glue is moto's, and Unity Catalog is a small server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars
import pytest

import headwater.landing
from headwater.client.retries import Backoff
from headwater.lake import catalogs
from headwater.landing import LandingQuery
from support.fault_proxy import free_port
from support.landings import SourceBucket, run_headwater, wait_until
from support.node_process import PASSWORD, USER
from support.object_store import S3Server
from support.unity_server import UnityServer


@pytest.fixture
def unity() -> Iterator[UnityServer]:
    with UnityServer() as server:
        yield server


def land(bucket: SourceBucket, folder: Path, *options: str, **environment: str) -> str:
    """`headwater land --once`. Returns what it said."""
    arguments = ["land", bucket.url, "--into", str(folder), "--once", "--runner", "local", *options]
    ended = run_headwater(*arguments, **environment)
    assert ended.returncode == 0, ended.stderr
    return " ".join(ended.stderr.split())


def test_unity_has_all_tables_with_their_comments_and_follows_their_columns(
    bucket: SourceBucket, tmp_path: Path, unity: UnityServer
) -> None:
    bucket.create_scope("shop")
    bucket.create_collection("shop.orders")
    bucket.put([b"a"], b'{"n":1}', into="shop.orders")
    bucket.put([b"b"], b'{"m":1}')
    unity.token = "in-no-log"
    options = ("--catalog", unity.catalog, "--schema", "lake", "--history")
    environment = {"HEADWATER_CATALOG_TOKEN": unity.token}
    land(bucket, tmp_path / "lake", *options, **environment)
    names = [
        "changes",
        *(f"{kind}_{it}" for kind in ("documents", "history") for it in ("_default__default", "shop_orders")),
    ]
    assert sorted(unity.tables) == [f"main.lake.{name}" for name in names]
    table = unity.tables["main.lake.documents_shop_orders"]
    assert table["storage_location"] == f"file://{tmp_path}/lake/documents/shop.orders"
    assert table["comment"] == "The live documents of shop.orders"
    columns = {column["name"]: (column["type_text"], column.get("comment")) for column in table["columns"]}
    assert columns["n"] == ("bigint", "The field 'n' of the document")
    assert columns["changed_at"] == ("timestamp", "When the change was made, by the clock of its server")
    # Another client of the API finds the table by its name, and the right rows.
    found = polars.Catalog(unity.url, bearer_token=unity.token, require_https=False)
    info = found.get_table_info("main", "lake", "documents_shop_orders")
    assert [column.name for column in info.columns or []] == list(columns)
    assert found.scan_table("main", "lake", "documents_shop_orders").select("key", "n").collect().rows() == [("a", 1)]
    # Nothing new: nothing is written.
    unity.requests.clear()
    land(bucket, tmp_path / "lake", *options, **environment)
    assert {method for method, _ in unity.requests} == {"GET"}
    bucket.put([b"c"], b'{"n":2,"city":"Bonn"}', into="shop.orders")
    land(bucket, tmp_path / "lake", *options, **environment)
    table = unity.tables["main.lake.documents_shop_orders"]
    assert [column["type_text"] for column in table["columns"] if column["name"] == "city"] == ["string"]
    dropped = sorted(path for method, path in unity.requests if method == "DELETE")
    assert dropped == [f"tables/main.lake.{kind}_shop_orders" for kind in ("documents", "history")]


def start(bucket: SourceBucket, folder: Path, every: float | None = None, **options: Any) -> LandingQuery:
    login = {"user": USER, "password": PASSWORD}
    return headwater.landing.land(bucket.url, str(folder), every=every, **login, **options)  # type: ignore[arg-type]


def test_a_catalog_that_fails_stops_no_landing_and_gets_the_tables_later(
    bucket: SourceBucket,
    tmp_path: Path,
    unity: UnityServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(catalogs, "_BACKOFF", Backoff(delay_s_min=0.1, delay_s_max=0.1, random=lambda: 1.0))
    unity.fails = True
    bucket.put([b"a"], b'{"n":1}')
    with caplog.at_level(logging.INFO, "headwater.lake.catalogs"):
        query = start(bucket, tmp_path / "lake", 0.1, catalog=unity.catalog)
        wait_until(lambda: query.landing_status.catalog_failure is not None, query)
        bucket.put([b"b"], b'{"n":2}')
        query.processAllAvailable()
        status = query.landing_status
        assert (status.documents, status.failures, status.tables_unregistered) == (2, 0, 2)
        assert status.catalog_failure == (
            "changes is not up to date in the catalog: Unity Catalog answers GET tables with status 500: the database "
            "is away. Check the address in --catalog, and the catalog's log"
        )
        unity.fails = False
        wait_until(lambda: query.landing_status.tables_unregistered == 0, query)
        assert query.landing_status.catalog_failure is None
        # A table that is dropped in the catalog comes back, and a new collection is registered when it has a table.
        unity.tables.clear()
        monkeypatch.setattr(catalogs, "CHECK_EVERY_S", 0.2)
        bucket.create_scope("s")
        bucket.create_collection("s.new")
        bucket.put([b"c"], b"{}", into="s.new")
        schema = bucket.name.replace("-", "_")
        names = {f"main.{schema}.{name}" for name in ("changes", "documents__default__default", "documents_s_new")}
        wait_until(lambda: unity.tables.keys() == names, query)
        query.stop()
    sentences = [record.getMessage() for record in caplog.records]
    assert sum("is not up to date in the catalog" in sentence for sentence in sentences) == 2
    assert sum("is in the catalog now" in sentence for sentence in sentences) == 2


def test_a_catalog_that_is_away_is_said_once(bucket: SourceBucket, tmp_path: Path) -> None:
    bucket.put([b"a"], b'{"n":1}')
    port = free_port()
    said = land(bucket, tmp_path / "lake", "--catalog", f"unity://127.0.0.1:{port}/main")
    assert said.count(f"is not up to date in the catalog: the catalog at 127.0.0.1:{port} does not answer") == 1
    assert "Check the address in --catalog" in said


def test_entries_of_others_stay_as_they_are(bucket: SourceBucket, tmp_path: Path, unity: UnityServer) -> None:
    bucket.create_scope("a")
    bucket.create_scope("a_b")
    for collection in ("a.b_c", "a_b.c"):
        bucket.create_collection(collection)
        bucket.put([b"k"], b'{"n":1}', into=collection)
    start(bucket, tmp_path / "lake", catalog=unity.catalog, schema="s").awaitTermination()
    with pytest.MonkeyPatch.context() as patch:
        # Another program has made one of them, and one is of other tables.
        table = unity.tables["main.s.changes"]
        table |= {"properties": {}, "comment": "mine"}
        other = tmp_path / "other"
        patch.setattr(catalogs, "CHECK_EVERY_S", 0.2)
        query = start(bucket, other, catalog=unity.catalog, schema="s")
        query.awaitTermination()
    failure = query.landing_status.catalog_failure
    assert failure is not None
    assert failure.startswith(
        f"changes is not up to date in the catalog: the catalog has main.s.changes already, and it is at "
        f"file://{tmp_path}/lake/changes, not at file://{other}/changes. Drop it there"
    )
    query = start(bucket, tmp_path / "lake", catalog=unity.catalog, schema="s")
    query.awaitTermination()
    assert unity.tables["main.s.changes"]["comment"] == "mine"
    # Two collections with one name: the older one has it.
    assert unity.tables["main.s.documents_a_b_c"]["storage_location"].endswith("/documents/a.b_c")
    assert query.landing_status.tables_unregistered == 1
    assert "which documents/a.b_c has. Land the two collections separately" in str(query.landing_status.catalog_failure)


def test_glue_has_the_tables_of_a_lake_in_s3(
    bucket: SourceBucket, store: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    bucket.create_scope("Shop")
    bucket.create_collection("Shop.a-b%")
    bucket.put([b"a"], b'{"n":1,"at":{"x":[1.5]}}', into="Shop.a-b%")

    def land() -> dict[str, dict[str, Any]]:
        options = {"catalog": "glue://", "schema": "Lake", "storage_options": store.options}
        query = start(bucket, "s3a://lakes/glue", **options)  # type: ignore[arg-type]
        query.awaitTermination()
        assert query.landing_status.catalog_failure is None
        return store.glue_tables("lake")

    first = land()
    assert sorted(first) == ["changes", "documents_shop_a_b_"]
    table = first["documents_shop_a_b_"]
    place = "s3://lakes/glue/documents/Shop.a-b~"
    assert table["StorageDescriptor"]["Location"] == place
    assert table["StorageDescriptor"]["SerdeInfo"]["Parameters"]["path"] == place
    assert table["Parameters"]["spark.sql.sources.provider"] == "delta"
    assert table["Description"] == "The live documents of Shop.a-b%"
    types = {column["Name"]: column["Type"] for column in table["StorageDescriptor"]["Columns"]}
    assert (types["n"], types["at"], types["vbucket"]) == ("bigint", "struct<x:array<double>>", "int")
    assert land()["changes"]["VersionId"] == first["changes"]["VersionId"]
    bucket.put([b"a"], b'{"city":"Bonn"}', into="Shop.a-b%")
    columns = land()["documents_shop_a_b_"]["StorageDescriptor"]["Columns"]
    assert {"Name": "city", "Type": "string", "Comment": "The field 'city' of the document"} in columns
