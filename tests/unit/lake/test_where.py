"""Conditions that can't be judged here: the error names the part, and says what is possible."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.errors import InvalidInput
from headwater.lake.where import TEXT_CHARS_MAX, Where
from headwater.landing.source_options import Conditions
from support.cases import each


@each(
    ("text", "sentence"),
    [
        ("lower(name) = 'x' AND n = 1", r"'LOWER\(name\)' is neither a field nor a column. Possible are comparisons"),
        ("n = 1 AND (m = 2 OR a + 1 = 2)", "'a [+] 1' is neither a field nor a column"),
        ("tags[0] = 1", "is neither a field nor a column"),
        ("n IN (SELECT 1)", "can't be judged here"),
        ("EXISTS (SELECT 1)", "can't be judged here"),
        ("n IS TRUE", "'n IS TRUE' can't be judged here"),
        ("n ILIKE 'a'", "can't be judged here"),
        ("n BETWEEN SYMMETRIC 1 AND 2", "can't be judged here"),
        ("n LIKE ANY ('a')", "is no text"),
        ("n LIKE '10!' ESCAPE '!'", "has nothing behind the last character of ESCAPE"),
        ("n LIKE 'a' ESCAPE '!!'", "has more than one character after ESCAPE"),
        ("seqno LIKE '1%'", "compares seqno, which is no text, with a pattern"),
        ('type = "order"', "compares two names. Texts are written in single quotes"),
        ("n = NULL", "Write IS NULL"),
        ("active < TRUE", "puts true and false in an order"),
        ("n = -m", "'m' is neither a text, a number, TRUE, FALSE nor NULL"),
        ("n = 1e400", "is too large for a number"),
        (r"name = 'a\b'", "has a backslash, which engines take differently"),
        ("cas = '5'", "is no number, and the column cas is one"),
        ("key = 5", "is no text, and the column key is one"),
        ("changed_at > 'noon'", "is no time. Write one like"),
        ("value = 1", "names the column value. Write document.value for the field of the document"),
        ("key.part = 1", "names the column key, which has no parts. Write document.key.part"),
        ("op", "'op' can't be judged here"),
        ("n = 1; m = 2", "is no condition of SQL"),
        ("n = 'a' 'b'", "is neither a text"),
        ("if = 3", "is no condition of SQL"),
        ("n =", "is no condition of SQL"),
        ("", "can't be judged here"),
        ("NOT " * 100 + "n", "is nested too deeply"),
        ("(" * 9000 + "n" + ")" * 9000, "is nested too deeply"),
        (" " * TEXT_CHARS_MAX + "n", "characters, and may have 65,536"),
    ],
)
def test_what_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as raised:
        Where.parse(text)
    assert len(str(raised.value)) < 800


def test_conditions_are_equal_if_they_say_the_same() -> None:
    assert Where.parse("type='order' and total>10") == Where.parse("(type = 'order') AND 10 < total")
    assert Where.parse("n = 1") != Where.parse("n = 2")


def test_numbers_and_truth_values_are_different_literals() -> None:
    """To Python, 1 and TRUE are equal."""
    values = pa.array([b'{"a":1}', b'{"a":true}', b'{"a":2}'])
    rows = pa.table({"value": values, "datatype": pa.array([1] * 3, pa.uint8())})
    for text in ("a IN (1, TRUE)", "a IN (TRUE, 1)", "a = 1 OR a = TRUE"):
        assert Where.parse(text).met(rows).tolist() == [True, True, False]
    assert not Conditions.parse("a = 1").is_same(Conditions.parse("a = TRUE"))
    assert Conditions.parse("a = 1 AND key IN ('x', 'y')").is_same(Conditions.parse("key IN ('y', 'x') AND 1 = a"))


def test_what_is_no_json_object_has_no_fields() -> None:
    values = [b'{"n":1}', b'{"n":1', b'{"n":1} ,', b'[{"n":1}]', b'{"n":1,"x":"\xff"}', None]
    rows = pa.table({"value": pa.array(values, pa.binary()), "datatype": pa.array([1] * len(values), pa.uint8())})
    assert Where.parse("n = 1").met(rows).tolist() == [True] + [False] * 5
    assert Where.parse("n IS MISSING").met(rows).tolist() == [False] + [True] * 5


def test_columns_of_a_change() -> None:
    rows = pa.table(
        {
            "value": pa.array([b'{"key":1}', b"{}", None], pa.binary()),
            "datatype": pa.array([1, 1, 0], pa.uint8()),
            "key": pa.array([b"o-1", b"\xff", None], pa.binary()),
            "scope": pa.array(["a", "a", None]).dictionary_encode(),
            "cas": pa.array([5, 2**64 - 1, 0], pa.uint64()),
            "changed_at": pa.array([1_700_000_000_000_000, 1_800_000_000_000_000, None], pa.timestamp("us", tz="UTC")),
        }
    )
    for text, marks in {
        "key LIKE 'o-%'": [True, False, False],
        "KEY IN ('o-1', 'x')": [True, False, False],
        "key IS NULL": [False, False, True],
        "document.key = 1": [True, False, False],
        "NOT document.key = 1": [False, False, False],
        "scope <> 'b'": [True, True, False],
        "cas > 9223372036854775807": [False, True, False],
        "cas > -1 AND cas < 99999999999999999999": [True, True, True],
        "cas IN (5, 6.5)": [True, False, False],
        "changed_at >= '2025-06-01'": [False, True, False],
        "changed_at BETWEEN '2023-01-01T00:00:00+02:00' AND '2024-01-01'": [True, False, False],
    }.items():
        assert Where.parse(text).met(rows).tolist() == marks, text
