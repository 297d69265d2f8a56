"""Catalogs: how a user names one, what tables are called there, and what is said of a refusal."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import CatalogError, CatalogUnreachable, InvalidInput
from headwater.lake.catalogs import (
    CHECK_EVERY_S,
    TOKEN_VARIABLE,
    CatalogKeeper,
    CatalogSettings,
    Column,
    TableEntry,
    _hive_type,
    _unity_column,
    entry_name,
    sql_type,
)
from headwater.lake.commits import merge
from support.lake_model import HOTEL, SmallLake
from support.unity_server import UnityServer

TOKEN = "in-no-message"


def column(name: str, type_: object) -> Column:
    return Column(json.dumps({"name": name, "type": type_, "nullable": True, "metadata": {"comment": "it's one"}}))


ENTRY = TableEntry(table="documents/a.b", uri="s3a://lake/a.b", columns=(column("n", "long"),), comment="It has rows")


@pytest.fixture
def unity() -> Iterator[UnityServer]:
    with UnityServer() as server:
        yield server


@given(st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9_%-]{0,250}\.[A-Za-z0-9_-][A-Za-z0-9_%-]{0,250}", fullmatch=True))
def test_every_collection_has_a_name_that_catalogs_take(collection: str) -> None:
    name = entry_name(f"documents/{collection}")
    assert re.fullmatch("documents_[a-z0-9_]+", name)
    assert len(name) <= 128


def test_long_names_stay_apart() -> None:
    names = {entry_name(f"history/{'s' * 200}.{'c' * 200}{number}") for number in range(10)}
    assert {len(name) for name in names} == {128}
    assert len(names) == 10


def test_types_as_sql_writes_them() -> None:
    inner = {"type": "struct", "fields": [{"name": "a b", "type": {"type": "array", "elementType": "integer"}}]}
    assert sql_type({"type": "map", "keyType": "string", "valueType": inner}) == "map<string,struct<`a b`:array<int>>>"
    members = [{"name": name, "type": name} for name in ("variant", "timestamp_ntz")]
    assert _hive_type(column("d", {"type": "struct", "fields": members})) == (
        "struct<variant:binary,timestamp_ntz:timestamp>"
    )
    said = _unity_column(3, column("d", "decimal(10,2)"))
    assert (said["type_name"], said["type_precision"], said["type_scale"]) == ("DECIMAL", 10, 2)


# --- what a user gives --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catalog", "schema", "sentence"),
    [
        ("unity://host", None, "'unity://host' is not a catalog. Give unity://HOST:PORT/CATALOG"),
        ("hive://host", None, "'hive://host' is not a catalog"),
        ("unity://me:secret@host/main", None, "a catalog's URL can't contain a user or parameters. Put a token"),
        ("unity://host/main?token=secret", None, "a catalog's URL can't contain a user or parameters"),
        ("spark", "a-b", "'a-b' can't be the name of a schema. Use up to 128 letters"),
        (None, "lake", "a schema was given without a catalog"),
        ("unity://host:8080/main", None, "the token of the catalog would cross the network unencrypted. Give unitys:"),
    ],
)
def test_what_can_not_be_used(
    catalog: str | None, schema: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with pytest.raises(InvalidInput) as refused:
        CatalogSettings.of(catalog, schema)
    assert str(refused.value).startswith(sentence)
    assert "secret" not in str(refused.value)


def test_what_is_given() -> None:
    assert CatalogSettings.of(None, None) is None
    settings = CatalogSettings(catalog="spark:main")
    assert (settings.needs_session, settings.name_in_session) == (True, "main")
    assert (settings.schema_for("My-bucket"), replace(settings, schema="S").schema_for("b")) == ("my_bucket", "S")
    with pytest.raises(InvalidInput, match="the catalog of a Spark session needs one"):
        settings.check_runner(has_session=False)


def test_glue_needs_boto3_and_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    with pytest.raises(InvalidInput, match="no region of AWS is known"):
        CatalogSettings(catalog="glue://").open_service()
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(InvalidInput, match=r"Glue needs boto3.*\[glue\]"):
        CatalogSettings(catalog="glue://").open_service()


# --- what a catalog answers ---------------------------------------------------------------------------------------


def test_unity_refuses(unity: UnityServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    other = CatalogSettings(catalog=unity.catalog.replace("/main", "/other")).open_service()
    assert TOKEN not in repr(other)
    with pytest.raises(CatalogUnreachable, match=r"has no catalog other\. Create it"):
        other.register("s", ENTRY)
    unity.token = "another"
    with pytest.raises(CatalogUnreachable, match=r"refuses the request \(401\): no token, or a wrong one. Put a token"):
        other.register("s", ENTRY)
    monkeypatch.setenv(TOKEN_VARIABLE, f"{TOKEN}\n")
    with pytest.raises(InvalidInput, match="is not a token"):
        CatalogSettings(catalog=unity.catalog)


def test_unity_is_asked_as_its_api_says(unity: UnityServer) -> None:
    catalog = CatalogSettings(catalog=unity.catalog).open_service()
    catalog.register("s", ENTRY)
    made = unity.tables["main.s.documents_a_b"]
    assert made["columns"][0] | {"type_json": None} == {
        "name": "n", "type_text": "bigint", "type_json": None, "type_name": "LONG", "position": 0, "nullable": True,
        "comment": "it's one",
    }  # fmt: skip
    # The same place in another spelling.
    catalog.register("s", replace(ENTRY, uri="s3://lake/a.b/"))
    with pytest.raises(CatalogError, match=r"main\.s\.documents_a_b already, and it is at s3a://lake/a.b, not at s3:"):
        catalog.register("s", replace(ENTRY, uri="s3://lake/b"))
    catalog.register("s", replace(ENTRY, comment="It has more"))
    assert unity.tables["main.s.documents_a_b"]["comment"] == "It has more"


def test_what_is_no_catalog_at_all() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
    catalog = CatalogSettings(catalog=f"unity://127.0.0.1:{port}/main").open_service()
    with pytest.raises(CatalogUnreachable, match=r"does not answer: .*Connection refused"):
        catalog.register("s", ENTRY)


# --- what keeps the tables there ----------------------------------------------------------------------------------


@dataclass
class FakeCatalog:
    """Notes what it is asked for."""

    wrong: str = "changes"
    fault: type[Exception] = CatalogError
    asked: list[str] = field(default_factory=list)

    def register(self, schema: str, entry: TableEntry) -> None:
        self.asked.append(entry.name)
        if entry.name == self.wrong:
            raise self.fault("it is wrong")


@pytest.mark.parametrize("fault", [CatalogError, CatalogUnreachable, ZeroDivisionError])
def test_what_is_wrong_with_one_table_delays_no_other(small: SmallLake, fault: type[Exception]) -> None:
    catalog = FakeCatalog(fault=fault)
    keeper = CatalogKeeper(catalog, "s", clock=lambda: 1.0)  # so that no retry is ever due
    small.write(0, "a")
    small.land(merges=False)
    keeper.offer(small.lake)
    keeper.settle()
    assert "it is wrong" in (keeper.status().failure or "")
    asked = len(catalog.asked)
    merge(small.lake)
    small.write(1, "b", collection=HOTEL)
    small.land()
    keeper.offer(small.lake)
    if fault is CatalogUnreachable:
        time.sleep(0.1)
        assert len(catalog.asked) == asked, "nothing is asked before the pause is over"
        catalog.wrong = ""
        keeper.settle()
    give_up_s = time.monotonic() + 10.0
    while keeper.status().missing != (0 if fault is CatalogUnreachable else 1):
        assert time.monotonic() < give_up_s, keeper.status()
        time.sleep(0.01)
    assert catalog.asked[asked:].count("changes") == (fault is CatalogUnreachable)
    assert {*catalog.asked} == {"changes", "documents__default__default", "documents_inventory_hotel"}
    small.write(2, "c")
    small.land()
    asked = len(catalog.asked)
    keeper.offer(small.lake)
    if not keeper.status().failure:
        keeper.settle()
    assert len(catalog.asked) == asked, "rows are nothing that a catalog wants to know"
    keeper.close()


def test_a_table_that_is_checked_again_counts_as_registered(small: SmallLake) -> None:
    catalog, now = FakeCatalog(wrong=""), [1.0]
    keeper = CatalogKeeper(catalog, "s", clock=lambda: now[0])
    small.land()
    keeper.offer(small.lake)
    keeper.settle()
    asked, seen = len(catalog.asked), list[int]()
    register = catalog.register
    catalog.register = lambda schema, entry: (seen.append(keeper.status().missing), register(schema, entry))[1]  # type: ignore[method-assign]
    now[0] += CHECK_EVERY_S
    keeper.settle(0.0)
    give_up_s = time.monotonic() + 10.0
    while len(catalog.asked) < 2 * asked:
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
    assert seen == [0] * asked
    keeper.close()
