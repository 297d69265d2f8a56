"""Search: the newest changes of a bucket, by collection, key, kind and time, a page at a time.

The dashboard's change browser calls it, in a thread beside the event loop: `SearchedBucket.of` first takes what is
needed from the bucket, and the search itself reads nothing else. It must never touch the bucket.

It uses no index. The store has changes by vbucket and seqno; across vbuckets their order is that of the CAS, which is
a time. The search reads young commits first, the newest first, because they are in memory. Then it reads the vbuckets'
blocks, from the last one backwards: the next is always the vbucket whose unread blocks can hold the newest change. No
change in a vbucket has a higher CAS than the vbucket, and no change before a block a higher one than the block's
first, unless that was made elsewhere and kept an older CAS: changes before it may then be read too late. A search ends
when it has enough rows or reaches one of its bounds, and reports whether it found all that match.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from headwater.errors import VBucketDamaged
from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    Int64s,
    ReadOnlyBytes,
    UInt32s,
    UInt64s,
    i64,
    kernel,
    kernel_part,
    load_u16,
    load_u32,
    load_u64,
    u64,
)
from headwater.protocol.kernels.frame_runs import collection_id, is_document_change, prefix_bytes
from headwater.store.bucket import Bucket
from headwater.store.commits import GroupCommit
from headwater.store.data_format import block_key, block_last_seqno
from headwater.store.engine import Engine, Table
from headwater.store.runs import as_run

_CHANGE_BYTES_MIN = 24 + 20 + 2
"""The length of the shortest stored change of a document, which limits how many a run can have."""
_SEQNO_END = 2**64 - 1
CAS_MAX = 2**63 - 1
"""Higher than any time, and the highest number that fits into the signed integers of kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What to search for, and the bounds of the search."""

    rows: int
    bytes_max: int
    seconds_max: float
    key_part: bytes = b""
    is_whole_key: bool = False
    """Whether `key_part` is the whole key."""
    collections: tuple[int, ...] = ()
    """Ids; empty for all."""
    opcodes: tuple[int, ...] = ()
    """Mutations, deletions or expirations; empty for all."""
    vbucket: int | None = None
    first_cas: int = 0
    """Find nothing older: a CAS is a time in nanoseconds."""
    before: tuple[int, int] = (CAS_MAX, 0)
    """The CAS and vbucket of the last row of the previous page: this page has older rows. Vbuckets that are written at
    one moment have the same CAS, so a page can't end at a CAS alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The frames found, newest first, and whether they are all that match."""

    frames: list[bytes]
    is_complete: bool
    searched_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedBucket:
    """What the event loop takes from a bucket for a search; the search itself may then run in a thread."""

    engine: Engine
    young: tuple[GroupCommit, ...]
    bounds: tuple[tuple[int, int], ...]
    """Vbuckets, each with its highest CAS."""

    @classmethod
    def of(cls, bucket: Bucket) -> SearchedBucket:
        numbers = bucket.numbers
        existing = np.flatnonzero(numbers.states).tolist()
        bounds = tuple(zip(existing, numbers.max_cas[existing].tolist(), strict=True))
        return cls(engine=bucket.engine, young=tuple(bucket.young.values()), bounds=bounds)


def search_changes(searched: SearchedBucket, search: Search, *, now_s: Callable[[], float]) -> SearchResult:
    """Return the newest changes that match. `now_s` is a clock that never goes back; it may be called in a thread."""
    matches = _Matches(search, now_s=now_s)
    is_through = _search_young(matches, searched) and _search_blocks(matches, searched)
    is_all = not matches.has_left_out and len(matches.found) <= search.rows
    return SearchResult(
        frames=matches.newest(), is_complete=is_through and is_all, searched_bytes=matches.searched_bytes
    )


class _Matches:
    """What a search has found so far, and how many bytes it has read."""

    def __init__(self, search: Search, *, now_s: Callable[[], float]) -> None:
        self.search = search
        self.found: dict[tuple[int, int], tuple[int, bytes]] = {}
        """CAS and frame by vbucket and seqno: during settling, a change may be both in a commit and in a block."""
        self.searched_bytes = 0
        self.has_left_out = False
        """Whether more changes have matched than there are rows for."""
        self._collections = np.array(search.collections, dtype=np.uint32)
        self._needle = as_run(search.key_part)
        self._opcodes = np.array(search.opcodes, dtype=np.uint32)
        self._now_s = now_s
        self._deadline_s = now_s() + search.seconds_max

    @property
    def is_exhausted(self) -> bool:
        return self.searched_bytes >= self.search.bytes_max or self._now_s() >= self._deadline_s

    def look_through(self, run: Bytes) -> None:
        self.searched_bytes += len(run)
        search, rows, room = self.search, self.search.rows, len(run) // _CHANGE_BYTES_MIN + 1
        starts, cases = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.uint64)
        count = find_changes(
            run, self._collections, self._opcodes, self._needle, search.is_whole_key, search.first_cas, *search.before,
            starts, cases,
        )  # fmt: skip
        self.has_left_out |= count > rows
        vbuckets = run[starts[:count] + 6].astype(np.int64) * 256 + run[starts[:count] + 7]
        newest = np.lexsort((vbuckets, cases[:count]))[::-1][:rows]
        for start, cas in zip(starts[newest].tolist(), cases[newest].tolist(), strict=True):
            frame = run[start : start + 24 + int.from_bytes(run[start + 8 : start + 12])].tobytes()
            self.found[int.from_bytes(frame[6:8]), int.from_bytes(frame[24:32])] = cas, frame
        if len(self.found) > 4 * rows:
            ordered = sorted(self.found.items(), key=lambda match: (match[1][0], match[0][0]), reverse=True)
            self.found = dict(ordered[:rows])
            self.has_left_out = True

    def newer_than(self, cas: int) -> int:
        return sum(1 for found, _ in self.found.values() if found >= cas)

    def newest(self) -> list[bytes]:
        ordered = sorted(self.found.items(), key=lambda match: (match[1][0], match[0][0]), reverse=True)
        return [frame for _, (_, frame) in ordered[: self.search.rows]]


def _search_young(matches: _Matches, searched: SearchedBucket) -> bool:
    """Search the young commits. Returns whether the search has to continue in the blocks."""
    vbucket = matches.search.vbucket
    for commit in reversed(searched.young):
        matches.look_through(commit.data if vbucket is None else commit.run(vbucket))
        if matches.is_exhausted:
            return False
        if len(matches.found) >= matches.search.rows:
            break  # Blocks may have newer changes of other vbuckets: a replica's large runs are never young.
    return True


def _search_blocks(matches: _Matches, searched: SearchedBucket) -> bool:
    """Search the blocks. Returns whether all that may match could be read, and were."""
    wanted = matches.search.vbucket
    # The vbucket that may have the newest change comes first.
    unread = [(-cas, vbucket, _SEQNO_END) for vbucket, cas in searched.bounds if wanted in (None, vbucket)]
    heapq.heapify(unread)
    is_through = True
    with searched.engine.view() as view:
        while unread:
            bound, vbucket, before = heapq.heappop(unread)
            if -bound < matches.search.first_cas:
                return is_through
            if matches.is_exhausted or matches.newer_than(-bound) >= matches.search.rows:
                return False
            try:
                block = view.last_before(Table.BLOCKS, block_key(vbucket, before))
            except VBucketDamaged:
                is_through = False  # Damaged changes are not shown, nor those before them.
                continue
            if block is None or block[0] < block_key(vbucket, 0):
                continue
            run = as_run(block[1])
            matches.look_through(run)
            # No change before this block has a higher CAS than its first; a system event has none, so the bound stays.
            first_cas = int.from_bytes(run[16:24]) or -bound
            heapq.heappush(unread, (-first_cas, vbucket, block_last_seqno(block[0])))
    return is_through


# --- kernels ------------------------------------------------------------------------------------------------------


@kernel
def find_changes(
    run: AnyBytes, collections: UInt32s, opcodes: UInt32s, needle: ReadOnlyBytes, is_whole_key: bool, first_cas: int,
    before_cas: int, before_vbucket: int, starts: Int64s, cases: UInt64s,
) -> int:  # fmt: skip
    """Find where the changes of documents begin whose key contains the needle, or equals it, and the CAS of each.

    `collections` are the wanted ids, and `opcodes` the wanted kinds; empty for all. Returns how many changes there
    are; the arrays must have room for every frame of the run.
    """
    count = 0
    at = i64(0)
    while at < len(run):
        end = at + 24 + i64(load_u32(run, at + 8))
        opcode = run[at + 1]
        cas = i64(load_u64(run, at + 16))
        is_before = cas < before_cas or (cas == before_cas and i64(load_u16(run, at + 6)) < before_vbucket)
        if is_document_change(opcode) and is_before and cas >= first_cas and _is_wanted(opcode, opcodes):
            key_at = at + 24 + i64(run[at + 4])
            key_end = key_at + i64(load_u16(run, at + 2))
            name_at = key_at + prefix_bytes(run, key_at, key_end)
            has_length = not is_whole_key or key_end - name_at == len(needle)
            is_wanted = has_length and _is_wanted(collection_id(run, key_at), collections)
            if is_wanted and _contains(run, name_at, key_end, needle):
                starts[count] = at
                cases[count] = load_u64(run, at + 16)
                count += 1
        at = end
    return count


@kernel_part
def _is_wanted(number: int, wanted: Column) -> bool:
    if len(wanted) == 0:
        return True
    for index in range(len(wanted)):
        if u64(wanted[index]) == u64(number):
            return True
    return False


@kernel_part
def _contains(run: Bytes, at: int, end: int, needle: Bytes) -> bool:
    if len(needle) == 0:
        return True
    for begin in range(at, end - len(needle) + 1):
        matches = True
        for index in range(len(needle)):
            if run[begin + index] != needle[index]:
                matches = False
                break
        if matches:
            return True
    return False
