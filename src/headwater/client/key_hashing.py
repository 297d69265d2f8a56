"""The vbuckets of many keys at once. `cluster_map` has the rule, for one key, and is what planners and tasks that send
nothing load: this needs the compiler of the kernels.
"""

from __future__ import annotations

import numpy as np

from headwater.client.cluster_map import VBUCKETS_MAX
from headwater.protocol.kernels.memory import Bytes, Column, i64, kernel, u32


def _crc32_table() -> Column:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ 0xEDB88320, table >> 1).astype(np.uint32)
    return table


CRC32_TABLE = _crc32_table()


def vbuckets_of(keys: Bytes, ends: Column, vbuckets: int) -> Column:
    """The vbuckets of many keys that lie one behind the other, each up to its end."""
    if not 0 < vbuckets <= VBUCKETS_MAX:
        raise ValueError(f"{vbuckets} vbuckets")
    found = np.empty(len(ends), dtype=np.uint16)
    _hash_keys(keys, ends, vbuckets, CRC32_TABLE, found)
    return found


@kernel
def _hash_keys(keys: Bytes, ends: Column, vbuckets: int, table: Column, found: Column) -> None:
    at = i64(0)
    for item in range(len(ends)):
        crc = u32(0xFFFFFFFF)
        while at < ends[item]:
            crc = table[(crc ^ keys[at]) & u32(0xFF)] ^ (crc >> u32(8))
            at += 1
        found[item] = (i64(~crc) >> 16 & 0x7FFF) % vbuckets
