"""Runs: finding, cutting and grouping frames, and telling what the store could not have written."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from headwater.kernels.compiling import part_for_python
from headwater.protocol.frames import DurabilityLevel
from headwater.protocol.messages import dcp_changes
from headwater.protocol.messages.documents import Set
from headwater.protocol.numbers import DEFAULT_COLLECTION, CollectionId, Seqno, VBucketId
from headwater.store import runs
from headwater.store.runs import (
    EMPTY_RUN,
    as_run,
    find_seqno,
    group_by_vbucket,
    group_starts_of,
    is_sound,
    last_seqno,
    last_seqnos,
    split_after,
    split_before,
)
from support.cases import case, each

frame_end = part_for_python(runs.frame_end)


def change(seqno: int, vbucket: int = 0, *, kind: str = "mutation", value_bytes: int = 10) -> bytes:
    place = {"seqno": Seqno(seqno), "vbucket": VBucketId(vbucket)}
    if kind == "event":
        return dcp_changes.SystemEvent(
            **place, event=dcp_changes.SystemEventId.COLLECTION_CREATED, key=b"name", value=bytes(16)
        ).encode()
    document = {**place, "rev_seqno": 1, "collection_id": CollectionId(8), "key": b"key"}
    if kind == "mutation":
        return dcp_changes.Mutation(**document, value=bytes(value_bytes)).encode()
    return (dcp_changes.Deletion if kind == "deletion" else dcp_changes.Expiration)(**document, delete_time=5).encode()


def run_of(*seqnos: int) -> np.ndarray:
    return as_run(b"".join(change(seqno) for seqno in seqnos))


SIZE = len(change(1))
GAPS = run_of(2, 5, 9)


# --- finding and cutting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seqno", "found"), [(1, -1), (2, 0), (3, -1), (5, SIZE), (9, 2 * SIZE), (10, -1), (2**63 - 1, -1)]
)
def test_a_frame_is_found_by_its_seqno(seqno: int, found: int) -> None:
    assert find_seqno(GAPS, seqno) == (found, found + SIZE if found >= 0 else -1)


@pytest.mark.parametrize(("seqno", "at"), [(0, 0), (1, 0), (2, 1), (4, 1), (5, 2), (9, 3), (2**63 - 1, 3)])
def test_a_run_is_split_after_a_seqno(seqno: int, at: int) -> None:
    assert split_after(GAPS, seqno) == at * SIZE


@pytest.mark.parametrize(
    ("size", "at"), [(0, 1), (1, 1), (SIZE, 1), (SIZE + 1, 1), (2 * SIZE, 2), (3 * SIZE - 1, 2), (3 * SIZE, 3)]
)
def test_a_run_is_split_before_a_size_but_gives_one_frame_at_least(size: int, at: int) -> None:
    assert split_before(GAPS, size) == at * SIZE


def test_ends_and_empty_runs() -> None:
    assert (last_seqno(GAPS), last_seqno(EMPTY_RUN)) == (9, 0)
    assert find_seqno(EMPTY_RUN, 1) == (-1, -1)
    assert split_after(EMPTY_RUN, 0) == split_before(EMPTY_RUN, 10) == 0
    starts = np.empty(5, dtype=np.int64)
    assert group_starts_of(EMPTY_RUN, starts)
    assert starts.tolist() == [0] * 5


# --- grouping -----------------------------------------------------------------------------------------------------


def test_frames_are_grouped_by_vbucket_in_their_order() -> None:
    source = random.Random(1)
    seqnos = [0] * 8
    frames: list[tuple[int, bytes]] = []
    for _ in range(200):
        vbucket = source.choice([0, 2, 3, 7])
        seqnos[vbucket] += 1
        frames.append((vbucket, change(seqnos[vbucket], vbucket, value_bytes=source.randrange(40))))
    starts = np.cumsum([0, *(len(frame) for _, frame in frames)])
    data = as_run(b"".join(frame for _, frame in frames))
    grouped, group_starts = np.empty(len(data), dtype=np.uint8), np.empty(9, dtype=np.int64)
    vbuckets = np.array([vbucket for vbucket, _ in frames], dtype=np.uint16)
    group_by_vbucket(data, vbuckets, starts[:-1], len(frames), len(data), grouped, group_starts)

    for vbucket in range(8):
        expected = b"".join(frame for of, frame in frames if of == vbucket)
        assert grouped[group_starts[vbucket] : group_starts[vbucket + 1]].tobytes() == expected
    again = np.empty(9, dtype=np.int64)
    assert group_starts_of(grouped, again)
    assert again.tolist() == group_starts.tolist()

    highest, visible, completed = (np.full(8, 1000, dtype=np.uint64) for _ in range(3))
    last_seqnos(grouped, group_starts, highest, visible, completed)
    assert highest.tolist() == visible.tolist() == [seqno or 1000 for seqno in seqnos]
    assert completed.tolist() == [1000] * 8


def test_prepares_and_aborts_are_not_visible_and_what_decides_a_prepare_completes_it() -> None:
    durable = {"vbucket": VBucketId(0), "key": b"k", "collection_id": DEFAULT_COLLECTION}
    prepare = dcp_changes.Prepare(seqno=Seqno(4), rev_seqno=1, durability=DurabilityLevel.MAJORITY, **durable)
    commit = dcp_changes.Mutation(seqno=Seqno(5), rev_seqno=1, opaque=1, **durable)
    # A stored abort has its own seqno first.
    abort = dcp_changes.Abort(prepared_seqno=Seqno(8), abort_seqno=Seqno(7), **durable)

    numbers = [np.zeros(1, dtype=np.uint64) for _ in range(3)]
    seen = []
    for frame in (prepare, commit, replace(prepare, seqno=Seqno(7)), abort):
        run = as_run(frame.encode())
        last_seqnos(run, np.array([0, len(run)], dtype=np.int64), *numbers)
        seen.append(tuple(int(number[0]) for number in numbers))
    assert seen == [(4, 0, 0), (5, 5, 4), (7, 5, 4), (8, 5, 7)]


@case([change(1, 1), change(1, 0)])
@case([change(1, 4)])
@case([change(2, 1), change(2, 1)])
@case([change(2, 1), change(1, 1)])
@case([change(0, 1)])
@case([change(1)[:-1]])
@case([change(1), change(2)[:20]])
@case([Set(key=b"k").encode()])
def test_groups_that_are_not_sound(frames: list[bytes]) -> None:
    assert not group_starts_of(as_run(b"".join(frames)), np.empty(5, dtype=np.int64))


# --- soundness ----------------------------------------------------------------------------------------------------

KINDS = as_run(
    b"".join(change(n + 1, 3, kind=k) for n, k in enumerate(["mutation", "deletion", "expiration", "event"]))
)


def sound(run: np.ndarray, vbucket: int, after_seqno: int, last: int) -> bool:
    return is_sound(run, vbucket, np.uint64(after_seqno), np.uint64(last))


def test_what_the_store_writes_is_sound() -> None:
    assert sound(KINDS, 3, 0, 4)
    assert sound(EMPTY_RUN, 3, 7, 7)
    assert sound(GAPS, 0, 1, 9)


@pytest.mark.parametrize(("vbucket", "after", "last"), [(2, 0, 4), (3, 1, 4), (3, 0, 3), (3, 0, 5), (3, 4, 4)])
def test_a_run_that_is_not_where_it_belongs(vbucket: int, after: int, last: int) -> None:
    assert not sound(KINDS, vbucket, after, last)


@each("cut", range(1, len(KINDS), 7))
def test_a_run_that_is_cut(cut: int) -> None:
    assert not sound(KINDS[:cut], 3, 0, 4)


def test_damage_is_seen_or_harmless() -> None:
    """Any byte may be anything: no kernel may run beyond the run. What looks like a frame, it takes for one."""
    for at in range(len(KINDS)):
        for value in (0x00, 0x7F, 0x80, 0xFF):
            damaged = KINDS.copy()
            damaged[at] = value
            ends = [0]
            while ends[-1] < len(damaged) and ends[-1] >= 0:
                ends.append(frame_end(damaged, ends[-1]))
            assert sound(damaged, 3, 0, 4) <= (ends[-1] == len(damaged))


@pytest.mark.parametrize("key", [b"", b"\x08", b"\x88", b"\x80\x00k", b"\xff\xff\xff\xff\xffk"])
def test_a_key_without_a_collection_or_a_name_is_not_sound(key: bytes) -> None:
    frame = dcp_changes.Mutation(seqno=Seqno(1), rev_seqno=1, key=key or b"k", value=b"v").encode()
    if not key:
        frame = frame[:2] + bytes(2) + frame[4:]
    assert frame_end(as_run(frame), 0) == -1


def test_a_seqno_that_no_vbucket_reaches_is_not_sound() -> None:
    assert frame_end(as_run(change(2**63 - 1)), 0) == SIZE
    assert frame_end(as_run(change(2**63)), 0) == -1
    assert not sound(GAPS, 0, 0, 2**64 - 1)
