"""The set kernel: a run of plain sets, from request bytes to stored frames and responses in one pass.

Key-value sessions call it with the bytes they have received. A bulk load is one set after the other. The kernel reads
them in the receive buffer, looks each key up in the index, assigns seqno, CAS and revision, writes the frame that will
be stored and streamed into the pending commit and the response into the reply, and enters the new version in the
index. It stops before the first request that is anything else, or that needs a closer look. The handlers of `node.kv`
answer that one; they must always give the same result as the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.kernels.memory import (
    Bytes,
    Column,
    Int64Rows,
    Int64s,
    UInt16s,
    UInt32s,
    UInt64,
    UInt64Rows,
    UInt64s,
    borrowed,
    copy_bytes,
    i64,
    inlined_part,
    kernel,
    load_u16,
    load_u32,
    load_u64,
    store_u16,
    store_u32,
    store_u64,
    u16,
    u32,
    u64,
)
from headwater.kernels.siphash import siphash128
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.kernels.frame_runs import (
    JSON,
    MUTATION,
    MUTATION_EXTRAS_BYTES,
    RAW,
    REQUEST,
    SET,
    SETQ,
    SNAPPY,
    collection_id,
    prefix_bytes,
    write_response_header,
)
from headwater.protocol.kernels.json_check import is_json
from headwater.protocol.kernels.snappy import inflate_value, stated_length
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import DEFAULT_COLLECTION, KEY_BYTES_MAX, RELATIVE_EXPIRY_S_MAX
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from headwater.store.index import (
    BASE,
    CAPACITY,
    CAS,
    COUNT,
    HAS_XATTRS,
    HASH_HIGH,
    HASH_LOW,
    PLACE,
    REVISION,
    SEQNO,
    is_full,
    needs_closer_look,
    probe,
)
from headwater.store.vbuckets import ABSENT

_TIME_S_MAX = 2**32 - 1
_SET_EXTRAS_BYTES = 8
_KEY_OFFSET = HEADER_BYTES + _SET_EXTRAS_BYTES
_REQUEST_BYTES_MIN = _KEY_OFFSET + 1
_GROWTH_BYTES = HEADER_BYTES + MUTATION_EXTRAS_BYTES + 1 - _KEY_OFFSET
"""A stored frame is this much longer than its request, with a byte for the collection id that older clients omit."""
_GROWTHS_MAX = 8
"""How many tables of the index one run may grow. The tables of all vbuckets get full at about the same time, and
growing one takes a while: further sets wait for the next run."""
INFLATED_BYTES_MAX = 64 * 1024
"""Compressed values are inflated to be checked or searched; one that becomes longer is left to the handlers."""
PLAIN_VALUE_BYTES_MAX = 512 * 1024
"""Checking whether a value is JSON takes up to four milliseconds for a megabyte. A longer one is left to the handlers,
which check it beside the event loop."""
_NO_DATATYPE = -1
_TOKEN_BYTES = 16
_RESPONSE_BYTES_MAX = HEADER_BYTES + _TOKEN_BYTES

_ACTIVE = int(VBucketState.ACTIVE)
_SUCCESS = int(Status.SUCCESS)
_DEFAULT_COLLECTION = int(DEFAULT_COLLECTION)
UNKNOWN_COLLECTION = -1


_END, _OTHER, _GROW = range(3)
"""Why the kernel stopped: no whole request is left; the next is for the handlers; the index of a vbucket is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRun:
    """What the kernel did."""

    consumed_bytes: int
    sets: int
    responses: bytes
    is_cut_short: bool = False
    """Whether there may be more sets, which are left for the next turn."""


def apply_set_run(
    bucket: Bucket, data: Bytes, *, collections: bool, mutation_tokens: bool, now_ns: int,
    datatypes: Datatype = Datatype.JSON,
) -> SetRun:  # fmt: skip
    """Apply the plain sets at the front of `data`. `collections` says whether their keys have a collection id.

    `datatypes` are those that the client has negotiated. A value that arrives compressed is stored compressed.
    """
    index, numbers, pending = bucket.index, bucket.numbers, bucket.pending
    requests_max = len(data) // _REQUEST_BYTES_MIN
    pending.reserve(len(data) + requests_max * _GROWTH_BYTES, requests_max)
    responses = np.empty(requests_max * _RESPONSE_BYTES_MAX, dtype=np.uint8)
    scratch = np.empty(KEY_BYTES_MAX + 1, dtype=np.uint8)
    inflated = np.empty(INFLATED_BYTES_MAX if datatypes & Datatype.SNAPPY else 0, dtype=np.uint8)
    known, max_ttls = bucket.collection_columns
    # With undecided durable writes each key has to be checked, so for the kernel these vbuckets are absent.
    undecided = bucket.prepares.counts
    states = np.where(undecided > 0, ABSENT, numbers.states) if undecided.any() else numbers.states
    at = written = 0
    first = pending.count
    for _ in range(_GROWTHS_MAX):
        outcome = _apply(
            data, at, collections, mutation_tokens, u64(now_ns), int(datatypes), known, max_ttls, scratch, inflated,
            index.slots, index.tables, index.secret,
            states, numbers.vbuuids, numbers.high_seqnos, numbers.max_cas, numbers.deleted_revs,
            numbers.superseded,
            pending.frames, pending.used_bytes, pending.vbuckets, pending.starts, pending.count,
            u64(pending.number & 0xFFFFFFFF), responses, written,
        )  # fmt: skip
        stop, at, pending.used_bytes, pending.count, written, full = outcome
        if stop != _GROW:
            break
        index.make_room(full, 1)
    return SetRun(
        consumed_bytes=at,
        sets=pending.count - first,
        responses=responses[:written].tobytes(),
        is_cut_short=stop == _GROW,
    )


@inlined_part
def _expiry(asked: int, now_s: int, max_ttl: int) -> int:
    """Return the time at which a document expires, 0 for never."""
    expiry = asked
    if asked != 0 and asked <= RELATIVE_EXPIRY_S_MAX:
        expiry = asked + now_s
    if max_ttl != 0 and (expiry == 0 or expiry > now_s + max_ttl):
        expiry = now_s + max_ttl
    return min(expiry, i64(_TIME_S_MAX))


@kernel
def _apply(
    data: Bytes, at: int, collections: bool, mutation_tokens: bool, now_ns: UInt64, datatypes: int,
    known: UInt32s, max_ttls: UInt32s, scratch: Bytes, inflated: Bytes,
    slots: UInt64Rows, tables: Int64Rows, secret: UInt64s,
    states: Bytes, vbuuids: UInt64s, high_seqnos: UInt64s, max_cas: UInt64s, deleted_revs: UInt64s, superseded: Int64s,
    frames: Bytes, used: int, item_vbuckets: UInt16s, item_starts: Int64s, count: int,
    commit: UInt64, responses: Bytes, written: int,
) -> tuple[int, int, int, int, int, int]:  # fmt: skip
    """Returns why and where it stopped, the ends of frames, items and responses, and the last vbucket it looked at."""
    # The parts of the kernel get these arrays once per request.
    data = borrowed(data)
    known = borrowed(known)
    scratch = borrowed(scratch)
    inflated = borrowed(inflated)
    secret = borrowed(secret)
    frames = borrowed(frames)
    responses = borrowed(responses)
    at = i64(at)
    used = i64(used)
    count = i64(count)
    written = i64(written)
    now_s = i64(now_ns // u64(1_000_000_000))
    vbucket = i64(0)
    stop = _END
    while len(data) - at >= HEADER_BYTES:
        vbucket = i64(load_u16(data, at + 6))
        if not _is_plain_set(data, at, datatypes) or vbucket >= len(states) or states[vbucket] != _ACTIVE:
            stop = _OTHER
            break
        key_at = at + _KEY_OFFSET
        value_at = key_at + i64(load_u16(data, at + 2))
        end = at + HEADER_BYTES + i64(load_u32(data, at + 8))
        if end > len(data):
            break
        collection = known_collection(data, key_at, value_at, collections, known)
        datatype = _stored_datatype(data, at, value_at, end, inflated)
        if collection == UNKNOWN_COLLECTION or datatype == _NO_DATATYPE:
            stop = _OTHER
            break
        if is_full(tables, vbucket):
            stop = _GROW
            break
        high, low = key_hash(data, key_at, value_at, collections, scratch, secret)
        slot = probe(slots, tables[vbucket, BASE], tables[vbucket, CAPACITY], high, low)
        if slot >= 0:
            if slots[slot, REVISION] & u64(HAS_XATTRS) or needs_closer_look(
                slots[slot, REVISION], slots[slot, PLACE], now_s
            ):
                stop = _OTHER
                break
            rev = (slots[slot, REVISION] >> u64(8)) + u64(1)
            superseded[vbucket] += 1
        else:
            slot = ~slot
            rev = deleted_revs[vbucket] + u64(1)
            slots[slot, HASH_HIGH] = high
            slots[slot, HASH_LOW] = low
            tables[vbucket, COUNT] += 1

        expiry = _expiry(i64(load_u32(data, at + 28)), now_s, i64(max_ttls[collection]))
        seqno = high_seqnos[vbucket] + u64(1)
        high_seqnos[vbucket] = seqno
        cas = max(now_ns & ~u64(0xFFFF), max_cas[vbucket] + u64(1))
        max_cas[vbucket] = cas
        slots[slot, SEQNO] = seqno
        slots[slot, CAS] = cas
        slots[slot, REVISION] = rev << u64(8)
        slots[slot, PLACE] = (u64(expiry) << u64(32)) | commit

        item_vbuckets[count] = vbucket
        item_starts[count] = used
        count += 1
        used = _write_mutation(data, at, value_at, end, collections, datatype, seqno, cas, rev, expiry, frames, used)
        if data[at + 1] == SET:
            written = _write_response(data, at, cas, mutation_tokens, vbuuids[vbucket], seqno, responses, written)
        at = end
    return stop, at, used, count, written, vbucket


@inlined_part
def _is_plain_set(data: Bytes, at: int, datatypes: int) -> bool:
    """Whether the header at `at` is that of a set with sound lengths, without a CAS, and of a negotiated datatype."""
    if data[at] != REQUEST or (data[at + 1] != SET and data[at + 1] != SETQ):
        return False
    if data[at + 4] != _SET_EXTRAS_BYTES or i64(data[at + 5]) & ~datatypes or load_u64(data, at + 16) != 0:
        return False
    value_bytes = i64(load_u32(data, at + 8)) - _SET_EXTRAS_BYTES - i64(load_u16(data, at + 2))
    return bool(0 <= value_bytes <= PLAIN_VALUE_BYTES_MAX)


@inlined_part
def _stored_datatype(data: Bytes, at: int, value_at: int, end: int, inflated: Bytes) -> int:
    """Return the datatype of a set's stored value; `_NO_DATATYPE` for a compressed one that is long or not sound.

    Whether it is JSON is checked: what the client says does not count.
    """
    if not data[at + 5] & SNAPPY:
        return JSON if is_json(data, value_at, end) else RAW
    length, elements_at = stated_length(data, value_at, end)
    if length < 0 or length > len(inflated) or not inflate_value(data, elements_at, end, inflated, 0, length):
        return _NO_DATATYPE
    return SNAPPY | JSON if is_json(inflated, 0, length) else SNAPPY


@inlined_part
def known_collection(data: Bytes, key_at: int, key_end: int, collections: bool, known: Column) -> int:
    """Return the position of a sound key's collection among the known ones, or `UNKNOWN_COLLECTION`."""
    key_bytes = key_end - key_at
    if not collections:
        is_sound = 1 <= key_bytes <= KEY_BYTES_MAX and len(known) != 0 and known[0] == _DEFAULT_COLLECTION
        return 0 if is_sound else UNKNOWN_COLLECTION
    prefix = prefix_bytes(data, key_at, key_end)
    if prefix == 0 or key_bytes - prefix < 1 or key_bytes - prefix > KEY_BYTES_MAX:
        return UNKNOWN_COLLECTION
    collection = collection_id(data, key_at)
    position = np.searchsorted(known, u32(collection))
    return position if position < len(known) and known[position] == collection else UNKNOWN_COLLECTION


@inlined_part
def key_hash(
    data: Bytes, key_at: int, key_end: int, collections: bool, scratch: Bytes, secret: Column
) -> tuple[int, int]:
    """Return the hash of the key as it is stored, with its collection id."""
    key_bytes = key_end - key_at
    if collections:
        return siphash128(data, key_at, key_bytes, secret[0], secret[1])
    scratch[0] = _DEFAULT_COLLECTION
    copy_bytes(scratch, i64(1), data, key_at, key_bytes)
    return siphash128(scratch, 0, key_bytes + 1, secret[0], secret[1])


@inlined_part
def _write_mutation(
    data: Bytes, at: int, value_at: int, end: int, collections: bool, datatype: int, seqno: int, cas: int, rev: int,
    expiry: int, frames: Bytes, to: int,
) -> int:  # fmt: skip
    """Write the request at `at` as it is stored and streamed. Returns where that ends."""
    key_at = at + _KEY_OFFSET
    prefix = 0 if collections else 1
    stored_key_bytes = value_at - key_at + prefix
    frames[to] = REQUEST
    frames[to + 1] = MUTATION
    store_u16(frames, to + 2, u16(stored_key_bytes))
    frames[to + 4] = MUTATION_EXTRAS_BYTES
    frames[to + 5] = datatype
    store_u16(frames, to + 6, load_u16(data, at + 6))
    store_u32(frames, to + 8, u32(MUTATION_EXTRAS_BYTES + stored_key_bytes + end - value_at))
    store_u32(frames, to + 12, u32(0))
    store_u64(frames, to + 16, cas)
    store_u64(frames, to + 24, seqno)
    store_u64(frames, to + 32, rev)
    store_u32(frames, to + 40, load_u32(data, at + 24))
    store_u32(frames, to + 44, u32(expiry))
    # No lock time, no metadata, and no value for how recently the document was used.
    store_u32(frames, to + 48, u32(0))
    store_u16(frames, to + 52, u16(0))
    frames[to + 54] = 0
    to += HEADER_BYTES + MUTATION_EXTRAS_BYTES
    if not collections:
        frames[to] = _DEFAULT_COLLECTION
    copy_bytes(frames, to + prefix, data, key_at, end - key_at)
    return to + prefix + end - key_at


@inlined_part
def _write_response(
    data: Bytes, at: int, cas: int, mutation_tokens: bool, vbuuid: int, seqno: int, responses: Bytes, to: int
) -> int:
    """Answer that the set at `at` succeeded. Returns where the response ends."""
    token_bytes = _TOKEN_BYTES if mutation_tokens else 0
    write_response_header(data, at, 0, token_bytes, RAW, _SUCCESS, token_bytes, cas, responses, to)
    if mutation_tokens:
        store_u64(responses, to + 24, vbuuid)
        store_u64(responses, to + 32, seqno)
    return to + HEADER_BYTES + token_bytes
