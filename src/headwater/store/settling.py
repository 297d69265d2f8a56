"""Settle young commits into the blocks of the vbuckets they touch, and take changes back out of blocks.

The commit loop settles; handlers and consumers roll back, remove and flush. Everything here but `abandon` requires
that no commit is being written meanwhile.

A commit holds a few changes of many vbuckets, a block many changes of one. Settling gathers what the young commits
hold of each vbucket and appends it to the vbucket's last block if that is small; otherwise it begins another. It goes
in steps of a few vbuckets, each one durable write, so that no writer waits long; the last step clears the journal. A
crash in between leaves changes both in blocks and in the journal, which opening recognises by their seqnos.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from headwater.errors import StoreError, VBucketDamaged
from headwater.kernels.memory import Bytes
from headwater.protocol.failover_log import FailoverLog
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import Seqno
from headwater.store.bucket import Bucket
from headwater.store.checked_engine import CheckedView
from headwater.store.commits import GroupCommit, blocks, full_block_bytes
from headwater.store.data_format import (
    BUCKET_FACTS,
    BucketFacts,
    VBucketFacts,
    block_key,
    block_last_seqno,
    blocks_of,
    commit_key,
    vbucket_key,
)
from headwater.store.engine import Change, DeleteRow, PutRow, Table
from headwater.store.opening import load_vbucket, stored_manifest
from headwater.store.runs import as_run, gather_runs, last_seqno, split_after

YOUNG_BYTES_MAX = 64 * 1024 * 1024
"""Settle at this size: young commits are held in memory. In 1,024 vbuckets it makes blocks that nothing is added to."""
YOUNG_COMMITS_MAX = 2048
STEP_BYTES = 2 * 1024 * 1024
"""Commits are written between two steps, so a small write may have to wait for this much, or up to half as much again
with the blocks that the changes are appended to."""


def is_due(bucket: Bucket) -> bool:
    return len(bucket.young) >= YOUNG_COMMITS_MAX or bucket.young.total_bytes >= YOUNG_BYTES_MAX


class Settling:
    """One round over all vbuckets. Call `write_step` until it returns False, then `finish`.

    With `oldest` it takes only as many commits as make settling due: the journal is cleared at the end of a round, so
    a node that is killed again and again must reach the end of one, however much its earlier runs left behind.
    """

    def __init__(self, bucket: Bucket, *, oldest: bool = False) -> None:
        self._bucket = bucket
        commits = (commit for _, commit in sorted(bucket.young.items()))
        self._commits = list(_due_part(commits) if oldest else commits)
        self._steps = self.steps()

    def write_step(self) -> bool:
        """Write the next step; return False after the last. Uses only the engine, so it may run in another thread."""
        changes = next(self._steps, None)
        if changes is not None:
            self._bucket.engine.write(changes)
        return changes is not None

    def steps(self) -> Iterator[list[Change]]:
        """Yield the changes for the engine, one step at a time; write each step before taking the next."""
        changes: list[Change] = []
        for part in self._parts():
            if changes:
                yield changes
            with self._bucket.engine.view() as view:
                changes = [change for vbucket, fresh in part for change in settle_vbucket(view, vbucket, fresh)]
        yield [*changes, *(DeleteRow(Table.JOURNAL, commit_key(commit.number)) for commit in self._commits)]

    def finish(self) -> None:
        """Drop the commits from memory, once all steps are durable."""
        for commit in self._commits:
            del self._bucket.young[commit.number]

    def _parts(self) -> Iterator[list[tuple[int, Bytes]]]:
        """Yield what the commits hold of each vbucket that they touch, for some vbuckets at a time."""
        places = np.array([commit.place for commit in self._commits], dtype=np.int64).reshape(-1, 2)
        ends = np.zeros(len(self._bucket.vbuckets) + 1, dtype=np.int64)
        for commit in self._commits:
            ends += commit.group_starts
        first = 0
        while ends[first] < ends[-1]:
            # As many vbuckets as make a step, and the one that completes it.
            last = min(int(np.searchsorted(ends, ends[first] + STEP_BYTES)), len(ends) - 1)
            gathered = np.empty(ends[last] - ends[first], dtype=np.uint8)
            starts = np.empty(last - first + 1, dtype=np.int64)
            gather_runs(places, first, gathered, starts)
            touched = np.flatnonzero(np.diff(starts)).tolist()
            yield [(first + item, gathered[starts[item] : starts[item + 1]]) for item in touched]
            first = last


def _due_part(commits: Iterable[GroupCommit]) -> Iterator[GroupCommit]:
    left = YOUNG_BYTES_MAX
    for commit in islice(commits, YOUNG_COMMITS_MAX):
        if left <= 0:
            return
        yield commit
        left -= len(commit.data)


def settle_now(bucket: Bucket) -> None:
    """Settle everything at once, for callers that can wait."""
    settling = Settling(bucket)
    while settling.write_step():
        pass
    settling.finish()


def settle_vbucket(view: CheckedView, vbucket: int, fresh: Bytes) -> list[Change]:
    """Return the writes that append changes to a vbucket's blocks, except changes that the blocks hold already."""
    start, end = blocks_of(vbucket)
    last = view.last_size_before(Table.BLOCKS, end)
    reached = block_last_seqno(last[0]) if last is not None and last[0] >= start else 0
    fresh = fresh[split_after(fresh, reached) :]
    size = len(fresh)
    if size == 0:
        return []
    merged: list[Bytes] = []
    changes: list[Change] = []
    # Merge small blocks up to twice the size of what follows them. So there are few small blocks, and a change is
    # rewritten only a few times before its block is full, however little is settled at a time.
    appended_max = full_block_bytes()
    while last is not None and last[0] >= start and last[1] < appended_max and last[1] <= 2 * size:
        try:
            block = view.get(Table.BLOCKS, last[0])
        except VBucketDamaged:
            break  # A damaged block stays as it is: the next read of it reports the damage.
        assert block is not None
        merged.insert(0, as_run(block))
        changes.append(DeleteRow(Table.BLOCKS, last[0]))
        size += len(block)
        last = view.last_size_before(Table.BLOCKS, last[0])
    return [*changes, *blocks(vbucket, np.concatenate([*merged, fresh]) if merged else fresh)]


# --- taking changes back ------------------------------------------------------------------------------------------
#
# Rollback, removal and flush first make everything durable and settle it, so that only blocks have to be changed.


def roll_back(bucket: Bucket, vbucket: int, to_seqno: Seqno, *, branch: bool = False) -> Seqno:
    """Roll a vbucket back to a seqno. Returns the seqno that it was rolled back to.

    Inside the history window that is `to_seqno`, and the documents are exactly what they were then. Before the window
    versions are missing, so the vbucket starts again from 0. With `branch` a new branch of history begins there.
    """
    _bring_to_rest(bucket)
    facts = bucket.numbers.facts[vbucket]
    assert facts is not None, "only vbuckets that exist are rolled back"
    target = to_seqno if to_seqno >= facts.history_start_seqno else Seqno(0)
    target = Seqno(min(target, int(bucket.numbers.high_seqnos[vbucket])))
    rolled = replace(
        facts,
        failover_log=facts.failover_log.truncate(target),
        purge_seqno=Seqno(min(facts.purge_seqno, target)),
        history_start_seqno=Seqno(min(facts.history_start_seqno, target)),
        snapshot_start_seqno=target,
        snapshot_end_seqno=target,
        high_seqno_floor=target,
        visible_seqno_floor=Seqno(min(facts.visible_seqno_floor, target)),
        completed_seqno_floor=Seqno(min(facts.completed_seqno_floor, target)),
        max_cas_floor=int(bucket.numbers.max_cas[vbucket]),
    )
    if branch:
        log = rolled.failover_log.branch(bucket.environment.new_vbuuid(), at_seqno=target)
        rolled = replace(rolled, failover_log=log)
    changes = _drop_after(bucket, vbucket, target)
    bucket.engine.write([*changes, PutRow(Table.VBUCKETS, vbucket_key(vbucket), rolled.encode())])
    bucket.numbers.set_facts(vbucket, rolled)
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
        changes += [*_drop_after(bucket, vbucket, Seqno(0)), DeleteRow(Table.VBUCKETS, vbucket_key(vbucket))]
    bucket.engine.write([*changes, *bucket.forget_damaged_commits(vbuckets)])
    for vbucket in vbuckets:
        bucket.numbers.damage.pop(vbucket, None)
        bucket.numbers.set_facts(vbucket, None)
        bucket.forget_vbucket(vbucket)


def reset_vbucket(bucket: Bucket, vbucket: int) -> None:
    """Drop the stored data of a damaged vbucket, so that this node can receive a copy of it from another node."""
    facts = bucket.numbers.facts[vbucket]
    assert facts is not None, "only vbuckets that exist are reset"
    remove_vbuckets(bucket, [vbucket])
    log = FailoverLog.start(bucket.environment.new_vbuuid())
    bucket.set_vbucket_facts(vbucket, VBucketFacts(state=facts.state, failover_log=log, topology=facts.topology))
    bucket.commit_now()


def flush(bucket: Bucket, *, active_only: bool = False) -> None:
    """Drop all documents. Every vbucket begins a history that has nothing in common with the old one.

    In a cluster each node flushes what is active there, and the replicas follow by a rollback to 0.
    """
    _bring_to_rest(bucket)
    existing = {
        vbucket: facts
        for vbucket, facts in enumerate(bucket.numbers.facts)
        if facts is not None and (not active_only or facts.state == VBucketState.ACTIVE)
    }
    # One commit for all: a crash leaves either everything or nothing.
    for vbucket, facts in existing.items():
        bucket.numbers.damage.pop(vbucket, None)
        bucket.pending.extra += _drop_after(bucket, vbucket, Seqno(0))
        log = FailoverLog.start(bucket.environment.new_vbuuid())
        bucket.set_vbucket_facts(vbucket, VBucketFacts(state=facts.state, failover_log=log, topology=facts.topology))
        bucket.forget_vbucket(vbucket)
        if facts.state == VBucketState.ACTIVE:
            bucket.enter_manifest(vbucket)
    bucket.pending.extra += bucket.forget_damaged_commits(existing)
    try:
        bucket.commit_now()
    except StoreError:
        bucket.pending.restart(bucket.pending.number)
        for vbucket, facts in existing.items():
            bucket.numbers.set_facts(vbucket, facts)
            _reload(bucket, vbucket)
        raise


def abandon(bucket: Bucket) -> list[int]:
    """Take back everything that is not durable, after a commit could not be written. Returns the void commits."""
    void = [bucket.pending.number] if bucket.in_flight is None else [bucket.in_flight.number, bucket.pending.number]
    bucket.in_flight = None
    bucket.pending.restart(bucket.pending.number + 1)
    bucket.durable_commit = bucket.pending.number - 1
    with bucket.engine.view() as view:
        bucket.manifest = stored_manifest(view)
        facts = view.get(Table.BUCKET, BUCKET_FACTS)
        bucket.facts = bucket.facts if facts is None else BucketFacts.decode(facts)
        stored = {vbucket: _stored_facts(bucket, view, vbucket) for vbucket in range(len(bucket.numbers))}
    for vbucket, encoded in stored.items():
        if vbucket in bucket.numbers.damage:
            continue
        bucket.numbers.set_facts(vbucket, None if encoded is None else VBucketFacts.decode(encoded))
        changed = bucket.numbers.high_seqnos[vbucket] != bucket.numbers.durable_seqnos[vbucket]
        if encoded is not None and changed:
            # Locks are not stored, and a failing disk is no reason to release them.
            locked = bucket.index.locked(vbucket)
            _reload(bucket, vbucket)
            bucket.index.lock_again(vbucket, locked)
        elif encoded is None:
            bucket.forget_vbucket(vbucket)
    return void


def _stored_facts(bucket: Bucket, view: CheckedView, vbucket: int) -> bytes | None:
    try:
        stored = view.get(Table.VBUCKETS, vbucket_key(vbucket))
    except VBucketDamaged as error:
        bucket.stop_vbucket(error)
        return None
    return None if stored is None else bytes(stored)


def _bring_to_rest(bucket: Bucket) -> None:
    assert bucket.in_flight is None, "what is in flight would be written after it was taken back"
    bucket.commit_now()
    settle_now(bucket)


def _reload(bucket: Bucket, vbucket: int) -> None:
    try:
        with bucket.reading(vbucket) as view:
            load_vbucket(bucket, view, vbucket)
    except VBucketDamaged:
        # The vbucket is stopped now. The caller continues with the others.
        bucket.index.clear(vbucket)
        bucket.undecided.clear(vbucket)


def _drop_after(bucket: Bucket, vbucket: int, seqno: Seqno) -> list[Change]:
    """Return the writes that remove the changes after a seqno from the blocks."""
    changes: list[Change] = []
    if seqno == 0:
        # Nothing is kept, so nothing is read: this also removes damaged blocks.
        with bucket.engine.view() as view:
            return [DeleteRow(Table.BLOCKS, key) for key, _ in view.sizes(Table.BLOCKS, *blocks_of(vbucket))]
    with bucket.reading(vbucket) as view:
        for key, block in view.scan(Table.BLOCKS, *blocks_of(vbucket, from_seqno=seqno + 1)):
            run = as_run(block)
            kept = run[: split_after(run, seqno)]
            changes.append(DeleteRow(Table.BLOCKS, key))
            if len(kept):
                changes.append(PutRow(Table.BLOCKS, block_key(vbucket, last_seqno(kept)), kept.tobytes()))
    return changes
