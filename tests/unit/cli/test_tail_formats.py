"""`tail` for people: one line a change."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headwater.cli import tail_formats
from headwater.cli.tail_formats import EventsOnce, KeyPattern, PrettyLines, _second
from support.cases import case
from support.commands import batch_of, document, event, rollback


@pytest.fixture(autouse=True)
def in_vienna(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Vienna")
    time.tzset()
    _second.cache_clear()
    yield
    monkeypatch.undo()
    time.tzset()
    _second.cache_clear()


def lines_of(*rows: dict[str, Any], width: int | None = None, coloured: bool = False) -> list[str]:
    text = PrettyLines(coloured=coloured, width=lambda: width).encode(batch_of(*rows)).decode()
    assert text.endswith("\n")
    return text.removesuffix("\n").split("\n")


def line_of(*, width: int | None = None, **members: Any) -> str:
    [line] = lines_of(document(**members), width=width)
    return line


def test_a_document() -> None:
    assert line_of() == '2025-11-15 09:16:00.123  7:41          mutation             _default._default  fox  {"legs":4}'
    assert line_of(op="deletion", value=None).endswith("  deletion             _default._default  fox")
    assert line_of(cas=0).startswith("-" + " " * 22 + "  7:41 ")
    assert "(collection 0x9)" in line_of(scope=None, collection=None, collection_id=9)


def test_events() -> None:
    lines = lines_of(
        event("collection_created", scope="shop", collection="orders", collection_id=8),
        event("scope_dropped", scope="shop", collection=None, collection_id=None),
        event("scope_created", scope=None, collection=None, collection_id=None),
        event("collection_modified", collection=None, collection_id=0x10),
        document(),
    )
    assert [line[23:] for line in lines] == [
        "  7:41          collection created   shop.orders",
        "  7:41          scope dropped        shop",
        "  7:41          scope created        ?",
        "  7:41          collection modified  (collection 0x10)",
        '  7:41          mutation             _default._default  fox  {"legs":4}',
    ]
    assert [line[:23].rstrip() for line in lines] == ["-"] * 4 + ["2025-11-15 09:16:00.123"]


def test_a_rollback_stands_out() -> None:
    [line] = lines_of(rollback())
    assert line.startswith("ROLLBACK of vbucket 7 from seqno 99 to 40")
    [line] = lines_of(rollback(), coloured=True)
    assert line.startswith("\x1b[1;37;41mROLLBACK")
    assert line.endswith("\x1b[0m")


def test_colours_change_nothing_else() -> None:
    rows = [document(), document(op="expiration", value=None), rollback(), event("collection_created")]
    [plain, coloured] = (lines_of(*rows, width=100, coloured=coloured) for coloured in (False, True))
    assert [re.sub("\x1b\\[[0-9;]*m", "", line) for line in coloured] == plain
    assert plain != coloured


@pytest.mark.parametrize("width", [99, 100, 110, 200, 2000])
def test_a_value_is_cut_to_the_width(width: int) -> None:
    value = b'{"long":"' + b"x" * 1500 + b'"}'
    line = line_of(value=value, width=width)
    assert len(line) == min(width, len(line_of(value=value)))
    assert line.endswith("…" if width < 1500 else "}")


def test_wide_characters_are_counted_as_two() -> None:
    line = line_of(value='{"狐":"狐狐狐狐狐狐狐狐狐狐狐狐狐狐狐狐狐狐"}'.encode(), width=100)
    value = line.partition("fox  ")[2]
    cells = len(line) + value.count("狐")
    assert 99 <= cells <= 100
    assert value.startswith('{"狐":"狐')


def test_a_narrow_terminal_shows_a_bit_of_the_value_and_no_terminal_all_of_it() -> None:
    assert line_of(value=b'{"name":"a long name"}', width=10).endswith('fox  {"name":"a …')
    assert line_of(value=b'"' + b"x" * 10_000 + b'"').endswith('xxx"')


def test_a_change_stays_on_its_line_and_tells_the_terminal_nothing() -> None:
    line = line_of(key=b"a\x1b[2Jb\n", value=b'{\n"a":\r\n1}\x1b]0;title\x07')
    assert r"a\x1b[2Jb\n" in line
    assert r'{ "a":  1}\x1b]0;title\x07' in line
    assert line.isprintable()


@pytest.mark.parametrize("width", [None, 120])
def test_values_and_keys_that_are_not_text(width: int | None) -> None:
    line = line_of(key=b"\xff\xfe\x00bin", value=b"\xff\x00\xfex", datatype=0, width=width)
    assert line.endswith(r"  \xff\xfe\x00bin  (4 bytes) \xff\x00\xfex")
    assert line_of(value=b"\x00\x01\x02", datatype=0, width=width).endswith(r"  fox  \x00\x01\x02")
    assert line_of(scope="a\u2028", width=width).count(r"  a\u2028._default  fox  ") == 1


@pytest.mark.parametrize(("width", "chars"), [(None, 400), (120, 120)])
def test_of_what_is_not_text_the_beginning_is_shown(width: int | None, chars: int) -> None:
    line = line_of(value=b"\xff" * 5000, datatype=0, width=width)
    assert r"(5,000 bytes) \xff\xff" in line
    assert line.endswith("…")
    assert len(line) <= chars


@pytest.mark.parametrize("padding", range(4))
def test_text_that_is_cut_inside_a_character_is_still_text(padding: int) -> None:
    assert "bytes)" not in line_of(value=b'"' + b"x" * padding + "🦊".encode() * 5000 + b'"', width=120)


# --- which rows: people see an event once that every vbucket sends ------------------------------------------------


def created(vbucket: int, collection: str = "orders", op: str = "collection_created") -> dict[str, Any]:
    return event(op, vbucket=vbucket, scope="shop", collection=collection, collection_id=8)


def shown(once: EventsOnce, *rows: dict[str, Any]) -> list[int]:
    found: list[int] = once.rows(batch_of(*rows)).tolist()
    return found


def test_an_event_that_all_vbuckets_tell() -> None:
    once = EventsOnce()
    assert shown(once, document(), created(0), document(), created(1), created(2)) == [0, 1, 2]
    assert shown(once, created(3), document(), rollback()) == [1, 2]


def test_other_events_are_others() -> None:
    rows = [created(0), created(0, "users"), created(0, op="collection_dropped")]
    rows += [event("scope_created", vbucket=1, scope=scope, collection=None, collection_id=None) for scope in "ab"]
    assert shown(EventsOnce(), *rows) == [0, 1, 2, 3, 4]


def test_what_a_vbucket_tells_again_is_new_and_told_once() -> None:
    once = EventsOnce()
    assert shown(once, *(created(vbucket) for vbucket in (0, 1, 2, 1, 0, 2, 2, 0))) == [0, 3, 6]


def test_events_of_long_ago_are_forgotten(monkeypatch: Any) -> None:
    monkeypatch.setattr(tail_formats, "EVENTS_MAX", 2)
    once = EventsOnce()
    assert shown(once, created(0, "a"), created(0, "b"), created(1, "a"), created(0, "c"), created(2, "a")) == [0, 1, 3]
    assert shown(once, created(1, "b")) == [0]


# `tail --key`.


KEYS = [b"user::1", "user::é".encode(), b"userX", b"a.b", b"", b"line\nbreak", b"\xff\xfe", b"user::(x)", b"a b"]


def matched(*patterns: str) -> list[bytes]:
    batch = batch_of(*(document(key=key) for key in KEYS))
    return [KEYS[row] for row in KeyPattern(patterns).rows(batch).tolist()]


@case("user::1", [b"user::1"])
@case("user::", [])
@case("user::*", [KEYS[0], KEYS[1], KEYS[7]])
@case("user::?", [KEYS[0], KEYS[1]])
@case("*é", [KEYS[1]])
@case("é", [])
@case("a.b", [b"a.b"])
@case("a?b", [b"a.b", b"a b"])
@case("a b", [b"a b"])
@case("user::(x)", [KEYS[7]])
@case("line?break", [KEYS[5]])
@case("line*", [KEYS[5]])
@case("??", [KEYS[6]])
@case("\udcff\udcfe", [KEYS[6]])
@case("", [b""])
@case("*", KEYS)
@case("[a-z]*", [])
@case(r"\d*", [])
def test_patterns(pattern: str, keys: list[bytes]) -> None:
    assert matched(pattern) == keys


def test_several_patterns() -> None:
    assert matched("userX", "a*", "b|c") == [b"userX", b"a.b", b"a b"]


def test_rollbacks_are_never_hidden_and_events_are() -> None:
    batch = batch_of(event("collection_created"), rollback(), document(key=b"x"), document(key=b"y"))
    assert KeyPattern(("y",)).rows(batch).tolist() == [1, 3]
