"""Making, opening and closing buckets: the node does so when it starts and stops.

Opening reads the facts, takes what the journal still holds, and rebuilds the index from the stored changes; it checks
every frame, so that the rest of the store can trust them. A bucket that was not closed in order gets a new branch in
the failover log of every active vbucket: what it had answered just before it died can't be known. So does one that is a
copy, or was brought back from one: its original may have gone on, and given the seqnos that come next to other changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from headwater.errors import DataDamaged, MalformedJson, StoreFull, VBucketDamaged
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.kernels.memory import Bytes, u64
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store.bucket import Bucket, StoreEnvironment
from headwater.store.checked_engine import FIRST, LAST, CheckedEngine, CheckedView, Progress, upgrade
from headwater.store.commits import GroupCommit, YoungCommits
from headwater.store.data_format import (
    BUCKET_FACTS,
    CLEAN_STOP,
    MANIFEST,
    BucketFacts,
    VBucketFacts,
    block_key,
    block_last_seqno,
    blocks_of,
    commit_number,
    vbucket_key,
    vbucket_of_block,
    vbucket_of_key,
)
from headwater.store.engine import Change, DeleteRow, Engine, PutRow, Table
from headwater.store.index import Index, count_documents
from headwater.store.runs import as_run, group_starts_of, is_sound, last_seqnos, split_after
from headwater.store.vbuckets import events_in, is_flush


def create_bucket(
    engine: Engine,
    facts: BucketFacts,
    *,
    environment: StoreEnvironment,
    secret: tuple[int, int],
    extra: Sequence[Change] = (),
) -> Bucket:
    """A new bucket with no vbuckets. `extra` is written with it."""
    bucket = _bare_bucket(engine, facts, Manifest(), environment=environment, secret=secret, next_commit=1)
    bucket.engine.write(
        [
            PutRow(Table.BUCKET, BUCKET_FACTS, facts.encode()),
            PutRow(Table.BUCKET, MANIFEST, Manifest().encode()),
            *extra,
        ]
    )
    return bucket


def stored_facts(engine: Engine) -> BucketFacts | None:
    """The facts of the bucket that an engine holds, or None where it holds none."""
    with engine.view() as view:
        encoded = view.get(Table.BUCKET, BUCKET_FACTS)
        if encoded is not None:
            return BucketFacts.decode(encoded)
        if any(view.last_before(table, LAST) is not None for table in Table):
            # A new bucket must not be made over what is left of another.
            raise _damaged("the data holds a bucket without its facts")
        return None


def open_bucket(
    engine: Engine,
    *,
    environment: StoreEnvironment,
    secret: tuple[int, int],
    on_upgrade: Callable[[Progress], None] = lambda progress: None,
) -> Bucket:
    """The bucket that an engine holds, as it was when it was last durable.

    A vbucket that is damaged is stopped, and the others are there; damage to what belongs to all of them is an error.
    """
    stored = stored_facts(engine)
    if stored is None:
        raise DataDamaged("the data holds no bucket", hint="Create the bucket first, or restore the data")
    engine = CheckedEngine.over(engine, stored.name)
    facts = upgrade(engine.unchecked, stored, on_upgrade)
    with engine.view() as view:
        for _ in view.scan(Table.BUCKET, FIRST, LAST):
            """A name that the disk has changed is not missed below: its row is checked here."""
        manifest = stored_manifest(view)
        was_clean = engine.was_left_alone and view.get(Table.BUCKET, CLEAN_STOP) is not None
        commits = [_read_commit(key, value, facts.vbuckets) for key, value in view.scan(Table.JOURNAL, FIRST, LAST)]
        next_commit = commits[-1].number + 1 if commits else 1
        bucket = _bare_bucket(engine, facts, manifest, environment=environment, secret=secret, next_commit=next_commit)
        bucket.young = YoungCommits(commits)
        for vbucket in _stored_vbuckets(view, facts):
            _open_vbucket(bucket, view, vbucket)
    _mark_open(bucket, was_clean=was_clean)
    return bucket


def _stored_vbuckets(view: CheckedView, facts: BucketFacts) -> list[int]:
    """The vbuckets of which facts or changes are stored. Where the facts are missing, the changes still say so."""
    found = {int(vbucket_of_key(key)) for key, _ in view.sizes(Table.VBUCKETS, FIRST, LAST)}
    key = FIRST
    while (row := next(view.sizes(Table.BLOCKS, key, LAST), None)) is not None:
        vbucket = vbucket_of_block(row[0])
        found.add(vbucket)
        key = block_key(vbucket, 2**64 - 1) + b"\0"
    beyond = [vbucket for vbucket in found if vbucket >= facts.vbuckets]
    if beyond:
        raise _damaged(f"vbucket {beyond[0]} is beyond the bucket's {facts.vbuckets}")
    return sorted(found)


def _open_vbucket(bucket: Bucket, view: CheckedView, vbucket: int) -> None:
    """Load a vbucket, or stop it where it is damaged."""
    # What its state was, a vbucket without sound facts does not show.
    unknown = VBucketFacts(state=VBucketState.DEAD, failover_log=FailoverLog.start(bucket.environment.new_vbuuid()))
    try:
        stored = view.get(Table.VBUCKETS, vbucket_key(vbucket))
        if stored is None:
            raise VBucketDamaged(
                f"bucket {bucket.facts.name}: vbucket {vbucket} has lost its state and its failover log",
                vbucket=vbucket,
            )
        bucket.vbuckets.set_facts(vbucket, _decoded_facts(bucket, vbucket, stored))
        load_vbucket(bucket, view, vbucket)
    except VBucketDamaged as error:
        if bucket.vbuckets.facts[vbucket] is None:
            bucket.vbuckets.set_facts(vbucket, unknown)
        bucket.index.clear(vbucket)
        bucket.prepares.clear(vbucket)
        bucket.stop_vbucket(error)


def _decoded_facts(bucket: Bucket, vbucket: int, stored: memoryview) -> VBucketFacts:
    try:
        return VBucketFacts.decode(stored)
    except DataDamaged as error:
        reason = f"bucket {bucket.facts.name}: vbucket {vbucket}: {error.reason}"
        raise VBucketDamaged(reason, vbucket=vbucket) from error


def stored_manifest(view: CheckedView) -> Manifest:
    encoded = view.get(Table.BUCKET, MANIFEST)
    if encoded is None:
        raise _damaged("the bucket's manifest is gone")
    try:
        return Manifest.decode(encoded)
    except MalformedJson as error:
        raise _damaged(f"the bucket's manifest is damaged: {error.reason}") from error


def _damaged(reason: str) -> DataDamaged:
    return DataDamaged(reason, hint="Restore the data from a backup or a replica")


def close_bucket(bucket: Bucket) -> None:
    """Commit what is pending and leave the mark of a clean stop. The engine stays open."""
    assert bucket.in_flight is None, "a stop is clean only if nothing is lost"
    bucket.commit_now()
    if not bucket.is_marked_clean:
        bucket.engine.write([PutRow(Table.BUCKET, CLEAN_STOP, b"1")])


def load_vbucket(bucket: Bucket, view: CheckedView, vbucket: int) -> None:
    """Rebuild the index and the numbers of a vbucket from its stored changes."""
    bucket.index.clear(vbucket)
    bucket.prepares.clear(vbucket)
    bucket.vbuckets.reset_numbers(vbucket)
    flushes: dict[int, int] = {}
    """Of the collections that were flushed: where that was last."""
    reached = 0
    for key, block in view.scan(Table.BLOCKS, *blocks_of(vbucket)):
        last = block_last_seqno(key)
        if not is_sound(as_run(block), vbucket, u64(reached), u64(last)):
            raise VBucketDamaged(
                f"bucket {bucket.facts.name}: vbucket {vbucket}, its changes from {reached + 1} to {last} are damaged",
                vbucket=vbucket,
            )
        flushes |= _load_run(bucket, vbucket, as_run(block), commit=0)
        reached = last
    for commit in bucket.young.of(vbucket):
        run = commit.run(vbucket)
        # A crash between settling and clearing the journal leaves changes in both.
        fresh = run[split_after(run, reached) :]
        if len(fresh):
            flushes |= _load_run(bucket, vbucket, fresh, commit=commit.number)
    if flushes:
        stored = (as_run(block) for _, block in view.scan(Table.BLOCKS, *blocks_of(vbucket)))
        runs = chain(stored, (commit.run(vbucket) for commit in bucket.young.of(vbucket)))
        bucket.vbuckets.superseded[vbucket] += bucket.index.forget_flushed(vbucket, flushes, runs)
    facts = bucket.vbuckets.facts[vbucket]
    assert facts is not None
    numbers = bucket.vbuckets
    numbers.high_seqnos[vbucket] = max(int(numbers.high_seqnos[vbucket]), reached, facts.high_seqno_floor)
    numbers.durable_seqnos[vbucket] = numbers.high_seqnos[vbucket]
    numbers.visible_seqnos[vbucket] = max(int(numbers.visible_seqnos[vbucket]), facts.visible_seqno_floor)
    numbers.completed_seqnos[vbucket] = max(int(numbers.completed_seqnos[vbucket]), facts.completed_seqno_floor)
    numbers.max_cas[vbucket] = max(int(numbers.max_cas[vbucket]), facts.max_cas_floor)
    numbers.deleted_revs[vbucket] = max(int(numbers.deleted_revs[vbucket]), facts.deleted_rev_floor)


def _load_run(bucket: Bucket, vbucket: int, run: Bytes, *, commit: int) -> dict[int, int]:
    """Enter a run. Returns the collections that are flushed in it, each with the seqno of that."""
    flushes: dict[int, int] = {}
    numbers = bucket.vbuckets
    bucket.index_changes(vbucket, run, documents=count_documents(run), commit=commit)
    bucket.prepares.enter_run(vbucket, run)
    for seqno, event in events_in(run):
        numbers.on_event(vbucket, seqno, event.manifest_uid)
        if is_flush(event):
            flushes[event.collection_id] = seqno
    starts = np.array([0, len(run)], dtype=np.int64)
    one = slice(vbucket, vbucket + 1)
    last_seqnos(run, starts, numbers.high_seqnos[one], numbers.visible_seqnos[one], numbers.completed_seqnos[one])
    return flushes


def _read_commit(key: bytes, value: memoryview, vbuckets: int) -> GroupCommit:
    data = as_run(value).copy()
    group_starts = np.empty(vbuckets + 1, dtype=np.int64)
    if not group_starts_of(data, group_starts):
        raise _damaged(f"commit {commit_number(key)} in the journal is damaged")
    return GroupCommit(number=commit_number(key), data=data, group_starts=group_starts)


def _bare_bucket(
    engine: Engine,
    facts: BucketFacts,
    manifest: Manifest,
    *,
    environment: StoreEnvironment,
    secret: tuple[int, int],
    next_commit: int,
) -> Bucket:
    index = Index(facts.vbuckets, secret=secret)
    return Bucket(engine, facts, index=index, manifest=manifest, environment=environment, next_commit=next_commit)


def _mark_open(bucket: Bucket, *, was_clean: bool) -> None:
    bucket.was_stopped_in_order = was_clean
    changes: list[Change] = [DeleteRow(Table.BUCKET, CLEAN_STOP)]
    for vbucket, facts in enumerate(bucket.vbuckets.facts):
        if was_clean or facts is None or bucket.vbuckets.states[vbucket] != VBucketState.ACTIVE:
            continue
        high = Seqno(int(bucket.vbuckets.high_seqnos[vbucket]))
        log = facts.failover_log.branch(bucket.environment.new_vbuuid(), at_seqno=high)
        branched = replace(facts, failover_log=log)
        bucket.vbuckets.set_facts(vbucket, branched)
        changes.append(PutRow(Table.VBUCKETS, vbucket_key(vbucket), branched.encode()))
    try:
        bucket.engine.write(changes)
    except StoreFull:
        # A node that was stopped in order can be read on a full disk. It is as clean as before until something changes.
        if not was_clean:
            raise
        bucket.is_marked_clean = True
