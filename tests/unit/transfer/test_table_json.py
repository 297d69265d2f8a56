"""Arrow columns as JSON, held against the standard library's idea of the same rows."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.errors import InvalidInput
from headwater.transfer.tables import objects, objects_of
from support.cases import case


def rows_of(values: list[Any], type_: pa.DataType) -> list[Any]:
    batch = pa.RecordBatch.from_arrays([pa.array(values, type_)], names=["x"])
    return [json.loads(text)["x"] for text in objects_of(batch).to_pylist()]


@case(pa.null(), [None], [None])
@case(pa.bool_(), [True, None, False], [True, None, False])
@case(pa.int8(), [-128, None], [-128, None])
@case(pa.uint64(), [2**64 - 1], [2**64 - 1])
@case(pa.float64(), [1.5, 1e300, None, 0.1], [1.5, 1e300, None, 0.1])
@case(pa.float64(), [float("nan"), float("inf"), float("-inf")], [None, None, None])
@case(pa.float16(), [1.5, None], [1.5, None])
@case(pa.decimal128(10, 2), [Decimal("12.50"), None], [12.5, None])
@case(pa.string(), ['a"b\\c\n\r\t\x01\x1f', "", None, "é🦊"], ['a"b\\c\n\r\t\x01\x1f', "", None, "é🦊"])
@case(pa.large_string(), ["a"], ["a"])
@case(pa.string_view(), ["a", None], ["a", None])
@case(pa.binary(), [b"\xff\x00", None, b""], ["/wA=", None, ""])
@case(pa.binary(2), [b"ab"], ["YWI="])
@case(pa.date32(), [datetime.date(2026, 1, 2), None], ["2026-01-02", None])
@case(pa.time32("s"), [datetime.time(1, 2, 3)], ["01:02:03"])
@case(pa.timestamp("s"), [datetime.datetime(2026, 1, 2, 3, 4, 5)], ["2026-01-02T03:04:05"])
@case(pa.timestamp("ms", "Europe/Vienna"), [1, None], ["1970-01-01T00:00:00.001Z", None])
@case(pa.dictionary(pa.int8(), pa.string()), ["a", None, "a"], ["a", None, "a"])
@case(pa.list_(pa.int32()), [[1, None], [], None], [[1, None], [], None])
@case(pa.large_list(pa.string()), [["a"], None], [["a"], None])
@case(pa.list_(pa.int8(), 2), [[1, 2], None, [3, 4]], [[1, 2], None, [3, 4]])
@case(pa.map_(pa.string(), pa.int8()), [[("k", 1), ('"', None)], [], None], [{"k": 1, '"': None}, {}, None])
@case(pa.struct([("a", pa.int8()), ("b", pa.string())]), [{"a": 1, "b": None}, None], [{"a": 1, "b": None}, None])
@case(
    pa.list_(pa.struct([("q", pa.list_(pa.int8()))])),
    [[{"q": [1]}, None], [{"q": None}]],
    [[{"q": [1]}, None], [{"q": None}]],
)
def test_types(type_: pa.DataType, values: list[Any], expected: list[Any]) -> None:
    assert rows_of(values, type_) == expected


def test_a_decimal_keeps_its_digits() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([Decimal("12.50")])], names=["x"])
    assert objects_of(batch).to_pylist() == ['{"x":12.50}']


@pytest.mark.parametrize("type_", [pa.duration("s"), pa.map_(pa.int8(), pa.int8()), pa.list_(pa.duration("s"))])
def test_what_has_no_form_is_named(type_: pa.DataType) -> None:
    batch = pa.RecordBatch.from_arrays([pa.nulls(1, type_)], names=["took"])
    with pytest.raises(InvalidInput, match="column 'took'"):
        objects_of(batch)


def test_names_are_escaped() -> None:
    batch = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=['a"b', "ö"])
    assert objects_of(batch).to_pylist() == ['{"a\\"b":1,"ö":2}']


def test_no_columns_and_no_rows() -> None:
    assert objects([], [], 2).to_pylist() == ["{}", "{}"]
    assert objects_of(pa.RecordBatch.from_pydict({"a": pa.array([], pa.string())})).to_pylist() == []


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "n": st.none() | st.integers(-(2**63), 2**63 - 1),
            "t": st.none() | st.text(),
            "l": st.none() | st.lists(st.none() | st.text(max_size=5), max_size=3),
            "s": st.none() | st.fixed_dictionaries({"b": st.none() | st.booleans()}),
        }
    ),
    max_size=8,
)
SCHEMA = pa.schema(
    [("n", pa.int64()), ("t", pa.string()), ("l", pa.list_(pa.string())), ("s", pa.struct([("b", pa.bool_())]))]
)


@given(ROWS, st.integers(0, 8), st.integers(0, 8))
def test_any_rows_and_any_slice_of_them(rows: list[dict[str, Any]], start: int, length: int) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA).slice(min(start, len(rows)), length)
    assert [json.loads(text) for text in objects_of(batch).to_pylist()] == rows[start : start + length]
