"""Prepares: durable writes that have begun and are not decided yet, and how durable writes are stored.

The bucket holds one `UndecidedPrepares`, enters prepares in it and decides them. Others read the same object as
`Bucket.prepares`. Nothing here writes to a bucket.

A durable write is stored twice. It begins as a *prepare*, which is a DCP prepare frame with its own seqno; no client
sees it as a document. It ends as a *commit* or as an *abort*.

- A commit is stored as the mutation or deletion itself, with a new seqno and the prepare's CAS and revision, so a
  consumer that does not know durable writes can read it. Its opaque field, which is 0 in all other stored frames,
  holds the distance from the prepare's seqno to its own: that marks it as the commit of this prepare.
- An abort is a DCP abort frame with its two numbers swapped: in all stored frames the first number is the seqno of
  the frame itself, so the abort's own comes before that of the prepare. Its CAS says when it was written.

Undecided prepares are held in memory by key. They are rebuilt from the stored frames when a vbucket is loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    Int64s,
    UInt64,
    UInt64s,
    i64,
    kernel,
    load_u16,
    load_u32,
    load_u64,
    read_only,
    u64,
)
from headwater.kernels.siphash import siphash128
from headwater.protocol.features import Opcode
from headwater.protocol.frames import encode_collection_id
from headwater.protocol.kernels.frame_runs import ABORT, PREPARE, is_document_change
from headwater.protocol.messages.dcp_changes import Prepare
from headwater.protocol.numbers import SEQNO_MAX, Cas, CollectionId, Seqno, VBucketId
from headwater.store.data_format import decode_stored
from headwater.store.runs import as_run

PENDING_BYTES_MAX = 256 * 1024 * 1024
"""Limit for the undecided prepares of a bucket, which are held in memory. The node refuses durable writes beyond it."""
NO_PREPARES: Column = np.empty(0, dtype=np.uint64)
_DISTANCE_MAX = 2**32 - 1
_CHANGES = frozenset({Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION})
_FRAME_BYTES_MIN = 24 + 16 + 2
"""The shortest change: its header, the two numbers that all changes have, and a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingPrepare:
    """A prepare that is neither committed nor aborted."""

    vbucket: VBucketId
    seqno: Seqno
    cas: Cas
    collection_id: CollectionId
    key: bytes
    frame: bytes
    """The prepare as it is stored."""
    commit: int = 0
    """The commit that makes it durable; 0 if it was read back from disk."""

    @property
    def encoded_key(self) -> bytes:
        return encode_collection_id(self.collection_id) + self.key

    def is_same(self, other: PendingPrepare | None) -> bool:
        """Whether both are the same prepare, even if one was read back from the stored data since."""
        return other is not None and (self.seqno, self.cas) == (other.seqno, other.cas)


class Prepares:
    """The undecided prepares of a bucket, for reading."""

    def __init__(self, vbuckets: int) -> None:
        self._counts = np.zeros(vbuckets, dtype=np.int64)
        self._high_prepared = np.zeros(vbuckets, dtype=np.uint64)
        self.counts = read_only(self._counts)
        """The number of prepares of each vbucket."""
        self.high_prepared = read_only(self._high_prepared)
        """The highest seqno of a prepare that was seen in each vbucket since the vbucket was loaded."""
        self.held_bytes = 0
        self._by_key: dict[int, OrderedDict[bytes, PendingPrepare]] = {}
        """By vbucket, oldest first, which is the order of their seqnos. Unlike a plain dict, an `OrderedDict` finds
        its first entry at once, however many before it were removed."""

    def find(self, vbucket: int, collection_id: CollectionId, key: bytes) -> PendingPrepare | None:
        return self.find_encoded(vbucket, encode_collection_id(collection_id) + key) if self.counts[vbucket] else None

    def find_encoded(self, vbucket: int, key: bytes) -> PendingPrepare | None:
        """Find a prepare by its stored key, which starts with the collection id."""
        return self._undecided(vbucket).get(key)

    def _undecided(self, vbucket: int) -> Mapping[bytes, PendingPrepare]:
        return self._by_key.get(vbucket) or {}

    def of(self, vbucket: int) -> list[PendingPrepare]:
        """The prepares of a vbucket, oldest first."""
        return list(self._undecided(vbucket).values())

    def up_to(self, vbucket: int, seqno: int) -> list[PendingPrepare]:
        """The prepares of a vbucket up to a seqno, oldest first. Newer ones are not read."""
        return list(takewhile(lambda prepare: prepare.seqno <= seqno, self._undecided(vbucket).values()))

    def keys_of(self, vbucket: int) -> list[bytes]:
        """The stored keys of a vbucket's prepares."""
        return list(self._undecided(vbucket))

    def vbuckets(self) -> list[int]:
        """The vbuckets that have undecided prepares."""
        return [vbucket for vbucket, found in self._by_key.items() if found]


class UndecidedPrepares(Prepares):
    """The same, for modules of the store to write to."""

    def add(self, prepare: PendingPrepare) -> None:
        """Add a prepare. It replaces an older one of the same key, whose decision left no trace."""
        vbucket = prepare.vbucket
        found = self._by_key.setdefault(vbucket, OrderedDict())
        older = found.pop(prepare.encoded_key, None)
        if older is not None:
            self._removed(older)
        assert not found or next(reversed(found.values())).seqno < prepare.seqno, "prepares come in their order"
        found[prepare.encoded_key] = prepare
        self._counts[vbucket] += 1
        self.held_bytes += len(prepare.frame)
        self._high_prepared[vbucket] = max(int(self._high_prepared[vbucket]), prepare.seqno)

    def remove(self, prepare: PendingPrepare) -> None:
        """Remove a prepare that is decided."""
        removed = self._by_key[prepare.vbucket].pop(prepare.encoded_key)
        assert removed.is_same(prepare), "a prepare is decided once"
        self._removed(removed)

    def _removed(self, prepare: PendingPrepare) -> None:
        self._counts[prepare.vbucket] -= 1
        self.held_bytes -= len(prepare.frame)

    def clear(self, vbucket: int) -> None:
        """Drop the prepares of a vbucket that is removed, emptied or about to be loaded."""
        for prepare in self._by_key.pop(vbucket, {}).values():
            self.held_bytes -= len(prepare.frame)
        self._counts[vbucket] = self._high_prepared[vbucket] = 0

    def enter_run(self, vbucket: int, run: Bytes) -> None:
        """Remove the prepares that a stored run decides, and add those that it leaves undecided."""
        starts, completed = sync_frames(run)
        if not len(starts) and not len(completed):
            return
        if self.counts[vbucket]:
            decided = set(completed.tolist())
            for prepare in self.of(vbucket):
                if prepare.seqno in decided:
                    self.remove(prepare)
        seqnos = np.empty(len(starts), dtype=np.uint64)
        _fill_seqnos(run, starts, seqnos)
        for start in starts[~np.isin(seqnos, completed)].tolist():
            self.add(_read_back(vbucket, run, start))
        # This includes prepares that began and ended within the run.
        self._high_prepared[vbucket] = max(int(self._high_prepared[vbucket]), int(seqnos.max(initial=0)))


def _read_back(vbucket: int, run: Bytes, start: int) -> PendingPrepare:
    end = start + 24 + int.from_bytes(run[start + 8 : start + 12])
    frame = run[start:end].tobytes()
    prepare = decode_prepare(frame)
    assert prepare.collection_id is not None, "stored keys have their collection"
    return PendingPrepare(
        vbucket=VBucketId(vbucket), seqno=prepare.seqno, cas=prepare.cas, collection_id=prepare.collection_id,
        key=prepare.key, frame=frame,
    )  # fmt: skip


def decode_prepare(frame: bytes) -> Prepare:
    """Return the prepare in a stored frame."""
    prepare = decode_stored(frame)
    assert isinstance(prepare, Prepare), "only prepares are decided"
    return prepare


def commit_opaque(distance: int) -> int:
    """Return the opaque that marks a commit: its distance from the prepare. A commit that is too far away is stored as
    a plain change, which decides the prepare as well."""
    assert distance > 0, "a commit comes after its prepare"
    return distance if distance <= _DISTANCE_MAX else 0


def decide_by_changes(prepares: UndecidedPrepares, vbucket: int, run: Bytes, secret: Column) -> None:
    """Treat a received change of a document with an undecided prepare as the commit of that prepare.

    Producers send a plain change if the prepare may have been compacted away. `run` is in the pending commit, and is
    marked as a commit there.
    """
    undecided = int(prepares.counts[vbucket])
    if not undecided:
        return
    # The cost depends on the run, however much is undecided: many runs are short, and many prepares may be waiting.
    is_short = len(run) // _FRAME_BYTES_MIN < undecided
    starts = _change_starts(run) if is_short else changes_of(run, prepares.keys_of(vbucket), secret)
    for start in starts:
        key_at = start + 24 + int(run[start + 4])
        key = run[key_at : key_at + int.from_bytes(run[start + 2 : start + 4])].tobytes()
        prepare = prepares.find_encoded(vbucket, key)
        if prepare is not None:
            distance = int.from_bytes(run[start + 24 : start + 32]) - prepare.seqno
            run[start + 12 : start + 16] = as_run(commit_opaque(distance).to_bytes(4))
            prepares.remove(prepare)


def _change_starts(run: Bytes) -> list[int]:
    """Return where the changes of documents start."""
    starts, at = [], 0
    while at < len(run):
        if int(run[at + 1]) in _CHANGES:
            starts.append(at)
        at += 24 + int.from_bytes(run[at + 8 : at + 12])
    return starts


# --- the frames of durable writes in a run ------------------------------------------------------------------------


def sync_frames(run: Bytes, *, end_seqno: int = SEQNO_MAX) -> tuple[Column, Column]:
    """Return where a run's prepares start, and the seqnos of the prepares that it commits or aborts, up to a seqno."""
    frames_max = len(run) // _FRAME_BYTES_MIN + 1
    starts, completed = np.empty(frames_max, dtype=np.int64), np.empty(frames_max, dtype=np.uint64)
    started, ended = _sync_frames(run, u64(end_seqno), starts, completed)
    return starts[:started], completed[:ended]


def changes_of(run: Bytes, keys: list[bytes], secret: Column) -> list[int]:
    """Return where the changes start that may be of these documents. `keys` are as they are stored."""
    hashes = [siphash128(as_run(key), 0, len(key), secret[0], secret[1])[0] for key in keys]
    starts = np.empty(len(run) // _FRAME_BYTES_MIN + 1, dtype=np.int64)
    count = _frames_of_keys(run, np.sort(np.array(hashes, dtype=np.uint64)), secret, starts)
    return [int(start) for start in starts[:count]]


@kernel
def _sync_frames(run: AnyBytes, end_seqno: UInt64, starts: Int64s, completed: UInt64s) -> tuple[int, int]:
    at = i64(0)
    started = i64(0)
    ended = i64(0)
    while at < len(run) and load_u64(run, at + 24) <= end_seqno:
        opcode = run[at + 1]
        if opcode == PREPARE:
            starts[started] = at
            started += 1
        elif opcode == ABORT:
            completed[ended] = load_u64(run, at + 32)
            ended += 1
        elif load_u32(run, at + 12) != 0:
            completed[ended] = load_u64(run, at + 24) - u64(load_u32(run, at + 12))
            ended += 1
        at += 24 + i64(load_u32(run, at + 8))
    return started, ended


@kernel
def _fill_seqnos(run: AnyBytes, starts: Int64s, seqnos: UInt64s) -> None:
    """Enter the seqnos of the frames that start at `starts`."""
    for item in range(len(starts)):
        seqnos[item] = load_u64(run, starts[item] + 24)


@kernel
def _frames_of_keys(run: Bytes, hashes: UInt64s, secret: UInt64s, starts: Int64s) -> int:
    """Find where the changes of documents start whose keys have one of these hashes. Returns how many there are."""
    at = i64(0)
    count = i64(0)
    while at < len(run):
        if is_document_change(run[at + 1]):
            key_at = at + 24 + i64(run[at + 4])
            high, _ = siphash128(run, key_at, i64(load_u16(run, at + 2)), secret[0], secret[1])
            position = np.searchsorted(hashes, high)
            if position < len(hashes) and hashes[position] == high:
                starts[count] = at
                count += 1
        at += 24 + i64(load_u32(run, at + 8))
    return int(count)
