"""Bulk kernels: the hot path of the codec, compiled by numba, with no Python object per item.

`decode` turns a received buffer into Arrow columns, and `snappy` inflates its values. The typed codec is their oracle:
property tests check that both give the same results.
"""

from headwater.protocol.kernels.decode import (
    CHANGES_SCHEMA,
    DecodedChanges,
    OtherFrame,
    decode_changes,
    other_message_frame,
)
from headwater.protocol.kernels.snappy import decompress_values

__all__ = [
    "CHANGES_SCHEMA",
    "DecodedChanges",
    "OtherFrame",
    "decode_changes",
    "decompress_values",
    "other_message_frame",
]
