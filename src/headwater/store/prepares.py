"""Prepares: durable writes that have begun and are not decided yet.

A durable write is stored twice. It begins as a *prepare*, which is a DCP prepare frame with a seqno of its own; nobody
gets to see it as a document. It ends as a *commit* or as an *abort*.

- A commit is stored as the mutation or deletion itself, with a new seqno and the prepare's CAS and revision. So whoever
  knows nothing of durable writes reads it as it lies. Its opaque field, which is 0 in all other stored frames, holds
  the distance from the prepare's seqno to its own: that is how it is known for a commit, and of what.
- An abort is a DCP abort frame, but for the order of its two numbers: in all that is stored the first is the seqno of
  the frame itself, so the abort's own comes before that of the prepare. Its CAS tells when it was written.

Undecided prepares are held in memory by key. They are rebuilt from the stored frames when a vbucket is loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from headwater.protocol.features import WITH_COLLECTIONS, Opcode
from headwater.protocol.frames import DurabilityLevel, decode_frame
from headwater.protocol.kernels.frame_header import ABORT, PREPARE, is_document_change
from headwater.protocol.kernels.memory import (
    AnyBytes,
    Bytes,
    Column,
    Int64s,
    UInt64s,
    i64,
    kernel,
    load_u16,
    load_u32,
    load_u64,
    u64,
)
from headwater.protocol.kernels.siphash import siphash128
from headwater.protocol.messages import decode_message
from headwater.protocol.messages.dcp_changes import Abort, Deletion, Mutation, Prepare
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId, encode_collection_id
from headwater.protocol.values import Datatype
from headwater.store.data_format import BUCKET_FACTS, FORMAT_VERSION
from headwater.store.engine import Put, Table
from headwater.store.runs import as_run

if TYPE_CHECKING:
    from headwater.store.bucket import Bucket, MakeValue, Written

# What the frames of a run tell of durable writes, found by kernels. `prepares` says how these are stored.


NO_PREPARES: Column = np.empty(0, dtype=np.uint64)
_FRAME_BYTES_MIN = 24 + 16 + 2


def sync_frames(run: Bytes) -> tuple[Column, Column]:
    """Where the prepares of a run start, and the seqnos of the prepares that it commits or aborts."""
    frames_max = len(run) // _FRAME_BYTES_MIN + 1
    starts, completed = np.empty(frames_max, dtype=np.int64), np.empty(frames_max, dtype=np.uint64)
    started, ended = _sync_frames(run, starts, completed)
    return starts[:started], completed[:ended]


def changes_of(run: Bytes, keys: list[bytes], secret: Column) -> list[int]:
    """Where the changes start that may be of these documents. The keys have the form in which they are stored."""
    hashes = [siphash128(as_run(key), 0, len(key), secret[0], secret[1])[0] for key in keys]
    starts = np.empty(len(run) // _FRAME_BYTES_MIN + 1, dtype=np.int64)
    count = _frames_of_keys(run, np.sort(np.array(hashes, dtype=np.uint64)), secret, starts)
    return [int(start) for start in starts[:count]]


@kernel
def _sync_frames(run: AnyBytes, starts: Int64s, completed: UInt64s) -> tuple[int, int]:
    at = i64(0)
    started = i64(0)
    ended = i64(0)
    while at < len(run):
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
def seqnos_at(run: AnyBytes, starts: Int64s) -> Column:
    """The seqnos of the frames that start there."""
    seqnos = np.empty(len(starts), dtype=np.uint64)
    for item in range(len(starts)):
        seqnos[item] = load_u64(run, starts[item] + 24)
    return seqnos


@kernel
def _frames_of_keys(run: Bytes, hashes: UInt64s, secret: UInt64s, starts: Int64s) -> int:
    """Where the changes of documents start whose keys have one of these hashes. Returns how many there are."""
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


PENDING_BYTES_MAX = 256 * 1024 * 1024
"""Of undecided prepares in a bucket: they are held in memory. Whoever takes durable writes refuses more."""
_DISTANCE_MAX = 2**32 - 1
_CHANGES = frozenset({Opcode.DCP_MUTATION, Opcode.DCP_DELETION, Opcode.DCP_EXPIRATION})
"""Of a change: its header, the two numbers that all changes have, and a key."""


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
    """The commit that makes it durable; 0 where it was read back."""

    @property
    def encoded_key(self) -> bytes:
        return encode_collection_id(self.collection_id) + self.key

    def is_same(self, other: PendingPrepare | None) -> bool:
        """Whether that is this prepare, be it that it was read back from what is stored meanwhile."""
        return other is not None and (self.seqno, self.cas) == (other.seqno, other.cas)


class Prepares:
    """The undecided prepares of a bucket."""

    def __init__(self, vbuckets: int) -> None:
        self.counts = np.zeros(vbuckets, dtype=np.int64)
        """How many each vbucket has."""
        self.high_prepared = np.zeros(vbuckets, dtype=np.uint64)
        """The highest seqno of a prepare, as far as this was seen since the vbucket was loaded."""
        self.high_completed = np.zeros(vbuckets, dtype=np.uint64)
        """The highest seqno of a prepare that was decided."""
        self.held_bytes = 0
        self._by_key: dict[int, OrderedDict[bytes, PendingPrepare]] = {}
        """By vbucket, oldest first: they come in the order of their seqnos. Unlike a plain dict, an ordered one finds
        its first entry at once, however many before it are gone."""

    def find(self, vbucket: int, collection_id: CollectionId, key: bytes) -> PendingPrepare | None:
        return self.find_encoded(vbucket, encode_collection_id(collection_id) + key) if self.counts[vbucket] else None

    def find_encoded(self, vbucket: int, key: bytes) -> PendingPrepare | None:
        """The same by the key as it is stored, which starts with its collection id."""
        return self._undecided(vbucket).get(key)

    def _undecided(self, vbucket: int) -> Mapping[bytes, PendingPrepare]:
        return self._by_key.get(vbucket) or {}

    def of(self, vbucket: int) -> list[PendingPrepare]:
        """Those of a vbucket, oldest first."""
        return list(self._undecided(vbucket).values())

    def up_to(self, vbucket: int, seqno: int) -> list[PendingPrepare]:
        """The same, without those that are newer, which are not looked at."""
        return list(takewhile(lambda prepare: prepare.seqno <= seqno, self._undecided(vbucket).values()))

    def keys_of(self, vbucket: int) -> list[bytes]:
        """The keys as they are stored."""
        return list(self._undecided(vbucket))

    def vbuckets(self) -> list[int]:
        """The vbuckets that have any."""
        return [vbucket for vbucket, found in self._by_key.items() if found]

    def add(self, prepare: PendingPrepare) -> None:
        """Enter a prepare. An older one of the same key was decided in a way that left no trace."""
        vbucket = prepare.vbucket
        found = self._by_key.setdefault(vbucket, OrderedDict())
        older = found.pop(prepare.encoded_key, None)
        if older is not None:
            self._removed(older)
        assert not found or next(reversed(found.values())).seqno < prepare.seqno, "prepares come in their order"
        found[prepare.encoded_key] = prepare
        self.counts[vbucket] += 1
        self.held_bytes += len(prepare.frame)
        self.high_prepared[vbucket] = max(int(self.high_prepared[vbucket]), prepare.seqno)

    def remove(self, prepare: PendingPrepare) -> None:
        """A prepare is decided."""
        removed = self._by_key[prepare.vbucket].pop(prepare.encoded_key)
        assert removed.is_same(prepare), "a prepare is decided once"
        self._removed(removed)

    def _removed(self, prepare: PendingPrepare) -> None:
        vbucket = prepare.vbucket
        self.counts[vbucket] -= 1
        self.held_bytes -= len(prepare.frame)
        self.high_completed[vbucket] = max(int(self.high_completed[vbucket]), prepare.seqno)

    def clear(self, vbucket: int) -> None:
        """The vbucket is gone, or empty, or about to be loaded."""
        for prepare in self._by_key.pop(vbucket, {}).values():
            self.held_bytes -= len(prepare.frame)
        self.counts[vbucket] = self.high_prepared[vbucket] = self.high_completed[vbucket] = 0

    def enter_run(self, vbucket: int, run: Bytes) -> None:
        """Take what a stored run tells of prepares. Only those that it leaves undecided are looked at one by one."""
        starts, completed = sync_frames(run)
        if not len(starts) and not len(completed):
            return
        if self.counts[vbucket]:
            decided = set(completed.tolist())
            for prepare in self.of(vbucket):
                if prepare.seqno in decided:
                    self.remove(prepare)
        seqnos = seqnos_at(run, starts)
        for start in starts[~np.isin(seqnos, completed)].tolist():
            self.add(_read_back(vbucket, run, start))
        # Those that began and ended within the run count as well.
        for highest, seen in ((self.high_prepared, seqnos), (self.high_completed, completed)):
            highest[vbucket] = max(int(highest[vbucket]), int(seen.max(initial=0)))


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
    """The prepare in a stored frame."""
    decoded = decode_frame(frame)
    assert decoded is not None, "stored frames are whole"
    prepare = decode_message(decoded[0], WITH_COLLECTIONS)
    assert isinstance(prepare, Prepare), "only prepares are decided"
    return prepare


# --- beginning and deciding ---------------------------------------------------------------------------------------


def put_prepare(
    bucket: Bucket, vbucket: int, *, collection_id: CollectionId, key: bytes, value: bytes | MakeValue,
    datatype: Datatype, level: DurabilityLevel, flags: int = 0, expiry: int = 0, is_removal: bool = False,
) -> PendingPrepare:  # fmt: skip
    """Begin a durable write. Whether it may begin is for the caller to decide."""
    assert bucket.prepares.find(vbucket, collection_id, key) is None, "a key has one durable write at a time"
    seqno, cas, rev_seqno, _ = bucket.coming_version(vbucket, collection_id, key)
    prepare = Prepare(
        vbucket=VBucketId(vbucket), cas=cas, datatype=datatype, seqno=seqno, rev_seqno=rev_seqno, flags=flags,
        # As in real servers, a removal has the time of the deletion here: all copies are to have the same.
        expiry=bucket.outside.now_s() if is_removal else expiry,
        deleted=int(is_removal), durability=level, collection_id=collection_id, key=key,
        value=value if isinstance(value, bytes) else value(cas, seqno),
    )  # fmt: skip
    return enter_prepare(bucket, prepare)


def enter_prepare(bucket: Bucket, prepare: Prepare) -> PendingPrepare:
    """Store a prepare that has its numbers: one that begins here, or one that was received."""
    assert prepare.collection_id is not None
    vbucket, frame = prepare.vbucket, replace(prepare, opaque=0, frame_infos=()).encode()
    _mark_format(bucket)
    bucket.pending.append(vbucket, frame)
    bucket.vbuckets.high_seqnos[vbucket] = prepare.seqno
    bucket.vbuckets.max_cas[vbucket] = max(int(bucket.vbuckets.max_cas[vbucket]), prepare.cas)
    # It will be of no use once it is decided, and that is soon.
    bucket.vbuckets.superseded[vbucket] += 1
    pending = PendingPrepare(
        vbucket=vbucket, seqno=prepare.seqno, cas=prepare.cas, collection_id=prepare.collection_id, key=prepare.key,
        frame=frame, commit=bucket.pending.number,
    )  # fmt: skip
    bucket.prepares.add(pending)
    return pending


def _mark_format(bucket: Bucket) -> None:
    """Programs that know no prepares must not open the bucket from now on."""
    if bucket.facts.version < FORMAT_VERSION:
        bucket.facts = replace(bucket.facts, version=FORMAT_VERSION)
        bucket.pending.extra.append(Put(Table.BUCKET, BUCKET_FACTS, bucket.facts.encode()))


def commit_prepare(bucket: Bucket, pending: PendingPrepare, *, seqno: Seqno | None = None) -> Written:
    """Make a prepare the newest version of its document, at a new seqno or at the one that was received."""
    vbucket, prepare = pending.vbucket, decode_prepare(pending.frame)
    assert prepare.collection_id is not None
    if seqno is None:
        seqno = Seqno(int(bucket.vbuckets.high_seqnos[vbucket]) + 1)
    distance = seqno - pending.seqno
    supersedes = bucket.find(vbucket, prepare.collection_id, prepare.key) is not None
    change: Mutation | Deletion
    if prepare.deleted:
        change = Deletion(
            vbucket=vbucket, opaque=_opaque(distance), cas=prepare.cas, datatype=prepare.datatype, seqno=seqno,
            rev_seqno=prepare.rev_seqno, delete_time=prepare.expiry, collection_id=prepare.collection_id,
            key=prepare.key, value=prepare.value,
        )  # fmt: skip
    else:
        change = Mutation(
            vbucket=vbucket, opaque=_opaque(distance), cas=prepare.cas, datatype=prepare.datatype, seqno=seqno,
            rev_seqno=prepare.rev_seqno, flags=prepare.flags, expiry=prepare.expiry,
            collection_id=prepare.collection_id, key=prepare.key, value=prepare.value,
        )  # fmt: skip
    written = bucket.enter_change(
        vbucket, change, supersedes, expiry=0 if prepare.deleted else prepare.expiry, is_deleted=bool(prepare.deleted)
    )
    if prepare.deleted:
        deleted_revs = bucket.vbuckets.deleted_revs
        deleted_revs[vbucket] = max(int(deleted_revs[vbucket]), prepare.rev_seqno)
    bucket.prepares.remove(pending)
    return written


def _opaque(distance: int) -> int:
    """A commit that is too far from its prepare goes as a plain change, which decides the prepare as well."""
    assert distance > 0, "a commit comes after its prepare"
    return distance if distance <= _DISTANCE_MAX else 0


def abort_prepare(bucket: Bucket, pending: PendingPrepare) -> int:
    """Give up a prepare. Returns the commit that makes this durable."""
    seqno = Seqno(int(bucket.vbuckets.high_seqnos[pending.vbucket]) + 1)
    abort = Abort(
        vbucket=pending.vbucket, prepared_seqno=pending.seqno, abort_seqno=seqno, collection_id=pending.collection_id,
        key=pending.key,
    )  # fmt: skip
    enter_abort(bucket, abort)
    return bucket.pending.number


def enter_abort(bucket: Bucket, abort: Abort) -> None:
    """Store an abort that has its numbers, and end its prepare. That may not be here: nobody needs an aborted one."""
    assert abort.collection_id is not None
    vbucket, numbers = abort.vbucket, bucket.vbuckets
    cas = abort.cas or numbers.coming_cas(vbucket, bucket.outside.now_ns())
    stored = Abort(
        vbucket=vbucket, cas=cas, prepared_seqno=abort.abort_seqno, abort_seqno=abort.prepared_seqno,
        collection_id=abort.collection_id, key=abort.key,
    )  # fmt: skip
    bucket.pending.append(vbucket, stored.encode())
    numbers.high_seqnos[vbucket] = abort.abort_seqno
    numbers.max_cas[vbucket] = max(int(numbers.max_cas[vbucket]), cas)
    pending = bucket.prepares.find(vbucket, abort.collection_id, abort.key)
    if pending is not None and pending.seqno == abort.prepared_seqno:
        bucket.prepares.remove(pending)


def commit_inherited(bucket: Bucket, vbucket: int) -> None:
    """Commit all prepares of a vbucket that becomes active.

    The copy that was active before may have committed them, and told its clients so, without this one having heard of
    it. Whether they were, nobody here can know; those that were not have no answer yet, or an ambiguous one.
    """
    for pending in bucket.prepares.of(vbucket):
        if bucket.manifest.collection_by_id(pending.collection_id) is None:
            abort_prepare(bucket, pending)
        else:
            commit_prepare(bucket, pending)


def decide_by_changes(bucket: Bucket, vbucket: int, run: Bytes) -> None:
    """A change that was received for a document with an undecided prepare is its commit, though it does not say so.

    Producers send it so where the prepare may have been compacted away. `run` lies in the pending commit, and is marked
    there.
    """
    prepares = bucket.prepares
    undecided = int(prepares.counts[vbucket])
    if not undecided:
        return
    # Each run costs what is in it, however much is undecided: many runs are short, and many prepares may be waiting.
    is_short = len(run) // _FRAME_BYTES_MIN < undecided
    starts = _change_starts(run) if is_short else changes_of(run, prepares.keys_of(vbucket), bucket.index.secret)
    for start in starts:
        key_at = start + 24 + int(run[start + 4])
        key = run[key_at : key_at + int.from_bytes(run[start + 2 : start + 4])].tobytes()
        prepare = prepares.find_encoded(vbucket, key)
        if prepare is not None:
            distance = int.from_bytes(run[start + 24 : start + 32]) - prepare.seqno
            run[start + 12 : start + 16] = as_run(_opaque(distance).to_bytes(4))
            prepares.remove(prepare)


def _change_starts(run: Bytes) -> list[int]:
    """Where the changes of documents start."""
    starts, at = [], 0
    while at < len(run):
        if int(run[at + 1]) in _CHANGES:
            starts.append(at)
        at += 24 + int.from_bytes(run[at + 8 : at + 12])
    return starts
