"""Digests tell any two documents apart, and no two orders of the same ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from bucket_model import Change, ModelBucket, batches
from headwater.spark.lake.digests import ChangeDigester, VBucketDigests, digest_documents
from headwater.spark.lake.schemas import documents_schema

DOCUMENT = Change(
    seqno=5, op="mutation", collection_id=8, key=b"k", value=b'{"n": 1}', rev=2, cas=2**63 + 9, flags=3, expiry=4
)


def digest(*changes: Change, vbucket: int = 0, size: int = 10) -> VBucketDigests:
    bucket = ModelBucket(2)
    bucket.names[8] = bucket.names[9] = ("inventory", "hotel")
    digester = ChangeDigester(2)
    for batch in batches([bucket.row(vbucket, change, 0) for change in changes], size):
        digester.add(batch)
    return digester.finish()


@pytest.mark.parametrize(
    "change",
    [
        {"seqno": 6}, {"collection_id": 9}, {"key": b"l"}, {"key": b"k{"}, {"value": b'{"n": 2}'}, {"value": b""},
        {"is_json": False}, {"flags": 2}, {"expiry": 0}, {"rev": 1}, {"cas": 9},
    ],
)  # fmt: skip
def test_every_part_of_a_document_counts(change: dict[str, Any]) -> None:
    assert digest(DOCUMENT) != digest(replace(DOCUMENT, **change))
    assert digest(DOCUMENT) == digest(replace(DOCUMENT))


def test_a_key_and_a_value_are_kept_apart() -> None:
    assert digest(replace(DOCUMENT, key=b"ab", value=b"c")) != digest(replace(DOCUMENT, key=b"a", value=b"bc"))


def test_the_order_of_documents_does_not_count() -> None:
    other = replace(DOCUMENT, key=b"other")
    assert digest(DOCUMENT, other) == digest(other, DOCUMENT)
    assert digest(DOCUMENT, other) != digest(DOCUMENT)


def test_only_the_newest_version_counts_whatever_came_first() -> None:
    newer = replace(DOCUMENT, seqno=9, value=b"{}")
    assert digest(DOCUMENT, newer) == digest(newer, DOCUMENT) == digest(newer)


@pytest.mark.parametrize("op", ["deletion", "expiration"])
def test_what_was_removed_is_not_there(op: str) -> None:
    assert digest(DOCUMENT, replace(DOCUMENT, op=op, seqno=6, value=None)).counts.tolist() == [0, 0]
    assert digest(DOCUMENT, replace(DOCUMENT, op=op, seqno=4, value=None)) == digest(DOCUMENT)


@pytest.mark.parametrize("op", ["collection_dropped", "collection_created"])
def test_the_end_of_a_collection_takes_what_is_older(op: str) -> None:
    other = replace(DOCUMENT, collection_id=9, key=b"other")
    end = Change(seqno=7, op=op, collection_id=8)
    newer = replace(DOCUMENT, seqno=8)
    assert digest(DOCUMENT, other, end) == digest(other)
    assert digest(DOCUMENT, other, end, newer) == digest(other, newer)


@pytest.mark.parametrize("size", [1, 100])
def test_a_rollback_takes_back_what_came_before_it(size: int) -> None:
    bucket = ModelBucket(2)
    for key in (b"a", b"b", b"c"):
        bucket.change(0, "mutation", 0, key, b"{}")
        bucket.change(1, "mutation", 0, key, b"{}")
    rows = [*bucket.rows(0), *bucket.rows(1)]
    bucket.mark_sent([0, 1])
    bucket.fail_over(0, 1)
    bucket.change(0, "deletion", 0, b"a")
    bucket.change(0, "mutation", 0, b"d", b"{}")
    rows += bucket.rows(0)
    digester, straight = ChangeDigester(2), ChangeDigester(2)
    for batch in batches(rows, size):
        digester.add(batch)
    bucket.mark_unread(0)
    bucket.mark_unread(1)
    for batch in batches([*bucket.rows(0), *bucket.rows(1)], size):
        straight.add(batch)
    assert digester.finish() == straight.finish()
    assert digester.finish().counts.tolist() == [1, 3]


def test_differences_are_told_by_vbucket() -> None:
    one, other = digest(DOCUMENT, vbucket=0), digest(DOCUMENT, vbucket=1)
    assert one.differences(other) == [0, 1]
    assert one.text(0) == other.text(1) != one.text(1)
    assert len(one.text(0)) == 32
    assert (one + other).counts.tolist() == [1, 1]
    assert one.differences(one + VBucketDigests.empty(2)) == []


def test_a_row_of_documents_has_the_digest_of_its_change() -> None:
    for is_json in (True, False):
        row = {
            "key": "k", "document": '{"n": 1}' if is_json else None, "content": None if is_json else b'{"n": 1}',
            "datatype": int(is_json), "flags": 3, "expiry": 4, "cas": -(2**63) + 9, "seqno": 5, "rev": 2,
            "vbucket": 1, "vbuuid": 1, "collection_id": 8,
        }  # fmt: skip
        table = pa.Table.from_pylist([row], documents_schema(xattrs=False))
        expected = digest(replace(DOCUMENT, is_json=is_json), vbucket=1)
        assert digest_documents([table, table.slice(0, 0)], vbuckets=2) == expected


def test_nothing_has_the_digest_of_nothing() -> None:
    assert ChangeDigester(2).finish() == VBucketDigests.empty(2) == digest_documents([], vbuckets=2)
