"""Groups of vbuckets, the places of tables, and the facts in a table's properties."""

from __future__ import annotations

import operator
import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headwater.client.changes import split_keys
from headwater.errors import LakeDamaged, LakeTooNew
from headwater.lake.layout import (
    LakeFacts,
    changes_schema,
    folder_name,
    groups_for,
    raw_keys,
    table_name,
    to_change_columns,
)


@pytest.mark.parametrize(("vbuckets", "groups"), [(1024, 16), (64, 16), (5, 2), (7, 7), (1, 1), (100, 33)])
def test_every_vbucket_is_in_the_one_group_that_has_it(vbuckets: int, groups: int) -> None:
    facts = LakeFacts(bucket_uuid="u", vbuckets=vbuckets, groups=groups)
    found = [vbucket for group in range(groups) for vbucket in facts.vbuckets_of(group)]
    assert found == list(range(vbuckets))
    for group in range(groups):
        assert {facts.group_of(vbucket) for vbucket in facts.vbuckets_of(group)} == {group}
    assert facts.group_of(np.arange(vbuckets)).tolist() == [facts.group_of(vbucket) for vbucket in range(vbuckets)]


def test_facts_come_back_from_the_properties() -> None:
    facts = LakeFacts(bucket_uuid="5ab1e", vbuckets=64, groups=8, xattrs=True)
    assert LakeFacts.from_properties(facts.to_properties(), where="here") == facts


@pytest.mark.parametrize(("documents", "groups"), [(0, 16), (8_000_000, 16), (8_000_001, 17), (10**8, 200)])
def test_large_buckets_get_more_groups(documents: int, groups: int) -> None:
    assert groups_for(documents) == groups


def test_a_table_that_is_not_ours_is_refused() -> None:
    with pytest.raises(LakeDamaged, match="not created by Headwater"):
        LakeFacts.from_properties({"delta.appendOnly": "true"}, where="here")


def test_a_newer_format_is_refused() -> None:
    properties = {**LakeFacts(bucket_uuid="u", vbuckets=64).to_properties(), "headwater.format": "7"}
    with pytest.raises(LakeTooNew, match="format 7, and this program supports formats up to 6"):
        LakeFacts.from_properties(properties, where="here")


_LEGAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-%"
_names = st.builds(operator.add, st.sampled_from(_LEGAL[:-1]), st.text(_LEGAL, max_size=250))
"""All that Couchbase permits for scopes and collections."""
_long = st.builds(operator.mul, _names, st.integers(1, 8)).map(lambda name: name[:251])
_tables = st.builds("{}.{}".format, _names | _long, _names | _long)


@example("shop.x%20y", "shop.x20y")
@example("shop%.a", "shop.a%")
@example(f"s.c{'%' * 250}", f"s.c{'%' * 249}")
@example(f"{'s' * 251}.a", f"{'s' * 251}.b")
@example(f"{'s' * 251}.{'c' * 251}", f"{'s' * 251}.{'c' * 250}")
@example(f"{'s' * 3}.{'c' * 251}", f"{'s' * 4}.{'c' * 251}")
@given(_tables, _tables)
def test_every_name_of_a_table_has_a_folder_of_its_own_that_says_it(one: str, other: str) -> None:
    folder = folder_name(one)
    assert re.fullmatch(r"[\w.~-]{1,255}", folder, re.ASCII)
    assert (folder == folder_name(other)) == (one == other)
    is_cut = ".~" in folder
    assert is_cut == (len(one) > 255)
    if is_cut:
        assert one.startswith(folder.rpartition(".~")[0].replace("~", "%"))
    else:
        assert folder.replace("~", "%") == one


def test_a_collection_without_a_name_goes_by_its_id() -> None:
    assert table_name("inventory", "hotel", 8) == "inventory.hotel"
    assert table_name(None, None, 0x1F) == table_name("inventory", None, 0x1F) == "_unnamed.1f"


# Batches of a reader, and batches that came by way of Spark, give the same columns.


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


def test_columns_have_the_types_of_the_table_and_numbers_keep_their_bits() -> None:
    schema = changes_schema(xattrs=False)
    columns = to_change_columns(batch_of(READER_TYPES), schema)
    for name, column in columns.items():
        assert column.type == (NAME if name in ("op", "scope", "collection") else schema.field(name).type), name
    found = {name: column[0].as_py() for name, column in columns.items()}
    assert found == {**ROW, "key": "k", "key_bytes": None, "vbuuid": -5, "cas": -(2**63) + 1}


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
        ([b"", "ä".encode(), None, b"\xc3"], ["", "ä", None, "\\xc3"], [None, None, None, b"\xc3"]),
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
