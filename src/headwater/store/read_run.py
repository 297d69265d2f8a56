"""The read kernel: a run of gets and sub-document look-ups, from request bytes to answers in one pass.

Key-value sessions call it with the bytes they have received. The kernel reads the requests in the receive buffer,
looks each key up in the index, finds the newest version in memory (`commits`) and writes the answer. It stops before
the first request that is anything else, or that needs a closer look, such as one for a locked or expired document, or
a path with escapes. The handlers of `node.kv` answer that one; they must always give the same result as the kernel.
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
    UInt64Rows,
    UInt64s,
    borrowed,
    bytes_at,
    copy_bytes,
    i64,
    inlined_part,
    kernel,
    load_u16,
    load_u32,
    load_u64,
    store_u32,
    u64,
)
from headwater.protocol.frames import HEADER_BYTES
from headwater.protocol.kernels.frame_runs import (
    GET,
    GETK,
    GETKQ,
    GETQ,
    JSON,
    RAW,
    REQUEST,
    SNAPPY,
    SUBDOC_GET,
    XATTR,
    write_response_header,
)
from headwater.protocol.kernels.json_check import is_json
from headwater.protocol.kernels.json_path import (
    NEEDS_CLOSER_LOOK,
    RESULT_BYTES,
    answer_lookup,
    count_paths,
    has_lookup_lengths,
    is_shallow_container,
)
from headwater.protocol.kernels.snappy import inflate_value, stated_length
from headwater.protocol.messages.dcp_streams import VBucketState
from headwater.protocol.numbers import KEY_BYTES_MAX
from headwater.protocol.status import Status
from headwater.protocol.values import Datatype
from headwater.store.bucket import Bucket
from headwater.store.commits import (
    COMMIT_LOW,
    NOT_FOUND,
    UNKNOWN_BLOCKS,
    UNKNOWN_DIRECTORY,
    BlockPlaces,
    in_blocks,
    in_pending,
    in_run,
    in_young,
)
from headwater.store.index import BASE, CAPACITY, CAS, DELETED, PLACE, REVISION, SEQNO, needs_closer_look, probe
from headwater.store.runs import EMPTY_RUN
from headwater.store.set_run import INFLATED_BYTES_MAX, UNKNOWN_COLLECTION, key_hash, known_collection
from headwater.store.vbuckets import ABSENT

ANSWERS_BYTES = 256 * 1024
"""Limit for the answers of one call of the kernel; a single large document may exceed it."""
WALKED_BYTES = 512 * 1024
"""Limit for the bytes that the look-ups of one call walk through: about a millisecond. A document that takes longer,
or is longer when inflated, is left to the handlers, which process it beside the event loop."""
_FLAGS_BYTES = 4
_STORED_FLAGS_AT = HEADER_BYTES + 16
"""In a stored mutation the flags follow seqno and revision."""
_ACTIVE = int(VBucketState.ACTIVE)
_SUCCESS = int(Status.SUCCESS)
_KEY_ENOENT = int(Status.KEY_ENOENT)
_NO_STARTS: Column = np.zeros(1, dtype=np.int64)
_NO_COMMIT = -1
_NO_ROOM, _UNUSUAL = -1, -2
"""Returned in place of the end of an answer."""


_END, _OTHER, _ROOM, _BLOCKS, _DIRECTORY = range(5)
"""Why the kernel stopped: no whole request is left; the next one is for the handlers; its answer has no room; the
blocks of its vbucket, or the directory of a block, must be entered first (`commits`)."""
_DURABLE, _IN_FLIGHT, _PENDING = range(3)
"""The newest change that the answers show: they wait until it is durable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRun:
    """What the kernel did."""

    consumed_bytes: int
    reads: int
    responses: bytes
    commit: int
    """The commit that has to be durable before the answers are sent; 0 for none."""
    walked_bytes: int
    """The bytes of documents that look-ups have walked through, which the size of their answers does not show."""


class DocumentReads:
    """The reads of one bucket: the kernel, and the memory it works with."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._places = BlockPlaces(len(bucket.numbers))
        self._scratch = np.empty(KEY_BYTES_MAX + 1, dtype=np.uint8)
        self._inflated = np.empty(INFLATED_BYTES_MAX, dtype=np.uint8)
        self._answers: Bytes = np.empty(ANSWERS_BYTES, dtype=np.uint8)

    def answer_run(self, data: Bytes, *, collections: bool, datatypes: Datatype) -> ReadRun:
        """Answer the gets and look-ups at the front of `data`, with about `ANSWERS_BYTES` of answers at most.

        `collections` says whether their keys have a collection id. `datatypes` are those that the client has
        negotiated: a compressed value is inflated for a client without Snappy.
        """
        engine = self._bucket.engine
        versions = engine.block_versions
        # Another thread may write blocks. The known addresses are valid for this view if no block was written while it
        # was taken: a freed page is not reused as long as an earlier view is open.
        version = versions[-1]
        answers, at, written, reads, shows, walked = self._answers, 0, 0, 0, _DURABLE, 0
        with engine.unchecked.view() as view:
            while versions[-1] == version:
                stop, at, written, reads, shows, walked, vbucket, wanted = self._answer(
                    data, at, answers, written, reads, shows, walked, versions,
                    collections=collections, datatypes=datatypes,
                )  # fmt: skip
                if stop == _BLOCKS:
                    of_vbucket = int(versions[vbucket])
                    if versions[-1] == version:
                        self._places.enter_blocks(view, vbucket, version=of_vbucket)
                elif stop == _ROOM and not written:
                    answers = np.empty(wanted, dtype=np.uint8)
                elif stop != _DIRECTORY or not self._places.enter_directory(vbucket, wanted):
                    break  # The handlers find a damaged directory as well, and handle it.
        commit = 0 if shows == _DURABLE else self._bucket.pending.number - (shows == _IN_FLIGHT)
        responses = answers[:written].tobytes()
        return ReadRun(consumed_bytes=at, reads=reads, responses=responses, commit=commit, walked_bytes=walked)

    def _answer(
        self, data: Bytes, at: int, answers: Bytes, written: int, reads: int, shows: int, walked: int, versions: Column,
        *, collections: bool, datatypes: Datatype,
    ) -> tuple[int, int, int, int, int, int, int, int]:  # fmt: skip
        bucket, numbers = self._bucket, self._bucket.vbuckets
        index, pending, in_flight = bucket.index, bucket.pending, bucket.in_flight
        # A request may have to wait for a durable write, which the session checks: for the kernel, vbuckets with
        # undecided durable writes are absent.
        prepares = bucket.prepares
        states = np.where(prepares.counts > 0, ABSENT, numbers.states) if prepares.held_bytes else numbers.states
        return _answer(
            data, at, collections, int(datatypes), bucket.environment.now_s(), bucket.collection_columns[0],
            self._scratch, self._inflated, index.slots, index.tables, index.secret, states,
            pending.frames, pending.vbuckets, pending.starts, pending.count, pending.used_bytes,
            pending.number & COMMIT_LOW,
            EMPTY_RUN if in_flight is None else in_flight.data,
            _NO_STARTS if in_flight is None else in_flight.group_starts,
            _NO_COMMIT if in_flight is None else in_flight.number & COMMIT_LOW,
            bucket.young.places, self._places.heads, versions, answers, written, reads, shows, walked,
        )  # fmt: skip


# --- the kernel ---------------------------------------------------------------------------------------------------


@kernel
def _answer(
    data: Bytes, at: int, collections: bool, datatypes: int, now_s: int, known: UInt32s, scratch: Bytes,
    inflated: Bytes, slots: UInt64Rows, tables: Int64Rows, secret: UInt64s, states: Bytes,
    pending: Bytes, item_vbuckets: UInt16s, item_starts: Int64s, items: int, pending_used: int, pending_low: int,
    flying: Bytes, flying_starts: Int64s, flying_low: int, young: Int64Rows, heads: Int64Rows, versions: Int64s,
    answers: Bytes, written: int, reads: int, shows: int, walked: int,
) -> tuple[int, int, int, int, int, int, int, int]:  # fmt: skip
    """Returns why and where it stopped, the end and the number of the answers, what they show, the bytes walked, and,
    if it stopped for lack of something, the vbucket, and the seqno or the room that it needs."""
    data = borrowed(data)
    known = borrowed(known)
    scratch = borrowed(scratch)
    inflated = borrowed(inflated)
    secret = borrowed(secret)
    pending = borrowed(pending)
    flying = borrowed(flying)
    answers = borrowed(answers)
    at = i64(at)
    written = i64(written)
    reads = i64(reads)
    shows = i64(shows)
    walked = i64(walked)
    vbucket = i64(0)
    wanted = i64(0)
    stop = _END
    while len(data) - at >= HEADER_BYTES and walked < WALKED_BYTES:
        vbucket = i64(load_u16(data, at + 6))
        if not _is_plain_read(data, at) or vbucket >= len(states) or states[vbucket] != _ACTIVE:
            stop = _OTHER
            break
        key_at = at + HEADER_BYTES + i64(data[at + 4])
        key_end = key_at + i64(load_u16(data, at + 2))
        end = at + HEADER_BYTES + i64(load_u32(data, at + 8))
        if end > len(data):
            break
        is_lookup = data[at + 1] >= SUBDOC_GET
        is_known = known_collection(data, key_at, key_end, collections, known) != UNKNOWN_COLLECTION
        if not is_known or (is_lookup and count_paths(data, at, key_end, end) == 0):
            stop = _OTHER
            break
        if len(answers) - written < HEADER_BYTES:
            stop = _ROOM
            break
        high, low = key_hash(data, key_at, key_end, collections, scratch, secret)
        capacity = tables[vbucket, CAPACITY]
        slot = probe(slots, tables[vbucket, BASE], capacity, high, low) if capacity else i64(-1)
        if slot < 0:
            written = _write_miss(data, at, answers, written)
            reads += 1
            at = end
            continue
        if needs_closer_look(slots[slot, REVISION], slots[slot, PLACE], now_s):
            stop = _OTHER
            break
        commit_low = i64(slots[slot, PLACE] & u64(COMMIT_LOW))
        if slots[slot, REVISION] & u64(DELETED):
            answer_end = _write_miss(data, at, answers, written)
        else:
            wanted = i64(slots[slot, SEQNO])
            address, frame_bytes = _locate(
                commit_low, vbucket, wanted, pending, item_vbuckets, item_starts, items, pending_used, pending_low,
                flying, flying_starts, flying_low, young, heads, versions,
            )  # fmt: skip
            if address <= NOT_FOUND:
                stop = _BLOCKS if address == UNKNOWN_BLOCKS else _DIRECTORY if address == UNKNOWN_DIRECTORY else _OTHER
                break
            frame = bytes_at(address, frame_bytes)
            if is_lookup:
                answer_end = _write_lookup(data, at, key_end, end, slots[slot, CAS], frame, inflated, answers, written)
            else:
                answer_end = _write_hit(data, at, slots[slot, CAS], frame, datatypes, answers, written)
            if is_lookup and answer_end >= 0:
                walked += len(frame) * (1 + count_paths(data, at, key_end, end))
        if answer_end < 0:
            stop = _ROOM if answer_end == _NO_ROOM else _OTHER
            wanted = _room_for(frame, count_paths(data, at, key_end, end) if is_lookup else i64(0))
            break
        if commit_low == pending_low:
            shows = i64(_PENDING)
        elif commit_low == flying_low:
            shows = max(shows, i64(_IN_FLIGHT))
        written = answer_end
        reads += 1
        at = end
    return stop, at, written, reads, shows, walked, vbucket, wanted


@inlined_part
def _locate(
    commit_low: int, vbucket: int, seqno: int, pending: Bytes, item_vbuckets: Column, item_starts: Column, items: int,
    pending_used: int, pending_low: int, flying: Bytes, flying_starts: Column, flying_low: int, young: Column,
    heads: Column, versions: Column,
) -> tuple[int, int]:  # fmt: skip
    """Return the address and the length of a stored frame, or why there is none yet."""
    if commit_low == pending_low:
        address, frame_bytes = in_pending(pending, item_vbuckets, item_starts, items, pending_used, vbucket, seqno)
    elif commit_low == flying_low:
        run_at, run_end = flying_starts[vbucket], flying_starts[vbucket + 1]
        address, frame_bytes = in_run(flying.ctypes.data + run_at, run_end - run_at, seqno)
    else:
        address, frame_bytes = in_young(young, commit_low, vbucket, seqno)
    if address == NOT_FOUND:
        address, frame_bytes = in_blocks(heads, versions[vbucket], vbucket, seqno)
    return address, frame_bytes


@inlined_part
def _is_plain_read(data: Bytes, at: int) -> bool:
    """Whether the header at `at` is that of a get or a look-up with sound lengths, and with nothing unusual."""
    opcode = data[at + 1]
    if data[at] != REQUEST or data[at + 5] != RAW or load_u64(data, at + 16) != 0:
        return False
    key_bytes, body_bytes = i64(load_u16(data, at + 2)), i64(load_u32(data, at + 8))
    if opcode == GET or opcode == GETQ or opcode == GETK or opcode == GETKQ:  # noqa: SIM109
        return bool(data[at + 4] == 0 and body_bytes == key_bytes)
    extras_bytes = i64(data[at + 4])
    return bool(extras_bytes + key_bytes < body_bytes and has_lookup_lengths(opcode, extras_bytes, body_bytes))


@inlined_part
def _write_miss(data: Bytes, at: int, answers: Bytes, to: int) -> int:
    """Answer that the document does not exist, unless the get at `at` is quiet. Returns where the answer ends."""
    if data[at + 1] == GETQ or data[at + 1] == GETKQ:
        return to
    write_response_header(data, at, 0, 0, RAW, _KEY_ENOENT, 0, u64(0), answers, to)
    return to + HEADER_BYTES


@inlined_part
def _write_hit(data: Bytes, at: int, cas: int, frame: Bytes, datatypes: int, answers: Bytes, to: int) -> int:
    """Answer the get at `at` from a stored frame. Returns where the answer ends, or why there is none."""
    datatype = i64(frame[5])
    value_at = HEADER_BYTES + i64(frame[4]) + i64(load_u16(frame, 2))
    if datatype & XATTR:
        # Plain commands do not see extended attributes, which precede the body.
        if len(frame) - value_at < 4 or i64(load_u32(frame, value_at)) > len(frame) - value_at - 4:
            return _UNUSUAL
        value_at += 4 + i64(load_u32(frame, value_at))
    value_bytes = i64(len(frame) - value_at)
    is_inflated = datatype & SNAPPY and not datatypes & SNAPPY
    if is_inflated:
        value_bytes, value_at = stated_length(frame, value_at, i64(len(frame)))
        datatype &= ~SNAPPY
        if value_bytes > WALKED_BYTES:
            return _UNUSUAL
    key_bytes = i64(load_u16(data, at + 2)) if data[at + 1] >= GETK else i64(0)
    body_bytes: int = _FLAGS_BYTES + key_bytes + value_bytes
    if len(answers) - to < HEADER_BYTES + body_bytes:
        return _NO_ROOM
    write_response_header(
        data, at, key_bytes, _FLAGS_BYTES, datatype & datatypes, _SUCCESS, body_bytes, cas, answers, to
    )
    store_u32(answers, to + HEADER_BYTES, load_u32(frame, _STORED_FLAGS_AT))
    key_to = to + HEADER_BYTES + _FLAGS_BYTES
    value_to = key_to + key_bytes
    copy_bytes(answers, key_to, data, at + HEADER_BYTES, key_bytes)
    if not is_inflated:
        copy_bytes(answers, value_to, frame, value_at, value_bytes)
    elif not inflate_value(frame, value_at, i64(len(frame)), answers, value_to, value_to + value_bytes):
        return _UNUSUAL
    return to + HEADER_BYTES + body_bytes


@inlined_part
def _room_for(frame: Bytes, paths: int) -> int:
    """Return an upper bound for the answer with the document of a frame: its extras are longer than its flags, and
    every path may select all of it."""
    value_at = HEADER_BYTES + i64(frame[4]) + i64(load_u16(frame, 2))
    inflated_bytes: int = stated_length(frame, value_at, i64(len(frame)))[0] if frame[5] & SNAPPY else i64(0)
    return HEADER_BYTES + (paths + 1) * (len(frame) + inflated_bytes + RESULT_BYTES)


@inlined_part
def _write_lookup(
    data: Bytes, at: int, value_at: int, end: int, cas: int, frame: Bytes, inflated: Bytes, answers: Bytes, to: int
) -> int:
    """Answer the look-up at `at` from a stored frame. Returns where the answer ends, or why there is none."""
    body_at = HEADER_BYTES + i64(frame[4]) + i64(load_u16(frame, 2))
    body_end = i64(len(frame))
    text = frame
    if frame[5] == JSON | SNAPPY:
        length, elements_at = stated_length(frame, body_at, body_end)
        if length < 0 or length > len(inflated) or not inflate_value(frame, elements_at, body_end, inflated, 0, length):
            return _UNUSUAL
        text, body_at, body_end = inflated, i64(0), length
    elif frame[5] != JSON or body_end - body_at > WALKED_BYTES:
        return _UNUSUAL
    if not is_json(text, body_at, body_end) or not is_shallow_container(text, body_at, body_end):
        return _UNUSUAL
    if len(answers) - to < _room_for(frame, count_paths(data, at, value_at, end)):
        return _NO_ROOM
    answer_end: int = answer_lookup(data, at, value_at, end, cas, text, body_at, body_end, answers, to)
    return _UNUSUAL if answer_end == NEEDS_CLOSER_LOOK else answer_end
