"""The change browser's search: the newest changes of a bucket first, by collection and by a part of the key.

Nothing is kept for it. Changes lie in the store by vbucket and seqno; the order over all vbuckets is that of the CAS,
which is a time. Young commits are looked through newest first, they are in memory. Behind them come the vbuckets'
blocks, from the last one backwards: of all vbuckets always the one next whose unread blocks can hold the newest change
(no change in a vbucket has a higher CAS than the vbucket, and none before a block a higher one than that block's first
has). A search ends when it has enough, and by its bounds: it says how far back it looked.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from headwater.dashboard.kernels import find_changes
from headwater.dashboard.limits import SEARCH_BYTES_MAX, SEARCH_S_MAX
from headwater.protocol.kernels.memory import Bytes
from headwater.store.bucket import Bucket
from headwater.store.commits import Commit
from headwater.store.data_format import block_key, block_last_seqno
from headwater.store.engine import Engine, Table, View
from headwater.store.runs import as_run

_CHANGE_BYTES_MIN = 24 + 20 + 2
"""No stored change of a document is shorter, so a run has at most so many of them."""
_SEQNO_END = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is looked for."""

    rows: int
    key_part: bytes = b""
    collections: tuple[int, ...] = ()
    """Ids; empty for all."""
    vbucket: int | None = None
    bytes_max: int = SEARCH_BYTES_MAX
    seconds_max: float = SEARCH_S_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The frames found, newest first, and whether they are all that match."""

    frames: list[bytes]
    is_complete: bool
    searched_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What of a bucket has to be taken in its event loop; with it the search may run in a thread."""

    engine: Engine
    young: tuple[Commit, ...]
    bounds: tuple[tuple[int, int], ...]
    """Vbuckets and the highest CAS of each."""

    @classmethod
    def of(cls, bucket: Bucket) -> Stored:
        numbers = bucket.vbuckets
        there = np.flatnonzero(numbers.states).tolist()
        bounds = tuple(zip(there, numbers.max_cas[there].tolist(), strict=True))
        return cls(engine=bucket.engine, young=tuple(bucket.young.values()), bounds=bounds)


@dataclass(slots=True)
class _Search:
    wanted: Wanted
    collections: np.ndarray[tuple[int], np.dtype[np.uint32]]
    needle: Bytes
    deadline_s: float
    matches: dict[tuple[int, int], tuple[int, bytes]] = field(default_factory=dict)
    """CAS and frame by vbucket and seqno: while commits are settled, a change lies in two places."""
    searched_bytes: int = 0
    has_left_out: bool = False
    """Whether more has matched than is wanted."""

    @property
    def is_exhausted(self) -> bool:
        return self.searched_bytes >= self.wanted.bytes_max or time.monotonic() >= self.deadline_s

    def look_through(self, run: Bytes) -> None:
        self.searched_bytes += len(run)
        room = len(run) // _CHANGE_BYTES_MIN + 1
        starts, cases = np.empty(room, dtype=np.int64), np.empty(room, dtype=np.uint64)
        count = find_changes(run, self.collections, self.needle, starts, cases)
        self.has_left_out |= count > self.wanted.rows
        newest = np.argsort(cases[:count], kind="stable")[::-1][: self.wanted.rows]
        for start, cas in zip(starts[newest].tolist(), cases[newest].tolist(), strict=True):
            frame = run[start : start + 24 + int.from_bytes(run[start + 8 : start + 12])].tobytes()
            self.matches[int.from_bytes(frame[6:8]), int.from_bytes(frame[24:32])] = cas, frame
        if len(self.matches) > 4 * self.wanted.rows:
            ordered = sorted(self.matches.items(), key=lambda match: match[1][0], reverse=True)
            self.matches = dict(ordered[: self.wanted.rows])
            self.has_left_out = True

    def newer_than(self, cas: int) -> int:
        return sum(1 for found, _ in self.matches.values() if found >= cas)

    def newest(self) -> list[bytes]:
        ordered = sorted(self.matches.values(), key=lambda match: match[0], reverse=True)
        return [frame for _, frame in ordered[: self.wanted.rows]]


def search_changes(stored: Stored, wanted: Wanted) -> Found:
    """The newest changes that match. Touches nothing but what it is given, so it may run in a thread."""
    search = _Search(
        wanted,
        np.array(wanted.collections, dtype=np.uint32),
        as_run(wanted.key_part),
        time.monotonic() + wanted.seconds_max,
    )
    is_through = _search_young(search, stored) and _search_blocks(search, stored)
    is_all = not search.has_left_out and len(search.matches) <= wanted.rows
    return Found(frames=search.newest(), is_complete=is_through and is_all, searched_bytes=search.searched_bytes)


def _search_young(search: _Search, stored: Stored) -> bool:
    """Returns whether the search has to go on behind them."""
    vbucket = search.wanted.vbucket
    for commit in reversed(stored.young):
        search.look_through(commit.data if vbucket is None else commit.run(vbucket))
        if len(search.matches) >= search.wanted.rows or search.is_exhausted:
            return False
    return True


def _search_blocks(search: _Search, stored: Stored) -> bool:
    """Returns whether everything was looked at."""
    wanted = search.wanted.vbucket
    # The vbucket that may have the newest change comes first.
    unread = [(-cas, vbucket, _SEQNO_END) for vbucket, cas in stored.bounds if wanted in (None, vbucket)]
    heapq.heapify(unread)
    with stored.engine.view() as view:
        while unread:
            bound, vbucket, before = heapq.heappop(unread)
            if search.is_exhausted or search.newer_than(-bound) >= search.wanted.rows:
                return False
            for run, last_seqno in _block_before(view, vbucket, before):
                search.look_through(run)
                heapq.heappush(unread, (-_first_cas(run, -bound), vbucket, last_seqno))
    return True


def _block_before(view: View, vbucket: int, before: int) -> Iterator[tuple[Bytes, int]]:
    """The last block of a vbucket that ends before a seqno, if there is one."""
    found = view.last_before(Table.BLOCKS, block_key(vbucket, before))
    if found is not None and found[0] >= block_key(vbucket, 0):
        yield as_run(found[1]), block_last_seqno(found[0])


def _first_cas(run: Bytes, bound: int) -> int:
    """No change before this block has a higher CAS; a system event has none, and says nothing."""
    return int.from_bytes(run[16:24]) or bound if len(run) else bound
