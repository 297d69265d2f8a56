"""What the frames of a run tell of durable writes, found by kernels. `prepares` says how these are stored."""

from __future__ import annotations

import numpy as np

from headwater.protocol.kernels.frame_header import ABORT, PREPARE, is_document_change
from headwater.protocol.kernels.memory import Bytes, Column, i64, kernel, load_u16, load_u32, load_u64, u64
from headwater.protocol.kernels.siphash import siphash128
from headwater.store.runs import as_run

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
def _sync_frames(run: Bytes, starts: Column, completed: Column) -> tuple[int, int]:
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
def seqnos_at(run: Bytes, starts: Column) -> Column:
    """The seqnos of the frames that start there."""
    seqnos = np.empty(len(starts), dtype=np.uint64)
    for item in range(len(starts)):
        seqnos[item] = load_u64(run, starts[item] + 24)
    return seqnos


@kernel
def _frames_of_keys(run: Bytes, hashes: Column, secret: Column, starts: Column) -> int:
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
