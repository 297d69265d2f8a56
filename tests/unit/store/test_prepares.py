"""Durable writes in the store: prepares that wait, their commits and aborts, and that nothing of it is ever lost."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, field, replace

import pytest

from headwater.errors import StoreFull
from headwater.protocol.features import Opcode
from headwater.protocol.frames import DurabilityLevel, decode_frames
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, Seqno, VBucketId
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from headwater.store.compaction import expire_documents
from headwater.store.engine import MemoryEngine
from headwater.store.prepares import PendingPrepare, decide_by_changes, decode_prepare
from headwater.store.settling import abandon, flush, remove_vbuckets, roll_back, settle_now
from support.store_harness import (
    EVERYTHING_KEPT,
    NOTHING_KEPT,
    Clock,
    FailingEngine,
    compact,
    facts_of,
    get,
    new_bucket,
    put,
    remove,
    reopened,
    value_of,
)

VB = VBucketId(1)
LEVEL = DurabilityLevel.MAJORITY


def prepare(bucket: Bucket, key: bytes, value: bytes = b"1", *, is_removal: bool = False) -> PendingPrepare:
    return bucket.put_prepare(
        VB,
        collection_id=DEFAULT_COLLECTION,
        key=key,
        value=b"" if is_removal else value,
        datatype=Datatype.RAW if is_removal else Datatype.JSON,
        level=LEVEL,
        flags=0 if is_removal else 7,
        is_removal=is_removal,
    )


def pending(bucket: Bucket, key: bytes) -> PendingPrepare:
    return bucket.prepares.find(VB, DEFAULT_COLLECTION, key)


def pending_keys(bucket: Bucket) -> list[bytes]:
    return [found.key for found in bucket.prepares.of(VB)]


def frames_of(bucket: Bucket) -> list[tuple[int, int, int]]:
    """Opcode, seqno and stored opaque of everything durable."""
    data = b"".join(run.tobytes() for run in bucket.runs(VB))
    return [(frame.opcode, int.from_bytes(frame.extras[:8]), frame.opaque) for frame in decode_frames(data)]


# --- one write ----------------------------------------------------------------------------------------------------


def test_a_prepare_is_stored_and_not_seen(bucket: Bucket) -> None:
    put(bucket, VB, b"k", b"0")
    prepared = prepare(bucket, b"k")
    bucket.commit_now()
    assert value_of(bucket, VB, b"k") == b"0"
    assert frames_of(bucket) == [(Opcode.DCP_MUTATION, 1, 0), (Opcode.DCP_PREPARE, 2, 0)]
    assert decode_prepare(prepared.frame).durability == LEVEL
    assert bucket.index.live_documents() == 1


def test_a_commit_is_the_mutation_with_the_distance_to_its_prepare(bucket: Bucket) -> None:
    prepared = prepare(bucket, b"k")
    put(bucket, VB, b"other")
    written = bucket.commit_prepare(prepared)
    bucket.commit_now()
    assert frames_of(bucket)[-1] == (Opcode.DCP_MUTATION, 3, 2)
    document = get(bucket, VB, b"k")
    assert (document.value, document.flags, document.cas, document.seqno) == (b"1", 7, prepared.cas, written.seqno)
    assert pending_keys(bucket) == []


def test_the_clock_never_goes_back_behind_a_commit(bucket: Bucket) -> None:
    prepared = prepare(bucket, b"k")
    later = put(bucket, VB, b"other")
    bucket.commit_prepare(prepared)
    assert put(bucket, VB, b"third").cas > later.cas


def test_a_removal_has_the_time_and_the_revision_of_its_prepare(bucket: Bucket, clock: Clock) -> None:
    put(bucket, VB, b"k")
    prepared = prepare(bucket, b"k", is_removal=True)
    at_s = clock.now_s()
    clock.advance(10)
    bucket.commit_prepare(prepared)
    document = get(bucket, VB, b"k")
    assert (document.is_deleted, document.delete_time, document.rev_seqno) == (True, at_s, 2)
    assert put(bucket, VB, b"new").seqno == 4
    new = get(bucket, VB, b"new")
    assert new.rev_seqno == 3, "a new document starts above the revisions of deleted ones"


def test_an_abort_names_its_own_seqno_first(bucket: Bucket) -> None:
    put(bucket, VB, b"k", b"0")
    bucket.abort_prepare(prepare(bucket, b"k"))
    bucket.commit_now()
    assert frames_of(bucket)[-1] == (Opcode.DCP_ABORT, 3, 0)
    assert value_of(bucket, VB, b"k") == b"0"
    assert pending_keys(bucket) == []


def test_one_document_has_one_prepare(bucket: Bucket) -> None:
    prepare(bucket, b"k")
    with pytest.raises(AssertionError, match="one durable write at a time"):
        prepare(bucket, b"k")


# --- what happens to the bucket -----------------------------------------------------------------------------------


def test_a_document_that_is_about_to_be_replaced_does_not_expire(bucket: Bucket, clock: Clock) -> None:
    put(bucket, VB, b"k", b"0", expiry=clock.now_s() + 5)
    prepared = prepare(bucket, b"k")
    clock.advance(10)
    assert expire_documents(bucket, VB) == 0
    bucket.abort_prepare(prepared)
    assert expire_documents(bucket, VB) == 1


def test_flush_drops_prepares(bucket: Bucket) -> None:
    prepare(bucket, b"k")
    flush(bucket)
    assert pending_keys(bucket) == pending_keys(reopened(bucket)) == []


def test_a_commit_that_is_not_durable_is_taken_back_and_its_prepare_waits_again() -> None:
    engine = FailingEngine(MemoryEngine())
    bucket = new_bucket(engine)
    prepared = prepare(bucket, b"k")
    bucket.commit_now()
    bucket.commit_prepare(prepared)
    prepare(bucket, b"never durable")
    engine.writes_left = 0
    with pytest.raises(StoreFull):
        bucket.commit_now()
    abandon(bucket)
    assert pending_keys(bucket) == [b"k"]
    assert value_of(bucket, VB, b"k") is None
    assert pending(bucket, b"k").is_same(prepared)


def test_a_copy_that_becomes_active_commits_what_it_inherits(bucket: Bucket) -> None:
    prepare(bucket, b"a")
    prepare(bucket, b"b", is_removal=True)
    bucket.set_vbucket_state(VB, VBucketState.REPLICA)
    bucket.commit_now()
    bucket.set_vbucket_state(VB, VBucketState.ACTIVE)
    assert value_of(bucket, VB, b"a") == b"1"
    assert pending_keys(bucket) == []
    assert facts_of(bucket, VB).failover_log.newest.seqno == 2, "the new branch begins before the commits"


def test_what_is_inherited_of_a_dropped_collection_is_aborted(bucket: Bucket) -> None:
    with_fruit = Manifest().with_collection("_default", "fruit")
    bucket.set_manifest(with_fruit)
    fruit = next(c.id for _, c in bucket.manifest.collections() if c.name == "fruit")
    bucket.put_prepare(VB, collection_id=CollectionId(fruit), key=b"k", value=b"1", datatype=Datatype.JSON, level=LEVEL)
    bucket.set_vbucket_state(VB, VBucketState.REPLICA)
    bucket.commit_now()
    bucket.set_manifest(with_fruit.without_collection("_default", "fruit"))
    bucket.set_vbucket_state(VB, VBucketState.ACTIVE)
    bucket.commit_now()
    assert pending_keys(bucket) == []
    assert frames_of(bucket)[-1][0] == Opcode.DCP_ABORT


def test_a_received_change_decides_the_prepare_of_its_document(bucket: Bucket) -> None:
    """Producers send the change itself where they do not know whether the prepare was sent."""
    prepare(bucket, b"a")
    prepare(bucket, b"b")
    run_start = bucket.pending.used_bytes
    for seqno, key in ((3, b"other"), (4, b"a")):
        change = Mutation(
            vbucket=VB, seqno=Seqno(seqno), rev_seqno=1, collection_id=DEFAULT_COLLECTION, key=key, value=b"9"
        )
        bucket.pending.append(VB, change.encode())
    decide_by_changes(
        bucket.prepares, VB, bucket.pending.frames[run_start : bucket.pending.used_bytes], bucket.index.secret
    )
    bucket.commit_now()
    assert pending_keys(bucket) == pending_keys(reopened(bucket)) == [b"b"]
    assert frames_of(bucket)[-2:] == [(Opcode.DCP_MUTATION, 3, 0), (Opcode.DCP_MUTATION, 4, 3)]


# --- compaction ---------------------------------------------------------------------------------------------------


def test_compaction_keeps_what_is_undecided_and_drops_what_is_not(bucket: Bucket, clock: Clock) -> None:
    bucket.commit_prepare(prepare(bucket, b"a"))
    bucket.abort_prepare(prepare(bucket, b"b"))
    prepare(bucket, b"c")
    bucket.commit_now()
    settle_now(bucket)
    clock.advance(1000)
    compact(bucket, VB, replace(NOTHING_KEPT, purge_age_s=1001))
    kept = [(Opcode.DCP_MUTATION, 2, 1), (Opcode.DCP_ABORT, 4, 0), (Opcode.DCP_PREPARE, 5, 0)]
    assert frames_of(bucket) == kept, "copies that have the aborted prepare have to learn of its end"
    assert facts_of(bucket, VB).purge_seqno == 0
    compact(bucket, VB, NOTHING_KEPT)
    assert frames_of(bucket) == [(Opcode.DCP_MUTATION, 2, 1), (Opcode.DCP_PREPARE, 5, 0)]
    assert facts_of(bucket, VB).purge_seqno == 4, "who is behind has to start again"
    assert pending_keys(reopened(bucket)) == [b"c"]
    assert int(bucket.vbuckets.superseded[VB]) == int(reopened(bucket).vbuckets.superseded[VB]) == 1


def test_a_decision_that_is_not_durable_drops_no_prepare(bucket: Bucket) -> None:
    prepared = prepare(bucket, b"k")
    bucket.commit_now()
    settle_now(bucket)
    bucket.commit_prepare(prepared)
    compact(bucket, VB, NOTHING_KEPT)
    assert pending_keys(reopened(bucket)) == [b"k"]


def test_an_old_cas_of_a_late_commit_does_not_shorten_the_history(bucket: Bucket, clock: Clock) -> None:
    prepared = prepare(bucket, b"late")
    clock.advance(1000)
    put(bucket, VB, b"k", b"1")
    put(bucket, VB, b"k", b"2")
    bucket.commit_prepare(prepared)
    bucket.commit_now()
    settle_now(bucket)
    compact(bucket, VB, replace(EVERYTHING_KEPT, history_s=500))
    assert [seqno for _, seqno, _ in frames_of(bucket)] == [1, 2, 3, 4]


# --- any history --------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """What a vbucket holds, and held at every seqno."""

    documents: dict[bytes, bytes] = field(default_factory=dict)
    undecided: dict[bytes, tuple[int, bytes | None]] = field(default_factory=dict)
    """Key → the prepare's seqno and what the document is to become; None for removed."""
    history: list[tuple[dict[bytes, bytes], dict[bytes, tuple[int, bytes | None]]]] = field(default_factory=list)

    @property
    def high_seqno(self) -> int:
        return len(self.history)

    def take(self, key: bytes, value: bytes | None) -> None:
        self.documents.pop(key, None)
        if value is not None:
            self.documents[key] = value

    def step(self) -> None:
        self.history.append((dict(self.documents), dict(self.undecided)))

    def roll_back(self, seqno: int) -> None:
        del self.history[seqno:]
        documents, undecided = self.history[-1] if self.history else ({}, {})
        self.documents, self.undecided = dict(documents), dict(undecided)


def check(bucket: Bucket, model: Model, keys: list[bytes]) -> None:
    assert {key: value for key in keys if (value := value_of(bucket, VB, key)) is not None} == model.documents
    found = {
        waiting.key: (waiting.seqno, None if message.deleted else message.value)
        for waiting in bucket.prepares.of(VB)
        for message in [decode_prepare(waiting.frame)]
    }
    assert found == model.undecided
    assert int(bucket.prepares.counts[VB]) == len(found)
    assert bucket.prepares.held_bytes == sum(len(waiting.frame) for waiting in bucket.prepares.of(VB))
    assert int(bucket.vbuckets.high_seqnos[VB]) == model.high_seqno
    if bucket.pending.is_empty:
        opcodes = [opcode for opcode, _, _ in frames_of(bucket)]
        prepares = opcodes.count(Opcode.DCP_PREPARE)
        versions = len(opcodes) - prepares - opcodes.count(Opcode.DCP_ABORT)
        assert int(bucket.vbuckets.superseded[VB]) == prepares + versions - int(bucket.index.tables[VB, 2])


def write_something(bucket: Bucket, model: Model, dice: random.Random, key: bytes) -> None:
    value = str(dice.randrange(10**6)).encode()
    if key in model.undecided:
        prepared_seqno, coming = model.undecided.pop(key)
        assert pending(bucket, key).seqno == prepared_seqno
        if dice.random() < 0.6:
            bucket.commit_prepare(pending(bucket, key))
            model.take(key, coming)
        else:
            bucket.abort_prepare(pending(bucket, key))
    elif dice.random() < 0.5:
        is_removal = key in model.documents and dice.random() < 0.3
        prepared = prepare(bucket, key, value, is_removal=is_removal)
        model.undecided[key] = (prepared.seqno, None if is_removal else value)
    elif key in model.documents and dice.random() < 0.3:
        remove(bucket, VB, key)
        model.take(key, None)
    else:
        put(bucket, VB, key, value)
        model.take(key, value)
    model.step()


@pytest.mark.parametrize("seed", range(25))
def test_any_history_is_what_the_model_says(seed: int, clock: Clock) -> None:
    dice = random.Random(seed)
    bucket, model = new_bucket(clock=clock), Model()
    keys = [bytes([letter]) for letter in b"abcdef"]
    durable = deepcopy(model)
    for _ in range(250):
        action = dice.random()
        clock.advance(dice.random() * 5)
        if action < 0.7:
            write_something(bucket, model, dice, dice.choice(keys))
        elif action < 0.8:
            bucket.commit_now()
            durable = deepcopy(model)
        elif action < 0.86:
            bucket.commit_now()
            durable = deepcopy(model)
            settle_now(bucket)
        elif action < 0.92:
            retention = dice.choice([NOTHING_KEPT, replace(NOTHING_KEPT, history_s=20, history_bytes=10**6)])
            compact(bucket, VB, replace(retention, purge_age_s=10**9))
        elif action < 0.96:
            bucket, model = reopened(bucket), deepcopy(durable)
        else:
            reached = roll_back(bucket, VB, Seqno(dice.randint(0, model.high_seqno)))
            model.roll_back(reached)
            durable = deepcopy(model)
        check(bucket, model, keys)


def test_vbuckets_that_are_removed_together_take_their_prepares_with_them(bucket: Bucket) -> None:
    prepare(bucket, b"k")
    bucket.commit_now()
    remove_vbuckets(bucket, [VB, 2])
    assert bucket.prepares.find(VB, DEFAULT_COLLECTION, b"k") is None
    assert (bucket.prepares.vbuckets(), bucket.prepares.held_bytes) == ([], 0)
    remove_vbuckets(bucket, [])
