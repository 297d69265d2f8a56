"""Conditions of SQL are true of the documents that a plain model of its logic says, document by document."""

from __future__ import annotations

import json
import operator
import re
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.lake.where import Where

MISSING = object()
INT64 = range(-(2**63), 2**63)
COMPARE = {
    "=": operator.eq, "<>": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

# --- the model: True, False, or None for unknown ----------------------------------------------------------------------


def look_up(document: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if not isinstance(document, dict) or name not in document:
            return MISSING
        document = document[name]
    return document


def kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "text" if isinstance(value, str) else "other"


def as_double(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def compare(value: Any, sign: str, literal: Any) -> bool | None:
    if kind(value) != kind(literal):
        return None
    if kind(value) == "number" and not all(isinstance(it, int) and it in INT64 for it in (value, literal)):
        value, literal = as_double(value), as_double(literal)
    if kind(value) == "text":
        value, literal = value.encode(), literal.encode()
    found: bool = COMPARE[sign](value, literal)
    return found


def negate(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def any_of(truths: list[bool | None]) -> bool | None:
    return True if True in truths else None if None in truths else False


def judge(node: tuple[Any, ...], document: Any) -> bool | None:
    match node:
        case ("and", *parts):
            return negate(any_of([negate(judge(part, document)) for part in parts]))
        case ("or", *parts):
            return any_of([judge(part, document) for part in parts])
        case ("not", part):
            return negate(judge(part, document))
    value = look_up(document, node[1])
    match node:
        case ("compare", _, sign, literal):
            return compare(value, sign, literal)
        case ("in", _, literals):
            return any_of([None if literal is None else compare(value, "=", literal) for literal in literals])
        case ("between", _, low, high):
            ends = [compare(value, ">=", low), compare(value, "<=", high)]
            return negate(any_of([negate(end) for end in ends]))
        case ("like", _, pattern):
            if kind(value) != "text":
                return None
            wanted = "".join({"%": ".*", "_": "."}.get(sign, re.escape(sign)) for sign in pattern)
            return re.fullmatch(wanted, value, re.DOTALL) is not None
        case ("null", _):
            return value is None or value is MISSING
        case ("missing", _):
            return value is MISSING
    return compare(value, "=", True)


# --- as SQL writes it -------------------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def literal_text(literal: Any) -> str:
    if literal is None:
        return "NULL"
    return quoted(literal) if isinstance(literal, str) else str(literal).upper().replace("E+", "E")


def path_text(path: tuple[str, ...]) -> str:
    return ".".join("`" + name.replace("`", "``") + "`" for name in path)


def sql(node: tuple[Any, ...]) -> str:
    match node:
        case ("and" | "or" as word, *parts):
            return "(" + f" {word} ".join(map(sql, parts)) + ")"
        case ("not", part):
            return f"NOT ({sql(part)})"
    path = path_text(node[1])
    match node:
        case ("compare", _, sign, literal):
            return f"{path} {sign} {literal_text(literal)}"
        case ("in", _, literals):
            return f"{path} IN ({', '.join(map(literal_text, literals))})"
        case ("between", _, low, high):
            return f"{path} BETWEEN {literal_text(low)} AND {literal_text(high)}"
        case ("like", _, pattern):
            return f"{path} LIKE {quoted(pattern)}"
        case ("null", _):
            return f"{path} IS NULL"
        case ("missing", _):
            return f"{path} IS MISSING"
    return path


NAMES = ("a", "b", "Ä c", 'q"`t')
texts = st.text(st.sampled_from("ab%_'\n.*Ä€😀"), max_size=4)
numbers = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**53 + 1, -(2**53) - 1, 2**63 - 1, -(2**63), 2**63, 10**25, 0.5, -2.5, 1e300, 5e-324]),
    st.floats(allow_nan=False, allow_infinity=False),
)
scalars = st.one_of(numbers, texts, st.booleans())
values = st.recursive(
    scalars | st.none(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)
documents = st.one_of(st.dictionaries(st.sampled_from(NAMES), values, max_size=4), values)
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(tuple)
leaves = st.one_of(
    st.tuples(st.just("compare"), paths, st.sampled_from([*COMPARE]), numbers | texts),
    st.tuples(st.just("compare"), paths, st.sampled_from(["=", "<>"]), st.booleans()),
    st.tuples(st.just("in"), paths, st.lists(scalars | st.none(), min_size=1, max_size=4)),
    st.tuples(st.just("between"), paths, numbers | texts, numbers | texts),
    st.tuples(st.just("like"), paths, texts),
    st.tuples(st.sampled_from(["null", "missing", "bare"]), paths),
)
nodes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner),
        st.tuples(st.sampled_from(["and", "or"]), inner, inner, inner),
    ),
    max_leaves=6,
)


@given(nodes, st.lists(st.tuples(documents, st.booleans()), max_size=8))
@example(("compare", ("a",), ">", 10), [({"a": 11}, True), ({"a": "11"}, True), ({}, True), ([11], False)])
@example(("not", ("in", ("a",), [1, None])), [({"a": 2}, True)])
@example(("compare", ("a",), "=", 2**53 + 1), [({"a": 2**53}, True), ({"a": 2.0**53}, True)])
@example(("like", ("a",), "%_%"), [({"a": "\n"}, True), ({"a": ""}, True)])
def test_conditions_are_those_of_sql(node: tuple[Any, ...], written: list[tuple[Any, bool]]) -> None:
    rows = pa.table(
        {
            # With escapes in strings, or without.
            "value": pa.array([json.dumps(it, ensure_ascii=ascii_).encode() for it, ascii_ in written], pa.binary()),
            "datatype": pa.array(np.ones(len(written), dtype=np.uint8)),
        }
    )
    where = Where.parse(sql(node))
    assert where.met(rows).tolist() == [judge(node, document) is True for document, _ in written], where
    # What is no JSON has no fields.
    rows = rows.set_column(1, "datatype", pa.array(np.zeros(len(written), dtype=np.uint8)))
    assert where.met(rows).tolist() == [judge(node, MISSING) is True] * len(written)
