"""Commits: the changes that become durable together.

`PendingCommit` collects changes in the order they arrive. Sealing it makes a `GroupCommit`: the same frames grouped by
vbucket, which is one row of the journal, one fsync, and the unit that streams and reads see while it is young.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headwater.kernels.memory import (
    Bytes,
    Column,
    address_of,
    bytes_at,
    i64,
    int64s_at,
    kernel_part,
    load_u32,
    read_only,
    u32,
    u64,
)
from headwater.store.checksums import (
    BLOCK_END_BYTES,
    CHECKSUM_BYTES,
    ENTRY_BYTES,
    checksum_of,
    directory_start,
    first_piece,
    piece_start,
    row_seed,
)
from headwater.store.data_format import block_key, block_last_seqno, blocks_of
from headwater.store.engine import Change, PutRow, Table, View
from headwater.store.runs import (
    EMPTY_RUN,
    as_run,
    find_seqno,
    first_seqno,
    group_by_vbucket,
    join_runs,
    last_seqno,
    split_before,
)

_FIRST_BYTES = 1024 * 1024
_FIRST_ITEMS = 4096
_KEPT_BYTES = 16 * 1024 * 1024
"""Memory that one commit leaves for the next: more than the commits of a bulk load need."""
_FIRST_PLACES = 4096
JOINED_BYTES = 64 * 1024
"""Less than a reader takes at once, and less than the size from which memory is returned to the system."""
BLOCK_BYTES_TARGET = 256 * 1024
APPENDED_SHARE = 4
"""Changes are appended to the last block of their vbucket while it is smaller than this fraction (1/4) of the target.
Appending rewrites the block, so blocks filled up to the target would be written three times over in small rounds."""
COMMIT_LOW = 0xFFFFFFFF
"""The part of a commit's number that the index keeps."""
PLACE_NUMBER, PLACE_DATA, PLACE_STARTS = range(3)
"""Columns of `YoungCommits.places`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCommit:
    """Changes grouped by vbucket."""

    number: int
    data: Bytes
    group_starts: Column
    row: Bytes
    """The data, followed by room for the checksum of its row. Empty if the row was stored before."""
    extra: tuple[Change, ...] = ()
    """Facts that become durable with the changes: vbucket states, the manifest."""
    advanced_seqnos: Mapping[int, int] = field(default_factory=dict)
    """The seqnos that vbuckets reach with this commit without a change."""
    young: GroupCommit | None = None
    """The part for the journal and memory, if the rest becomes blocks at once; None for all of it."""
    in_blocks: tuple[int, ...] = ()
    """The vbuckets of the same commit whose changes are in blocks."""
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

    def large_runs(self) -> Column:
        """Return the vbuckets that have enough changes here for blocks that nothing is appended to."""
        return np.flatnonzero(np.diff(self.group_starts) >= full_block_bytes())

    def with_blocks(self, vbuckets: Sequence[int]) -> GroupCommit:
        """Return the same commit, in which the changes of these vbuckets, ascending, become blocks at once."""
        kept, sizes = [], np.diff(self.group_starts)
        begin = 0
        for vbucket in vbuckets:
            kept.append(self.data[begin : self.group_starts[vbucket]])
            begin = self.group_starts[vbucket + 1]
        sizes[list(vbuckets)] = 0
        row = np.concatenate([*kept, self.data[begin:], np.zeros(CHECKSUM_BYTES, dtype=np.uint8)])
        group_starts = np.zeros(len(self.group_starts), dtype=np.int64)
        np.cumsum(sizes, out=group_starts[1:])
        data = row[:-CHECKSUM_BYTES]
        part = replace(self, data=data, row=row, group_starts=group_starts, in_blocks=tuple(vbuckets))
        return replace(self, row=EMPTY_RUN, young=part)

    def block_rows(self) -> Iterator[PutRow]:
        """Yield the blocks that parts of the commit become at once."""
        for vbucket in () if self.young is None else self.young.in_blocks:
            # A small block that is not the last one would stay small.
            yield from blocks(vbucket, self.run(vbucket), joined_bytes=full_block_bytes())


def full_block_bytes() -> int:
    """Return the size from which on nothing is appended to a block."""
    return BLOCK_BYTES_TARGET // APPENDED_SHARE


def blocks(vbucket: int, run: Bytes, *, joined_bytes: int = 0) -> Iterator[PutRow]:
    """Cut a run into blocks of about the target size. A rest of less than `joined_bytes` belongs to the last one."""
    while len(run):
        cut = split_before(run, BLOCK_BYTES_TARGET)
        if len(run) - cut < joined_bytes:
            cut = len(run)
        yield PutRow(Table.BLOCKS, block_key(vbucket, last_seqno(run[:cut])), run[:cut].data)
        run = run[cut:]


class YoungCommits(dict[int, GroupCommit]):
    """Durable commits that are not settled yet, by number, and those of each vbucket, oldest first.

    Streams constantly ask for the commits of one vbucket, and thousands of commits may have no changes of it.
    """

    def __init__(self, commits: Iterable[GroupCommit] = ()) -> None:
        super().__init__()
        self.total_bytes = 0
        self.places = np.full((_FIRST_PLACES, 3), -1, dtype=np.int64)
        """For kernels: the low half of a commit's number, the addresses of its data and of its group starts. The row
        of a commit is its number modulo the number of rows, which is a power of two."""
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

    def has_any_of(self, vbucket: int) -> bool:
        """Whether a vbucket has changes in commits that are not settled."""
        return bool(self._by_vbucket.get(vbucket))

    def _enter_place(self, commit: GroupCommit) -> None:
        row = self.places[commit.number & (len(self.places) - 1)]
        if row[PLACE_NUMBER] != -1:
            self.places = np.full((2 * len(self.places), 3), -1, dtype=np.int64)
            for known in self.values():
                self._enter_place(known)
            return
        row[:] = commit.number & COMMIT_LOW, *commit.place

    def of(self, vbucket: int, *, after_seqno: int = 0) -> list[GroupCommit]:
        """Return the commits that may have changes of a vbucket after a seqno, oldest first.

        Searches from the newest commit: a stream that keeps up lacks only that one, and a vbucket may have thousands.
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
    """Yield what these commits hold of a vbucket, oldest first, with the small parts of many commits as one run.

    A run costs its reader about as much time as a hundred changes, whatever is in it, and with many vbuckets a commit
    has only two or three changes of each.
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
    """The commit that collects changes. Kernels write into its arrays directly, once `reserve` has made room.

    An item is one frame, or several of one vbucket that arrived together.
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
        """Make room for this many more bytes and items."""
        self.frames = _grown(self.frames, self.used_bytes, self.used_bytes + frame_bytes)
        self.vbuckets = _grown(self.vbuckets, self.count, self.count + items)
        self.starts = _grown(self.starts, self.count, self.count + items)

    def append(self, vbucket: int, frame: bytes) -> None:
        self.reserve(len(frame), 1)
        end = self.used_bytes + len(frame)
        self.frames[self.used_bytes : end] = as_run(frame)
        self.add_run(vbucket, end)

    def add_run(self, vbucket: int, end: int) -> None:
        """Add an item: the frames that were written after the last item, up to `end`."""
        self.vbuckets[self.count] = vbucket
        self.starts[self.count] = self.used_bytes
        self.used_bytes = end
        self.count += 1

    def runs(self, vbucket: int) -> Iterator[Bytes]:
        """Yield the pending changes of a vbucket."""
        for item in np.flatnonzero(self.vbuckets[: self.count] == vbucket).tolist():
            end = self.starts[item + 1] if item + 1 < self.count else self.used_bytes
            yield self.frames[self.starts[item] : end]

    def find(self, vbucket: int, seqno: int) -> Bytes | None:
        """Return the frame of a pending change, or None if it is not pending."""
        for run in self.runs(vbucket):
            start, end = find_seqno(run, seqno)
            if start >= 0:
                return run[start:end]
        return None

    def seal(self) -> GroupCommit:
        row = np.empty(self.used_bytes + CHECKSUM_BYTES, dtype=np.uint8)
        grouped = row[: self.used_bytes]
        group_starts = np.empty(self._vbucket_count + 1, dtype=np.int64)
        group_by_vbucket(self.frames, self.vbuckets, self.starts, self.count, self.used_bytes, grouped, group_starts)
        return GroupCommit(
            number=self.number,
            data=grouped,
            row=row,
            group_starts=group_starts,
            extra=tuple(self.extra),
            advanced_seqnos=self.advanced_seqnos,
        )

    def restart(self, number: int) -> None:
        """Begin the next commit in the same memory, unless it has grown large."""
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


# --- where stored frames are in memory, for kernels ----------------------------------------------------------------
# The index has the vbucket, the seqno and the commit of a change. From these, kernels find its frame: in the pending
# commit, in the commit in flight or a young one (`YoungCommits.places`), or in a block, whose address this module
# keeps. They must find the same frame as `Bucket.read_frame`, which does this for one document.
#
# A block is a row of the engine, which maps its file into memory. The address of a row stays the same until the row is
# rewritten; `Engine.block_versions` shows when that happened in a vbucket. The directory of a block (`checksums`) is
# checked and copied when the block is first read, so that it can't change afterwards. The piece that holds a frame is
# in the mapped file, and is checked each time.


BLOCKS_MAX = 64 * 1024
"""Limit for the blocks whose addresses are kept. Beyond it all are forgotten, and entered again when needed."""

VERSION, ROWS, COUNT = range(3)
"""Columns of `BlockPlaces.heads`: the version of a vbucket's blocks, the address of their rows, and their number."""
LAST_SEQNO, ADDRESS, DIRECTORY, PIECES = range(4)
"""Columns of a vbucket's rows, one per block, in the order of seqnos. Directory and pieces are 0 until it is read."""
ROW_WORDS = 4

NOT_FOUND, UNKNOWN_BLOCKS, UNKNOWN_DIRECTORY, DAMAGED_PIECE = 0, -1, -2, -3
"""Returned in place of an address: the change is not here; the blocks of the vbucket, or the directory of one, must be
entered first; the change is here, but damaged."""


@dataclass(slots=True)
class _Entered:
    """The blocks of a vbucket, referenced so that their addresses stay valid."""

    rows: Column
    keys: list[bytes]
    blocks: list[Bytes]
    directories: dict[int, Bytes] = field(default_factory=dict)


class BlockPlaces:
    """The addresses of blocks that kernels have read."""

    def __init__(self, vbuckets: int) -> None:
        self.heads = np.zeros((vbuckets, 3), dtype=np.int64)
        self.heads[:, VERSION] = -1
        self._entered: dict[int, _Entered] = {}
        self._blocks = 0

    def enter_blocks(self, view: View, vbucket: int, *, version: int) -> None:
        """Enter the addresses of a vbucket's blocks. The version must have been read before the view was taken."""
        self._forget(vbucket)
        found = [(key, as_run(block)) for key, block in view.scan(Table.BLOCKS, *blocks_of(vbucket))]
        if self._blocks + len(found) > BLOCKS_MAX:
            for known in list(self._entered):
                self._forget(known)
        rows = np.zeros((len(found), ROW_WORDS), dtype=np.int64)
        for row, (key, block) in zip(rows, found, strict=True):
            row[LAST_SEQNO], row[ADDRESS] = block_last_seqno(key), address_of(block)
        self._entered[vbucket] = _Entered(rows, [key for key, _ in found], [block for _, block in found])
        self._blocks += len(found)
        self.heads[vbucket] = version, address_of(rows), len(rows)

    def enter_directory(self, vbucket: int, seqno: int) -> bool:
        """Copy the directory of the block that holds a seqno. Returns False if it is damaged."""
        entered = self._entered[vbucket]
        number = int(np.searchsorted(entered.rows[:, LAST_SEQNO], seqno))
        row = read_only(entered.blocks[number])
        start = directory_start(row, u32(row_seed(Table.BLOCKS.value, entered.keys[number])))
        if start < 0:
            return False
        directory = entered.directories[number] = row[start : len(row) - BLOCK_END_BYTES].copy()
        entered.rows[number, DIRECTORY] = address_of(directory)
        entered.rows[number, PIECES] = len(directory) // ENTRY_BYTES
        return True

    def _forget(self, vbucket: int) -> None:
        self.heads[vbucket] = -1, 0, 0
        entered = self._entered.pop(vbucket, None)
        self._blocks -= 0 if entered is None else len(entered.blocks)


# --- for kernels: each returns the address of a frame and its length ------------------------------------------------


@kernel_part
def in_run(address: int, run_bytes: int, seqno: int) -> tuple[int, int]:
    start, end = find_seqno(bytes_at(address, run_bytes), seqno)
    if start < 0:
        return i64(NOT_FOUND), i64(0)
    return address + start, end - start


@kernel_part
def in_pending(
    frames: Bytes, item_vbuckets: Column, item_starts: Column, count: int, used: int, vbucket: int, seqno: int
) -> tuple[int, int]:
    """Search from the last change written to the first."""
    end = used
    for item in range(count - 1, -1, -1):
        start = item_starts[item]
        if i64(item_vbuckets[item]) == vbucket:
            found, found_end = find_seqno(frames[start:end], seqno)
            if found >= 0:
                return frames.ctypes.data + start + found, found_end - found
        end = start
    return i64(NOT_FOUND), i64(0)


@kernel_part
def in_young(commits: Column, commit_low: int, vbucket: int, seqno: int) -> tuple[int, int]:
    row = commit_low & (len(commits) - 1)
    if commits[row, PLACE_NUMBER] != commit_low:
        return i64(NOT_FOUND), i64(0)
    starts = int64s_at(commits[row, PLACE_STARTS], vbucket + 2)
    return in_run(commits[row, PLACE_DATA] + starts[vbucket], starts[vbucket + 1] - starts[vbucket], seqno)


@kernel_part
def in_blocks(heads: Column, version: int, vbucket: int, seqno: int) -> tuple[int, int]:
    if heads[vbucket, VERSION] != version:
        return i64(UNKNOWN_BLOCKS), i64(0)
    count = heads[vbucket, COUNT]
    rows = int64s_at(heads[vbucket, ROWS], count * ROW_WORDS)
    block, after = i64(0), count
    while block < after:
        middle = (block + after) >> 1
        if rows[middle * ROW_WORDS + LAST_SEQNO] < seqno:
            block = middle + 1
        else:
            after = middle
    if block == count:
        return i64(NOT_FOUND), i64(0)
    row = block * ROW_WORDS
    if rows[row + DIRECTORY] == 0:
        return i64(UNKNOWN_DIRECTORY), i64(0)
    return _in_block(rows[row + ADDRESS], rows[row + DIRECTORY], rows[row + PIECES], seqno)


@kernel_part
def _in_block(address: int, directory_address: int, pieces: int, seqno: int) -> tuple[int, int]:
    directory = bytes_at(directory_address, pieces * ENTRY_BYTES)
    piece = first_piece(directory, i64(0), pieces, u64(seqno))
    if piece == pieces:
        return i64(NOT_FOUND), i64(0)
    start = piece_start(directory, i64(0), piece)
    end = i64(load_u32(directory, piece * ENTRY_BYTES + 8))
    if checksum_of(bytes_at(address, end), start, end) != load_u32(directory, piece * ENTRY_BYTES + 12):
        return i64(DAMAGED_PIECE), i64(0)
    return in_run(address + start, end - start, seqno)
