"""Buckets: writing, reading wherever a document is, states of vbuckets, and the manifest as system events."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import headwater
from headwater.errors import LocalProtocolError
from headwater.protocol.manifest import CollectionCreated, CollectionDropped, Manifest, ScopeCreated, decode_event
from headwater.protocol.messages.dcp_changes import Deletion, Mutation
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import CollectionId
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from headwater.store.settling import settle_now
from support.store_harness import (
    Clock,
    branches,
    changes_of,
    check_counts,
    events_of,
    get,
    new_bucket,
    put,
    remove,
    reopened,
    seqnos_of,
    value_of,
)

# --- writing ------------------------------------------------------------------------------------------------------


def test_a_document_is_stored_as_the_change_that_is_streamed(bucket: Bucket, clock: Clock) -> None:
    written = put(bucket, 2, b"k", b"value", collection_id=300, expiry=5, flags=6, datatype=Datatype.RAW)
    bucket.commit_now()
    assert changes_of(bucket, 2) == [
        Mutation(
            vbucket=2, cas=written.cas, seqno=1, rev_seqno=1, flags=6, expiry=5, collection_id=300, key=b"k",
            value=b"value",
        )
    ]  # fmt: skip
    removed = remove(bucket, 2, b"k", collection_id=300)
    bucket.commit_now()
    assert changes_of(bucket, 2, after_seqno=1) == [
        Deletion(
            vbucket=2, cas=removed.cas, seqno=2, rev_seqno=2, delete_time=clock.now_s(), collection_id=300, key=b"k"
        )
    ]


def test_the_cas_rises_whatever_the_clock_does(bucket: Bucket, clock: Clock) -> None:
    first, second = put(bucket, 0, b"k").cas, put(bucket, 0, b"k").cas
    assert (first, second) == (clock.ns & ~0xFFFF, (clock.ns & ~0xFFFF) + 1)
    clock.advance(-100)
    third = put(bucket, 0, b"j").cas
    assert third == second + 1
    clock.advance(200)
    assert put(bucket, 0, b"k").cas == clock.ns & ~0xFFFF


def test_revisions_count_per_document_and_start_above_what_was_deleted(bucket: Bucket) -> None:
    def revision(key: bytes) -> int:
        document = get(bucket, 0, key)
        return document.rev_seqno

    for expected in (1, 2, 3):
        put(bucket, 0, b"k")
        assert revision(b"k") == expected
    remove(bucket, 0, b"k")
    assert revision(b"k") == 4
    put(bucket, 0, b"other")
    assert revision(b"other") == 5
    put(bucket, 0, b"k")
    assert revision(b"k") == 5
    put(bucket, 1, b"k")
    entry = bucket.find(1, CollectionId(0), b"k")
    assert entry.rev_seqno == 1


def test_a_value_may_be_made_from_its_own_cas_and_seqno(bucket: Bucket) -> None:
    written = bucket.put_mutation(
        0, collection_id=CollectionId(0), key=b"k", value=lambda cas, seqno: b"%d %d" % (cas, seqno),
        datatype=Datatype.RAW,
    )  # fmt: skip
    assert value_of(bucket, 0, b"k") == b"%d %d" % (written.cas, written.seqno)
    removed = bucket.put_removal(
        0, collection_id=CollectionId(0), key=b"k", value=lambda cas, seqno: b"%d" % seqno, datatype=Datatype.XATTR
    )
    document = get(bucket, 0, b"k")
    assert (document.value, document.is_deleted) == (b"%d" % removed.seqno, True)


def test_a_write_that_fails_takes_no_number(bucket: Bucket) -> None:
    put(bucket, 0, b"k", b"v")
    before = [array.tolist() for array in (bucket.vbuckets.high_seqnos, bucket.vbuckets.max_cas)]

    def fail(cas: int, seqno: int) -> bytes:
        raise RuntimeError

    place = {"collection_id": CollectionId(0), "key": b"k"}
    with pytest.raises(RuntimeError):
        bucket.put_mutation(0, **place, value=fail, datatype=Datatype.RAW)
    with pytest.raises(RuntimeError):
        bucket.put_removal(0, **place, value=fail)
    with pytest.raises(LocalProtocolError):
        bucket.put_mutation(0, **place, value=b"", datatype=Datatype.RAW, flags=2**32)
    with pytest.raises(LocalProtocolError):
        bucket.put_mutation(0, collection_id=CollectionId(0), key=bytes(2**16), value=b"", datatype=Datatype.RAW)
    assert [array.tolist() for array in (bucket.vbuckets.high_seqnos, bucket.vbuckets.max_cas)] == before
    assert (bucket.vbuckets.superseded[0], bucket.vbuckets.deleted_revs[0]) == (0, 0)
    assert put(bucket, 0, b"j").seqno == 2
    bucket.commit_now()
    assert seqnos_of(bucket, 0) == [1, 2]
    check_counts(bucket)


def test_a_lock_is_a_mark_that_the_next_version_loses(bucket: Bucket) -> None:
    put(bucket, 0, b"k", b"v")
    entry = bucket.find(0, CollectionId(0), b"k")
    bucket.set_locked(0, CollectionId(0), b"k", entry, locked=True)
    locked = bucket.find(0, CollectionId(0), b"k")
    assert (locked.is_locked, locked.seqno, value_of(bucket, 0, b"k")) == (True, entry.seqno, b"v")
    bucket.set_locked(0, CollectionId(0), b"k", locked, locked=False)
    assert bucket.find(0, CollectionId(0), b"k") == entry
    bucket.set_locked(0, CollectionId(0), b"k", entry, locked=True)
    put(bucket, 0, b"k")
    newer = bucket.find(0, CollectionId(0), b"k")
    assert not newer.is_locked


# --- reading ------------------------------------------------------------------------------------------------------


def test_which_commit_an_answer_has_to_wait_for(bucket: Bucket) -> None:
    def commit_of(key: bytes) -> int:
        entry = bucket.find(0, CollectionId(0), key)
        assert entry is not None
        return bucket.commit_of(entry)

    put(bucket, 0, b"settled")
    bucket.commit_now()
    settle_now(bucket)
    put(bucket, 0, b"young")
    bucket.commit_now()
    durable = bucket.durable_commit
    put(bucket, 0, b"in flight")
    sealed = bucket.seal()
    written = put(bucket, 0, b"pending")
    assert sealed.number == durable + 1
    assert written.commit == bucket.pending.number == durable + 2
    assert [commit_of(key) for key in (b"settled", b"young", b"in flight", b"pending")] == [
        durable, durable, durable + 1, durable + 2,
    ]  # fmt: skip
    bucket.persist(sealed)
    bucket.publish(sealed)
    assert bucket.durable_commit == sealed.number
    assert commit_of(b"in flight") == sealed.number
    bucket.commit_now()
    assert commit_of(b"pending") == bucket.durable_commit


def test_commit_numbers_beyond_32_bits(bucket: Bucket) -> None:
    """The index keeps half of a number. Years of commits lie between two that look alike."""
    bucket.pending.restart(2**32 - 2)
    bucket.durable_commit = 2**32 - 3
    for number in range(6):
        put(bucket, 0, b"k%d" % number, b"%d" % number)
        entry = bucket.find(0, CollectionId(0), b"k%d" % number)
        assert entry is not None
        assert bucket.commit_of(entry) == bucket.pending.number
        bucket.commit_now()
        for seen in range(number + 1):
            assert value_of(bucket, 0, b"k%d" % seen) == b"%d" % seen
    again = reopened(bucket)
    assert [value_of(again, 0, b"k%d" % number) for number in range(6)] == [b"%d" % number for number in range(6)]
    assert again.pending.number == 2**32 + 4


# --- committing ---------------------------------------------------------------------------------------------------


def test_one_commit_is_in_flight_at_a_time(bucket: Bucket) -> None:
    assert bucket.seal() is None
    put(bucket, 0, b"k")
    sealed = bucket.seal()
    assert bucket.seal() is None
    put(bucket, 0, b"j")
    assert bucket.seal() is None
    bucket.commit_now()
    assert bucket.in_flight is sealed
    bucket.persist(sealed)
    bucket.publish(sealed)
    following = bucket.seal()
    assert following.number == sealed.number + 1


def test_a_commit_of_facts_alone_leaves_nothing_young(bucket: Bucket) -> None:
    number = bucket.set_vbucket_state(0, VBucketState.DEAD)
    bucket.commit_now()
    assert bucket.durable_commit == number
    assert bucket.young == {}


# --- states -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [VBucketState.ACTIVE, VBucketState.REPLICA, VBucketState.PENDING, VBucketState.DEAD])
def test_a_new_vbucket(state: VBucketState) -> None:
    bucket = new_bucket(state=None)
    assert bucket.vbuckets.state(1) is None
    number = bucket.set_vbucket_state(1, state)
    assert number == bucket.pending.number
    assert bucket.vbuckets.state(1) == state
    ((vbuuid, seqno),) = branches(bucket, 1)
    assert seqno == 0
    assert bucket.vbuckets.vbuuids[1] == vbuuid
    bucket.commit_now()
    assert reopened(bucket).vbuckets.state(1) == state


def test_a_vbucket_that_becomes_active_begins_a_branch(bucket: Bucket) -> None:
    put(bucket, 0, b"k")
    first = branches(bucket)
    bucket.set_vbucket_state(0, VBucketState.REPLICA)
    assert branches(bucket) == first
    bucket.set_vbucket_state(0, VBucketState.ACTIVE)
    ((vbuuid, seqno), *older) = branches(bucket)
    assert (seqno, older) == (1, first)
    assert bucket.vbuckets.vbuuids[0] == vbuuid
    bucket.commit_now()
    assert branches(reopened(bucket))[1:] == branches(bucket)


def test_a_vbucket_that_is_active_already_begins_none(bucket: Bucket) -> None:
    """kv_engine's setVBucketState asks for `oldstate != vbucket_state_active`: only a change of state forks history.

    Cluster managers set the state again with every new topology; after 25 of them no consumer's branch would be left.
    """
    put(bucket, 0, b"k")
    before = branches(bucket)
    bucket.set_vbucket_state(0, VBucketState.ACTIVE)
    assert branches(bucket) == before


@pytest.mark.parametrize("state", [VBucketState.REPLICA, VBucketState.PENDING, VBucketState.DEAD])
def test_other_states_change_nothing_but_the_state(bucket: Bucket, state: VBucketState) -> None:
    put(bucket, 0, b"k", b"v")
    before = branches(bucket)
    bucket.set_vbucket_state(0, state)
    assert (bucket.vbuckets.state(0), branches(bucket)) == (state, before)
    assert value_of(bucket, 0, b"k") == b"v"


@pytest.mark.parametrize("vbucket", [-1, 4, 1024])
def test_vbuckets_beyond_the_bucket(bucket: Bucket, vbucket: int) -> None:
    with pytest.raises(LocalProtocolError, match="beyond"):
        bucket.set_vbucket_state(vbucket, VBucketState.ACTIVE)
    assert not bucket.vbuckets.exists(vbucket)
    assert bucket.vbuckets.state(vbucket) is None


# --- the manifest -------------------------------------------------------------------------------------------------

GARDEN = Manifest().with_scope("garden").with_collection("garden", "fruit", max_ttl_s=60)


def test_every_active_vbucket_gets_the_events_of_a_manifest(bucket: Bucket) -> None:
    bucket.set_vbucket_state(1, VBucketState.REPLICA)
    bucket.set_vbucket_state(2, VBucketState.PENDING)
    number = bucket.set_manifest(GARDEN)
    assert number == bucket.pending.number
    bucket.commit_now()
    expected = [
        ScopeCreated(manifest_uid=0, scope_id=8, name="garden"),
        CollectionCreated(manifest_uid=2, scope_id=8, collection_id=9, name="fruit", max_ttl_s=60),
    ]
    for vbucket in (0, 3):
        events = events_of(bucket, vbucket)
        assert [decode_event(event) for event in events] == expected
        assert [(event.vbucket, event.seqno) for event in events] == [(vbucket, 1), (vbucket, 2)]
    assert changes_of(bucket, 1) == changes_of(bucket, 2) == []
    assert bucket.vbuckets.durable_seqnos.tolist() == [2, 0, 0, 2]


def test_only_the_last_event_has_the_new_uid(bucket: Bucket) -> None:
    manifest = GARDEN.with_collection("garden", "roots").with_collection("_default", "tools")
    bucket.set_manifest(manifest)
    later = manifest.without_scope("garden").with_scope("shed").with_collection("shed", "nails")
    bucket.set_manifest(later)
    bucket.commit_now()
    uids = [decode_event(event).manifest_uid for event in events_of(bucket, 0)]
    assert uids == [0, 0, 0, manifest.uid, manifest.uid, manifest.uid, manifest.uid, manifest.uid, later.uid]
    kinds = [type(decode_event(event)).__name__ for event in events_of(bucket, 0)[4:]]
    assert kinds == ["CollectionDropped", "CollectionDropped", "ScopeDropped", "ScopeCreated", "CollectionCreated"]


def test_events_and_documents_are_of_one_history(bucket: Bucket) -> None:
    put(bucket, 0, b"before")
    bucket.set_manifest(GARDEN)
    put(bucket, 0, b"in it", collection_id=9)
    bucket.set_manifest(GARDEN.without_collection("garden", "fruit"))
    bucket.commit_now()
    assert seqnos_of(bucket, 0) == [1, 2, 3, 4, 5]
    assert isinstance(decode_event(events_of(bucket, 0)[-1]), CollectionDropped)
    settle_now(bucket)
    again = reopened(bucket)
    assert seqnos_of(again, 0) == [1, 2, 3, 4, 5]
    assert again.manifest == GARDEN.without_collection("garden", "fruit")
    # No id comes twice, though the highest is gone from the manifest.
    assert again.manifest.with_collection("garden", "new").find("garden", "new").id == 10


def test_a_new_active_vbucket_gets_all_events(bucket: Bucket) -> None:
    fresh = new_bucket(state=None)
    fresh.set_manifest(GARDEN)
    fresh.set_vbucket_state(0, VBucketState.ACTIVE)
    fresh.set_vbucket_state(1, VBucketState.REPLICA)
    fresh.commit_now()
    assert [decode_event(event).manifest_uid for event in events_of(fresh, 0)] == [0, GARDEN.uid]
    assert events_of(fresh, 1) == []


def test_the_same_manifest_again_is_no_event(bucket: Bucket) -> None:
    bucket.set_manifest(GARDEN)
    bucket.set_manifest(GARDEN)
    bucket.commit_now()
    assert len(events_of(bucket, 0)) == 2


def test_a_changed_collection_is_stored_as_flatbuffers(bucket: Bucket) -> None:
    bucket.set_manifest(GARDEN)
    encoded = GARDEN.encode().replace(b'"maxTTL": 60', b'"maxTTL": 70').replace(b'"uid": "2"', b'"uid": "3"')
    bucket.set_manifest(Manifest.decode(encoded))
    bucket.commit_now()
    (changed,) = events_of(bucket, 0)[2:]
    assert changed.version == 2
    event = decode_event(changed)
    assert (event.manifest_uid, event.collection_id, event.max_ttl_s) == (3, 9, 70)


# --- a store that is closed ---------------------------------------------------------------------------------------


def test_only_the_store_writes_to_its_numbers_and_its_commits() -> None:
    with pytest.raises(ValueError, match="read-only"):
        new_bucket().vbuckets.high_seqnos[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        new_bucket().prepares.counts[0] = 1
    inside = re.compile(r"bucket\.(pending|in_flight|young|engine|numbers|undecided)\b|\bPutRow\b|\bDeleteRow\b")
    sources = Path(headwater.__file__).parent
    outside = [path for package in ("node", "cluster", "cli", "testing") for path in (sources / package).rglob("*.py")]
    assert [path.name for path in outside if inside.search(path.read_text())] == []
