"""The hot path of bulk writing: columns of documents to SET frames, and their answers, without an object per item.

The kernels here are the loader's half of the codec. The typed messages are their oracle: a property test checks
that the frames equal those of `messages.documents.Set`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from headwater.errors import BadMagic, FrameTooLarge, LengthMismatch, RemoteProtocolError, UnexpectedMessage
from headwater.kernels.memory import (
    ByteRows,
    Bytes,
    Column,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    UInt16s,
    UInt32,
    UInt32s,
    copy_bytes,
    i64,
    kernel,
    load_u16,
    load_u32,
    read_only,
    store_u16,
    store_u32,
    u16,
    u32,
)
from headwater.protocol.cluster_config import VBUCKETS_MAX
from headwater.protocol.frames import encode_collection_id
from headwater.protocol.numbers import LEB128_BYTES_MAX, CollectionId

# --- the vbuckets of many keys ----------------------------------------------------------------------------------------
#
# `cluster_map` has the same rule for a single key. Planners and tasks that send nothing load only that, because
# this version needs the compiler of the kernels.


def _crc32_table() -> Column:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ 0xEDB88320, table >> 1).astype(np.uint32)
    return table


CRC32_TABLE = _crc32_table()


def vbuckets_of(keys: Bytes, ends: Column, vbuckets: int) -> Column:
    """Return the vbuckets of many concatenated keys, each up to its end."""
    if not 0 < vbuckets <= VBUCKETS_MAX:
        raise ValueError(f"{vbuckets} vbuckets")
    found = np.empty(len(ends), dtype=np.uint16)
    _hash_keys(read_only(keys), ends, vbuckets, CRC32_TABLE, found)
    return found


@kernel
def _hash_keys(keys: ReadOnlyBytes, ends: Int64s, vbuckets: int, table: UInt32s, found: UInt16s) -> None:
    at = i64(0)
    for item in range(len(ends)):
        crc = u32(0xFFFFFFFF)
        while at < ends[item]:
            crc = table[(crc ^ keys[at]) & u32(0xFF)] ^ (crc >> u32(8))
            at += 1
        found[item] = (i64(~crc) >> 16 & 0x7FFF) % vbuckets


JSON_FLAGS = 0x02000000
"""The flags that mark a document as JSON for every Couchbase SDK ("common flags")."""

ANSWER_BODY_BYTES_MAX = 8 * 1024 * 1024
"""A success has at most 16 bytes. A refusal by the wrong node may contain the cluster config."""

_HEADER_AND_EXTRAS_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Documents to write, as columns."""

    keys: Bytes
    """The concatenated keys, without collection ids."""
    key_ends: Column
    values: Bytes
    value_starts: Column
    value_ends: Column

    def __len__(self) -> int:
        return len(self.key_ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptDocuments(Documents):
    """Documents with their own flags and expiries."""

    flags: Column
    expiries: Column

    def stamp(self, frames: SetFrames) -> None:
        """Write flags and expiries into the SETs encoded from these documents."""
        for at, numbers in ((24, self.flags), (28, self.expiries)):
            at_bytes = frames.starts[:-1, np.newaxis] + np.arange(at, at + 4)
            frames.data[at_bytes] = numbers.astype(">u4").view(np.uint8).reshape(-1, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetFrames:
    """Concatenated SET requests. The opaques are set when the connection of the frames is known."""

    data: Bytes
    starts: Column
    """The start of each frame, followed by the end of the data."""
    vbuckets: Column

    def __len__(self) -> int:
        return len(self.vbuckets)

    def select(self, items: Sequence[int]) -> SetFrames:
        """Return a copy of some of the frames."""
        chosen = [self.data[self.starts[item] : self.starts[item + 1]] for item in items]
        ends = np.cumsum([0, *(len(frame) for frame in chosen)], dtype=np.int64)
        return SetFrames(data=np.concatenate(chosen), starts=ends, vbuckets=self.vbuckets[list(items)])

    def key(self, item: int) -> bytes:
        """Return the key of one frame, with its collection id if it has one."""
        start = self.starts[item]
        key_bytes = int.from_bytes(self.data[start + 2 : start + 4].tobytes())
        key_at = start + _HEADER_AND_EXTRAS_BYTES
        return self.data[key_at : key_at + key_bytes].tobytes()


def encode_sets(
    documents: Documents,
    *,
    vbuckets: int,
    collections: Sequence[CollectionId] = (),
    first_document: int = 0,
    expiry: int = 0,
    flags: int = JSON_FLAGS,
) -> SetFrames:
    """Encode the documents as SET requests, distributed over the collections in turn.

    Without collections, the keys get no collection id, as on a connection that did not negotiate them.
    `first_document` is the number of documents before these, so that the turns continue from batch to batch.
    """
    prefixes = np.zeros((max(1, len(collections)), LEB128_BYTES_MAX), dtype=np.uint8)
    prefix_lengths = np.zeros(len(prefixes), dtype=np.int64)
    for turn, collection in enumerate(collections):
        prefix = encode_collection_id(collection)
        prefixes[turn, : len(prefix)] = np.frombuffer(prefix, dtype=np.uint8)
        prefix_lengths[turn] = len(prefix)
    hashed = vbuckets_of(documents.keys, documents.key_ends, vbuckets)
    value_bytes = int((documents.value_ends - documents.value_starts).sum())
    overhead_bytes = len(documents) * (_HEADER_AND_EXTRAS_BYTES + LEB128_BYTES_MAX)
    data = np.empty(overhead_bytes + len(documents.keys) + value_bytes, dtype=np.uint8)
    starts = np.empty(len(documents) + 1, dtype=np.int64)
    _encode_sets(
        read_only(documents.keys), documents.key_ends, read_only(documents.values), documents.value_starts,
        documents.value_ends, hashed, prefixes, prefix_lengths, first_document % len(prefixes), u32(flags), u32(expiry),
        data, starts,
    )  # fmt: skip
    return SetFrames(data=data[: starts[-1]], starts=starts, vbuckets=hashed)


@kernel
def _encode_sets(
    keys: ReadOnlyBytes, key_ends: Int64s, values: ReadOnlyBytes, value_starts: Int64s, value_ends: Int64s,
    vbuckets: UInt16s, prefixes: ByteRows, prefix_lengths: Int64s, turn: int, flags: UInt32, expiry: UInt32,
    data: Bytes, starts: Int64s,
) -> None:  # fmt: skip
    at = i64(0)
    key_at = i64(0)
    for item in range(len(key_ends)):
        starts[item] = at
        own_key_bytes = key_ends[item] - key_at
        value_bytes = value_ends[item] - value_starts[item]
        prefix_bytes = prefix_lengths[turn]
        data[at] = 0x80
        data[at + 1] = 0x01
        store_u16(data, at + 2, u16(prefix_bytes + own_key_bytes))
        data[at + 4] = 8
        data[at + 5] = 0
        store_u16(data, at + 6, vbuckets[item])
        store_u32(data, at + 8, u32(8 + prefix_bytes + own_key_bytes + value_bytes))
        for i in range(12, 24):
            data[at + i] = 0
        store_u32(data, at + 24, flags)
        store_u32(data, at + 28, expiry)
        at += 32
        for i in range(prefix_bytes):
            data[at + i] = prefixes[turn, i]
        at += prefix_bytes
        copy_bytes(data, at, keys, key_at, own_key_bytes)
        at += own_key_bytes
        copy_bytes(data, at, values, value_starts[item], value_bytes)
        at += value_bytes
        key_at = key_ends[item]
        turn += 1
        if turn == len(prefix_lengths):
            turn = 0
    starts[len(key_ends)] = at


# --- to the connections -----------------------------------------------------------------------------------------------


def split_frames(frames: SetFrames, lane_of_vbucket: Column, *, lanes: int) -> list[SetFrames]:
    """Return the frames of each lane, by vbucket and in their order; some lanes may have none.

    A key always uses the same lane, so a later write to it overwrites the earlier one.
    """
    lane_ends = np.zeros(lanes + 1, dtype=np.int64)
    data = np.empty_like(frames.data)
    starts = np.empty(len(frames), dtype=np.int64)
    vbuckets = np.empty_like(frames.vbuckets)
    byte_ends = np.zeros(lanes + 1, dtype=np.int64)
    _split(frames.data, frames.starts, frames.vbuckets, lane_of_vbucket, lane_ends, byte_ends, data, starts, vbuckets)
    return [
        SetFrames(
            data=data[byte_ends[lane] : byte_ends[lane + 1]],
            starts=np.append(starts[lane_ends[lane] : lane_ends[lane + 1]], byte_ends[lane + 1]) - byte_ends[lane],
            vbuckets=vbuckets[lane_ends[lane] : lane_ends[lane + 1]],
        )
        for lane in range(lanes)
    ]


@kernel
def _split(
    source: Bytes, source_starts: Int64s, source_vbuckets: UInt16s, lane_of_vbucket: Int64s,
    lane_ends: Int64s, byte_ends: Int64s, data: Bytes, starts: Int64s, vbuckets: UInt16s,
) -> None:  # fmt: skip
    count = len(source_vbuckets)
    for item in range(count):
        lane = lane_of_vbucket[source_vbuckets[item]]
        lane_ends[lane + 1] += 1
        byte_ends[lane + 1] += source_starts[item + 1] - source_starts[item]
    for lane in range(len(lane_ends) - 1):
        lane_ends[lane + 1] += lane_ends[lane]
        byte_ends[lane + 1] += byte_ends[lane]
    for item in range(count):
        lane = lane_of_vbucket[source_vbuckets[item]]
        length = source_starts[item + 1] - source_starts[item]
        copy_bytes(data, byte_ends[lane], source, source_starts[item], length)
        starts[lane_ends[lane]] = byte_ends[lane]
        vbuckets[lane_ends[lane]] = source_vbuckets[item]
        lane_ends[lane] += 1
        byte_ends[lane] += length
    # Each entry has moved to the start of the next lane.
    for lane in range(len(lane_ends) - 1, 0, -1):
        lane_ends[lane] = lane_ends[lane - 1]
        byte_ends[lane] = byte_ends[lane - 1]
    lane_ends[0] = 0
    byte_ends[0] = 0


@kernel
def set_opaques(data: Bytes, starts: Int64s, first: int) -> None:
    """Number the frames from `first` on, in 32 bits."""
    for item in range(len(starts) - 1):
        store_u32(data, starts[item] + 12, u32(first + item))


# --- the answers ------------------------------------------------------------------------------------------------------


class Fault(IntEnum):
    """What is wrong with an answer."""

    NONE = 0
    MAGIC = 1
    LENGTHS = 2
    TOO_LARGE = 3
    UNEXPECTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The parsed answers of a buffer."""

    consumed_bytes: int
    answered: int
    failures: list[tuple[int, int]]
    """The index of each failed answer, counted from the first of the buffer, and its status."""


def scan_answers(data: Bytes, *, opaque: int, failures: Column) -> Answers:
    """Count the answers to SETs. They arrive in the order of the requests, so the first opaque is enough.

    `failures` is room for failures, two columns. If it is full, the scan ends early and must be called again.
    """
    consumed, answered, failed, fault = _scan(read_only(data), u32(opaque), ANSWER_BODY_BYTES_MAX, failures)
    if fault != Fault.NONE:
        raise _fault(Fault(fault), data, consumed, opaque + answered)
    return Answers(
        consumed_bytes=consumed, answered=answered, failures=[tuple(row) for row in failures[:failed].tolist()]
    )


def _fault(fault: Fault, data: Bytes, at: int, opaque: int) -> RemoteProtocolError:
    if fault is Fault.MAGIC:
        return BadMagic(f"0x{data[at]:02x} is not the magic of an answer", offset=at)
    if fault is Fault.LENGTHS:
        return LengthMismatch("the parts of an answer are longer than its body", offset=at)
    if fault is Fault.TOO_LARGE:
        return FrameTooLarge(f"an answer of more than {ANSWER_BODY_BYTES_MAX} bytes", offset=at)
    return UnexpectedMessage(f"an answer that is not to the SET with opaque {opaque & 0xFFFFFFFF}", offset=at)


@kernel
def _scan(data: ReadOnlyBytes, opaque: UInt32, body_bytes_max: int, failures: Int64Rows) -> tuple[int, int, int, int]:
    at = i64(0)
    answered = i64(0)
    failed = i64(0)
    while len(data) - at >= 24:
        magic = data[at]
        if magic == 0x81:
            key_bytes = i64(load_u16(data, at + 2))
        elif magic == 0x18:
            key_bytes = i64(data[at + 2]) + i64(data[at + 3])
        else:
            return at, answered, failed, 1
        body_bytes = i64(load_u32(data, at + 8))
        if key_bytes + i64(data[at + 4]) > body_bytes:
            return at, answered, failed, 2
        if body_bytes > body_bytes_max:
            return at, answered, failed, 3
        if data[at + 1] != 0x01 or load_u32(data, at + 12) != u32(opaque + answered):
            return at, answered, failed, 4
        if at + 24 + body_bytes > len(data):
            break
        status = load_u16(data, at + 6)
        if status != 0:
            if failed == len(failures):
                break
            failures[failed, 0] = answered
            failures[failed, 1] = status
            failed += 1
        at += 24 + body_bytes
        answered += 1
    return at, answered, failed, 0
