"""Fields of documents as typed columns, and what does not fit."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import InvalidColumns
from headwater.lake.typed_columns import ColumnDef, TypedColumns, infer_columns, parse_columns, to_ddl
from support.cases import each


def parse(ddl: str, *documents: str | None) -> tuple[list[Any], list[str | None]]:
    columns = TypedColumns.from_ddl(ddl)
    parsed = columns.parse(pa.array(documents, pa.string()))
    assert [column.type for column in parsed.columns.values()] == columns.schema.types
    (values,) = parsed.columns.values()
    return values.to_pylist(), parsed.reasons.to_pylist()


@each(
    ("type_", "good", "bad"),
    [
        ("STRING", {'"a"': "a", '"\\u00e4\\n"': "ä\n", "7": "7", '{"b": [1]}': '{"b": [1]}'}, ['"\\ud800"']),
        ("BOOLEAN", {"true": True, "false": False}, ["1", '"true"', "[]"]),
        ("TINYINT", {"127": 127, "-128": -128}, ["128", "1.0", '"1"']),
        ("INT", {"2147483647": 2**31 - 1, "-0": 0}, ["2147483648", "1e3", "true"]),
        ("BIGINT", {"9223372036854775807": 2**63 - 1, "-9223372036854775808": -(2**63)}, ["9223372036854775808"]),
        ("DOUBLE", {"1": 1.0, "-2.5e3": -2500.0, "1e308": 1e308}, ["1e999", '"1.0"', "null1"]),
        ("FLOAT", {"0.5": 0.5}, ["1e300", "[]"]),
        ("DECIMAL(5,2)", {"1.25": Decimal("1.25"), "3": Decimal("3.00")}, ["1.255", "10000", '"1"']),
        ("DATE", {'"2024-02-29"': date(2024, 2, 29)}, ['"2023-02-29"', '"today"', "20240229"]),
        (
            "TIMESTAMP",
            {
                '"2024-02-29T12:00:00Z"': datetime(2024, 2, 29, 12, tzinfo=UTC),
                '"2024-02-29T12:00:00.5+02:00"': datetime(2024, 2, 29, 10, 0, 0, 500_000, tzinfo=UTC),
                '"2024-02-29 12:00:00"': datetime(2024, 2, 29, 12, tzinfo=UTC),
                '"2024-02-29"': datetime(2024, 2, 29, tzinfo=UTC),
            },
            ['"noon"', "1709208000"],
        ),
        ("ARRAY<INT>", {"[1, null, 3]": [1, None, 3], "[]": [], "[\n1\n]": [1]}, ["[1.5]", '["a"]', "1", "{}"]),
        (
            "STRUCT<b: INT, c: STRING>",
            {'{"b": 1, "d": 5}': {"b": 1, "c": None}, "{}": {"b": None, "c": None}},
            ['{"b": "x"}', "[]"],
        ),
    ],
)  # fmt: skip
def test_values_of_a_type(type_: str, good: dict[str, Any], bad: list[str]) -> None:
    texts = [*good, *bad]
    values, reasons = parse(f"a {type_}", *(f'{{"z": 1, "a": {text}}}' for text in texts))
    assert values == [*good.values(), *(None for _ in bad)]
    assert [reason is None for reason in reasons] == [True] * len(good) + [False] * len(bad)


@each("type_", ["STRING", "INT", "DOUBLE", "DATE", "TIMESTAMP", "BOOLEAN", "ARRAY<INT>", "DECIMAL"])
def test_what_is_missing_or_null_is_null_and_fits(type_: str) -> None:
    assert parse(f"a {type_}", "{}", '{"a": null}', '{"b": 1}') == ([None] * 3, [None] * 3)


def test_a_required_field_must_be_there() -> None:
    values, reasons = parse("a INT NOT NULL", "{}", '{"a": null}', '{"a": 1}')
    assert values == [None, None, 1]
    assert reasons == ["column a: it must not be missing or null"] * 2 + [None]


def test_a_document_that_does_not_fit_has_no_typed_column_at_all() -> None:
    parsed = TypedColumns.from_ddl("a INT, b STRING").parse(pa.array(['{"a": "x", "b": "y"}', '{"a": 1, "b": "y"}']))
    assert parsed.columns["b"].to_pylist() == [None, "y"]
    assert parsed.reasons.to_pylist() == ["column a: INT can't hold a string like this", None]


def test_what_is_no_object_does_not_fit() -> None:
    _, reasons = parse("a INT", "[1]", "7", None, "{", "", '{"a": 1} x')
    assert reasons == [
        "it is JSON, but no object",
        "it is JSON, but no object",
        "it is not JSON",
        *["it is called JSON, but can't be read as such"] * 3,
    ]


def test_of_a_field_that_is_there_twice_the_last_counts() -> None:
    assert parse("a INT", '{"a": 1, "a": 2}') == ([2], [None])


def test_names_with_escapes_in_them_are_understood() -> None:
    values, reasons = parse("name STRING", '{"n\\u0061me": "x"}', '{"name": "y"}', '{"n\\u0061me": "\\ud800"}')
    assert values == ["x", "y", None]
    assert reasons == [None, None, "column name: STRING can't hold a string like this"]


def test_names_that_only_escapes_can_write() -> None:
    assert parse('`a"b\\c` INT', '{"a\\"b\\\\c": 5}', "{}") == ([5, None], [None, None])


def test_many_documents_in_chunks() -> None:
    texts = [f'{{"a": {number}}}' if number % 1000 else '{"a": []}' for number in range(150_000)]
    chunks = pa.chunked_array([texts[:70_001], texts[70_001:]])
    parsed = TypedColumns.from_ddl("a BIGINT").parse(chunks)
    assert parsed.columns["a"].to_pylist() == [number if number % 1000 else None for number in range(150_000)]
    assert parsed.reasons.null_count == 150_000 - 150


@pytest.mark.parametrize("name", ["key", "DOCUMENT", "cas", "vbucket_group", "xattrs"])
def test_the_table_has_columns_of_its_own(name: str) -> None:
    with pytest.raises(InvalidColumns, match="of its own"):
        TypedColumns.from_ddl(f"{name} STRING")


def test_columns_are_inferred_from_documents() -> None:
    columns = infer_columns(
        [
            '{"n": 1, "x": 1, "s": "a", "f": true, "m": 1, "o": {}, "key": 1, "bad name": 1, "none": null}',
            '{"n": 2, "x": 1.5, "N": 3, "m": "a"}',
            "no json",
            None,
            "[]",
        ]
    )
    assert columns is not None
    assert columns.ddl == "n BIGINT, x DOUBLE, s STRING, f BOOLEAN, m STRING, o STRING"
    assert infer_columns(["[]", "7"]) is None


# Columns as SQL writes them.


@each(
    ("ddl", "name", "type_"),
    [
        ("a STRING", "a", pa.string()),
        ("a boolean", "a", pa.bool_()),
        ("a TINYINT", "a", pa.int8()),
        ("a SMALLINT", "a", pa.int16()),
        ("a INT", "a", pa.int32()),
        ("a BIGINT", "a", pa.int64()),
        ("a LONG", "a", pa.int64()),
        ("a FLOAT", "a", pa.float32()),
        ("a DOUBLE", "a", pa.float64()),
        ("a DATE", "a", pa.date32()),
        ("a TIMESTAMP", "a", pa.timestamp("us", tz="UTC")),
        ("a DECIMAL", "a", pa.decimal128(10, 0)),
        ("a DECIMAL(12)", "a", pa.decimal128(12, 0)),
        ("a DECIMAL( 12 , 2 )", "a", pa.decimal128(12, 2)),
        ("a ARRAY<INT>", "a", pa.list_(pa.int32())),
        ("`first``name ä` STRING", None, None),
        ("`first-name` STRING", "first-name", pa.string()),
        (
            "a STRUCT<b: INT, c ARRAY<STRUCT<d: STRING>>>",
            "a",
            pa.struct([("b", pa.int32()), ("c", pa.list_(pa.struct([("d", pa.string())])))]),
        ),
    ],
)
def test_types(ddl: str, name: str | None, type_: pa.DataType | None) -> None:
    if name is None:
        with pytest.raises(InvalidColumns, match="can't have a column"):
            parse_columns(ddl)
        return
    assert parse_columns(ddl) == [ColumnDef(name, type_)]
    assert parse_columns(to_ddl(parse_columns(ddl))) == parse_columns(ddl)


def test_several_columns_some_of_them_required() -> None:
    columns = parse_columns(" name STRING NOT NULL,\n age int , tags ARRAY<STRING>")
    assert [(column.name, column.is_required) for column in columns] == [
        ("name", True),
        ("age", False),
        ("tags", False),
    ]
    assert to_ddl(columns) == "name STRING NOT NULL, age INT, tags ARRAY<STRING>"


@each(
    ("ddl", "reason"),
    [
        ("", "the name of a column"),
        ("a", "a type"),
        ("a STRING b INT", "a comma or the end"),
        ("a STRING,", "the name of a column"),
        ("a VARIANT", "VARIANT is no type"),
        ("a MAP<STRING, INT>", "MAP is no type"),
        ("a STRING, A INT", "twice"),
        ("a DECIMAL(39,0)", r"DECIMAL\(39,0\)"),
        ("a DECIMAL(3,4)", r"DECIMAL\(3,4\)"),
        ("a DECIMAL(x)", "a number"),
        ("a ARRAY<INT", "`>`"),
        ("a STRING NOT", "NULL"),
        ("a " + "ARRAY<" * 20 + "INT" + ">" * 20, "nested"),
        ("a;b STRING", "a type"),
    ],
)
def test_what_is_wrong_is_told(ddl: str, reason: str) -> None:
    with pytest.raises(InvalidColumns, match=reason) as caught:
        parse_columns(ddl)
    assert caught.value.hint
