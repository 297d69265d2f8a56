"""Settling: young commits become blocks of about one size, and readers see no difference. And taking changes back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import StoreFull
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store import commits, compaction, settling
from headwater.store.bucket import Bucket
from headwater.store.data_format import block_last_seqno, blocks_of
from headwater.store.engine import MemoryEngine, PutRow, Table
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.settling import Settling, abandon, flush, is_due, remove_vbucket, roll_back, settle_now
from headwater.store.vbuckets import Retention
from support.store_harness import (
    Clock,
    FailingEngine,
    branches,
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

TARGET = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "BLOCK_BYTES_TARGET", TARGET)


def blocks(bucket: Bucket, vbucket: int) -> list[tuple[int, int]]:
    """The last seqno and the size of every block."""
    with bucket.engine.view() as view:
        rows = view.scan(Table.BLOCKS, *blocks_of(vbucket))
        return [(block_last_seqno(key), len(value)) for key, value in rows]


def journal_rows(bucket: Bucket) -> int:
    with bucket.engine.view() as view:
        return sum(1 for _ in view.scan(Table.JOURNAL, b"", b"\xff" * 16))


def write(bucket: Bucket, vbucket: int, count: int, *, value_bytes: int = 100) -> None:
    start = int(bucket.vbuckets.high_seqnos[vbucket])
    for number in range(start + 1, start + 1 + count):
        put(bucket, vbucket, b"k%d" % number, b"%0*d" % (value_bytes, number))
    bucket.commit_now()


# --- blocks -------------------------------------------------------------------------------------------------------


def test_blocks_have_about_the_target_size(bucket: Bucket) -> None:
    write(bucket, 0, 100)
    settle_now(bucket)
    sizes = [size for _, size in blocks(bucket, 0)]
    frame = len(next(iter(bucket.runs(0)))) // 5
    assert all(TARGET - frame < size <= TARGET for size in sizes[:-1])
    assert sizes[-1] <= TARGET
    assert blocks(bucket, 0)[-1][0] == 100


def test_a_change_that_is_larger_than_a_block_has_one_of_its_own(bucket: Bucket) -> None:
    write(bucket, 0, 1, value_bytes=10)
    write(bucket, 0, 1, value_bytes=5 * TARGET)
    write(bucket, 0, 1, value_bytes=10)
    settle_now(bucket)
    assert [last for last, _ in blocks(bucket, 0)] == [1, 2, 3]
    assert seqnos_of(bucket, 0) == [1, 2, 3]


def test_a_small_last_block_is_filled_up(bucket: Bucket) -> None:
    """However little each round brings, blocks do not stay small."""
    for _ in range(60):
        write(bucket, 0, 1)
        settle_now(bucket)
    sizes = [size for _, size in blocks(bucket, 0)]
    assert min(sizes[:-1]) >= TARGET // commits.APPENDED_SHARE
    assert seqnos_of(bucket, 0) == list(range(1, 61))


def test_a_block_that_is_full_is_left_alone(bucket: Bucket) -> None:
    write(bucket, 0, 1, value_bytes=TARGET)
    settle_now(bucket)
    first = blocks(bucket, 0)
    write(bucket, 0, 1)
    (step,) = Settling(bucket).steps()
    assert [change for change in step if change.table == Table.BLOCKS and not isinstance(change, PutRow)] == []
    settle_now(bucket)
    assert blocks(bucket, 0)[:1] == first


def test_vbuckets_that_are_not_touched_are_not_written(bucket: Bucket) -> None:
    write(bucket, 0, 3)
    write(bucket, 2, 3)
    settle_now(bucket)
    write(bucket, 2, 3)
    (step,) = Settling(bucket).steps()
    assert {change.key[:2] for change in step if change.table == Table.BLOCKS} == {b"\0\2"}


# --- steps --------------------------------------------------------------------------------------------------------


def test_steps_are_bounded_and_the_last_clears_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "STEP_BYTES", 1500)
    bucket = new_bucket(vbuckets=16)
    for vbucket in range(16):
        write(bucket, vbucket, 5)
    settling_round = Settling(bucket)
    sizes = []
    for step in settling_round.steps():
        bucket.engine.write(step)
        sizes.append(sum(len(change.value) for change in step if isinstance(change, PutRow)))
        has_cleared = any(change.table == Table.JOURNAL for change in step)
        assert journal_rows(bucket) == (0 if has_cleared else 16)
    settling_round.finish()
    assert len(sizes) > 4
    assert all(1500 <= size < 2500 for size in sizes[:-1])
    assert bucket.young == {}


def test_commits_between_the_steps_stay_young(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "STEP_BYTES", 1)
    bucket = new_bucket()
    for vbucket in range(4):
        write(bucket, vbucket, 3)
    settling_round = Settling(bucket)
    for step in settling_round.steps():
        bucket.engine.write(step)
        for vbucket in range(4):
            put(bucket, vbucket, b"k1", b"between")
            bucket.commit_now()
            assert value_of(bucket, vbucket, b"k1") == b"between"
            assert seqnos_of(bucket, vbucket) == list(range(1, int(bucket.vbuckets.high_seqnos[vbucket]) + 1))
    settling_round.finish()
    assert len(bucket.young) == 4 * 4
    settle_now(bucket)
    for vbucket in range(4):
        assert seqnos_of(bucket, vbucket) == list(range(1, 8))
    check_counts(bucket)


def test_a_round_takes_the_oldest_that_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many lives of a node have left commits behind, the next one comes to the end of a round."""
    monkeypatch.setattr(settling, "YOUNG_COMMITS_MAX", 3)
    bucket = new_bucket()
    for number in range(8):
        write(bucket, number % 4, 2)
    for left, bytes_max in ((5, settling.YOUNG_BYTES_MAX), (4, 1), (1, settling.YOUNG_BYTES_MAX)):
        monkeypatch.setattr(settling, "YOUNG_BYTES_MAX", bytes_max)
        settling_round = Settling(bucket, oldest=True)
        while settling_round.write_step():
            pass
        settling_round.finish()
        assert journal_rows(bucket) == len(bucket.young) == left
        assert all(seqnos_of(bucket, vbucket) == [1, 2, 3, 4] for vbucket in range(4))
    check_counts(bucket)


def test_when_to_settle(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    write(bucket, 0, 1)
    assert not is_due(bucket)
    monkeypatch.setattr(settling, "YOUNG_COMMITS_MAX", 2)
    assert not is_due(bucket)
    write(bucket, 0, 1)
    assert is_due(bucket)
    monkeypatch.undo()
    monkeypatch.setattr(settling, "YOUNG_BYTES_MAX", 200)
    assert is_due(bucket)
    settle_now(bucket)
    assert not is_due(bucket)


# --- reading ------------------------------------------------------------------------------------------------------


def test_runs_are_complete_from_every_seqno(bucket: Bucket) -> None:
    source = random.Random(2)
    for number in range(80):
        write(bucket, 1, source.randrange(1, 4), value_bytes=source.randrange(1, 400))
        if number % 7 == 3:
            settle_now(bucket)
    high = int(bucket.vbuckets.durable_seqnos[1])
    assert bucket.young
    assert len(blocks(bucket, 1)) > 10
    for after in range(high + 2):
        assert seqnos_of(bucket, 1, after_seqno=after) == list(range(after + 1, high + 1))


def test_runs_that_are_being_read_do_not_change(bucket: Bucket) -> None:
    """A stream may take its time: what it began with is what it gets."""
    write(bucket, 0, 20)
    settle_now(bucket)
    write(bucket, 0, 5)
    runs = bucket.runs(0)
    read = [next(runs).tobytes()]
    settle_now(bucket)
    write(bucket, 0, 5)
    settle_now(bucket)
    read += [run.tobytes() for run in runs]
    again = [run.tobytes() for run in bucket.runs(0)]
    assert b"".join(again).startswith(b"".join(read))
    assert seqnos_of(bucket, 0) == list(range(1, 31))


# --- taking back ------------------------------------------------------------------------------------------------------


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


def test_a_rollback_inside_the_window_of_a_compacted_vbucket_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commits, "BLOCK_BYTES_TARGET", 400)
    for step_bytes in (1, 1000, 2**24):
        monkeypatch.setattr(compaction, "STEP_BYTES", step_bytes)
        for target in range(61, 101, 7):
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
def test_a_rollback_to_before_the_window_goes_to_0(bucket: Bucket, clock: Clock, target: int) -> None:
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


def test_a_rollback_to_the_future_changes_nothing(bucket: Bucket) -> None:
    put(bucket, 0, b"k", b"v")
    assert roll_back(bucket, 0, Seqno(100)) == 1
    assert value_of(bucket, 0, b"k") == b"v"
    assert bucket.vbuckets.high_seqnos[0] == 1


def test_a_rollback_may_branch(bucket: Bucket) -> None:
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


def test_what_is_in_flight_is_not_rolled_back(bucket: Bucket) -> None:
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


def test_a_vbucket_that_is_made_again_has_nothing_in_common_with_the_old(bucket: Bucket) -> None:
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


def test_a_flush_drops_all_documents_and_begins_a_new_history(bucket: Bucket) -> None:
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
        # An active vbucket has all events for its streams; a replica gets them from its active copy.
        assert [[event.key for event in events_of(seen, vbucket)] for vbucket in range(4)] == [[b"fruit"]] * 3 + [[]]
        assert seen.vbuckets.durable_seqnos.tolist() == [1, 1, 1, 0]
        for vbucket in range(4):
            assert value_of(seen, vbucket, b"k") is None
            assert not set(dict(branches(seen, vbucket))) & set(dict(old[vbucket]))
        check_counts(seen)
    assert bucket.manifest.find("_default", "fruit") is not None
    assert put(bucket, 0, b"k").seqno == 2


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
    # Numbers of commits are not given out again: a caller may still hold one.
    assert bucket.pending.number > last
    broken.engine.writes_left = None
    # Writing goes on.
    broken.change_everything(b"last")
    bucket.commit_now()
    after = broken.all()
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
    assert settled.is_locked
    # The writer of this one had the CAS of its lock, which is released.
    assert not young.is_locked
    assert get(bucket, 2, b"settled") is not None
