"""What a replica receives: snapshots and changes that another node has made, stored under the seqnos of that node.

The node's consumer calls it with what its streams receive. A change is stored as a producer sends it to a consumer
that has asked for collections, extended attributes, delete times and the expiry opcode; only the opaque differs. So a
kernel checks a run of received changes and copies it into the pending commit, and the run is entered in the index like
one that is read back from disk. A change in any other form is decoded and encoded again (`receive_change`).

Everything is checked before it is stored: sound frames of this vbucket, seqnos that rise inside the snapshot, keys and
values within their limits. `SnapshotViolation` and `MalformedMessage` say what was wrong; what precedes it is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headwater.errors import MalformedMessage, SnapshotViolation
from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    UInt64,
    copy_bytes,
    i64,
    kernel,
    kernel_part,
    load_u16,
    load_u32,
    load_u64,
    store_u32,
    u8,
    u32,
    u64,
)
from headwater.protocol.failover_log import FailoverEntry, FailoverLog
from headwater.protocol.kernels.frame_runs import (
    EXPIRATION,
    JSON,
    MUTATION,
    SNAPPY,
    SYSTEM_EVENT,
    XATTR,
    prefix_bytes,
)
from headwater.protocol.kernels.snappy import inflated_bytes
from headwater.protocol.kernels.xattr_split import has_sound_xattrs
from headwater.protocol.manifest import decode_event
from headwater.protocol.messages.dcp_changes import Deletion, Expiration, Mutation, SystemEvent
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, KEY_BYTES_MAX, VALUE_BYTES_MAX, ManifestUid, Seqno
from headwater.protocol.snapshots import StreamOffset
from headwater.protocol.values import Datatype, decode_xattrs, decompress
from headwater.store.bucket import Bucket
from headwater.store.data_format import VBucketFacts
from headwater.store.prepares import decide_by_changes
from headwater.store.runs import frame_end
from headwater.store.vbuckets import is_flush, raise_to, stored_event

Change = Mutation | Deletion | Expiration

_NO_SEQNO = Seqno(0)


_END, _OTHER, _RANGE = range(3)
"""Why the kernel stopped: at the end; before a frame that is not sound or not in the stored form; before a seqno that
does not rise or is outside the snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The part of a run that was stored."""

    consumed_bytes: int
    """Where the first frame starts that was not stored."""
    high_seqno: Seqno
    has_to_be_decoded: bool
    """Whether the next frame is for `receive_change`."""


# --- where a copy is ----------------------------------------------------------------------------------------------


def resume_offset(bucket: Bucket, vbucket: int) -> StreamOffset:
    """Return where to ask the producer to resume: what this copy holds, durable or not, and the snapshot it is in.

    The branch is the one that the end of that snapshot belongs to, not always the newest: a producer that does not
    know the newest may still share everything that this copy holds.
    """
    facts, high = _facts(bucket, vbucket), Seqno(int(bucket.numbers.high_seqnos[vbucket]))
    start, end = facts.snapshot_start_seqno, facts.snapshot_end_seqno
    if not start < high < end:
        # The snapshot is complete, or none of it has arrived.
        start = end = high
    return StreamOffset(
        vbuuid=facts.failover_log.vbuuid_at(end), seqno=high, snapshot_start=start, snapshot_end=end
    )  # fmt: skip


def whole_seqno(bucket: Bucket, vbucket: int) -> Seqno:
    """Return up to where a vbucket durably holds all that was written.

    Inside a snapshot that leaves out older versions, documents are missing whose newest version is still to come.
    """
    facts, durable = _facts(bucket, vbucket), bucket.numbers.durable_seqno(vbucket)
    if facts.state != VBucketState.ACTIVE and durable < facts.history_start_seqno:
        return Seqno(min(durable, facts.snapshot_start_seqno))
    return Seqno(durable)


def take_failover_log(bucket: Bucket, vbucket: int, entries: tuple[FailoverEntry, ...]) -> int:
    """Adopt the branches of a producer that shares all that this copy holds. Returns the commit."""
    facts = _facts(bucket, vbucket)
    return bucket.set_vbucket_facts(vbucket, replace(facts, failover_log=FailoverLog.of(entries)))


def begin_snapshot(
    bucket: Bucket, vbucket: int, *, start: Seqno, end: Seqno, has_history: bool, purge_seqno: Seqno = _NO_SEQNO,
    completed_seqno: Seqno = _NO_SEQNO,
) -> int:  # fmt: skip
    """Begin a snapshot. Returns the commit that makes its range durable.

    If it does not hold every version, versions are missing until its end, so no rollback into it can be exact. The
    last prepare that was decided may be among the missing, so the producer names it as `completed_seqno`.
    """
    facts = _facts(bucket, vbucket)
    history_start = facts.history_start_seqno if has_history else Seqno(max(facts.history_start_seqno, end))
    facts = replace(
        facts,
        snapshot_start_seqno=start,
        snapshot_end_seqno=end,
        history_start_seqno=history_start,
        purge_seqno=Seqno(max(facts.purge_seqno, purge_seqno)),
        completed_seqno_floor=Seqno(max(facts.completed_seqno_floor, completed_seqno)),
    )
    numbers = bucket.numbers
    raise_to(numbers.completed_seqnos, vbucket, completed_seqno)
    return bucket.set_vbucket_facts(vbucket, facts)


def advance_seqno(bucket: Bucket, vbucket: int, seqno: Seqno) -> int:
    """Advance the vbucket to a seqno whose change is not sent. Returns the commit that makes this durable."""
    facts = replace(_facts(bucket, vbucket), high_seqno_floor=seqno)
    bucket.numbers.high_seqnos[vbucket] = seqno
    bucket.pending.advanced_seqnos[vbucket] = seqno
    return bucket.set_vbucket_facts(vbucket, facts)


def _facts(bucket: Bucket, vbucket: int) -> VBucketFacts:
    facts = bucket.numbers.facts[vbucket]
    assert facts is not None, "only vbuckets that exist receive"
    return facts


# --- changes ------------------------------------------------------------------------------------------------------


def receive_run(bucket: Bucket, vbucket: int, run: Bytes, *, end_seqno: Seqno) -> Received:
    """Store the changes at the front of `run` that have the stored form. `end_seqno` ends their snapshot."""
    pending, numbers = bucket.pending, bucket.numbers
    after = numbers.high_seqnos[vbucket]
    pending.reserve(len(run), 1)
    stop, at, used, high, documents = _take(
        run, i64(vbucket), after, u64(end_seqno), pending.frames, i64(pending.used_bytes)
    )
    if documents:
        taken = pending.frames[pending.used_bytes : used]
        pending.add_run(vbucket, int(used))
        # Assume that the rest of the snapshot is as dense, so that the index grows once for all of it.
        expected = int(documents) * (end_seqno - int(after)) // int(high - after)
        _enter(bucket, vbucket, taken, documents=int(documents), expected=expected)
        numbers.high_seqnos[vbucket] = high
    if stop == _RANGE:
        raise SnapshotViolation(
            f"seqno {int.from_bytes(run[at + 24 : at + 32])} after {int(high)} in a snapshot that ends at {end_seqno}",
            offset=int(at),
        )
    return Received(consumed_bytes=int(at), high_seqno=Seqno(int(high)), has_to_be_decoded=stop == _OTHER)


def receive_change(bucket: Bucket, vbucket: int, change: Change, *, end_seqno: Seqno) -> None:
    """Store a change that has to be converted to the stored form."""
    _check_seqno(bucket, vbucket, change, end_seqno)
    _append(bucket, vbucket, _stored_form(bucket, change).encode(), change.seqno)


def receive_event(bucket: Bucket, vbucket: int, message: SystemEvent, *, end_seqno: Seqno) -> ManifestUid:
    """Store a system event. Returns the uid of the manifest that the vbucket reaches with it."""
    _check_seqno(bucket, vbucket, message, end_seqno)
    event = decode_event(message)
    stored = stored_event(event, vbucket, message.seqno, cas=message.cas)
    _append(bucket, vbucket, stored.encode(), message.seqno)
    bucket.numbers.on_event(vbucket, message.seqno, event, manifest_uid=event.manifest_uid)
    if is_flush(event):
        bucket.flush_collection(vbucket, event.collection_id, message.seqno)
    return event.manifest_uid


def _check_seqno(bucket: Bucket, vbucket: int, change: Change | SystemEvent, end_seqno: Seqno) -> None:
    if change.vbucket != vbucket:
        raise MalformedMessage(f"a change of vbucket {change.vbucket} in a stream of vbucket {vbucket}", offset=6)
    high = int(bucket.numbers.high_seqnos[vbucket])
    if not high < change.seqno <= end_seqno:
        raise SnapshotViolation(f"seqno {change.seqno} after {high} in a snapshot that ends at {end_seqno}")
    if change.seqno >> 63:
        raise MalformedMessage(f"no vbucket gets to seqno {change.seqno}", offset=24)


def stored_value(value: bytes, datatype: Datatype) -> tuple[bytes, Datatype]:
    """Check a value and return it as it is stored. A value with extended attributes is stored uncompressed."""
    if int(datatype) & ~int(Datatype.JSON | Datatype.SNAPPY | Datatype.XATTR):
        raise MalformedMessage(f"the datatype 0x{datatype:02x} is not known", offset=5)
    inflated = decompress(value) if Datatype.SNAPPY in datatype else value
    if len(inflated) > VALUE_BYTES_MAX:
        raise MalformedMessage(f"a value of {len(inflated)} bytes exceeds {VALUE_BYTES_MAX}")
    if Datatype.XATTR not in datatype:
        return value, datatype
    decode_xattrs(inflated)
    return inflated, datatype & ~Datatype.SNAPPY


def _stored_form(bucket: Bucket, change: Change) -> Change:
    """Return the change as it is stored: with its collection, and removals with their time."""
    value, datatype = change.value, change.datatype
    if change.nmeta:
        # Older servers append metadata to the value, which has no meaning any more.
        value = value[: max(0, len(value) - change.nmeta)]
    value, datatype = stored_value(value, datatype)
    collection = DEFAULT_COLLECTION if change.collection_id is None else change.collection_id
    plain = {"opaque": 0, "frame_infos": (), "nmeta": 0, "collection_id": collection}
    changed = replace(change, value=value, datatype=datatype, **plain)  # type: ignore[arg-type]
    if isinstance(changed, Mutation):
        return replace(changed, lock_time=0, nru=0)
    delete_time = bucket.environment.now_s() if changed.delete_time is None else changed.delete_time
    return replace(changed, delete_time=delete_time)


def _append(bucket: Bucket, vbucket: int, frame: bytes, seqno: Seqno) -> None:
    start = bucket.pending.used_bytes
    bucket.pending.append(vbucket, frame)
    _enter(bucket, vbucket, bucket.pending.frames[start : bucket.pending.used_bytes], documents=1)
    bucket.numbers.high_seqnos[vbucket] = seqno


def _enter(bucket: Bucket, vbucket: int, run: Bytes, *, documents: int, expected: int = 0) -> None:
    bucket.index_changes(vbucket, run, documents=documents, commit=bucket.pending.number, expected=expected)
    decide_by_changes(bucket.undecided, vbucket, run, bucket.index.secret)


# --- kernels ------------------------------------------------------------------------------------------------------


@kernel_part
def _is_stored_form(run: Bytes, at: int, end: int, vbucket: int) -> bool:
    """Whether a sound frame is, except for its opaque, as the store would have written it."""
    opcode = run[at + 1]
    datatype = run[at + 5]
    if opcode == SYSTEM_EVENT or datatype & ~u8(JSON | SNAPPY | XATTR) or i64(load_u16(run, at + 6)) != vbucket:
        return False
    if opcode == MUTATION and (load_u32(run, at + 48) != 0 or load_u16(run, at + 52) != 0):
        return False
    key_bytes = i64(load_u16(run, at + 2))
    key_at = at + 24 + i64(run[at + 4])
    value_at = key_at + key_bytes
    if key_bytes - prefix_bytes(run, key_at, value_at) > KEY_BYTES_MAX or end - value_at > VALUE_BYTES_MAX:
        return False
    if datatype & SNAPPY:
        return not datatype & XATTR and 0 <= inflated_bytes(run, value_at, end) <= VALUE_BYTES_MAX
    return not datatype & XATTR or has_sound_xattrs(run, value_at, end)


@kernel
def _take(
    run: AnyBytes, vbucket: int, after_seqno: UInt64, end_seqno: UInt64, frames: Bytes, used: int
) -> tuple[int, int, int, int, int]:
    """Copy frames of `run` into `frames` from offset `used`, up to the first that can't be taken.

    Returns why and where in `run` it stopped, the new end of `frames`, the last seqno, and the number of documents.
    """
    at = i64(0)
    documents = i64(0)
    reached = after_seqno
    while at < len(run):
        end = frame_end(run, at)
        if end < 0 or run[at + 1] > EXPIRATION or not _is_stored_form(run, at, end, vbucket):
            return _OTHER, at, used, reached, documents
        seqno = load_u64(run, at + 24)
        if seqno <= reached or seqno > end_seqno:
            return _RANGE, at, used, reached, documents
        copy_bytes(frames, used, run, at, end - at)
        store_u32(frames, used + 12, u32(0))
        if run[at + 1] == MUTATION:
            frames[used + 54] = 0
        used += end - at
        reached = seqno
        documents += 1
        at = end
    return _END, at, used, reached, documents
