"""Batches of a reader, and batches that came by way of Spark, give the same columns."""

from __future__ import annotations

import pyarrow as pa
import pytest

from headwater.lake.layout import changes_schema, raw_keys, split_keys, to_change_columns

ROW = {
    "vbucket": 3, "vbuuid": 2**64 - 5, "seqno": 7, "rev": 2, "op": "mutation", "scope": "inventory",
    "collection": "hotel", "collection_id": 8, "key": b"k", "value": b"{}", "datatype": 1, "flags": 2**32 - 1,
    "expiry": 0, "cas": 2**63 + 1, "changed_at": None, "snapshot_start": 0, "snapshot_end": 9,
}  # fmt: skip
NAME = pa.dictionary(pa.int32(), pa.string())


def batch_of(types: dict[str, pa.DataType]) -> pa.RecordBatch:
    columns = {}
    for name, value in ROW.items():
        type_ = types.get(name, pa.uint64())
        column = pa.array([value], type_.value_type if pa.types.is_dictionary(type_) else type_)
        columns[name] = column.dictionary_encode().cast(type_) if pa.types.is_dictionary(type_) else column
    return pa.RecordBatch.from_pydict(columns)


READER_TYPES = {
    "vbucket": pa.uint16(), "op": pa.dictionary(pa.int8(), pa.string()), "scope": NAME, "collection": NAME,
    "collection_id": pa.uint32(), "key": pa.binary(), "value": pa.binary(), "datatype": pa.uint8(),
    "flags": pa.uint32(), "expiry": pa.uint32(), "changed_at": pa.timestamp("us", tz="UTC"),
}  # fmt: skip


def test_unsigned_numbers_keep_their_bits() -> None:
    columns = to_change_columns(batch_of(READER_TYPES), changes_schema(xattrs=False))
    found = {name: column[0].as_py() for name, column in columns.items()}
    assert found == {**ROW, "key": "k", "key_bytes": None, "vbuuid": -5, "cas": -(2**63) + 1}


def test_columns_have_the_types_of_the_table_and_names_are_dictionaries() -> None:
    schema = changes_schema(xattrs=False)
    columns = to_change_columns(batch_of(READER_TYPES), schema)
    for name, column in columns.items():
        assert column.type == (NAME if name in ("op", "scope", "collection") else schema.field(name).type), name


def test_rows_by_way_of_spark_give_the_same() -> None:
    schema = changes_schema(xattrs=False)
    reader = to_change_columns(batch_of(READER_TYPES), schema)
    plain = {
        name: column.cast(pa.string()) if name in ("op", "scope", "collection") else column
        for name, column in reader.items()
    }
    spark = pa.RecordBatch.from_pydict(plain)
    again = to_change_columns(spark, schema)
    assert {name: column.to_pylist() for name, column in again.items()} == {
        name: column.to_pylist() for name, column in reader.items()
    }


@pytest.mark.parametrize(
    ("keys", "texts", "others"),
    [
        ([b"a", "ä".encode(), None], ["a", "ä", None], [None, None, None]),
        ([b"\xff", b"\\xff", b"a"], ["\\xff", "\\xff", "a"], [b"\xff", None, None]),
        ([], [], []),
    ],
)
def test_keys_are_text_and_those_that_are_none_keep_their_bytes(
    keys: list[bytes | None], texts: list[str | None], others: list[bytes | None]
) -> None:
    column = pa.array(keys, pa.binary())
    text, odd = split_keys(column)
    assert (text.to_pylist(), odd.to_pylist()) == (texts, others)
    assert raw_keys(text, odd).to_pylist() == keys
