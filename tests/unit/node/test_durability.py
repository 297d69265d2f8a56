"""Durable writes in progress: every way in which one is decided, and that it is decided once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headwater.errors import StoreFull
from headwater.node import durability as module
from headwater.node.durability import Chain, SyncWrite, SyncWrites, chains_of, is_possible, majority, satisfied_seqno
from headwater.protocol.frames import DurabilityLevel
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, Seqno, VBucketId
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from headwater.store.engine import MemoryEngine
from headwater.store.prepares import decide_by_changes
from headwater.store.settling import abandon, roll_back
from support.cases import case
from support.machine import calls_of
from support.store_harness import Clock, FailingEngine, new_bucket, value_of

VB = VBucketId(0)


def tracked(bucket: Bucket, *chain: str | None) -> SyncWrites:
    sync_writes = SyncWrites(bucket=bucket)
    set_chain(sync_writes, *chain)
    return sync_writes


def set_chain(sync_writes: SyncWrites, *chain: str | None) -> None:
    bucket = sync_writes.bucket
    facts = bucket.vbuckets.facts[VB]
    assert facts is not None
    bucket.set_vbucket_facts(VB, replace(facts, topology=(list(chain),)))
    bucket.commit_now()
    sync_writes.evaluate(VB)


def begin(
    sync_writes: SyncWrites, key: bytes = b"k", *, deadline_s: float = 30, collection_id: int = 0, value: bytes = b"1"
) -> SyncWrite:
    prepare = sync_writes.bucket.put_prepare(VB, collection_id=CollectionId(collection_id), key=key, value=value,
        datatype=Datatype.JSON, level=DurabilityLevel.MAJORITY,
    )  # fmt: skip
    return sync_writes.begin(prepare, deadline_s=deadline_s)


def status_of(write: SyncWrite) -> Status | None:
    return None if write.outcome is None else write.outcome.status


def test_the_acknowledgement_of_a_later_seqno_decides_earlier_ones() -> None:
    sync_writes = tracked(new_bucket(), "a", "b")
    writes = [begin(sync_writes, key) for key in (b"x", b"y", b"z")]
    sync_writes.bucket.commit_now()
    sync_writes.acknowledge(VB, "b", Seqno(2))
    assert [status_of(write) for write in writes] == [Status.SUCCESS, Status.SUCCESS, None]
    assert [write.outcome.seqno for write in writes[:2] if write.outcome] == [4, 5], "in the order of their prepares"


def test_an_older_acknowledgement_takes_nothing_back() -> None:
    sync_writes = tracked(new_bucket(), "a", "b")
    sync_writes.bucket.commit_now()
    begin(sync_writes, b"x")
    second = begin(sync_writes, b"y")
    sync_writes.bucket.commit_now()
    set_chain(sync_writes, "a", "c")
    sync_writes.acknowledge(VB, "b", Seqno(2))
    sync_writes.acknowledge(VB, "b", Seqno(1))
    set_chain(sync_writes, "a", "b")
    assert status_of(second) == Status.SUCCESS


def test_acknowledgements_of_another_branch_mean_nothing() -> None:
    sync_writes = tracked(new_bucket(), "a", "b")
    bucket = sync_writes.bucket
    sync_writes.acknowledge(VB, "b", Seqno(100))
    roll_back(bucket, VB, Seqno(0), branch=True)
    write = begin(sync_writes)
    bucket.commit_now()
    sync_writes.evaluate(VB)
    assert status_of(write) is None


def test_a_write_that_is_lost_with_a_rollback_is_ambiguous_though_its_seqno_is_given_again() -> None:
    sync_writes = tracked(new_bucket(), "a", "b")
    lost = begin(sync_writes)
    sync_writes.bucket.commit_now()
    roll_back(sync_writes.bucket, VB, Seqno(0), branch=True)
    sync_writes.evaluate(VB)
    again = begin(sync_writes)
    assert lost.prepare.seqno == again.prepare.seqno
    assert (status_of(lost), status_of(again)) == (Status.SYNC_WRITE_AMBIGUOUS, None)
    assert sync_writes.has_news


def test_a_dropped_collection_aborts() -> None:
    bucket = new_bucket()
    sync_writes = tracked(bucket, "a", "b")
    bucket.set_manifest(Manifest().with_collection("_default", "fruit"))
    fruit = next(c.id for _, c in bucket.manifest.collections() if c.name == "fruit")
    write = begin(sync_writes, collection_id=fruit)
    bucket.commit_now()
    bucket.set_manifest(bucket.manifest.without_collection("_default", "fruit"))
    sync_writes.tick(0)
    assert status_of(write) == Status.SYNC_WRITE_AMBIGUOUS
    assert bucket.prepares.of(VB) == []


def test_so_many_writes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITES_MAX", 2)
    sync_writes = tracked(new_bucket(), "a", "b")
    begin(sync_writes, b"x")
    assert not sync_writes.is_full
    begin(sync_writes, b"y")
    assert sync_writes.is_full
    sync_writes.tick(100)
    assert not sync_writes.is_full


def test_a_single_copy_is_satisfied_when_it_is_durable() -> None:
    sync_writes = tracked(new_bucket(), "a", "b")
    write = begin(sync_writes)
    facts = sync_writes.bucket.vbuckets.facts[VB]
    assert facts is not None
    sync_writes.bucket.set_vbucket_facts(VB, replace(facts, topology=None))
    sync_writes.evaluate(VB)
    assert status_of(write) is None
    sync_writes.bucket.commit_now()
    sync_writes.on_durable()
    assert status_of(write) == Status.SUCCESS


def fail_commit(sync_writes: SyncWrites, engine: FailingEngine) -> None:
    """The disk is full, for one commit."""
    engine.writes_left = 0
    with pytest.raises(StoreFull):
        sync_writes.bucket.commit_now()
    engine.writes_left = None
    abandon(sync_writes.bucket)
    sync_writes.on_void()


def test_an_abort_that_could_not_be_stored_leaves_the_write_undecided() -> None:
    engine = FailingEngine(MemoryEngine())
    sync_writes = tracked(new_bucket(engine), "a", "b")
    write = begin(sync_writes, deadline_s=5)
    sync_writes.bucket.commit_now()
    sync_writes.tick(6)
    assert status_of(write) == Status.SYNC_WRITE_AMBIGUOUS
    fail_commit(sync_writes, engine)
    assert status_of(write) is None
    sync_writes.acknowledge(VB, "b", Seqno(1))
    assert status_of(write) == Status.SUCCESS


def test_of_two_writes_of_a_key_the_one_that_is_prepared_goes_on_when_a_commit_fails() -> None:
    engine = FailingEngine(MemoryEngine())
    sync_writes = tracked(new_bucket(engine), "a", "b")
    first = begin(sync_writes)
    sync_writes.bucket.commit_now()
    sync_writes.acknowledge(VB, "b", Seqno(1))
    assert sync_writes.in_the_way(VB, DEFAULT_COLLECTION, b"k") is None, "the first one is decided"
    second = begin(sync_writes)
    fail_commit(sync_writes, engine)
    assert status_of(second) == Status.ETMPFAIL, "no replica has ever had its prepare"
    assert sync_writes.has_news
    assert status_of(first) == Status.SUCCESS, "a majority holds its prepare still"
    sync_writes.bucket.commit_now()
    sync_writes.on_durable()
    assert value_of(sync_writes.bucket, VB, b"k") == b"1"


def test_what_is_decided_stays_decided_when_the_commit_of_another_bucket_fails() -> None:
    sync_writes = tracked(new_bucket(), "a", "b")
    first = begin(sync_writes)
    sync_writes.bucket.commit_now()
    sync_writes.acknowledge(VB, "b", Seqno(1))
    second = begin(sync_writes)
    sync_writes.on_void()
    assert (status_of(first), status_of(second)) == (Status.SUCCESS, None)
    sync_writes.bucket.commit_now()
    sync_writes.on_durable()
    sync_writes.acknowledge(VB, "b", Seqno(3))
    assert status_of(second) == Status.SUCCESS


def test_a_write_that_was_lost_is_answered_though_another_one_of_its_key_begins_before_anybody_looks() -> None:
    sync_writes = tracked(new_bucket(), "a", "b")
    lost = begin(sync_writes)
    sync_writes.bucket.commit_now()
    roll_back(sync_writes.bucket, VB, Seqno(0), branch=True)
    again = begin(sync_writes)
    assert (status_of(lost), status_of(again)) == (Status.SYNC_WRITE_AMBIGUOUS, None)
    assert sync_writes.has_news


class Tracking(RuleBasedStateMachine):
    """Whatever happens in whatever order: every write is decided in the end, once, and success means a majority."""

    @initialize()
    def start(self) -> None:
        self.clock = Clock()
        self.engine = FailingEngine(MemoryEngine())
        self.bucket = new_bucket(self.engine, self.clock)
        self.sync_writes = tracked(self.bucket, "a", "b", "c")
        self.now_s = 0.0
        self.held = {"b": 0, "c": 0}
        """What the replicas really hold."""
        self.writes: list[SyncWrite] = []
        self.reported: dict[int, Status] = {}

    @rule(key=st.sampled_from([b"x", b"y"]))
    def write(self, key: bytes) -> None:
        in_the_way = self.sync_writes.in_the_way(VB, DEFAULT_COLLECTION, key)
        if in_the_way is None:
            self.writes.append(begin(self.sync_writes, key, deadline_s=self.now_s + 5))
        else:
            assert in_the_way == Status.SYNC_WRITE_IN_PROGRESS

    @rule()
    def commit(self) -> None:
        self.bucket.commit_now()
        self.sync_writes.on_durable()

    @rule()
    def fail(self) -> None:
        self.engine.writes_left = 0
        try:
            self.bucket.commit_now()
        except StoreFull:
            abandon(self.bucket)
            self.sync_writes.on_void()
        self.engine.writes_left = None

    @rule(node=st.sampled_from(["b", "c"]), share=st.sampled_from([0.5, 1.0]))
    def acknowledge(self, node: str, share: float) -> None:
        durable = self.bucket.vbuckets.durable_seqno(VB)
        self.held[node] = max(self.held[node], int(durable * share))
        self.sync_writes.acknowledge(VB, node, Seqno(self.held[node]))

    @rule(seconds=st.floats(0.5, 4))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.sync_writes.tick(self.now_s)

    @rule(state=st.sampled_from([VBucketState.REPLICA, VBucketState.ACTIVE]))
    def change_state(self, state: VBucketState) -> None:
        topology = self.bucket.vbuckets.facts[VB].topology
        self.bucket.set_vbucket_state(VB, state)
        facts = self.bucket.vbuckets.facts[VB]
        assert facts is not None
        self.bucket.set_vbucket_facts(VB, replace(facts, topology=topology))
        self.commit()
        self.sync_writes.evaluate(VB)
        if state != VBucketState.ACTIVE:
            self.bucket.set_vbucket_state(VB, VBucketState.ACTIVE)
            self.commit()
            self.sync_writes.evaluate(VB)

    @rule()
    def roll_back(self) -> None:
        """All is taken back, also what replicas hold. A client that was answered was answered before."""
        self.commit()
        self.report()
        roll_back(self.bucket, VB, Seqno(0), branch=True)
        self.held = dict.fromkeys(self.held, 0)

    def teardown(self) -> None:
        """The disk has room again, time passes, and no client waits for an answer."""
        for _ in range(2):
            self.commit()
            self.wait(10)
        self.commit()
        self.report()
        assert len(self.reported) == len(self.writes), "a write has no answer"

    @invariant()
    def report(self) -> None:
        for number, write in enumerate(getattr(self, "writes", [])):
            outcome = write.outcome
            if outcome is None or outcome.commit > self.bucket.durable_commit:
                assert number not in self.reported, "what was reported is taken back"
                continue
            if number in self.reported:
                assert self.reported[number] == outcome.status, "reported twice"
                continue
            self.reported[number] = outcome.status
            if outcome.status == Status.SUCCESS:
                assert max(self.held.values()) >= write.prepare.seqno, "no majority holds it"
                entry = self.bucket.find(VB, DEFAULT_COLLECTION, write.prepare.key)
                assert entry.seqno >= outcome.seqno
                assert value_of(self.bucket, VB, write.prepare.key) == b"1"


TestTracking = Tracking.TestCase
TestTracking.settings = settings(stateful_step_count=40)


# Chains of nodes, majorities of them, and up to where a majority holds everything.


@case(None, ())
@case((), ())
@case((["a"],), ())
@case((["a", "b"],), (("a", "b"),))
@case((["a", None],), (("a", None),))
@case((["a", "b"], ["a"]), (("a", "b"),))
@case((["a", "b"], ["c", "d", None]), (("a", "b"), ("c", "d", None)))
def test_only_chains_with_copies_have_a_say(topology: object, chains: object) -> None:
    assert chains_of(topology) == chains


@case((), True)
@case((("a", "b"),), True)
@case((("a", None),), False)
@case((("a", "b", None),), True)
@case((("a", None, None),), False)
@case((("a", "b", None, None),), False)
@case((("a", "b"), ("a", None)), False)
def test_a_missing_node_counts_as_a_copy_that_does_not_answer(chains: tuple[Chain, ...], possible: bool) -> None:
    assert is_possible(chains) is possible
    assert [majority(tuple("abcd"[:copies])) for copies in (2, 3, 4)] == [2, 2, 3]


@case((), {}, 10)
@case((("a", "b"),), {}, 0)
@case((("a", "b"),), {"b": 7}, 7)
@case((("a", "b"),), {"b": 99}, 10)
@case((("a", "b"),), {"stranger": 9}, 0)
@case((("a", "b", "c"),), {"b": 4, "c": 6}, 6)
@case((("a", "b", "c"),), {"b": 99, "c": 99}, 10)
@case((("a", "b", None),), {"b": 4}, 4)
@case((("a", "b", "c", "d"),), {"b": 4, "c": 6, "d": 2}, 4)
@case((("a", "b"), ("a", "c")), {"b": 8, "c": 3}, 3)
def test_what_a_majority_holds(chains: tuple[Chain, ...], acknowledged: dict[str, int], held: int) -> None:
    assert satisfied_seqno(chains, acknowledged, active_seqno=10) == held


NODES = ["a", "b", "c", "d"]
any_chain = st.lists(st.sampled_from([*NODES[1:], None]), min_size=1, max_size=3).map(
    lambda replicas: ("a", *dict.fromkeys(replicas))
)


@given(
    st.lists(any_chain, min_size=1, max_size=2),
    st.dictionaries(st.sampled_from(NODES[1:]), st.integers(0, 20)),
    st.integers(0, 20),
)
def test_any_minority_may_be_lost(chains: list[Chain], acknowledged: dict[str, int], active: int) -> None:
    """Whichever copies of a chain are lost, if fewer than a majority: one that is left holds what was satisfied."""
    held = satisfied_seqno(tuple(chains), acknowledged, active_seqno=active)
    for chain in chains:
        copies = [active, *(0 if node is None else acknowledged.get(node, 0) for node in chain[1:])]
        for survivors in itertools.combinations(copies, len(copies) - majority(chain) + 1):
            assert max(survivors) >= held, chain


# Many durable writes at a time: each acknowledgement and each received change costs what it decides, and no more.


FEW, MANY = 100, 400
LINEAR_MAX = 1.2
"""How much more one of many may cost than one of few. Quadratic work would make it about four times as much."""


def prepared(count: int) -> Bucket:
    bucket = new_bucket()
    for number in range(count):
        bucket.put_prepare(VB, collection_id=DEFAULT_COLLECTION, key=b"%d" % number, value=b"1",
            datatype=Datatype.JSON, level=DurabilityLevel.MAJORITY,
        )  # fmt: skip
    bucket.commit_now()
    return bucket


def work_of_acknowledging(count: int) -> float:
    """What it costs to acknowledge one write, where there are so many, one after the other."""
    bucket = prepared(count)
    facts = bucket.vbuckets.facts[VB]
    assert facts is not None
    bucket.set_vbucket_facts(VB, replace(facts, topology=(["a", "b"],)))
    bucket.commit_now()
    sync_writes = SyncWrites(bucket=bucket)
    writes = [sync_writes.begin(prepare, deadline_s=30) for prepare in bucket.prepares.of(VB)]

    def work() -> None:
        for number in range(1, count + 1):
            sync_writes.acknowledge(VB, "b", Seqno(number))

    effort = calls_of(work) / count
    assert {write.outcome.status for write in writes if write.outcome} == {Status.SUCCESS}
    assert bucket.prepares.of(VB) == []
    return effort


def work_of_receiving(count: int) -> float:
    """What it costs to receive the change of one document, where so many have a prepare, each in a run of its own."""
    bucket = prepared(count)
    runs = []
    for number in range(count):
        start = bucket.pending.used_bytes
        change = Mutation(
            vbucket=VB, seqno=Seqno(count + number + 1), rev_seqno=1, collection_id=DEFAULT_COLLECTION,
            key=b"%d" % number, value=b"9",
        )  # fmt: skip
        bucket.pending.append(VB, change.encode())
        runs.append((start, bucket.pending.used_bytes))

    def work() -> None:
        for start, end in runs:
            decide_by_changes(bucket.prepares, VB, bucket.pending.frames[start:end], bucket.index.secret)

    effort = calls_of(work) / count
    assert bucket.prepares.of(VB) == []
    return effort


@pytest.mark.parametrize("effort", [work_of_acknowledging, work_of_receiving])
def test_one_of_many_costs_as_much_as_one_of_few(effort: Callable[[int], float]) -> None:
    effort(2)  # what is done once only, such as compiling
    assert effort(MANY) < LINEAR_MAX * effort(FEW)
