"""Checksums: the published check value, every way to compute it alike, and no flipped bit of a block passes."""

from __future__ import annotations

import numpy as np
import pytest

from headwater.kernels.memory import Bytes, kernel, u32, u64
from headwater.protocol.messages.dcp_changes import Mutation
from headwater.protocol.numbers import Cas, CollectionId, Seqno, VBucketId
from headwater.store.checksums import (
    ABSENT,
    DAMAGED,
    PIECE_BYTES,
    bits_of,
    check_block,
    check_wanted,
    crc32c,
    find_frame,
    piece_bits,
    row_seed,
    seal_block,
    step_by_tables,
)
from headwater.store.runs import as_run

SEED = row_seed(b"blocks", b"key")


def run_of(*value_bytes: int) -> Bytes:
    """Mutations with values of these lengths; seqnos are even, from 2 on."""
    frames = [
        Mutation(
            vbucket=VBucketId(3), cas=Cas(7), seqno=Seqno(2 * number), rev_seqno=1, collection_id=CollectionId(0),
            key=b"key %d" % number, value=bytes(value_byte % 251 for value_byte in range(number, number + length)),
        ).encode()
        for number, length in enumerate(value_bytes, start=1)
    ]  # fmt: skip
    return as_run(b"".join(frames))


def test_the_check_value_of_crc32c() -> None:
    """RFC 3720, appendix B.4, has more of these."""
    assert crc32c(as_run(b"123456789"), u32(0)) == 0xE3069283
    assert crc32c(as_run(bytes(32)), u32(0)) == 0x8A9136AA
    assert crc32c(as_run(b"56789"), u32(crc32c(as_run(b"1234"), u32(0)))) == 0xE3069283


@kernel
def by_tables(data: Bytes) -> int:
    crc = u32(0xFFFFFFFF)
    for at in range(0, len(data), 8):
        crc = step_by_tables(data, at, crc)
    return int(crc)


def test_tables_and_instruction_agree() -> None:
    data = np.random.default_rng(1).integers(0, 256, 64, dtype=np.uint8)
    assert by_tables(data) ^ 0xFFFFFFFF == crc32c(data, u32(0))


@pytest.mark.parametrize(
    "lengths", [[], [0], [5], [300] * 100, [PIECE_BYTES] * 7, [100_000, 1, 100_000, 1]], ids=lambda sizes: len(sizes)
)
def test_a_block_gives_back_its_frames_and_no_others(lengths: list[int]) -> None:
    run = run_of(*lengths)
    row = seal_block(run, SEED)
    assert check_block(row, u32(SEED), u64(0)) == (0, len(run))
    assert row[: len(run)].tobytes() == run.tobytes()
    for seqno in range(1, 2 * len(lengths) + 3):
        start, end = find_frame(row, u32(SEED), u64(seqno))
        if seqno % 2 or seqno > 2 * len(lengths):
            assert start == end == ABSENT
        else:
            assert int.from_bytes(row[start + 24 : start + 32]) == seqno
            assert end == start + 24 + int.from_bytes(row[start + 8 : start + 12])


def test_no_flipped_bit_passes() -> None:
    run = run_of(*[700] * 30)
    row = seal_block(run, SEED)
    found = {seqno: find_frame(row, u32(SEED), u64(seqno)) for seqno in (2, 30, 60)}
    for at in range(0, len(row), 7):
        row[at] ^= 1 << at % 8
        assert check_block(row, u32(SEED), u64(0)) == (-1, -1)
        for seqno, (start, end) in found.items():
            # A get checks the piece of its frame and the directory: what it returns is right, or it is refused.
            assert find_frame(row, u32(SEED), u64(seqno)) in ((start, end), (DAMAGED, DAMAGED))
            assert not start <= at < end or find_frame(row, u32(SEED), u64(seqno))[0] == DAMAGED
        row[at] ^= 1 << at % 8
    assert check_block(row, u32(SEED), u64(0)) == (0, len(run))


def test_what_a_stream_has_got_is_not_checked_again() -> None:
    run = run_of(*[700] * 30)
    row = seal_block(run, SEED)
    start, end = check_block(row, u32(SEED), u64(30))
    assert end == len(run)
    assert int.from_bytes(row[start + 24 : start + 32]) <= 32 < int.from_bytes(row[start + 24 : start + 32]) + 12
    row[start - 1] ^= 1
    assert check_block(row, u32(SEED), u64(30)) == (start, end)
    assert check_block(row, u32(SEED), u64(2)) == (-1, -1)
    row[start] ^= 1
    assert check_block(row, u32(SEED), u64(30)) == (-1, -1)


def test_a_row_in_the_wrong_place_is_damage() -> None:
    row = seal_block(run_of(10, 10), SEED)
    assert check_block(row, u32(row_seed(b"blocks", b"other")), u64(0)) == (-1, -1)
    assert find_frame(row, u32(row_seed(b"journal", b"key")), u64(2))[0] == DAMAGED


def test_what_is_too_short_for_a_block_is_damage() -> None:
    for length in (0, 4, 7, 8, 30):
        assert check_block(np.zeros(length, dtype=np.uint8), u32(SEED), u64(0)) == (-1, -1)


# --- pieces of collections ----------------------------------------------------------------------------------------


def test_only_pieces_of_the_collections_that_are_wanted_are_checked() -> None:
    frames = [
        Mutation(
            vbucket=VBucketId(3), cas=Cas(7), seqno=Seqno(number), rev_seqno=1, key=b"key", value=bytes(PIECE_BYTES),
            collection_id=CollectionId(300 if number in (3, 5, 20, 40) else 8),
        ).encode()
        for number in range(1, 41)
    ]  # fmt: skip
    run = as_run(b"".join(frames))
    row = seal_block(run, SEED)
    bits = piece_bits(row, len(run))
    starts = np.cumsum([0, *map(len, frames)]).tolist()

    def parts(row: Bytes, *, wanted: int, after_seqno: int = 0) -> list[tuple[int, int]]:
        found, piece = [], 0
        while piece < len(bits):
            start, end, piece = check_wanted(row, u32(SEED), u64(after_seqno), piece, bits, bits_of(np.array([wanted])))
            if start < 0:
                return [(-1, -1)]
            if start < end:
                found.append((starts.index(start), starts.index(end)))
        return found

    assert parts(row, wanted=300) == [(2, 5), (19, 20), (39, 40)]
    assert parts(row, wanted=300, after_seqno=4) == [(4, 5), (19, 20), (39, 40)]
    assert parts(row, wanted=8) == [(0, 39)]
    assert parts(row, wanted=9) == []
    row[starts[30] + 100] ^= 1
    assert parts(row, wanted=300) == [(2, 5), (19, 20), (39, 40)], "it is not read"
    assert parts(row, wanted=8) == [(-1, -1)]
