"""The keys of checkpoint documents, each of which lies in the vbucket that it is about.

    _headwater:checkpoint:GROUP:VBUCKET:NUMBER

The vbucket of a key is taken from its CRC32, so NUMBER, always of five digits, is chosen for that: the lowest that puts
the key where it should be. To try numbers one by one takes half a second for 1,024 vbuckets. But a CRC is linear: of
two beginnings, the checksums with the same ending differ by the same bits, whatever the ending of that length is. So
the checksums of all numbers are made once, and those with a beginning differ from them by what one of them does.
"""

from __future__ import annotations

import zlib
from functools import cache

from headwater.client.cluster_map import vbucket_of
from headwater.errors import CheckpointFailed
from headwater.protocol.numbers import VBucketId

KEY_PREFIX = b"_headwater:checkpoint:"
"""Of the checkpoints of all groups. They show up in streams, and whoever does not want them can tell them by it."""

GROUP_BYTES_MAX = 200
"""With the rest, a key stays below the 250 bytes that servers allow."""

_NUMBERS = 100_000
_HASHES = 0x8000
"""Vbuckets are made of these many values of a key's checksum: see `vbucket_of`."""


def checkpoint_key(group: str, vbucket: VBucketId, vbuckets: int) -> bytes:
    """The key of a vbucket's document, in a bucket of that many vbuckets."""
    beginning = KEY_PREFIX + b"%s:%d:" % (group.encode(), vbucket)
    difference = _hash(zlib.crc32(_ending(0), zlib.crc32(beginning))) ^ _hash(zlib.crc32(_ending(0)))
    lowest = _lowest_numbers()
    number = min((lowest[value ^ difference] for value in range(vbucket, _HASHES, vbuckets)), default=_NUMBERS)
    if number == _NUMBERS:
        raise CheckpointFailed(
            f"there is no key for the checkpoint of vbucket {vbucket} of {vbuckets}", hint="Keep it in a file"
        )
    key = beginning + _ending(number)
    assert vbucket_of(key, vbuckets) == vbucket
    return key


@cache
def _lowest_numbers() -> list[int]:
    """By the hash of their digits alone, the lowest numbers that have it; `_NUMBERS` where none has."""
    lowest = [_NUMBERS] * _HASHES
    for number in reversed(range(_NUMBERS)):
        lowest[_hash(zlib.crc32(_ending(number)))] = number
    return lowest


def _ending(number: int) -> bytes:
    return b"%05d" % number


def _hash(checksum: int) -> int:
    return checksum >> 16 & 0x7FFF
