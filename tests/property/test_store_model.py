"""A bucket against a model: of each vbucket a list of all versions, of which the last of each key is the document.

The machine writes, commits, settles, compacts, lets time pass, fails and crashes in any order. After every step the
bucket must hold what the model says, to a reader of documents and to a stream of the changes. Small blocks and
small steps make every boundary come up soon.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headwater.errors import StoreFull
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import FAILOVER_LOG_ENTRIES_MAX, Seqno
from headwater.protocol.values import Datatype
from headwater.store import commits, compaction, settling
from headwater.store.commits import GroupCommit
from headwater.store.compaction import expire_documents
from headwater.store.data_format import Document, VBucketFacts
from headwater.store.engine import Engine, MemoryEngine
from headwater.store.lmdb_engine import LmdbEngine
from headwater.store.opening import close_bucket
from headwater.store.settling import abandon, flush, roll_back, settle_now
from headwater.store.vbuckets import Retention
from support.store_harness import (
    Clock,
    FailingEngine,
    changes_of,
    compaction_steps,
    facts_of,
    get,
    new_bucket,
    put,
    remove,
    reopened,
)

VBUCKETS = 2
KEYS = [b"a", b"b", b"c", b"d"]

vbuckets = st.sampled_from([0, 0, 0, 1])
keys = st.sampled_from(KEYS)
writes_before_failure = st.sampled_from([None, None, None, 0, 1, 2, 3])
retentions = st.builds(
    Retention,
    history_s=st.sampled_from([0, 5, 30, 10**9]),
    history_bytes=st.sampled_from([0, 150, 600, 2**40]),
    purge_age_s=st.sampled_from([0, 0, 5, 30]),
)


@dataclass(slots=True)
class Version:
    """One version of a document."""

    key: bytes
    document: Document
    may_be_purged: bool = False
    """It is a deletion, and compaction has met it when it was old enough."""


@dataclass(slots=True)
class Model:
    """One vbucket."""

    versions: list[Version] = field(default_factory=list)
    """By seqno: the first has 1. Nothing ever leaves it but what is taken back."""
    durable: int = 0
    log: list[int] = field(default_factory=lambda: [0])
    """The seqnos of the failover log, newest first."""
    durable_log: list[int] = field(default_factory=lambda: [0])
    state: VBucketState = VBucketState.ACTIVE
    durable_state: VBucketState = VBucketState.ACTIVE
    cas_max: int = 0
    """Of what was ever durable."""

    def newest(self, *, up_to: int | None = None) -> dict[bytes, Version]:
        return {version.key: version for version in self.versions[:up_to]}

    def take_back(self) -> None:
        del self.versions[self.durable :]
        self.log, self.state = list(self.durable_log), self.durable_state

    def branch(self) -> None:
        self.log = [len(self.versions), *self.log][:FAILOVER_LOG_ENTRIES_MAX]


class StoreMachine(RuleBasedStateMachine):
    """On an engine in memory, which outlives the bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = ExitStack()
        self.patches.enter_context(patch.multiple(settling, STEP_BYTES=200))
        self.patches.enter_context(patch.multiple(commits, BLOCK_BYTES_TARGET=300))
        self.patches.enter_context(patch.multiple(compaction, STEP_BYTES=500))
        self.clock = Clock()
        self.sealed: GroupCommit | None = None
        self.models = [Model() for _ in range(VBUCKETS)]
        self.engine = FailingEngine(self.first_engine())
        self.bucket = new_bucket(self.engine, self.clock, vbuckets=VBUCKETS)

    def first_engine(self) -> Engine:
        return MemoryEngine()

    def next_engine(self, engine: Engine) -> Engine:
        """What another process would open."""
        return engine

    def teardown(self) -> None:
        self.engine.close()
        self.patches.close()

    @property
    def now_s(self) -> int:
        return self.clock.now_s()

    def get(self, vbucket: int, key: bytes) -> Document | None:
        return get(self.bucket, vbucket, key)

    def facts(self, vbucket: int) -> VBucketFacts:
        return facts_of(self.bucket, vbucket)

    # --- writing --------------------------------------------------------------------------------------------------

    def entered(self, vbucket: int, key: bytes, before: Document | None) -> Document:
        """Take the version that was just written into the model."""
        model = self.models[vbucket]
        document = self.get(vbucket, key)
        assert document.seqno == len(model.versions) + 1
        assert document.cas > model.cas_max
        if before is not None:
            assert document.rev_seqno == before.rev_seqno + 1
        else:
            # It may be a document that was deleted and purged: its revisions must not come a second time.
            purged = [v.document.rev_seqno for v in model.versions if v.key == key and v.document.is_deleted]
            assert document.rev_seqno > max(purged, default=0)
        model.versions.append(Version(key, document))
        return document

    @rule(
        vbucket=vbuckets,
        writes=st.lists(
            st.tuples(keys, st.none() | st.binary(max_size=120), st.sampled_from([0, 0, 3, 20])), min_size=1, max_size=8
        ),
    )
    def write(self, vbucket: int, writes: list[tuple[bytes, bytes | None, int]]) -> None:
        """Documents, with a life in seconds where they have an end; without a value they are deleted."""
        for key, value, ttl_s in writes:
            if value is None:
                self.remove(vbucket, key)
            else:
                self.put(vbucket, key, value, ttl_s)

    @precondition(lambda self: self.sealed is None)
    @rule(vbucket=vbuckets, names=st.lists(keys, min_size=3, max_size=10), is_settled=st.booleans())
    def write_and_commit(self, vbucket: int, names: list[bytes], is_settled: bool) -> None:
        """The same few documents again and again, every other of them deleted the next time."""
        for key in names:
            document = self.get(vbucket, key)
            if document is None or document.is_deleted or document.seqno % 2:
                self.put(vbucket, key, b"again", 0)
            else:
                self.remove(vbucket, key)
        self.commit(is_settled)

    def put(self, vbucket: int, key: bytes, value: bytes, ttl_s: int) -> None:
        before = self.get(vbucket, key)
        expiry = self.now_s + ttl_s if ttl_s else 0
        put(self.bucket, vbucket, key, value, datatype=Datatype.RAW, expiry=expiry)
        document = self.entered(vbucket, key, before)
        assert (document.value, document.expiry, document.is_deleted) == (value, expiry, False)

    def remove(self, vbucket: int, key: bytes) -> None:
        before = self.get(vbucket, key)
        if before is not None and not before.is_deleted:
            remove(self.bucket, vbucket, key)
            document = self.entered(vbucket, key, before)
            assert (document.value, document.is_deleted, document.delete_time) == (b"", True, self.now_s)

    @rule(vbucket=vbuckets)
    def expire(self, vbucket: int) -> None:
        model = self.models[vbucket]
        due = {
            key: version.document
            for key, version in model.newest().items()
            if 0 < version.document.expiry <= self.now_s and not version.document.is_deleted
        }
        assert expire_documents(self.bucket, vbucket) == len(due)
        gone = {key: document for key in due if (document := self.get(vbucket, key)) is not None}
        for key in sorted(gone, key=lambda key: gone[key].seqno):
            document = gone[key]
            assert (document.is_deleted, document.rev_seqno) == (True, due[key].rev_seqno + 1)
            assert document.seqno == len(model.versions) + 1
            model.versions.append(Version(key, document))

    @rule(seconds=st.sampled_from([1, 4, 10, 40]))
    def wait(self, seconds: int) -> None:
        self.clock.advance(seconds)

    @rule(vbucket=vbuckets, state=st.sampled_from([VBucketState.ACTIVE, VBucketState.REPLICA]))
    def set_state(self, vbucket: int, state: VBucketState) -> None:
        model = self.models[vbucket]
        self.bucket.set_vbucket_state(vbucket, state)
        if state == VBucketState.ACTIVE and model.state != state:
            model.branch()
        model.state = state

    # --- committing -----------------------------------------------------------------------------------------------

    def made_durable(self, seqnos: list[int], logs: list[list[int]], states: list[VBucketState]) -> None:
        for model, seqno, log, state in zip(self.models, seqnos, logs, states, strict=True):
            model.durable, model.durable_log, model.durable_state = seqno, log, state
            model.cas_max = max([model.cas_max, *(v.document.cas for v in model.versions[:seqno])])

    def now(self) -> tuple[list[int], list[list[int]], list[VBucketState]]:
        models = self.models
        return [len(m.versions) for m in models], [list(m.log) for m in models], [m.state for m in models]

    @precondition(lambda self: self.sealed is None)
    @rule(is_settled=st.booleans())
    def commit(self, is_settled: bool) -> None:
        self.bucket.commit_now()
        self.made_durable(*self.now())
        if is_settled:
            settle_now(self.bucket)
            assert not self.bucket.young

    @precondition(lambda self: self.sealed is None)
    @rule()
    def seal(self) -> None:
        self.sealed = self.bucket.seal()
        self.sealed_model = self.now()

    @precondition(lambda self: self.sealed is not None)
    @rule()
    def publish(self) -> None:
        assert self.sealed is not None
        self.bucket.persist(self.sealed)
        self.bucket.publish(self.sealed)
        self.sealed = None
        self.made_durable(*self.sealed_model)

    def fail(self) -> None:
        """A commit can't be written, and is taken back with all that followed it."""
        commit = self.sealed or self.bucket.seal()
        if commit is not None:
            self.engine.writes_left = 0
            with pytest.raises(StoreFull):
                self.bucket.persist(commit)
            self.engine.writes_left = None
        abandon(self.bucket)
        self.sealed = None
        for model in self.models:
            model.take_back()

    # --- house-keeping --------------------------------------------------------------------------------------------

    @rule(writes_left=writes_before_failure)
    def settle(self, writes_left: int | None) -> None:
        """Which may fail in the middle."""
        self.engine.writes_left = writes_left
        with suppress(StoreFull):
            settle_now(self.bucket)
            assert not self.bucket.young
        self.engine.writes_left = None

    @precondition(lambda self: self.sealed is None)
    @rule(vbucket=vbuckets, retention=retentions, writes_left=writes_before_failure, is_settled=st.booleans())
    def compact(self, vbucket: int, retention: Retention, writes_left: int | None, is_settled: bool) -> None:
        """Which may fail in the middle, and during which time passes."""
        if is_settled:
            self.commit(is_settled=True)
        before = self.facts(vbucket)
        self.may_purge(vbucket, retention)
        self.engine.writes_left = writes_left
        with suppress(StoreFull):
            for step in compaction_steps(self.bucket, vbucket, retention):
                self.clock.advance(step.reached_seqno is not None)
                self.may_purge(vbucket, retention)
        self.engine.writes_left = None
        facts = self.facts(vbucket)
        assert facts.history_start_seqno >= max(before.history_start_seqno, facts.purge_seqno)
        assert facts.purge_seqno >= before.purge_seqno
        assert facts.history_start_seqno <= self.models[vbucket].durable

    def may_purge(self, vbucket: int, retention: Retention) -> None:
        """Each step of a compaction goes by its own time, so a deletion may get old enough on the way."""
        model = self.models[vbucket]
        for version in model.versions[: model.durable]:
            if version.document.is_deleted and version.document.delete_time < self.now_s - retention.purge_age_s:
                version.may_be_purged = True

    def roll_back(self, vbucket: int, target: int, *, branch: bool) -> None:
        self.commit(is_settled=False)
        model, start = self.models[vbucket], self.facts(vbucket).history_start_seqno
        target = max(0, len(model.versions) - target)
        reached = roll_back(self.bucket, vbucket, Seqno(target), branch=branch)
        assert reached == (target if target >= start else 0)
        del model.versions[reached:]
        model.log = [seqno for seqno in model.log if seqno <= reached] or [reached]
        if branch:
            model.branch()
        self.made_durable(*self.now())

    def flush(self) -> None:
        self.commit(is_settled=False)
        flush(self.bucket)
        self.models = [Model(state=model.state, durable_state=model.state) for model in self.models]

    # --- stops ----------------------------------------------------------------------------------------------------

    def open_again(self) -> None:
        self.engine = FailingEngine(self.next_engine(self.engine.inner))
        facts = [self.facts(vbucket) for vbucket in range(VBUCKETS)]
        self.bucket = reopened(self.bucket, self.engine)
        self.sealed = None
        for vbucket, before in enumerate(facts):
            after = self.facts(vbucket)
            # A compaction that was not written has announced to streams, and to no other, what it was about to drop.
            assert after.purge_seqno <= before.purge_seqno
            assert after.history_start_seqno <= before.history_start_seqno

    @rule(
        how=st.sampled_from(["crash", "crash when written", "fail", "fail", "stop", "roll back", "roll back", "flush"]),
        vbucket=vbuckets,
        seqnos=st.integers(0, 12),
        branch=st.booleans(),
    )
    def break_off(self, how: str, vbucket: int, seqnos: int, branch: bool) -> None:
        if how == "fail":
            self.fail()
        elif how.startswith("crash") or self.sealed is not None:
            self.crash(is_written=how == "crash when written")
        elif how == "stop":
            self.stop()
        elif how == "roll back":
            self.roll_back(vbucket, seqnos, branch=branch)
        else:
            self.flush()

    def stop(self) -> None:
        close_bucket(self.bucket)
        self.made_durable(*self.now())
        self.open_again()

    def crash(self, is_written: bool) -> None:
        """What is in flight may have been written, or not."""
        if self.sealed is not None and is_written:
            self.bucket.persist(self.sealed)
            self.made_durable(*self.sealed_model)
        for model in self.models:
            model.take_back()
            if model.state == VBucketState.ACTIVE:
                model.branch()
        self.made_durable(*self.now())
        self.open_again()

    # --- what must hold -------------------------------------------------------------------------------------------

    @initialize()
    def nothing_is_there(self) -> None:
        assert self.bucket.index.live_documents() == 0

    @invariant()
    def documents_are_those_of_the_model(self) -> None:
        for vbucket, model in enumerate(self.models):
            newest = model.newest()
            for key in KEYS:
                stored, version = self.get(vbucket, key), newest.get(key)
                if version is None:
                    assert stored is None
                elif stored is None:
                    assert version.may_be_purged
                    assert version.document.seqno <= self.facts(vbucket).purge_seqno
                else:
                    assert stored == version.document

    @invariant()
    def numbers_are_those_of_the_model(self) -> None:
        numbers = self.bucket.vbuckets
        assert numbers.high_seqnos.tolist() == [len(model.versions) for model in self.models]
        assert numbers.durable_seqnos.tolist() == [model.durable for model in self.models]
        assert numbers.states.tolist() == [model.state for model in self.models]
        for vbucket, model in enumerate(self.models):
            facts = self.facts(vbucket)
            assert [entry.seqno for entry in facts.failover_log.entries] == model.log
            assert numbers.vbuuids[vbucket] == facts.failover_log.newest.vbuuid
        live = sum(not version.document.is_deleted for model in self.models for version in model.newest().values())
        assert self.bucket.index.live_documents() == live

    @invariant()
    def changes_are_those_of_the_model(self) -> None:
        for vbucket, model in enumerate(self.models):
            seqnos = []
            for change in changes_of(self.bucket, vbucket):
                assert isinstance(change, Mutation | Deletion | Expiration)
                expected = model.versions[change.seqno - 1].document
                assert (change.key, change.value, change.cas) == (expected.key, expected.value, expected.cas)
                assert (change.rev_seqno, isinstance(change, Mutation)) == (
                    expected.rev_seqno, not expected.is_deleted,
                )  # fmt: skip
                seqnos.append(change.seqno)
            assert seqnos == sorted(set(seqnos))
            self.check_completeness(vbucket, seqnos)

    def check_completeness(self, vbucket: int, seqnos: list[int]) -> None:
        """Nothing is missing that a stream or a rollback could ask for."""
        model, facts = self.models[vbucket], self.facts(vbucket)
        stored = set(seqnos)
        assert max(stored, default=0) <= model.durable
        assert stored.issuperset(range(facts.history_start_seqno + 1, model.durable + 1))
        for up_to in (model.durable, facts.history_start_seqno):
            for version in model.newest(up_to=up_to).values():
                seqno = version.document.seqno
                assert seqno in stored or (version.may_be_purged and seqno <= facts.purge_seqno)

    @invariant()
    def superseded_changes_are_counted(self) -> None:
        for vbucket, model in enumerate(self.models):
            changes = len(changes_of(self.bucket, vbucket)) + len(model.versions) - model.durable
            documents = sum(self.get(vbucket, key) is not None for key in KEYS)
            assert int(self.bucket.vbuckets.superseded[vbucket]) == changes - documents


class LmdbStoreMachine(StoreMachine):
    """On files, which are closed and opened again."""

    def first_engine(self) -> Engine:
        self.folder = Path(tempfile.mkdtemp(prefix="headwater-model-"))
        return LmdbEngine(self.folder)

    def next_engine(self, engine: Engine) -> Engine:
        engine.close()
        return LmdbEngine(self.folder)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)


def test_a_deletion_gets_old_enough_during_a_compaction() -> None:
    machine = StoreMachine()
    machine.write(0, [(b"a", bytes(120), 0)] * 24 + [(b"a", None, 0)])
    machine.compact(0, Retention(history_s=0, history_bytes=0, purge_age_s=5), None, is_settled=True)
    assert machine.get(0, b"a") is None
    machine.changes_are_those_of_the_model()
    machine.teardown()


_SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]
TestStoreModel = StoreMachine.TestCase
# Few unit tests repeat what the model proves, so it has more examples than other properties.
TestStoreModel.settings = settings(
    max_examples=3 * settings().max_examples, stateful_step_count=40, suppress_health_check=_SLOW
)
TestLmdbStoreModel = LmdbStoreMachine.TestCase
TestLmdbStoreModel.settings = settings(
    TestStoreModel.settings, max_examples=settings().max_examples // 4, stateful_step_count=30
)
