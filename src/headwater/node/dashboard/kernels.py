"""The kernels of the dashboard: one finds the changes that somebody looks for, one counts documents."""

from __future__ import annotations

import numpy as np

from headwater.protocol.kernels.frame_header import collection_id, is_document_change, prefix_bytes
from headwater.protocol.kernels.memory import Bytes, Column, i64, kernel, load_u16, load_u32, load_u64, u64
from headwater.store.index import BASE, CAPACITY, DELETED, REVISION, SEQNO, SLOT_WORDS


@kernel
def find_changes(run: Bytes, collections: Column, needle: Bytes, starts: Column, cases: Column) -> int:
    """Where the changes of documents begin whose key has the needle in it, and the CAS of each.

    `collections` are the ids that are wanted, all of them where it is empty. Returns how many there are; the arrays
    must have room for every frame of the run.
    """
    count = 0
    at = i64(0)
    while at < len(run):
        end = at + 24 + i64(load_u32(run, at + 8))
        opcode = run[at + 1]
        if is_document_change(opcode):
            key_at = at + 24 + i64(run[at + 4])
            key_end = key_at + i64(load_u16(run, at + 2))
            name_at = key_at + prefix_bytes(run, key_at, key_end)
            if _is_wanted(collection_id(run, key_at), collections) and _contains(run, name_at, key_end, needle):
                starts[count] = at
                cases[count] = load_u64(run, at + 16)
                count += 1
        at = end
    return count


@kernel
def _is_wanted(collection: int, collections: Column) -> bool:
    if len(collections) == 0:
        return True
    for index in range(len(collections)):
        if u64(collections[index]) == u64(collection):
            return True
    return False


@kernel
def _contains(run: Bytes, at: int, end: int, needle: Bytes) -> bool:
    if len(needle) == 0:
        return True
    for begin in range(at, end - len(needle) + 1):
        matches = True
        for index in range(len(needle)):
            if run[begin + index] != needle[index]:
                matches = False
                break
        if matches:
            return True
    return False


@kernel
def count_live(slots: Column, tables: Column, vbuckets: Column, counts: Column) -> None:
    """Count the documents of some vbuckets, without the deleted."""
    for index in range(len(vbuckets)):
        vbucket = vbuckets[index]
        live = 0
        base = tables[vbucket, BASE]
        for slot in range(base, base + tables[vbucket, CAPACITY]):
            if slots[slot, SEQNO] != 0 and not slots[slot, REVISION] & u64(DELETED):
                live += 1
        counts[vbucket] = live


def warm_up() -> None:
    """Compile them before somebody waits, for memory that may be written and for what comes from a file."""
    numbers = np.zeros(1, dtype=np.int64)
    cases = np.zeros(1, dtype=np.uint64)
    for run in (np.empty(0, dtype=np.uint8), np.frombuffer(b"", dtype=np.uint8)):
        find_changes(run, np.zeros(0, dtype=np.uint32), np.frombuffer(b"k", dtype=np.uint8), numbers, cases)
    tables = np.zeros((1, 3), dtype=np.int64)
    count_live(np.zeros((1, SLOT_WORDS), dtype=np.uint64), tables, np.zeros(1, dtype=np.int64), numbers)
