"""Snappy, the raw block format that the SNAPPY datatype bit stands for."""

from __future__ import annotations

import cramjam

from headwater.errors import MalformedSnappy
from headwater.protocol.limits import VALUE_BYTES_MAX


def compress(value: bytes) -> bytes:
    return bytes(cramjam.snappy.compress_raw(value))


def decompressed_bytes(compressed: bytes) -> int:
    """The length a block inflates to, which it states in its first bytes."""
    try:
        return cramjam.snappy.decompress_raw_len(compressed)
    except cramjam.DecompressionError as error:
        raise MalformedSnappy(f"the value is not snappy: {error}") from error


def decompress(compressed: bytes, *, bytes_max: int = VALUE_BYTES_MAX) -> bytes:
    """The inflated value. The stated length is held against the limit before anything is allocated."""
    length = decompressed_bytes(compressed)
    if length > bytes_max:
        raise MalformedSnappy(f"the value would inflate to {length} bytes, above the limit of {bytes_max}")
    try:
        return bytes(cramjam.snappy.decompress_raw(compressed))
    except cramjam.DecompressionError as error:
        raise MalformedSnappy(f"the value is not snappy: {error}") from error
