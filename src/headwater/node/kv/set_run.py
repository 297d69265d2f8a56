"""The set kernel: a run of plain sets, from request bytes to stored frames and responses in one pass.

A bulk load is one set after the other. The kernel takes them as they lie in the receive buffer, looks each key up in
the index, gives it seqno, CAS and revision, writes the frame that will be stored and streamed into the pending commit
and the response into the reply, and enters the new version in the index. It stops in front of the first request that
is anything else, or that needs a closer look, and leaves it to the handlers.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from headwater.node.kv.service import BucketService
from headwater.protocol.kernels.collection_prefix import collection_id, prefix_bytes
from headwater.protocol.kernels.json_check import is_json
from headwater.protocol.kernels.memory import (
    Bytes,
    Column,
    copy_bytes,
    i64,
    kernel,
    load_u16,
    load_u32,
    load_u64,
    store_u16,
    store_u32,
    store_u64,
    u8,
    u16,
    u32,
    u64,
)
from headwater.protocol.kernels.siphash import siphash128
from headwater.protocol.limits import KEY_BYTES_MAX, VALUE_BYTES_MAX
from headwater.store.index import BASE, CAPACITY, CAS, COUNT, HASH_HIGH, HASH_LOW, PLACE, REVISION, SEQNO, probe
from headwater.store.vbuckets import ABSENT

RELATIVE_EXPIRY_S_MAX = 30 * 24 * 3600
"""An expiry up to this counts from now; a larger one is a time."""

_TIME_S_MAX = 2**32 - 1
_REQUEST_BYTES_MIN = 24 + 8 + 1
_GROWTH_BYTES = 24 + 31 + 1 - (24 + 8)
"""A stored frame is this much longer than its request, one byte of it the collection id of an older client."""
_RESPONSE_BYTES_MAX = 24 + 16


class Stop(IntEnum):
    """Why the kernel stopped."""

    END = 0
    """No whole request is left."""
    OTHER = 1
    """The next request is for the handlers."""
    GROW = 2
    """The index of a vbucket is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRun:
    """What the kernel did."""

    consumed_bytes: int
    sets: int
    responses: bytes


def apply_set_run(
    service: BucketService, data: Bytes, *, collections: bool, mutation_tokens: bool, now_ns: int
) -> SetRun:
    """Handle the plain sets at the front of `data`."""
    bucket = service.bucket
    index, numbers, pending = bucket.index, bucket.vbuckets, bucket.pending
    requests_max = len(data) // _REQUEST_BYTES_MIN
    pending.reserve(len(data) + requests_max * _GROWTH_BYTES, requests_max)
    responses = np.empty(requests_max * _RESPONSE_BYTES_MAX, dtype=np.uint8)
    scratch = np.empty(KEY_BYTES_MAX + 1, dtype=np.uint8)
    known, max_ttls = _collections(service)
    # Where durable writes are undecided, each key has to be looked at: to the kernel these vbuckets are not here.
    undecided = bucket.prepares.counts
    states = np.where(undecided > 0, ABSENT, numbers.states) if undecided.any() else numbers.states
    at = written = sets = 0
    while True:
        outcome = _apply(
            data, at, collections, mutation_tokens, u64(now_ns), known, max_ttls, scratch,
            index.slots, index.tables, index.secret,
            states, numbers.vbuuids, numbers.high_seqnos, numbers.max_cas, numbers.deleted_revs,
            numbers.superseded,
            pending.frames, pending.used_bytes, pending.vbuckets, pending.starts, pending.count,
            u64(pending.number & 0xFFFFFFFF), responses, written,
        )  # fmt: skip
        stop, at, done, pending.used_bytes, pending.count, written, full = outcome
        sets += done
        if stop != Stop.GROW:
            break
        index.make_room(full, 1)
    return SetRun(consumed_bytes=at, sets=sets, responses=responses[:written].tobytes())


def _collections(service: BucketService) -> tuple[Column, Column]:
    """The ids of the collections, ascending, and the longest life of a document in each; 0 for no bound."""
    collections = sorted((c.id, c.max_ttl_s or 0) for _, c in service.bucket.manifest.collections())
    ids, max_ttls = zip(*collections, strict=True) if collections else ((), ())
    return np.array(ids, dtype=np.uint32), np.array(max_ttls, dtype=np.uint32)


@kernel
def _expiry(asked: int, now_s: int, max_ttl: int) -> int:
    """The time at which a document expires, 0 for never."""
    expiry = asked
    if asked != 0 and asked <= RELATIVE_EXPIRY_S_MAX:
        expiry = asked + now_s
    if max_ttl != 0 and (expiry == 0 or expiry > now_s + max_ttl):
        expiry = now_s + max_ttl
    return min(expiry, i64(_TIME_S_MAX))


@kernel
def _apply(
    data: Bytes, at: int, collections: bool, mutation_tokens: bool, now_ns: int,
    known: Column, max_ttls: Column, scratch: Bytes,
    slots: Column, tables: Column, secret: Column,
    states: Column, vbuuids: Column, high_seqnos: Column, max_cas: Column, deleted_revs: Column, superseded: Column,
    frames: Bytes, used: int, item_vbuckets: Column, item_starts: Column, count: int,
    commit: int, responses: Bytes, written: int,
) -> tuple[int, int, int, int, int, int, int]:  # fmt: skip
    at = i64(at)
    used = i64(used)
    count = i64(count)
    written = i64(written)
    sets = i64(0)
    now_s = i64(now_ns // u64(1_000_000_000))
    end = len(data)
    while True:
        if end - at < 24:
            return 0, at, sets, used, count, written, 0
        opcode = data[at + 1]
        if data[at] != 0x80 or (opcode != 0x01 and opcode != 0x11) or data[at + 4] != 8 or data[at + 5] > 1:
            return 1, at, sets, used, count, written, 0
        key_bytes = i64(load_u16(data, at + 2))
        body_bytes = i64(load_u32(data, at + 8))
        vbucket = i64(load_u16(data, at + 6))
        value_bytes = body_bytes - 8 - key_bytes
        if value_bytes < 0 or value_bytes > VALUE_BYTES_MAX or load_u64(data, at + 16) != 0:
            return 1, at, sets, used, count, written, 0
        if vbucket >= len(states) or states[vbucket] != 1:
            return 1, at, sets, used, count, written, 0
        frame_end = at + 24 + body_bytes
        if frame_end > end:
            return 0, at, sets, used, count, written, 0

        # The key as it is stored: with its collection id.
        key_at = at + 32
        if collections:
            prefix = prefix_bytes(data, key_at, key_at + key_bytes)
            if prefix == 0 or key_bytes - prefix < 1 or key_bytes - prefix > KEY_BYTES_MAX:
                return 1, at, sets, used, count, written, 0
            position = np.searchsorted(known, u32(collection_id(data, key_at)))
            if position == len(known) or known[position] != collection_id(data, key_at):
                return 1, at, sets, used, count, written, 0
            max_ttl = i64(max_ttls[position])
            high, low = siphash128(data, key_at, key_bytes, secret[0], secret[1])
            stored_key_bytes = key_bytes
        else:
            if key_bytes < 1 or key_bytes > KEY_BYTES_MAX or len(known) == 0 or known[0] != 0:
                return 1, at, sets, used, count, written, 0
            max_ttl = i64(max_ttls[0])
            scratch[0] = 0
            copy_bytes(scratch, i64(1), data, key_at, key_bytes)
            high, low = siphash128(scratch, 0, key_bytes + 1, secret[0], secret[1])
            stored_key_bytes = key_bytes + 1

        capacity = tables[vbucket, CAPACITY]
        if (tables[vbucket, COUNT] + 1) * 5 > capacity * 4:
            return 2, at, sets, used, count, written, vbucket
        slot = probe(slots, tables[vbucket, BASE], capacity, high, low)
        if slot >= 0:
            if slots[slot, REVISION] & u64(0x06):
                # Locked, or with extended attributes: both need a closer look.
                return 1, at, sets, used, count, written, 0
            rev = (slots[slot, REVISION] >> u64(8)) + u64(1)
            superseded[vbucket] += 1
        else:
            slot = ~slot
            rev = deleted_revs[vbucket] + u64(1)
            slots[slot, HASH_HIGH] = high
            slots[slot, HASH_LOW] = low
            tables[vbucket, COUNT] += 1

        value_at = key_at + key_bytes
        datatype = u8(1) if is_json(data, value_at, frame_end) else u8(0)
        expiry = _expiry(i64(load_u32(data, at + 28)), now_s, max_ttl)
        seqno = high_seqnos[vbucket] + u64(1)
        high_seqnos[vbucket] = seqno
        cas = max(now_ns & ~u64(0xFFFF), max_cas[vbucket] + u64(1))
        max_cas[vbucket] = cas
        slots[slot, SEQNO] = seqno
        slots[slot, CAS] = cas
        slots[slot, REVISION] = rev << u64(8)
        slots[slot, PLACE] = (u64(expiry) << u64(32)) | commit

        # The mutation as it is stored and streamed.
        item_vbuckets[count] = vbucket
        item_starts[count] = used
        count += 1
        frames[used] = 0x80
        frames[used + 1] = 0x57
        store_u16(frames, used + 2, u16(stored_key_bytes))
        frames[used + 4] = 31
        frames[used + 5] = datatype
        store_u16(frames, used + 6, u16(vbucket))
        store_u32(frames, used + 8, u32(31 + stored_key_bytes + value_bytes))
        store_u32(frames, used + 12, u32(0))
        store_u64(frames, used + 16, cas)
        store_u64(frames, used + 24, seqno)
        store_u64(frames, used + 32, rev)
        store_u32(frames, used + 40, load_u32(data, at + 24))
        store_u32(frames, used + 44, u32(expiry))
        store_u32(frames, used + 48, u32(0))
        store_u16(frames, used + 52, u16(0))
        frames[used + 54] = 0
        used += 55
        if not collections:
            frames[used] = 0
            used += 1
        copy_bytes(frames, used, data, key_at, key_bytes + value_bytes)
        used += key_bytes + value_bytes

        if opcode == 0x01:
            token_bytes = 16 if mutation_tokens else 0
            responses[written] = 0x81
            responses[written + 1] = 0x01
            store_u16(responses, written + 2, u16(0))
            responses[written + 4] = token_bytes
            responses[written + 5] = 0
            store_u16(responses, written + 6, u16(0))
            store_u32(responses, written + 8, u32(token_bytes))
            store_u32(responses, written + 12, load_u32(data, at + 12))
            store_u64(responses, written + 16, cas)
            written += 24
            if mutation_tokens:
                store_u64(responses, written, vbuuids[vbucket])
                store_u64(responses, written + 8, seqno)
                written += 16
        sets += 1
        at = frame_end
