"""Fields of documents as typed columns, and what does not fit."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from headwater.errors import InvalidColumns
from headwater.kernels.machine_code import compile_kernels
from headwater.lake.column_values import ColumnDef, parse_columns, to_ddl
from headwater.lake.documents_merge import MergeRules
from headwater.lake.lake import LakeSettings
from headwater.lake.typed_columns import INFERRED_MAX, Parsed, TypedColumns
from support.cases import each
from support.lake_model import SmallLake, verify_model, with_columns
from support.machine import loaded_kernels


def parse(ddl: str, *documents: str | None) -> tuple[list[Any], list[str | None]]:
    columns = TypedColumns.from_ddl(ddl)
    parsed = columns.parse(pa.array(documents, pa.string()))
    assert [column.type for column in parsed.columns.values()] == columns.schema.types
    (values,) = parsed.columns.values()
    return values.to_pylist(), reasons(parsed, len(documents))


def reasons(parsed: Parsed, count: int) -> list[str | None]:
    """By document, where none has more than one."""
    found = dict(zip(parsed.misfits.rows.tolist(), parsed.misfits.reasons.to_pylist(), strict=True))
    assert len(found) == len(parsed.misfits)
    return [found.get(row) for row in range(count)]


@each(
    ("type_", "good", "bad"),
    [
        ("STRING", {'"a"': "a", '"\\u00e4\\n"': "ä\n", "7": "7", '{"b": [1]}': '{"b": [1]}'}, ['"\\ud800"']),
        ("BOOLEAN", {"true": True, "false": False}, ["1", '"true"', "[]"]),
        ("TINYINT", {"127": 127, "-128": -128}, ["128", "1.0", '"1"']),
        ("INT", {"2147483647": 2**31 - 1, "-0": 0}, ["2147483648", "1e3", "true"]),
        ("BIGINT", {"9223372036854775807": 2**63 - 1, "-9223372036854775808": -(2**63)}, ["9223372036854775808"]),
        (
            "DOUBLE",
            {"1": 1.0, "-2.5e3": -2500.0, "1e308": 1e308, "1e30": 1e30, "9007199254740993": 2.0**53},
            ["1e999", "9223372036854775808", "-100000000000000000000", '"1.0"', "null1"],
        ),
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
        (
            "MAP<STRING, INT>",
            {'{"\\u00e4": 1, "y": null}': [("ä", 1), ("y", None)], "{}": []},
            ['{"b": "x"}', '{"\\ud800": 1}', "[]"],
        ),
        (
            "ARRAY<STRUCT<b: ARRAY<INT>>>",
            {'[{"b": [1, 2]}, {}, null]': [{"b": [1, 2]}, {"b": None}, None]},
            ['[{"b": [1, 2]}, {"b": ["x"]}]', "[7]"],
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


def test_a_value_that_does_not_fit_nulls_its_own_column_only() -> None:
    texts = pa.array(['{"a": "x", "b": "y", "c": 1}', '{"a": 1, "b": "y"}', '{"a": 1, "c": [], "b": "\\ud800"}'])
    parsed = TypedColumns.from_ddl("a INT, b STRING, c INT").parse(texts)
    assert [column.to_pylist() for column in parsed.columns.values()] == [
        [None, 1, 1],
        ["y", "y", None],
        [1, None, None],
    ]
    assert parsed.misfits.rows.tolist() == [0, 2, 2]
    assert parsed.misfits.fields.to_pylist() == ["a", "b", "c"]
    assert parsed.misfits.reasons.to_pylist() == [
        "column a: INT can't hold a string like this",
        "column b: STRING can't hold a string like this",
        "column c: INT can't hold an array like this",
    ]


def test_tables_of_earlier_versions_null_all_columns_of_such_a_document() -> None:
    columns = replace(TypedColumns.from_ddl("a INT, b STRING"), is_whole_row=True)
    parsed = columns.parse(pa.array(['{"a": "x", "b": "y"}', '{"a": 1, "b": "y"}']))
    assert parsed.columns["b"].to_pylist() == [None, "y"]


def test_what_is_no_object_does_not_fit() -> None:
    _, reasons = parse("a INT", "[1]", "7", None, "{", "", '{"a": 1} x')
    assert reasons == [
        "it is JSON, but no object",
        "it is JSON, but no object",
        "it is not JSON",
        *["it is called JSON, but can't be read as such"] * 3,
    ]


def test_names_of_fields() -> None:
    assert parse("a INT", '{"a": 1, "a": 2}') == ([2], [None]), "of equal names the last counts"
    assert parse('`a"b\\c` INT', '{"a\\"b\\\\c": 5}', "{}") == ([5, None], [None, None])
    values, reasons = parse("name STRING", '{"n\\u0061me": "x"}', '{"name": "y"}', '{"n\\u0061me": "\\ud800"}')
    assert values == ["x", "y", None]
    assert reasons == [None, None, "column name: STRING can't hold a string like this"]


def test_many_documents_in_chunks() -> None:
    texts = [f'{{"a": {number}}}' if number % 1000 else '{"a": []}' for number in range(150_000)]
    chunks = pa.chunked_array([texts[:70_001], texts[70_001:]])
    parsed = TypedColumns.from_ddl("a BIGINT").parse(chunks)
    assert parsed.columns["a"].to_pylist() == [number if number % 1000 else None for number in range(150_000)]
    assert parsed.misfits.rows.tolist() == [*range(0, 150_000, 1000)]


@pytest.mark.parametrize("name", ["key", "DOCUMENT", "cas", "vbucket_group", "xattrs"])
def test_the_table_has_columns_of_its_own(name: str) -> None:
    with pytest.raises(InvalidColumns, match="of its own"):
        TypedColumns.from_ddl(f"{name} STRING")


# Columns from what the documents have.


def inferred(*texts: str | None, before: TypedColumns | None = None) -> TypedColumns:
    """The columns that a merge of these documents leaves."""
    columns = before or TypedColumns(is_inferred=True)
    documents = pa.array(texts, pa.string())
    while wanted := columns.parse(documents, discovers=True).wanted:
        columns = columns.extended(wanted)
    return columns


@each(
    ("values", "type_"),
    [
        (["1", "null", "-3"], "BIGINT"),
        (["1", "2.5"], "DOUBLE"),
        (["[1, 9223372036854775808]", "[2.5]"], "ARRAY<STRING>"),
        (["[1e999, 1]"], "ARRAY<STRING>"),
        (['{"n\\u0000m": 1}'], "MAP<STRING, BIGINT>"),
        (["true", "false"], "BOOLEAN"),
        (['"a"', '"2024-01-01"'], "STRING"),
        (['"2024-01-01"', '"2024-02-29"'], "DATE"),
        (['"2024-01-01"', '"2024-02-30"'], "STRING"),
        (['"2024-01-01T10:00:00Z"', '"2024-01-01 10:00:00.123456+02:00"'], "TIMESTAMP"),
        (["1", '"a"'], "STRING"),
        (["[1, null]", "[]"], "ARRAY<BIGINT>"),
        (["[]"], "ARRAY<STRING>"),
        (['[1, "a"]'], "ARRAY<STRING>"),
        (['[{"b": 1}, {"c": [true]}]'], "ARRAY<STRUCT<b: BIGINT, c: ARRAY<BOOLEAN>>>"),
        (['{"b": 1}', '{"c": "2024-01-01", "b": 1.5}', '{"d": null}'], "STRUCT<b: DOUBLE, c: STRING, d: STRING>"),
        (['{"b": 1, "B": 2}'], "MAP<STRING, BIGINT>"),
        (["{{{}}}".format(", ".join(f'"user-{n}": {n}' for n in range(65)))], "MAP<STRING, BIGINT>"),
        (["{}"], "STRING"),
        (["[[[[[1]]]]]"], "ARRAY<ARRAY<ARRAY<ARRAY<STRING>>>>"),
        (["{}", "[]"], "STRING"),
    ],
)
def test_the_type_of_a_field(values: list[str], type_: str) -> None:
    documents = [f'{{"a": {value}}}' for value in values]
    columns = inferred(*documents)
    assert columns.ddl == f"a {type_}"
    parsed = columns.parse(pa.array(documents))
    assert not len(parsed.misfits)
    assert parsed.columns["a"].null_count == values.count("null")


def test_fields_without_a_column() -> None:
    names = ("N", "key", "bad name", "n\\u0000m", "\\ud800", "x" * 256)
    members = ", ".join(f'"{name}": 2' for name in names)
    texts = [f'{{"n": 1, "none": null, {members}, "\\u00e4": 1}}', "7", "{", None]
    columns = inferred(*texts)
    assert columns.ddl == "n BIGINT, `ä` BIGINT"
    assert reasons(columns.parse(pa.array(texts)), len(texts)) == [
        None,
        None,
        "it is called JSON, but can't be read as such",
        None,
    ]


@each(
    ("first", "then", "added", "values"),
    [
        ("1", "2.5", "a_double DOUBLE", 2.5),
        ("1", "1e30", "a_double DOUBLE", 1e30),
        ('"2024-01-01"', '"2024-01-01T01:00:00Z"', "a_timestamp TIMESTAMP", datetime(2024, 1, 1, 1, tzinfo=UTC)),
        ('"2024-01-01"', '"soon"', "a_string STRING", "soon"),
        ('"2024-01-01T01:00:00Z"', '"soon"', "a_string STRING", "soon"),
        ('{"b": 1}', '{"b": "x"}', "a_json STRING", '{"b": "x"}'),
        ("[1]", "[true]", "a_json STRING", "[true]"),
        ("1", '"x"', None, None),
        ("1", "9223372036854775808", None, None),
        ("1", "1e999", None, None),
        ("true", "1", None, None),
        ("[1]", "{}", None, None),
        ('"2024-01-01"', "5", None, None),
    ],
)
def test_a_value_that_is_too_wide_gets_a_column_of_its_own(
    first: str, then: str, added: str | None, values: Any
) -> None:
    before = inferred(f'{{"a": {first}}}')
    columns = inferred(f'{{"a": {then}}}', before=before)
    assert columns.ddl == before.ddl + (f", {added}" if added else "")
    parsed = columns.parse(pa.array([f'{{"a": {first}}}', f'{{"a": {then}}}']))
    assert [column.is_valid().to_pylist() for column in parsed.columns.values()] == [[True, False], [False, True]][
        : 2 if added else 1
    ]
    assert parsed.misfits.rows.tolist() == ([1] if added is None else [])
    assert added is None or parsed.columns[added.split()[0]][1].as_py() == values


def test_what_was_a_misfit_still_is_one_when_a_wider_column_was_added() -> None:
    before = inferred('{"a": "2024-01-01"}')
    columns = inferred('{"a": "soon"}', before=before)
    parsed = columns.parse(pa.array(['{"a": 5}']))
    assert parsed.columns["a_string"].to_pylist() == [None]
    assert parsed.misfits.reasons.to_pylist() == ["column a: DATE can't hold a number like this"]


def test_a_wider_column_takes_the_name_of_no_field() -> None:
    columns = inferred('{"a": 1.5}', before=inferred('{"a": 1, "a_double": "x"}'))
    assert [(column.name, column.field) for column in columns.definitions] == [
        ("a", "a"),
        ("a_double", "a_double"),
        ("a_double_2", "a"),
    ]


def test_a_table_gets_so_many_columns_and_no_more() -> None:
    texts = ["{{{}}}".format(", ".join(f'"f{part}_{n}": {n}' for n in range(200))) for part in (0, 1)]
    columns = inferred(texts[0])
    columns = inferred(texts[1], before=columns)
    assert len(columns.definitions) == INFERRED_MAX
    assert inferred('{"new": 1, "f0_0": 1.5}', before=columns) is columns
    nested = ["{{{}}}".format(", ".join(f'"m{n}": {n}' for n in range(60)))] * 20
    columns = inferred("{{{}}}".format(", ".join(f'"o{n}": {text}' for n, text in enumerate(nested))))
    assert [pa.types.is_struct(column.type) for column in columns.definitions] == [True] * 16 + [False] * 4


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
        ("a MAP<STRING, ARRAY<INT>>", "a", pa.map_(pa.string(), pa.list_(pa.int32()))),
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
        ("a VARIANT", "VARIANT is not a type"),
        ("a MAP<INT, INT>", "have type STRING"),
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
def test_what_is_wrong_is_refused(ddl: str, reason: str) -> None:
    with pytest.raises(InvalidColumns, match=reason) as caught:
        parse_columns(ddl)
    assert caught.value.hint


# --- after compiling ahead nothing is compiled any more, whatever is landed -------------------------------------------


def test_all_kernels_are_compiled_before_they_are_needed(tmp_path: Path) -> None:
    compile_kernels("headwater.lake", "headwater.protocol")
    warm = loaded_kernels()
    settings = with_columns(
        LakeSettings(merging=MergeRules(history=True)), {"*": "n INT, s STRING, d DOUBLE, o STRUCT<a: INT>"}
    )
    small = SmallLake(tmp_path, settings=settings)
    small.write(0, "a", "", value=b'{"n": 1, "s": "x\\n", "d": 1.5, "o": {"a": 1}}')
    small.write(1, "b", value=b"\xff")
    small.land()
    small.write(0, "a", value=b"[]")
    small.bucket.change(1, "deletion", 0, b"b")
    small.bucket.event("collection_created", 0)
    small.land()
    small.bucket.fail_over(0, 1)
    small.land()
    assert not verify_model(small.reopen(), small.bucket).findings.counts
    assert loaded_kernels() == warm
