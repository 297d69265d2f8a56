"""Digests differ between any two versions of a document, and are the same wherever a version lies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from headwater.client.changes import split_keys
from headwater.lake.layout import changes_schema, documents_schema
from headwater.lake.verify_hashes import UNKNOWN_OP, HashedRows, HashIndex, hash_changes, hash_documents, hash_texts
from support.cases import each
from support.lake_model import Change, ModelBucket, batches, changed_at

DOCUMENT = Change(
    seqno=5, op="mutation", collection_id=8, key=b"k", value=b'{"n": 1}', rev=2, cas=2**60 + 9, flags=3, expiry=4
)


def hashed(*changes: Change, vbucket: int = 0) -> HashedRows:
    bucket = ModelBucket(2)
    bucket.names[8] = bucket.names[9] = ("inventory", "hotel")
    (batch,) = batches([bucket.row(vbucket, change, 0) for change in changes], 10)
    return hash_changes(batch, xattrs=False)


def digest(change: Change, vbucket: int = 0) -> list[int]:
    words: list[int] = hashed(change, vbucket=vbucket).hashes[0].tolist()
    return words


def key(change: Change, vbucket: int = 0) -> list[int]:
    words: list[int] = hashed(change, vbucket=vbucket).keys[0].tolist()
    return words


@each(
    "change",
    [
        {"seqno": 6}, {"collection_id": 9}, {"key": b"l"}, {"key": b"k{"}, {"value": b'{"n": 2}'}, {"value": b""},
        {"value": None}, {"is_json": False}, {"flags": 2}, {"expiry": 0}, {"rev": 1}, {"cas": 9},
    ],
)  # fmt: skip
def test_every_part_of_a_version_counts(change: dict[str, Any]) -> None:
    assert digest(DOCUMENT) != digest(replace(DOCUMENT, **change))
    assert digest(DOCUMENT) == digest(replace(DOCUMENT))


def test_a_value_that_is_null_is_not_empty() -> None:
    assert digest(replace(DOCUMENT, value=None)) != digest(replace(DOCUMENT, value=b""))


def test_a_key_and_a_value_are_kept_apart() -> None:
    assert digest(replace(DOCUMENT, key=b"ab", value=b"c")) != digest(replace(DOCUMENT, key=b"a", value=b"bc"))


def test_a_key_is_a_vbucket_a_collection_and_a_key() -> None:
    assert key(DOCUMENT) == key(replace(DOCUMENT, seqno=6, value=b"{}", op="deletion"))
    assert key(DOCUMENT) != key(DOCUMENT, vbucket=1)
    assert key(DOCUMENT) != key(replace(DOCUMENT, collection_id=9))
    assert key(DOCUMENT) != key(replace(DOCUMENT, key=b"l"))


@each("length", range(18))
def test_every_byte_of_a_value_counts(length: int) -> None:
    value = bytes(range(1, length + 1))
    others = [value[:at] + b"\x00" + value[at + 1 :] for at in range(length)]
    found = {tuple(digest(replace(DOCUMENT, value=it, is_json=False))) for it in [value, value + b"\x00", *others]}
    assert len(found) == length + 2


# --- the same version in a table -----------------------------------------------------------------------------------


def document_row(change: Change, **values: Any) -> pa.Table:
    """As a merge writes it."""
    texts, others = split_keys(pa.array([change.key], pa.binary()))
    text = change.value.decode() if change.is_json and change.value is not None else None
    row = {
        "key": texts[0].as_py(), "key_bytes": others[0].as_py(), "document": text,
        "content": None if change.is_json else change.value, "datatype": int(change.is_json), "flags": change.flags,
        "expiry": change.expiry, "cas": change.cas, "seqno": change.seqno, "rev": change.rev, "vbucket": 1,
        "vbuuid": 1, "collection_id": change.collection_id, "changed_at": changed_at(change), **values,
    }  # fmt: skip
    return pa.Table.from_pylist([row], documents_schema(xattrs="xattrs" in values))


@pytest.mark.parametrize(
    "change", [{}, {"is_json": False}, {"value": b"\xff", "is_json": False}, {"key": b"\xff\xfe"}, {"cas": 2**63 - 1}]
)
def test_a_row_of_documents_has_the_digest_of_its_change(change: dict[str, Any]) -> None:
    document = replace(DOCUMENT, **change)
    expected, found = hashed(document, vbucket=1), hash_documents(document_row(document), xattrs=False)
    assert found.hashes.tolist() == expected.hashes.tolist()
    assert found.keys.tolist() == expected.keys.tolist()
    assert (found.vbuckets[0], found.ids[0], found.seqnos[0], found.ops[0]) == (1, 8, 5, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"document": None, "content": b'{"n": 1}'},
        {"content": b'{"n": 1}'},
        {"datatype": 0},
        {"changed_at": None},
        {"key_bytes": b"k", "key": "l"},
        {"document": None},
    ],
    ids=["JSON in content", "in both columns", "text that is no JSON", "no time", "a key shown wrong", "no value"],
)
def test_a_row_that_says_it_otherwise_differs(wrong: dict[str, Any]) -> None:
    rows = document_row(DOCUMENT, **wrong)
    assert hash_documents(rows, xattrs=False).hashes.tolist() != hashed(DOCUMENT, vbucket=1).hashes.tolist()


def test_json_that_is_no_text_belongs_into_content() -> None:
    odd = replace(DOCUMENT, value=b'{"\xff"}')
    rows = document_row(replace(odd, is_json=False), datatype=1)
    assert hash_documents(rows, xattrs=False).hashes.tolist() == hashed(odd, vbucket=1).hashes.tolist()


def test_extended_attributes_count_in_any_order() -> None:
    def with_xattrs(*pairs: tuple[str, bytes]) -> list[list[int]]:
        rows = document_row(DOCUMENT, xattrs=list(pairs))
        found: list[list[int]] = hash_documents(rows, xattrs=True).hashes.tolist()
        return found

    a, b = ("a", b"1"), ("b", b"2")
    assert with_xattrs(a, b) == with_xattrs(b, a)
    assert with_xattrs(a, b) != with_xattrs(("a", b"2"), ("b", b"1"))
    assert with_xattrs(a) != with_xattrs(a, b)
    assert with_xattrs(("ab", b"c")) != with_xattrs(("a", b"bc"))
    none = document_row(DOCUMENT, xattrs=None)
    assert hash_documents(none, xattrs=True).hashes.tolist() == with_xattrs()


def test_rows_of_a_slice_have_their_own_hashes() -> None:
    rows = pa.concat_tables(
        [document_row(replace(DOCUMENT, key=bytes([65 + n])), xattrs=[("n", b"%d" % n)]) for n in range(5)]
    )
    whole, part = hash_documents(rows, xattrs=True), hash_documents(rows.combine_chunks().slice(2, 2), xattrs=True)
    assert part.hashes.tolist() == whole.hashes[2:4].tolist()


def test_an_operation_that_is_unknown_is_none_of_ours() -> None:
    row = {field.name: None if field.nullable else 0 for field in changes_schema(xattrs=False)}
    rows = pa.Table.from_pylist(
        [{**row, "op": "sabotage", "landed_at": 0, "void": False}], changes_schema(xattrs=False)
    )
    found = hash_changes(rows, xattrs=False)
    assert (found.ops[0], found.ids[0]) == (UNKNOWN_OP, -1)


# --- rows by their hash ----------------------------------------------------------------------------------------------


def test_an_index_has_the_newest_of_each() -> None:
    hashes = hash_texts(pa.array(["a", "b", "a", "c", "a", "b"]))
    index = HashIndex(hashes, np.array([1, 5, 3, 1, 2, 5]))
    assert index.newest.tolist() == [False, True, True, True, False, False]
    assert index.find(hash_texts(pa.array(["a", "b", "c", "d", None]))).tolist() == [2, 1, 3, -1, -1]
    assert len(index) == 3
