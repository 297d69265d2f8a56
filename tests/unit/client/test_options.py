"""The options, and the places that are made from their definitions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import headwater.spark
from headwater.cli import load_command
from headwater.client.offsets import Offsets
from headwater.client.read_options import (
    NAME_BYTES_MAX,
    READ_OPTIONS,
    End,
    ReadKeywords,
    ReadOptions,
    Snapshots,
    Start,
    parse_start_time,
)
from headwater.client.settings import CONNECT_KEYWORDS, CONNECT_OPTIONS, ConnectKeywords
from headwater.errors import InvalidInput
from headwater.landing.source_options import SOURCE_OPTIONS, FrameKeywords, SourceKeywords
from headwater.node.options import NodeOptions, ServerLimits
from headwater.options import Kind, check_keywords, options_of, parse_bytes, write_bytes
from support.cases import case, each

URL = "couchbase://127.0.0.1/travel"
COMMANDS = ("tail", "land", "export", "verify", "load")
OPTIONS = CONNECT_OPTIONS | READ_OPTIONS | SOURCE_OPTIONS


def test_an_option_has_one_name_in_three_spellings() -> None:
    option = OPTIONS["buffer_bytes"]
    assert (option.name, option.in_spark, option.on_command_line) == ("buffer_bytes", "bufferBytes", "--buffer-bytes")
    assert option.unit == "bytes"
    assert OPTIONS["reconnect_delay_s_min"].unit == OPTIONS["give_up_after_s"].unit == "seconds"
    assert OPTIONS["history"].unit == ""


def test_every_option_is_described_by_a_sentence() -> None:
    for option in (*OPTIONS.values(), *options_of(NodeOptions).values(), *options_of(ServerLimits).values()):
        assert re.fullmatch(r"(`|[A-Z]).*\.", option.help), option.name


def test_typed_keywords_are_those_that_are_defined() -> None:
    assert list(ReadKeywords.__annotations__) == list(READ_OPTIONS)
    assert list(ConnectKeywords.__annotations__) == [option.name for option in CONNECT_KEYWORDS]


def test_a_landing_takes_the_options_of_the_source() -> None:
    """But the URL, which is an argument of its own, and those that tables can't have."""
    apart = {"end", "value", "no_value", "mode", "columns"}
    of_source = SOURCE_OPTIONS.keys() - {"url"}
    assert SourceKeywords.__annotations__.keys() - {"tls"} == of_source - apart
    assert FrameKeywords.__annotations__.keys() - {"tls"} == of_source


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_that_the_table_says(command: str) -> None:
    found = {parameter.name: parameter.opts for parameter in load_command(command).params}
    for option in OPTIONS.values():
        if command in option.commands or "*" in option.commands:
            assert found.get(option.name) == [option.on_command_line, *option.cli_also], option.name


def test_spellings_are_not_used_twice() -> None:
    spelled = [name.lower() for one in SOURCE_OPTIONS.values() for name in (one.in_spark, *one.spark_also)]
    assert len(set(spelled)) == len(spelled)


@case("xattrs", "True", True)
@case("buffer_bytes", "4096", 4096)
@case("buffer_bytes", "64K", 65536)
@case("noop_interval_s", "3", 3)
@case("give_up_after_s", "1.5", 1.5)
@case("scopes", "a, b", ("a", "b"))
@case("tls_ca", "ca.pem", Path("ca.pem"))
@case("name", "me", "me")
def test_texts_and_values(name: str, text: str, value: Any) -> None:
    option = OPTIONS[name]
    assert option.parse(text) == value
    assert option.parse(option.write(value)) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [("xattrs", "yes"), ("buffer_bytes", "much"), ("min_partitions", "0"), ("give_up_after_s", "later")],
)
def test_texts_that_are_no_values(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OPTIONS[name].parse(text)


@each("size", [0, 1, 1000, 1024, 64 * 1024, 16 * 1024**2, 3 * 1024**3, 1024**2 + 1])
def test_sizes_are_written_as_they_are_read(size: int) -> None:
    assert parse_bytes(write_bytes(size)) == size


def test_limits_are_of_numbers() -> None:
    for option in OPTIONS.values():
        assert option.least is None or option.kind in (Kind.WHOLE, Kind.BYTES, Kind.NUMBER)
    assert OPTIONS["connections_per_node"].check(65) == "Use 1 to 64"
    assert OPTIONS["connections_per_node"].check(64) is None
    assert OPTIONS["give_up_after_s"].check(None) is None


def test_a_keyword_that_is_not_known() -> None:
    check_keywords("connect", ["user"], {"user"})
    with pytest.raises(
        TypeError, match=r"^connect\(\) got an unexpected keyword argument 'usr'\. Did you mean user\?$"
    ):
        check_keywords("connect", ["usr"], {"user", "password"})


@case(headwater.connect, ConnectKeywords)
@case(headwater.blocking.connect, ConnectKeywords)
@case(headwater.Client.batches, ReadKeywords)
@case(headwater.blocking.Client.changes, ReadKeywords)
@case(headwater.spark.land, SourceKeywords)
@case(headwater.spark.read, FrameKeywords)
@case(headwater.spark.verify, ConnectKeywords)
def test_a_notebook_can_complete_keywords(function: Callable[..., Any], keywords: type) -> None:
    parameters = inspect.signature(function).parameters
    assert parameters.keys() >= keywords.__annotations__.keys()
    assert not [one for one in parameters.values() if one.kind is one.VAR_KEYWORD]
    assert all(f"{name}: {OPTIONS[name].help}" in (function.__doc__ or "") for name in keywords.__annotations__)


def test_a_signature_says_what_is_taken_where_nothing_is_given() -> None:
    parameters = inspect.signature(headwater.Client.changes).parameters
    assert str(parameters["buffer_bytes"]) == "buffer_bytes: 'int' = 16777216"
    assert str(parameters["give_up_after_s"]) == "give_up_after_s: 'float | None' = 300.0"
    assert parameters["boundaries"].default is ..., "there is one, and it is no constant"


@case(lambda: headwater.Timeouts(conect_s=1), "Timeouts() got .*'conect_s'. Did you mean connect_s?")
@case(lambda: headwater.TlsSettings(cafile="x"), "TlsSettings() got .*'cafile'. Did you mean ca_file?")
@case(lambda: headwater.FileCheckpoint(pth="x"), "FileCheckpoint() got .*'pth'. Did you mean path?")
@case(lambda: headwater.LeaseGroup("x", lease=1), "LeaseGroup() got .*'lease'. Did you mean lease_s?")
@case(lambda: headwater.spark.LakeSettings(xatrs=1), "LakeSettings() got .*'xatrs'")
@case(lambda: headwater.spark.land(None, URL, "lake", evry="1 s"), "land() got .*'evry'. Did you mean every?")
def test_whatever_users_make_names_the_keyword_that_was_meant(call: Callable[[], Any], sentence: str) -> None:
    pattern = re.escape(sentence).replace(r"\.\*", ".*")
    with pytest.raises(TypeError, match=f"^{pattern}"):
        call()


@case(lambda **given: headwater.connect(URL, **given), "connect")
@case(lambda **given: headwater.blocking.connect(URL, **given), "connect")
@case(lambda **given: headwater.spark.verify(None, URL, "lake", **given), "verify")
@case(lambda **given: headwater.spark.land(None, URL, "lake", **given), "land")
@case(lambda **given: headwater.spark.read(None, URL, **given), "read")
def test_what_users_call_names_the_keyword_that_was_meant(call: Callable[..., Any], sentence: str) -> None:
    with pytest.raises(TypeError, match=rf"^{sentence}\(\) got .* 'pasword'\. Did you mean password\?$"):
        call(user="me", pasword="secret")


# --- what can be asked of a read --------------------------------------------------------------------------------------


def test_choices_are_written_as_strings() -> None:
    options = ReadOptions.make(start="now", end="now", snapshots="as-they-come", collections="a.b", vbuckets=[1, 2])
    assert options.start is Start.NOW
    assert options.end is End.NOW
    assert options.snapshots is Snapshots.AS_THEY_COME
    assert options.collections == ("a.b",)
    assert options.vbuckets == {1, 2}


@each(
    ("start", "expected"),
    [
        ("2026-01-02", datetime(2026, 1, 2, tzinfo=UTC)),
        ("2026-01-02T03:04:05.678901Z", datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)),
        ("2026-01-02 03:04+01:00", datetime(2026, 1, 2, 2, 4, tzinfo=UTC)),
        ("1767322800.5", datetime(2026, 1, 2, 3, 0, 0, 500_000, tzinfo=UTC)),
        (datetime(2026, 1, 2, 5, tzinfo=timezone(timedelta(hours=2))), datetime(2026, 1, 2, 3, tzinfo=UTC)),
    ],
)
def test_reads_may_start_at_a_time(start: str | datetime, expected: datetime) -> None:
    found = ReadOptions.make(start=start).start
    assert found == expected
    assert isinstance(found, datetime)
    assert found.tzinfo is UTC
    # As Spark's options carry it.
    assert parse_start_time(READ_OPTIONS["start"].write(found)) == found


@each(("span", "seconds"), [("90s", 90), ("2h", 7200), ("7d", 604_800), ("1.5 hours", 5400)])
def test_reads_may_start_a_while_ago(span: str, seconds: float) -> None:
    found = ReadOptions.make(start=f"-{span}").start
    assert isinstance(found, datetime)
    assert abs((datetime.now(UTC) - found).total_seconds() - seconds) < 60


@each(
    ("start", "reason"),
    [
        ("2026-01-02T03:04:05", "has no zone"),
        (datetime(2026, 1, 2), "has no zone"),
        ("2999-01-01", "lies in the future"),
        ("1767322800500", "looks like milliseconds"),
        ("2026-13-01", "not a valid choice"),
        ("-soon", "is no time"),
        ("-99999999999999h", "not a valid choice"),
        ("20260102", "not a valid choice"),
    ],
)
def test_times_that_are_refused(start: str | datetime, reason: str) -> None:
    with pytest.raises(InvalidInput, match=reason) as raised:
        ReadOptions.make(start=start)
    assert raised.value.hint


def test_offsets_and_ends_are_taken_as_they_are() -> None:
    offsets = Offsets("uuid", {})
    options = ReadOptions.make(start=offsets, end={3: 7}, scopes=("a", "b"), collections=[8])
    assert (options.start, options.end, options.scopes, options.collections) == (offsets, {3: 7}, ("a", "b"), (8,))


@case({"start": "yesterday"})
@case({"end": "never"})
@case({"snapshots": "some"})
@case({"buffer_bytes": 0})
@case({"noop_interval_s": 0})
@case({"connections_per_node": 65})
@case({"give_up_after_s": -1})
@case({"reconnect_delay_s_min": 20.0, "reconnect_delay_s_max": 10.0})
@case({"name": ""})
@case({"name": "é" * NAME_BYTES_MAX})
def test_what_makes_no_sense_is_refused_with_what_to_do(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput) as caught:
        ReadOptions.make(**wrong)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [("buffer_byts", "buffer_bytes"), ("bufferBytes", "buffer_bytes"), ("chekpoint", "checkpoint")],
)
def test_a_misspelt_keyword_is_an_error_that_names_the_right_one(misspelt: str, meant: str) -> None:
    keywords: Any = {misspelt: 1}
    with pytest.raises(TypeError, match=rf"^changes\(\) got an .* '{misspelt}'\. Did you mean {meant}\?$"):
        ReadOptions.make("changes", **keywords)


def test_a_keyword_like_no_other_lists_them_all() -> None:
    keywords: Any = {"zzz": 1}
    with pytest.raises(TypeError, match=r"It takes batch_bytes, .* xattrs"):
        ReadOptions.make(**keywords)
