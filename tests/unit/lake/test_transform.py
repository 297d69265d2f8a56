"""What a transform may do to a batch, and what not."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from headwater.client.batches import RAW_SCHEMA
from headwater.errors import InvalidInput
from headwater.lake.transform import Transform
from support.cases import each

ROWS = [
    {"op": "mutation", "key": b"a", "value": b'{"email":"a@example.com"}', "datatype": 1},
    {"op": "rollback", "value": b'{"from_seqno":9}'},
    {"op": "deletion", "key": b"b", "value": None},
]
BATCH = pa.RecordBatch.from_pylist(
    [{field.name: None if field.nullable else 0 for field in RAW_SCHEMA} | row for row in ROWS], RAW_SCHEMA
)


def with_column(batch: pa.RecordBatch, name: str, values: list[Any]) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, batch.schema.field(index), pa.array(values, batch.schema.field(index).type))


def mask(batch: pa.RecordBatch) -> pa.RecordBatch:
    return with_column(batch, "value", [b'"masked"'] * batch.num_rows)


def drop_a_row(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.slice(1)


def change_a_seqno(batch: pa.RecordBatch) -> pa.RecordBatch:
    return with_column(batch, "seqno", [5] * batch.num_rows)


def add_a_column(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.append_column("more", pa.nulls(batch.num_rows))


def return_a_table(batch: pa.RecordBatch) -> Any:
    return pa.Table.from_batches([batch])


def fail(batch: pa.RecordBatch) -> pa.RecordBatch:
    return json.loads("{")


def test_documents_are_changed_and_all_other_rows_stay() -> None:
    changed = Transform.of(mask).function()(BATCH)
    assert changed.schema == BATCH.schema
    assert changed.column("value").to_pylist() == [b'"masked"', b'{"from_seqno":9}', b'"masked"']
    assert changed.drop_columns(["value"]).to_pylist() == BATCH.drop_columns(["value"]).to_pylist()


@each(
    ("function", "sentence"),
    [
        (drop_a_row, "drop_a_row was given 3 rows and has returned 2"),
        (change_a_seqno, "change_a_seqno has changed the column seqno"),
        (add_a_column, "add_a_column has returned other columns"),
        (return_a_table, "return_a_table has returned a Table"),
        (fail, "fail has failed: JSONDecodeError"),
    ],
)
def test_what_it_may_not_do(function: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        Transform.of(function).function()(BATCH)
    assert sentence in str(caught.value)


def test_what_is_no_transform() -> None:
    for none in (lambda batch: batch, "mask"):
        with pytest.raises(InvalidInput, match="can't be"):
            Transform.of(none)
