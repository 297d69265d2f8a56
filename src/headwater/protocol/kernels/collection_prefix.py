"""The collection id at the front of a key, for kernels: unsigned LEB128, as `leb128` has it for one key at a time."""

from __future__ import annotations

from headwater.protocol.kernels.memory import Bytes, kernel, u64


@kernel
def prefix_bytes(data: Bytes, at: int, end: int) -> int:
    """The length of the collection id at `at`; 0 where it is cut off, overlong or beyond 32 bits."""
    for index in range(5):
        if at + index >= end:
            return 0
        byte = data[at + index]
        if byte < 0x80:
            overlong = byte == 0 and index > 0
            too_large = index == 4 and byte > 0x0F
            return 0 if overlong or too_large else index + 1
    return 0


@kernel
def collection_id(data: Bytes, at: int) -> int:
    """The collection id at `at`, which `prefix_bytes` has found sound."""
    value = u64(0)
    shift = u64(0)
    while data[at] >= 0x80:
        value |= u64(data[at] & 0x7F) << shift
        shift += u64(7)
        at += 1
    return value | (u64(data[at]) << shift)
