"""The mutations, as tables of (document, path, value) and the document after, or the status.

The cases follow the tests of couchbase/subjson, whose order of checks decides between statuses.
"""

from __future__ import annotations

import pytest

from headwater.node.kv.subdocument.execute import (
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
from headwater.node.kv.subdocument.json_text import COMPONENTS_MAX, LEVELS_MAX, document_text, parse_path
from headwater.protocol.status import RequestRefused, Status
from support.cases import case, each

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


@each("mutation", [dict_add, dict_upsert])
@case("{}", "a", "1", '{"a":1}')
@case('{"a":1}', "b", '"x"', '{"a":1,"b":"x"}')
@case('{ "a" : 1 }', "b", "2", '{ "a" : 1 ,"b":2}')
@case("{ }", "b", "2", '{ "b":2}')
@case('{"a":{}}', "a.b", "[1,2]", '{"a":{"b":[1,2]}}')
@case('[{"a":1}]', "[0].b", "null", '[{"a":1,"b":null}]')
@case('[{},{"a":1}]', "[-1].b", "true", '[{},{"a":1,"b":true}]')
@case("{}", "`a.b`", "1", '{"a.b":1}')
@case("{}", r"q\"q", "1", '{"q\\"q":1}')
@case("{}", "Fútbol", '"é"', '{"Fútbol":"é"}')
@case("{}", "a", " 1 ", '{"a":1}')
@case("{}", "a", '{ "foo": "bar" }', '{"a":{ "foo": "bar" }}')
@case("{}", "a", "1.10", '{"a":1.10}')
@case("{}", "a", "9" * 5000, '{"a":' + "9" * 5000 + "}")
@case("{}", "a.b", "1", ENOENT)
@case("{}", "", "1", CANTINSERT)
@case("{}", "[0]", "1", MISMATCH)
@case("{}", "a[0]", "1", EINVAL)
@case('{"array":[null]}', "array[0]", "true", EINVAL)
@case('{"array":[null]}', "array[1]", "true", EINVAL)
@case('{"array":[null]}', "array[-1]", "true", EINVAL)
@case('{"array":[null]}', "array.x", "true", MISMATCH)
@case('{"a":1}', "a.b", "1", MISMATCH)
@case("[]", "a", "1", MISMATCH)
# A value that is no JSON shows before the path does.
@case("[]", "a", "blah", CANTINSERT)
@case("{}", "a", "", CANTINSERT)
@case("{}", "a", " \t\r\n", CANTINSERT)
@case("{}", "a", "INVALID", CANTINSERT)
@case("{}", "a", "1,2", CANTINSERT)
@case("{}", "a", '1,"k2":2', CANTINSERT)
@case("{}", "a", '{},"z":{}', CANTINSERT)
@case("{}", "a", '1}{"b":2', CANTINSERT)
@case("{}", "a", '{ "foo" }', CANTINSERT)
@case("{}", "a", '{ "foo": }', CANTINSERT)
@case("{}", "a", "nul", CANTINSERT)
@case("{}", "a", "2.0.0", CANTINSERT)
@case("{}", "a", "2.", CANTINSERT)
@case("{}", "a", "2.0e", CANTINSERT)
@case("{}", "a", "2.0e+", CANTINSERT)
@case("{}", "a", "NaN", CANTINSERT)
def test_dict_add_and_upsert(
    mutation: PathMutation, document: str, path: str, value: str, expected: str | Status
) -> None:
    assert after(mutation, document, path, value) == expected


@each("mutation", [dict_add, dict_upsert])
@case("{}", "a.b.c", "1", '{"a":{"b":{"c":1}}}')
@case('{"a":{"x":0}}', "a.b.c", "1", '{"a":{"x":0,"b":{"c":1}}}')
@case('{"x":0}', r"`a.b`.q\"q", "1", '{"x":0,"a.b":{"q\\"q":1}}')
@case("{}", "a", "1", '{"a":1}')
@case("[{}]", "[0].a.b", "1", '[{"a":{"b":1}}]')
# Elements are never made.
@case("[]", "[0].a", "1", ENOENT)
@case("{}", "a[0].b", "1", ENOENT)
@case("{}", "a.b[0]", "1", EINVAL)
@case('{"a":1}', "a.b.c", "1", MISMATCH)
@case("[null]", "foo.bar", "null", MISMATCH)
def test_dict_mkdir_p(mutation: PathMutation, document: str, path: str, value: str, expected: str | Status) -> None:
    assert after(mutation, document, path, value, mkdir_p=True) == expected


@case('{"a":1}', "a", EEXISTS, '{"a":9}')
@case('{ "a" : [1, 2] , "b":3}', "a", EEXISTS, '{ "a" : 9 , "b":3}')
@case('{"a":{"b":1}}', "a.b", EEXISTS, '{"a":{"b":9}}')
@case('{"a":1,"a":2}', "a", EEXISTS, '{"a":1,"a":9}')
def test_dict_where_the_name_is_there(document: str, path: str, added: Status, upserted: str) -> None:
    assert after(dict_add, document, path, "9") == added
    assert after(dict_upsert, document, path, "9") == upserted


@case('{"a":1}', "a", "2", '{"a":2}')
@case('{"a":[1,2,3]}', "a[1]", '{"x":1}', '{"a":[1,{"x":1},3]}')
@case('{"a":[1,2,3]}', "a[-1]", "4", '{"a":[1,2,4]}')
@case("[ 1 , 2 ]", "[0]", "9", "[ 9 , 2 ]")
@case("{}", "a", "1", ENOENT)
@case("[]", "[0]", "1", ENOENT)
@case("[1]", "[1]", "1", ENOENT)
@case("{}", "[0]", "1", MISMATCH)
@case("{}", "", "1", CANTINSERT)
@case('{"a":1}', "a", "1,2", CANTINSERT)
@case("[1]", "[0]", "1,2", CANTINSERT)
@case('{"a":[true,false]}', "a[-1][-1]", "null", MISMATCH)
def test_replace(document: str, path: str, value: str, expected: str | Status) -> None:
    assert after(replace, document, path, value) == expected
    assert after(replace, document, path, value, mkdir_p=True) == expected


@case('{"a":1}', "a", "{}")
@case('{ "a" : 1 }', "a", "{  }")
@case('{"a":1,"b":2,"c":3}', "a", '{"b":2,"c":3}')
@case('{"a":1,"b":2,"c":3}', "b", '{"a":1,"c":3}')
@case('{"a":1,"b":2,"c":3}', "c", '{"a":1,"b":2}')
@case('{"a":1 , "b":2 ,\n"c":3 }', "b", '{"a":1 ,\n"c":3 }')
@case('{ "a":1 , "b":2}', "a", '{ "b":2}')
@case('{"0": 1,"1": 2.0}', "0", '{"1": 2.0}')
@case("[1,2]", "[0]", "[2]")
@case("[1,2]", "[1]", "[1]")
@case("[1,2]", "[-1]", "[1]")
@case("[1]", "[0]", "[]")
@case("[1]", "[-1]", "[]")
@case("[1,1,1]", "[1]", "[1,1]")
@case('[0,[1,[2]],{"key":"val"}]', "[1][1][0]", '[0,[1,[]],{"key":"val"}]')
@case('[0,[1,[]],{"key":"val"}]', "[1][1]", '[0,[1],{"key":"val"}]')
@case('{"a":[{"b":1,"c":2,"d":3}]}', "a[-1].c", '{"a":[{"b":1,"d":3}]}')
@case('{"a":[{"b":1}]}', "a[-1].b", '{"a":[{}]}')
# A name that stands twice is gone afterwards.
@case('{"a":1,"a":2}', "a", "{}")
@case('{"a":1, "b":2, "a":3}', "a", '{"b":2}')
@case('{"b":1, "a":2, "a":3, "c":4}', "a", '{"b":1, "c":4}')
@case("{}", "a", ENOENT)
@case("[]", "[-1]", ENOENT)
@case("[1]", "[1]", ENOENT)
@case("[]", "", CANTINSERT)
@case("[]", "a", MISMATCH)
@case('{"a":1}', "a.b", MISMATCH)
@case('{"a":1}', "x.b", ENOENT)
def test_remove(document: str, path: str, expected: str | Status) -> None:
    assert after(remove, document, path, "") == expected


# --- arrays ---------------------------------------------------------------------------------------------------------


@case('{"a":[]}', "a", "1", '{"a":[1]}', '{"a":[1]}')
@case('{"a":[4,5]}', "a", "1", '{"a":[4,5,1]}', '{"a":[1,4,5]}')
@case('{"a":[4,5]}', "a", "1,2,3", '{"a":[4,5,1,2,3]}', '{"a":[1,2,3,4,5]}')
@case('{"a":[4]}', "a", '[1,2], {"x":3}', '{"a":[4,[1,2], {"x":3}]}', '{"a":[[1,2], {"x":3},4]}')
@case("[]", "", "null", "[null]", "[null]")
@case("[ ]", "", "null", "[ null]", "[null ]")
@case("[ 4 ]", "", " 5 ", "[ 4 ,5]", "[5, 4 ]")
@case("[[]]", "[0]", "123", "[[123]]", "[[123]]")
@case("[1,[2]]", "[-1]", "10", "[1,[2,10]]", "[1,[10,2]]")
@case("{}", "a", "1", ENOENT, ENOENT)
@case("{}", "", "null", MISMATCH, MISMATCH)
@case('{"a":{}}', "a", "1", MISMATCH, MISMATCH)
@case('{"a":"s"}', "a", "1", MISMATCH, MISMATCH)
@case("[1]", "[0]", "1", MISMATCH, MISMATCH)
@case("[1]", "[1]", "1", ENOENT, ENOENT)
@case("[]", "", "notjson", CANTINSERT, CANTINSERT)
@case("[]", "", "", CANTINSERT, CANTINSERT)
@case("[]", "", "\n", CANTINSERT, CANTINSERT)
@case("[]", "", "1,", CANTINSERT, CANTINSERT)
@case("[]", "", ",1", CANTINSERT, CANTINSERT)
@case("[]", "", "1],[2", CANTINSERT, CANTINSERT)
@case("[]", "", '1,"k":2', CANTINSERT, CANTINSERT)
def test_push(document: str, path: str, value: str, last: str | Status, first: str | Status) -> None:
    assert after(array_push_last, document, path, value) == last
    assert after(array_push_first, document, path, value) == first


@each("mutation", [array_push_last, array_push_first, array_add_unique])
@case("{}", "a", '{"a":[true]}')
@case("{}", "a.b", '{"a":{"b":[true]}}')
@case('{"a":{"x":1}}', "a.b", '{"a":{"x":1,"b":[true]}}')
@case("[]", "", "[true]")
@case('{"a":[null]}', "a[1]", ENOENT)
@case('{"a":[null]}', "a[2]", ENOENT)
@case('{"a":[]}', "a[-1]", ENOENT)
@case("{}", "a[0]", ENOENT)
@case("[null]", "foo.bar", MISMATCH)
def test_array_mkdir_p(mutation: PathMutation, document: str, path: str, expected: str | Status) -> None:
    assert after(mutation, document, path, "true", mkdir_p=True) == expected


@case("[1,2,4,5]", "[2]", "3", "[1,2,3,4,5]")
@case("[1,2]", "[0]", "0", "[0,1,2]")
@case("[1,2]", "[2]", "3", "[1,2,3]")
@case("[]", "[0]", "1", "[1]")
@case("[ ]", "[0]", "1", "[ 1]")
@case("[ 1 , 2 ]", "[1]", "9", "[ 1 , 9,2 ]")
@case('{"a":[1,2,3]}', "a[1]", "-3,-2,-1", '{"a":[1,-3,-2,-1,2,3]}')
@case("[[],[1]]", "[-1][0]", "0", "[[],[0,1]]")
@case("[1,2,3]", "[4]", "null", ENOENT)
@case("[]", "[1]", "null", ENOENT)
@case("[1,2,3]", "[-1]", "4", EINVAL)
@case("[1,2,3]", "[0].anything", "null", EINVAL)
@case("[1,2,3]", "", "4", EINVAL)
@case("{}", "array", "4", EINVAL)
@case("{}", "non_exist[0]", "null", ENOENT)
@case("{}", "[0]", "null", MISMATCH)
@case('{"a":1}', "a[0]", "null", MISMATCH)
@case("[]", "[0]", "blah", CANTINSERT)
@case("[]", "[0]", " ", CANTINSERT)
def test_array_insert(document: str, path: str, value: str, expected: str | Status) -> None:
    assert after(array_insert, document, path, value) == expected


@case("[]", "", "0", "[0]")
@case("[0]", "", "0", EEXISTS)
@case("[0]", "", " 0 ", EEXISTS)
@case('["value"]', "", '"value"', EEXISTS)
@case('{"u":["value"]}', "u", "1", '{"u":["value",1]}')
@case("[1]", "", '"1"', '[1,"1"]')
@case("[1]", "", "1.0", "[1,1.0]")
@case("[true]", "", '"true"', '[true,"true"]')
@case("[null]", "", "null", EEXISTS)
@case('{"a":["23"]}', "a", "1234", '{"a":["23",1234]}')
@case('{"a":[[0],[1,2]]}', "a[-1]", "2", EEXISTS)
@case('{"a":[[0],[1,2]]}', "a[-1]", "0", '{"a":[[0],[1,2,0]]}')
@case("[1]", "", "[]", CANTINSERT)
@case("[1]", "", "{}", CANTINSERT)
@case("[1]", "", "1,2,3", CANTINSERT)
@case("[1]", "", "", CANTINSERT)
@case("[1,[]]", "", "2", MISMATCH)
@case("[1,{}]", "", "2", MISMATCH)
# The elements are compared in their order, and the first that decides, decides.
@case("[1,[]]", "", "1", EEXISTS)
@case("[[],1]", "", "1", MISMATCH)
@case("{}", "", "1", MISMATCH)
@case('{"a":"s"}', "a", "1", MISMATCH)
@case("{}", "a", "1", ENOENT)
def test_array_add_unique(document: str, path: str, value: str, expected: str | Status) -> None:
    assert after(array_add_unique, document, path, value) == expected


# --- counters -------------------------------------------------------------------------------------------------------


@case("{}", "c", "1", '{"c":1}', "1")
@case('{"c":1}', "c", "-101", '{"c":-100}', "-100")
@case('{ "c" : 0 , "d":1}', "c", "5", '{ "c" : 5 , "d":1}', "5")
@case('{"c":-0}', "c", "5", '{"c":5}', "5")
@case("[-20]", "[0]", "1", "[-19]", "-19")
@case("[1,2]", "[-1]", "1", "[1,3]", "3")
@case('{"c":0}', "c", str(INT64_MAX), f'{{"c":{INT64_MAX}}}', str(INT64_MAX))
@case('{"c":0}', "c", str(INT64_MIN), f'{{"c":{INT64_MIN}}}', str(INT64_MIN))
@case(f'{{"c":{INT64_MAX - 1}}}', "c", "1", f'{{"c":{INT64_MAX}}}', str(INT64_MAX))
@case(f'{{"c":{INT64_MIN + 1}}}', "c", "-1", f'{{"c":{INT64_MIN}}}', str(INT64_MIN))
@case(f'{{"c":{INT64_MAX}}}', "c", str(INT64_MIN), '{"c":-1}', "-1")
@case('{"a":{}}', "a.c", "7", '{"a":{"c":7}}', "7")
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


@case("{}", "a.b.c", Edit(b'{"a":{"b":{"c":5}}}', b"5"))
@case("[]", "[0]", ENOENT)
@case('{"array":[null]}', "array[1]", ENOENT)
@case("{}", "a[0].c", ENOENT)
@case("{}", "a[0]", EINVAL)
def test_counter_mkdir_p(document: str, path: str, expected: Edit | Status) -> None:
    assert edit(counter, document, path, "5", mkdir_p=True) == expected


# --- depth ----------------------------------------------------------------------------------------------------------


def nested(levels: int, innermost: str = "") -> str:
    return "[" * levels + innermost + "]" * levels


@case(replace, nested(31, "1"), "[0]" * 31, "2", nested(31, "2"))
@case(replace, nested(31, "1"), "[0]" * 30, "[3,4]", nested(31, "3,4"))
@case(replace, nested(31, "1"), "[0]" * 30, "[[]]", nested(32))
@case(replace, nested(31, "1"), "[0]" * 30, "[[5]]", ETOODEEP)
@case(replace, nested(31, "1"), "[0]" * 32, "2", E2BIG)
@case(dict_upsert, "{}", "a", nested(31), '{"a":' + nested(31) + "}")
@case(dict_upsert, "{}", "a", nested(32), ETOODEEP)
@case(dict_upsert, "{}", "a", nested(31, "1"), ETOODEEP)
@case(dict_upsert, "{}", "a", nested(100_000), ETOODEEP)
@case(dict_upsert, "{}", "a", "[" * 100_000, ETOODEEP)
@case(array_push_last, "[]", "", nested(31), "[" + nested(31) + "]")
@case(array_push_last, "[]", "", nested(32), ETOODEEP)
@case(array_push_first, "[]", "", "1," + nested(31), "[1," + nested(31) + "]")
@case(array_push_first, "[]", "", "1," + nested(32), ETOODEEP)
@case(array_insert, "[]", "[0]", nested(31), "[" + nested(31) + "]")
@case(array_insert, "[]", "[0]", nested(32), ETOODEEP)
@case(array_push_last, nested(32), "[0]" * 31, "1", ETOODEEP)
@case(array_add_unique, nested(32), "[0]" * 31, "1", ETOODEEP)
@case(array_add_unique, nested(31), "[0]" * 30, "1", nested(31, "1"))
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


@case(dict_add, "new", "1", "] }", '] ,"new":1}')
@case(dict_upsert, "f", "2", "1.10", "2")
@case(replace, "a[1]", "3", ", 2 ]", ", 3 ]")
@case(remove, "neg", "", ', "neg": -0', "")
@case(array_push_last, "a", "3", "2 ]", "2 ,3]")
@case(array_push_first, "a", "0", "[ 1", "[0, 1")
@case(array_insert, "a[1]", "9", ", 2 ]", ", 9,2 ]")
@case(array_add_unique, "a", "9", "2 ]", "2 ,9]")
@case(counter, "a[0]", "1", "[ 1 ,", "[ 2 ,")
def test_what_is_not_touched_keeps_its_text(mutation: PathMutation, path: str, value: str, old: str, new: str) -> None:
    assert PRECIOUS.count(old) == 1
    assert after(mutation, PRECIOUS, path, value) == PRECIOUS.replace(old, new)


@each("mutation", MUTATIONS.values())
def test_a_value_that_is_not_utf8(mutation: PathMutation) -> None:
    with pytest.raises(RequestRefused) as raised:
        mutation(b"{}", ("a",), b'"\xff"', create_parents=False)
    assert raised.value.status in (CANTINSERT, DELTA, ENOENT)
