"""The options of `format("dcp")`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from headwater.client.cluster_map import Network
from headwater.client.offsets import Offsets
from headwater.client.read_options import ReadOptions, Snapshots, Start
from headwater.client.settings import TlsSettings
from headwater.errors import HeadwaterError, InvalidConnectionString, InvalidInput, InvalidOffsets
from headwater.protocol.sasl import Mechanism
from headwater.spark.source import spark_schema
from headwater.spark.source_options import (
    OPTION_NAMES,
    PASSWORD_FILE_BYTES_MAX,
    SourceOptions,
    ValueForm,
    source_texts,
)
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
        ("scopes", "a, b ,c", "scopes", ("a", "b", "c")),
        ("collections", "a.b", "collections", ("a.b",)),
        ("noValue", "true", "no_value", True),
        ("xattrs", "TRUE", "xattrs", True),
        ("history", "true", "history", True),
        ("compression", "false", "compression", False),
        ("bufferBytes", "4096", "buffer_bytes", 4096),
        ("noopIntervalS", "3", "noop_interval_s", 3),
        ("connectionsPerNode", "2", "connections_per_node", 2),
        ("name", "me", "name", "me"),
        ("giveUpAfterS", "1.5", "give_up_after_s", 1.5),
        ("mitigateRollbacks", "true", "mitigate_rollbacks", True),
    ],
)
def test_options_of_the_read(name: str, text: str, field: str, value: Any) -> None:
    assert getattr(made(**{name: text}).read, field) == value


@each(
    ("name", "text", "field", "value"),
    [
        ("value", "String", "value_form", ValueForm.STRING),
        ("value", "variant", "value_form", ValueForm.VARIANT),
        ("startingOffsets", "now", "start", Start.NOW),
        ("startingOffsets", "latest", "start", Start.NOW),
        ("startingOffsets", "earliest", "start", Start.BEGINNING),
        ("startingOffsets", "Beginning", "start", Start.BEGINNING),
        ("startingOffsets", f" {OFFSETS}", "start", Offsets("uuid")),
        ("endingOffsets", "now", "end", None),
        ("endingOffsets", "latest", "end", None),
        ("endingOffsets", OFFSETS, "end", Offsets("uuid")),
        ("maxRowsPerTrigger", "10", "rows_per_trigger_max", 10),
        ("maxBytesPerTrigger", "10", "bytes_per_trigger_max", 10),
        ("minPartitions", "4", "partitions_min", 4),
    ],
)
def test_options_of_the_source(name: str, text: str, field: str, value: Any) -> None:
    assert getattr(made(**{name: text}), field) == value


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


@each(
    ("columns", "sentence"),
    [
        ("kye", "no column 'kye' with these options. Did you mean key?"),
        ("key,op,key", "'key' is asked for twice"),
        ("value_bytes", "no column 'value_bytes'"),
    ],
)
def test_columns_that_are_none(columns: str, sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        spark_schema(made(columns=columns))
    assert sentence in str(caught.value)


def test_a_condition_that_the_source_can_not_apply() -> None:
    with pytest.raises(InvalidInput, match=r"'seqno > 5' is no value for the option where.*AND key IN"):
        made(where="seqno > 5")


def test_options_of_the_connection(tmp_path: Path) -> None:
    options = SourceOptions.make(
        {
            "url": "couchbases://127.0.0.1/travel",
            "tlsCa": str(tmp_path / "ca.pem"),
            "tlsSkipVerify": "false",
            "user": "me",
            "password": SECRET,
            "mechanism": "SCRAM-SHA256",
            "network": "external",
        },
        {},
    )
    assert options.settings.tls is not None
    assert options.settings.tls.ca_file == tmp_path / "ca.pem"
    assert (options.settings.mechanism, options.settings.network) == (Mechanism.SCRAM_SHA256, Network.EXTERNAL)


def test_every_option_has_one_of_these_tests_or_is_told_to_be_unknown() -> None:
    """Names are taken in any case, as Spark hands them over in lower case."""
    given = {"URL": URL, "MAXROWSPERTRIGGER": "5"}
    assert SourceOptions.make(given, {}).rows_per_trigger_max == 5
    assert len({name.lower() for name in OPTION_NAMES}) == len(OPTION_NAMES)


# --- who logs in --------------------------------------------------------------------------------------------------


def credentials(options: SourceOptions) -> tuple[str, str] | None:
    found = options.settings.credentials
    return None if found is None else (found.user, found.password)


def test_the_password_is_an_option() -> None:
    assert credentials(made(user="me", password=SECRET)) == ("me", SECRET)


def test_the_environment_has_it() -> None:
    environment = {"HEADWATER_USER": "me", "HEADWATER_PASSWORD": SECRET}
    assert credentials(made(environment)) == ("me", SECRET)
    assert credentials(made(environment, user="you", password="other")) == ("you", "other")


@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_a_file_has_it(tmp_path: Path, end: str) -> None:
    file = tmp_path / "password"
    file.write_bytes((SECRET + end).encode())
    environment = {"HEADWATER_PASSWORD": "that of the environment"}
    assert credentials(made(environment, user="me", passwordFile=str(file))) == ("me", SECRET)


def test_a_password_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can't be read"):
        made(user="me", passwordFile=str(tmp_path / "nothing"))


def test_a_password_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"\xff")
    with pytest.raises(InvalidInput, match="can't be read"):
        made(user="me", passwordFile=str(file))


def test_no_more_of_a_file_is_read_than_a_password_can_have(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_bytes(b"x" * (PASSWORD_FILE_BYTES_MAX + 1))
    assert credentials(made(user="me", passwordFile=str(file))) == ("me", "x" * PASSWORD_FILE_BYTES_MAX)


def test_the_password_is_never_shown(tmp_path: Path) -> None:
    options = made(user="me", password=SECRET)
    assert SECRET not in f"{options} {options!r} {options.settings!r}"
    for wrong in ({"value": "none"}, {"user": ""}, {"minPartitions": "x"}, {"nothing": "x"}):
        with pytest.raises(HeadwaterError) as caught:
            made(**{"user": "me", "password": SECRET, **wrong})
        assert SECRET not in str(caught.value)


def test_they_travel_to_the_executors() -> None:
    options = made(user="me", password=SECRET, startingOffsets=OFFSETS)
    assert pickle.loads(pickle.dumps(options)) == options


# --- what can't be used -------------------------------------------------------------------------------------------


def test_no_url() -> None:
    with pytest.raises(InvalidInput, match="needs the option url"):
        SourceOptions.make({}, {})


def test_no_bucket() -> None:
    with pytest.raises(InvalidConnectionString):
        SourceOptions.make({"url": "couchbase://127.0.0.1"}, {})


def test_an_option_that_is_not_there() -> None:
    with pytest.raises(InvalidInput, match=r"no option 'colections'.* collections") as caught:
        made(colections="a.b")
    assert "colections" in str(caught.value)


@each(
    ("name", "text"),
    [
        ("minPartitions", "0"),
        ("minPartitions", "many"),
        ("maxRowsPerTrigger", "-1"),
        ("maxBytesPerTrigger", "1.5"),
        ("xattrs", "yes"),
        ("value", "json"),
        ("startingOffsets", "yesterday"),
        ("noopIntervalS", "soon"),
        ("giveUpAfterS", "later"),
    ],
)
def test_a_value_that_is_none(name: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"{text!r} is no value for the option {name}"):
        made(**{name: text})


@pytest.mark.parametrize("name", ["startingOffsets", "endingOffsets"])
def test_offsets_that_are_none(name: str) -> None:
    with pytest.raises(InvalidOffsets):
        made(**{name: '{"offsets": []}'})


def test_what_the_read_refuses() -> None:
    with pytest.raises(InvalidInput, match="noop_interval_s is 0"):
        made(noopIntervalS="0")


# --- other spellings ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("noopInterval", "noopIntervalS", "3"),
        ("giveUpAfter", "giveUpAfterS", "1.5"),
        ("TLSCERTIFICATE", "tlsCert", "me"),
    ],
)
def test_an_old_spelling_works_and_warns(old: str, new: str, text: str) -> None:
    tls = "couchbases://127.0.0.1/travel"
    with pytest.warns(FutureWarning, match=f"the option {old} is an old spelling: write {new}"):
        renamed = made(url=tls, **{old: text})
    assert renamed == made(url=tls, **{new: text})


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


def test_certificates_are_options_of_the_source() -> None:
    tls = TlsSettings(ca_file="ca.pem", certificate_file=Path("me.pem"), key_file="key.pem", key_password=SECRET)
    texts = source_texts("couchbases://127.0.0.1/travel", {"tls": tls})
    assert SourceOptions.make(texts, {}).settings.tls == TlsSettings(
        ca_file=Path("ca.pem"), certificate_file=Path("me.pem"), key_file=Path("key.pem"), key_password=SECRET
    )
    assert SECRET not in repr(SourceOptions.make(texts, {}))


@pytest.mark.parametrize(("old", "new"), [("maxRowsPerTrigger", "max_rows_per_trigger"), ("startingOffsets", "start")])
def test_a_keyword_in_the_spelling_of_spark_works_and_warns(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{old} is an old spelling: write {new}"):
        assert source_texts(URL, {old: "10"}) == {"url": URL, old: "10"}


def test_a_misspelt_keyword_of_a_landing() -> None:
    with pytest.raises(TypeError, match=r"land\(\) got an .*'colections'\. Did you mean collections\?"):
        source_texts(URL, {"colections": "a.b"})


# --- as other sources of Spark call them --------------------------------------------------------------------------


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
    assert options.settings.credentials is not None
    assert (options.settings.bucket, options.settings.credentials.user) == ("travel", "me")
    assert (options.read.scopes, options.read.collections) == ((), ("inventory.hotel", "inventory.airport"))
    assert (options.start, options.read.buffer_bytes) == (Start.NOW, 10 * 1024**2)
    assert (options.rows_per_trigger_max, options.partitions_min) == (1000, 4)


@each(
    ("given", "sentence"),
    [
        ({"usernme": "me"}, "the dcp source has no option 'usernme'. Did you mean user?"),
        (
            {"subscribe": "x"},
            "the dcp source has no option 'subscribe'. Use collections, or leave it out for all of them",
        ),
        ({"bucket": "x"}, "the dcp source has no option 'bucket'. Name it in the url: couchbase://host/bucket"),
        ({"scope": "a", "scopes": "b"}, "scope and scopes are one option of the dcp source. Give one of them"),
    ],
)
def test_names_that_are_almost_right_or_of_others(given: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        made(**given)
    assert str(raised.value) == sentence
