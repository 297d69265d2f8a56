"""Runs: stored changes as they are in commits and blocks, whole frames one after the other.

The frames are DCP's own, as a collection-aware consumer gets them: mutations, deletions (version 2), expirations,
system events, prepares and aborts, with opaque 0 except in commits (see `prepares`). The first number of a frame's
extras is always its seqno. The kernels here walk runs that the store wrote, or that were checked when they were
received or opened (`is_sound`, `group_starts_of`), so the other kernels trust the lengths.
"""

from __future__ import annotations

import numpy as np

from headwater.kernels.memory import (
    AnyBytes,
    Bytes,
    Int64Rows,
    Int64s,
    ReadOnlyBytes,
    UInt16s,
    UInt64,
    UInt64s,
    bytes_at,
    copy_bytes,
    i64,
    int64s_at,
    kernel,
    kernel_part,
    load_u8,
    load_u16,
    load_u32,
    load_u64,
    u64,
)
from headwater.protocol.kernels.frame_runs import (
    ABORT,
    ABORT_EXTRAS_BYTES,
    DELETION,
    EXPIRATION,
    EXPIRATION_EXTRAS_BYTES,
    MUTATION,
    MUTATION_EXTRAS_BYTES,
    PREPARE,
    PREPARE_EXTRAS_BYTES,
    REQUEST,
    SYSTEM_EVENT,
    SYSTEM_EVENT_EXTRAS_BYTES,
    TIMED_DELETION_EXTRAS_BYTES,
    prefix_bytes,
)

EMPTY_RUN: Bytes = np.empty(0, dtype=np.uint8)


def as_run(data: bytes | bytearray | memoryview) -> Bytes:
    return np.frombuffer(data, dtype=np.uint8)


def first_seqno(run: Bytes) -> int:
    """Return the seqno of the first change of a run that is not empty."""
    return int.from_bytes(run[24:32])


@kernel
def find_seqno(run: AnyBytes, seqno: int) -> tuple[int, int]:
    """Return where the frame of a seqno starts and ends; (-1, -1) if it is not in the run."""
    at = i64(0)
    while at < len(run):
        end = at + 24 + i64(load_u32(run, at + 8))
        found = load_u64(run, at + 24)
        if found == u64(seqno):
            return at, end
        if found > u64(seqno):
            break
        at = end
    return -1, -1


@kernel
def split_after(run: AnyBytes, seqno: int) -> int:
    """Return where the first frame with a higher seqno starts; the run's length if there is none."""
    at = i64(0)
    while at < len(run) and load_u64(run, at + 24) <= u64(seqno):
        at += 24 + i64(load_u32(run, at + 8))
    return at


@kernel
def split_before(run: Bytes, size_bytes: int) -> int:
    """Return where to cut so that the front has at most this size, or one frame if that is larger."""
    at = i64(0)
    while at < len(run):
        end = at + 24 + i64(load_u32(run, at + 8))
        if end > size_bytes and at > 0:
            break
        at = end
    return at


@kernel
def last_seqno(run: AnyBytes) -> int:
    """Return the highest seqno of a run, 0 for an empty one."""
    at = i64(0)
    seqno = u64(0)
    while at < len(run):
        seqno = load_u64(run, at + 24)
        at += 24 + i64(load_u32(run, at + 8))
    return seqno


@kernel
def last_seqnos(grouped: AnyBytes, group_starts: Int64s, seqnos: UInt64s, visible: UInt64s, completed: UInt64s) -> None:
    """Set the numbers of every vbucket that has changes in grouped frames to those of its last changes.

    `visible` leaves out prepares and aborts. `completed` is the highest seqno of a prepare that was decided: an abort
    names it, and a stored commit has its distance in the opaque (`store.prepares`).
    """
    for vbucket in range(len(group_starts) - 1):
        at = group_starts[vbucket]
        while at < group_starts[vbucket + 1]:
            seqno = load_u64(grouped, at + 24)
            opcode = load_u8(grouped, at + 1)
            distance = load_u32(grouped, at + 12)
            seqnos[vbucket] = seqno
            if opcode == ABORT:
                completed[vbucket] = max(completed[vbucket], load_u64(grouped, at + 32))
            elif opcode != PREPARE:
                visible[vbucket] = seqno
                if distance != 0:
                    completed[vbucket] = max(completed[vbucket], seqno - u64(distance))
            at += 24 + i64(load_u32(grouped, at + 8))


@kernel
def group_by_vbucket(
    frames: Bytes, vbuckets: UInt16s, starts: Int64s, count: int, used: int, grouped: Bytes, group_starts: Int64s
) -> None:
    """Sort frames by vbucket, keeping the order within each. `group_starts` gets one entry per vbucket and an end."""
    group_starts[:] = 0
    for item in range(count):
        end = starts[item + 1] if item + 1 < count else used
        group_starts[i64(vbuckets[item]) + 1] += end - starts[item]
    for vbucket in range(len(group_starts) - 1):
        group_starts[vbucket + 1] += group_starts[vbucket]
    for item in range(count):
        end = starts[item + 1] if item + 1 < count else used
        vbucket = i64(vbuckets[item])
        copy_bytes(grouped, group_starts[vbucket], frames, starts[item], end - starts[item])
        group_starts[vbucket] += end - starts[item]
    # Each start is now where the next group starts.
    for vbucket in range(len(group_starts) - 1, 0, -1):
        group_starts[vbucket] = group_starts[vbucket - 1]
    group_starts[0] = 0


@kernel
def gather_runs(places: Int64Rows, first_vbucket: int, gathered: Bytes, starts: Int64s) -> None:
    """Copy what several commits hold of some vbuckets, vbucket by vbucket, and the oldest commit's part first.

    `places` are the addresses of each commit's data and group starts. `starts` gets one entry per vbucket and an end.
    """
    to = i64(0)
    for item in range(len(starts) - 1):
        starts[item] = to
        vbucket = first_vbucket + item
        for commit in range(len(places)):
            group_starts = int64s_at(places[commit, 1], vbucket + 2)
            size = group_starts[vbucket + 1] - group_starts[vbucket]
            if size:
                copy_bytes(gathered, to, bytes_at(places[commit, 0] + group_starts[vbucket], size), i64(0), size)
                to += size
    starts[len(starts) - 1] = to


@kernel
def join_runs(places: Int64Rows, first: int, vbucket: int, joined: Bytes) -> tuple[int, int]:
    """Copy what commits from `first` on hold of a vbucket, one after the other, as many as fit.

    Returns how many bytes that is, and the next commit.
    """
    to = i64(0)
    for commit in range(first, len(places)):
        group_starts = int64s_at(places[commit, 1], vbucket + 2)
        size = group_starts[vbucket + 1] - group_starts[vbucket]
        if to + size > len(joined):
            return to, commit
        copy_bytes(joined, to, bytes_at(places[commit, 0] + group_starts[vbucket], size), i64(0), size)
        to += size
    return to, i64(len(places))


@kernel_part
def _stored_extras_bytes(opcode: int) -> int:
    """Return the length of the extras of stored frames with this opcode; -1 for opcodes that are never stored."""
    if opcode == MUTATION:
        return MUTATION_EXTRAS_BYTES
    if opcode == DELETION:
        return TIMED_DELETION_EXTRAS_BYTES
    if opcode == EXPIRATION:
        return EXPIRATION_EXTRAS_BYTES
    if opcode == PREPARE:
        return PREPARE_EXTRAS_BYTES
    if opcode == ABORT:
        return ABORT_EXTRAS_BYTES
    return SYSTEM_EVENT_EXTRAS_BYTES if opcode == SYSTEM_EVENT else -1


@kernel_part
def frame_end(run: Bytes, at: int) -> int:
    """Return where the frame at `at` ends, or -1 if it is none that the store could have written."""
    if len(run) - at < 24:
        return -1
    opcode = run[at + 1]
    extras_bytes = _stored_extras_bytes(opcode)
    if extras_bytes < 0:
        return -1
    key_bytes = i64(load_u16(run, at + 2))
    end = at + 24 + i64(load_u32(run, at + 8))
    key_at = at + 24 + extras_bytes
    if run[at] != REQUEST or run[at + 4] != extras_bytes or end > len(run) or key_at + key_bytes > end:
        return -1
    if load_u64(run, at + 24) >> u64(63):
        return -1  # No vbucket reaches it, and code that is not compiled has signed numbers.
    if opcode != SYSTEM_EVENT:
        prefix = prefix_bytes(run, key_at, key_at + key_bytes)
        if prefix == 0 or key_bytes == prefix:
            return -1
    return end


@kernel
def is_sound(run: ReadOnlyBytes, vbucket: int, after_seqno: UInt64, last_seqno: UInt64) -> bool:
    """Whether a run has only frames of `vbucket`, with seqnos that rise from above `after_seqno` to `last_seqno`."""
    at = i64(0)
    reached = u64(after_seqno)
    while at < len(run):
        end = frame_end(run, at)
        if end < 0 or i64(load_u16(run, at + 6)) != vbucket or load_u64(run, at + 24) <= reached:
            return False
        reached = load_u64(run, at + 24)
        at = end
    return reached == u64(last_seqno)


@kernel
def group_starts_of(grouped: Bytes, group_starts: Int64s) -> bool:
    """Find where each vbucket's run starts in frames that are grouped already. Returns False if they are not sound."""
    group_starts[:] = 0
    at = i64(0)
    previous = i64(-1)
    reached = u64(0)
    while at < len(grouped):
        end = frame_end(grouped, at)
        if end < 0:
            return False
        vbucket = i64(load_u16(grouped, at + 6))
        if vbucket < previous or vbucket >= len(group_starts) - 1:
            return False
        seqno = load_u64(grouped, at + 24)
        if seqno == 0 or (vbucket == previous and seqno <= reached):
            return False
        group_starts[vbucket + 1] += end - at
        previous = vbucket
        reached = seqno
        at = end
    for vbucket in range(len(group_starts) - 1):
        group_starts[vbucket + 1] += group_starts[vbucket]
    return True
