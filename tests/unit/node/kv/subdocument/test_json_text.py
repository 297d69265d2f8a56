"""The lookups, as tables of (document, path) and what comes back."""

from __future__ import annotations

import pytest

from headwater.node.kv.subdocument import json_text
from headwater.protocol.status import RequestRefused, Status
from support.cases import case, each

ENOENT = Status.SUBDOC_PATH_ENOENT
MISMATCH = Status.SUBDOC_PATH_MISMATCH
EINVAL = Status.SUBDOC_PATH_EINVAL
E2BIG = Status.SUBDOC_PATH_E2BIG
NOT_JSON = Status.SUBDOC_DOC_NOT_JSON
E2DEEP = Status.SUBDOC_DOC_E2DEEP


def outcome(operation: object, document: str | bytes, path: str) -> str | Status:
    data = document.encode() if isinstance(document, str) else document
    try:
        return operation(json_text.document_text(data), json_text.parse_path(path.encode())).decode()
    except RequestRefused as failure:
        return failure.status


ARRAY = '[ 0, "one", 2.0 ]'
DICT = ' { "int": 1,  "string": "two", "true": true, "null" : null, "list":[ 1 , {"a": "b, c : d"} ] }\n'
NESTED = '{"k1": ["first", {"k2":[6,7,8]},"last"], "":{"a.b":1,"`":2,"q\\"q":3, "\\u0041":4}}'


@case(ARRAY, "[0]", "0")
@case(ARRAY, "[1]", '"one"')
@case(ARRAY, "[2]", "2.0")
@case(ARRAY, "[-1]", "2.0")
@case(ARRAY, "", '[0,"one",2.0]')
@case(ARRAY, "[-2]", EINVAL)
@case(ARRAY, "[3]", ENOENT)
@case(ARRAY, "[9999]", ENOENT)
@case(ARRAY, f"[{2**63 - 1}]", ENOENT)
@case(ARRAY, "missing_key", MISMATCH)
@case(ARRAY, "[2].nothing_here", MISMATCH)
@case(DICT, "int", "1")
@case(DICT, "string", '"two"')
@case(DICT, "true", "true")
@case(DICT, "null", "null")
@case(DICT, "list", '[1,{"a":"b, c : d"}]')
@case(DICT, "list[1].a", '"b, c : d"')
@case(DICT, "missing_key", ENOENT)
@case(DICT, "missing.key", ENOENT)
@case(DICT, "missing[0]", ENOENT)
@case(DICT, "[0]", MISMATCH)
@case(DICT, "[-1]", MISMATCH)
@case(DICT, "int.nothing_here", MISMATCH)
@case(DICT, "string[0]", MISMATCH)
@case(DICT, "list.a", MISMATCH)
@case(NESTED, "k1[-1]", '"last"')
@case(NESTED, "k1[1].k2[-1]", "8")
@case(NESTED, "k1[1].k2", "[6,7,8]")
@case('{"a.b":1,"`":2,"q\\"q":3,"\\u0041":4,"é":5}', "`a.b`", "1")
@case('{"a.b":1,"`":2,"q\\"q":3,"\\u0041":4,"é":5}', "````", "2")
@case('{"a.b":1,"`":2,"q\\"q":3,"\\u0041":4,"é":5}', r"q\"q", "3")
@case('{"a.b":1,"`":2,"q\\"q":3,"\\u0041":4,"é":5}', "A", "4")
@case('{"a.b":1,"`":2,"q\\"q":3,"\\u0041":4,"é":5}', "é", "5")
@case('{"\\ud83d\\ude00":1,"\\ud83d":2,"\\ud83dx":3,"\\ude00":4}', "😀", "1")
@case('{"\\u20AC\\t":1,"\\u00e9":2}', "€\\t", "1")
@case("[1,2,3,[4,5,6,[7,8,9]]]", "[-1].[-1].[-1]", "9")
@case("[]", "[0]", ENOENT)
@case("[]", "[-1]", ENOENT)
@case("[]", "a", MISMATCH)
@case("{}", "[0]", MISMATCH)
@case("{}", "a", ENOENT)
# Text is kept: numbers that Python would round or refuse, escapes, and the order of names.
@case('{"n":12345678901234567890123}', "n", "12345678901234567890123")
@case(f'{{"n":{"9" * 5000}}}', "n", "9" * 5000)
@case('{"n":1.10}', "n", "1.10")
@case('{"n":-0}', "n", "-0")
@case('{"n":1E400}', "n", "1E400")
@case('{"n":0.1000000000000000055511151231257827}', "n", "0.1000000000000000055511151231257827")
@case('{"s":"\\u00e9\\ud800 \\/"}', "s", '"\\u00e9\\ud800 \\/"')
@case('{"o":{"z":1,"a":2}}', "o", '{"z":1,"a":2}')
# Where a name stands twice, the last one counts.
@case('{"a":1,"a":2}', "a", "2")
@case('{"a":{"b":1},"a":{"c":2}}', "a.b", ENOENT)
def test_get_and_exists(document: str, path: str, expected: str | Status) -> None:
    assert outcome(json_text.get, document, path) == expected
    assert outcome(json_text.exists, document, path) == (expected if isinstance(expected, Status) else "")


@case('{"array":[1,2,3,4]}', "array", "4")
@case('{"array":[1,2,3,4]}', "array[0]", MISMATCH)
@case('{"array":[1,2,3,4]}', "", "1")
@case("[]", "", "0")
@case("[1]", "", "1")
@case("{}", "", "0")
@case('{"a":1,"b":2}', "", "2")
@case('{"a":1,"a":2}', "", "1")
# However a name is written, it is the same name. Half a surrogate is no character that another name could have.
@case('{"a\\u00e9":1,"aé":2,"\\ud83d\\ude00":3,"😀":4,"\\ud83d":5,"\\n":6,"\\u000a":7}', "", "4")
@case("{}", "non.exist.path", ENOENT)
@case('{"a":"k"}', "n", ENOENT)
@case('{"a":"k"}', "a", MISMATCH)
@case('{"array":[[]]}', "array[-1]", "0")
@case('{"o":{"a":{"b":1},"c":[]}}', "o", "2")
@case("[1]", "a", MISMATCH)
def test_get_count(document: str, path: str, expected: str | Status) -> None:
    assert outcome(json_text.get_count, document, path) == expected


@each("document", [
    b"", b" ", b"not; json", b"1", b'"string"', b"null", b"{", b"[1,]", b"{'a':1}", b'{"a":1,}', b'{"a" 1}', b"[NaN]",
    b"[-Infinity]", b"[01]", b"[1.]", b"[.5]", b'["tab\there"]', b'["nul\0here"]', b"[1] trailing", b"{}{}",
    b'["\xff"]', "\ufeff{}".encode(), "{}".encode("utf-16"),
])  # fmt: skip
def test_what_is_no_json_document(document: bytes) -> None:
    assert outcome(json_text.get, document, "a") == NOT_JSON


def test_the_bytes_of_a_path() -> None:
    assert failure(b"\xff") == Status.SUBDOC_PATH_EINVAL
    assert json_text.parse_path(b"x" * json_text.PATH_BYTES_MAX) == ("x" * json_text.PATH_BYTES_MAX,)
    assert failure(b"x" * (json_text.PATH_BYTES_MAX + 1)) == Status.SUBDOC_PATH_E2BIG


def nested(levels: int, innermost: str = "") -> str:
    return "[" * levels + innermost + "]" * levels


@case(nested(json_text.LEVELS_MAX), "[0]" * (json_text.LEVELS_MAX - 1), "[]")
@case(nested(json_text.LEVELS_MAX - 1, "1"), "[0]" * (json_text.LEVELS_MAX - 1), "1")
# A number is a level of its own.
@case(nested(json_text.LEVELS_MAX, "1"), "[0]", E2DEEP)
@case(nested(json_text.LEVELS_MAX + 1), "[0]", E2DEEP)
@case(nested(json_text.LEVELS_MAX), "[0]" * json_text.LEVELS_MAX, E2BIG)
@case('{"a":' * (json_text.LEVELS_MAX - 1) + "1" + "}" * (json_text.LEVELS_MAX - 1), "a", '{"a":' * 30 + "1" + "}" * 30)
@case('{"a":' * json_text.LEVELS_MAX + "1" + "}" * json_text.LEVELS_MAX, "a", E2DEEP)
@case('{"a":[' * 16 + "]}" * 16, "b", ENOENT)
@case('{"a":[' * 16 + "{}" + "]}" * 16, "b", E2DEEP)
# Brackets inside strings are no levels.
@case('{"a":"' + "[" * 100 + '\\""}', "a", '"' + "[" * 100 + '\\""')
# Far beyond what Python can nest.
@case(nested(100_000), "[0]", E2DEEP)
@case("[" * 100_000, "[0]", E2DEEP)
@case('{"a":' * 100_000, "a", E2DEEP)
def test_depth(document: str, path: str, expected: str | Status) -> None:
    assert outcome(json_text.get, document, path) == expected


# The path syntax, as a table of paths and what they mean. The cases follow the tests of couchbase/subjson.


VALID: dict[str, json_text.Path] = {
    "": (),
    "a": ("a",),
    "foo.bar.baz": ("foo", "bar", "baz"),
    "array[1].item[9]": ("array", 1, "item", 9),
    "foo[0][0][0]": ("foo", 0, 0, 0),
    "[1][2][3]": (1, 2, 3),
    "[1].[2].[3]": (1, 2, 3),
    "a.[0]": ("a", 0),
    "foo[-1][-1]": ("foo", json_text.LAST, json_text.LAST),
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


@each(("path", "components"), VALID.items())
def test_path(path: str, components: json_text.Path) -> None:
    assert json_text.parse_path(path.encode()) == components


def failure(path: bytes) -> Status:
    with pytest.raises(RequestRefused) as raised:
        json_text.parse_path(path)
    return raised.value.status


@each("path", [
    ".", "....", ".a", "a..b", "a...", "a]", "]", "[", "[]", "[0", "a[", "a[]", "[not][a][number]", "[1.5]", "[+1]",
    "[ 1]", "[-2]", "[-1", "[--1]", "[-01]", f"[{2**63}]", f"[{'9' * 500}]", "hello[0]world", "[0]world", "`", "```",
    "``", "a.``", "`unterminated", "a`b", '"invalid.path', "line\nbreak", "nul\0", "trailing\\", r"\x", r"\.",
    r"\u0041", "[٣]",
])  # fmt: skip
def test_invalid_path(path: str) -> None:
    assert failure(path.encode()) == Status.SUBDOC_PATH_EINVAL


@pytest.mark.parametrize("component", ["a", "[0]", "`x`"])
def test_the_number_of_components_is_limited(component: str) -> None:
    longest = ".".join([component] * json_text.COMPONENTS_MAX).encode()
    assert len(json_text.parse_path(longest)) == json_text.COMPONENTS_MAX
    assert failure(longest + b"." + component.encode()) == Status.SUBDOC_PATH_E2BIG
