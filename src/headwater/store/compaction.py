"""Compaction drops changes that are no longer needed from the blocks; expiry removes documents at their time.

The commit loop calls both, between its commits. Compaction must never drop what a rollback inside the history window,
a stream or an undecided write still needs.

A change is needed while it is the newest of its key, or while it is inside the history window, which serves change
streams, exact rollbacks and repeated reads. If a key has changed inside the window, the version that it had when the
window began is needed as well: a rollback may go back to that. A deletion that is the newest of its key is needed
until it is older than the purge age; the highest one that is dropped becomes the purge seqno. Changes of a dropped
collection are not needed. Until they are gone their documents are counted, so a vbucket with a dropped collection is
always worth compacting. One call handles a few blocks of one vbucket, so that the work comes in bounded steps: the
thread that writes the engine reads and writes the blocks, and only the decisions are made where the index is.

A deletion may be dropped only if no older version of its document stays, which would come back to life. So it must be
outside the window as well. The first step over a vbucket decides where the window starts for all its steps, so that
everything before a dropped deletion was compacted by the same rule.

A prepare is needed until it is decided, and longer if that happened inside the window: a rollback to before the
decision makes it undecided again. An abort is kept like a deletion: a copy that has the prepare must receive it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headwater.kernels.memory import (
    Bytes,
    Column,
    Int64Rows,
    ReadOnlyBytes,
    UInt32s,
    UInt64,
    UInt64Rows,
    UInt64s,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    load_u16,
    load_u32,
    load_u64,
    read_only,
    u32,
    u64,
)
from headwater.kernels.siphash import siphash128
from headwater.protocol.frames import encode_collection_id
from headwater.protocol.kernels.frame_runs import (
    ABORT,
    MUTATION,
    PREPARE,
    SYSTEM_EVENT,
    collection_id,
    is_document_change,
)
from headwater.protocol.manifest import Manifest
from headwater.protocol.numbers import Seqno
from headwater.protocol.values import Datatype, keep_system_xattrs
from headwater.store.bucket import Bucket, Written
from headwater.store.checked_engine import CheckedView
from headwater.store.commits import blocks
from headwater.store.data_format import RISING_FACTS, Entry, VBucketFacts, block_last_seqno, blocks_of, vbucket_key
from headwater.store.engine import Change, DeleteRow, PutRow, Table
from headwater.store.index import BASE, CAPACITY, SEQNO, probe
from headwater.store.opening import stored_manifest
from headwater.store.prepares import NO_PREPARES, sync_frames
from headwater.store.runs import EMPTY_RUN, as_run, first_seqno, split_after
from headwater.store.vbuckets import Retention

STEP_BYTES = 4 * 1024 * 1024
"""How many bytes are decided at once, while clients wait: up to ten milliseconds if documents are small."""
EXPIRED_MAX = 256
EXPIRED_BYTES_MAX = 1024 * 1024
"""The most documents and bytes of a vbucket that expire in one call; the last document may be longer than that."""
SUPERSEDED_SHARE = 0.25
"""Compact a vbucket when this share of its changes is superseded."""
_START = Seqno(0)
_CHANGE_BYTES_MIN = 24 + 20 + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """The result of one step."""

    changes: list[Change]
    reached_seqno: Seqno | None
    """Where the next step continues; None if the vbucket is done."""
    dropped_bytes: int
    dropped_superseded: int
    forgotten_seqnos: Column
    """Seqnos of documents that are gone altogether: purged deletions, and documents of dropped collections."""
    facts: VBucketFacts | None
    """The stored facts of the vbucket; None if nothing was dropped."""
    manifest_uid: int
    """The uid of the manifest that said which collections are dropped."""


def worth_compacting(bucket: Bucket) -> list[int]:
    """Return the vbuckets with enough superseded changes, or whose documents may be of dropped collections."""
    numbers = bucket.numbers
    is_worth = (numbers.superseded > SUPERSEDED_SHARE * bucket.index.entries + 1) | (numbers.dropped_seqnos > 0)
    return np.flatnonzero(is_worth).tolist()


def needs_settling(bucket: Bucket, vbucket: int) -> bool:
    """Whether documents of a dropped collection are in young commits, which compaction does not read."""
    return int(bucket.numbers.dropped_seqnos[vbucket]) > _settled_seqno(bucket, vbucket)


def compact_vbucket(bucket: Bucket, vbucket: int, retention: Retention, *, after_seqno: Seqno = _START) -> Compacted:
    """Do one step, for callers that can wait. Returns the changes that compact a vbucket's blocks after a seqno."""
    return compact_part(bucket, vbucket, retention, read_part(bucket, vbucket, retention, after_seqno=after_seqno))


def read_part(bucket: Bucket, vbucket: int, retention: Retention, *, after_seqno: Seqno = _START) -> Part:
    """Read the data of a step. Uses only the engine, so that it may run in another thread."""
    with bucket.reading(vbucket) as view:
        # Facts that are not durable yet may still be taken back, so they must not decide about durable changes.
        stored, manifest = view.get(Table.VBUCKETS, vbucket_key(vbucket)), stored_manifest(view)
        now_s, is_first = bucket.environment.now_s(), after_seqno == _START
        keys, run, reached_seqno = _read_blocks(view, vbucket, after_seqno)
        return Part(
            keys=keys,
            run=run,
            reached_seqno=reached_seqno,
            manifest=manifest,
            facts=None if stored is None else VBucketFacts.decode(stored),
            window_start=_window_start(view, vbucket, now_s, retention) if is_first else None,
        )


def compact_part(bucket: Bucket, vbucket: int, retention: Retention, part: Part) -> Compacted:
    """Decide what to keep of a part, and enter its new facts in the bucket.

    Call `write_compacted`, then `finish_compaction`; the bucket must not commit or settle from `read_part` until then.
    It uses the index, so call it in the event loop, not in the disk thread.
    """
    assert bucket.in_flight is None, "the facts that a commit in flight carries would overwrite those written here"
    now_s, facts, manifest = bucket.environment.now_s(), part.facts, part.manifest
    if part.window_start is not None:
        bucket.numbers.window_starts[vbucket] = part.window_start
    kept, dropped = _filter_part(bucket, vbucket, part.run, manifest, facts, now_s - retention.purge_age_s)
    changes: list[Change] = []
    compacted: VBucketFacts | None = None
    if facts is not None and len(kept) < len(part.run):
        numbers = bucket.numbers
        compacted = replace(
            facts,
            purge_seqno=Seqno(max(facts.purge_seqno, dropped.purge_seqno)),
            history_start_seqno=Seqno(max(facts.history_start_seqno, int(numbers.window_starts[vbucket]))),
            high_seqno_floor=Seqno(int(numbers.durable_seqnos[vbucket])),
            visible_seqno_floor=Seqno(int(numbers.visible_seqnos[vbucket])),
            completed_seqno_floor=Seqno(int(numbers.completed_seqnos[vbucket])),
            max_cas_floor=int(numbers.max_cas[vbucket]),
            deleted_rev_floor=int(numbers.deleted_revs[vbucket]),
        )
        # Streams rely on these: while another thread writes, they must not read on as if all versions were there.
        _take_over(bucket, vbucket, compacted)
        changes = [
            *(DeleteRow(Table.BLOCKS, key) for key in part.keys),
            *blocks(vbucket, kept),
            PutRow(Table.VBUCKETS, vbucket_key(vbucket), compacted.encode()),
        ]
    return Compacted(
        changes=changes,
        reached_seqno=part.reached_seqno,
        dropped_bytes=len(part.run) - len(kept),
        dropped_superseded=dropped.superseded,
        forgotten_seqnos=dropped.forgotten_seqnos,
        facts=compacted,
        manifest_uid=manifest.uid,
    )


def write_compacted(bucket: Bucket, compacted: Compacted) -> None:
    """Make a step durable. Uses only the engine, so that it may run in another thread."""
    bucket.engine.write(compacted.changes)


def finish_compaction(bucket: Bucket, vbucket: int, compacted: Compacted) -> None:
    """Apply a durable step to the facts and the index."""
    numbers = bucket.numbers
    knows_all_drops = compacted.manifest_uid >= numbers.manifest_uids[vbucket] and not needs_settling(bucket, vbucket)
    if compacted.reached_seqno is None and knows_all_drops:
        numbers.dropped_seqnos[vbucket] = 0
    if compacted.facts is None or bucket.numbers.facts[vbucket] is None:
        return
    facts = _take_over(bucket, vbucket, compacted.facts)
    key = vbucket_key(vbucket)
    if any(change.table == Table.VBUCKETS and change.key == key for change in bucket.pending.extra):
        # The pending facts are older than these by now.
        bucket.set_vbucket_facts(vbucket, facts)
    forgotten = bucket.index.forget(vbucket, compacted.forgotten_seqnos)
    # A document that was rewritten meanwhile counts its old version as superseded, which is gone as well.
    rewritten = len(compacted.forgotten_seqnos) - forgotten
    bucket.numbers.superseded[vbucket] -= compacted.dropped_superseded + rewritten


def _take_over(bucket: Bucket, vbucket: int, compacted: VBucketFacts) -> VBucketFacts:
    """Raise the numbers that compaction has decided, and only those: other facts may have changed since."""
    facts = bucket.numbers.facts[vbucket]
    assert facts is not None, "only vbuckets that exist are compacted"
    risen: dict[str, Any] = {name: max(getattr(facts, name), getattr(compacted, name)) for name in RISING_FACTS}
    facts = replace(facts, **risen)
    bucket.numbers.set_facts(vbucket, facts)
    return facts


# --- what a step looks at -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The blocks that one step reads, and what is stored beside them."""

    keys: list[bytes]
    run: Bytes
    reached_seqno: Seqno | None
    """The last seqno of these blocks; None if no blocks follow."""
    manifest: Manifest
    facts: VBucketFacts | None
    window_start: int | None
    """None except in the first part of a vbucket."""


def _read_blocks(view: CheckedView, vbucket: int, after_seqno: Seqno) -> tuple[list[bytes], Bytes, Seqno | None]:
    keys: list[bytes] = []
    runs: list[Bytes] = []
    size = 0
    is_last = True
    for key, value in view.scan(Table.BLOCKS, *blocks_of(vbucket, from_seqno=after_seqno + 1)):
        if size >= STEP_BYTES:
            is_last = False
            break
        keys.append(key)
        runs.append(as_run(value).copy())
        size += len(value)
    run = np.concatenate(runs) if runs else EMPTY_RUN
    return keys, run, None if is_last else block_last_seqno(keys[-1])


def _window_start(view: CheckedView, vbucket: int, now_s: int, retention: Retention) -> int:
    """Return the seqno after which every version is kept.

    The window begins in the last block whose first change is too old, or too far from the end, so only that block is
    walked. A version that was made elsewhere keeps its CAS, which may be older than those before it and then does not
    show when it arrived: a block that begins with one is skipped, and inside a block the highest CAS so far counts.
    """
    oldest_cas = u64(max(0, now_s - retention.history_s) * 1_000_000_000)
    fronts = [(key, int(_first_cas(front)), size) for key, front, size in view.fronts(vbucket)]
    window_from = sum(size for _, _, size in fronts) - retention.history_bytes
    at = before = written_cas = 0
    begins_in: tuple[bytes, int, int, int] | None = None
    for key, first_cas, size in fronts:
        if at < window_from or (0 < first_cas <= oldest_cas and first_cas >= written_cas):
            begins_in = key, at, before, written_cas
        written_cas = max(written_cas, first_cas)
        at += size
        before = block_last_seqno(key)
    if begins_in is None:
        return 0
    key, at, before, written_cas = begins_in
    block = view.get(Table.BLOCKS, key)
    assert block is not None
    last = _last_before(read_only(as_run(block)), oldest_cas, i64(window_from - at), u64(written_cas))
    return max(before, int(last))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dropped:
    superseded: int
    forgotten_seqnos: Column
    purge_seqno: int


def _filter_part(
    bucket: Bucket, vbucket: int, run: Bytes, manifest: Manifest, facts: VBucketFacts | None, purge_before_s: int
) -> tuple[Bytes, _Dropped]:
    """Return what is kept of a run, and what is dropped."""
    index, numbers = bucket.index, bucket.numbers
    window_start = int(numbers.window_starts[vbucket])
    history_start = max(window_start, facts.history_start_seqno if facts else 0)
    collections = np.array(sorted(collection.id for _, collection in manifest.collections()), dtype=np.uint32)
    kept = np.empty(len(run), dtype=np.uint8)
    forgotten = np.empty(len(run) // _CHANGE_BYTES_MIN, dtype=np.uint64)
    bases = np.zeros(int(index.tables[vbucket, CAPACITY]), dtype=np.uint64)
    _find_bases(run, bases, index.slots, index.tables, vbucket, index.secret, u64(history_start))
    settled_run = run[: split_after(run, _settled_seqno(bucket, vbucket))]
    prepares = _needed_prepares(bucket, vbucket, run, history_start)
    kept_bytes, forgotten_count, superseded, purge_seqno = _filter(
        settled_run, kept, forgotten, bases, index.slots, index.tables, vbucket, index.secret, collections, prepares,
        numbers.durable_seqnos[vbucket], u64(history_start), u64(window_start), i64(purge_before_s),
    )  # fmt: skip
    dropped = _Dropped(
        superseded=int(superseded), forgotten_seqnos=forgotten[:forgotten_count], purge_seqno=int(purge_seqno)
    )
    return np.concatenate([kept[:kept_bytes], run[len(settled_run) :]]), dropped


def _needed_prepares(bucket: Bucket, vbucket: int, run: Bytes, history_start: int) -> Column:
    """Return the seqnos, ascending, of prepares that are undecided, or were when the window began."""
    if not len(sync_frames(run)[0]):
        return NO_PREPARES
    undecided = np.array([prepare.seqno for prepare in bucket.prepares.of(vbucket)], dtype=np.uint64)
    decided = [sync_frames(later)[1].copy() for later in bucket.runs(vbucket, after_seqno=history_start)]
    # A decision that is not durable yet may be taken back. Decisions of other vbuckets do no harm here.
    coming = sync_frames(bucket.pending.frames[: bucket.pending.used_bytes])[1]
    return np.unique(np.concatenate([undecided, *decided, coming]))


def _settled_seqno(bucket: Bucket, vbucket: int) -> int:
    """Return the last seqno that is only in blocks. If settling stopped half-way, some changes are both in blocks and
    in commits: if they were dropped here, they would come back from the commits."""
    young = bucket.young.of(vbucket)
    return first_seqno(young[0].run(vbucket)) - 1 if young else int(bucket.numbers.durable_seqnos[vbucket])


# --- kernels ------------------------------------------------------------------------------------------------------


@kernel_part
def _written_cas(run: Bytes, at: int) -> int:
    """Return the CAS of a change, which says when it was written; 0 for a commit, which has the CAS of its prepare."""
    return load_u64(run, at + 16) if load_u32(run, at + 12) == 0 else u64(0)


@kernel
def _first_cas(run: ReadOnlyBytes) -> int:
    """Return the CAS of the first change that has one; system events have none."""
    at = i64(0)
    cas = u64(0)
    while at < len(run) and cas == 0:
        cas = _written_cas(run, at)
        at += 24 + i64(load_u32(run, at + 8))
    return cas


@kernel
def _last_before(run: ReadOnlyBytes, oldest_cas: UInt64, byte: int, written_cas: UInt64) -> int:
    """Return the last seqno written before a CAS or placed before a byte. `written_cas` is the highest so far."""
    at = i64(0)
    seqno = u64(0)
    while at < len(run):
        written_cas = max(written_cas, _written_cas(run, at))
        if at < byte or (written_cas != 0 and written_cas <= oldest_cas):
            seqno = load_u64(run, at + 24)
        at += 24 + i64(load_u32(run, at + 8))
    return seqno


@kernel_part
def _is_member(ids: Column, wanted: int) -> bool:
    position = np.searchsorted(ids, wanted)
    return bool(position < len(ids) and ids[position] == wanted)


@kernel_part
def _slot_of(run: Bytes, at: int, slots: Column, base: int, capacity: int, secret: Column) -> int:
    """Return the slot of the document that the frame at `at` is about, or a negative number."""
    if capacity == 0:
        return -1
    key_at = at + 24 + i64(run[at + 4])
    high, low = siphash128(run, key_at, i64(load_u16(run, at + 2)), secret[0], secret[1])
    return probe(slots, base, capacity, high, low)


@kernel
def _find_bases(
    run: Bytes,
    bases: UInt64s,
    slots: UInt64Rows,
    tables: Int64Rows,
    vbucket: int,
    secret: UInt64s,
    history_start: UInt64,
) -> None:
    """Find, by slot, the seqno of the version that a document had when the window began, if this run has it."""
    base = tables[vbucket, BASE]
    capacity = tables[vbucket, CAPACITY]
    at = i64(0)
    while at < len(run) and load_u64(run, at + 24) <= history_start:
        if is_document_change(run[at + 1]):
            slot = _slot_of(run, at, slots, base, capacity, secret)
            if slot >= 0 and slots[slot, SEQNO] > history_start:
                bases[slot - base] = load_u64(run, at + 24)
        at += 24 + i64(load_u32(run, at + 8))


@kernel_part
def _is_sync_frame_needed(
    run: Bytes, at: int, prepares: Column, history_start: int, window_start: int, purge_before_s: int
) -> bool:
    """Whether a prepare or an abort has to stay. An abort's CAS says when it was written."""
    seqno = load_u64(run, at + 24)
    if run[at + 1] == PREPARE:
        return bool(seqno > history_start or _is_member(prepares, seqno))
    return bool(seqno > window_start or i64(load_u64(run, at + 16) // u64(1_000_000_000)) >= purge_before_s)


@kernel
def _filter(
    run: Bytes, kept: Bytes, forgotten: UInt64s, bases: UInt64s, slots: UInt64Rows, tables: Int64Rows, vbucket: int,
    secret: UInt64s, collections: UInt32s, prepares: UInt64s, durable_seqno: UInt64, history_start: UInt64,
    window_start: UInt64, purge_before_s: int,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Copy the changes that are needed.

    Returns their length, how many documents are gone altogether, how many superseded changes were dropped, and the
    highest seqno of a deletion or abort that was purged.
    """
    base = tables[vbucket, BASE]
    capacity = tables[vbucket, CAPACITY]
    at = i64(0)
    to = i64(0)
    gone = 0
    superseded = 0
    purge_seqno = u64(0)
    while at < len(run):
        end = at + 24 + i64(load_u32(run, at + 8))
        opcode = run[at + 1]
        seqno = load_u64(run, at + 24)
        keep = True
        if is_document_change(opcode):
            slot = _slot_of(run, at, slots, base, capacity, secret)
            is_newest = slot >= 0 and slots[slot, SEQNO] == seqno
            # A version that is not durable yet does not supersede one that is.
            is_needed = is_newest or (slot >= 0 and slots[slot, SEQNO] > durable_seqno)
            is_old_removal = opcode != MUTATION and i64(load_u32(run, at + 40)) < purge_before_s
            if not _is_member(collections, u32(collection_id(run, at + 24 + i64(run[at + 4])))):
                keep = False
            elif not is_needed:
                keep = seqno > history_start or (slot >= 0 and bases[slot - base] == seqno)
            elif is_newest and is_old_removal and seqno <= window_start:
                keep = False
                purge_seqno = seqno
            if not keep and is_newest:
                forgotten[gone] = seqno
                gone += 1
            elif not keep:
                superseded += 1
        elif opcode != SYSTEM_EVENT:
            keep = _is_sync_frame_needed(run, at, prepares, history_start, window_start, purge_before_s)
            superseded += opcode == PREPARE and not keep
            purge_seqno = seqno if opcode == ABORT and not keep else purge_seqno
        if keep:
            copy_bytes(kept, to, run, at, end - at)
            to += end - at
        at = end
    return to, gone, superseded, purge_seqno


# --- expiry -------------------------------------------------------------------------------------------------------
#
# Documents whose time has come become expirations, whether a client reads them or not.


def expire_documents(bucket: Bucket, vbucket: int) -> int:
    """Expire documents of a vbucket whose time has come, as many as one call may. Returns how many."""
    went = read_bytes = 0
    for entry in bucket.index.expired(vbucket, now_s=bucket.environment.now_s(), entries_max=EXPIRED_MAX):
        if read_bytes > EXPIRED_BYTES_MAX:
            break
        document = bucket.read(vbucket, entry)
        read_bytes += len(document.value)
        if bucket.manifest.collection_by_id(document.collection_id) is None:
            # The collection was dropped, so no more changes of it may be stored. Compaction drops the document;
            # without an expiry it is not found here again until then.
            key = as_run(encode_collection_id(document.collection_id) + document.key)
            bucket.index.put(vbucket, key, replace(entry, expiry=0))
        elif bucket.prepares.find(vbucket, document.collection_id, document.key) is None:
            # A document that a durable write is about to replace is left to that write.
            expire_document(bucket, vbucket, entry)
            went += 1
    return went


def expire_document(bucket: Bucket, vbucket: int, entry: Entry) -> Written:
    """Expire a document. Its system extended attributes stay in the tombstone."""
    document = bucket.read(vbucket, entry)
    kept = keep_system_xattrs(document.value) if document.datatype & Datatype.XATTR else b""
    return bucket.put_removal(
        vbucket,
        collection_id=document.collection_id,
        key=document.key,
        expired=True,
        value=kept,
        datatype=Datatype.XATTR if kept else Datatype.RAW,
    )


def is_expired(entry: Entry, now_s: int) -> bool:
    return not entry.is_deleted and 0 < entry.expiry <= now_s
