"""Compile the kernels before the first client needs them.

numba compiles a kernel when it is first called and keeps the machine code on disk. On a machine where that has not
happened yet it takes some seconds, during which a node would answer nobody; so it is done before the node says that it
is ready. Later starts load what was kept.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from headwater.node.consumer.stream import ChangeRun, Inbound
from headwater.node.kv.collection_seqnos import collection_high_seqnos
from headwater.node.kv.service import BucketService
from headwater.node.kv.set_run import apply_set_run
from headwater.node.producer.connection import ProducerConnection
from headwater.protocol.frames import DurabilityLevel
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.messages.dcp_streams import OpenFlags, StreamRequest, VBucketState
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, Seqno, Vbuuid
from headwater.protocol.stream_requests import Accepted
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket, Outside
from headwater.store.compaction import Retention, compact_vbucket, expire_documents, finish_compaction
from headwater.store.data_format import BucketFacts
from headwater.store.engine import Engine, MemoryEngine
from headwater.store.opening import close_bucket, create_bucket, open_bucket
from headwater.store.prepares import abort_prepare, commit_prepare, decide_by_changes, put_prepare
from headwater.store.receiving import receive_run
from headwater.store.settling import roll_back, settle_now

_NOW_NS = 1_700_000_000_000_000_000
_OUTSIDE = Outside(now_ns=lambda: _NOW_NS, new_vbuuid=lambda: Vbuuid(1))
_SECRET = (1, 2)
_WRITES = 200
"""So many changes that tables which begin small have to grow."""


@cache
def warm_up() -> None:
    """Call everything that is compiled once, on a bucket of its own. It takes one time a process."""
    engine = MemoryEngine()
    facts = BucketFacts(name="warm-up", uuid="0", vbuckets=1)
    bucket = create_bucket(engine, facts, outside=_OUTSIDE, secret=_SECRET)
    bucket.set_vbucket_state(0, VBucketState.ACTIVE)
    _write(bucket)
    _stream(bucket)
    _open_again(engine)
    _keep_house(bucket, engine)
    _receive()


def _write(bucket: Bucket) -> None:
    service = BucketService(bucket=bucket)
    request = Set(key=b"k", value=b"{}", expiry=1).encode()
    with memoryview(bytearray(request * _WRITES)) as received:
        for collections in (False, True):
            apply_set_run(
                service,
                np.frombuffer(received, dtype=np.uint8),
                collections=collections,
                mutation_tokens=True,
                now_ns=_NOW_NS,
            )
    for key in (b"a", b"b"):
        bucket.put_mutation(0, collection_id=DEFAULT_COLLECTION, key=key, value=b"1", datatype=Datatype.JSON)
    entry = bucket.find(0, DEFAULT_COLLECTION, b"a")
    assert entry is not None
    bucket.read(0, entry)
    bucket.put_removal(0, collection_id=DEFAULT_COLLECTION, key=b"a")
    _write_durably(bucket)
    bucket.commit_now()
    bucket.read(0, entry)
    collection_high_seqnos(bucket, [0], DEFAULT_COLLECTION)


def _write_durably(bucket: Bucket) -> None:
    prepared = [
        put_prepare(
            bucket, 0, collection_id=DEFAULT_COLLECTION, key=key, value=b"1", datatype=Datatype.JSON,
            level=DurabilityLevel.MAJORITY,
        )
        for key in (b"c", b"d")
    ]  # fmt: skip
    # As a replica looks at what it receives; nothing here is about these keys.
    decide_by_changes(bucket, 0, bucket.pending.frames[: bucket.pending.used_bytes])
    commit_prepare(bucket, prepared[0])
    abort_prepare(bucket, prepared[1])


def _stream(bucket: Bucket) -> None:
    """Stream everything, as clients with and without collections get it, and as replicas do."""
    for knows_collections, is_replica in ((False, False), (True, False), (True, True)):
        connection = ProducerConnection(
            bucket=bucket,
            name="warm-up",
            flags=OpenFlags.PRODUCER,
            knows_collections=knows_collections,
            may_compress=False,
            opened_s=0.0,
        )
        connection.set_control(b"enable_noop", b"true")
        if is_replica:
            connection.set_control(b"enable_sync_writes", b"true")
            connection.set_control(b"max_marker_version", b"2.2")
        request = StreamRequest()
        admission = connection.admit(request)
        assert isinstance(admission, Accepted)
        connection.open_stream(request, admission)
        connection.produce(1024 * 1024)


def _receive() -> None:
    """Take changes as a copy does."""
    facts = BucketFacts(name="warm-up", uuid="0", vbuckets=1)
    bucket = create_bucket(MemoryEngine(), facts, outside=_OUTSIDE, secret=_SECRET)
    bucket.set_vbucket_state(0, VBucketState.REPLICA)
    change = Mutation(seqno=Seqno(1), rev_seqno=1, collection_id=DEFAULT_COLLECTION, key=b"k")
    for item in Inbound().receive(change.encode()):
        assert isinstance(item, ChangeRun)
        receive_run(bucket, 0, item.data, end_seqno=Seqno(1))
    bucket.commit_now()


def _open_again(engine: Engine) -> None:
    """As after a crash: what was written is in the journal."""
    open_bucket(engine, outside=_OUTSIDE, secret=_SECRET)


def _keep_house(bucket: Bucket, engine: Engine) -> None:
    settle_now(bucket)
    _stream(bucket)
    expire_documents(bucket, 0)
    bucket.index.live_documents()
    for _ in bucket.runs(0, after_seqno=1):
        pass
    collection_high_seqnos(bucket, [0], DEFAULT_COLLECTION)
    for history_bytes in (1 << 20, 0):
        compacted = compact_vbucket(bucket, 0, Retention(history_s=0, history_bytes=history_bytes, purge_age_s=-1))
        engine.write(compacted.changes)
        finish_compaction(bucket, 0, compacted)
    close_bucket(bucket)
    reopened = open_bucket(engine, outside=_OUTSIDE, secret=_SECRET)
    entry = reopened.find(0, DEFAULT_COLLECTION, b"b")
    assert entry is not None
    reopened.read(0, entry)
    roll_back(reopened, 0, Seqno(1))
