"""Expiry: documents whose time has come become expirations, within bounds and only once."""

from __future__ import annotations

import pytest

from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation
from headwater.protocol.values import Datatype, ValueParts, decode_xattrs, encode_xattrs
from headwater.store import compaction
from headwater.store.bucket import Bucket
from headwater.store.compaction import expire_document, expire_documents, is_expired
from headwater.store.settling import settle_now
from support.store_harness import (
    Clock,
    changes_of,
    check_counts,
    compact,
    get,
    new_bucket,
    put,
    remove,
    reopened,
    value_of,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def bucket(clock: Clock) -> Bucket:
    return new_bucket(clock=clock)


def test_documents_expire_when_their_time_has_come(bucket: Bucket, clock: Clock) -> None:
    now = clock.now_s()
    for key, expiry in ((b"never", 0), (b"past", now - 1), (b"now", now), (b"later", now + 1)):
        put(bucket, 0, key, expiry=expiry)
    assert expire_documents(bucket, 0) == 2
    assert [value_of(bucket, 0, key) for key in (b"never", b"past", b"now", b"later")] == [b"{}", None, None, b"{}"]
    assert expire_documents(bucket, 0) == 0
    clock.advance(1)
    assert expire_documents(bucket, 0) == 1
    bucket.commit_now()
    assert [type(change) for change in changes_of(bucket, 0)] == [Mutation] * 4 + [Expiration] * 3
    check_counts(bucket)


def test_an_expiration_is_a_version(bucket: Bucket, clock: Clock) -> None:
    written = put(bucket, 0, b"k", expiry=1)
    entry = bucket.find(0, 0, b"k")
    assert entry is not None
    clock.advance(5)
    expired = expire_document(bucket, 0, entry)
    document = get(bucket, 0, b"k")
    assert document is not None
    assert (document.seqno, document.cas, document.rev_seqno) == (expired.seqno, expired.cas, 2)
    assert (expired.seqno, expired.commit) == (written.seqno + 1, bucket.pending.number)
    assert (document.is_deleted, document.delete_time, document.value) == (True, clock.now_s(), b"")


def test_an_expiration_leaves_one_revision_more_behind(bucket: Bucket) -> None:
    """As real servers have it: a document that follows it under another key begins above."""
    put(bucket, 0, b"k", expiry=1)
    expire_documents(bucket, 0)
    bucket.commit_now()
    put(bucket, 0, b"other")
    for seen in (bucket, reopened(bucket)):
        assert seen.vbuckets.deleted_revs[0] == 3
    other = get(bucket, 0, b"other")
    assert other is not None
    assert other.rev_seqno == 4


@pytest.mark.parametrize("place", ["pending", "in flight", "young", "settled"])
def test_documents_expire_wherever_they_are(bucket: Bucket, place: str) -> None:
    put(bucket, 0, b"k", expiry=1)
    if place == "in flight":
        bucket.seal()
    elif place != "pending":
        bucket.commit_now()
    if place == "settled":
        settle_now(bucket)
    assert expire_documents(bucket, 0) == 1
    assert value_of(bucket, 0, b"k") is None


def test_deleted_documents_do_not_expire(bucket: Bucket) -> None:
    put(bucket, 0, b"k", expiry=1)
    remove(bucket, 0, b"k")
    assert expire_documents(bucket, 0) == 0
    bucket.commit_now()
    assert [type(change) for change in changes_of(bucket, 0)] == [Mutation, Deletion]


def test_a_document_that_was_written_again_lives_on(bucket: Bucket, clock: Clock) -> None:
    put(bucket, 0, b"k", expiry=1)
    put(bucket, 0, b"k", expiry=clock.now_s() + 10)
    put(bucket, 0, b"j", expiry=1)
    put(bucket, 0, b"j")
    assert expire_documents(bucket, 0) == 0


def test_one_go_is_bounded(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "EXPIRED_MAX", 10)
    for number in range(25):
        put(bucket, 0, b"k%d" % number, expiry=1)
    assert [expire_documents(bucket, 0) for _ in range(4)] == [10, 10, 5, 0]


def test_attributes_of_the_system_outlive_the_document(bucket: Bucket) -> None:
    both = encode_xattrs(ValueParts({"_sync": b"1", "user": b"2"}, b'{"a":1}'))
    users = encode_xattrs(ValueParts({"user": b"2"}, b"body"))
    put(bucket, 0, b"both", both, expiry=1, datatype=Datatype.XATTR | Datatype.JSON)
    put(bucket, 0, b"users", users, expiry=1, datatype=Datatype.XATTR)
    assert expire_documents(bucket, 0) == 2
    kept = get(bucket, 0, b"both")
    assert kept is not None
    assert kept.datatype == Datatype.XATTR
    assert decode_xattrs(kept.value) == ValueParts({"_sync": b"1"}, b"")
    gone = get(bucket, 0, b"users")
    assert gone is not None
    assert (gone.datatype, gone.value) == (Datatype.RAW, b"")
    entry = bucket.find(0, 0, b"both")
    assert entry is not None
    assert entry.has_xattrs


def test_nothing_is_told_of_a_collection_that_was_dropped(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "EXPIRED_MAX", 4)
    fruit = Manifest().with_collection("_default", "fruit")
    bucket.set_manifest(fruit)
    for number in range(6):
        put(bucket, 0, b"k%d" % number, expiry=1, collection_id=8)
    put(bucket, 0, b"alive", expiry=1)
    bucket.set_manifest(fruit.without_collection("_default", "fruit"))
    bucket.commit_now()
    # They do not stand in the way of others either.
    assert sum(expire_documents(bucket, 0) for _ in range(3)) == 1
    assert value_of(bucket, 0, b"alive") is None
    bucket.commit_now()
    assert [change.collection_id for change in changes_of(bucket, 0) if isinstance(change, Expiration)] == [0]


def test_what_compaction_dropped_with_its_collection_does_not_expire(bucket: Bucket) -> None:
    fruit = Manifest().with_collection("_default", "fruit")
    bucket.set_manifest(fruit)
    put(bucket, 0, b"k", expiry=1, collection_id=8)
    bucket.set_manifest(fruit.without_collection("_default", "fruit"))
    bucket.commit_now()
    settle_now(bucket)
    compact(bucket, 0)
    assert expire_documents(bucket, 0) == 0
    check_counts(bucket)


def test_is_expired(bucket: Bucket) -> None:
    put(bucket, 0, b"k", expiry=10)
    entry = bucket.find(0, 0, b"k")
    assert entry is not None
    assert [is_expired(entry, now) for now in (9, 10, 11)] == [False, True, True]
    put(bucket, 0, b"k")
    entry = bucket.find(0, 0, b"k")
    assert entry is not None
    assert not is_expired(entry, 2**33)
