"""CRC-32C (Castagnoli), which `$document.value_crc32c` and its macro show.

A checksum goes byte by byte, which is slow in Python. Long data is therefore laid out as lanes, side by side, and numpy
takes one step in all of them at once. The lanes are put together by what a run of zero bytes of a lane's length does to
each bit of a checksum; 32 more lanes find that out in the same steps.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

_POLYNOMIAL = 0x82F63B78
_ALL_BITS = 0xFFFFFFFF
_PLAIN_BYTES_MAX = 4096


def _table_entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_TABLE = [_table_entry(byte) for byte in range(256)]
_NUMPY_TABLE = np.array(_TABLE, dtype=np.uint32)
_BITS = [1 << bit for bit in range(32)]


def crc32c(data: bytes) -> int:
    state = _ALL_BITS
    tail = 0
    if len(data) > _PLAIN_BYTES_MAX:
        lanes = lane_bytes = isqrt(len(data))
        tail = lanes * lane_bytes
        state = _after_lanes(state, data[:tail], lane_bytes)
    return _after(state, data[tail:]) ^ _ALL_BITS


def _after(state: int, data: bytes) -> int:
    for byte in data:
        state = _TABLE[(state ^ byte) & 0xFF] ^ state >> 8
    return state


def _after_lanes(state: int, data: bytes, lane_bytes: int) -> int:
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, lane_bytes)
    steps = np.zeros((lane_bytes, len(rows) + len(_BITS)), dtype=np.uint8)
    steps[:, : len(rows)] = rows.T
    states = np.array([0] * len(rows) + _BITS, dtype=np.uint32)
    for step in steps:
        states = _NUMPY_TABLE[(states ^ step) & 0xFF] ^ states >> 8
    lanes, bits = states[: len(rows)].tolist(), states[len(rows) :].tolist()
    for lane in lanes:
        moved = 0
        for bit, effect in enumerate(bits):
            if state >> bit & 1:
                moved ^= effect
        state = moved ^ lane
    return state
