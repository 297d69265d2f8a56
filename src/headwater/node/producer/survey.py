"""Surveying a snapshot before it is sent: which of its changes are superseded within it, and where it really ends.

A snapshot holds a key once: its newest version at the snapshot's end. The store keeps older versions inside the history
window, so a snapshot that may hold some has to be looked through first. One walk, newest versions remembered by the
hash of their key.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from headwater.protocol.kernels.collection_prefix import collection_id
from headwater.protocol.kernels.frame_header import ABORT, PREPARE, SYSTEM_EVENT
from headwater.protocol.kernels.memory import Bytes, Column, i64, kernel, load_u16, load_u32, load_u64, u32, u64
from headwater.protocol.kernels.siphash import siphash128

_FRAME_BYTES_MIN = 24 + 18 + 2
_SLOTS_MIN = 256
NO_SEQNOS: Column = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    superseded: Column
    """The seqnos to leave out, ascending."""
    last_wanted_seqno: int
    """The last change that the stream will get, 0 for none."""


def survey(
    runs: Iterable[Bytes],
    *,
    end_seqno: int,
    secret: Column,
    wanted: Column | None,
    with_events: bool,
    with_prepares: bool = False,
) -> Survey:
    """Look through the changes of a snapshot. `wanted` are the collections of the stream, None for all.

    Prepares and aborts are no versions of their documents: they neither supersede nor are they superseded.
    """
    table = _empty_table(_SLOTS_MIN)
    found: list[Column] = []
    filtered = wanted is not None
    ids = np.empty(0, dtype=np.uint32) if wanted is None else wanted
    keys = last = 0
    for run in runs:
        frames_max = len(run) // _FRAME_BYTES_MIN + 1
        if 2 * (keys + frames_max) > len(table):
            table = _grown(table, 4 * (keys + frames_max))
        superseded = np.empty(frames_max, dtype=np.uint64)
        count, fresh, reached = _survey(
            run, u64(end_seqno), secret, filtered, ids, with_events, with_prepares, table, superseded
        )
        found.append(superseded[:count])
        keys += fresh
        last = int(reached) or last
    return Survey(superseded=np.sort(np.concatenate(found)) if found else NO_SEQNOS, last_wanted_seqno=last)


def _empty_table(slots: int) -> Column:
    return np.zeros((1 << (slots - 1).bit_length(), 3), dtype=np.uint64)


def _grown(table: Column, slots: int) -> Column:
    larger = _empty_table(slots)
    _reenter(table, larger)
    return larger


@kernel
def _reenter(table: Column, larger: Column) -> None:
    mask = len(larger) - 1
    for old in range(len(table)):
        if table[old, 2] != 0:
            slot = i64(table[old, 0] & u64(mask))
            while larger[slot, 2] != 0:
                slot = (slot + 1) & mask
            for word in range(3):
                larger[slot, word] = table[old, word]


@kernel
def _survey(
    run: Bytes, end_seqno: int, secret: Column, filtered: bool, wanted: Column, with_events: bool,
    with_prepares: bool, table: Column, superseded: Column,
) -> tuple[int, int, int]:  # fmt: skip
    at = i64(0)
    count = i64(0)
    keys = i64(0)
    last = u64(0)
    mask = len(table) - 1
    while at < len(run):
        seqno = load_u64(run, at + 24)
        if seqno > end_seqno:
            break
        opcode = run[at + 1]
        if opcode == SYSTEM_EVENT:
            if with_events:
                last = seqno
        elif opcode == PREPARE or opcode == ABORT:
            if with_prepares:
                last = seqno
        else:
            key_at = at + 24 + i64(run[at + 4])
            position = np.searchsorted(wanted, u32(collection_id(run, key_at)))
            if not filtered or (position < len(wanted) and wanted[position] == collection_id(run, key_at)):
                high, low = siphash128(run, key_at, i64(load_u16(run, at + 2)), secret[0], secret[1])
                slot = i64(high & u64(mask))
                while table[slot, 2] != 0 and (table[slot, 0] != high or table[slot, 1] != low):
                    slot = (slot + 1) & mask
                if table[slot, 2] != 0:
                    superseded[count] = table[slot, 2]
                    count += 1
                else:
                    keys += 1
                table[slot, 0] = high
                table[slot, 1] = low
                table[slot, 2] = seqno
                last = seqno
        at += 24 + i64(load_u32(run, at + 8))
    return count, keys, last


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSeqnos:
    """What a snapshot holds of durable writes. Each is 0 where there is none."""

    max_visible: int
    """The last change that is neither a prepare nor an abort."""
    high_prepared: int
    high_completed: int
    """The highest seqno of a prepare that is committed or aborted."""


def sync_seqnos(runs: Iterable[Bytes], *, end_seqno: int) -> SyncSeqnos:
    visible = prepared = completed = 0
    for run in runs:
        found = [int(seqno) for seqno in _sync_seqnos(run, u64(end_seqno))]
        visible, prepared, completed = found[0] or visible, found[1] or prepared, max(found[2], completed)
    return SyncSeqnos(max_visible=visible, high_prepared=prepared, high_completed=completed)


@kernel
def _sync_seqnos(run: Bytes, end_seqno: int) -> tuple[int, int, int]:
    at = i64(0)
    visible = u64(0)
    prepared = u64(0)
    completed = u64(0)
    while at < len(run):
        seqno = load_u64(run, at + 24)
        if seqno > end_seqno:
            break
        opcode = run[at + 1]
        if opcode == PREPARE:
            prepared = seqno
        elif opcode == ABORT:
            completed = max(completed, load_u64(run, at + 32))
        else:
            visible = seqno
            if load_u32(run, at + 12) != 0:
                completed = max(completed, seqno - u64(load_u32(run, at + 12)))
        at += 24 + i64(load_u32(run, at + 8))
    return visible, prepared, completed
