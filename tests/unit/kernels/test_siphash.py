"""The hash of keys, held against a slow one that follows the paper, and that against the paper's own vector."""

from __future__ import annotations

import random

import numpy as np

from headwater.kernels.siphash import siphash128
from support.cases import each

MASK = 2**64 - 1


def rotate(word: int, bits: int) -> int:
    return (word << bits | word >> (64 - bits)) & MASK


def sip_round(v: list[int]) -> None:
    v[0] = (v[0] + v[1]) & MASK
    v[1] = rotate(v[1], 13) ^ v[0]
    v[0] = rotate(v[0], 32)
    v[2] = (v[2] + v[3]) & MASK
    v[3] = rotate(v[3], 16) ^ v[2]
    v[0] = (v[0] + v[3]) & MASK
    v[3] = rotate(v[3], 21) ^ v[0]
    v[2] = (v[2] + v[1]) & MASK
    v[1] = rotate(v[1], 17) ^ v[2]
    v[2] = rotate(v[2], 32)


def slow_siphash(data: bytes, secret: tuple[int, int], *, rounds: int, last_rounds: int) -> tuple[int, int]:
    v = [
        0x736F6D6570736575 ^ secret[0],
        0x646F72616E646F6D ^ secret[1] ^ 0xEE,
        0x6C7967656E657261 ^ secret[0],
        0x7465646279746573 ^ secret[1],
    ]
    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for at in range(0, len(padded), 8):
        word = int.from_bytes(padded[at : at + 8], "little")
        v[3] ^= word
        for _ in range(rounds):
            sip_round(v)
        v[0] ^= word
    halves = []
    for index, tweak in ((2, 0xEE), (1, 0xDD)):
        v[index] ^= tweak
        for _ in range(last_rounds):
            sip_round(v)
        halves.append(v[0] ^ v[1] ^ v[2] ^ v[3])
    return halves[0], halves[1]


def test_the_slow_one_is_right() -> None:
    """`vectors.h` of the reference implementation: SipHash-2-4 with 128 bits, key 00 to 0f."""
    secret = (0x0706050403020100, 0x0F0E0D0C0B0A0908)
    high, low = slow_siphash(b"", secret, rounds=2, last_rounds=4)
    assert (high.to_bytes(8, "little") + low.to_bytes(8, "little")).hex() == "a3817f04ba25a8e66df67214c7550293"
    high, low = slow_siphash(bytes([0]), secret, rounds=2, last_rounds=4)
    assert (high.to_bytes(8, "little") + low.to_bytes(8, "little")).hex() == "da87c1d86b99af44347659119b22fc45"


@each("length", [*range(41), 255, 256, 257])
def test_all_lengths(length: int) -> None:
    source = random.Random(length)
    for secret in ((0, 0), (2**64 - 1, 2**64 - 1), (source.getrandbits(64), source.getrandbits(64))):
        data = source.randbytes(length)
        expected = slow_siphash(data, secret, rounds=1, last_rounds=3)
        # In the middle of a buffer, as keys lie in frames.
        buffer = np.frombuffer(b"before" + data + b"behind", dtype=np.uint8)
        got = siphash128(buffer, 6, length, np.uint64(secret[0]), np.uint64(secret[1]))
        assert (int(got[0]), int(got[1])) == expected


def test_the_secret_and_every_byte_count() -> None:
    data = np.arange(24, dtype=np.uint8)
    hashes = {siphash128(data, 0, 24, np.uint64(1), np.uint64(2)), siphash128(data, 0, 24, np.uint64(2), np.uint64(1))}
    for byte in range(24):
        other = data.copy()
        other[byte] ^= 0x80
        hashes.add(siphash128(other, 0, 24, np.uint64(1), np.uint64(2)))
    assert len(hashes) == 26
