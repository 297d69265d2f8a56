"""Compaction: what leaves the blocks, what stays, and that nothing deleted comes back. And expiry, once and bounded."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest

from headwater.errors import StoreFull
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_changes import Expiration, Mutation
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, Cas, Seqno
from headwater.protocol.values import Datatype, ValueParts, decode_xattrs, encode_xattrs
from headwater.store import commits, compaction, settling
from headwater.store.bucket import Bucket, GivenVersion
from headwater.store.compaction import (
    compact_vbucket,
    expire_document,
    expire_documents,
    finish_compaction,
    is_expired,
    write_compacted,
)
from headwater.store.engine import MemoryEngine
from headwater.store.receiving import begin_snapshot
from headwater.store.settling import abandon, roll_back, settle_now
from headwater.store.vbuckets import Retention
from support.store_harness import (
    EVERYTHING_KEPT,
    NOTHING_KEPT,
    START_S,
    Clock,
    FailingEngine,
    changes_of,
    check_counts,
    compact,
    compaction_steps,
    events_of,
    facts_of,
    get,
    new_bucket,
    put,
    remove,
    reopened,
    seqnos_of,
    state_of,
    value_of,
)

LONG = 10**9


@pytest.fixture(params=[1, 2**24], ids=["many steps", "one step"])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is said of one step holds for many: with this, one frame a block and one block a step."""
    monkeypatch.setattr(compaction, "STEP_BYTES", request.param)
    if request.param == 1:
        monkeypatch.setattr(commits, "BLOCK_BYTES_TARGET", 1)


@pytest.fixture(params=[1, 2**18], ids=["small blocks", "one block"])
def block_sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where exactly the window begins does not depend on where blocks do."""
    monkeypatch.setattr(commits, "BLOCK_BYTES_TARGET", request.param)


def settle(bucket: Bucket) -> None:
    bucket.commit_now()
    settle_now(bucket)


def write(bucket: Bucket, *keys: str, value: bytes = b"{}") -> None:
    """Versions of documents in vbucket 0, settled; a name after a minus is deleted."""
    for key in keys:
        if key.startswith("-"):
            remove(bucket, 0, key[1:].encode())
        else:
            put(bucket, 0, key.encode(), value)
    settle(bucket)


def copy_of(bucket: Bucket) -> MemoryEngine:
    """What a process that dies now would leave behind."""
    assert isinstance(bucket.engine.unchecked, MemoryEngine)
    return deepcopy(bucket.engine.unchecked)


# --- superseded versions ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steps")
def test_superseded_versions_go(bucket: Bucket) -> None:
    write(bucket, *"abacabd")
    before = state_of(bucket, 0)
    compact(bucket, 0)
    assert seqnos_of(bucket, 0) == [4, 5, 6, 7]
    assert state_of(bucket, 0) == before
    check_counts(bucket)
    assert int(bucket.vbuckets.superseded[0]) == 0
    assert state_of(reopened(bucket), 0) == before


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("keys", ["abc", ""])
def test_with_nothing_to_drop_nothing_is_written(bucket: Bucket, keys: str) -> None:
    write(bucket, *keys)
    facts = facts_of(bucket, 0)
    assert compact(bucket, 0) == 0
    assert compact_vbucket(bucket, 0, NOTHING_KEPT).changes == []
    assert facts_of(bucket, 0) == facts


def test_what_is_young_is_not_looked_at(bucket: Bucket) -> None:
    write(bucket, *"ab")
    put(bucket, 0, b"a", b"young")
    bucket.commit_now()
    put(bucket, 0, b"a", b"younger")
    bucket.commit_now()
    assert compact(bucket, 0) == 0
    assert seqnos_of(bucket, 0) == [1, 2, 3, 4]
    settle(bucket)
    compact(bucket, 0)
    assert seqnos_of(bucket, 0) == [2, 4]
    assert value_of(bucket, 0, b"a") == b"younger"


def test_what_is_settled_half_way_is_not_dropped_while_it_is_young_as_well(clock: Clock) -> None:
    """It would come back from the journal."""
    engine = FailingEngine(MemoryEngine())
    bucket = new_bucket(engine, clock)
    write(bucket, "a", "a")
    for key in (b"b", b"b", b"c"):
        put(bucket, 0, key)
    remove(bucket, 0, b"c")
    put(bucket, 1, b"for another step")
    bucket.commit_now()
    clock.advance(10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settling, "STEP_BYTES", 1)
        engine.writes_left = 1
        with pytest.raises(StoreFull):
            settle_now(bucket)
        engine.writes_left = None
    compact(bucket, 0)
    assert seqnos_of(bucket, 0) == [2, 3, 4, 5, 6]
    for seen in (bucket, reopened(bucket, deepcopy(engine.inner))):
        check_counts(seen)
    settle_now(bucket)
    compact(bucket, 0)
    assert seqnos_of(bucket, 0) == [2, 4]
    check_counts(bucket)


# --- the history window -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("block_sizes")
def test_versions_inside_the_window_of_seconds_are_kept(bucket: Bucket, clock: Clock) -> None:
    for second in range(10):
        clock.ns = (START_S + second) * 1_000_000_000
        write(bucket, "k", f"only {second}")
    clock.advance(1)
    # What was written 4 seconds ago and later. Before that, the version that k had then.
    compact(bucket, 0, Retention(history_s=4, history_bytes=2**30, purge_age_s=LONG))
    assert [seqno for seqno in seqnos_of(bucket, 0) if seqno % 2] == [13, 15, 17, 19]
    assert len(state_of(bucket, 0)) == 11
    assert facts_of(bucket, 0).history_start_seqno == 14
    check_counts(bucket)


@pytest.mark.usefixtures("block_sizes")
def test_versions_inside_the_window_of_bytes_are_kept(bucket: Bucket) -> None:
    write(bucket, *("k" * 20), value=bytes(100))
    frame = sum(len(run) for run in bucket.runs(0)) // 20
    compact(bucket, 0, Retention(history_s=LONG, history_bytes=5 * frame, purge_age_s=LONG))
    assert seqnos_of(bucket, 0) == [15, 16, 17, 18, 19, 20]
    assert facts_of(bucket, 0).history_start_seqno == 15
    check_counts(bucket)


@pytest.mark.usefixtures("steps")
def test_the_version_before_the_window_is_kept_for_changed_keys(bucket: Bucket, clock: Clock) -> None:
    write(bucket, "a", "b", "c", "a", "b", "-c")
    clock.advance(100)
    write(bucket, "a", "c", "a")
    compact(bucket, 0, Retention(history_s=50, history_bytes=2**30, purge_age_s=LONG))
    # Of a: 4 as it was, then all. Of b: the newest. Of c: its deletion, then what came. A step sees no blocks but its
    # own, and keeps what could be the last before the window.
    one_step = [4, 5, 6, 7, 8, 9]
    assert seqnos_of(bucket, 0) == (one_step if compaction.STEP_BYTES > 1 else [1, 3, *one_step])
    assert facts_of(bucket, 0).history_start_seqno == 6
    check_counts(bucket)
    for target, expected in ((6, {b"a": 4, b"b": 5, b"c": 6}), (7, {b"a": 7, b"b": 5, b"c": 6})):
        again = reopened(bucket, copy_of(bucket))
        assert roll_back(again, 0, Seqno(target)) == target
        assert {key: document.seqno for (_, key), document in state_of(again, 0).items()} == expected


@pytest.mark.usefixtures("block_sizes")
def test_a_version_that_was_made_long_ago_elsewhere_does_not_end_the_window(bucket: Bucket, clock: Clock) -> None:
    """Its CAS is older than those of the changes before it, and was never a time at which it was written here."""
    write(bucket, "k", "k")
    clock.advance(100)
    write(bucket, "k", "k")
    elsewhere = GivenVersion(cas=Cas((START_S - 10**6) * 1_000_000_000), rev_seqno=1)
    bucket.put_mutation(
        0, collection_id=DEFAULT_COLLECTION, key=b"old", value=b"1", datatype=Datatype.JSON, given=elsewhere
    )
    bucket.commit_now()
    write(bucket, "k")
    compact(bucket, 0, Retention(history_s=50, history_bytes=2**30, purge_age_s=LONG))
    assert facts_of(bucket, 0).history_start_seqno == 2
    assert seqnos_of(bucket, 0)[-4:] == [3, 4, 5, 6]


def test_the_window_does_not_go_back(bucket: Bucket, clock: Clock) -> None:
    """A clock that is set back, or a larger window: what has been dropped is not promised again."""
    for _ in range(5):
        write(bucket, "k")
        clock.advance(10)
    compact(bucket, 0)
    start = facts_of(bucket, 0).history_start_seqno
    assert start == 5
    clock.advance(-1000)
    write(bucket, "k", "k")
    compact(bucket, 0, EVERYTHING_KEPT)
    assert facts_of(bucket, 0).history_start_seqno == start
    assert seqnos_of(bucket, 0) == [5, 6, 7]


# --- deletions ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steps")
def test_deletions_are_purged_by_age(bucket: Bucket, clock: Clock) -> None:
    write(bucket, "a", "b", "c", "-a")
    clock.advance(100)
    write(bucket, "-b")
    clock.advance(50)
    compact(bucket, 0, Retention(history_s=0, history_bytes=0, purge_age_s=100))
    assert seqnos_of(bucket, 0) == [3, 5]
    assert get(bucket, 0, b"a") is None
    assert get(bucket, 0, b"b") is not None
    assert facts_of(bucket, 0).purge_seqno == 4
    check_counts(bucket)
    clock.advance(51)
    compact(bucket, 0, Retention(history_s=0, history_bytes=0, purge_age_s=100))
    assert seqnos_of(bucket, 0) == [3]
    assert facts_of(bucket, 0).purge_seqno == 5
    again = reopened(bucket)
    assert facts_of(again, 0).purge_seqno == 5
    assert list(state_of(again, 0)) == [(0, b"c")]
    check_counts(again)


@pytest.mark.usefixtures("steps")
def test_expirations_are_purged_like_deletions(bucket: Bucket, clock: Clock) -> None:
    put(bucket, 0, b"k")
    bucket.put_removal(0, collection_id=0, key=b"k", expired=True)
    settle(bucket)
    clock.advance(10)
    compact(bucket, 0)
    assert seqnos_of(bucket, 0) == []
    assert facts_of(bucket, 0).purge_seqno == 2


@pytest.mark.usefixtures("steps")
def test_a_superseded_deletion_does_not_move_the_purge_seqno(bucket: Bucket, clock: Clock) -> None:
    write(bucket, "a", "-a", "a")
    clock.advance(10)
    compact(bucket, 0)
    assert seqnos_of(bucket, 0) == [3]
    assert facts_of(bucket, 0).purge_seqno == 0


def test_a_deletion_behind_its_cas_revives_no_document(bucket: Bucket, clock: Clock) -> None:
    """The window goes by CAS, the purge by the time of the deletion. Here the CAS is far ahead of the time."""
    clock.advance(100_000)
    write(bucket, "k")
    clock.advance(-100_000)
    write(bucket, "-k")
    clock.advance(10)
    compact(bucket, 0, Retention(history_s=3600, history_bytes=2**30, purge_age_s=5))
    for seen in (bucket, reopened(bucket)):
        assert value_of(seen, 0, b"k") is None


def test_time_between_steps_revives_no_document(bucket: Bucket, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step keeps k, which is just inside the window; the deletion would be outside for the second."""
    monkeypatch.setattr(compaction, "STEP_BYTES", 1)
    monkeypatch.setattr(commits, "BLOCK_BYTES_TARGET", 1)
    write(bucket, "k")
    clock.advance(1)
    write(bucket, "-k")
    clock.advance(8)
    retention = Retention(history_s=10, history_bytes=2**30, purge_age_s=10)
    first, *_ = (clock.advance(60) or step for step in compaction_steps(bucket, 0, retention))
    assert first.reached_seqno == 1
    assert value_of(reopened(bucket), 0, b"k") is None
    compact(bucket, 0, retention)
    assert seqnos_of(bucket, 0) == []


def test_streams_know_of_versions_that_go_before_they_are_gone(bucket: Bucket) -> None:
    """The write is in another thread, and a stream may have its turn at any moment of it."""
    write(bucket, "a", "a", "-a", "b")
    compacted = compact_vbucket(bucket, 0, NOTHING_KEPT)
    known = facts_of(bucket, 0)
    assert known.history_start_seqno == compacted.facts.history_start_seqno > 0
    assert known.purge_seqno == compacted.facts.purge_seqno


def test_a_snapshot_that_begins_while_a_copy_is_compacted_stays(bucket: Bucket) -> None:
    write(bucket, "a", "a", "b")
    bucket.set_vbucket_state(0, VBucketState.REPLICA)
    bucket.commit_now()
    compacted = compact_vbucket(bucket, 0, NOTHING_KEPT)
    begin_snapshot(bucket, 0, start=Seqno(4), end=Seqno(9), has_history=False, purge_seqno=Seqno(7))
    write_compacted(bucket, compacted)
    finish_compaction(bucket, 0, compacted)
    assert (facts_of(bucket, 0).history_start_seqno, facts_of(bucket, 0).purge_seqno) == (9, 7)


# --- what is not durable ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("newer", ["k", "-k"])
def test_a_version_that_is_not_durable_does_not_supersede_one_that_is(bucket: Bucket, newer: str) -> None:
    write(bucket, "k", "k", value=b"durable")
    (remove if newer.startswith("-") else put)(bucket, 0, b"k")
    compact(bucket, 0)
    assert 2 in seqnos_of(bucket, 0)
    assert value_of(reopened(bucket, copy_of(bucket)), 0, b"k") == b"durable"
    abandon(bucket)
    assert value_of(bucket, 0, b"k") == b"durable"
    check_counts(bucket)


def test_a_deletion_is_not_purged_for_the_sake_of_a_version_that_is_not_durable(bucket: Bucket, clock: Clock) -> None:
    write(bucket, "k", "-k")
    clock.advance(100)
    put(bucket, 0, b"k", b"pending")
    compact(bucket, 0)
    for _ in range(2):
        assert value_of(reopened(bucket, copy_of(bucket)), 0, b"k") is None
        abandon(bucket)
        assert value_of(bucket, 0, b"k") is None
        compact(bucket, 0)
        check_counts(bucket)


def test_a_rollback_between_steps_revives_no_document(
    bucket: Bucket, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "STEP_BYTES", 1)
    monkeypatch.setattr(commits, "BLOCK_BYTES_TARGET", 1)
    write(bucket, "k", "-k")
    clock.advance(100)
    put(bucket, 0, b"k", b"pending")
    for _ in compaction_steps(bucket, 0):
        abandon(bucket)
        assert value_of(reopened(bucket, copy_of(bucket)), 0, b"k") is None


# --- what happens meanwhile ---------------------------------------------------------------------------------------


def test_documents_written_while_a_step_is_written(bucket: Bucket, clock: Clock) -> None:
    """The engine is written beside the event loop, which goes on serving."""
    write(bucket, "a", "-a", "b", "b")
    clock.advance(10)
    compacted = compact_vbucket(bucket, 0, NOTHING_KEPT)
    put(bucket, 0, b"a", b"again")
    put(bucket, 0, b"b", b"again")
    write_compacted(bucket, compacted)
    finish_compaction(bucket, 0, compacted)
    bucket.commit_now()
    assert (value_of(bucket, 0, b"a"), value_of(bucket, 0, b"b")) == (b"again", b"again")
    check_counts(bucket)
    check_counts(reopened(bucket))


def test_a_state_given_while_a_step_is_written_is_kept(bucket: Bucket) -> None:
    write(bucket, "a", "a")
    compacted = compact_vbucket(bucket, 0, NOTHING_KEPT)
    bucket.set_vbucket_state(0, VBucketState.REPLICA)
    write_compacted(bucket, compacted)
    finish_compaction(bucket, 0, compacted)
    bucket.commit_now()
    for seen in (bucket, reopened(bucket)):
        facts = facts_of(seen, 0)
        assert (facts.state, facts.history_start_seqno, facts.high_seqno_floor) == (VBucketState.REPLICA, 2, 2)


def test_a_state_that_waits_to_be_committed_does_not_undo_what_compaction_stored(bucket: Bucket, clock: Clock) -> None:
    """Where it did, the purged seqno would be given out a second time after a restart."""
    write(bucket, "a", "-a")
    clock.advance(10)
    bucket.set_vbucket_state(0, VBucketState.DEAD)
    compact(bucket, 0)
    assert facts_of(bucket, 0).state == VBucketState.DEAD
    # Not durable yet, and to be taken back if it can't be made so.
    assert facts_of(reopened(bucket, copy_of(bucket)), 0).state == VBucketState.ACTIVE
    bucket.commit_now()
    again = reopened(bucket)
    facts = facts_of(again, 0)
    assert (facts.state, facts.purge_seqno, facts.high_seqno_floor) == (VBucketState.DEAD, 2, 2)
    assert again.vbuckets.high_seqnos[0] == 2


def test_a_state_that_could_not_be_committed_is_not_stored_by_compaction(bucket: Bucket) -> None:
    write(bucket, "a", "a")
    bucket.set_vbucket_state(0, VBucketState.DEAD)
    compact(bucket, 0)
    abandon(bucket)
    assert facts_of(bucket, 0).state == VBucketState.ACTIVE
    assert facts_of(bucket, 0).history_start_seqno == 2


# --- collections --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("steps")
def test_what_a_dropped_collection_held_vanishes(bucket: Bucket) -> None:
    fruit = Manifest().with_collection("_default", "fruit")
    bucket.set_manifest(fruit)
    for key in (b"a", b"b", b"a"):
        put(bucket, 0, key, collection_id=8)
        put(bucket, 0, key)
    remove(bucket, 0, b"b", collection_id=8)
    bucket.set_manifest(fruit.without_collection("_default", "fruit"))
    settle(bucket)
    compact(bucket, 0, EVERYTHING_KEPT)
    assert get(bucket, 0, b"a", collection_id=8) is None
    assert [place for place in state_of(bucket, 0) if place[0]] == []
    assert len(events_of(bucket, 0)) == 2
    assert value_of(bucket, 0, b"a") == b"{}"
    # No deletion of the others was lost by it.
    assert facts_of(bucket, 0).purge_seqno == 0
    check_counts(bucket)
    assert bucket.index.live_documents() == 2


@pytest.mark.usefixtures("steps")
def test_a_collection_whose_drop_is_not_durable_keeps_its_documents(bucket: Bucket) -> None:
    fruit = Manifest().with_collection("_default", "fruit")
    bucket.set_manifest(fruit)
    put(bucket, 0, b"a", b"apple", collection_id=8)
    settle(bucket)
    bucket.set_manifest(fruit.without_collection("_default", "fruit"))
    compact(bucket, 0)
    abandon(bucket)
    assert bucket.manifest == fruit
    assert value_of(bucket, 0, b"a", collection_id=8) == b"apple"


def test_system_events_are_kept(bucket: Bucket) -> None:
    manifest = bucket.manifest
    for name in ("one", "two", "three"):
        manifest = manifest.with_collection("_default", name)
        bucket.set_manifest(manifest)
    write(bucket, "a", "a")
    compact(bucket, 0)
    assert [event.key for event in events_of(bucket, 0)] == [b"one", b"two", b"three"]


# --- the whole ----------------------------------------------------------------------------------------------------


def test_compaction_asks_for_a_bucket_at_rest(bucket: Bucket) -> None:
    write(bucket, "a")
    put(bucket, 0, b"a")
    bucket.seal()
    with pytest.raises(AssertionError):
        compact_vbucket(bucket, 0, NOTHING_KEPT)


def test_a_vbucket_that_is_not_stored_yet(clock: Clock) -> None:
    bucket = new_bucket(clock=clock, state=None)
    bucket.set_vbucket_state(0, VBucketState.ACTIVE)
    put(bucket, 0, b"k")
    assert compact(bucket, 0) == 0
    bucket.commit_now()
    assert value_of(bucket, 0, b"k") == b"{}"


def test_retention_has_the_documented_defaults() -> None:
    assert Retention() == replace(NOTHING_KEPT, history_s=3600, history_bytes=2**24, purge_age_s=3 * 86400)


# --- expiry -----------------------------------------------------------------------------------------------------------


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
    assert other.rev_seqno == 4


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
    assert kept.datatype == Datatype.XATTR
    assert decode_xattrs(kept.value) == ValueParts({"_sync": b"1"}, b"")
    gone = get(bucket, 0, b"users")
    assert (gone.datatype, gone.value) == (Datatype.RAW, b"")
    entry = bucket.find(0, 0, b"both")
    assert entry.has_xattrs


def test_a_dropped_collection_gets_no_expirations(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
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
