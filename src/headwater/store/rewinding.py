"""Taking changes back: rollback of a vbucket, removal of one, and what is done when a commit can't be written.

All three first bring the bucket to rest, everything durable and settled, so that only blocks have to be changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headwater.errors import StoreError
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages.dcp_stream import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store.bucket import Bucket
from headwater.store.data_format import BUCKET_FACTS, BucketFacts, VBucketFacts, block_key, blocks_of, vbucket_key
from headwater.store.engine import Change, Delete, Put, Table
from headwater.store.opening import load_vbucket, stored_manifest
from headwater.store.runs import as_run, last_seqno, split_after
from headwater.store.settling import settle_now


def roll_back(bucket: Bucket, vbucket: int, to_seqno: Seqno, *, branch: bool = False) -> Seqno:
    """Take a vbucket back to a seqno and return the one it was taken to.

    Inside the history window that is the seqno asked for, and the documents are exactly what they were then. Before it
    versions are missing, so the vbucket starts again from 0. With `branch` a new branch of history begins there.
    """
    _bring_to_rest(bucket)
    facts = bucket.vbuckets.facts[vbucket]
    assert facts is not None, "only vbuckets that exist are rolled back"
    target = to_seqno if to_seqno >= facts.history_start_seqno else Seqno(0)
    target = Seqno(min(target, int(bucket.vbuckets.high_seqnos[vbucket])))
    rolled = replace(
        facts,
        failover_log=facts.failover_log.truncate(target),
        purge_seqno=Seqno(min(facts.purge_seqno, target)),
        history_start_seqno=Seqno(min(facts.history_start_seqno, target)),
        snapshot_start_seqno=target,
        snapshot_end_seqno=target,
        high_seqno_floor=target,
        max_cas_floor=int(bucket.vbuckets.max_cas[vbucket]),
    )
    if branch:
        log = rolled.failover_log.branch(bucket.outside.new_vbuuid(), at_seqno=target)
        rolled = replace(rolled, failover_log=log)
    changes = _drop_after(bucket, vbucket, target)
    bucket.engine.write([*changes, Put(Table.VBUCKETS, vbucket_key(vbucket), rolled.encode())])
    bucket.vbuckets.set_facts(vbucket, rolled)
    _reload(bucket, vbucket)
    return target


def remove_vbucket(bucket: Bucket, vbucket: int) -> None:
    """Remove a vbucket with all its data."""
    remove_vbuckets(bucket, [vbucket])


def remove_vbuckets(bucket: Bucket, vbuckets: Sequence[int]) -> None:
    """Remove vbuckets with all their data, in one write."""
    _bring_to_rest(bucket)
    changes: list[Change] = []
    for vbucket in vbuckets:
        changes += [*_drop_after(bucket, vbucket, Seqno(0)), Delete(Table.VBUCKETS, vbucket_key(vbucket))]
    bucket.engine.write(changes)
    for vbucket in vbuckets:
        bucket.vbuckets.set_facts(vbucket, None)
        bucket.vbuckets.reset_numbers(vbucket)
        bucket.index.clear(vbucket)
        bucket.prepares.clear(vbucket)


def flush(bucket: Bucket) -> None:
    """Drop all documents. Every vbucket begins a history that has nothing in common with the old one."""
    _bring_to_rest(bucket)
    existing = {vbucket: facts for vbucket, facts in enumerate(bucket.vbuckets.facts) if facts is not None}
    # One commit for all: a crash leaves either everything or nothing.
    for vbucket, facts in existing.items():
        bucket.pending.extra += _drop_after(bucket, vbucket, Seqno(0))
        log = FailoverLog.start(bucket.outside.new_vbuuid())
        bucket.set_vbucket_facts(vbucket, VBucketFacts(state=facts.state, failover_log=log, topology=facts.topology))
        bucket.vbuckets.reset_numbers(vbucket)
        bucket.index.clear(vbucket)
        bucket.prepares.clear(vbucket)
        if facts.state == VBucketState.ACTIVE:
            bucket.enter_manifest(vbucket)
    try:
        bucket.commit_now()
    except StoreError:
        bucket.pending.restart(bucket.pending.number)
        for vbucket, facts in existing.items():
            bucket.vbuckets.set_facts(vbucket, facts)
            _reload(bucket, vbucket)
        raise


def abandon(bucket: Bucket) -> list[int]:
    """Take back all that is not durable, after a commit could not be written. Returns the commits that are void."""
    void = [bucket.pending.number] if bucket.in_flight is None else [bucket.in_flight.number, bucket.pending.number]
    bucket.in_flight = None
    bucket.pending.restart(bucket.pending.number + 1)
    bucket.durable_commit = bucket.pending.number - 1
    with bucket.engine.view() as view:
        bucket.manifest = stored_manifest(view)
        facts = view.get(Table.BUCKET, BUCKET_FACTS)
        bucket.facts = bucket.facts if facts is None else BucketFacts.decode(facts)
        stored = {key: bytes(value) for key, value in view.scan(Table.VBUCKETS, b"", b"\xff" * 16)}
    for vbucket in range(len(bucket.vbuckets)):
        encoded = stored.get(vbucket_key(vbucket))
        bucket.vbuckets.set_facts(vbucket, None if encoded is None else VBucketFacts.decode(encoded))
        changed = bucket.vbuckets.high_seqnos[vbucket] != bucket.vbuckets.durable_seqnos[vbucket]
        if encoded is not None and changed:
            # Locks are not stored, and what happened is not the fault of those who hold them.
            locked = bucket.index.locked(vbucket)
            _reload(bucket, vbucket)
            bucket.index.lock_again(vbucket, locked)
        elif encoded is None:
            bucket.vbuckets.reset_numbers(vbucket)
            bucket.index.clear(vbucket)
            bucket.prepares.clear(vbucket)
    return void


def _bring_to_rest(bucket: Bucket) -> None:
    assert bucket.in_flight is None, "what is in flight would be written after it was taken back"
    bucket.commit_now()
    settle_now(bucket)


def _reload(bucket: Bucket, vbucket: int) -> None:
    with bucket.engine.view() as view:
        load_vbucket(bucket, view, vbucket)


def _drop_after(bucket: Bucket, vbucket: int, seqno: Seqno) -> list[Change]:
    """What removes the changes after a seqno from the blocks."""
    changes: list[Change] = []
    with bucket.engine.view() as view:
        for key, block in view.scan(Table.BLOCKS, *blocks_of(vbucket, from_seqno=seqno + 1)):
            run = as_run(block)
            kept = run[: split_after(run, seqno)]
            changes.append(Delete(Table.BLOCKS, key))
            if len(kept):
                changes.append(Put(Table.BLOCKS, block_key(vbucket, last_seqno(kept)), kept.tobytes()))
    return changes
