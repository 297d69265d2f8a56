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
from headwater.protocol.kernels.memory import Bytes, Column, i64, kernel, load_u16, load_u32, load_u64, u32, u64
from headwater.store.siphash import siphash128


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    superseded: Column
    """The seqnos to leave out, ascending."""
    last_wanted_seqno: int
    """The last change that the stream will get, 0 for none."""


def survey(
    runs: Iterable[Bytes], *, frames_max: int, end_seqno: int, secret: Column, wanted: Column | None, with_events: bool
) -> Survey:
    """Look through the changes of a snapshot.

    `wanted` are the collections of the stream, None for all; `frames_max` bounds how many changes there can be.
    """
    table = np.zeros((1 << (2 * frames_max).bit_length(), 3), dtype=np.uint64)
    superseded = np.empty(frames_max, dtype=np.uint64)
    filtered = wanted is not None
    ids = np.empty(0, dtype=np.uint32) if wanted is None else wanted
    count = last = 0
    for run in runs:
        count, reached = _survey(run, u64(end_seqno), secret, filtered, ids, with_events, table, superseded, count)
        last = int(reached) or last
    return Survey(superseded=np.sort(superseded[:count]), last_wanted_seqno=last)


@kernel
def _survey(
    run: Bytes, end_seqno: int, secret: Column, filtered: bool, wanted: Column, with_events: bool, table: Column,
    superseded: Column, count: int,
) -> tuple[int, int]:  # fmt: skip
    at = i64(0)
    count = i64(count)
    last = u64(0)
    mask = len(table) - 1
    while at < len(run):
        seqno = load_u64(run, at + 24)
        if seqno > end_seqno:
            break
        opcode = run[at + 1]
        if opcode == 0x5F:
            if with_events:
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
                table[slot, 0] = high
                table[slot, 1] = low
                table[slot, 2] = seqno
                last = seqno
        at += 24 + i64(load_u32(run, at + 8))
    return count, last
