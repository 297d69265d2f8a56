"""Any document, key and name that JSON and Couchbase permit is landed, and readers that are not ours find it again.

What a column must hold is said here once more, in Python's own JSON: nothing of the code that fills columns is used.
"""

from __future__ import annotations

import json
import math
import operator
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.types as types
from deltalake import DeltaTable
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from headwater.lake.lake import LakeSettings
from headwater.lake.layout import DocumentForm, folder_name
from headwater.lake.variants import json_texts
from support.lake_model import SmallLake, document_text, is_same, place_of, said, verify_model

TABLES = 3
OWN = {
    *("key", "key_bytes", "document", "content", "datatype", "flags", "expiry", "cas", "seqno", "rev", "vbucket"),
    *("vbuuid", "collection_id", "changed_at", "xattrs", "vbucket_group"),
}
LEGAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-%"

# --- anything ---------------------------------------------------------------------------------------------------------

texts = st.text(st.characters(codec=None), max_size=12)
"""Halves of pairs of surrogates are among them: JSON can write them."""
words = st.sampled_from(
    [
        *("n", "N", "a", "ä", "", " ", "a.b", "a`b", 'a"b', "a\\b", "a\0b", "\0", "\n", "a\tb", "\ud800", "key", "KEY"),
        *("n_double", "n_json", "document", "min.n", "İ", "ſ", "\u212a", "key_value", "element", "x,y", "$", "x" * 300),
    ]
)
names = words | words | texts
strings = st.one_of(texts, words, st.sampled_from(["2024-01-01", "2024-02-30", "2024-01-01T01:00:00Z", "y" * 5000]))
numbers = st.one_of(
    st.integers(-5, 5).map(str),
    st.integers(-(2**70), 2**70).map(str),
    st.sampled_from([str(2**53 + 1), str(2**63), str(2**63 - 1), str(-(2**63)), str(2**64), "1" + "0" * 400]),
    st.sampled_from(["1.5", "-0", "-0.0", "1e400", "-1E+999", "1e-999", "1e23", "0.1", "123456789012345678901.5"]),
)


def _written(text: str) -> st.SearchStrategy[str]:
    """A text as JSON writes it: with escapes for all that is not ASCII, or only where there must be some."""
    short = json.dumps(text, ensure_ascii=False)
    return st.just(json.dumps(text)) if not _is_character(text) else st.sampled_from([json.dumps(text), short])


def _is_character(text: str) -> bool:
    return not any(0xD800 <= ord(sign) <= 0xDFFF for sign in text)


def _object(value: st.SearchStrategy[str], size: int) -> st.SearchStrategy[str]:
    member = st.builds("{}: {}".format, names.flatmap(_written), value)
    return st.lists(member, max_size=size).map(lambda members: "{" + ", ".join(members) + "}")


scalars = st.one_of(numbers, strings.flatmap(_written), st.sampled_from(["true", "false", "null"]))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3).map(lambda items: f"[{','.join(items)}]") | _object(inner, 4),
    max_leaves=8,
)
deep = st.integers(5, 200).map(lambda depth: f'{{"deep": {"[" * depth}{"]" * depth}, "n": {{"a": {"{" * 0}1}}}}')
wide = st.just("{" + ", ".join(f'"field {number}": 1, "f{number}": {number}' for number in range(300)) + "}")
documents = st.one_of(_object(values, 6), _object(values, 6), _object(values, 6), values, deep, wide)
contents = st.one_of(documents.map(str.encode), st.sampled_from([b"", b"{", b"\xff\0", b'{"n": 1} x', b'"\xff"']))
keys = st.one_of(st.sampled_from([b"a", b"b", b"a\0b"]), st.binary(min_size=1, max_size=250))
name = st.builds(operator.add, st.sampled_from(LEGAL[:-1]), st.text(LEGAL, max_size=8))
long_name = st.builds(operator.mul, name, st.just(251)).map(lambda it: it[:251])
tables = st.lists(st.tuples(name | long_name, name | long_name), min_size=TABLES, max_size=TABLES, unique=True)
writes = st.lists(st.tuples(st.integers(0, TABLES - 1), st.integers(0, 3), keys, contents, st.booleans()), max_size=20)


# --- what a column must hold ------------------------------------------------------------------------------------------


class Real(str):
    """A number with a fraction or an exponent, as it is written."""


def parsed(text: str) -> Any:
    """Of equal names the last counts. Raises `ValueError` for what is no JSON."""
    return json.loads(text, parse_float=Real, parse_constant=_no_constant)


def _no_constant(text: str) -> Any:
    raise ValueError(text)


def is_taken(value: Any, type_: pa.DataType) -> bool:
    """Whether a column of this type holds a value of JSON."""
    if value is None:
        return True
    is_whole, is_real = type(value) is int, isinstance(value, Real)
    if types.is_boolean(type_):
        return isinstance(value, bool)
    if types.is_int64(type_):
        return is_whole and -(2**63) <= value < 2**63
    if types.is_float64(type_):
        return (is_real and math.isfinite(float(value))) or (is_whole and -(2**63) <= value < 2**63)
    if types.is_string(type_):
        return not isinstance(value, str) or is_real or _is_character(value)
    if types.is_list(type_):
        return isinstance(value, list) and all(is_taken(it, type_.value_type) for it in value)
    if types.is_map(type_):
        return isinstance(value, dict) and all(
            _is_character(k) and is_taken(v, type_.item_type) for k, v in value.items()
        )
    if types.is_struct(type_):
        return isinstance(value, dict) and all(is_taken(value.get(it.name), it.type) for it in type_)
    return isinstance(value, str) and not is_real and not isinstance(_time_of(value, type_), Exception)


def _time_of(value: str, type_: pa.DataType) -> Any:
    from datetime import date, datetime

    try:
        if types.is_date(type_):
            return date.fromisoformat(value) if len(value) == 10 else ValueError(value)
        return datetime.fromisoformat(value)
    except ValueError as error:
        return error


def holds(held: Any, value: Any, type_: pa.DataType) -> bool:
    """Whether what a reader has found is a value that is taken."""
    if value is None:
        return held is None
    if types.is_string(type_):
        if isinstance(value, str) and not isinstance(value, Real):
            return held == value
        return parsed(held) == value
    if types.is_float64(type_):
        return held == float(value)
    if types.is_list(type_):
        return len(held) == len(value) and all(holds(h, v, type_.value_type) for h, v in zip(held, value, strict=True))
    if types.is_map(type_):
        found = dict(held)
        return (
            len(found) == len(held)
            and found.keys() == value.keys()
            and all(holds(found[k], v, type_.item_type) for k, v in value.items())
        )
    if types.is_struct(type_):
        return all(holds(held[it.name], value.get(it.name), it.type) for it in type_)
    return held == value if not types.is_temporal(type_) else held is not None


def offers(first: pa.DataType, value: Any) -> bool:
    """Whether a value that the first column of a field does not take is one for a wider column."""
    if types.is_int64(first):
        return type(value) is int or isinstance(value, Real)
    if types.is_temporal(first):
        return isinstance(value, str) and not isinstance(value, Real)
    if types.is_list(first):
        return isinstance(value, list)
    return isinstance(value, dict) and (types.is_struct(first) or types.is_map(first))


def check_columns(table: pa.Table, rejects: list[tuple[Any, str | None]], fields: dict[str, list[str]]) -> None:
    """Every value is in the first column of its field that takes it, or in `rejects`."""
    expected: list[tuple[Any, str | None]] = []
    seen: set[str] = set()
    for row in table.to_pylist():
        try:
            document = {} if row["document"] is None else parsed(row["document"])
        except (ValueError, RecursionError):
            expected.append((place_of(row), None))
            document = {}
        document = document if isinstance(document, dict) else {}
        seen |= {it for it, value in document.items() if value is not None}
        for field, columns in fields.items():
            value, first = document.get(field), table.schema.field(columns[0]).type
            taking = [
                it
                for number, it in enumerate(columns)
                if is_taken(value, table.schema.field(it).type) and (number == 0 or offers(first, value))
            ]
            if not taking and value is not None:
                expected.append((place_of(row), field))
            for column in columns:
                held, type_ = row[column], table.schema.field(column).type
                if value is not None and taking[:1] == [column]:
                    assert holds(held, value, type_), (field, column, type_, value, held)
                else:
                    assert held is None, (field, column, type_, value, held)
    assert sorted(rejects, key=repr) == sorted(expected, key=repr)
    if len(table.schema.names) < 250:
        taken = {it.lower() for it in table.schema.names}
        left = {it for it in seen - fields.keys() if it.lower() not in taken}
        assert all(not it or set(it) & set(" ,;{}()\n\t=\0") or len(it) > 60 or not _is_character(it) for it in left), (
            left
        )


def read(directory: Path) -> pa.Table:
    """By delta-rs; and DuckDB must be able to read the same rows."""
    table = DeltaTable(directory)
    rows = table.to_pyarrow_table()
    uris = table.file_uris()
    if uris:
        found = duckdb.read_parquet(uris, union_by_name=True).to_arrow_table()
        assert found.num_rows == rows.num_rows
        columns = ["key", "key_bytes", "document"]
        assert sorted(found.select(columns).to_pylist(), key=repr) == sorted(rows.select(columns).to_pylist(), key=repr)
    return rows


def rejected(directory: Path) -> Iterator[tuple[Any, str | None]]:
    if (directory / "_delta_log").exists():
        yield from ((place_of(row), row["field"]) for row in read(directory).to_pylist())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(tables, writes, writes, st.sampled_from([*DocumentForm]))
@example(
    [("shop", "x%20y"), ("s" * 251, "c" * 251), ("s" * 251, "c%" * 125)],
    [(0, 0, b"a", b'{"n\\u0000m": 1}', True), (1, 1, b"b\0", b'{"m": {"a": 1, "A": 1, "a": 2}}', True)],
    [(0, 0, b"a", b'{"n": 123456789012345678901}', True), (2, 3, b"\xff", b'{"n": 1e400, "n": 2.5}', True)],
    DocumentForm.VARIANT,
)
def test_anything_is_landed_and_found_again(
    names: list[tuple[str, str]],
    first: list[tuple[int, int, bytes, bytes, bool]],
    second: list[tuple[int, int, bytes, bytes, bool]],
    form: DocumentForm,
) -> None:
    directory = Path(tempfile.mkdtemp(prefix="lake-anything-"))
    try:
        small = SmallLake(directory, settings=LakeSettings(document=form))
        small.bucket.names |= {8 + number: name for number, name in enumerate(names)}
        for part in (first, second):
            for table, vbucket, key, content, is_json in part:
                small.bucket.change(vbucket, "mutation", 8 + table, key, content, is_json=is_json)
            small.land()
        assert [table.reason for table in small.lake.aside.tables] == []
        live = small.bucket.sent_documents()
        for number, (scope, collection) in enumerate(names):
            folder = folder_name(f"{scope}.{collection}")
            expected = {place: change for place, change in live.items() if place[1] == 8 + number}
            if not (directory / "documents" / folder).exists():
                assert not expected
                continue
            rows = read(directory / "documents" / folder)
            found = {place_of(row): row for row in rows.to_pylist()}
            assert found.keys() == expected.keys()
            assert len(found) == rows.num_rows
            for place, row in found.items():
                text, value = document_text(row), expected[place].value
                if form is DocumentForm.STRING or text is None:
                    assert (row["content"] if text is None else text.encode()) == value
                else:
                    assert is_same(said(text), said(value or b""))
            if form is DocumentForm.VARIANT:
                at = rows.schema.get_field_index("document")
                rows = rows.set_column(at, "document", json_texts(rows["document"]))
                told = [
                    (it, document_text(found[place_of(row)])) for row in rows.to_pylist() if (it := row["document"])
                ]
                assert all(is_same(said(ours), said(theirs or "")) for ours, theirs in told)
            fields: dict[str, list[str]] = {}
            for column in DeltaTable(directory / "documents" / folder).schema().fields:
                if column.name not in OWN:
                    fields.setdefault(column.metadata.get("headwater.field", column.name), []).append(column.name)
            check_columns(rows, [*rejected(directory / "rejects" / folder)], fields)
        assert verify_model(small.lake, small.bucket).findings.first() == ()
    finally:
        shutil.rmtree(directory)
