"""The columns that Spark sees, made from the client's batches."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import VariantVal

from headwater.client.batches import raw_schema
from headwater.lake.layout import split_texts
from headwater.landing.source_options import SourceOptions
from headwater.protocol.values import Datatype
from headwater.spark.rows import SparkRows
from headwater.spark.source import spark_schema

BIG = 2**64 - 1


def options(**given: str) -> SourceOptions:
    return SourceOptions.make({"url": "couchbase://127.0.0.1/b", **given}, {})


def converter(**given: str) -> SparkRows:
    made = options(**given)
    return SparkRows(made, to_arrow_schema(spark_schema(made), timezone="UTC"))


def batch(*rows: dict[str, Any], xattrs: bool = False) -> pa.RecordBatch:
    schema = raw_schema(xattrs=xattrs)
    full = [{field.name: None if field.nullable else 0 for field in schema} | {"op": "mutation"} | row for row in rows]
    return pa.RecordBatch.from_pylist(full, schema=schema)


def document(value: bytes | None, *, is_json: bool = True) -> dict[str, Any]:
    return {"key": b"k", "value": value, "datatype": int(Datatype.JSON) if is_json else 0}


@pytest.mark.parametrize("form", ["binary", "string", "variant"])
@pytest.mark.parametrize("xattrs", ["true", "false"])
def test_the_schema_is_exactly_that_of_spark(form: str, xattrs: str) -> None:
    made = options(value=form, xattrs=xattrs)
    wanted = to_arrow_schema(spark_schema(made), timezone="UTC")
    rows = SparkRows(made, wanted)
    full = batch(document(b"{}"), {"op": "scope_dropped", "scope": "s"}, xattrs=xattrs == "true")
    for made_batch in (rows.convert(full), rows.convert(full.slice(0, 0))):
        assert made_batch.schema == wanted
        made_batch.validate(full=True)


def test_all_columns() -> None:
    changed_at = datetime(2026, 11, 15, tzinfo=UTC)
    row = {
        "vbucket": 1023, "vbuuid": BIG, "seqno": 7, "rev": 3, "op": "deletion", "scope": "s", "collection": "c",
        "collection_id": 2**32 - 1, "key": b"k", "value": b"v", "datatype": 1, "flags": 2**32 - 1,
        "expiry": 2**32 - 1, "cas": 2**63, "changed_at": changed_at, "snapshot_start": 5, "snapshot_end": 9,
    }  # fmt: skip
    (converted,) = converter().convert(batch(row)).to_pylist()
    # Spark has no unsigned numbers: those of 64 bits keep their bits.
    assert converted == {**row, "key": "k", "key_bytes": None, "vbuuid": -1, "cas": -(2**63)}


def test_keys_that_are_no_text() -> None:
    converted = converter().convert(batch({"key": b"\xffa"}, {"key": rb"\xffa"}, {"key": None}, {"key": b""}))
    assert [(row["key"], row["key_bytes"]) for row in converted.to_pylist()] == [
        (r"\xffa", b"\xffa"),
        (r"\xffa", None),
        (None, None),
        ("", None),
    ]


def test_values_as_text() -> None:
    values = [b'{"a":1}', "☃".encode(), b"", b"\xff\x00", None]
    converted = converter(value="string").convert(batch(*map(document, values)))
    assert [(row["value"], row["value_bytes"]) for row in converted.to_pylist()] == [
        ('{"a":1}', None),
        ("☃", None),
        ("", None),
        (None, b"\xff\x00"),
        (None, None),
    ]


def test_texts_that_are_all_texts_are_not_looked_at_one_by_one() -> None:
    texts, others = split_texts(pa.array([b"a", None, b""], pa.binary()))
    assert texts.to_pylist() == ["a", None, ""]
    assert others.to_pylist() == [None, None, None]


def test_values_as_variant() -> None:
    rows = [
        document(b'{"a":[1,null]}'),
        document(b"17"),
        document(b"17", is_json=False),
        document(b'{"a":'),
        document(b"\xff"),
        document(None),
    ]
    converted = converter(value="variant").convert(batch(*rows)).to_pylist()
    assert [row["value_bytes"] for row in converted] == [None, None, b"17", b'{"a":', b"\xff", None]
    parsed = [VariantVal(**row["value"]).toPython() if row["value"] else None for row in converted]
    assert parsed == [{"a": [1, None]}, 17, None, None, None, None]


def test_extended_attributes() -> None:
    row = {"key": b"k", "xattrs": [("_sync", b"1"), ("u", b"2")]}
    (converted,) = converter(xattrs="true").convert(batch(row, xattrs=True)).to_pylist()
    assert converted["xattrs"] == [("_sync", b"1"), ("u", b"2")]


@pytest.mark.parametrize("form", ["binary", "string", "variant"])
def test_a_rollback(form: str) -> None:
    value = {"from_seqno": 9, "old_vbuuid": BIG, "new_vbuuid": 5}
    rollback = {"op": "rollback", "vbucket": 3, "vbuuid": 5, "seqno": 4, "value": json.dumps(value).encode()}
    (row,) = converter(value=form, xattrs="true").convert(batch(rollback, xattrs=True)).to_pylist()
    assert (row["op"], row["vbucket"], row["vbuuid"], row["seqno"]) == ("rollback", 3, 5, 4)
    assert (row["key"], row["collection_id"], row["xattrs"], row["changed_at"]) == (None, None, None, None)
    # It says that it is no JSON document, so it stays as it is where those are parsed.
    told = row["value_bytes"] if form == "variant" else row["value"]
    assert json.loads(told) == value
