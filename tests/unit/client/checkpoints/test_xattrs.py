"""Keys of checkpoint documents: each in the vbucket that it is about, by the lowest number that does it."""

from __future__ import annotations

import pytest

from headwater.client.checkpoints.xattrs import GROUP_BYTES_MAX, KEY_PREFIX, checkpoint_key
from headwater.client.cluster_map import vbucket_of
from headwater.errors import CheckpointFailed
from headwater.protocol.numbers import KEY_BYTES_MAX, VBucketId
from support.cases import each


@each("group", ["orders", "a", "é" * 50, "x" * GROUP_BYTES_MAX])
@each("vbuckets", [1, 16, 100, 1024])
def test_a_key_lies_in_its_vbucket(group: str, vbuckets: int) -> None:
    keys = [checkpoint_key(group, VBucketId(vbucket), vbuckets) for vbucket in range(vbuckets)]
    assert [vbucket_of(key, vbuckets) for key in keys] == list(range(vbuckets))
    for vbucket, key in enumerate(keys):
        assert key.startswith(KEY_PREFIX + b"%s:%d:" % (group.encode(), vbucket))
        assert len(key) <= KEY_BYTES_MAX


def test_the_number_is_the_lowest_that_does_it() -> None:
    """So that any program finds the same key: this one tries them all."""
    for vbucket in range(0, 1024, 37):
        beginning = KEY_PREFIX + b"orders:%d:" % vbucket
        numbers = (number for number in range(100_000) if vbucket_of(beginning + b"%05d" % number, 1024) == vbucket)
        assert checkpoint_key("orders", VBucketId(vbucket), 1024) == beginning + b"%05d" % next(numbers)


def test_keys_stay_what_they_are() -> None:
    """Another key for the same vbucket would be a checkpoint that is not found."""
    assert checkpoint_key("orders", VBucketId(0), 1024) == b"_headwater:checkpoint:orders:0:00835"
    assert checkpoint_key("orders", VBucketId(1023), 1024) == b"_headwater:checkpoint:orders:1023:00139"


def test_a_vbucket_that_no_key_can_have() -> None:
    """The checksum gives 15 bits, and a header has 16 for the vbucket."""
    with pytest.raises(CheckpointFailed):
        checkpoint_key("orders", VBucketId(0x8000), 0x10000)
