"""SipHash-1-3 with a 128-bit result.

With a secret that is new in every process, no client can find keys that collide, neither by chance nor by trying. With
a fixed secret, it is a digest on which all processes agree.
"""

from __future__ import annotations

from headwater.kernels.memory import Bytes, ReadOnlyBytes, UInt64, i64, kernel, kernel_part, u64

_C0 = 0x736F6D6570736575
_C1 = 0x646F72616E646F6D
_C2 = 0x6C7967656E657261
_C3 = 0x7465646279746573


@kernel_part
def _rotate(word: int, bits: int) -> int:
    return u64((word << u64(bits)) | (word >> u64(64 - bits)))


@kernel_part
def sip_round(v0: int, v1: int, v2: int, v3: int) -> tuple[int, int, int, int]:
    """One round over the four words of the state."""
    v0 = u64(v0 + v1)
    v1 = _rotate(v1, 13) ^ v0
    v0 = _rotate(v0, 32)
    v2 = u64(v2 + v3)
    v3 = _rotate(v3, 16) ^ v2
    v0 = u64(v0 + v3)
    v3 = _rotate(v3, 21) ^ v0
    v2 = u64(v2 + v1)
    v1 = _rotate(v1, 17) ^ v2
    v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@kernel_part
def sip_start(secret0: int, secret1: int) -> tuple[int, int, int, int]:
    """The state before the first word."""
    return (
        u64(_C0) ^ u64(secret0),
        u64(_C1) ^ u64(secret1) ^ u64(0xEE),
        u64(_C2) ^ u64(secret0),
        u64(_C3) ^ u64(secret1),
    )


@kernel_part
def sip_word(state: tuple[int, int, int, int], word: int) -> tuple[int, int, int, int]:
    """Add eight bytes, given as a number, to the state."""
    v0, v1, v2, v3 = state
    v0, v1, v2, v3 = sip_round(v0, v1, v2, v3 ^ u64(word))
    return v0 ^ u64(word), v1, v2, v3


@kernel_part
def sip_end(state: tuple[int, int, int, int]) -> tuple[int, int]:
    """The two halves of the result."""
    v0, v1, v2, v3 = state
    v2 ^= u64(0xEE)
    for _ in range(3):
        v0, v1, v2, v3 = sip_round(v0, v1, v2, v3)
    high = v0 ^ v1 ^ v2 ^ v3
    v1 ^= u64(0xDD)
    for _ in range(3):
        v0, v1, v2, v3 = sip_round(v0, v1, v2, v3)
    return high, v0 ^ v1 ^ v2 ^ v3


@kernel_part
def _little_endian(data: Bytes, at: int, length: int) -> int:
    """Up to eight bytes as a number."""
    word = u64(0)
    for i in range(length):
        word |= u64(data[at + i]) << u64(8 * i)
    return word


@kernel_part
def sip_bytes(state: tuple[int, int, int, int], data: Bytes, at: int, length: int) -> tuple[int, int, int, int]:
    """Add `length` bytes at `at`, and then their number, to the state. The caller has checked the range."""
    whole = i64(length) // 8
    for i in range(whole):
        state = sip_word(state, _little_endian(data, at + 8 * i, 8))
    last = _little_endian(data, at + 8 * whole, length - 8 * whole)
    return sip_word(state, last | (u64(length & 0xFF) << u64(56)))


@kernel
def siphash128(data: ReadOnlyBytes, at: int, length: int, secret0: UInt64, secret1: UInt64) -> tuple[int, int]:
    """The hash of `length` bytes at `at`. The caller has checked the range."""
    return sip_end(sip_bytes(sip_start(secret0, secret1), data, at, length))
