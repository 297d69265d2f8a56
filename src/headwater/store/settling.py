"""Settling: young commits become blocks of the vbuckets they touch.

A commit holds a little of many vbuckets, a block much of one. Settling takes the commits there are, gathers what they
hold of each vbucket and appends it to the vbucket's last block until that is large enough, then begins another. It goes
in steps of a few vbuckets, each one durable write, so that no writer waits long; the journal is cleared after the
last. A crash in between leaves changes both in blocks and in the journal, which opening sees by their seqnos.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headwater.protocol.kernels.memory import Bytes
from headwater.store.bucket import Bucket
from headwater.store.commits import Commit
from headwater.store.data_format import block_key, block_last_seqno, blocks_of, commit_key
from headwater.store.engine import Change, Delete, Put, Table, View
from headwater.store.runs import as_run, last_seqno, split_after, split_before

BLOCK_BYTES_TARGET = 256 * 1024
YOUNG_BYTES_MAX = 32 * 1024 * 1024
"""When to settle: what is young is held in memory."""
YOUNG_COMMITS_MAX = 2048
STEP_BYTES = 4 * 1024 * 1024


def is_due(bucket: Bucket) -> bool:
    return len(bucket.young) >= YOUNG_COMMITS_MAX or bucket.young.total_bytes >= YOUNG_BYTES_MAX


class Settling:
    """One round over all vbuckets. `steps` are to be written one after the other, then `finish` is called."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._commits = [commit for _, commit in sorted(bucket.young.items())]
        # Taken here and not in `steps`, which may run in another thread while more commits are published.
        self._by_vbucket = {vbucket: bucket.young.of(vbucket) for vbucket in self._touched()}

    def steps(self) -> Iterator[list[Change]]:
        """Changes for the engine, a step at a time; each must be written before the next is asked for."""
        changes: list[Change] = []
        size = 0
        for vbucket, commits in self._by_vbucket.items():
            with self._bucket.engine.view() as view:
                settled = settle_vbucket(view, vbucket, commits)
            changes += settled
            size += sum(len(change.value) for change in settled if isinstance(change, Put))
            if size >= STEP_BYTES:
                yield changes
                changes, size = [], 0
        yield [*changes, *(Delete(Table.JOURNAL, commit_key(commit.number)) for commit in self._commits)]

    def finish(self) -> None:
        """All steps are durable: let go of the commits."""
        for commit in self._commits:
            del self._bucket.young[commit.number]

    def _touched(self) -> list[int]:
        sizes = np.zeros(len(self._bucket.vbuckets), dtype=np.int64)
        for commit in self._commits:
            sizes += np.diff(commit.group_starts)
        return [int(vbucket) for vbucket in np.flatnonzero(sizes)]


def settle_now(bucket: Bucket) -> None:
    """Settle everything at once, for callers that can wait."""
    settling = Settling(bucket)
    for changes in settling.steps():
        bucket.engine.write(changes)
    settling.finish()


def settle_vbucket(view: View, vbucket: int, commits: list[Commit]) -> list[Change]:
    """The changes that bring a vbucket's part of the commits into its blocks."""
    start, end = blocks_of(vbucket)
    last = view.last_before(Table.BLOCKS, end)
    reached = block_last_seqno(last[0]) if last is not None and last[0] >= start else 0
    fresh = [run[split_after(run, reached) :] for run in (commit.run(vbucket) for commit in commits)]
    size = sum(len(run) for run in fresh)
    if size == 0:
        return []
    merged: list[Bytes] = []
    changes: list[Change] = []
    # Blocks up to twice the size of what comes behind them are taken along. So there are few small blocks, and a change
    # is written anew only a few times before its block is full, however little is settled at a time.
    while last is not None and last[0] >= start and len(last[1]) < BLOCK_BYTES_TARGET and len(last[1]) <= 2 * size:
        merged.insert(0, as_run(last[1]))
        changes.append(Delete(Table.BLOCKS, last[0]))
        size += len(last[1])
        last = view.last_before(Table.BLOCKS, last[0])
    return [*changes, *blocks(vbucket, np.concatenate([*merged, *fresh]))]


def blocks(vbucket: int, run: Bytes) -> Iterator[Put]:
    """A run cut into blocks of about the target size."""
    while len(run):
        cut = split_before(run, BLOCK_BYTES_TARGET)
        yield Put(Table.BLOCKS, block_key(vbucket, last_seqno(run[:cut])), run[:cut].tobytes())
        run = run[cut:]
