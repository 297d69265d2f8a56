"""Conditions that the source applies itself: as texts, and what they leave to be read."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, IsNotNull, LessThanOrEqual, Not, StringStartsWith

from headwater.client.bootstrap import BucketView
from headwater.client.cluster_map import vbucket_of
from headwater.client.read_options import ReadOptions
from headwater.protocol.manifest import Collection, Manifest, Scope
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId
from headwater.spark.conditions import TEXT_CHARS_MAX, Conditions
from headwater.spark.source import DcpFilteringReader, spark_schema
from headwater.spark.source_options import SourceOptions
from support.cases import each

MANIFEST = Manifest(
    uid=ManifestUid(3),
    scopes=(
        Scope(id=ScopeId(0), name="_default", collections=(Collection(id=CollectionId(0), name="_default"),)),
        Scope(
            id=ScopeId(8),
            name="shop",
            collections=(Collection(id=CollectionId(8), name="orders"), Collection(id=CollectionId(9), name="users")),
        ),
        Scope(id=ScopeId(9), name="old", collections=(Collection(id=CollectionId(10), name="orders"),)),
    ),
)


@each(
    ("text", "allowed"),
    [
        ("", {}),
        ("op = 'mutation'", {"op": {"mutation"}}),
        ("OP='mutation'", {"op": {"mutation"}}),
        ("key in ('a', 'b c','AND')", {"key": {"a", "b c", "AND"}}),
        ("vbucket IN (1,2) AND vbucket >= 2", {"vbucket": {2}}),
        ("vbucket between 3 and 5 AND op = 'deletion'", {"vbucket": {3, 4, 5}, "op": {"deletion"}}),
        ("key = 'a' AND key = 'b'", {"key": set()}),
        ("vbucket < 2", {"vbucket": {0, 1}}),
        ("scope = 'shop'\n  AND collection = 'orders' ", {"scope": {"shop"}, "collection": {"orders"}}),
    ],
)
def test_texts(text: str, allowed: dict[str, set[Any]]) -> None:
    assert Conditions.parse(text).allowed == allowed


@each(
    "text",
    [
        "op = 'mutation' OR vbucket = 1",
        "NOT op = 'mutation'",
        "op <> 'mutation'",
        "op = 'mutation' AND",
        "AND op = 'mutation'",
        "op = 'mutation' vbucket = 1",
        "op = 'mutation'ANDkey = 'a'",
        "(op = 'mutation')",
        "seqno = 5",
        "key = 5",
        "vbucket = '5'",
        "vbucket = 5.5",
        "key = 'it''s'",
        r"key = 'a\nb'",
        'key = "a"',
        "key > 'a'",
        "key IN ()",
        "CASE WHEN op = 'a' AND key = 'b' THEN 1 END = 1",
        "key = 'a'" + " " * TEXT_CHARS_MAX + "AND op = 'b'",
    ],
)
def test_what_is_left_to_spark(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        Conditions.parse(text)


@each(
    ("text", "vbuckets"),
    [
        ("op = 'mutation'", None),
        ("vbucket >= 0", None),
        ("vbucket IN (3, 7, 500)", [3, 7]),
        ("key IN ('a', 'b')", sorted({vbucket_of(b"a", 8), vbucket_of(b"b", 8)})),
        (f"key = 'a' AND vbucket <> {vbucket_of(b'a', 8)}".replace("<>", ">"), []),
    ],
)
def test_the_vbuckets_that_are_read(text: str, vbuckets: list[int] | None) -> None:
    assert Conditions.parse(text).vbuckets(8) == vbuckets


def test_a_key_that_may_stand_for_bytes_is_looked_for_everywhere() -> None:
    """The column shows the bytes ff 61 as this text, and they have another vbucket."""
    assert Conditions({"key": frozenset({r"\xffa"})}).vbuckets(8) is None


@each(
    ("text", "options", "selected"),
    [
        ("op = 'mutation'", {"scopes": ("shop",)}, {"scopes": ("shop",)}),
        ("scope = 'shop'", {}, {"scopes": ("shop",)}),
        ("collection = 'orders'", {}, {"collections": ("shop.orders", "old.orders")}),
        ("collection = 'orders' AND scope = 'old'", {}, {"collections": ("old.orders",)}),
        ("collection = 'orders'", {"scopes": ("shop",)}, {"collections": ("shop.orders",)}),
        ("scope = 'shop'", {"collections": ("shop.users", "old.orders")}, {"collections": ("shop.users",)}),
        ("collection = 'nothing'", {}, None),
        ("scope = 'nothing'", {}, None),
    ],
)
def test_what_a_server_is_asked_for(text: str, options: dict[str, Any], selected: dict[str, Any] | None) -> None:
    ids = {("shop",): {8, 9}, (): {9, 10}}[options.get("scopes", ())] if options else set()
    view = BucketView(cluster_map=None, manifest=MANIFEST, has_collections=True)
    found = Conditions.parse(text).selection(ReadOptions(**options), view, ids)
    assert found == (None if selected is None else ReadOptions(**selected))


def test_a_server_that_has_no_collections_is_asked_for_none() -> None:
    view = BucketView(cluster_map=None, manifest=Manifest(), has_collections=False)
    assert Conditions.parse("scope = '_default'").selection(ReadOptions(), view, ()) == ReadOptions()
    assert Conditions.parse("scope = 'shop'").selection(ReadOptions(), view, ()) is None


def test_the_filters_of_spark_that_are_taken() -> None:
    options = SourceOptions.make({"url": "couchbase://127.0.0.1/b", "where": "vbucket < 4"}, {})
    reader = DcpFilteringReader(options, spark_schema(options))
    left: list[Filter] = [
        IsNotNull(("op",)),
        Not(EqualTo(("op",), "deletion")),
        StringStartsWith(("key",), "a"),
        EqualTo(("seqno",), 5),
        EqualTo(("xattrs", "op"), "x"),
        In(("key",), ("a", None)),
    ]
    taken: list[Filter] = [EqualTo(("op",), "mutation"), In(("key",), ("a", "b")), GreaterThan(("vbucket",), 1)]
    assert [*reader.pushFilters([*left, *taken, LessThanOrEqual(("vbucket",), 100)])] == left
    assert reader._options.where == Conditions.parse("op = 'mutation' AND key IN ('a', 'b') AND vbucket IN (2, 3)")
