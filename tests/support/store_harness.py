"""Buckets for experiments: a stopped clock, engines that fail on demand, and the contents of a bucket as values.

Checks read a bucket only through its own methods (`find`, `read`, `runs`), never from its internals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from headwater.errors import StoreFull
from headwater.protocol.features import WITH_COLLECTIONS
from headwater.protocol.frames import decode_frames
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.base import Message
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation, SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, Seqno, Vbuuid
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket, StoreEnvironment, Written
from headwater.store.compaction import Compacted, compact_vbucket, finish_compaction, write_compacted
from headwater.store.data_format import BucketFacts, Document, VBucketFacts
from headwater.store.engine import Change, Engine, MemoryEngine
from headwater.store.opening import create_bucket, open_bucket
from headwater.store.vbuckets import Retention

START_S = 1_800_000_000
SECRET = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
NOTHING_KEPT = Retention(history_s=0, history_bytes=0, purge_age_s=0)
"""Keep only what must be kept. Deletions must be a second old to be purged."""
EVERYTHING_KEPT = Retention(history_s=10**9, history_bytes=2**60, purge_age_s=10**9)


class Clock:
    def __init__(self) -> None:
        self.ns = START_S * 1_000_000_000
        self._vbuuids = 0xB0_0000_0000

    def advance(self, seconds: float) -> None:
        self.ns += int(seconds * 1_000_000_000)

    def now_s(self) -> int:
        return self.ns // 1_000_000_000

    def environment(self) -> StoreEnvironment:
        return StoreEnvironment(now_ns=lambda: self.ns, new_vbuuid=self._new_vbuuid)

    def _new_vbuuid(self) -> Vbuuid:
        self._vbuuids += 1
        return Vbuuid(self._vbuuids)


class FailingEngine:
    """Forwards everything until it is set to fail: writes then have no effect."""

    def __init__(self, inner: Engine, *, writes_left: int | None = None) -> None:
        self.inner = inner
        self.writes_left = writes_left
        """None for no limit."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, changes: Sequence[Change]) -> None:
        if self.writes_left == 0:
            raise StoreFull("no room is left", hint="It is a test")
        if self.writes_left is not None:
            self.writes_left -= 1
        self.inner.write(changes)


def new_bucket(
    engine: Engine | None = None,
    clock: Clock | None = None,
    *,
    vbuckets: int = 4,
    state: VBucketState | None = VBucketState.ACTIVE,
) -> Bucket:
    """Return a bucket whose vbuckets all have one state; with None it has none yet."""
    facts = BucketFacts(name="default", uuid="0" * 32, vbuckets=vbuckets)
    bucket = create_bucket(engine or MemoryEngine(), facts, environment=(clock or Clock()).environment(), secret=SECRET)
    if state is not None:
        for vbucket in range(vbuckets):
            bucket.set_vbucket_state(vbucket, state)
        bucket.commit_now()
    return bucket


def reopened(bucket: Bucket, engine: Engine | None = None) -> Bucket:
    """Return the bucket as another process would find it: it was not closed, so only durable changes are in it."""
    return open_bucket(engine or bucket.engine, environment=bucket.environment, secret=(SECRET[1], SECRET[0]))


# --- writing ------------------------------------------------------------------------------------------------------


def put(
    bucket: Bucket,
    vbucket: int,
    key: bytes,
    value: bytes = b"{}",
    *,
    collection_id: int = DEFAULT_COLLECTION,
    expiry: int = 0,
    flags: int = 0,
    datatype: Datatype = Datatype.JSON,
) -> Written:
    return bucket.put_mutation(
        vbucket, collection_id=CollectionId(collection_id), key=key, value=value, datatype=datatype, expiry=expiry,
        flags=flags,
    )  # fmt: skip


def remove(bucket: Bucket, vbucket: int, key: bytes, *, collection_id: int = DEFAULT_COLLECTION) -> Written:
    return bucket.put_removal(vbucket, collection_id=CollectionId(collection_id), key=key)


def compaction_steps(bucket: Bucket, vbucket: int, retention: Retention = NOTHING_KEPT) -> Iterator[Compacted]:
    """Compact a vbucket, one step at a time."""
    after: Seqno | None = Seqno(0)
    while after is not None:
        compacted = compact_vbucket(bucket, vbucket, retention, after_seqno=after)
        write_compacted(bucket, compacted)
        finish_compaction(bucket, vbucket, compacted)
        after = compacted.reached_seqno
        yield compacted


def compact(bucket: Bucket, vbucket: int, retention: Retention = NOTHING_KEPT) -> int:
    """Run all steps over a vbucket. Returns how many bytes were dropped."""
    return sum(compacted.dropped_bytes for compacted in compaction_steps(bucket, vbucket, retention))


# --- reading ------------------------------------------------------------------------------------------------------


def facts_of(bucket: Bucket, vbucket: int) -> VBucketFacts:
    facts = bucket.vbuckets.facts[vbucket]
    assert facts is not None
    return facts


def branches(bucket: Bucket, vbucket: int = 0) -> list[tuple[int, int]]:
    """Return the vbuuids and seqnos of the failover log, newest first."""
    return [(entry.vbuuid, entry.seqno) for entry in facts_of(bucket, vbucket).failover_log.entries]


def get(bucket: Bucket, vbucket: int, key: bytes, *, collection_id: int = DEFAULT_COLLECTION) -> Document | None:
    """Return a document, or its tombstone, as a client gets it. The index must match what is stored."""
    entry = bucket.find(vbucket, CollectionId(collection_id), key)
    if entry is None:
        return None
    document = bucket.read(vbucket, entry)
    assert (document.key, document.collection_id) == (key, collection_id)
    assert (document.seqno, document.cas, document.rev_seqno) == (entry.seqno, entry.cas, entry.rev_seqno)
    assert (document.is_deleted, document.expiry) == (entry.is_deleted, entry.expiry)
    return document


def value_of(bucket: Bucket, vbucket: int, key: bytes, *, collection_id: int = DEFAULT_COLLECTION) -> bytes | None:
    """Return the value of an existing document."""
    document = get(bucket, vbucket, key, collection_id=collection_id)
    return None if document is None or document.is_deleted else document.value


def changes_of(bucket: Bucket, vbucket: int, *, after_seqno: int = 0) -> list[Message]:
    """Return the durable changes, in order."""
    runs = [run.tobytes() for run in bucket.runs(vbucket, after_seqno=after_seqno)]
    assert all(runs), "a run is never empty"
    return [decode_message(frame, WITH_COLLECTIONS) for frame in decode_frames(b"".join(runs))]


def seqnos_of(bucket: Bucket, vbucket: int, *, after_seqno: int = 0) -> list[int]:
    return [message.seqno for message in changes_of(bucket, vbucket, after_seqno=after_seqno)]


def events_of(bucket: Bucket, vbucket: int) -> list[SystemEvent]:
    return [change for change in changes_of(bucket, vbucket) if isinstance(change, SystemEvent)]


def state_of(bucket: Bucket, vbucket: int) -> dict[tuple[int, bytes], Document]:
    """Return every document and every tombstone whose key has a durable change."""
    keys = {
        (change.collection_id or 0, change.key)
        for change in changes_of(bucket, vbucket)
        if isinstance(change, Mutation | Deletion | Expiration)
    }
    found = {(cid, key): get(bucket, vbucket, key, collection_id=cid) for cid, key in keys}
    return {place: document for place, document in found.items() if document is not None}


def check_counts(bucket: Bucket) -> None:
    """Check that the counters match the contents: superseded changes, and documents."""
    live = 0
    for vbucket in range(len(bucket.vbuckets)):
        if not bucket.vbuckets.exists(vbucket):
            continue
        stored = [c for c in changes_of(bucket, vbucket) if isinstance(c, Mutation | Deletion | Expiration)]
        documents = state_of(bucket, vbucket)
        assert int(bucket.vbuckets.superseded[vbucket]) == len(stored) - len(documents)
        assert int(bucket.index.tables[vbucket, 2]) == len(documents)
        live += sum(not document.is_deleted for document in documents.values())
    assert bucket.index.live_documents() == live


def stopped_everywhere(
    prepare: Callable[[FailingEngine], Bucket], action: Callable[[Bucket], object]
) -> Iterator[tuple[Bucket, bool]]:
    """Prepare a bucket and do something to it, repeatedly: stopped before the first write to the engine, before the
    second, and so on until it completes. Yields the bucket in its state then, and whether the action completed."""
    writes_left = 0
    while True:
        engine = FailingEngine(MemoryEngine())
        bucket = prepare(engine)
        engine.writes_left = writes_left
        has_ended = False
        with suppress(StoreFull):
            action(bucket)
            has_ended = True
        engine.writes_left = None
        yield bucket, has_ended
        if has_ended:
            return
        writes_left += 1
