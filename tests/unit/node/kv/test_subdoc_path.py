"""The path syntax, as a table of paths and what they mean. The cases follow the tests of couchbase/subjson."""

from __future__ import annotations

import pytest

from headwater.node.kv.subdocument.json_text import (
    COMPONENTS_MAX,
    LAST,
    PATH_BYTES_MAX,
    Path,
    SubdocFailure,
    parse_path,
)
from headwater.protocol.status import Status

VALID: dict[str, Path] = {
    "": (),
    "a": ("a",),
    "foo.bar.baz": ("foo", "bar", "baz"),
    "array[1].item[9]": ("array", 1, "item", 9),
    "foo[0][0][0]": ("foo", 0, 0, 0),
    "[1][2][3]": (1, 2, 3),
    "[1].[2].[3]": (1, 2, 3),
    "a.[0]": ("a", 0),
    "foo[-1][-1]": ("foo", LAST, LAST),
    "[007]": (7,),
    f"[{2**63 - 1}]": (2**63 - 1,),
    "`simple`.`escaped`": ("simple", "escaped"),
    "escaped.`arr.idx`[9]": ("escaped", "arr.idx", 9),
    "`a[0]`": ("a[0]",),
    "`]`": ("]",),
    "`BACKTICK``HAPPY`.`CAMPER`": ("BACKTICK`HAPPY", "CAMPER"),
    "a``b": ("a`b",),
    "````": ("`",),
    "a`.`b": ("a.b",),
    "`a`x`b`": ("axb",),
    r"\"quoted.path": ('"quoted', "path"),
    r"back\\slash": ("back\\slash",),
    r"a\/b\n": ("a/b\n",),
    r"`field.with.\"quotes\"`": ('field.with."quotes"',),
    "Fútbol.日本": ("Fútbol", "日本"),
    "with space": ("with space",),
    "0.1": ("0", "1"),
    "-1": ("-1",),
    "$document.CAS": ("$document", "CAS"),
    # A dot at the very end is nothing.
    "a.": ("a",),
    "[0].": (0,),
}

INVALID = (
    ".",
    "....",
    ".a",
    "a..b",
    "a...",
    "a]",
    "]",
    "[",
    "[]",
    "[0",
    "a[",
    "a[]",
    "[not][a][number]",
    "[1.5]",
    "[+1]",
    "[ 1]",
    "[-2]",
    "[-1",
    "[--1]",
    "[-01]",
    f"[{2**63}]",
    f"[{'9' * 500}]",
    "hello[0]world",
    "[0]world",
    "`",
    "```",
    "``",
    "a.``",
    "`unterminated",
    "a`b",
    '"invalid.path',
    "line\nbreak",
    "nul\0",
    "trailing\\",
    r"\x",
    r"\.",
    r"\u0041",
    "[٣]",
)


@pytest.mark.parametrize(("path", "components"), VALID.items())
def test_path(path: str, components: Path) -> None:
    assert parse_path(path.encode()) == components


def failure(path: bytes) -> Status:
    with pytest.raises(SubdocFailure) as raised:
        parse_path(path)
    return raised.value.status


@pytest.mark.parametrize("path", INVALID)
def test_invalid_path(path: str) -> None:
    assert failure(path.encode()) == Status.SUBDOC_PATH_EINVAL


def test_a_path_that_is_not_utf8_is_invalid() -> None:
    assert failure(b"\xff") == Status.SUBDOC_PATH_EINVAL


@pytest.mark.parametrize("component", ["a", "[0]", "`x`"])
def test_the_number_of_components_is_limited(component: str) -> None:
    longest = ".".join([component] * COMPONENTS_MAX).encode()
    assert len(parse_path(longest)) == COMPONENTS_MAX
    assert failure(longest + b"." + component.encode()) == Status.SUBDOC_PATH_E2BIG


def test_the_length_in_bytes_is_limited() -> None:
    assert parse_path(b"x" * PATH_BYTES_MAX) == ("x" * PATH_BYTES_MAX,)
    assert failure(b"x" * (PATH_BYTES_MAX + 1)) == Status.SUBDOC_PATH_E2BIG
