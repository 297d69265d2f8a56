"""The mutations, as tables of (document, path, value) and the document after, or the status.

The cases follow the tests of couchbase/subjson, whose order of checks decides between statuses.
"""

from __future__ import annotations

import pytest

from headwater.node.kv.subdocument.json_text import COMPONENTS_MAX, LEVELS_MAX, document_text, parse_path
from headwater.node.kv.subdocument.mutation import (
    MUTATIONS,
    Edit,
    PathMutation,
    array_add_unique,
    array_insert,
    array_push_first,
    array_push_last,
    counter,
    dict_add,
    dict_upsert,
    remove,
    replace,
)
from headwater.protocol.status import RequestRefused, Status
from support.cases import each

ENOENT = Status.SUBDOC_PATH_ENOENT
MISMATCH = Status.SUBDOC_PATH_MISMATCH
EINVAL = Status.SUBDOC_PATH_EINVAL
EEXISTS = Status.SUBDOC_PATH_EEXISTS
E2BIG = Status.SUBDOC_PATH_E2BIG
CANTINSERT = Status.SUBDOC_VALUE_CANTINSERT
ETOODEEP = Status.SUBDOC_VALUE_ETOODEEP
DELTA = Status.SUBDOC_DELTA_EINVAL
ERANGE = Status.SUBDOC_NUM_ERANGE
INT64_MAX, INT64_MIN = 2**63 - 1, -(2**63)

Case = tuple[str, str, str, str | Status]


def edit(mutation: PathMutation, document: str, path: str, value: str = "", *, mkdir_p: bool = False) -> Edit | Status:
    try:
        text = document_text(document.encode())
        edited = mutation(text, parse_path(path.encode()), value.encode(), create_parents=mkdir_p)
    except RequestRefused as failure:
        return failure.status
    assert document_text(edited.text) == edited.text, "a mutation leaves a valid document"
    return edited


def after(mutation: PathMutation, document: str, path: str, value: str, *, mkdir_p: bool = False) -> str | Status:
    edited = edit(mutation, document, path, value, mkdir_p=mkdir_p)
    return edited if isinstance(edited, Status) else edited.text.decode()


# --- objects --------------------------------------------------------------------------------------------------------

BOTH_DICT: list[Case] = [
    ("{}", "a", "1", '{"a":1}'),
    ('{"a":1}', "b", '"x"', '{"a":1,"b":"x"}'),
    ('{ "a" : 1 }', "b", "2", '{ "a" : 1 ,"b":2}'),
    ("{ }", "b", "2", '{ "b":2}'),
    ('{"a":{}}', "a.b", "[1,2]", '{"a":{"b":[1,2]}}'),
    ('[{"a":1}]', "[0].b", "null", '[{"a":1,"b":null}]'),
    ('[{},{"a":1}]', "[-1].b", "true", '[{},{"a":1,"b":true}]'),
    ("{}", "`a.b`", "1", '{"a.b":1}'),
    ("{}", r"q\"q", "1", '{"q\\"q":1}'),
    ("{}", "Fútbol", '"é"', '{"Fútbol":"é"}'),
    ("{}", "a", " 1 ", '{"a":1}'),
    ("{}", "a", '{ "foo": "bar" }', '{"a":{ "foo": "bar" }}'),
    ("{}", "a", "1.10", '{"a":1.10}'),
    ("{}", "a", "9" * 5000, '{"a":' + "9" * 5000 + "}"),
    ("{}", "a.b", "1", ENOENT),
    ("{}", "", "1", CANTINSERT),
    ("{}", "[0]", "1", MISMATCH),
    ("{}", "a[0]", "1", EINVAL),
    ('{"array":[null]}', "array[0]", "true", EINVAL),
    ('{"array":[null]}', "array[1]", "true", EINVAL),
    ('{"array":[null]}', "array[-1]", "true", EINVAL),
    ('{"array":[null]}', "array.x", "true", MISMATCH),
    ('{"a":1}', "a.b", "1", MISMATCH),
    ("[]", "a", "1", MISMATCH),
    # A value that is no JSON shows before the path does.
    ("[]", "a", "blah", CANTINSERT),
    ("{}", "a", "", CANTINSERT),
    ("{}", "a", " \t\r\n", CANTINSERT),
    ("{}", "a", "INVALID", CANTINSERT),
    ("{}", "a", "1,2", CANTINSERT),
    ("{}", "a", '1,"k2":2', CANTINSERT),
    ("{}", "a", '{},"z":{}', CANTINSERT),
    ("{}", "a", '1}{"b":2', CANTINSERT),
    ("{}", "a", '{ "foo" }', CANTINSERT),
    ("{}", "a", '{ "foo": }', CANTINSERT),
    ("{}", "a", "nul", CANTINSERT),
    ("{}", "a", "2.0.0", CANTINSERT),
    ("{}", "a", "2.", CANTINSERT),
    ("{}", "a", "2.0e", CANTINSERT),
    ("{}", "a", "2.0e+", CANTINSERT),
    ("{}", "a", "NaN", CANTINSERT),
]

BOTH_DICT_MKDIR_P: list[Case] = [
    ("{}", "a.b.c", "1", '{"a":{"b":{"c":1}}}'),
    ('{"a":{"x":0}}', "a.b.c", "1", '{"a":{"x":0,"b":{"c":1}}}'),
    ('{"x":0}', r"`a.b`.q\"q", "1", '{"x":0,"a.b":{"q\\"q":1}}'),
    ("{}", "a", "1", '{"a":1}'),
    ("[{}]", "[0].a.b", "1", '[{"a":{"b":1}}]'),
    # Elements are never made.
    ("[]", "[0].a", "1", ENOENT),
    ("{}", "a[0].b", "1", ENOENT),
    ("{}", "a.b[0]", "1", EINVAL),
    ('{"a":1}', "a.b.c", "1", MISMATCH),
    ("[null]", "foo.bar", "null", MISMATCH),
]


@each("mutation", [dict_add, dict_upsert])
@each(("document", "path", "value", "expected"), BOTH_DICT)
def test_dict_add_and_upsert(
    mutation: PathMutation, document: str, path: str, value: str, expected: str | Status
) -> None:
    assert after(mutation, document, path, value) == expected


@each("mutation", [dict_add, dict_upsert])
@each(("document", "path", "value", "expected"), BOTH_DICT_MKDIR_P)
def test_dict_mkdir_p(mutation: PathMutation, document: str, path: str, value: str, expected: str | Status) -> None:
    assert after(mutation, document, path, value, mkdir_p=True) == expected


@pytest.mark.parametrize(
    ("document", "path", "added", "upserted"),
    [
        ('{"a":1}', "a", EEXISTS, '{"a":9}'),
        ('{ "a" : [1, 2] , "b":3}', "a", EEXISTS, '{ "a" : 9 , "b":3}'),
        ('{"a":{"b":1}}', "a.b", EEXISTS, '{"a":{"b":9}}'),
        ('{"a":1,"a":2}', "a", EEXISTS, '{"a":1,"a":9}'),
    ],
)
def test_dict_where_the_name_is_there(document: str, path: str, added: Status, upserted: str) -> None:
    assert after(dict_add, document, path, "9") == added
    assert after(dict_upsert, document, path, "9") == upserted


@each(
    ("document", "path", "value", "expected"),
    [
        ('{"a":1}', "a", "2", '{"a":2}'),
        ('{"a":[1,2,3]}', "a[1]", '{"x":1}', '{"a":[1,{"x":1},3]}'),
        ('{"a":[1,2,3]}', "a[-1]", "4", '{"a":[1,2,4]}'),
        ("[ 1 , 2 ]", "[0]", "9", "[ 9 , 2 ]"),
        ("{}", "a", "1", ENOENT),
        ("[]", "[0]", "1", ENOENT),
        ("[1]", "[1]", "1", ENOENT),
        ("{}", "[0]", "1", MISMATCH),
        ("{}", "", "1", CANTINSERT),
        ('{"a":1}', "a", "1,2", CANTINSERT),
        ("[1]", "[0]", "1,2", CANTINSERT),
        ('{"a":[true,false]}', "a[-1][-1]", "null", MISMATCH),
    ],
)
def test_replace(document: str, path: str, value: str, expected: str | Status) -> None:
    assert after(replace, document, path, value) == expected
    assert after(replace, document, path, value, mkdir_p=True) == expected


@each(
    ("document", "path", "expected"),
    [
        ('{"a":1}', "a", "{}"),
        ('{ "a" : 1 }', "a", "{  }"),
        ('{"a":1,"b":2,"c":3}', "a", '{"b":2,"c":3}'),
        ('{"a":1,"b":2,"c":3}', "b", '{"a":1,"c":3}'),
        ('{"a":1,"b":2,"c":3}', "c", '{"a":1,"b":2}'),
        ('{"a":1 , "b":2 ,\n"c":3 }', "b", '{"a":1 ,\n"c":3 }'),
        ('{ "a":1 , "b":2}', "a", '{ "b":2}'),
        ('{"0": 1,"1": 2.0}', "0", '{"1": 2.0}'),
        ("[1,2]", "[0]", "[2]"),
        ("[1,2]", "[1]", "[1]"),
        ("[1,2]", "[-1]", "[1]"),
        ("[1]", "[0]", "[]"),
        ("[1]", "[-1]", "[]"),
        ("[1,1,1]", "[1]", "[1,1]"),
        ('[0,[1,[2]],{"key":"val"}]', "[1][1][0]", '[0,[1,[]],{"key":"val"}]'),
        ('[0,[1,[]],{"key":"val"}]', "[1][1]", '[0,[1],{"key":"val"}]'),
        ('{"a":[{"b":1,"c":2,"d":3}]}', "a[-1].c", '{"a":[{"b":1,"d":3}]}'),
        ('{"a":[{"b":1}]}', "a[-1].b", '{"a":[{}]}'),
        # A name that stands twice is gone afterwards.
        ('{"a":1,"a":2}', "a", "{}"),
        ('{"a":1, "b":2, "a":3}', "a", '{"b":2}'),
        ('{"b":1, "a":2, "a":3, "c":4}', "a", '{"b":1, "c":4}'),
        ("{}", "a", ENOENT),
        ("[]", "[-1]", ENOENT),
        ("[1]", "[1]", ENOENT),
        ("[]", "", CANTINSERT),
        ("[]", "a", MISMATCH),
        ('{"a":1}', "a.b", MISMATCH),
        ('{"a":1}', "x.b", ENOENT),
    ],
)
def test_remove(document: str, path: str, expected: str | Status) -> None:
    assert after(remove, document, path, "") == expected


# --- arrays ---------------------------------------------------------------------------------------------------------


@each(
    ("document", "path", "value", "last", "first"),
    [
        ('{"a":[]}', "a", "1", '{"a":[1]}', '{"a":[1]}'),
        ('{"a":[4,5]}', "a", "1", '{"a":[4,5,1]}', '{"a":[1,4,5]}'),
        ('{"a":[4,5]}', "a", "1,2,3", '{"a":[4,5,1,2,3]}', '{"a":[1,2,3,4,5]}'),
        ('{"a":[4]}', "a", '[1,2], {"x":3}', '{"a":[4,[1,2], {"x":3}]}', '{"a":[[1,2], {"x":3},4]}'),
        ("[]", "", "null", "[null]", "[null]"),
        ("[ ]", "", "null", "[ null]", "[null ]"),
        ("[ 4 ]", "", " 5 ", "[ 4 ,5]", "[5, 4 ]"),
        ("[[]]", "[0]", "123", "[[123]]", "[[123]]"),
        ("[1,[2]]", "[-1]", "10", "[1,[2,10]]", "[1,[10,2]]"),
        ("{}", "a", "1", ENOENT, ENOENT),
        ("{}", "", "null", MISMATCH, MISMATCH),
        ('{"a":{}}', "a", "1", MISMATCH, MISMATCH),
        ('{"a":"s"}', "a", "1", MISMATCH, MISMATCH),
        ("[1]", "[0]", "1", MISMATCH, MISMATCH),
        ("[1]", "[1]", "1", ENOENT, ENOENT),
        ("[]", "", "notjson", CANTINSERT, CANTINSERT),
        ("[]", "", "", CANTINSERT, CANTINSERT),
        ("[]", "", "\n", CANTINSERT, CANTINSERT),
        ("[]", "", "1,", CANTINSERT, CANTINSERT),
        ("[]", "", ",1", CANTINSERT, CANTINSERT),
        ("[]", "", "1],[2", CANTINSERT, CANTINSERT),
        ("[]", "", '1,"k":2', CANTINSERT, CANTINSERT),
    ],
)
def test_push(document: str, path: str, value: str, last: str | Status, first: str | Status) -> None:
    assert after(array_push_last, document, path, value) == last
    assert after(array_push_first, document, path, value) == first


@each("mutation", [array_push_last, array_push_first, array_add_unique])
@each(
    ("document", "path", "expected"),
    [
        ("{}", "a", '{"a":[true]}'),
        ("{}", "a.b", '{"a":{"b":[true]}}'),
        ('{"a":{"x":1}}', "a.b", '{"a":{"x":1,"b":[true]}}'),
        ("[]", "", "[true]"),
        ('{"a":[null]}', "a[1]", ENOENT),
        ('{"a":[null]}', "a[2]", ENOENT),
        ('{"a":[]}', "a[-1]", ENOENT),
        ("{}", "a[0]", ENOENT),
        ("[null]", "foo.bar", MISMATCH),
    ],
)
def test_array_mkdir_p(mutation: PathMutation, document: str, path: str, expected: str | Status) -> None:
    assert after(mutation, document, path, "true", mkdir_p=True) == expected


@each(
    ("document", "path", "value", "expected"),
    [
        ("[1,2,4,5]", "[2]", "3", "[1,2,3,4,5]"),
        ("[1,2]", "[0]", "0", "[0,1,2]"),
        ("[1,2]", "[2]", "3", "[1,2,3]"),
        ("[]", "[0]", "1", "[1]"),
        ("[ ]", "[0]", "1", "[ 1]"),
        ("[ 1 , 2 ]", "[1]", "9", "[ 1 , 9,2 ]"),
        ('{"a":[1,2,3]}', "a[1]", "-3,-2,-1", '{"a":[1,-3,-2,-1,2,3]}'),
        ("[[],[1]]", "[-1][0]", "0", "[[],[0,1]]"),
        ("[1,2,3]", "[4]", "null", ENOENT),
        ("[]", "[1]", "null", ENOENT),
        ("[1,2,3]", "[-1]", "4", EINVAL),
        ("[1,2,3]", "[0].anything", "null", EINVAL),
        ("[1,2,3]", "", "4", EINVAL),
        ("{}", "array", "4", EINVAL),
        ("{}", "non_exist[0]", "null", ENOENT),
        ("{}", "[0]", "null", MISMATCH),
        ('{"a":1}', "a[0]", "null", MISMATCH),
        ("[]", "[0]", "blah", CANTINSERT),
        ("[]", "[0]", " ", CANTINSERT),
    ],
)
def test_array_insert(document: str, path: str, value: str, expected: str | Status) -> None:
    assert after(array_insert, document, path, value) == expected


@each(
    ("document", "path", "value", "expected"),
    [
        ("[]", "", "0", "[0]"),
        ("[0]", "", "0", EEXISTS),
        ("[0]", "", " 0 ", EEXISTS),
        ('["value"]', "", '"value"', EEXISTS),
        ('{"u":["value"]}', "u", "1", '{"u":["value",1]}'),
        ("[1]", "", '"1"', '[1,"1"]'),
        ("[1]", "", "1.0", "[1,1.0]"),
        ("[true]", "", '"true"', '[true,"true"]'),
        ("[null]", "", "null", EEXISTS),
        ('{"a":["23"]}', "a", "1234", '{"a":["23",1234]}'),
        ('{"a":[[0],[1,2]]}', "a[-1]", "2", EEXISTS),
        ('{"a":[[0],[1,2]]}', "a[-1]", "0", '{"a":[[0],[1,2,0]]}'),
        ("[1]", "", "[]", CANTINSERT),
        ("[1]", "", "{}", CANTINSERT),
        ("[1]", "", "1,2,3", CANTINSERT),
        ("[1]", "", "", CANTINSERT),
        ("[1,[]]", "", "2", MISMATCH),
        ("[1,{}]", "", "2", MISMATCH),
        # The elements are compared in their order, and the first that decides, decides.
        ("[1,[]]", "", "1", EEXISTS),
        ("[[],1]", "", "1", MISMATCH),
        ("{}", "", "1", MISMATCH),
        ('{"a":"s"}', "a", "1", MISMATCH),
        ("{}", "a", "1", ENOENT),
    ],
)
def test_array_add_unique(document: str, path: str, value: str, expected: str | Status) -> None:
    assert after(array_add_unique, document, path, value) == expected


# --- counters -------------------------------------------------------------------------------------------------------


@each(
    ("document", "path", "delta", "expected", "result"),
    [
        ("{}", "c", "1", '{"c":1}', "1"),
        ('{"c":1}', "c", "-101", '{"c":-100}', "-100"),
        ('{ "c" : 0 , "d":1}', "c", "5", '{ "c" : 5 , "d":1}', "5"),
        ('{"c":-0}', "c", "5", '{"c":5}', "5"),
        ("[-20]", "[0]", "1", "[-19]", "-19"),
        ("[1,2]", "[-1]", "1", "[1,3]", "3"),
        ('{"c":0}', "c", str(INT64_MAX), f'{{"c":{INT64_MAX}}}', str(INT64_MAX)),
        ('{"c":0}', "c", str(INT64_MIN), f'{{"c":{INT64_MIN}}}', str(INT64_MIN)),
        (f'{{"c":{INT64_MAX - 1}}}', "c", "1", f'{{"c":{INT64_MAX}}}', str(INT64_MAX)),
        (f'{{"c":{INT64_MIN + 1}}}', "c", "-1", f'{{"c":{INT64_MIN}}}', str(INT64_MIN)),
        (f'{{"c":{INT64_MAX}}}', "c", str(INT64_MIN), '{"c":-1}', "-1"),
        ('{"a":{}}', "a.c", "7", '{"a":{"c":7}}', "7"),
    ],
)
def test_counter(document: str, path: str, delta: str, expected: str, result: str) -> None:
    assert edit(counter, document, path, delta) == Edit(expected.encode(), result.encode())


@each(
    ("document", "path", "delta", "expected"),
    [
        *[
            ("{}", "c", delta, DELTA)
            for delta in ("bad", "3.14", "-", "43f", "0", "-0", "01", "+1", " 1", "1e3", "", "1\n")
        ],
        ("{}", "c", str(INT64_MAX + 1), DELTA),
        ("{}", "c", str(INT64_MIN - 1), DELTA),
        ("{}", "c", "9" * 5000, DELTA),
        ("{}", "c", "٣", DELTA),
        # The delta is looked at first.
        ("[]", "c", "0", DELTA),
        (f'{{"c":{INT64_MAX - 1}}}', "c", "2", CANTINSERT),
        (f'{{"c":{INT64_MIN + 1}}}', "c", "-2", CANTINSERT),
        ('{"c":9999999999999999999999999999999}', "c", "1", ERANGE),
        (f'{{"c":{INT64_MAX + 1}}}', "c", "-1", ERANGE),
        (f'{{"c":{"9" * 5000}}}', "c", "1", ERANGE),
        ('{"c":3.14}', "c", "1", MISMATCH),
        ('{"c":1e3}', "c", "1", MISMATCH),
        ('{"c":"1"}', "c", "1", MISMATCH),
        ('{"c":null}', "c", "1", MISMATCH),
        ('{"c":[]}', "c", "1", MISMATCH),
        ("{}", "", "1", MISMATCH),
        ("[]", "[0]", "42", ENOENT),
        ("{}", "a.c", "1", ENOENT),
        ("{}", "a[0]", "1", ENOENT),
        ("[]", "c", "1", MISMATCH),
    ],
)
def test_counter_fails(document: str, path: str, delta: str, expected: Status) -> None:
    assert edit(counter, document, path, delta) == expected


@pytest.mark.parametrize(
    ("document", "path", "expected"),
    [
        ("{}", "a.b.c", Edit(b'{"a":{"b":{"c":5}}}', b"5")),
        ("[]", "[0]", ENOENT),
        ('{"array":[null]}', "array[1]", ENOENT),
        ("{}", "a[0].c", ENOENT),
        ("{}", "a[0]", EINVAL),
    ],
)
def test_counter_mkdir_p(document: str, path: str, expected: Edit | Status) -> None:
    assert edit(counter, document, path, "5", mkdir_p=True) == expected


# --- depth ----------------------------------------------------------------------------------------------------------


def nested(levels: int, innermost: str = "") -> str:
    return "[" * levels + innermost + "]" * levels


@each(
    ("mutation", "document", "path", "value", "expected"),
    [
        (replace, nested(31, "1"), "[0]" * 31, "2", nested(31, "2")),
        (replace, nested(31, "1"), "[0]" * 30, "[3,4]", nested(31, "3,4")),
        (replace, nested(31, "1"), "[0]" * 30, "[[]]", nested(32)),
        (replace, nested(31, "1"), "[0]" * 30, "[[5]]", ETOODEEP),
        (replace, nested(31, "1"), "[0]" * 32, "2", E2BIG),
        (dict_upsert, "{}", "a", nested(31), '{"a":' + nested(31) + "}"),
        (dict_upsert, "{}", "a", nested(32), ETOODEEP),
        (dict_upsert, "{}", "a", nested(31, "1"), ETOODEEP),
        (dict_upsert, "{}", "a", nested(100_000), ETOODEEP),
        (dict_upsert, "{}", "a", "[" * 100_000, ETOODEEP),
        (array_push_last, "[]", "", nested(31), "[" + nested(31) + "]"),
        (array_push_last, "[]", "", nested(32), ETOODEEP),
        (array_push_first, "[]", "", "1," + nested(31), "[1," + nested(31) + "]"),
        (array_push_first, "[]", "", "1," + nested(32), ETOODEEP),
        (array_insert, "[]", "[0]", nested(31), "[" + nested(31) + "]"),
        (array_insert, "[]", "[0]", nested(32), ETOODEEP),
        (array_push_last, nested(32), "[0]" * 31, "1", ETOODEEP),
        (array_add_unique, nested(32), "[0]" * 31, "1", ETOODEEP),
        (array_add_unique, nested(31), "[0]" * 30, "1", nested(31, "1")),
    ],
)
def test_depth(mutation: PathMutation, document: str, path: str, value: str, expected: str | Status) -> None:
    assert after(mutation, document, path, value) == expected


@pytest.mark.parametrize("mutation", [dict_add, dict_upsert, counter])
def test_the_longest_path_is_made_whole(mutation: PathMutation) -> None:
    path = ".".join("a" * COMPONENTS_MAX)
    made = after(mutation, "{}", path, "1", mkdir_p=True)
    assert made == '{"a":' * COMPONENTS_MAX + "1" + "}" * COMPONENTS_MAX
    assert COMPONENTS_MAX + 1 == LEVELS_MAX


# --- all ------------------------------------------------------------------------------------------------------------

PRECIOUS = '{ "big":12345678901234567890123, "f":1.10, "neg": -0, "e":"\\u00e9\\/", "dup":1, "dup":2, "a" :[ 1 , 2 ] }'


@each(
    ("mutation", "path", "value", "old", "new"),
    [
        (dict_add, "new", "1", "] }", '] ,"new":1}'),
        (dict_upsert, "f", "2", "1.10", "2"),
        (replace, "a[1]", "3", ", 2 ]", ", 3 ]"),
        (remove, "neg", "", ', "neg": -0', ""),
        (array_push_last, "a", "3", "2 ]", "2 ,3]"),
        (array_push_first, "a", "0", "[ 1", "[0, 1"),
        (array_insert, "a[1]", "9", ", 2 ]", ", 9,2 ]"),
        (array_add_unique, "a", "9", "2 ]", "2 ,9]"),
        (counter, "a[0]", "1", "[ 1 ,", "[ 2 ,"),
    ],
)
def test_what_is_not_touched_keeps_its_text(mutation: PathMutation, path: str, value: str, old: str, new: str) -> None:
    assert PRECIOUS.count(old) == 1
    assert after(mutation, PRECIOUS, path, value) == PRECIOUS.replace(old, new)


@each("mutation", MUTATIONS.values())
def test_a_value_that_is_not_utf8(mutation: PathMutation) -> None:
    with pytest.raises(RequestRefused) as raised:
        mutation(b"{}", ("a",), b'"\xff"', create_parents=False)
    assert raised.value.status in (CANTINSERT, DELTA, ENOENT)
