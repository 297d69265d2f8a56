"""Taking back: rollbacks that are exact, removal, flush, and a commit that could not be written."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import StoreFull
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store import compaction, settling
from headwater.store.bucket import Bucket
from headwater.store.compaction import Retention
from headwater.store.engine import MemoryEngine
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.settling import abandon, flush, remove_vbucket, roll_back, settle_now
from support.store_harness import (
    Clock,
    FailingEngine,
    changes_of,
    check_counts,
    compact,
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


def branches(bucket: Bucket, vbucket: int = 0) -> list[tuple[int, int]]:
    return [(entry.vbuuid, entry.seqno) for entry in facts_of(bucket, vbucket).failover_log.entries]


def recorded(bucket: Bucket, clock: Clock, *, changes: int, seed: int = 1) -> list[dict[Any, Any]]:
    """Change vbucket 0 at random. Gives what it held after each seqno."""
    source = random.Random(seed)
    states: list[dict[Any, Any]] = [{}]
    for number in range(changes):
        key = b"k%d" % source.randrange(12)
        document = get(bucket, 0, key)
        if document is not None and not document.is_deleted and source.random() < 0.3:
            bucket.put_removal(0, collection_id=0, key=key, expired=source.random() < 0.3)
        else:
            put(bucket, 0, key, b"%d" % number, flags=number)
        written = get(bucket, 0, key)
        assert written is not None
        states.append({**states[-1], (0, key): written})
        clock.advance(1)
        if source.random() < 0.4:
            bucket.commit_now()
        if source.random() < 0.1:
            settle_now(bucket)
    bucket.commit_now()
    return states


# --- rollback -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [0, 1, 2, 17, 50, 99, 100])
def test_a_rollback_is_exact(target: int) -> None:
    clock = Clock()
    bucket = new_bucket(clock=clock)
    states = recorded(bucket, clock, changes=100)
    assert roll_back(bucket, 0, Seqno(target)) == target
    for seen in (bucket, reopened(bucket)):
        assert state_of(seen, 0) == states[target]
        assert seqnos_of(seen, 0) == list(range(1, target + 1))
        assert (seen.vbuckets.high_seqnos[0], seen.vbuckets.durable_seqnos[0]) == (target, target)
        check_counts(seen)


def test_a_rollback_inside_the_window_of_a_compacted_vbucket_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "BLOCK_BYTES_TARGET", 400)
    for step_bytes in (1, 1000, 2**24):
        monkeypatch.setattr(compaction, "STEP_BYTES", step_bytes)
        for target in range(61, 101, 3):
            clock = Clock()
            bucket = new_bucket(clock=clock)
            states = recorded(bucket, clock, changes=100, seed=target)
            settle_now(bucket)
            compact(bucket, 0, Retention(history_s=40, history_bytes=2**30, purge_age_s=0))
            assert facts_of(bucket, 0).history_start_seqno == 61
            purged = facts_of(bucket, 0).purge_seqno
            assert purged <= 61
            assert roll_back(bucket, 0, Seqno(target)) == target
            # Deletions that were purged have left nothing behind.
            expected = {
                place: document
                for place, document in states[target].items()
                if not (document.is_deleted and document.seqno <= purged)
            }
            assert {place: d for place, d in state_of(bucket, 0).items() if d.seqno > purged or not d.is_deleted} == (
                expected
            )
            check_counts(bucket)


@pytest.mark.parametrize("target", [1, 62])
def test_a_rollback_to_before_the_window_goes_to_0(target: int) -> None:
    clock = Clock()
    bucket = new_bucket(clock=clock)
    put(bucket, 0, b"purged")
    remove(bucket, 0, b"purged")
    recorded(bucket, clock, changes=100)
    settle_now(bucket)
    compact(bucket, 0, Retention(history_s=40, history_bytes=2**30, purge_age_s=0))
    assert facts_of(bucket, 0).purge_seqno > 0
    assert facts_of(bucket, 0).history_start_seqno == 63
    assert roll_back(bucket, 0, Seqno(target)) == 0
    facts = facts_of(bucket, 0)
    assert (facts.purge_seqno, facts.history_start_seqno, facts.high_seqno_floor) == (0, 0, 0)
    for seen in (bucket, reopened(bucket)):
        assert (state_of(seen, 0), changes_of(seen, 0), seen.vbuckets.high_seqnos[0]) == ({}, [], 0)
        check_counts(seen)


def test_a_rollback_to_the_future_changes_nothing() -> None:
    bucket = new_bucket()
    put(bucket, 0, b"k", b"v")
    assert roll_back(bucket, 0, Seqno(100)) == 1
    assert value_of(bucket, 0, b"k") == b"v"
    assert bucket.vbuckets.high_seqnos[0] == 1


def test_other_vbuckets_are_not_rolled_back() -> None:
    bucket = new_bucket()
    for vbucket in range(4):
        put(bucket, vbucket, b"k", b"%d" % vbucket)
    roll_back(bucket, 2, Seqno(0))
    assert [value_of(bucket, vbucket, b"k") for vbucket in range(4)] == [b"0", b"1", None, b"3"]


def test_history_goes_on_from_there() -> None:
    clock = Clock()
    bucket = new_bucket(clock=clock)
    recorded(bucket, clock, changes=20)
    cas_max = max(document.cas for document in state_of(bucket, 0).values())
    roll_back(bucket, 0, Seqno(10))
    clock.advance(-1000)
    written = put(bucket, 0, b"new", b"v")
    assert written.seqno == 11
    # What was taken back has been seen: its CAS must not come a second time.
    assert written.cas > cas_max
    bucket.commit_now()
    settle_now(bucket)
    assert seqnos_of(reopened(bucket), 0) == list(range(1, 12))


def test_the_failover_log_is_cut() -> None:
    bucket = new_bucket()
    for _ in range(3):
        put(bucket, 0, b"k")
        put(bucket, 0, b"k")
        bucket.commit_now()
        bucket = reopened(bucket)
    log = branches(bucket)
    assert [seqno for _, seqno in log] == [6, 4, 2, 0]
    roll_back(bucket, 0, Seqno(5))
    assert branches(bucket) == log[1:]
    roll_back(bucket, 0, Seqno(4))
    assert branches(bucket) == log[1:]
    roll_back(bucket, 0, Seqno(1))
    assert branches(bucket) == log[3:]
    assert bucket.vbuckets.vbuuids[0] == log[3][0]
    assert branches(reopened(bucket))[-1] == log[3]


def test_a_rollback_may_branch() -> None:
    bucket = new_bucket()
    for _ in range(4):
        put(bucket, 0, b"k")
    before = branches(bucket)
    roll_back(bucket, 0, Seqno(2), branch=True)
    ((vbuuid, seqno), *older) = branches(bucket)
    assert (seqno, older) == (2, before)
    assert vbuuid not in dict(before)
    assert bucket.vbuckets.vbuuids[0] == vbuuid


def test_the_snapshot_of_a_replica_ends_where_it_was_rolled_back_to() -> None:
    bucket = new_bucket(state=VBucketState.REPLICA)
    for _ in range(4):
        put(bucket, 0, b"k")
    roll_back(bucket, 0, Seqno(3))
    facts = facts_of(bucket, 0)
    assert (facts.snapshot_start_seqno, facts.snapshot_end_seqno, facts.state) == (3, 3, VBucketState.REPLICA)


def test_a_rollback_that_can_not_be_written_changes_nothing() -> None:
    engine = FailingEngine(MemoryEngine())
    clock = Clock()
    bucket = new_bucket(engine, clock)
    states = recorded(bucket, clock, changes=30)
    settle_now(bucket)
    log = branches(bucket)
    engine.writes_left = 1
    with pytest.raises(StoreFull):
        roll_back(bucket, 0, Seqno(10), branch=True)
    assert state_of(bucket, 0) == states[30]
    assert branches(bucket) == log
    engine.writes_left = None
    assert roll_back(bucket, 0, Seqno(10)) == 10
    assert state_of(bucket, 0) == states[10]


def test_what_is_in_flight_is_not_rolled_back() -> None:
    bucket = new_bucket()
    put(bucket, 0, b"k")
    bucket.seal()
    for action in (lambda: roll_back(bucket, 0, Seqno(0)), lambda: remove_vbucket(bucket, 0), lambda: flush(bucket)):
        with pytest.raises(AssertionError):
            action()


# --- removal and flush --------------------------------------------------------------------------------------------


def test_a_removed_vbucket_is_gone(tmp_path: Path) -> None:
    engine = LmdbEngine(tmp_path)
    bucket = new_bucket(engine)
    for vbucket in range(4):
        put(bucket, vbucket, b"k", b"v")
    settle_now(bucket)
    put(bucket, 1, b"young")
    bucket.commit_now()
    put(bucket, 1, b"pending")
    remove_vbucket(bucket, 1)
    for seen in (bucket, reopened(bucket)):
        assert not seen.vbuckets.exists(1)
        assert (changes_of(seen, 1), get(seen, 1, b"k")) == ([], None)
        assert seen.vbuckets.high_seqnos.tolist() == [1, 0, 1, 1]
        assert value_of(seen, 2, b"k") == b"v"
        assert seen.index.live_documents() == 3
    engine.close()


def test_a_vbucket_that_is_made_again_has_nothing_in_common_with_the_old() -> None:
    bucket = new_bucket()
    put(bucket, 1, b"k", b"v")
    old = branches(bucket, 1)
    remove_vbucket(bucket, 1)
    bucket.set_vbucket_state(1, VBucketState.ACTIVE)
    assert put(bucket, 1, b"other").seqno == 1
    bucket.commit_now()
    assert value_of(bucket, 1, b"k") is None
    assert not set(dict(branches(bucket, 1))) & set(dict(old))


def test_removing_what_is_not_there_does_nothing() -> None:
    bucket = new_bucket(state=None)
    remove_vbucket(bucket, 1)
    assert not bucket.vbuckets.exists(1)


def test_a_flush_drops_all_documents_and_begins_anew() -> None:
    bucket = new_bucket()
    bucket.set_manifest(Manifest().with_collection("_default", "fruit"))
    bucket.set_vbucket_state(3, VBucketState.REPLICA)
    for vbucket in range(4):
        put(bucket, vbucket, b"k", b"v")
        put(bucket, vbucket, b"k", b"v", collection_id=8)
    old = [branches(bucket, vbucket) for vbucket in range(4)]
    flush(bucket)
    for seen in (bucket, reopened(bucket)):
        assert [seen.vbuckets.state(vbucket) for vbucket in range(4)] == [VBucketState.ACTIVE] * 3 + [
            VBucketState.REPLICA
        ]
        assert seen.index.live_documents() == 0
        # What an active vbucket tells its streams is whole; a replica is told by its active copy.
        assert [[event.key for event in events_of(seen, vbucket)] for vbucket in range(4)] == [[b"fruit"]] * 3 + [[]]
        assert seen.vbuckets.durable_seqnos.tolist() == [1, 1, 1, 0]
        for vbucket in range(4):
            assert value_of(seen, vbucket, b"k") is None
            assert not set(dict(branches(seen, vbucket))) & set(dict(old[vbucket]))
        check_counts(seen)
    assert bucket.manifest.find("_default", "fruit") is not None
    assert put(bucket, 0, b"k").seqno == 2


def test_a_flush_that_can_not_be_written_changes_nothing() -> None:
    engine = FailingEngine(MemoryEngine())
    bucket = new_bucket(engine)
    for vbucket in range(4):
        put(bucket, vbucket, b"k", b"v")
    bucket.commit_now()
    settle_now(bucket)
    old = [branches(bucket, vbucket) for vbucket in range(4)]
    engine.writes_left = 1
    with pytest.raises(StoreFull):
        flush(bucket)
    engine.writes_left = None
    assert [value_of(bucket, vbucket, b"k") for vbucket in range(4)] == [b"v"] * 4
    assert [branches(bucket, vbucket) for vbucket in range(4)] == old
    assert bucket.pending.is_empty
    check_counts(bucket)
    assert put(bucket, 0, b"k").seqno == 2
    bucket.commit_now()
    assert seqnos_of(reopened(bucket), 0) == [1, 2]


# --- commits that could not be written ----------------------------------------------------------------------------


class Broken:
    """A bucket with durable documents in all vbuckets, on an engine that is just about to fail."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.engine = FailingEngine(MemoryEngine())
        self.bucket = new_bucket(self.engine, self.clock)
        self.bucket.set_manifest(Manifest().with_collection("_default", "fruit"))
        for vbucket in range(3):
            for key in (b"settled", b"young", b"young"):
                put(self.bucket, vbucket, key, b"durable")
                self.bucket.commit_now()
                if key == b"settled":
                    settle_now(self.bucket)
        remove(self.bucket, 0, b"settled")
        self.bucket.commit_now()
        self.before = self.all()

    def all(self) -> list[object]:
        bucket = self.bucket
        return [
            [state_of(bucket, vbucket) for vbucket in range(4)],
            [changes_of(bucket, vbucket) for vbucket in range(4)],
            bucket.vbuckets.high_seqnos.tolist(),
            bucket.vbuckets.durable_seqnos.tolist(),
            bucket.vbuckets.max_cas.tolist(),
            bucket.vbuckets.deleted_revs.tolist(),
            bucket.vbuckets.superseded.tolist(),
            [bucket.vbuckets.facts[vbucket] for vbucket in range(4)],
            bucket.vbuckets.states.tolist(),
            bucket.manifest,
            bucket.index.live_documents(),
        ]

    def change_everything(self, value: bytes) -> None:
        self.clock.advance(1)
        bucket = self.bucket
        for vbucket in range(3):
            put(bucket, vbucket, b"settled", value)
            remove(bucket, vbucket, b"young")
            put(bucket, vbucket, value, value)
        bucket.set_vbucket_state(1, VBucketState.DEAD)
        bucket.set_manifest(bucket.manifest.with_collection("_default", value.decode()))


@pytest.fixture
def broken() -> Broken:
    return Broken()


def test_nothing_of_a_commit_that_failed_is_visible(broken: Broken) -> None:
    bucket = broken.bucket
    broken.change_everything(b"sealed")
    sealed = bucket.seal()
    assert sealed is not None
    broken.change_everything(b"pending")
    last = bucket.pending.number
    broken.engine.writes_left = 0
    with pytest.raises(StoreFull):
        bucket.persist(sealed)
    assert abandon(bucket) == [sealed.number, last]
    assert (bucket.in_flight, bucket.pending.is_empty) == (None, True)
    assert broken.all() == broken.before
    assert [get(bucket, 0, key) for key in (b"sealed", b"pending")] == [None, None]
    check_counts(bucket)
    # Numbers of commits are not given out again: somebody may still hold one.
    assert bucket.pending.number > last
    broken.engine.writes_left = None
    assert broken.all() == broken.before


def test_only_pending_changes_can_be_taken_back_too(broken: Broken) -> None:
    broken.change_everything(b"pending")
    number = broken.bucket.pending.number
    assert abandon(broken.bucket) == [number]
    assert broken.all() == broken.before


def test_with_nothing_to_take_back_nothing_changes(broken: Broken) -> None:
    abandon(broken.bucket)
    assert broken.all() == broken.before


def test_writing_goes_on_after_a_failure(broken: Broken) -> None:
    bucket = broken.bucket
    for attempt in range(3):
        broken.change_everything(b"attempt%d" % attempt)
        sealed = bucket.seal()
        assert sealed is not None
        broken.engine.writes_left = 0
        with pytest.raises(StoreFull):
            bucket.persist(sealed)
        abandon(bucket)
        broken.engine.writes_left = None
    broken.change_everything(b"last")
    bucket.commit_now()
    for vbucket in range(3):
        assert value_of(bucket, vbucket, b"last") == b"last"
        assert seqnos_of(bucket, vbucket) == list(range(1, int(bucket.vbuckets.high_seqnos[vbucket]) + 1))
    after = broken.all()
    settle_now(bucket)
    assert broken.all() == after
    again = reopened(bucket)
    assert [state_of(again, vbucket) for vbucket in range(4)] == after[0]
    assert [changes_of(again, vbucket) for vbucket in range(4)] == after[1]


def test_a_new_vbucket_that_failed_never_was() -> None:
    bucket = new_bucket(state=None)
    bucket.set_vbucket_state(1, VBucketState.ACTIVE)
    put(bucket, 1, b"k")
    abandon(bucket)
    assert not bucket.vbuckets.exists(1)
    assert (bucket.vbuckets.high_seqnos[1], get(bucket, 1, b"k"), bucket.index.live_documents()) == (0, None, 0)


def test_locks_survive_a_failure_of_others(broken: Broken) -> None:
    """A lock is a promise of the node to its holder, and has nothing to do with what could not be written."""
    bucket = broken.bucket
    for key in (b"settled", b"young"):
        entry = bucket.find(2, 0, key)
        assert entry is not None
        bucket.set_locked(2, 0, key, entry, locked=True)
    put(bucket, 2, b"other")
    put(bucket, 2, b"young")
    abandon(bucket)
    settled, young = bucket.find(2, 0, b"settled"), bucket.find(2, 0, b"young")
    assert settled is not None
    assert young is not None
    assert settled.is_locked
    # Whoever wrote this one had the key to its lock, which is spent.
    assert not young.is_locked
    assert get(bucket, 2, b"settled") is not None


def test_committing_at_once_can_fail_and_be_tried_again(broken: Broken) -> None:
    bucket = broken.bucket
    broken.change_everything(b"late")
    broken.engine.writes_left = 0
    with pytest.raises(StoreFull):
        bucket.commit_now()
    assert bucket.in_flight is None
    assert value_of(bucket, 0, b"late") == b"late"
    broken.engine.writes_left = None
    bucket.commit_now()
    assert value_of(reopened(bucket), 0, b"late") == b"late"
