"""What a DCP consumer holds after applying its streams, and the check of every frame on the way there.

The documents have numbers: `key::00000042` is number 42, and a value begins with the version that its writer gave it.
So the state of a consumer is a few arrays, and a kernel can apply a thousand streams to them at little cost. It judges
the producer and shares no code with it, nor with the codec.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numba import njit

KEY_PREFIX = b"key::"
NUMBER_DIGITS = 8
VERSION_DIGITS = 12
VALUE_BYTES = 1000
PADDING = ord("x")


def key_of(number: int) -> bytes:
    return KEY_PREFIX + b"%0*d" % (NUMBER_DIGITS, number)


def value_of(version: int) -> bytes:
    return (b"%0*d" % (VERSION_DIGITS, version)).ljust(VALUE_BYTES, b"x")


def vbucket_of(key: bytes, vbuckets: int) -> int:
    return (zlib.crc32(key) >> 16 & 0x7FFF) % vbuckets


class Fault(IntEnum):
    """What is wrong with a frame."""

    NONE = 0
    STATUS = 1
    """A request was refused."""
    NOT_OPEN = 2
    """A message for a stream that is not open."""
    UNKNOWN = 3
    """A frame that has no place in these streams."""
    MARKER_TOO_EARLY = 4
    """A snapshot begins before the last one has come to its end."""
    MARKER_GOES_BACK = 5
    SEQNO_NOT_RISING = 6
    OUTSIDE_SNAPSHOT = 7
    KEY_TWICE = 8
    """Two versions of a document in one snapshot."""
    WRONG_VBUCKET = 9
    DAMAGED = 10
    """A key, value or length that nobody has written."""


@dataclass(slots=True)
class CheckedStreams:
    """The streams of one connection, one a vbucket, and the documents they have made."""

    vbucket_of_document: np.ndarray
    vbuckets: int
    streams: np.ndarray = field(init=False)
    """A row a vbucket, see the columns below."""
    documents: np.ndarray = field(init=False)
    """A row a document, see the columns below."""
    changes: int = 0
    deletions: int = 0
    snapshots: int = 0

    def __post_init__(self) -> None:
        self.streams = np.zeros((self.vbuckets, STREAM_COLUMNS), dtype=np.uint64)
        self.documents = np.zeros((len(self.vbucket_of_document), DOCUMENT_COLUMNS), dtype=np.uint64)

    def receive(self, data: np.ndarray) -> Received:
        """Apply all complete frames, or raise what is wrong with one."""
        counts = np.zeros(COUNTS, dtype=np.int64)
        consumed, fault, at = _apply(data, self.streams, self.documents, self.vbucket_of_document, counts)
        if fault:
            frame = data[at : at + 96].tobytes().hex(" ")
            vbucket = int.from_bytes(data[at + 6 : at + 8].tobytes())
            stream = self.streams[vbucket].tolist() if vbucket < self.vbuckets else None
            raise AssertionError(f"{Fault(fault).name}: {frame}; vbucket {vbucket}, its stream {stream}")
        self.changes += int(counts[CHANGES])
        self.deletions += int(counts[DELETIONS])
        self.snapshots += int(counts[SNAPSHOTS])
        return Received(
            consumed_bytes=int(consumed),
            flow_control_bytes=int(counts[FLOW_CONTROL_BYTES]),
            noops=int(counts[NOOPS]),
            noop_opaque=int(counts[NOOP_OPAQUE]),
            has_ends=bool(counts[ENDS]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What a buffer held apart from changes."""

    consumed_bytes: int
    flow_control_bytes: int
    noops: int
    noop_opaque: int
    has_ends: bool


PHASE, PASSED, SNAPSHOT_START, SNAPSHOT_END, ORDINAL, VBUUID, END_REASON = range(7)
STREAM_COLUMNS = 7
REQUESTED, OPEN, IN_SNAPSHOT, ENDED = range(4)
"""The phases of a stream. `OPEN` has not got a marker since it was opened."""

SEQNO, CAS, VERSION, LAST_ORDINAL = range(4)
DOCUMENT_COLUMNS = 4
"""The version is 0 for a document that is deleted or was never there."""

CHANGES, DELETIONS, SNAPSHOTS, NOOPS, NOOP_OPAQUE, ENDS, FLOW_CONTROL_BYTES = range(7)
COUNTS = 7

_u64 = np.uint64


@njit(cache=True)
def _load(data: Any, at: int, size: int) -> Any:
    number = _u64(0)
    for byte in data[at : at + size]:
        number = _u64(number << _u64(8)) | _u64(byte)
    return number


@njit(cache=True)
def _digits(data: Any, at: int, count: int) -> int:
    """A decimal number, or -1 where there is none."""
    number = 0
    for byte in data[at : at + count]:
        if byte < 48 or byte > 57:
            return -1
        number = number * 10 + int(byte) - 48
    return number


@njit(cache=True)
def _apply(  # noqa: C901 - one flat loop: every rule stands where the frame it is about is met
    data: Any, streams: Any, documents: Any, vbucket_of_document: Any, counts: Any
) -> tuple[int, int, int]:
    at = 0
    while len(data) - at >= 24:
        body_bytes = int(_load(data, at + 8, 4))
        end = at + 24 + body_bytes
        if end > len(data):
            break
        magic, opcode = data[at], data[at + 1]
        vbucket = int(_load(data, at + 6, 2))
        body = at + 24
        if magic == 0x81:
            # An answer: to a stream request, whose opaque is its vbucket, or to a control.
            if vbucket != 0:
                return at, 1, at
            if opcode == 0x53:
                stream = streams[int(_load(data, at + 12, 4))]
                if stream[PHASE] != REQUESTED:
                    return at, 2, at
                stream[PHASE] = OPEN
                stream[VBUUID] = _load(data, body, 8)
            at = end
            continue
        if magic != 0x80:
            return at, 3, at
        if opcode == 0x5C:
            counts[NOOPS] += 1
            counts[NOOP_OPAQUE] = int(_load(data, at + 12, 4))
            at = end
            continue
        counts[FLOW_CONTROL_BYTES] += end - at
        if vbucket >= len(streams) or int(_load(data, at + 12, 4)) != vbucket:
            return at, 9, at
        stream = streams[vbucket]
        if stream[PHASE] != OPEN and stream[PHASE] != IN_SNAPSHOT:
            return at, 2, at
        if opcode == 0x55:
            stream[PHASE] = ENDED
            stream[END_REASON] = _load(data, body, 4)
            counts[ENDS] += 1
        elif opcode == 0x56:
            start_seqno, end_seqno = _load(data, body, 8), _load(data, body + 8, 8)
            if body_bytes != 20:
                return at, 10, at
            if stream[PHASE] == IN_SNAPSHOT:
                if stream[PASSED] != stream[SNAPSHOT_END]:
                    return at, 4, at
                if start_seqno <= stream[SNAPSHOT_END]:
                    return at, 5, at
            if start_seqno > end_seqno or end_seqno <= stream[PASSED]:
                return at, 5, at
            stream[PHASE] = IN_SNAPSHOT
            stream[SNAPSHOT_START], stream[SNAPSHOT_END] = start_seqno, end_seqno
            stream[ORDINAL] += _u64(1)
            counts[SNAPSHOTS] += 1
        elif opcode == 0x64:
            seqno = _load(data, body, 8)
            if seqno <= stream[PASSED]:
                return at, 6, at
            if stream[PHASE] != IN_SNAPSHOT or seqno > stream[SNAPSHOT_END]:
                return at, 7, at
            stream[PASSED] = seqno
        elif opcode == 0x57 or opcode == 0x58:
            seqno = _load(data, body, 8)
            if seqno <= stream[PASSED]:
                return at, 6, at
            if stream[PHASE] != IN_SNAPSHOT or seqno < stream[SNAPSHOT_START] or seqno > stream[SNAPSHOT_END]:
                return at, 7, at
            stream[PASSED] = seqno
            value_at = body + int(data[at + 4]) + int(_load(data, at + 2, 2))
            number = _digits(data, value_at - 8, 8)
            if number < 0 or number >= len(documents) or end < value_at:
                return at, 10, at
            if vbucket_of_document[number] != vbucket:
                return at, 9, at
            version = 0
            if opcode == 0x57:
                version = _digits(data, value_at, 12)
                if end - value_at != VALUE_BYTES or version <= 0:
                    return at, 10, at
                for byte in data[value_at + 12 : end]:
                    if byte != PADDING:
                        return at, 10, at
            else:
                counts[DELETIONS] += 1
                if end != value_at:
                    return at, 10, at
            document = documents[number]
            if document[LAST_ORDINAL] == stream[ORDINAL]:
                return at, 8, at
            document[SEQNO] = seqno
            document[CAS] = _load(data, at + 16, 8)
            document[VERSION] = _u64(version)
            document[LAST_ORDINAL] = stream[ORDINAL]
            counts[CHANGES] += 1
        else:
            return at, 3, at
        at = end
    return at, 0, at
