"""The options of `format("dcp")`."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan, In, IsNotNull, LessThanOrEqual, Not, StringStartsWith

from headwater.client.bootstrap import BucketView
from headwater.client.cluster_map import Network, vbucket_of
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions, Snapshots, Start
from headwater.client.settings import TlsSettings
from headwater.errors import HeadwaterError, InvalidInput
from headwater.landing.source_options import (
    PASSWORD_FILE_BYTES_MAX,
    Conditions,
    SourceOptions,
    ValueForm,
    source_texts,
)
from headwater.protocol.manifest import Collection, Manifest, Scope
from headwater.protocol.numbers import CollectionId, ManifestUid, ScopeId
from headwater.protocol.sasl import Mechanism
from headwater.spark.source import DcpFilteringReader, spark_schema
from support.cases import each

URL = "couchbase://127.0.0.1/travel"
SECRET = "not to be seen"
OFFSETS = Offsets("uuid").to_json()


def made(environment: dict[str, str] | None = None, **options: str) -> SourceOptions:
    return SourceOptions.make({"url": URL, **options}, environment or {})


# --- what is made of them -----------------------------------------------------------------------------------------


def test_what_holds_unless_told() -> None:
    options = made()
    assert options.settings.bucket == "travel"
    assert options.settings.credentials is None
    assert options.read == ReadOptions(name="headwater-spark", snapshots=Snapshots.AS_THEY_COME)
    assert (options.value_form, options.start, options.end) == (ValueForm.BINARY, Start.BEGINNING, None)
    assert (options.rows_per_trigger_max, options.bytes_per_trigger_max) == (None, None)


@each(
    ("name", "text", "field", "value"),
    [
        ("scopes", "a, b ,c", "read.scopes", ("a", "b", "c")),
        ("collections", "a.b", "read.collections", ("a.b",)),
        ("noValue", "true", "read.no_value", True),
        ("xattrs", "TRUE", "read.xattrs", True),
        ("history", "true", "read.history", True),
        ("compression", "false", "read.compression", False),
        ("bufferBytes", "4096", "read.buffer_bytes", 4096),
        ("noopIntervalS", "3", "read.noop_interval_s", 3),
        ("connectionsPerNode", "2", "read.connections_per_node", 2),
        ("name", "me", "read.name", "me"),
        ("giveUpAfterS", "1.5", "read.give_up_after_s", 1.5),
        ("mitigateRollbacks", "true", "read.mitigate_rollbacks", True),
        ("value", "String", "value_form", ValueForm.STRING),
        ("value", "variant", "value_form", ValueForm.VARIANT),
        ("startingOffsets", "now", "start", Start.NOW),
        ("startingOffsets", "latest", "start", Start.NOW),
        ("startingOffsets", "earliest", "start", Start.BEGINNING),
        ("startingOffsets", "Beginning", "start", Start.BEGINNING),
        ("startingOffsets", f" {OFFSETS}", "start", Offsets("uuid")),
        ("startAt", "2026-11-01T02:00:00+02:00", "start", datetime(2026, 11, 1, tzinfo=UTC)),
        ("endingOffsets", "now", "end", None),
        ("endingOffsets", "latest", "end", None),
        ("endingOffsets", OFFSETS, "end", Offsets("uuid")),
        ("maxRowsPerTrigger", "10", "rows_per_trigger_max", 10),
        ("MAXROWSPERTRIGGER", "5", "rows_per_trigger_max", 5),
        ("maxBytesPerTrigger", "10", "bytes_per_trigger_max", 10),
        ("minPartitions", "4", "partitions_min", 4),
        ("network", "external", "settings.network", Network.EXTERNAL),
    ],
)
def test_texts_become_values(name: str, text: str, field: str, value: Any) -> None:
    assert attrgetter(field)(made(**{name: text})) == value


@each(
    ("columns", "xattrs", "no_value"),
    [
        ("key,op", False, True),
        ("key, value", False, False),
        ("datatype", False, False),
        ("value_bytes", False, False),
        ("xattrs,key", True, False),
    ],
)
def test_values_are_asked_for_where_a_column_needs_them(columns: str, xattrs: bool, no_value: bool) -> None:
    read = made(columns=columns, xattrs="true").read
    assert (read.xattrs, read.no_value) == (xattrs, no_value)


def test_they_travel_to_the_executors() -> None:
    options = made(user="me", password=SECRET, startingOffsets=OFFSETS)
    assert pickle.loads(pickle.dumps(options)) == options


# --- who logs in --------------------------------------------------------------------------------------------------


def credentials(options: SourceOptions) -> tuple[str, str] | None:
    found = options.settings.credentials
    return None if found is None else (found.user, found.password)


def test_the_login_is_in_options_or_in_the_environment() -> None:
    environment = {"HEADWATER_USER": "me", "HEADWATER_PASSWORD": SECRET}
    assert credentials(made(environment)) == ("me", SECRET)
    assert credentials(made(environment, user="you", password="other")) == ("you", "other")
    assert made(environment, mechanism="SCRAM-SHA256").settings.mechanism is Mechanism.SCRAM_SHA256


@each(
    ("content", "password"),
    [
        (SECRET.encode(), SECRET),
        (SECRET.encode() + b"\n", SECRET),
        (SECRET.encode() + b"\r\n", SECRET),
        (b"x" * (PASSWORD_FILE_BYTES_MAX + 1), "x" * PASSWORD_FILE_BYTES_MAX),
        (b"\xff", None),
        (None, None),
    ],
)
def test_a_password_file(tmp_path: Path, content: bytes | None, password: str | None) -> None:
    file = tmp_path / "password"
    if content is not None:
        file.write_bytes(content)
    environment = {"HEADWATER_PASSWORD": "that of the environment"}
    if password is not None:
        assert credentials(made(environment, user="me", passwordFile=str(file))) == ("me", password)
    else:
        with pytest.raises(InvalidInput, match="can't be read"):
            made(environment, user="me", passwordFile=str(file))


def test_the_password_is_never_shown() -> None:
    options = made(user="me", password=SECRET)
    assert SECRET not in f"{options} {options!r} {options.settings!r}"
    for wrong in ({"value": "none"}, {"user": ""}, {"minPartitions": "x"}, {"nothing": "x"}):
        with pytest.raises(HeadwaterError) as caught:
            made(**{"user": "me", "password": SECRET, **wrong})
        assert SECRET not in str(caught.value)


# --- what can't be used -------------------------------------------------------------------------------------------


@each(
    ("given", "sentence"),
    [
        ({"url": "couchbase://127.0.0.1"}, "names no bucket"),
        ({"colections": "a.b"}, "no option 'colections'. Did you mean collections?"),
        ({"usernme": "me"}, "the dcp source has no option 'usernme'. Did you mean user?"),
        ({"subscribe": "x"}, "no option 'subscribe'. Use collections, or leave it out for all of them"),
        ({"bucket": "x"}, "no option 'bucket'. Name it in the url: couchbase://host/bucket"),
        ({"scope": "a", "scopes": "b"}, "scope and scopes are one option of the dcp source. Give one of them"),
        ({"startingOffsets": '{"offsets": []}'}, "offsets"),
        ({"endingOffsets": '{"offsets": []}'}, "offsets"),
        ({"noopIntervalS": "0"}, "noop_interval_s is 0"),
        ({"where": "seqno +"}, "'seqno +' is no condition of SQL. Possible are comparisons of a field or a column"),
        ({"where": "n > 5", "noValue": "true"}, "a condition on fields of documents needs their values"),
        ({"columns": "kye"}, "no column 'kye' with these options. Did you mean key?"),
        ({"columns": "key,op,key"}, "'key' is requested twice"),
        ({"columns": "value_bytes"}, "no column 'value_bytes'"),
        *(
            ({name: text}, f"{text!r} is not a valid value for the option {name}")
            for name, text in (
                ("minPartitions", "0"),
                ("minPartitions", "many"),
                ("maxRowsPerTrigger", "-1"),
                ("maxBytesPerTrigger", "1.5"),
                ("xattrs", "yes"),
                ("value", "json"),
                ("startingOffsets", "yesterday"),
                ("noopIntervalS", "soon"),
                ("giveUpAfterS", "later"),
            )
        ),
    ],
)
def test_options_that_can_not_be(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(HeadwaterError) as raised:
        spark_schema(made(**given))
    assert sentence in str(raised.value)


def test_no_url() -> None:
    with pytest.raises(InvalidInput, match="needs the option url"):
        SourceOptions.make({}, {})


# --- other spellings ----------------------------------------------------------------------------------------------


def test_keywords_of_a_landing_are_options_of_the_source() -> None:
    keywords = {
        "user": "me",
        "password": SECRET,
        "collections": ["a.b", "c.d"],
        "scopes": "s",
        "xattrs": True,
        "buffer_bytes": 4096,
        "max_rows_per_trigger": 10,
        "start": Offsets("uuid"),
        "network": None,
    }
    assert source_texts(URL, keywords) == {
        "url": URL,
        "user": "me",
        "password": SECRET,
        "collections": "a.b,c.d",
        "scopes": "s",
        "xattrs": "true",
        "bufferBytes": "4096",
        "maxRowsPerTrigger": "10",
        "startingOffsets": OFFSETS,
    }
    with pytest.raises(TypeError, match=r"land\(\) got an .*'colections'\. Did you mean collections\?"):
        source_texts(URL, {"colections": "a.b"})


def test_certificates_are_options_of_the_source() -> None:
    tls = TlsSettings(ca_file="ca.pem", certificate_file=Path("me.pem"), key_file="key.pem", key_password=SECRET)
    texts = source_texts("couchbases://127.0.0.1/travel", {"tls": tls})
    assert SourceOptions.make(texts, {}).settings.tls == TlsSettings(
        ca_file=Path("ca.pem"), certificate_file=Path("me.pem"), key_file=Path("key.pem"), key_password=SECRET
    )
    assert SECRET not in repr(SourceOptions.make(texts, {}))


def test_names_of_kafka_and_couchbase_work() -> None:
    options = SourceOptions.make(
        {
            "connectionString": URL,
            "userName": "me",
            "password": SECRET,
            "scope": "inventory",
            "collection": "hotel, airport",
            "streamFrom": "fromNow",
            "streamFlowControlBufferSize": "10M",
            "maxOffsetsPerTrigger": "1000",
            "numPartitions": "4",
        },
        {},
    )
    assert (options.settings.bucket, credentials(options)) == ("travel", ("me", SECRET))
    assert (options.read.scopes, options.read.collections) == ((), ("inventory.hotel", "inventory.airport"))
    assert (options.start, options.read.buffer_bytes) == (Start.NOW, 10 * 1024**2)
    assert (options.rows_per_trigger_max, options.partitions_min) == (1000, 4)


# --- conditions that the source applies itself: as texts, and what they leave to be read ------------------------------

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
    ("text", "columns", "need_values"),
    [
        ("op = 'mutation' OR vbucket = 1", {"op", "vbucket"}, False),
        ("NOT op = 'mutation'", {"op"}, False),
        ("vbucket = 5.5", {"vbucket"}, False),
        ("key > 'a'", {"key"}, False),
        ("n = 5 OR (document.key LIKE 'a%' AND address.city IS MISSING)", set(), True),
    ],
)
def test_what_does_not_limit_the_read_is_left_to_the_tasks(text: str, columns: set[str], need_values: bool) -> None:
    both = Conditions.parse(f"op = 'mutation' AND {text}" if " OR " not in text else f"op = 'mutation' AND ({text})")
    assert both.allowed == {"op": {"mutation"}}
    assert len(both.others) == 1
    assert (both.columns, both.need_values) == ({"op", *columns}, need_values)
    options = SourceOptions.make({"url": "couchbase://127.0.0.1/b", "where": text, "columns": "key"}, {})
    assert options.read.no_value is not need_values


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
