"""Create, open and close buckets: the node does so when it starts and stops.

Opening reads the facts and what the journal still holds, and rebuilds the index from the stored changes; it checks
every frame, so that the rest of the store can trust them. A bucket that was not closed in order gets a new branch in
the failover log of every active vbucket, because what it answered just before it died is unknown. So does a copy or a
restored backup: its original may have continued, and given the next seqnos to other changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from types import MappingProxyType

import numpy as np

from headwater.errors import DataDamaged, MalformedJson, StoreFull, VBucketDamaged
from headwater.kernels.memory import Bytes, u64
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.features import Opcode
from headwater.protocol.frames import decode_collection_id, decode_frames
from headwater.protocol.manifest import Manifest
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno, vbucket_of
from headwater.store.bucket import Bucket, StoreEnvironment
from headwater.store.checked_engine import FIRST, LAST, CheckedEngine, CheckedView
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
    commit_key,
    commit_number,
    vbucket_key,
    vbucket_of_block,
    vbucket_of_key,
)
from headwater.store.engine import DeleteRow, Engine, PutRow, Table
from headwater.store.index import count_documents
from headwater.store.runs import EMPTY_RUN, as_run, group_starts_of, is_sound, last_seqnos, split_after
from headwater.store.vbuckets import events_in, is_flush, raise_to


def create_bucket(
    engine: Engine,
    facts: BucketFacts,
    *,
    environment: StoreEnvironment,
    secret: tuple[int, int],
    rows: Mapping[bytes, bytes] = MappingProxyType({}),
) -> Bucket:
    """Create a bucket with no vbuckets. `rows` are stored with it, as by `Bucket.put_rows`."""
    bucket = Bucket(engine, facts, Manifest(), environment=environment, secret=secret, next_commit=1)
    bucket.engine.write(
        [
            PutRow(Table.BUCKET, BUCKET_FACTS, facts.encode()),
            PutRow(Table.BUCKET, MANIFEST, Manifest().encode()),
            *(PutRow(Table.BUCKET, key, value) for key, value in rows.items()),
        ]
    )
    return bucket


def stored_facts(engine: Engine) -> BucketFacts | None:
    """Return the facts of the bucket that an engine holds, or None if it holds none."""
    with engine.view() as view:
        encoded = view.get(Table.BUCKET, BUCKET_FACTS)
        if encoded is not None:
            return BucketFacts.decode(encoded)
        if any(view.last_before(table, LAST) is not None for table in Table):
            # A new bucket must not be created over the remains of another.
            raise _damaged("the data holds a bucket without its facts")
        return None


def open_bucket(engine: Engine, *, environment: StoreEnvironment, secret: tuple[int, int]) -> Bucket:
    """Open the bucket that an engine holds, as it was when it was last durable.

    A damaged vbucket is stopped, and the others are served; damage to what belongs to all of them raises
    `DataDamaged`. A damaged commit of the journal stops the vbuckets that it may have changes of.
    """
    facts = stored_facts(engine)
    if facts is None:
        raise DataDamaged("the data holds no bucket", hint="Create the bucket first, or restore the data")
    engine = CheckedEngine.over(engine, facts.name)
    with engine.view() as view:
        for _ in view.scan(Table.BUCKET, FIRST, LAST):
            """Check every row: one whose key the disk has changed would go unnoticed below."""
        manifest = stored_manifest(view)
        was_clean = engine.was_left_alone and view.get(Table.BUCKET, CLEAN_STOP) is not None
        next_commit, commits, damaged = 1, list[GroupCommit](), dict[int, set[int]]()
        for key, value, is_sound_row in view.journal():
            next_commit = commit_number(key) + 1
            commit = _read_commit(key, value, facts.vbuckets) if is_sound_row else None
            if commit is None:
                damaged[commit_number(key)] = _vbuckets_of_damaged(value, facts.vbuckets)
            else:
                commits.append(commit)
        bucket = Bucket(engine, facts, manifest, environment=environment, secret=secret, next_commit=next_commit)
        bucket.young = YoungCommits(commits)
        bucket.damaged_commits = damaged
        for vbucket in _stored_vbuckets(view, facts):
            _open_vbucket(bucket, view, vbucket)
    _mark_open(bucket, was_clean=was_clean)
    return bucket


def _stored_vbuckets(view: CheckedView, facts: BucketFacts) -> list[int]:
    """Return the vbuckets that have stored facts or changes. The changes show a vbucket whose facts are missing."""
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
    """Load a vbucket, or stop it if it is damaged."""
    # The state of a vbucket without sound facts is unknown.
    unknown = VBucketFacts(state=VBucketState.DEAD, failover_log=FailoverLog.start(bucket.environment.new_vbuuid()))
    try:
        stored = view.get(Table.VBUCKETS, vbucket_key(vbucket))
        if stored is None:
            raise VBucketDamaged(
                f"bucket {bucket.facts.name}: vbucket {vbucket} has lost its state and its failover log",
                vbucket=vbucket,
            )
        bucket.numbers.set_facts(vbucket, _decoded_facts(bucket, vbucket, stored))
        for number, vbuckets in bucket.damaged_commits.items():
            if vbucket in vbuckets:
                where = f"bucket {bucket.facts.name}: vbucket {vbucket}, its changes in commit {number} of the journal"
                raise VBucketDamaged(f"{where} are not what was written", vbucket=vbucket)
        load_vbucket(bucket, view, vbucket)
    except VBucketDamaged as error:
        if bucket.numbers.facts[vbucket] is None:
            bucket.numbers.set_facts(vbucket, unknown)
        bucket.index.clear(vbucket)
        bucket.undecided.clear(vbucket)
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
    """Commit pending changes and store the mark of a clean stop. The engine stays open."""
    assert bucket.in_flight is None, "a stop is clean only if nothing is lost"
    bucket.begin_due_branches()
    bucket.commit_now()
    if not bucket.is_as_found:
        bucket.engine.write([PutRow(Table.BUCKET, CLEAN_STOP, b"1")])


def load_vbucket(bucket: Bucket, view: CheckedView, vbucket: int) -> None:
    """Rebuild the index and the numbers of a vbucket from its stored changes."""
    bucket.forget_vbucket(vbucket)
    flushes: dict[int, int] = {}
    """The seqno of the last flush of each collection that was flushed."""
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
        bucket.numbers.superseded[vbucket] += bucket.index.forget_flushed(vbucket, flushes, runs)
    facts = bucket.numbers.facts[vbucket]
    assert facts is not None
    numbers = bucket.numbers
    raise_to(numbers.high_seqnos, vbucket, max(reached, facts.high_seqno_floor))
    numbers.durable_seqnos[vbucket] = numbers.high_seqnos[vbucket]
    raise_to(numbers.visible_seqnos, vbucket, facts.visible_seqno_floor)
    raise_to(numbers.completed_seqnos, vbucket, facts.completed_seqno_floor)
    raise_to(numbers.max_cas, vbucket, facts.max_cas_floor)
    raise_to(numbers.deleted_revs, vbucket, facts.deleted_rev_floor)


def _load_run(bucket: Bucket, vbucket: int, run: Bytes, *, commit: int) -> dict[int, int]:
    """Enter a run. Returns the collections that it flushes, each with the seqno of the last flush."""
    flushes: dict[int, int] = {}
    numbers = bucket.numbers
    bucket.index_changes(vbucket, run, documents=count_documents(run), commit=commit)
    bucket.undecided.enter_run(vbucket, run)
    for seqno, event in events_in(run):
        numbers.on_event(vbucket, seqno, event, manifest_uid=event.manifest_uid)
        if is_flush(event):
            flushes[event.collection_id] = seqno
    starts = np.array([0, len(run)], dtype=np.int64)
    one = slice(vbucket, vbucket + 1)
    last_seqnos(run, starts, numbers.high_seqnos[one], numbers.visible_seqnos[one], numbers.completed_seqnos[one])
    return flushes


def _read_commit(key: bytes, value: memoryview, vbuckets: int) -> GroupCommit | None:
    """Return a commit of the journal; None if its frames can't be separated."""
    data = as_run(value).copy()
    group_starts = np.empty(vbuckets + 1, dtype=np.int64)
    if not group_starts_of(data, group_starts):
        return None
    return GroupCommit(number=commit_number(key), data=data, row=EMPTY_RUN, group_starts=group_starts)


def _vbuckets_of_damaged(value: memoryview, vbuckets: int) -> set[int]:
    """Return the vbuckets that a damaged commit may have changes of.

    These are the vbuckets that its frames name, if the frames are whole and each key belongs to the vbucket that its
    frame names: then the disk has changed neither a length nor a vbucket's number. If in doubt, these are all
    vbuckets: one that lost a change unnoticed would use its seqno a second time.
    """
    commit = _read_commit(commit_key(0), value, vbuckets)
    named: set[int] = set()
    for frame in () if commit is None else decode_frames(commit.data.tobytes()):
        named.add(frame.specific)
        if frame.opcode == Opcode.DCP_SYSTEM_EVENT:
            return set(range(vbuckets))
        _, key_at = decode_collection_id(frame.key)
        if vbucket_of(frame.key[key_at:], vbuckets) != frame.specific:
            return set(range(vbuckets))
    return named or set(range(vbuckets))


def _mark_open(bucket: Bucket, *, was_clean: bool) -> None:
    bucket.was_stopped_in_order = was_clean
    branched: dict[int, VBucketFacts] = {}
    for vbucket, facts in enumerate(bucket.numbers.facts):
        if was_clean or facts is None or bucket.numbers.states[vbucket] != VBucketState.ACTIVE:
            continue
        high = Seqno(int(bucket.numbers.high_seqnos[vbucket]))
        log = facts.failover_log.branch(bucket.environment.new_vbuuid(), at_seqno=high)
        branched[vbucket] = replace(facts, failover_log=log)
    rows = (PutRow(Table.VBUCKETS, vbucket_key(vbucket), facts.encode()) for vbucket, facts in branched.items())
    try:
        bucket.engine.write([DeleteRow(Table.BUCKET, CLEAN_STOP), *rows])
    except StoreFull:
        # A bucket can be read on a full disk. Until something is written, no seqno is given on a branch that ended.
        bucket.is_as_found = True
        bucket.due_branches = {vbucket: facts.failover_log for vbucket, facts in branched.items()}
        return
    for vbucket, facts in branched.items():
        bucket.numbers.set_facts(vbucket, facts)
