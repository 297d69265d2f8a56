"""The kernels of the table layer against what Python does one by one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import event, example, given
from hypothesis import strategies as st

from headwater.lake.column_values import is_column_name
from headwater.lake.json_fields import Form, JsonKind, find_fields, integers
from headwater.lake.key_index import KeyIndex, KeyPlaces, key_hashes, new_secret, packed_places
from headwater.lake.typed_columns import ColumnGrowth, Misfits, TypedColumns, UnsettledColumns

rows = st.lists(
    st.tuples(st.binary(max_size=3).map(lambda it: it * len(it) ** 2), st.integers(0, 20), st.integers(0, 2)),
    max_size=60,
)


@given(rows, rows)
def test_the_newest_row_is_found(inserted: list[tuple[bytes, int, int]], asked: list[tuple[bytes, int, int]]) -> None:
    index = KeyIndex(*columns_of(inserted))
    newest: dict[tuple[bytes, int], int] = {}
    first: dict[tuple[bytes, int], int] = {}
    for row, (key, seqno, beside) in enumerate(inserted):
        place = key, beside
        first.setdefault(place, row)
        if place not in newest or seqno >= inserted[newest[place]][1]:
            newest[place] = row
    assert np.flatnonzero(index.newest).tolist() == sorted(newest.values())
    assert index.documents.tolist() == [first[key, beside] for key, _, beside in inserted]
    wanted, _, beside = columns_of(asked)
    assert index.find(wanted, beside).tolist() == [newest.get((key, it), -1) for key, _, it in asked]
    held = {key for key, _, _ in inserted}
    assert {*index.maybe(wanted).tolist()} >= {row for row, (key, _, _) in enumerate(asked) if key in held}


def test_many_keys_of_a_slice() -> None:
    keys = pa.array([b"key-%d" % (number % 5000) for number in range(20_001)]).slice(1)
    index = KeyIndex(keys, np.arange(20_000))
    assert np.flatnonzero(index.newest).tolist() == list(range(15_000, 20_000))
    others = pa.array([b"key-%d" % number for number in range(5000, 15_000)])
    assert len(index.maybe(others)) < 500, "nearly all keys that are not there are passed over"


@given(rows, rows)
@example([(b"", 1, 0)] * 300, [(b"", 1, 0)])
def test_a_file_finds_all_rows_of_a_key(
    held: list[tuple[bytes, int, int]], asked: list[tuple[bytes, int, int]]
) -> None:
    keys, _, beside = columns_of(held)
    secret = new_secret()
    data = packed_places(key_hashes(keys, beside, secret), secret)
    found = KeyPlaces(len(held), lambda ranges: [data[start:end] for start, end in ranges]).find(
        KeyIndex(*columns_of(asked))
    )
    wanted = {(key, space) for key, _, space in asked}
    assert found.tolist() == [row for row, (key, _, space) in enumerate(held) if (key, space) in wanted]


def test_a_few_keys_of_many_are_found_in_a_few_blocks() -> None:
    keys, secret, read_bytes = pa.array([b"key-%d" % number for number in range(200_000)]), new_secret(), 0
    data = packed_places(key_hashes(keys, np.zeros(len(keys)), secret), secret)

    def read(ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        nonlocal read_bytes
        read_bytes += sum(end - start for start, end in ranges)
        return [data[start:end] for start, end in ranges]

    wanted = [7, 77_777, 123_456, 199_999]
    asked = pa.array([b"other", *(b"key-%d" % number for number in wanted)])
    assert KeyPlaces(len(keys), read).find(KeyIndex(asked, np.arange(len(asked)))).tolist() == wanted
    assert read_bytes < len(data) / 50


def columns_of(inserted: list[tuple[bytes, int, int]]) -> tuple[Any, Any, Any]:
    keys = pa.array([key for key, _, _ in inserted], pa.binary())
    seqnos, beside = (np.array([row[i] for row in inserted], dtype=np.int64) for i in (1, 2))
    return keys, seqnos, beside


NAMES = ["n", "s", "ä", "long name", ""]
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    # Long ones are looked at in steps of 64 bytes.
    | st.builds(lambda length, text: "x" * length + text, st.integers(56, 200), st.text(max_size=3)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(st.sampled_from([*NAMES, "other", "n2"]), json_values, max_size=6)
spaces = st.sampled_from([None, 1, 3])


def kind_of(value: Any) -> set[JsonKind]:
    if value is None:
        return {JsonKind.NULL}
    if isinstance(value, bool):
        return {JsonKind.TRUE if value else JsonKind.FALSE}
    if isinstance(value, int | float):
        return {JsonKind.INTEGER if isinstance(value, int) else JsonKind.REAL}
    if isinstance(value, str):
        return {JsonKind.STRING, JsonKind.ESCAPED_STRING}
    return {JsonKind.OBJECT if isinstance(value, dict) else JsonKind.ARRAY}


@given(st.lists(st.tuples(objects, spaces, st.booleans()), max_size=8))
def test_fields_lie_where_they_are_found(documents: list[tuple[dict[str, Any], int | None, bool]]) -> None:
    texts = [json.dumps(document, indent=indent, ensure_ascii=ascii) for document, indent, ascii in documents]
    fields = find_fields(pa.array(texts, pa.string()), NAMES)
    for row, (document, _, _) in enumerate(documents):
        assert fields.forms[row] == Form.OBJECT
        assert fields.others[row] == sum(document.get(name) is not None for name in ("other", "n2"))
        for number, name in enumerate(NAMES):
            kind = JsonKind(fields.kinds[number, row])
            if name not in document:
                assert kind == JsonKind.MISSING
                continue
            assert kind in kind_of(document[name])
            text = fields.data[fields.starts[number, row] : fields.ends[number, row]].tobytes().decode()
            is_string = kind in (JsonKind.STRING, JsonKind.ESCAPED_STRING)
            assert json.loads(f'"{text}"' if is_string else text) == document[name]


@given(st.lists(st.text(alphabet='{}[]":,\\ntrue-1.e \n', max_size=12) | st.text(max_size=6), max_size=8))
def test_what_is_no_json_is_never_taken_for_an_object_with_fields(texts: list[str]) -> None:
    """The walk trusts the server that called it JSON, so it may pass what is odd; but it stays inside the text."""
    fields = find_fields(pa.array(texts, pa.string()), ["n", ""])
    bounds = np.cumsum([0, *(len(text.encode()) for text in texts)])
    for row in range(len(texts)):
        found = fields.kinds[:, row] != JsonKind.MISSING
        assert (fields.starts[found, row] >= bounds[row]).all()
        assert (fields.ends[found, row] <= bounds[row + 1]).all()
        assert (fields.starts[found, row] <= fields.ends[found, row]).all()


@given(st.lists(st.integers(-(2**70), 2**70) | st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1]), max_size=9))
def test_integers_are_read_as_far_as_they_fit(values: list[int]) -> None:
    text = "".join(map(str, values)).encode()
    ends = np.cumsum([len(str(value)) for value in values]).astype(np.int64)
    starts = ends - [len(str(value)) for value in values]
    data = np.frombuffer(text, dtype=np.uint8)
    found, fits = integers(data, starts.astype(np.int64), ends, np.ones(len(values), dtype=np.bool_))
    assert fits.tolist() == [-(2**63) <= value < 2**63 for value in values]
    assert found[fits].tolist() == [value for value in values if -(2**63) <= value < 2**63]


@given(st.lists(st.tuples(objects, st.booleans()), max_size=8))
@example([({"n": 2**63 + 1}, False)])
def test_columns_hold_what_the_documents_have(documents: list[tuple[dict[str, Any], bool]]) -> None:
    """Columns that were inferred from half of the documents, against values that Python has read."""
    texts = pa.array([json.dumps(it, ensure_ascii=ascii) for it, ascii in documents], pa.string())
    columns = TypedColumns(is_inferred=True)
    for part in (texts.slice(0, len(texts) // 2), texts):
        while wanted := columns.parse(part, discovers=True).wanted:
            columns = columns.extended(wanted)
    parsed = columns.parse(texts)
    listed = [*zip(parsed.misfits.rows.tolist(), parsed.misfits.fields.to_pylist(), strict=True)]
    for row, (document, _) in enumerate(documents):
        misfits = []
        for field, found in columns.by_field.items():
            value = document.get(field)
            held = [it for column in found if (it := parsed.columns[column.name][row].as_py()) is not None]
            if held:
                (one,) = held
                assert is_as_read(one, value), (field, found)
            elif value is not None:
                misfits.append(field)
        assert [field for at, field in listed if at == row] == misfits
        fields = {name for name, value in document.items() if value is not None and is_column_name(name)}
        assert fields <= {*columns.by_field}


@given(st.lists(st.lists(objects, max_size=6), max_size=4))
def test_columns_that_grow_with_the_documents_are_those_of_a_look_at_all(parts: list[list[dict[str, Any]]]) -> None:
    nothing = TypedColumns(is_inferred=True)
    growth = ColumnGrowth(nothing, sample_rows=1)
    chunks = [pa.chunked_array([[json.dumps(it) for it in part]], pa.string()) for part in parts]
    texts = pa.array([json.dumps(it) for part in parts for it in part], pa.string())
    try:
        parsed = [growth.parse(chunk) for chunk in chunks]
    except UnsettledColumns:
        return
    event("settled")
    assert {*growth.columns.definitions} == {*nothing.extended(nothing.parse(texts, discovers=True).wanted).definitions}
    whole = growth.columns.parse(texts)
    for name, column in whole.columns.items():
        found = zip(parsed, chunks, strict=True)
        held = [part.columns.get(name, pa.nulls(len(chunk))).to_pylist() for part, chunk in found]
        assert [*chain(*held)] == column.to_pylist()
    starts = np.cumsum([0, *map(len, chunks)])[:-1]
    joined = Misfits.joined([part.misfits for part in parsed], starts.tolist())
    assert joined.rows.tolist() == whole.misfits.rows.tolist()
    assert joined.reasons == whole.misfits.reasons


def is_as_read(held: Any, value: Any) -> bool:
    """Whether a column holds the value of a document: as it is, or as JSON text."""
    if isinstance(value, dict) and isinstance(held, dict):
        # Members that the struct does not have are in the text only.
        return all(is_as_read(member, value.get(name)) for name, member in held.items())
    if isinstance(value, dict) and isinstance(held, list):
        return len(held) == len(value) and all(is_as_read(member, value[name]) for name, member in held)
    if isinstance(value, list) and isinstance(held, list):
        return len(held) == len(value) and all(map(is_as_read, held, value))
    if isinstance(held, str) and not isinstance(value, str):
        return value is not None and bool(json.loads(held) == value)
    if isinstance(held, float) and isinstance(value, int):
        # Of whole numbers beyond 53 bits DOUBLE has the nearest, as of fractions.
        return held == float(value)
    return type(held) is type(value) and bool(held == value)
