"""Columns as SQL writes them."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.errors import InvalidColumns
from headwater.lake.typed_columns import ColumnDef, parse_columns, to_ddl


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
