"""Commits: the changes that become durable together.

`PendingCommit` collects changes in the order they come. Sealed, it is a `Commit`: the same frames grouped by vbucket,
which is one row of the journal, one fsync, and the unit that streams and reads see while it is young.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from headwater.protocol.kernels.memory import Bytes, Column, address_of
from headwater.store.engine import Change
from headwater.store.runs import as_run, find_seqno, first_seqno, group_by_vbucket, join_runs

_FIRST_BYTES = 1024 * 1024
_FIRST_ITEMS = 4096
_KEPT_BYTES = 16 * 1024 * 1024
"""Memory that is kept from one commit for the next: more than the commits of a bulk load need."""
_FIRST_PLACES = 4096
JOINED_BYTES = 64 * 1024
"""Below what a reader takes at once, and below what memory is returned to the system for."""
COMMIT_LOW = 0xFFFFFFFF
"""The index keeps so much of a commit's number."""
PLACE_NUMBER, PLACE_DATA, PLACE_STARTS = range(3)
"""Columns of `YoungCommits.places`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCommit:
    """Changes grouped by vbucket."""

    number: int
    data: Bytes
    group_starts: Column
    extra: tuple[Change, ...] = ()
    """Facts that become durable with the changes: vbucket states, the manifest."""
    advanced_seqnos: Mapping[int, int] = field(default_factory=dict)
    """Where vbuckets are with this commit that have got there without a change."""
    place: tuple[int, int] = field(init=False)
    """For kernels: the addresses of the data and of the group starts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "place", (address_of(self.data), address_of(self.group_starts)))

    def run(self, vbucket: int) -> Bytes:
        """The changes of one vbucket."""
        return self.data[self.group_starts[vbucket] : self.group_starts[vbucket + 1]]

    def vbuckets(self) -> Iterator[int]:
        """The vbuckets that have changes here."""
        return iter(np.flatnonzero(np.diff(self.group_starts)).tolist())


class YoungCommits(dict[int, GroupCommit]):
    """Durable commits that are not settled yet, by number, and those of each vbucket, oldest first.

    Streams ask for the commits of one vbucket all the time, and there may be thousands that have nothing of it.
    """

    def __init__(self, commits: Iterable[GroupCommit] = ()) -> None:
        super().__init__()
        self.total_bytes = 0
        self.places = np.full((_FIRST_PLACES, 3), -1, dtype=np.int64)
        """For kernels: the low half of a commit's number, the addresses of its data and of its group starts. A commit
        has the row of its number modulo the rows, of which there is a power of two."""
        self._by_vbucket: dict[int, deque[GroupCommit]] = {}
        for commit in commits:
            self[commit.number] = commit

    def __setitem__(self, number: int, commit: GroupCommit) -> None:
        super().__setitem__(number, commit)
        self._enter_place(commit)
        self.total_bytes += len(commit.data)
        for vbucket in commit.vbuckets():
            self._by_vbucket.setdefault(vbucket, deque()).append(commit)

    def __delitem__(self, number: int) -> None:
        commit = self[number]
        super().__delitem__(number)
        self.places[number & (len(self.places) - 1)] = -1
        self.total_bytes -= len(commit.data)
        for vbucket in commit.vbuckets():
            oldest = self._by_vbucket[vbucket].popleft()
            assert oldest is commit, "commits are settled in their order"

    def _enter_place(self, commit: GroupCommit) -> None:
        row = self.places[commit.number & (len(self.places) - 1)]
        if row[PLACE_NUMBER] != -1:
            self.places = np.full((2 * len(self.places), 3), -1, dtype=np.int64)
            for known in self.values():
                self._enter_place(known)
            return
        row[:] = commit.number & COMMIT_LOW, *commit.place

    def of(self, vbucket: int, *, after_seqno: int = 0) -> list[GroupCommit]:
        """The commits that may have changes of a vbucket after a seqno, oldest first.

        The newest is looked at first: a stream that keeps up lacks what is in there, and a vbucket may have thousands.
        """
        commits = self._by_vbucket.get(vbucket, ())
        if after_seqno == 0:
            return list(commits)
        found: list[GroupCommit] = []
        for commit in reversed(commits):
            found.append(commit)
            if first_seqno(commit.run(vbucket)) <= after_seqno + 1:
                break
        return found[::-1]


def joined_runs(commits: Sequence[GroupCommit], vbucket: int) -> Iterator[Bytes]:
    """What these commits hold of a vbucket, oldest first, with the small parts of many commits as one run.

    A run takes its reader about as long as a hundred changes do, whatever is in it, and where there are many vbuckets
    a commit has two or three changes of each.
    """
    at, places = 0, None
    while at < len(commits):
        run = commits[at].run(vbucket)
        if at + 1 == len(commits) or len(run) >= JOINED_BYTES // 2:
            yield run
            at += 1
            continue
        if places is None:
            places = np.array([commit.place for commit in commits], dtype=np.int64)
        joined = np.empty(JOINED_BYTES, dtype=np.uint8)
        size, at = join_runs(places, at, vbucket, joined)
        yield joined[:size]


class PendingCommit:
    """The commit in the making. Kernels write into its arrays directly; `reserve` makes the room first.

    An item is one frame, or several of one vbucket that have come together.
    """

    def __init__(self, number: int, vbuckets: int) -> None:
        self.number = number
        self._vbucket_count = vbuckets
        self.frames: Bytes = np.empty(_FIRST_BYTES, dtype=np.uint8)
        self.used_bytes = 0
        self.vbuckets = np.empty(_FIRST_ITEMS, dtype=np.uint16)
        self.starts = np.empty(_FIRST_ITEMS, dtype=np.int64)
        self.count = 0
        self.extra: list[Change] = []
        self.advanced_seqnos: dict[int, int] = {}

    @property
    def is_empty(self) -> bool:
        return self.count == 0 and not self.extra

    def reserve(self, frame_bytes: int, items: int) -> None:
        """Make room for this much more."""
        self.frames = _grown(self.frames, self.used_bytes, self.used_bytes + frame_bytes)
        self.vbuckets = _grown(self.vbuckets, self.count, self.count + items)
        self.starts = _grown(self.starts, self.count, self.count + items)

    def append(self, vbucket: int, frame: bytes) -> None:
        self.reserve(len(frame), 1)
        end = self.used_bytes + len(frame)
        self.frames[self.used_bytes : end] = as_run(frame)
        self.add_run(vbucket, end)

    def add_run(self, vbucket: int, end: int) -> None:
        """The frames that were written behind the last item, up to `end`, are the next."""
        self.vbuckets[self.count] = vbucket
        self.starts[self.count] = self.used_bytes
        self.used_bytes = end
        self.count += 1

    def runs(self, vbucket: int) -> Iterator[Bytes]:
        """What is pending of a vbucket."""
        for item in np.flatnonzero(self.vbuckets[: self.count] == vbucket).tolist():
            end = self.starts[item + 1] if item + 1 < self.count else self.used_bytes
            yield self.frames[self.starts[item] : end]

    def find(self, vbucket: int, seqno: int) -> Bytes | None:
        """The frame of a change that is pending."""
        for run in self.runs(vbucket):
            start, end = find_seqno(run, seqno)
            if start >= 0:
                return run[start:end]
        return None

    def seal(self) -> GroupCommit:
        grouped = np.empty(self.used_bytes, dtype=np.uint8)
        group_starts = np.empty(self._vbucket_count + 1, dtype=np.int64)
        group_by_vbucket(self.frames, self.vbuckets, self.starts, self.count, self.used_bytes, grouped, group_starts)
        return GroupCommit(
            number=self.number,
            data=grouped,
            group_starts=group_starts,
            extra=tuple(self.extra),
            advanced_seqnos=self.advanced_seqnos,
        )

    def restart(self, number: int) -> None:
        """Begin the next commit in the same memory, unless that has grown large."""
        if len(self.frames) > _KEPT_BYTES:
            self.frames = np.empty(_FIRST_BYTES, dtype=np.uint8)
        self.number, self.used_bytes, self.count = number, 0, 0
        self.extra, self.advanced_seqnos = [], {}


def _grown(array: Column, used: int, needed: int) -> Column:
    if needed <= len(array):
        return array
    larger = np.empty(max(needed, 2 * len(array)), dtype=array.dtype)
    larger[:used] = array[:used]
    return larger
